"""Hyper-connections around their products on CUDA. The readable twins are in reference.py.

A stream of a row is a program of its own where a norm is taken; the rest has no sum over channels. All arithmetic is
float32, what stands between launches is rounded to its tensor's dtype once, and contraction is off: what is added to the
streams rounds alike with and without a norm behind it.

    open_streams(token_ids, owners, slots, drawn, embedding, streams, x, *, overlap)
    combine_and_norm(x, y, inject, streams, weight, eps, normed, *, overlap)
    combine_streams(x, y, inject, streams, *, overlap)
    norm_wanted(x, want, streams, weight, eps, normed, *, overlap)
    mix_low(low, streams, *, overlap)
    mix_streams(normed, gate, streams, mixed, *, overlap)
    mean_streams(x, streams, out)

Every tensor may be columns of wider rows. ``overlap``: the launch may begin before the one in front has ended.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kittiwake.ops.triton_launch import piece_options, row_options
from kittiwake.ops.triton_math import quick_sigmoid

BLOCK = 512
"""Channels of a program where no sum is taken: it changes no bit."""


@triton.jit
def _rms_norm(x, weight, C, eps):
    """RMS norm of one stream of a row, which is zero beyond C."""
    return x * (1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / C + eps)) * weight


@triton.jit
def open_kernel(
    token_ids,  # int32 [N]; below 0: the token drawn last for the slot of the row's sequence
    owners,  # int32 [N], -1 for a spare row
    slots,  # int32 [B]
    drawn,  # int64 [S]
    embedding,  # [vocab, C]
    x,  # float32 [N, STREAMS C]
    C,
    x_stride,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    n = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.load(token_ids + n).to(tl.int64)
    if token < 0:
        # a fault of the sampler stands below 0 here too: any row will do, but none outside
        token = tl.maximum(tl.load(drawn + tl.load(slots + tl.maximum(tl.load(owners + n), 0))), 0)
    value = tl.load(embedding + token * C + columns, mask=inside, other=0.0).to(tl.float32)
    for s in tl.static_range(STREAMS):
        tl.store(x + n.to(tl.int64) * x_stride + s * C + columns, value, mask=inside)


@triton.jit
def combine_kernel(
    x,  # float32 [N, STREAMS C], added to in place
    y,  # [N, C]
    inject,  # [N, STREAMS], logits
    weight,  # float32 [STREAMS C]
    normed,  # [N, STREAMS C], written
    C,
    x_stride,
    y_stride,
    inject_stride,
    normed_stride,
    eps,
    STREAMS: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    if NORMS:
        w = tl.load(weight + s * C + columns, mask=inside, other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at = x + n * x_stride + s * C + columns
    value = tl.load(at, mask=inside, other=0.0)
    if ADDS:
        share = 2.0 * quick_sigmoid(tl.load(inject + n * inject_stride + s).to(tl.float32) / STREAMS)
        value += tl.load(y + n * y_stride + columns, mask=inside, other=0.0).to(tl.float32) * share
        tl.store(at, value, mask=inside)
    if NORMS:
        out = _rms_norm(value, w, C, eps).to(normed.dtype.element_ty)
        tl.store(normed + n * normed_stride + s * C + columns, out, mask=inside)


@triton.jit
def norm_kernel(
    x,  # float32 [N, STREAMS C]
    want,  # int32 [W], rows of x
    weight,  # float32 [STREAMS C]
    normed,  # [W, STREAMS C], written
    C,
    x_stride,
    normed_stride,
    eps,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    w = tl.load(weight + s * C + columns, mask=inside, other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(want + i).to(tl.int64)
    value = tl.load(x + row * x_stride + s * C + columns, mask=inside, other=0.0)
    out = _rms_norm(value, w, C, eps).to(normed.dtype.element_ty)
    tl.store(normed + i * normed_stride + s * C + columns, out, mask=inside)


@triton.jit
def low_kernel(
    low,  # [N, R], silu(low / STREAMS) in place
    R,
    low_stride,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < R
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at = low + n * low_stride + columns
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32) / STREAMS
    tl.store(at, (value * quick_sigmoid(value)).to(low.dtype.element_ty), mask=inside)


@triton.jit
def mix_kernel(
    normed,  # [N, STREAMS C]
    gate,  # [N, STREAMS C], logits
    mixed,  # [N, C], written: the mean over streams of normed * sigmoid(gate), or of normed
    C,
    normed_stride,
    gate_stride,
    mixed_stride,
    STREAMS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(STREAMS):
        value = tl.load(normed + n * normed_stride + s * C + columns, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            logit = tl.load(gate + n * gate_stride + s * C + columns, mask=inside, other=0.0).to(tl.float32)
            value = value * quick_sigmoid(logit)
        total += value
    tl.store(mixed + n * mixed_stride + columns, (total / STREAMS).to(mixed.dtype.element_ty), mask=inside)


def open_streams(
    token_ids: torch.Tensor,
    owners: torch.Tensor,
    slots: torch.Tensor,
    drawn: torch.Tensor,
    embedding: torch.Tensor,
    streams: int,
    x: torch.Tensor,
    *,
    overlap: bool,
) -> None:
    """token_ids, owners int32 [N], embedding [vocab, C] → x float32 [N, S C]: S copies of each token's row.

    An id below 0 stands for the token drawn last for its sequence's slot, ``drawn`` int64 [slots + 1].
    """
    options = piece_options(embedding.shape[1], BLOCK, overlap)
    open_kernel[(x.shape[0], triton.cdiv(embedding.shape[1], options["BLOCK"]))](
        token_ids, owners, slots, drawn, embedding, x, embedding.shape[1], x.stride(0), STREAMS=streams, **options
    )


def combine_and_norm(
    x: torch.Tensor,
    y: torch.Tensor | None,
    inject: torch.Tensor | None,
    streams: int,
    weight: torch.Tensor,
    eps: float,
    normed: torch.Tensor,
    *,
    overlap: bool,
) -> None:
    """Give a block's output to the streams, x += y * 2 sigmoid(inject / S), and norm every stream for the next block.

    x float32 [N, S C] (in place), y [N, C] and inject [N, S] (logits) or None: nothing is to be added; weight float32
    [S C]; normed [N, S C] is written.
    """
    width = x.shape[1] // streams
    adds = y is not None and inject is not None
    added, logits = (y, inject) if y is not None and inject is not None else (x, x)
    combine_kernel[(x.shape[0], streams)](
        x,
        added,
        logits,
        weight,
        normed,
        width,
        x.stride(0),
        added.stride(0),
        logits.stride(0),
        normed.stride(0),
        eps,
        STREAMS=streams,
        ADDS=adds,
        NORMS=True,
        **row_options(width, overlap),
    )


def combine_streams(x: torch.Tensor, y: torch.Tensor, inject: torch.Tensor, streams: int, *, overlap: bool) -> None:
    """The first half of :func:`combine_and_norm` alone, with its bits."""
    width = x.shape[1] // streams
    combine_kernel[(x.shape[0], streams)](
        x,
        y,
        inject,
        x,
        x,
        width,
        x.stride(0),
        y.stride(0),
        inject.stride(0),
        0,
        0.0,
        STREAMS=streams,
        ADDS=True,
        NORMS=False,
        **row_options(width, overlap),
    )


def norm_wanted(
    x: torch.Tensor,
    want: torch.Tensor,
    streams: int,
    weight: torch.Tensor,
    eps: float,
    normed: torch.Tensor,
    *,
    overlap: bool,
) -> None:
    """Every stream of the rows x[want] normed by itself: x float32 [N, S C], want int32 [W] → normed [W, S C]."""
    width = x.shape[1] // streams
    norm_kernel[(want.shape[0], streams)](
        x, want, weight, normed, width, x.stride(0), normed.stride(0), eps, **row_options(width, overlap)
    )


def mix_low(low: torch.Tensor, streams: int, *, overlap: bool) -> None:
    """low [N, rank] = silu(low / S), in place."""
    rank = low.shape[1]
    options = piece_options(rank, BLOCK, overlap)
    low_kernel[(low.shape[0], triton.cdiv(rank, options["BLOCK"]))](
        low, rank, low.stride(0), STREAMS=streams, **options
    )


def mix_streams(normed: torch.Tensor, gate: torch.Tensor, streams: int, mixed: torch.Tensor, *, overlap: bool) -> None:
    """normed, gate (logits) [N, S C] → mixed [N, C]: the mean over streams of normed * sigmoid(gate), added in order."""
    width = mixed.shape[1]
    options = piece_options(width, BLOCK, overlap)
    mix_kernel[(mixed.shape[0], triton.cdiv(width, options["BLOCK"]))](
        normed,
        gate,
        mixed,
        width,
        normed.stride(0),
        gate.stride(0),
        mixed.stride(0),
        STREAMS=streams,
        GATED=True,
        **options,
    )


def mean_streams(x: torch.Tensor, streams: int, out: torch.Tensor) -> None:
    """x [N, S C] → out [N, C], the mean over streams, added in order."""
    width = out.shape[1]
    options = piece_options(width, BLOCK, overlap=False)
    mix_kernel[(out.shape[0], triton.cdiv(width, options["BLOCK"]))](
        x, x, out, width, x.stride(0), 0, out.stride(0), STREAMS=streams, GATED=False, **options
    )
