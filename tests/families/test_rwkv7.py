"""RWKV-7: agreement with independent references, storage of weights, packed batches, and checkpoints that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import pytest
import torch

from kittiwake.bench.shapes import Rwkv7Shape, random_rwkv7, small
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StateTable
from kittiwake.errors import BundleError, ModelError
from kittiwake.families.contract import ModelConfig
from kittiwake.families.registry import family_named, recognise
from kittiwake.families.rwkv7 import Rwkv7Family
from kittiwake.load import TensorDict, load_tensors
from tests.families import agreement
from tests.families.agreement import Tensors, load, renamed, run
from tests.oracles import rwkv7_float64, rwkv_package
from tests.oracles.measure import random_ids, relative_error
from tests.tiny import SHAPE, run_alone, same_state, tiny_model, tiny_tensors

SHAPES = {
    "heads of 64": small(3, 128),
    "heads of 32, odd ranks": small(3, 96, 32, rank_w=3, rank_a=9, rank_v=5, rank_g=17),
    "heads of 16": small(4, 48, 16, rank_w=15, rank_a=2, rank_v=31, rank_g=1, vocab=256),
    "one layer": small(1, 64, 32),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
needs_rwkv = pytest.mark.skipif(not rwkv_package.is_available(), reason=rwkv_package.SKIP_REASON)


def assert_agrees(
    found: tuple[np.ndarray, dict[str, np.ndarray]],
    logits: np.ndarray,
    state: Mapping[str, np.ndarray],
    tolerance: float,
) -> None:
    """``state`` as the oracles have it, its matrices [V, K]; ours are [K, V]."""
    assert relative_error(found[0], logits) < tolerance
    for part, expected in state.items():
        mine = found[1][part].swapaxes(-1, -2) if part == "wkv" else found[1][part]
        assert mine.shape == expected.shape
        assert relative_error(mine, expected) < tolerance, part


# Agreement


@every_shape
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_and_states_are_those_of_the_equations_in_float64(shape: Rwkv7Shape, stored: torch.dtype) -> None:
    tensors, ids = random_rwkv7(shape, seed=shape.heads, dtype=stored), random_ids(shape, 70)
    logits, state = rwkv7_float64.run(tensors, ids)
    model = load(tensors)
    assert_agrees(run(model, ids), logits, state, 3e-6)
    # chunks of a wide batch, of a few rows and of one
    assert_agrees(run(model, ids, [33, 1, 7, 29]), logits, state, 3e-6)


@every_shape
def test_the_largest_error_of_a_logit_is_small_too(shape: Rwkv7Shape) -> None:
    tensors, ids = random_rwkv7(shape, seed=9), random_ids(shape, 70)
    logits, _ = rwkv7_float64.run(tensors, ids)
    found, _ = run(load(tensors), ids)
    assert np.abs(found - logits).max() < 1e-4
    assert np.array_equal(found.argmax(-1), logits.argmax(-1))


def test_a_long_prompt_stays_as_exact_as_a_short_one() -> None:
    shape = SHAPES["heads of 16"]
    tensors, ids = random_rwkv7(shape, seed=2), random_ids(shape, 700)
    logits, state = rwkv7_float64.run(tensors, ids)
    assert_agrees(run(load(tensors), ids), logits, state, 3e-6)


@needs_rwkv
@pytest.mark.parametrize("name", ["heads of 64", "heads of 32, odd ranks"])
def test_logits_and_states_are_those_of_the_rwkv_package(name: str) -> None:
    shape = SHAPES[name]
    tensors, ids = random_rwkv7(shape, seed=3), random_ids(shape, 40)
    theirs = rwkv_package.run(tensors, ids, cuts=(5, 6, 30))
    assert_agrees(run(load(tensors), ids), theirs.logits, theirs.state, 1e-5)


# Storage


@every_shape
def test_weights_kept_in_bfloat16_and_widened_have_the_same_bits(shape: Rwkv7Shape) -> None:
    tensors, ids = random_rwkv7(shape, seed=5), random_ids(shape, 40)
    narrow, wide = load(tensors, "bf16"), load(tensors, "fp32")
    assert narrow.weight_bytes * 2 == wide.weight_bytes
    for pieces in (None, [1, 36, 3]):
        (left, left_state), (right, right_state) = (run(model, ids, pieces) for model in (narrow, wide))
        assert left.tobytes() == right.tobytes()
        assert all(left_state[part].tobytes() == right_state[part].tobytes() for part in left_state)


@pytest.mark.parametrize(
    ("stored", "kept"), [(torch.float32, "fp32"), (torch.float16, "fp32"), (torch.bfloat16, "bf16")]
)
def test_auto_keeps_what_is_stored_without_loss(stored: torch.dtype, kept: str) -> None:
    tensors = random_rwkv7(SHAPE, seed=6, dtype=stored)
    loaded = load_tensors(tensors, EngineConfig(threads=2))
    assert loaded.dtype == kept
    widened = {name: tensor.float() for name, tensor in tensors.items()}
    ids = random_ids(SHAPE, 20)
    assert run(loaded.model, ids)[0].tobytes() == run(load(widened), ids)[0].tobytes()


def test_asking_for_bfloat16_rounds_float32_weights() -> None:
    tensors = random_rwkv7(SHAPE, seed=6, dtype=torch.float32)
    ids = random_ids(SHAPE, 20)
    found = run(load(tensors, "bf16"), ids)[0]
    products = ("emb.weight", "head.weight", "receptance.weight", "key.weight", "value.weight", "output.weight")
    products += tuple(f".{letter}{index}" for letter in "wavg" for index in "12")
    rounded = {n: t.bfloat16().float() if n.endswith(products) else t for n, t in tensors.items()}
    assert found.tobytes() == run(load(rounded), ids)[0].tobytes()
    assert found.tobytes() != run(load(tensors), ids)[0].tobytes()


def test_unused_tensors_of_the_first_layer_are_let_through_and_change_nothing() -> None:
    ids = random_ids(SHAPE, 12)
    plain, extra = (random_rwkv7(SHAPE, seed=7, unused_layer0=unused) for unused in (False, True))
    assert len(extra) == len(plain) + 3
    assert run(load(extra), ids)[0].tobytes() == run(load(plain), ids)[0].tobytes()


# Batches


def test_wanted_rows_are_picked_from_the_same_logits() -> None:
    model, ids = tiny_model().model, random_ids(SHAPE, 37)
    whole, state = run(model, ids)
    for wanted in ([36], [0], [], [0, 1, 2, 3, 4], [3, 17, 36], list(range(37))):
        table = StateTable(model.state_spec, 1)
        slot = table.allocate()
        found = model.forward(Batch.pack([(slot, ids)], [wanted]), table)
        assert found.shape == (len(wanted), 256) and found.dtype == np.float32
        assert found.tobytes() == whole[wanted].tobytes()
        assert all(table.save(slot).parts[name].tobytes() == part.tobytes() for name, part in state.items())


def test_a_batch_moves_the_slots_it_names_and_no_other() -> None:
    model = tiny_model().model
    table = StateTable(model.state_spec, 5)
    slots = [table.allocate() for _ in range(5)]
    for slot in slots:
        model.forward(Batch.pack([(slot, [slot])]), table)
    before = {slot: table.save(slot) for slot in slots}
    chosen = [(slots[3], [1, 2, 3]), (slots[0], [9])]
    logits = model.forward(Batch.pack(chosen), table)
    for slot in slots:
        assert same_state(table.save(slot), before[slot]) == (slot not in (slots[3], slots[0]))
    for row, (slot, ids) in zip(logits, chosen, strict=True):
        expected, state = run_alone(model, [slot, *ids])
        assert row.tobytes() == expected.tobytes() and same_state(table.save(slot), state)
    assert table.positions.tolist() == [0, *(1 + {slots[3]: 3, slots[0]: 1}.get(slot, 0) for slot in sorted(slots))]
    assert not any(table.part(name)[:, 0].any() for name in before[slots[0]].parts)  # the scratch slot


def test_logits_are_the_callers_to_change() -> None:
    model = tiny_model().model
    first, _ = run_alone(model, [1, 2, 3])
    table = StateTable(model.state_spec, 1)
    slot = table.allocate()
    logits = model.forward(Batch.pack([(slot, [1, 2, 3])]), table)
    logits[:] = np.nan
    model.forward(Batch.pack([(slot, [4])]), table)
    assert np.isnan(logits).all()
    assert run_alone(model, [1, 2, 3])[0].tobytes() == first.tobytes()


def test_what_was_picked_is_described() -> None:
    described = tiny_model(threads=2).model.describe()
    assert (described["device"], described["dtype"], described["threads"]) == ("cpu", "fp32", 2)
    found = {(row["depth"], row["columns"]) for row in described["products"]}
    ranks = {(32, rank) for rank in (3, 5, 4, 6)}
    assert found == ranks | {(rank, 32) for _, rank in ranks} | {(32, 32), (32, 128), (128, 32), (32, 256)}
    matrices = [t for n, t in tiny_tensors().items() if n != "emb.weight" and t.dim() == 2 and not n.endswith("r_k")]
    assert described["weight_bytes"] == 4 * sum(tensor.numel() for tensor in matrices)
    assert described["state_bytes"] == 4 * 2 * (32 + 2 * 16 * 16 + 32)


# Refusals


changed = partial(agreement.changed, tiny_tensors())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (changed(blocks__1__att__extra=torch.zeros(3)), r"tensors RWKV-7 does not have: blocks\.1\.att\.extra"),
        (changed(blocks__0__ffn__s_emb__weight=torch.zeros(256, 3)), r"does not have: blocks\.0\.ffn\.s_emb\.weight"),
        (changed(blocks__1__att__w1=None), r"lacks tensors of RWKV-7: blocks\.1\.att\.w1"),
        (changed(blocks__1__att__v0=None), r"lacks tensors of RWKV-7: blocks\.1\.att\.v0"),
        (changed(ln_out__bias=None, head__weight=None), r"lacks tensors of RWKV-7: head\.weight, ln_out\.bias"),
        (changed(emb__weight=None), r"lacks emb\.weight"),
        (changed(blocks__1__ln1__weight=torch.zeros(33)), r"blocks\.1\.ln1\.weight in \S+ has shape \(33,\), expected \(32,\)"),
        (changed(blocks__1__att__w1=torch.zeros(3, 32)), r"blocks\.1\.att\.w1 .* has shape \(3, 32\), expected \(32, 3\)"),
        (changed(blocks__1__att__x_r=torch.zeros(1, 32, 1)), r"blocks\.1\.att\.x_r .* has shape \(1, 32, 1\)"),
        (changed(blocks__1__att__r_k=torch.zeros(4, 8)), r"blocks\.1\.att\.r_k .* has shape \(4, 8\), expected \(2, 16\)"),
        (changed(blocks__0__att__r_k=torch.zeros(2, 15)), r"blocks\.0\.att\.r_k has shape \(2, 15\), whose product is not"),
        (changed(blocks__0__att__r_k=torch.zeros(32)), r"blocks\.0\.att\.r_k has shape \(32,\), expected 2 sizes"),
        (changed(blocks__0__att__w1=torch.zeros(32, 0)), r"blocks\.0\.att\.w1 has shape \(32, 0\)"),
        (changed(head__weight=torch.zeros(255, 32)), r"head\.weight .* has shape \(255, 32\), expected \(256, 32\)"),
        (changed(ln_out__weight=torch.zeros(32, dtype=torch.int8)), r"ln_out\.weight .* is torch\.int8"),
        (changed(ln_out__weight=torch.zeros(32, dtype=torch.float64)), r"ln_out\.weight .* is torch\.float64"),
        (renamed(tiny_tensors(), "blocks.1.", "blocks.2."), "layers up to 2, but layer 1 is missing"),
        (changed(blocks__99999__ln1__bias=torch.zeros(32)), "layers up to 99999, but layer 2 is missing"),
        ({**tiny_tensors(), "blocks." + "9" * 5000 + ".ln1.bias": torch.zeros(32)}, "tensors RWKV-7 does not have"),
        ({**tiny_tensors(), "blocks.01.ln1.bias": torch.zeros(32)}, r"does not have: blocks\.01\.ln1\.bias"),
        (renamed(tiny_tensors(), "att.x_r", "att.time_maa_r"), r"does not have: .*time_maa_r"),
    ],
)  # fmt: skip
def test_checkpoints_that_are_not_whole_are_refused_by_name(tensors: Tensors, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load(tensors)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("names", "guess"),
    [
        (("emb.weight", "blocks.0.att.time_maa_x", "blocks.0.att.lambda"), "RWKV-6"),
        (("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"), "a transformer"),
        (("transformer.h.0.attn.c_attn.weight",), "a transformer"),
        (("conv.weight",), "its tensors begin with conv.weight"),
    ],
)
def test_other_models_are_told_what_they_seem_to_be(names: tuple[str, ...], guess: str) -> None:
    with pytest.raises(ModelError, match=guess) as caught:
        recognise(TensorDict({name: torch.zeros(2, 2) for name in names}, "some.pth"))
    assert "rwkv7" in caught.value.hint and "some.pth" in caught.value.message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("emb.weight", "embedding.weight"),
        ("blocks.1.att.key.weight", "layers.1.time_mix.key.weight"),
        ("blocks.0.att.w2", "layers.0.time_mix.decay_up"),
        ("blocks.1.ffn.x_k", "layers.1.channel_mix.mix_k"),
        ("ln_out.bias", "output_norm.bias"),
    ],
)
def test_weights_that_are_not_finite_are_refused_by_name(name: str, ours: str, value: float) -> None:
    tensors = {**tiny_tensors(), name: tiny_tensors()[name].clone()}
    tensors[name].view(-1)[-1] = value
    with pytest.raises(ModelError, match=f"{ours} holds values that are not finite"):
        load(tensors)


# Canonical tensors


def canonical(tensors: Tensors) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    family, source = Rwkv7Family(), TensorDict(tensors)
    config = family.read_config(source)
    return config, dict(family.canonical(source, config))


@every_shape
def test_canonical_tensors_make_the_same_model(shape: Rwkv7Shape) -> None:
    tensors, ids = random_rwkv7(shape, seed=8), random_ids(shape, 20)
    config, ours = canonical(tensors)
    source = TensorDict(ours)
    source.format = "bundle"
    family = family_named("rwkv7")
    family.check_canonical(source, config)
    model = family.build(config, family.canonical(source, config), device="cpu", dtype="bf16", threads=2)
    assert run(model, ids)[0].tobytes() == run(load(tensors), ids)[0].tobytes()
    products = [tensor for tensor in ours.values() if tensor.dim() == 2]
    assert all(tensor.dtype == torch.bfloat16 for tensor in products)
    assert {tuple(tensor.shape) for tensor in ours.values() if tensor.dim() != 2} == {(shape.width,)}


def test_the_config_comes_back_from_a_manifest() -> None:
    config, _ = canonical(tiny_tensors())
    assert (config.layers, config.width, config.vocab_size) == (2, 32, 256)
    assert config.extra["ranks"] == {"decay": 3, "iclr": 5, "value_residual": 4, "gate": 6}
    model = {"layers": config.layers, "width": config.width, "vocab_size": config.vocab_size, **config.extra}
    assert Rwkv7Family().config_from_manifest(model) == config


MANIFEST = {
    "layers": 2, "width": 32, "vocab_size": 256, "heads": 2, "ffn": 128, "norm_eps": 1e-5, "group_norm_eps": 64e-5,
    "ranks": {"decay": 3, "iclr": 5, "value_residual": 4, "gate": 6},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope": 1}, "rwkv7 needs"),
        ({"heads": None}, "rwkv7 needs"),
        ({"layers": 0}, "model.layers must be a whole number of at least 1, got 0"),
        ({"layers": 2.0}, "model.layers must be a whole number"),
        ({"width": True}, "model.width must be a whole number"),
        ({"heads": 3}, "width 32 is not a multiple of heads 3"),
        ({"norm_eps": -1e-6}, "model.norm_eps is -1e-06"),
        ({"group_norm_eps": "64e-5"}, "model.group_norm_eps is '64e-5'"),
        ({"ranks": {"decay": 3}}, "model.ranks must name"),
        ({"ranks": [3, 5, 4, 6]}, "model.ranks must name"),
        ({"ranks": {**MANIFEST["ranks"], "gate": -1}}, "model.gate must be a whole number of at least 1"),  # type: ignore[dict-item]
        ({"ranks": {**MANIFEST["ranks"], "value_residual": 0}}, "model.value_residual must be"),  # type: ignore[dict-item]
    ],
)  # fmt: skip
def test_manifests_are_read_strictly(change: dict[str, object], message: str) -> None:
    model = {key: value for key, value in {**MANIFEST, **change}.items() if value is not None}
    with pytest.raises(BundleError, match=message):
        Rwkv7Family().config_from_manifest(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more.weight": torch.zeros(3)}, r"unknown more\.weight; missing none"),
        ({"head.weight": None}, r"unknown none; missing head\.weight"),
    ],
)
def test_a_bundle_holds_exactly_the_canonical_tensors(change: dict[str, torch.Tensor | None], message: str) -> None:
    config, ours = canonical(tiny_tensors())
    table = {name: tensor for name, tensor in {**ours, **change}.items() if tensor is not None}
    with pytest.raises(BundleError, match=message):
        Rwkv7Family().check_canonical(TensorDict(table), config)


def test_a_manifest_that_asks_for_a_billion_layers_is_refused_at_once() -> None:
    config = Rwkv7Family().config_from_manifest({**MANIFEST, "layers": 10**9})
    with pytest.raises(BundleError, match="asks for 1000000000 layers"):
        Rwkv7Family().check_canonical(TensorDict(canonical(tiny_tensors())[1]), config)


def test_a_model_that_was_not_given_every_tensor_says_which() -> None:
    config, ours = canonical(tiny_tensors())
    del ours["layers.1.time_mix.k_a"], ours["head.weight"]
    with pytest.raises(ModelError, match=r"tensors missing: head\.weight, layers\.1\.time_mix\.k_a"):
        Rwkv7Family().build(config, ours.items(), device="cpu", dtype="fp32", threads=2)


def test_families_are_found_by_name() -> None:
    assert family_named("rwkv7").name == "rwkv7"
    with pytest.raises(BundleError, match=r"family is 'rwkv9'; known: .*rwkv7"):
        family_named("rwkv9")


def test_loading_tells_its_progress() -> None:
    told: list[tuple[str, int, int]] = []
    load_tensors(tiny_tensors(), EngineConfig(threads=2), progress=lambda *step: told.append(step))
    for what in ("probing products", "loading tensors", "preparing kernels"):
        steps = [(done, total) for name, done, total in told if name == what]
        assert steps == sorted(steps) and steps[-1][0] == steps[-1][1] > 0
