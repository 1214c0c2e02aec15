from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kittiwake.errors import RequestError
from kittiwake.text.chat import (
    TEMPLATES,
    Segment,
    clean,
    encode_segments,
    read_messages,
    skip_text,
)
from kittiwake.text.world import WorldTokenizer

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "<think>hm</think>\nb"},
    {"role": "user", "content": " c\r\n\r\n\nd "},
]


def _text(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return TEMPLATES[name].render(read_messages(messages), **options).text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("g1", "System: Be kind.\n\nUser: a\n\nAssistant: b\n\nUser: c\nd\n\nAssistant:"),
        ("g1-think", "System: Be kind.\n\nUser: a\n\nAssistant: b\n\nUser: c\nd\n\nAssistant: <think"),
        ("g1-fast", "System: Be kind.\n\nUser: a\n\nAssistant: b\n\nUser: c\nd\n\nAssistant: <think>\n</think"),
        ("raven", "Be kind.\n\nBob: a\n\nAlice: b\n\nBob: c\nd\n\nAlice:"),
        ("qa", "Be kind.\n\nQuestion: a\n\nAnswer: b\n\nQuestion: c\nd\n\nAnswer:"),
        ("plain", "Be kind.\n\na b\n\nc\nd"),
    ],
)
def test_turns_are_written_as_the_models_learned_them(name: str, expected: str) -> None:
    assert _text(name, TALK) == expected


def test_an_answer_as_it_was_said_keeps_its_paragraphs() -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "one\n\ntwo\n"}]
    messages = read_messages([*talk, {"role": "user", "content": "b"}])
    assert "one\ntwo" in TEMPLATES["g1"].render(messages).text
    assert "Assistant: one\n\ntwo\n\nUser: b" in TEMPLATES["g1"].render(messages, as_said=True).text


def test_prompts_are_the_tokens_the_models_were_trained_on(world: WorldTokenizer) -> None:
    for name, ids in (
        ("g1", [24281, 59, 4571, 261, 5585, 41693, 59]),
        ("g1-think", [24281, 59, 4571, 261, 5585, 41693, 59, 295, 35762]),
    ):
        rendered = TEMPLATES[name].render(read_messages([{"role": "user", "content": "hi"}]))
        assert encode_segments(world, rendered.segments) == ids


def test_stops_of_g1_leave_paragraphs_alone() -> None:
    assert TEMPLATES["g1"].stops == ("\n\nUser:", "\nUser:")
    assert "\n\n" in TEMPLATES["raven"].stops


@given(st.text(), st.sampled_from(["user", "system"]))
def test_no_message_can_end_its_turn(text: str, role: str) -> None:
    if not clean(text):
        return
    rendered = _text("g1", [{"role": role, "content": text}, {"role": "user", "content": "x"}])
    assert rendered.count("\n\n") == 2


def test_developer_is_system_and_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    found = read_messages([{"role": "developer", "content": "x"}, {"role": "user", "content": parts}])
    assert [(message.role, message.content) for message in found] == [("system", "x"), ("user", "hello")]


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "no messages"),
        ("hello", "must be a list"),
        ({"role": "user", "content": "x"}, "must be a list"),
        ([3], "message 1 must be an object"),
        ([{"role": "tool", "content": "x"}], "the role 'tool'"),
        ([{"content": "x"}], "the role None"),
        ([{"role": "user"}], "content must be a text, got None"),
        ([{"role": "user", "content": " \n"}], "message 1 (user) is empty"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}], "message 2 (assistant) is empty"),
        ([{"role": "user", "content": "x", "tool_calls": []}], "tool_calls"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "'image_url'"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "cache": 1}]}], "exactly type and text"),
        ([{"role": "user", "content": "x", "reasoning_content": "y"}], "reasoning_content"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "nothing to answer"),
    ],
)
def test_messages_that_cannot_be_used_are_named(messages: Any, complaint: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_messages(messages)
    assert complaint in str(caught.value)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(RequestError, match="no option enable_thinking"):
        TEMPLATES["g1"].render(read_messages([{"role": "user", "content": "x"}]), options={"enable_thinking": True})


def test_skipping_text_leaves_what_follows() -> None:
    segments = [Segment("ab"), Segment("<x>", True), Segment("cd")]
    assert skip_text(segments, 0) == segments
    assert skip_text(segments, 1) == [Segment("b"), *segments[1:]]
    assert skip_text(segments, 2) == segments[1:]
    assert skip_text(segments, 3) == [Segment("x>"), Segment("cd")]
    assert skip_text(segments, 7) == []
