"""Do decode steps of few requests gain when products have the weights of those behind them brought to L2?

    python lab/weights_ahead.py [--parts 1.5b,0.1b,7.2b] [--json FILE]

Memory is idle while a layer's small kernels wait for one another. For 1, 2 and 4 requests, whole steps in turns: nothing
brought, each of the places alone, and different limits on the bytes. Bits cannot change and are compared all the same. fp16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from card import Launch, Report, medians_us

from kittiwake.bench.random import load_random
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.layers.cuda_linear import CudaGroup
from tests.device.runs import Runs

SHAPES = ("1.5b", "0.1b", "7.2b")
REQUESTS = (1, 2, 4)
MIB = 2**20
LIMITS = (16, 30, 44, 60)
"""MiB."""
PLACES = ("projections", "low_rank", "output", "ffn_key", "ffn_value")
Brings = dict[str, tuple[tuple[str, ...], int]]
"""Of a place, the places behind it whose weights are brought, and at most how many MiB; "+" stands for the next layer."""


def variants() -> dict[str, Brings]:
    """Names, and what is brought where."""
    rest = ("output", "ffn_key")
    found: dict[str, Brings] = {"nothing": {}}
    for limit in LIMITS:
        found[f"projections {limit}"] = {"projections": (rest, limit)}
        found[f"projections, value {limit}"] = {
            "projections": (rest, limit), "ffn_value": (("+projections",), limit),
        }  # fmt: skip
    found["value 30"] = {"ffn_value": (("+projections",), 30)}
    found["output only"] = {"projections": (("output",), 30)}
    found["key 10"] = {"ffn_key": (("ffn_value",), 10)}
    found["projections, key 10, value 44"] = {
        "projections": (rest, 44), "ffn_key": (("ffn_value",), 10), "ffn_value": (("+projections", "+low_rank"), 44),
    }  # fmt: skip
    found["projections, key 30, value 44"] = {
        "projections": (rest, 44), "ffn_key": (("ffn_value",), 30), "ffn_value": (("+projections", "+low_rank"), 44),
    }  # fmt: skip
    return found


def put_in(model: Any, brings: Brings) -> None:
    """Every layer's products bring what is told."""
    layers = model._layer_list
    for index, layer in enumerate(layers):
        for place in PLACES:
            names, limit = brings.get(place, ((), 0))
            groups: list[CudaGroup] = []
            for name in names:
                if not name.startswith("+"):
                    groups.append(getattr(layer, name))
                elif index + 1 < len(layers):
                    groups.append(getattr(layers[index + 1], name[1:]))
                else:
                    groups.append(model.head)
            getattr(layer, place).bring(groups, limit * MIB)


def steps(report: Report, shape: str) -> None:
    """Every variant of one shape."""
    runs = Runs(load_random(shape, EngineConfig(device="cuda", dtype="fp16")).model, 8)
    report.say(f"{shape} loaded")
    model, states = cast(Any, runs.model), cast(Any, runs.states)
    for requests in REQUESTS:
        slots = runs.slots(requests)
        batch = Batch.pack([(slot, runs.ids(1)) for slot in slots])
        works: dict[str, tuple[Launch, int]] = {}
        wanted: torch.Tensor | None = None
        kept = []
        for name, brings in variants().items():
            put_in(model, brings)
            states.graphs.clear()
            states.pool = None
            for slot in slots:
                states.clear(slot)
            logits = torch.cat([model.forward_on_device(batch, states).clone() for _ in range(3)])
            wanted = logits if wanted is None else wanted
            kept.append([(g, g._ahead) for g in model.groups])  # what a graph reads stays where it is
            if report.check(f"{shape}, {requests} requests, {name}: the same bits", torch.equal(logits, wanted)):
                works[name] = (next(iter(states.graphs.values()))[0].replay, 1)
        taken = medians_us(works, 10)
        line = "  ".join(f"{name} {us:.0f}" for name, us in sorted(taken.items(), key=lambda item: item[1]))
        report.say(f"{shape}, {requests} requests: {requests / min(taken.values()) * 1e6:.0f} tokens/s; µs: {line}")
        report.put("steps", f"{shape}, {requests} requests", taken)
        states.graphs.clear()
        states.pool = None
        runs.free(slots)


def main(arguments: Sequence[str] | None = None) -> int:
    """Lines, and 1 when a step has other bits."""
    report = Report(__doc__, SHAPES, arguments)
    works: dict[str, Callable[[], None]] = {shape: partial(steps, report, shape) for shape in SHAPES}
    return report.each(works)


if __name__ == "__main__":
    sys.exit(main())
