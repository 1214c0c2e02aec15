from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.config import EngineConfig
from kittiwake.load import load_model
from tests.families.layouts import save_fla, save_gguf

from .conftest import Call


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return random_rwkv7(small(), seed=1)


@pytest.fixture
def pth(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path = tmp_path / "tiny.pth"
    torch.save(tensors, path)
    return path


def _inspect(call: Call, *arguments: str | Path) -> dict[str, Any]:
    result = call("inspect", *arguments, "--json")
    assert result.code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_a_checkpoint_that_runs(call: Call, pth: Path, tensors: dict[str, torch.Tensor]) -> None:
    report = _inspect(call, pth)
    assert (report["format"], report["family"], report["runs"], report["why_not"]) == ("pth", "rwkv7", True, None)
    assert (report["config"]["layers"], report["config"]["width"], report["config"]["vocab_size"]) == (
        small().layers,
        128,
        256,
    )
    assert report["tensors"] == len(tensors)
    assert report["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert report["dtypes"] == {"bf16": len(tensors)}
    assert report["dtype_bytes"] == {"bf16": report["bytes"]} == {"bf16": 2 * report["parameters"]}
    assert (report["layout"], report["architecture"], report["metadata"]) == ("blinkdl", None, None)
    assert report["origins"]["group_norm_eps"] == "constant of blinkdl files"
    assert report["tokenizer"]["found_by"] == "the size of the vocabulary"
    assert report["tokenizer"]["kind"] == "bytes"
    assert len(report["files_sha256"]) == 64
    assert "[N, K]" in report["at_load"]
    assert "tensor by tensor" in report["at_load"]
    assert report["bundle"] is None


def test_text_ends_with_the_verdict(call: Call, pth: Path) -> None:
    result = call("inspect", pth, "--tensors")
    assert "\nemb.weight" in result.stdout
    assert "256 × 128" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("kittiwake runs it")


def test_a_model_of_no_known_family_is_described_all_the_same(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4)}, path)
    report = _inspect(call, path)
    assert (report["format"], report["family"], report["runs"], report["tensors"]) == ("safetensors", None, False, 1)
    assert "transformer" in report["why_not"]
    assert report["at_load"] is None


def test_a_tokenizer_that_cannot_be_told_is_the_reason(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "odd.pth"
    torch.save(random_rwkv7(small(vocab=300), seed=1), path)
    report = _inspect(call, path)
    assert (report["family"], report["runs"]) == ("rwkv7", False)
    assert "300 rows" in report["why_not"]
    assert _inspect(call, path, "--tokenizer", "bytes")["runs"] is True


def test_digest_can_be_left_out(call: Call, pth: Path) -> None:
    assert _inspect(call, pth, "--no-digest")["files_sha256"] is None


def test_a_damaged_file_is_exit_3(call: Call, pth: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "cut.pth"
    damaged.write_bytes(pth.read_bytes()[:5000])
    for path in (damaged, tmp_path / "gone.pth", tmp_path):
        (tmp_path / "other.pth").write_bytes(b"")  # two .pth files: the folder does not tell which is meant
        result = call("inspect", path, "--json")
        assert (result.code, result.stdout) == (3, "")
        assert result.stderr.startswith("error: ")


SHAPE = small(2, 64, rank_w=32, rank_a=24, rank_v=8, rank_g=12)


def test_memory_is_what_loading_takes(call: Call, pth: Path) -> None:
    model = load_model(pth, EngineConfig(threads=1)).model
    memory = _inspect(call, pth, "--no-digest")["memory"]
    assert memory["state_bytes"] == model.state_spec.slot_bytes
    assert memory["bf16_bytes"] > model.weight_bytes  # the embedding and the vectors beside the products
    matrices = memory["fp32_bytes"] - memory["bf16_bytes"]
    assert matrices == model.weight_bytes + 2 * 256 * 128


def test_a_gguf_file(call: Call, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "m.gguf", SHAPE, random_rwkv7(SHAPE, seed=1), "Q8_0", tokenizer="none")
    report = _inspect(call, path)
    assert (report["format"], report["architecture"], report["family"], report["layout"], report["runs"]) == (
        "gguf",
        "rwkv7",
        "rwkv7",
        "gguf",
        True,
    )
    assert report["dtypes"] == {"Q8_0": 14, "bf16": 12, "fp32": 36}
    assert sum(report["dtype_bytes"].values()) == report["bytes"] < path.stat().st_size
    assert report["dtype_bytes"]["Q8_0"] == 131_072 // 32 * 34
    assert report["origins"] == {
        "norm_eps": "metadata: rwkv7.attention.layer_norm_epsilon",
        "group_norm_eps": "constant of llama.cpp's rwkv7",
    }
    assert report["metadata"]["tokenizer.ggml.tokens"] == "256 values of string"
    text = call("inspect", path, "--no-digest").stdout
    assert "\n  Q8_0       14  139 kB\n" in text
    assert "\n  weights as bf16: " in text


def test_a_gguf_file_of_another_packing_is_described_with_the_exact_reason(call: Call, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "m.gguf", SHAPE, random_rwkv7(SHAPE, seed=1), "MXFP4")
    report = _inspect(call, path)
    assert (report["family"], report["runs"], report["config"], report["memory"]) == ("rwkv7", False, None, None)
    assert report["dtypes"]["MXFP4"] == 14
    assert "token_embd.weight" in report["why_not"]
    assert "is of the type MXFP4; kittiwake reads F32, F16, BF16, Q8_0" in report["why_not"]


def test_a_folder_whose_settings_are_not_implemented(call: Call, tmp_path: Path) -> None:
    folder = save_fla(tmp_path / "m", SHAPE, random_rwkv7(SHAPE, seed=1), hidden_act="gelu")
    report = _inspect(call, folder)
    assert (report["architecture"], report["family"], report["runs"]) == ("RWKV7ForCausalLM", "rwkv7", False)
    assert "hidden_act is 'gelu'; supported: 'sqrelu'" in report["why_not"]
    assert report["metadata"]["hidden_act"] == "gelu"


def test_another_epsilon_is_shown(call: Call, tmp_path: Path) -> None:
    folder = save_fla(tmp_path / "m", SHAPE, random_rwkv7(SHAPE, seed=1))
    assert _inspect(call, folder)["origins"]["group_norm_eps"] == "head size 64 × config.json: norm_eps"
    report = _inspect(call, folder, "--group-norm-eps", "1e-3")
    assert (report["config"]["group_norm_eps"], report["origins"]["group_norm_eps"]) == (
        1e-3,
        "option group_norm_eps",
    )
