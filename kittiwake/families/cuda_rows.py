"""A batch on the device: rows of one launch, padded to a bucket so that captured graphs can be replayed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from kittiwake.engine.batch import Batch
from kittiwake.engine.states import SCRATCH_SLOT

DECODE_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512)
PROMPT_BUCKETS = (
    16,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
    384,
    512,
    640,
    768,
    1024,
    1280,
    1536,
    2048,
    2560,
    3072,
    4096,
    5120,
    6144,
    8192,
)
SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 32)
FEW_ROWS = 8
"""Rows up to which nothing depends on how many there are."""
_RING = 16
Numbers = TypeVar("Numbers", np.ndarray, torch.Tensor)
_COUNTING = np.arange(DECODE_BUCKETS[-1] + 1)


@dataclass(frozen=True)
class Shape:
    """How many rows, sequences and wanted rows a launch has; one captured graph for each."""

    is_decode: bool
    rows: int
    sequences: int
    wanted: int


@dataclass(frozen=True)
class Piece:
    """A part of a batch that goes in one launch. ``places`` are its wanted rows' places in the answer."""

    is_decode: bool
    token_ids: np.ndarray  # [N]
    starts: np.ndarray  # [B + 1]
    slots: np.ndarray  # [B]
    want: np.ndarray  # [W], rows of this piece
    places: np.ndarray  # [W]
    rows: np.ndarray  # [N], which rows of the batch these are


@dataclass(frozen=True)
class Rows:
    """Views of the device's metadata for one shape: int32, see :class:`Batch`; ``owners`` [N] is each row's sequence."""

    shape: Shape
    token_ids: torch.Tensor
    owners: torch.Tensor
    starts: torch.Tensor
    slots: torch.Tensor
    want: torch.Tensor


def cut(batch: Batch, most_rows: int) -> list[Piece]:
    """The launches of a batch: sequences of one row first, as many as a bucket holds, then prompts of ``most_rows`` rows.

    Where the cuts fall changes no bit, so nothing here depends on what else is in the batch.
    """
    lengths = np.diff(batch.starts)
    if batch.rows == len(batch.slots) == len(batch.want_rows) <= most_rows:
        return [whole(batch, is_decode=True)]
    if batch.rows <= most_rows and lengths.min() > 1:
        return [whole(batch, is_decode=False)]
    pieces: list[Piece] = []
    place = {int(row): index for index, row in enumerate(batch.want_rows)}
    singles, most_singles = np.flatnonzero(lengths == 1), min(most_rows, DECODE_BUCKETS[-1])
    for first in range(0, len(singles), most_singles):
        some = singles[first : first + most_singles]
        rows = batch.starts[some]
        found = [(i, place[int(row)]) for i, row in enumerate(rows) if int(row) in place]
        starts = np.arange(len(some) + 1)
        pieces.append(Piece(True, batch.token_ids[rows], starts, batch.slots[some], *_pairs(found), rows))
    open_parts: list[tuple[int, int, int]] = []
    room = most_rows
    for sequence in np.flatnonzero(lengths > 1):
        at, end = int(batch.starts[sequence]), int(batch.starts[sequence + 1])
        while at < end:
            count = min(end - at, room)
            open_parts.append((int(sequence), at, count))
            at, room = at + count, room - count
            if room == 0:
                pieces.append(_prompt_piece(batch, open_parts, place))
                open_parts, room = [], most_rows
    if open_parts:
        pieces.append(_prompt_piece(batch, open_parts, place))
    return pieces


def whole(batch: Batch, *, is_decode: bool) -> Piece:
    """A batch that goes in one launch as it is."""
    rows, places = np.arange(batch.rows), np.arange(len(batch.want_rows))
    return Piece(is_decode, batch.token_ids, batch.starts, batch.slots, batch.want_rows, places, rows)


def _prompt_piece(batch: Batch, parts: list[tuple[int, int, int]], place: dict[int, int]) -> Piece:
    ids = np.concatenate([batch.token_ids[at : at + count] for _, at, count in parts])
    starts = np.concatenate([[0], np.cumsum([count for _, _, count in parts])])
    rows = np.concatenate([np.arange(at, at + count) for _, at, count in parts])
    found = [(i, place[int(row)]) for i, row in enumerate(rows) if int(row) in place] if place else []
    return Piece(False, ids, starts, batch.slots[[sequence for sequence, _, _ in parts]], *_pairs(found), rows)


def _pairs(found: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    array = np.array(found, dtype=np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def bucket(value: int, buckets: tuple[int, ...]) -> int | None:
    """The least bucket that holds ``value``; None above all."""
    return next((size for size in buckets if size >= value), None)


def nobody(shape: Shape) -> Piece:
    """A launch of this shape that moves no state but the scratch slot's."""
    empty = np.zeros(0, dtype=np.int64)
    if not shape.is_decode:
        return Piece(False, empty, np.zeros(1, dtype=np.int64), empty, empty, empty, empty)
    rows = np.arange(shape.rows)
    return Piece(True, rows * 0, np.arange(shape.rows + 1), rows * 0 + SCRATCH_SLOT, rows, rows, rows)


def largest_bucket(most_rows: int) -> int:
    """The largest bucket of a prompt's rows that is no larger: cut there, a long prompt's pieces need no padding."""
    return max(size for size in PROMPT_BUCKETS if size <= most_rows)


def padded_shape(piece: Piece, most_rows: int) -> Shape:
    """The shape of a piece as it is, but for its rows, which are padded to a bucket: at those counts products are proved."""
    rows = len(piece.token_ids)
    size = bucket(rows, PROMPT_BUCKETS) if rows > FEW_ROWS else rows
    return Shape(False, rows if size is None or size > most_rows else size, len(piece.slots), len(piece.want))


def shape_of(piece: Piece, most_rows: int) -> tuple[Shape, bool]:
    """The shape a piece is padded to, and whether a graph of it may be kept; else that of :func:`padded_shape`."""
    rows, sequences, wanted = len(piece.token_ids), len(piece.slots), len(piece.want)
    if piece.is_decode:
        size = bucket(rows, DECODE_BUCKETS)
        return (padded_shape(piece, most_rows), False) if size is None else (Shape(True, size, size, size), True)
    padded, many = bucket(rows, PROMPT_BUCKETS), bucket(sequences, SEQUENCE_BUCKETS)
    if padded is None or padded > most_rows or many is None or wanted > many:
        return padded_shape(piece, most_rows), False
    return Shape(False, padded, many, many), True


class SentRows:
    """Rows on the device, at a fixed address, filled by one copy a launch from pinned memory."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, turns: int) -> None:
        """``turns``: how many copies the host may be ahead of the device."""
        self._device = torch.zeros(shape, dtype=dtype, device=device)
        host = [torch.zeros(shape, dtype=dtype) for _ in range(turns)]
        if device.type == "cpu":  # what was copied is there at once
            self._ring: list[tuple[torch.Tensor, torch.cuda.Event | None]] = [(tensor, None) for tensor in host]
        else:
            self._ring = [(tensor.pin_memory(), torch.cuda.Event()) for tensor in host]  # type: ignore[no-untyped-call]
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._device.nbytes

    def sent(self, rows: int) -> torch.Tensor:
        """The first rows on the device."""
        return self._device[:rows]

    def next(self) -> torch.Tensor:
        """Where the host writes what it sends next."""
        self._turn = (self._turn + 1) % len(self._ring)
        tensor, event = self._ring[self._turn]
        if event is not None:
            event.synchronize()  # the copy that last used it has long run, unless the host is far ahead
        return tensor

    def send(self, rows: int) -> None:
        """Copy the first rows of what :meth:`next` gave."""
        self._device[:rows].copy_(self._ring[self._turn][0][:rows], non_blocking=True)
        self.mark()

    def mark(self) -> None:
        """What :meth:`next` gave is free again when all that has been enqueued so far has run."""
        event = self._ring[self._turn][1]
        if event is not None:
            event.record()


class RowBuffer(SentRows):
    """The metadata of a launch on the device."""

    def __init__(self, most_rows: int, device: torch.device) -> None:
        most = max(most_rows, DECODE_BUCKETS[-1])
        super().__init__((parts_length(_sizes(Shape(False, most, most, most))),), torch.int32, device, _RING)
        self._decoding: dict[tuple[int, Shape], tuple[np.ndarray, np.ndarray, torch.Tensor, torch.Tensor]] = {}
        """By turn and shape: where ids and slots are written, and the two ends of the copy."""
        self._holds: list[Shape | None] = [None] * _RING
        """The shape of decoding whose other parts a turn's memory holds."""

    def views(self, shape: Shape) -> Rows:
        """Where a launch of this shape reads."""
        return Rows(shape, *split_parts(self._device, _sizes(shape)))

    def fill(self, piece: Piece, shape: Shape) -> None:
        """Send a piece, padded to ``shape``: spare rows belong to nobody, spare sequences are empty, in the scratch slot."""
        array = self.next().numpy()
        self._holds[self._turn] = None
        rows, sequences, wanted = len(piece.token_ids), len(piece.slots), len(piece.want)
        length = parts_length(_sizes(shape))
        array[:length] = 0
        ids, owners, starts, slots, want = split_parts(array, _sizes(shape))
        ids[:rows] = piece.token_ids
        slots[:sequences] = piece.slots
        slots[sequences:] = SCRATCH_SLOT
        if shape.is_decode:
            _count(owners, starts, want)
        else:
            owners[:rows] = np.repeat(np.arange(sequences), np.diff(piece.starts))
            owners[rows:] = -1
            starts[: sequences + 1] = piece.starts
            starts[sequences + 1 :] = rows
            want[:wanted] = piece.want
        self.send(length)

    def fill_decoding(self, batch: Batch, shape: Shape) -> None:
        """The same for a batch of one row a sequence, all wanted: the commonest by far, of which only two parts change.

        The caller enqueues what reads it, which must not wait, and calls :meth:`mark`.
        """
        tensor = self.next()
        key = (self._turn, shape)
        if key not in self._decoding:
            length, parts = parts_length(_sizes(shape)), split_parts(tensor.numpy(), _sizes(shape))
            self._decoding[key] = (parts[0], parts[3], self.sent(length), tensor[:length])
        ids, slots, sent, given = self._decoding[key]
        rows, size = batch.rows, shape.rows
        if self._holds[self._turn] != shape:
            _, owners, starts, _, want = split_parts(tensor.numpy(), _sizes(shape))
            _count(owners, starts, want)
            self._holds[self._turn] = shape
        ids[:rows], slots[:rows] = batch.token_ids, batch.slots
        if rows < size:
            ids[rows:], slots[rows:] = 0, SCRATCH_SLOT
        sent.copy_(given, non_blocking=True)


def _count(owners: np.ndarray, starts: np.ndarray, want: np.ndarray) -> None:
    """A row a sequence, all wanted."""
    owners[:] = want[:] = _COUNTING[: len(owners)]
    starts[:] = _COUNTING[: len(starts)]


def _sizes(shape: Shape) -> tuple[int, int, int, int, int]:
    return shape.rows, shape.rows, shape.sequences + 1, shape.sequences, shape.wanted


def _padded(size: int) -> int:
    return -(-size // 4) * 4  # kernels are compiled for addresses that are multiples of 16 bytes


def parts_length(sizes: Iterable[int]) -> int:
    """Numbers of int32 that hold parts of these sizes, see :func:`split_parts`."""
    return sum(map(_padded, sizes))


def split_parts(numbers: Numbers, sizes: Iterable[int]) -> list[Numbers]:
    """Views of parts [size] that lie one behind the other in int32 ``numbers``, each where kernels may read it."""
    parts, at = [], 0
    for size in sizes:
        parts.append(numbers[at : at + size])
        at += _padded(size)
    return parts
