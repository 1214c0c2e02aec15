"""Random RWKV-5 and 6 checkpoints: published sizes, and values that let no mistake pass unseen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kittiwake.bench.random import ALL_SHAPES
from kittiwake.bench.rwkv56_shapes import (
    RWKV5_SHAPES,
    RWKV6_SHAPES,
    Rwkv5Shape,
    Rwkv6Shape,
    random_rwkv5,
    random_rwkv6,
)
from kittiwake.errors import UsageError
from tests.oracles import rwkv6_float64
from tests.oracles.measure import random_ids, relative_error

SIX = Rwkv6Shape(3, 64, 6, 10, 16, 256)
FIVES = tuple(Rwkv5Shape(3, 64, version, 16, 256) for version in ("5.0", "5.1", "5.2"))
SHAPES = {"6": SIX, **{shape.version: shape for shape in FIVES}}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def make(shape: Rwkv5Shape | Rwkv6Shape, seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return random_rwkv6(shape, seed, dtype) if isinstance(shape, Rwkv6Shape) else random_rwkv5(shape, seed, dtype)


def test_a_checkpoint_has_the_names_and_shapes_of_a_published_one() -> None:
    found = {name: tuple(tensor.shape) for name, tensor in make(SIX, 1).items()}
    assert {name: shape for name, shape in found.items() if name.startswith("blocks.1.")} == {
        **{f"blocks.1.{norm}.{part}": (64,) for norm in ("ln1", "ln2", "att.ln_x") for part in ("weight", "bias")},
        **{f"blocks.1.att.time_maa_{letter}": (1, 1, 64) for letter in "xwkvrg"},
        **{f"blocks.1.ffn.time_maa_{letter}": (1, 1, 64) for letter in "kr"},
        "blocks.1.att.time_maa_w1": (64, 30), "blocks.1.att.time_maa_w2": (5, 6, 64),
        "blocks.1.att.time_decay": (1, 1, 64), "blocks.1.att.time_decay_w1": (64, 10),
        "blocks.1.att.time_decay_w2": (10, 64), "blocks.1.att.time_faaaa": (4, 16),
        **{f"blocks.1.att.{name}.weight": (64, 64) for name in "receptance key value gate output".split()},
        "blocks.1.ffn.key.weight": (224, 64), "blocks.1.ffn.value.weight": (64, 224),
        "blocks.1.ffn.receptance.weight": (64, 64),
    }  # fmt: skip
    outer = {name for name in found if not name.startswith("blocks.")}
    assert outer == {"emb.weight", "head.weight", "ln_out.weight", "ln_out.bias"}


@pytest.mark.parametrize("shape", FIVES, ids=lambda shape: shape.version)
def test_a_version_has_its_own_time_mix(shape: Rwkv5Shape) -> None:
    tensors = make(shape, 1)
    block = "blocks.2.att."
    assert (f"{block}gate.weight" in tensors) == (f"{block}time_mix_g" in tensors) == (shape.version != "5.0")
    bonus = tensors[block + ("time_faaaa" if shape.version == "5.2" else "time_first")]
    expected = (4, 16) if shape.version == "5.2" else (4,)
    assert bonus.shape == tensors[f"{block}time_decay"].shape == expected


@every_shape
def test_every_tensor_moves_the_logits_far_more_than_rounding(shape: Rwkv5Shape | Rwkv6Shape) -> None:
    tensors, ids = make(shape, 2), random_ids(shape, 16)
    expected, _ = rwkv6_float64.run(tensors, ids)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        shuffled = tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape)
        if torch.equal(shuffled, tensor):  # four values may fall into their old places
            shuffled = tensor.flip(0)
        found, _ = rwkv6_float64.run({**tensors, name: shuffled}, ids)
        assert relative_error(found, expected) > 3e-4, name


@every_shape
def test_decays_cover_the_trained_range_and_keys_are_large(shape: Rwkv5Shape | Rwkv6Shape) -> None:
    tensors = make(shape, 3)
    for layer in range(3):
        decay = tensors[f"blocks.{layer}.att.time_decay"]
        assert decay.min() == -8 and decay.max() == 1.5
        keys = tensors[f"blocks.{layer}.att.key.weight"].float().view(4, -1).norm(dim=1)
        assert keys.max() / keys.min() > 1e4 and keys.max() > 100


@every_shape
def test_a_long_run_neither_explodes_nor_becomes_constant(shape: Rwkv5Shape | Rwkv6Shape) -> None:
    logits, _ = rwkv6_float64.run(make(shape, 1), random_ids(shape, 300))
    assert 1.5 < logits[:20].std() < 4 and 1.5 < logits[-20:].std() < 4
    assert len(np.unique(logits[-100:].argmax(-1))) > 20


@every_shape
def test_the_same_seed_gives_the_same_values_and_another_seed_others(shape: Rwkv5Shape | Rwkv6Shape) -> None:
    first, again, other = make(shape, 1), make(shape, 1), make(shape, 2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if not name.endswith("time_decay"))
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        (Rwkv6Shape, {"layers": 0}, "sizes must be at least 1"),
        (Rwkv6Shape, {"rank_mix": 0}, "sizes must be at least 1"),
        (Rwkv6Shape, {"width": 100}, "width 100 is not a multiple of head_size 64"),
        (Rwkv5Shape, {"width": 8, "head_size": 4}, "the width at least 10"),
        (Rwkv5Shape, {"version": "5.3"}, "version is '5.3'"),
    ],
)
def test_impossible_sizes_are_refused_by_name(kind: Any, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kind(**{"layers": 2, "width": 128, **sizes})


def test_published_shapes_can_be_benchmarked_by_name() -> None:
    assert set(RWKV5_SHAPES) | set(RWKV6_SHAPES) <= set(ALL_SHAPES)
    assert (RWKV6_SHAPES["rwkv6-1.6b"].ffn_width, RWKV6_SHAPES["rwkv6-1.6b"].heads) == (7168, 32)
    assert RWKV5_SHAPES["rwkv5-0.4b"].ffn_width == 3584 and RWKV6_SHAPES["rwkv6-7b"].ffn_width == 14336
