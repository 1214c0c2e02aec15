"""Random models of published shapes, for measuring without a checkpoint."""

from __future__ import annotations

import torch

from kittiwake.bench.shapes import SHAPES, random_rwkv7
from kittiwake.config import EngineConfig
from kittiwake.errors import UsageError
from kittiwake.families.contract import Progress
from kittiwake.load import Loaded, load_tensors


def load_random(shape: str, config: EngineConfig, progress: Progress | None = None, seed: int = 0) -> Loaded:
    """Random weights of a shape ("0.1b" …), stored as ``config.dtype`` says ("auto": bf16, as published ones are)."""
    if shape not in SHAPES:
        raise UsageError(f"there is no shape {shape!r}", f"known shapes: {', '.join(SHAPES)}")
    tensors = random_rwkv7(SHAPES[shape], seed, torch.bfloat16)
    return load_tensors(tensors, config, progress=progress, name=f"random {shape}")
