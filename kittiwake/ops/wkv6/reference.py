"""Readable float32 reference of the scan and of the time mix around it, one token and one head at a time.

Equations: RWKV-LM, RWKV-v5/src/model.py; arXiv 2404.05892.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def scan(
    r: np.ndarray,
    w: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    u: np.ndarray,
    starts: np.ndarray,
    slots: np.ndarray,
    state: np.ndarray,
) -> np.ndarray:
    """r, w (decay), k [N, H, K], v [N, H, V], u (bonus) [H, K], state [S, H, K, V] (updated) → y [N, H, V]; float32."""
    y = np.empty_like(v)
    for sequence, slot in enumerate(slots):
        for head in range(r.shape[1]):
            s = state[slot, head]
            for i in range(starts[sequence], starts[sequence + 1]):
                added = np.outer(k[i, head], v[i, head])
                y[i, head] = r[i, head] @ (u[head][:, None] * added + s)
                s = w[i, head][:, None] * s + added
            state[slot, head] = s
    return y


@dataclass(frozen=True)
class HeadParams:
    """Float32 vectors [C] of one layer's time mix, C = H * K."""

    decay_bias: np.ndarray
    """d, before both exponentials: a decay is exp(-exp(d))."""
    bonus: np.ndarray
    norm_weight: np.ndarray
    norm_bias: np.ndarray
    norm_eps: float
    heads: int


def time_mix(
    r: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray | None,
    decay_low: np.ndarray | None,
    params: HeadParams,
    starts: np.ndarray,
    slots: np.ndarray,
    state: np.ndarray,
) -> np.ndarray:
    """From the products of one layer to the input of its output product; all [N, C] float32.

    ``decay_low`` is the low-rank product without its bias, None where decays are constant (RWKV-5); ``g`` is None where
    there is no gate (RWKV-5.0).
    """
    rows, width = r.shape
    per_head = (rows, params.heads, width // params.heads)
    exponents = np.broadcast_to(params.decay_bias, r.shape) if decay_low is None else params.decay_bias + decay_low
    with np.errstate(over="ignore"):  # e**d may be infinite: the decay is then 0
        decay = np.exp(-np.exp(exponents)).astype(np.float32)
    r_heads, decay_heads, k_heads, v_heads = (x.reshape(per_head) for x in (r, decay, k, v))
    y = scan(r_heads, decay_heads, k_heads, v_heads, params.bonus.reshape(per_head[1:]), starts, slots, state)
    mean = y.mean(-1, keepdims=True)
    variance = ((y - mean) ** 2).mean(-1, keepdims=True)
    normed = ((y - mean) / np.sqrt(variance + np.float32(params.norm_eps))).reshape(rows, width)
    normed = normed * params.norm_weight + params.norm_bias
    return normed.astype(np.float32) if g is None else (normed * _silu(g)).astype(np.float32)


def _silu(x: np.ndarray) -> np.ndarray:
    return (x / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32)
