"""Row kernels on the CPU; every row is computed by the same code whatever stands beside it."""

from __future__ import annotations

import numpy as np
from numba import get_num_threads, prange

from kittiwake.ops.cpu_math import fma, rms_row, sigmoid32, silu32, widen
from kittiwake.ops.jit import kernel

PARALLEL_VALUES = 1 << 15
"""Work (rows times columns) below which starting the threads costs more than they save."""

_TWO = np.float32(2.0)


@kernel()
def open_streams(table, token_ids, streams, x):  # type: ignore[no-untyped-def]
    """x [≥ N, S C] = S copies of table[token_ids]; table [vocab, C] float32 or bfloat16 bits."""
    width = table.shape[1]
    for i in range(token_ids.shape[0]):
        stored, row = table[token_ids[i]], x[i]
        for s in range(streams):
            for c in range(width):
                row[s * width + c] = widen(stored[c])


@kernel()
def _combine_rows(x, y, inject, inject_column, streams, first, last):  # type: ignore[no-untyped-def]
    """x[i, stream s] += y[i] * 2 sigmoid(inject[i, inject_column + s] / S), for rows first to last."""
    width = y.shape[1]
    for i in range(first, last):
        added = y[i]
        for s in range(streams):
            share = _TWO * sigmoid32(inject[i, inject_column + s] / np.float32(streams))
            stream = x[i, s * width : (s + 1) * width]
            for c in range(width):
                stream[c] = fma(added[c], share, stream[c])


@kernel()
def _norm_rows(x, weight, eps, streams, out, first, last):  # type: ignore[no-untyped-def]
    """out = RMS norm of every stream, for rows first to last."""
    width = weight.shape[0] // streams
    for i in range(first, last):
        for s in range(streams):
            at, end = s * width, (s + 1) * width
            rms_row(x[i, at:end], weight[at:end], eps, out[i, at:end])


@kernel()
def _combine_and_norm_rows(x, y, inject, inject_column, weight, eps, streams, normed, first, last):  # type: ignore[no-untyped-def]
    if y.shape[0] > 0:
        _combine_rows(x, y, inject, inject_column, streams, first, last)
    _norm_rows(x, weight, eps, streams, normed, first, last)


@kernel(parallel=True)
def _combine_and_norm_parallel(x, y, inject, inject_column, rows, weight, eps, streams, normed, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        first, last = rows * part // parts, rows * (part + 1) // parts
        _combine_and_norm_rows(x, y, inject, inject_column, weight, eps, streams, normed, first, last)


def combine_and_norm(
    x: np.ndarray,
    y: np.ndarray,
    inject: np.ndarray,
    inject_column: int,
    rows: int,
    streams: int,
    weight: np.ndarray,
    eps: np.float32,
    normed: np.ndarray,
) -> None:
    """Give a block's output to the streams, and norm them for the next one; N = ``rows``.

    x, normed float32 [≥ N, S C] are written; y [≥ N, C], or 0 rows: nothing to add; inject [≥ N, ≥ inject_column + S]
    are logits; weight [S C]. x + y * 2 sigmoid(inject / S) is x; its norm is normed.
    """
    if rows * weight.shape[0] < PARALLEL_VALUES:
        _combine_and_norm_rows(x, y, inject, inject_column, weight, eps, streams, normed, 0, rows)
    else:
        _combine_and_norm_parallel(
            x, y, inject, inject_column, rows, weight, eps, streams, normed, get_num_threads()
        )  # fmt: skip


@kernel(parallel=True)
def _combine_parallel(x, y, inject, inject_column, rows, streams, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        _combine_rows(x, y, inject, inject_column, streams, rows * part // parts, rows * (part + 1) // parts)


def combine_streams(
    x: np.ndarray, y: np.ndarray, inject: np.ndarray, inject_column: int, rows: int, streams: int
) -> None:
    """The first half of :func:`combine_and_norm` alone, with its bits."""
    if rows * streams * y.shape[1] < PARALLEL_VALUES:
        _combine_rows(x, y, inject, inject_column, streams, 0, rows)
    else:
        _combine_parallel(x, y, inject, inject_column, rows, streams, get_num_threads())


@kernel(parallel=True)
def _norm_parallel(x, rows, weight, eps, streams, out, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        _norm_rows(x, weight, eps, streams, out, rows * part // parts, rows * (part + 1) // parts)


def norm_streams(x: np.ndarray, rows: int, streams: int, weight: np.ndarray, eps: np.float32, out: np.ndarray) -> None:
    """RMS norm of every stream by itself: x float32 [≥ N, ≥ S C], weight [S C], out [≥ N, ≥ S C] (written, may be x)."""
    if rows * weight.shape[0] < PARALLEL_VALUES:
        _norm_rows(x, weight, eps, streams, out, 0, rows)
    else:
        _norm_parallel(x, rows, weight, eps, streams, out, get_num_threads())


@kernel()
def _low_rows(low, columns, streams, first, last):  # type: ignore[no-untyped-def]
    for i in range(first, last):
        row = low[i, :columns]
        for c in range(columns):
            row[c] = silu32(row[c] / np.float32(streams))


@kernel(parallel=True)
def _low_parallel(low, rows, columns, streams, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        _low_rows(low, columns, streams, rows * part // parts, rows * (part + 1) // parts)


def mix_low(low: np.ndarray, rows: int, columns: int, streams: int) -> None:
    """low[:, :columns] = silu(low / S) in place, for N = ``rows`` rows of float32 [≥ N, ≥ columns]."""
    if rows * columns < PARALLEL_VALUES:
        _low_rows(low, columns, streams, 0, rows)
    else:
        _low_parallel(low, rows, columns, streams, get_num_threads())


@kernel()
def _mix_rows(normed, gate, streams, out, first, last):  # type: ignore[no-untyped-def]
    """out = mean over streams of normed * sigmoid(gate), for rows first to last; streams added in order."""
    width = out.shape[1]
    for i in range(first, last):
        mixed = out[i]
        for s in range(streams):
            row, logits = normed[i, s * width : (s + 1) * width], gate[i, s * width : (s + 1) * width]
            if s == 0:
                for c in range(width):
                    mixed[c] = row[c] * sigmoid32(logits[c])
            else:
                for c in range(width):
                    mixed[c] = fma(row[c], sigmoid32(logits[c]), mixed[c])
        for c in range(width):
            mixed[c] = mixed[c] / np.float32(streams)


@kernel(parallel=True)
def _mix_parallel(normed, gate, rows, streams, out, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        _mix_rows(normed, gate, streams, out, rows * part // parts, rows * (part + 1) // parts)


def mix_streams(normed: np.ndarray, gate: np.ndarray, rows: int, streams: int, out: np.ndarray) -> None:
    """normed, gate (logits) float32 [≥ N, ≥ S C], out [≥ N, C] (written), N = ``rows``."""
    if rows * streams * out.shape[1] < PARALLEL_VALUES:
        _mix_rows(normed, gate, streams, out, 0, rows)
    else:
        _mix_parallel(normed, gate, rows, streams, out, get_num_threads())
