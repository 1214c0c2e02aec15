"""Do decode steps of few requests gain when add, norm, token shift and mixes are made inside the products that read them?

    python lab/fused_shift.py [--parts bits,1.5b,0.1b] [--json FILE]

fused_shift.cu against two launches, for 1, 2 and 4 requests, fp16. ``bits``: every layout of the fused kernel, and of the
kernel that takes any rows, has the bits of one definition, prompts cut anywhere; its error beside today's. ``1.5b`` and
``0.1b``: both places of a layer alone, over the weights of all layers; then whole steps, whose bits must be those of a step
by the kernel that takes any rows; and the law over random splits and crowds with the fastest put in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from card import Launch, Report, captured, medians_us

from kittiwake.bench.random import load_random
from kittiwake.config import EngineConfig
from kittiwake.device import usable_cores
from kittiwake.engine.batch import Batch
from kittiwake.errors import DeviceError
from kittiwake.families import rwkv7_cuda
from kittiwake.layers.cuda_linear import CudaGroup, CudaProduct, exact_products
from kittiwake.ops.matmul import cuda as matmul
from kittiwake.ops.matmul.cuda import Narrow
from kittiwake.ops.nvrtc import CudaKernel
from kittiwake.ops.shift_mix.triton import shift_mix
from tests.device.runs import Runs

REQUESTS = (1, 2, 4)
MOST = 4
"""Rows that the fused kernel takes."""
SHARED = 227 * 1024
WIDTHS = {"1.5b": 2048, "0.1b": 768}
PLACES = {"projections": ("time_norm", "time_mixes", 32), "ffn_key": ("channel_norm", "channel_mixes", 64)}
"""The products behind a shift: their layer's norm and mixes, and most columns a block."""
EPS = 1e-5


@dataclass(frozen=True)
class Fused:
    """How the fused kernel is laid out; none of it changes a bit. See fused_shift.cu."""

    bn: int
    bk: int
    stages: int
    workers: int = 256
    cluster: int = 1

    @property
    def family(self) -> str:
        """What it stands for."""
        return "mma" if self.cluster == 1 else "cluster"

    def shared_bytes(self, rows: int, width: int) -> int:
        """Shared memory of a block."""
        weights, mixed = self.stages * self.bn * (self.bk + 8) * 2, rows * (width + 8) * 2
        return weights + mixed + rows * 2 * 8 * 4 + (rows * 2 * width * 4 if self.cluster > 1 else 0)

    def fits(self, rows: int, width: int, most_columns: int) -> bool:
        """Whether a block can hold it, and the place takes as many columns a block."""
        return width % self.bk == 0 and self.bn <= most_columns and self.shared_bytes(rows, width) <= SHARED

    def __str__(self) -> str:
        """In a few characters."""
        blocks = f"/{self.cluster}" if self.cluster > 1 else ""
        return f"{self.family} {self.bn}x{self.bk}x{self.stages}/{self.workers}{blocks}"


FORMS = (
    Fused(8, 256, 6, 128), Fused(16, 256, 4, 128), Fused(16, 256, 6, 128), Fused(16, 256, 8, 128), Fused(16, 512, 4, 128),
    Fused(16, 256, 4), Fused(32, 256, 4, 128), Fused(32, 256, 4), Fused(32, 256, 6), Fused(32, 256, 3),
    Fused(64, 256, 4), Fused(64, 128, 8), Fused(64, 256, 6),
    Fused(32, 256, 4, 128, 2), Fused(32, 256, 4, 128, 4), Fused(32, 256, 4, 128, 8), Fused(32, 256, 4, 256, 4),
    Fused(16, 256, 4, 128, 8), Fused(64, 256, 4, 256, 2), Fused(64, 256, 4, 256, 4),
)  # fmt: skip
PLAIN_WORKERS = (256, 128, 64)


@dataclass(frozen=True)
class Shift:
    """What ``shift_mix`` is given."""

    x: torch.Tensor
    y: torch.Tensor | None
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

    def plain(self, workers: int = 256, *, overlap: bool = True, is_split: bool | None = None) -> None:
        """By the kernel for any rows."""
        rows, width = self.x.shape
        count = self.mixes.shape[0]
        is_split = rows <= 32 if is_split is None else is_split
        y = self.x if self.y is None else self.y
        kernel = plain_kernel(workers, width, self.mixed.dtype)
        given = (self.x, y, self.x_out, self.norm, self.mixes, self.state, self.owners, self.starts, self.slots)
        more = (self.mixed, self.last, count, self.mixed.stride(0))
        last = (int(self.y is not None), self.eps, 1)
        kernel((rows, count if is_split else 1, 1), workers, (*given, *more, *last), overlap=overlap)

    def fused(self, form: Fused, group: CudaGroup, out: torch.Tensor, *, overlap: bool = True) -> None:
        """With the products behind it; one row a sequence, nothing in ``mixed``."""
        rows, width = self.x.shape
        y = self.x if self.y is None else self.y
        tiles = group.lines.shape[0] * 32 // form.bn
        given = (self.x, y, self.x_out, self.norm, self.mixes, self.state, self.slots, self.last)
        products = (group.weight, out, group.lines, group._codes, tiles, out.stride(0))
        grid = (-(-tiles // form.cluster) * form.cluster, 1, 1)
        last = (int(self.y is not None), self.eps, 1)
        kernel = fused_kernel(form, rows, width, out.dtype)
        kernel(grid, form.workers, (*given, *products, *last), overlap=overlap)


def text() -> str:
    """The CUDA C++ text."""
    return matmul.source() + Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")


def fused_defines(form: Fused, rows: int, width: int, dtype: torch.dtype) -> tuple[str, ...]:
    """What the source of the fused kernel is compiled with."""
    given = matmul.defines(dtype, Narrow(form.bn, 8, form.bk, form.stages), 1 if rows == 1 else 8, is_wide_out=False)
    return (*given, f"WIDTH={width}", f"WORKERS={form.workers}", f"CLUSTER={form.cluster}", f"REAL={rows}")


def plain_defines(workers: int, width: int, dtype: torch.dtype) -> tuple[str, ...]:
    """And of the kernel for any rows."""
    given = matmul.defines(dtype, Narrow(), 1, is_wide_out=False)
    return (*given, f"WIDTH={width}", f"WORKERS={workers}", "CLUSTER=1")


@cache
def fused_kernel(form: Fused, rows: int, width: int, dtype: torch.dtype) -> CudaKernel:
    """Compiled."""
    given, room = fused_defines(form, rows, width, dtype), form.shared_bytes(rows, width)
    return CudaKernel(text(), "fused_product", given, shared_bytes=room)


@cache
def plain_kernel(workers: int, width: int, dtype: torch.dtype) -> CudaKernel:
    """Compiled."""
    return CudaKernel(text(), "shift_rows", plain_defines(workers, width, dtype))


# -- bits


def ints(*values: int) -> torch.Tensor:
    """On the card."""
    return torch.tensor(values, dtype=torch.int32, device="cuda")


class Rows:
    """Random rows of some sequences, and a layer's products behind them."""

    def __init__(self, width: int, lengths: Sequence[int], has_y: bool) -> None:
        draw = partial(torch.randn, device="cuda")
        self.width, self.lengths, self.count = width, tuple(lengths), sum(lengths)
        self.x = draw(self.count, width) * torch.exp2(torch.randint(-8, 9, (self.count, 1), device="cuda").float())
        self.x[self.count // 2] = 0.25
        self.y = draw(self.count, width).half() if has_y else None
        self.norm, self.mixes = draw(2, width), torch.rand(6, width, device="cuda")
        self.state = draw(len(lengths) + 3, width)
        self.slots = torch.randperm(len(lengths) + 3, device="cuda")[: len(lengths)].int()
        columns = (96, 64, 160, 96, 96, 32, 64)
        products = [CudaProduct(str(i), width, size, i % 6) for i, size in enumerate(columns)]
        self.group = CudaGroup(products, torch.float16, torch.device("cuda"))
        for i, size in enumerate(columns):
            self.group.load(str(i), draw(size, width).half())

    def shift(self, pieces: Sequence[tuple[int, int, int]], state: torch.Tensor) -> tuple[Shift, torch.Tensor]:
        """A launch of some sequences' rows, each (sequence, from, to); and where in all rows they stand."""
        begins = [sum(self.lengths[:s]) for s in range(len(self.lengths))]
        rows = [begins[s] + i for s, first, end in pieces for i in range(first, end)]
        index = torch.tensor(rows, device="cuda")
        owners = ints(*(i for i, (_, first, end) in enumerate(pieces) for _ in range(first, end)))
        starts = [0]
        for _, first, end in pieces:
            starts.append(starts[-1] + end - first)
        x = self.x[index].contiguous()
        y = None if self.y is None else self.y[index].contiguous()
        slots = self.slots[torch.tensor([s for s, _, _ in pieces], device="cuda")]
        mixed = torch.full((6, len(rows), self.width), torch.nan, dtype=torch.float16, device="cuda")
        last = torch.full((len(pieces), self.width), torch.nan, device="cuda")
        meta = (owners, ints(*starts), slots)
        given = Shift(x, y, torch.full_like(x, torch.nan), self.norm, EPS, self.mixes, state, *meta, mixed, last)
        return given, index


def bits(report: Report) -> None:
    """One definition: any threads, any rows, any cuts, alone or inside a product."""
    for width in sorted(set(WIDTHS.values())):
        for has_y in (True, False):
            lengths = (1, 14, 2, 9, 1, 3, 6)
            rows = Rows(width, lengths, has_y)
            name = f"{width}, {'added' if has_y else 'first'}"
            whole, _ = rows.shift([(s, 0, n) for s, n in enumerate(lengths)], rows.state.clone())
            whole.plain(overlap=False)
            wanted = [kept.clone() for kept in (whole.x_out, whole.mixed, whole.last)]
            is_finite = all(bool(kept.isfinite().all()) for kept in wanted)
            report.check(f"{name}: everything written, finite", is_finite)
            for workers in PLAIN_WORKERS:
                for is_split in (True, False):
                    for kept in (whole.x_out, whole.mixed, whole.last):
                        kept.fill_(torch.nan)
                    whole.plain(workers, overlap=False, is_split=is_split)
                    same = all(map(torch.equal, (whole.x_out, whole.mixed, whole.last), wanted))
                    report.check(f"{name}, {workers} threads, {'a block a mix' if is_split else 'all mixes'}", same)
            for end in (1, 2, 4):  # every sequence cut behind so many rows, what is left without the rest
                state = rows.state.clone()
                same = True
                for first, until in ((0, end), (end, max(lengths))):
                    pieces = [(s, first, min(until, n)) for s, n in enumerate(lengths) if first < n]
                    part, index = rows.shift(pieces, state)
                    part.plain(overlap=False)
                    same &= torch.equal(part.mixed, wanted[1][:, index]) and torch.equal(part.x_out, wanted[0][index])
                    state[part.slots.long()] = part.last
                    ended = [(i, s) for i, (s, _, until) in enumerate(pieces) if until == lengths[s]]
                    same &= all(torch.equal(part.last[i], wanted[2][s]) for i, s in ended)
                report.check(f"{name}, cut behind {end} rows", same)
            products = torch.empty((rows.count, rows.group.columns), dtype=torch.float16, device="cuda")
            rows.group(wanted[1], products, overlap=False)
            for form in FORMS:
                for count in range(1, MOST + 1):
                    if form.fits(count, width, 32):
                        _fused_bits(report, f"{name}, {form}, {count} rows", rows, form, count, wanted, products)
    _error(report)
    report.say(f"bits: {len(report.document['checks'])} checks, {len(report.failures)} wrong")


def _fused_bits(
    report: Report,
    name: str,
    rows: Rows,
    form: Fused,
    count: int,
    wanted: Sequence[torch.Tensor],
    products: torch.Tensor,
) -> None:
    """The last ``count`` sequences decode their rows one by one."""
    try:
        state, same = rows.state.clone(), True
        own = range(len(rows.lengths) - count, len(rows.lengths))
        for step in range(max(rows.lengths[s] for s in own)):
            # a sequence that has ended runs its last row again, in a slot that is not looked at
            pieces = [(s, min(step, rows.lengths[s] - 1), min(step, rows.lengths[s] - 1) + 1) for s in own]
            part, index = rows.shift(pieces, state)
            out = torch.full((count, rows.group.columns), torch.nan, dtype=torch.float16, device="cuda")
            part.fused(form, rows.group, out, overlap=False)
            state[part.slots.long()] = part.last
            for i, (s, first, _) in enumerate(pieces):
                if first == step:
                    same &= torch.equal(out[i], products[index[i]]) and torch.equal(part.x_out[i], wanted[0][index[i]])
                    same &= first + 1 < rows.lengths[s] or torch.equal(part.last[i], wanted[2][s])
    except Exception as err:
        name, same = f"{name}: {type(err).__name__} {str(err)[:120]}", False
    report.check(name, same)


def _error(report: Report) -> None:
    """How far the norm is from float64, beside today's; at one row a sequence ``last`` is the norm."""
    for width in sorted(set(WIDTHS.values())):
        rows = Rows(width, (1,) * 512, True)
        given, _ = rows.shift([(s, 0, 1) for s in range(512)], rows.state)
        assert given.y is not None
        x = (given.x + given.y.float()).double()
        gap = x - x.mean(-1, keepdim=True)
        normed = gap / (gap.square().mean(-1, keepdim=True) + EPS).sqrt()
        right = normed * given.norm[0].double() + given.norm[1].double()
        errors = {}
        for name, launch in (("ours", partial(given.plain, overlap=False)), ("today", partial(today, given))):
            given.last.fill_(torch.nan)
            launch()
            gaps = (given.last.double() - right).abs()
            errors[name] = (float(gaps.max()), float(gaps.square().mean().sqrt()))
        near = all(mine <= 1.25 * its for mine, its in zip(errors["ours"], errors["today"], strict=True))
        report.check(f"{width}: the norm's error is not above today's by a quarter: {errors}", near)
        report.say(f"{width}, error of the norm, most and mean square: " + str(errors))
        report.put("error", str(width), errors)


# -- times


def today(given: Shift, *, overlap: bool = False) -> None:
    """By ops/shift_mix."""
    meta = (given.owners, given.starts, given.slots)
    first = (given.x, given.y, given.x_out, given.norm, given.eps, given.mixes, given.state)
    shift_mix(*first, *meta, given.mixed, given.last, overlap=overlap)


def winners(report: Report, model: Any, rows: int) -> dict[str, dict[str, Fused]]:
    """Time a shift and the products behind it over all layers but the first; the best layout of each family by place."""
    width, found = model.width, {}
    x = torch.randn(rows, width, device="cuda")
    y = torch.randn(rows, width, device="cuda").half()
    x_out, last, state = torch.empty_like(x), torch.empty_like(x), torch.randn(rows, width, device="cuda")
    mixed = torch.empty((6, rows, width), dtype=torch.float16, device="cuda")
    meta = (ints(*range(rows)), ints(*range(rows + 1)), ints(*range(rows)))
    layers = model._layer_list[1:]
    for place, (norm, mixes, most_columns) in PLACES.items():
        groups = [getattr(layer, place) for layer in layers]
        out = torch.empty((rows, groups[0].columns), dtype=torch.float16, device="cuda")
        shifts = []
        for layer in layers:
            mix = getattr(layer, mixes)
            given = (x, y, x_out, getattr(layer, norm), model.eps, mix, state, *meta)
            shifts.append(Shift(*given, mixed[: mix.shape[0]], last))
        read = mixed if place == "projections" else mixed[0]
        behind = [partial(group, read, out, overlap=True) for group in groups]

        def pairs(first: Sequence[Launch], behind: Sequence[Launch] = behind) -> tuple[Launch, int]:
            return captured([launch for pair in zip(first, behind, strict=True) for launch in pair]), len(behind)

        works: dict[Any, tuple[Launch, int]] = {
            "product": (captured(behind), len(behind)),
            "today": pairs([partial(today, given, overlap=True) for given in shifts]),
            "plain": pairs([given.plain for given in shifts]),
        }
        shifts[0].plain(overlap=False)
        groups[0](read, out, overlap=False)
        wanted = out.clone()
        for form in FORMS:
            if form.fits(rows, width, most_columns):
                name = f"{width}, {place}, {rows} rows, {form}"
                try:
                    out.fill_(torch.nan)
                    shifts[0].fused(form, groups[0], out, overlap=False)
                    same = torch.equal(out, wanted)
                except (RuntimeError, DeviceError) as err:
                    name, same = f"{name}: {str(err)[:120]}", False
                if report.check(name, same):
                    own = [partial(given.fused, form, group, out) for given, group in zip(shifts, groups, strict=True)]
                    works[form] = (captured(own), len(own))
        taken = medians_us(works)
        found[place] = {
            family: min(forms, key=taken.__getitem__)
            for family in ("mma", "cluster")
            if (forms := [form for form in taken if isinstance(form, Fused) and form.family == family])
        }
        best = "  ".join(f"{taken[form]:.2f} {form}" for form in found[place].values())
        report.say(
            f"{width}, {place}, {rows} rows, µs: product {taken['product']:.2f}, with today's shift {taken['today']:.2f}, "
            f"plain {taken['plain']:.2f}; fused {best}"
        )
        report.put("alone", f"{width}, {place}, {rows} rows", {str(name): us for name, us in taken.items()})
    return found


class _Held:
    """Stands for ``shift_mix`` in a forward: launches the kernel for any rows, or leaves the work to the products behind."""

    def __init__(self, forms: Mapping[str, Fused]) -> None:
        self._forms = forms
        self._held: Shift | None = None

    def __call__(self, *given: Any, overlap: bool, kept: torch.Tensor | None = None) -> None:
        """As ``shift_mix``."""
        assert kept is None
        shift = Shift(*given)
        rows = shift.x.shape[0]
        place = "projections" if shift.mixes.shape[0] > 1 else "ffn_key"
        if place in self._forms and rows <= MOST and shift.slots.shape[0] == rows:
            self._held = shift
        else:
            shift.plain(overlap=overlap)

    def take(self) -> Shift | None:
        """What the products are to do in front of their sums."""
        held, self._held = self._held, None
        return held


class _Behind:
    """A group that makes its own inputs where they were left to it."""

    def __init__(self, group: CudaGroup, form: Fused, held: _Held) -> None:
        self._group, self._form, self._held = group, form, held

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def __call__(self, x: torch.Tensor, out: torch.Tensor, *, overlap: bool) -> None:
        """As the group's."""
        shift = self._held.take()
        if shift is None:
            self._group(x, out, overlap=overlap)
        else:
            shift.fused(self._form, self._group, out, overlap=overlap)


@contextmanager
def put_in(model: Any, states: Any, forms: Mapping[str, Fused] | None) -> Iterator[None]:
    """Steps are by these layouts inside, by the kernel for any rows where there is none; None: as today."""
    states.graphs.clear()
    states.pool = None
    if forms is None:
        yield
        return
    held, kept = _Held(forms), []
    before = vars(rwkv7_cuda)["shift_mix"]
    vars(rwkv7_cuda)["shift_mix"] = held
    for place, form in forms.items():
        for layer in model._layer_list:
            group = getattr(layer, place)
            kept.append((layer, place, group))
            setattr(layer, place, _Behind(group, form, held))
    try:
        yield
    finally:
        vars(rwkv7_cuda)["shift_mix"] = before
        for layer, place, group in kept:
            setattr(layer, place, group)


def steps(report: Report, shape: str) -> None:
    """Everything of one shape."""
    runs = Runs(load_random(shape, EngineConfig(device="cuda", dtype="fp16")).model, 16)
    model, states = cast(Any, runs.model), cast(Any, runs.states)
    compiled(model.width)
    report.say(f"{shape} loaded")
    best: dict[str, Fused] = {}
    for requests in REQUESTS:
        with exact_products():
            found = winners(report, model, requests)
        slots = runs.slots(requests)
        batch = Batch.pack([(slot, runs.ids(1)) for slot in slots])
        variants: dict[str, Mapping[str, Fused] | None] = {"today": None, "plain": {}}
        for family in ("mma", "cluster"):
            forms = {place: by[family] for place, by in found.items() if family in by}
            variants[" + ".join(map(str, forms.values()))] = forms
        variants |= {f"{by['mma']} {place} only": {place: by["mma"]} for place, by in found.items() if "mma" in by}
        works: dict[str, tuple[Launch, int]] = {}
        wanted: torch.Tensor | None = None
        for name, places in variants.items():
            for slot in slots:
                states.clear(slot)
            with put_in(model, states, places):
                logits = torch.cat([model.forward_on_device(batch, states).clone() for _ in range(3)])
                works[name] = (next(iter(states.graphs.values()))[0].replay, 1)
            if name == "plain":
                wanted = logits
            elif wanted is None:
                continue  # today's norm is another sum: a step of its own bits
            right = torch.equal(logits, wanted) and bool(logits.isfinite().all())
            if not report.check(f"{shape}, {requests} requests, {name}: the bits of plain", right):
                works.pop(name)
        taken = medians_us(works, 10)
        line = "  ".join(f"{name} {us:.0f}" for name, us in sorted(taken.items(), key=lambda item: item[1]))
        fastest = min(taken, key=taken.__getitem__)
        report.say(f"{shape}, {requests} requests: {requests / taken[fastest] * 1e6:.0f} tokens/s at best; µs: {line}")
        report.put("steps", f"{shape}, {requests} requests", taken)
        if requests == 1:
            best = dict(variants[fastest] or {})
        runs.free(slots)
    with put_in(model, states, best):
        trace = runs.trace(40)
        cuts = [[40], [1, 39], [17, 23], *(runs.pieces(40) for _ in range(4))]
        splits = [runs.split(trace, pieces) for pieces in cuts]
        crowds = [runs.crowd(trace, others) for others in (1, 2, 3, 5)]
    names = " + ".join(map(str, best.values())) or "plain"
    report.check(f"{shape}, {names}: the same bits in every split and crowd", all(splits + crowds))
    report.say(f"{shape}: {len(splits)} splits, {len(crowds)} crowds by {names}")
    states.graphs.clear()
    states.pool = None


def compiled(width: int, counts: Sequence[int] = REQUESTS) -> None:
    """Compile what is run at a width, side by side; what cannot be is told where it is run."""

    def once(work: Callable[[], object]) -> None:
        with torch.cuda.device(0), suppress(Exception):
            work()

    works: list[Callable[[], object]] = []
    works += [
        partial(fused_kernel, form, rows, width, torch.float16)
        for form in FORMS
        for rows in counts
        if form.fits(rows, width, 64)
    ]
    works += [partial(plain_kernel, workers, width, torch.float16) for workers in PLAIN_WORKERS]
    with ThreadPoolExecutor(min(16, usable_cores())) as pool:
        list(pool.map(once, works))


def main(arguments: Sequence[str] | None = None) -> int:
    """Lines, and 1 when something has other bits."""
    report = Report(__doc__, ("bits", *WIDTHS), arguments)
    torch.manual_seed(0)

    def check() -> None:
        for width in WIDTHS.values():
            compiled(width, range(1, MOST + 1))
        report.say("compiled")
        with exact_products():
            bits(report)

    works: dict[str, Callable[[], None]] = {"bits": check}
    works |= {shape: partial(steps, report, shape) for shape in WIDTHS}
    return report.each(works)


if __name__ == "__main__":
    sys.exit(main())
