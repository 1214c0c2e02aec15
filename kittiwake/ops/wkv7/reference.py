"""Readable float32 reference of the scan and of the time mix around it, one token and one head at a time.

Equations: RWKV-LM, RWKV-v7/rwkv_v7_numpy.py (``time_mixing``); arXiv 2503.14456.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DECAY_SCALE = np.float32(0.6065306597126334)
"""e**-0.5: a decay is exp(-DECAY_SCALE * sigmoid(w)), so it lies in (0.545, 1)."""


def scan(
    r: np.ndarray,
    w: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    starts: np.ndarray,
    slots: np.ndarray,
    state: np.ndarray,
) -> np.ndarray:
    """r, w (decay), k, a, b [N, H, K], v [N, H, V], state [S, H, K, V] (updated) → y [N, H, V]; all float32."""
    y = np.empty_like(v)
    for sequence, slot in enumerate(slots):
        for head in range(r.shape[1]):
            s = state[slot, head]
            for i in range(starts[sequence], starts[sequence + 1]):
                removed = a[i, head] @ s
                s = w[i, head][:, None] * s + np.outer(b[i, head], removed) + np.outer(k[i, head], v[i, head])
                y[i, head] = r[i, head] @ s
            state[slot, head] = s
    return y


@dataclass(frozen=True)
class HeadParams:
    """Float32 vectors [C] of one layer's time mix, C = H * K; ``v0`` is None in layer 0."""

    w0: np.ndarray
    a0: np.ndarray
    v0: np.ndarray | None
    k_k: np.ndarray
    k_a: np.ndarray
    r_k: np.ndarray
    norm_weight: np.ndarray
    norm_bias: np.ndarray
    norm_eps: float
    heads: int


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return (1 / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32)


def time_mix(
    r: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    w_low: np.ndarray,
    a_low: np.ndarray,
    g: np.ndarray,
    v_low: np.ndarray | None,
    v_first: np.ndarray,
    params: HeadParams,
    starts: np.ndarray,
    slots: np.ndarray,
    state: np.ndarray,
) -> np.ndarray:
    """From the products of one layer to the input of its output product; all [N, C] float32.

    ``*_low`` are the low-rank products without their bias; ``v_first`` is written by layer 0 and read by the others.
    """
    rows, width = r.shape
    per_head = (rows, params.heads, width // params.heads)
    decay = np.exp(-DECAY_SCALE * _sigmoid(params.w0 + w_low)).astype(np.float32)
    a_gate = _sigmoid(params.a0 + a_low)
    if params.v0 is None:
        v_first[:] = v
    else:
        assert v_low is not None
        v = v + (v_first - v) * _sigmoid(params.v0 + v_low)
    kk = (k * params.k_k).reshape(per_head)
    kk = kk / np.maximum(np.sqrt((kk * kk).sum(-1, keepdims=True)), np.float32(1e-12))
    k = k * (1 + (a_gate - 1) * params.k_a)
    r_heads, k_heads, v_heads = (x.reshape(per_head) for x in (r, k, v))
    y = scan(
        r_heads, decay.reshape(per_head), k_heads, v_heads, -kk, kk * a_gate.reshape(per_head), starts, slots, state
    )
    mean = y.mean(-1, keepdims=True)
    variance = ((y - mean) ** 2).mean(-1, keepdims=True)
    normed = ((y - mean) / np.sqrt(variance + np.float32(params.norm_eps))).reshape(rows, width)
    normed = normed * params.norm_weight + params.norm_bias
    bonus = (r_heads * k_heads * params.r_k.reshape(per_head[1:])).sum(-1, keepdims=True) * v_heads
    return ((normed + bonus.reshape(rows, width)) * g).astype(np.float32)
