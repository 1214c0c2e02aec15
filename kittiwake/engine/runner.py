"""Batch → forward. On a device the model replays captured graphs, and where it can run ahead drawing stays there too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kittiwake.device import device_memory_for
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import new_states
from kittiwake.errors import RequestError
from kittiwake.families.contract import Model

if TYPE_CHECKING:
    from kittiwake.engine.device_steps import DeviceSteps, DrawableModel


class Runner:
    """Runs a model's forward over a state table."""

    def __init__(self, model: Model, slots: int, growing_bytes: int = -1) -> None:
        self.model = model
        self.states = new_states(model, slots, growing_bytes)

    def device_steps(self, never: Sequence[int]) -> DeviceSteps | None:
        """What launches steps where the model can run ahead of the host; None where each waits for the one before.

        On a device the graphs of every count of decoding sequences are captured now.
        """
        if self.model.device == "cpu":
            return None
        from kittiwake.engine.cuda_states import CudaStateTable
        from kittiwake.engine.device_steps import DeviceSteps

        model: DrawableModel = self.model  # type: ignore[assignment]
        assert isinstance(self.states, CudaStateTable)
        with device_memory_for(
            f"the graphs and rooms of {self.states.slots} slots", "take fewer slots, or a 16-bit dtype"
        ):
            model.capture_decoding(self.states)
            if not self.model.can_run_ahead:
                return None
            return DeviceSteps(model, self.states, self.model.config.vocab_size, never)

    def run(self, batch: Batch) -> np.ndarray:
        """Float32 logits [W, vocab] of the wanted rows; the states of the batch's slots move on."""
        vocab = self.model.config.vocab_size
        ids = batch.token_ids
        if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < vocab):
            bad = next(int(token) for token in ids if not 0 <= token < vocab)
            raise RequestError(f"token id {bad} is outside the model's vocabulary of {vocab}")
        return self.model.forward(batch, self.states)
