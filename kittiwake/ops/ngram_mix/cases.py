"""Packed rows on which every implementation must agree with the reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kittiwake.ops.packed import LENGTHS, Packed


@dataclass(frozen=True)
class NgramMixCase:
    """N packed rows of M streams of C channels; a convolution of ``taps`` rows, ``dilation`` rows apart."""

    packed: Packed
    streams: int
    width: int
    taps: int
    dilation: int

    def make(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Float32 x [N, M C], kv [N, M C + C], norm_key, norm_query, norm_conv [M C], conv_weight [taps, M C], state."""
        rng = np.random.default_rng([seed, self.packed.rows, self.streams, self.width])
        columns, rows = self.streams * self.width, self.packed.rows

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        # rows of very different size, and two that close the gate half: a key of zeros, values of zeros
        kv = draw(rows, columns + self.width) * np.exp2(rng.integers(-6, 7, (rows, 1))).astype(np.float32)
        kv[rows // 2, :columns] = 0
        kv[rows // 3, columns:] = 0
        return {
            "x": draw(rows, columns) * np.exp2(rng.integers(-6, 7, (rows, 1))).astype(np.float32),
            "kv": kv,
            "norm_key": draw(columns),
            "norm_query": draw(columns),
            "norm_conv": draw(columns),
            "conv_weight": draw(self.taps, columns),
            "state": draw(self.packed.table_slots, (self.taps - 1) * self.dilation, columns),
        }

    def __str__(self) -> str:
        return f"{self.packed} of {self.streams}x{self.width}, {self.taps} taps {self.dilation} apart"


CASES: tuple[NgramMixCase, ...] = tuple(
    NgramMixCase(Packed(lengths), *sizes)
    for lengths, sizes in zip(
        LENGTHS,
        ((4, 32, 4, 3), (2, 7, 4, 3), (4, 64, 4, 3), (3, 65, 2, 5), (2, 128, 4, 2), (4, 33, 3, 3), (1, 96, 4, 3)),
        strict=True,
    )
)
