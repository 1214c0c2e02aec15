"""The commands on real models: a tiny random one, and the packaged one once it is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kittiwake
from kittiwake.bench.shapes import random_rwkv7, small

from .conftest import Call

DEMO = Path(kittiwake.__file__).parent / "demo"
needs_packaged_model = pytest.mark.skipif(
    not any(DEMO.rglob("manifest.json")), reason="kittiwake/demo holds no bundle yet"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random RWKV-7 of two layers whose tokens are bytes."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.pth"
    torch.save(random_rwkv7(small(), seed=3), path)
    return path


def _json(call: Call, *arguments: str | Path, code: int = 0) -> Any:
    result = call(*arguments, "--json")
    assert result.code == code, result.stderr
    return json.loads(result.stdout)


def test_answer_is_the_same_streamed_whole_chunked_and_in_another_process(call: Call, tiny: Path) -> None:
    arguments = ("run", tiny, "--prompt", "Once upon a time", "--max-tokens", "24", "--seed", "5")
    whole = _json(call, *arguments)
    assert whole["completion_tokens"] == len(whole["token_ids"]) == 24
    assert (whole["prompt_tokens"], whole["finish_reason"]) == (16, "length")
    assert all(value >= 0 for value in whole["timings"].values())
    for chunk in ("1", "5"):
        assert _json(call, *arguments, "--chunk", chunk)["token_ids"] == whole["token_ids"]
    assert call(*arguments).stdout == whole["text"] + "\n"
    line = [sys.executable, "-m", "kittiwake", *map(str, arguments), "--json"]
    other = json.loads(subprocess.run(line, check=True, capture_output=True, text=True).stdout)
    assert other["token_ids"] == whole["token_ids"]


def test_verify_proves_a_tiny_model(call: Call, tiny: Path) -> None:
    report = _json(call, "verify", tiny)
    assert report["ok"] is True
    assert sum(law["cases"] for law in report["laws"]) >= 100


def test_bench_times_a_tiny_model(call: Call, tiny: Path) -> None:
    rows = _json(call, "bench", tiny, "--cases", "1x1,3x7", "--repeat", "2")
    assert [(row["batch"], row["tokens"]) for row in rows] == [(1, 1), (3, 7)]
    trip = _json(call, *f"bench {tiny} --prompt 9 --generate 4 --depth 5 --repeat 1".split())
    assert trip["decode"]["tok_s"] > 0


def test_doctor_tells_what_was_picked(call: Call, tiny: Path) -> None:
    report = _json(call, "doctor", tiny)
    assert report["model"]["family"] == "rwkv7"
    assert report["model"]["picked"]


def test_lambada_answers_alike_at_every_batch_size(call: Call, tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"passage {index} ends here"}) + "\n" for index in range(7)))
    lines = []
    for batch in ("1", "3"):
        out = tmp_path / f"answers-{batch}.jsonl"
        assert _json(call, "eval", "lambada", tiny, "--data", data, "--batch", batch, "--out", out)["total"] == 7
        lines.append([{**json.loads(line), "wall_ms": 0} for line in out.read_text().splitlines()])
    assert lines[0] == lines[1]


def test_bits_of_a_random_model_are_about_those_of_chance(call: Call, tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It was a dark and stormy night. " * 8)
    report = _json(call, "eval", "bits", text, tiny)
    assert report["bytes"] == report["tokens"] == 256
    assert 4 < report["bits_per_byte"] < 16


def test_a_checkpoint_becomes_a_bundle_that_answers_and_proves_itself(call: Call, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    result = call("build", tiny, "-o", out, "--precision", "bf16", "--goldens", "2")
    assert result.code == 0, result.stderr
    arguments = ("--prompt", "Hello", "--max-tokens", "8")
    assert _json(call, "run", out, *arguments)["token_ids"] == _json(call, "run", tiny, *arguments)["token_ids"]
    report = _json(call, "inspect", out)
    assert (report["format"], report["runs"], report["bundle"]["goldens"]) == ("bundle", True, 2)
    assert _json(call, "verify", out)["ok"] is True
    again = call("build", tiny, "-o", out)
    assert again.code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle"]


def test_a_truncated_checkpoint_is_exit_3_and_leaves_nothing(call: Call, tiny: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.pth"
    cut.write_bytes(tiny.read_bytes()[:20_000])
    for arguments in (("run", cut, "--prompt", "x", "--json"), ("build", cut, "-o", tmp_path / "out")):
        result = call(*arguments)
        assert (result.code, result.stdout) == (3, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.pth"]


@needs_packaged_model
def test_packaged_model_writes_english(call: Call) -> None:
    answer = _json(call, "run", "--prompt", "It was a dark night, and the old house by the sea", "--max-tokens", "60")
    words = answer["text"].split()
    assert len(words) > 20
    assert sum(word.strip('.,;:!?"').isalpha() for word in words) > 0.8 * len(words)


@needs_packaged_model
def test_packaged_model_is_inspected_and_runs(call: Call) -> None:
    report = _json(call, "inspect", next(DEMO.rglob("manifest.json")).parent)
    assert (report["runs"], report["bundle"]["precision"]) == (True, "bf16")


@needs_packaged_model
@pytest.mark.slow
def test_packaged_model_is_exact(call: Call) -> None:
    report = _json(call, "verify")
    assert report["ok"] is True
    assert sum(law["cases"] for law in report["laws"]) >= 100
