from __future__ import annotations

import contextlib
import datetime
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kittiwake.errors import KittiwakeError, RequestError, TokenizerError
from kittiwake.text.bpe import HFTokenizer
from kittiwake.text.chat import Rendered, encode_segments, read_messages
from kittiwake.text.jinja_template import MAX_STEPS, JinjaTemplate
from kittiwake.text.world import WorldTokenizer

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message.content | trim ~ '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
HI = [{"role": "user", "content": "hi"}]


def _render(tokenizer: HFTokenizer, text: str, messages: Any = HI, **options: Any) -> Rendered:
    return JinjaTemplate(text, "test", tokenizer).render(read_messages(messages), options=options)


def _controls(tokenizer: HFTokenizer, ids: list[int]) -> list[int]:
    known = {tokenizer.encode(text, allow_special=True)[0] for text in tokenizer.control_texts}
    return [token for token in ids if token in known]


def test_a_template_renders_as_transformers_does(byte_level: HFTokenizer) -> None:
    talk = [{"role": "system", "content": " be kind "}, *HI]
    rendered = _render(byte_level, CHATML, talk)
    text = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert rendered.text == text
    assert encode_segments(byte_level, rendered.segments) == byte_level.encode(text, allow_special=True)
    assert rendered.opening == ""


def test_what_the_prompt_opens_is_told(byte_level: HFTokenizer) -> None:
    assert _render(byte_level, CHATML, enable_thinking=False).opening == "<think>\n\n</think>"
    for end in ("{% if add_generation_prompt %}<think>\n{% endif %}", "<think>\n\n"):
        assert _render(byte_level, CHATML + end, [{"role": "user", "content": "a <think> b"}]).opening == "<think>\n"


def test_earlier_reasoning_is_left_out(byte_level: HFTokenizer) -> None:
    talk = [*HI, {"role": "assistant", "content": "<think>secret</think>\nyes"}, *HI]
    text = _render(byte_level, CHATML, talk).text
    assert "secret" not in text
    assert "assistant\nyes<|im_end|>" in text


@settings(max_examples=40)
@given(st.text(st.sampled_from("<|im_startend>hk/x \n\U000f0000"), max_size=40))
def test_text_that_spells_control_tokens_stays_text(byte_level: HFTokenizer, content: str) -> None:
    plain = _render(byte_level, CHATML)
    expected = _controls(byte_level, encode_segments(byte_level, plain.segments))
    for said in (content, f"x{content}<|im_end|>", f"<think>{content}", "<|im_" + content, content + "<|im_start|"):
        if not said.strip():
            continue
        rendered = _render(byte_level, CHATML, [{"role": "user", "content": said}])
        ids = encode_segments(byte_level, rendered.segments)
        assert _controls(byte_level, ids) == expected
        assert said.strip() in rendered.text
        assert b"".join(map(byte_level.token_bytes, ids)).decode() == (
            f"user\n{said.strip()}\nassistant\n"  # control tokens have no bytes of their own
        )


def test_a_control_token_put_together_from_both_sides_is_none(byte_level: HFTokenizer) -> None:
    for template, said in (("<|im_{{ messages[0].content }}", "end|>"), ("{{ messages[0].content }}>", "<think")):
        rendered = _render(byte_level, template, [{"role": "user", "content": said}])
        assert not any(segment.is_control for segment in rendered.segments)
        assert _controls(byte_level, encode_segments(byte_level, rendered.segments)) == []


def test_templates_may_look_into_messages(byte_level: HFTokenizer) -> None:
    look = "{% if '/no_think' in messages[0].content %}no{% else %}yes{% endif %}"
    assert _render(byte_level, look, [{"role": "user", "content": "a <b> /no_think"}]).text == "no"
    assert _render(byte_level, look).text == "yes"


def test_what_transformers_offers_is_there(byte_level: HFTokenizer) -> None:
    year = str(datetime.datetime.now().year)
    for template, text in (
        ("{{ messages | tojson }}", json.dumps(HI, ensure_ascii=False)),
        ("{{ {'a': 'é'} | tojson(indent=1) }}", '{\n "a": "é"\n}'),
        ("{{ strftime_now('%Y') }}", year),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% set ns = namespace(n=0) %}{% for m in range(3) %}{% set ns.n = ns.n + m %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ bos_token }}{{ eos_token }}|{{ tools is none }}", "<|endoftext|>|True"),
        ("{{ ['a', 'b'] | join(', ') }} {{ 'a-b' | replace('-', '+') }} {{ 'x'.split('x') | length }}", "a, b a+b 2"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') ~ 1 }}", "[a]1"),
        ("a\n{% if true %}\nb\n{% endif %}\nc", "a\nb\nc"),
    ):
        assert _render(byte_level, template).text == text


def test_the_end_token_of_a_template_ends_answers(byte_level: HFTokenizer) -> None:
    end = byte_level.encode("<|im_end|>", allow_special=True)
    assert JinjaTemplate("x", "t", byte_level, {"eos_token": "<|im_end|>"}).stop_ids == tuple(end)
    assert JinjaTemplate('{%- set eos_token = "<|im_end|>" -%}x', "t", byte_level).stop_ids == tuple(end)
    assert JinjaTemplate("x", "t", byte_level, {"eos_token": "nothing"}).stop_ids == ()


def test_end_of_text_of_world_models_is_id_0_in_a_template_only(world: WorldTokenizer) -> None:
    spelled = "<|rwkv_tokenizer_end_of_text|>"
    template = JinjaTemplate("{{ '" + spelled + "' }}{{ messages[0].content }}", "t", world)
    rendered = template.render(read_messages([{"role": "user", "content": spelled}]))
    ids = encode_segments(world, rendered.segments)
    assert ids[0] == 0
    assert 0 not in ids[1:]
    assert world.decode(ids) == spelled


def test_raise_exception_is_about_the_messages(byte_level: HFTokenizer) -> None:
    with pytest.raises(RequestError, match="test refuses these messages: roles must alternate"):
        _render(byte_level, "{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "option", [{"messages": 1}, {"add_generation_prompt": 1}, {"raise_exception": 1}, {"a b": 1}, {"eos_token": "x"}]
)
def test_options_that_would_overwrite_are_refused(byte_level: HFTokenizer, option: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="cannot be an option"):
        JinjaTemplate("x", "test", byte_level).render(read_messages(HI), options=option)


HOSTILE = {
    "endless loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "endless calls": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "deep calls": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "repeat": "{{ 'a' * 10**9 }}",
    "repeat a list": "{{ [1] * 10**9 }}",
    "power": "{{ 2 ** (10 ** 9) }}",
    "doubling": "{% set n = namespace(x='a') %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "glue": "{% set n = namespace(x='a') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled list": "{% set n = namespace(x=[1]) %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "padding": "{{ 'a'.center(10**9) }}",
    "padding filter": "{{ 'a' | center(10**9) }}",
    "format": "{{ '{:>1000000000}'.format('a') }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "replace filter": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "join": "{{ ('b' * 100000).join(['a'] * 100000) }}",
    "join filter": "{{ (['a'] * 100000) | join('b' * 100000) }}",
    "indent": "{{ 'a' | tojson(indent=10**9) }}",
    "a list of one large text": "{{ ['a' * 1000000] * 1000000 }}",
    "its JSON": "{{ (['a' * 1000000] * 1000000) | tojson }}",
    "its text": "{{ (['a' * 1000000] * 1000000) | string }}",
    "lists of lists": "{% set a = [1] * 99999 %}{% set a = [a] * 99999 %}{% set a = [a] * 99999 %}{{ a }}",
    "many slices": "{% set a = 'a' * 1000000 %}" + "{% set b = [a[1:], a[2:], a[3:], a[4:]] %}" * 100,
    "many copies": "{% set a = 'a' * 1000000 %}" + "{% set b = a.upper() %}{% set c = a | upper %}" * 100,
    "many splits": "{% set a = 'a ' * 100000 %}" + "{% set b = a.split() %}" * 100,
    "many texts of a list": "{% set a = ['a' * 1000000] %}" + "{% set b = '%s' % (a,) %}" * 100,
    "a hidden buffer": "{% set x %}{% for i in range(99999) %}" + "b" * 1000 + "{% endfor %}{% endset %}",
    "private": "{{ ''.__class__.__mro__ }}",
    "function globals": "{{ raise_exception.__globals__.x }}",
    "attr": "{{ ''|attr('__class__') }}",
    "changing": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "undefined": "{{ messages[0].a.b }}",
    "syntax": "{% if %}",
    "nested": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "division": "{{ 1 / 0 }}",
    "too large": "a" * (1 << 21),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_templates_are_refused_by_name(byte_level: HFTokenizer, kind: str) -> None:
    with pytest.raises(TokenizerError, match="test"):
        _render(byte_level, HOSTILE[kind])


def test_a_long_conversation_is_within_the_budget(byte_level: HFTokenizer) -> None:
    talk = [{"role": "user", "content": "x" * 300} for _ in range(2000)]
    nested = "{% for a in messages %}{% for b in range(40) %}{% endfor %}{{ a.content }}{% endfor %}"
    assert MAX_STEPS + 200 * 2000 > 2000 * 40
    assert len(_render(byte_level, nested, talk).text) == 600_000


@given(st.text(st.sampled_from("{}%#-|~'+*()[] \nabformsgeiend.0"), max_size=60))
def test_any_template_renders_or_is_refused(byte_level: HFTokenizer, text: str) -> None:
    with contextlib.suppress(KittiwakeError):
        encode_segments(byte_level, _render(byte_level, text).segments)
