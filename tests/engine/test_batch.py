"""Packing rows: where everything lies, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from kittiwake.engine.batch import Batch
from kittiwake.errors import RequestError


def test_sequences_lie_end_to_end() -> None:
    batch = Batch.pack([(3, [5, 6]), (1, [7]), (9, [8, 9, 10])])
    assert batch.rows == 6
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.starts.tolist() == [0, 2, 3, 6]
    assert batch.slots.tolist() == [3, 1, 9]
    assert batch.want_rows.tolist() == [1, 2, 5]
    assert {array.dtype for array in (batch.token_ids, batch.starts, batch.slots, batch.want_rows)} == {
        np.dtype("int64")
    }


def test_wanted_rows_are_counted_within_their_sequence_and_ascend() -> None:
    batch = Batch.pack([(1, [5, 6, 7]), (2, [8]), (3, [9, 10])], [[2, 0], [], [1]])
    assert batch.want_rows.tolist() == [0, 2, 5]


def test_nothing_wanted_is_no_row() -> None:
    batch = Batch.pack([(1, [5])], [[]])
    assert batch.want_rows.shape == (0,) and batch.want_rows.dtype == np.int64


@pytest.mark.parametrize(
    ("sequences", "want", "message"),
    [
        ([], None, "at least one sequence"),
        ([(1, [2]), (1, [3])], None, r"twice in one batch: \[1, 1\]"),
        ([(1, [2]), (2, [])], None, r"sequence 1 \(slot 2\) has no tokens"),
        ([(1, [2, 3])], [[2]], "row 2 is outside the 2 rows"),
        ([(1, [2, 3])], [[-1]], "row -1 is outside"),
        ([(1, [2]), (2, [3])], [[0]], "2 sequences need as many lists of wanted rows, got 1"),
        ([(1, [2])], [[0], [0]], "1 sequences need as many lists of wanted rows, got 2"),
    ],
)
def test_impossible_batches_are_refused(
    sequences: list[tuple[int, list[int]]], want: list[list[int]] | None, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        Batch.pack(sequences, want)
