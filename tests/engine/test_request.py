from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest

from kittiwake.engine.request import Completion, SamplingParams, TokenLogprob
from kittiwake.errors import RequestError
from kittiwake.ops.sampling.reference import derived_seed


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty must be from -2 to 2, got 2.5"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"frequency_penalty": True}, "frequency_penalty must be a number"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be from 0.01 to 100, got 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"logit_bias": {5: 101.0}}, "logit_bias of token 5 must be from -100 to 100, got 101"),
        ({"logit_bias": {5: float("-inf")}}, "logit_bias of token 5"),
        ({"logit_bias": {5: None}}, "logit_bias of token 5 must be a number"),
        ({"logit_bias": {"5": 1.0}}, "a token id of logit_bias must be a whole number, got '5'"),
        ({"logit_bias": {-1: 1.0}}, "a token id of logit_bias must be at least 0"),
        ({"logit_bias": [(5, 1.0)]}, "logit_bias must map"),
        ({"logit_bias": None}, "logit_bias must map"),
        ({"sampling_order": "Rwkv"}, "standard, rwkv"),
        ({"n": 0}, "n must be from 1 to 1024"),
        ({"n": 1025}, "n must be from 1 to 1024"),
        ({"n": 1.0}, "n must be a whole number"),
        ({"n": 2, "temperature": 0.0}, "temperature 0 would draw the same completion 2 times"),
        ({"temperature": 0.0, "min_p": 0.1}, "temperature 0 is greedy and contradicts"),
        ({"logprobs": 3}, "logprobs must be true or false, got 3"),
        ({"top_logprobs": 3}, "top_logprobs 3 needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be from 0 to 20"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ],
)
def test_values_that_cannot_be_honoured_are_refused_by_name(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        SamplingParams(**wrong)


def test_greedy_takes_bias_penalties_and_logprobs() -> None:
    params = SamplingParams(
        temperature=0.0, presence_penalty=0.5, repetition_penalty=1.1, logit_bias={3: -100}, logprobs=True
    )
    assert params.has_penalties


def test_a_bias_is_copied_and_params_stay_values() -> None:
    bias = {9: 1, 2: -100}
    params = SamplingParams(logit_bias=bias)
    bias[5] = 3
    assert list(params.logit_bias.items()) == [(2, -100.0), (9, 1.0)]
    assert params == SamplingParams(logit_bias={2: -100, 9: 1})
    assert hash(params) == hash(SamplingParams(logit_bias={2: -100, 9: 1}))
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params


def test_each_sample_has_a_seed_of_its_own_and_the_first_that_of_the_request() -> None:
    params = SamplingParams(seed=5, n=3, min_p=0.1)
    assert [params.for_sample(index).seed for index in range(3)] == [5, derived_seed(5, 1), derived_seed(5, 2)]
    assert {(one.n, one.min_p) for one in map(params.for_sample, range(3))} == {(1, 0.1)}
    full = SamplingParams(n=3, seed=5, stop=("a",), logit_bias={5: 1, 2: -100}, stop_token_ids=(4,), logprobs=True)
    for index in range(3):
        assert full.for_sample(index) == replace(full, n=1, seed=full.for_sample(index).seed)
    assert (full.n, full.seed) == (3, 5)
    with pytest.raises(RequestError, match="the index of a sample must be from 0 to 2, got 3"):
        params.for_sample(3)


def test_text_of_half_a_character() -> None:
    assert TokenLogprob(1, -0.5, "é".encode()[:1]).text == "\ufffd"


def test_choices_are_all_samples_in_order() -> None:
    second = Completion("b", (2,), 1, "stop")
    first = Completion("a", (1,), 1, "stop", others=(second,))
    assert [one.text for one in first.choices] == ["a", "b"]
    assert second.choices == (second,)
