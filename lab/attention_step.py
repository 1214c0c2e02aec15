"""Block attention of one row at depth: is the selection and all behind it faster than before, with the same bits?

    python lab/attention_step.py [--parts bits,times,kernels] [--json FILE]

One attention layer of the released geometry in bf16 with random keys: the product in front (71 MB of weights, which
clear the L2), the attention, the product behind (31 MB). ``times``: a captured step of the layer, before and now in
turns, and now with parts of what was. ``kernels``: µs of each kernel alone, with no launch beside it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from attention_before import triton as before
from attention_before import triton_sizes as sizes_before
from card import Report, captured, medians_us, untuned

from kittiwake.bench.qwen4exp_shapes import QWEN4EXP_SHAPES
from kittiwake.bench.random import RandomSource, RandomWeights
from kittiwake.engine.cuda_states import CudaStateTable
from kittiwake.families.cuda_rows import Shape
from kittiwake.families.qwen4exp import cuda_blocks
from kittiwake.families.qwen4exp.blocks import frequencies
from kittiwake.families.qwen4exp.cuda_blocks import CudaAttention, Launch
from kittiwake.families.qwen4exp.cuda_rooms import Rooms
from kittiwake.families.qwen4exp.cuda_rows import MetaBuffer
from kittiwake.families.qwen4exp.family import Qwen4ExpFamily
from kittiwake.families.qwen4exp.geometry import Geometry
from kittiwake.families.qwen4exp.sizes import attention_shape
from kittiwake.families.qwen4exp.state import state_spec
from kittiwake.layers.cuda_linear import exact_products
from kittiwake.ops.block_attention import triton as now
from kittiwake.ops.block_attention import triton_sizes
from kittiwake.ops.block_attention.triton import AttentionRows, make_rooms, turn_rows

DEPTHS = (0, 4096, 32768, 131072)
PAGES = 544
REPEATS = 12
BF16 = torch.bfloat16


class Layer:
    """One attention layer, a slot with every page, and a row at any depth of it."""

    def __init__(self, place: torch.device) -> None:
        self.place = place
        shape = QWEN4EXP_SHAPES["qwen4exp-4of48"]
        self.g = g = Geometry.of(Qwen4ExpFamily().read_config(RandomSource(RandomWeights(shape), "random")))
        torch.manual_seed(0)
        self.block = CudaAttention("", 0, g, BF16, place)
        for group in self.block.groups:
            group.weight.normal_(0, 0.02)
            group.picks = untuned([group], BF16)
        for norm in (self.block._norms.q, self.block._norms.k, self.block._norms.index_q, self.block._norms.index_k):
            norm.uniform_(0.6, 1.4)
        self.states = CudaStateTable(state_spec(g), 1, place, PAGES)
        self.slot = self.states.allocate()
        self.states.device_pages[self.slot] = torch.randperm(PAGES, device=place).to(torch.int32)
        for name in ("keys", "values", "index_blocks", "index_rows"):
            self.states.part(name).normal_()
        self.meta = MetaBuffer(1, place)
        self.rows = self.meta.views(Shape(True, 1, 1, 1))
        self.turns = torch.empty((1, 4, g.rotary_size // 2), device=place)
        self.rooms = Rooms(g, 1, BF16, place)
        self.attention = make_rooms(attention_shape(g), 1, PAGES * 256, BF16, place)
        self.x = self.rooms.get("mixed", 1, g.width)
        self.x.normal_()
        self._frequencies = frequencies(g).to(place)

    def go(self, depth: int) -> None:
        """The row stands behind so many tokens."""
        self.rows.owners.zero_()
        self.rows.positions.fill_(depth)
        self.rows.seen.fill_(depth)
        self.rows.slots.fill_(self.slot)
        self.rows.starts.copy_(torch.tensor([0, 1], dtype=torch.int32))
        turn_rows(self.rows.positions, self._frequencies, self.g.index_ratio, self.turns, overlap=False)
        torch.cuda.synchronize()

    def step(self, overlap: bool = True) -> torch.Tensor:
        """The layer's launches; what it leaves in ``attention.chosen`` and returns is all it makes."""
        rows = self.rows
        attention = AttentionRows(rows.owners, rows.starts, rows.slots, rows.seen, rows.positions, self.turns)
        no_experts: Any = None
        return self.block(
            Launch(self.g, rows, self.states, self.rooms, no_experts, None, (attention, self.attention), None, overlap),
            self.x,
        )

    def made(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The bits of a step's output, and the blocks that it chose."""
        self.attention.chosen.fill_(-1)
        out = self.step().clone()
        return out.view(torch.int16), self.attention.chosen.clone()


@contextmanager
def as_before() -> Iterator[None]:
    with patch.object(cuda_blocks, "block_attention", before.block_attention):
        yield


@contextmanager
def with_few_warps() -> Iterator[None]:
    with patch.object(triton_sizes, "GATHERED", 64):
        yield


@contextmanager
def with_old(name: str) -> Iterator[None]:
    """One kernel as it was, the others as they are."""
    sizes = f"{name}_sizes"
    with (
        patch.object(now, f"{name}_kernel", getattr(before, f"{name}_kernel")),
        patch.object(now, sizes, getattr(sizes_before, sizes)),
    ):
        yield


@contextmanager
def as_now() -> Iterator[None]:
    yield


VARIANTS: dict[str, Callable[[], Any]] = {
    "before": as_before,
    "now": as_now,
    "now, 8 warps select": with_few_warps,
    "now, old scores": partial(with_old, "score"),
    "now, old attend": partial(with_old, "attend"),
}


def hostile(layer: Layer, kind: str) -> None:
    """Block keys of which many are equal, or that no query is near to."""
    blocks = layer.states.part("index_blocks")
    blocks.normal_()
    if kind == "ties":
        blocks.copy_(blocks.reshape(-1, blocks.shape[-1])[torch.arange(blocks[..., 0].numel()) % 7].view_as(blocks))
    elif kind == "few above zero":
        blocks.zero_()
        blocks.view(-1, blocks.shape[-1])[::97].normal_()


def check_bits(layer: Layer, report: Report) -> None:
    for kind in ("ties", "few above zero", "random"):
        hostile(layer, kind)
        for depth in (0, 2046, 2047, 2051, 4099, 32767, 32771, 131075):
            layer.go(depth)
            found = {}
            for name in ("before", "now"):
                with VARIANTS[name]():
                    found[name] = layer.made()
            is_same = all(bool((a == b).all()) for a, b in zip(found["before"], found["now"], strict=True))
            report.check(f"{kind}, depth {depth}: the bits of before", is_same)
    report.say("bits compared")


def time_steps(layer: Layer, report: Report) -> None:
    hostile(layer, "random")
    works: dict[Any, Any] = {}
    for name, variant in VARIANTS.items():
        with variant():
            works[name] = captured([layer.step] * REPEATS), REPEATS
    for depth in DEPTHS:
        layer.go(depth)
        found = medians_us(works)
        report.put("times", str(depth), found)
        report.say(f"depth {depth}: " + ", ".join(f"{name} {us:.1f}" for name, us in found.items()) + " µs a layer")


def time_kernels(layer: Layer, report: Report) -> None:
    """With no launch beside another; the first of some runs is not counted."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    for name in ("before", "now"):
        with VARIANTS[name]():
            layer.step(overlap=False)
            for depth in DEPTHS:
                layer.go(depth)
                with recorded(activities=[ProfilerActivity.CUDA]) as events:
                    for _ in range(REPEATS):
                        layer.step(overlap=False)
                    torch.cuda.synchronize()
                took: dict[str, float] = defaultdict(float)
                for row in events.key_averages():
                    took[row.key[:24]] += row.device_time_total / REPEATS
                report.put("kernels", f"{name} {depth}", took)
                report.say(f"{name}, depth {depth}: " + ", ".join(f"{key} {us:.1f}" for key, us in took.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    report = Report(__doc__, ("bits", "times", "kernels"), arguments)
    with exact_products(), torch.no_grad():
        layer = Layer(torch.device("cuda"))
        report.say("made")
        return report.each(
            {
                "bits": partial(check_bits, layer, report),
                "times": partial(time_steps, layer, report),
                "kernels": partial(time_kernels, layer, report),
            }
        )


if __name__ == "__main__":
    sys.exit(main())
