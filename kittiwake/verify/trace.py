"""What a sequence must give at every position, and runs that are compared with it bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from kittiwake.engine.batch import Batch
from kittiwake.engine.states import new_states
from kittiwake.families.contract import Model


def fingerprint(logits: np.ndarray, parts: Mapping[str, np.ndarray]) -> str:
    """sha-256 over the bits of one row of logits and of a state."""
    digest = hashlib.sha256(np.ascontiguousarray(logits).tobytes())
    for name in sorted(parts):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(parts[name]).tobytes())
    return digest.hexdigest()


class Trace:
    """A sequence run alone, one token a step: ``marks[t]`` is the fingerprint after token t."""

    def __init__(self, model: Model, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        runs = Table(model, 1)
        slot = runs.states.allocate()
        self.marks = [runs.step([(slot, [token])])[0] for token in self.ids]


class Table:
    """A state table to run batches on."""

    def __init__(self, model: Model, slots: int) -> None:
        self.model = model
        self.states = new_states(model, slots)

    def step(self, sequences: list[tuple[int, list[int]]]) -> list[str]:
        """Run one batch of (slot, ids); the fingerprint of each sequence after it."""
        logits = self.model.forward(Batch.pack(sequences), self.states)
        return [
            fingerprint(row, self.states.save(slot, whole=True).parts)
            for row, (slot, _) in zip(logits, sequences, strict=True)
        ]

    def follows(self, trace: Trace, slot: int, pieces: Sequence[int]) -> bool:
        """Run a trace's tokens in pieces of these lengths, alone; whether every border has its fingerprint."""
        at, same = 0, True
        for length in pieces:
            mark = self.step([(slot, trace.ids[at : at + length])])[0]
            at += length
            same &= mark == trace.marks[at - 1]
        return same
