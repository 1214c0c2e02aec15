"""Short convolutions on CUDA. The readable twin is in reference.py.

    short_conv(x, weight, dilation, is_silu, owners, starts, slots, state, out, *, overlap)

No sum crosses channels and taps are added in order, so a row has the same bits in both layouts: where there are as many
rows as sequences (decoding), a program takes a sequence and does the state as well; else a program takes a few rows, and
a second launch moves the states, when all rows before the first have been read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kittiwake.ops.triton_launch import piece_options
from kittiwake.ops.triton_math import quick_sigmoid

BLOCK = 256
"""Channels of a program."""
ROWS = 8
"""Rows of a program where there are more rows than sequences."""


@triton.jit
def _conv_rows(
    x, weight, state, rows, into, slots, columns, inside, C, x_stride, TAPS: tl.constexpr, DILATION: tl.constexpr,
    IS_SILU: tl.constexpr,
):  # fmt: skip
    """Rows [R] (int64) of x, which are rows ``into`` of sequences that have their states in ``slots`` → float32 [R, BLOCK].

    inside [R, BLOCK]: what is there to be computed.
    """
    CARRIED: tl.constexpr = (TAPS - 1) * DILATION
    total = tl.zeros(inside.shape, tl.float32)
    for k in tl.static_range(TAPS):
        behind = DILATION * (TAPS - 1 - k)
        has_come = (into >= behind)[:, None]
        here = (rows - behind)[:, None] * x_stride + columns[None, :]
        row = tl.load(x + here, mask=inside & has_come, other=0.0).to(tl.float32)
        if k < TAPS - 1:
            there = (slots * CARRIED + k * DILATION + into)[:, None] * C + columns[None, :]
            row = tl.where(has_come, row, tl.load(state + there, mask=inside & (into < behind)[:, None], other=0.0))
        tap = tl.load(weight + k * C + columns, mask=columns < C, other=0.0)
        total += tap[None, :] * row
    if IS_SILU:
        total = total * quick_sigmoid(total)
    return total


@triton.jit
def _keep_rows(x, state, first, count, slot, columns, C, x_stride, CARRIED: tl.constexpr, PADDED: tl.constexpr):
    """The last CARRIED rows of a state followed by ``count`` rows of x from ``first`` on become that state."""
    kept = tl.arange(0, PADDED)
    source = (kept + count).to(tl.int64)
    is_kept = (kept < CARRIED)[:, None] & (columns < C)[None, :]
    from_state = (source < CARRIED)[:, None]
    own = state + slot * CARRIED * C
    old = tl.load(own + source[:, None] * C + columns[None, :], mask=is_kept & from_state, other=0.0)
    at = (first + source - CARRIED)[:, None] * x_stride + columns[None, :]
    new = tl.load(x + at, mask=is_kept & (source >= CARRIED)[:, None], other=0.0).to(tl.float32)
    tl.debug_barrier()  # all threads have read, the convolution before this too, before one of them writes
    tl.store(own + kept[:, None] * C + columns[None, :], tl.where(from_state, old, new), mask=is_kept)


@triton.jit(do_not_specialize=["N"])
def rows_kernel(
    x,  # [N, C]
    weight,  # float32 [TAPS, C], the last tap for the row itself
    owners,  # int32 [N], the sequence of each row, -1 for a spare one
    starts,  # int32 [B + 1]
    slots,  # int32 [B]
    state,  # float32 [S, (TAPS - 1) DILATION, C], oldest rows first
    out,  # [N, C], written but for spare rows
    N,
    C,
    x_stride,
    out_stride,
    TAPS: tl.constexpr,
    DILATION: tl.constexpr,
    IS_SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    owner = tl.load(owners + rows, mask=rows < N, other=-1)
    is_owned = owner >= 0
    into = rows - tl.load(starts + owner, mask=is_owned, other=0)
    slot = tl.load(slots + owner, mask=is_owned, other=0).to(tl.int64)
    inside = is_owned[:, None] & (columns < C)[None, :]
    total = _conv_rows(
        x, weight, state, rows, into, slot, columns, inside, C, x_stride, TAPS, DILATION, IS_SILU
    )  # fmt: skip
    spot = out + rows[:, None] * out_stride + columns[None, :]
    tl.store(spot, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def keep_kernel(
    x,
    starts,
    slots,
    state,
    C,
    x_stride,
    CARRIED: tl.constexpr,
    PADDED: tl.constexpr,  # CARRIED rounded up to a power of two
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The states after the rows of :func:`rows_kernel`."""
    b = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.load(starts + b)
    count = tl.load(starts + b + 1) - first
    if count > 0:
        slot = tl.load(slots + b).to(tl.int64)
        _keep_rows(x, state, first, count, slot, columns, C, x_stride, CARRIED, PADDED)


@triton.jit
def sequences_kernel(
    x,
    weight,
    starts,
    slots,
    state,
    out,
    C,
    x_stride,
    out_stride,
    TAPS: tl.constexpr,
    DILATION: tl.constexpr,
    IS_SILU: tl.constexpr,
    CARRIED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A sequence's rows one after another, and its state; arguments as those of :func:`rows_kernel`."""
    b = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.load(starts + b)
    last = tl.load(starts + b + 1)
    slot = tl.load(slots + b).to(tl.int64)
    one = tl.zeros((1,), tl.int64)
    inside = (one == 0)[:, None] & (columns < C)[None, :]
    for i in range(first, last):
        total = _conv_rows(
            x, weight, state, one + i, one + (i - first), one + slot, columns, inside, C, x_stride, TAPS, DILATION,
            IS_SILU,
        )  # fmt: skip
        spot = out + (one + i)[:, None] * out_stride + columns[None, :]
        tl.store(spot, total.to(out.dtype.element_ty), mask=inside)
    if first < last:
        _keep_rows(x, state, first, last - first, slot, columns, C, x_stride, CARRIED, PADDED)


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    dilation: int,
    is_silu: bool,
    owners: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor,
    *,
    overlap: bool,
) -> None:
    """x [N, C], columns of wider rows or not; weight float32 [taps, C]; out [N, C], not x, is written.

    state float32 [slots + 1, (taps - 1) dilation, C], contiguous, holds the last rows of x of every sequence, oldest
    first, and moves on. owners int32 [N], starts int32 [B + 1], slots int32 [B]: rows without an owner are not written.
    """
    rows, width = x.shape
    taps, carried, sequences = weight.shape[0], state.shape[1], slots.shape[0]
    options = piece_options(width, BLOCK, overlap)
    pieces = triton.cdiv(width, options["BLOCK"])
    conv = {"TAPS": taps, "DILATION": dilation, "IS_SILU": is_silu}
    keep = {"CARRIED": carried, "PADDED": triton.next_power_of_2(max(carried, 1))}
    if rows == sequences:
        sequences_kernel[(sequences, pieces)](
            x, weight, starts, slots, state, out, width, x.stride(0), out.stride(0), **conv, **keep, **options
        )
        return
    rows_kernel[(triton.cdiv(rows, ROWS), pieces)](
        x, weight, owners, starts, slots, state, out, rows, width, x.stride(0), out.stride(0), ROWS=ROWS, **conv, **options
    )  # fmt: skip
    if carried:
        keep_kernel[(sequences, pieces)](x, starts, slots, state, width, x.stride(0), **keep, **options)
