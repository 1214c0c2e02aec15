"""Readable reference in Python's integers."""

from __future__ import annotations

import numpy as np


def window(token: int, before: list[int], eos: int) -> list[int]:
    """The ids that are hashed, newest first; ``before`` are the ids before the token, newest first, -1 where missing."""
    ids = [token]
    is_cut = False
    for previous in before:
        is_cut = is_cut or previous < 0 or previous == eos
        ids.append(eos if is_cut else previous)
    return ids


def ngram_hash(
    token_ids: np.ndarray,
    starts: np.ndarray,
    history: np.ndarray,
    eos: int,
    multipliers: np.ndarray,
    head_sizes: np.ndarray,
    offsets: np.ndarray,
) -> np.ndarray:
    """token_ids [N], history [B, n - 1] (newest first, -1 none), multipliers [n], head_sizes, offsets [H] → rows [N, H]."""
    orders = len(multipliers) - 1
    heads = len(head_sizes) // orders
    rows = np.empty((len(token_ids), len(head_sizes)), dtype=np.int64)
    for b in range(len(starts) - 1):
        before = [int(i) for i in history[b]]
        for i in range(int(starts[b]), int(starts[b + 1])):
            ids = window(int(token_ids[i]), before, eos)
            mixed = ids[0] * int(multipliers[0])
            for order in range(orders):
                mixed ^= ids[order + 1] * int(multipliers[order + 1])
                for head in range(order * heads, (order + 1) * heads):
                    rows[i, head] = mixed % int(head_sizes[head]) + int(offsets[head])
            before = [int(token_ids[i]), *before][:orders]
    return rows
