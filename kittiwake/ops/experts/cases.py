"""Rows on which every implementation must agree with the reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ExpertsCase:
    """N rows of C channels, k of E experts of ff hidden channels each."""

    rows: int
    experts: int
    top_k: int
    width: int
    ff: int
    is_renormalised: bool

    def make(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Float32 x [N, C], logits [N, E], gate_up [E, C, 2 ff], down [E, ff, C], shared [N, C], shared_gate [N, 1].

        Logits are rounded to halves, so that many are the same, and one row's are all the same; few experts are liked
        by most rows, and some by none.
        """
        rng = np.random.default_rng([seed, self.rows, self.experts, self.width, self.ff])

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        liked = rng.standard_normal(self.experts) * 3
        logits = np.round((rng.standard_normal((self.rows, self.experts)) + liked) * 2) / 2
        logits[self.rows // 2] = 1
        return {
            "x": draw(self.rows, self.width),
            "logits": logits.astype(np.float32),
            "gate_up": draw(self.experts, self.width, 2 * self.ff) / np.float32(np.sqrt(self.width)),
            "down": draw(self.experts, self.ff, self.width) / np.float32(np.sqrt(self.ff)),
            "shared": draw(self.rows, self.width),
            "shared_gate": draw(self.rows, 1),
        }

    def __str__(self) -> str:
        renormalised = "renormalised" if self.is_renormalised else "as they are"
        sizes = f"{self.top_k} of {self.experts} experts {self.width}x{self.ff}"
        return f"{self.rows} rows, {sizes}, {renormalised}"


CASES: tuple[ExpertsCase, ...] = (
    ExpertsCase(1, 1, 1, 1, 1, True),
    ExpertsCase(3, 5, 2, 7, 3, True),
    ExpertsCase(1, 32, 8, 64, 48, True),
    ExpertsCase(17, 16, 16, 33, 5, False),
    ExpertsCase(65, 7, 3, 385, 17, True),
    ExpertsCase(127, 64, 10, 31, 200, True),
    ExpertsCase(40, 3, 1, 16, 515, False),
)
