"""A model small enough to see through: its state is a running sum of token ids, its logits follow from that alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StatePart, StateSpec, StateTable
from kittiwake.families.contract import ModelConfig

VOCAB = 16


class SumModel:
    """Exact by nature. ``crowd_leak`` adds the number of sequences to the logits, ``chunk_leak`` that of rows to the state."""

    def __init__(self, *, crowd_leak: float = 0.0, chunk_leak: float = 0.0) -> None:
        self.config = ModelConfig("fake", layers=1, width=1, vocab_size=VOCAB)
        self.state_spec = StateSpec(1, (StatePart("sum", (1,)),))
        self.weight_bytes = 4
        self.device = "cpu"
        self.crowd_leak = crowd_leak
        self.chunk_leak = chunk_leak
        self.calls: list[tuple[int, int]] = []

    def forward(self, batch: Batch, states: StateTable) -> np.ndarray:
        sums = states.part("sum")
        self.calls.append((len(batch.slots), batch.rows))
        logits = np.zeros((batch.rows, VOCAB), dtype=np.float32)
        for index, slot in enumerate(batch.slots):
            begin, end = int(batch.starts[index]), int(batch.starts[index + 1])
            for row in range(begin, end):
                sums[0, slot, 0] = (sums[0, slot, 0] * 3 + batch.token_ids[row]) % 1009
                logits[row, int(sums[0, slot, 0]) % VOCAB] = 1.0 + sums[0, slot, 0]
            sums[0, slot, 0] += self.chunk_leak * (end - begin)
            states.positions[slot] += end - begin
        return logits[batch.want_rows] + np.float32(self.crowd_leak * len(batch.slots))

    def describe(self) -> dict[str, Any]:
        return {"kind": "fake"}
