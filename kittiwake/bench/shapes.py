"""Published RWKV-7 shapes, and random checkpoints of any shape for tests and benchmarks.

The checkpoints carry BlinkDL's tensor names and are built to show mistakes: every term of the equations moves the
logits by far more than rounding does, decays cover the trained range, and the heads' outputs lie on both sides of the
group norm's epsilon, as they do in trained models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kittiwake.bench.draw import Draw, Recipe, draw_norm, made
from kittiwake.errors import UsageError

_DECAY_RANGE = (-7.0, 3.0)  # w0, before the sigmoid: one step keeps 0.9994 to 0.5611 of a state column
_KEY_GAIN_LOG10 = (-3.0, -1.0)  # one gain a head


@dataclass(frozen=True)
class Rwkv7Shape:
    """Sizes of an RWKV-7 model; the channel mix is always four times as wide as the residual stream."""

    layers: int
    width: int
    rank_w: int
    rank_a: int
    rank_v: int
    rank_g: int
    head_size: int = 64
    vocab: int = 65536

    def __post_init__(self) -> None:
        """Refuse sizes below one and a width that does not divide into heads (UsageError)."""
        for name, value in vars(self).items():
            if value < 1:
                raise UsageError(f"RWKV-7 shape: {name} is {value}, expected at least 1")
        if self.width % self.head_size:
            raise UsageError(f"RWKV-7 shape: width {self.width} is not a multiple of head_size {self.head_size}")

    @property
    def heads(self) -> int:
        """Number of heads of the time mix."""
        return self.width // self.head_size

    @property
    def ffn_width(self) -> int:
        """Hidden width of the channel mix."""
        return 4 * self.width

    @property
    def parameters(self) -> int:
        """Number of parameters in use, that is without v0, v1 and v2 of layer 0."""
        c = self.width
        low_rank = 2 * c * (self.rank_w + self.rank_a + self.rank_g)
        layer = 12 * c * c + low_rank + 18 * c
        value_residual = c + 2 * c * self.rank_v
        return 2 * self.vocab * c + 4 * c + self.layers * layer + (self.layers - 1) * value_residual


SHAPES: dict[str, Rwkv7Shape] = {
    "0.1b": Rwkv7Shape(layers=12, width=768, rank_w=64, rank_a=64, rank_v=32, rank_g=128),
    "0.4b": Rwkv7Shape(layers=24, width=1024, rank_w=64, rank_a=64, rank_v=32, rank_g=128),
    "1.5b": Rwkv7Shape(layers=24, width=2048, rank_w=96, rank_a=96, rank_v=64, rank_g=256),
    "2.9b": Rwkv7Shape(layers=32, width=2560, rank_w=96, rank_a=96, rank_v=64, rank_g=320),
    "7.2b": Rwkv7Shape(layers=32, width=4096, rank_w=128, rank_a=128, rank_v=96, rank_g=480),
    "13.3b": Rwkv7Shape(layers=61, width=4096, rank_w=192, rank_a=192, rank_v=128, rank_g=384),
}


def small(
    layers: int = 3,
    width: int = 128,
    head_size: int = 64,
    *,
    rank_w: int = 5,
    rank_a: int = 24,
    rank_v: int = 7,
    rank_g: int = 12,
    vocab: int = 256,
) -> Rwkv7Shape:
    """Return a tiny shape for tests.

    The ranks differ from one another, so that no two can be confused unseen. Three layers are the fewest that tell the
    value residual's source (layer 0) from the layer before.
    """
    return Rwkv7Shape(layers, width, rank_w, rank_a, rank_v, rank_g, head_size=head_size, vocab=vocab)


def random_rwkv7(
    shape: Rwkv7Shape, seed: int, dtype: torch.dtype = torch.bfloat16, *, unused_layer0: bool = False
) -> dict[str, torch.Tensor]:
    """Return a random RWKV-7 checkpoint in BlinkDL's names, shapes and orientation.

    Linear weights are [out, in]; low-rank pairs are [C, R] and [R, C]; per-channel vectors of the mixes are [1, 1, C];
    r_k is [H, head_size]. The same (shape, seed) gives the same values, rounded to `dtype`; logits have a standard
    deviation of about 2.5 at any length. `unused_layer0` adds v0, v1 and v2 of layer 0, which some published files
    carry and no model reads.
    """
    return made(rwkv7_recipes(shape, seed, dtype, unused_layer0=unused_layer0))


def rwkv7_recipes(
    shape: Rwkv7Shape, seed: int, dtype: torch.dtype, device: str = "cpu", *, unused_layer0: bool = False
) -> dict[str, Recipe]:
    """The same, each tensor drawn on `device` when it is wanted: a large model need not exist twice."""
    draw = Draw(seed, dtype, device)
    c = shape.width
    tensors = {"emb.weight": draw.uniform("emb.weight", (shape.vocab, c), -0.05, 0.05)}
    tensors.update(draw_norm(draw, "blocks.0.ln0", c))
    for layer in range(shape.layers):
        block = f"blocks.{layer}."
        tensors.update(draw_norm(draw, block + "ln1", c))
        tensors.update(draw_norm(draw, block + "ln2", c))
        tensors.update(_time_mix(draw, block + "att.", shape, value_residual=layer > 0 or unused_layer0))
        tensors.update(_channel_mix(draw, block + "ffn.", shape))
    tensors.update(draw_norm(draw, "ln_out", c))
    tensors["head.weight"] = draw.dense("head.weight", (shape.vocab, c), 2.5, c)
    return tensors


def _time_mix(draw: Draw, att: str, shape: Rwkv7Shape, *, value_residual: bool) -> dict[str, Recipe]:
    """Tensors of one time mix, its names starting with `att`."""
    c = shape.width
    tensors = {att + x: draw.uniform(att + x, (1, 1, c), 0.0, 1.0) for x in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g")}
    tensors[att + "w0"] = draw.scattered(att + "w0", c, *_DECAY_RANGE).reshaped(1, 1, c)
    tensors[att + "a0"] = draw.uniform(att + "a0", (1, 1, c), -3.0, 3.0)
    if value_residual:
        tensors[att + "v0"] = draw.uniform(att + "v0", (1, 1, c), -2.0, 2.0)
    tensors.update(_low_rank_pairs(draw, att, shape, value_residual=value_residual))
    tensors[att + "k_k"] = draw.uniform(att + "k_k", (1, 1, c), 0.6, 1.1)
    tensors[att + "k_a"] = draw.uniform(att + "k_a", (1, 1, c), 0.7, 1.3)
    tensors[att + "r_k"] = draw.uniform(att + "r_k", (shape.heads, shape.head_size), -2.0, 2.0)
    for name, gain in (("receptance", 0.5), ("key", 1.0), ("value", 1.0), ("output", 1.0)):
        weight = f"{att}{name}.weight"
        tensors[weight] = draw.dense(weight, (c, c), gain, c)
    # Small keys put the variance of a head's output on either side of the group norm's epsilon (6.4e-4).
    key_gain = 10.0 ** draw.spread(att + "key.gain", shape.heads, *_KEY_GAIN_LOG10)
    tensors[att + "key.weight"] = tensors[att + "key.weight"].scaled_by_head(key_gain)
    tensors.update(draw_norm(draw, att + "ln_x", c))
    return tensors


def _low_rank_pairs(draw: Draw, att: str, shape: Rwkv7Shape, *, value_residual: bool) -> Iterator[tuple[str, Recipe]]:
    """Yield the low-rank matrices x1 [C, R] and x2 [R, C] of decay, in-context rate, gate and value residual."""
    pairs = [("w", shape.rank_w, 1.0), ("a", shape.rank_a, 1.0), ("g", shape.rank_g, 2.0)]
    if value_residual:
        pairs.append(("v", shape.rank_v, 1.0))
    for letter, rank, gain in pairs:
        down, up = f"{att}{letter}1", f"{att}{letter}2"
        yield down, draw.dense(down, (shape.width, rank), gain, shape.width)
        yield up, draw.dense(up, (rank, shape.width), gain, rank)


def _channel_mix(draw: Draw, ffn: str, shape: Rwkv7Shape) -> dict[str, Recipe]:
    """Tensors of one channel mix, its names starting with `ffn`."""
    key, value = ffn + "key.weight", ffn + "value.weight"
    return {
        ffn + "x_k": draw.uniform(ffn + "x_k", (1, 1, shape.width), 0.0, 1.0),
        key: draw.dense(key, (shape.ffn_width, shape.width), 1.0, shape.width),
        value: draw.dense(value, (shape.width, shape.ffn_width), 0.7, shape.ffn_width),
    }
