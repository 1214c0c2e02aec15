"""Batches cut into launches and padded to buckets: every row runs once, in order, and padding belongs to nobody."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kittiwake.engine.batch import Batch
from kittiwake.engine.states import SCRATCH_SLOT
from kittiwake.families import cuda_rows
from kittiwake.families.cuda_rows import (
    DECODE_BUCKETS,
    FEW_ROWS,
    PROMPT_BUCKETS,
    SEQUENCE_BUCKETS,
    Piece,
    RowBuffer,
    Shape,
    bucket,
    cut,
    largest_bucket,
    nobody,
    padded_shape,
    shape_of,
)
from kittiwake.layers.cuda_linear import LIBRARY_ROWS


def packed(lengths: list[int], want: list[list[int]] | None = None) -> Batch:
    """Sequences in slots 3, 5, 7, …, every token another number."""
    ids = iter(range(100, 10**6))
    sequences = [(3 + 2 * index, [next(ids) for _ in range(length)]) for index, length in enumerate(lengths)]
    return Batch.pack(sequences, want)


def random_batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = rng.choice([1, 1, 1, 2, 3, 7, 16, 40], rng.integers(1, 40)).tolist()
    want = [sorted(rng.choice(length, rng.integers(0, length + 1), replace=False).tolist()) for length in lengths]
    return packed(lengths, want)


# Cutting


@pytest.mark.parametrize("most_rows", [16, 17, 64, 8192])
@pytest.mark.parametrize("seed", range(20))
def test_every_row_runs_once_and_a_sequence_in_order(seed: int, most_rows: int) -> None:
    batch = random_batch(seed)
    pieces = cut(batch, most_rows)
    assert sorted(np.concatenate([piece.rows for piece in pieces]).tolist()) == list(range(batch.rows))
    reached = dict.fromkeys(batch.slots.tolist(), 0)
    for piece in pieces:
        assert 0 < len(piece.token_ids) <= most_rows
        assert np.array_equal(piece.token_ids, batch.token_ids[piece.rows])
        assert piece.starts[0] == 0 and piece.starts[-1] == len(piece.rows) and (np.diff(piece.starts) > 0).all()
        assert len(set(piece.slots.tolist())) == len(piece.slots)
        for index, slot in enumerate(piece.slots.tolist()):
            rows = piece.rows[piece.starts[index] : piece.starts[index + 1]]
            first = int(batch.starts[batch.slots.tolist().index(slot)])
            assert rows.tolist() == list(range(first + reached[slot], first + reached[slot] + len(rows)))
            reached[slot] += len(rows)


@pytest.mark.parametrize("most_rows", [16, 64, 8192])
@pytest.mark.parametrize("seed", range(20))
def test_every_wanted_row_has_its_place_in_the_answer(seed: int, most_rows: int) -> None:
    batch = random_batch(seed)
    places: list[int] = []
    for piece in cut(batch, most_rows):
        assert np.array_equal(piece.rows[piece.want], batch.want_rows[piece.places])
        places += piece.places.tolist()
    assert sorted(places) == list(range(len(batch.want_rows)))


def test_sequences_of_one_row_go_first_and_by_themselves() -> None:
    pieces = cut(packed([1, 9, 1, 2]), 64)
    assert [piece.is_decode for piece in pieces] == [True, False]
    assert pieces[0].slots.tolist() == [3, 7] and pieces[1].slots.tolist() == [5, 9]


def test_decoding_never_needs_a_launch_without_a_bucket() -> None:
    """Only launches of buckets have graphs; and rows of logits are made for no more."""
    batch = packed(
        [1] * (2 * DECODE_BUCKETS[-1] + 3), [[0] if i % 5 == 0 else [] for i in range(2 * DECODE_BUCKETS[-1] + 3)]
    )
    pieces = cut(batch, 8192)
    assert [len(piece.rows) for piece in pieces] == [DECODE_BUCKETS[-1], DECODE_BUCKETS[-1], 3]
    assert all(shape_of(piece, 8192)[1] for piece in pieces)


# Buckets


@pytest.mark.parametrize("buckets", [DECODE_BUCKETS, PROMPT_BUCKETS, SEQUENCE_BUCKETS])
def test_the_least_bucket_that_holds_a_value_is_taken(buckets: tuple[int, ...]) -> None:
    assert list(buckets) == sorted(set(buckets))
    for value in range(1, buckets[-1] + 1):
        size = bucket(value, buckets)
        assert size is not None and size >= value
        assert all(other < value or other >= size for other in buckets)
    assert bucket(buckets[-1] + 1, buckets) is None


def test_products_are_proved_at_every_bucket() -> None:
    buckets = {*DECODE_BUCKETS, *PROMPT_BUCKETS}
    assert {size for size in buckets if size > FEW_ROWS} == set(LIBRARY_ROWS)


def test_a_launch_of_the_most_rows_is_a_bucket() -> None:
    assert [largest_bucket(size) for size in (16, 47, 512, 3071, 8192, 10**6)] == [16, 32, 512, 2560, 8192, 8192]


@pytest.mark.parametrize(
    ("lengths", "want", "most", "shape", "kept"),
    [
        ([1] * 5, None, 8192, Shape(True, 6, 6, 6), True),
        ([17], None, 8192, Shape(False, 32, 1, 1), True),
        ([5, 5, 5], None, 8192, Shape(False, 16, 4, 4), True),
        ([17], [[3, 4, 5]], 8192, Shape(False, 32, 1, 3), False),  # more wanted rows than sequences have graphs for
        ([2] * 33, None, 8192, Shape(False, 96, 33, 33), False),
        ([2] * 33, None, 80, Shape(False, 66, 33, 33), False),
        ([7], [[1, 2]], 8192, Shape(False, 7, 1, 2), False),
        ([60], None, 60, Shape(False, 60, 1, 1), False),  # its bucket is larger than the workspace
        ([3], [[]], 8192, Shape(False, 16, 1, 1), True),
    ],
)
def test_shapes_of_pieces(
    lengths: list[int], want: list[list[int]] | None, most: int, shape: Shape, kept: bool
) -> None:
    (piece,) = cut(packed(lengths, want), most)
    assert shape_of(piece, most) == (shape, kept)


# The buffer


@pytest.fixture
def buffer() -> RowBuffer:
    """One in host memory: there is neither pinned memory nor an event without a card."""
    made = RowBuffer(600, torch.device("cpu"))
    made._device.fill_(-77)
    for tensor, _ in made._ring:
        tensor.fill_(-77)  # what an earlier, longer launch left
    return made


def views(buffer: RowBuffer, shape: Shape) -> dict[str, list[int]]:
    rows = buffer.views(shape)
    return {name: getattr(rows, name).tolist() for name in ("token_ids", "owners", "starts", "slots", "want")}


def test_a_prompt_is_padded_with_rows_and_sequences_of_nobody(buffer: RowBuffer) -> None:
    (piece,) = cut(packed([3, 2], [[2], []]), 64)
    buffer.fill(piece, Shape(False, 8, 4, 4))
    assert views(buffer, Shape(False, 8, 4, 4)) == {
        "token_ids": [100, 101, 102, 103, 104, 0, 0, 0],
        "owners": [0, 0, 0, 1, 1, -1, -1, -1],
        "starts": [0, 3, 5, 5, 5],
        "slots": [3, 5, SCRATCH_SLOT, SCRATCH_SLOT],
        "want": [2, 0, 0, 0],
    }


def test_decoding_is_padded_with_the_scratch_slot(buffer: RowBuffer) -> None:
    (piece,) = cut(packed([1, 1, 1], [[], [0], []]), 64)
    buffer.fill(piece, Shape(True, 4, 4, 4))
    expected = {
        "token_ids": [100, 101, 102, 0],
        "owners": [0, 1, 2, 3],
        "starts": [0, 1, 2, 3, 4],
        "slots": [3, 5, 7, SCRATCH_SLOT],
        "want": [0, 1, 2, 3],
    }
    assert views(buffer, Shape(True, 4, 4, 4)) == expected
    buffer.fill(nobody(Shape(True, 4, 4, 4)), Shape(True, 4, 4, 4))
    buffer.fill_decoding(packed([1, 1, 1]), Shape(True, 4, 4, 4))
    assert views(buffer, Shape(True, 4, 4, 4)) == expected


@pytest.mark.parametrize("shape", [Shape(True, 8, 8, 8), Shape(False, 32, 4, 4)])
def test_a_launch_of_nobody_names_the_scratch_slot_only(buffer: RowBuffer, shape: Shape) -> None:
    buffer.fill(nobody(shape), shape)
    found = views(buffer, shape)
    assert set(found["slots"]) == {SCRATCH_SLOT}
    if not shape.is_decode:
        assert set(found["owners"]) == {-1} and set(found["starts"]) == {0}


def test_every_part_starts_at_16_bytes_and_parts_do_not_overlap(buffer: RowBuffer) -> None:
    for shape in (Shape(False, 17, 3, 5), Shape(True, 3, 3, 3), Shape(False, 600, 600, 600)):
        rows = buffer.views(shape)
        end = 0
        for part in (rows.token_ids, rows.owners, rows.starts, rows.slots, rows.want):
            assert part.storage_offset() % 4 == 0 and part.storage_offset() >= end
            end = part.storage_offset() + len(part)
        assert end <= len(buffer._device)


def test_more_launches_than_the_ring_has_turns(buffer: RowBuffer) -> None:
    for turn in range(3 * cuda_rows._RING):
        empty = np.zeros(0, dtype=np.int64)
        piece = Piece(False, np.full(2, turn), np.array([0, 2]), np.array([1]), empty, empty, np.arange(2))
        buffer.fill(piece, padded_shape(piece, 600))
        assert views(buffer, padded_shape(piece, 600))["token_ids"] == [turn, turn]
