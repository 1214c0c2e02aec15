"""The second half of the mix on CUDA; the first is the plain token shift's kernel, which keeps what this one reads.

Contraction is off here as there (``ops/shift_mix/triton.py``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kittiwake.ops.triton_launch import piece_options

BLOCK = 512
"""Channels of a program: no sum is taken, so it changes no bit."""


@triton.jit
def close_kernel(
    kept,  # float32 [2, N, C]: normed rows, and their differences to the rows before
    low,  # [N, MIXES C]
    mixes,  # float32 [MIXES, C]
    mixed,  # [MIXES, N, C]
    C,
    kept_stride,  # elements from normed rows to differences
    low_stride,  # from a row to the next
    mixed_stride,  # from one mix to the next
    MIXES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at = n * C + columns
    normed = tl.load(kept + at, mask=inside, other=0.0)
    gap = tl.load(kept + kept_stride.to(tl.int64) + at, mask=inside, other=0.0)
    for m in tl.static_range(MIXES):
        mix = tl.load(mixes + m * C + columns, mask=inside, other=0.0)
        mix += tl.load(low + n * low_stride + m * C + columns, mask=inside, other=0.0).to(tl.float32)
        spot = mixed + m * mixed_stride.to(tl.int64) + at
        tl.store(spot, (normed + gap * mix).to(mixed.dtype.element_ty), mask=inside)


def close_mix(
    kept: torch.Tensor, low: torch.Tensor, mixes: torch.Tensor, mixed: torch.Tensor, *, overlap: bool
) -> None:
    """mixed[m] = normed + difference * (mixes[m] + low[m]); shapes as in :func:`close_kernel`."""
    _, rows, width = kept.shape
    options = piece_options(width, BLOCK, overlap)
    close_kernel[(rows, triton.cdiv(width, options["BLOCK"]))](
        kept,
        low,
        mixes,
        mixed,
        width,
        kept.stride(0),
        low.stride(0),
        mixed.stride(0),
        MIXES=mixes.shape[0],
        **options,
    )
