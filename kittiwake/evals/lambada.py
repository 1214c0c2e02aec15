"""LAMBADA: guess the last word of a passage that needs the whole of it to be guessed.

The task: the prompt is the passage up to its last space, eight tokens are drawn greedily, and the first word of what
they spell, less closing punctuation, must equal the passage's last word exactly, case included.
Source: Paperno et al. 2016, arXiv:1606.06031; scored on generated text, not on the likelihood of the word.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kittiwake.engine.request import Completion, SamplingParams
from kittiwake.errors import InputFileError
from kittiwake.evals.documents import read_text_lines
from kittiwake.evals.subject import Subject, begin_token
from kittiwake.progress import Progress
from kittiwake.text.tokenizer import Prompt

NEW_TOKENS = 8
CLOSING_PUNCTUATION = ".,;:!?\"'”’)]}"


@dataclass(frozen=True)
class Passage:
    """One problem: ``index`` counts lines from 0."""

    index: int
    prompt: str
    gold: str


@dataclass(frozen=True)
class Answer:
    """One passage answered. ``wall_ms`` is the time of the call that answered it, alone or with its batch."""

    index: int
    gold: str
    predicted: str
    correct: bool
    continuation: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    wall_ms: float

    def document(self) -> dict[str, Any]:
        """The line of the per-passage file."""
        return {**asdict(self), "wall_ms": round(self.wall_ms, 3)}


def split_passage(text: str) -> tuple[str, str]:
    """(prompt without a space at its end, last word). Raises ValueError for a passage without a space between words."""
    prompt, space, gold = text.rpartition(" ")
    prompt = prompt.rstrip(" ")
    if not space or not prompt or not gold:
        raise ValueError("a passage needs a prompt, a space and a last word")
    return prompt, gold


def first_word(continuation: str) -> str:
    """The first word of what was drawn, less closing punctuation at its end; empty when there is no word."""
    words = continuation.split(maxsplit=1)
    return words[0].rstrip(CLOSING_PUNCTUATION) if words else ""


def is_right(continuation: str, gold: str) -> bool:
    """Whether the first word equals the gold word exactly. No word is never right."""
    word = first_word(continuation)
    return word != "" and word == gold


def read_passages(path: Path, limit: int | None = None) -> list[Passage]:
    """Passages of a .jsonl (or .jsonl.xz) file with "text" on each line. Raises InputFileError with the line's number."""
    passages = []
    for index, (_, text) in enumerate(read_text_lines(path, limit)):
        try:
            prompt, gold = split_passage(text)
        except ValueError as error:
            raise InputFileError(f"{path} line {index + 1}: {error}") from error
        passages.append(Passage(index, prompt, gold))
    if not passages:
        raise InputFileError(f"{path} holds no passage")
    return passages


def answer_passages(
    llm: Subject, passages: Sequence[Passage], *, batch: int = 1, bos: bool = False, progress: Progress | None = None
) -> Iterator[Answer]:
    """Answer the passages in order, ``batch`` of them in one call. The batch changes times and never an answer."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
    begin = begin_token(llm.tokenizer) if bos else None
    for start in range(0, len(passages), batch):
        group = passages[start : start + batch]
        prompts = [_prompt(llm, passage, begin) for passage in group]
        started = time.perf_counter()
        completions = llm.generate(prompts, params)
        wall_ms = 1000 * (time.perf_counter() - started)
        for passage, completion in zip(group, completions, strict=True):
            yield _judge(passage, completion, wall_ms)
        if progress is not None:
            progress("passages", start + len(group), len(passages))


def _prompt(llm: Subject, passage: Passage, begin: int | None) -> Prompt:
    return passage.prompt if begin is None else [begin, *llm.tokenizer.encode(passage.prompt)]


def _judge(passage: Passage, completion: Completion, wall_ms: float) -> Answer:
    return Answer(
        index=passage.index,
        gold=passage.gold,
        predicted=first_word(completion.text),
        correct=is_right(completion.text, passage.gold),
        continuation=completion.text,
        token_ids=tuple(completion.token_ids),
        prompt_tokens=completion.prompt_tokens,
        wall_ms=wall_ms,
    )


def summarize(answers: Sequence[Answer]) -> dict[str, int | float]:
    """correct, total, accuracy (0 to 1), p50_ms and p99_ms over passages. Raises ValueError for none."""
    if not answers:
        raise ValueError("no answers to summarise")
    correct = sum(answer.correct for answer in answers)
    p50, p99 = np.percentile([answer.wall_ms for answer in answers], [50, 99])
    return {
        "correct": correct,
        "total": len(answers),
        "accuracy": correct / len(answers),
        "p50_ms": round(float(p50), 3),
        "p99_ms": round(float(p99), 3),
    }
