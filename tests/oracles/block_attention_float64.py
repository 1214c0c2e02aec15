"""Gated attention with a block selector in float64, a whole sequence at a time and without pages.

Written from transformers' qwen4_exp (``Qwen4ExpTextAttention``, ``Qwen4ExpTextQSAIndexer``); ties go to the lowest block.
"""

from __future__ import annotations

import numpy as np

Vector = np.ndarray


def _rms(x: Vector, weight: Vector, eps: float) -> Vector:
    normed: Vector = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight
    return normed


def _turn(x: Vector, positions: Vector, inv_freq: Vector) -> Vector:
    """x [T, heads, dim] at positions [T]: complex numbers of its first values, half apart, turned by the angle."""
    half = len(inv_freq)
    # the angle is defined as a float32 product
    angle = (positions.astype(np.float32)[:, None] * inv_freq.astype(np.float32)).astype(np.float64)
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angle)[:, None]
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


def block_attention(
    q_gate: Vector,
    k: Vector,
    v: Vector,
    index_q: Vector,
    index_k: Vector,
    norms: tuple[Vector, Vector, Vector, Vector],
    inv_freq: Vector,
    eps: float,
    ratio: int,
    budget: int,
) -> Vector:
    """q_gate [T, H, 2 D], k, v [T, KV, D], index_q [T, I, E], index_k [T, E] raw, float64 → [T, H, D]. I = 0: dense."""
    tokens, heads, dim = q_gate.shape[0], q_gate.shape[1], k.shape[2]
    at = np.arange(tokens)
    q = _turn(_rms(q_gate[..., :dim], norms[0], eps), at, inv_freq)
    k = _turn(_rms(k, norms[1], eps), at, inv_freq)
    visible = np.tril(np.ones((tokens, tokens), dtype=bool))
    if index_q.shape[1]:
        whole = tokens // ratio
        pooled = index_k[: whole * ratio].reshape(whole, ratio, index_k.shape[1]).mean(axis=1)
        keys = _turn(_rms(pooled, norms[3], eps)[:, None], np.arange(whole) * ratio, inv_freq)[:, 0]
        scores = np.maximum(np.einsum("thd,bd->thb", _turn(_rms(index_q, norms[2], eps), at, inv_freq), keys), 0).sum(1)
        for t in range(tokens):
            complete = (t + 1) // ratio
            if complete > budget // ratio:
                best = sorted(range(complete), key=lambda block, t=t: (-scores[t, block], block))[: budget // ratio]  # type: ignore[misc]
                visible[t, : complete * ratio] = np.isin(np.arange(complete * ratio) // ratio, best)
    group = heads // k.shape[1]
    logits = np.einsum("thd,shd->hts", q, np.repeat(k, group, axis=1)) / np.sqrt(dim)
    logits = np.where(visible, logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("hts,shd->thd", weights, np.repeat(v, group, axis=1))
    gated: Vector = mixed / (1 + np.exp(-q_gate[..., dim:]))
    return gated
