"""Whole decode steps of RWKV-6: what do launches that make low-rank products inside gain?

    python lab/rwkv6_steps.py [--json FILE]

1.6B in float16, random weights, 1, 8 and 32 requests, and a prompt of 1,024: the token shift and the decay's product together
or apart, the kernel behind the mix let in at once or at the end. Bits are compared before anything is timed. Which picks suit
the step: step_search.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from card import Launch, Report, medians_us

from kittiwake.bench.random import load_random
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.ops.dynamic_mix import cuda as mixes
from kittiwake.ops.wkv6 import cuda as wkv6
from tests.device.runs import Runs

REQUESTS = (1, 8, 32)
ALL = 1 << 20
LAUNCHES: dict[str, tuple[int, int, int]] = {
    "apart": (0, 4, 4),
    "mix": (ALL, 4, 4),
    "mix, next at the end": (ALL, 4, 0),
    "mix, decay": (ALL, ALL, 4),
    "mix, decay, next at once": (ALL, ALL, ALL),
    "mix, decay, next at the end": (ALL, ALL, 0),
}
"""Rows up to which: the mix, and decoding, make low-rank products themselves; the kernel behind the mix begins at once."""


class Steps:
    """A model whose steps are captured and replayed, each with the bits of the first."""

    def __init__(self, report: Report, runs: Runs, requests: int, tokens: int = 1) -> None:
        self.report, self.runs = report, runs
        self.model, self.states = cast(Any, runs.model), cast(Any, runs.states)
        self.name = f"{requests}x{tokens}"
        self.slots = runs.slots(requests)
        self.batch = Batch.pack([(slot, runs.ids(tokens)) for slot in self.slots])
        self.wanted: torch.Tensor | None = None

    def capture(self, name: str) -> Launch | None:
        """A replay of the step as it is now; None where its logits, of three steps from nothing, are others."""
        self.states.graphs.clear()
        self.states.pool = None
        for slot in self.slots:
            self.states.clear(slot)
        logits = torch.cat([self.model.forward_on_device(self.batch, self.states).clone() for _ in range(3)])
        self.wanted = logits if self.wanted is None else self.wanted
        if not self.report.check(f"{self.name}, {name}: the bits of the first", torch.equal(logits, self.wanted)):
            return None
        (graph, *_), *_ = self.states.graphs.values()
        replay: Launch = graph.replay
        return replay

    def done(self) -> None:
        """Give the slots and the graphs back."""
        self.states.graphs.clear()
        self.states.pool = None
        self.runs.free(self.slots)


@contextmanager
def launched(setting: tuple[int, int, int]) -> Iterator[None]:
    """Launches as one of LAUNCHES says."""
    kept = mixes.LOW_ROWS, wkv6.LOW_ROWS, mixes.BEGIN_NEXT_ROWS
    mixes.LOW_ROWS, wkv6.LOW_ROWS, mixes.BEGIN_NEXT_ROWS = setting
    try:
        yield
    finally:
        mixes.LOW_ROWS, wkv6.LOW_ROWS, mixes.BEGIN_NEXT_ROWS = kept


def launches(report: Report, runs: Runs) -> None:
    """Every setting at every number of requests, and a prompt."""
    for requests, tokens in (*((count, 1) for count in REQUESTS), (1, 1024)):
        steps = Steps(report, runs, requests, tokens)
        works: dict[Any, tuple[Launch, int]] = {}
        for name, setting in LAUNCHES.items():
            with launched(setting):
                replay = steps.capture(name)
            if replay is not None:
                works[name] = (replay, 1)
        tell(report, "launches", steps.name, requests * tokens, medians_us(works, 10 if tokens == 1 else 3))
        steps.done()


def tell(report: Report, part: str, name: str, tokens: int, taken: Mapping[Any, float], most: int = 20) -> None:
    """A line, fastest first."""
    ordered = sorted(taken.items(), key=lambda item: item[1])
    line = "  ".join(f"{which} {us:.0f}" for which, us in ordered[:most])
    report.say(f"{name}: {tokens / ordered[0][1] * 1e6:.0f} tokens/s; µs  {line}")
    report.put(part, name, {str(which): round(us, 1) for which, us in ordered})


def main(arguments: Sequence[str] | None = None) -> int:
    """Lines, and 1 when a step has other bits."""
    report = Report(__doc__, ("launches",), arguments)
    runs = Runs(load_random("rwkv6-1.6b", EngineConfig(device="cuda", dtype="fp16")).model, 40)
    report.say("loaded")
    report.check("the mix keeps its bits with its products inside", cast(Any, runs.model)._keeps_bits)
    return report.each({"launches": partial(launches, report, runs)})


if __name__ == "__main__":
    sys.exit(main())
