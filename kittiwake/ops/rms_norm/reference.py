"""Readable float32 reference."""

from __future__ import annotations

import numpy as np


def norm_heads(x: np.ndarray, heads: int, weight: np.ndarray, eps: float) -> np.ndarray:
    """x [N, heads * dim], weight [dim] → [N, heads * dim]."""
    split = x.reshape(len(x), heads, -1)
    return (split / np.sqrt((split * split).mean(-1, keepdims=True) + np.float32(eps)) * weight).reshape(x.shape)
