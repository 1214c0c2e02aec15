"""RWKV-5's tensors: kittiwake's names and shapes, and where each published layout keeps them (table: docs/checkpoints.md).

5.0 has no gate; 5.0 and 5.1 have one decay and one bonus a head, 5.2 has one a channel. Sources: see rwkv56_names.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from kittiwake.checkpoints.reader import TensorInfo, TensorSource
from kittiwake.errors import ModelError
from kittiwake.families.rwkv56_names import BLINKDL, HF, Layout
from kittiwake.families.rwkv_channel_mix import channel_mix_shapes
from kittiwake.families.rwkv_names import (
    NORMS,
    HeadPlace,
    MatrixSizes,
    Place,
    Shapes,
    count_layers,
    matrix_shape,
    whole_shapes,
)

VERSIONS = ("5.0", "5.1", "5.2")
_LOG_BONUS = "time_first"
"""A bonus of this name is a logarithm, one named ``time_faaaa`` is not."""
CHANNEL_MIXES = ("keep_k", "keep_r")
_LETTERS = {"receptance": "r", "key": "k", "value": "v", "gate": "g"}
"""Products of the time mix, in the order they are computed in → the letter of their token shift."""
_MIX_WORDS = {"k": "key", "v": "value", "r": "receptance", "g": "gate"}
"""Letter → the word that the folders have for it in the names of token shifts."""


@dataclass(frozen=True)
class Sizes(MatrixSizes):
    """Everything the shapes of an RWKV-5 depend on."""

    version: str
    is_bonus_log: bool
    """Whether the bonus is stored as its logarithm."""

    @property
    def is_gated(self) -> bool:
        """Whether the time mix has a gate."""
        return self.version != "5.0"

    @property
    def mixed_products(self) -> tuple[str, ...]:
        """Products that read the token shifts of the time mix, in the order both lie in."""
        return tuple(name for name in _LETTERS if self.is_gated or name != "gate")

    @property
    def bonus(self) -> str:
        """Our name of the bonus as it is stored."""
        return "log_bonus" if self.is_bonus_log else "bonus"

    @property
    def mixes(self) -> tuple[str, ...]:
        """Our names of those token shifts: the share of the token itself."""
        return tuple(f"keep_{_LETTERS[name]}" for name in self.mixed_products)


@lru_cache(maxsize=4)
def canonical_shapes(sizes: Sizes) -> Shapes:
    """Our name → shape, products as [N, K]."""
    width = sizes.width
    block: dict[str, tuple[int, ...]] = {f"time_mix.{mix}": (width,) for mix in sizes.mixes}
    block |= {"time_mix.decay_bias": (width,), f"time_mix.{sizes.bonus}": (width,)}
    block |= {f"time_mix.{name}.weight": (width, width) for name in (*sizes.mixed_products, "output")}
    block |= channel_mix_shapes(width, sizes.ffn, CHANNEL_MIXES)
    return whole_shapes(width, sizes.vocab, NORMS, [block] * sizes.layers)


def find_layout(source: TensorSource) -> Layout | None:
    """The layout of the names in this source, or None where they are not an RWKV-5's.

    It is told by a decay, which RWKV-7 does not have, the group norm, which RWKV-4 does not have, and by the lack of
    RWKV-6's token shifts.
    """
    names = {info.name for info in source.infos()}
    if source.format == "gguf":
        return None
    for layout in (BLINKDL, HF):
        has_own = {layout.in_time_mix("time_decay"), layout.in_time_mix("ln_x.weight")} <= names
        if has_own and not any(name.startswith(layout.in_time_mix("time_maa_")) for name in names):
            return layout
    return None


def places_of(layout: Layout, sizes: Sizes, source: TensorSource) -> dict[str, Place]:
    """Our name → place in this source, for a whole model."""
    shapes = {info.name: info.shape for info in source.infos()}
    return layout.whole(sizes.layers, lambda layer: _block_places(layout, sizes, layer, shapes))


def _block_places(layout: Layout, sizes: Sizes, layer: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """Those of one layer within its block."""

    def mix_name(letter: str) -> str:
        return f"time_mix_{_MIX_WORDS[letter] if layout is HF else letter}"

    def by_head(name: str) -> HeadPlace:
        is_flat = len(shapes.get(layout.in_time_mix(name, layer), ())) == 1
        by_channel, one_a_head = (sizes.heads, sizes.head_size), (sizes.heads,) if is_flat else (sizes.heads, 1)
        return HeadPlace(layout.time_mix + name, stored=by_channel if sizes.version == "5.2" else one_a_head)

    block = layout.products((*sizes.mixed_products, "output"))
    block |= {f"time_mix.{mix}": Place(layout.time_mix + mix_name(mix[-1])) for mix in sizes.mixes}
    block["time_mix.decay_bias"] = by_head("time_decay")
    block[f"time_mix.{sizes.bonus}"] = by_head(_LOG_BONUS if sizes.is_bonus_log else "time_faaaa")
    for mix in CHANNEL_MIXES:
        block[f"channel_mix.{mix}"] = Place(layout.channel_mix + mix_name(mix[-1]))
    return block


def read_sizes(layout: Layout, source: TensorSource) -> Sizes:
    """Sizes from the shapes of a few tensors. Raises ModelError when one of them is missing or makes no sense."""
    infos = {info.name: info for info in source.infos()}
    layers = count_layers(layout.block, infos, source, layout.in_time_mix("time_decay"))
    vocab, width = matrix_shape(infos, layout.embedding, "RWKV-5")
    ffn, _ = matrix_shape(infos, layout.in_channel_mix("key.weight"), "RWKV-5")
    heads, is_by_channel = _heads(infos[layout.in_time_mix("time_decay")], width)
    is_gated = layout.in_time_mix("gate.weight") in infos
    version = "5.2" if is_by_channel else "5.1" if is_gated else "5.0"
    return Sizes(layers, width, heads, ffn, vocab, version, layout.in_time_mix(_LOG_BONUS) in infos)


def _heads(decay: TensorInfo, width: int) -> tuple[int, bool]:
    """How many heads there are, and whether each of their channels has a decay of its own: [H], [H, 1] or [H, K]."""
    shape = decay.shape
    if len(shape) not in (1, 2) or 0 in shape or width % shape[0] or shape[1:] not in ((), (1,), (width // shape[0],)):
        raise ModelError(
            f"{decay.name} has shape {shape}, expected one value a head or one a channel of each head, in a width of {width}"
        )
    return shape[0], len(shape) == 2 and shape[1] > 1
