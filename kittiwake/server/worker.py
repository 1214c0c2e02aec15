"""An HTTP worker process: uvicorn over the app, one end of the message socket.

Run as ``python -m kittiwake.server.worker`` by the supervisor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kittiwake.config import ServerConfig
from kittiwake.server import metrics
from kittiwake.server.app import create_app
from kittiwake.server.child import Parent, WorkerJob
from kittiwake.server.connections import limited_protocol
from kittiwake.server.remote_engine import RemoteEngine

access_logger = logging.getLogger("kittiwake.access")

_BACKLOG = 2048
"""Connections that wait to be taken."""
_LAST_WORDS_S = 2.0
"""How long an answer that is broken off gets to say so."""
_UNKNOWN = "(other)"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_CLOSED = 499
"""What is noted where the client left before there was a status."""
_LONGEST_PATH = 200


class _Server(uvicorn.Server):
    """uvicorn that leaves signals alone: the parent tells when to end."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Measured:
    """The app with its requests counted, timed and logged: by route, without query and without any of their text."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        status, has_ended = 0, False

        async def observe(message: Message) -> None:
            nonlocal status, has_ended
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                has_ended = not message.get("more_body", False)
            await send(message)

        metrics.http_in_flight.inc()
        try:
            await self._app(scope, receive, observe)
        finally:
            seconds = time.perf_counter() - started_s
            metrics.http_in_flight.dec()
            metrics.http_requests.labels(_method(scope), _route(scope), str(status or _CLOSED)).inc()
            metrics.http_seconds.labels(_route(scope)).observe(seconds)
            _log(scope, status, seconds, has_ended)


def _log(scope: Any, status: int, seconds: float, has_ended: bool) -> None:
    """The line of a request in the log."""
    told = {
        "request_id": scope.get("state", {}).get("request_id", ""),
        "client": scope["client"][0] if scope.get("client") else "",
        "method": scope["method"],
        "path": scope["path"][:_LONGEST_PATH],
        "status": status or _CLOSED,
        "ms": round(seconds * 1e3, 3),
    }
    access_logger.info("request" if has_ended else "request broken off", extra=told)


def _route(scope: Any) -> str:
    """The route's own pattern, not the path: figures must not grow with what clients make up."""
    return getattr(scope.get("route"), "path", _UNKNOWN)


def _method(scope: Any) -> str:
    return scope["method"] if scope["method"] in _METHODS else _UNKNOWN


def make_server(app: ASGIApp, config: ServerConfig) -> uvicorn.Server:
    """uvicorn as this server wants it."""
    settings = uvicorn.Config(
        app,
        http=limited_protocol(config),
        ws="none",
        lifespan="on",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=max(1, round(config.keep_alive_s)),
        timeout_graceful_shutdown=round(config.drain_s + _LAST_WORDS_S) + 1,
        h11_max_incomplete_event_size=config.max_header_bytes,
    )
    return _Server(settings)


async def serve(job: WorkerJob, parent: Parent) -> None:
    """Wait for the engine, then answer until the parent says otherwise."""
    engine = RemoteEngine(Path(job.folder), job.name, max_buffered_bytes=job.server.max_buffered_bytes)
    async with engine:
        ending = asyncio.create_task(_until_told(parent))
        loading = asyncio.create_task(engine.wait_ready())
        await asyncio.wait((ending, loading), return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            loading.cancel()
            return
        server = make_server(Measured(create_app(engine, job.server)), job.server)
        serving = asyncio.create_task(server.serve([socket.socket(fileno=job.listener)]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        parent.tell_ready()
        await asyncio.wait((ending, serving), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            engine.stop_taking()
            asyncio.get_running_loop().call_later(ending.result(), engine.break_off)
            server.should_exit = True
        await serving
        ending.cancel()


async def _until_told(parent: Parent) -> float:
    """Wait for the parent's word to end: the seconds that running answers have left."""
    heard: asyncio.Queue[list[str]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.add_reader(parent.fileno(), lambda: heard.put_nowait(parent.words()))
    while True:
        for word in await heard.get():
            if word.startswith("drain "):
                return float(word.removeprefix("drain "))
        if parent.is_gone:
            os._exit(0)


def main() -> None:
    """Serve HTTP."""
    parent = Parent()
    job = parent.job(WorkerJob, "worker")
    metrics.log_missing_room()
    asyncio.run(serve(job, parent))


if __name__ == "__main__":
    main()
