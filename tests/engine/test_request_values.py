"""Sampling parameters: every value that cannot be honoured is refused by name when they are made."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kittiwake.engine.request import MAX_SEED, Completion, SamplingParams
from kittiwake.errors import RequestError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": -5}, "max_tokens must be at least 1, got -5"),
        ({"max_tokens": 2.0}, "max_tokens must be a whole number, got 2.0"),
        ({"max_tokens": True}, "max_tokens must be a whole number, got True"),
        ({"max_tokens": "7"}, "max_tokens must be a whole number, got '7'"),
        ({"min_tokens": -1}, "min_tokens must be at least 0, got -1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens 9 is above max_tokens 8"),
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
        ({"temperature": math.nan}, "temperature must be at least 0, got nan"),
        ({"temperature": math.inf}, "temperature must be at least 0, got inf"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": False}, "temperature must be a number, got False"),
        ({"top_k": -1}, "top_k must be from 0 to 2147483647, got -1"),
        ({"top_k": 1.5}, "top_k must be a whole number, got 1.5"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0"),
        ({"top_p": -0.1}, "top_p must be from 0 to 1, got -0.1"),
        ({"top_p": 1.01}, "top_p must be from 0 to 1, got 1.01"),
        ({"top_p": math.nan}, "top_p must be from 0 to 1, got nan"),
        ({"temperature": 0.0, "top_k": 4}, "temperature 0 is greedy and contradicts top_k 4"),
        ({"temperature": 0, "top_p": 0.5}, "temperature 0 is greedy and contradicts top_k 0, top_p 0.5"),
        ({"top_k": 2**63}, "top_k must be from 0 to 2147483647, got 9223372036854775808"),
        ({"temperature": 10**400}, "temperature must be at least 0, got a whole number of 401 digits"),
        ({"stop": {"a": 1}}, "stop must be a list"),
        ({"stop": ["\ud800"]}, "a stop string must be non-empty text that UTF-8 can hold"),
        ({"seed": -1}, "seed must be from 0 to 9223372036854775807, got -1"),
        ({"seed": MAX_SEED + 1}, "seed must be from 0 to"),
        ({"seed": 1.0}, "seed must be a whole number"),
        ({"seed": None}, "seed must be a whole number, got None"),
        ({"stop": ("a", "")}, "non-empty text that UTF-8 can hold, got ''"),
        ({"stop": ""}, "non-empty text that UTF-8 can hold, got ''"),
        ({"stop": (1,)}, "non-empty text that UTF-8 can hold, got 1"),
        ({"stop": None}, "stop must be a list, got None"),
        ({"stop": 5}, "stop must be a list, got 5"),
        ({"stop": b"ab"}, "stop must be a list, got b'ab'"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids must be at least 0, got -1"),
        ({"stop_token_ids": (1.0,)}, "stop_token_ids must be a whole number, got 1.0"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list, got 3"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
    ],
)
def test_values_that_cannot_be_honoured_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**values)
    assert (caught.value.exit_code, caught.value.http_status) == (2, 400)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_tokens": 1, "min_tokens": 1},
        {"temperature": 0},
        {"temperature": 1, "top_p": 1},
        {"top_p": 1e-300},
        {"top_k": 10**9},
        {"seed": MAX_SEED},
    ],
)
def test_values_at_the_edge_are_taken(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


def test_stops_become_tuples() -> None:
    params = SamplingParams(stop="\n\n", stop_token_ids=[3, 4])  # type: ignore[arg-type]
    assert params.stop == ("\n\n",) and params.stop_token_ids == (3, 4)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert hash(params) == hash(SamplingParams(stop=("\n\n",), stop_token_ids=(3, 4)))


def test_a_completion_counts_its_tokens() -> None:
    assert Completion("a", (1, 2, 3), 5, "stop").completion_tokens == 3
