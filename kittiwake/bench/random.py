"""Random models of published shapes, for measuring without a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from kittiwake.bench.qwen4exp_shapes import QWEN4EXP_SHAPES, one_table, qwen4exp_config, random_qwen4exp
from kittiwake.bench.rwkv4_shapes import RWKV4_SHAPES, random_rwkv4
from kittiwake.bench.rwkv56_shapes import RWKV5_SHAPES, RWKV6_SHAPES, random_rwkv5, random_rwkv6
from kittiwake.bench.shapes import SHAPES, Recipe, Rwkv7Shape, rwkv7_recipes
from kittiwake.checkpoints.reader import FilePlace, TensorInfo
from kittiwake.config import EngineConfig
from kittiwake.errors import CheckpointError, UsageError
from kittiwake.families.contract import Progress
from kittiwake.families.registry import family_named
from kittiwake.load import Loaded, choose_device, load_source, load_tensors

STORED = torch.bfloat16
"""How random weights are stored, as published ones are: float16 and float32 hold the same values."""


MAKERS: dict[str, Callable[[int, torch.dtype], dict[str, torch.Tensor]]] = {
    **{name: partial(random_rwkv4, rwkv4) for name, rwkv4 in RWKV4_SHAPES.items()},
    **{name: partial(random_rwkv5, rwkv5) for name, rwkv5 in RWKV5_SHAPES.items()},
    **{name: partial(random_rwkv6, rwkv6) for name, rwkv6 in RWKV6_SHAPES.items()},
}
"""Shapes of the versions before RWKV-7, by name: (seed, dtype) → a checkpoint."""


class RandomWeights(Mapping[str, torch.Tensor]):
    """Random tensors under BlinkDL's names, drawn on ``device`` each time one is asked for: never all there at once."""

    def __init__(self, shape: Rwkv7Shape, seed: int = 0, device: str = "cpu") -> None:
        self.shape, self.seed, self.device = shape, seed, device
        self.recipes: dict[str, Recipe] = rwkv7_recipes(shape, seed, STORED, device)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of a name, drawn now."""
        return self.recipes[name].make()

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self.recipes)

    def __len__(self) -> int:
        """How many tensors there are."""
        return len(self.recipes)


class RandomSource:
    """Random weights as an open checkpoint."""

    format = "memory"
    config: Mapping[str, object] | None = None

    def __init__(self, weights: RandomWeights, name: str) -> None:
        self.path = Path(name)
        self.weights = weights

    def infos(self) -> list[TensorInfo]:
        """Every tensor; none is drawn."""
        return [TensorInfo(name, recipe.shape, recipe.dtype) for name, recipe in self.weights.recipes.items()]

    def read(self, name: str) -> torch.Tensor:
        """The tensor, drawn now."""
        return self.weights[name]

    def place(self, name: str) -> FilePlace:
        """Raises CheckpointError: they lie in no file."""
        raise CheckpointError(f"{name} of {self.path} is drawn when it is read")

    def digest(self, progress: Progress | None = None) -> str:
        """sha-256 (hex) of what the values follow from: shape, seed, and whether a card drew them."""
        weights = self.weights
        kind = "cpu" if weights.device == "cpu" else "card"
        return hashlib.sha256(f"random {weights.shape} {weights.seed} {STORED} {kind}".encode()).hexdigest()

    def close(self) -> None:
        """Nothing to let go of."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def shape_named(name: str) -> Rwkv7Shape:
    """The published shape of a name. Raises UsageError for one that is not known."""
    if name not in SHAPES:
        raise UsageError(
            f"there is no shape {name!r}", f"known shapes: {', '.join([*SHAPES, *MAKERS, *QWEN4EXP_SHAPES])}"
        )
    return SHAPES[name]


def random_weights(shape: str, config: EngineConfig, seed: int = 0) -> RandomWeights:
    """The random weights of a shape ("0.1b" …), drawn on the device the model will run on."""
    sizes = shape_named(shape)
    return RandomWeights(sizes, seed, choose_device(config.device, family_named("rwkv7")))


def load_random(shape: str, config: EngineConfig, progress: Progress | None = None, seed: int = 0) -> Loaded:
    """Random weights of a shape, kept as ``config.dtype`` says ("auto": bf16, as published ones are)."""
    if shape in QWEN4EXP_SHAPES:
        sizes = QWEN4EXP_SHAPES[shape]
        tensors, settings = one_table(sizes, random_qwen4exp(sizes, seed, STORED)), qwen4exp_config(sizes)
        return load_tensors(tensors, config, progress=progress, name=f"random {shape}", settings=settings)
    if shape in MAKERS:
        return load_tensors(MAKERS[shape](seed, STORED), config, progress=progress, name=f"random {shape}")
    return load_source(RandomSource(random_weights(shape, config, seed), f"random {shape}"), config, progress=progress)
