from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kittiwake.errors import InputFileError, OutputError, UsageError
from kittiwake.evals.lambada import Answer, Passage
from kittiwake.evals.runs import (
    Run,
    check_run_file,
    last_word_log_prob,
    load_run,
    make_run,
    passage_digest,
    save_run,
)

from .fake_runs import ANSWERER, outcome, run


class Letters:
    """One token a byte; "ab" is one token, so that it can span a border."""

    kind = "fake"
    vocab_size = 300
    eos_ids: tuple[int, ...] = (0,)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return list(text.encode().replace(b" c", b"\x01"))


class Scorer:
    """Gives token t the log-probability -t / 100."""

    def __init__(self) -> None:
        self.tokenizer = Letters()
        self.vocab_size = 300
        self.asked: list[list[int]] = []

    def score(self, ids: Sequence[int]) -> np.ndarray:
        self.asked.append(list(ids))
        return -np.asarray(ids[1:], dtype=np.float64) / 100


def test_the_last_word_is_scored_with_the_space_before_it() -> None:
    llm = Scorer()
    found = last_word_log_prob(llm, Passage(0, "xy", "bd"), None)  # type: ignore[arg-type]
    assert found == pytest.approx(-(ord(" ") + ord("b") + ord("d")) / 100)
    assert llm.asked == [list(b"xy bd")]
    assert last_word_log_prob(llm, Passage(0, "xy", "cd"), 0) == pytest.approx(-(1 + ord("d")) / 100)  # type: ignore[arg-type]
    assert llm.asked[1] == [0, *b"xy\x01d"]


def test_a_word_that_nothing_stands_before_costs_the_vocabulary() -> None:
    class OneToken(Letters):
        def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
            return [5] if text == "x y" else list(text.encode())

    llm = Scorer()
    llm.tokenizer = OneToken()
    assert last_word_log_prob(llm, Passage(0, "x", "y"), None) == pytest.approx(-math.log(300))  # type: ignore[arg-type]
    assert last_word_log_prob(llm, Passage(0, "x", "y"), 0) == pytest.approx(-0.05)  # type: ignore[arg-type]


def test_a_run_is_made_of_answers_and_kept_whole(tmp_path: Path) -> None:
    passages = [Passage(0, "xy", "bd"), Passage(1, "xy", "ce")]
    answers = [
        Answer(0, "bd", "bd", True, " bd.", (1, 2), 2, 3.25),
        Answer(1, "ce", "déjà", False, " déjà ", (3,), 2, 4.75),
    ]
    seen: list[tuple[str, int, int]] = []
    made = make_run(
        Scorer(),  # type: ignore[arg-type]
        ANSWERER,
        passages,
        answers,
        bos=False,
        batch=1,
        busy=True,
        progress=lambda *step: seen.append(step),
    )
    assert seen == [("last words", 1, 2), ("last words", 2, 2)]
    assert (made.correct, made.wall_ms(50), made.busy) == (1, 4.0, True)
    log_probs = [-(ord(" ") + ord("b") + ord("d")) / 100, -(1 + ord("e")) / 100]
    assert made.perplexity == pytest.approx(math.exp(-sum(log_probs) / 2), rel=1e-5)
    path = tmp_path / "run.json"
    save_run(path, made)
    assert load_run(path) == made
    assert made.outcomes[0].digest == passage_digest(passages[0]) != made.outcomes[1].digest


def test_a_probability_that_is_no_number_is_kept_as_none_and_leaves_no_perplexity(tmp_path: Path) -> None:
    class Broken(Scorer):
        def score(self, ids: Sequence[int]) -> np.ndarray:
            return np.full(len(ids) - 1, np.nan)

    answer = Answer(0, "bd", "", False, "", (), 2, 1.0)
    made = make_run(Broken(), ANSWERER, [Passage(0, "xy", "bd")], [answer], bos=False, batch=1, busy=False)  # type: ignore[arg-type]
    assert (made.outcomes[0].log_prob, made.perplexity) == (None, None)
    save_run(tmp_path / "run.json", made)
    assert load_run(tmp_path / "run.json") == made


def test_where_a_run_cannot_be_kept_is_told_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"named \.json"):
        check_run_file(tmp_path / "run.txt")
    with pytest.raises(OutputError, match="nowhere"):
        check_run_file(tmp_path / "nowhere" / "run.json")
    path = tmp_path / "run.json"
    check_run_file(path)
    path.write_text("precious")
    with pytest.raises(OutputError, match="exists"):
        check_run_file(path)
    with pytest.raises(OutputError, match="exists"):
        save_run(path, run([True]))
    assert path.read_text() == "precious"


def _document(tmp_path: Path, made: Run) -> dict[str, Any]:
    path = tmp_path / "good.json"
    save_run(path, made)
    document: dict[str, Any] = json.loads(path.read_text())
    return document


BAD = [
    (lambda d: d.update(format="other"), "no saved run"),
    (lambda d: d.update(version=2), "version is 2"),
    (lambda d: d.update(extra=1), "holds 'extra'"),
    (lambda d: d.pop("task"), "lacks 'task'"),
    (lambda d: d.update(passages=[]), "at least one"),
    (lambda d: d.update(passages={}), "at least one"),
    (lambda d: d["task"].update(new_tokens=9), "new_tokens is 9"),
    (lambda d: d["task"].update(bos=1), "bos is 1, expected bool"),
    (lambda d: d["task"].update(batch=True), "batch is True, expected a whole number"),
    (lambda d: d["task"].update(busy=None), "busy is None, expected bool"),
    (lambda d: d["task"].update(data="0" * 64), "its passages are not those"),
    (lambda d: d["task"].update(passages=7), "its passages are not those"),
    (lambda d: d["answerer"].pop("digest"), "answerer lacks 'digest'"),
    (lambda d: d["answerer"].update(threads="2"), "answerer: threads is '2'"),
    (lambda d: d.update(answerer=None), "answerer is no object"),
    (lambda d: d["passages"][1].update(correct=True), "passage 1: correct is True"),
    (lambda d: d["passages"][1].update(predicted="word1"), "passage 1: the predicted word"),
    (lambda d: d["passages"][0].update(wall_ms=-1), "passage 0: wall_ms is -1"),
    (lambda d: d["passages"][0].update(wall_ms=1e300), "passage 0: wall_ms is 1e.300, expected a time in ms"),
    (lambda d: d["passages"][0].update(log_prob=0.5), "passage 0: log_prob is 0.5, expected the logarithm"),
    (lambda d: d["passages"][0].update(log_prob=-1e300), "passage 0: log_prob"),
    (lambda d: d["passages"][0].update(token_ids=[1, -2]), "passage 0: token_ids"),
    (lambda d: d["passages"][0].update(token_ids="12"), "passage 0: token_ids"),
    (lambda d: d["passages"][0].update(log_prob="x"), "passage 0: log_prob"),
    (lambda d: d["passages"][0].update(index=0.5), "passage 0: index"),
    (lambda d: d["passages"].reverse(), "its passages are not those"),
    (lambda d: d["passages"].__setitem__(0, 5), "passage 0 is no object"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    document = _document(tmp_path, run([True, False]))
    change(document)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputFileError, match=message) as caught:
        load_run(path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '{"format": NaN}', "\ud800"])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InputFileError):
        load_run(path)


def test_a_perplexity_beyond_every_number_is_held_below_infinity() -> None:
    made = run([True])
    made = replace(made, outcomes=(outcome(0, True, log_prob=-1e6),))
    assert made.perplexity is not None
    assert math.isfinite(made.perplexity)
