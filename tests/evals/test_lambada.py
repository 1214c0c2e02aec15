from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kittiwake.engine.request import Completion, SamplingParams
from kittiwake.errors import InputFileError, UsageError
from kittiwake.evals.lambada import (
    Answer,
    Passage,
    answer_passages,
    first_word,
    is_right,
    read_passages,
    split_passage,
    summarize,
)


@pytest.mark.parametrize(
    ("text", "prompt", "gold"),
    [
        ("She gave it to Tom", "She gave it to", "Tom"),
        ('and then he said, "Nadia', "and then he said,", '"Nadia'),
        ("two  spaces", "two", "spaces"),
        ("the house\nof\n\nPower", "the", "house\nof\n\nPower"),
        (" lead and last", " lead and", "last"),
    ],
)
def test_prompt_ends_before_the_last_space(text: str, prompt: str, gold: str) -> None:
    assert split_passage(text) == (prompt, gold)


@pytest.mark.parametrize("text", ["", "word", " word", "  ", "word ", "two words "])
def test_a_passage_without_two_words_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a last word"):
        split_passage(text)


@pytest.mark.parametrize(
    ("continuation", "word"),
    [
        (" Tom and then", "Tom"),
        ("Tom", "Tom"),
        ("\n\n  Tom\n", "Tom"),
        (' Tom."', "Tom"),
        (" Tom.’” he", "Tom"),
        (" Tom)]}!?;:,", "Tom"),
        ("'s hat", "'s"),
        (' "Tom', '"Tom'),
        (" don't!", "don't"),
        (" U.S.", "U.S"),
        (" well-known…", "well-known…"),
        (" ...", ""),
        ('"', ""),
        ("", ""),
        ("   \n", ""),
        ("\u00a0Tom", "Tom"),
    ],
)
def test_first_word_loses_closing_punctuation_only_at_its_end(continuation: str, word: str) -> None:
    assert first_word(continuation) == word


@pytest.mark.parametrize(
    ("continuation", "gold", "right"),
    [
        (" Tom.", "Tom", True),
        (" tom", "Tom", False),
        (" Tommy", "Tom", False),
        (" To", "Tom", False),
        (' "Tom"', "Tom", False),
        (' "Nadia,', '"Nadia', True),
        (" the Tom", "Tom", False),
        ("", "", False),
        (" ...", "", False),
    ],
)
def test_only_the_exact_word_is_right(continuation: str, gold: str, right: bool) -> None:
    assert is_right(continuation, gold) is right


class Tokenizer:
    kind = "fake"
    vocab_size = 300
    eos_ids: tuple[int, ...] = (0,)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return list(text.encode())


class Parrot:
    """Says the last word of its prompt again."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer()
        self.vocab_size = 300
        self.calls: list[list[str | Sequence[int]]] = []

    def generate(self, prompts: Sequence[str | Sequence[int]], params: SamplingParams) -> list[Completion]:
        assert (params.max_tokens, params.temperature) == (8, 0.0)
        self.calls.append(list(prompts))
        texts = [prompt if isinstance(prompt, str) else bytes(prompt[1:]).decode() for prompt in prompts]
        return [Completion(f" {text.split()[-1]}.", (1, 2), len(text), "length") for text in texts]

    def score(self, ids: Sequence[int]) -> np.ndarray:
        raise NotImplementedError


PASSAGES = [Passage(0, "Anna met Tom", "Tom"), Passage(1, "Tom met Anna", "Bob"), Passage(2, "x Eve", "Eve")]


def test_batch_size_changes_no_answer() -> None:
    alone, together, wide = Parrot(), Parrot(), Parrot()
    one = list(answer_passages(alone, PASSAGES, batch=1))
    two = list(answer_passages(together, PASSAGES, batch=2))
    nine = list(answer_passages(wide, PASSAGES, batch=9))
    assert [len(call) for call in alone.calls] == [1, 1, 1]
    assert [len(call) for call in together.calls] == [2, 1]
    assert [len(call) for call in wide.calls] == [3]
    without_time = [[{**answer.document(), "wall_ms": 0} for answer in run] for run in (one, two, nine)]
    assert without_time[0] == without_time[1] == without_time[2]
    assert [answer.correct for answer in one] == [True, False, True]


def test_bos_stands_before_the_passage_and_only_when_asked() -> None:
    parrot = Parrot()
    list(answer_passages(parrot, PASSAGES[:1], bos=True))
    assert parrot.calls == [[[0, *b"Anna met Tom"]]]
    parrot.tokenizer.eos_ids = ()
    with pytest.raises(UsageError, match="no end-of-text token"):
        list(answer_passages(parrot, PASSAGES, bos=True))


def test_progress_counts_passages() -> None:
    seen: list[tuple[str, int, int]] = []
    list(answer_passages(Parrot(), PASSAGES, batch=2, progress=lambda *step: seen.append(step)))
    assert seen == [("passages", 2, 3), ("passages", 3, 3)]


def _answer(correct: bool, wall_ms: float) -> Answer:
    return Answer(0, "a", "a", correct, "a", (), 1, wall_ms)


def test_summary() -> None:
    answers = [_answer(index < 25, float(index)) for index in range(100)]
    figures = summarize(answers)
    assert figures == {"correct": 25, "total": 100, "accuracy": 0.25, "p50_ms": 49.5, "p99_ms": pytest.approx(98.01)}
    with pytest.raises(ValueError, match="no answers"):
        summarize([])


def _write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_passages_are_read_in_order_up_to_the_limit(tmp_path: Path) -> None:
    path = _write(tmp_path / "data.jsonl", {"text": "one two"}, {"text": "three four"}, {"text": "five six"})
    assert read_passages(path, 2) == [Passage(0, "one", "two"), Passage(1, "three", "four")]


def test_bad_passages_are_named_by_line(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="line 2: a passage needs"):
        read_passages(_write(tmp_path / "a.jsonl", {"text": "one two"}, {"text": "single"}))
    with pytest.raises(InputFileError, match="no passage"):
        read_passages(_write(tmp_path / "b.jsonl"))
