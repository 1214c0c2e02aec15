"""The definition of a product, readable and slow."""

from __future__ import annotations

import numpy as np


def product(x: np.ndarray, weight: np.ndarray, k_block: int) -> np.ndarray:
    """float32 x [R, K] times weight [K, N] → [R, N], fused multiply-adds over k in blocks of ``k_block``.

    A fused multiply-add is emulated in float64: the product of two float32 is exact there, and the one rounding of the
    sum to float64 before the rounding to float32 differs from a true one in about one of 2**29 cases.
    """
    rows, depth = x.shape
    total = np.zeros((rows, weight.shape[1]), dtype=np.float32)
    for start in range(0, depth, k_block):
        block = np.zeros_like(total)
        for k in range(start, min(start + k_block, depth)):
            exact = x[:, k : k + 1].astype(np.float64) * weight[k].astype(np.float64)
            block = (block.astype(np.float64) + exact).astype(np.float32)
        total = block if start == 0 else total + block
    return total
