"""What the name tables of RWKV-5 and RWKV-6 share: layouts, and where each keeps what both versions have.

Sources: BlinkDL/RWKV-LM, RWKV-v5 (``.pth``); the folders RWKV/rwkv-5-world-* and RWKV/rwkv-6-world-* (``hf``);
ggml-org/llama.cpp, conversion/rwkv.py (``gguf``, RWKV-6 alone).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.families.rwkv_names import OuterLayout, Place

FFN_PRODUCTS = ("key", "receptance", "value")
HINT = "variants are not supported; a tuned initial state (time_state) belongs in a file of its own"
"""For a tensor that is not known."""


@dataclass(frozen=True)
class Layout(OuterLayout):
    """What names begin with."""

    time_mix: str
    channel_mix: str

    def in_time_mix(self, name: str, layer: int = 0) -> str:
        """The full name of a tensor of a layer's time mix."""
        return self.block.format(layer) + self.time_mix + name

    def in_channel_mix(self, name: str) -> str:
        """The full name of a tensor of the first layer's channel mix."""
        return self.block.format(0) + self.channel_mix + name

    def products(self, time_mix_products: Iterable[str]) -> dict[str, Place]:
        """Our name → place within a block, of every product that stands as [N, K]."""
        places = {f"time_mix.{name}.weight": Place(f"{self.time_mix}{name}.weight") for name in time_mix_products}
        return places | {
            f"channel_mix.{name}.weight": Place(f"{self.channel_mix}{name}.weight") for name in FFN_PRODUCTS
        }


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
