"""The room that a forward on a card works in: planned from the geometry, made once, always at the same addresses.

Buffers whose values never live at the same time share a room.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kittiwake.families.cuda_rows import largest_bucket
from kittiwake.families.qwen4exp.geometry import Geometry
from kittiwake.families.qwen4exp.sizes import attention_sizes, delta_sizes, expert_sizes
from kittiwake.layers.cuda_linear import padded_row
from kittiwake.ops.gated_delta.triton import made_columns

MOST_ROWS = 4096
"""Most rows of one launch; longer batches are cut, which changes no bit."""
_ROWS_PER_GIB = 128
_LEAST_ROWS = 512


def most_rows_for(memory_bytes: int) -> int:
    """Most rows of one launch on a card of so much memory."""
    return largest_bucket(min(MOST_ROWS, max(_LEAST_ROWS, int(memory_bytes / 2**30 * _ROWS_PER_GIB))))


@dataclass(frozen=True)
class Room:
    """Values of a room for each row: of the element type, or float32."""

    columns: int
    is_float32: bool = False

    def nbytes(self, rows: int, element_bytes: int) -> int:
        """Bytes for so many rows."""
        return rows * padded_row(self.columns) * (4 if self.is_float32 else element_bytes)


def delta_columns(g: Geometry) -> int:
    """Float32 values of a row that the delta rule works on."""
    return made_columns(g.key_heads, g.value_heads, g.key_size, g.value_size)


def plan(g: Geometry) -> dict[str, Room]:
    """Every room that has a row for each token."""
    inputs = [sum(delta_sizes(g).values()), sum(expert_sizes(g).values())]
    inner, out = [g.conv_width, g.shared_width], [g.value_width, g.width]
    floats = max(delta_columns(g), 2 * g.streams, g.width)
    rooms = {"x": Room(g.stream_width, is_float32=True), "floats": Room(floats, is_float32=True)}
    if g.has_attention:
        inputs.append(sum(attention_sizes(g).values()))
        out.append(g.heads * g.head_size)
    if g.ngrams:
        inputs.append(g.stream_width + g.width)
    return rooms | {
        "normed": Room(g.stream_width),
        "low": Room(g.stream_rank + g.streams),
        "up": Room(g.stream_width),
        "mixed": Room(g.width),
        "inputs": Room(max(inputs)),
        "inner": Room(max(inner)),
        "out": Room(max(out)),
        "y": Room(g.width),
    }


class Rooms:
    """The rooms of one model, for up to ``most_rows`` rows."""

    def __init__(self, g: Geometry, most_rows: int, element: torch.dtype, place: torch.device) -> None:
        self._flat = {
            name: torch.empty(
                most_rows * padded_row(room.columns), dtype=torch.float32 if room.is_float32 else element, device=place
            )
            for name, room in plan(g).items()
        }

    def get(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """Room for ``rows`` rows, [rows, columns], never cleared; rows are padded as products load them."""
        width = padded_row(columns)
        return self._flat[name][: rows * width].view(rows, width)[:, :columns]

    @property
    def nbytes(self) -> int:
        """Bytes of all rooms."""
        return sum(flat.nbytes for flat in self._flat.values())


def room_bytes(g: Geometry, rows: int, element_bytes: int) -> int:
    """Bytes that :class:`Rooms` takes."""
    return sum(room.nbytes(rows, element_bytes) for room in plan(g).values())
