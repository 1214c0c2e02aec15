"""Published RWKV-5 and RWKV-6 shapes, and random checkpoints of any shape for tests and benchmarks.

As those of RWKV-7 (``shapes.py``) they carry BlinkDL's names and are built to show mistakes: decays and bonuses cover
their trained ranges and more, keys reach from far below 1 to well beyond 100.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kittiwake.bench.draw import Draw, Recipe, draw_norm, made
from kittiwake.errors import UsageError

_DECAY_RANGE = (-8.0, 1.5)  # before both exponentials: one step keeps 0.99966 to 0.0113 of a key's row
_KEY_GAIN_LOG10 = (-2.5, 1.7)  # one gain a head


@dataclass(frozen=True)
class Rwkv5Shape:
    """Sizes of an RWKV-5 model; ``version`` is "5.0" (no gate), "5.1" or "5.2" (a decay and a bonus a channel)."""

    layers: int
    width: int
    version: str = "5.2"
    head_size: int = 64
    vocab: int = 65536

    def __post_init__(self) -> None:
        """Refuse sizes below one, a width that does not divide into heads and unknown versions (UsageError)."""
        _check_sizes("RWKV-5", self.layers, self.width, self.head_size, self.vocab)
        if self.version not in ("5.0", "5.1", "5.2"):
            raise UsageError(f"RWKV-5 shape: version is {self.version!r}, expected 5.0, 5.1 or 5.2")

    @property
    def heads(self) -> int:
        """Number of heads of the time mix."""
        return self.width // self.head_size

    @property
    def ffn_width(self) -> int:
        """Hidden width of the channel mix."""
        return _ffn_width(self.width)

    @property
    def mixes(self) -> str:
        """Letters of the token shifts of the time mix."""
        return "kvr" if self.version == "5.0" else "kvrg"


@dataclass(frozen=True)
class Rwkv6Shape:
    """Sizes of an RWKV-6 model."""

    layers: int
    width: int
    rank_mix: int = 32
    rank_decay: int = 64
    head_size: int = 64
    vocab: int = 65536

    def __post_init__(self) -> None:
        """Refuse sizes below one and a width that does not divide into heads (UsageError)."""
        _check_sizes("RWKV-6", self.layers, self.width, self.head_size, self.vocab, self.rank_mix, self.rank_decay)

    @property
    def heads(self) -> int:
        """Number of heads of the time mix."""
        return self.width // self.head_size

    @property
    def ffn_width(self) -> int:
        """Hidden width of the channel mix."""
        return _ffn_width(self.width)


def _check_sizes(family: str, layers: int, width: int, head_size: int, *others: int) -> None:
    if min(layers, head_size, *others) < 1 or width < 10:
        raise UsageError(f"{family} shape: sizes must be at least 1 and the width at least 10, got a width of {width}")
    if width % head_size:
        raise UsageError(f"{family} shape: width {width} is not a multiple of head_size {head_size}")


def _ffn_width(width: int) -> int:
    return int(3.5 * width) // 32 * 32


RWKV5_SHAPES: dict[str, Rwkv5Shape] = {
    "rwkv5-0.1b": Rwkv5Shape(layers=12, width=768),
    "rwkv5-0.4b": Rwkv5Shape(layers=24, width=1024),
    "rwkv5-1.5b": Rwkv5Shape(layers=24, width=2048),
    "rwkv5-3b": Rwkv5Shape(layers=32, width=2560),
    "rwkv5-7b": Rwkv5Shape(layers=32, width=4096),
}
RWKV6_SHAPES: dict[str, Rwkv6Shape] = {
    "rwkv6-0.1b": Rwkv6Shape(layers=12, width=768),
    "rwkv6-1.6b": Rwkv6Shape(layers=24, width=2048),
    "rwkv6-3b": Rwkv6Shape(layers=32, width=2560),
    "rwkv6-7b": Rwkv6Shape(layers=32, width=4096, rank_mix=64, rank_decay=128),
    "rwkv6-14b": Rwkv6Shape(layers=61, width=4096, rank_mix=64, rank_decay=128),
}


def random_rwkv5(
    shape: Rwkv5Shape, seed: int, dtype: torch.dtype = torch.bfloat16, *, plain_bonus: bool | None = None
) -> dict[str, torch.Tensor]:
    """Return a random RWKV-5 checkpoint in BlinkDL's names, shapes and orientation.

    The same (shape, seed) gives the same values, rounded to `dtype`. `plain_bonus` says whether the bonus is named
    ``time_faaaa`` or, as its logarithm, ``time_first``; None: as published, plain in 5.2 alone.
    """
    return made(rwkv5_recipes(shape, seed, dtype, plain_bonus=plain_bonus))


def rwkv5_recipes(
    shape: Rwkv5Shape, seed: int, dtype: torch.dtype, device: str = "cpu", *, plain_bonus: bool | None = None
) -> dict[str, Recipe]:
    """The same, each tensor drawn on `device` when it is wanted: a large model need not exist twice."""
    is_plain = shape.version == "5.2" if plain_bonus is None else plain_bonus
    by_head = (shape.heads, shape.head_size) if shape.version == "5.2" else (shape.heads,)
    draw, c = Draw(seed, dtype, device), shape.width
    tensors: dict[str, Recipe] = {}
    for layer in range(shape.layers):
        att, ffn = f"blocks.{layer}.att.", f"blocks.{layer}.ffn."
        tensors |= _mixes(draw, (f"{att}time_mix_{letter}" for letter in shape.mixes), c)
        tensors |= _mixes(draw, (f"{ffn}time_mix_{letter}" for letter in "kr"), c)
        decays = draw.scattered(att + "time_decay", torch.Size(by_head).numel(), *_DECAY_RANGE)
        tensors[att + "time_decay"] = decays.reshaped(*by_head)
        bonus = att + ("time_faaaa" if is_plain else "time_first")
        tensors[bonus] = draw.uniform(bonus, by_head, *((-2.0, 2.0) if is_plain else (-3.0, 1.0)))
        tensors |= _products(draw, layer, c, shape.heads, shape.ffn_width, is_gated=shape.version != "5.0")
    return _framed(draw, shape.vocab, c, tensors)


def random_rwkv6(shape: Rwkv6Shape, seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return a random RWKV-6 checkpoint in BlinkDL's names, shapes and orientation.

    The same (shape, seed) gives the same values, rounded to `dtype`.
    """
    return made(rwkv6_recipes(shape, seed, dtype))


def rwkv6_recipes(shape: Rwkv6Shape, seed: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Recipe]:
    """The same, each tensor drawn on `device` when it is wanted."""
    draw, c = Draw(seed, dtype, device), shape.width
    tensors: dict[str, Recipe] = {}
    for layer in range(shape.layers):
        att, ffn = f"blocks.{layer}.att.", f"blocks.{layer}.ffn."
        tensors |= _mixes(draw, (f"{att}time_maa_{letter}" for letter in "xwkvrg"), c)
        tensors |= _mixes(draw, (f"{ffn}time_maa_{letter}" for letter in "kr"), c)
        tensors[att + "time_maa_w1"] = draw.dense(att + "time_maa_w1", (c, 5 * shape.rank_mix), 1.0, c)
        up = draw.dense(att + "time_maa_w2", (5 * shape.rank_mix, c), 0.5, shape.rank_mix)
        tensors[att + "time_maa_w2"] = up.reshaped(5, shape.rank_mix, c)
        decays = draw.scattered(att + "time_decay", c, *_DECAY_RANGE)
        tensors[att + "time_decay"] = decays.reshaped(1, 1, c)
        tensors[att + "time_decay_w1"] = draw.dense(att + "time_decay_w1", (c, shape.rank_decay), 1.0, c)
        up = draw.dense(att + "time_decay_w2", (shape.rank_decay, c), 1.0, shape.rank_decay)
        tensors[att + "time_decay_w2"] = up
        by_head = (shape.heads, shape.head_size)
        tensors[att + "time_faaaa"] = draw.uniform(att + "time_faaaa", by_head, -2.0, 2.0)
        tensors |= _products(draw, layer, c, shape.heads, shape.ffn_width, is_gated=True)
    return _framed(draw, shape.vocab, c, tensors)


def _mixes(draw: Draw, names: Iterable[str], c: int) -> dict[str, Recipe]:
    """Token shifts [1, 1, C]."""
    return {name: draw.uniform(name, (1, 1, c), 0.0, 1.0) for name in names}


def _products(draw: Draw, layer: int, c: int, heads: int, ffn_width: int, *, is_gated: bool) -> dict[str, Recipe]:
    """Products, group norm and layer norms of one layer."""
    block = f"blocks.{layer}."
    tensors = draw_norm(draw, block + "ln1", c) | draw_norm(draw, block + "ln2", c)
    tensors |= draw_norm(draw, block + "att.ln_x", c)
    gains = {"receptance": 0.5, "key": 1.0, "value": 1.0, "output": 1.0} | ({"gate": 1.0} if is_gated else {})
    for name, gain in gains.items():
        weight = f"{block}att.{name}.weight"
        tensors[weight] = draw.dense(weight, (c, c), gain, c)
    key_gain = 10.0 ** draw.spread(block + "att.key.gain", heads, *_KEY_GAIN_LOG10)
    key = block + "att.key.weight"
    tensors[key] = tensors[key].scaled_by_head(key_gain)
    for name, (rows, columns), gain in (
        ("key", (ffn_width, c), 1.0),
        ("receptance", (c, c), 1.0),
        ("value", (c, ffn_width), 0.7),
    ):
        weight = f"{block}ffn.{name}.weight"
        tensors[weight] = draw.dense(weight, (rows, columns), gain, columns)
    return tensors


def _framed(draw: Draw, vocab: int, c: int, blocks: dict[str, Recipe]) -> dict[str, Recipe]:
    """The layers with embedding, outer norms and head."""
    tensors = {"emb.weight": draw.uniform("emb.weight", (vocab, c), -0.05, 0.05)} | blocks
    tensors |= draw_norm(draw, "blocks.0.ln0", c) | draw_norm(draw, "ln_out", c)
    tensors["head.weight"] = draw.dense("head.weight", (vocab, c), 2.5, c)
    return tensors
