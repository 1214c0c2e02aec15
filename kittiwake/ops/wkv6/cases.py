"""Scans and time mixes on which every implementation must agree with the reference, final states included."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kittiwake.ops.packed import LENGTHS, Packed

DECAY_BIASES = (-8.0, 2.0)
"""d over its trained range: one step keeps 0.99966 to 0.0006 of a key's row."""
LARGE_KEY = 110.0


@dataclass(frozen=True)
class ScanCase:
    """The bare recurrence over N packed rows; K and V differ, so that a transposed state shows."""

    packed: Packed
    heads: int
    keys: int
    values: int

    def make(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Float32 r, w (decay), k [N, H, K], v [N, H, V], u (bonus) [H, K], state [S, H, K, V].

        One row's keys are large, and decays reach from exactly 0 to exactly 1.
        """
        rng = np.random.default_rng([seed, self.packed.rows, self.heads, self.keys, self.values])
        rows = (self.packed.rows, self.heads, self.keys)
        decay = np.exp(-np.exp(rng.uniform(*DECAY_BIASES, rows)))
        decay[:, :, 0] = 1
        decay[self.packed.rows // 2] = 0
        keys = rng.standard_normal(rows)
        keys[self.packed.rows // 3] *= LARGE_KEY
        made = {
            "r": rng.standard_normal(rows),
            "w": decay,
            "k": keys,
            "v": rng.standard_normal((*rows[:2], self.values)),
            "u": rng.uniform(-2, 2, rows[1:]),
            "state": rng.standard_normal((self.packed.table_slots, self.heads, self.keys, self.values)),
        }
        return {name: array.astype(np.float32) for name, array in made.items()}

    def __str__(self) -> str:
        return f"{self.packed}, {self.heads} heads of {self.keys}x{self.values}"


@dataclass(frozen=True)
class TimeMixCase:
    """One layer's time mix between its products, C = H * K channels."""

    packed: Packed
    heads: int
    size: int
    is_decay_constant: bool = False
    """As in RWKV-5."""
    is_gated: bool = True
    """Not so in RWKV-5.0."""

    @property
    def width(self) -> int:
        """C, channels."""
        return self.heads * self.size

    def make(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Float32 rkvg [N, 4 C or 3 C], decay_low [N or 0, C], vectors [4, C], state [S, H, K, K].

        Some decay exponents lie so far out that a decay is exactly 0 or 1, one row's keys are large, and some rows'
        gates are so far below zero that they shut.
        """
        rng = np.random.default_rng([seed, self.packed.rows, self.heads, self.size])
        rows, width = self.packed.rows, self.width

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        rkvg = draw(rows, (4 if self.is_gated else 3) * width)
        rkvg[rows // 3, width : 2 * width] *= np.float32(LARGE_KEY)
        rkvg[rows // 2 + 1 :: 31, 3 * width :] = -200
        vectors = draw(4, width)
        vectors[0] = rng.uniform(*DECAY_BIASES, width)
        vectors[0, :: self.size + 3] = 95
        vectors[0, 1 :: self.size + 3] = -40
        return {
            "rkvg": rkvg,
            "decay_low": draw(0 if self.is_decay_constant else rows, width),
            "vectors": vectors,
            "state": draw(self.packed.table_slots, self.heads, self.size, self.size),
        }

    def __str__(self) -> str:
        kind = "constant decay" if self.is_decay_constant else "decay by token"
        return f"{self.packed}, {self.heads} heads of {self.size}, {kind}, {'gate' if self.is_gated else 'no gate'}"


SCAN_CASES: tuple[ScanCase, ...] = tuple(
    ScanCase(Packed(lengths), *sizes)
    for lengths, sizes in zip(
        LENGTHS, ((1, 1, 1), (3, 7, 5), (1, 64, 64), (2, 16, 33), (1, 5, 64), (3, 64, 16), (2, 65, 63)), strict=True
    )
)
TIME_MIX_CASES: tuple[TimeMixCase, ...] = tuple(
    TimeMixCase(Packed(lengths), heads, size, index % 3 > 0, index % 3 < 2)
    for index, (lengths, (heads, size)) in enumerate(
        zip(LENGTHS, ((1, 1), (3, 5), (1, 64), (2, 33), (2, 64), (4, 16), (3, 7)), strict=True)
    )
)
