"""What a launch knows of its rows, on the device: int32, sent by one copy from pinned memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kittiwake.engine.batch import Batch
from kittiwake.engine.states import SCRATCH_SLOT
from kittiwake.families.cuda_rows import (
    DECODE_BUCKETS,
    Piece,
    SentRows,
    Shape,
    bucket,
    cut,
    parts_length,
    split_parts,
    whole,
)

_TURNS = 4
"""Launches that the host may be ahead: it waits for logits after nearly every one."""


@dataclass(frozen=True)
class CudaRows:
    """Views of the metadata for one shape. Spare rows belong to nobody, spare sequences are empty, in the scratch slot."""

    shape: Shape
    token_ids: torch.Tensor  # [N]
    owners: torch.Tensor  # [N], the sequence of each row, -1 for a spare one
    positions: torch.Tensor  # [N], absolute, 0 for a spare one
    starts: torch.Tensor  # [B + 1]
    slots: torch.Tensor  # [B]
    seen: torch.Tensor  # [B], tokens before these rows
    want: torch.Tensor  # [W], 0 where no row is wanted


def pieces_of(batch: Batch, most_rows: int) -> list[Piece]:
    """The launches of a batch: one where it fits, so that the weights are read once, else as :func:`cut` cuts it."""
    if batch.rows > most_rows:
        return cut(batch, most_rows)
    return [whole(batch, is_decode=batch.rows == len(batch.slots))]


def graph_shape(piece: Piece, most_rows: int) -> Shape | None:
    """The shape of the captured launch that serves a piece: of decode steps the bucket, of others none."""
    size = bucket(len(piece.token_ids), DECODE_BUCKETS) if piece.is_decode else None
    return None if size is None or size > most_rows else Shape(True, size, size, size)


class MetaBuffer(SentRows):
    """The metadata of a launch."""

    def __init__(self, most_rows: int, place: torch.device) -> None:
        super().__init__(
            (parts_length(_sizes(Shape(False, most_rows, most_rows, most_rows))),), torch.int32, place, _TURNS
        )

    def views(self, shape: Shape) -> CudaRows:
        """Where a launch of this shape reads."""
        return CudaRows(shape, *split_parts(self._device, _sizes(shape)))

    def fill(self, piece: Piece, seen: np.ndarray, shape: Shape) -> CudaRows:
        """Send a piece, padded to ``shape``; ``seen`` [B] are the tokens before it of each sequence."""
        array = self.next().numpy()
        length = parts_length(_sizes(shape))
        array[:length] = 0
        ids, owners, positions, starts, slots, before, want = split_parts(array, _sizes(shape))
        rows, sequences, wanted = len(piece.token_ids), len(piece.slots), len(piece.want)
        counts = np.diff(piece.starts)
        ids[:rows] = piece.token_ids
        owners[:rows], owners[rows:] = np.repeat(np.arange(sequences), counts), -1
        positions[:rows] = np.repeat(seen - piece.starts[:-1], counts) + np.arange(rows)
        starts[: sequences + 1], starts[sequences + 1 :] = piece.starts, rows
        slots[:sequences], slots[sequences:] = piece.slots, SCRATCH_SLOT
        before[:sequences] = seen
        want[:wanted] = piece.want
        self.send(length)
        return self.views(shape)

    def fill_nobody(self, shape: Shape) -> CudaRows:
        """Send a launch of this shape that moves no state but the scratch slot's."""
        empty = np.zeros(0, dtype=np.int64)
        return self.fill(Piece(False, empty, np.zeros(1, np.int64), empty, empty, empty, empty), empty, shape)


def _sizes(shape: Shape) -> tuple[int, ...]:
    rows, sequences = shape.rows, shape.sequences
    return rows, rows, rows, sequences + 1, sequences, sequences, shape.wanted
