"""Scans and time mixes on which every implementation must agree with the reference, final states included."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kittiwake.ops.packed import LENGTHS, Packed


@dataclass(frozen=True)
class ScanCase:
    """The bare recurrence over N packed rows; K and V differ, so that a transposed state shows."""

    packed: Packed
    heads: int
    keys: int
    values: int

    def make(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Float32 r, w (decay), k, a, b [N, H, K], v [N, H, V], state [S, H, K, V], as a time mix makes them."""
        rng = np.random.default_rng([seed, self.packed.rows, self.heads, self.keys, self.values])
        rows = (self.packed.rows, self.heads, self.keys)
        removal = rng.standard_normal(rows)
        removal /= np.maximum(np.linalg.norm(removal, axis=-1, keepdims=True), 1e-12)
        rate = rng.uniform(0, 1, rows)
        made = {
            "r": rng.standard_normal(rows),
            "w": rng.uniform(0.5454, 0.9999, rows),
            "k": rng.standard_normal(rows),
            "v": rng.standard_normal((*rows[:2], self.values)),
            "a": -removal,
            "b": removal * rate,
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
    is_first_layer: bool

    @property
    def width(self) -> int:
        """C, channels."""
        return self.heads * self.size

    def make(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Float32 rkv [N, 3 C], low [N, 3 C or 4 C], v_first [N, C], vectors [8, C], state [S, H, K, K].

        One row's keys of the first head are all zero: the norm they are divided by must not be.
        """
        rng = np.random.default_rng([seed, self.packed.rows, self.heads, self.size])
        rows, width = self.packed.rows, self.width

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        rkv = draw(rows, 3 * width)
        rkv[rows // 2, width : width + self.size] = 0
        vectors = draw(8, width)
        vectors[0] = rng.uniform(-7, 3, width)  # w0 over its trained range
        return {
            "rkv": rkv,
            "low": draw(rows, (3 if self.is_first_layer else 4) * width) * np.float32(2),
            "v_first": draw(rows, width),
            "vectors": vectors,
            "state": draw(self.packed.table_slots, self.heads, self.size, self.size),
        }

    def __str__(self) -> str:
        layer = "first layer" if self.is_first_layer else "later layer"
        return f"{self.packed}, {self.heads} heads of {self.size}, {layer}"


SCAN_CASES: tuple[ScanCase, ...] = tuple(
    ScanCase(Packed(lengths), *sizes)
    for lengths, sizes in zip(
        LENGTHS, ((1, 1, 1), (3, 7, 5), (1, 64, 64), (2, 16, 33), (1, 5, 64), (3, 64, 16), (2, 65, 63)), strict=True
    )
)
TIME_MIX_CASES: tuple[TimeMixCase, ...] = tuple(
    TimeMixCase(Packed(lengths), heads, size, index % 2 == 0)
    for index, (lengths, (heads, size)) in enumerate(
        zip(LENGTHS, ((1, 1), (3, 5), (1, 64), (2, 33), (2, 64), (4, 16), (3, 7)), strict=True)
    )
)
