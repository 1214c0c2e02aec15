"""Threads that read rows of one table and need the interpreter for nothing; see :mod:`kittiwake.ops.row_reads`."""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kittiwake.checkpoints.row_table import DIRECT_ALIGN, OpenFiles, RowTable
from kittiwake.errors import CheckpointError, UsageError
from kittiwake.ops.row_reads import layout
from kittiwake.ops.row_reads.cpu import WAYS, cancel, keep_rows, plan_gather, publish, serve

READERS = 32
"""Threads of a pool: reads wait for the disk, not for a core, so more than there are cores."""
CACHE_BYTES = 8 << 20
MAX_READERS = 1024
PLANNING_BYTES = 5 * 8
"""Bytes a row asked for that planning a gather takes: its number, its place, and their order."""
_NOTHING = np.zeros(0, dtype=np.int64)


def gather_bytes(asked: int, out_rows: int, row_bytes: int, row_values: int) -> int:
    """Bytes of :class:`GatherBuffers` with room for ``asked`` rows that are read into ``out_rows`` places."""
    return asked * (row_bytes + 8 * 8) + 2 * 8 + 4 * row_values * out_rows


class GatherBuffers:
    """The memory of one gather, kept and grown from gather to gather."""

    def __init__(self, row_bytes: int, row_values: int) -> None:
        self._row_bytes, self._row_values = row_bytes, row_values
        self._capacity = -1
        self.out = np.zeros((0, row_values), dtype=np.float32)
        self._grow(0)

    def _grow(self, asked: int) -> None:
        self._capacity = -1  # until all of it is there
        self.ids = self.begins = self.status = self.misses = self.job_parts = (
            _NOTHING  # the old goes before the new comes
        )
        self.target_first = self.job_first = self.targets = _NOTHING
        self.packed = np.zeros((0, self._row_bytes), np.uint8)
        self.ids, self.begins, self.status, self.misses, self.job_parts = np.zeros((5, asked), np.int64)
        self.target_first, self.job_first = np.zeros((2, asked + 1), np.int64)
        self.targets = np.zeros(asked, np.int64)
        self.packed = np.zeros((asked, self._row_bytes), np.uint8)
        self._capacity = asked

    def make_room(self, asked: int, out_rows: int) -> None:
        """Room for ``asked`` rows read into ``out_rows`` places; what ``out`` holds is lost when it grows.

        No gather may be under way in them. Raises MemoryError.
        """
        if asked > self._capacity:
            self._grow(asked)
        if out_rows > len(self.out):
            self.out = np.zeros((0, self._row_values), dtype=np.float32)
            self.out = np.zeros((out_rows, self._row_values), dtype=np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        small = (self.ids, self.begins, self.status, self.misses, self.job_parts)
        more = (self.target_first, self.job_first, self.targets, self.packed, self.out)
        return sum(array.nbytes for array in (*small, *more))


@dataclass(eq=False)
class Gather:
    """One gather under way, or over."""

    buffers: GatherBuffers
    lane: int
    started_ns: int
    asked: int
    unique: int
    misses: int
    jobs: int
    is_over: bool = False
    ended_ns: int = 0
    reads: int = 0
    read_bytes: int = 0

    @property
    def gather_ms(self) -> float:
        """From its start to the arrival of its last row."""
        return (self.ended_ns - self.started_ns) / 1e6

    @property
    def failed(self) -> np.ndarray:
        """int64: the unique rows that did not come, by their places in ``buffers.ids``."""
        return np.flatnonzero(self.buffers.status[: self.unique] != layout.READ_OK)


@dataclass
class _Shared:
    """What readers use, apart from the pool, so that the pool can end while they still hold it."""

    files: OpenFiles
    lanes: np.ndarray  # int64, see layout
    wake: tuple[int, int]
    ends: tuple[tuple[int, int], ...]
    threads: list[threading.Thread] = field(default_factory=list)

    def shut(self) -> None:
        """Let the readers go: they finish the reads under way, and only then are the files closed."""
        for lane in range(layout.LANES):
            cancel(self.lanes, lane)
        self.lanes[layout.STOP] = 1
        os.write(self.wake[1], bytes(len(self.threads)))  # not by closing: a forked process may hold the pipe's end too
        for thread in self.threads:
            thread.join()
        for descriptor in (*self.wake, *(end for pair in self.ends for end in pair)):
            os.close(descriptor)
        self.files.close()


def _poll_of(descriptor: int) -> select.poll:
    """What waits for bytes of a pipe, which from now on does not block."""
    os.set_blocking(descriptor, False)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return poll


def _drain(descriptor: int) -> None:
    """Take what a pipe that does not block holds."""
    try:
        os.read(descriptor, 4096)
    except BlockingIOError:
        pass


def now_ns() -> int:
    """The clock that readers write down ends with."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class RowPool:
    """Readers of one table, with a cache of the packed rows used last.

    Two gathers may be under way: an urgent one, and one ahead that gets only the readers which the urgent one leaves.
    One thread at a time may call it.
    """

    def __init__(
        self, table: RowTable, *, readers: int = READERS, cache_bytes: int = CACHE_BYTES, is_direct: bool = True
    ) -> None:
        """``is_direct``: past the page cache where the file system allows. Raises UsageError, CheckpointError."""
        if not 1 <= readers <= MAX_READERS:
            raise UsageError(f"{readers} readers of the table, expected 1 to {MAX_READERS}")
        if cache_bytes < 0:
            raise UsageError(f"a cache of {cache_bytes} bytes of rows, expected 0 or more")
        self.table, self.readers = table, readers
        self._first_rows = np.array(table.first_rows, dtype=np.int64)
        self._begins = np.array([part.begin for part in table.parts], dtype=np.int64)
        self._kind = layout.KINDS.index(table.kind)
        self._lanes = np.zeros(layout.STOP + 1, dtype=np.int64)
        self._number = 0
        self._under_way: list[Gather | None] = [None] * layout.LANES
        self._make_cache(cache_bytes)
        files = table.open_files(is_direct=is_direct)
        self.buffered_because = files.buffered_because
        """Why reads go through the page cache; empty where they do not."""
        self._aligns = np.array(files.aligns, dtype=np.int64)
        ends = tuple(os.pipe() for _ in range(layout.LANES))
        self._shared = _Shared(files, self._lanes, os.pipe(), ends)
        self._polls = [_poll_of(end) for end, _ in ends]
        self._finalizer = weakref.finalize(self, self._shared.shut)
        self._start_readers()

    def forget(self) -> None:
        """Empty the cache of rows."""
        self._tags[:], self._stamps[:] = -1, 0

    def _make_cache(self, cache_bytes: int) -> None:
        sets = cache_bytes // (self.table.row_bytes * WAYS)
        sets = 1 << (sets.bit_length() - 1) if sets else 0
        self._tags = np.full((sets, WAYS), -1, dtype=np.int64)
        self._stamps = np.zeros((sets, WAYS), dtype=np.int64)
        self._cached = np.zeros((sets * WAYS, self.table.row_bytes), dtype=np.uint8)
        self._clock = np.zeros(1, dtype=np.int64)

    def _start_readers(self) -> None:
        wake, ends = self._shared.wake, np.array([write for _, write in self._shared.ends], dtype=np.int64)
        descriptors = np.array(self._shared.files.descriptors, dtype=np.int64)
        window = -(-self.table.row_bytes // DIRECT_ALIGN) * DIRECT_ALIGN + 2 * DIRECT_ALIGN
        common = (ends, self._lanes, descriptors, self._aligns, self.table.row_bytes, self.table.row_values, self._kind)

        def read_until_closed(descriptor: int) -> None:
            serve(descriptor, *common, np.zeros(window + DIRECT_ALIGN, dtype=np.uint8))

        # Compiles once, here: a pipe without a writer is at its end.
        closed, writer = os.pipe()
        os.close(writer)
        read_until_closed(closed)
        os.close(closed)
        for number in range(self.readers):
            thread = threading.Thread(
                target=read_until_closed, args=(wake[0],), name=f"kittiwake-rows-{number}", daemon=True
            )
            thread.start()
            self._shared.threads.append(thread)

    def start(self, lane: int, buffers: GatherBuffers, ids: np.ndarray, places: np.ndarray | None, rows: int) -> Gather:
        """Begin to read rows ``ids`` (int64 [M]) into ``buffers.out[places]`` ([M]; left out: 0 to M - 1) of ``rows`` places.

        ``buffers.out`` may be read when :meth:`finish` has returned. A gather that the lane still holds is stopped.
        """
        if (before := self._under_way[lane]) is not None:
            self.stop(before)
        started_ns = now_ns()
        buffers.make_room(len(ids), rows)
        order = np.argsort(ids)
        buffers.targets[: len(ids)] = order
        unique, misses, jobs = plan_gather(
            ids[order], buffers.targets[: len(ids)], _NOTHING if places is None else places, self._first_rows,
            self._begins, self._aligns, self._kind, self._tags, self._stamps, self._cached, self._clock,
            buffers.ids, buffers.begins, buffers.target_first, buffers.misses, buffers.job_first, buffers.job_parts,
            buffers.packed, buffers.status, buffers.out,
        )  # fmt: skip
        gather = Gather(buffers, lane, started_ns, len(ids), unique, misses, jobs)
        self._under_way[lane] = gather
        if jobs:
            self._publish(gather)
            os.write(self._shared.wake[1], bytes(min(self.readers, jobs)))
        else:
            gather.ended_ns = now_ns()
        return gather

    def _publish(self, gather: Gather) -> None:
        """Point the gather's lane at its arrays."""
        buffers, fields = gather.buffers, self._lanes[gather.lane * layout.FIELDS :][: layout.FIELDS]
        pointers: dict[int, np.ndarray] = {
            layout.JOB_PARTS: buffers.job_parts,
            layout.JOB_FIRST: buffers.job_first,
            layout.MISSES: buffers.misses,
            layout.BEGINS: buffers.begins,
            layout.PACKED: buffers.packed,
            layout.STATUS: buffers.status,
            layout.TARGET_FIRST: buffers.target_first,
            layout.TARGETS: buffers.targets,
            layout.OUT: buffers.out,
        }
        for place, array in pointers.items():
            fields[place] = array.ctypes.data
        fields[layout.UNIQUE], fields[layout.OUT_ROWS] = gather.unique, len(buffers.out)
        self._number = self._number % ((1 << 30) - 1) + 1
        publish(self._lanes, gather.lane, self._number, gather.jobs)

    def finish(self, gather: Gather) -> None:
        """Wait until every row has come or failed; then the gather's figures and ``failed`` are there, and the lane is free."""
        if gather.is_over:
            return
        if gather.jobs:
            self._wait(gather.lane)
            self._note_end(gather)
        buffers = gather.buffers
        keep_rows(
            buffers.ids, buffers.status, buffers.packed, buffers.target_first, gather.unique,
            self._tags, self._stamps, self._cached, self._clock,
        )  # fmt: skip
        gather.is_over, self._under_way[gather.lane] = True, None

    def _wait(self, lane: int) -> None:
        """Until the lane's gather is over. A byte of the pipe is a hint only: one may be left of an earlier gather."""
        end = self._shared.ends[lane][0]
        while not self._lanes[lane * layout.FIELDS + layout.END_NS]:
            self._polls[lane].poll()
            _drain(end)
        _drain(end)

    def _note_end(self, gather: Gather) -> None:
        fields = self._lanes[gather.lane * layout.FIELDS :][: layout.FIELDS]
        gather.ended_ns, gather.reads = int(fields[layout.END_NS]), int(fields[layout.READS])
        gather.read_bytes = int(fields[layout.BYTES])

    def stop(self, gather: Gather) -> None:
        """Drain a gather that nobody wants any more: reads under way end, no other begins, and the lane is free."""
        if gather.is_over:
            return
        if gather.jobs:
            cancel(self._lanes, gather.lane)
            self._wait(gather.lane)
        gather.is_over, self._under_way[gather.lane] = True, None

    def error(self, gather: Gather, unique: int) -> CheckpointError:
        """Why a row of ``gather.failed`` did not come."""
        row, status = int(gather.buffers.ids[unique]), int(gather.buffers.status[unique])
        path, begin = self.table.where(row)
        if status == layout.NOT_FINITE:
            return CheckpointError(
                f"{path}: row {row:,} of the n-gram table (byte {begin:,}) holds values that are not finite",
                "the file is damaged: get it again",
            )
        if status == layout.CUT_SHORT:
            return CheckpointError(
                f"{path} is cut short: row {row:,} of the n-gram table ends at byte {begin + self.table.row_bytes:,}",
                "the file was changed while the model ran: get it again, and start anew",
            )
        return CheckpointError(
            f"{path} cannot be read at byte {begin:,} (row {row:,} of the n-gram table): {os.strerror(status)}",
            "check the disk",
        )

    def close(self) -> None:
        """End the readers and close the files. Closing twice is harmless."""
        for gather in self._under_way:
            if gather is not None:
                self.stop(gather)
        self._finalizer()

    def describe(self) -> dict[str, Any]:
        """The table, how it is read, and the memory that takes: JSON values."""
        return {
            **self.table.describe(),
            "read_as": "direct" if not self.buffered_because else f"buffered: {self.buffered_because}",
            "readers": self.readers,
            "cache_bytes": self._cached.nbytes,
        }
