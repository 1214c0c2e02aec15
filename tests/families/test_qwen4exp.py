"""qwen4exp: agreement with transformers, the laws by hash, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kittiwake.bench.qwen4exp_shapes import random_qwen4exp
from kittiwake.checkpoints.reader import open_checkpoint
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StateTable
from kittiwake.errors import BundleError, ModelError
from kittiwake.families.contract import Model, SequencesError
from kittiwake.families.qwen4exp.family import Qwen4ExpFamily
from kittiwake.load import load_model
from tests.families.agreement import run, same_run
from tests.families.qwen4exp_cases import CASES, ids_of
from tests.families.qwen4exp_layouts import write_hf
from tests.oracles import transformers_qwen4exp as oracle
from tests.oracles.measure import relative_error

FIXTURE = Path(__file__).parent.parent / "fixtures" / "qwen4exp_transformers.npz"
SHAPE, SEED = CASES["one n-gram layer"]
IDS = ids_of(SHAPE, SEED)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The HF folder of every case."""
    return {
        name: write_hf(tmp_path_factory.mktemp("hf"), shape, random_qwen4exp(shape, seed, torch.float32))
        for name, (shape, seed) in CASES.items()
    }


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, Model]:
    """Every case, loaded from its folder."""
    return {name: load(folder) for name, folder in folders.items()}


def load(folder: Path, threads: int = 2, dtype: str = "fp32") -> Model:
    return load_model(folder, EngineConfig(threads=threads, dtype=dtype)).model


def cut(total: int, seed: int) -> list[int]:
    """Lengths of pieces, at random."""
    rng, lengths = np.random.default_rng(seed), []
    while sum(lengths) < total:
        lengths.append(min(int(rng.integers(1, 20)), total - sum(lengths)))
    return lengths


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, models: dict[str, Model]) -> None:
    shape, seed = CASES[case]
    with np.load(FIXTURE) as fixture:
        expected = fixture[case]
    logits, _ = run(models[case], ids_of(shape, seed))
    assert relative_error(logits, expected) < 1e-5
    for position, (row, wanted) in enumerate(zip(logits, expected, strict=True)):
        assert relative_error(row, wanted) < 1e-5, position
    assert (logits.argmax(axis=1) == expected.argmax(axis=1)).all()


@pytest.mark.slow
@pytest.mark.skipif(not oracle.is_available(), reason=oracle.SKIP_REASON)
def test_transformers_still_gives_what_was_recorded(folders: dict[str, Path]) -> None:
    answer = oracle.run(folders["one n-gram layer"], IDS)
    with np.load(FIXTURE) as fixture:
        assert relative_error(answer, fixture["one n-gram layer"]) < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_pieces_of_any_size_give_the_same_bytes(case: str, models: dict[str, Model]) -> None:
    ids = ids_of(*CASES[case])
    whole = run(models[case], ids)
    sizes: list[list[int]] = [[1] * len(ids), [7] * 10 + [2], [64, 8], *(cut(len(ids), seed) for seed in range(4))]
    for pieces in sizes:
        assert same_run(run(models[case], ids, pieces), whole), pieces


def test_the_budget_is_crossed_at_any_alignment(models: dict[str, Model]) -> None:
    """Budget 8 in blocks of 4: the twelfth token is the first that does not see all before it."""
    model, ids = models["one n-gram layer"], IDS[:24]
    whole = run(model, ids)
    for first in range(5, 20):
        assert same_run(run(model, ids, [first, len(ids) - first]), whole), first
        assert same_run(run(model, ids, [first, 1, len(ids) - first - 1]), whole), first


def test_alone_and_in_a_crowd_are_the_same(models: dict[str, Model]) -> None:
    model = models["two n-gram layers"]
    ids = ids_of(*CASES["two n-gram layers"])
    alone = [run(model, ids[start:])[0][-1].tobytes() for start in (0, 20, 40)]
    table = StateTable(model.state_spec, 4, 8)
    slots = [table.allocate() for _ in range(3)]
    texts = [ids[start:] for start in (0, 20, 40)]
    # the first two sequences are some tokens ahead when the third comes
    model.forward(Batch.pack([(slots[0], texts[0][:13]), (slots[1], texts[1][:6])]), table)
    rest = [(slots[1], texts[1][6:]), (slots[0], texts[0][13:]), (slots[2], texts[2])]
    logits = model.forward(Batch.pack(rest), table)
    assert [row.tobytes() for row in logits] == [alone[1], alone[0], alone[2]]


def test_a_restored_state_goes_on_as_if_never_saved(models: dict[str, Model]) -> None:
    """Saved within a block of four and within an n-gram that an end has cut, restored to another slot."""
    model = models["one n-gram layer"]
    whole, _ = run(model, IDS)
    for first in (6, 7, 18, 21, 42):
        table = StateTable(model.state_spec, 3, 8)
        slot, other = table.allocate(), table.allocate()
        model.forward(Batch.pack([(slot, IDS[:first])]), table)
        saved = table.save(slot)
        model.forward(Batch.pack([(slot, IDS[::-1])]), table)
        table.restore(other, saved)
        logits = model.forward(Batch.pack([(other, IDS[first:])], [list(range(len(IDS) - first))]), table)
        assert logits.tobytes() == whole[first:].tobytes(), first


def test_threads_change_no_bit(folders: dict[str, Path], models: dict[str, Model]) -> None:
    whole = run(models["attention twice"], ids_of(*CASES["attention twice"]))
    for threads in (1, 3):
        model = load(folders["attention twice"], threads)
        assert same_run(run(model, ids_of(*CASES["attention twice"]), [5, 40, 1, 26]), whole), threads


def test_hidden_is_the_mean_of_the_streams_and_changes_nothing(models: dict[str, Model]) -> None:
    model = models["one n-gram layer"]
    plain = run(model, IDS[:20])
    table = StateTable(model.state_spec, 1, 2)
    hidden = {layer: np.full((20, SHAPE.width), np.nan, dtype=np.float32) for layer in range(SHAPE.layers + 1)}
    logits = model.forward(Batch.pack([(table.allocate(), IDS[:20])], [list(range(20))]), table, hidden=hidden)
    assert logits.tobytes() == plain[0].tobytes()
    assert all(np.isfinite(rows).all() for rows in hidden.values())


def test_a_row_that_cannot_be_read_ends_its_sequence_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    """The table's file is cut short behind the model's back: who needs the lost rows fails, the others go on."""
    shape, folder = SHAPE, tmp_path / "cut"
    tensors = random_qwen4exp(shape, SEED, torch.float32)
    write_hf(folder, shape, tensors, shards=3)
    model = load(folder)
    table = StateTable(model.state_spec, 2, 8)
    good, bad = table.allocate(), table.allocate()
    expected = model.forward(Batch.pack([(good, IDS[:9])]), table)
    name = next(path for path in folder.glob("*.safetensors") if any("shard_1" in one for one in load_file(path)))
    with name.open("r+b") as file:
        file.truncate(name.stat().st_size // 8)
    table.clear(good)
    # among so many tokens some rows lie in what was lost
    ids = np.random.default_rng(0).integers(8, 256, 200).tolist()
    with pytest.raises(SequencesError) as caught:
        model.forward(Batch.pack([(good, IDS[:9]), (bad, ids)]), table)
    assert bad in caught.value.errors
    if good not in caught.value.errors:
        assert caught.value.logits[0].tobytes() == expected[0].tobytes()


def refusal(folder: Path, **changes: Any) -> str:
    """What reading the config says when keys are changed."""
    path = folder / "config.json"
    stored = path.read_text(encoding="utf-8")
    try:
        path.write_text(json.dumps(json.loads(stored) | changes), encoding="utf-8")
        with pytest.raises(ModelError) as caught, open_checkpoint(folder) as source:
            Qwen4ExpFamily().read_config(source)
    finally:
        path.write_text(stored, encoding="utf-8")
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("hidden_act", "gelu", "hidden_act is 'gelu'; supported: 'silu'"),
        ("attention_bias", True, "attention_bias is True"),
        ("hc_count", 1, "hc_count is 1; supported: a whole number of at least 2"),
        ("indexer_kv_heads", 2, "indexer_kv_heads is 2"),
        ("indexer_budget", 10, "the budget of 10 tokens is no multiple of the block's 4"),
        ("num_experts_per_tok", 9, "9 experts a token are more than the 8 there are"),
        ("ple_layer_ids", [4], "layer 3 has n-grams and attends"),
        ("ple_layer_ids", [0], "ple_layer_ids is [0]"),
        ("ple_embed_dim", 30, "ple_embed_dim is 30; supported: a multiple of the 4 rows"),
        ("eos_token_id", None, "lacks the key eos_token_id"),
        ("eos_token_id", [0, 256], "eos_token_id is [0, 256], expected ids of tokens, 0 to 255"),
        ("eos_token_id", [0, -7], "eos_token_id is [0, -7], expected ids of tokens, 0 to 255"),
        ("seed", 99, "layer_multipliers"),
        ("layer_types", ["full_attention"], "layer_types is ['full_attention']; supported: one entry for each"),
        ("rope_parameters", {"rope_type": "yarn"}, "rope_parameters.rope_type is 'yarn'"),
        ("rope_parameters", {"rope_theta": 1e4, "base": 2}, "unknown key rope_parameters.base"),
        ("quantization_config", {"bits": 4}, "quantization_config"),
        ("sliding_window", 4, "unknown key sliding_window = 4"),
        ("hidden_size", "32", "hidden_size is '32'"),
        ("linear_num_value_heads", 5, "5 value heads are no multiple of 2 key heads"),
        ("num_hidden_layers", 3, "layer_types"),
        ("moe_intermediate_size", 16, "expected (8, 32, 32)"),
    ],
)
def test_a_config_that_is_not_implemented_is_refused_by_key(
    key: str, value: object, expected: str, folders: dict[str, Path]
) -> None:
    assert expected in refusal(folders["one n-gram layer"], **{key: value})


def test_ends_of_a_manifest_are_tokens_of_the_model(folders: dict[str, Path]) -> None:
    with open_checkpoint(folders["one n-gram layer"]) as source:
        config = Qwen4ExpFamily().read_config(source)
    model = {**config.extra, "layers": config.layers, "width": config.width, "vocab_size": config.vocab_size}
    assert Qwen4ExpFamily().config_from_manifest(model | {"end_ids": [0, 255]}).extra["end_ids"] == [0, 255]
    for ends in ([256], [-1], ["0"], 0):
        with pytest.raises(BundleError, match=r"model\.end_ids is .*, expected"):
            Qwen4ExpFamily().config_from_manifest(model | {"end_ids": ends})


def test_tensors_must_be_all_there_and_no_others(tmp_path: Path) -> None:
    tensors = random_qwen4exp(SHAPE, 0)
    folder = write_hf(tmp_path / "m", SHAPE, tensors)

    def refused(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, folder / "model.safetensors")
        return refusal(folder)

    gone = "model.layers.2.mlp.shared_expert_gate.weight"
    assert f"lacks the tensor {gone}" in refused({name: one for name, one in tensors.items() if name != gone})
    assert "model.layers.9.extra" in refused(tensors | {"model.layers.9.extra": torch.ones(2)})
    wrong = {"model.layers.0.linear_attn.A_log": torch.ones(5)}
    assert "A_log in" in refused(tensors | wrong) and "expected (6,)" in refused(tensors | wrong)
    shard = "model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight"
    assert "lacks its part 0" in refused({name: one for name, one in tensors.items() if name != shard})
    assert "rows in 2 parts" in refused(tensors | {shard: tensors[shard][1:].clone()})
    numbers = "model.layers.1.ple.ple_embedding.layer_multipliers"
    assert "layer_multipliers" in refused(tensors | {numbers: torch.tensor([1, 3, 5])})


def test_nested_folders_in_shards_with_drafts_give_the_same(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, drafts=1, ngram_parts=5)
    tensors = random_qwen4exp(shape, SEED, torch.float32)
    flat = run(load(write_hf(tmp_path / "flat", shape, tensors)), IDS[:30])
    nested = write_hf(tmp_path / "nested", shape, tensors, is_nested=True, shards=4)
    assert same_run(run(load(nested), IDS[:30]), flat)
    with open_checkpoint(nested) as source:
        family = Qwen4ExpFamily()
        config = family.read_config(source)
        kept = dict(family.canonical(source, config))
    assert config.extra["draft_layers"] == 1 and kept["draft.hidden"].shape == (32, 32)
    assert kept["draft.layers.0.attention.index_key"].shape == (8, 32)


def test_a_tuned_initial_state_is_refused(models: dict[str, Model], folders: dict[str, Path]) -> None:
    with open_checkpoint(folders["one n-gram layer"]) as source, pytest.raises(ModelError, match="no tuned initial"):
        models["one n-gram layer"].initial_state(source)
