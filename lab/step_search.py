"""Which layouts of products make whole decode steps fast, rather than each product alone?

    python lab/step_search.py [--parts 1.5b-1,1.5b-8,1.5b-32,0.1b-1,rwkv6-1.6b-1,…] [--json FILE]

Kernels that are fast alone can leave the one behind them no room to begin early, and the other way round. For a shape and a
number of requests every place of a layer is tried in turn with every layout in the step itself, and keeps the fastest; bits
are compared with those of the picks that were there. fp16. When each kind of kernel lets the next one begin is tried likewise,
before each pass and at the end. ``picks`` of the document are what was better, by shape and limit.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import torch
from card import Report, each_once

from kittiwake.bench.random import load_random
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.layers.cuda_linear import ROW_LIMITS, Choice, CudaGroup, exact_products
from kittiwake.layers.cuda_probe import _document, _trial
from kittiwake.ops import head_kernels
from kittiwake.ops.head_kernels import LOW_ROWS
from kittiwake.ops.matmul.cuda import Narrow
from kittiwake.ops.matmul.triton import Config
from tests.device.runs import Runs

CASES = ("1.5b-1", "1.5b-8", "1.5b-32", "0.1b-1", "rwkv6-1.6b-1", "rwkv6-1.6b-8", "rwkv6-1.6b-32")
MOST_SHARED = 200 * 1024
NARROW = [
    Narrow(bn, wn, bk, stages)
    for bn, wn in ((8, 8), (16, 8), (16, 16), (32, 8), (32, 16), (64, 16))
    for bk, depths in ((128, (4, 6, 8, 10, 12, 16)), (256, (3, 4, 5, 6, 7, 8, 10)), (512, (3, 4, 5, 6)))
    for stages in depths
    if bn // wn * 32 >= bk // 8
]
SHARING = [
    Narrow(8, 8, 256, 9, rows=8), Narrow(8, 8, 256, 5, rows=16), Narrow(16, 8, 256, 6, rows=16), Narrow(16, 8, 256, 4),
    Narrow(32, 8, 256, 3), Narrow(32, 8, 256, 4, rows=16), Narrow(64, 8, 128, 4),
]  # fmt: skip
"""For more than 8 rows, of which a block need not take all."""
TILES = {
    8: [(16, 16, 256, 2, 4), (16, 32, 128, 2, 6), (16, 16, 128, 2, 6), (16, 32, 256, 4, 3), (16, 16, 256, 1, 4)],
    32: [(32, 16, 256, 2, 4), (32, 32, 128, 2, 6), (32, 32, 128, 4, 4), (32, 64, 128, 4, 4), (32, 64, 64, 4, 5),
         (32, 16, 128, 2, 6), (32, 16, 256, 4, 3), (32, 32, 256, 4, 3), (32, 16, 256, 1, 4), (32, 32, 64, 2, 8),
         (16, 32, 128, 4, 4)],
}  # fmt: skip
PLACES = {
    "7": ("projections", "low_rank", "output", "ffn_key", "ffn_value", "head"),
    "6": ("mix_down", "projections", "output", "ffn_inputs", "ffn_value", "head"),
}
LOW_MOMENTS = (0, 1, 2, 3)
"""When time mixes that make low-rank products themselves let the next kernel begin, see ``LOW_BEGIN_NEXT``."""
MOMENTS = (0, 1, 2, 3)
"""And when narrow products may, see :class:`Narrow`."""
JOINT_SECONDS = 30
"""For moves of several places at once."""


class Step:
    """A decode step of so many requests, whose places can be served by other choices."""

    def __init__(self, runs: Runs, rows: int) -> None:
        self.rows = rows
        self.model, self.states = cast(Any, runs.model), cast(Any, runs.states)
        self.slots = runs.slots(rows)
        self.batch = Batch.pack([(slot, runs.ids(1)) for slot in self.slots])
        self._limit = next(i for i, most in enumerate(ROW_LIMITS) if rows <= most)

    @property
    def limit(self) -> int:
        """The rows up to which a pick for this step serves."""
        return ROW_LIMITS[self._limit]

    def groups(self, place: str) -> list[CudaGroup]:
        """Of all layers, or the head."""
        return [self.model.head] if place == "head" else [getattr(layer, place) for layer in self.model._layer_list]

    @property
    def places(self) -> list[str]:
        """Where a layer has products that launches of this step make."""
        found = PLACES["7" if hasattr(self.model._layer_list[0], "ffn_key") else "6"]
        return [place for place in found if place != "low_rank" or self.rows > LOW_ROWS]

    def put(self, place: str, choice: Choice) -> None:
        """Set what serves a place."""
        for group in self.groups(place):
            choices = list(group.picks.choices)
            choices[self._limit] = choice
            group.picks = replace(group.picks, choices=tuple(choices))

    def logits(self) -> torch.Tensor:
        """Of three steps from nothing, by a fresh graph."""
        self.states.graphs.clear()
        self.states.pool = None
        for slot in self.slots:
            self.states.clear(slot)
        return torch.cat([self.model.forward_on_device(self.batch, self.states).clone() for _ in range(3)])

    def time_us(self, count: int = 25) -> float:
        """Median µs of the graph that :meth:`logits` made."""
        graph = next(iter(self.states.graphs.values()))[0]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        taken = []
        for _ in range(count):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) * 1e3)
        return float(statistics.median(taken))


def candidates(group: CudaGroup, out_dtype: torch.dtype, rows: int) -> list[Choice]:
    """What can serve a place; narrow products let the next kernel begin when the one that serves it does."""
    size, kept = 1 if rows == 1 else 8, group.picks.choice(rows)
    narrow = [one for one in NARROW if one.shared_bytes(size) <= MOST_SHARED] if rows <= 8 else SHARING
    found = [begun(Choice("narrow", one), begin_next_of(kept)) for one in narrow]
    found = [one for one in found if out_dtype == group.dtype or cast(Narrow, one.layout).bn >= 32]  # the head is wide
    found += [Choice("tile", Config(*one)) for one in TILES.get(rows, ())]
    found += [Choice("library")] if rows in group.picks.library_rows else []
    return [choice for choice in found if group.can_run(choice, out_dtype)]


def out_dtype_of(place: str) -> torch.dtype:
    """Of a place's outputs."""
    return torch.float32 if place == "head" else torch.float16


def compiled(step: Step) -> None:
    """Compile what is tried, side by side."""
    works = []
    for place in step.places:
        group, out_dtype = step.groups(place)[-1], out_dtype_of(place)
        given, out = _trial(group, out_dtype, step.rows)
        some = candidates(group, out_dtype, step.rows)
        works += [partial(group.run, choice, given, out, overlap=True) for choice in some]

    with exact_products():
        each_once(works)
    torch.cuda.synchronize()


def search(report: Report, case: str, runs: Runs, rows: int, passes: int) -> None:
    """The fastest layouts of one step, place by place."""
    step = Step(runs, rows)
    name = f"{case}, {rows} requests"
    compiled(step)
    report.say(f"{name}: compiled")
    wanted = step.logits()
    first = step.time_us(60)
    changed: dict[str, Choice] = {}
    fastest: dict[str, list[Choice]] = {}
    for turn in range(passes):
        moments(report, f"{name}, pass {turn + 1}", step, changed, wanted)
        for place in step.places:
            group = step.groups(place)[-1]
            kept = group.picks.choice(rows)
            tried: dict[Choice, float] = {}
            known = [begun(choice, begin_next_of(kept)) for choice in fastest.get(place, ())]
            for choice in known or candidates(group, out_dtype_of(place), rows):
                step.put(place, choice)
                with suppress(RuntimeError):
                    if report.check(f"{name}, {place}, {choice}: the same bits", torch.equal(step.logits(), wanted)):
                        tried[choice] = step.time_us()
            fastest[place] = sorted(tried, key=tried.__getitem__)[:12]
            step.put(place, kept)
            step.logits()
            here = step.time_us(60)
            for choice in fastest[place][:3]:
                step.put(place, choice)
                step.logits()
                taken = step.time_us(60)
                if taken < here * 0.998:
                    here, kept = taken, choice
                    changed[place] = choice
            step.put(place, kept)
            report.say(f"{name}, pass {turn + 1}, {place}: {kept}, {here:.0f} µs")
            shown = {str(choice): round(us, 1) for choice, us in sorted(tried.items(), key=lambda item: item[1])}
            report.put("tried", f"{name}, pass {turn + 1}, {place}", shown)
    moments(report, f"{name}, last", step, changed, wanted)
    if rows == 1:
        joint(report, name, step, fastest, changed, wanted)
    report.check(f"{name}: the bits of the picks that were there", torch.equal(step.logits(), wanted))
    last = step.time_us(100)
    report.say(f"{name}: {first:.0f} to {last:.0f} µs, {rows / last * 1e6:.0f} tokens/s")
    report.put("steps", name, {"before_us": first, "after_us": last})
    picks: dict[str, Any] = {}
    for place, choice in changed.items():
        for group in step.groups(place):
            picks[group.key] = _document(choice)
    report.put("picks", f"{name}, up to {step.limit} rows", picks)
    step.states.graphs.clear()
    step.states.pool = None
    runs.free(step.slots)


def joint(
    report: Report,
    name: str,
    step: Step,
    fastest: Mapping[str, Sequence[Choice]],
    changed: dict[str, Choice],
    wanted: torch.Tensor,
) -> None:
    """Random moves of two or three places at once, among the fastest layouts of each and other moments to begin the next."""
    draw, until = random.Random(1), time.perf_counter() + JOINT_SECONDS
    top = {
        place: [*some[:8], *(begun(choice, 1 if begin_next_of(choice) == 3 else 3) for choice in some[:3])]
        for place, some in fastest.items()
        if place != "head"
    }
    step.logits()
    best, tried, taken = step.time_us(80), 0, 0
    while time.perf_counter() < until:
        places = draw.sample(sorted(top), 2 if draw.random() < 0.7 else 3)
        kept = {place: step.groups(place)[-1].picks.choice(step.rows) for place in places}
        moved = {place: draw.choice(top[place]) for place in places}
        for place, choice in moved.items():
            step.put(place, choice)
        tried += 1
        if torch.equal(step.logits(), wanted) and step.time_us() < best * 0.997:
            step.logits()
            us = step.time_us(80)
            if us < best * 0.997:
                best, taken = us, taken + 1
                changed |= moved
                continue
        for place, choice in kept.items():
            step.put(place, choice)
    step.logits()
    report.say(f"{name}: {tried} moves of several places, {taken} taken, {step.time_us(60):.0f} µs")


def begin_next_of(choice: Choice) -> int:
    """When a choice lets the next kernel begin, see :class:`Narrow`."""
    return choice.layout.begin_next if isinstance(choice.layout, Narrow) else 1


def begun(choice: Choice, begin_next: int) -> Choice:
    """The same that lets the next kernel begin at another moment, where it is a narrow product."""
    if not isinstance(choice.layout, Narrow):
        return choice
    return replace(choice, layout=replace(choice.layout, begin_next=begin_next))


def moments(report: Report, name: str, step: Step, changed: dict[str, Choice], wanted: torch.Tensor) -> None:
    """Every kind of kernel in turn lets the next begin when that is fastest."""

    def tried(set_to: Callable[[int], None], values: Sequence[int], kept: int, kind: str) -> int:
        found = {}
        for value in values:
            set_to(value)
            report.check(f"{name}, {kind} {value}: the same bits", torch.equal(step.logits(), wanted))
            found[value] = round(step.time_us(40), 1)
        chosen = min(found, key=found.__getitem__)
        if found[chosen] > found[kept] * 0.998:
            chosen = kept
        set_to(chosen)
        step.logits()
        report.say(f"{name}, {kind}: {found}, {chosen}: {step.time_us(60):.0f} µs")
        report.put("moments", f"{name}, {kind}", found)
        return chosen

    if step.rows <= LOW_ROWS:
        set_low = partial(setattr, head_kernels, "LOW_BEGIN_NEXT")
        tried(set_low, LOW_MOMENTS, head_kernels.LOW_BEGIN_NEXT, "time mix")
    for place in step.places:
        choice = step.groups(place)[-1].picks.choice(step.rows)
        if choice.kind != "narrow" or place == "head":
            continue

        def put(value: int, place: str = place, choice: Choice = choice) -> None:
            step.put(place, begun(choice, value))

        chosen = tried(put, MOMENTS, begin_next_of(choice), place)
        if chosen != begin_next_of(choice):
            changed[place] = begun(choice, chosen)


@cache
def loaded(shape: str) -> Runs:
    """A random model of a shape; only the last one stays."""
    loaded.cache_clear()
    torch.cuda.empty_cache()
    return Runs(load_random(shape, EngineConfig(device="cuda", dtype="fp16")).model, 40)


def main(arguments: Sequence[str] | None = None) -> int:
    """Lines, and 1 when something has other bits."""
    report = Report(__doc__, CASES, arguments)

    def one(case: str) -> None:
        shape, _, rows = case.rpartition("-")
        search(report, shape, loaded(shape), int(rows), 2 if rows == "1" else 1)

    return report.each({case: partial(one, case) for case in CASES})


if __name__ == "__main__":
    sys.exit(main())
