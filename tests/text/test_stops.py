"""Stop strings: cut at the first one, wherever the tokens end, and never show what must be cut."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kittiwake.errors import RequestError
from kittiwake.text.stops import MAX_STOP_CHARS, StopMatcher
from kittiwake.text.stream import TextStream
from kittiwake.text.world import WorldTokenizer

letters = st.text(alphabet="ab\n", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=6), max_size=4)


def cut_naively(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the stop string that is complete first ends the text; of several, the longest."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece).text for piece in pieces)
    return shown + matcher.flush(), matcher.hit


def split_at(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


@settings(max_examples=500)
@given(stop_lists, letters, st.lists(st.integers(0, 30), max_size=8))
def test_the_outcome_is_the_definition_wherever_the_text_is_cut(stops: list[str], text: str, cuts: list[int]) -> None:
    assert run(stops, split_at(text, cuts)) == cut_naively(text, stops)
    assert run(stops, list(text)) == cut_naively(text, stops)


@settings(max_examples=300)
@given(stop_lists, letters, letters)
def test_nothing_is_shown_that_a_continuation_would_cut_and_nothing_is_held_without_need(
    stops: list[str], text: str, more: str
) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.push(text).text
    assert cut_naively(text + more, stops)[0].startswith(shown)
    assert matcher.accepted_chars == len(shown)
    if matcher.hit is None:
        assert len(shown) + matcher.held == len(text)
        # What is held is a beginning of some stop string, and the longest such end of the text.
        ends = [n for n in range(len(text) + 1) if any(stop.startswith(text[len(text) - n :]) for stop in stops)]
        assert matcher.held == max(ends, default=0)


@given(stop_lists, st.lists(letters, max_size=5))
def test_every_character_is_accepted_held_or_cut(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        result = matcher.push(piece)
        shown += result.text
        assert result.hit == matcher.hit
        assert matcher.accepted_chars == len(shown)
    shown += matcher.flush()
    assert matcher.accepted_chars == len(shown)
    assert matcher.held == 0
    assert matcher.flush() == ""


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "hit"),
    [
        ([], ["a", "b"], "ab", None),
        (["\n\n"], ["a\n", "\nb"], "a", "\n\n"),
        (["\n\nUser:"], ["ok\n", "\n", "Us", "er", ": hi"], "ok", "\n\nUser:"),
        (["\n\nUser:"], ["ok\n\nUse", "ful"], "ok\n\nUseful", None),
        (["aab"], ["aaab"], "a", "aab"),
        (["abab"], ["abaabab"], "aba", "abab"),
        (["abcd", "bc"], ["abcd"], "a", "bc"),
        (["bc", "abc"], ["xabc"], "x", "abc"),
        (["ab", "abc"], ["xabc"], "x", "ab"),
        (["a", "a"], ["ba"], "b", "a"),
        (["stop"], ["stop"], "", "stop"),
        (["stop"], ["sto"], "sto", None),
        (["stop"], ["STOP"], "STOP", None),
        (["녕하"], ["안녕", "하세요"], "안", "녕하"),
        (["🙂"], ["a🙂b"], "a", "🙂"),
        (["e\u0301"], ["e", "\u0301"], "", "e\u0301"),
        (["\ufffd"], ["a\ufffd"], "a", "\ufffd"),
    ],
)
def test_cases(stops: list[str], pieces: list[str], shown: str, hit: str | None) -> None:
    assert run(stops, pieces) == (shown, hit)


def test_a_token_with_three_line_ends_meets_a_stop_of_two(world: WorldTokenizer) -> None:
    """Token 3328 is "\\n\\n\\n": a stop on the token of "\\n\\n" would never see it."""
    stream, matcher = TextStream(world), StopMatcher(["\n\n"])
    assert matcher.push(stream.push(33155)) == ("Hello", None)
    assert matcher.push(stream.push(3328)) == ("", "\n\n")
    assert matcher.accepted_chars == 5


def test_a_stop_over_the_borders_of_tokens_that_the_encoder_would_never_make(world: WorldTokenizer) -> None:
    """A model may write "。\\n" then "\\n", "User", ":"; ids of the encoded stop string do not occur."""
    stream, matcher = TextStream(world), StopMatcher(["\n\nUser:"])
    shown = [matcher.push(stream.push(token_id)) for token_id in [28329, 11, 24281, 59, 33155]]
    assert "".join(result.text for result in shown) == "。"
    assert [result.hit for result in shown] == [None, None, None, "\n\nUser:", "\n\nUser:"]


def test_a_stop_inside_a_syllable_split_over_tokens(world: WorldTokenizer) -> None:
    stream, matcher = TextStream(world), StopMatcher(["녕"])
    shown = [matcher.push(stream.push(token_id)) for token_id in [18815, 3266, 150, 19052]]
    assert [result.text for result in shown] == ["안", "", "", ""]
    assert shown[2].hit == "녕"


@settings(max_examples=200, deadline=None)
@given(stop_lists, letters, letters)
def test_another_matcher_begins_anew_and_neither_disturbs_the_other(stops: list[str], one: str, other: str) -> None:
    first = StopMatcher(stops)
    shown = first.push(one[:5]).text
    second = first.another()
    result = second.push(other).text + second.flush(), second.hit
    assert result == run(stops, [other])
    assert (shown + first.push(one[5:]).text + first.flush(), first.hit) == run(stops, [one])


def test_after_a_hit_everything_is_cut() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == ("a", "x")
    assert matcher.push("more x") == ("", "x")
    assert matcher.flush() == ""
    assert (matcher.hit, matcher.held, matcher.accepted_chars) == ("x", 0, 1)


@pytest.mark.parametrize("stops", ["\n\n", [""], ["a", ""], [None], [1], [b"a"]])
def test_stops_that_make_no_sense_are_refused(stops: list[str]) -> None:
    with pytest.raises(RequestError, match="stop string"):
        StopMatcher(stops)


def test_endless_stop_strings_are_refused() -> None:
    StopMatcher(["a" * MAX_STOP_CHARS])
    with pytest.raises(RequestError, match=f"{MAX_STOP_CHARS + 2} characters"):
        StopMatcher(["a" * MAX_STOP_CHARS, "bb"])


def test_repetition_that_almost_matches_stays_linear() -> None:
    """Each "b" throws away a nearly complete match of 20,000 characters; a search from anew would take 10^9 steps."""
    stop = "a" * 20_000 + "c"
    matcher = StopMatcher([stop])
    text = ("a" * 20_000 + "b") * 10
    start = time.perf_counter()
    shown = "".join(matcher.push(char).text for char in text) + matcher.flush()
    assert shown == text
    assert time.perf_counter() - start < 5
