"""Readable float32 reference, a sequence at a time."""

from __future__ import annotations

import numpy as np


def short_conv(
    x: np.ndarray,
    weight: np.ndarray,
    dilation: int,
    is_silu: bool,
    starts: np.ndarray,
    slots: np.ndarray,
    state: np.ndarray,
) -> np.ndarray:
    """x [N, C], weight [taps, C] (the last tap is the row itself), state [S, (taps - 1) dilation, C] (updated) → [N, C]."""
    out = np.zeros_like(x)
    for b, slot in enumerate(slots):
        rows = np.concatenate([state[slot], x[starts[b] : starts[b + 1]]])
        count = starts[b + 1] - starts[b]
        for k, tap in enumerate(weight):
            out[starts[b] : starts[b + 1]] += tap * rows[k * dilation : k * dilation + count]
        state[slot] = rows[count:]
    return out / (1 + np.exp(-out)) if is_silu else out
