"""Batch → forward. The place where a device keeps its captured graphs; the CPU runs every batch as it comes."""

from __future__ import annotations

import numpy as np

from kittiwake.engine.batch import Batch
from kittiwake.engine.states import new_states
from kittiwake.errors import RequestError
from kittiwake.families.contract import Model


class Runner:
    """Runs a model's forward over a state table."""

    def __init__(self, model: Model, slots: int) -> None:
        self.model = model
        self.states = new_states(model, slots)

    def run(self, batch: Batch) -> np.ndarray:
        """Float32 logits [W, vocab] of the wanted rows; the states of the batch's slots move on."""
        vocab = self.model.config.vocab_size
        ids = batch.token_ids
        if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < vocab):
            bad = next(int(token) for token in ids if not 0 <= token < vocab)
            raise RequestError(f"token id {bad} is outside the model's vocabulary of {vocab}")
        return self.model.forward(batch, self.states)
