"""Do decode steps of one request gain when add, norm, token shift and mix are made inside the product that reads them?

    python lab/shift_inside.py [--parts 1.5b,rwkv6-1.6b,0.1b] [--json FILE]

shift_inside.cu instead of two launches: in front of the projections of RWKV-7, of the first low-rank products of RWKV-6. fp16.
Its sums are in the order that Triton's are, one of two by version: which one gives the bits of the two launches is found first.
Then whole steps, with every layout and moment to let the next kernel begin; bits are those of a step as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
import triton
from card import Launch, Report, each_once, medians_us

from kittiwake.bench.random import load_random
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.families import rwkv7_cuda, rwkv_cuda
from kittiwake.layers.cuda_linear import CudaGroup, exact_products, same_bits
from kittiwake.ops.matmul import cuda as matmul
from kittiwake.ops.matmul.cuda import Narrow
from kittiwake.ops.nvrtc import CudaKernel
from kittiwake.ops.shift_mix.triton import Added, shift_mix
from tests.device.runs import Runs

SHAPES = ("1.5b", "rwkv6-1.6b", "0.1b")
LAYOUTS = [
    Narrow(bn, 8, bk, stages, begin_next=begin_next)
    for bn, bk, depths in (
        (8, 256, (4, 6, 8)),
        (16, 256, (4, 6, 8)),
        (16, 128, (8, 12)),
        (32, 256, (3, 4, 6)),
        (32, 128, (8, 10)),
    )
    for stages in depths
    for begin_next in (1, 3)
]


def shared_bytes(layout: Narrow, width: int) -> int:
    """Shared memory of a block: stages of weights, and the mixed row."""
    return layout.stages * layout.bn * (layout.bk + 8) * 2 + (width + 8) * 2


@cache
def kernel(layout: Narrow, width: int, is_tree: bool) -> CudaKernel:
    """Compiled."""
    text = matmul.source() + Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    own = (f"WIDTH={width}", f"BLOCK={triton.next_power_of_2(width)}", f"TREE={int(is_tree)}")
    given = (*matmul.defines(torch.float16, layout, 1, is_wide_out=False), *own)
    return CudaKernel(text, "shift_product", given, shared_bytes=shared_bytes(layout, width))


@dataclass(frozen=True)
class Shift:
    """What ``shift_mix`` was given for one row."""

    x: torch.Tensor
    added: torch.Tensor | Added | None
    x_out: torch.Tensor
    norm: torch.Tensor
    eps: float
    mixes: torch.Tensor
    state: torch.Tensor
    owners: torch.Tensor
    starts: torch.Tensor
    slots: torch.Tensor
    mixed: torch.Tensor
    last: torch.Tensor
    kept: torch.Tensor | None = None

    def apart(self, *, overlap: bool) -> None:
        """By its own launch."""
        given = (self.x, self.added, self.x_out, self.norm, self.eps, self.mixes, self.state)
        meta = (self.owners, self.starts, self.slots)
        shift_mix(*given, *meta, self.mixed, self.last, kept=self.kept, overlap=overlap)

    def inside(self, layout: Narrow, is_tree: bool, group: CudaGroup, out: torch.Tensor, *, overlap: bool) -> None:
        """With the products behind it; nothing in ``mixed``."""
        width, x, kept, nothing = self.x.shape[1], self.x, self.kept, group.weight
        added = self.added if isinstance(self.added, Added) or self.added is None else Added(self.added)
        y = nothing if added is None else added.y
        gate = None if added is None else added.gate
        given = (
            x,
            y,
            nothing if gate is None else gate,
            self.x_out,
            self.norm,
            self.mixes,
            self.state,
            self.slots,
            self.last,
        )
        more = (x if kept is None else kept, group.weight, out, group.lines, group._codes)
        flags = (int(added is not None), int(gate is not None), int(kept is not None))
        scale = 1.0 if added is None else float(added.scale)
        stride = 0 if kept is None else kept.stride(0)
        grid = (group.lines.shape[0] * 32 // layout.bn, 1, 1)
        launch = kernel(layout, width, is_tree)
        launch(
            grid,
            triton.next_power_of_2(width) // 8,
            (*given, *more, *flags, stride, scale, self.eps),
            overlap=overlap,
        )


class Held:
    """Stands for ``shift_mix`` in a forward; leaves the work of some launches to the products behind them."""

    def __init__(self, layout: Narrow, is_tree: bool, takes_kept: bool) -> None:
        self.layout, self.is_tree, self._takes_kept = layout, is_tree, takes_kept
        self.shift: Shift | None = None

    def __call__(self, *given: Any, overlap: bool, kept: torch.Tensor | None = None) -> None:
        """As ``shift_mix``."""
        shift: Shift = cast(Any, Shift)(*given, kept=kept)
        is_before_time_mix = shift.kept is not None if self._takes_kept else shift.mixes.shape[0] > 1
        if is_before_time_mix and shift.x.shape[0] == 1:
            self.shift = shift
        else:
            shift.apart(overlap=overlap)


class Behind:
    """A group that makes its own inputs where they were left to it."""

    def __init__(self, group: CudaGroup, held: Held) -> None:
        self._group, self._held = group, held

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def __call__(self, x: torch.Tensor, out: torch.Tensor, *, overlap: bool) -> None:
        """As the group's."""
        shift, self._held.shift = self._held.shift, None
        if shift is None:
            self._group(x, out, overlap=overlap)
        else:
            shift.inside(self._held.layout, self._held.is_tree, self._group, out, overlap=overlap)


@contextmanager
def put_in(model: Any, states: Any, layout: Narrow | None, is_tree: bool) -> Iterator[None]:
    """Steps of one row with this layout inside; None: as they are."""
    states.graphs.clear()
    states.pool = None
    if layout is None:
        yield
        return
    is_7 = hasattr(model._layer_list[0], "ffn_key")
    module, place = (rwkv7_cuda, "projections") if is_7 else (rwkv_cuda, "mix_down")
    held, before, kept = Held(layout, is_tree, not is_7), vars(module)["shift_mix"], []
    vars(module)["shift_mix"] = held
    for layer in model._layer_list:
        kept.append((layer, getattr(layer, place)))
        setattr(layer, place, Behind(getattr(layer, place), held))
    try:
        yield
    finally:
        vars(module)["shift_mix"] = before
        for layer, group in kept:
            setattr(layer, place, group)


def order_of_sums(report: Report, shape: str, model: Any) -> bool | None:
    """Whether Triton here adds a thread's columns as a tree, by the bits of some rows; None: in neither of the two ways."""
    layer, width = model._layer_list[-1], model.width
    is_7 = hasattr(layer, "ffn_key")
    group, mixes = (layer.projections, layer.time_mixes) if is_7 else (layer.mix_down, layer.mix_x)
    generator = torch.Generator("cuda").manual_seed(1)
    draw = partial(torch.randn, generator=generator, device="cuda")
    one, two = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in ([0], [0, 1]))
    fits = {True, False}
    for _ in range(20):
        x, y, state, norm = draw(1, width), draw(1, width).half(), draw(1, width), draw(2, width)
        made: dict[Any, list[torch.Tensor]] = {}
        for order in (None, True, False):
            mixed = torch.zeros((mixes.shape[0], 1, width), dtype=torch.float16, device="cuda")
            kept = None if is_7 else torch.full((2, 1, width), torch.nan, device="cuda")
            x_out, last = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
            shift = Shift(x, y, x_out, norm, model.eps, mixes, state, one, two, one, mixed, last, kept)
            out = torch.full((1, group.columns), torch.nan, dtype=torch.float16, device="cuda")
            if order is None:
                shift.apart(overlap=False)
                group(mixed if is_7 else mixed[0], out, overlap=False)
            else:
                shift.inside(LAYOUTS[0], order, group, out, overlap=False)
            made[order] = [out, x_out, last, *([] if kept is None else [kept])]
        fits = {order for order in fits if all(map(same_bits, made[order], made[None]))}
    report.check(f"{shape}: the bits of two launches in one of two orders", bool(fits))
    report.say(f"{shape}: sums of a thread {'as a tree' if True in fits else 'in order' if fits else 'in neither way'}")
    return True in fits if fits else None


def steps(report: Report, shape: str) -> None:
    """Everything of one shape."""
    runs = Runs(load_random(shape, EngineConfig(device="cuda", dtype="fp16")).model, 16)
    model, states = cast(Any, runs.model), cast(Any, runs.states)
    width = model.width
    layouts = [
        layout for layout in LAYOUTS if width % layout.bk == 0 and triton.next_power_of_2(width) >= layout.bn * 32
    ]
    each_once([partial(kernel, layout, width, is_tree) for layout in layouts for is_tree in (True, False)])
    report.say(f"{shape}: compiled")
    with exact_products():
        is_tree = order_of_sums(report, shape, model)
    if is_tree is None:
        return
    slots = runs.slots(1)
    batch = Batch.pack([(slots[0], runs.ids(1))])
    works: dict[str, tuple[Launch, int]] = {}
    kept: list[Any] = []
    wanted: torch.Tensor | None = None
    for layout in (None, *layouts):
        name = "apart" if layout is None else str(layout)
        states.clear(slots[0])
        try:
            with put_in(model, states, layout, is_tree):
                logits = torch.cat([model.forward_on_device(batch, states).clone() for _ in range(3)])
                graph = next(iter(states.graphs.values()))[0]
        except RuntimeError as err:
            report.say(f"{shape}, {name}: {str(err)[:120]}")
            continue
        wanted = logits if wanted is None else wanted
        if report.check(f"{shape}, {name}: the bits of two launches", torch.equal(logits, wanted)):
            kept.append(graph)
            works[name] = (graph.replay, 1)
    taken = medians_us(works, 10)
    ordered = sorted(taken.items(), key=lambda item: item[1])
    report.say(f"{shape}: apart {taken['apart']:.0f} µs; " + "  ".join(f"{name} {us:.0f}" for name, us in ordered[:5]))
    report.put("steps", shape, taken)
    states.graphs.clear()
    states.pool = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Lines, and 1 when something has other bits."""
    report = Report(__doc__, SHAPES, arguments)
    return report.each({shape: partial(steps, report, shape) for shape in SHAPES})


if __name__ == "__main__":
    sys.exit(main())
