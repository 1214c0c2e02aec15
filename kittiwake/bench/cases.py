"""What is timed: B sequences of T tokens in one forward call, and a prompt at some depth with decoding after it.

A case is first checked for the law of exactness (whole = split, in a crowd = alone, bit for bit); where that fails
there is no speed to tell. The check warms up as well.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kittiwake.bench.timing import Effort, Figures, measure_ms, median_ms
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StateTable
from kittiwake.errors import KittiwakeError, UsageError
from kittiwake.families.contract import Model, Progress

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
    """Token ids drawn uniformly: random data, since zeros would flatter caches and predictors."""
    ids: list[list[int]] = np.random.default_rng(seed).integers(0, vocab_size, size=(batch, tokens)).tolist()
    return ids


def measure_case(model: Model, case: Case, seed: int, effort: Effort, progress: Progress | None = None) -> Figures:
    """Time one forward call over the whole case from cleared states. Raises InexactError before timing anything."""
    states = StateTable(model.state_spec, case.batch)
    slots = [states.allocate() for _ in range(case.batch)]
    ids = random_ids(model.config.vocab_size, case.batch, case.tokens, seed)
    batch = Batch.pack(list(zip(slots, ids, strict=True)))

    def clear() -> None:
        for slot in slots:
            states.clear(slot)

    if progress is not None:
        progress(f"checking {case}", 0, 1)
    check_case(model, states, slots, ids, seed)
    if progress is not None:
        progress(f"timing {case}", 0, 1)
    samples = measure_ms(lambda: model.forward(batch, states), effort, prepare=clear)
    if progress is not None:
        progress(f"timing {case}", 1, 1)
    return Figures(str(case), case.batch, case.tokens, median_ms(samples), len(samples))


def check_case(model: Model, states: StateTable, slots: Sequence[int], ids: Sequence[Sequence[int]], seed: int) -> None:
    """Raise InexactError unless one sequence gives the same bits alone and cut in two as it does among all of them."""
    for slot in slots:
        states.clear(slot)
    together = model.forward(Batch.pack([(slot, list(row)) for slot, row in zip(slots, ids, strict=True)]), states)
    rng = np.random.default_rng(seed)
    chosen = int(rng.integers(len(slots)))
    slot, row = slots[chosen], list(ids[chosen])
    crowd_state = states.save(slot)
    states.clear(slot)
    cut = int(rng.integers(len(row)))
    if cut:
        model.forward(Batch.pack([(slot, row[:cut])]), states)
    alone = model.forward(Batch.pack([(slot, row[cut:])]), states)
    lone_state = states.save(slot)
    same_state = all(
        np.array_equal(_bits(part), _bits(lone_state.parts[name])) for name, part in crowd_state.parts.items()
    )
    if not np.array_equal(_bits(together[chosen]), _bits(alone[0])) or not same_state:
        raise InexactError(
            f"{len(slots)}x{len(row)}: sequence {chosen} has other bits alone, cut after {cut} tokens, than in the batch",
            "no speed is told for inexact work; run kittiwake verify",
        )


def _bits(array: np.ndarray) -> np.ndarray:
    """The bytes of an array, so that comparing tells -0.0 from 0.0 and takes NaN for equal to itself."""
    return np.ascontiguousarray(array).view(np.uint8)


@dataclass(frozen=True)
class Trip:
    """A prompt of ``prompt`` tokens after ``depth`` tokens of context, then ``generate`` greedy steps."""

    prompt: int
    generate: int
    depth: int


def measure_trip(
    model: Model, trip: Trip, seed: int, repeat: int, chunk_rows: int, progress: Progress | None = None
) -> tuple[Figures, Figures]:
    """(prefill, decode) of one sequence: medians over ``repeat`` runs, each from the same saved state.

    The prompt is fed in pieces of at most ``chunk_rows`` rows, as the engine would. A decode run is ``generate`` steps
    of one row, the likeliest token each time; its figures count the whole run.
    """
    states = StateTable(model.state_spec, 1)
    slot = states.allocate()
    ids = random_ids(model.config.vocab_size, 1, trip.depth + trip.prompt, seed)[0]
    check_case(model, states, [slot], [ids[-min(len(ids), 64) :]], seed)
    states.clear(slot)
    _feed(model, states, slot, ids[: trip.depth], chunk_rows, progress)
    at_depth = states.save(slot)
    prefill_ms, decode_ms = [], []
    for run in range(repeat + 1):  # the first one warms up
        if progress is not None:
            progress("timing prompt and decoding", run, repeat + 1)
        states.restore(slot, at_depth)
        prompt = measure_ms(lambda: _feed(model, states, slot, ids[trip.depth :], chunk_rows), Effort(1, 1, 0.0))
        decode = measure_ms(lambda: _decode(model, states, slot, ids[-1], trip.generate), Effort(1, 1, 0.0))
        if run:
            prefill_ms += prompt
            decode_ms += decode
    name = f"{trip.prompt}+{trip.generate} at {trip.depth}"
    return (
        Figures(f"prefill {name}", 1, trip.prompt, median_ms(prefill_ms), repeat),
        Figures(f"decode {name}", 1, trip.generate, median_ms(decode_ms), repeat),
    )


def _feed(
    model: Model, states: StateTable, slot: int, ids: Sequence[int], chunk_rows: int, progress: Progress | None = None
) -> None:
    for start in range(0, len(ids), chunk_rows):
        if progress is not None:
            progress("reaching the depth", start, len(ids))
        piece = list(ids[start : start + chunk_rows])
        want = [len(piece) - 1] if start + chunk_rows >= len(ids) else []  # logits of the last token only
        model.forward(Batch.pack([(slot, piece)], [want]), states)


def _decode(model: Model, states: StateTable, slot: int, last_id: int, steps: int) -> None:
    for _ in range(steps):
        logits = model.forward(Batch.pack([(slot, [last_id])]), states)
        last_id = int(logits[0].argmax())
