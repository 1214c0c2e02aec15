"""The random checkpoints: published sizes, and values that let no mistake pass unseen."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from kittiwake.bench.shapes import SHAPES, Rwkv7Shape, random_rwkv7, small
from kittiwake.errors import UsageError
from tests.oracles import rwkv7_float64
from tests.oracles.measure import random_ids, relative_error

SMALL = (small(3, 128), small(3, 96, 32), small(3, 64, 16))  # heads of 64, 32 and 16


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("0.1b", 191_034_624),
        ("0.4b", 450_767_872),
        ("1.5b", 1_527_404_544),
        ("2.9b", 2_947_735_040),
        ("7.2b", 7_199_141_888),
        ("13.3b", 13_269_245_952),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert SHAPES[name].parameters == parameters


def test_a_checkpoint_has_the_parameters_and_the_dtype_it_says() -> None:
    shape = small(3, 96, 32, vocab=300)
    tensors = random_rwkv7(shape, seed=1)
    assert sum(tensor.numel() for tensor in tensors.values()) == shape.parameters
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(tensor.is_contiguous() for tensor in tensors.values())


def test_a_checkpoint_has_the_names_and_shapes_of_a_published_one() -> None:
    tensors = random_rwkv7(small(2, 64, 16, rank_w=5, rank_a=24, rank_v=7, rank_g=12, vocab=300), seed=1)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    norms = ("ln_out", *(f"blocks.{name}" for name in ("0.ln0", "0.ln1", "0.ln2", "1.ln1", "1.ln2")))
    expected: dict[str, tuple[int, ...]] = {"emb.weight": (300, 64), "head.weight": (300, 64)}
    expected |= {f"{norm}.{part}": (64,) for norm in norms for part in ("weight", "bias")}
    for block in ("blocks.0.", "blocks.1."):
        rows = "x_r x_w x_k x_v x_a x_g w0 a0 k_k k_a".split()
        expected |= {f"{block}att.{name}": (1, 1, 64) for name in rows} | {f"{block}ffn.x_k": (1, 1, 64)}
        for letter, rank in (("w", 5), ("a", 24), ("g", 12)):
            expected |= {f"{block}att.{letter}1": (64, rank), f"{block}att.{letter}2": (rank, 64)}
        expected |= {f"{block}att.{name}.weight": (64, 64) for name in ("receptance", "key", "value", "output")}
        expected |= {f"{block}att.r_k": (4, 16), f"{block}att.ln_x.weight": (64,), f"{block}att.ln_x.bias": (64,)}
        expected |= {f"{block}ffn.key.weight": (256, 64), f"{block}ffn.value.weight": (64, 256)}
    expected |= {"blocks.1.att.v0": (1, 1, 64), "blocks.1.att.v1": (64, 7), "blocks.1.att.v2": (7, 64)}
    assert found == expected


def test_the_same_seed_gives_the_same_values_and_another_seed_others() -> None:
    first, again, other = (random_rwkv7(small(), seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_unused_tensors_of_layer_0_change_no_other() -> None:
    plain, extra = (random_rwkv7(small(), 1, unused_layer0=unused) for unused in (False, True))
    assert set(extra) - set(plain) == {"blocks.0.att.v0", "blocks.0.att.v1", "blocks.0.att.v2"}
    assert all(torch.equal(plain[name], extra[name]) for name in plain)


def test_decays_cover_the_trained_range_in_every_layer() -> None:
    tensors = random_rwkv7(small(3, 128), 1)
    for layer in range(3):
        w0 = tensors[f"blocks.{layer}.att.w0"]
        assert w0.min() == -7 and w0.max() == 3


@pytest.mark.parametrize("sizes", [{"layers": 0}, {"width": 100}, {"rank_v": 0}, {"vocab": -1}])
def test_impossible_sizes_are_refused_by_name(sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(sizes))):
        small(**sizes)


@pytest.mark.parametrize("shape", SMALL, ids=["64", "32", "16"])
def test_every_tensor_moves_the_logits_far_more_than_rounding(shape: Rwkv7Shape) -> None:
    tensors, ids = random_rwkv7(shape, seed=2), random_ids(shape, 16)
    expected, _ = rwkv7_float64.run(tensors, ids)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        shuffled = tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape)
        found, _ = rwkv7_float64.run({**tensors, name: shuffled}, ids)
        assert relative_error(found, expected) > 1e-3, name


@pytest.mark.parametrize("shape", SMALL, ids=["64", "32", "16"])
def test_a_wrong_epsilon_of_the_group_norm_shows(shape: Rwkv7Shape) -> None:
    tensors, ids = random_rwkv7(shape, seed=2), random_ids(shape, 16)
    expected, _ = rwkv7_float64.run(tensors, ids)
    found, _ = rwkv7_float64.run(tensors, ids, ln_x_eps=shape.heads * 1e-5)
    assert relative_error(found, expected) > 0.1


def test_a_long_run_neither_explodes_nor_becomes_constant() -> None:
    shape = small(3, 128)
    logits, _ = rwkv7_float64.run(random_rwkv7(shape, 1), random_ids(shape, 600))
    assert 2 < logits[:20].std() < 4 and 2 < logits[-20:].std() < 4
    assert len(np.unique(logits[-100:].argmax(-1))) > 20


def test_a_long_past_is_remembered() -> None:
    shape = small(3, 128)
    tensors, ids = random_rwkv7(shape, 1), random_ids(shape, 400)
    one, _ = rwkv7_float64.run(tensors, ids[:150])
    other, _ = rwkv7_float64.run(tensors, ids[300:400] + ids[100:150])
    assert relative_error(one[-1], other[-1]) > 0.1


def test_a_checkpoint_of_the_0_1b_shape_is_made_in_seconds() -> None:
    start = time.process_time()
    random_rwkv7(SHAPES["0.1b"], 1)
    assert time.process_time() - start < 10
