from __future__ import annotations

import asyncio
import json
import re
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from kittiwake.server.api_errors import ApiError
from kittiwake.server.body import MAX_DEPTH, parse
from kittiwake.server.schema import ChatRequest, CompletionRequest, MakeStateRequest, TokenizeRequest
from tests.server.ask import HI, asking, error_of, in_loop, until
from tests.server.stub_engine import StubEngine

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"prompt": "a"', "not JSON"),
        (b'{"prompt": "a",}', "not JSON"),
        (b'{"prompt": "a"} {}', "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b'{"prompt": "a", "prompt": "b"}', "'prompt' is given twice"),
        (b'{"metadata": {"a": "1", "a": "2"}}', "'a' is given twice"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": Infinity}', "Infinity"),
        (b'{"temperature": 1e999}', "out of range"),
        (b'{"seed": 123456789012345678901234567890}', "out of range"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", f"more than {MAX_DEPTH} levels"),
        (b'{"metadata": ' + b'{"a":' * 65 + b"1" + b"}" * 66, f"more than {MAX_DEPTH} levels"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'"prompt"', "must be a JSON object"),
    ],
)
def test_what_is_no_plain_json_is_refused(raw: bytes, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(raw, CompletionRequest)
    assert said in caught.value.message
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("field", "value", "param", "code"),
    [
        ("foo", 1, "foo", "unsupported_parameter"),
        ("tools", [{}], "tools", "invalid_value"),
        ("response_format", {"type": "json_object"}, "response_format.type", "invalid_value"),
        ("response_format", {"type": "text", "schema": {}}, "response_format.schema", "unsupported_parameter"),
        ("audio", {}, "audio", "unsupported_parameter"),
        ("prediction", {"type": "content", "content": "a"}, "prediction", "unsupported_parameter"),
        ("web_search_options", {}, "web_search_options", "unsupported_parameter"),
        ("banana", None, "banana", "unsupported_parameter"),
        ("store", True, "store", "invalid_value"),
        ("temperature", -1, "temperature", "invalid_value"),
        ("temperature", "1", "temperature", "invalid_value"),
        ("temperature", True, "temperature", "invalid_value"),
        ("max_tokens", 0, "max_tokens", "invalid_value"),
        ("max_tokens", 1.5, "max_tokens", "invalid_value"),
        ("max_tokens", 2**31, "max_tokens", "invalid_value"),
        ("n", 0, "n", "invalid_value"),
        ("stop", [1], "stop[0]", "invalid_value"),
        ("stop", "", "stop", "invalid_value"),
        ("stop", ["a"] * 65, "stop", "invalid_value"),
        ("top_logprobs", 3, "top_logprobs", "invalid_value"),
        ("logit_bias", {"a": 1}, "logit_bias.a", "invalid_value"),
        ("logit_bias", {"1": 101}, "logit_bias.1", "invalid_value"),
        ("stream_options", {"include_usage": True}, "stream_options", "invalid_value"),
        ("seed", 2**63, "seed", "invalid_value"),
        ("priority", 1, "priority", "invalid_value"),
        ("state", "../a", "state", "invalid_value"),
        ("state", "a\n", "state", "invalid_value"),
        ("messages", [], "messages", "invalid_value"),
        ("messages", "Hi", "messages", "invalid_value"),
        ("messages", [{"role": "robot", "content": "a"}], "messages[0].role", "invalid_value"),
        ("messages", [{"role": "user", "content": "a", "name": "b"}], "messages[0].name", "unsupported_parameter"),
        ("messages", [{"content": "a"}], "messages[0].role", "missing_required_parameter"),
        ("messages", [{"role": "user", "content": 1}], "messages[0].content", "invalid_value"),
        (
            "messages",
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0].type",
            "invalid_value",
        ),
    ],
)
def test_a_field_that_is_not_taken_is_refused_by_its_name(field: str, value: object, param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(json.dumps({"messages": HI, field: value}).encode(), ChatRequest)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": [-1] * 300_000}, "prompt[0]"),
        ({"prompt": [[-1]] * 100_000}, "prompt[0][0]"),
        ({"prompt": "a", "logit_bias": {f"a{i}": 1 for i in range(100_000)}}, "logit_bias has 100000 entries"),
        ({"prompt": "a", "metadata": {f"a{i}": 1 for i in range(100_000)}}, "metadata has 100000 entries"),
        ({f"a{i}": 1 for i in range(100_000)}, "an object has 100000 fields"),
    ],
)
def test_a_large_body_does_not_make_an_error_of_each_of_its_values(body: object, said: str) -> None:
    raw = json.dumps(body).encode()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match=re.escape(said)):
            parse(raw, CompletionRequest)
        assert tracemalloc.get_traced_memory()[1] < 80_000_000
    finally:
        tracemalloc.stop()


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ApiError, match="messages is missing") as caught:
        parse(b"{}", ChatRequest)
    assert (caught.value.param, caught.value.code) == ("messages", "missing_required_parameter")


def test_a_shown_value_is_short() -> None:
    with pytest.raises(ApiError) as caught:
        parse(json.dumps({"prompt": {"a": "b" * 10_000}}).encode(), CompletionRequest)
    assert len(caught.value.message) < 300


def test_null_is_the_same_as_nothing() -> None:
    for model, needed in ((ChatRequest, {"messages": HI}), (CompletionRequest, {"prompt": "a"})):
        given = {name: None for name in model.model_fields if name not in needed}
        assert parse(json.dumps({**given, **needed}).encode(), model) == model.model_validate(needed)


def test_fields_of_openai_that_are_not_supported_may_be_null() -> None:
    names = (
        "audio",
        "moderation",
        "prediction",
        "prompt_cache_options",
        "prompt_cache_retention",
        "web_search_options",
    )
    part = {"type": "text", "text": "Hi", "prompt_cache_breakpoint": None, "cache_control": None}
    past = {"role": "assistant", "content": "Hello", **dict.fromkeys(("name", "audio", "refusal", "function_call"))}
    messages = [*HI, past, {"role": "user", "content": [part], "name": None}]
    parse(json.dumps({"messages": messages, **dict.fromkeys(names)}).encode(), ChatRequest)


@in_loop
async def test_a_body_that_is_too_large_is_not_read() -> None:
    async def endless():  # type: ignore[no-untyped-def]
        for _ in range(10_000):
            yield b" " * 1024
            sent.append(1)

    sent: list[int] = []
    async with asking(StubEngine(), max_body_bytes=4096) as client:
        answer = await client.post(CHAT, content=b" " * 4097, headers={"content-type": "application/json"})
        assert error_of(answer)["code"] == "too_large" and answer.status_code == 413
        answer = await client.post(CHAT, content=endless(), headers={"content-type": "application/json"})
        assert answer.status_code == 413 and len(sent) < 10
        answer = await client.post(
            CHAT, content=b"", headers={"content-type": "application/json", "content-length": "9" * 30}
        )
        assert answer.status_code == 413


@in_loop
async def test_only_plain_json_is_read() -> None:
    async with asking(StubEngine()) as client:
        for headers in (
            {"content-type": "text/plain"},
            {"content-type": "application/x-www-form-urlencoded"},
            {"content-type": "application/json; charset=latin-1"},
            {"content-type": "application/json", "content-encoding": "gzip"},
        ):
            answer = await client.post(CHAT, content=json.dumps({"messages": HI}), headers=headers)
            assert answer.status_code == 415, headers
            error_of(answer)
        kind = {"content-type": 'Application/JSON; charset="UTF-8"'}
        assert (await client.post(CHAT, content=json.dumps({"messages": HI}), headers=kind)).status_code == 200


@in_loop
async def test_a_long_body_is_parsed_beside_the_loop_all_the_same() -> None:
    engine = StubEngine()
    async with asking(engine) as client:
        text = "word " * 50_000
        answer = await client.post("/v1/completions", json={"prompt": text, "max_tokens": 2})
        assert answer.json()["usage"]["prompt_tokens"] == len(text) == len(engine.submitted[0].prompt_ids)


@in_loop
async def test_many_large_bodies_at_once_do_not_fill_the_memory() -> None:
    go, reading = asyncio.Event(), []

    async def slowly():  # type: ignore[no-untyped-def]
        yield b'{"prompt": "' + b"a" * 900
        reading.append(1)
        await go.wait()
        yield b'"}'

    async with asking(StubEngine(), max_body_bytes=1024) as client:
        kind = {"content-type": "application/json"}
        posts = [
            asyncio.ensure_future(client.post("/v1/completions", content=slowly(), headers=kind)) for _ in range(30)
        ]
        await until(lambda: any(post.done() for post in posts))
        go.set()
        answers = [await post for post in posts]
        statuses = [answer.status_code for answer in answers]
        assert statuses.count(200) == 16 * 1024 // 912 and set(statuses) == {200, 503}
        refused = next(answer for answer in answers if answer.status_code == 503)
        assert refused.headers["retry-after"] == "1" and "large requests" in error_of(refused)["message"]
        assert (await client.post("/v1/completions", json={"prompt": "a" * 900})).status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(ChatRequest.model_fields)), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(JSON, st.sampled_from([ChatRequest, CompletionRequest, TokenizeRequest, MakeStateRequest]))
def test_any_json_is_taken_or_refused(value: object, model: type[BaseModel]) -> None:
    with suppress(ApiError):  # and nothing else
        parse(json.dumps(value).encode("utf-8", "surrogatepass"), model)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | st.lists(st.sampled_from(b'{}[]",:\\u0d8aeE+-.tfn '), max_size=40).map(bytes))
def test_any_bytes_are_taken_or_refused(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(raw, ChatRequest)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("field", "value", "param", "said"),
    [
        ("stop", ["a"] * 65, "stop", "at most 64 items"),
        ("stop", "", "stop", "at least 1 character"),
        ("prompt", [5, -1], "prompt[1]", "greater than or equal to 0, got -1"),
        ("prompt", [2**31], "prompt[0]", "less than 2147483648"),
        ("logit_bias", {"01": 1, "1": 2}, "logit_bias.01", "got '01'"),
    ],
)
def test_a_value_of_the_right_type_is_told_what_is_wrong_with_it(
    field: str, value: object, param: str, said: str
) -> None:
    with pytest.raises(ApiError) as caught:
        parse(json.dumps({"prompt": "a", field: value}).encode(), CompletionRequest)
    assert caught.value.param == param and said in caught.value.message
