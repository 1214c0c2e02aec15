"""Packed rows on which every implementation must agree with the reference, the carried rows included."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kittiwake.ops.packed import LENGTHS, Packed


@dataclass(frozen=True)
class ShortConvCase:
    """N packed rows of C channels, in a buffer that has ``beside`` more columns on either side."""

    packed: Packed
    width: int
    taps: int
    dilation: int
    is_silu: bool
    beside: int

    def make(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Float32 x [N, beside + C + beside], weight [taps, C], state [S, (taps - 1) dilation, C]."""
        rng = np.random.default_rng([seed, self.packed.rows, self.width, self.taps, self.dilation])
        shapes = {
            "x": (self.packed.rows, self.width + 2 * self.beside),
            "weight": (self.taps, self.width),
            "state": (self.packed.table_slots, (self.taps - 1) * self.dilation, self.width),
        }
        return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    def __str__(self) -> str:
        activation = "silu" if self.is_silu else "none"
        return f"{self.packed} of {self.width}, {self.taps} taps {self.dilation} apart, {activation}"


CASES: tuple[ShortConvCase, ...] = tuple(
    ShortConvCase(Packed(lengths), *sizes)
    for lengths, sizes in zip(
        LENGTHS,
        (
            (1, 4, 1, True, 0),
            (7, 4, 3, True, 2),
            (96, 4, 1, True, 5),
            (65, 1, 1, False, 0),
            (2055, 2, 1, False, 1),
            (33, 4, 3, True, 0),
            (200, 3, 2, False, 7),
        ),
        strict=True,
    )
)
