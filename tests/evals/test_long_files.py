"""A file too long to hold: the same figures as in one go."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.cli.main import main
from kittiwake.errors import InputFileError
from kittiwake.evals import bits
from kittiwake.llm import LLM

TEXT = "Once upon a time, d\u00e9j\u00e0 vu \u65e5\u672c\r\n" * 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.pth"
    torch.save(random_rwkv7(small(2, 64, 16), seed=2), path)
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, threads=1)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "LONG_BYTES", 100)
    monkeypatch.setattr(bits, "BLOCK_CHARS", 77)


def test_block_by_block_gives_the_figures_of_the_whole(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(TEXT.encode())
    assert bits.is_long(path)
    seen: list[tuple[str, int, int]] = []
    long = bits.score_long_file(llm, path, progress=lambda *step: seen.append(step))
    whole = bits.score_document(llm, bits.Document("book.txt", TEXT), None)
    assert (long.title, long.utf8_bytes, long.tokens) == (whole.title, whole.utf8_bytes, whole.tokens)
    assert long.bits == pytest.approx(whole.bits, rel=1e-14)
    assert seen[-1] == ("scoring", len(TEXT.encode()), len(TEXT.encode()))


def test_pieces_are_scored_bit_for_bit(llm: LLM) -> None:
    ids = np.random.default_rng(0).integers(0, 256, 700).tolist()
    pieces = [ids[:1], ids[1:300], [], ids[300:301], ids[301:]]
    assert np.concatenate(list(llm.score_stream(pieces))).tobytes() == llm.score(ids).tobytes()


def test_command_gives_the_same_either_way(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(TEXT.encode())
    found = []
    for limit in (100, 1 << 20):
        monkeypatch.setattr(bits, "LONG_BYTES", limit)
        assert main(["eval", "bits", str(path), str(model), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]


def test_what_is_no_text_is_told(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 " * 60)
    with pytest.raises(InputFileError, match="not UTF-8"):
        bits.score_long_file(llm, path)
    assert not bits.is_long(tmp_path / "gone.txt")
