"""RWKV-7's tensors: kittiwake's names and shapes, and where each published layout keeps them (table: docs/checkpoints.md).

Sources: BlinkDL/RWKV-LM, RWKV-v7 (``.pth``); fla-org/flash-linear-attention, fla/models/rwkv7 (``fla``); the RWKV
models of transformers (``hf``: BlinkDL's names under a prefix); ggml-org/llama.cpp, conversion/rwkv.py (``gguf``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from kittiwake.checkpoints.reader import TensorInfo, TensorSource
from kittiwake.errors import ModelError
from kittiwake.families.rwkv_names import (
    NORMS,
    HeadPlace,
    MatrixSizes,
    OuterLayout,
    Place,
    Shapes,
    check_places,
    count_layers,
    heads_of,
    matrix_shape,
    whole_shapes,
)

MIXES = ("r", "w", "k", "v", "a", "g")
"""Token shifts of the time mix, in the order that fused tensors hold them too."""
RANKS = {"decay": "w", "iclr": "a", "value_residual": "v", "gate": "g"}
"""Low-rank pairs: kittiwake's name → the letter in other names."""
_PRODUCTS = ("receptance", "key", "value", "output")


@dataclass(frozen=True)
class Sizes(MatrixSizes):
    """Everything the shapes of an RWKV-7 depend on."""

    decay_rank: int
    iclr_rank: int
    value_residual_rank: int
    gate_rank: int


@lru_cache(maxsize=4)
def canonical_shapes(sizes: Sizes) -> Shapes:
    """Our name → shape, products as [N, K]."""
    blocks = (_block_shapes(sizes, layer) for layer in range(sizes.layers))
    return whole_shapes(sizes.width, sizes.vocab, NORMS, blocks)


def _block_shapes(sizes: Sizes, layer: int) -> Shapes:
    width = (sizes.width,)
    block: dict[str, tuple[int, ...]] = {f"time_mix.mix_{letter}": width for letter in MIXES}
    for rank in ranks_of(layer):
        size = getattr(sizes, f"{rank}_rank")
        block |= {f"time_mix.{rank}_down": (size, sizes.width), f"time_mix.{rank}_up": (sizes.width, size)}
        if rank != "gate":
            block[f"time_mix.{rank}_bias"] = width
    block |= {f"time_mix.{name}": width for name in ("k_k", "k_a", "r_k")}
    block |= {f"time_mix.{name}.weight": (sizes.width, sizes.width) for name in _PRODUCTS}
    return block | {
        "channel_mix.mix_k": width,
        "channel_mix.key.weight": (sizes.ffn, sizes.width),
        "channel_mix.value.weight": (sizes.width, sizes.ffn),
    }


def ranks_of(layer: int) -> tuple[str, ...]:
    """The low-rank pairs of a layer: the first one has no value residual."""
    return tuple(rank for rank in RANKS if layer > 0 or rank != "value_residual")


@dataclass(frozen=True)
class Layout(OuterLayout):
    """The names of one layout. ``{}`` stands for a letter of MIXES or RANKS, or for the name of a product or vector."""

    mix: str
    low_rank: tuple[str, str, str]
    """Down, up and bias."""
    vector: str
    product: str
    channel_mix: tuple[str, str, str]
    """Token shift, key and value."""
    products: Mapping[str, str] = field(default_factory=dict)
    """Names of products that differ from ours."""
    is_mix_fused: bool = False
    is_low_rank_transposed: bool = False
    is_bonus_flat: bool = False
    """``r_k`` is [C], not [H, K]: the head size stands in the file's metadata."""
    is_head_eps_scaled: bool = False
    """The group norm's epsilon is the head size times the other norms'."""

    def places(self, layers: int) -> dict[str, Place]:
        """Our name → place, for a whole model."""
        return self.whole(layers, self._block_places)

    def _block_places(self, layer: int) -> dict[str, Place]:
        places: dict[str, Place] = {}
        for row, letter in enumerate(MIXES):
            name = self.mix.format(letter)
            places[f"time_mix.mix_{letter}"] = Place(name, row=(row, len(MIXES)) if self.is_mix_fused else None)
        for rank in ranks_of(layer):
            down, up, bias = (name.format(RANKS[rank]) for name in self.low_rank)
            places[f"time_mix.{rank}_down"] = Place(down, self.is_low_rank_transposed)
            places[f"time_mix.{rank}_up"] = Place(up, self.is_low_rank_transposed)
            if rank != "gate":
                places[f"time_mix.{rank}_bias"] = Place(bias)
        places |= {f"time_mix.{name}": Place(self.vector.format(name)) for name in ("k_k", "k_a", "r_k")}
        for name in _PRODUCTS:
            places[f"time_mix.{name}.weight"] = Place(self.product.format(self.products.get(name, name)))
        mix, key, value = self.channel_mix
        places |= {"channel_mix.mix_k": Place(mix), "channel_mix.key.weight": Place(key)}
        places["channel_mix.value.weight"] = Place(value)
        return places

    @property
    def bonus(self) -> str:
        """The first layer's ``r_k``, which no other version of RWKV has."""
        return self.block.format(0) + self.vector.format("r_k")

    @property
    def unused(self) -> frozenset[str]:
        """Names a file may hold that no model reads: the value residual of the first layer."""
        return frozenset(self.block.format(0) + name.format("v") for name in self.low_rank)


BLINKDL = Layout(
    key="blinkdl",
    block="blocks.{}.",
    embedding="emb.weight",
    embedding_norm="blocks.0.ln0",
    output_norm="ln_out",
    head="head.weight",
    norms=("ln1", "ln2", "att.ln_x"),
    mix="att.x_{}",
    low_rank=("att.{}1", "att.{}2", "att.{}0"),
    vector="att.{}",
    product="att.{}.weight",
    channel_mix=("ffn.x_k", "ffn.key.weight", "ffn.value.weight"),
    is_low_rank_transposed=True,
)
HF = replace(
    BLINKDL,
    key="hf",
    block="rwkv7.blocks.{}.",
    embedding="rwkv7.emb.weight",
    embedding_norm="rwkv7.blocks.0.ln0",
    output_norm="rwkv7.ln_out",
    is_head_eps_scaled=True,
)
FLA = Layout(
    key="fla",
    block="model.layers.{}.",
    embedding="model.embeddings.weight",
    embedding_norm="model.layers.0.pre_norm",
    output_norm="model.norm",
    head="lm_head.weight",
    norms=("attn_norm", "ffn_norm", "attn.g_norm"),
    mix="attn.x_{}",
    low_rank=("attn.{}_lora.lora.0.weight", "attn.{}_lora.lora.2.weight", "attn.{}_lora.lora.2.bias"),
    vector="attn.{}",
    product="attn.{}_proj.weight",
    products={"receptance": "r", "key": "k", "value": "v", "output": "o"},
    channel_mix=("ffn.x_k", "ffn.key.weight", "ffn.value.weight"),
    is_head_eps_scaled=True,
)
_OLD_FLA = replace(FLA, mix="attn.x_x", is_mix_fused=True)
GGUF = Layout(
    key="gguf",
    block="blk.{}.",
    embedding="token_embd.weight",
    embedding_norm="token_embd_norm",
    output_norm="output_norm",
    head="output.weight",
    norms=("attn_norm", "attn_norm_2", "time_mix_ln"),
    mix="time_mix_lerp_fused.weight",
    low_rank=("time_mix_{}1.weight", "time_mix_{}2.weight", "time_mix_{}0.weight"),
    vector="time_mix_{}.weight",
    product="time_mix_{}.weight",
    channel_mix=("channel_mix_lerp_k.weight", "channel_mix_key.weight", "channel_mix_value.weight"),
    is_mix_fused=True,
    is_bonus_flat=True,
)


def find_layout(source: TensorSource) -> Layout | None:
    """The layout of the names in this source, or None where they are not an RWKV-7's."""
    names = {info.name for info in source.infos()}
    if source.format == "gguf":
        is_ours = source.config is not None and source.config.get("general.architecture") == "rwkv7"
        return GGUF if is_ours else None
    found = next((layout for layout in (BLINKDL, HF, FLA) if layout.bonus in names), None)
    return _OLD_FLA if found is FLA and "model.layers.0.attn.x_x" in names else found


def read_sizes(layout: Layout, source: TensorSource) -> Sizes:
    """Sizes from the shapes of a few tensors. Raises ModelError when one of them is missing or makes no sense."""
    infos = {info.name: info for info in source.infos()}
    layers = count_layers(layout.block, infos, source, layout.bonus)
    places = layout.places(layers)

    def shape(ours: str) -> tuple[int, int]:
        place = places[ours]
        size = matrix_shape(infos, place.name, "RWKV-7")
        return size[::-1] if place.is_transposed else size

    vocab, width = shape("embedding.weight")
    ranks = {
        f"{rank}_rank": shape(f"layers.{min(1, layers - 1) if rank == 'value_residual' else 0}.time_mix.{rank}_down")[0]
        for rank in RANKS
        if rank != "value_residual" or layers > 1
    }
    ranks.setdefault("value_residual_rank", 0)
    heads = _heads(layout, source, infos, width)
    return Sizes(layers, width, heads, shape("layers.0.channel_mix.key.weight")[0], vocab, **ranks)


def _heads(layout: Layout, source: TensorSource, infos: Mapping[str, TensorInfo], width: int) -> int:
    if layout.is_bonus_flat:
        key = "rwkv7.wkv.head_size"
        head_size = (source.config or {}).get(key)
        if type(head_size) is not int or head_size < 1 or width % head_size:
            raise ModelError(f"{source.path}: {key} is {head_size!r}, expected a divisor of the width {width}")
        return width // head_size
    return heads_of(infos, layout.bonus, width, "RWKV-7")


def check_tensors(layout: Layout, sizes: Sizes, source: TensorSource) -> None:
    """Every tensor known, present, of the right shape and of a type that is read. Raises ModelError."""
    places = layout.places(sizes.layers)
    if not layout.is_bonus_flat:
        for ours in (f"layers.{layer}.time_mix.r_k" for layer in range(sizes.layers)):
            places[ours] = HeadPlace(places[ours].name, stored=(sizes.heads, sizes.head_size))
    hint = "variants such as v7a, v7b (DeepEmbed) and v8 are not supported"
    check_places(source, places, canonical_shapes(sizes), "RWKV-7", unused=layout.unused, hint=hint)
