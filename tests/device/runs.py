"""Runs of a model that are compared bit for bit, on the device it is on: nothing but logits crosses to the host."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StateTable, new_states
from kittiwake.families.contract import Model


@dataclass(frozen=True)
class Trace:
    """A sequence run alone, one token a step: logits [T, vocab], and by part the state after each token [T, L, *shape]."""

    ids: list[int]
    logits: np.ndarray
    states: dict[str, Any]


class Runs:
    """A model with a state table that its runs share, so that graphs are captured once."""

    def __init__(self, model: Model, slots: int = 64, seed: int = 0) -> None:
        self.model = model
        self.states: StateTable = new_states(model, slots)
        self.draw = random.Random(seed)

    def ids(self, count: int) -> list[int]:
        """Random tokens."""
        return [self.draw.randrange(self.model.config.vocab_size) for _ in range(count)]

    def forward(self, sequences: Sequence[tuple[int, list[int]]], want: list[list[int]] | None = None) -> np.ndarray:
        """Logits of the wanted rows, of the last of each sequence where nothing is said."""
        return self.model.forward(Batch.pack(list(sequences), want), self.states)

    def slots(self, count: int) -> list[int]:
        """Fresh slots."""
        return [self.states.allocate() for _ in range(count)]

    def free(self, slots: Sequence[int]) -> None:
        """Give slots back."""
        for slot in slots:
            self.states.free(slot)

    def state(self, slot: int) -> dict[str, Any]:
        """What a slot holds, where it is; a copy."""
        return {part.name: _copy(self.states.part(part.name)[:, slot]) for part in self.model.state_spec.parts}

    def trace(self, length: int) -> Trace:
        """Random tokens, run alone one at a time."""
        (slot,), ids = self.slots(1), self.ids(length)
        logits, states = [], []
        for token in ids:
            logits.append(self.forward([(slot, [token])])[0].copy())
            states.append(self.state(slot))
        self.free([slot])
        return Trace(ids, np.stack(logits), {name: [state[name] for state in states] for name in states[0]})

    def agrees(self, trace: Trace, at: int, slot: int, logits: np.ndarray) -> bool:
        """Whether logits and a slot's state have the bits they must have after ``at`` tokens."""
        found = self.state(slot)
        states = all(_same(found[name], steps[at - 1]) for name, steps in trace.states.items())
        return states and same_logits(logits, trace.logits[at - 1])

    def pieces(self, length: int) -> list[int]:
        """A random split of a length, 1s among the pieces."""
        out: list[int] = []
        while length:
            out.append(1 if self.draw.random() < 0.3 else self.draw.randint(1, length))
            length -= out[-1]
        return out

    def split(self, trace: Trace, pieces: Sequence[int]) -> bool:
        """Run a trace alone in these pieces, comparing at every border."""
        (slot,) = self.slots(1)
        at, same = 0, True
        for length in pieces:
            logits = self.forward([(slot, trace.ids[at : at + length])])[0]
            at += length
            same &= self.agrees(trace, at, slot, logits)
        self.free([slot])
        return same

    def crowd(self, trace: Trace, others: int) -> bool:
        """The same among sequences that prefill and decode at its side, at a random place of each batch."""
        slots, (mine,) = self.slots(others), self.slots(1)
        at, same = 0, True
        for length in self.pieces(len(trace.ids)):
            sequences = [(slot, self.ids(self.draw.choice((1, 1, 1, 3, 20)))) for slot in slots]
            place = self.draw.randint(0, others)
            sequences.insert(place, (mine, trace.ids[at : at + length]))
            at += length
            same &= self.agrees(trace, at, mine, self.forward(sequences)[place])
        self.free([*slots, mine])
        return same


def same_logits(found: np.ndarray, expected: np.ndarray) -> bool:
    """Every bit."""
    return bool(np.array_equal(found.view(np.uint32), expected.view(np.uint32)))


def _copy(array: Any) -> Any:
    return array.clone() if isinstance(array, torch.Tensor) else array.copy()


def _same(found: Any, expected: Any) -> bool:
    if isinstance(found, torch.Tensor):
        return bool(torch.equal(found.view(torch.int32), expected.view(torch.int32)))
    return same_logits(np.ascontiguousarray(found), np.ascontiguousarray(expected))
