"""Layers on which every implementation must agree with the reference, final states included."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kittiwake.ops.gated_delta.heads import key_head_of
from kittiwake.ops.packed import LENGTHS, Packed


@dataclass(frozen=True)
class GatedDeltaCase:
    """N packed rows; K and V differ, so that a transposed state shows, and so do the numbers of heads."""

    packed: Packed
    key_heads: int
    value_heads: int
    keys: int
    values: int
    order: str
    is_silu_gate: bool

    @property
    def qkv_columns(self) -> int:
        """Columns of q, k and v side by side."""
        return 2 * self.key_heads * self.keys + self.value_heads * self.values

    @property
    def gate_columns(self) -> int:
        """Columns of z, a and b side by side."""
        return self.value_heads * (self.values + 2)

    @property
    def width(self) -> int:
        """Columns of the output."""
        return self.value_heads * self.values

    @property
    def key_of(self) -> np.ndarray:
        """int64 [nv]: the key head of each value head."""
        return key_head_of(self.value_heads, self.key_heads, self.order)

    def make(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Float32 qkv [N, q | k | v], gates [N, z | a | b], decay_rate, dt_bias [nv], norm_weight [V], state [S, nv, K, V].

        One row has no key at all, and rates reach from almost no decay to a state gone in a step.
        """
        packed = self.packed
        rng = np.random.default_rng([seed, packed.rows, self.value_heads, self.keys, self.values])
        qkv = rng.standard_normal((packed.rows, self.qkv_columns))
        keys = self.key_heads * self.keys
        qkv[packed.rows // 2, keys : 2 * keys] = 0
        gates = rng.standard_normal((packed.rows, self.gate_columns)) * 3
        made = {
            "qkv": qkv,
            "gates": gates,
            "decay_rate": np.exp(rng.uniform(-6, 3, self.value_heads)),
            "dt_bias": rng.standard_normal(self.value_heads),
            "norm_weight": rng.standard_normal(self.values),
            "state": rng.standard_normal((packed.table_slots, self.value_heads, self.keys, self.values)),
        }
        return {name: array.astype(np.float32) for name, array in made.items()}

    def __str__(self) -> str:
        gate = "silu" if self.is_silu_gate else "sigmoid"
        heads = f"{self.value_heads} {self.order} over {self.key_heads} heads of {self.keys}x{self.values}"
        return f"{self.packed}, {heads}, {gate}"


CASES: tuple[GatedDeltaCase, ...] = tuple(
    GatedDeltaCase(Packed(lengths), *sizes)
    for lengths, sizes in zip(
        LENGTHS,
        (
            (1, 1, 1, 1, "grouped", False),
            (2, 6, 7, 5, "grouped", True),
            (1, 3, 64, 128, "tiled", False),
            (2, 4, 16, 33, "tiled", True),
            (3, 3, 5, 64, "grouped", False),
            (2, 6, 64, 16, "grouped", False),
            (3, 9, 65, 63, "tiled", True),
        ),
        strict=True,
    )
)
