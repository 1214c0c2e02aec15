"""The state table on a CUDA device: the verbs of :class:`StateTable`, arrays of torch, saved states in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kittiwake.engine.states import NO_PAGE, PartKind, StatePart, StateSpec, StateTable


def sent(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, enqueued: the host goes on, and torch keeps what it is read from until it has been."""
    host = torch.from_numpy(values)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True, copy=True)


class CudaStateTable(StateTable):
    """``part(name)`` is a tensor on the device, or an array of numpy for a part that lies on the host; every verb is
    enqueued on the current stream.

    Copies made by :meth:`save` are numpy arrays, the same as those of a table in host memory.
    """

    def __init__(self, spec: StateSpec, slots: int, device: torch.device, pages: int = 0) -> None:
        self.device = device
        super().__init__(spec, slots, pages)
        self.device_pages = torch.from_numpy(self.pages).to(device, copy=True)
        """``pages`` on the device, for kernels; the same tensor always, so that graphs may read it."""
        self.drawn = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        """The token drawn last for each slot, which a row given as a negative id eats."""
        self._rooms: dict[str, torch.Tensor] = {}
        self.graphs: dict[Any, Any] = {}
        """Captured graphs that read and write these very tensors; the model that captures them keeps them here."""
        self.attached: dict[str, Any] = {}
        """What else a model keeps beside these states: room to work in whose size follows from the table's."""
        self.pool: Any = None
        """The memory pool of those graphs."""

    def _make(self, part: StatePart, shape: tuple[int, ...]) -> Any:
        if part.on_host:
            return super()._make(part, shape)
        return torch.zeros(shape, dtype=getattr(torch, part.dtype), device=self.device)

    def _take_pages(self, slot: int, count: int) -> None:
        super()._take_pages(slot, count)
        if count > 0:
            self.device_pages[slot].copy_(torch.from_numpy(self.pages[slot]))

    def _give_pages(self, slot: int) -> None:
        super()._give_pages(slot)
        if self.spec.growing:
            self.device_pages[slot].fill_(NO_PAGE)

    def room(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Float32 room beside the states, for a forward to work in; of the largest shape asked for first."""
        if name not in self._rooms:
            self._rooms[name] = torch.empty(shape, dtype=torch.float32, device=self.device)
        return self._rooms[name]

    def _copy(self, part: StatePart, slot: int, position: int, first: int = 0) -> np.ndarray:
        """A part of a slot in host memory, as it is once everything enqueued has run."""
        if part.on_host:
            return super()._copy(part, slot, position, first)
        array = self._arrays[part.name]
        if part.kind is not PartKind.GROWING:
            copied: np.ndarray = array[:, slot].to("cpu", copy=True).numpy()
            return copied
        saved = self._room_for_rows(part, position, first)
        for page, rows in self._page_rows(part, slot, position, first):
            saved[:, rows] = array[:, page, : rows.stop - rows.start].cpu().numpy()
        return saved

    def _write(self, part: StatePart, slot: int, values: np.ndarray, position: int, first: int = 0) -> None:
        if part.on_host:
            super()._write(part, slot, values, position, first)
            return
        array = self._arrays[part.name]
        if part.kind is not PartKind.GROWING:
            array[:, slot].copy_(torch.from_numpy(np.ascontiguousarray(values)))
            return
        for page, rows in self._page_rows(part, slot, position, first):
            piece = torch.from_numpy(np.ascontiguousarray(values[:, rows]))
            array[:, page, : rows.stop - rows.start].copy_(piece)
