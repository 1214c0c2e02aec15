"""Readable reference in the precision of its inputs (float32, or float64 for tests of precision)."""

from __future__ import annotations

import numpy as np

SMALLEST = 1e-6
"""The least |d| that the square root is taken of."""


def norm_streams(x: np.ndarray, streams: int, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm of every stream of x [N, M C] by itself, times weight [M C]."""
    split = x.reshape(len(x), streams, -1)
    scale = 1 / np.sqrt((split * split).mean(axis=-1, keepdims=True) + x.dtype.type(eps))
    return (split * scale).reshape(x.shape) * weight


def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + e**-x)."""
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def gate_values(
    x: np.ndarray,
    kv: np.ndarray,
    streams: int,
    norm_key: np.ndarray,
    norm_query: np.ndarray,
    eps: float,
) -> np.ndarray:
    """x [N, M C], kv [N, M C + C] → the gated values [N, M C]."""
    rows, columns = x.shape
    key = norm_streams(kv[:, :columns], streams, norm_key, eps).reshape(rows, streams, -1)
    query = norm_streams(x, streams, norm_query, eps).reshape(rows, streams, -1)
    d = (key * query).sum(axis=-1) / np.sqrt(x.dtype.type(columns // streams))
    gate = np.sign(d) * np.sqrt(np.maximum(np.abs(d), x.dtype.type(SMALLEST)))
    shares = 1 / (1 + np.exp(-gate))
    return (shares[:, :, None] * kv[:, None, columns:]).reshape(rows, columns)


def ngram_mix(
    x: np.ndarray,
    kv: np.ndarray,
    streams: int,
    norm_key: np.ndarray,
    norm_query: np.ndarray,
    norm_conv: np.ndarray,
    conv_weight: np.ndarray,
    dilation: int,
    eps: float,
    starts: np.ndarray,
    slots: np.ndarray,
    state: np.ndarray,
) -> np.ndarray:
    """x [N, M C], kv [N, M C + C], conv_weight [taps, M C] (last tap: the row itself), state [S, carried, M C] → the new x.

    state, carried = (taps - 1) dilation rows norm(g), oldest first, is updated.
    """
    gated = gate_values(x, kv, streams, norm_key, norm_query, eps)
    normed = norm_streams(gated, streams, norm_conv, eps)
    out = x + gated
    taps = len(conv_weight)
    for b, slot in enumerate(slots):
        rows = np.concatenate([state[slot], normed[starts[b] : starts[b + 1]]])
        for i in range(int(starts[b]), int(starts[b + 1])):
            newest = i - int(starts[b]) + state.shape[1]
            seen = rows[[newest - dilation * (taps - 1 - k) for k in range(taps)]]
            out[i] += silu((conv_weight * seen).sum(axis=0))
        state[slot] = rows[len(rows) - state.shape[1] :]
    return out
