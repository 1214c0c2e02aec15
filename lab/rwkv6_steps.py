"""Whole decode steps of RWKV-6: what launches that make low-rank products inside gain, and which picks suit a whole step.

    python lab/rwkv6_steps.py [--parts launches,picks] [--json FILE]

1.6B in float16, random weights, 1, 8 and 32 requests. ``launches`` puts the token shift and the decay's product together or
apart, and lets the kernel behind the mix begin at once or at the end; a prompt of 1,024 as well. ``picks`` tries layouts of
each group of products in the step, where launches overlap, not alone, as loading does; the best stand in the JSON file as
cuda_picks/ keeps them. Bits are compared before anything is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from card import Launch, Report, medians_us

from kittiwake.bench.random import load_random
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.layers import cuda_probe
from kittiwake.layers.cuda_linear import ROW_LIMITS, Choice, CudaGroup, exact_products
from kittiwake.ops.dynamic_mix import cuda as mixes
from kittiwake.ops.matmul.cuda import Narrow
from kittiwake.ops.matmul.triton import Config
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
PLACES = ("mix_down", "projections", "output", "ffn_inputs", "ffn_value")
FEW = (
    *(
        (8, 8, 256, 6),
        (8, 8, 256, 9),
        (16, 8, 256, 3),
        (16, 8, 256, 4),
        (16, 8, 256, 6),
        (16, 8, 512, 3),
        (16, 8, 512, 4),
    ),
    *((32, 8, 256, 4), (32, 8, 256, 6), (32, 8, 512, 3), (32, 8, 128, 3), (64, 8, 256, 3), (64, 16, 128, 4)),
)
MANY = (
    *(
        Narrow(8, 8, 256, 9, rows=8),
        Narrow(8, 8, 256, 5, rows=16),
        Narrow(16, 8, 256, 6, rows=16),
        Narrow(16, 8, 256, 4),
    ),
    *(Narrow(32, 8, 256, 3), Narrow(32, 8, 256, 4, rows=16), Narrow(64, 8, 128, 4)),
)
TILES = (
    *((32, 16, 256, 2, 4), (32, 32, 128, 2, 6), (32, 32, 128, 4, 4), (32, 64, 128, 4, 4), (32, 64, 64, 4, 5)),
    *((32, 16, 128, 2, 6), (32, 32, 256, 4, 3), (16, 32, 128, 4, 4)),
)
LEAST_GAIN = 0.003


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
        (graph, _), *_ = self.states.graphs.values()
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


def candidates(group: CudaGroup, rows: int) -> list[Choice]:
    """What is tried for a group, today's first."""
    today = group.picks.choice(rows)
    if rows > 8:
        others = [Choice("narrow", layout) for layout in MANY]
        others += [Choice("tile", Config(*layout)) for layout in TILES] + [Choice("library")]
    else:
        others = [Choice("narrow", Narrow(*layout)) for layout in FEW]
        others += [Choice("tile", Config(16, 32, 128, 2, 6))] if rows > 1 else []
    fitting = [other for other in others if other != today and group.can_run(other, group.dtype)]
    return [today, *fitting]


def agreeing(group: CudaGroup, rows: int) -> list[Choice]:
    """Those that can run here and have the bits of today's."""
    given, expected = cuda_probe._trial(group, group.dtype, rows)
    today, *others = candidates(group, rows)
    with exact_products():
        group.run(today, given, expected, overlap=True)
        cuda_probe._compile(partial(cuda_probe._run_once, group, choice, given, expected.clone()) for choice in others)
        return [today, *(choice for choice in others if cuda_probe._agrees(group, choice, given, expected, rows))]


def put(groups: Sequence[CudaGroup], rows: int, choice: Choice) -> None:
    """From now on this serves so many rows."""
    at = ROW_LIMITS.index(rows)
    for group in groups:
        choices = list(group.picks.choices)
        choices[at] = choice
        served = dict(group.picks.library_rows)
        if choice.kind == "library":  # proved for all products of the group
            served[rows] = frozenset(range(len(group.products)))
        group.picks = replace(group.picks, choices=tuple(choices), library_rows=served)


def picks(report: Report, runs: Runs) -> None:
    """Group by group, what makes the whole step fastest with what was found for the others."""
    places = {place: [getattr(layer, place) for layer in cast(Any, runs.model)._layer_list] for place in PLACES}
    for requests in REQUESTS:
        steps = Steps(report, runs, requests)
        for place, groups in places.items():
            works: dict[Any, tuple[Launch, int]] = {}
            known = agreeing(groups[0], requests)
            for choice in known:
                put(groups, requests, choice)
                replay = steps.capture(f"{place} by {choice}")
                if replay is not None:
                    works[choice] = (replay, 1)
            taken = medians_us(works, 4)
            best = min(taken, key=taken.__getitem__)
            today = known[0]
            if today in taken and taken[best] > taken[today] * (1 - LEAST_GAIN):
                best = today
            put(groups, requests, best)
            name = f"{requests} requests, {place} ({today} {taken.get(today, 0):.0f})"
            tell(report, "picks in steps", name, requests, taken, 3)
        steps.done()
    shipped = {
        groups[0].key: [cuda_probe._document(choice) for choice in groups[0].picks.choices]
        for groups in places.values()
    }
    report.put("cuda_picks", "picks", shipped)


def main(arguments: Sequence[str] | None = None) -> int:
    """Lines, and 1 when a step has other bits."""
    report = Report(__doc__, ("launches", "picks"), arguments)
    runs = Runs(load_random("rwkv6-1.6b", EngineConfig(device="cuda", dtype="fp16")).model, 40)
    report.say("loaded")
    report.check("the mix keeps its bits with its products inside", cast(Any, runs.model)._keeps_bits)
    return report.each({"launches": partial(launches, report, runs), "picks": partial(picks, report, runs)})


if __name__ == "__main__":
    sys.exit(main())
