"""Random RWKV-7 models so small that a step takes less than a millisecond, loaded once for all tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from kittiwake.bench.shapes import Rwkv7Shape, random_rwkv7, small
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import SavedState, StateTable
from kittiwake.families.contract import Model
from kittiwake.load import Loaded, load_tensors

SHAPE = small(2, 32, 16, rank_w=3, rank_a=5, rank_v=4, rank_g=6)
"""Two heads of 16, tokens that are bytes."""


@cache
def tiny_tensors(dtype: torch.dtype = torch.bfloat16, shape: Rwkv7Shape = SHAPE) -> dict[str, torch.Tensor]:
    """A checkpoint in BlinkDL's names; not to be changed."""
    return random_rwkv7(shape, seed=4, dtype=dtype)


@cache
def tiny_model(threads: int = 1, dtype: str = "fp32", shape: Rwkv7Shape = SHAPE) -> Loaded:
    """The same weights ready to run; by one thread, for two wait for each other where processes share the cores."""
    return load_tensors(tiny_tensors(shape=shape), EngineConfig(threads=threads, dtype=dtype))


def run_alone(model: Model, ids: Sequence[int], start: SavedState | None = None) -> tuple[np.ndarray, SavedState]:
    """Logits [vocab] after these tokens and the state then, all in one forward on a table of its own."""
    table = StateTable(model.state_spec, 1)
    slot = table.allocate()
    if start is not None:
        table.restore(slot, start)
    logits = model.forward(Batch.pack([(slot, list(ids))]), table)
    return logits[0].copy(), table.save(slot)


def same_state(found: SavedState, expected: SavedState) -> bool:
    """The same position, and every part the same bits."""
    return (
        found.position == expected.position
        and found.parts.keys() == expected.parts.keys()
        and all(found.parts[name].tobytes() == part.tobytes() for name, part in expected.parts.items())
    )
