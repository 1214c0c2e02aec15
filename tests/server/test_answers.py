from __future__ import annotations

import pytest

from kittiwake.engine.request import TokenLogprob
from kittiwake.server.answers import (
    Choice,
    Piece,
    PromptAnswers,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    spelled,
    timings,
    usage,
)
from kittiwake.server.engine_client import AnswerEnd, AnswerEvent, EngineError, Failure
from kittiwake.text.tokenizer import load_tokenizer

BYTES = load_tokenizer("bytes")


def answered(text: str, opening: str | None = None, end: AnswerEnd | None = None, burst: int = 1) -> Choice:
    choice, data = Choice(0, opening), text.encode()
    for first in range(0, len(data), burst):
        part = data[first : first + burst]
        choice.push(AnswerEvent(0, part.decode(), tuple(part)), Piece(0))
    choice.push(AnswerEvent(0, end=end or AnswerEnd("stop")), Piece(0))
    return choice


@pytest.mark.parametrize(
    ("opening", "text", "reasoning", "content", "tokens"),
    [
        ("", "Hello", "", "Hello", 0),
        ("", "<think>ab</think>c", "ab", "c", len("<think>ab</think>")),
        ("", "<think>ab", "ab", "", len("<think>ab")),
        ("<think>", "ab</think>\nc", "ab", "c", len("ab</think>")),
        ("<think", ">ab</think>c", "ab", "c", len(">ab</think>")),
        ("<think>\n</think", ">c", "", "c", 0),
        ("<think>\n\n</think>\n\n", "c", "", "c", 0),
        ("", "a <think>b</think>", "", "a <think>b</think>", 0),
    ],
)
@pytest.mark.parametrize("burst", [1, 3, 100])
def test_reasoning_and_its_tokens(
    opening: str, text: str, reasoning: str, content: str, tokens: int, burst: int
) -> None:
    choice = answered(text, opening, burst=burst)
    assert (choice.reasoning, choice.text) == (reasoning, content)
    assert choice.reasoning_tokens(BYTES) == tokens
    assert usage([PromptAnswers(4, [choice])], BYTES)["completion_tokens_details"] == {"reasoning_tokens": tokens}


def test_usage_counts_a_prompt_once_and_all_choices() -> None:
    end = AnswerEnd("stop", cached_tokens=3, cache="hit")
    answers = [PromptAnswers(5, [answered("ab", end=end), answered("c", end=end)]), PromptAnswers(2, [answered("d")])]
    counted = usage(answers, BYTES)
    assert (counted["prompt_tokens"], counted["completion_tokens"], counted["total_tokens"]) == (7, 4, 11)
    assert counted["prompt_tokens_details"] == {"cached_tokens": 3, "cache": "hit"}


def test_timings_are_the_longest_of_all_choices() -> None:
    slow = AnswerEnd("length", queue_ms=5, prefill_ms=20, decode_ms=100, cached_tokens=2, cache="hit")
    told = timings([PromptAnswers(10, [answered("ab", end=slow), answered("cd", end=AnswerEnd("stop", 1, 2, 3))])])
    assert (told["queue_ms"], told["prompt_ms"], told["predicted_ms"]) == (5, 20, 100)
    assert (told["prompt_n"], told["cache_n"], told["predicted_n"], told["cache"]) == (8, 2, 4, "hit")
    assert (told["prompt_per_second"], told["predicted_per_second"]) == (400.0, 40.0)
    assert timings([PromptAnswers(1, [answered("a", end=AnswerEnd("stop"))])])["predicted_per_second"] is None


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_an_end_that_is_none_is_an_error(reason: str) -> None:
    failure = Failure("no", "", 504) if reason == "error" else None
    with pytest.raises(EngineError) as caught:
        answered("a", end=AnswerEnd(reason, failure=failure))
    assert caught.value.http_status == (504 if failure else 503)


def test_tokens_that_are_no_text_do_not_look_alike() -> None:
    assert spelled(b"a") == "a" and spelled("\u4f60".encode()) == "\u4f60"
    assert spelled(b"\xe4") == "bytes:\\xe4" != spelled(b"\xe5")
    one = TokenLogprob(0xE4, -2.0, b"\xe4", (TokenLogprob(0xE5, -1.0, b"\xe5"), TokenLogprob(0xE4, -2.0, b"\xe4")))
    assert completion_logprobs([one], [b"\xe4"], TextOffsets())["top_logprobs"] == [
        {"bytes:\\xe5": -1.0, "bytes:\\xe4": -2.0}
    ]
    assert chat_logprobs([one])["content"][0]["bytes"] == [0xE4]


def test_offsets_stand_still_inside_a_character() -> None:
    offsets = TextOffsets(10)
    assert [offsets.push(token) for token in (b"a", b"\xe4", b"\xbd\xa0", b"", b"bc", b"d")] == [10, 11, 11, 12, 12, 14]
