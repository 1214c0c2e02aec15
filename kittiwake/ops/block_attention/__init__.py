"""Gated attention over keys in pages, with a block selector: every row reads all keys, or the best blocks of them.

Per row at position p, with keys and values of positions 0 to p, per head (``sigma`` is the sigmoid, the rotation turns
the first ``rotary_dim`` values of a head in pairs (i, i + rotary_dim / 2)):

    q, gate = projection;  q = rotate(rms(q), p);  k = rotate(rms(k), p)          v as it is
    out = softmax(q k / sqrt(D)) v * sigma(gate)                                  over the keys that the row sees

Keys come in blocks of ``ratio`` positions. A row for which no more than ``budget / ratio`` blocks are complete sees all
keys. A later one sees the keys of the ``budget / ratio`` blocks of the highest score, ties to the lowest, and those of
the block that is not complete yet:

    block key = rotate(rms(mean of the raw index keys), first position of the block)
    score     = sum over index heads of relu(rotate(rms(index q), p) . block key)

The keys a row sees are walked in ascending order, ``SPLIT`` at a time counted from the first, and the splits merged in
that order: the bits depend on the tokens up to the row alone.

Source: transformers, models/qwen4_exp/modeling_qwen4_exp.py (``Qwen4ExpTextAttention``, ``Qwen4ExpTextQSAIndexer``),
which leaves ties open; Flash-Decoding for the merge of splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kittiwake.errors import ModelError

SPLIT = 64
"""Keys whose share of the softmax is summed before it is merged. It decides bits: changing it changes every answer."""


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one layer. ``index_heads`` 0: there is no selector, every row sees all keys."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    index_heads: int = 0
    index_dim: int = 0
    ratio: int = 1
    """Positions in a block."""
    budget: int = 0
    """Keys of complete blocks that a row sees at most."""

    def __post_init__(self) -> None:
        """Raise ModelError for sizes that make no attention."""
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} attention heads cannot share {self.kv_heads} key heads evenly")
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ModelError(f"rotary_dim {self.rotary_dim} must be even and at most head_dim {self.head_dim}")
        if not self.index_heads:
            return
        if self.rotary_dim > self.index_dim:
            raise ModelError(f"rotary_dim {self.rotary_dim} is above the indexer's head dim {self.index_dim}")
        if self.ratio < 1 or self.budget < self.ratio or self.budget % self.ratio:
            raise ModelError(f"an index budget of {self.budget} keys is not one or more blocks of {self.ratio}")

    @property
    def budget_blocks(self) -> int:
        """Complete blocks that a row sees at most; 0 without a selector."""
        return self.budget // self.ratio if self.index_heads else 0

    def is_sparse(self, keys: int) -> bool:
        """Whether a row that may see ``keys`` keys sees a selection of them."""
        return self.index_heads > 0 and keys // self.ratio > self.budget_blocks


@dataclass(frozen=True)
class AttentionColumns:
    """Where in a packed projection each input begins."""

    q_gate: int
    """per head q [head_dim], then gate [head_dim]"""
    k: int
    v: int
    index_q: int = 0
    index_k: int = 0


@dataclass(frozen=True)
class AttentionNorms:
    """RMS norm weights, float32, as they are multiplied (zero-centred ones with their 1 added)."""

    q: np.ndarray  # [head_dim]
    k: np.ndarray  # [head_dim]
    index_q: np.ndarray  # [index_dim]
    index_k: np.ndarray  # [index_dim]
    eps: np.float32


@dataclass(frozen=True)
class AttentionMemory:
    """What one layer keeps of the sequences: float32 pages that all share, and which pages each slot has.

    Position t of a slot lies in page ``pages[slot, t // P]``, row ``t % P``, its block in row ``t % P // ratio``.
    """

    keys: np.ndarray  # [pages, P, kv_heads, head_dim], normed and rotated
    values: np.ndarray  # [pages, P, kv_heads, head_dim]
    blocks: np.ndarray  # [pages, P / ratio, index_dim], block keys; [0, 0, 0] without a selector
    open_rows: np.ndarray  # [S, ratio, index_dim], raw index keys of the latest positions, position t in row t % ratio
    pages: np.ndarray  # int32 [S, most pages of a slot]


@dataclass(frozen=True)
class RotaryRows:
    """Cosines and sines of each row, float32 [N, rotary_dim / 2]: at its position, and at the first one of its block."""

    cos: np.ndarray
    sin: np.ndarray
    block_cos: np.ndarray
    block_sin: np.ndarray
