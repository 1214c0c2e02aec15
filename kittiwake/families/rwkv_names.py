"""What the name tables of every RWKV share: sizes, what stands around the layers, where a layout keeps a tensor, and checks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kittiwake.checkpoints.reader import TensorInfo, TensorSource
from kittiwake.errors import ModelError
from kittiwake.families.canonical import check_tensor, listed

Shapes = Mapping[str, tuple[int, ...]]
"""Our name → shape, products as [N, K] (N outputs)."""
NORMS = ("time_norm", "channel_norm", "time_mix.group_norm")
"""Norms of a layer; RWKV-4 has no group norm."""


@dataclass(frozen=True)
class Place:
    """Where a layout keeps one of our tensors."""

    name: str
    is_transposed: bool = False
    row: tuple[int, int] | None = None
    """(its row, how many there are) in a tensor that holds several of ours."""

    def take(self, source: TensorSource, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor as ours: matrices as stored, turned if need be; vectors as float32 [C]."""
        tensor = source.read(self.name)
        if self.row is not None:
            row, rows = self.row
            tensor = tensor.reshape(rows, -1)[row]
        if len(shape) == 1:
            return tensor.reshape(-1).float()
        return tensor.t() if self.is_transposed else tensor

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape a file has for a tensor of ours, sizes of 1 before or within a vector's left out."""
        if self.row is not None:
            return (self.row[1], *shape)
        return shape[::-1] if self.is_transposed else shape


@dataclass(frozen=True)
class HeadPlace(Place):
    """A vector that is stored by heads: one value a head, or one a channel of it."""

    stored: tuple[int, ...] = ()

    def take(self, source: TensorSource, shape: tuple[int, ...]) -> torch.Tensor:
        """Float32 [C]; a head's one value stands for each of its channels."""
        values = source.read(self.name).reshape(-1).float()
        return values.repeat_interleave(shape[0] // len(values))

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """As it is stored."""
        return self.stored


@dataclass(frozen=True)
class MatrixSizes:
    """What the shapes of an RWKV-5 to RWKV-7, whose states are a matrix a head, have in common."""

    layers: int
    width: int
    heads: int
    ffn: int
    vocab: int

    @property
    def head_size(self) -> int:
        """Channels of a head."""
        return self.width // self.heads


@dataclass(frozen=True)
class OuterLayout:
    """The names of one layout, of what every version has."""

    key: str
    block: str
    """What a block's names begin with; ``{}`` is the number of the layer."""
    embedding: str
    embedding_norm: str
    output_norm: str
    head: str
    norms: tuple[str, ...]
    """In the order of NORMS; ``.weight`` and ``.bias`` follow."""

    def whole(self, layers: int, block: Callable[[int], Mapping[str, Place]], head: str = "") -> dict[str, Place]:
        """Our name → place, for a whole model.

        ``block(layer)`` has the tensors of a layer that are no norms, both names without what a block's begin with;
        ``head`` is where the head is, if not at its own name.
        """
        places = {"embedding.weight": Place(self.embedding)}
        places |= _norm("embedding_norm", self.embedding_norm) | _norm("output_norm", self.output_norm)
        places["head.weight"] = Place(head or self.head)
        for layer in range(layers):
            prefix = self.block.format(layer)
            within: dict[str, Place] = {}
            for ours, theirs in zip(NORMS, self.norms, strict=False):
                within |= _norm(ours, theirs)
            for ours, place in (within | dict(block(layer))).items():
                places[f"layers.{layer}.{ours}"] = replace(place, name=prefix + place.name)
        return places


def _norm(ours: str, theirs: str) -> dict[str, Place]:
    return {f"{ours}.{part}": Place(f"{theirs}.{part}") for part in ("weight", "bias")}


def whole_shapes(width: int, vocab: int, norms: Sequence[str], blocks: Iterable[Shapes]) -> Shapes:
    """Our name → shape for a whole model: ``norms`` are a layer's, ``blocks`` what else each layer has."""

    def with_norms(names: Iterable[str], prefix: str = "") -> dict[str, tuple[int, ...]]:
        return {f"{prefix}{name}.{part}": (width,) for name in names for part in ("weight", "bias")}

    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (vocab, width)}
    shapes |= with_norms(("embedding_norm", "output_norm")) | {"head.weight": (vocab, width)}
    for layer, block in enumerate(blocks):
        shapes |= with_norms(norms, f"layers.{layer}.")
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def count_layers(block: str, names: Iterable[str], source: TensorSource, first: str) -> int:
    """How many layers names are for, the names of layer i beginning with ``block.format(i)``.

    Raises ModelError where there is none (``first`` is a name that was expected) or a number is left out.
    """
    before, after = block.split("{}")
    pattern = re.compile(re.escape(before) + r"(0|[1-9]\d{0,5})" + re.escape(after) + ".+", re.DOTALL)
    found = {int(match[1]) for name in names if (match := pattern.fullmatch(name))}
    if not found:
        raise ModelError(f"{source.path} holds no tensor of a layer, expected {first}")
    if found != set(range(len(found))):
        gap = min(set(range(len(found))) - found)
        raise ModelError(f"the checkpoint has layers up to {max(found)}, but layer {gap} is missing")
    return len(found)


def matrix_shape(infos: Mapping[str, TensorInfo], name: str, family: str) -> tuple[int, int]:
    """The shape of a tensor that sizes are read from. Raises ModelError when it is missing or no matrix."""
    if name not in infos:
        raise ModelError(f"the checkpoint lacks {name}, which {family} is sized by")
    found = infos[name].shape
    if len(found) != 2 or 0 in found:
        raise ModelError(f"{name} has shape {found}, expected 2 sizes above 0")
    return found[0], found[1]


def heads_of(infos: Mapping[str, TensorInfo], bonus: str, width: int, family: str) -> int:
    """How many heads a bonus [H, K] tells. Raises ModelError when it is missing or makes another width."""
    heads, head_size = matrix_shape(infos, bonus, family)
    if heads * head_size != width:
        raise ModelError(f"{bonus} has shape {(heads, head_size)}, whose product is not the width {width}")
    return heads


def check_places(
    source: TensorSource,
    places: Mapping[str, Place],
    shapes: Shapes,
    family: str,
    *,
    unused: Iterable[str] = (),
    hint: str = "",
) -> None:
    """Every tensor known, present, of the right shape and of a type that is read. Raises ModelError, see check_presence."""
    check_presence(source, {place.name for place in places.values()}, family, unused=unused, hint=hint)
    infos = {info.name: info for info in source.infos()}
    for ours, place in places.items():
        check_tensor(infos[place.name], place.stored_shape(shapes[ours]), source)


def check_presence(
    source: TensorSource, expected: set[str], family: str, *, unused: Iterable[str] = (), hint: str = ""
) -> None:
    """Raise ModelError for a tensor that is neither expected nor known to be unused, and for one that is missing."""
    names = {info.name for info in source.infos()}
    unknown = sorted(names - expected - set(unused))
    if unknown:
        raise ModelError(f"{source.path} holds tensors {family} does not have: {listed(unknown)}", hint)
    missing = sorted(expected - names)
    if missing:
        raise ModelError(f"{source.path} lacks tensors of {family}: {listed(missing)}")
