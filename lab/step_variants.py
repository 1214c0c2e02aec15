"""Whole decode steps of RWKV-7 with the kernels of this folder in the places of today's: same bits, and how much faster?

    python lab/step_variants.py [--parts 1.5b,0.1b] [--json FILE]

For 1, 8 and 32 requests: every group of products is timed alone by the warpgroup instruction (wgmma.py) and as today, over
the weights of all layers; those that win, and decoding by wkv7_decode_many.py, are put into the step. fp16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import torch
from card import Launch, Report, captured, medians_us
from wgmma import Wide, fitting, wide, wide_kernel
from wkv7_decode_many import Many, kernel

from kittiwake.bench.random import load_random
from kittiwake.config import EngineConfig
from kittiwake.device import usable_cores
from kittiwake.engine.batch import Batch
from kittiwake.layers.cuda_linear import CudaGroup, exact_products
from kittiwake.layers.cuda_probe import _trial
from kittiwake.ops.head_kernels import LOW_ROWS
from tests.device.runs import Runs

REQUESTS = (1, 8, 32)
MANY = (Many(2), Many(4), Many(4, store=2), Many(8, 2, store=2))
PLACES = ("projections", "low_rank", "output", "ffn_key", "ffn_value", "head")
Winners = Mapping[str, Wide]
"""Where the warpgroup form is faster, and how it is laid out there."""


def groups_at(model: Any, place: str) -> list[CudaGroup]:
    """Every layer's group at a place, but the first layer's, which has fewer products; or the head."""
    return [model.head] if place == "head" else [getattr(layer, place) for layer in model._layer_list[1:]]


def winners(report: Report, model: Any, rows: int) -> dict[str, Wide]:
    """Time every place alone; print today's µs and the best of the others."""
    found: dict[str, Wide] = {}
    lines = []
    for place in PLACES:
        if place == "low_rank" and rows <= LOW_ROWS:
            continue  # it is inside the time mix
        groups = groups_at(model, place)
        out_dtype = torch.float32 if place == "head" else torch.float16
        given, out = _trial(groups[0], out_dtype, rows)
        wanted = torch.empty_like(out)
        groups[0](given, wanted, overlap=False)
        works: dict[Any, tuple[Launch, int]] = {}
        count = len(groups)
        works["today"] = (captured([partial(group, given, out, overlap=True) for group in groups]), count)
        for layout in fitting(rows, groups[0].align):
            with suppress(RuntimeError):
                out.fill_(torch.nan)
                wide(layout, groups[0], given, out, overlap=False)
                if report.check(f"{place}, {rows} rows, {layout}: the bits of today", torch.equal(out, wanted)):
                    launches = [partial(wide, layout, group, given, out) for group in groups]
                    works[layout] = (captured(launches), count)
        taken = medians_us(works)
        best = min(taken, key=taken.__getitem__)
        if best != "today":
            found[place] = best
        others = [(us, str(name)) for name, us in taken.items() if name != "today"]
        lines.append(
            f"{place} {taken['today']:.1f} / {' '.join(f'{us:.1f} {name}' for us, name in sorted(others)[:1])}"
        )
        report.put("alone", f"{model.width}, {place}, {rows} rows", {str(name): us for name, us in taken.items()})
    report.say(f"{rows} rows, µs today / by wgmma: " + "; ".join(lines))
    return found


class _Wide:
    """A group whose launches go to the warpgroup form."""

    def __init__(self, group: CudaGroup, layout: Wide) -> None:
        self._group, self._layout = group, layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def __call__(self, x: torch.Tensor, out: torch.Tensor, *, overlap: bool) -> None:
        """As the group's."""
        wide(self._layout, self._group, x, out, overlap=overlap)


@contextmanager
def put_in(model: Any, given: Winners, many: Many | None) -> Iterator[None]:
    """The model's launches are those of the winners inside, and decoding is by ``many``."""
    kept = []
    for place, layout in given.items():
        for owner in [model] if place == "head" else model._layer_list:
            group = getattr(owner, place)
            kept.append((owner, place, group))
            setattr(owner, place, _Wide(group, layout))
    if many is not None:
        model._wkv.decode = partial(decode_many, many)
    try:
        yield
    finally:
        for owner, place, group in kept:
            setattr(owner, place, group)
        vars(model._wkv).pop("decode", None)


def decode_many(
    form: Many,
    projected: torch.Tensor,
    low: torch.Tensor,
    v_first: torch.Tensor,
    vectors: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    *,
    first_layer: bool,
    eps: float,
    overlap: bool,
) -> None:
    """As ``Wkv7.decode``, by the kernel for many sequences."""
    rows, width = out.shape
    states = rows * (width // 64)
    passed = (projected, low, v_first, vectors, state, slots, out, projected.stride(0), low.stride(0), width)
    given = (*passed, int(first_layer), eps, form.begin_next, states)
    kernel(form, low.dtype)((-(-states // form.states), 1, 1), 128 * form.groups, given, overlap=overlap)


def steps(report: Report, shape: str) -> None:
    """Everything of one shape."""
    runs = Runs(load_random(shape, EngineConfig(device="cuda", dtype="fp16")).model, 40)
    report.say(f"{shape} loaded")
    model, states = cast(Any, runs.model), cast(Any, runs.states)
    for requests in REQUESTS:
        with exact_products():
            found = winners(report, model, requests)
        slots = runs.slots(requests)
        batch = Batch.pack([(slot, runs.ids(1)) for slot in slots])
        many = MANY if requests > LOW_ROWS else ()
        variants: dict[str, tuple[Winners, Many | None]] = {"today": ({}, None), "wgmma": (found, None)}
        variants |= {f"many {form}": ({}, form) for form in many}
        variants |= {f"wgmma, many {form}": (found, form) for form in many}
        works: dict[str, tuple[Launch, int]] = {}
        wanted: torch.Tensor | None = None
        for name, (places, form) in variants.items():
            states.graphs.clear()
            states.pool = None
            for slot in slots:
                states.clear(slot)
            with put_in(model, places, form):
                logits = torch.cat([model.forward_on_device(batch, states).clone() for _ in range(3)])
            wanted = logits if wanted is None else wanted
            if report.check(f"{shape}, {requests} requests, {name}: the bits of today", torch.equal(logits, wanted)):
                works[name] = (next(iter(states.graphs.values()))[0].replay, 1)
        taken = medians_us(works, 10)
        line = "  ".join(f"{name} {us:.0f}" for name, us in sorted(taken.items(), key=lambda item: item[1]))
        best = min(taken.values())
        report.say(f"{shape}, {requests} requests: {requests / best * 1e6:.0f} tokens/s at best; µs a step: {line}")
        report.put("steps", f"{shape}, {requests} requests", taken)
        states.graphs.clear()
        states.pool = None
        runs.free(slots)


def compiled() -> None:
    """Compile what is run, side by side; what cannot be is told where it is run."""
    wides = [(layout, rows, torch.float16) for rows in REQUESTS for layout in fitting(rows, 64)]
    wides += [(layout, rows, torch.float32) for layout, rows, _ in wides]

    def once(work: Callable[[], object]) -> None:
        with torch.cuda.device(0), suppress(Exception):
            work()

    works: list[Callable[[], object]] = [partial(wide_kernel, *given) for given in wides]
    works += [partial(kernel, form, torch.float16) for form in MANY]
    with ThreadPoolExecutor(min(16, usable_cores())) as pool:
        list(pool.map(once, works))


def main(arguments: Sequence[str] | None = None) -> int:
    """Lines, and 1 when a step has other bits."""
    report = Report(__doc__, ("1.5b", "0.1b"), arguments)
    compiled()
    report.say("compiled")
    works: dict[str, Callable[[], None]] = {shape: partial(steps, report, shape) for shape in ("1.5b", "0.1b")}
    return report.each(works)


if __name__ == "__main__":
    sys.exit(main())
