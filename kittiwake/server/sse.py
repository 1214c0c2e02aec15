"""Answers that take a while: server-sent events with comments in silence, and the end of the work when nobody listens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kittiwake.errors import KittiwakeError
from kittiwake.server.api_errors import ApiError

DONE = b"data: [DONE]\n\n"
_COMMENT = b": still at work\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_Result = TypeVar("_Result")


def event(content: Any) -> bytes:
    """One event with JSON in it."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


class ClientGoneError(Exception):
    """The client went away before it had its answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of ``work``, which is cancelled when the client goes away; then raises ClientGoneError."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        await _end(working)
        await _end(watching)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait until it has cleaned up; what it raised is not asked for any more."""
    if not task.done():
        task.cancel()
        with suppress(BaseException):
            await task
    elif not task.cancelled():
        task.exception()


class EventResponse(Response):
    """A stream of events, each of ``chunks`` one or more of them.

    The head is held back until there is something to say, or ``comment_s`` have passed: so an answer that fails before
    has the status of its error. One that fails later ends with an event that holds the error, and without ``[DONE]``.
    ``chunks`` is closed as soon as the client has gone.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], *, comment_s: float, headers: Mapping[str, str] | None = None
    ) -> None:
        self._chunks, self._comment_s = chunks, comment_s
        self._is_begun = self._is_over = False
        self._last_s = time.monotonic()
        self._turn = asyncio.Lock()  # an answer and a comment are sent one after the other
        self.status_code = 200
        self.background = None
        self.init_headers({**_HEADERS, **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all."""
        self._last_s = time.monotonic()
        with suppress(ClientGoneError):
            commenting = asyncio.ensure_future(self._comment(send))
            try:
                await while_connected(receive, self._run(scope, receive, send))
            finally:
                await _end(commenting)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    await self._put(send, chunk)
            last = b""
        except (KittiwakeError, ApiError) as error:
            failure = error if isinstance(error, ApiError) else ApiError.of(error)
            last = event(failure.body)
            if not self._is_begun:
                async with self._turn:
                    self._is_over = True
                    await failure.response()(scope, receive, send)
                return
        await self._put(send, last, is_last=True)

    async def _put(self, send: Send, chunk: bytes, *, is_last: bool = False) -> None:
        async with self._turn:
            if self._is_over:
                return
            if not self._is_begun:
                self._is_begun = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._last_s, self._is_over = time.monotonic(), is_last
            message: Message = {"type": "http.response.body", "body": chunk, "more_body": not is_last}
            await send(message)

    async def _comment(self, send: Send) -> None:
        """Say something whenever nothing has been said for a while."""
        while True:
            silent_s = time.monotonic() - self._last_s
            if silent_s >= self._comment_s:
                with suppress(OSError):
                    await self._put(send, _COMMENT)
                silent_s = 0.0
            await asyncio.sleep(self._comment_s - silent_s)
