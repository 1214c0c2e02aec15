"""RWKV-6: agreement with independent references, the law, storage of weights, and checkpoints that are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from kittiwake.bench.rwkv56_shapes import Rwkv6Shape, random_rwkv6
from kittiwake.config import EngineConfig
from kittiwake.errors import BundleError, ModelError
from kittiwake.families.contract import ModelConfig
from kittiwake.families.registry import family_named, recognise
from kittiwake.families.rwkv6 import Rwkv6Family
from kittiwake.load import TensorDict, load_model, load_tensors
from kittiwake.verify.laws import verify
from tests.families.agreement import TINY_MODELS, Tensors, assert_agrees, load, run, same_run
from tests.oracles import rwkv6_float64, rwkv_package
from tests.oracles.measure import random_ids, relative_error

SHAPES = {
    "heads of 64": Rwkv6Shape(3, 128, 5, 9, vocab=256),
    "heads of 32, larger ranks": Rwkv6Shape(2, 96, 33, 17, 32, 256),
    "heads of 11, ranks of 1": Rwkv6Shape(3, 66, 1, 1, 11, 256),
    "one layer, one head": Rwkv6Shape(1, 40, 4, 3, 40, 256),
}
TINY = Rwkv6Shape(2, 32, 3, 5, 16, 256)
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
needs_rwkv = pytest.mark.skipif(not rwkv_package.is_available(), reason=rwkv_package.SKIP_REASON)


def tiny_tensors() -> dict[str, torch.Tensor]:
    return random_rwkv6(TINY, seed=4)


# Agreement


@every_shape
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_and_states_are_those_of_the_equations_in_float64(shape: Rwkv6Shape, stored: torch.dtype) -> None:
    tensors, ids = random_rwkv6(shape, seed=shape.heads, dtype=stored), random_ids(shape, 75)
    logits, state = rwkv6_float64.run(tensors, ids)
    model = load(tensors)
    assert_agrees(run(model, ids), logits, state, 3e-6)
    assert_agrees(run(model, ids, [64, *[1] * 11]), logits, state, 3e-6)


def test_a_long_prompt_stays_as_exact_as_a_short_one() -> None:
    shape = SHAPES["heads of 11, ranks of 1"]
    tensors, ids = random_rwkv6(shape, seed=2), random_ids(shape, 700)
    logits, state = rwkv6_float64.run(tensors, ids)
    assert_agrees(run(load(tensors), ids), logits, state, 3e-6)


@needs_rwkv
@pytest.mark.parametrize("name", ["heads of 64", "heads of 32, larger ranks"])
def test_logits_states_and_the_steps_after_them_are_those_of_the_rwkv_package(name: str) -> None:
    shape = SHAPES[name]
    # float32, since the package norms the embeddings in the type they are stored in
    tensors, ids = random_rwkv6(shape, seed=3, dtype=torch.float32), random_ids(shape, 83)
    theirs = rwkv_package.run(tensors, ids, family="rwkv6", cuts=(64, *range(75, 83)))
    assert_agrees(run(load(tensors), ids, [64, 11, *[1] * 8]), theirs.logits, theirs.state, 5e-6)


@pytest.mark.skipif(not TINY_MODELS.is_dir(), reason="KITTIWAKE_TINY_MODELS names no folder of the tiny trained models")
def test_the_tiny_trained_model_gives_its_published_logits() -> None:
    published = json.loads((TINY_MODELS / "rwkv6v0.logits.json").read_text())
    model = load_model(TINY_MODELS / "rwkv6v0.pth", EngineConfig(threads=2), tokenizer="bytes").model
    logits = run(model, list(b'"in'))[0][-1]
    assert np.abs(logits - np.array(published["last_logits"])).max() < 1e-5
    np.testing.assert_allclose(logits[:5], [7.532772, -12.705347, -12.444719, -12.253119, -12.403223], rtol=1e-6)


def test_another_epsilon_of_the_group_norm_shows() -> None:
    shape = SHAPES["heads of 11, ranks of 1"]
    tensors, ids = random_rwkv6(shape, seed=2), random_ids(shape, 20)
    found, _ = run(load_tensors(tensors, EngineConfig(threads=2, group_norm_eps=1e-5)).model, ids)
    assert relative_error(found, rwkv6_float64.run(tensors, ids, ln_x_eps=1e-5)[0]) < 1e-5
    assert relative_error(found, rwkv6_float64.run(tensors, ids)[0]) > 1e-3


# The law


def test_every_cut_of_a_prompt_gives_the_same_bits() -> None:
    shape = SHAPES["heads of 32, larger ranks"]
    model, ids = load(random_rwkv6(shape, seed=6)), random_ids(shape, 75)
    whole = run(model, ids)
    for cut in range(1, 75):
        assert same_run(run(model, ids, [cut, 75 - cut]), whole), cut
    assert same_run(run(model, ids, [1] * 75), whole)


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_verify_finds_no_differing_bit(threads: int) -> None:
    config = EngineConfig(threads=threads)
    results = verify(load_tensors(tiny_tensors(), config), config)
    assert all(law.cases > 0 and law.differing == 0 for law in results)


# Storage


@every_shape
def test_weights_kept_in_bfloat16_and_widened_have_the_same_bits(shape: Rwkv6Shape) -> None:
    tensors, ids = random_rwkv6(shape, seed=5), random_ids(shape, 40)
    narrow, wide = load(tensors, "bf16"), load(tensors, "fp32")
    assert narrow.weight_bytes * 2 == wide.weight_bytes
    for pieces in (None, [1, 36, 3]):
        assert same_run(run(narrow, ids, pieces), run(wide, ids, pieces))


# Refusals


def changed(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The tiny checkpoint with tensors replaced, added, or (None) left out; "__" stands for a dot."""
    table: dict[str, torch.Tensor | None] = {**tiny_tensors()}
    table |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in table.items() if tensor is not None}


def renamed(old: str, new: str) -> dict[str, torch.Tensor]:
    return {name.replace(old, new): tensor for name, tensor in tiny_tensors().items()}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (changed(blocks__1__att__extra=torch.zeros(3)), r"tensors RWKV-6 does not have: blocks\.1\.att\.extra"),
        (changed(blocks__0__att__time_state=torch.zeros(2, 16, 16)), r"does not have: blocks\.0\.att\.time_state"),
        (changed(blocks__0__att__time_maa_x=None), r"lacks tensors of RWKV-6: blocks\.0\.att\.time_maa_x"),
        (changed(blocks__1__att__gate__weight=None), r"lacks tensors of RWKV-6: blocks\.1\.att\.gate\.weight"),
        (changed(blocks__0__ffn__receptance__weight=None), r"lacks tensors of RWKV-6: blocks\.0\.ffn\.receptance"),
        (changed(blocks__0__att__time_faaaa=None), r"lacks blocks\.0\.att\.time_faaaa"),
        (changed(blocks__0__att__time_maa_w1=torch.zeros(32, 16)), "time_maa_w1 has 16 columns, expected 5 times"),
        (changed(blocks__0__att__time_maa_w1=torch.zeros(32)), r"time_maa_w1 has shape \(32,\), expected 2 sizes"),
        (changed(blocks__1__att__time_maa_w2=torch.zeros(5, 32, 3)), r"has shape \(5, 32, 3\), expected \(5, 3, 32\)"),
        (changed(blocks__0__att__time_decay_w2=torch.zeros(32, 5)), r"has shape \(32, 5\), expected \(5, 32\)"),
        (changed(blocks__0__att__time_faaaa=torch.zeros(2, 15)), r"has shape \(2, 15\), whose product is not the width"),
        (changed(blocks__1__att__time_faaaa=torch.zeros(16, 2)), r"has shape \(16, 2\), expected \(2, 16\)"),
        (changed(blocks__1__att__time_decay=torch.zeros(2, 16)), r"has shape \(2, 16\), expected \(32,\)"),
        (changed(head__weight=torch.zeros(255, 32)), r"head\.weight .* has shape \(255, 32\), expected \(256, 32\)"),
        (changed(ln_out__weight=torch.zeros(32, dtype=torch.int8)), r"ln_out\.weight .* is torch\.int8"),
        (renamed("blocks.1.", "blocks.2."), "layers up to 2, but layer 1 is missing"),
        (renamed("att.time_maa_r", "att.time_maa_q"), r"does not have: blocks\.0\.att\.time_maa_q"),
    ],
)  # fmt: skip
def test_checkpoints_that_are_not_whole_are_refused_by_name(tensors: Tensors, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(tensors)


def test_a_tuned_state_among_the_weights_is_told_where_it_belongs() -> None:
    with pytest.raises(ModelError) as caught:
        load(changed(blocks__0__att__time_state=torch.zeros(2, 16, 16)))
    assert "belongs in a file of its own" in caught.value.hint


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    tensors = tiny_tensors()
    tensors["blocks.1.att.time_maa_w2"][2, 1, 3] = float("nan")
    with pytest.raises(ModelError, match=r"layers\.1\.time_mix\.mix_up_v holds values that are not finite"):
        load(tensors)


def test_it_is_told_from_its_neighbours() -> None:
    assert recognise(TensorDict(tiny_tensors())).name == "rwkv6"


# Canonical tensors


def canonical(tensors: Tensors) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    family, source = Rwkv6Family(), TensorDict(tensors)
    config = family.read_config(source)
    return config, dict(family.canonical(source, config))


@every_shape
def test_canonical_tensors_make_the_same_model(shape: Rwkv6Shape) -> None:
    tensors, ids = random_rwkv6(shape, seed=8), random_ids(shape, 20)
    config, ours = canonical(tensors)
    source = TensorDict(ours)
    family = family_named("rwkv6")
    family.check_canonical(source, config)
    model = family.build(config, family.canonical(source, config), device="cpu", dtype="bf16", threads=2)
    assert same_run(run(model, ids), run(load(tensors), ids))
    assert all(tensor.dtype == torch.bfloat16 for tensor in ours.values() if tensor.dim() == 2)
    assert {tuple(tensor.shape) for tensor in ours.values() if tensor.dim() != 2} == {(shape.width,)}


def test_the_config_comes_back_from_a_manifest() -> None:
    config, _ = canonical(tiny_tensors())
    assert (config.layers, config.width, config.vocab_size) == (2, 32, 256)
    assert config.extra["ranks"] == {"mix": 3, "decay": 5} and config.extra["ffn"] == 96
    model = {"layers": config.layers, "width": config.width, "vocab_size": config.vocab_size, **config.extra}
    assert Rwkv6Family().config_from_manifest(model) == config


MANIFEST = {
    "layers": 2, "width": 32, "vocab_size": 256, "heads": 2, "ffn": 96, "norm_eps": 1e-5, "group_norm_eps": 64e-5,
    "ranks": {"mix": 3, "decay": 5},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope": 1}, "rwkv6 needs"),
        ({"heads": None}, "rwkv6 needs"),
        ({"layers": 0}, "model.layers must be a whole number of at least 1, got 0"),
        ({"heads": 3}, "width 32 is not a multiple of heads 3"),
        ({"group_norm_eps": "64e-5"}, "model.group_norm_eps is '64e-5'"),
        ({"ranks": {"mix": 3}}, "model.ranks must name"),
        ({"ranks": {"mix": 3, "decay": True}}, "model.decay must be a whole number of at least 1"),
    ],
)
def test_manifests_are_read_strictly(change: dict[str, object], message: str) -> None:
    model = {key: value for key, value in {**MANIFEST, **change}.items() if value is not None}
    with pytest.raises(BundleError, match=message):
        Rwkv6Family().config_from_manifest(model)


def test_memory_is_told_before_loading() -> None:
    config, ours = canonical(tiny_tensors())
    told, model = Rwkv6Family().footprint(config), load(tiny_tensors(), "fp32")
    assert told["state"] == model.state_spec.slot_bytes == 4 * 2 * (32 + 2 * 16 * 16 + 32)
    assert told["fp32"] == 4 * sum(tensor.numel() for tensor in ours.values())


def test_a_tuned_initial_state_is_where_a_sequence_begins() -> None:
    model, shape = load(tiny_tensors()), (2, 16, 16)
    tuned = {f"blocks.{layer}.att.time_state": torch.randn(shape) for layer in range(2)}
    state = model.initial_state(TensorDict(tuned))
    for layer in range(2):
        stored = tuned[f"blocks.{layer}.att.time_state"].numpy()
        assert np.array_equal(state["wkv"][layer], stored.transpose(0, 2, 1))
    assert not state["att_shift"].any() and not state["ffn_shift"].any()
