"""The hash on the CPU: 64-bit integers, no product of which leaves 63 bits."""

from __future__ import annotations

import numpy as np

from kittiwake.ops.jit import kernel


@kernel()
def _hash_rows(token_ids, starts, history, eos, multipliers, head_sizes, offsets, rows):  # type: ignore[no-untyped-def]
    orders = multipliers.shape[0] - 1
    heads = head_sizes.shape[0] // orders
    for b in range(starts.shape[0] - 1):
        first = starts[b]
        for i in range(first, starts[b + 1]):
            mixed = token_ids[i] * multipliers[0]
            is_cut = False
            for order in range(orders):
                back = i - order - 1
                previous = token_ids[back] if back >= first else history[b, first - back - 1]
                is_cut = is_cut or previous < 0 or previous == eos
                mixed ^= (eos if is_cut else previous) * multipliers[order + 1]
                for head in range(order * heads, (order + 1) * heads):
                    rows[i, head] = mixed % head_sizes[head] + offsets[head]


def ngram_hash(
    token_ids: np.ndarray,
    starts: np.ndarray,
    history: np.ndarray,
    eos: int,
    multipliers: np.ndarray,
    head_sizes: np.ndarray,
    offsets: np.ndarray,
    rows: np.ndarray,
) -> None:
    """int64 token_ids [N], starts [B + 1], history [B, n - 1] (newest first, -1 none), rows [N, H] (written).

    multipliers [n], head_sizes and offsets [H], H = (n - 1) times the heads of an order.
    """
    _hash_rows(token_ids, starts, history, np.int64(eos), multipliers, head_sizes, offsets, rows)
