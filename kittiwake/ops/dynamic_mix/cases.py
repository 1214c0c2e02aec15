"""Packed rows on which every implementation must agree with the reference: those of the plain token shift, and ``low``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kittiwake.ops.shift_mix import cases as shift_mix


@dataclass(frozen=True)
class DynamicMixCase:
    """N packed rows of C channels, M mixes."""

    shift: shift_mix.ShiftMixCase

    def make(self, seed: int = 0) -> dict[str, np.ndarray]:
        """What ShiftMixCase makes, and mix_x [C] and low [N, M C], float32."""
        made = self.shift.make(seed)
        rng = np.random.default_rng([seed + 1, self.shift.packed.rows, self.shift.width])
        rows, columns = self.shift.packed.rows, self.shift.mixes * self.shift.width
        made["mix_x"] = rng.uniform(0, 1, self.shift.width).astype(np.float32)
        made["low"] = rng.standard_normal((rows, columns)).astype(np.float32)
        return made

    def __str__(self) -> str:
        return str(self.shift)


CASES: tuple[DynamicMixCase, ...] = tuple(DynamicMixCase(case) for case in shift_mix.CASES)
