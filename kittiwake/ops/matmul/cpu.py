"""Narrow products on the CPU: several weights in one launch, every thread a share of the columns.

A *group* is a set of products whose inputs lie in one float32 buffer ``x`` [R, columns] and whose outputs go to one
buffer ``y`` [R, columns]. Its table has a row a product, see :data:`TABLE_COLUMNS`. Weights lie in one flat array, each
[K, N] row-major, as float32 or as the bits of bfloat16 (uint16).
"""

from __future__ import annotations

import numpy as np
from numba import prange

from kittiwake.ops.cpu_math import fma, prefetch, sigmoid32, tanh32, widen
from kittiwake.ops.jit import kernel

TABLE_COLUMNS = ("x_column", "depth", "columns", "weight_offset", "y_column", "k_block", "activation")
"""int64 table of a group: where its input starts, K, N, where its weight starts, where its output starts, ..."""

ACTIVATIONS = ("none", "tanh", "sigmoid", "relu2")
"""Elementwise functions applied to a finished product, by their number in the table."""

STRIP = 512
"""Columns a thread sums at a time: the accumulators of many rows stay near the core."""
WIDE_STRIP = 2048
"""The same for a few rows: longer runs of consecutive weights read faster."""
_UNROLL = 8
_PREFETCH_ROWS = 4  # with more rows the arithmetic hides the wait
_ZERO = np.float32(0.0)


@kernel()
def activate(values: np.ndarray, activation: int) -> None:
    """Apply an activation to a float32 vector in place."""
    if activation == 1:
        for n in range(values.shape[0]):
            values[n] = tanh32(values[n])
    elif activation == 2:
        for n in range(values.shape[0]):
            values[n] = sigmoid32(values[n])
    elif activation == 3:
        for n in range(values.shape[0]):
            positive = max(values[n], _ZERO)
            values[n] = positive * positive


@kernel()
def _add_eight(acc, x, w0, w1, w2, w3, w4, w5, w6, w7):  # type: ignore[no-untyped-def]
    """acc[n] += x[0] w0[n], then x[1] w1[n], … in order."""
    a, b, c, d, e, f, g, h = x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]
    for n in range(acc.shape[0]):
        s = fma(a, widen(w0[n]), acc[n])
        s = fma(b, widen(w1[n]), s)
        s = fma(c, widen(w2[n]), s)
        s = fma(d, widen(w3[n]), s)
        s = fma(e, widen(w4[n]), s)
        s = fma(f, widen(w5[n]), s)
        s = fma(g, widen(w6[n]), s)
        acc[n] = fma(h, widen(w7[n]), s)


@kernel()
def _add_eight_two_rows(acc, other, x, z, w0, w1, w2, w3, w4, w5, w6, w7):  # type: ignore[no-untyped-def]
    """:func:`_add_eight` for two rows at once, so that a loaded weight serves both."""
    a, b, c, d, e, f, g, h = x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]
    i, j, k, l, m, o, p, q = z[0], z[1], z[2], z[3], z[4], z[5], z[6], z[7]  # noqa: E741
    for n in range(acc.shape[0]):
        w = widen(w0[n])
        s = fma(a, w, acc[n])
        t = fma(i, w, other[n])
        w = widen(w1[n])
        s = fma(b, w, s)
        t = fma(j, w, t)
        w = widen(w2[n])
        s = fma(c, w, s)
        t = fma(k, w, t)
        w = widen(w3[n])
        s = fma(d, w, s)
        t = fma(l, w, t)
        w = widen(w4[n])
        s = fma(e, w, s)
        t = fma(m, w, t)
        w = widen(w5[n])
        s = fma(f, w, s)
        t = fma(o, w, t)
        w = widen(w6[n])
        s = fma(g, w, s)
        t = fma(p, w, t)
        w = widen(w7[n])
        acc[n] = fma(h, w, s)
        other[n] = fma(q, w, t)


@kernel()
def _prefetch_row(weights):  # type: ignore[no-untyped-def]
    """Ask for a run of weights ahead of its use: the hardware loses track of eight short runs side by side."""
    for n in range(0, weights.shape[0], 64 // weights.itemsize):
        prefetch(weights, n)


@kernel()
def _sum_block(x, weight, acc, x_column, first, last, left, right):  # type: ignore[no-untyped-def]
    """acc [R, n] = x[:, x_column + first : x_column + last] times weight[first:last, left:right]."""
    rows = acc.shape[0]
    for r in range(rows):
        for n in range(acc.shape[1]):
            acc[r, n] = _ZERO
    k = first
    while k + _UNROLL <= last:
        # slices of rows, not rows of a slice: Numba must see that they are contiguous to vectorise
        w0, w1 = weight[k, left:right], weight[k + 1, left:right]
        w2, w3 = weight[k + 2, left:right], weight[k + 3, left:right]
        w4, w5 = weight[k + 4, left:right], weight[k + 5, left:right]
        w6, w7 = weight[k + 6, left:right], weight[k + 7, left:right]
        if rows <= _PREFETCH_ROWS and k + 2 * _UNROLL <= weight.shape[0]:
            for ahead in range(k + _UNROLL, k + 2 * _UNROLL):
                _prefetch_row(weight[ahead, left:right])
        at = x_column + k
        r = 0
        while r + 2 <= rows:
            _add_eight_two_rows(
                acc[r], acc[r + 1], x[r, at : at + 8], x[r + 1, at : at + 8], w0, w1, w2, w3, w4, w5, w6, w7
            )
            r += 2
        if r < rows:
            _add_eight(acc[r], x[r, at : at + 8], w0, w1, w2, w3, w4, w5, w6, w7)
        k += _UNROLL
    while k < last:
        for r in range(rows):
            value = x[r, x_column + k]
            for n in range(acc.shape[1]):
                acc[r, n] = fma(value, widen(weight[k, left + n]), acc[r, n])
        k += 1


@kernel()
def product_strip(x, rows, weight, y, x_column, y_column, k_block, activation, left, right):  # type: ignore[no-untyped-def]
    """One strip of columns of one product, all rows: weight [K, left:right] → y[:, y_column + left : y_column + right]."""
    depth = weight.shape[0]
    columns = right - left
    y_column += left
    acc = np.empty((rows, columns), np.float32)
    for first in range(0, depth, k_block):
        _sum_block(x, weight, acc, x_column, first, min(first + k_block, depth), left, right)
        for r in range(rows):
            out = y[r, y_column : y_column + columns]
            if first == 0:
                for n in range(columns):
                    out[n] = acc[r, n]
            else:
                for n in range(columns):
                    out[n] += acc[r, n]
    if activation != 0:
        for r in range(rows):
            activate(y[r, y_column : y_column + columns], activation)


@kernel(parallel=True)
def group_product(x, rows, weights, table, shares, y, strip):  # type: ignore[no-untyped-def]
    """All products of a group: x float32 [≥ rows, X], weights flat, table int64 [P, 7], y float32 [≥ rows, Y].

    ``shares`` int64 [S, 4] rows (thread, product, first column, last column), in thread order; the bits of an output do
    not depend on how columns are shared out.
    """
    threads = shares[shares.shape[0] - 1, 0] + 1
    for thread in prange(threads):
        for share in range(shares.shape[0]):
            if shares[share, 0] == thread:
                row = table[shares[share, 1]]
                depth, columns = row[1], row[2]
                weight = weights[row[3] : row[3] + depth * columns].reshape((depth, columns))
                left = shares[share, 2]
                while left < shares[share, 3]:
                    right = min(left + strip, shares[share, 3])
                    product_strip(x, rows, weight, y, row[0], row[4], row[5], row[6], left, right)
                    left = right


@kernel(parallel=True)
def activate_columns(y, rows, first, last, activation):  # type: ignore[no-untyped-def]
    """Apply an activation to y[:rows, first:last] in place, the elementwise code of the narrow kernel."""
    for r in prange(rows):
        activate(y[r, first:last], activation)
