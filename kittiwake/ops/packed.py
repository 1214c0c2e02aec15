"""Sequences laid end to end, for the cases of ops that keep a state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LENGTHS: tuple[tuple[int, ...], ...] = (
    (1,),
    (2,),
    (63,),
    (65,),
    (127,),
    (1,) * 17,
    (3, 1, 7, 1, 31, 5, 1, 9),
)
"""Hostile batches by their sequences' lengths: one row, many sequences of one row, odd lengths, sides of 64 and 128."""


@dataclass(frozen=True)
class Packed:
    """Where B sequences lie: rows, and slots of a table that has more slots than sequences."""

    lengths: tuple[int, ...]

    @property
    def rows(self) -> int:
        """N, the number of packed rows."""
        return sum(self.lengths)

    @property
    def starts(self) -> np.ndarray:
        """int64 [B + 1]: rows starts[b] to starts[b + 1] are those of sequence b."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    @property
    def owner(self) -> np.ndarray:
        """int64 [N]: the sequence of each row."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths).astype(np.int64)

    @property
    def slots(self) -> np.ndarray:
        """int64 [B]: places in the table, neither in order nor side by side."""
        return (np.arange(len(self.lengths), dtype=np.int64) * 2 + 1)[::-1].copy()

    @property
    def table_slots(self) -> int:
        """S: slots of the table, those that no sequence has among them."""
        return 2 * len(self.lengths) + 1

    def __str__(self) -> str:
        same = len(set(self.lengths)) == 1 and len(self.lengths) > 1
        return f"{len(self.lengths)}x{self.lengths[0]}" if same else "+".join(map(str, self.lengths))
