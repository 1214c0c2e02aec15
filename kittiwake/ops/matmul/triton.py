"""Products with weights on CUDA that walk K in order, for any number of rows; grouped, so that one launch serves many.

A group's weights lie in one flat tensor, cut into tiles of BN output columns. A table with one line a tile says where its
input begins, where its weights and where its output goes. The sum over K runs in order in float32,
``tl.dot`` by ``tl.dot``, so tile shapes, row counts and the library's products without split-K give the same bits
(measured; ``layers/cuda_probe.py`` proves it again on every card).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kittiwake.ops.triton_math import sigmoid

TILE = 32
"""Output columns that every segment of a group is padded to: BN divides or equals it, or a multiple of it."""


BEGIN_NEXT = 0
"""When a launch that overlaps lets the next kernel begin: 0 when it has ended, 1 at once, 2 when its sums are done."""


@dataclass(frozen=True)
class Config:
    """How one product is launched; none of it changes a bit."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


@triton.jit
def _activated(x, activation, SATURATES: tl.constexpr):
    """As ``activated`` in narrow.cu, with the same functions of CUDA's library, so to the same bits."""
    if activation == 1:
        # the tangent of a subnormal number is that number; the two compilers treat them differently
        x = tl.where(tl.abs(x) < 1.1754943508222875e-38, x, libdevice.tanh(x))
    elif activation == 2:
        x = sigmoid(x)
    elif activation == 3:
        x = tl.where(x <= 0.0, 0.0, x)
        x = x * x
        if SATURATES:
            x = tl.where(x > 65504.0, 65504.0, x)
    return x


@triton.jit(do_not_specialize=["M"])
def rows_kernel(
    x,  # [*, M, x_stride] elements, input i of a group x_group elements on
    w,  # flat
    y,  # [M, y_stride]
    tiles,  # int64 [tiles, 6]: input, first column of x, first element of w, depth, first column of y, columns
    activations,  # int32 [tiles]
    M,
    x_stride,
    x_group,
    y_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,  # every depth is a multiple of BK
    ALIGN: tl.constexpr,  # every first element of an input or of weights is a multiple of this
    PADDED: tl.constexpr,  # depths in w are rounded up to this
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr = 0,  # BEGIN_NEXT
):
    tile = tl.program_id(0)
    line = tiles + (tile * BN // 32) * 6  # the table has a line for each 32 columns
    depth = tl.load(line + 3).to(tl.int32)
    w_stride = (depth + PADDED - 1) // PADDED * PADDED
    inner = tile * BN % 32 if BN < 32 else 0
    columns = tl.load(line + 5).to(tl.int32) - inner
    rn = tl.arange(0, BN)
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    rk = tl.arange(0, BK)
    w_first = w + tl.multiple_of(tl.load(line + 2), ALIGN)
    w_tile = w_first + (inner + rn)[None, :].to(tl.int64) * w_stride
    if OVERLAP:
        if EARLY == 1:
            gdc_launch_dependents()
        gdc_wait()
    x_first = tl.load(line) * x_group + tl.multiple_of(tl.load(line + 1), ALIGN)
    x_tile = x + x_first + rm[:, None].to(tl.int64) * x_stride
    rows = rm[:, None] < M
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, depth, BK):
        at = k + rk
        if EVEN:
            a = tl.load(x_tile + at[None, :], mask=rows, other=0.0)
            b = tl.load(w_tile + at[:, None])
        else:
            a = tl.load(x_tile + at[None, :], mask=rows & (at < depth)[None, :], other=0.0)
            b = tl.load(w_tile + at[:, None], mask=(at < depth)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if EARLY == 2:
        gdc_launch_dependents()
    activation = tl.load(activations + tile * BN // 32)
    if activation != 0:
        SATURATES: tl.constexpr = x.dtype.element_ty == tl.float16
        acc = _activated(acc.to(x.dtype.element_ty).to(tl.float32), activation, SATURATES)
    first = tl.load(line + 4).to(tl.int32) + inner
    at = y + rm[:, None].to(tl.int64) * y_stride + (first + rn)[None, :]
    tl.store(at, acc.to(y.dtype.element_ty), mask=rows & (rn < columns)[None, :])
