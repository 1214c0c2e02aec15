"""What is timed: B sequences of T tokens in one forward call.

A case is first checked for the law of exactness (whole = split, in a crowd = alone, bit for bit), and a model on a card
for whole = stepwise too; where that fails there is no speed to tell. The checks warm up as well.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kittiwake.bench.floors import Ceilings, demand
from kittiwake.bench.subject import Subject
from kittiwake.bench.timing import Effort, Figures, interleaved_ms, median_ms, timed
from kittiwake.device import available_memory
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import SavedState
from kittiwake.errors import KittiwakeError, UsageError
from kittiwake.progress import Progress

CPU_CASES = "1x1,8x1,1x128,1x512"
CARD_CASES = "1x1,1x8,1x32,1x64,1x128,1x1024,1x4096,2x1,8x1,32x1,128x1,320x1,8x8,16x16"
"""The cases measured where none are named."""
SPLIT_TOKENS = 67
SPLITS = 3
_STREAMS = 4
"""Batches of different tokens that a case goes through in turn."""
_ID_BYTES = 48
"""Of a token id in an array, and then in a list."""
_CASE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,7})")


class InexactError(KittiwakeError):
    """A case whose bits depend on how it was run: it has no speed worth telling."""


@dataclass(frozen=True)
class Case:
    """``batch`` sequences of ``tokens`` tokens each, in one forward call; logits for the last row of each."""

    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.tokens}"


def parse_cases(text: str) -> list[Case]:
    """ "1x512,8x1" → cases in that order; one named twice stands twice. Raises UsageError."""
    cases = []
    for part in text.split(","):
        match = _CASE.fullmatch(part.strip().lower())
        if match is None:
            raise UsageError(
                f"a case is BATCHxTOKENS such as 1x512, got {part.strip()!r}", "separate cases with commas"
            )
        cases.append(Case(int(match[1]), int(match[2])))
    return cases


def random_ids(vocab_size: int, batch: int, tokens: int, seed: int) -> list[list[int]]:
    """Token ids drawn uniformly: random data, since zeros would flatter caches and predictors. Raises KittiwakeError for
    more than the memory that is free holds."""
    free = available_memory()
    if free and batch * tokens * _ID_BYTES > free:
        raise KittiwakeError(
            f"{batch * tokens:,} random tokens take {batch * tokens * _ID_BYTES:,} bytes, {free:,} are free",
            "ask for fewer tokens at once",
        )
    ids: list[list[int]] = np.random.default_rng(seed).integers(0, vocab_size, size=(batch, tokens)).tolist()
    return ids


def measure_cases(
    subject: Subject,
    cases: Sequence[Case],
    seed: int,
    effort: Effort,
    *,
    ceilings: Ceilings | None = None,
    dtype: str = "fp32",
    progress: Progress | None = None,
) -> list[Figures]:
    """Time one forward call for each case, all of them in turns. Raises InexactError before timing anything.

    The sequences go on from call to call: their states are those of random tokens, never zeros. ``ceilings`` of the
    device, where given, put a floor beside each figure.
    """
    tell = progress if progress is not None else _silent
    if subject.device != "cpu":
        tell("checking splits", 0, 1)
        check_splits(subject, seed)
    for index, case in enumerate(cases):
        tell("checking cases", index, len(cases))
        check_case(subject, case, seed)
    fill_states(subject, seed)
    works = [timed(case_work(subject, case, seed)) for case in cases]
    for work in works:  # the checks ran other calls: cut ones, and with logits for the host
        for _ in range(2):
            work()
    samples = interleaved_ms(works, effort, lambda done, total: tell("timing cases", done, total))
    tell("timing cases", 1, 1)
    return [_figures(subject, case, times, ceilings, dtype) for case, times in zip(cases, samples, strict=True)]


def _figures(subject: Subject, case: Case, samples: Sequence[float], ceilings: Ceilings | None, dtype: str) -> Figures:
    floor_ms, floor_by = None, ""
    if ceilings is not None:
        floor_ms, floor_by = demand(subject.model, dtype, case.batch, case.tokens).floor(ceilings)
    return Figures(str(case), case.batch, case.tokens, median_ms(samples), len(samples), floor_ms, floor_by)


def case_work(subject: Subject, case: Case, seed: int) -> Callable[[], object]:
    """One forward call of a case; each call takes the next of a few batches of random tokens."""
    vocab = subject.model.config.vocab_size
    calls = [
        subject.call(subject.pack(random_ids(vocab, case.batch, case.tokens, seed + stream)))
        for stream in range(_STREAMS)
    ]
    turn = itertools.cycle(calls)

    def work() -> object:
        return next(turn)()

    return work


def fill_states(subject: Subject, seed: int, tokens: int = 5) -> None:
    """Put every slot into the state after a few random tokens of its own."""
    subject.clear()
    subject.forward(subject.pack(random_ids(subject.model.config.vocab_size, len(subject.slots), tokens, seed)))


def check_case(subject: Subject, case: Case, seed: int) -> None:
    """Raise InexactError unless one sequence gives the same bits alone and cut in two as it does among all of them."""
    ids = random_ids(subject.model.config.vocab_size, case.batch, case.tokens, seed)
    rng = np.random.default_rng(seed)
    chosen, cut = int(rng.integers(case.batch)), int(rng.integers(case.tokens))
    slot, row = subject.slots[chosen], ids[chosen]
    subject.clear()
    together = subject.forward(subject.pack(ids))[chosen]
    crowd_state = subject.states.save(slot, whole=True)
    pieces = [piece for piece in (row[:cut], row[cut:]) if piece]
    alone, lone_state = _run(subject, slot, pieces)
    if not _is_same(together, crowd_state, alone, lone_state):
        raise InexactError(
            f"{case}: sequence {chosen} has other bits alone, cut after {cut} tokens, than in the batch",
            "no speed is told for inexact work; run kittiwake verify",
        )


def check_splits(subject: Subject, seed: int) -> None:
    """Raise InexactError unless a prompt gives the same bits whole, token by token, and cut at random places."""
    row = random_ids(subject.model.config.vocab_size, 1, SPLIT_TOKENS, seed)[0]
    rng = np.random.default_rng(seed)
    slot = subject.slots[0]
    whole = _run(subject, slot, [row])
    for split in range(SPLITS + 1):
        if split == 0:
            cuts = list(range(1, len(row)))
        else:
            cuts = sorted(rng.choice(np.arange(1, len(row)), size=int(rng.integers(1, 6)), replace=False).tolist())
        bounds = itertools.pairwise([0, *cuts, len(row)])
        pieces = [row[begin:end] for begin, end in bounds]
        if not _is_same(*whole, *_run(subject, slot, pieces)):
            how = "token by token" if split == 0 else f"cut before the tokens {', '.join(map(str, cuts))}"
            raise InexactError(
                f"a prompt of {len(row)} tokens has other bits {how} than whole",
                "no speed is told for inexact work; run kittiwake verify",
            )


def _run(subject: Subject, slot: int, pieces: Sequence[Sequence[int]]) -> tuple[np.ndarray, SavedState]:
    """Logits of the last token and the state after it, of one sequence fed from its start in pieces."""
    subject.states.clear(slot)
    for piece in pieces:
        logits = subject.forward(Batch.pack([(slot, list(piece))]))
    return logits[0], subject.states.save(slot, whole=True)


def _is_same(logits: np.ndarray, state: SavedState, other_logits: np.ndarray, other_state: SavedState) -> bool:
    return np.array_equal(_bits(logits), _bits(other_logits)) and all(
        np.array_equal(_bits(part), _bits(other_state.parts[name])) for name, part in state.parts.items()
    )


def _bits(array: np.ndarray) -> np.ndarray:
    """The bytes of an array, so that comparing tells -0.0 from 0.0 and takes NaN for equal to itself."""
    return np.ascontiguousarray(array).view(np.uint8)


def _silent(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""
