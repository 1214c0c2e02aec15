"""RWKV-4's tensors: kittiwake's names and shapes, and where each published layout keeps them (table: docs/checkpoints.md).

Sources: BlinkDL/RWKV-LM, RWKV-v4 (``.pth``); transformers, models/rwkv (``hf``), and its copies whose body is called
``backbone``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.families.canonical import check_tensor
from kittiwake.families.rwkv_channel_mix import channel_mix_shapes
from kittiwake.families.rwkv_names import (
    NORMS,
    OuterLayout,
    Place,
    Shapes,
    check_places,
    count_layers,
    matrix_shape,
    whole_shapes,
)

FAMILY = "RWKV-4"
TIME_SHIFTS = {"keep_r": "receptance", "keep_k": "key", "keep_v": "value"}
"""Token shifts of the time mix in the order of the products that read them: our name → the product."""
CHANNEL_SHIFTS = ("keep_k", "keep_r")
_LETTERS = {"keep_r": "r", "keep_k": "k", "keep_v": "v"}


@dataclass(frozen=True)
class Sizes:
    """Everything the shapes of an RWKV-4 depend on. ``attention`` is the width of the time mix, most often ``width``."""

    layers: int
    width: int
    attention: int
    ffn: int
    vocab: int


@lru_cache(maxsize=4)
def canonical_shapes(sizes: Sizes) -> Shapes:
    """Our name → shape, products as [N, K]. ``keep_*`` is the share of the token itself, as stored."""
    width, inner = sizes.width, sizes.attention
    block: dict[str, tuple[int, ...]] = {f"time_mix.{shift}": (width,) for shift in TIME_SHIFTS}
    block |= {"time_mix.decay": (inner,), "time_mix.bonus": (inner,)}
    block |= {f"time_mix.{name}.weight": (inner, width) for name in TIME_SHIFTS.values()}
    block |= {"time_mix.output.weight": (width, inner), **channel_mix_shapes(width, sizes.ffn, CHANNEL_SHIFTS)}
    return whole_shapes(width, sizes.vocab, NORMS[:2], [block] * sizes.layers)


@dataclass(frozen=True)
class Layout(OuterLayout):
    """The names of one layout."""

    time_mix: str
    channel_mix: str
    shift: str
    """``{}`` is a letter, or the name of the product that reads it."""
    is_shift_spelt_out: bool = True

    def places(self, layers: int, *, is_tied: bool = False) -> dict[str, Place]:
        """Our name → place, for a whole model; with ``is_tied`` the head is the embedding."""
        block = {ours: Place(name) for ours, name in self._block().items()}
        return self.whole(layers, lambda _: block, self.embedding if is_tied else self.head)

    def _block(self) -> dict[str, str]:
        """Our name → theirs within a block."""
        names = {}
        for shift, product in TIME_SHIFTS.items():
            names[f"time_mix.{shift}"] = f"{self.time_mix}.{self._shift(shift, product)}"
            names[f"time_mix.{product}.weight"] = f"{self.time_mix}.{product}.weight"
        names |= {"time_mix.decay": f"{self.time_mix}.time_decay", "time_mix.bonus": f"{self.time_mix}.time_first"}
        names["time_mix.output.weight"] = f"{self.time_mix}.output.weight"
        for shift in CHANNEL_SHIFTS:
            names[f"channel_mix.{shift}"] = f"{self.channel_mix}.{self._shift(shift, TIME_SHIFTS[shift])}"
        for product in ("key", "receptance", "value"):
            names[f"channel_mix.{product}.weight"] = f"{self.channel_mix}.{product}.weight"
        return names

    def _shift(self, shift: str, product: str) -> str:
        return self.shift.format(product if self.is_shift_spelt_out else _LETTERS[shift])

    @property
    def decay(self) -> str:
        """The first layer's decay."""
        return f"{self.block.format(0)}{self.time_mix}.time_decay"

    def is_of(self, names: set[str]) -> bool:
        """Whether these are an RWKV-4's: a decay and a bonus, and nothing that later versions have in their time mix."""
        first = f"{self.block.format(0)}{self.time_mix}."
        later = ("ln_x.weight", "gate.weight", "time_faaaa", "time_maa_x")
        has_both = f"{first}time_decay" in names and f"{first}time_first" in names
        return has_both and not any(first + name in names for name in later)


HEAD = "head.weight"
BLINKDL = Layout(
    key="blinkdl",
    block="blocks.{}.",
    embedding="emb.weight",
    embedding_norm="blocks.0.ln0",
    output_norm="ln_out",
    head=HEAD,
    norms=("ln1", "ln2"),
    time_mix="att",
    channel_mix="ffn",
    shift="time_mix_{}",
    is_shift_spelt_out=False,
)
HF = Layout(
    key="hf",
    block="rwkv.blocks.{}.",
    embedding="rwkv.embeddings.weight",
    embedding_norm="rwkv.blocks.0.pre_ln",
    output_norm="rwkv.ln_out",
    head=HEAD,
    norms=("ln1", "ln2"),
    time_mix="attention",
    channel_mix="feed_forward",
    shift="time_mix_{}",
)
BACKBONE = replace(
    HF,
    block="backbone.blocks.{}.",
    embedding="backbone.embeddings.weight",
    embedding_norm="backbone.blocks.0.pre_ln",
    output_norm="backbone.norm_f",
    time_mix="att",
    channel_mix="ffn",
)


def find_layout(source: TensorSource) -> Layout | None:
    """The layout of the names in this source, or None where they are not an RWKV-4's."""
    if source.format == "gguf":
        return None
    names = {info.name for info in source.infos()}
    return next((layout for layout in (BLINKDL, HF, BACKBONE) if layout.is_of(names)), None)


def read_sizes(layout: Layout, source: TensorSource) -> Sizes:
    """Sizes from the shapes of a few tensors. Raises ModelError when one of them is missing or makes no sense."""
    infos = {info.name: info for info in source.infos()}
    layers = count_layers(layout.block, infos, source, layout.decay)
    places = layout.places(layers)

    def shape(ours: str) -> tuple[int, int]:
        return matrix_shape(infos, places[ours].name, FAMILY)

    vocab, width = shape("embedding.weight")
    attention, ffn = shape("layers.0.time_mix.key.weight")[0], shape("layers.0.channel_mix.key.weight")[0]
    return Sizes(layers, width, attention, ffn, vocab)


def check_tensors(layout: Layout, sizes: Sizes, source: TensorSource, *, is_tied: bool) -> None:
    """Every tensor known, present, of the right shape and of a type that is read. Raises ModelError."""
    places, shapes = layout.places(sizes.layers, is_tied=is_tied), canonical_shapes(sizes)
    hint = "variants such as RWKV-4a (tiny attention) are not supported"
    check_places(source, places, shapes, FAMILY, unused={HEAD} if is_tied else (), hint=hint)
    infos = {info.name: info for info in source.infos()}
    if is_tied and HEAD in infos:
        check_tensor(infos[HEAD], shapes["head.weight"], source)
