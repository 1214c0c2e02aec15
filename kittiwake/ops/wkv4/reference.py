"""Readable float32 reference of the recurrence, one token at a time.

Equations: RWKV-LM, RWKV-v4/cuda/wkv_cuda.cu (``kernel_forward``).
"""

from __future__ import annotations

import numpy as np


def time_mix(
    r: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_decay: np.ndarray,
    bonus: np.ndarray,
    starts: np.ndarray,
    slots: np.ndarray,
    num: np.ndarray,
    den: np.ndarray,
    top: np.ndarray,
) -> np.ndarray:
    """r (receptance in [0, 1]), k, v [N, C], log_decay (below 0), bonus [C], num, den, top [S, C] (updated) → r * wkv [N, C].

    All float32. The decay is not applied before the output: the token before weighs e^k, not e^(k + log_decay).
    """
    out = np.empty_like(v)
    for sequence, slot in enumerate(slots):
        for i in range(starts[sequence], starts[sequence + 1]):
            past, new = _weights(top[slot], bonus + k[i])
            out[i] = r[i] * ((past * num[slot] + new * v[i]) / (past * den[slot] + new))
            past, new = _weights(top[slot] + log_decay, k[i])
            num[slot] = past * num[slot] + new * v[i]
            den[slot] = past * den[slot] + new
            top[slot] = np.maximum(top[slot] + log_decay, k[i])
    return out


def _weights(past: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both exponents' e^x, relative to the larger: one of the two is 1."""
    largest = np.maximum(past, new)
    return np.exp(past - largest), np.exp(new - largest)
