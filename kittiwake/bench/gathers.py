"""What reading n-gram rows costs a prompt: gathers behind its forwards, with the chunk that follows read ahead and without."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kittiwake.bench.timing import Timed, median_ms
from kittiwake.families.contract import Model
from kittiwake.families.qwen4exp.ngram_reader import NgramReader

BYPASSED = "bypassed"
UNKNOWN = "unknown"
_SAMPLES = 32
_MOSTLY = 0.9


@dataclass(frozen=True)
class GatherRun:
    """One prompt: its time, and what its gathers of all tables took together."""

    prefill_ms: float
    gather_ms: float
    waited_ms: float
    """How long forwards stood still for rows."""
    reads: int
    """Calls of the system."""
    rows: int
    """Rows of tables that were asked for, several times the same among them."""
    ahead: int
    """Gathers that were begun before their chunk."""
    gathers: int


@dataclass(frozen=True)
class GatherFigures:
    """Runs of one prompt: medians, shares over all of them."""

    runs: tuple[GatherRun, ...]

    def median(self, name: str) -> float:
        """Of one field of the runs."""
        return median_ms([getattr(run, name) for run in self.runs])

    @property
    def forward_ms(self) -> float:
        """What the prompt took beyond waiting for rows."""
        return median_ms([run.prefill_ms - run.waited_ms for run in self.runs])

    @property
    def hidden_share(self) -> float:
        """The part of the gathers' time, 0 to 1, in which no forward waited for them; 1 where there was none."""
        gathered = sum(run.gather_ms for run in self.runs)
        return max(0.0, 1 - sum(run.waited_ms for run in self.runs) / gathered) if gathered else 1.0

    @property
    def reads_per_s(self) -> float:
        """Reads a second while gathers were under way."""
        gathered = sum(run.gather_ms for run in self.runs)
        return 1000 * sum(run.reads for run in self.runs) / gathered if gathered else 0.0

    def document(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "prefill_ms": round(self.median("prefill_ms"), 4),
            "gather_ms": round(self.median("gather_ms"), 4),
            "forward_ms": round(self.forward_ms, 4),
            "waited_ms": round(self.median("waited_ms"), 4),
            "hidden_share": round(self.hidden_share, 4),
            "rows": round(self.median("rows")),
            "reads": round(self.median("reads")),
            "reads_per_s": round(self.reads_per_s, 1),
            "gathers": round(self.median("gathers")),
            "gathers_ahead": round(self.median("ahead")),
        }


@dataclass(frozen=True)
class Gathers:
    """Both ways to read, timed in turns."""

    ahead: GatherFigures
    alone: GatherFigures
    """Without look-ahead: every chunk's rows are asked for when it begins."""
    page_cache: str
    """ "bypassed" by direct reads; else what of the table the page cache held before a run: cold, warm, partly warm, or
    unknown where the system does not tell."""

    def document(self) -> dict[str, Any]:
        """JSON values: the figures with look-ahead, and beside them those without."""
        return {**self.ahead.document(), "page_cache": self.page_cache, "without_look_ahead": self.alone.document()}


class GatherWatch:
    """The readers of a model's tables, and what they do in each run of a prompt."""

    def __init__(self, readers: Sequence[NgramReader]) -> None:
        self._readers = readers
        self._runs: dict[bool, list[GatherRun]] = {True: [], False: []}
        self._caches: Counter[str] = Counter()

    def run(self, prefill: Timed, *, looks_ahead: bool, is_counted: bool = True) -> float:
        """Run the prompt; its ms. No row that an earlier run read is in our own cache, nor in the system's if it can be."""
        before_looks = [reader.looks_ahead for reader in self._readers]
        try:
            for reader in self._readers:
                reader.looks_ahead = looks_ahead
                reader.forget_rows()
            cache = " and ".join(dict.fromkeys(_page_cache(reader) for reader in self._readers))
            before = self._sums()
            took_ms = prefill()
            spent = self._sums() - before
        finally:
            for reader, looked in zip(self._readers, before_looks, strict=True):
                reader.looks_ahead = looked
        if is_counted:
            gather_ms, waited_ms, *counts = spent.tolist()
            reads, rows, ahead, gathers = map(int, counts)
            self._runs[looks_ahead].append(GatherRun(took_ms, gather_ms, waited_ms, reads, rows, ahead, gathers))
            self._caches[cache] += 1
        return took_ms

    def _sums(self) -> np.ndarray:
        """Counters of all tables so far, in the order of :class:`GatherRun`."""
        total: np.ndarray = np.zeros(6)
        for one in (reader.stats for reader in self._readers):
            total += (one.gather_ms, one.wait_ms, one.reads, one.rows, one.ahead_used, one.gathers)
        return total

    def figures(self) -> Gathers:
        """What the counted runs gave, at least one each way."""
        return Gathers(
            GatherFigures(tuple(self._runs[True])), GatherFigures(tuple(self._runs[False])), " or ".join(self._caches)
        )


def readers_of(model: Model) -> Sequence[NgramReader]:
    """What reads the model's n-gram tables; none where it has none."""
    readers: Sequence[NgramReader] = getattr(model, "readers", ())
    return readers


def _page_cache(reader: NgramReader) -> str:
    """Have the system drop the pages of a table that is read through them; what it holds of it then."""
    if reader.is_direct:
        return BYPASSED
    paths = dict.fromkeys(part.path for part in reader.table.parts)
    drop_pages(paths)
    return cached_share(reader)


def drop_pages(paths: Iterable[Path]) -> None:
    """Ask the system to forget the pages of files; what is not written out yet, or lives in memory, it keeps."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cached_share(reader: NgramReader) -> str:
    """Whether the page cache holds the table, by a sample of its rows: reads that may not wait are refused where not."""
    flag = getattr(os, "RWF_NOWAIT", 0)
    if not flag or not hasattr(os, "preadv"):
        return UNKNOWN
    held = 0
    for row in np.linspace(0, reader.table.rows - 1, _SAMPLES).astype(np.int64).tolist():
        path, begin = reader.table.where(row)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # else each try has its neighbours read
            os.preadv(descriptor, [bytearray(1)], begin, flag)
            held += 1
        except BlockingIOError:
            pass
        except OSError:
            return UNKNOWN
        finally:
            os.close(descriptor)
    return "warm" if held >= _MOSTLY * _SAMPLES else "cold" if held <= (1 - _MOSTLY) * _SAMPLES else "partly warm"
