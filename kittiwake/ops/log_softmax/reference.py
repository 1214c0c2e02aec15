"""Readable reference in numpy, float64 throughout."""

from __future__ import annotations

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Float64 [W, vocab] of float32 logits [W, vocab]."""
    wide = logits.astype(np.float64)
    out = np.full(wide.shape, np.nan)
    for row, target in zip(wide, out, strict=True):
        top = row.max()
        if np.isfinite(top):
            target[:] = (row - top) - np.log(np.exp(row - top).sum())
    return out


def log_probs(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Float64 [W]: log-probability of targets[w] in row w."""
    return np.asarray(log_softmax(logits)[np.arange(len(targets)), targets])


def top_log_probs(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k likeliest ids of each row, ties to the lowest id, with their log-probabilities: int64, float64 [W, k]."""
    ids = np.argsort(-logits.astype(np.float64), axis=1, kind="stable")[:, :k]
    return ids, np.take_along_axis(log_softmax(logits), ids, axis=1)
