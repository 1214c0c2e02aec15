"""Readable float32 reference of both halves."""

from __future__ import annotations

import numpy as np

from kittiwake.ops.shift_mix.reference import layer_norm


def open_mix(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    eps: float,
    starts: np.ndarray,
    slots: np.ndarray,
    shift: np.ndarray,
    mix_x: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [N, C], mix_x [C], shift [S, C] (updated) → normed rows, their difference to the row before, z; all [N, C]."""
    normed = layer_norm(x, weight, bias, eps)
    difference = np.empty_like(normed)
    for b, slot in enumerate(slots):
        rows = normed[starts[b] : starts[b + 1]]
        difference[starts[b] : starts[b + 1]] = np.concatenate([shift[slot][None], rows[:-1]]) - rows
        shift[slot] = rows[-1]
    return normed, difference, normed + difference * mix_x


def close_mix(normed: np.ndarray, difference: np.ndarray, low: np.ndarray, mix: np.ndarray) -> np.ndarray:
    """normed, difference [N, C], low [N, M C], mix [M, C] → [N, M C]."""
    rows, width = normed.shape
    low = low.reshape(rows, -1, width)
    return (normed[:, None] + difference[:, None] * (mix + low)).reshape(rows, -1)
