"""Products of few rows by Hopper's warpgroup instruction (wgmma_narrow.cu), for the scripts that time them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from kittiwake.layers.cuda_linear import CudaGroup
from kittiwake.ops.matmul import cuda as matmul
from kittiwake.ops.matmul.cuda import Narrow
from kittiwake.ops.nvrtc import CudaKernel


@dataclass(frozen=True)
class Wide:
    """How wgmma_narrow.cu is laid out; none of it changes a bit."""

    bn: int
    bk: int
    stages: int
    pitch: int = 144
    swaps: int = 0
    fences: int = 1

    def shared_bytes(self, rows: int) -> int:
        """Shared memory of a block, what a last tile of 64 weight rows reads beyond its own included."""
        group = self.bk // 8 * self.pitch
        return max(self.stages * (self.bn + max(rows, 8)) // 8, (self.stages - 1) * self.bn // 8 + 8) * group

    def __str__(self) -> str:
        """In a few characters."""
        more = (self.pitch != 144, self.swaps, not self.fences)
        ends = [end for end, is_so in zip(("pitch 128", "swapped", "no fences"), more, strict=True) if is_so]
        return " ".join(["wgmma", f"{self.bn}x{self.bk}x{self.stages}", *ends])


SIZES = ((8, 256, 8), (16, 256, 8), (16, 128, 8), (32, 256, 6), (32, 128, 8), (64, 128, 8), (64, 128, 6))
WIDES = tuple(Wide(*sizes) for sizes in SIZES)
OTHERS = (
    Wide(16, 256, 8),
    Wide(16, 256, 8, fences=0),
    Wide(16, 256, 8, pitch=128),
    Wide(16, 256, 8, swaps=1),
    Wide(16, 256, 8, pitch=128, swaps=1),
)
"""Should the warpgroup form give other bits: is it the descriptor? And what do its fences cost?"""


@lru_cache
def wide_kernel(layout: Wide, rows: int, out_dtype: torch.dtype) -> CudaKernel:
    """Compiled, for up to ``rows`` rows: 1, 8, 16 or 32."""
    narrow, is_wide_out = Narrow(layout.bn, 8, layout.bk, layout.stages), out_dtype == torch.float32
    given = matmul.defines(torch.float16, narrow, rows, is_wide_out=is_wide_out)
    given += (f"PITCH={layout.pitch}", f"SWAPS={layout.swaps}", f"FENCES={layout.fences}")
    text = matmul.source() + Path(__file__).with_name("wgmma_narrow.cu").read_text(encoding="utf-8")
    return CudaKernel(text, "wide_product", given, shared_bytes=layout.shared_bytes(rows), feature="a")


def wide(layout: Wide, group: CudaGroup, x: torch.Tensor, out: torch.Tensor, *, overlap: bool = True) -> None:
    """A group of products by the warpgroup instruction, as ``narrow_product`` takes them; any number of rows."""
    rows = out.shape[0]
    size = next((most for most in (1, 8, 16) if rows <= most), 32)
    strides = (x.stride(-2), x.stride(0) if x.dim() == 3 else 0, out.stride(0))
    given = (x, group.weight, out, group.lines, group._codes, rows, *strides, matmul.BEGIN_NEXT)
    grid = (group.lines.shape[0] * 32 // layout.bn, -(-rows // size), 1)
    wide_kernel(layout, size, out.dtype)(grid, 128, given, overlap=overlap)


def fitting(rows: int, most_columns: int) -> list[Wide]:
    """The layouts that an SM's shared memory holds for so many rows, of no more columns a block."""
    return [w for w in WIDES if w.bn <= most_columns and w.shared_bytes(rows) <= 227 * 1024]
