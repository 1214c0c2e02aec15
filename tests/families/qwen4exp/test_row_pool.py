"""Reading rows with many threads: right rows in right places, and faults that stay where they are."""

from __future__ import annotations

import gc
import os
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kittiwake.errors import UsageError
from kittiwake.families.qwen4exp.row_pool import Gather, GatherBuffers, RowPool
from kittiwake.ops.row_reads import layout, reference
from kittiwake.ops.row_reads.layout import AHEAD, KINDS, URGENT
from tests.families.qwen4exp.tables import SmallTable
from tests.ops.bits import same_bits

COUNTS = (700, 1, 33, 300)
ROWS = sum(COUNTS)


@pytest.fixture
def small(tmp_path: Path) -> SmallTable:
    return SmallTable(tmp_path, COUNTS)


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def pool(request: pytest.FixtureRequest, small: SmallTable) -> Iterator[RowPool]:
    made = RowPool(small.table, readers=5, cache_bytes=0, is_direct=request.param)
    yield made
    made.close()


def room(pool: RowPool) -> GatherBuffers:
    return GatherBuffers(pool.table.row_bytes, pool.table.row_values)


def gather(pool: RowPool, ids: np.ndarray, lane: int = URGENT, buffers: GatherBuffers | None = None) -> Gather:
    buffers = buffers or room(pool)
    buffers.make_room(len(ids), len(ids))
    buffers.out[:] = np.nan
    started = pool.start(lane, buffers, ids, None, len(ids))
    pool.finish(started)
    return started


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "buffered"])
def test_every_kind_of_row_is_read_as_the_reference_reads_it(tmp_path: Path, kind: str, is_direct: bool) -> None:
    small = SmallTable(tmp_path, (40, 7), 64, kind)
    pool = RowPool(small.table, readers=3, is_direct=is_direct)
    ids = np.random.default_rng(1).integers(0, 47, 200)
    files = [os.open(path, os.O_RDONLY) for path in small.paths]
    expected = reference.gather_rows(files, small.begins, small.table.first_rows[:-1], small.table.row_bytes, kind, ids)
    for descriptor in files:
        os.close(descriptor)
    assert same_bits(gather(pool, ids).buffers.out[:200], expected)
    pool.close()


@pytest.mark.parametrize("asked", [1, 2, 31, 1500])
def test_rows_come_to_their_places_each_read_once(pool: RowPool, small: SmallTable, asked: int) -> None:
    buffers = room(pool)
    for seed in range(3):
        ids = np.random.default_rng(seed).integers(0, ROWS, asked)
        done = gather(pool, ids, buffers=buffers)
        assert same_bits(buffers.out[:asked], small.values[ids])
        assert done.unique == done.misses == len(np.unique(ids)) and done.jobs <= done.unique
        assert done.reads >= done.jobs and not len(done.failed) and done.gather_ms > 0


def test_the_first_and_the_last_row_of_every_part(pool: RowPool, small: SmallTable) -> None:
    ends = np.array(small.table.first_rows)
    ids = np.concatenate([ends[:-1], ends[1:] - 1])
    assert same_bits(gather(pool, ids).buffers.out[: len(ids)], small.values[ids])


def test_direct_reads_share_windows(small: SmallTable) -> None:
    pool = RowPool(small.table, readers=2, cache_bytes=0)
    if pool.buffered_because:
        pytest.skip(pool.buffered_because)
    done = gather(pool, np.arange(ROWS))
    assert done.unique == ROWS and done.jobs < ROWS // 5
    pool.close()


def test_rows_may_go_to_some_places_only(pool: RowPool, small: SmallTable) -> None:
    buffers = room(pool)
    buffers.make_room(4, 9)
    buffers.out[:] = 7
    started = pool.start(URGENT, buffers, np.array([5, 800, 5, 2]), np.array([8, 0, 3, 4]), 9)
    pool.finish(started)
    assert same_bits(buffers.out[[8, 0, 3, 4]], small.values[[5, 800, 5, 2]])
    assert (buffers.out[[1, 2, 5, 6, 7]] == 7).all()


def test_the_cache_gives_the_same_bits_without_a_read(small: SmallTable) -> None:
    pool = RowPool(small.table, readers=3)
    ids = np.random.default_rng(5).integers(0, ROWS, 300)
    first, again = gather(pool, ids), gather(pool, ids[::-1].copy())
    assert first.misses == first.unique and again.misses == again.reads == again.jobs == 0
    assert same_bits(again.buffers.out[:300][::-1], first.buffers.out[:300])
    pool.close()


def test_a_small_cache_forgets_what_was_used_longest_ago(small: SmallTable) -> None:
    pool = RowPool(small.table, readers=3, cache_bytes=8 * small.table.row_bytes)  # one set of eight
    for row in (0, 1):
        gather(pool, np.array([row]))
    for row in range(2, 8):
        gather(pool, np.array([row]))
        assert gather(pool, np.array([0])).misses == 0
    gather(pool, np.array([100]))  # row 1 makes way
    assert gather(pool, np.array([0])).misses == 0
    assert gather(pool, np.array([1])).misses == 1
    pool.close()


def test_a_gather_beyond_the_cache_keeps_only_what_it_needed_twice(small: SmallTable) -> None:
    pool = RowPool(small.table, readers=3, cache_bytes=64 * small.table.row_bytes)
    gather(pool, np.concatenate([np.arange(100), [42]]))
    assert gather(pool, np.arange(43)).misses == 42
    pool.close()


def test_a_table_cut_short_fails_the_lost_rows_and_the_pool_lives_on(pool: RowPool, small: SmallTable) -> None:
    last, begin = small.table.where(ROWS - 10)
    os.truncate(last, begin + 5)
    ids = np.array([3, ROWS - 11, ROWS - 10, ROWS - 1, 3])
    done = gather(pool, ids)
    assert done.buffers.ids[done.failed].tolist() == [ROWS - 10, ROWS - 1]
    out = done.buffers.out[:5]
    assert same_bits(out[[0, 1, 4]], small.values[[3, ROWS - 11, 3]]) and not out[2:4].any()
    told = str(pool.error(done, int(done.failed[0])))
    assert f"{last} is cut short: row {ROWS - 10:,} of the n-gram table ends at byte {begin + 320:,}" in told
    assert same_bits(gather(pool, ids[:2]).buffers.out[:2], small.values[ids[:2]])


def test_a_failed_row_is_not_cached(small: SmallTable) -> None:
    pool = RowPool(small.table, readers=2)
    path, begin = small.table.where(ROWS - 1)
    whole = path.read_bytes()
    os.truncate(path, begin)
    assert len(gather(pool, np.array([ROWS - 1])).failed) == 1
    path.write_bytes(whole)
    assert same_bits(gather(pool, np.array([ROWS - 1])).buffers.out[:1], small.values[-1:])
    pool.close()


def test_a_row_that_is_not_finite_is_told(pool: RowPool, small: SmallTable) -> None:
    small.overwrite(9, np.array([0x7F80], np.uint16).tobytes())
    done = gather(pool, np.array([8, 9, 10]))
    assert done.buffers.ids[done.failed].tolist() == [9] and not done.buffers.out[1].any()
    assert "row 9 of the n-gram table" in str(pool.error(done, int(done.failed[0])))
    assert "not finite" in str(pool.error(done, int(done.failed[0])))


def test_an_error_of_the_system_is_told_by_its_name(small: SmallTable, tmp_path: Path) -> None:
    pool = RowPool(small.table, readers=2, is_direct=False)
    other = os.open(tmp_path, os.O_RDONLY)  # reading a folder fails
    os.dup2(other, pool._shared.files.descriptors[0])
    os.close(other)
    done = gather(pool, np.array([0, ROWS - 1]))
    assert len(done.failed) == 1 and "Is a directory" in str(pool.error(done, int(done.failed[0])))
    assert same_bits(done.buffers.out[1:2], small.values[-1:])
    pool.close()


def test_an_urgent_gather_and_one_ahead_do_not_mix(pool: RowPool, small: SmallTable) -> None:
    rng = np.random.default_rng(0)
    ahead_buffers, buffers = room(pool), room(pool)
    for _ in range(10):
        wanted = rng.integers(0, ROWS, 1000)
        ahead = pool.start(AHEAD, ahead_buffers, wanted, None, 1000)
        for _ in range(5):
            ids = rng.integers(0, ROWS, 16)
            assert same_bits(gather(pool, ids, buffers=buffers).buffers.out[:16], small.values[ids])
        pool.finish(ahead)
        assert same_bits(ahead_buffers.out[:1000], small.values[wanted])


def test_a_gather_can_be_stopped_at_any_time(pool: RowPool, small: SmallTable) -> None:
    rng = np.random.default_rng(0)
    buffers = room(pool)
    for turn in range(60):
        started = pool.start(turn % 2, buffers, rng.integers(0, ROWS, 400), None, 400)
        time.sleep(turn * 2e-5)
        pool.stop(started)
        pool.stop(started)  # twice is harmless
        ids = rng.integers(0, ROWS, 20)
        assert same_bits(gather(pool, ids, turn % 2, buffers).buffers.out[:20], small.values[ids])


class BrokenOffError(BaseException):
    """What a signal's handler may raise in the middle of a wait."""


def test_a_wait_that_is_broken_off_leaves_the_pool_whole(pool: RowPool, small: SmallTable) -> None:
    rng = np.random.default_rng(0)
    buffers = room(pool)
    real = pool._wait

    def broken_off(lane: int) -> None:
        if rng.random() < 0.5:
            real(lane)
        raise BrokenOffError

    for turn in range(40):
        started = pool.start(URGENT, buffers, rng.integers(0, ROWS, 300), None, 300)
        end = pool.stop if turn % 2 else pool.finish
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool, "_wait", broken_off)
            with pytest.raises(BrokenOffError):
                end(started)
        ids = rng.integers(0, ROWS, 20)
        assert same_bits(gather(pool, ids, buffers=buffers).buffers.out[:20], small.values[ids])


def test_hints_that_nobody_reads_do_not_pile_up(pool: RowPool, small: SmallTable) -> None:
    buffers = room(pool)
    for _ in range(300):
        started = pool.start(AHEAD, buffers, np.array([1, 800]), None, 2)
        while not pool._lanes[AHEAD * layout.FIELDS + layout.END_NS]:
            time.sleep(1e-4)
        pool.finish(started)
    time.sleep(0.05)
    left = select.select([pool._shared.ends[AHEAD][0]], [], [], 0)[0]
    assert not left or len(os.read(pool._shared.ends[AHEAD][0], 4096)) <= 2


def reader_threads() -> int:
    return sum(thread.name.startswith("kittiwake-rows") for thread in threading.enumerate())


def open_files() -> int:
    return sum(1 for _ in Path("/dev/fd").iterdir())


def test_closing_ends_the_threads_and_the_files(small: SmallTable) -> None:
    before, files = reader_threads(), open_files()
    pool = RowPool(small.table, readers=6)
    assert reader_threads() == before + 6
    pool.start(URGENT, room(pool), np.arange(500), None, 500)  # nobody waits for it
    pool.close()
    pool.close()
    assert reader_threads() == before and open_files() == files


def test_a_pool_that_is_forgotten_ends_by_itself(small: SmallTable) -> None:
    before = reader_threads()
    pool = RowPool(small.table, readers=3)
    del pool
    gc.collect()
    assert reader_threads() == before


def test_figures_no_pool_can_have_are_refused(small: SmallTable) -> None:
    with pytest.raises(UsageError, match="0 readers of the table, expected 1 to"):
        RowPool(small.table, readers=0)
    with pytest.raises(UsageError, match="cache of -1 bytes"):
        RowPool(small.table, cache_bytes=-1)
