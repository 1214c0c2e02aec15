from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kittiwake.bench.shapes import random_rwkv7, small

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
    assert report["tokenizer"]["kind"] == "bytes"
    assert len(report["digest"]) == 64
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
    assert _inspect(call, pth, "--no-digest")["digest"] is None


def test_a_damaged_file_is_exit_3(call: Call, pth: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "cut.pth"
    damaged.write_bytes(pth.read_bytes()[:5000])
    for path in (damaged, tmp_path / "gone.pth", tmp_path):
        (tmp_path / "other.pth").write_bytes(b"")  # two .pth files: the folder does not tell which is meant
        result = call("inspect", path, "--json")
        assert (result.code, result.stdout) == (3, "")
        assert result.stderr.startswith("error: ")
