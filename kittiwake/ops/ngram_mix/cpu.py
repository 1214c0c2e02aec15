"""Row kernels on the CPU; every row is computed by the same code whatever stands beside it."""

from __future__ import annotations

import numpy as np
from numba import get_num_threads, prange

from kittiwake.ops.cpu_math import fma, rms_row, row_square_sum, sigmoid32
from kittiwake.ops.jit import kernel
from kittiwake.ops.short_conv.cpu import short_conv

PARALLEL_VALUES = 1 << 15
"""Work (rows times columns) below which starting the threads costs more than they save."""
_LANES = 8
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_SMALLEST = np.float32(1e-6)


@kernel()
def _inverse_rms(x, eps):  # type: ignore[no-untyped-def]
    return _ONE / np.sqrt(row_square_sum(x, _ZERO) / np.float32(x.shape[0]) + eps)


@kernel()
def _normed_product(key, key_weight, query, query_weight, eps):  # type: ignore[no-untyped-def]
    """norm(key) . norm(query): eight interleaved chains of fused multiply-adds, then pairs."""
    key_scale, query_scale = _inverse_rms(key, eps), _inverse_rms(query, eps)
    sums = np.zeros(_LANES, np.float32)
    full = key.shape[0] - key.shape[0] % _LANES
    for first in range(0, full, _LANES):
        for lane in range(_LANES):
            c = first + lane
            left = key[c] * key_scale * key_weight[c]
            sums[lane] = fma(left, query[c] * query_scale * query_weight[c], sums[lane])
    for c in range(full, key.shape[0]):
        sums[0] = fma(key[c] * key_scale * key_weight[c], query[c] * query_scale * query_weight[c], sums[0])
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))


@kernel()
def _share(d):  # type: ignore[no-untyped-def]
    """sigmoid(sign(d) sqrt(max(|d|, 1e-6))); one half where d is 0."""
    if d == _ZERO:
        return sigmoid32(_ZERO)
    root = np.sqrt(max(abs(d), _SMALLEST))
    return sigmoid32(root if d > _ZERO else -root)


@kernel()
def _gate_rows(x, kv, streams, norm_key, norm_query, norm_conv, eps, gated, normed, first, last):  # type: ignore[no-untyped-def]
    """gated and normed of rows first to last."""
    columns = norm_key.shape[0]
    width = columns // streams
    root = np.sqrt(np.float32(width))
    for i in range(first, last):
        value = kv[i, columns : columns + width]
        for s in range(streams):
            at, end = s * width, (s + 1) * width
            d = _normed_product(kv[i, at:end], norm_key[at:end], x[i, at:end], norm_query[at:end], eps) / root
            share = _share(d)
            row = gated[i, at:end]
            for c in range(width):
                row[c] = share * value[c]
            rms_row(row, norm_conv[at:end], eps, normed[i, at:end])


@kernel()
def _add_rows(x, gated, mixed, first, last):  # type: ignore[no-untyped-def]
    """x += gated + mixed, for rows first to last."""
    for i in range(first, last):
        row, added, more = x[i], gated[i], mixed[i]
        for c in range(row.shape[0]):
            row[c] += added[c] + more[c]


@kernel()
def _gate_serial(x, kv, rows, streams, norm_key, norm_query, norm_conv, eps, gated, normed, parts):  # type: ignore[no-untyped-def]
    _gate_rows(x, kv, streams, norm_key, norm_query, norm_conv, eps, gated, normed, 0, rows)


@kernel(parallel=True)
def _gate_parallel(x, kv, rows, streams, norm_key, norm_query, norm_conv, eps, gated, normed, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        first, last = rows * part // parts, rows * (part + 1) // parts
        _gate_rows(x, kv, streams, norm_key, norm_query, norm_conv, eps, gated, normed, first, last)


@kernel()
def _add_serial(x, gated, mixed, rows, parts):  # type: ignore[no-untyped-def]
    _add_rows(x, gated, mixed, 0, rows)


@kernel(parallel=True)
def _add_parallel(x, gated, mixed, rows, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        _add_rows(x, gated, mixed, rows * part // parts, rows * (part + 1) // parts)


def ngram_mix(
    x: np.ndarray,
    kv: np.ndarray,
    streams: int,
    norm_key: np.ndarray,
    norm_query: np.ndarray,
    norm_conv: np.ndarray,
    conv_weight: np.ndarray,
    dilation: int,
    eps: np.float32,
    starts: np.ndarray,
    slots: np.ndarray,
    state: np.ndarray,
    gated: np.ndarray,
    normed: np.ndarray,
) -> None:
    """x float32 [≥ N, M C] and state [S, (taps - 1) dilation, M C] are updated, kv [≥ N, M C + C] is used up.

    M = ``streams``; norms [M C]; conv_weight [taps, M C], the last tap for the row itself; state holds the rows norm(g)
    before, oldest first; gated and normed [≥ N, M C] are scratch. Rows beyond N are not touched.
    """
    rows = int(starts[-1])
    is_small, parts = rows * x.shape[1] < PARALLEL_VALUES, get_num_threads()
    gate = _gate_serial if is_small else _gate_parallel
    gate(x, kv, rows, streams, norm_key, norm_query, norm_conv, eps, gated, normed, parts)
    short_conv(normed, 0, conv_weight, dilation, starts, slots, state, kv)  # the keys are not needed any more
    add = _add_serial if is_small else _add_parallel
    add(x, gated, kv, rows, parts)
