"""RWKV-6's tensors: kittiwake's names and shapes, and where each published layout keeps them (table: docs/checkpoints.md).

Sources: see rwkv56_names.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.errors import ModelError
from kittiwake.families.rwkv56_names import BLINKDL, HF, Layout, ScaledPlace, StackedPlace
from kittiwake.families.rwkv_channel_mix import channel_mix_shapes
from kittiwake.families.rwkv_names import (
    NORMS,
    HeadPlace,
    MatrixSizes,
    Place,
    Shapes,
    count_layers,
    heads_of,
    matrix_shape,
    whole_shapes,
)
from kittiwake.families.rwkv_rescale import RESCALED, scale_of_stream

MIXES = ("w", "k", "v", "r", "g")
"""Token shifts of the time mix, in the order that fused tensors hold them too."""
CHANNEL_MIXES = ("mix_k", "mix_r")
PRODUCTS = ("receptance", "key", "value", "gate", "output")
RANKS = ("mix", "decay")
RESCALE_KEY = "rwkv6.rescale_every_n_layers"
"""Converters to GGUF divide the weights of late layers, see rwkv_rescale.py."""

GGUF = Layout(
    key="gguf",
    block="blk.{}.",
    embedding="token_embd.weight",
    embedding_norm="token_embd_norm",
    output_norm="output_norm",
    head="output.weight",
    norms=("attn_norm", "attn_norm_2", "time_mix_ln"),
    time_mix="time_mix_",
    channel_mix="channel_mix_",
)


@dataclass(frozen=True)
class Sizes(MatrixSizes):
    """Everything the shapes of an RWKV-6 depend on."""

    mix_rank: int
    decay_rank: int


@lru_cache(maxsize=4)
def canonical_shapes(sizes: Sizes) -> Shapes:
    """Our name → shape, products as [N, K]."""
    width, vector = sizes.width, (sizes.width,)
    block: dict[str, tuple[int, ...]] = {f"time_mix.mix_{letter}": vector for letter in ("x", *MIXES)}
    block["time_mix.mix_down"] = (len(MIXES) * sizes.mix_rank, width)
    block |= {f"time_mix.mix_up_{letter}": (width, sizes.mix_rank) for letter in MIXES}
    block |= {"time_mix.decay_down": (sizes.decay_rank, width), "time_mix.decay_up": (width, sizes.decay_rank)}
    block |= {"time_mix.decay_bias": vector, "time_mix.bonus": vector}
    block |= {f"time_mix.{name}.weight": (width, width) for name in PRODUCTS}
    block |= channel_mix_shapes(width, sizes.ffn, CHANNEL_MIXES)
    return whole_shapes(width, sizes.vocab, NORMS, [block] * sizes.layers)


def find_layout(source: TensorSource) -> Layout | None:
    """The layout of the names in this source, or None where they are not an RWKV-6's: told by token shifts and decay."""
    if source.format == "gguf":
        is_ours = source.config is not None and source.config.get("general.architecture") == "rwkv6"
        return GGUF if is_ours else None
    names = {info.name for info in source.infos()}
    for layout in (BLINKDL, HF):
        start, decay = layout.in_time_mix("time_maa_"), layout.in_time_mix("time_decay")
        if decay in names and any(name.startswith(start) for name in names):
            return layout
    return None


def places_of(layout: Layout, sizes: Sizes, source: TensorSource) -> dict[str, Place]:
    """Our name → place in this source, for a whole model."""
    places = _named_places(layout, sizes.layers, source)
    for ours in (f"layers.{layer}.time_mix.bonus" for layer in range(sizes.layers)):
        places[ours] = HeadPlace(places[ours].name, stored=(sizes.heads, sizes.head_size))
    if layout is GGUF:
        every = (source.config or {}).get(RESCALE_KEY) or 0
        for layer in range(sizes.layers):
            for ours in (f"layers.{layer}.{name}" for name in RESCALED):
                places[ours] = ScaledPlace(places[ours].name, factor=1 / scale_of_stream(layer, every))
    return places


def _named_places(layout: Layout, layers: int, source: TensorSource) -> dict[str, Place]:
    """The same without what depends on sizes and metadata."""
    is_fused = any(info.name == layout.in_time_mix("lerp_fused.weight") for info in source.infos())
    block = layout.products(PRODUCTS) | (_gguf_block(layout, is_fused) if layout is GGUF else _blinkdl_block(layout))
    return layout.whole(layers, lambda _: block)


def _blinkdl_block(layout: Layout) -> dict[str, Place]:
    """Those of a layer within its block, without the products that every layout names alike."""

    def named(name: str) -> str:
        return layout.time_mix + name

    block = {f"time_mix.mix_{letter}": Place(named(f"time_maa_{letter}")) for letter in ("x", *MIXES)}
    block["time_mix.mix_down"] = Place(named("time_maa_w1"), is_transposed=True)
    for index, letter in enumerate(MIXES):
        block[f"time_mix.mix_up_{letter}"] = StackedPlace(named("time_maa_w2"), True, index=index, count=len(MIXES))
    block["time_mix.decay_down"] = Place(named("time_decay_w1"), is_transposed=True)
    block["time_mix.decay_up"] = Place(named("time_decay_w2"), is_transposed=True)
    block |= {"time_mix.decay_bias": Place(named("time_decay")), "time_mix.bonus": Place(named("time_faaaa"))}
    for letter in "kr":
        block[f"channel_mix.mix_{letter}"] = Place(f"{layout.channel_mix}time_maa_{letter}")
    return block


def _gguf_block(layout: Layout, is_fused: bool) -> dict[str, Place]:
    """The same as a converter to GGUF leaves it; one that fuses the token shifts puts MIXES into one tensor."""

    def named(name: str) -> str:
        return f"{layout.time_mix}{name}.weight"

    block = {"time_mix.mix_x": Place(named("lerp_x")), "time_mix.mix_down": Place(named("w1"))}
    for index, letter in enumerate(MIXES):
        fused = Place(named("lerp_fused"), row=(index, len(MIXES)))
        block[f"time_mix.mix_{letter}"] = fused if is_fused else Place(named(f"lerp_{letter}"))
        block[f"time_mix.mix_up_{letter}"] = StackedPlace(named("w2"), index=index, count=len(MIXES))
    block |= {"time_mix.decay_down": Place(named("decay_w1")), "time_mix.decay_up": Place(named("decay_w2"))}
    block |= {"time_mix.decay_bias": Place(named("decay")), "time_mix.bonus": Place(named("first"))}
    for letter in "kr":
        block[f"channel_mix.mix_{letter}"] = Place(f"{layout.channel_mix}lerp_{letter}.weight")
    return block


def read_sizes(layout: Layout, source: TensorSource) -> Sizes:
    """Sizes from the shapes of a few tensors. Raises ModelError when one of them is missing or makes no sense."""
    infos = {info.name: info for info in source.infos()}
    layers = count_layers(layout.block, infos, source, layout.in_time_mix("receptance.weight"))
    places = _named_places(layout, layers, source)

    def shape(ours: str) -> tuple[int, int]:
        place = places[ours]
        size = matrix_shape(infos, place.name, "RWKV-6")
        return size[::-1] if place.is_transposed else size

    vocab, width = shape("embedding.weight")
    mix_columns = shape("layers.0.time_mix.mix_down")[0]
    if mix_columns % len(MIXES):
        name = places["layers.0.time_mix.mix_down"].name
        raise ModelError(f"{name} has {mix_columns} columns, expected {len(MIXES)} times a rank")
    return Sizes(
        layers,
        width,
        heads_of(infos, places["layers.0.time_mix.bonus"].name, width, "RWKV-6"),
        shape("layers.0.channel_mix.key.weight")[0],
        vocab,
        mix_columns // len(MIXES),
        shape("layers.0.time_mix.decay_down")[0],
    )
