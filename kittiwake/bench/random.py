"""Random models of published shapes, for measuring without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kittiwake.bench.rwkv4_shapes import RWKV4_SHAPES, random_rwkv4
from kittiwake.bench.rwkv56_shapes import RWKV5_SHAPES, RWKV6_SHAPES, random_rwkv5, random_rwkv6
from kittiwake.bench.shapes import SHAPES, random_rwkv7
from kittiwake.config import EngineConfig
from kittiwake.errors import UsageError
from kittiwake.families.contract import Progress
from kittiwake.load import Loaded, load_tensors

MakeTensors = Callable[[int, torch.dtype], dict[str, torch.Tensor]]
"""(seed, dtype) → a checkpoint."""
MAKERS: dict[str, MakeTensors] = {
    **{name: partial(random_rwkv7, shape) for name, shape in SHAPES.items()},
    **{name: partial(random_rwkv4, rwkv4) for name, rwkv4 in RWKV4_SHAPES.items()},
    **{name: partial(random_rwkv5, rwkv5) for name, rwkv5 in RWKV5_SHAPES.items()},
    **{name: partial(random_rwkv6, rwkv6) for name, rwkv6 in RWKV6_SHAPES.items()},
}
"""Every published shape by its name."""


def load_random(shape: str, config: EngineConfig, progress: Progress | None = None, seed: int = 0) -> Loaded:
    """Random weights of a shape ("0.1b" …), stored as ``config.dtype`` says ("auto": bf16, as published ones are)."""
    if shape not in MAKERS:
        raise UsageError(f"there is no shape {shape!r}", f"known shapes: {', '.join(MAKERS)}")
    tensors = MAKERS[shape](seed, torch.bfloat16)
    return load_tensors(tensors, config, progress=progress, name=f"random {shape}")
