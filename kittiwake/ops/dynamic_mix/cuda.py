"""The second half of the mix for few rows on CUDA, with its low-rank products inside: the kernel of dynamic_mix.cu."""

from __future__ import annotations

from functools import lru_cache

import torch

from kittiwake.ops.nvrtc import DTYPE_CODES, CudaKernel, read_sources

LOW_ROWS = 64
"""Rows up to which the mix makes its low-rank products itself."""
BEGIN_NEXT_ROWS = 4
"""Rows up to which the next kernel may begin at once, and not when this one has ended."""
_WARPS = 2
"""Of a block: 8 channels each."""
_MOST_TILES = 16
"""Blocks that share the rows of the same channels; each walks them ROWS at a time."""
_MOST_RANK = 64
"""A lane holds its share of the weights and inputs of all mixes in registers."""


def source() -> str:
    """The CUDA C++ text."""
    return read_sources("base.cu", "dynamic_mix/dynamic_mix.cu")


def defines(dtype: torch.dtype, mixes: int, rank: int, tile: int) -> tuple[str, ...]:
    """What the source is compiled with; ``tile``: rows of a matrix instruction that are used, 8 or 16."""
    return (f"DT={DTYPE_CODES[dtype]}", f"MIXES={mixes}", f"RANK={rank}", f"ROWS={tile}", f"WARPS={_WARPS}")


@lru_cache(maxsize=16)
def _close_low(dtype: torch.dtype, mixes: int, rank: int, tile: int) -> CudaKernel:
    return CudaKernel(source(), "close_low", defines(dtype, mixes, rank, tile))


def can_take_low(dtype: torch.dtype, width: int, rank: int, rows: int) -> bool:
    """Whether :func:`close_mix_low` serves: few rows of 16 bits, and sizes that its loads can walk."""
    return (
        rows <= LOW_ROWS
        and dtype in (torch.float16, torch.bfloat16)
        and width % 8 == 0
        and rank % 8 == 0
        and rank <= _MOST_RANK
    )


def close_mix_low(
    kept: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    mixes: torch.Tensor,
    mixed: torch.Tensor,
    *,
    overlap: bool,
) -> None:
    """mixed[m] = normed + difference * (mixes[m] + low[m]) with low[m] the product of ``down`` [N, M rank] and ``up``.

    ``up`` holds M times [≥ C, rank rounded up to 16], as :class:`kittiwake.layers.cuda_linear.CudaGroup` keeps them; the
    others are as in :func:`kittiwake.ops.dynamic_mix.triton.close_kernel`. The bits are those of the two launches.
    """
    (count, width), (_, rows, _) = mixes.shape, kept.shape
    tile = 8 if rows <= 8 else 16
    kernel = _close_low(mixed.dtype, count, down.shape[1] // count, tile)
    grid = (-(-width // (8 * _WARPS)), min(-(-rows // tile), _MOST_TILES), 1)
    strides = (kept.stride(0), down.stride(0), up.numel() // count, mixed.stride(0))
    given = (kept, down, up, mixes, mixed, rows, width, *strides, int(rows <= BEGIN_NEXT_ROWS))
    kernel(grid, _WARPS * 32, given, overlap=overlap)
