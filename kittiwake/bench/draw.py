"""Random tensors for made-up checkpoints, each from a stream of its own, each drawn when it is wanted."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

_BLOCK_ELEMENTS = 1 << 15  # torch keeps an elementwise op of this size on one thread: no thread pool to wait for


@dataclass(frozen=True)
class Recipe:
    """A tensor yet to be drawn: its shape and type are known, ``make`` gives it anew each time, the same values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    def reshaped(self, *shape: int) -> Recipe:
        """The same values in another shape."""
        return Recipe(shape, self.dtype, lambda: self.make().reshape(shape))

    def scaled_by_head(self, gains: torch.Tensor) -> Recipe:
        """Rows of a matrix, head by head, times float32 ``gains`` [H]; rounded once."""

        def make() -> torch.Tensor:
            tensor = self.make()
            tensor.view(len(gains), -1).mul_(gains[:, None].to(tensor.device))
            return tensor

        return Recipe(self.shape, self.dtype, make)


class Draw:
    """Recipes of random tensors, each from a stream of its own keyed by (seed, name): adding one changes no other.

    A card draws large tensors itself, so that no model is sent to it; its values are others than the processor's.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: str = "cpu") -> None:
        self._seed = seed
        self.dtype = dtype
        self._device = device

    def _stream(self, name: str) -> np.random.PCG64:
        return np.random.PCG64([self._seed, zlib.crc32(name.encode())])

    def uniform(self, name: str, shape: tuple[int, ...], low: float, high: float) -> Recipe:
        """Values spread evenly within (low, high), drawn as float32 and rounded once."""
        fill = self._fill_here if self._device == "cpu" else self._fill_on_card
        return Recipe(shape, self.dtype, lambda: fill(name, shape, low, high))

    def _fill_here(self, name: str, shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
        """Values at 65536 even levels.

        Four levels come from each raw word: several times faster than drawing floats, and NumPy keeps raw streams
        stable. Filled block by block, so that no second copy of a large tensor exists.
        """
        tensor = torch.empty(shape, dtype=self.dtype)
        flat, stream = tensor.view(-1), self._stream(name)
        step = (high - low) / 65536
        for start in range(0, flat.numel(), _BLOCK_ELEMENTS):
            part = flat[start : start + _BLOCK_ELEMENTS]
            words = stream.random_raw(-(-part.numel() // 4)).astype("<u8", copy=False)
            levels = torch.from_numpy(words.view("<u2")[: part.numel()].astype(np.float32))
            part.copy_(levels.mul_(step).add_(low + step / 2))
        return tensor

    def _fill_on_card(self, name: str, shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
        generator = torch.Generator(self._device)
        generator.manual_seed(int(self._stream(name).random_raw()) >> 1)
        values = torch.rand(shape, generator=generator, device=self._device, dtype=torch.float32)
        return values.mul_(high - low).add_(low).to(self.dtype)

    def dense(self, name: str, shape: tuple[int, int], gain: float, fan_in: int) -> Recipe:
        """A matrix that turns inputs of unit variance into outputs of standard deviation `gain`."""
        bound = gain * (3.0 / fan_in) ** 0.5
        return self.uniform(name, shape, -bound, bound)

    def spread(self, name: str, count: int, low: float, high: float) -> torch.Tensor:
        """`count` evenly spaced float32 values that cover [low, high], in random order, in host memory."""
        values = np.linspace(low, high, count) if count > 1 else np.array([(low + high) / 2])
        order = np.argsort(self._stream(name).random_raw(count), kind="stable")
        return torch.from_numpy(values[order].astype(np.float32))

    def scattered(self, name: str, count: int, low: float, high: float) -> Recipe:
        """The same, rounded once, where the others are drawn."""

        def make() -> torch.Tensor:
            return self.spread(name, count, low, high).to(self._device, self.dtype)

        return Recipe((count,), self.dtype, make)


def draw_norm(draw: Draw, name: str, c: int) -> dict[str, Recipe]:
    """Weight and bias [C] of a layer norm or group norm."""
    weight, bias = f"{name}.weight", f"{name}.bias"
    return {weight: draw.uniform(weight, (c,), 0.5, 1.5), bias: draw.uniform(bias, (c,), -0.3, 0.3)}


def made(recipes: Mapping[str, Recipe]) -> dict[str, torch.Tensor]:
    """Every tensor, drawn now."""
    return {name: recipe.make() for name, recipe in recipes.items()}
