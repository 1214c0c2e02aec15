"""A table of fixed-size rows that stays in its files: where each row lies, and descriptors to read it through.

The table may be far larger than memory: it is neither loaded nor mapped.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kittiwake.checkpoints.files import FileStamp, quoted, writing
from kittiwake.checkpoints.reader import FilePlace, TensorSource
from kittiwake.errors import CheckpointError

BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "IQ4_NL": (32, 18),
}
"""Kinds of rows that are decoded as they are read: numbers in a block, and its bytes."""
DIRECT_ALIGN = 4096
MAX_ROW_BYTES = 1 << 20
MAX_UNPACKED_BYTES = 1 << 30
"""Bytes of bfloat16 up to which a table of another kind is unpacked when a model loads."""
_AGAIN = "the download stopped early or the file is damaged: get it again"


@dataclass(frozen=True)
class OpenFiles:
    """A table's files, open: descriptors and read alignment by part, and whether reads go past the page cache."""

    descriptors: tuple[int, ...]  # one a part; parts of one file share one
    aligns: tuple[int, ...]  # bytes: DIRECT_ALIGN for direct reads, 1 for buffered ones
    buffered_because: str
    """Why reads go through the page cache; empty where they do not."""

    def close(self) -> None:
        """Close every descriptor; only once, and only when nothing reads any more."""
        for descriptor in set(self.descriptors):
            os.close(descriptor)


class RowTable:
    """Rows of ``row_values`` numbers, one after another in parts of files, in the order of the parts."""

    def __init__(self, parts: Sequence[FilePlace], row_values: int, *, keep_open: Any = None) -> None:
        """``keep_open`` is held as long as the table: a temporary file's object, say.

        Raises CheckpointError for kinds that are not read or differ, parts that are not whole rows or reach beyond
        their file, and files that are missing.
        """
        if not parts:
            raise CheckpointError("a table of rows needs at least one part, got none")
        self.parts, self.kind, self.row_values = tuple(parts), parts[0].kind, row_values
        self._keep_open = keep_open
        where = f"the table in {parts[0].path}"
        if self.kind not in BLOCKS:
            raise CheckpointError(
                f"{where} is of the kind {quoted(self.kind)}", f"rows are read as {', '.join(BLOCKS)}"
            )
        block, block_bytes = BLOCKS[self.kind]
        if row_values < 1 or row_values % block:
            raise CheckpointError(
                f"{where} has rows of {row_values:,} numbers, {self.kind} needs a multiple of {block}"
            )
        self.row_bytes = row_values // block * block_bytes
        if self.row_bytes > MAX_ROW_BYTES:
            raise CheckpointError(f"{where} has rows of {self.row_bytes:,} bytes, at most {MAX_ROW_BYTES:,} are read")
        self._stamps = {path: FileStamp.of(path) for path in dict.fromkeys(part.path for part in parts)}
        for part in parts:
            self._check_part(part)
        counts = [part.nbytes // self.row_bytes for part in parts]
        self.first_rows = tuple(int(row) for row in np.concatenate([[0], np.cumsum(counts)]))
        """The first row of each part, and one past the last row of all."""

    def _check_part(self, part: FilePlace) -> None:
        if part.kind != self.kind:
            raise CheckpointError(
                f"{part.path} holds rows of the kind {quoted(part.kind)}, the table began with {self.kind}"
            )
        if part.nbytes < 1 or part.nbytes % self.row_bytes:
            raise CheckpointError(
                f"{part.path}: a part of {part.nbytes:,} bytes is not a number of rows of {self.row_bytes:,} bytes",
                _AGAIN,
            )
        size = self._stamps[part.path].size
        if part.begin < 0 or part.begin + part.nbytes > size:
            raise CheckpointError(
                f"{part.path} is cut short: rows reach byte {part.begin + part.nbytes:,}, the file has {size:,}", _AGAIN
            )

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self.first_rows[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in their files."""
        return self.rows * self.row_bytes

    def open_files(self, *, is_direct: bool = True) -> OpenFiles:
        """Open the files: past the page cache, unless a file system refuses it or ``is_direct`` is False.

        Raises CheckpointError when a file cannot be opened, or changed since the table was made.
        """
        reason = self._refusal() if is_direct else "not asked for"
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | (0 if reason else os.O_DIRECT)
        opened: dict[Path, int] = {}
        try:
            for path, stamp in self._stamps.items():
                opened[path] = os.open(path, flags)
                stamp.check_unchanged()
        except (OSError, CheckpointError) as err:
            for descriptor in opened.values():
                os.close(descriptor)
            if isinstance(err, CheckpointError):
                raise
            hint = "raise the limit of open files: ulimit -n" if err.errno == errno.EMFILE else ""
            raise CheckpointError(f"{err.filename} cannot be opened: {err.strerror}", hint) from None
        align = 1 if reason else DIRECT_ALIGN
        return OpenFiles(tuple(opened[part.path] for part in self.parts), tuple(align for _ in self.parts), reason)

    def _refusal(self) -> str:
        """Why direct reads are not possible here; empty where they are. One file system is taken to hold all files."""
        if not hasattr(os, "O_DIRECT"):
            return "this system has no direct reads"
        path = self.parts[0].path
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as err:
            return f"direct reads are refused: {err.strerror}"
        try:
            # Some file systems take the flag and refuse the read. A mapping is aligned to pages.
            with mmap.mmap(-1, DIRECT_ALIGN) as page:
                os.preadv(descriptor, [page], self.parts[0].begin // DIRECT_ALIGN * DIRECT_ALIGN)
        except OSError as err:
            return f"direct reads are refused: {err.strerror}"
        finally:
            os.close(descriptor)
        return ""

    def where(self, row: int) -> tuple[Path, int]:
        """The file of a row and the byte that it begins at."""
        part = int(np.searchsorted(self.first_rows, row, side="right")) - 1
        place = self.parts[part]
        return place.path, place.begin + (row - self.first_rows[part]) * self.row_bytes

    def describe(self) -> dict[str, Any]:
        """Sizes, for people: JSON values."""
        return {
            "rows": self.rows,
            "row_values": self.row_values,
            "kind": self.kind,
            "row_bytes": self.row_bytes,
            "bytes": self.nbytes,
            "files": len(self._stamps),
        }


def unpacked_table(source: TensorSource, name: str) -> RowTable:
    """A matrix of any kind that can be read whole, as a table of bfloat16 rows in a temporary file that goes with it.

    For small tables of a kind that rows cannot be read in. Raises CheckpointError beyond ``MAX_UNPACKED_BYTES``.
    """
    tensors = {info.name: info for info in source.infos()}
    if name in tensors and (size := 2 * math.prod(tensors[name].shape)) > MAX_UNPACKED_BYTES:
        raise CheckpointError(
            f"{source.path}: table {quoted(name)} would take {size:,} bytes unpacked, at most {MAX_UNPACKED_BYTES:,} are",
            f"use a file whose table is one of {', '.join(BLOCKS)}",
        )
    values = source.read(name)
    if values.ndim != 2:
        raise CheckpointError(
            f"{source.path}: table {quoted(name)} has the shape {tuple(values.shape)}, expected a matrix"
        )
    file = tempfile.NamedTemporaryFile(prefix="kittiwake-rows-")  # noqa: SIM115 - open as long as the table
    bits = values.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
    with writing(Path(file.name)):
        file.write(bits.tobytes())
        file.flush()
    place = FilePlace(Path(file.name), 0, bits.nbytes, "BF16")
    return RowTable([place], values.shape[1], keep_open=file)
