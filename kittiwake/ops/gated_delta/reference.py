"""Readable float32 reference, one token and one value head at a time.

Equations: see :mod:`kittiwake.ops.gated_delta`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

KEY_EPS = np.float32(1e-6)
"""Added to the squared length of a query or key before it is divided by it."""


@dataclass(frozen=True)
class Params:
    """What one layer holds beside its products."""

    key_of: np.ndarray
    """int64 [nv]: the key head of each value head."""
    decay_rate: np.ndarray
    """float32 [nv], exp(A_log)."""
    dt_bias: np.ndarray
    """float32 [nv]."""
    norm_weight: np.ndarray
    """float32 [V]."""
    eps: float
    """Of the norm; that of the keys' length is KEY_EPS."""
    is_silu_gate: bool


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return (1 / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + KEY_EPS)


def scan(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    decay: np.ndarray,
    beta: np.ndarray,
    key_of: np.ndarray,
    starts: np.ndarray,
    slots: np.ndarray,
    state: np.ndarray,
) -> np.ndarray:
    """q (scaled), k [N, nk, K], v [N, nv, V], decay, beta [N, nv], state [S, nv, K, V] (updated) → o [N, nv, V]."""
    o = np.empty_like(v)
    for sequence, slot in enumerate(slots):
        for head, key_head in enumerate(key_of):
            s = state[slot, head]
            for i in range(starts[sequence], starts[sequence + 1]):
                s = decay[i, head] * s
                recalled = k[i, key_head] @ s
                s = s + np.outer(k[i, key_head], beta[i, head] * (v[i, head] - recalled))
                o[i, head] = q[i, key_head] @ s
            state[slot, head] = s
    return o


def gated_delta(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    z: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    params: Params,
    starts: np.ndarray,
    slots: np.ndarray,
    state: np.ndarray,
) -> np.ndarray:
    """q, k [N, nk, K], v, z [N, nv, V], a, b [N, nv], state [S, nv, K, V] (updated) → [N, nv V]; all float32."""
    step = np.logaddexp(0, (a + params.dt_bias).astype(np.float64))
    decay = np.exp(-params.decay_rate * step).astype(np.float32)
    scale = np.float32(q.shape[-1]) ** np.float32(-0.5)
    q, k = _unit(q) * scale, _unit(k)
    o = scan(q, k, v, decay, _sigmoid(b), params.key_of, starts, slots, state)
    normed = o / np.sqrt((o * o).mean(-1, keepdims=True) + np.float32(params.eps)) * params.norm_weight
    gate = _sigmoid(z) * z if params.is_silu_gate else _sigmoid(z)
    return (normed * gate).reshape(len(v), -1)
