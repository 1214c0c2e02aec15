"""Gated attention with a block selector in float64, a whole sequence at a time and without pages.

Written from transformers' qwen4_exp (``Qwen4ExpTextAttention``, ``Qwen4ExpTextQSAIndexer``); ties go to the lowest block.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kittiwake.ops.block_attention.cases import AttentionCase, AttentionInputs

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


def sequences(case: AttentionCase, inputs: AttentionInputs) -> Iterator[tuple[slice, Vector]]:
    """The rows of each sequence of a case, and their outputs [T, H D]."""
    shape, packed = case.shape, case.packed

    def part(column: int, *sizes: int) -> Vector:
        values = inputs.proj[: packed.rows, column : column + int(np.prod(sizes))]
        return values.reshape(packed.rows, *sizes).astype(np.float64)

    columns, norms = inputs.columns, inputs.norms
    parts = (
        part(columns.q_gate, shape.heads, 2 * shape.head_dim),
        part(columns.k, shape.kv_heads, shape.head_dim),
        part(columns.v, shape.kv_heads, shape.head_dim),
        part(columns.index_q, shape.index_heads, shape.index_dim),
        part(columns.index_k, shape.index_dim),
    )
    weights = tuple(vector.astype(np.float64) for vector in (norms.q, norms.k, norms.index_q, norms.index_k))
    for first, length in zip(packed.starts, packed.lengths, strict=False):
        rows = slice(first, first + length)
        expected = block_attention(
            *(values[rows] for values in parts),
            weights,  # type: ignore[arg-type]
            inputs.inv_freq,
            1e-6,
            shape.ratio,
            shape.budget,
        )
        yield rows, expected.reshape(length, -1)
