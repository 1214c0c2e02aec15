"""Readable float32 reference of the parts around the products; streams lie side by side in a row of S C channels."""

from __future__ import annotations

import numpy as np


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return (1 / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32)


def norm_streams(x: np.ndarray, streams: int, weight: np.ndarray, eps: float) -> np.ndarray:
    """x [N, S C], weight [S C] → [N, S C]: an RMS norm for every stream."""
    split = x.reshape(len(x), streams, -1)
    normed = split / np.sqrt((split * split).mean(-1, keepdims=True) + np.float32(eps))
    return normed.reshape(x.shape) * weight


def combine_streams(x: np.ndarray, y: np.ndarray, inject: np.ndarray) -> np.ndarray:
    """x [N, S C], y [N, C], inject [N, S] (logits) → [N, S C]."""
    streams = inject.shape[1]
    added = y[:, None, :] * (2 * _sigmoid(inject / np.float32(streams)))[:, :, None]
    return (x.reshape(added.shape) + added).reshape(x.shape)


def mix_low(low: np.ndarray, streams: int) -> np.ndarray:
    """low [N, rank] → silu(low / S)."""
    low = low / np.float32(streams)
    return low * _sigmoid(low)


def mix_streams(normed: np.ndarray, gate: np.ndarray, streams: int) -> np.ndarray:
    """normed, gate (logits) [N, S C] → [N, C]."""
    return (normed * _sigmoid(gate)).reshape(len(normed), streams, -1).mean(1)
