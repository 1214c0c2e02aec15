"""Random tensors for made-up checkpoints, each from a stream of its own."""

from __future__ import annotations

import zlib

import numpy as np
import torch

_BLOCK_ELEMENTS = 1 << 15  # torch keeps an elementwise op of this size on one thread: no thread pool to wait for


class Draw:
    """Random tensors, each from a stream of its own keyed by (seed, name): adding a tensor changes no other."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._seed = seed
        self.dtype = dtype

    def _stream(self, name: str) -> np.random.PCG64:
        return np.random.PCG64([self._seed, zlib.crc32(name.encode())])

    def uniform(self, name: str, shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
        """Return values at 65536 even levels within (low, high), drawn as float32 and rounded once.

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

    def dense(self, name: str, shape: tuple[int, int], gain: float, fan_in: int) -> torch.Tensor:
        """Return a matrix that turns inputs of unit variance into outputs of standard deviation `gain`."""
        bound = gain * (3.0 / fan_in) ** 0.5
        return self.uniform(name, shape, -bound, bound)

    def spread(self, name: str, count: int, low: float, high: float) -> torch.Tensor:
        """Return `count` evenly spaced float32 values that cover [low, high], in random order."""
        values = np.linspace(low, high, count) if count > 1 else np.array([(low + high) / 2])
        order = np.argsort(self._stream(name).random_raw(count), kind="stable")
        return torch.from_numpy(values[order].astype(np.float32))


def draw_norm(draw: Draw, name: str, c: int) -> dict[str, torch.Tensor]:
    """Weight and bias [C] of a layer norm or group norm."""
    weight, bias = f"{name}.weight", f"{name}.bias"
    return {weight: draw.uniform(weight, (c,), 0.5, 1.5), bias: draw.uniform(bias, (c,), -0.3, 0.3)}
