"""What the tests of families share: load a checkpoint in memory, run it in pieces, compare with a reference."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StateTable
from kittiwake.families.contract import Model
from kittiwake.load import load_tensors
from tests.oracles.measure import relative_error

Tensors = Mapping[str, torch.Tensor]
Run = tuple[np.ndarray, dict[str, np.ndarray]]
"""Logits at every position [T, vocab], and the state after the last."""
TINY_MODELS = Path(os.environ.get("KITTIWAKE_TINY_MODELS", "no such folder"))
"""Where the tiny trained models of the rwkv.cpp project lie, which are too large to come with the tests."""


def load(tensors: Tensors, dtype: str = "auto", threads: int = 2) -> Model:
    """The model of a checkpoint."""
    return load_tensors(tensors, EngineConfig(threads=threads, dtype=dtype)).model


def changed(stored: Tensors, **tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """A checkpoint with tensors replaced, added, or (None) left out; "__" stands for a dot."""
    table = {**stored, **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
    return {name: tensor for name, tensor in table.items() if tensor is not None}


def renamed(stored: Tensors, old: str, new: str) -> dict[str, torch.Tensor]:
    """A checkpoint with other names."""
    return {name.replace(old, new): tensor for name, tensor in stored.items()}


def run(model: Model, ids: Sequence[int], pieces: Sequence[int] | None = None) -> Run:
    """From an empty state; the ids in pieces of these lengths, or all at once."""
    table = StateTable(model.state_spec, 1)
    slot, rows, at = table.allocate(), [], 0
    for length in pieces or [len(ids)]:
        part = list(ids[at : at + length])
        rows.append(model.forward(Batch.pack([(slot, part)], [list(range(len(part)))]), table))
        at += length
    assert table.positions[slot] == len(ids)
    return np.concatenate(rows), dict(table.save(slot).parts)


def same_run(found: Run, expected: Run) -> bool:
    """Every bit of logits and states."""
    return found[0].tobytes() == expected[0].tobytes() and all(
        found[1][part].tobytes() == state.tobytes() for part, state in expected[1].items()
    )


def assert_agrees(found: Run, logits: np.ndarray, state: Mapping[str, np.ndarray], tolerance: float) -> None:
    """Each relative to its tensor's scale, and the logits at each position as well."""
    assert found[0].shape == logits.shape and found[1].keys() == state.keys()
    assert relative_error(found[0], logits) < tolerance
    for position, (row, expected) in enumerate(zip(found[0], logits, strict=True)):
        assert relative_error(row, expected) < 10 * tolerance, position
    for part, values in state.items():
        assert found[1][part].shape == values.shape
        for layer, (one, expected) in enumerate(zip(found[1][part], values, strict=True)):
            assert relative_error(one, expected) < 3 * tolerance, (part, layer)
