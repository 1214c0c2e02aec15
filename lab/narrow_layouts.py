"""Narrow products by layouts with warps that only copy: what do they gain alone, and in whole decode steps?

    python lab/narrow_layouts.py [--parts 1.5b,0.1b] [--json FILE]

Chains of 512 matrix instructions leave a warp little time for anything else. Every place of a layer is timed alone over the
weights of all layers, bits checked first; then the step with the best of each place, and with each place's best alone. fp16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from card import Launch, Report, captured, medians_us

from kittiwake.bench.random import load_random
from kittiwake.config import EngineConfig
from kittiwake.device import usable_cores
from kittiwake.engine.batch import Batch
from kittiwake.layers.cuda_linear import ROW_LIMITS, Choice, CudaGroup, exact_products
from kittiwake.layers.cuda_probe import _document, _trial
from kittiwake.ops.head_kernels import LOW_ROWS
from kittiwake.ops.matmul.cuda import Narrow
from tests.device.runs import Runs

SHAPES = ("1.5b", "0.1b")
ROWS = (1, 8)
LAYOUTS = [
    Narrow(*layout)
    for layout in (
        (8, 8, 256, 4), (16, 8, 256, 3), (32, 8, 256, 4), (8, 8, 256, 6, 1), (8, 8, 256, 8, 1), (8, 8, 256, 8, 2),
        (8, 8, 512, 4, 2), (8, 8, 512, 6, 2), (8, 8, 512, 4, 4), (16, 8, 256, 4, 2), (16, 8, 256, 6, 2), (16, 8, 256, 6, 4),
        (16, 8, 512, 3, 2), (16, 8, 512, 4, 2), (16, 8, 512, 4, 4), (16, 8, 128, 8, 2), (16, 16, 256, 4, 2),
        (16, 16, 512, 4, 2), (32, 8, 256, 4, 2), (32, 8, 256, 4, 4), (32, 8, 128, 6, 2), (32, 16, 256, 4, 2),
        (32, 16, 512, 3, 2), (64, 16, 128, 4, 2), (64, 16, 256, 3, 4),
    )
]  # fmt: skip
PLACES = ("projections", "low_rank", "output", "ffn_key", "ffn_value", "head")


def groups_at(model: Any, place: str) -> list[CudaGroup]:
    """Every layer's group at a place but the first layer's, which has fewer products; or the head."""
    return [model.head] if place == "head" else [getattr(layer, place) for layer in model._layer_list[1:]]


def compiled(groups: Sequence[CudaGroup], rows: int, given: torch.Tensor, out: torch.Tensor) -> None:
    """Compile what is run, side by side."""

    def once(layout: Narrow) -> None:
        with torch.cuda.device(0), suppress(Exception):
            groups[0].run(Choice("narrow", layout), given, out, overlap=True)

    with ThreadPoolExecutor(min(16, usable_cores())) as pool:
        list(pool.map(once, LAYOUTS))
    torch.cuda.synchronize()


def best_at(report: Report, model: Any, place: str, rows: int) -> Choice | None:
    """The fastest layout of a place, where it beats today's choice."""
    groups = groups_at(model, place)
    given, out = _trial(groups[0], torch.float32 if place == "head" else torch.float16, rows)
    compiled(groups, rows, given, out)
    today = groups[0].picks.choice(rows)
    wanted = torch.empty_like(out)
    groups[0].run(today, given, wanted, overlap=False)
    works: dict[Any, tuple[Launch, int]] = {}
    choices = {str(today): today} | {str(choice): choice for choice in (Choice("narrow", one) for one in LAYOUTS)}
    for name, choice in choices.items():
        with suppress(Exception):
            if not groups[0].can_run(choice, out.dtype):
                continue
            out.fill_(torch.nan)
            groups[0].run(choice, given, out, overlap=False)
            if report.check(f"{place}, {rows} rows, {choice}: the bits of today", torch.equal(out, wanted)):
                launches = [partial(group.run, choice, given, out, overlap=True) for group in groups]
                works[name] = (captured(launches), len(groups))
    taken = medians_us(works, 4)
    ordered = sorted(taken, key=taken.__getitem__)
    report.say(f"{model.width}, {place}, {rows} rows, µs: today {taken[str(today)]:.2f} ({today}); "
               + "  ".join(f"{taken[name]:.2f} {name}" for name in ordered[:4]))  # fmt: skip
    report.put("alone", f"{model.width}, {place}, {rows} rows", taken)
    return choices[ordered[0]] if ordered[0] != str(today) else None


def put_in(model: Any, rows: int, found: dict[str, Choice]) -> None:
    """Set what serves a row count at some places."""
    limit = next(i for i, most in enumerate(ROW_LIMITS) if rows <= most)
    for place, choice in found.items():
        for group in groups_at(model, place):
            choices = list(group.picks.choices)
            choices[limit] = choice
            group.picks = replace(group.picks, choices=tuple(choices))


def steps(report: Report, shape: str) -> None:
    """Everything of one shape."""
    runs = Runs(load_random(shape, EngineConfig(device="cuda", dtype="fp16")).model, 10)
    report.say(f"{shape} loaded")
    model, states = cast(Any, runs.model), cast(Any, runs.states)
    for rows in ROWS:
        found: dict[str, Choice] = {}
        with exact_products():
            for place in PLACES:
                if place == "low_rank" and rows <= LOW_ROWS:
                    continue
                choice = best_at(report, model, place, rows)
                if choice is not None:
                    found[place] = choice
        today = {place: groups_at(model, place)[0].picks.choice(rows) for place in found}
        variants = {"today": {}, "all": found} | {place: {place: choice} for place, choice in found.items()}
        slots = runs.slots(rows)
        batch = Batch.pack([(slot, runs.ids(1)) for slot in slots])
        works: dict[str, tuple[Launch, int]] = {}
        wanted: torch.Tensor | None = None
        for name, places in variants.items():
            put_in(model, rows, today | places)
            states.graphs.clear()
            states.pool = None
            for slot in slots:
                states.clear(slot)
            logits = torch.cat([model.forward_on_device(batch, states).clone() for _ in range(3)])
            wanted = logits if wanted is None else wanted
            if report.check(f"{shape}, {rows} requests, {name}: the bits of today", torch.equal(logits, wanted)):
                works[name] = (next(iter(states.graphs.values()))[0].replay, 1)
        taken = medians_us(works, 10)
        line = "  ".join(f"{name} {us:.0f}" for name, us in sorted(taken.items(), key=lambda item: item[1]))
        report.say(f"{shape}, {rows} requests: {rows / min(taken.values()) * 1e6:.0f} tokens/s; µs a step: {line}")
        report.put("steps", f"{shape}, {rows} requests", taken)
        best = {groups_at(model, place)[0].key: _document(choice) for place, choice in found.items()}
        report.put("picks", f"{shape}, {rows} rows", best)
        states.graphs.clear()
        states.pool = None
        runs.free(slots)


def main(arguments: Sequence[str] | None = None) -> int:
    """Lines, and 1 when something has other bits."""
    report = Report(__doc__, SHAPES, arguments)
    works: dict[str, Callable[[], None]] = {shape: partial(steps, report, shape) for shape in SHAPES}
    return report.each(works)


if __name__ == "__main__":
    sys.exit(main())
