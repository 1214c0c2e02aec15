"""What the name tables of RWKV-5 and RWKV-6 share: layouts, and where each keeps what both versions have.

Sources: BlinkDL/RWKV-LM, RWKV-v5 (``.pth``); the folders RWKV/rwkv-5-world-* and RWKV/rwkv-6-world-* (``hf``);
ggml-org/llama.cpp, conversion/rwkv.py (``gguf``, RWKV-6 alone).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.families.rwkv_names import Place, Shapes, check_presence, check_tensor

NORMS = ("time_norm", "channel_norm", "time_mix.group_norm")
FFN_PRODUCTS = ("key", "receptance", "value")


@dataclass(frozen=True)
class Layout:
    """What names begin with; ``{}`` is the number of the layer."""

    key: str
    block: str
    embedding: str
    embedding_norm: str
    output_norm: str
    head: str
    norms: tuple[str, str, str]
    """In the order of NORMS; ``.weight`` and ``.bias`` follow."""
    time_mix: str
    channel_mix: str

    def in_time_mix(self, name: str, layer: int = 0) -> str:
        """The full name of a tensor of a layer's time mix."""
        return self.block.format(layer) + self.time_mix + name

    def in_channel_mix(self, name: str, layer: int = 0) -> str:
        """The full name of a tensor of a layer's channel mix."""
        return self.block.format(layer) + self.channel_mix + name

    def common_places(self, layers: int, time_mix_products: Iterable[str]) -> dict[str, Place]:
        """Our name → place of the embedding, the head, every norm and every product that stands as [N, K]."""
        places = {"embedding.weight": Place(self.embedding), "head.weight": Place(self.head)}
        places |= _norm("embedding_norm", self.embedding_norm) | _norm("output_norm", self.output_norm)
        for layer in range(layers):
            ours = f"layers.{layer}."
            for norm, theirs in zip(NORMS, self.norms, strict=True):
                places |= _norm(ours + norm, self.block.format(layer) + theirs)
            for name in time_mix_products:
                places[f"{ours}time_mix.{name}.weight"] = Place(self.in_time_mix(f"{name}.weight", layer))
            for name in FFN_PRODUCTS:
                places[f"{ours}channel_mix.{name}.weight"] = Place(self.in_channel_mix(f"{name}.weight", layer))
        return places


def _norm(ours: str, theirs: str) -> dict[str, Place]:
    return {f"{ours}.{part}": Place(f"{theirs}.{part}") for part in ("weight", "bias")}


BLINKDL = Layout(
    key="blinkdl",
    block="blocks.{}.",
    embedding="emb.weight",
    embedding_norm="blocks.0.ln0",
    output_norm="ln_out",
    head="head.weight",
    norms=("ln1", "ln2", "att.ln_x"),
    time_mix="att.",
    channel_mix="ffn.",
)
HF = replace(
    BLINKDL,
    key="hf",
    block="rwkv.blocks.{}.",
    embedding="rwkv.embeddings.weight",
    embedding_norm="rwkv.blocks.0.pre_ln",
    output_norm="rwkv.ln_out",
    norms=("ln1", "ln2", "attention.ln_x"),
    time_mix="attention.",
    channel_mix="feed_forward.",
)


@dataclass(frozen=True)
class ScaledPlace(Place):
    """A tensor that was divided by a power of two; multiplying by it is exact."""

    factor: float = 1.0

    def take(self, source: TensorSource, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor as it was; float16, whose range may not hold it, as float32."""
        tensor = super().take(source, shape)
        if self.factor == 1:
            return tensor
        return (tensor.float() if tensor.dtype == torch.float16 else tensor) * self.factor


@dataclass(frozen=True)
class StackedPlace(Place):
    """One matrix of several that lie in one tensor."""

    index: int = 0
    count: int = 1

    def take(self, source: TensorSource, shape: tuple[int, ...]) -> torch.Tensor:
        """The matrix as ours, [N, K]."""
        tensor = source.read(self.name)[self.index]
        return tensor.t() if self.is_transposed else tensor

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """All matrices together."""
        return (self.count, *super().stored_shape(shape))


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


def common_shapes(layers: int, width: int, vocab: int) -> Shapes:
    """Our name → shape of the embedding, the head and every norm."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (vocab, width), "head.weight": (vocab, width)}
    norms = ["embedding_norm", "output_norm", *(f"layers.{layer}.{norm}" for layer in range(layers) for norm in NORMS)]
    return shapes | {f"{norm}.{part}": (width,) for norm in norms for part in ("weight", "bias")}


def check_places(source: TensorSource, places: Mapping[str, Place], shapes: Shapes, family: str) -> None:
    """Every tensor known, present, of the right shape and of a type that is read. Raises ModelError."""
    hint = "variants are not supported; a tuned initial state (time_state) belongs in a file of its own"
    check_presence(source, {place.name for place in places.values()}, family, hint=hint)
    infos = {info.name: info for info in source.infos()}
    for ours, place in places.items():
        check_tensor(infos[place.name], place.stored_shape(shapes[ours]), source)
