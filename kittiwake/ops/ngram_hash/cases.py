"""Packed rows on which every implementation must give the reference's very rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kittiwake.ops.packed import LENGTHS, Packed


@dataclass(frozen=True)
class NgramHashCase:
    """Tokens of a small vocabulary, so that the end token (0) falls everywhere; n-grams up to ``size``."""

    packed: Packed
    size: int
    heads: int
    """Heads of each order."""

    def make(self, seed: int = 0) -> dict[str, np.ndarray]:
        """int64 token_ids [N], history [B, size - 1], multipliers [size], head_sizes and offsets [(size - 1) heads]."""
        rng = np.random.default_rng([seed, self.packed.rows, self.size])
        head_sizes = np.array([97, 101, 103, 107, 109, 113, 127, 131, 137][: self.heads] * (self.size - 1), np.int64)
        history = rng.integers(-1, 5, (len(self.packed.lengths), self.size - 1))
        for row in history:  # nothing is older than what is missing
            row[np.cumsum(row < 0) > 0] = -1
        return {
            "token_ids": rng.integers(0, 5, self.packed.rows),
            "history": history,
            "multipliers": rng.integers(1 << 50, 1 << 60, self.size) | 1,
            "head_sizes": head_sizes,
            "offsets": np.concatenate([[0], np.cumsum(head_sizes)[:-1]]).astype(np.int64),
        }

    def __str__(self) -> str:
        return f"{self.packed}, up to {self.size}, {self.heads} heads"


CASES: tuple[NgramHashCase, ...] = tuple(
    NgramHashCase(Packed(lengths), size, heads)
    for lengths, (size, heads) in zip(LENGTHS, ((3, 8), (3, 1), (2, 3), (4, 2), (3, 8), (3, 2), (5, 3)), strict=True)
)
