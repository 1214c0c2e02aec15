"""Random models of published shapes, for measuring without a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch

from kittiwake.bench.draw import Recipe
from kittiwake.bench.qwen4exp_shapes import (
    QWEN4EXP_SHAPES,
    Qwen4ExpShape,
    one_table,
    qwen4exp_config,
    qwen4exp_recipes,
)
from kittiwake.bench.rwkv4_shapes import RWKV4_SHAPES, Rwkv4Shape, rwkv4_recipes
from kittiwake.bench.rwkv56_shapes import (
    RWKV5_SHAPES,
    RWKV6_SHAPES,
    Rwkv5Shape,
    Rwkv6Shape,
    rwkv5_recipes,
    rwkv6_recipes,
)
from kittiwake.bench.shapes import SHAPES, Rwkv7Shape, rwkv7_recipes
from kittiwake.checkpoints.reader import FilePlace, TensorInfo
from kittiwake.config import EngineConfig
from kittiwake.errors import CheckpointError, UsageError
from kittiwake.families.registry import family_named
from kittiwake.load import Loaded, choose_device, load_source
from kittiwake.progress import Progress

STORED = torch.bfloat16
"""How random weights are stored, as published ones are: float16 and float32 hold the same values."""

AnyShape = Rwkv4Shape | Rwkv5Shape | Rwkv6Shape | Rwkv7Shape | Qwen4ExpShape
Shape = TypeVar("Shape", bound=AnyShape)
ALL_SHAPES: dict[str, AnyShape] = {**SHAPES, **RWKV4_SHAPES, **RWKV5_SHAPES, **RWKV6_SHAPES, **QWEN4EXP_SHAPES}
"""Every published shape by name: RWKV-7 by size alone, the others with their family in front."""


def recipes_of(shape: AnyShape, seed: int, device: str = "cpu") -> dict[str, Recipe]:
    """The tensors of a checkpoint of this shape, to be drawn on ``device``."""
    if isinstance(shape, Rwkv4Shape):
        return rwkv4_recipes(shape, seed, STORED, device)
    if isinstance(shape, Rwkv5Shape):
        return rwkv5_recipes(shape, seed, STORED, device)
    if isinstance(shape, Rwkv6Shape):
        return rwkv6_recipes(shape, seed, STORED, device)
    if isinstance(shape, Qwen4ExpShape):
        return one_table(shape, qwen4exp_recipes(shape, seed, STORED, device))
    return rwkv7_recipes(shape, seed, STORED, device)


def family_of(shape: AnyShape) -> str:
    """The name of the family that runs this shape."""
    names: dict[type, str] = {Rwkv4Shape: "rwkv4", Rwkv5Shape: "rwkv5", Rwkv6Shape: "rwkv6", Rwkv7Shape: "rwkv7"}
    return (names | {Qwen4ExpShape: "qwen4exp"})[type(shape)]


class RandomWeights(Mapping[str, torch.Tensor], Generic[Shape]):
    """Random tensors under published names, drawn on ``device`` each time one is asked for: never all there at once."""

    def __init__(self, shape: Shape, seed: int = 0, device: str = "cpu") -> None:
        self.shape, self.seed, self.device = shape, seed, device
        self.recipes: dict[str, Recipe] = recipes_of(shape, seed, device)

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

    def __init__(self, weights: RandomWeights[Any], name: str) -> None:
        self.path = Path(name)
        self.weights = weights
        shape = weights.shape
        self.config: Mapping[str, Any] | None = None
        if isinstance(shape, Qwen4ExpShape):
            self.config = qwen4exp_config(shape)

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


def shape_named(name: str) -> AnyShape:
    """The published shape of a name. Raises UsageError for one that is not known."""
    if name not in ALL_SHAPES:
        raise UsageError(f"there is no shape {name!r}", f"known shapes: {', '.join(ALL_SHAPES)}")
    return ALL_SHAPES[name]


def random_weights(shape: str, config: EngineConfig, seed: int = 0) -> RandomWeights[Rwkv7Shape]:
    """The random weights of an RWKV-7 shape ("0.1b" …), drawn on the device the model will run on: what peers are given."""
    sizes = shape_named(shape)
    if not isinstance(sizes, Rwkv7Shape):
        raise UsageError(f"no peer runs shape {shape!r}", f"shapes with peers: {', '.join(SHAPES)}")
    return RandomWeights(sizes, seed, choose_device(config.device, family_named("rwkv7")))


def load_random(shape: str, config: EngineConfig, progress: Progress | None = None, seed: int = 0) -> Loaded:
    """Random weights of a shape, kept as ``config.dtype`` says ("auto": bf16, as published ones are)."""
    return load_shape(shape_named(shape), config, progress, seed, name=f"random {shape}")


def load_shape(
    shape: AnyShape, config: EngineConfig, progress: Progress | None = None, seed: int = 0, *, name: str = "random"
) -> Loaded:
    """The same of any sizes, drawn on the device the model will run on."""
    device = choose_device(config.device, family_named(family_of(shape)))
    return load_source(RandomSource(RandomWeights(shape, seed, device), name), config, progress=progress)
