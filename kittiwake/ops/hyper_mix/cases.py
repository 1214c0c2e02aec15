"""Rows on which every implementation must agree with the reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class HyperMixCase:
    """N rows of S streams of C channels; the logits of the injection stand after ``rank`` other columns."""

    rows: int
    streams: int
    width: int
    rank: int

    def make(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Float32 x, normed, gate [N, S C], y [N, C], low [N, rank + S], weight [S C].

        Streams differ in size by powers of two, and one is nothing at all: its variance is nothing but epsilon.
        """
        rng = np.random.default_rng([seed, self.rows, self.streams, self.width])

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        wide = self.streams * self.width
        x = draw(self.rows, self.streams, self.width)
        x *= np.exp2(rng.integers(-8, 9, (self.rows, self.streams, 1))).astype(np.float32)
        x[self.rows // 2, -1] = 0
        return {
            "x": x.reshape(self.rows, wide),
            "normed": draw(self.rows, wide),
            "gate": draw(self.rows, wide) * np.float32(4),
            "y": draw(self.rows, self.width),
            "low": draw(self.rows, self.rank + self.streams) * np.float32(4),
            "weight": draw(wide),
        }

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.streams}x{self.width}, rank {self.rank}"


CASES: tuple[HyperMixCase, ...] = (
    HyperMixCase(1, 1, 1, 1),
    HyperMixCase(3, 2, 7, 5),
    HyperMixCase(1, 4, 128, 16),
    HyperMixCase(17, 3, 33, 8),
    HyperMixCase(65, 4, 96, 31),
    HyperMixCase(127, 5, 65, 2),
)
