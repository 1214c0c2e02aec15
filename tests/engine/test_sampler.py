from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kittiwake.engine.request import SamplingParams
from kittiwake.engine.sampler import Draw, Drawn, adjustments_for, sample
from kittiwake.errors import KittiwakeError, RequestError
from kittiwake.ops.log_softmax import reference as log_softmax
from kittiwake.ops.log_softmax.cpu import log_probs
from kittiwake.ops.sampling import reference

VOCAB = 50


def _row(seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(VOCAB) * 3).astype(np.float32)


def _draw(params: SamplingParams, given: Sequence[int] = (), drawn: Sequence[int] = (), position: int = 0) -> Draw:
    adjustments = adjustments_for(params, given, VOCAB)
    for token in drawn:
        if adjustments is not None:
            adjustments.push(token)
    return Draw(params, position, (), adjustments)


def _alone(row: np.ndarray, draw: Draw) -> Drawn:
    return sample(row[None].copy(), [draw])[0]


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=30)


@given(
    given_tokens=TOKENS,
    drawn=TOKENS,
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=8),
    repetition=st.sampled_from((1.0, 0.8, 1.3)),
    presence=st.sampled_from((0.0, 0.7, -1.0)),
    frequency=st.sampled_from((0.0, 0.4)),
)
@settings(max_examples=100, deadline=None)
def test_adjustments_kept_up_token_by_token_are_those_made_from_all_tokens(
    given_tokens: list[int],
    drawn: list[int],
    bias: dict[int, float],
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    params = SamplingParams(
        max_tokens=max(1, len(drawn)),
        logit_bias=bias,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    adjustments = adjustments_for(params, given_tokens, VOCAB)
    row = _row(1)
    bans = {token: -np.inf if value == -100 else value for token, value in bias.items()}
    expected = reference.adjusted(row, bans, given_tokens, drawn, repetition, presence, frequency)
    assert (adjustments is None) == (not bias and (repetition, presence, frequency) == (1.0, 0.0, 0.0))
    if adjustments is not None:
        for token in drawn:
            adjustments.push(token)
        adjustments.apply(row)
    assert (row + np.float32(0)).tobytes() == (expected + np.float32(0)).tobytes()


def test_presence_and_frequency_do_not_read_the_prompt_and_repetition_does() -> None:
    row = _row(2)
    likeliest = int(row.argmax())
    for params, expected in (
        (SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0), likeliest),
        (SamplingParams(temperature=0.0, repetition_penalty=100.0), int(row.argsort()[-2])),
    ):
        assert _alone(row, _draw(params, given=[likeliest] * 9)).token == expected


def test_minus_a_hundred_bans_whatever_the_logits() -> None:
    row = np.zeros(VOCAB, dtype=np.float32)
    row[7] = 1e6
    assert _alone(row, _draw(SamplingParams(temperature=0.0, logit_bias={7: -99.9}))).token == 7
    assert _alone(row, _draw(SamplingParams(temperature=0.0, logit_bias={7: -100}))).token == 0


def test_logprobs_are_the_models_own_before_any_change() -> None:
    row = _row(3)
    likeliest = np.argsort(-row, kind="stable")
    params = SamplingParams(
        temperature=0.0, logit_bias={int(likeliest[0]): -100}, repetition_penalty=2.0, logprobs=True, top_logprobs=3
    )
    found = _alone(row, _draw(params, given=range(VOCAB)))
    expected = log_softmax.log_softmax(row[None])[0]
    assert found.token is not None
    assert found.token != likeliest[0]
    assert found.logprob == pytest.approx(expected[found.token], abs=1e-13)
    assert [token for token, _ in found.top] == likeliest[:3].tolist()
    assert [value for _, value in found.top] == pytest.approx(expected[likeliest[:3]], abs=1e-13)


def test_a_log_probability_has_the_same_bits_whether_others_are_asked_for_or_not() -> None:
    for seed in range(40):
        row, params = _row(seed), SamplingParams(seed=seed, logprobs=True)
        alone = _alone(row, _draw(params))
        assert alone.token is not None
        assert alone.logprob == log_probs(row[None], np.array([alone.token]))[0]
        assert _alone(row, _draw(replace(params, top_logprobs=2))).logprob == alone.logprob


def test_nothing_asked_nothing_told() -> None:
    found = _alone(_row(3), _draw(SamplingParams()))
    assert (found.logprob, found.top, found.error) == (0.0, (), None)


def test_more_top_logprobs_than_tokens_gives_all_tokens() -> None:
    found = sample(np.zeros((1, 3), dtype=np.float32), [Draw(SamplingParams(logprobs=True, top_logprobs=20), 0)])[0]
    assert [token for token, _ in found.top] == [0, 1, 2]


MANY: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "logprobs": True},
    {"min_p": 0.1, "logprobs": True, "top_logprobs": 2},
    {"top_k": 5, "top_p": 0.7, "sampling_order": "rwkv", "temperature": 1.4},
    {"logit_bias": {3: 4.0, 4: -100}, "presence_penalty": 1.0, "logprobs": True, "top_logprobs": 7},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "seed": 9},
]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99), TOKENS, TOKENS), min_size=2, max_size=12))
@settings(max_examples=60, deadline=None)
def test_alone_and_in_a_crowd_the_same_token_and_log_probabilities(
    crowd: list[tuple[int, int, list[int], list[int]]],
) -> None:
    draws = [_draw(SamplingParams(**MANY[kind]), before, drawn, seed) for kind, seed, before, drawn in crowd]
    rows = np.stack([_row(seed) for _, seed, _, _ in crowd])
    together = sample(rows.copy(), draws)
    assert together == [_alone(row, draw) for row, draw in zip(rows, draws, strict=True)]


def test_a_row_that_cannot_be_drawn_from_leaves_its_neighbours_alone() -> None:
    banned = SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), -100), logprobs=True, top_logprobs=2)
    rows = np.stack([_row(seed) for seed in range(4)])
    rows[1, 3] = np.nan
    draws = [
        _draw(SamplingParams(logprobs=True)),
        _draw(SamplingParams(logprobs=True)),
        _draw(banned),
        _draw(SamplingParams()),
    ]
    found = sample(rows.copy(), draws)
    assert [found[0], found[3]] == [_alone(rows[0], draws[0]), _alone(rows[3], draws[3])]
    assert [found[1].token, found[2].token] == [None, None]
    assert isinstance(found[2].error, RequestError)
    assert isinstance(found[1].error, KittiwakeError)
    assert not isinstance(found[1].error, RequestError)
    assert "not finite" in str(found[1].error)
    assert "every one is banned" in str(found[2].error)
