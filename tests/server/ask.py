"""Asking the application in the test's own process, and over a real socket."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp

from kittiwake.config import ServerConfig
from kittiwake.server.app import create_app
from kittiwake.server.engine_client import EngineClient

HI = [{"role": "user", "content": "Hi"}]
KEY = "a-secret-of-this-test"


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @wraps(test)
    def run(*args: Any, **values: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **values), 120))

    return run


@asynccontextmanager
async def asking(engine: EngineClient, **config: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application over ``engine``, without a socket between them."""
    app = create_app(engine, ServerConfig(**config))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@contextmanager
def listening(app: ASGIApp | AbstractAsyncContextManager[ASGIApp]) -> Iterator[str]:
    """A real server on a free port, in a thread with a loop of its own; yields its address.

    An application that comes as a context manager is made in that loop.
    """
    config = uvicorn.Config("", port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)

    async def serve() -> None:
        async with app if isinstance(app, AbstractAsyncContextManager) else nullcontext(app) as made:
            config.app = made
            await server.serve()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def events_of(text: str) -> list[Any]:
    """The JSON of each event, and the text of one that has none."""
    blocks = [block for block in text.split("\n\n") if block]
    lines = [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]
    assert len(lines) + sum(block.startswith(":") for block in blocks) == len(blocks)
    return [json.loads(line) if line.startswith("{") else line for line in lines]


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of a refused request, its shape checked."""
    content = answer.json()
    assert answer.status_code >= 400
    assert list(content) == ["error"]
    assert set(content["error"]) == {"message", "type", "param", "code"}
    assert isinstance(content["error"]["message"], str) and content["error"]["message"]
    return dict(content["error"])


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds; an assertion where it never does, after a time that is long on a busy machine too."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen within a minute")
