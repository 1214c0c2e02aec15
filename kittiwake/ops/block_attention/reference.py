"""Readable float32 reference, one row and one head at a time.

Equations: transformers, models/qwen4_exp/modeling_qwen4_exp.py; see the package's docstring.
"""

from __future__ import annotations

import numpy as np

from kittiwake.ops.block_attention import (
    SPLIT,
    AttentionColumns,
    AttentionMemory,
    AttentionNorms,
    AttentionShape,
    RotaryRows,
)


def row_positions(starts: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """int64 [N]: the absolute position of each row, of sequences that had seen ``positions`` int64 [B] tokens."""
    lengths = np.diff(starts)
    within = np.arange(int(starts[-1])) - np.repeat(starts[:-1], lengths)
    absolute: np.ndarray = np.repeat(positions, lengths) + within
    return absolute


def rotary(positions: np.ndarray, inv_freq: np.ndarray, factor: float, ratio: int) -> RotaryRows:
    """The angle is the float32 product of position and ``inv_freq``; its cosine and sine are times ``factor``."""

    def turn(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        angle = (at[:, None].astype(np.float32) * inv_freq).astype(np.float64)
        return (np.cos(angle) * factor).astype(np.float32), (np.sin(angle) * factor).astype(np.float32)

    return RotaryRows(*turn(positions), *turn(positions // ratio * ratio))


def _rms(x: np.ndarray, weight: np.ndarray, eps: np.float32) -> np.ndarray:
    mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    return (x / np.sqrt(mean + eps) * weight).astype(np.float32)


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [..., dim] with its first values turned in pairs (i, i + half)."""
    half = cos.shape[0]
    first, second = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], axis=-1)


def select_blocks(scores: np.ndarray, count: int) -> np.ndarray:
    """The ``count`` blocks of the highest scores, ties to the lowest block, in ascending order."""
    return np.sort(np.argsort(-scores, kind="stable")[:count])


def seen_keys(position: int, index_q: np.ndarray, block_keys: np.ndarray, shape: AttentionShape) -> np.ndarray:
    """Positions of the keys that a row sees, ascending; index_q [index_heads, index_dim] normed and rotated."""
    count = position + 1
    if not shape.is_sparse(count):
        return np.arange(count)
    complete = count // shape.ratio
    scores = np.maximum(index_q @ block_keys[:complete].T, np.float32(0)).sum(axis=0, dtype=np.float32)
    chosen = select_blocks(scores, shape.budget_blocks)
    of_blocks = (chosen[:, None] * shape.ratio + np.arange(shape.ratio)).ravel()
    return np.concatenate([of_blocks, np.arange(complete * shape.ratio, count)])


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """softmax(q keys / sqrt(D)) values of one head, split by split; q [D], keys and values [T, D]."""
    scale = np.float32(1 / np.sqrt(q.shape[0]))
    top, total, mixed = np.float32(-np.inf), np.float32(0), np.zeros_like(q)
    for first in range(0, len(keys), SPLIT):
        scores = (keys[first : first + SPLIT] @ q) * scale
        split_top = scores.max()
        weights = np.exp(scores - split_top)
        new_top = max(top, split_top)
        old, new = np.exp(top - new_top), np.exp(split_top - new_top)
        mixed = mixed * old + (weights @ values[first : first + SPLIT]) * new
        total = total * old + weights.sum(dtype=np.float32) * new
        top = new_top
    return (mixed / total).astype(np.float32)


def block_attention(
    proj: np.ndarray,
    columns: AttentionColumns,
    shape: AttentionShape,
    norms: AttentionNorms,
    rope: RotaryRows,
    starts: np.ndarray,
    slots: np.ndarray,
    positions: np.ndarray,
    memory: AttentionMemory,
) -> np.ndarray:
    """As the function of this name in cpu.py; returns out [N, heads * head_dim]."""
    rows, group = int(starts[-1]), shape.heads // shape.kv_heads
    out = np.empty((rows, shape.heads, shape.head_dim), dtype=np.float32)
    page_tokens, kv_size = memory.keys.shape[1], (shape.kv_heads, shape.head_dim)
    at = row_positions(starts, positions)
    for i, slot in enumerate(np.repeat(slots, np.diff(starts))):
        row, position = proj[i], int(at[i])
        q_gate = row[columns.q_gate :][: shape.heads * 2 * shape.head_dim].reshape(shape.heads, 2, shape.head_dim)
        k = row[columns.k :][: np.prod(kv_size)].reshape(kv_size)
        v = row[columns.v :][: np.prod(kv_size)].reshape(kv_size)
        page, within = memory.pages[slot, position // page_tokens], position % page_tokens
        memory.keys[page, within] = _rotate(_rms(k, norms.k, norms.eps), rope.cos[i], rope.sin[i])
        memory.values[page, within] = v
        index_q, block_keys = np.empty(0), np.empty(0)
        if shape.index_heads:
            size = (shape.index_heads, shape.index_dim)
            index_q = row[columns.index_q :][: np.prod(size)].reshape(size)
            index_q = _rotate(_rms(index_q, norms.index_q, norms.eps), rope.cos[i], rope.sin[i])
            memory.open_rows[slot, position % shape.ratio] = row[columns.index_k :][: shape.index_dim]
            if (position + 1) % shape.ratio == 0:
                mean = memory.open_rows[slot].mean(axis=0, dtype=np.float32)
                mean = _rms(mean, norms.index_k, norms.eps)
                memory.blocks[page, within // shape.ratio] = _rotate(mean, rope.block_cos[i], rope.block_sin[i])
            block_keys = memory.blocks[memory.pages[slot]].reshape(-1, shape.index_dim)
        seen = seen_keys(position, index_q, block_keys, shape)
        places = memory.pages[slot, seen // page_tokens], seen % page_tokens
        q = _rotate(_rms(q_gate[:, 0], norms.q, norms.eps), rope.cos[i], rope.sin[i])
        for head in range(shape.heads):
            keys, values = (array[places][:, head // group] for array in (memory.keys, memory.values))
            gate = 1 / (1 + np.exp(-q_gate[head, 1].astype(np.float64)))
            out[i, head] = attend(q[head], keys, values) * gate.astype(np.float32)
    return out.reshape(rows, -1)
