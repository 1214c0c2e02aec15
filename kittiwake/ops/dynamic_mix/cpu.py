"""Row kernels on the CPU; every row is computed by the same code whatever stands beside it."""

from __future__ import annotations

import numpy as np
from numba import get_num_threads, prange

from kittiwake.ops.cpu_math import fma
from kittiwake.ops.jit import kernel
from kittiwake.ops.shift_mix.cpu import PARALLEL_VALUES, add_and_norm_rows, keep_last_rows


@kernel()
def _open_rows(normed, starts, slots, owner, shift, mix_x, difference, z, first, last):  # type: ignore[no-untyped-def]
    """difference = row before - row, z = row + difference * mix_x, for rows first to last."""
    for i in range(first, last):
        b = owner[i]
        row, made, mixed = normed[i], difference[i], z[i]
        before = shift[slots[b]] if i == starts[b] else normed[i - 1]
        for c in range(row.shape[0]):
            made[c] = before[c] - row[c]
        for c in range(row.shape[0]):
            mixed[c] = fma(made[c], mix_x[c], row[c])


@kernel()
def _open_serial(x, y, weight, bias, eps, starts, slots, owner, shift, mix_x, normed, difference, z, parts):  # type: ignore[no-untyped-def]
    rows = owner.shape[0]
    add_and_norm_rows(x, y, weight, bias, eps, normed, 0, rows)
    _open_rows(normed, starts, slots, owner, shift, mix_x, difference, z, 0, rows)
    keep_last_rows(normed, starts, slots, shift)


@kernel(parallel=True)
def _open_parallel(x, y, weight, bias, eps, starts, slots, owner, shift, mix_x, normed, difference, z, parts):  # type: ignore[no-untyped-def]
    rows = owner.shape[0]
    for part in prange(parts):
        add_and_norm_rows(x, y, weight, bias, eps, normed, rows * part // parts, rows * (part + 1) // parts)
    for part in prange(parts):
        first, last = rows * part // parts, rows * (part + 1) // parts
        _open_rows(normed, starts, slots, owner, shift, mix_x, difference, z, first, last)
    keep_last_rows(normed, starts, slots, shift)


def open_mix(
    x: np.ndarray,
    y: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    eps: np.float32,
    starts: np.ndarray,
    slots: np.ndarray,
    owner: np.ndarray,
    shift: np.ndarray,
    mix_x: np.ndarray,
    normed: np.ndarray,
    difference: np.ndarray,
    z: np.ndarray,
) -> None:
    """x, y, normed, difference, z float32 [≥ N, C] (y may have 0 rows), shift [S, C], mix_x [C], owner int64 [N].

    x (y is added to it), shift, normed, difference and z are written; ``owner[i]`` is the sequence of row i.
    """
    run = _open_serial if owner.shape[0] * z.shape[1] < PARALLEL_VALUES else _open_parallel
    parts = get_num_threads()
    run(x, y, weight, bias, eps, starts, slots, owner, shift, mix_x, normed, difference, z, parts)


@kernel()
def _close_rows(normed, difference, low, mix, out, first, last):  # type: ignore[no-untyped-def]
    """out[i, m C : (m + 1) C] = normed[i] + difference[i] * (mix[m] + low[i, m C : (m + 1) C]), for rows first to last."""
    width = normed.shape[1]
    for i in range(first, last):
        row, made = normed[i], difference[i]
        for m in range(mix.shape[0]):
            weight, added, mixed = mix[m], low[i, m * width : (m + 1) * width], out[i, m * width : (m + 1) * width]
            for c in range(width):
                mixed[c] = fma(made[c], weight[c] + added[c], row[c])


@kernel()
def _close_serial(normed, difference, rows, low, mix, out, parts):  # type: ignore[no-untyped-def]
    _close_rows(normed, difference, low, mix, out, 0, rows)


@kernel(parallel=True)
def _close_parallel(normed, difference, rows, low, mix, out, parts):  # type: ignore[no-untyped-def]
    for part in prange(parts):
        _close_rows(normed, difference, low, mix, out, rows * part // parts, rows * (part + 1) // parts)


def close_mix(
    normed: np.ndarray, difference: np.ndarray, rows: int, low: np.ndarray, mix: np.ndarray, out: np.ndarray
) -> None:
    """normed, difference float32 [≥ N, C], low [≥ N, M C], mix [M, C], out [≥ N, M C] (written), N = ``rows``."""
    run = _close_serial if rows * out.shape[1] < PARALLEL_VALUES else _close_parallel
    run(normed, difference, rows, low, mix, out, get_num_threads())
