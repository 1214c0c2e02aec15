"""Row kernels on the CPU; every row is computed by the same code whatever stands beside it."""

from __future__ import annotations

import numpy as np
from numba import get_num_threads, prange

from kittiwake.ops.cpu_math import fma, norm_row, widen
from kittiwake.ops.jit import kernel

PARALLEL_VALUES = 1 << 15
"""Work (rows times columns) below which starting the threads costs more than they save."""


@kernel()
def embed_rows(table, token_ids, weight, bias, eps, x):  # type: ignore[no-untyped-def]
    """x [≥ N, C] = layer norm of table[token_ids]; table [vocab, C] float32 or bfloat16 bits."""
    row = np.empty(table.shape[1], np.float32)
    for i in range(token_ids.shape[0]):
        stored = table[token_ids[i]]
        for c in range(row.shape[0]):
            row[c] = widen(stored[c])
        norm_row(row, weight, bias, eps, x[i])


@kernel()
def add_and_norm_rows(x, y, weight, bias, eps, normed, first, last):  # type: ignore[no-untyped-def]
    """x += y (when y has rows), normed = layer norm of x, for rows first to last."""
    for i in range(first, last):
        row = x[i]
        if y.shape[0] > 0:
            added = y[i]
            for c in range(row.shape[0]):
                row[c] += added[c]
        norm_row(row, weight, bias, eps, normed[i])


@kernel()
def _mix_rows(normed, starts, slots, owner, shift, mix, out, first, last):  # type: ignore[no-untyped-def]
    """out[i, m C : (m + 1) C] = normed[i] + (before - normed[i]) * mix[m], for rows first to last."""
    width = normed.shape[1]
    for i in range(first, last):
        b = owner[i]
        row = normed[i]
        before = shift[slots[b]] if i == starts[b] else normed[i - 1]
        for m in range(mix.shape[0]):
            weight = mix[m]
            mixed = out[i, m * width : (m + 1) * width]
            for c in range(width):
                mixed[c] = fma(before[c] - row[c], weight[c], row[c])


@kernel()
def keep_last_rows(normed, starts, slots, shift):  # type: ignore[no-untyped-def]
    """shift[slot] = the normed last row of each sequence."""
    for b in range(slots.shape[0]):
        last, kept = normed[starts[b + 1] - 1], shift[slots[b]]
        for c in range(kept.shape[0]):  # Numba compiles a loop far sooner than an assignment of arrays
            kept[c] = last[c]


@kernel()
def _serial(x, y, weight, bias, eps, starts, slots, owner, shift, mix, normed, out, parts):  # type: ignore[no-untyped-def]
    rows = owner.shape[0]
    add_and_norm_rows(x, y, weight, bias, eps, normed, 0, rows)
    _mix_rows(normed, starts, slots, owner, shift, mix, out, 0, rows)
    keep_last_rows(normed, starts, slots, shift)


@kernel(parallel=True)
def _parallel(x, y, weight, bias, eps, starts, slots, owner, shift, mix, normed, out, parts):  # type: ignore[no-untyped-def]
    rows = owner.shape[0]
    for part in prange(parts):
        add_and_norm_rows(x, y, weight, bias, eps, normed, rows * part // parts, rows * (part + 1) // parts)
    for part in prange(parts):
        _mix_rows(normed, starts, slots, owner, shift, mix, out, rows * part // parts, rows * (part + 1) // parts)
    keep_last_rows(normed, starts, slots, shift)


def shift_mix(
    x: np.ndarray,
    y: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    eps: np.float32,
    starts: np.ndarray,
    slots: np.ndarray,
    owner: np.ndarray,
    shift: np.ndarray,
    mix: np.ndarray,
    normed: np.ndarray,
    out: np.ndarray,
) -> None:
    """x, y, normed float32 [≥ N, C] (y may have 0 rows), shift [S, C], mix [M, C], out [≥ N, M C], owner int64 [N].

    x, shift, normed and out are written; ``owner[i]`` is the sequence of row i.
    """
    small = owner.shape[0] * out.shape[1] < PARALLEL_VALUES
    run = _serial if small else _parallel
    run(x, y, weight, bias, eps, starts, slots, owner, shift, mix, normed, out, get_num_threads())


@kernel()
def norm_rows(x, rows, weight, bias, eps):  # type: ignore[no-untyped-def]
    """Layer norm of x[:rows] [N, C] in place."""
    for i in range(rows):
        norm_row(x[i], weight, bias, eps, x[i])
