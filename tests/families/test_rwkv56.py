"""RWKV-5.0, 5.1, 5.2 and 6: agreement with references, the law, storage of weights, and what all of them refuse."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from kittiwake.bench.rwkv56_shapes import Rwkv5Shape, Rwkv6Shape, random_rwkv5, random_rwkv6
from kittiwake.config import EngineConfig
from kittiwake.errors import ModelError
from kittiwake.families.contract import ModelConfig
from kittiwake.families.registry import family_named
from kittiwake.families.rwkv5 import Rwkv5Family
from kittiwake.families.rwkv6 import Rwkv6Family
from kittiwake.load import TensorDict, load_model, load_tensors
from kittiwake.verify.laws import verify
from tests.families.agreement import TINY_MODELS, Tensors, assert_agrees, changed, load, run, same_run
from tests.oracles import rwkv6_float64, rwkv_package
from tests.oracles.measure import random_ids, relative_error

Shape = Rwkv5Shape | Rwkv6Shape
SHAPES: dict[str, Shape] = {
    "5.2, heads of 64": Rwkv5Shape(3, 128, vocab=256),
    "5.2, heads of 11": Rwkv5Shape(3, 66, "5.2", 11, 256),
    "5.1, heads of 16": Rwkv5Shape(2, 64, "5.1", 16, 256),
    "5.0, heads of 32": Rwkv5Shape(3, 96, "5.0", 32, 256),
    "5.0, one layer, one head": Rwkv5Shape(1, 40, "5.0", 40, 256),
    "6, heads of 64": Rwkv6Shape(3, 128, 5, 9, vocab=256),
    "6, heads of 32, larger ranks": Rwkv6Shape(2, 96, 33, 17, 32, 256),
    "6, heads of 11, ranks of 1": Rwkv6Shape(3, 66, 1, 1, 11, 256),
    "6, one layer, one head": Rwkv6Shape(1, 40, 4, 3, 40, 256),
}
FIVE, SIX = Rwkv5Shape(2, 32, "5.2", 16, 256), Rwkv6Shape(2, 32, 3, 5, 16, 256)
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
both_tiny = pytest.mark.parametrize("tiny", [FIVE, SIX], ids=["5.2", "6"])
heads_of_11 = pytest.mark.parametrize("name", ["5.2, heads of 11", "6, heads of 11, ranks of 1"])


def draw(shape: Shape, seed: int = 4, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """A random checkpoint."""
    if isinstance(shape, Rwkv5Shape):
        return random_rwkv5(shape, seed, dtype)
    return random_rwkv6(shape, seed, dtype)


def family_of(shape: Shape) -> Rwkv5Family | Rwkv6Family:
    return Rwkv5Family() if isinstance(shape, Rwkv5Shape) else Rwkv6Family()


# Agreement


@every_shape
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_and_states_are_those_of_the_equations_in_float64(shape: Shape, stored: torch.dtype) -> None:
    tensors, ids = draw(shape, shape.heads, stored), random_ids(shape, 75)
    logits, state = rwkv6_float64.run(tensors, ids)
    model = load(tensors)
    assert_agrees(run(model, ids), logits, state, 3e-6)
    assert_agrees(run(model, ids, [64, *[1] * 11]), logits, state, 3e-6)


@heads_of_11
def test_a_long_prompt_stays_as_exact_as_a_short_one(name: str) -> None:
    shape = SHAPES[name]
    tensors, ids = draw(shape, 2), random_ids(shape, 700)
    logits, state = rwkv6_float64.run(tensors, ids)
    assert_agrees(run(load(tensors), ids), logits, state, 3e-6)


@pytest.mark.skipif(not rwkv_package.is_available(), reason=rwkv_package.SKIP_REASON)
@pytest.mark.parametrize(
    "name",
    ["5.2, heads of 64", "5.1, heads of 16", "5.0, heads of 32", "6, heads of 64", "6, heads of 32, larger ranks"],
)
def test_logits_states_and_the_steps_after_them_are_those_of_the_rwkv_package(name: str) -> None:
    shape = SHAPES[name]
    # float32, since the package norms the embeddings in the type they are stored in
    tensors, ids = draw(shape, 3, torch.float32), random_ids(shape, 83)
    theirs = rwkv_package.run(tensors, ids, family=family_of(shape).name, cuts=(64, *range(75, 83)))
    assert_agrees(run(load(tensors), ids, [64, 11, *[1] * 8]), theirs.logits, theirs.state, 5e-6)


@pytest.mark.skipif(not TINY_MODELS.is_dir(), reason="KITTIWAKE_TINY_MODELS names no folder of the tiny trained models")
@pytest.mark.parametrize(
    ("name", "epsilon", "version", "expected"),
    [
        # it was trained with another epsilon than BlinkDL's models, and rwkv.cpp counts the versions otherwise
        ("rwkv5v1", 1e-5, "5.0", [-4.830526, -4.09021, -3.927983, -4.560354, -4.059572]),
        ("rwkv6v0", None, None, [7.532772, -12.705347, -12.444719, -12.253119, -12.403223]),
    ],
)
def test_the_tiny_trained_models_give_their_published_logits(
    name: str, epsilon: float | None, version: str | None, expected: list[float]
) -> None:
    published = json.loads((TINY_MODELS / f"{name}.logits.json").read_text())
    config = EngineConfig(threads=2, group_norm_eps=epsilon)
    model = load_model(TINY_MODELS / f"{name}.pth", config, tokenizer="bytes").model
    assert model.config.extra.get("version") == version
    logits = run(model, list(b'"in'))[0][-1]
    assert np.abs(logits - np.array(published["last_logits"])).max() < 1e-5
    np.testing.assert_allclose(logits[:5], expected, rtol=1e-6)


@heads_of_11
def test_another_epsilon_of_the_group_norm_shows(name: str) -> None:
    shape = SHAPES[name]
    tensors, ids = draw(shape, 2), random_ids(shape, 20)
    found, _ = run(load_tensors(tensors, EngineConfig(threads=2, group_norm_eps=1e-5)).model, ids)
    assert relative_error(found, rwkv6_float64.run(tensors, ids, ln_x_eps=1e-5)[0]) < 1e-5
    assert relative_error(found, rwkv6_float64.run(tensors, ids)[0]) > 1e-3


# The law


@pytest.mark.parametrize("name", ["5.0, heads of 32", "6, heads of 32, larger ranks"])
def test_every_cut_of_a_prompt_gives_the_same_bits(name: str) -> None:
    shape = SHAPES[name]
    model, ids = load(draw(shape, 6)), random_ids(shape, 75)
    whole = run(model, ids)
    for cut in range(1, 75):
        assert same_run(run(model, ids, [cut, 75 - cut]), whole), cut
    assert same_run(run(model, ids, [1] * 75), whole)


@pytest.mark.parametrize("threads", [1, 3, 5])
@both_tiny
def test_verify_finds_no_differing_bit(tiny: Shape, threads: int) -> None:
    config = EngineConfig(threads=threads)
    results = verify(load_tensors(draw(tiny), config), config)
    assert all(law.cases > 0 and law.differing == 0 for law in results)


# Storage


@every_shape
def test_weights_kept_in_bfloat16_and_widened_have_the_same_bits(shape: Shape) -> None:
    tensors, ids = draw(shape, 5), random_ids(shape, 40)
    narrow, wide = load(tensors, "bf16"), load(tensors, "fp32")
    assert narrow.weight_bytes * 2 == wide.weight_bytes
    for pieces in (None, [1, 36, 3]):
        assert same_run(run(narrow, ids, pieces), run(wide, ids, pieces))


# Refusals


@both_tiny
def test_a_tuned_state_among_the_weights_is_told_where_it_belongs(tiny: Shape) -> None:
    with pytest.raises(ModelError, match=r"does not have: blocks\.0\.att\.time_state") as caught:
        load(changed(draw(tiny), blocks__0__att__time_state=torch.zeros(2, 16, 16)))
    assert "belongs in a file of its own" in caught.value.hint


@pytest.mark.parametrize(
    ("tiny", "stored", "at", "name"),
    [(FIVE, "time_faaaa", (1, 3), "bonus"), (SIX, "time_maa_w2", (2, 1, 3), "mix_up_v")],
    ids=["5.2", "6"],
)
def test_weights_that_are_not_finite_are_refused_by_name(
    tiny: Shape, stored: str, at: tuple[int, ...], name: str
) -> None:
    tensors = draw(tiny)
    tensors[f"blocks.1.att.{stored}"][at] = float("nan")
    with pytest.raises(ModelError, match=rf"layers\.1\.time_mix\.{name} holds values that are not finite"):
        load(tensors)


# Canonical tensors


def canonical(shape: Shape, tensors: Tensors) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    family, source = family_of(shape), TensorDict(tensors)
    config = family.read_config(source)
    return config, dict(family.canonical(source, config))


@every_shape
def test_canonical_tensors_make_the_same_model(shape: Shape) -> None:
    tensors, ids = draw(shape, 8), random_ids(shape, 20)
    config, ours = canonical(shape, tensors)
    source = TensorDict(ours)
    family = family_named(config.family)
    family.check_canonical(source, config)
    model = family.build(config, family.canonical(source, config), device="cpu", dtype="bf16", threads=2)
    assert same_run(run(model, ids), run(load(tensors), ids))
    assert all(tensor.dtype == torch.bfloat16 for tensor in ours.values() if tensor.dim() == 2)
    assert {tuple(tensor.shape) for tensor in ours.values() if tensor.dim() != 2} == {(shape.width,)}


@pytest.mark.parametrize(
    ("tiny", "own"),
    [(FIVE, {"version": "5.2", "is_bonus_log": False}), (SIX, {"ranks": {"mix": 3, "decay": 5}})],
    ids=["5.2", "6"],
)
def test_the_config_comes_back_from_a_manifest(tiny: Shape, own: dict[str, object]) -> None:
    config, _ = canonical(tiny, draw(tiny))
    assert (config.layers, config.width, config.vocab_size) == (2, 32, 256)
    assert config.extra == {"heads": 2, "ffn": 96, **own, "norm_eps": 1e-5, "group_norm_eps": 64e-5}
    model = {"layers": config.layers, "width": config.width, "vocab_size": config.vocab_size, **config.extra}
    assert family_of(tiny).config_from_manifest(model) == config


@both_tiny
def test_memory_is_told_before_loading(tiny: Shape) -> None:
    config, ours = canonical(tiny, draw(tiny))
    told, model = family_of(tiny).footprint(config), load(draw(tiny), "fp32")
    assert told["state"] == model.state_spec.slot_bytes == 4 * 2 * (32 + 2 * 16 * 16 + 32)
    assert told["fp32"] == 4 * sum(tensor.numel() for tensor in ours.values())


@both_tiny
def test_a_tuned_initial_state_is_where_a_sequence_begins(tiny: Shape) -> None:
    model, shape = load(draw(tiny)), (2, 16, 16)
    tuned = {f"blocks.{layer}.att.time_state": torch.randn(shape) for layer in range(2)}
    state = model.initial_state(TensorDict(tuned))
    for layer in range(2):
        stored = tuned[f"blocks.{layer}.att.time_state"].numpy()
        assert np.array_equal(state["wkv"][layer], stored.transpose(0, 2, 1))
    assert not state["att_shift"].any() and not state["ffn_shift"].any()
