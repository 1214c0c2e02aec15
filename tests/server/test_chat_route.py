from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from kittiwake.server.engine_client import Failure, TemplateSource
from kittiwake.text.chat import TEMPLATES
from tests.server.ask import HI, asking, error_of, events_of, in_loop
from tests.server.stub_engine import RECEIPT, StubEngine, stub_info

CHAT = "/v1/chat/completions"
THINKING = "<think>\nSome thought.</think>\n\nThe answer."


def prompt_of(engine: StubEngine, number: int = -1) -> str:
    return engine.tokenizer.decode(engine.submitted[number].prompt_ids)


@in_loop
async def test_an_answer_has_exactly_what_clients_expect() -> None:
    async with asking(StubEngine(cached_tokens=7)) as client:
        content = (await client.post(CHAT, json={"messages": HI, "max_tokens": 5})).json()
    assert content.pop("id").startswith("chatcmpl-")
    assert isinstance(content.pop("created"), int)
    assert content == {
        "object": "chat.completion",
        "model": "stub",
        "system_fingerprint": f"fp_{RECEIPT[:16]}",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 20,
            "completion_tokens": 5,
            "total_tokens": 25,
            "prompt_tokens_details": {"cached_tokens": 7, "cache": "hit"},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "timings": {
            "queue_ms": 1.0,
            "cache_n": 7,
            "cache": "hit",
            "prompt_n": 13,
            "prompt_ms": 10.0,
            "prompt_per_second": 1300.0,
            "predicted_n": 5,
            "predicted_ms": 20.0,
            "predicted_per_second": 250.0,
        },
    }


@in_loop
async def test_a_stream_says_the_same_and_ends_with_done() -> None:
    ask = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    async with asking(StubEngine(cached_tokens=7)) as client:
        whole = (await client.post(CHAT, json={"messages": HI})).json()
        answer = await client.post(CHAT, json=ask)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, last, done = events_of(answer.text)
    assert done == "[DONE]"
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert {chunk["object"] for chunk in (*chunks, last)} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in (*chunks, last)}) == 1
    assert all(chunk["usage"] is None and chunk["model"] == "stub" for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"] == "Hello there."
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert chunks[-1]["timings"]["predicted_n"] == 12


@in_loop
async def test_no_usage_in_a_stream_that_does_not_ask() -> None:
    async with asking(StubEngine()) as client:
        answer = await client.post(CHAT, json={"messages": HI, "stream": True})
    chunks = events_of(answer.text)
    assert chunks.pop() == "[DONE]"
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)


@in_loop
async def test_tokens_that_are_ready_together_share_an_event() -> None:
    async with asking(StubEngine(burst=6)) as client:
        answer = await client.post(CHAT, json={"messages": HI, "stream": True})
    deltas = [chunk["choices"][0]["delta"].get("content") for chunk in events_of(answer.text)[:-1]]
    assert deltas == ["", "Hello ", "there.", None]


@in_loop
async def test_a_character_is_never_split_between_events() -> None:
    reply = "a\u00e9\u4f60\U0001f642b"
    async with asking(StubEngine(reply=reply)) as client:
        answer = await client.post(CHAT, json={"messages": HI, "stream": True, "logprobs": True, "top_logprobs": 0})
    chunks = events_of(answer.text)[:-1]
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert [text for text in deltas if text] == list(reply)
    entries = [one for chunk in chunks if (found := chunk["choices"][0]["logprobs"]) for one in found["content"]]
    assert bytes(byte for one in entries for byte in one["bytes"]).decode() == reply
    assert entries[1]["token"] == "bytes:\\xc3"


@in_loop
async def test_a_character_that_is_never_finished_is_one_replacement() -> None:
    async with asking(StubEngine(reply=b"a\xe4\xbd")) as client:
        content = (await client.post(CHAT, json={"messages": HI})).json()
        stream = events_of((await client.post(CHAT, json={"messages": HI, "stream": True})).text)
    assert content["choices"][0]["message"]["content"] == "a\ufffd"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in stream[:-1]) == "a\ufffd"


@in_loop
async def test_reasoning_is_told_apart() -> None:
    engine = StubEngine(reply=THINKING)
    async with asking(engine) as client:
        whole = (await client.post(CHAT, json={"messages": HI})).json()
        stream = events_of((await client.post(CHAT, json={"messages": HI, "stream": True})).text)[:-1]
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Some thought.", "The answer.")
    deltas = [chunk["choices"][0]["delta"] for chunk in stream]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Some thought."
    assert "".join(delta.get("content", "") for delta in deltas) == "The answer."
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("<think>\nSome thought.</think>")


@pytest.mark.parametrize(
    ("fields", "opening"),
    [
        ({}, "\n\nAssistant:"),
        ({"reasoning_effort": "none"}, "\n\nAssistant: <think>\n</think"),
        ({"reasoning_effort": "low"}, "\n\nAssistant: <think"),
        ({"reasoning_effort": "high"}, "\n\nAssistant: <think"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "\n\nAssistant: <think"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "\n\nAssistant: <think>\n</think"),
        ({"chat_template_kwargs": {"enable_thinking": None}}, "\n\nAssistant:"),
    ],
)
@in_loop
async def test_reasoning_can_be_had_or_not(fields: dict[str, Any], opening: str) -> None:
    reply = ">x</think>y" if opening.endswith("think") and "</" not in opening else ">y"
    engine = StubEngine(reply=reply)
    async with asking(engine) as client:
        message = (await client.post(CHAT, json={"messages": HI, **fields})).json()["choices"][0]["message"]
    assert prompt_of(engine) == f"User: Hi{opening}"
    assert message["content"] == (">y" if opening.endswith(":") else "y")
    assert (
        message.get("reasoning_content") == {True: "x", False: ""}.get("</" not in opening)
        if "think" in opening
        else True
    )


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [
        ("raven", {"reasoning_effort": "none"}, "reasoning_effort"),
        ("g1", {"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
        ("g1", {"chat_template_kwargs": {"other": 1}}, "chat_template_kwargs"),
        ("g1", {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, "reasoning_effort"),
    ],
)
@in_loop
async def test_reasoning_that_a_template_cannot_do_is_refused(
    template: str, fields: dict[str, Any], param: str
) -> None:
    async with asking(StubEngine(info=stub_info(template=TemplateSource(template)))) as client:
        answer = await client.post(CHAT, json={"messages": HI, **fields})
    assert answer.status_code == 400 and error_of(answer)["param"] == param


JINJA = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


@in_loop
async def test_variables_of_a_jinja_template() -> None:
    engine = StubEngine(info=stub_info(template=TemplateSource("own", JINJA)))
    async with asking(engine) as client:
        for fields in ({"reasoning_effort": "high"}, {"chat_template_kwargs": {"enable_thinking": True}}, {}):
            assert (await client.post(CHAT, json={"messages": HI, **fields})).status_code == 200
        refused = await client.post(CHAT, json={"messages": HI, "chat_template_kwargs": {"documents_too": 1}})
    assert [prompt_of(engine, i) for i in range(3)] == ["[user]Hi[assistant]<think>"] * 2 + ["[user]Hi[assistant]"]
    assert refused.status_code == 400 and "documents_too" in error_of(refused)["message"]


@in_loop
async def test_several_answers() -> None:
    ask = {"messages": HI, "n": 3, "max_tokens": 4}
    async with asking(StubEngine(), max_prompts=3) as client:
        content = (await client.post(CHAT, json=ask)).json()
        stream = events_of((await client.post(CHAT, json={**ask, "stream": True})).text)[:-1]
        too_many = await client.post(CHAT, json={**ask, "n": 4})
    assert [choice["index"] for choice in content["choices"]] == [0, 1, 2]
    assert content["usage"]["completion_tokens"] == 12 and content["usage"]["prompt_tokens"] == 20
    for index in range(3):
        mine = [chunk["choices"][0] for chunk in stream if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "Hell"
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
    assert sum("timings" in chunk for chunk in stream) == 1 and "timings" in stream[-1]
    assert too_many.status_code == 400 and error_of(too_many)["param"] == "n"


@in_loop
async def test_log_probabilities() -> None:
    ask = {"messages": HI, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    async with asking(StubEngine()) as client:
        content = (await client.post(CHAT, json=ask)).json()["choices"][0]["logprobs"]["content"]
        stream = events_of((await client.post(CHAT, json={**ask, "stream": True})).text)[:-1]
    assert [one["token"] for one in content] == ["H", "e", "l"]
    assert content[0] == {
        "token": "H",
        "logprob": -72 / 64,
        "bytes": [72],
        "top_logprobs": [
            {"token": "H", "logprob": -1.0, "bytes": [72]},
            {"token": "I", "logprob": -2.0, "bytes": [73]},
        ],
    }
    parts = [chunk["choices"][0]["logprobs"] for chunk in stream]
    assert [one for part in parts if part for one in part["content"]] == content


@in_loop
async def test_harmless_fields_are_taken() -> None:
    engine = StubEngine()
    ask = {
        "model": "stub",
        "messages": [
            {"role": "developer", "content": "Be kind."},
            {"role": "system", "content": ""},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " you"}]},
            {
                "role": "assistant",
                "content": "Yes?",
                "refusal": None,
                "tool_calls": None,
                "annotations": [],
                "audio": None,
            },
            {"role": "assistant", "content": None},
            {"role": "user", "content": "So", "tool_calls": None},
        ],
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "stream_options": None,
        "logit_bias": {},
        "stop": None,
        "top_k": -1,
    }
    async with asking(engine) as client:
        answer = await client.post(CHAT, json=ask)
    assert answer.status_code == 200, answer.text
    assert prompt_of(engine) == "System: Be kind.\n\nUser: Hi you\n\nAssistant: Yes?\n\nUser: So\n\nAssistant:"


@in_loop
async def test_fields_reach_the_engine() -> None:
    engine = StubEngine()
    ask = {
        "messages": HI,
        "max_completion_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 40,
        "min_p": 0.125,
        "seed": -1,
        "stop": ["x", "y"],
        "stop_token_ids": [7],
        "presence_penalty": 1,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"65": -100},
        "sampling_order": "rwkv",
        "logprobs": True,
        "cache_prompt": False,
        "priority": -3,
        "timeout_s": 30,
    }
    async with asking(engine, request_timeout_s=20) as client:
        answer = await client.post(CHAT, json=ask)
    assert answer.status_code == 200 and answer.headers["x-seed"] == str(2**63 - 1)
    submission = engine.submitted[0]
    params = submission.params
    assert (params.max_tokens, params.min_tokens, params.temperature, params.top_p) == (9, 2, 0.5, 0.75)
    assert (params.top_k, params.min_p, params.seed, params.stop_token_ids) == (40, 0.125, 2**63 - 1, (7,))
    assert params.stop == ("x", "y", *TEMPLATES["g1"].stops)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -0.5, 1.5)
    assert (params.logit_bias, params.sampling_order, params.logprobs) == ({65: -100.0}, "rwkv", True)
    assert (submission.cache_prompt, submission.priority, submission.deadline_s) == (False, -3, 20)


@in_loop
async def test_defaults() -> None:
    engine = StubEngine()
    async with asking(engine, default_max_tokens=33) as client:
        first = await client.post(CHAT, json={"messages": HI})
        second = await client.post(CHAT, json={"messages": HI})
    params = engine.submitted[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (33, 1.0, 1.0, 0)
    assert first.headers["x-seed"] == str(params.seed) != second.headers["x-seed"]
    assert engine.submitted[0].cache_prompt and engine.submitted[0].deadline_s is None


@in_loop
async def test_greedy_takes_whatever_filters_come_with_it() -> None:
    engine = StubEngine()
    async with asking(engine) as client:
        for fields in ({"temperature": 0, "top_p": 0.9, "top_k": 40, "min_p": 0.1}, {"top_p": 0}):
            assert (await client.post(CHAT, json={"messages": HI, **fields})).status_code == 200
        refused = await client.post(CHAT, json={"messages": HI, "temperature": 0, "n": 2})
    assert [one.params.temperature for one in engine.submitted] == [0.0, 0.0]
    assert refused.status_code == 400 and error_of(refused)["param"] == "temperature"


@in_loop
async def test_ignoring_the_end_of_text_ignores_the_template_s_ends_too() -> None:
    engine = StubEngine(reply="a\n\nUser: b")
    async with asking(engine) as client:
        usual = (await client.post(CHAT, json={"messages": HI, "max_tokens": 30})).json()
        on = (await client.post(CHAT, json={"messages": HI, "max_tokens": 30, "ignore_eos": True})).json()
    assert usual["choices"][0]["message"]["content"] == "a" and usual["choices"][0]["finish_reason"] == "stop"
    assert on["usage"]["completion_tokens"] == 30 and on["choices"][0]["finish_reason"] == "length"


@in_loop
async def test_limits_of_the_server() -> None:
    async with asking(StubEngine(), max_answer_tokens=100, default_max_tokens=4096) as client:
        assert (await client.post(CHAT, json={"messages": HI})).status_code == 200
        answer = await client.post(CHAT, json={"messages": HI, "max_tokens": 101})
    assert answer.status_code == 400 and error_of(answer)["param"] == "max_tokens"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "  "}],
        [{"role": "user", "content": None}],
        [{"role": "system", "content": ""}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    ],
)
@in_loop
async def test_messages_that_cannot_be_answered(messages: list[Any]) -> None:
    async with asking(StubEngine()) as client:
        answer = await client.post(CHAT, json={"messages": messages})
    assert answer.status_code == 400 and error_of(answer)["param"] == "messages"


@in_loop
async def test_the_model_s_name() -> None:
    async with asking(StubEngine(), served_model_name="gpt-4o") as client:
        listed = (await client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["gpt-4o"] and listed["object"] == "list"
        assert (await client.get("/v1/models/gpt-4o")).json() == listed["data"][0]
        assert (await client.post(CHAT, json={"messages": HI, "model": "gpt-4o"})).json()["model"] == "gpt-4o"
        for answer in (
            await client.post(CHAT, json={"messages": HI, "model": "stub"}),
            await client.post("/tokenize", json={"prompt": "a", "model": "stub"}),
            await client.get("/v1/models/a/b"),
            await client.get("/v1/models/"),
        ):
            assert answer.status_code == 404, answer.text
            assert (error_of(answer)["code"], error_of(answer)["param"]) == ("model_not_found", "model")


@in_loop
async def test_a_model_that_cannot_chat_says_so() -> None:
    engine = StubEngine()
    object.__setattr__(engine.info, "template", None)
    async with asking(engine) as client:
        answer = await client.post(CHAT, json={"messages": HI})
        assert answer.status_code == 400 and error_of(answer)["code"] == "no_chat_template"
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_what_the_engine_refuses_has_its_status(stream: bool) -> None:
    engine = StubEngine(refuse=Failure("the queue is full", "", 429, "queue_full", 2.3))
    async with asking(engine) as client:
        answer = await client.post(CHAT, json={"messages": HI, "stream": stream})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "3"
        assert error_of(answer) == {
            "message": "the queue is full",
            "type": "rate_limit_error",
            "param": None,
            "code": "queue_full",
        }
        engine.refuse = Failure("the engine has stopped", "", 503)
        answer = await client.post(CHAT, json={"messages": HI, "stream": stream})
        assert answer.status_code == 503 and error_of(answer)["type"] == "server_error"


@in_loop
async def test_an_answer_that_fails_halfway() -> None:
    for engine in (StubEngine(fail_after=3), StubEngine(die_after=3)):
        async with asking(engine) as client:
            whole = await client.post(CHAT, json={"messages": HI})
            assert whole.status_code in (500, 503) and error_of(whole)["type"] == "server_error"
            engine.die_after = 3 if engine.fail_after is None else None
            answer = await client.post(CHAT, json={"messages": HI, "stream": True})
        assert answer.status_code == 200
        *chunks, last = events_of(answer.text)
        assert list(last) == ["error"] and last["error"]["type"] == "server_error"
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hel"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert "[DONE]" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_an_answer_that_fails_before_its_first_token_has_the_status_of_its_error(stream: bool) -> None:
    async with asking(StubEngine(fail_after=0)) as client:
        answer = await client.post(CHAT, json={"messages": HI, "stream": stream})
    assert answer.status_code == 500 and error_of(answer)["message"] == "logits are not finite"


@in_loop
async def test_progress_of_a_long_prompt() -> None:
    async with asking(StubEngine(cached_tokens=4)) as client:
        answer = await client.post(CHAT, json={"messages": HI, "stream": True, "return_progress": True})
    chunks = events_of(answer.text)[:-1]
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert progress == [
        {"total": 20, "cache": 4, "processed": 10, "time_ms": 1.0},
        {"total": 20, "cache": 4, "processed": 20, "time_ms": 1.0},
    ]
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:2]] == [{}, {}]


@in_loop
async def test_token_ids() -> None:
    ask = {"messages": HI, "max_tokens": 3, "return_token_ids": True}
    engine = StubEngine()
    async with asking(engine) as client:
        content = (await client.post(CHAT, json=ask)).json()
        stream = events_of((await client.post(CHAT, json={**ask, "stream": True})).text)[:-1]
    assert content["prompt_token_ids"] == list(engine.submitted[0].prompt_ids)
    assert content["choices"][0]["token_ids"] == [72, 101, 108]
    assert [one for chunk in stream for one in chunk["choices"][0].get("token_ids", [])] == [72, 101, 108]


@in_loop
async def test_control_tokens_that_a_user_spells_stay_text() -> None:
    engine = StubEngine()
    async with asking(engine) as client:
        await client.post(CHAT, json={"messages": [{"role": "user", "content": "<think> </think> User: x"}]})
    assert prompt_of(engine) == "User: <think> </think> User: x\n\nAssistant:"


def test_bytes_of_a_chunk_are_json_whatever_the_text() -> None:
    text = 'quote " back \\ newline \n null \x00 line\u2028separator \U0001f642'

    @in_loop
    async def run() -> None:
        async with asking(StubEngine(reply=text)) as client:
            answer = await client.post(CHAT, json={"messages": HI, "stream": True})
            deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in events_of(answer.text)[:-1]]
            assert "".join(deltas) == text
            whole = await client.post(
                CHAT, content=json.dumps({"messages": HI}), headers={"content-type": "application/json"}
            )
            assert whole.json()["choices"][0]["message"]["content"] == text

    run()


LONG_IDS = [65] * 30_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a" * 30_000}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 30_000}]}]}),
        (CHAT, {"messages": HI * 300}),
        ("/v1/completions", {"prompt": LONG_IDS, "echo": True}),
        ("/tokenize", {"prompt": "a" * 30_000, "return_token_strs": True}),
        ("/detokenize", {"tokens": LONG_IDS}),
    ],
)
@in_loop
async def test_a_long_text_holds_up_no_other_stream(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = StubEngine(reply=[65])  # ids: it encodes no text itself
    threads = []

    def watch(name: str) -> None:
        kind = type(engine.tokenizer)
        work = getattr(kind, name)

        def watched(*args: Any, **more: Any) -> Any:
            threads.append(threading.get_ident())
            return work(*args, **more)

        monkeypatch.setattr(kind, name, watched)

    async with asking(engine) as client:
        await client.get("/v1/models")
        for name in ("encode", "decode"):
            watch(name)
        assert (await client.post(path, json=body)).status_code == 200
    assert threads and threading.get_ident() not in threads
