"""Logits → token ids. Apart from the forward, and reading nothing but its row, its parameters and the tokens so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kittiwake.engine.request import MAX_BIAS, SamplingParams
from kittiwake.errors import KittiwakeError, RequestError
from kittiwake.ops.log_softmax.cpu import log_probs, top_log_probs
from kittiwake.ops.sampling.cpu import NOT_FINITE, adjust, draw_rows


class Adjustments:
    """Bias and penalties of one request: an entry for each token they touch, kept up as tokens are drawn.

    ``given`` are the tokens before the first drawn one; only the repetition penalty reads them.
    """

    def __init__(self, params: SamplingParams, given: Sequence[int], vocab_size: int) -> None:
        self._params = params
        seen = np.unique(np.asarray(given if params.repetition_penalty != 1.0 else (), dtype=np.int64))
        biased = np.fromiter(params.logit_bias, dtype=np.int64)
        ids = np.union1d(seen, biased)
        most = min(vocab_size, len(ids) + (params.max_tokens if params.has_penalties else 0))
        self._size = len(ids)
        self._ids = np.zeros(most, dtype=np.int64)
        self._ids[: len(ids)] = ids
        self._biases = np.zeros(most, dtype=np.float64)
        biases = np.fromiter(params.logit_bias.values(), dtype=np.float64)
        self._biases[np.searchsorted(ids, biased)] = np.where(biases == -MAX_BIAS, -np.inf, biases)
        self._is_seen = np.zeros(most, dtype=np.bool_)
        self._is_seen[np.searchsorted(ids, seen)] = True
        self._counts = np.zeros(most, dtype=np.int64)
        self._places = {token: place for place, token in enumerate(ids.tolist())} if params.has_penalties else {}

    def push(self, token: int) -> None:
        """A token was drawn."""
        if not self._params.has_penalties:
            return
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = self._size
            self._ids[place] = token
            self._size += 1
        self._counts[place] += 1

    def apply(self, row: np.ndarray) -> None:
        """Change float32 logits [vocab] in place, only where a token has an entry."""
        params = self._params
        adjust(
            row,
            self._ids,
            self._biases,
            self._is_seen,
            self._counts,
            self._size,
            float(params.repetition_penalty),
            float(params.presence_penalty),
            float(params.frequency_penalty),
        )


def adjustments_for(params: SamplingParams, given: Sequence[int], vocab_size: int) -> Adjustments | None:
    """The adjustments of a request, None where it has neither bias nor penalties."""
    return Adjustments(params, given, vocab_size) if params.logit_bias or params.has_penalties else None


@dataclass(frozen=True)
class Draw:
    """What one row is drawn with: its parameters, the position of the token to come, ids it may not give."""

    params: SamplingParams
    position: int
    banned: Sequence[int] = ()
    adjustments: Adjustments | None = None


@dataclass(frozen=True)
class Drawn:
    """What came of one row."""

    token: int | None
    """None where no token can be drawn."""
    error: KittiwakeError | None = None
    """Why not."""
    logprob: float = 0.0
    """Natural log of the token's probability before any change, where it was asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """(id, log-probability) of the likeliest tokens, as many as were asked for."""


def fault(code: int) -> KittiwakeError:
    """Why nothing can be drawn from a row."""
    if code == NOT_FINITE:
        return KittiwakeError("no token can be drawn: the logits are not finite")
    return RequestError(
        "no token can be drawn: every one is banned",
        "logit_bias -100, min_tokens (ends of text and stop ids) and ids the tokenizer does not use ban",
    )


def describe(row: np.ndarray, params: SamplingParams, token: int) -> Drawn:
    """A token drawn from float32 logits [vocab] with the log-probabilities that ``params`` ask for."""
    drawn = [Drawn(token)]
    if params.logprobs:
        _describe(row[None], [Draw(params, 0)], [0], drawn)
    return drawn[0]


def sample(logits: np.ndarray, draws: Sequence[Draw]) -> list[Drawn]:
    """Draw from float32 logits [W, vocab], which are written to.

    ``seed`` and ``position`` key the noise, so a row's token depends on nothing beside it.
    """
    described = [index for index, draw in enumerate(draws) if draw.params.logprobs]
    untouched = logits[described] if described else None  # a copy
    for row, draw in zip(logits, draws, strict=True):
        if draw.adjustments is not None:
            draw.adjustments.apply(row)
        if draw.banned:
            row[list(draw.banned)] = -np.inf
    out = np.empty(len(draws), dtype=np.int64)
    draw_rows(
        logits,
        np.array([d.params.temperature for d in draws], dtype=np.float64),
        np.array([d.params.top_k for d in draws], dtype=np.int64),
        np.array([d.params.top_p for d in draws], dtype=np.float64),
        np.array([d.params.min_p for d in draws], dtype=np.float64),
        np.array([d.params.sampling_order == "rwkv" for d in draws], dtype=np.bool_),
        np.array([d.params.seed for d in draws], dtype=np.uint64),
        np.array([d.position for d in draws], dtype=np.uint64),
        out,
    )
    drawn = [Drawn(token) if token >= 0 else Drawn(None, fault(token)) for token in out.tolist()]
    if untouched is not None:
        _describe(untouched, draws, described, drawn)
    return drawn


def _describe(untouched: np.ndarray, draws: Sequence[Draw], rows: list[int], drawn: list[Drawn]) -> None:
    """Put log-probabilities beside the tokens of these rows, whose logits before any change are [len(rows), vocab]."""
    tokens = np.array([drawn[row].token or 0 for row in rows], dtype=np.int64)
    most = min(max(draws[row].params.top_logprobs for row in rows), untouched.shape[1])
    ids, values = top_log_probs(untouched, most)
    if most == 0:
        picked = log_probs(untouched, tokens)
    else:
        # what log_probs gives, without going over the rows again: the likeliest one's is minus the log of the sum
        rank = np.arange(len(rows))
        gaps = untouched[rank, tokens].astype(np.float64) - untouched[rank, ids[:, 0]].astype(np.float64)
        picked = gaps + values[:, 0]
    for index, row in enumerate(rows):
        token, count = drawn[row].token, draws[row].params.top_logprobs
        if token is not None:
            top = tuple(zip(ids[index, :count].tolist(), values[index, :count].tolist(), strict=True))
            drawn[row] = Drawn(token, logprob=float(picked[index]), top=top)


def warm_up() -> None:
    """Compile the sampling kernels, or fetch them from the cache."""
    params = SamplingParams(logit_bias={0: 1.0}, logprobs=True, top_logprobs=1)
    for rows in (1, 2):  # which take different ways through the log-probabilities
        draws = [Draw(params, 0, (), Adjustments(params, (), 2))] * rows
        sample(np.zeros((rows, 2), dtype=np.float32), draws)
