"""Products of few rows on CUDA, and activations in place: the kernels of narrow.cu."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from kittiwake.ops.nvrtc import DTYPE_CODES, CudaKernel, read_sources

ACTIVATIONS = {"none": 0, "tanh": 1, "sigmoid": 2, "relu2": 3}
ROW_CLASSES = (1, 8, 16, 32, 64)
"""Row counts that the narrow product is compiled for; it serves up to the last."""
MOST_ROWS = ROW_CLASSES[-1]


@dataclass(frozen=True)
class Narrow:
    """How a narrow product is laid out; none of it changes a bit."""

    bn: int = 16
    wn: int = 8
    bk: int = 256
    stages: int = 4
    rows: int = MOST_ROWS
    """Most rows of a block, one of ROW_CLASSES: with few columns, more blocks share the rows, each with all of its weights."""
    begin_next: int = 1
    """When it lets the next kernel begin: 0 when it has ended, 1 at once, 2 when its sums are done, 3 when its inputs
    have been asked for."""

    def size_for(self, rows: int) -> int:
        """Rows of a block, where there are so many in all."""
        return next((most for most in ROW_CLASSES if min(rows, self.rows) <= most), MOST_ROWS)

    def shared_bytes(self, rows: int) -> int:
        """Shared memory of a block for ``rows`` rows."""
        return self.stages * (self.bn + rows) * (self.bk + 8) * 2


def source() -> str:
    """The CUDA C++ text."""
    return read_sources("base.cu", "matmul/narrow.cu")


def defines(dtype: torch.dtype, config: Narrow, rows: int, *, is_wide_out: bool) -> tuple[str, ...]:
    """What the source is compiled with."""
    return (
        f"DT={DTYPE_CODES[dtype]}",
        f"BN={config.bn}",
        f"BK={config.bk}",
        f"STAGES={config.stages}",
        f"WN={config.wn}",
        f"ROWS={rows}",
        f"OUT32={int(is_wide_out)}",
        f"BEGIN_NEXT={config.begin_next}",
    )


@lru_cache(maxsize=256)
def _product(dtype: torch.dtype, config: Narrow, rows: int, is_wide_out: bool) -> CudaKernel:
    given = defines(dtype, config, rows, is_wide_out=is_wide_out)
    return CudaKernel(source(), "product", given, shared_bytes=config.shared_bytes(rows))


@lru_cache(maxsize=4)
def _activate(dtype: torch.dtype) -> CudaKernel:
    return CudaKernel(source(), "activate", defines(dtype, Narrow(), 8, is_wide_out=False))


def narrow_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    lines: torch.Tensor,
    activations: torch.Tensor,
    config: Narrow,
    *,
    overlap: bool,
) -> None:
    """x [inputs, M, *] or [M, *] → out [M, *]; weights and their table as ``ops/matmul/triton.py`` describes them."""
    rows = out.shape[0]
    size = config.size_for(rows)
    kernel = _product(x.dtype, config, size, out.dtype == torch.float32)
    grid = (lines.shape[0] * 32 // config.bn, -(-rows // size), 1)
    group = x.stride(0) if x.dim() == 3 else 0
    given = (x, weight, out, lines, activations, rows, x.stride(-2), group, out.stride(0))
    kernel(grid, config.bn // config.wn * 32, given, overlap=overlap)


def activate(out: torch.Tensor, column: int, columns: int, activation: str) -> None:
    """Apply an activation to some columns of a product [M, *], in place, as the fused one would."""
    part = out[:, column : column + columns]
    kernel = _activate(out.dtype)
    kernel((out.shape[0], -(-columns // 2048), 1), 256, (part, columns, out.stride(0), ACTIVATIONS[activation]))
