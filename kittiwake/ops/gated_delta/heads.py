"""Which key head a value head reads."""

from __future__ import annotations

import numpy as np

from kittiwake.errors import ModelError

ORDERS = ("grouped", "tiled")
"""grouped: the value heads of a key head stand side by side (HF files); tiled: they stand nk apart (GGUF files)."""


def key_head_of(value_heads: int, key_heads: int, order: str) -> np.ndarray:
    """int64 [value_heads]: the key head of each value head, for one of ORDERS.

    Raises ModelError when the value heads cannot be shared out evenly, or for another order.
    """
    if order not in ORDERS:
        raise ModelError(f"order of value heads is {order!r}, expected one of {ORDERS}")
    if key_heads < 1 or value_heads < 1 or value_heads % key_heads:
        raise ModelError(f"{value_heads} value heads cannot be shared out evenly over {key_heads} key heads")
    heads = np.arange(value_heads, dtype=np.int64)
    return heads // (value_heads // key_heads) if order == "grouped" else heads % key_heads
