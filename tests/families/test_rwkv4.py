"""RWKV-4: agreement with independent references, the law of exactness, and checkpoints that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

from kittiwake.bench.rwkv4_shapes import RWKV4_SHAPES, Rwkv4Shape, random_rwkv4
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StateTable
from kittiwake.errors import BundleError, ModelError, UsageError
from kittiwake.families.contract import Model, ModelConfig
from kittiwake.families.registry import family_named, recognise
from kittiwake.families.rwkv4 import Rwkv4Family
from kittiwake.load import Loaded, TensorDict, load_tensors
from kittiwake.ops.wkv4 import EMPTY_TOP
from kittiwake.text.bytes_level import BytesTokenizer
from kittiwake.verify.laws import LAWS, verify
from tests.families import agreement
from tests.families.agreement import Run, Tensors, run, same_run
from tests.oracles import rwkv4_float64, rwkv_package, transformers_rwkv4
from tests.oracles.measure import random_ids, relative_error
from tests.tiny import run_alone, same_state

FIXTURES = Path(__file__).parents[1] / "fixtures"
TINY = Rwkv4Shape(2, 32, 256)
SHAPES = {
    "width 64": Rwkv4Shape(3, 64, 256),
    "another width in the time mix": Rwkv4Shape(4, 48, 300, ffn=100, attention=40),
    "odd": Rwkv4Shape(2, 37, 257, ffn=61, attention=75),
    "one layer": Rwkv4Shape(1, 96, 256),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
needs_rwkv = pytest.mark.skipif(not rwkv_package.is_available(), reason=rwkv_package.SKIP_REASON)
needs_transformers = pytest.mark.skipif(not transformers_rwkv4.is_available(), reason=transformers_rwkv4.SKIP_REASON)


class AnyTokenizer(BytesTokenizer):
    """Goes with every vocabulary: these tests use ids only."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size


def load_whole(tensors: Tensors, **options: object) -> Loaded:
    config = EngineConfig(**{"threads": 2, **options})  # type: ignore[arg-type]
    return load_tensors(tensors, config, tokenizer=AnyTokenizer(tensors["emb.weight"].shape[0]))


def load(tensors: Tensors, **options: object) -> Model:
    return load_whole(tensors, **options).model


@cache
def tiny() -> Loaded:
    return load_whole(random_rwkv4(TINY, seed=4))


def assert_agrees(found: Run, logits: np.ndarray, state: Mapping[str, np.ndarray], tolerance: float) -> None:
    """Logits and every part of the state, each against the size of its own tensor."""
    assert relative_error(found[0], logits) < tolerance
    assert found[1].keys() == state.keys()
    assert (found[1]["den"] > 0).all()  # so the largest exponent means something everywhere
    for part, expected in state.items():
        assert found[1][part].shape == expected.shape
        assert relative_error(found[1][part], expected) < tolerance, part


# Agreement


@every_shape
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_and_states_are_those_of_the_equations_in_float64(shape: Rwkv4Shape, stored: torch.dtype) -> None:
    tensors, ids = random_rwkv4(shape, seed=shape.layers, dtype=stored), random_ids(shape, 75)
    logits, state = rwkv4_float64.run(tensors, ids)
    model = load(tensors)
    assert_agrees(run(model, ids), logits, state, 5e-6)
    assert np.array_equal(run(model, ids, [64, 11])[0].argmax(-1), logits.argmax(-1))


def test_large_keys_stay_finite_and_right() -> None:
    tensors, ids = random_rwkv4(SHAPES["width 64"], seed=3, key_gain=40.0), random_ids(SHAPES["width 64"], 75)
    logits, state = rwkv4_float64.run(tensors, ids)
    assert np.abs(state["top"]).max() > 89  # e^89 is beyond float32
    found = run(load(tensors), ids)
    assert np.isfinite(found[0]).all()
    # the exponents are known to 4e-6 of their unit only, and with them the weights
    assert_agrees(found, logits, state, 5e-5)


def test_the_trained_model_gives_its_published_logits() -> None:
    stored = dict(np.load(FIXTURES / "rwkv4_tiny.npz"))
    ids, published = stored.pop("ids").tolist(), stored.pop("logits")
    loaded = load_tensors({name: torch.from_numpy(values) for name, values in stored.items()}, EngineConfig(threads=2))
    assert (loaded.model.config.family, loaded.tokenizer.kind, bytes(ids)) == ("rwkv4", "bytes", b'"in')
    for pieces in (None, [1, 1, 1], [1, 2]):
        logits, _ = run(loaded.model, ids, pieces)
        assert np.abs(logits[-1] - published).max() < 5e-6
        assert int(logits[-1].argmax()) == int(published.argmax())


@needs_rwkv
@pytest.mark.parametrize(("key_gain", "tolerance"), [(2.0, 1e-5), (30.0, 5e-5)], ids=["plain", "large keys"])
def test_logits_and_states_are_those_of_the_rwkv_package(key_gain: float, tolerance: float) -> None:
    shape = SHAPES["width 64"]
    tensors, ids = random_rwkv4(shape, seed=3, dtype=torch.float32, key_gain=key_gain), random_ids(shape, 80)
    # a prompt in two parts, then five tokens one by one
    theirs = rwkv_package.run(tensors, ids, family="rwkv4", cuts=(64, 75, 76, 77, 78, 79))
    assert_agrees(run(load(tensors), ids), theirs.logits, theirs.state, tolerance)


RECORDED = Rwkv4Shape(layers=5, width=32, vocab=97)


def recorded(
    case: str, key_gain: float
) -> tuple[dict[str, torch.Tensor], list[int], np.ndarray, dict[str, np.ndarray]]:
    """The random checkpoint, the ids, and what transformers made of them."""
    fixture = np.load(FIXTURES / "rwkv4_hf.npz")
    parts = {name: fixture[f"{case}_{name}"] for name in transformers_rwkv4.PARTS}
    tensors = random_rwkv4(RECORDED, seed=21, dtype=torch.float32, key_gain=key_gain)
    return tensors, fixture["ids"].tolist(), fixture[f"{case}_logits"], parts


@pytest.mark.parametrize(("case", "key_gain", "tolerance"), [("plain", 2.0, 1e-5), ("large_keys", 30.0, 5e-5)])
def test_logits_and_states_are_those_of_transformers(case: str, key_gain: float, tolerance: float) -> None:
    tensors, ids, logits, parts = recorded(case, key_gain)
    assert_agrees(run(load(tensors), ids), logits, parts, tolerance)


def test_rescaling_as_transformers_does_it_is_met_by_the_option() -> None:
    tensors, ids, logits, parts = recorded("rescaled", 2.0)
    assert_agrees(run(load(tensors, rescale_every=2), ids), logits, parts, 1e-5)
    exact = run(load(tensors), ids)[0]
    assert relative_error(exact, logits) > 2e-5
    assert exact.tobytes() == run(load(tensors, rescale_every=0), ids)[0].tobytes()
    assert relative_error(rwkv4_float64.run(tensors, ids, rescale_every=2)[0], logits) < 1e-5


@pytest.mark.slow
@needs_transformers
def test_transformers_still_gives_what_was_recorded(tmp_path: Path) -> None:
    from tests.families.rwkv4_layouts import save_hf

    tensors, ids, logits, parts = recorded("rescaled", 2.0)
    folder = save_hf(tmp_path / "m", RECORDED, tensors, rescale_every=2)
    answer = transformers_rwkv4.run(folder, [ids[:64], ids[64:75], *([token] for token in ids[75:])])
    assert relative_error(answer.pop("logits"), logits) < 1e-6
    assert all(relative_error(answer[name], part) < 1e-5 for name, part in parts.items())


# The law


def test_every_cut_of_a_prompt_has_the_same_bits() -> None:
    model, ids = tiny().model, random_ids(TINY, 75)
    whole = run(model, ids)
    for first in range(1, 75):
        assert same_run(run(model, ids, [first, 75 - first]), whole), first
    assert same_run(run(model, ids, [1] * 75), whole)


@pytest.mark.parametrize("threads", [1, 3, 5, 7])
def test_threads_change_no_bit_of_a_prompt_in_pieces(threads: int) -> None:
    ids, tensors = random_ids(SHAPES["odd"], 75), random_rwkv4(SHAPES["odd"], seed=1)
    model = load(tensors, threads=threads)
    whole = run(model, ids)
    for pieces in ([64, 11], [1, 74], [30, 1, 1, 43]):
        assert same_run(run(model, ids, pieces), whole)


def test_a_sequence_in_a_crowd_has_the_bits_it_has_alone() -> None:
    model = tiny().model
    table = StateTable(model.state_spec, 6)
    prompts = [random_ids(TINY, count) for count in (3, 75, 1, 18, 7)]
    slots = [table.allocate() for _ in prompts]
    together = model.forward(Batch.pack(list(zip(slots, prompts, strict=True))), table)
    for row, slot, prompt in zip(together, slots, prompts, strict=True):
        alone, state = run_alone(model, prompt)
        assert row.tobytes() == alone.tobytes() and same_state(table.save(slot), state)


def test_a_slot_given_back_begins_anew() -> None:
    model = tiny().model
    table = StateTable(model.state_spec, 1)
    slot = table.allocate()
    fresh = table.save(slot)
    assert (fresh.parts["top"] == np.float32(EMPTY_TOP)).all() and not fresh.parts["den"].any()
    first = model.forward(Batch.pack([(slot, [1, 2, 3])]), table)
    table.free(slot)
    slot = table.allocate()
    assert same_state(table.save(slot), fresh)
    assert model.forward(Batch.pack([(slot, [1, 2, 3])]), table).tobytes() == first.tobytes()


@pytest.mark.slow
def test_verify_proves_the_model() -> None:
    results = verify(tiny(), EngineConfig(threads=2))
    assert [law.name for law in results] == list(LAWS)
    assert all(law.cases > 0 and law.differing == 0 for law in results)


# Storage


def test_weights_kept_in_bfloat16_and_widened_have_the_same_bits() -> None:
    tensors, ids = random_rwkv4(TINY, seed=5), random_ids(TINY, 40)
    narrow, wide = load(tensors, dtype="bf16"), load(tensors, dtype="fp32")
    assert narrow.weight_bytes * 2 == wide.weight_bytes
    assert same_run(run(narrow, ids), run(wide, ids, [1, 39]))


def test_what_a_state_and_a_step_cost_is_told() -> None:
    shape = SHAPES["another width in the time mix"]
    tensors = random_rwkv4(shape, seed=1)
    config, ours = canonical(tensors)
    footprint, described = Rwkv4Family().footprint(config), load(tensors, dtype="bf16").describe()
    assert footprint["state"] == described["state_bytes"] == 4 * 4 * (2 * 48 + 3 * 40)
    products = sum(tensor.numel() for name, tensor in ours.items() if tensor.dim() == 2 and "embedding" not in name)
    assert described["weight_bytes"] == 2 * products
    vectors = sum(tensor.numel() for tensor in ours.values() if tensor.dim() == 1)
    assert footprint["bf16"] == 2 * (products + 300 * 48) + 4 * vectors


# Refusals


changed = partial(agreement.changed, random_rwkv4(TINY, seed=4))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (changed(blocks__1__att__extra=torch.zeros(3)), r"tensors RWKV-4 does not have: blocks\.1\.att\.extra"),
        (changed(blocks__1__tiny_q__weight=torch.zeros(3, 3)), r"does not have: blocks\.1\.tiny_q\.weight"),
        (changed(blocks__1__att__time_mix_k=None), r"lacks tensors of RWKV-4: blocks\.1\.att\.time_mix_k"),
        (changed(ln_out__bias=None, head__weight=None), r"lacks tensors of RWKV-4: head\.weight, ln_out\.bias"),
        (changed(blocks__0__ln0__bias=None), r"lacks tensors of RWKV-4: blocks\.0\.ln0\.bias"),
        (changed(emb__weight=None), r"lacks emb\.weight"),
        (changed(blocks__1__ln1__weight=torch.zeros(33)), r"blocks\.1\.ln1\.weight in \S+ has shape \(33,\), expected \(32,\)"),
        (changed(blocks__1__att__time_decay=torch.zeros(2, 16)), r"time_decay .* has shape \(2, 16\), expected \(32,\)"),
        (changed(blocks__1__ffn__key__weight=torch.zeros(32, 128)), r"has shape \(32, 128\), expected \(128, 32\)"),
        (changed(blocks__0__att__key__weight=torch.zeros(32)), r"att\.key\.weight has shape \(32,\), expected 2 sizes"),
        (changed(ln_out__weight=torch.zeros(32, dtype=torch.int8)), r"ln_out\.weight .* is torch\.int8"),
        (changed(blocks__3__ln1__bias=torch.zeros(32)), "layers up to 3, but layer 2 is missing"),
    ],
)  # fmt: skip
def test_checkpoints_that_are_not_whole_are_refused_by_name(tensors: Tensors, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_tensors(tensors, EngineConfig(threads=2), tokenizer=AnyTokenizer(256))
    assert caught.value.exit_code == 3


def test_a_family_is_told_by_its_tensors() -> None:
    assert recognise(TensorDict(random_rwkv4(TINY, seed=4))).name == "rwkv4"
    for extra in ("att.ln_x.weight", "att.gate.weight", "att.time_faaaa", "att.time_maa_x"):
        source = TensorDict({**random_rwkv4(TINY, seed=4), f"blocks.0.{extra}": torch.zeros(32)})
        assert not Rwkv4Family().recognises(source)


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    tensors = changed(blocks__1__att__time_first=torch.full((32,), float("inf")))
    with pytest.raises(ModelError, match=r"layers\.1\.time_mix\.bonus holds values that are not finite"):
        load(tensors)


def test_there_are_no_tuned_states() -> None:
    source = TensorDict({"blocks.0.att.time_state": torch.zeros(2, 16, 16)}, "tuned.pth")
    with pytest.raises(ModelError, match=r"tuned\.pth cannot be an initial state of RWKV-4"):
        tiny().model.initial_state(source)


@pytest.mark.parametrize("every", [-1, 1.5, True, "6"])
def test_a_number_of_layers_that_cannot_be_is_refused(every: object) -> None:
    with pytest.raises(UsageError, match="rescale_every must be a whole number of layers"):
        EngineConfig(rescale_every=every)  # type: ignore[arg-type]


def test_constants_of_other_families_are_refused() -> None:
    with pytest.raises(UsageError, match=r"rwkv4 has no group norm, so group_norm_eps cannot be 0\.001"):
        load(random_rwkv4(TINY, seed=4), group_norm_eps=1e-3)


@pytest.mark.parametrize("sizes", [{"layers": 0}, {"width": -1}, {"ffn": -4}])
def test_shapes_that_cannot_be_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=f"RWKV-4 shape: {next(iter(sizes))} is"):
        Rwkv4Shape(**{"layers": 1, "width": 8, **sizes})


def test_the_published_sizes() -> None:
    counts = {name: shape.parameters for name, shape in RWKV4_SHAPES.items()}
    assert counts["rwkv4-169m"] == 169_342_464
    assert counts["rwkv4-430m"] == 430_397_440
    assert counts["rwkv4-1.5b"] == 1_515_106_304
    tensors = random_rwkv4(SHAPES["odd"], seed=0)
    assert SHAPES["odd"].parameters == sum(tensor.numel() for tensor in tensors.values())


# Canonical tensors


def canonical(tensors: Tensors) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    family, source = Rwkv4Family(), TensorDict(tensors)
    config = family.read_config(source)
    return config, dict(family.canonical(source, config))


@every_shape
def test_canonical_tensors_make_the_same_model(shape: Rwkv4Shape) -> None:
    tensors, ids = random_rwkv4(shape, seed=8), random_ids(shape, 20)
    config, ours = canonical(tensors)
    source = TensorDict({name: tensor.bfloat16() for name, tensor in ours.items()})  # as a bundle stores them
    family = family_named("rwkv4")
    family.check_canonical(source, config)
    model = family.build(config, family.canonical(source, config), device="cpu", dtype="bf16", threads=2)
    assert run(model, ids)[0].tobytes() == run(load(tensors), ids)[0].tobytes()


def test_the_config_comes_back_from_a_manifest() -> None:
    config, _ = canonical(random_rwkv4(SHAPES["odd"], seed=1))
    assert config.extra == {"attention": 75, "ffn": 61, "norm_eps": 1e-5, "rescale_every": 0, "end_ids": []}
    model = {"layers": config.layers, "width": config.width, "vocab_size": config.vocab_size, **config.extra}
    assert Rwkv4Family().config_from_manifest(model) == config


MANIFEST = {
    "layers": 2, "width": 32, "vocab_size": 256, "attention": 32, "ffn": 128, "norm_eps": 1e-5, "rescale_every": 0,
    "end_ids": [0],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 1}, "rwkv4 needs"),
        ({"attention": None}, "rwkv4 needs"),
        ({"layers": 0}, "model.layers must be a whole number of at least 1, got 0"),
        ({"attention": True}, "model.attention must be a whole number"),
        ({"norm_eps": 0}, "model.norm_eps is 0"),
        ({"rescale_every": -1}, "model.rescale_every must be a whole number of at least 0"),
        ({"end_ids": 0}, "model.end_ids must be a list of ids from 0 to 255, got 0"),
        ({"end_ids": [256]}, r"model.end_ids must be a list of ids from 0 to 255, got \[256\]"),
    ],
)
def test_manifests_are_read_strictly(change: dict[str, object], message: str) -> None:
    model = {key: value for key, value in {**MANIFEST, **change}.items() if value is not None}
    with pytest.raises(BundleError, match=message):
        Rwkv4Family().config_from_manifest(model)
