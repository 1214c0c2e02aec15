"""Block attention piece by piece: whose rows come when, and what is kept, on the CPU and on cards alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kittiwake.ops.block_attention import AttentionMemory
from kittiwake.ops.packed import Packed
from tests.ops.bits import same_bits


class Turn(NamedTuple):
    """Some rows of a case's sequences as one batch."""

    rows: np.ndarray
    starts: list[int]
    sequences: list[int]
    seen: list[int]
    """Tokens of each sequence before these rows."""


def turns(packed: Packed, sizes: list[int], together: int) -> Iterator[Turn]:
    """Each sequence in pieces of these sizes over and over, ``together`` sequences side by side."""
    done = [0] * len(packed.lengths)
    turn = 0
    while any(seen < length for seen, length in zip(done, packed.lengths, strict=True)):
        left = [b for b, length in enumerate(packed.lengths) if done[b] < length]
        picked = (left[turn % len(left) :] + left[: turn % len(left)])[:together]
        rows: list[int] = []
        starts, before = [0], []
        for b in picked:
            size = min(sizes[(turn + b) % len(sizes)], packed.lengths[b] - done[b])
            rows += range(int(packed.starts[b]) + done[b], int(packed.starts[b]) + done[b] + size)
            starts.append(len(rows))
            before.append(done[b])
            done[b] += size
        yield Turn(np.array(rows), starts, picked, before)
        turn += 1


def copied(memory: AttentionMemory) -> AttentionMemory:
    """The same values elsewhere."""
    return AttentionMemory(*(array.copy() for array in vars(memory).values()))


def same_memory(found: AttentionMemory, expected: AttentionMemory) -> bool:
    """Every bit of keys, values, block keys and open rows."""
    return all(
        same_bits(getattr(found, name), getattr(expected, name)) for name in ("keys", "values", "blocks", "open_rows")
    )
