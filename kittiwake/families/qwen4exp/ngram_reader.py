"""The rows of an n-gram layer, read behind the forward: begun at its start, waited for where they are used.

When a chunk's rows have come, those of the chunk that is to follow are begun into a second buffer. They are used only
if the sequence, its tokens and the ids before them are then the same, so a wrong guess costs reads and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kittiwake.checkpoints.row_table import RowTable
from kittiwake.engine.batch import Batch
from kittiwake.errors import CheckpointError, DeviceError, ModelError
from kittiwake.families.qwen4exp.ngram import NgramHash, next_history
from kittiwake.families.qwen4exp.row_pool import (
    CACHE_BYTES,
    READERS,
    Gather,
    GatherBuffers,
    RowPool,
    gather_bytes,
    now_ns,
)
from kittiwake.layers.linear import padded
from kittiwake.ops.row_reads.layout import AHEAD, URGENT


@dataclass
class ReadStats:
    """Sums over all gathers whose rows were used."""

    gathers: int = 0
    rows: int = 0
    """Rows asked for, several times the same among them."""
    unique_rows: int = 0
    cached_rows: int = 0
    """Of the unique ones those that the cache had."""
    windows: int = 0
    """Pieces of files, each read at once."""
    reads: int = 0
    """Calls of the system."""
    read_bytes: int = 0
    gather_ms: float = 0.0
    wait_ms: float = 0.0
    """How long forwards stood still for rows."""
    ahead_used: int = 0
    ahead_dropped: int = 0

    @property
    def hidden_share(self) -> float:
        """The part of the gathers' time in which no forward waited for them; 1 where there was none."""
        return max(0.0, 1.0 - self.wait_ms / self.gather_ms) if self.gather_ms else 1.0

    def count(self, gather: Gather) -> None:
        """Add a gather that is over."""
        self.gathers += 1
        self.rows += gather.asked
        self.unique_rows += gather.unique
        self.cached_rows += gather.unique - gather.misses
        self.windows += gather.jobs
        self.reads += gather.reads
        self.read_bytes += gather.read_bytes
        self.gather_ms += gather.gather_ms


@dataclass(eq=False)
class _LookAhead:
    """Rows begun for a chunk that is expected."""

    slot: int
    token_ids: np.ndarray
    history: np.ndarray
    gather: Gather

    def fits(self, token_ids: np.ndarray, history: np.ndarray) -> bool:
        """Whether these tokens after that history read the very rows."""
        return np.array_equal(self.token_ids, token_ids) and np.array_equal(self.history, history)


@dataclass(eq=False)
class Ticket:
    """What one forward has asked for."""

    batch: Batch
    history: np.ndarray
    gather: Gather | None
    """None where the look-ahead has all of it."""
    ahead_sequence: int
    """The sequence whose rows the look-ahead has, -1 for none."""
    failures: dict[int, CheckpointError] = field(default_factory=dict)
    """By slot, the sequences whose rows did not all come; their rows are zeros. Filled by ``take``."""


class NgramReader:
    """The table of one n-gram layer and its readers; one forward at a time."""

    def __init__(
        self,
        table: RowTable,
        hashing: NgramHash,
        *,
        readers: int = READERS,
        cache_bytes: int = CACHE_BYTES,
        is_direct: bool = True,
        looks_ahead: bool = True,
    ) -> None:
        """Raises ModelError for a table with too few rows, CheckpointError for files that cannot be opened."""
        if table.rows < hashing.total_rows():
            raise ModelError(
                f"the n-gram table in {table.parts[0].path} has {table.rows:,} rows, the hash of this model reaches "
                f"{hashing.total_rows():,}",
                "the checkpoint is not complete, or its config is not its own",
            )
        self.hashing, self.stats = hashing, ReadStats()
        self.looks_ahead = looks_ahead
        """Whether rows of the chunk that is expected next are read ahead. Changes no bit."""
        self._pool = RowPool(table, readers=readers, cache_bytes=cache_bytes, is_direct=is_direct)
        self._buffers = [GatherBuffers(table.row_bytes, table.row_values) for _ in range(2)]
        """For the rows of a forward, and for those that are read ahead; they change places when those are used."""
        self._ahead: _LookAhead | None = None
        self._ticket: Ticket | None = None

    def make_room(self, batch: Batch) -> None:
        """Have the buffers that :meth:`begin` and :meth:`take` of a batch need. Raises MemoryError.

        The one for reading ahead may be refused: nobody asked for its rows yet.
        """
        if self._ticket is not None:
            self.drop(self._ticket)
        self._make_buffers_room(self._buffers[0], batch.rows)
        ahead = next((len(token_ids) for _, token_ids in batch.ahead), 0) if self.looks_ahead else 0
        if ahead and self._ahead is None:
            with suppress(MemoryError):
                self._make_buffers_room(self._buffers[1], ahead)

    def _make_buffers_room(self, buffers: GatherBuffers, rows: int) -> None:
        buffers.make_room(rows * self.hashing.heads, padded(rows) * self.hashing.heads)

    def begin(self, batch: Batch, history: np.ndarray) -> Ticket:
        """Start reading the rows of a batch; history int64 [B, n - 1] as :meth:`NgramHash.rows` takes it, kept by copy.

        A ticket that was never taken is dropped. Raises DeviceError where the system refuses the memory.
        """
        if self._ticket is not None:
            self.drop(self._ticket)
        history = np.array(history, dtype=np.int64)
        sequence = self._find_ahead(batch, history)
        gather = None
        if sequence < 0 or len(batch.slots) > 1:
            try:
                gather = self._start(batch, history, sequence)
            except MemoryError:
                raise DeviceError(
                    f"the system refuses {self.plan_bytes(batch.rows):,} bytes for the n-gram rows of {batch.rows:,} tokens",
                    "read the prompt in smaller chunks",
                ) from None
        self._ticket = Ticket(batch, history, gather, sequence)
        return self._ticket

    def _find_ahead(self, batch: Batch, history: np.ndarray) -> int:
        """The sequence of the batch whose rows were read ahead, -1 for none. A guess that was wrong is dropped."""
        ahead = self._ahead
        if ahead is None or ahead.slot not in batch.slots:
            return -1
        sequence = int(np.flatnonzero(batch.slots == ahead.slot)[0])
        if ahead.fits(batch.token_ids[batch.starts[sequence] : batch.starts[sequence + 1]], history[sequence]):
            return sequence
        self._drop_ahead()
        return -1

    def _start(self, batch: Batch, history: np.ndarray, without: int) -> Gather:
        """The urgent gather: every row of the batch but those of one sequence."""
        rows = self.hashing.rows(batch.token_ids, batch.starts, history)
        places = None
        if without >= 0:
            wanted = np.ones(batch.rows, dtype=bool)
            wanted[batch.starts[without] : batch.starts[without + 1]] = False
            places = np.arange(rows.size).reshape(rows.shape)[wanted].reshape(-1)
            rows = rows[wanted]
        room = padded(batch.rows) * self.hashing.heads
        return self._pool.start(URGENT, self._buffers[0], rows.reshape(-1), places, room)

    def take(self, ticket: Ticket) -> np.ndarray:
        """Wait for the rows: float32 [padded N, H * row values], the rows beyond N zero; valid until the next ``begin``.

        A row that cannot be read does not raise: see ``Ticket.failures``. Then the chunk that the batch expects next
        is begun.
        """
        assert ticket is self._ticket, "a ticket is taken once, before the next begins"
        self._ticket = None
        waited_ns = now_ns()
        if ticket.gather is not None:
            self._pool.finish(ticket.gather)
            self.stats.count(ticket.gather)
            self._note_failures(ticket, ticket.gather, 0)
        if ticket.ahead_sequence >= 0:
            self._take_ahead(ticket)
        self.stats.wait_ms += (now_ns() - waited_ns) / 1e6
        taken = self._buffers[0].out[: padded(ticket.batch.rows) * self.hashing.heads]
        taken[ticket.batch.rows * self.hashing.heads :] = 0.0
        self._begin_ahead(ticket)
        return taken.reshape(padded(ticket.batch.rows), -1)

    def _take_ahead(self, ticket: Ticket) -> None:
        """Bring the rows that were read ahead to their place."""
        ahead, batch = self._ahead, ticket.batch
        assert ahead is not None
        self._ahead = None
        self._pool.finish(ahead.gather)
        self.stats.count(ahead.gather)
        self.stats.ahead_used += 1
        first = int(batch.starts[ticket.ahead_sequence]) * self.hashing.heads
        if ticket.gather is None:
            self._buffers.reverse()
        else:
            self._buffers[0].out[first : first + ahead.gather.asked] = self._buffers[1].out[: ahead.gather.asked]
        self._note_failures(ticket, ahead.gather, first)

    def _note_failures(self, ticket: Ticket, gather: Gather, first: int) -> None:
        """Find the sequences of rows that failed; ``first`` is where the gather's places begin among the batch's."""
        buffers = gather.buffers
        for unique in gather.failed:
            places = buffers.targets[buffers.target_first[unique] : buffers.target_first[unique + 1]] + first
            sequences = np.searchsorted(ticket.batch.starts, places // self.hashing.heads, side="right") - 1
            for slot in ticket.batch.slots[np.unique(sequences)]:
                if int(slot) not in ticket.failures:
                    ticket.failures[int(slot)] = self._pool.error(gather, int(unique))

    def _begin_ahead(self, ticket: Ticket) -> None:
        """Start reading for the first chunk that the batch expects next, unless that is under way already."""
        batch = ticket.batch
        for slot, token_ids in batch.ahead if self.looks_ahead else ():
            found = np.flatnonzero(batch.slots == slot)
            if not len(found) or not len(token_ids):
                continue
            if self._ahead is not None:
                self._drop_ahead()
            tokens = np.array(token_ids, dtype=np.int64)
            history = next_history(batch.token_ids, batch.starts, ticket.history)[int(found[0])]
            room = padded(len(tokens)) * self.hashing.heads
            try:
                rows = self.hashing.rows(tokens, np.array([0, len(tokens)]), history[None])
                gather = self._pool.start(AHEAD, self._buffers[1], rows.reshape(-1), None, room)
            except MemoryError:  # nobody asked for these rows yet
                return
            self._ahead = _LookAhead(slot, tokens, history, gather)
            return

    def _drop_ahead(self) -> None:
        assert self._ahead is not None
        self._pool.stop(self._ahead.gather)
        self._ahead = None
        self.stats.ahead_dropped += 1

    def drop(self, ticket: Ticket) -> None:
        """Give up what a forward asked for and will not take. Rows that were read ahead are kept for the next one."""
        if ticket is not self._ticket:
            return
        self._ticket = None
        if ticket.gather is not None:
            self._pool.stop(ticket.gather)

    def close(self) -> None:
        """End the readers and close the table's files. Closing twice is harmless."""
        self._pool.close()

    def forget_rows(self) -> None:
        """Empty the cache of rows: the next forward reads all of its own anew."""
        self._pool.forget()

    @property
    def table(self) -> RowTable:
        """The table that is read."""
        return self._pool.table

    @property
    def is_direct(self) -> bool:
        """Whether reads go past the page cache."""
        return not self._pool.buffered_because

    @property
    def workspace_bytes(self) -> int:
        """Bytes that buffers for the chunks seen so far take."""
        return sum(buffers.nbytes for buffers in self._buffers)

    def plan_bytes(self, rows: int) -> int:
        """Bytes that buffers for chunks of this many rows take, the one for reading ahead too."""
        table, heads = self._pool.table, self.hashing.heads
        return 2 * gather_bytes(rows * heads, padded(rows) * heads, table.row_bytes, table.row_values)

    def describe(self) -> dict[str, Any]:
        """The table, how it is read, and what was read so far: JSON values."""
        return {
            **self._pool.describe(),
            "workspace_bytes": self.workspace_bytes,
            "gathered": {**asdict(self.stats), "hidden_share": self.stats.hidden_share},
        }


def begin_all(readers: Sequence[NgramReader], batch: Batch, history: np.ndarray) -> list[tuple[NgramReader, Ticket]]:
    """:meth:`NgramReader.begin` of every reader. Raises DeviceError, with nothing asked for."""
    reads: list[tuple[NgramReader, Ticket]] = []
    try:
        for reader in readers:
            reads.append((reader, reader.begin(batch, history)))
    except DeviceError:
        for reader, ticket in reads:
            reader.drop(ticket)
        raise
    return reads
