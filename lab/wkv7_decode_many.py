"""WKV-7 decoding at the speed of memory for many sequences: states of several heads a block, all fetched before waiting.

    python lab/wkv7_decode_many.py [--parts bits,times] [--json FILE]

wkv7_decode_many.cu beside ops/wkv7's ``decode``: the same bits are checked first; then both are timed alone and behind the
product that stands in front of them in a layer, 32 heads of 64 channels, fp16, states that no L2 holds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from card import Launch, Report, captured, copies_of, medians_us

from kittiwake.device import usable_cores
from kittiwake.layers.cuda_linear import CudaGroup, CudaProduct, exact_products
from kittiwake.layers.cuda_probe import pick_products
from kittiwake.ops.head_kernels import Tiling, head_defines, head_source
from kittiwake.ops.nvrtc import CudaKernel
from kittiwake.ops.wkv7.cuda import Wkv7, kernels

HEADS, SIZE, RANKS = 32, 64, (96, 96, 256, 64)
WIDTH = HEADS * SIZE
SEQUENCES = (1, 8, 32, 128, 320)
ROOM = SIZE // 4 * (4 * SIZE * 4 + 16)
"""Shared memory that a state takes."""


@dataclass(frozen=True)
class Many:
    """How ``decode_many`` is laid out; none of it changes a bit. See wkv7_decode_many.cu."""

    states: int
    groups: int = 1
    bulk: int = 1
    store: int = 0
    begin_next: int = 2

    def __str__(self) -> str:
        """In a few characters."""
        ends = ("", " streamed", " bulk out")[self.store] + (", next at once" if self.begin_next == 1 else "")
        return f"{self.states}/{self.groups} {'bulk' if self.bulk else 'cp.async'}{ends}"

    def defines(self, dtype: torch.dtype) -> tuple[str, ...]:
        """What the source is compiled with."""
        own = (f"Q={self.states}", f"GROUPS={self.groups}", f"BULK={self.bulk}", f"LEAVE={self.store}")
        return (*head_defines(SIZE, dtype, Tiling()), *own)


FORMS = (
    Many(1), Many(2), Many(4), Many(4, bulk=0), Many(2, bulk=0), Many(4, store=1), Many(4, store=2), Many(2, store=2),
    Many(4, 2), Many(8, 2), Many(8, 2, store=2), Many(4, begin_next=1), Many(4, store=2, begin_next=1),
)  # fmt: skip


def text() -> str:
    """The CUDA C++ text."""
    return head_source("wkv7") + Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")


@lru_cache
def kernel(form: Many, dtype: torch.dtype) -> CudaKernel:
    """Compiled."""
    return CudaKernel(text(), "decode_many", form.defines(dtype), shared_bytes=form.states * ROOM)


def compiled(form: Many) -> None:
    """Compile a form; one that cannot be is told where it is run."""
    with torch.cuda.device(0), suppress(Exception):
        kernel(form, torch.float16)


class Layer:
    """The inputs of a layer's decode step."""

    def __init__(self, sequences: int, slots: torch.Tensor, projected: torch.Tensor) -> None:
        self.sequences, self.slots, self.projected = sequences, slots, projected
        draw = partial(torch.randn, device="cuda")
        self.low, self.v_first = draw(sequences, 4 * WIDTH).half(), draw(sequences, WIDTH).half()
        self.vectors = draw(8, WIDTH)
        self.vectors[0].uniform_(-7, 3)
        self.state = draw(int(slots.max()) + 1, HEADS, SIZE, SIZE)
        self.out = torch.empty_like(self.v_first)

    def today(self, op: Wkv7, is_first: bool = False) -> None:
        """By ops/wkv7."""
        given = (self.projected, self.low, self.v_first, self.vectors, self.state, self.slots, self.out)
        op.decode(*given, first_layer=is_first, eps=64e-5, overlap=True)

    def many(self, form: Many, is_first: bool = False) -> None:
        """By the kernel for many sequences."""
        states = self.sequences * HEADS
        passed = (self.projected, self.low, self.v_first, self.vectors, self.state, self.slots, self.out)
        strides = (self.projected.stride(0), self.low.stride(0), WIDTH, int(is_first), 64e-5, form.begin_next, states)
        blocks = -(-states // form.states)
        kernel(form, self.low.dtype)((blocks, 1, 1), 128 * form.groups, (*passed, *strides), overlap=True)

    def kept(self) -> tuple[torch.Tensor, ...]:
        """What a step writes; copies."""
        return self.state.clone(), self.v_first.clone(), self.out.clone()

    def restore(self, state: torch.Tensor, v_first: torch.Tensor, out: torch.Tensor) -> None:
        """Put back what was kept."""
        self.state.copy_(state)
        self.v_first.copy_(v_first)
        self.out.copy_(out)


def bits(report: Report, op: Wkv7) -> None:
    """Are outputs, states and first values those of ops/wkv7, for any number of sequences in any slots?"""
    for sequences in (1, 3, 8, 33):
        slots = torch.randperm(40, device="cuda")[:sequences].int()
        layer = Layer(sequences, slots, torch.randn(sequences, 3 * WIDTH + 512, device="cuda").half())
        before = layer.kept()
        for is_first in (False, True):
            layer.restore(*before)
            layer.today(op, is_first)
            layer.today(op, is_first)
            wanted = layer.kept()
            for form in FORMS:
                layer.restore(before[0], before[1], torch.full_like(before[2], torch.nan))
                name = f"{sequences} sequences, {'first' if is_first else 'later'} layer, {form}"
                try:
                    layer.many(form, is_first)
                    layer.many(form, is_first)
                    torch.cuda.synchronize()
                    same = all(map(torch.equal, layer.kept(), wanted))
                except Exception as err:
                    name, same = f"{name}: {type(err).__name__} {str(err)[:120]}", False
                report.check(name, same)
    report.say(f"bits: {len(report.document['checks'])} checks, {len(report.failures)} wrong")


def times(report: Report, op: Wkv7) -> None:
    """Alone, and behind the low-rank products."""
    for sequences in SEQUENCES:
        nbytes = 2 * sequences * HEADS * SIZE * SIZE * 4
        copies = copies_of(nbytes // 2, 48)
        slots = torch.arange(sequences, dtype=torch.int32, device="cuda")
        projected = torch.randn(sequences, 3 * WIDTH + sum(RANKS), device="cuda").half()
        layers = [Layer(sequences, slots, projected) for _ in range(copies)]
        groups = [low_rank() for _ in range(copies)]
        pick_products(groups, {})
        forms: dict[str, Any] = {"today": lambda layer: partial(layer.today, op)}
        forms |= {str(form): partial(_many, form=form) for form in FORMS}
        works: dict[tuple[str, str], tuple[Launch, int]] = {}
        fronts = [
            partial(group, projected, layer.low, overlap=True) for group, layer in zip(groups, layers, strict=True)
        ]
        works["product", "front"] = (captured(fronts), copies)
        for name, of in forms.items():
            own = [of(layer) for layer in layers]
            works[name, "alone"] = (captured(own), copies)
            both = [launch for pair in zip(fronts, own, strict=True) for launch in pair]
            works[name, "behind"] = (captured(both), copies)
        taken = medians_us(works)
        front = taken["product", "front"]
        us = {name: (taken[name, "alone"], taken[name, "behind"] - front) for name in forms}
        best = min(us, key=lambda name: us[name][1])
        report.say(
            f"{sequences} sequences, {nbytes / 1e6:.1f} MB; µs alone, TB/s, µs more behind a product of {front:.1f}:"
        )
        for name, (alone, behind) in sorted(us.items(), key=lambda item: item[1][1]):
            report.say(
                f"  {name:28} {alone:7.2f} {nbytes / alone / 1e6:5.2f} {behind:7.2f}{' <' if name == best else ''}"
            )
        report.put("times", f"{sequences} sequences", {"front_us": front, "alone_and_behind_us": us, "best": best})
        del works


def _many(layer: Layer, form: Many) -> Launch:
    return partial(layer.many, form)


def low_rank() -> CudaGroup:
    """A layer's low-rank ups, as RWKV-7 has them."""
    products, column = [], 3 * WIDTH
    for index, rank in enumerate(RANKS):
        products.append(CudaProduct(str(index), rank, WIDTH, 0, column))
        column += rank
    group = CudaGroup(products, torch.float16, torch.device("cuda"))
    for index, rank in enumerate(RANKS):
        group.load(str(index), torch.randn(WIDTH, rank, device="cuda").half() / rank**0.5)
    return group


def main(arguments: Sequence[str] | None = None) -> int:
    """Lines, and 1 when a form has other bits."""
    report = Report(__doc__, ("bits", "times"), arguments)
    torch.manual_seed(0)
    op = kernels(SIZE, torch.float16)
    with ThreadPoolExecutor(min(16, usable_cores())) as pool:
        list(pool.map(compiled, FORMS))
    report.say("compiled")
    with exact_products():
        return report.each({"bits": lambda: bits(report, op), "times": lambda: times(report, op)})


if __name__ == "__main__":
    sys.exit(main())
