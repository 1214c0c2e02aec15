"""Tokens to an answer: what is shown when, why it ends, and which tokens are accepted."""

from __future__ import annotations

import codecs
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kittiwake.engine.answer import Answer, Step
from kittiwake.engine.request import SamplingParams
from tests.engine.pieces import CONTROL, END, HOLE, PIECES, PieceTokenizer

TOKENIZER = PieceTokenizer()


def run(tokens: list[int], **params: Any) -> tuple[str, str | None, Answer]:
    """Push tokens until the answer ends: its text, why it ended, and the answer."""
    answer = Answer(TOKENIZER, SamplingParams(**params))
    text = ""
    for token in tokens:
        step = answer.push(token)
        text += step.text
        if step.finish_reason is not None:
            return text, step.finish_reason, answer
    return text, None, answer


@pytest.mark.parametrize(
    ("tokens", "params", "text", "reason", "drawn", "accepted"),
    [
        # ends
        ([1, 2, END, 3], {}, "ab", "stop", 3, 2),
        ([END], {}, "", "stop", 1, 0),
        ([1, END, 2], {"ignore_eos": True, "max_tokens": 3}, "ab", "length", 3, 3),
        ([1, 2, 3], {"stop_token_ids": (2,)}, "a", "stop", 2, 1),
        ([1, 2, 3], {"stop_token_ids": (2,), "ignore_eos": True}, "a", "stop", 2, 1),
        ([1, 2, 3], {"max_tokens": 2}, "ab", "length", 2, 2),
        ([1, END], {"max_tokens": 2}, "a", "stop", 2, 1),
        ([1, 2], {"max_tokens": 3}, "ab", None, 2, 2),
        # stop strings
        ([1, 2, 3], {"stop": ("b",)}, "a", "stop", 2, 1),
        ([1, 4, 3], {"stop": ("b",)}, "aa", "stop", 2, 1),  # "ab" is cut inside: not accepted
        ([1, 13, 3], {"stop": ("bc",)}, "aa", "stop", 2, 1),
        ([1, 1, 2, 3], {"stop": ("abc",)}, "a", "stop", 4, 1),
        ([4, 1, 2, 3], {"stop": ("babc",)}, "a", "stop", 4, 0),
        ([1, 2, 1, 2, 5], {"stop": ("abc",), "max_tokens": 5}, "abab\n", "length", 5, 5),
        ([1, 2], {"stop": ("abc",), "max_tokens": 2}, "ab", "length", 2, 2),  # held text is shown at the end
        ([1, 2, END], {"stop": ("abc",)}, "ab", "stop", 3, 2),
        ([1, 2], {"stop": ("b",), "max_tokens": 2}, "a", "stop", 2, 1),
        ([3, 1], {"stop": ("c",)}, "", "stop", 1, 0),
        ([1, CONTROL, 2], {"stop": ("b",)}, "a", "stop", 3, 2),
        ([1, 2, CONTROL, 3], {"stop": ("bc",)}, "a", "stop", 4, 1),
        # characters over token borders
        ([6, 7, 8], {"max_tokens": 3}, "안녕", "length", 3, 3),
        ([6, 7, 8, 1], {"stop": ("녕",)}, "안", "stop", 3, 1),
        ([7, 8, 1], {"stop": ("a",)}, "녕", "stop", 3, 2),
        ([9, 10, 1], {"stop": ("c",)}, "녕", "stop", 2, 0),  # the last byte of 녕 came with the stop string
        ([1, 15, 8], {"stop": ("녕",)}, "ax", "stop", 3, 1),
        ([15, 8, 3], {"stop": ("c",)}, "x녕", "stop", 3, 2),
        ([1, 7], {"max_tokens": 2}, "a\ufffd", "length", 2, 2),  # an open character at the end
        ([1, 7, END], {}, "a\ufffd", "stop", 3, 2),
        ([1, 7], {"max_tokens": 2, "stop": ("\ufffd",)}, "a", "stop", 2, 1),
        ([1, 7, END], {"stop": ("\ufffd",)}, "a", "stop", 3, 1),
        ([14, 1], {"stop": ("a",)}, "\ufffd", "stop", 2, 1),
        # min_tokens
        ([2, 2, 1], {"stop": ("b",), "min_tokens": 2}, "b", "stop", 2, 1),
        ([2, 2, 1], {"stop": ("b",), "min_tokens": 3, "max_tokens": 3}, "bba", "length", 3, 3),
        ([1, 2], {"stop": ("ab",), "min_tokens": 2, "max_tokens": 2}, "ab", "length", 2, 2),  # "a" came too early
        ([7, 8, 1], {"stop": ("녕",), "min_tokens": 2}, "", "stop", 2, 0),
    ],
)  # fmt: skip
def test_cases(
    tokens: list[int], params: dict[str, Any], text: str, reason: str | None, drawn: int, accepted: int
) -> None:
    found, why, answer = run(tokens, **params)
    assert (found, why) == (text, reason)
    assert (len(answer.tokens), answer.accepted) == (drawn, accepted)


def test_text_is_shown_as_soon_as_it_is_decided_and_not_before() -> None:
    answer = Answer(TOKENIZER, SamplingParams(stop=("abc",)))
    steps = [answer.push(token) for token in (1, 2, 2, 7, 8, 1)]
    assert steps == [
        Step("", None),
        Step("", None),
        Step("abb", None),
        Step("", None),
        Step("녕", None),
        Step("", None),
    ]


def test_what_may_still_be_taken_back_is_known() -> None:
    answer = Answer(TOKENIZER, SamplingParams(stop=("ab",)))
    decided = []
    for token in (3, 1, 3, 7, 8, CONTROL, 1, 1):
        answer.push(token)
        decided.append(answer.is_decided)
    assert decided == [True, False, True, False, True, True, False, False]


def test_ends_are_banned_until_min_tokens_stand() -> None:
    answer = Answer(TOKENIZER, SamplingParams(min_tokens=2, stop_token_ids=(3, 1)))
    assert answer.banned_now == (END, 1, 3)
    answer.push(2)
    assert answer.banned_now == (END, 1, 3)
    answer.push(2)
    assert answer.banned_now == ()
    assert Answer(TOKENIZER, SamplingParams(min_tokens=1, ignore_eos=True)).banned_now == ()
    assert Answer(TOKENIZER, SamplingParams()).banned_now == ()


def decode(tokens: list[int]) -> tuple[str, bool]:
    """Text of tokens without their last, open character, and whether there is one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(b"".join(PIECES[token] or b"" for token in tokens))
    return text, bool(decoder.getstate()[0])


pieces = st.lists(st.sampled_from([token for token in range(16) if token not in (END, HOLE)]), min_size=1, max_size=14)
stops = st.lists(st.text(alphabet="abc\n안녕x\ufffd", min_size=1, max_size=4), max_size=3)


@settings(max_examples=400, deadline=None)
@given(pieces, stops)
def test_the_outcome_is_the_definition(tokens: list[int], strings: list[str]) -> None:
    """The first stop string to be complete, of several the longest, ends the text; tokens wholly before it are accepted."""
    found, why, answer = run(tokens, stop=tuple(strings), max_tokens=len(tokens))
    text, is_open = decode(tokens)
    complete = text + "\ufffd" * is_open
    ends = [(end, stop) for end in range(len(complete) + 1) for stop in strings if complete[:end].endswith(stop)]
    if not ends:
        assert (found, why, answer.accepted) == (complete, "length", len(tokens))
        return
    first = min(end for end, _ in ends)
    expected = complete[: first - max(len(stop) for end, stop in ends if end == first)]
    assert (found, why) == (expected, "stop")
    whole = [
        count
        for count in range(len(answer.tokens) + 1)
        if not decode(tokens[:count])[1] and len(decode(tokens[:count])[0]) <= len(expected)
    ]
    assert answer.accepted == max(whole)
