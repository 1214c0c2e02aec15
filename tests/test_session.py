from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kittiwake.engine.request import SamplingParams
from kittiwake.errors import InputFileError, OutputError, RequestError, UsageError
from kittiwake.llm import LLM
from kittiwake.session import ChatSession, cut
from kittiwake.text.bpe import HFTokenizer
from kittiwake.text.chat import TEMPLATES, Segment, TurnTemplate, encode_segments, read_messages
from kittiwake.text.jinja_template import JinjaTemplate
from kittiwake.text.world import WorldTokenizer
from tests.models import tiny_llm, tiny_llm_with
from tests.text.tiny import make_byte_level

# Letters alone, so that an answer survives the trimming of spaces and nothing spells a stop.
LETTERS = {token: -100.0 for token in range(256) if not chr(token).isascii() or not chr(token).isalpha()}
PARAMS = SamplingParams(max_tokens=9, seed=5, logit_bias=LETTERS)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm(slots=1)


def _say(session: ChatSession, text: str) -> str:
    return "".join(delta.content for delta in session.send(text))


def _session(llm: LLM, template: str = "plain", params: SamplingParams = PARAMS) -> ChatSession:
    return ChatSession(llm, TEMPLATES[template], params)


def test_a_turn_reads_only_what_is_new(llm: LLM) -> None:
    session = _session(llm, "qa")
    first = _say(session, "one")
    assert session.tokens_read == len("Question: one\n\nAnswer:")
    assert len(first) == 9
    _say(session, "two")
    assert session.tokens_read == len("\n\nQuestion: two\n\nAnswer:")
    assert (
        bytes(session._marks[0].state.tokens).decode() == f"Question: one\n\nAnswer:{first}\n\nQuestion: two\n\nAnswer:"
    )


def test_what_was_shown_but_not_accepted_is_read_with_the_next_turn(llm: LLM) -> None:
    whole = _say(_session(llm), "one")
    session = _session(llm, params=replace(PARAMS, stop=(whole[4:6],)))
    assert _say(session, "one") == whole[:4]
    _say(session, "two")
    assert session.tokens_read == len("\n\ntwo")
    cut_inside = replace(PARAMS, logit_bias={}, stop=("\n",), max_tokens=40)
    session = _session(llm, "qa", cut_inside)
    for text in ("one", "two", "three"):
        list(session.send(text))
    assert llm.engine.free_slots == 1


def test_going_on_gives_the_bits_of_a_fresh_start(llm: LLM) -> None:
    session = _session(llm)
    answers = [_say(session, "a tale"), _say(session, "and then"), _say(session, "at last")]
    tokens = session._marks[-1].state.tokens
    fresh = llm.generate([list(tokens)], SamplingParams(max_tokens=1, temperature=0.0), keep_state=True)[0].state
    again = llm.generate(
        [[]], SamplingParams(max_tokens=1, temperature=0.0), keep_state=True, start_from=session._marks[-1].state
    )
    assert fresh is not None
    assert again[0].state is not None
    for name, array in fresh.saved.parts.items():
        assert np.array_equal(array, again[0].state.saved.parts[name])
    assert len(answers) == 3


def test_retry_reads_nothing_and_draws_with_the_next_seed(llm: LLM) -> None:
    session = _session(llm)
    first = _say(session, "one")
    second = "".join(delta.content for delta in session.retry())
    assert session.tokens_read == 0
    assert second != first
    assert [message["content"] for message in session.messages] == ["one", second]
    other = _session(llm, params=SamplingParams(max_tokens=9, seed=6, logit_bias=LETTERS))
    assert _say(other, "one") == second


def test_reset_forgets_all_but_the_system_message(llm: LLM) -> None:
    session = _session(llm, "qa")
    session.set_system("be kind")
    first = _say(session, "one")
    session.reset()
    assert session.messages == [{"role": "system", "content": "be kind"}]
    assert _say(session, "one") == first
    session.set_system("")
    assert _say(session, "one") != first


def test_an_answer_that_is_broken_off_stands_as_far_as_it_came(llm: LLM) -> None:
    session = _session(llm)
    stream = session.send("one")
    said = next(stream).content + next(stream).content
    stream.close()  # type: ignore[attr-defined]
    assert session.messages[-1] == {"role": "assistant", "content": said}
    assert llm.engine.free_slots == 1
    assert len(_say(session, "two")) == 9


def test_an_answer_without_text_leaves_no_trace(llm: LLM) -> None:
    session = _session(llm, params=SamplingParams(max_tokens=4, stop_token_ids=tuple(range(256))))
    assert _say(session, "one") == ""
    assert session.messages == []
    with pytest.raises(UsageError, match="no answer to draw anew"):
        session.retry()
    with pytest.raises(RequestError, match="empty"):
        session.send(" ")


def test_reasoning_is_forgotten_by_the_next_turn(llm: LLM) -> None:
    session = _session(llm, "g1-think")
    prompt, rest, start = session._read(read_messages([{"role": "user", "content": "one"}]))
    assert prompt.opening == "<think"
    assert bytes(rest) == b"<think"
    assert start is not None
    assert bytes(start.tokens) == b"User: one\n\nAssistant: "
    session.template = TurnTemplate("t", "Q: {}", "A:", opening="<think>so</think>")
    first = _say(session, "one")
    _say(session, "two")
    assert bytes(session._marks[0].state.tokens) == f"Q: one\n\nA: {first}\n\nQ: two\n\nA: ".encode()


def test_a_saved_session_goes_on_with_the_same_bits(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    session = _session(llm)
    session.set_param("temperature", 0.9)
    _say(session, "one")
    _say(session, "two")
    session.save(path)
    expected = _say(session, "three")
    later = _session(llm, params=SamplingParams())
    later.load(path)
    assert later.params.temperature == 0.9
    assert _say(later, "three") == expected
    assert later.messages == session.messages
    with pytest.raises(OutputError, match="exists already"):
        session.save(path)
    session.save(path, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["talk.json"]
    with pytest.raises(OutputError, match="cannot be written"):
        session.save(tmp_path / "nowhere" / "talk.json")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": "x"}, "no chat session"),
        ({"version": 2}, "version 2"),
        ({"more": 1}, "has more"),
        ({"messages": None}, "messages is NoneType"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "the role 'robot'"),
        ({"params": {"warmth": 1}}, "'warmth'"),
        ({"params": {"temperature": -1}}, "temperature"),
        ({"seen": {"tokenizer": None, "text": "x", "tokens": [999]}}, None),
    ],
)
def test_what_is_no_session_changes_nothing(
    llm: LLM, tmp_path: Path, change: dict[str, Any], complaint: str | None
) -> None:
    session = _session(llm)
    _say(session, "one")
    before = list(session.messages)
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(session.to_json() | change))
    if complaint is None:
        session.load(path)
    else:
        with pytest.raises(InputFileError, match=complaint):
            session.load(path)
    assert session.messages == before


def test_tokens_that_do_not_spell_their_text_are_not_believed(llm: LLM, tmp_path: Path) -> None:
    session = _session(llm)
    _say(session, "one")
    content = session.to_json()
    for tokens in ([1, 2, 3], [], "x"):
        content["seen"]["tokens"] = tokens
        (tmp_path / "talk.json").write_text(json.dumps(content))
        session.load(tmp_path / "talk.json")
        assert session._seen is None


def test_temperature_zero_turns_the_filters_off(llm: LLM) -> None:
    session = _session(llm, params=SamplingParams(top_p=0.5))
    session.set_param("temperature", 0)
    assert (session.params.temperature, session.params.top_p) == (0, 1.0)
    with pytest.raises(RequestError, match="no sampling parameter 'warmth'"):
        session.set_param("warmth", 1)


def test_a_jinja_template_goes_on_too(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(make_byte_level().to_str().encode())
    llm = tiny_llm_with(tokenizer, 320)
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role + '\\n' + m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    words = {token: -100.0 for token in range(tokenizer.vocab_size) if not tokenizer.token_bytes(token).isalpha()}
    template = JinjaTemplate(text.replace("\n{% endif", "\n\n{% endif"), "t", tokenizer)
    session = ChatSession(llm, template, SamplingParams(max_tokens=6, seed=2, logit_bias=words))
    _say(session, "one <|im_end|>")
    whole = len(session._marks[-1].state.tokens)
    _say(session, "two")
    assert session.tokens_read < whole
    path = tmp_path / "talk.json"
    session.save(path)
    expected = _say(session, "three")
    later = ChatSession(llm, template)
    later.load(path)
    assert later._seen is not None
    assert _say(later, "three") == expected


def test_a_prompt_is_cut_between_tokens_as_they_are_in_the_whole() -> None:
    text = "User: hi\n\nAssistant: <think"
    shared = len("User: hi\n\nAssistant: ")
    before, after, done = cut(WorldTokenizer(), [Segment(text)], shared)
    assert (before, after, done) == ([24281, 59, 4571, 261, 5585, 41693, 59], [295, 35762], shared - 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab é🙂\n:User", max_size=9), max_size=4), st.integers(-2, 40))
def test_cutting_changes_no_token(texts: list[str], chars: int) -> None:
    world = WorldTokenizer()
    segments = [Segment(text) for text in texts]
    before, after, done = cut(world, segments, chars)
    assert before + after == encode_segments(world, segments)
    assert done <= max(chars, 0)
    assert world.decode(before) == "".join(texts)[:done]
