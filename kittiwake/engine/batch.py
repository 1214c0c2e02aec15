"""The one thing a forward is given: packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kittiwake.errors import RequestError


@dataclass(frozen=True)
class Batch:
    """Rows of several sequences laid end to end.

    A decode step is the case of one row a sequence, a prompt the case of one sequence with many rows; a mixed batch is
    the same call. Rows are never padded with tokens that touch a state.
    """

    token_ids: np.ndarray  # int64 [N]
    starts: np.ndarray  # int64 [B + 1], starts[b]:starts[b + 1] are the rows of sequence b
    slots: np.ndarray  # int64 [B], place of each sequence in the state table; no slot twice
    want_rows: np.ndarray  # int64 [W], rows whose logits are wanted, ascending
    ahead: tuple[tuple[int, Sequence[int] | np.ndarray], ...] = ()
    """(slot, token ids): what these sequences are expected to read next. A guess: it may change no output."""

    @property
    def rows(self) -> int:
        """N, the number of packed rows."""
        return int(self.token_ids.shape[0])

    @staticmethod
    def pack(sequences: list[tuple[int, list[int]]], want: list[list[int]] | None = None) -> Batch:
        """Build a batch from ``(slot, token ids)`` pairs.

        ``want[b]`` lists rows of sequence b (counted from its own first row) whose logits are wanted; left out, the last
        row of each. Raises RequestError for an empty sequence, a slot named twice, or wanted rows that do not exist.
        """
        if not sequences:
            raise RequestError("a batch needs at least one sequence, got none")
        if want is not None and len(want) != len(sequences):
            raise RequestError(f"{len(sequences)} sequences need as many lists of wanted rows, got {len(want)}")
        slots = [slot for slot, _ in sequences]
        if len(set(slots)) != len(slots):
            raise RequestError(f"a slot stands twice in one batch: {slots}")
        starts = [0]
        flat: list[int] = []
        wanted: list[int] = []
        for index, (slot, ids) in enumerate(sequences):
            if not ids:
                raise RequestError(f"sequence {index} (slot {slot}) has no tokens")
            rows = [len(ids) - 1] if want is None else want[index]
            for row in rows:
                if not 0 <= row < len(ids):
                    raise RequestError(f"wanted row {row} is outside the {len(ids)} rows of sequence {index}")
            wanted.extend(starts[-1] + row for row in sorted(rows))
            flat.extend(ids)
            starts.append(len(flat))
        return Batch(
            token_ids=np.asarray(flat, dtype=np.int64),
            starts=np.asarray(starts, dtype=np.int64),
            slots=np.asarray(slots, dtype=np.int64),
            want_rows=np.asarray(wanted, dtype=np.int64),
        )
