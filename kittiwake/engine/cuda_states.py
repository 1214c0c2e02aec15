"""The state table on a CUDA device: the verbs of :class:`StateTable`, arrays of torch, saved states in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kittiwake.engine.states import SCRATCH_SLOT, SavedState, StateSpec, StateTable


class CudaStateTable(StateTable):
    """``part(name)`` is a tensor [L, S, *shape] on the device; every verb is enqueued on the current stream.

    Copies made by :meth:`save` are numpy arrays, the same as those of a table in host memory.
    """

    def __init__(self, spec: StateSpec, slots: int, device: torch.device) -> None:
        self.device = device
        super().__init__(spec, slots)
        self.drawn = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        """The token drawn last for each slot, which a row given as a negative id eats."""
        self._rooms: dict[str, torch.Tensor] = {}
        self.graphs: dict[Any, Any] = {}
        """Captured graphs that read and write these very tensors; the model that captures them keeps them here."""
        self.pool: Any = None
        """The memory pool of those graphs."""

    def _make(self, shape: tuple[int, ...], dtype: str) -> Any:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def room(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Float32 room beside the states, for a forward to work in; of the largest shape asked for first."""
        if name not in self._rooms:
            self._rooms[name] = torch.empty(shape, dtype=torch.float32, device=self.device)
        return self._rooms[name]

    def save(self, slot: int) -> SavedState:
        """A copy in host memory of what the slot holds once everything enqueued has run."""
        self._check(slot)
        parts = {name: array[:, slot].cpu().numpy() for name, array in self._arrays.items()}
        return SavedState(position=int(self.positions[slot]), parts=parts)

    def restore(self, slot: int, saved: SavedState) -> None:
        """Write a saved state into a slot. Raises StateError when its parts are not this table's."""
        self._check(slot)
        self.check_saved(saved)
        for name, array in self._arrays.items():
            array[:, slot].copy_(torch.from_numpy(np.ascontiguousarray(saved.parts[name])))
        self.positions[slot] = saved.position

    def check_saved(self, saved: SavedState) -> None:
        """Raise StateError when the parts of a saved state are not this table's."""
        self._check_parts(
            saved,
            {
                name: (tuple(array[:, SCRATCH_SLOT].shape), str(array.dtype).removeprefix("torch."))
                for name, array in self._arrays.items()
            },
        )
