from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kittiwake.engine.request import Completion
from kittiwake.errors import InputFileError
from kittiwake.evals.bits import Document, read_documents, score_document, score_documents, totals


class Tokenizer:
    kind = "fake"
    vocab_size = 1024
    eos_ids: tuple[int, ...] = (999,)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return [ord(character) for character in text]


class Quarter:
    """Gives every token a probability of a quarter: two bits."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer()
        self.vocab_size = 1024
        self.scored: list[list[int]] = []

    def generate(self, prompts: Any, params: Any) -> list[Completion]:
        raise NotImplementedError

    def score(self, ids: Sequence[int]) -> np.ndarray:
        self.scored.append(list(ids))
        return np.full(len(ids) - 1, math.log(0.25))


def test_first_token_costs_log2_of_the_vocabulary_without_a_begin_token() -> None:
    one = score_document(Quarter(), Document("a", "abcd"), None)
    assert (one.utf8_bytes, one.tokens) == (4, 4)
    assert one.bits == pytest.approx(10 + 3 * 2)


def test_first_token_is_scored_after_a_begin_token() -> None:
    model = Quarter()
    one = score_document(model, Document("a", "abcd"), 999)
    assert one.bits == pytest.approx(4 * 2)
    assert model.scored == [[999, 97, 98, 99, 100]]


def test_a_document_of_one_token_needs_no_model() -> None:
    model = Quarter()
    assert score_document(model, Document("a", "x"), None).bits == 10.0
    assert model.scored == []


def test_bytes_are_counted_not_tokens_or_characters() -> None:
    one = score_document(Quarter(), Document("a", "éé"), 999)
    assert (one.utf8_bytes, one.tokens, one.document()["bits_per_byte"]) == (4, 2, 1.0)


def test_total_weighs_documents_by_their_bytes() -> None:
    model = Quarter()
    seen: list[tuple[str, int, int]] = []
    scored = score_documents(
        model, [Document("a", "ab"), Document("b", "éé")], bos=True, progress=lambda *step: seen.append(step)
    )
    assert [len(ids) for ids in model.scored] == [3, 3], "every document starts from an empty state"
    assert totals(scored) == {
        "bits_per_byte": pytest.approx(8 / 6, abs=1e-6),
        "bits": 8.0,
        "bytes": 6,
        "tokens": 4,
        "perplexity": 4.0,
    }
    assert seen == [("scoring", 0, 6), ("scoring", 2, 6), ("scoring", 6, 6)]


def test_documents_from_files(tmp_path: Path) -> None:
    plain = tmp_path / "book.txt"
    plain.write_bytes(b"line\r\nend\n")
    assert read_documents(plain) == [Document("book.txt", "line\r\nend\n")]
    lines = tmp_path / "books.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ({"text": "x"}, {"text": ""}, {"text": "y"})))
    assert read_documents(lines) == [Document("line 1", "x"), Document("line 3", "y")]
    assert read_documents(lines, 1) == [Document("line 1", "x")]
    plain.write_bytes(b"")
    with pytest.raises(InputFileError, match="no text"):
        read_documents(plain)
