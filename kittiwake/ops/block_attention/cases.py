"""Attention on which every implementation must agree with the reference, what it keeps of the sequences included."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kittiwake.ops.block_attention import AttentionColumns, AttentionMemory, AttentionNorms, AttentionShape
from kittiwake.ops.packed import LENGTHS, Packed

THETA = 1e4


@dataclass(frozen=True)
class AttentionInputs:
    """One layer's inputs for N packed rows, of sequences that have seen nothing yet."""

    proj: np.ndarray
    columns: AttentionColumns
    norms: AttentionNorms
    inv_freq: np.ndarray
    memory: AttentionMemory
    positions: np.ndarray


@dataclass(frozen=True)
class AttentionCase:
    """A layer's sizes, the sequences, and how many tokens a page holds."""

    packed: Packed
    shape: AttentionShape
    page_tokens: int

    def make(self, seed: int = 0) -> AttentionInputs:
        """Raw projections between columns that nobody may read, and pages dealt out in no order, all poisoned with NaN."""
        shape, rng = self.shape, np.random.default_rng([seed, self.packed.rows, self.page_tokens, self.shape.head_dim])
        widths = (
            2 * shape.heads * shape.head_dim,
            shape.kv_heads * shape.head_dim,
            shape.kv_heads * shape.head_dim,
            shape.index_heads * shape.index_dim,
            shape.index_dim,
        )
        proj = np.full((self.packed.rows + 1, sum(widths) + 2 * len(widths)), np.nan, dtype=np.float32)
        begins = []
        at = 1
        for width in widths:
            proj[:-1, at : at + width] = rng.standard_normal((self.packed.rows, width))
            begins.append(at)
            at += width + 2
        norms = [
            rng.uniform(0.5, 1.5, n).astype(np.float32)
            for n in (shape.head_dim, shape.head_dim, shape.index_dim, shape.index_dim)
        ]
        half = np.arange(0, shape.rotary_dim, 2) / max(1, shape.rotary_dim)
        return AttentionInputs(
            proj,
            AttentionColumns(*begins),
            AttentionNorms(norms[0], norms[1], norms[2], norms[3], np.float32(1e-6)),
            (1 / THETA**half).astype(np.float32),
            self._memory(rng),
            np.zeros(len(self.packed.lengths), dtype=np.int64),
        )

    def _memory(self, rng: np.random.Generator) -> AttentionMemory:
        shape, size = self.shape, self.page_tokens
        each = [-(-length // size) for length in self.packed.lengths]
        numbers = rng.permutation(sum(each) + 1).astype(np.int32)
        pages = np.full((self.packed.table_slots, max(each)), -1, dtype=np.int32)
        for slot, count, end in zip(self.packed.slots, each, np.cumsum(each), strict=True):
            pages[slot, :count] = numbers[end - count : end]

        def poisoned(*sizes: int) -> np.ndarray:
            return np.full(sizes, np.nan, dtype=np.float32)

        keys = (len(numbers), size, shape.kv_heads, shape.head_dim)
        return AttentionMemory(
            poisoned(*keys),
            poisoned(*keys),
            poisoned(len(numbers), size // shape.ratio, shape.index_dim),
            poisoned(self.packed.table_slots, shape.ratio, shape.index_dim),
            pages,
        )

    def __str__(self) -> str:
        shape = self.shape
        kept = f"{shape.budget} of blocks of {shape.ratio}" if shape.index_heads else "dense"
        return f"{self.packed}, {shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, {kept}"


SHAPES = (
    AttentionShape(1, 1, 2, 2, 1, 2, ratio=1, budget=1),
    AttentionShape(4, 2, 8, 4, 3, 6, ratio=4, budget=8),
    AttentionShape(3, 1, 7, 2, 2, 5, ratio=4, budget=8),
    AttentionShape(6, 3, 16, 0, 1, 8, ratio=3, budget=9),
    AttentionShape(2, 2, 33, 10, 4, 12, ratio=4, budget=80),
    AttentionShape(4, 2, 8, 4),
    AttentionShape(12, 1, 16, 8, 4, 16, ratio=8, budget=16),
)
PAGES = (1, 16, 8, 12, 64, 5, 32)
CASES: tuple[AttentionCase, ...] = (
    *(
        AttentionCase(Packed(lengths), shape, page_tokens)
        for lengths, shape, page_tokens in zip(LENGTHS, SHAPES, PAGES, strict=True)
    ),
    AttentionCase(Packed((200, 11, 12, 75)), SHAPES[1], 16),
    AttentionCase(Packed((131,)), SHAPES[4], 8),
    AttentionCase(Packed((150, 3)), SHAPES[5], 64),
    AttentionCase(Packed((600, 90)), AttentionShape(3, 1, 8, 4, 3, 6, ratio=2, budget=148), 128),
)
