from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kittiwake.text.reasoning import CLOSING, OPENING, ReasoningSplitter, Split, split_reasoning

PIECES = st.lists(
    st.sampled_from(
        ["<", "<think", ">", "<think>", "</think", "</think>", "/think>", " ", "\n", "a", "b<", "thin", "é"]
    ),
    max_size=12,
)
PREFIXES = st.sampled_from(["", "<think", "<think>\n", "<think>\n</think", "<think></think>", " <think"])


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>\nwell\n</think>\n\nYes.", "well\n", "Yes."),
        (" Hello", "", "Hello"),
        ("Write <think>x</think> like so", "", "Write <think>x</think> like so"),
        ("<think>never closed", "never closed", ""),
        ("<think></think>Yes", "", "Yes"),
        ("<think>a</think> b </think> c", "a", "b </think> c"),
        ("<thinking>", "", "<thinking>"),
        ("<thi", "", "<thi"),
        ("<think>a</thin", "a</thin", ""),
        ("", "", ""),
    ],
)
def test_only_a_block_at_the_start_is_reasoning(text: str, reasoning: str, answer: str) -> None:
    assert split_reasoning(text) == Split(reasoning, answer)


@pytest.mark.parametrize(
    ("prefix", "text", "reasoning", "answer"),
    [
        ("<think", ">\nwell</think>\nYes", "well", "Yes"),
        ("<think>\n</think", ">\nYes", "", "Yes"),
        ("<think>\n", "well</think>Yes", "well", "Yes"),
        ("<think", "er> is a word", "", "<thinker> is a word"),
        ("<think", "", "", ""),
        ("<think>\n</think", "", "", ""),
    ],
)
def test_a_prompt_may_begin_the_answer(prefix: str, text: str, reasoning: str, answer: str) -> None:
    assert split_reasoning(text, prefix) == Split(reasoning, answer)


def _streamed(pieces: list[str], prefix: str) -> Split:
    splitter = ReasoningSplitter(prefix)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.flush()]
    return Split("".join(p.reasoning for p in parts), "".join(p.answer for p in parts))


@given(PIECES, PREFIXES)
def test_streamed_is_whole_wherever_the_pieces_are_cut(pieces: list[str], prefix: str) -> None:
    text = "".join(pieces)
    whole = split_reasoning(text, prefix)
    assert _streamed(pieces, prefix) == whole
    assert _streamed(list(text), prefix) == whole


@given(PIECES, PREFIXES)
def test_split_is_what_the_words_say(pieces: list[str], prefix: str) -> None:
    text = (prefix + "".join(pieces)).lstrip(" \t\r\n")
    if not pieces or not "".join(pieces):
        return
    if text.startswith(OPENING):
        inner, _, rest = text.removeprefix(OPENING).partition(CLOSING)
        expected = Split(inner.lstrip(" \t\r\n"), rest.lstrip(" \t\r\n"))
        # What the prompt held already of the reasoning is not the model's.
        got = split_reasoning("".join(pieces), prefix)
        assert expected.reasoning.endswith(got.reasoning)
        assert got.answer == expected.answer
    else:
        assert split_reasoning("".join(pieces), prefix) == Split("", text)


@given(PIECES)
def test_hardly_anything_is_held_back(pieces: list[str]) -> None:
    splitter = ReasoningSplitter()
    shown = ""
    for piece in pieces:
        shown += "".join(splitter.push(piece))
    rest = "".join(splitter.flush())
    assert len(rest) < len(CLOSING)
