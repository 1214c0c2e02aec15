from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from kittiwake.errors import RequestError
from kittiwake.server.conversation import check_messages, render, render_after, render_seen, with_reasoning
from kittiwake.server.schema import ChatMessage
from kittiwake.text.chat import TEMPLATES, ChatTemplate, Message
from kittiwake.text.jinja_template import JinjaTemplate
from kittiwake.text.tokenizer import Tokenizer, load_tokenizer

WORLD = load_tokenizer("world")
BYTES = load_tokenizer("bytes")
CHATML = JinjaTemplate(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    "chatml",
    BYTES,
)
SYSTEM = Message("system", "You are kind. You know birds.")
TURNS = (Message("user", "Hi there!"), Message("assistant", "Hello."), Message("user", "What is a kittiwake?"))


def shared(template: ChatTemplate, tokenizer: Tokenizer, one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many tokens two prompts begin with alike."""
    first, second = (render(template, tokenizer, messages, {}).ids for messages in (one, other))
    return next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))


@pytest.mark.parametrize(
    "template", [TEMPLATES["g1"], TEMPLATES["g1-think"], TEMPLATES["raven"], CHATML], ids=lambda t: t.name
)
@pytest.mark.parametrize("tokenizer", [WORLD, BYTES], ids=["world", "bytes"])
def test_every_border_is_one_that_the_next_prompts_share(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    messages = (SYSTEM, *TURNS)
    found = render(template, tokenizer, messages, {})
    later = {
        "the next turn": (*messages, Message("assistant", "A gull."), Message("user", "Where?")),
        "another last message": (*messages[:-1], Message("user", "Why?")),
        "another conversation": (SYSTEM, Message("user", "Count to ten.")),
    }
    lengths = {what: shared(template, tokenizer, messages, other) for what, other in later.items()}
    assert len(found.borders) >= 2
    for what, length in lengths.items():
        reached = max(place for place in (0, *found.borders, len(found.ids)) if place <= length)
        assert length - reached <= 3, (what, length, found.borders)  # the end of a prompt is kept anyway
    assert list(found.borders) == sorted(set(found.borders))
    assert found.borders[0] > 0 and found.borders[-1] < len(found.ids)


def test_the_last_border_stands_before_the_mark_of_reasoning() -> None:
    found = render(TEMPLATES["g1-think"], WORLD, (SYSTEM, *TURNS), {})
    assert found.opening == "<think"
    assert WORLD.decode(found.ids[: found.borders[-1]]).endswith("\n\nAssistant:")
    assert WORLD.decode(found.ids[found.borders[-1] :]) == " <think"


def test_the_rest_of_a_prompt_is_never_a_border() -> None:
    for text in ("a", "\u4f60\u597d", "  a  b  ", "x" * 5000):
        found = render(TEMPLATES["g1"], WORLD, (Message("user", text),), {})
        assert all(0 < border < len(found.ids) for border in found.borders)


def test_a_template_that_refuses_what_may_come_has_fewer_borders() -> None:
    picky = JinjaTemplate(
        "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
        "[{{ messages[0].content }}]{% if add_generation_prompt %}>{% endif %}",
        "picky",
        BYTES,
    )
    found = render(picky, BYTES, (Message("user", "abc"),), {})
    assert bytes(found.ids) == b"[abc]>" and found.borders == (1,)


def test_what_follows_a_state_is_written_as_it_would_stand_in_the_whole() -> None:
    for template in (TEMPLATES["g1"], TEMPLATES["raven"], CHATML):
        seen = bytes(render_seen(template, BYTES, (SYSTEM, *TURNS[:2]), {}, follows=False))
        more = bytes(render_after(template, BYTES, TURNS[2:], {}).ids)
        assert seen + more == bytes(render(template, BYTES, (SYSTEM, *TURNS), {}).ids)
        told = bytes(render_seen(template, BYTES, TURNS[2:], {}, follows=True))
        assert (seen + told) == bytes(render_seen(template, BYTES, (SYSTEM, *TURNS), {}, follows=False))


def test_private_characters_of_a_message_are_no_marks() -> None:
    odd = (Message("user", "\ue000\ue001 x"), Message("assistant", "\ue001"), Message("user", "\ue000"))
    seen = bytes(render_seen(TEMPLATES["g1"], BYTES, odd[:2], {}, follows=False))
    more = bytes(render_after(TEMPLATES["g1"], BYTES, odd[2:], {}).ids)
    assert seen + more == bytes(render(TEMPLATES["g1"], BYTES, odd, {}).ids)


def test_a_template_without_a_past_cannot_use_states() -> None:
    last_only = JinjaTemplate("[{{ messages[-1].content }}]", "last-only", BYTES)
    with pytest.raises(RequestError, match="last-only does not write earlier turns down"):
        render_after(last_only, BYTES, TURNS[:1], {})


def test_control_tokens_after_a_state_are_control_tokens_still() -> None:
    seen = render_seen(CHATML, BYTES, TURNS[:1], {}, follows=False)
    assert bytes(seen) == b"<|im_start|>user\nHi there!"
    assert bytes(render_after(CHATML, BYTES, TURNS[2:], {}).ids).startswith(b"<|im_end|>\n<|im_start|>user\n")


def test_messages_that_say_nothing_are_left_out_but_for_the_user_s() -> None:
    given = [
        ChatMessage(role="system", content=""),
        ChatMessage(role="user", content="Hi"),
        ChatMessage(role="assistant", content=None, reasoning_content="it had no room to answer"),
        ChatMessage(role="user", content="Go on"),
    ]
    assert check_messages(given) == (Message("user", "Hi"), Message("user", "Go on"))
    with pytest.raises(RequestError, match="is empty"):
        check_messages([*given[:1], ChatMessage(role="user", content="\n")])
    with pytest.raises(RequestError, match="no messages"):
        check_messages(given[:1])


def test_reasoning_is_a_matter_of_the_template() -> None:
    g1 = TEMPLATES["g1"]
    assert with_reasoning(g1, None, None) == (g1, {})
    assert with_reasoning(g1, "none", None)[0].name == "g1-fast"
    assert with_reasoning(g1, "medium", {"enable_thinking": True})[0].name == "g1-think"
    both = JinjaTemplate("{{ messages }}{{ enable_thinking }}{{ reasoning_effort }}", "both", BYTES)
    assert with_reasoning(both, "low", None) == (both, {"enable_thinking": True, "reasoning_effort": "low"})
    for effort, variables in (
        ("none", {"enable_thinking": True}),
        (None, {"bos_token": "x"}),
        (None, {"messages": []}),
    ):
        with pytest.raises(RequestError):
            with_reasoning(both, effort, variables)
    with pytest.raises(RequestError, match="reasoning_effort is nothing that the chat template chatml uses"):
        with_reasoning(CHATML, "low", None)


def test_an_http_worker_loads_no_model_code() -> None:
    code = "import sys, kittiwake.server.app; print({'torch', 'numba', 'tokenizers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
