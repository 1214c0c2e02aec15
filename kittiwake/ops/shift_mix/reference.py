"""Readable float32 reference; token shift as in RWKV-LM's RWKV-7 ("x070") time mix and channel mix."""

from __future__ import annotations

import numpy as np


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    """Layer norm over the last axis with population variance; float32 in and out."""
    mean = x.mean(axis=-1, keepdims=True, dtype=np.float32)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True, dtype=np.float32)
    return ((x - mean) / np.sqrt(variance + np.float32(eps)) * weight + bias).astype(np.float32)


def shift_mix(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    eps: float,
    starts: np.ndarray,
    slots: np.ndarray,
    shift: np.ndarray,
    mix: np.ndarray,
) -> np.ndarray:
    """x [N, C], mix [M, C], shift [S, C] (updated) → [N, M, C]."""
    normed = layer_norm(x, weight, bias, eps)
    out = np.empty((x.shape[0], *mix.shape), dtype=np.float32)
    for b, slot in enumerate(slots):
        rows = normed[starts[b] : starts[b + 1]]
        before = np.concatenate([shift[slot][None], rows[:-1]])
        out[starts[b] : starts[b + 1]] = rows[:, None] + (before - rows)[:, None] * mix
        shift[slot] = rows[-1]
    return out
