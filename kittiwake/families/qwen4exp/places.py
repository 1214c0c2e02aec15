"""Where a layout keeps one of our tensors, and what has to be done to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kittiwake.checkpoints.reader import TensorInfo, TensorSource
from kittiwake.errors import ModelError
from kittiwake.families.canonical import check_type

Shape = tuple[int, ...]
Change = Callable[[torch.Tensor], torch.Tensor]
"""What a tensor as stored becomes as ours."""


@dataclass(frozen=True)
class Place:
    """One of our tensors as stored: in one tensor, or in several that are laid end to end along an axis."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    """What the file has for each, sizes of 1 left out."""
    change: Change | None = None
    """What is done to each before they are laid together."""
    axis: int = 0

    def check(self, infos: Mapping[str, TensorInfo], source: TensorSource) -> None:
        """Raise ModelError for a tensor that is missing, or is of another shape or of a type that is not read."""
        for name, shape in zip(self.names, self.shapes, strict=True):
            info = infos.get(name)
            if info is None:
                raise ModelError(f"{source.path} lacks the tensor {name}")
            if without_ones(info.shape) != without_ones(shape):
                raise ModelError(f"{name} in {source.path} has shape {info.shape}, expected {shape}")
            check_type(info, source)

    def take(self, source: TensorSource, shape: Shape) -> torch.Tensor:
        """The tensor as ours: vectors as float32, others in the type they are stored in."""
        parts = [source.read(name) for name in self.names]
        if len(shape) == 1:
            parts = [part.float() for part in parts]
        if self.change is not None:
            parts = [self.change(part) for part in parts]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.axis)
        return whole.reshape(shape)


def without_ones(shape: Sequence[int]) -> Shape:
    """A shape without its sizes of 1: [1, C], [C, 1] and [C] hold the same values."""
    return tuple(size for size in shape if size != 1)


def plain(name: str, shape: Shape, change: Change | None = None) -> Place:
    """A tensor stored by itself."""
    return Place((name,), (shape,), change)


def less_one(tensor: torch.Tensor) -> torch.Tensor:
    """A norm's weight as it is multiplied → as kept, around zero."""
    return tensor.float() - 1


def log_of_negative(tensor: torch.Tensor) -> torch.Tensor:
    """-exp(A) → A."""
    return torch.log(-tensor.float())


def grouped_heads(key_heads: int, value_heads: int, size: int, before: int = 0, axis: int = 0) -> Change:
    """Value heads in tiles (all first heads of the key heads, then all second ones) → beside their key head.

    Along ``axis`` the tensor has ``before`` rows that stay where they are, then ``size`` rows a head. Source: the
    reordering of value heads in llama.cpp's converter for qwen3next.
    """
    every = value_heads // key_heads

    def change(tensor: torch.Tensor) -> torch.Tensor:
        heads = torch.arange(value_heads).reshape(every, key_heads).t().reshape(-1)
        rows = (heads[:, None] * size + torch.arange(size)).reshape(-1) + before
        order = torch.cat([torch.arange(before), rows])
        return tensor if every == 1 else tensor.index_select(axis, order)

    return change
