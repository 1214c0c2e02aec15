"""Published RWKV-4 shapes, and random checkpoints of any shape for tests and benchmarks.

As those of RWKV-7 (``shapes.py``) they carry BlinkDL's names and are built to show mistakes: decays and bonuses cover
their trained ranges, and every term of the equations moves the logits by far more than rounding does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kittiwake.bench.draw import Draw, Recipe, draw_norm, made
from kittiwake.errors import UsageError

_DECAY_RANGE = (-9.0, 3.0)  # before both exponentials: one step keeps 0.99988 to 2e-9 of a channel
_BONUS_RANGE = (-9.0, 4.0)


@dataclass(frozen=True)
class Rwkv4Shape:
    """Sizes of an RWKV-4 model; ``attention`` is the width of the time mix, 0 for that of the residual stream."""

    layers: int
    width: int
    vocab: int = 50277
    ffn: int = 0
    """0: four times the width."""
    attention: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes below one (UsageError)."""
        for name, low in (("layers", 1), ("width", 1), ("vocab", 1), ("ffn", 0), ("attention", 0)):
            if getattr(self, name) < low:
                raise UsageError(f"RWKV-4 shape: {name} is {getattr(self, name)}, expected at least {low}")

    @property
    def ffn_width(self) -> int:
        """Hidden width of the channel mix."""
        return self.ffn or 4 * self.width

    @property
    def attention_width(self) -> int:
        """Channels of the recurrence."""
        return self.attention or self.width

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        c, a, f = self.width, self.attention_width, self.ffn_width
        layer = 4 * c * a + 2 * a + 2 * c * f + c * c + 9 * c
        return 2 * self.vocab * c + 4 * c + self.layers * layer


RWKV4_SHAPES: dict[str, Rwkv4Shape] = {
    "rwkv4-169m": Rwkv4Shape(layers=12, width=768),
    "rwkv4-430m": Rwkv4Shape(layers=24, width=1024),
    "rwkv4-1.5b": Rwkv4Shape(layers=24, width=2048),
    "rwkv4-3b": Rwkv4Shape(layers=32, width=2560),
    "rwkv4-7b": Rwkv4Shape(layers=32, width=4096),
    "rwkv4-14b": Rwkv4Shape(layers=40, width=5120),
}


def random_rwkv4(
    shape: Rwkv4Shape, seed: int, dtype: torch.dtype = torch.bfloat16, *, key_gain: float = 2.0
) -> dict[str, torch.Tensor]:
    """Return a random RWKV-4 checkpoint in BlinkDL's names, shapes and orientation.

    The same (shape, seed) gives the same values, rounded to ``dtype``. ``key_gain`` is the standard deviation of the
    keys: with 30 many of them have an e^k beyond float32.
    """
    return made(rwkv4_recipes(shape, seed, dtype, key_gain=key_gain))


def rwkv4_recipes(
    shape: Rwkv4Shape, seed: int, dtype: torch.dtype, device: str = "cpu", *, key_gain: float = 2.0
) -> dict[str, Recipe]:
    """The same, each tensor drawn on ``device`` when it is wanted: a large model need not exist twice."""
    draw = Draw(seed, dtype, device)
    c = shape.width
    tensors = {"emb.weight": draw.uniform("emb.weight", (shape.vocab, c), -0.05, 0.05)}
    tensors.update(draw_norm(draw, "blocks.0.ln0", c))
    for layer in range(shape.layers):
        block = f"blocks.{layer}."
        tensors.update(draw_norm(draw, block + "ln1", c))
        tensors.update(draw_norm(draw, block + "ln2", c))
        tensors.update(_time_mix(draw, block + "att.", shape, key_gain))
        tensors.update(_channel_mix(draw, block + "ffn.", shape))
    tensors.update(draw_norm(draw, "ln_out", c))
    tensors["head.weight"] = draw.dense("head.weight", (shape.vocab, c), 2.5, c)
    return tensors


def _time_mix(draw: Draw, att: str, shape: Rwkv4Shape, key_gain: float) -> dict[str, Recipe]:
    """Tensors of one time mix, its names starting with ``att``."""
    c, inner = shape.width, shape.attention_width
    tensors = {
        att + name: draw.scattered(att + name, inner, *ends)
        for name, ends in (("time_decay", _DECAY_RANGE), ("time_first", _BONUS_RANGE))
    }
    for letter in "kvr":
        name = f"{att}time_mix_{letter}"
        tensors[name] = draw.uniform(name, (1, 1, c), 0.0, 1.0)
    for name, gain in (("key", key_gain), ("value", 1.0), ("receptance", 1.5)):
        weight = f"{att}{name}.weight"
        tensors[weight] = draw.dense(weight, (inner, c), gain, c)
    tensors[att + "output.weight"] = draw.dense(att + "output.weight", (c, inner), 1.5, inner)
    return tensors


def _channel_mix(draw: Draw, ffn: str, shape: Rwkv4Shape) -> dict[str, Recipe]:
    """Tensors of one channel mix, its names starting with ``ffn``."""
    c, hidden = shape.width, shape.ffn_width
    mixes = {f"{ffn}time_mix_{letter}": draw.uniform(f"{ffn}time_mix_{letter}", (1, 1, c), 0.0, 1.0) for letter in "kr"}
    key, receptance, value = (f"{ffn}{name}.weight" for name in ("key", "receptance", "value"))
    return mixes | {
        key: draw.dense(key, (hidden, c), 1.0, c),
        receptance: draw.dense(receptance, (c, c), 1.5, c),
        value: draw.dense(value, (c, hidden), 0.7, hidden),
    }
