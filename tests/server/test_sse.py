from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from kittiwake.config import ServerConfig
from kittiwake.server.app import create_app
from kittiwake.server.sse import ClientGoneError, EventResponse, while_connected
from tests.server.ask import HI, asking, events_of, in_loop, listening, until
from tests.server.stub_engine import StubEngine

CHAT = "/v1/chat/completions"


@in_loop
async def test_a_long_silence_is_filled_with_comments() -> None:
    async with asking(StubEngine(prefill_s=0.35), comment_s=0.1) as client:
        answer = await client.post(CHAT, json={"messages": HI, "stream": True})
        quick = await client.post(CHAT, json={"messages": HI})
    assert answer.text.startswith(": still at work\n\n")
    assert events_of(answer.text)[-1] == "[DONE]"
    assert quick.json()["choices"][0]["message"]["content"] == "Hello there."


@in_loop
async def test_comments_come_one_after_the_other_for_as_long_as_there_is_silence() -> None:
    comments: list[float] = []
    enough, sent = asyncio.Event(), []

    async def chunks() -> AsyncGenerator[bytes, None]:
        await enough.wait()
        yield b"data: x\n\n"

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(100)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])
            if message["body"].startswith(b":"):
                comments.append(time.monotonic())
            if len(comments) == 3:
                enough.set()

    begun_s = time.monotonic()
    await EventResponse(chunks(), comment_s=0.1)({"type": "http"}, receive, send)  # type: ignore[arg-type]
    assert sent[:3] == [b": still at work\n\n"] * 3 and sent[-2:] == [b"data: x\n\n", b""]
    assert all(later - earlier > 0.09 for earlier, later in pairwise([begun_s, *comments]))


@in_loop
async def test_no_comments_between_tokens_that_come_in_time() -> None:
    # in all it takes longer than a silence may
    async with asking(StubEngine(step_s=0.15), comment_s=1.5) as client:
        answer = await client.post(CHAT, json={"messages": HI, "stream": True})
    assert answer.text[0] != ":" and "still at work" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("engine", [StubEngine(step_s=0.02), StubEngine(prefill_s=100)], ids=["decoding", "reading"])
def test_who_goes_away_is_not_worked_for(engine: StubEngine, stream: bool) -> None:
    engine = StubEngine(step_s=engine.step_s, prefill_s=engine.prefill_s)

    async def run(url: str) -> None:
        ask = {"messages": HI, "stream": stream, "ignore_eos": True, "max_tokens": 100_000}
        async with httpx.AsyncClient(base_url=url) as client:
            asking_it = asyncio.ensure_future(client.post(CHAT, json=ask, timeout=100))
            await until(lambda: len(engine.submitted) == 1)
            await asyncio.sleep(0.1)
            assert engine.cancelled == []
            asking_it.cancel()
            await until(lambda: len(engine.cancelled) == 1)
            assert engine.finished == []

    with listening(create_app(engine, ServerConfig())) as url:
        asyncio.run(run(url))


def test_a_thousand_abandoned_streams_leave_nothing_behind() -> None:
    engine = StubEngine(step_s=0.01)

    async def one(client: httpx.AsyncClient) -> None:
        ask = {"prompt": ["a", "b"], "stream": True, "ignore_eos": True, "max_tokens": 100_000}
        async with client.stream("POST", "/v1/completions", json=ask) as answer:
            async for _ in answer.aiter_text():
                return

    async def run(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=100) as client:
            for _ in range(10):
                await asyncio.gather(*(one(client) for _ in range(50)))
            await until(lambda: len(engine.cancelled) == 1000)
            assert (await client.post(CHAT, json={"messages": HI})).status_code == 200

    with listening(create_app(engine, ServerConfig())) as url:
        asyncio.run(run(url))
    assert len(engine.submitted) == 1001 and len(engine.finished) == 1


@in_loop
async def test_work_is_cancelled_and_cleans_up_before_the_client_is_given_up() -> None:
    cleaned = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(1)

    with pytest.raises(ClientGoneError):
        await while_connected(receive, work())  # type: ignore[arg-type]
    assert cleaned == [1]


@in_loop
async def test_what_work_raises_comes_through() -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.sleep(30)
        return {}

    async def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await while_connected(receive, work())  # type: ignore[arg-type]


@in_loop
async def test_a_stream_whose_client_goes_is_closed_before_the_answer_is_over() -> None:
    begun, closed = [], []

    async def chunks() -> AsyncGenerator[bytes, None]:
        begun.append(1)
        try:
            while True:
                yield b"data: x\n\n"
                await asyncio.sleep(0.01)
        finally:
            closed.append(1)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.03)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(0.005)

    await EventResponse(chunks(), comment_s=1)({"type": "http"}, receive, send)  # type: ignore[arg-type]
    assert closed == begun == [1]
