"""run with states: saved, gone on with, tuned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kittiwake.bench.shapes import random_rwkv7, small

from .conftest import Call, FakeLLM


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.pth"
    torch.save(random_rwkv7(small(2, 64, 16), seed=3), path)
    return path


def _run(call: Call, model: Path, *more: str | Path, tokens: int = 6) -> Any:
    result = call("run", model, "--json", "--temperature", "0", "--ignore-eos", "--max-tokens", str(tokens), *more)
    assert result.code == 0, result.stderr
    return json.loads(result.stdout)


def test_saved_and_gone_on_with_is_one_answer(call: Call, tiny: Path, tmp_path: Path) -> None:
    whole = _run(call, tiny, "--prompt", "Once upon a time", tokens=12)
    first = _run(call, tiny, "--prompt", "Once upon a time", "--save-state", tmp_path / "a.state")
    assert first["state"] == {"file": str(tmp_path / "a.state"), "position": 22}
    rest = _run(call, tiny, "--load-state", tmp_path / "a.state", "--prompt", "", "--save-state", tmp_path / "b.state")
    assert first["token_ids"] + rest["token_ids"] == whole["token_ids"]
    assert rest["state"]["position"] == 28
    streamed = call("run", tiny, "-t", "0", "-n", "6", "--ignore-eos", "--load-state", tmp_path / "a.state", "-p", "")
    assert (streamed.code, streamed.stdout) == (0, rest["text"] + "\n")


def test_a_streamed_answer_saves_its_state_too(call: Call, tiny: Path, tmp_path: Path) -> None:
    result = call("run", tiny, "-t", "0", "-n", "3", "--ignore-eos", "-p", "ab", "--save-state", tmp_path / "a.state")
    assert result.code == 0
    _run(call, tiny, "-p", "ab", "--save-state", tmp_path / "b.state", tokens=3)
    assert (tmp_path / "a.state").read_bytes() == (tmp_path / "b.state").read_bytes()


def test_a_tuned_state_begins_an_answer(call: Call, tiny: Path, tmp_path: Path) -> None:
    torch.save({f"blocks.{i}.att.time_state": torch.randn(4, 16, 16) for i in range(2)}, tmp_path / "tuned.pth")
    answers = [
        _run(call, tiny, "--prompt", "abc", *more)["token_ids"]
        for more in (
            (),
            ("--initial-state", tmp_path / "tuned.pth"),
            ("--initial-state", tmp_path / "tuned.pth", "--transpose-state"),
        )
    ]
    assert answers[0] != answers[1] != answers[2]


def test_contradictions_and_taken_names_are_told_before_the_work(call: Call, llm: FakeLLM, tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"precious")
    for wrong in (
        ("--load-state", "a", "--initial-state", "b"),
        ("--transpose-state",),
        ("--save-state", tmp_path / "taken"),
        ("--save-state", tmp_path / "no" / "folder"),
        ("--save-state", tmp_path / "new", "--n", "2"),
    ):
        result = call("run", "--prompt", "x", *wrong)
        assert (result.code, result.stdout) == (2, ""), wrong
    assert call("run", "--prompt", "").code == 2
    assert llm.opened == []
    assert (tmp_path / "taken").read_bytes() == b"precious"


def test_a_bad_state_file_is_a_bad_input_file(call: Call, tiny: Path, tmp_path: Path) -> None:
    for option in ("--load-state", "--initial-state"):
        result = call("run", tiny, "--prompt", "x", option, tmp_path / "gone")
        assert (result.code, result.stdout) == (3, "")
        assert "does not exist" in result.stderr
