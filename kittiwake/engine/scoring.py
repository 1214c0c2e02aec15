"""Given tokens → what the model says of them: log-probabilities, logits, hidden rows. Nothing is drawn.

Sequences are packed side by side, a bounded number of rows at a time, in a state table of their own: memory does not
grow with their length beyond what is returned, and how they are packed changes no bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np

from kittiwake.engine.batch import Batch
from kittiwake.engine.request import KeptState
from kittiwake.engine.states import StateTable, new_states
from kittiwake.errors import RequestError, UsageError
from kittiwake.families.contract import Model
from kittiwake.ops.log_softmax.cpu import log_probs, top_log_probs

SCORE_ROWS = 256
"""Rows run in one forward: bounds the logits held at a time."""
SCORE_SLOTS = 16
"""Most sequences side by side."""


@dataclass(frozen=True)
class Given:
    """A sequence to run: its tokens, int64 [T], and the state that they follow."""

    ids: np.ndarray
    start: KeptState | None = None

    @property
    def length(self) -> int:
        """Tokens seen at its end, those before the state among them."""
        return len(self.ids) + (self.start.saved.position if self.start is not None else 0)


@dataclass(frozen=True)
class Rows:
    """What a piece of one sequence gave: rows of its tokens ``first`` to ``first + count``."""

    sequence: int
    first: int
    count: int
    logits: np.ndarray
    """float32 [count, vocab], what follows each token; no rows where only hidden rows were wanted."""
    hidden: np.ndarray
    """float32 [count, layers asked for, C]"""


@dataclass(frozen=True)
class Scored:
    """Log-probabilities (natural, float64) of a sequence's tokens, each given all before it.

    The first token of a sequence that follows no state has nothing before it and is not among them.
    """

    token_ids: np.ndarray
    """int64 [T]: the tokens scored"""
    log_probs: np.ndarray
    """float64 [T]"""
    top_ids: np.ndarray
    """int64 [T, k]: the likeliest tokens at each place, likeliest first, ties to the lowest id"""
    top_log_probs: np.ndarray
    """float64 [T, k]"""

    def last(self, count: int) -> Scored:
        """The same of the last ``count`` tokens scored, or of all where there are fewer."""
        first = max(0, len(self.token_ids) - count)
        return Scored(self.token_ids[first:], self.log_probs[first:], self.top_ids[first:], self.top_log_probs[first:])

    @property
    def total(self) -> float:
        """Sum of the log-probabilities, free of rounding on the way."""
        return math.fsum(self.log_probs.tolist())

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the likeliest of its place. Needs ``top`` of at least 1."""
        if self.top_ids.shape[1] == 0:
            raise UsageError("whether tokens are the likeliest is known only with top=1 or more")
        return bool((self.top_ids[:, 0] == self.token_ids).all())


def run_rows(
    model: Model,
    given: Sequence[Given],
    *,
    want_logits: bool = True,
    layers: Sequence[int] = (),
    max_rows: int = SCORE_ROWS,
) -> Iterator[Rows]:
    """Run sequences and hand out every row, piece by piece; pieces of one sequence come in order.

    ``layers`` names hidden rows: the residual stream that enters layer 0, 1, … and (``model.config.layers``) what
    leaves the last one, before the output norm.
    """
    table = new_states(model, max(1, min(len(given), SCORE_SLOTS)))
    waiting = deque(index for index, one in enumerate(given) if len(one.ids))
    running: dict[int, tuple[int, int]] = {}  # sequence → its slot, and the tokens run
    while waiting or running:
        left, parts = max_rows, list[tuple[int, int]]()
        while left and (len(parts) < len(running) or (waiting and _fits(table, given[waiting[0]], not running))):
            if len(parts) == len(running):
                index = waiting.popleft()
                running[index] = (table.allocate(given[index].length), 0)
                start = given[index].start
                if start is not None:
                    table.restore(running[index][0], start.saved)
            index = list(running)[len(parts)]
            count = min(left, len(given[index].ids) - running[index][1])
            parts.append((index, count))
            left -= count
        yield from _run(model, table, given, running, parts, want_logits, layers)
        for index, count in parts:
            slot, done = running[index]
            if done + count == len(given[index].ids):
                table.free(slot)
                del running[index]
            else:
                running[index] = (slot, done + count)


def _fits(table: StateTable, one: Given, is_alone: bool) -> bool:
    """Whether a sequence may begin; one that does not fit even alone may, and is refused by name."""
    return is_alone or table.can_hold(one.length)


def _run(
    model: Model,
    table: StateTable,
    given: Sequence[Given],
    running: dict[int, tuple[int, int]],
    parts: list[tuple[int, int]],
    want_logits: bool,
    layers: Sequence[int],
) -> Iterator[Rows]:
    """One forward over pieces (sequence, tokens)."""
    places = [(index, *running[index], count) for index, count in parts]
    sequences = [(slot, given[index].ids[done : done + count].tolist()) for index, slot, done, count in places]
    batch = Batch.pack(sequences, [list(range(count)) if want_logits else [] for *_, count in places])
    if layers:
        kept = {layer: np.empty((batch.rows, model.config.width), dtype=np.float32) for layer in set(layers)}
        logits = model.forward(batch, table, hidden=kept)
        hidden = np.stack([kept[layer] for layer in layers], axis=1)
    else:
        logits = model.forward(batch, table)
        hidden = np.empty((batch.rows, 0, model.config.width), dtype=np.float32)
    for (index, _, done, count), begin in zip(places, batch.starts, strict=False):
        end = begin + count
        yield Rows(index, done, count, logits[begin:end] if want_logits else logits[:0], hidden[begin:end])


T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work of several forwards that halts after each, so that others get their turn; its value is the result."""


def finish(steps: Steps[T]) -> T:
    """Do all of it at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(T, end.value)


def prefill(model: Model, given: Given) -> KeptState:
    """The state after exactly these tokens, with the logits that follow them; nothing is drawn. ``ids`` may be empty
    after a state that has logits."""
    return finish(prefill_steps(model, given))


def prefill_steps(model: Model, given: Given, *, max_rows: int = SCORE_ROWS) -> Steps[KeptState]:
    """:func:`prefill` forward by forward."""
    before, initial = (given.start.tokens, given.start.initial) if given.start is not None else ((), "")
    table = new_states(model, 1)
    slot = table.allocate()
    row = None
    if given.start is not None:
        table.restore(slot, given.start.saved)
        row = given.start.logits
    for first in range(0, len(given.ids), max_rows):
        piece = given.ids[first : first + max_rows]
        is_last = first + max_rows >= len(given.ids)
        rows = model.forward(Batch.pack([(slot, piece.tolist())], [[len(piece) - 1] if is_last else []]), table)
        if is_last:
            row = np.array(rows[0])
        yield
    return KeptState(table.save(slot), before + tuple(given.ids.tolist()), row, initial)


def score(model: Model, given: Sequence[Given], *, top: int = 0, max_rows: int = SCORE_ROWS) -> list[Scored]:
    """Log-probabilities of every token of the sequences, with the ``top`` likeliest of each place beside them.

    Raises RequestError for a ``top`` below 0 or above the vocabulary.
    """
    return finish(score_steps(model, given, top=top, max_rows=max_rows))


def score_steps(
    model: Model, given: Sequence[Given], *, top: int = 0, max_rows: int = SCORE_ROWS
) -> Steps[list[Scored]]:
    """:func:`score` forward by forward."""
    if not 0 <= top <= model.config.vocab_size:
        raise RequestError(f"top must be from 0 to the vocabulary's {model.config.vocab_size}, got {top}")
    results = []
    for one in given:
        follows = one.start is not None and one.start.logits is not None
        ids = one.ids if follows else one.ids[1:]
        shape = (len(ids), top)
        found = Scored(ids, np.empty(len(ids)), np.empty(shape, dtype=np.int64), np.empty(shape))
        if follows and len(ids):
            assert one.start is not None and one.start.logits is not None
            _score_rows(found, 0, one.start.logits[None])
        results.append(found)
    # the last token of a sequence is only a target
    shortened = [Given(one.ids[:-1], one.start) for one in given]
    for rows in run_rows(model, shortened, max_rows=max_rows):
        found = results[rows.sequence]
        first = rows.first + len(found.token_ids) - len(shortened[rows.sequence].ids)
        _score_rows(found, first, rows.logits)
        yield
    return results


def score_stream(model: Model, pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Log-probabilities, float64, of one endless sequence that comes in pieces int64 [T], in constant memory.

    As :func:`score`, the first token of all is not among them.
    """
    table = new_states(model, 1)
    slot = table.allocate()
    before = np.empty((0, model.config.vocab_size), dtype=np.float32)
    for piece in pieces:
        for first in range(0, len(piece), SCORE_ROWS):
            ids = piece[first : first + SCORE_ROWS]
            logits = model.forward(Batch.pack([(slot, ids.tolist())], [list(range(len(ids)))]), table)
            rows = np.concatenate([before, logits[:-1]])
            yield log_probs(rows, ids[len(ids) - len(rows) :])
            before = np.array(logits[-1:])


def _score_rows(found: Scored, first: int, logits: np.ndarray) -> None:
    """Enter the rows of logits that give the tokens scored from ``first`` on."""
    last, top = first + len(logits), found.top_ids.shape[1]
    found.log_probs[first:last] = log_probs(logits, found.token_ids[first:last])
    if top:
        found.top_ids[first:last], found.top_log_probs[first:last] = top_log_probs(logits, top)
