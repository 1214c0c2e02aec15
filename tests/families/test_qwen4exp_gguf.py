"""qwen4exp in GGUF files, written as a converter does: the same answers as the HF folder's, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from kittiwake.bench.qwen4exp_shapes import random_qwen4exp
from kittiwake.checkpoints.reader import open_checkpoint
from kittiwake.config import EngineConfig
from kittiwake.errors import ModelError
from kittiwake.families.contract import Model
from kittiwake.families.qwen4exp.family import Qwen4ExpFamily
from kittiwake.load import load_model
from tests.families.agreement import run, same_run
from tests.families.qwen4exp_cases import CASES, ids_of
from tests.families.qwen4exp_layouts import write_gguf, write_hf
from tests.oracles.measure import relative_error

CASE = "one n-gram layer"
SHAPE, SEED = dataclasses.replace(CASES[CASE][0], drafts=1), CASES[CASE][1]
IDS = ids_of(SHAPE, SEED)
FIXTURE = Path(__file__).parent.parent / "fixtures" / "qwen4exp_transformers.npz"


def load(path: Path) -> Model:
    return load_model(path, EngineConfig(threads=2, dtype="fp32")).model


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    tensors = random_qwen4exp(SHAPE, SEED, torch.float32)
    model = load(write_gguf(tmp_path / "m.gguf", SHAPE, tensors))
    logits, _ = found = run(model, IDS)
    with np.load(FIXTURE) as fixture:
        expected = fixture[CASE]
    assert relative_error(logits, expected) < 1e-5
    assert (logits.argmax(axis=1) == expected.argmax(axis=1)).all()
    assert same_run(run(model, IDS, [1] * 20 + [52]), found)


@pytest.mark.parametrize("packed", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16, GGMLQuantizationType.BF16])
def test_packed_weights_are_those_of_a_folder_that_holds_them_unpacked(
    packed: GGMLQuantizationType, tmp_path: Path
) -> None:
    """Canonical tensors of both, one by one; rounding is the packing's alone."""
    tensors = random_qwen4exp(SHAPE, SEED, torch.float32)
    family = Qwen4ExpFamily()
    with (
        open_checkpoint(write_gguf(tmp_path / "m.gguf", SHAPE, tensors, packed=packed)) as gguf,
        open_checkpoint(write_hf(tmp_path / "hf", SHAPE, tensors)) as folder,
    ):
        found = dict(family.canonical(gguf, family.read_config(gguf)))
        expected = dict(family.canonical(folder, family.read_config(folder)))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        assert relative_error(found[name].float().numpy(), tensor.float().numpy()) < 0.01, name


def refusal(path: Path, changes: dict[str, Any]) -> str:
    """What reading the config of a file with changed metadata says."""
    write_gguf(path, SHAPE, random_qwen4exp(SHAPE, 0, torch.float32), changes=changes)
    with pytest.raises(ModelError) as caught, open_checkpoint(path) as source:
        Qwen4ExpFamily().read_config(source)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("attention.value_length", 8, "attention.value_length is 8"),
        ("full_attention_interval", 2, "full_attention_interval is 2"),
        ("attention.compress_ratios", [0, 4, 0, 4, 0], "attention.compress_ratios"),
        ("ple.layers", [1, 2], "one layer"),
        ("ple.head_offsets", [0, 53, 112, 170], "ple.head_offsets"),
        ("ple.layer_multipliers", [1, 3], "2 multipliers"),
        ("expert_gating_func", 2, "unknown key qwen4exp.expert_gating_func = 2"),
        ("ssm.inner_size", 71, "ssm.inner_size is 71"),
        ("expert_count", 9, "expected (9, 32)"),
    ],
)
def test_metadata_that_is_not_implemented_is_refused_by_key(
    key: str, value: object, expected: str, tmp_path: Path
) -> None:
    assert expected in refusal(tmp_path / "m.gguf", {key: value})
