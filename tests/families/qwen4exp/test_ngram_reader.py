"""Rows behind the forward: the same with and without look-ahead, which is used only where all of it fits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kittiwake.engine.batch import Batch
from kittiwake.errors import DeviceError, ModelError
from kittiwake.families.qwen4exp.ngram import NgramHash, next_history
from kittiwake.families.qwen4exp.ngram_reader import NgramReader
from kittiwake.families.qwen4exp.row_pool import GatherBuffers
from tests.families.qwen4exp.tables import SmallTable
from tests.ops.bits import same_bits

EOS, VOCAB = 3, 50
HASHING = NgramHash.derive(VOCAB, 3, 4, 60, 0, 1234, EOS)
HEADS = HASHING.heads


@pytest.fixture
def small(tmp_path: Path) -> SmallTable:
    return SmallTable(tmp_path, (300, HASHING.total_rows(128) - 300), 32)


@pytest.fixture(params=[0, 8 << 20], ids=["no cache", "cache"])
def reader(request: pytest.FixtureRequest, small: SmallTable) -> Iterator[NgramReader]:
    made = NgramReader(small.table, HASHING, readers=4, cache_bytes=request.param)
    yield made
    made.close()


class Sequence:
    """A slot's tokens, read chunk by chunk, and the rows they must give."""

    def __init__(self, small: SmallTable, slot: int, length: int = 200) -> None:
        rng = np.random.default_rng(slot)
        self.slot, self.fed, self.tokens = slot, 0, rng.integers(0, VOCAB, length)
        self.history = np.full((1, 2), -1, dtype=np.int64)
        rows = HASHING.rows(self.tokens, np.array([0, length]), self.history)
        self.rows = small.values[rows].reshape(length, -1)

    def part(self, count: int) -> np.ndarray:
        return self.tokens[self.fed : self.fed + count]

    def eat(self, count: int) -> np.ndarray:
        """Move on; the rows of the tokens eaten."""
        part = self.part(count)
        self.history = next_history(part, np.array([0, len(part)]), self.history)
        self.fed += len(part)
        return self.rows[self.fed - len(part) : self.fed]


def batch_of(parts: list[tuple[Sequence, int]], ahead: tuple[tuple[int, np.ndarray], ...] = ()) -> Batch:
    tokens = [one.part(count) for one, count in parts]
    starts = np.cumsum([0, *map(len, tokens)])
    slots = np.array([one.slot for one, _ in parts])
    return Batch(np.concatenate(tokens), starts, slots, np.zeros(0, np.int64), ahead)


def step(
    reader: NgramReader, parts: list[tuple[Sequence, int]], ahead: tuple[tuple[int, np.ndarray], ...] = ()
) -> None:
    """One forward: the rows are right, and those of the padding are zeros."""
    ticket = reader.begin(batch_of(parts, ahead), np.concatenate([one.history for one, _ in parts]))
    found = reader.take(ticket)
    expected = np.concatenate([one.eat(count) for one, count in parts])
    assert len(found) % 4 == 0 and len(found) - len(expected) < 4
    assert same_bits(found[: len(expected)], expected) and not found[len(expected) :].any()
    assert ticket.failures == {}


def after(one: Sequence, count: int, following: int) -> tuple[int, np.ndarray]:
    """What a scheduler would say when it gives a sequence ``count`` tokens and expects ``following`` more."""
    return one.slot, one.tokens[one.fed + count : one.fed + count + following]


@pytest.mark.parametrize("chunk", [1, 7, 64, 200])
def test_a_prompt_in_chunks_reads_every_chunk_but_the_first_ahead(
    reader: NgramReader, small: SmallTable, chunk: int
) -> None:
    one = Sequence(small, 1)
    steps = 0
    while one.fed < 200:
        step(reader, [(one, chunk)], (after(one, chunk, chunk),))
        steps += 1
    assert reader.stats.ahead_used == steps - 1 and reader.stats.ahead_dropped == 0
    assert reader.stats.gathers == steps and reader.stats.rows == 200 * HEADS


def test_a_look_ahead_outlives_the_steps_of_others(reader: NgramReader, small: SmallTable) -> None:
    one, other, third = (Sequence(small, slot) for slot in (1, 2, 5))
    step(reader, [(one, 50)], (after(one, 50, 30),))
    for _ in range(20):
        step(reader, [(other, 1), (third, 1)])
    step(reader, [(other, 1), (one, 30), (third, 2)], (after(one, 30, 9),))
    assert (reader.stats.ahead_used, reader.stats.ahead_dropped) == (1, 0)
    step(reader, [(one, 9)])
    assert (reader.stats.ahead_used, reader.stats.ahead_dropped) == (2, 0)


@pytest.mark.parametrize("wrong", ["fewer tokens", "more tokens", "other tokens", "other history", "other slot"])
def test_a_wrong_guess_is_drained_and_changes_nothing(reader: NgramReader, small: SmallTable, wrong: str) -> None:
    one = Sequence(small, 1)
    slot, tokens = after(one, 50, 30)
    guess = {"fewer tokens": tokens[:-1], "more tokens": np.append(tokens, 1), "other tokens": tokens[::-1].copy()}
    if wrong == "other slot":
        step(reader, [(one, 50)], ((9, tokens),))  # a slot that is not in the batch: nothing is known of its history
        assert (reader.stats.ahead_used, reader.stats.ahead_dropped) == (0, 0)
        return
    step(reader, [(one, 50)], ((slot, guess.get(wrong, tokens)),))
    if wrong == "other history":
        one.history = np.array([[7, 7]])
        rows = HASHING.rows(one.part(30), np.array([0, 30]), one.history)
        one.rows[50:80] = small.values[rows].reshape(30, -1)
    step(reader, [(one, 30)])
    assert (reader.stats.ahead_used, reader.stats.ahead_dropped) == (0, 1)


def test_a_new_guess_takes_the_place_of_one_not_used(reader: NgramReader, small: SmallTable) -> None:
    one, other = Sequence(small, 1), Sequence(small, 2)
    step(reader, [(one, 50)], (after(one, 50, 30),))
    step(reader, [(other, 50)], (after(other, 50, 30),))
    step(reader, [(one, 30)])
    step(reader, [(other, 30)])
    assert (reader.stats.ahead_used, reader.stats.ahead_dropped) == (1, 1)


def test_without_look_ahead_the_rows_are_the_same(small: SmallTable) -> None:
    reader = NgramReader(small.table, HASHING, readers=2, looks_ahead=False, is_direct=False)
    one = Sequence(small, 1)
    while one.fed < 200:
        step(reader, [(one, 33)], (after(one, 33, 33),))
    assert reader.stats.ahead_used == 0 and reader.describe()["read_as"] == "buffered: not asked for"
    reader.close()


def test_a_forward_that_broke_off_leaves_no_gather_behind(reader: NgramReader, small: SmallTable) -> None:
    one, other = Sequence(small, 1), Sequence(small, 2)
    step(reader, [(one, 50)], (after(one, 50, 30),))
    ticket = reader.begin(batch_of([(one, 30), (other, 3)]), np.concatenate([one.history, other.history]))
    reader.drop(ticket)
    reader.drop(ticket)
    reader.begin(batch_of([(other, 3)]), other.history)  # never taken, never dropped
    step(reader, [(other, 5)])
    step(reader, [(one, 30)])
    assert (reader.stats.ahead_used, reader.stats.ahead_dropped) == (1, 0)


def test_a_lost_row_fails_its_sequence_alone(small: SmallTable) -> None:
    reader = NgramReader(small.table, HASHING, readers=4, cache_bytes=0)
    one, other = Sequence(small, 4, 1), Sequence(small, 2, 1)
    mine, theirs = (set(HASHING.rows(s.tokens, np.array([0, 1]), s.history)[0].tolist()) for s in (one, other))
    bad = min(mine - theirs)
    small.overwrite(bad, np.array([0x7FC0], np.uint16).tobytes())
    ticket = reader.begin(batch_of([(other, 1), (one, 1)]), np.concatenate([other.history, one.history]))
    found = reader.take(ticket)
    assert set(ticket.failures) == {4} and f"row {bad:,} of the n-gram table" in str(ticket.failures[4])
    assert same_bits(found[:1], other.eat(1))
    step(reader, [(Sequence(small, 2, 1), 1)])
    reader.close()


def test_a_row_lost_ahead_is_told_when_it_is_used(small: SmallTable) -> None:
    reader = NgramReader(small.table, HASHING, readers=4, cache_bytes=0)
    one = Sequence(small, 1)
    path, begin = small.table.where(300)
    os.truncate(path, begin)
    ticket = reader.begin(batch_of([(one, 1)], (after(one, 1, 40),)), one.history)
    reader.take(ticket)
    one.eat(1)
    ticket = reader.begin(batch_of([(one, 40)]), one.history)
    reader.take(ticket)
    assert reader.stats.ahead_used == 1
    assert set(ticket.failures) == {1} and "is cut short" in str(ticket.failures[1])
    reader.close()


def test_memory_refused_is_told_before_anything_moves_and_ahead_is_done_without(
    reader: NgramReader, small: SmallTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Sequence(small, 1)
    real = GatherBuffers.make_room

    def refuse(self: GatherBuffers, asked: int, out_rows: int) -> None:
        if asked > 20 * HEADS:
            raise MemoryError
        real(self, asked, out_rows)

    monkeypatch.setattr(GatherBuffers, "make_room", refuse)
    with pytest.raises(DeviceError, match="n-gram rows of 21 tokens"):
        reader.begin(batch_of([(one, 21)]), one.history)
    step(reader, [(one, 20)], (after(one, 20, 30),))
    assert reader.stats.ahead_used == 0
    monkeypatch.undo()
    step(reader, [(one, 30)])
    assert reader.stats.ahead_used == 0


def test_a_table_with_too_few_rows_is_refused(tmp_path: Path) -> None:
    small = SmallTable(tmp_path, (HASHING.total_rows() - 1,), 32)
    with pytest.raises(ModelError, match=f"has {HASHING.total_rows() - 1:,} rows, the hash of this model reaches"):
        NgramReader(small.table, HASHING)


def test_memory_is_planned_and_the_figures_are_told(reader: NgramReader, small: SmallTable) -> None:
    one = Sequence(small, 1)
    planned = reader.plan_bytes(50)
    step(reader, [(one, 50)], (after(one, 50, 50),))
    step(reader, [(one, 50)])
    assert reader.workspace_bytes == planned
    told = reader.describe()
    assert told["rows"] == small.table.rows and told["kind"] == "BF16" and told["row_values"] == 32
    gathered = told["gathered"]
    assert gathered["rows"] == 100 * HEADS and gathered["unique_rows"] <= 100 * HEADS
    assert 0 <= gathered["hidden_share"] <= 1 and gathered["wait_ms"] > 0
