from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Call, FakeLLM


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three passages; the fake answers "the" to each."""
    path = tmp_path / "lambada.jsonl"
    golds = ("the", "The", "cat")
    path.write_text("".join(json.dumps({"text": f"passage ends with {gold}"}) + "\n" for gold in golds))
    return path


def test_lambada_json(call: Call, llm: FakeLLM, data: Path) -> None:
    result = call("eval", "lambada", "--data", data, "--json")
    assert result.code == 0
    figures = json.loads(result.stdout)
    assert figures.keys() == {"correct", "total", "accuracy", "p50_ms", "p99_ms", "bos", "batch"}
    assert (figures["correct"], figures["total"], figures["accuracy"]) == (1, 3, pytest.approx(1 / 3))
    assert (figures["bos"], figures["batch"]) == (False, 1)


def test_lambada_writes_a_line_for_each_passage(call: Call, llm: FakeLLM, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    result = call("eval", "lambada", "some.pth", "--data", data, "--limit", "2", "--batch", "2", "--out", out)
    assert result.code == 0
    assert "1 of 2 last words, 50.00 %" in result.stdout
    assert "bos off, batch 2" in result.stdout
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["index"], row["gold"], row["predicted"], row["correct"]) for row in rows] == [
        (0, "the", "the", True),
        (1, "The", "the", False),
    ]
    assert llm.opened[0][1]["config"].slots == 2


def test_lambada_never_overwrites(call: Call, llm: FakeLLM, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    out.write_text("precious")
    result = call("eval", "lambada", "--data", data, "--out", out, "--json")
    assert (result.code, result.stdout) == (2, "")
    assert out.read_text() == "precious"
    assert llm.opened == []


def test_lambada_needs_readable_data(call: Call, llm: FakeLLM, tmp_path: Path) -> None:
    assert call("eval", "lambada").code == 2
    assert call("eval", "lambada", "--data", tmp_path / "gone.jsonl").code == 3
    assert llm.opened == []


def test_bits_json_and_text(call: Call, llm: FakeLLM, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("abcde")
    result = call("eval", "bits", path, "--bos", "--json")
    assert result.code == 0
    document = json.loads(result.stdout)
    assert document == {
        "bits_per_byte": 2.0,
        "bits": 10.0,
        "bytes": 5,
        "tokens": 5,
        "perplexity": 4.0,
        "bos": True,
        "documents": [
            {"title": "book.txt", "bytes": 5, "tokens": 5, "bits": 10.0, "bits_per_byte": 2.0, "perplexity": 4.0}
        ],
    }
    text = call("eval", "bits", path).stdout
    assert "bos off: first token of a document counted at log2 of the vocabulary" in text
    assert call("eval", "bits", tmp_path / "gone.txt").code == 3
