"""Time mixes on which every implementation must agree with the reference, final states included."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kittiwake.ops.packed import LENGTHS, Packed
from kittiwake.ops.wkv4 import EMPTY_TOP

LARGE_KEY = 110.0
"""e^110 overflows float32, e^-110 underflows it."""


@dataclass(frozen=True)
class TimeMixCase:
    """One layer's time mix between its products: N packed rows of C channels."""

    packed: Packed
    width: int
    key_scale: float
    """Standard deviation of the keys; some of them are ±LARGE_KEY whatever it is."""

    def make(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Float32 rkv [N, 3 C] (receptances in [0, 1]), log_decay, bonus [C], num, den, top [S, C].

        Decays and bonuses cover what trained models have: time_decay from -9 to 3, time_first from -9 to 4. The first
        sequence continues from a state, the second begins; every slot that no sequence has holds a state too.
        """
        rng = np.random.default_rng([seed, self.packed.rows, self.width])
        rows, width, slots = self.packed.rows, self.width, self.packed.table_slots
        keys = rng.standard_normal((rows, width)) * self.key_scale
        keys[rng.uniform(size=keys.shape) < 0.05] = LARGE_KEY
        keys[rng.uniform(size=keys.shape) < 0.05] = -LARGE_KEY
        den = np.exp(rng.uniform(0, 4, (slots, width)))
        made = {
            "rkv": np.concatenate([rng.uniform(0, 1, keys.shape), keys, rng.standard_normal(keys.shape)], axis=1),
            "log_decay": -np.exp(rng.uniform(-9, 3, width)),
            "bonus": rng.uniform(-9, 4, width),
            "num": den * rng.standard_normal(den.shape),
            "den": den,
            "top": rng.uniform(-20, 20, den.shape),
        }
        for slot in self.packed.slots[1:2]:
            made["num"][slot], made["den"][slot], made["top"][slot] = 0, 0, EMPTY_TOP
        # a sequence that begins with keys of which no e^k is a float32
        starting = rows if len(self.packed.slots) == 1 else self.packed.starts[1]
        made["rkv"][starting : starting + 1, width : 2 * width] = -LARGE_KEY
        return {name: array.astype(np.float32) for name, array in made.items()}

    def __str__(self) -> str:
        return f"{self.packed} of {self.width}, keys of {self.key_scale:g}"


TIME_MIX_CASES: tuple[TimeMixCase, ...] = tuple(
    TimeMixCase(Packed(lengths), width, key_scale)
    for lengths, (width, key_scale) in zip(
        LENGTHS, ((1, 1), (7, 30), (96, 1), (65, 8), (768, 1), (33, 30), (200, 2)), strict=True
    )
)
