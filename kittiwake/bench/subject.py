"""The model under measurement, on its device: forward calls whose results are there when they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import numpy as np
import torch

from kittiwake.device import available_memory
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StateTable, new_states
from kittiwake.errors import DeviceError, KittiwakeError
from kittiwake.families.contract import Model

_FEWER = "name cases of fewer sequences"


class _OnCard(Protocol):
    def forward_on_device(self, batch: Batch, states: StateTable) -> torch.Tensor: ...


class Subject:
    """A model with the first slots of one state table; every case takes as many of them as it has sequences."""

    def __init__(self, model: Model, slots: int) -> None:
        self.model = model
        self.device = model.device
        each, free = model.state_spec.slot_bytes, available_memory()
        if self.device == "cpu" and free and slots * each > free:
            raise KittiwakeError(
                f"{slots:,} states of {each:,} bytes are more than the {free:,} bytes that are free", _FEWER
            )
        try:
            self.states = new_states(model, slots)
        except torch.OutOfMemoryError as err:
            raise DeviceError(
                f"the device has no room for {slots} states of {model.state_spec.slot_bytes} bytes beside the model",
                _FEWER,
            ) from err
        self.slots = [self.states.allocate() for _ in range(slots)]

    def pack(self, ids: Sequence[Sequence[int]]) -> Batch:
        """A batch of one sequence a row of ids, logits for the last token of each."""
        return Batch.pack([(slot, list(row)) for slot, row in zip(self.slots, ids, strict=False)])

    def clear(self) -> None:
        """Bring every slot back to the start of a sequence."""
        for slot in self.slots:
            self.states.clear(slot)

    def forward(self, batch: Batch) -> np.ndarray:
        """Float32 logits [W, vocab] in host memory."""
        return self.model.forward(batch, self.states)

    def call(self, batch: Batch) -> Callable[[], object]:
        """One forward as the clock sees it: over when it returns, its logits where tokens are drawn from them."""
        if self.device == "cpu" or not self.model.can_run_ahead:  # whose tokens the host draws, from logits that it has
            return lambda: self.model.forward(batch, self.states)
        model = cast(_OnCard, self.model)

        def run() -> None:
            model.forward_on_device(batch, self.states)
            torch.cuda.synchronize()

        return run
