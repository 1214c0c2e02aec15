"""A run of LAMBADA kept in a file: every passage's outcome, and what answered it where, so that runs can be compared."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from kittiwake.checkpoints.files import check_new_file, new_file, quoted, write_file, writing
from kittiwake.checkpoints.strict_json import load_json_strict
from kittiwake.config import is_number
from kittiwake.errors import InputFileError, UsageError
from kittiwake.evals.lambada import NEW_TOKENS, Answer, Passage, first_word, is_right
from kittiwake.evals.likelihood import split_pair
from kittiwake.evals.subject import Subject, begin_token
from kittiwake.llm import LLM
from kittiwake.progress import Progress

FORMAT = "kittiwake lambada run"
VERSION = 1
SUFFIX = ".json"
_MAX_BYTES = 1 << 28
# What a file may say, so that sums and ratios of it stay finite.
_LARGEST_MS = 1e15
_LARGEST_NATS = 1e100
_ROUNDING = 1e-6
_EXPECTED = {
    "int": "a whole number of at least 0",
    "float": "a time in ms",
    "float | None": "the logarithm of a probability, or null",
    "tuple[int, ...]": "a list of token ids",
}


@dataclass(frozen=True)
class Answerer:
    """What answered, and where."""

    implementation: str
    """ "kittiwake", "transformers" or "rwkv"."""
    version: str
    model: str
    """The path it was loaded from."""
    digest: str
    """sha-256 (hex): of kittiwake the model digest of its receipt, of a reference that of the checkpoint's files."""
    family: str
    dtype: str
    device: str
    processor: str
    threads: int
    tokenizer: str
    """Digest of the tokenizer."""


@dataclass(frozen=True)
class Outcome:
    """One passage answered. ``log_prob`` is the natural log of the probability of its last word after the rest."""

    index: int
    digest: str
    target: str
    predicted: str
    correct: bool
    continuation: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    log_prob: float | None
    """None where the model gave no finite number."""
    wall_ms: float
    """From the prompt handed over to the text of the last token, which is drawn and not run."""


@dataclass(frozen=True)
class Run:
    """All of it. ``batch`` is how many passages were answered in a call, ``busy`` whether others kept the machine's
    cores busy before or after, so that the times are too long."""

    answerer: Answerer
    bos: bool
    batch: int
    busy: bool
    outcomes: tuple[Outcome, ...]

    @property
    def correct(self) -> int:
        """Passages whose last word was guessed."""
        return sum(outcome.correct for outcome in self.outcomes)

    @property
    def data_digest(self) -> str:
        """sha-256 (hex) over the digests of the passages, in order."""
        return hashlib.sha256("".join(f"{one.digest}\n" for one in self.outcomes).encode()).hexdigest()

    @property
    def perplexity(self) -> float | None:
        """Of the last words: exp of minus their mean log-probability. None where one of those is not finite."""
        log_probs = [one.log_prob for one in self.outcomes if one.log_prob is not None]
        if len(log_probs) < len(self.outcomes):
            return None
        return float(f"{math.exp(min(-math.fsum(log_probs) / len(log_probs), 700.0)):.6g}")

    def wall_ms(self, percentile: float) -> float:
        """That percentile of the passages' times."""
        return round(float(np.percentile([one.wall_ms for one in self.outcomes], percentile)), 3)


def passage_digest(passage: Passage) -> str:
    """sha-256 (hex) of the passage's text, one space before its last word."""
    return hashlib.sha256(f"{passage.prompt} {passage.gold}".encode("utf-8", "surrogatepass")).hexdigest()


def answerer_of(llm: LLM, model: Path | None, progress: Progress | None = None) -> Answerer:
    """What a kittiwake model is, out of its receipt."""
    receipt = llm.receipt(progress)
    return Answerer(
        implementation="kittiwake",
        version=receipt["versions"]["kittiwake"],
        model="packaged" if model is None else str(model),
        digest=receipt["model"]["digest"],
        family=receipt["model"]["family"],
        dtype=receipt["model"]["dtype"],
        device=receipt["device"]["kind"],
        processor=receipt["device"]["processor"],
        threads=receipt["device"]["threads"],
        tokenizer=receipt["model"]["tokenizer"],
    )


def make_run(
    llm: Subject,
    answerer: Answerer,
    passages: Sequence[Passage],
    answers: Sequence[Answer],
    *,
    bos: bool,
    batch: int,
    busy: bool,
    progress: Progress | None = None,
) -> Run:
    """The run that gave ``answers``; the last words are scored here, after the clock has stopped for all of them."""
    begin = begin_token(llm.tokenizer) if bos else None
    outcomes = []
    for done, (passage, answer) in enumerate(zip(passages, answers, strict=True), start=1):
        outcomes.append(_outcome(passage, answer, last_word_log_prob(llm, passage, begin)))
        if progress is not None:
            progress("last words", done, len(passages))
    return Run(answerer, bos, batch, busy, tuple(outcomes))


def last_word_log_prob(llm: Subject, passage: Passage, begin: int | None) -> float:
    """Natural log of the probability of the last word's tokens, tokenized with the passage as one text.

    A token that spans the border belongs to the word. One that nothing stands before costs the log of the vocabulary.
    """
    pair = split_pair(llm.tokenizer.encode, passage.prompt, f" {passage.gold}", begin)
    ids, count = (*pair.context, *pair.continuation), len(pair.continuation)
    found = llm.score(ids)[-count:].tolist() if len(ids) > 1 else []
    return math.fsum(found) - (math.log(llm.vocab_size) if len(found) < count else 0.0)


def _outcome(passage: Passage, answer: Answer, log_prob: float) -> Outcome:
    return Outcome(
        index=passage.index,
        digest=passage_digest(passage),
        target=passage.gold,
        predicted=answer.predicted,
        correct=answer.correct,
        continuation=answer.continuation,
        token_ids=tuple(answer.token_ids),
        prompt_tokens=answer.prompt_tokens,
        log_prob=log_prob if math.isfinite(log_prob) else None,
        wall_ms=round(answer.wall_ms, 3),
    )


def check_run_file(path: Path) -> None:
    """Raise OutputError or UsageError where :func:`save_run` would, so that it is told before the work."""
    if path.suffix != SUFFIX:
        raise UsageError(f"a run is saved to a file named {SUFFIX}, got {path}", f"name it {path.stem}{SUFFIX}")
    check_new_file(path)


def save_run(path: Path, run: Run) -> None:
    """Write a run as JSON, whole or not at all. Raises OutputError for a file that exists or cannot be written."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "answerer": asdict(run.answerer),
        "task": {
            "data": run.data_digest,
            "passages": len(run.outcomes),
            "bos": run.bos,
            "batch": run.batch,
            "busy": run.busy,
            "new_tokens": NEW_TOKENS,
        },
        "passages": [asdict(outcome) for outcome in run.outcomes],
    }
    text = json.dumps(document, indent=1, allow_nan=False)
    with new_file(path) as partial, writing(path):
        write_file(partial, text.encode())


def load_run(path: Path) -> Run:
    """Read a run that :func:`save_run` wrote. Raises InputFileError naming what is wrong with it."""
    document = load_json_strict(path, what=str(path), max_bytes=_MAX_BYTES, error=InputFileError)
    try:
        return _parse(document)
    except _WrongError as error:
        raise InputFileError(f"{path}: {error}", "save the run again: kittiwake eval lambada --save") from None


class _WrongError(ValueError):
    """What is wrong with a document, as the rest of a sentence."""


def _parse(document: Any) -> Run:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _WrongError("it is no saved run of eval lambada")
    if document.get("version") != VERSION:
        raise _WrongError(f"its version is {quoted(document.get('version'))}, this kittiwake reads {VERSION}")
    _check_keys(document, ("format", "version", "answerer", "task", "passages"), "it")
    task, passages = document["task"], document["passages"]
    _check_keys(task, ("data", "passages", "bos", "batch", "busy", "new_tokens"), "task")
    if not isinstance(passages, list) or not passages:
        raise _WrongError("passages is no list of at least one")
    if task["new_tokens"] != NEW_TOKENS:
        raise _WrongError(f"new_tokens is {quoted(task['new_tokens'])}, the task has {NEW_TOKENS}")
    for name, kind in (("bos", "bool"), ("batch", "int"), ("busy", "bool")):
        _check(task[name], kind, name)
    answerer = Answerer(**_values(Answerer, document["answerer"], "answerer"))
    outcomes = tuple(_parse_outcome(one, place) for place, one in enumerate(passages))
    run = Run(answerer, task["bos"], task["batch"], task["busy"], outcomes)
    if task["data"] != run.data_digest or task["passages"] != len(outcomes):
        raise _WrongError("its passages are not those that it says it was run on")
    return run


def _parse_outcome(value: Any, place: int) -> Outcome:
    where = f"passage {place}"
    outcome = Outcome(**_values(Outcome, value, where))
    if outcome.predicted != first_word(outcome.continuation):
        raise _WrongError(f"{where}: the predicted word is not the first of the continuation")
    if outcome.correct != is_right(outcome.continuation, outcome.target):
        raise _WrongError(f"{where}: correct is {outcome.correct}, which its words do not say")
    return outcome


def _values(kind: type[Any], value: Any, where: str) -> dict[str, Any]:
    """The fields of a dataclass out of a JSON object, each of the type that it is annotated with."""
    known = {field.name: str(field.type) for field in fields(kind)}
    _check_keys(value, tuple(known), where)
    for name, type_name in known.items():
        _check(value[name], type_name, f"{where}: {name}")
    return {name: tuple(value[name]) if isinstance(value[name], list) else value[name] for name in known}


def _check_keys(value: Any, keys: Sequence[str], where: str) -> None:
    if not isinstance(value, Mapping):
        raise _WrongError(f"{where} is no object")
    for name in keys:
        if name not in value:
            raise _WrongError(f"{where} lacks {name!r}")
    unknown = [name for name in value if name not in keys]
    if unknown:
        raise _WrongError(f"{where} holds {quoted(unknown[0])}, which is not known")


def _check(value: Any, type_name: str, where: str) -> None:
    good = {
        "str": isinstance(value, str),
        "bool": isinstance(value, bool),
        "int": _is_count(value),
        "float": is_number(value) and 0 <= value <= _LARGEST_MS,
        "float | None": value is None or (is_number(value) and -_LARGEST_NATS <= value <= _ROUNDING),
        "tuple[int, ...]": isinstance(value, list) and all(map(_is_count, value)),
    }
    if not good[type_name]:
        raise _WrongError(f"{where} is {quoted(value)}, expected {_EXPECTED.get(type_name, type_name)}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
