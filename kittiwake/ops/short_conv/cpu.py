"""Short convolutions on the CPU; every row is computed by the same code whatever stands beside it."""

from __future__ import annotations

import numpy as np
from numba import get_num_threads, prange

from kittiwake.ops.cpu_math import fma, silu32
from kittiwake.ops.jit import kernel

PARALLEL_VALUES = 1 << 15
"""Work (rows times channels) below which starting the threads costs more than they save."""
STRIP = 1024
"""Channels summed at a time: their sums stay near the core while the taps go over them."""


@kernel()
def _tap_row(x, x_column, state, i, behind, into, left, right):  # type: ignore[no-untyped-def]
    """Channels left to right of the row ``behind`` rows before row i, which is row ``into`` of its sequence."""
    if behind <= into:
        return x[i - behind, x_column + left : x_column + right]
    return state[state.shape[0] + into - behind, left:right]


@kernel()
def _strip(x, x_column, weight, dilation, is_silu, state, i, into, left, right, out):  # type: ignore[no-untyped-def]
    """out [right - left] of row i, the taps added in order from the oldest row on."""
    taps = weight.shape[0]
    for k in range(taps):
        row, tap = _tap_row(x, x_column, state, i, dilation * (taps - 1 - k), into, left, right), weight[k, left:right]
        if k == 0:
            for c in range(out.shape[0]):
                out[c] = tap[c] * row[c]
        else:
            for c in range(out.shape[0]):
                out[c] = fma(tap[c], row[c], out[c])
    if is_silu:
        for c in range(out.shape[0]):
            out[c] = silu32(out[c])


@kernel()
def _rows(x, x_column, weight, dilation, is_silu, starts, slots, owner, state, out, first, last):  # type: ignore[no-untyped-def]
    width = weight.shape[1]
    for i in range(first, last):
        b = owner[i]
        for left in range(0, width, STRIP):
            right = min(left + STRIP, width)
            _strip(
                x, x_column, weight, dilation, is_silu, state[slots[b]], i, i - starts[b], left, right,
                out[i, left:right],
            )  # fmt: skip


@kernel()
def _keep_rows(x, x_column, first, last, state):  # type: ignore[no-untyped-def]
    """state [carried, C]: what follows after ``last - first`` more rows; those kept move up in place, oldest first."""
    carried, count = state.shape[0], last - first
    for r in range(carried):
        source = r + count
        kept = state[r]
        row = state[source] if source < carried else x[first + source - carried, x_column : x_column + kept.shape[0]]
        for c in range(kept.shape[0]):
            kept[c] = row[c]


@kernel()
def _serial(x, x_column, weight, dilation, is_silu, starts, slots, owner, state, out, parts):  # type: ignore[no-untyped-def]
    _rows(x, x_column, weight, dilation, is_silu, starts, slots, owner, state, out, 0, owner.shape[0])
    for b in range(slots.shape[0]):
        _keep_rows(x, x_column, starts[b], starts[b + 1], state[slots[b]])


@kernel(parallel=True)
def _parallel(x, x_column, weight, dilation, is_silu, starts, slots, owner, state, out, parts):  # type: ignore[no-untyped-def]
    rows = owner.shape[0]
    for part in prange(parts):
        first, last = rows * part // parts, rows * (part + 1) // parts
        _rows(x, x_column, weight, dilation, is_silu, starts, slots, owner, state, out, first, last)
    for b in prange(slots.shape[0]):
        _keep_rows(x, x_column, starts[b], starts[b + 1], state[slots[b]])


def short_conv(
    x: np.ndarray,
    x_column: int,
    weight: np.ndarray,
    dilation: int,
    starts: np.ndarray,
    slots: np.ndarray,
    state: np.ndarray,
    out: np.ndarray,
    is_silu: bool = True,
) -> None:
    """Columns ``x_column`` to ``x_column + C`` of x float32 [≥ N, ...]; weight [taps, C], the last tap for the row itself.

    state [S, (taps - 1) dilation, C] (the last rows of x, oldest first) and out [≥ N, ≥ C] are written; out is not x.
    """
    owner = np.repeat(np.arange(slots.shape[0]), np.diff(starts))
    run = _serial if owner.shape[0] * weight.shape[1] < PARALLEL_VALUES else _parallel
    run(x, x_column, weight, dilation, is_silu, starts, slots, owner, state, out, get_num_threads())
