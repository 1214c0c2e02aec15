"""The real client of OpenAI against a real server: with an engine that says what it is told, and with the packaged model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest
from starlette.types import ASGIApp

from kittiwake.config import ServerConfig
from kittiwake.engine.request import SamplingParams
from kittiwake.llm import LLM
from kittiwake.server.app import create_app
from kittiwake.server.engine_client import Failure
from tests.server.ask import HI, KEY, listening
from tests.server.running import client_of, running_engine
from tests.server.stub_engine import StubEngine

MODEL = "stub"


@pytest.fixture
def engine() -> StubEngine:
    return StubEngine(cached_tokens=3)


@pytest.fixture
def url(engine: StubEngine) -> Iterator[str]:
    with listening(create_app(engine, ServerConfig(api_keys=(KEY,)))) as url:
        yield f"{url}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def strict(url: str) -> Iterator[openai.OpenAI]:
    """One that checks every answer against OpenAI's own types. (Completions break those themselves: with null for the
    finish reason of a chunk, and for the log-probability of a first token.)"""
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, _strict_response_validation=True) as client:
        yield client


def test_a_chat(strict: openai.OpenAI) -> None:
    answer = strict.chat.completions.create(model=MODEL, messages=HI, max_tokens=5, seed=1)
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "chat.completion" and answer.system_fingerprint
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details and usage.completion_tokens_details
    assert (usage.total_tokens, usage.prompt_tokens_details.cached_tokens) == (25, 3)
    assert usage.completion_tokens_details.reasoning_tokens == 0


def test_an_answer_can_be_sent_back_as_it_is(client: openai.OpenAI, engine: StubEngine) -> None:
    first = client.chat.completions.create(model=MODEL, messages=HI).choices[0].message
    history = [*HI, first.model_dump(), {"role": "user", "content": "So?"}]
    client.chat.completions.create(model=MODEL, messages=history)
    seen = engine.tokenizer.decode(engine.submitted[-1].prompt_ids)
    assert seen == "User: Hi\n\nAssistant: Hello there.\n\nUser: So?\n\nAssistant:"


def test_a_streamed_chat(strict: openai.OpenAI) -> None:
    stream = strict.chat.completions.create(
        model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}, n=2
    )
    texts, reasons, usages = ["", ""], [[], []], []
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == ["Hello there."] * 2 and reasons == [["stop"]] * 2
    assert usages[-1].completion_tokens == 24 and usages[:-1] == [None] * (len(usages) - 1)


def test_the_stream_helper_gathers_the_answer(strict: openai.OpenAI) -> None:
    with strict.chat.completions.stream(model=MODEL, messages=HI, logprobs=True, top_logprobs=2) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello there." and final.choices[0].finish_reason == "stop"
    assert final.choices[0].logprobs and len(final.choices[0].logprobs.content) == 12


def test_log_probabilities(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=2, max_tokens=2)
    content = chat.choices[0].logprobs.content
    assert [one.token for one in content] == ["H", "e"] and len(content[0].top_logprobs) == 2
    plain = client.completions.create(model=MODEL, prompt="ab", logprobs=2, max_tokens=2, echo=True)
    assert plain.choices[0].text == "abHe" and plain.choices[0].logprobs.text_offset == [0, 1, 2, 3]


def test_completions(client: openai.OpenAI) -> None:
    for prompt in ("ab", ["ab"], [97, 98], [[97, 98]]):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=5, n=2)
        assert [choice.text for choice in answer.choices] == ["Hello"] * 2
        stream = client.completions.create(model=MODEL, prompt=prompt, max_tokens=5, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hello"


def test_models(strict: openai.OpenAI) -> None:
    assert [model.id for model in strict.models.list()] == [MODEL]
    assert strict.models.retrieve(MODEL).owned_by == "kittiwake"
    with pytest.raises(openai.NotFoundError) as caught:
        strict.chat.completions.create(model="other", messages=HI)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_errors_are_what_the_client_expects(client: openai.OpenAI, engine: StubEngine, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HI, extra_body={"banana": 1})
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "banana")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=HI, temperature=-1)
    with (
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.models.list()
    engine.refuse = Failure("full", "", 429, "queue_full", 1)
    with pytest.raises(openai.RateLimitError) as limited:
        client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    assert limited.value.response.headers["retry-after"] == "1"
    assert limited.value.request_id and limited.value.request_id.startswith("req_")


def test_a_stream_that_fails_halfway_raises(client: openai.OpenAI, engine: StubEngine) -> None:
    engine.fail_after = 3
    texts: list[str] = []
    stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="logits are not finite"):
        texts.extend(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "".join(texts) == "Hel"


def test_the_client_for_asyncio(url: str, engine: StubEngine) -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            whole = await client.chat.completions.create(model=MODEL, messages=HI)
            assert whole.choices[0].message.content == "Hello there."
            assert await asyncio.gather(*(one(client) for _ in range(16))) == ["Hello there."] * 16
            engine.step_s = 0.01
            stream = await client.chat.completions.create(
                model=MODEL, messages=HI, stream=True, max_tokens=10_000, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()
            for _ in range(6000):
                if engine.cancelled:
                    return
                await asyncio.sleep(0.01)
            raise AssertionError("the closed stream was not cancelled")

    asyncio.run(run())


def test_the_example_of_the_document_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert examples
    with listening(create_app(StubEngine(), ServerConfig(served_model_name="rwkv"))) as url:
        for example in examples:
            exec(compile(example.replace("http://127.0.0.1:8000", url), "serving.md", "exec"), {})
    assert capsys.readouterr().out == "Hello there.\nHello there."


@asynccontextmanager
async def _app_over(folder: Path) -> AsyncIterator[ASGIApp]:
    async with client_of(folder) as client:
        yield create_app(client, ServerConfig(served_model_name="kittiwake-demo"))


@pytest.mark.slow
def test_the_packaged_model_answers_through_http_as_it_does_in_a_script(tmp_path: Path) -> None:
    prompt, params = "It was a dark night, and", SamplingParams(max_tokens=24, temperature=0.8, seed=7, logprobs=True)
    llm = LLM()
    expected = llm.generate(prompt, params)[0]
    ask = {"model": "kittiwake-demo", "prompt": prompt, "max_tokens": 24, "temperature": 0.8, "seed": 7, "logprobs": 0}
    extra = {"return_token_ids": True}
    with (
        running_engine(tmp_path, llm=llm),
        listening(_app_over(tmp_path)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        crowd = [client.completions.create(**ask, stream=True, extra_body=extra) for _ in range(8)]
        alone = client.completions.create(**ask, extra_body=extra)
        streamed = [list(stream) for stream in crowd]
    assert alone.choices[0].text == expected.text
    assert alone.choices[0].token_ids == list(expected.token_ids)
    assert expected.logprobs is not None
    values = [one.logprob for one in expected.logprobs]
    assert alone.choices[0].logprobs.token_logprobs == values
    for chunks in streamed:
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
        parts = [chunk.choices[0].logprobs for chunk in chunks]
        assert [value for part in parts if part for value in part.token_logprobs] == values
