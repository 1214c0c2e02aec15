"""The n-gram layer's mix on CUDA: gates of every row and stream, then convolution and addition, then the states.

The gated values g and their norms are not kept: both are the token's value times two numbers a row and stream, which are, and
whoever needs them multiplies again. Contraction is off (``enable_fp_fusion=False``), so that they are the same each time: a row
norm(g) enters the convolution of later rows from the same launch, or from the state after a cut.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kittiwake.ops.triton_launch import piece_options, row_options
from kittiwake.ops.triton_math import sigmoid

BLOCK = 512
"""Channels of a program of the convolution: no sum over channels is taken there, so it changes no bit."""
SMALLEST = 1e-6
"""The least |d| that the square root is taken of."""


@triton.jit
def gate_kernel(
    x,  # float32 [N, x_stride]
    kv,  # [N, kv_stride]: keys [M C], value [C]
    norm_key,  # float32 [M C]
    norm_query,
    owners,  # int32 [N], -1 for a spare row
    scales,  # float32 [N, M, 2]: what the value is multiplied by for g, and g for its norm
    C,
    x_stride,
    kv_stride,
    root,  # of C
    eps,
    SMALLEST: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least C
    OVERLAP: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    at = s * C + columns
    key_weight = tl.load(norm_key + at, mask=inside, other=0.0)
    query_weight = tl.load(norm_query + at, mask=inside, other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    if tl.load(owners + n) >= 0:
        key = tl.load(kv + n * kv_stride + at, mask=inside, other=0.0).to(tl.float32)
        query = tl.load(x + n * x_stride + at, mask=inside, other=0.0)
        value = tl.load(kv + n * kv_stride + STREAMS * C + columns, mask=inside, other=0.0).to(tl.float32)
        key = key * (1.0 / tl.sqrt_rn(tl.sum(key * key, 0) / C + eps)) * key_weight
        query = query * (1.0 / tl.sqrt_rn(tl.sum(query * query, 0) / C + eps)) * query_weight
        d = tl.div_rn(tl.sum(key * query, 0), root)
        gate = tl.sqrt_rn(tl.maximum(tl.abs(d), SMALLEST))
        gate = tl.where(d < 0.0, -gate, gate)
        share = sigmoid(tl.where(d == 0.0, 0.0, gate))
        gated = share * value
        to = scales + (n * STREAMS + s) * 2
        tl.store(to, share)
        tl.store(to + 1, 1.0 / tl.sqrt_rn(tl.sum(gated * gated, 0) / C + eps))


@triton.jit
def _gated(kv, scales, n, s, columns, inside, C, kv_stride, STREAMS: tl.constexpr):
    """g and its scale, of one row and stream."""
    value = tl.load(kv + n * kv_stride + STREAMS * C + columns, mask=inside, other=0.0).to(tl.float32)
    at = scales + (n * STREAMS + s) * 2
    return tl.load(at) * value, tl.load(at + 1)


@triton.jit
def conv_kernel(
    x,  # float32 [N, x_stride], added to
    kv,  # [N, kv_stride]
    scales,  # float32 [N, M, 2]
    norm_conv,  # float32 [M C]
    weight,  # float32 [TAPS, M C], the last tap for the row itself
    owners,
    starts,  # int32 [B + 1]
    slots,  # int32 [B]
    state,  # float32 [S, (TAPS - 1) dilation, M C], the rows norm(g) before, oldest first
    C,
    dilation,
    x_stride,
    kv_stride,
    STREAMS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    n = tl.program_id(0)
    parts = tl.cdiv(C, BLOCK)
    s = tl.program_id(1) // parts
    columns = tl.program_id(1) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    at = s * C + columns
    norm = tl.load(norm_conv + at, mask=inside, other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    owner = tl.load(owners + n)
    if owner >= 0:
        first = tl.load(starts + owner)
        carried = (TAPS - 1) * dilation
        before = state + tl.load(slots + owner).to(tl.int64) * carried * STREAMS * C
        mixed = tl.zeros((BLOCK,), tl.float32)
        for tap in tl.static_range(TAPS):
            row = n - (TAPS - 1 - tap) * dilation
            is_here = inside & (row >= first)
            there = tl.maximum(row, first).to(tl.int64)
            gated, scale = _gated(kv, scales, there, s, columns, is_here, C, kv_stride, STREAMS)
            kept = (carried + tl.minimum(row - first, -1)).to(tl.int64)
            old = tl.load(before + kept * STREAMS * C + at, mask=inside & (row < first), other=0.0)
            seen = tl.where(row >= first, gated * scale * norm, old)
            mixed += tl.load(weight + tap * STREAMS * C + at, mask=inside, other=0.0) * seen
        here = x + n.to(tl.int64) * x_stride + at
        gated, scale = _gated(kv, scales, n.to(tl.int64), s, columns, inside, C, kv_stride, STREAMS)
        added = gated + mixed * sigmoid(mixed)
        tl.store(here, tl.load(here, mask=inside, other=0.0) + added, mask=inside)


@triton.jit
def state_kernel(
    kv,
    scales,
    norm_conv,
    starts,
    slots,
    state,
    C,
    dilation,
    kv_stride,
    STREAMS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The last rows of each sequence; older ones move up, each read before it is written over."""
    b = tl.program_id(0)
    parts = tl.cdiv(C, BLOCK)
    s = tl.program_id(1) // parts
    columns = tl.program_id(1) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    at = s * C + columns
    norm = tl.load(norm_conv + at, mask=inside, other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.load(starts + b)
    end = tl.load(starts + b + 1)
    if end > first:
        carried = (TAPS - 1) * dilation
        kept = state + tl.load(slots + b).to(tl.int64) * carried * STREAMS * C
        for place in range(carried):
            row = end - carried + place
            if row >= first:
                gated, scale = _gated(kv, scales, row.to(tl.int64), s, columns, inside, C, kv_stride, STREAMS)
                value = gated * scale * norm
            else:
                value = tl.load(kept + (place + end - first) * STREAMS * C + at, mask=inside, other=0.0)
            tl.store(kept + place * STREAMS * C + at, value, mask=inside)


def ngram_mix(
    x: torch.Tensor,
    kv: torch.Tensor,
    streams: int,
    norm_key: torch.Tensor,
    norm_query: torch.Tensor,
    norm_conv: torch.Tensor,
    conv_weight: torch.Tensor,
    dilation: int,
    eps: float,
    owners: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    state: torch.Tensor,
    scales: torch.Tensor,
    *,
    overlap: bool,
) -> None:
    """x float32 [N, M C] and state float32 [S, (taps - 1) dilation, M C] are updated; kv [N, M C + C] of any float type.

    M = ``streams``; norms float32 [M C], as multiplied; conv_weight float32 [taps, M C], the last tap for the row itself; state
    holds the rows norm(g) before, oldest first. owners int32 [N], starts int32 [B + 1], slots int32 [B]: spare rows have owner
    -1 and are not touched, sequences without rows leave their state as it is. scales float32 [N, 2 M] is scratch.
    """
    rows, columns = x.shape
    width, taps = columns // streams, conv_weight.shape[0]
    gate_kernel[(rows, streams)](
        x,
        kv,
        norm_key,
        norm_query,
        owners,
        scales,
        width,
        x.stride(0),
        kv.stride(0),
        math.sqrt(width),
        eps,
        STREAMS=streams,
        SMALLEST=SMALLEST,
        **row_options(width, overlap),
    )
    sizes = piece_options(width, BLOCK, overlap) | {"STREAMS": streams, "TAPS": taps}
    parts = streams * triton.cdiv(width, sizes["BLOCK"])
    conv_kernel[(rows, parts)](
        x,
        kv,
        scales,
        norm_conv,
        conv_weight,
        owners,
        starts,
        slots,
        state,
        width,
        dilation,
        x.stride(0),
        kv.stride(0),
        **sizes,
    )
    state_kernel[(len(slots), parts)](
        kv, scales, norm_conv, starts, slots, state, width, dilation, kv.stride(0), **sizes
    )
