"""Packed rows on which every implementation must agree with the reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kittiwake.ops.packed import LENGTHS, Packed


@dataclass(frozen=True)
class ShiftMixCase:
    """N packed rows of C channels, M mixes; with or without rows to add first."""

    packed: Packed
    width: int
    mixes: int
    adds: bool

    def make(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Float32 x and y [N, C] (y [0, C] when nothing is added), weight and bias [C], shift [S, C], mix [M, C]."""
        rng = np.random.default_rng([seed, self.packed.rows, self.width, self.mixes])

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        rows = self.packed.rows
        # rows of very different size, and one that is constant: its variance is nothing but epsilon
        x = draw(rows, self.width) * np.exp2(rng.integers(-8, 9, (rows, 1))).astype(np.float32)
        x[rows // 2] = np.float32(0.25)
        return {
            "x": x,
            "y": draw(rows if self.adds else 0, self.width),
            "weight": draw(self.width),
            "bias": draw(self.width),
            "shift": draw(self.packed.table_slots, self.width),
            "mix": rng.uniform(0, 1, (self.mixes, self.width)).astype(np.float32),
        }

    def __str__(self) -> str:
        return f"{self.packed} of {self.width}, {self.mixes} mixes{', added' if self.adds else ''}"


CASES: tuple[ShiftMixCase, ...] = tuple(
    ShiftMixCase(Packed(lengths), width, mixes, adds)
    for lengths, (width, mixes, adds) in zip(
        LENGTHS, ((1, 1, False), (7, 6, True), (96, 6, True), (65, 1, False), (128, 6, True), (33, 1, True), (200, 6, False)),
        strict=True,
    )
)  # fmt: skip
