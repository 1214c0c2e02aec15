"""State as a table of slots, and its verbs: allocate, clear, save, restore, free.

A family declares its state as a :class:`StateSpec`; nobody outside the family knows what is in it. Recurrent state
cannot be rewound: it may be continued only by tokens that extend exactly what it has seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kittiwake.device import device_memory_for
from kittiwake.errors import StateError

if TYPE_CHECKING:
    from kittiwake.families.contract import Model

SCRATCH_SLOT = 0
"""The slot that belongs to nobody: spare rows of a graph bucket write there, no request ever gets it."""


class PartKind(Enum):
    """How a part of a state depends on the length of what it has seen."""

    FIXED = "fixed"
    """One array of constant size: a recurrent state, a token shift."""
    OPEN_ROWS = "open_rows"
    """Raw rows since the last block border, at most ``shape[0]``; the count is ``position % shape[0]``."""
    GROWING = "growing"
    """One row a token (keys, values), kept in pages under the scheduler's budget."""


@dataclass(frozen=True)
class StatePart:
    """One array a sequence carries in every layer. ``shape`` is per layer and slot, without the length of growing parts."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: PartKind = PartKind.FIXED
    fill: float = 0.0
    """What every value is at the start of a sequence."""

    @property
    def nbytes(self) -> int:
        """Bytes a layer and slot (for a growing part: a token and layer)."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class StateSpec:
    """What one sequence carries: parts times layers, and its absolute position (tokens seen so far)."""

    layers: int
    parts: tuple[StatePart, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, growing parts left out."""
        return self.layers * sum(part.nbytes for part in self.parts if part.kind is not PartKind.GROWING)


@dataclass(frozen=True)
class SavedState:
    """A copy of one slot: position and arrays [L, *shape] by part name. Immutable by agreement."""

    position: int
    parts: Mapping[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.parts.values())

    @cached_property
    def digest(self) -> str:
        """sha-256 (hex) over the names and values of the parts: what a sequence that began from it is told by."""
        digest = hashlib.sha256()
        for name, array in sorted(self.parts.items()):
            digest.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


class StateTable:
    """``slots`` usable places and the scratch slot, in host memory.

    ``part(name)`` is float array [L, S, *shape] where S = slots + 1; the family's forward reads and writes it in place.
    ``positions`` is int64 [S]: tokens each slot has seen.
    """

    def __init__(self, spec: StateSpec, slots: int) -> None:
        if slots < 1:
            raise StateError(f"a state table needs at least one slot, asked for {slots}")
        for part in spec.parts:
            if part.kind is PartKind.GROWING:
                raise StateError(
                    f"state part {part.name!r} grows with length; this table keeps constant-size parts only"
                )
        self.spec = spec
        self.slots = slots
        self.positions = np.zeros(slots + 1, dtype=np.int64)
        self._arrays = {part.name: self._make((spec.layers, slots + 1, *part.shape), part.dtype) for part in spec.parts}
        for part in spec.parts:
            if part.fill:  # zeros take no memory before they are written to
                self._arrays[part.name][...] = part.fill
        self._free = list(range(slots, SCRATCH_SLOT, -1))

    def _make(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An array of zeros where the table lives."""
        return np.zeros(shape, dtype=dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole table."""
        return sum(array.nbytes for array in self._arrays.values())

    @property
    def free_slots(self) -> int:
        """Slots that allocate() can still give."""
        return len(self._free)

    def part(self, name: str) -> Any:
        """The array of one part, [L, S, *shape]; writes go to the table."""
        return self._arrays[name]

    def allocate(self) -> int:
        """Take a cleared slot. Raises StateError when none is free."""
        if not self._free:
            raise StateError(f"all {self.slots} state slots are taken", "free one or open the engine with more slots")
        slot = self._free.pop()
        self.clear(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back. Raises StateError for a slot that is not taken."""
        self._check(slot)
        self._free.append(slot)

    def clear(self, slot: int) -> None:
        """Bring a slot back to the start of a sequence: what each part begins with, position 0."""
        for part in self.spec.parts:
            self._arrays[part.name][:, slot] = part.fill
        self.positions[slot] = 0

    def save(self, slot: int) -> SavedState:
        """A deep copy of what the slot holds now."""
        self._check(slot)
        return SavedState(
            position=int(self.positions[slot]),
            parts={name: array[:, slot].copy() for name, array in self._arrays.items()},
        )

    def restore(self, slot: int, saved: SavedState) -> None:
        """Write a saved state into a slot. Raises StateError when its parts are not this table's."""
        self._check(slot)
        self.check_saved(saved)
        for name, array in self._arrays.items():
            array[:, slot] = saved.parts[name]
        self.positions[slot] = saved.position

    def check_saved(self, saved: SavedState) -> None:
        """Raise StateError when the parts of a saved state are not this table's."""
        kinds = {name: (array[:, SCRATCH_SLOT].shape, str(array.dtype)) for name, array in self._arrays.items()}
        self._check_parts(saved, kinds)

    @staticmethod
    def _check_parts(saved: SavedState, kinds: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        if set(saved.parts) != set(kinds):
            raise StateError(f"saved state has parts {sorted(saved.parts)}, this model has {sorted(kinds)}")
        for name, (shape, dtype) in kinds.items():
            found = saved.parts[name]
            if found.shape != shape or str(found.dtype) != dtype:
                raise StateError(
                    f"saved state part {name!r} is {found.dtype} {found.shape}, this model has {dtype} {shape}"
                )

    def _check(self, slot: int) -> None:
        if not SCRATCH_SLOT < slot <= self.slots or slot in self._free:
            raise StateError(f"slot {slot} is not a taken slot of this table (1 to {self.slots})")


def new_states(model: Model, slots: int) -> StateTable:
    """A state table for a model, where the model lives. Raises DeviceError where a card has no room for it."""
    if model.device == "cpu":
        return StateTable(model.state_spec, slots)
    import torch

    from kittiwake.engine.cuda_states import CudaStateTable

    each = model.state_spec.slot_bytes
    with device_memory_for(f"{slots} slots of {each:,} bytes each beside the model", "take fewer slots"):
        return CudaStateTable(model.state_spec, slots, torch.device(model.device))
