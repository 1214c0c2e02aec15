"""Products on which every implementation must give the reference's bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MatmulCase:
    """x [rows, depth] times weight [depth, columns], summed in blocks of ``k_block``."""

    rows: int
    depth: int
    columns: int
    k_block: int

    def make(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """x [R, K] and weight [K, N], float32; exponents from 2**-20 to 2**20 let the order of a sum show in its bits."""
        rng = np.random.default_rng([seed, self.rows, self.depth, self.columns])
        scale = np.exp2(rng.integers(-20, 21, (self.rows, self.depth)))
        x = rng.standard_normal((self.rows, self.depth)) * scale
        return x.astype(np.float32), rng.standard_normal((self.depth, self.columns)).astype(np.float32)

    def __str__(self) -> str:
        return f"{self.rows}x{self.depth}x{self.columns} by {self.k_block}"


CASES: tuple[MatmulCase, ...] = (
    MatmulCase(1, 1, 1, 192),
    MatmulCase(2, 7, 3, 192),
    MatmulCase(3, 8, 17, 3),
    MatmulCase(5, 9, 16, 8),
    MatmulCase(1, 191, 515, 192),
    MatmulCase(4, 192, 33, 192),
    MatmulCase(7, 193, 15, 192),
    MatmulCase(2, 385, 65, 192),
    MatmulCase(63, 65, 5, 64),
    MatmulCase(65, 63, 127, 1),
    MatmulCase(127, 131, 31, 66),
    MatmulCase(1, 1000, 2051, 256),
)
