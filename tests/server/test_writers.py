from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kittiwake.engine.answer import Answer
from kittiwake.engine.request import SamplingParams, TokenLogprob
from kittiwake.server.engine_client import AnswerEnd, AnswerEvent, PromptScores
from kittiwake.server.service import Head, Served
from kittiwake.server.writers import ChatWriter, CompletionWriter, Wishes
from kittiwake.text.tokenizer import load_tokenizer
from tests.server.ask import events_of
from tests.server.stub_engine import stub_info

BYTES = load_tokenizer("bytes")
HEAD = Head("x-1", 1, Served(stub_info(), "stub", BYTES, None))
ALL = Wishes(logprobs=True, usage=True, token_ids=True)
REPLIES = st.lists(
    st.sampled_from(["<think>", "</think>", "a", " ", "\n", "\u00e9", "\U0001f642", "<", "\ud7ff", "\x00"])
).map("".join)


def events_for(reply: bytes, index: int) -> list[AnswerEvent]:
    """What an engine says of a reply, a token an event, and of its end."""
    answer = Answer(BYTES, SamplingParams(max_tokens=len(reply) + 1))
    events = []
    for token in reply:
        logprob = TokenLogprob(token, -float(token), bytes([token]))
        events.append(AnswerEvent(index, answer.push(token).text, (token,), (logprob,)))
    rest = reply.decode("utf-8", "replace").removeprefix("".join(event.text for event in events))
    return [*events, AnswerEvent(index, rest, end=AnswerEnd("stop"))]


def batches_of(replies: list[bytes], seed: int) -> list[list[AnswerEvent]]:
    """The events of several answers, shuffled between each other, some ready together."""
    draw = random.Random(seed)
    queues = [events_for(reply, index) for index, reply in enumerate(replies)]
    mixed = []
    while any(queues):
        queue = draw.choice([queue for queue in queues if queue])
        mixed.append(queue.pop(0))
    batches: list[list[AnswerEvent]] = [[]]
    for event in mixed:
        batches[-1].append(event)
        if draw.random() < 0.5:
            batches.append([])
    return [batch for batch in batches if batch]


def joined(text: str, count: int, key: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Choices put together from a stream, each with exactly one finish reason on its last chunk; and its usage."""
    *chunks, last, done = events_of(text)
    assert done == "[DONE]" and last["choices"] == []
    found = [{"text": "", "reasoning": "", "ids": [], "logprobs": [], "reasons": []} for _ in range(count)]
    for chunk in chunks:
        for choice in chunk["choices"]:
            mine: dict[str, Any] = found[choice["index"]]
            assert not mine["reasons"], "a chunk after the last"
            delta = choice.get("delta", {})
            mine["text"] += choice.get("text", "") + delta.get("content", "")
            mine["reasoning"] += delta.get("reasoning_content", "")
            mine["ids"] += choice.get("token_ids", [])
            mine["logprobs"] += (choice["logprobs"] or {}).get(key, [])
            mine["reasons"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return found, last["usage"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(REPLIES, min_size=1, max_size=3),
    st.integers(0, 1 << 20),
    st.sampled_from(["", "<think", "<think>", "<think>\n</think"]),
)
def test_a_stream_puts_together_what_the_whole_has(texts: list[str], seed: int, opening: str) -> None:
    replies = [text.encode() for text in texts]
    batches, n = batches_of(replies, seed), len(replies)
    whole = ChatWriter(HEAD, [1, 2], n, ALL, opening, keeps=True)
    stream = ChatWriter(HEAD, [1, 2], n, ALL, opening, keeps=False)
    written = b""
    for batch in batches:
        whole.take(batch)
        written += stream.push(batch)
    content = whole.whole()
    found, usage = joined((written + stream.close()).decode(), n, "content")
    for one, choice, reply in zip(found, content["choices"], replies, strict=True):
        message = choice["message"]
        assert (one["text"], one["reasoning"]) == (message["content"], message.get("reasoning_content", ""))
        assert one["ids"] == choice["token_ids"] == list(reply)
        assert one["logprobs"] == choice["logprobs"]["content"]
        assert one["reasons"] == [choice["finish_reason"]] == ["stop"]
    assert usage == content["usage"]
    assert usage["completion_tokens"] == sum(map(len, replies))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=12), min_size=1, max_size=3), st.integers(0, 1 << 20), st.booleans())
@example([b"\xed\xa0"], 0, False)  # an end that is two characters to replace
def test_the_same_for_completions_of_any_bytes(replies: list[bytes], seed: int, echo: bool) -> None:
    prompts = [[97, 0xC3, 0xA9]] * len(replies)
    scores = [PromptScores((None, TokenLogprob(0xC3, -1.0, b"\xc3"), TokenLogprob(0xA9, -2.0, b"\xa9")))] * len(replies)
    more: dict[str, Any] = {"echo": ["a\u00e9"] * len(replies), "scores": scores} if echo else {}
    whole = CompletionWriter(HEAD, prompts, 1, ALL, keeps=True, **more)
    stream = CompletionWriter(HEAD, prompts, 1, ALL, keeps=False, **more)
    written = stream.opening()
    for batch in batches_of(replies, seed):
        whole.take(batch)
        written += stream.push(batch)
    content = whole.whole()
    found, usage = joined((written + stream.close()).decode(), len(replies), "token_logprobs")
    for one, choice, reply in zip(found, content["choices"], replies, strict=True):
        assert one["text"] == choice["text"] == ("a\u00e9" if echo else "") + reply.decode("utf-8", "replace")
        assert one["ids"] == choice["token_ids"] == list(reply)
        assert one["logprobs"] == choice["logprobs"]["token_logprobs"]
        lengths = {len(values) for values in choice["logprobs"].values()}
        assert lengths == {len(reply) + (3 if echo else 0)}
        offsets = choice["logprobs"]["text_offset"]
        assert offsets == sorted(offsets) and all(0 <= at < max(1, len(choice["text"])) for at in offsets)
    assert usage == content["usage"]


def test_nothing_is_sent_while_a_character_is_open() -> None:
    writer = ChatWriter(HEAD, [1], 1, Wishes(), "", keeps=False)
    assert writer.push([AnswerEvent(0, "", (0xE4,))]) == b""
    assert b'"content":"\xe4\xbd\xa0"' in writer.push([AnswerEvent(0, "\u4f60", (0xBD, 0xA0))])


def test_a_whole_answer_is_not_asked_for_by_a_stream() -> None:
    writer = ChatWriter(HEAD, [1], 1, Wishes(), "", keeps=False)
    writer.push([AnswerEvent(0, "a", (97,), end=AnswerEnd("stop"))])
    assert writer.choices[0].text == ""  # a stream keeps no text


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_last_choice_has_the_timings(reason: str) -> None:
    writer = CompletionWriter(HEAD, [[1], [2]], 1, Wishes(), keeps=False)
    first = events_of(writer.push([AnswerEvent(1, "a", (97,), end=AnswerEnd(reason))]).decode())
    last = events_of(writer.push([AnswerEvent(0, "b", (98,), end=AnswerEnd(reason, decode_ms=4))]).decode())
    assert all("timings" not in chunk for chunk in first) and last[-1]["timings"]["predicted_n"] == 2
    assert last[-1]["choices"][0]["finish_reason"] == reason
