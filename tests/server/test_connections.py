"""Limits on connections, over real sockets and an app of three lines."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import uvicorn

from kittiwake.config import ServerConfig
from kittiwake.server.connections import LimitedProtocol, bind_listeners
from kittiwake.server.worker import make_server

from .running import run, until

CONFIG = ServerConfig(header_timeout_s=0.3, write_timeout_s=0.3, keep_alive_s=1.0, max_header_bytes=4096)
PATIENT = replace(CONFIG, header_timeout_s=60.0, write_timeout_s=60.0, keep_alive_s=60.0)
"""For tests that wait for none of these, however slow the machine is."""
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class App:
    """Reads the body and says how long it was; at /endless it never stops talking."""

    def __init__(self) -> None:
        self.running = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": message["type"] + ".complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        self.running += 1
        try:
            size, more = 0, True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                size, more = size + len(message["body"]), message["more_body"]
            text = str(size).encode()
            head = [] if scope["path"] == "/endless" else [(b"content-length", b"%d" % len(text))]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            leaving = asyncio.create_task(receive())
            while scope["path"] == "/endless" and not leaving.done():
                await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
                await asyncio.sleep(0)
            leaving.cancel()
            await send({"type": "http.response.body", "body": text, "more_body": False})
        finally:
            self.running -= 1


@asynccontextmanager
async def serving(app: App, config: ServerConfig = CONFIG) -> AsyncIterator[tuple[int, uvicorn.Server]]:
    """The app behind the server's own protocol."""
    (listener,) = bind_listeners("127.0.0.1", 0, 1)
    port = listener.getsockname()[1]
    server = make_server(app, config)
    task = asyncio.create_task(server.serve([listener]))
    await until(lambda: server.started)
    try:
        yield port, server
    finally:
        server.should_exit = True
        await task


async def _ask(port: int, *parts: bytes, pause_s: float = 0.0) -> tuple[bytes, float]:
    """What comes back until the server closes, and after how many seconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started_s = time.monotonic()
    for part in parts:
        writer.write(part)
        await asyncio.sleep(pause_s)
    try:
        data = await asyncio.wait_for(reader.read(), 60)
    except ConnectionError:
        data = b""
    writer.close()
    return data, time.monotonic() - started_s


def test_an_answer_and_the_next_one_on_the_same_connection() -> None:
    async def work() -> None:
        async with serving(App(), replace(PATIENT, keep_alive_s=2.0)) as (port, _):
            data, seconds = await _ask(port, GET, GET, pause_s=0.4)
            assert data.count(b"200 OK") == 2
            assert seconds > 2.0

    run(work())


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /", b"GET / HTTP/1.1\r\nhost: x\r\n", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc"],
)
def test_a_request_that_does_not_come_is_not_waited_for(sent: bytes) -> None:
    app = App()

    async def work() -> None:
        async with serving(app) as (port, server):
            data, seconds = await _ask(port, sent)
            assert data.startswith(b"HTTP/1.1 408 ") and b'"code":"timeout"' in data
            assert seconds > 0.2
            await until(lambda: app.running == 0 and not server.server_state.connections)

    run(work())


def test_a_head_that_trickles_in_is_not_waited_for_either() -> None:
    async def work() -> None:
        async with serving(App(), replace(PATIENT, header_timeout_s=0.3)) as (port, _):
            # Each piece comes in time, but a head has one time for all of it.
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n")

            async def trickle() -> None:
                while True:
                    writer.write(b"x")
                    await asyncio.sleep(0.05)

            trickling = asyncio.create_task(trickle())
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            trickling.cancel()
            writer.close()

    run(work())


def test_a_slow_second_request_is_cut_off_like_a_first_one() -> None:
    async def work() -> None:
        async with serving(App(), replace(PATIENT, header_timeout_s=0.3)) as (port, _):
            data, _ = await _ask(port, GET, b"GET / HT", pause_s=0.1)
            assert data.count(b"HTTP/1.1") == 2 and b"408" in data

    run(work())


@pytest.mark.parametrize("second", [b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc", b"GET / HT"])
def test_a_slow_request_that_came_with_the_one_before_is_cut_off_too(second: bytes) -> None:
    app = App()

    async def work() -> None:
        async with serving(app, replace(PATIENT, header_timeout_s=0.3)) as (port, server):
            data, _ = await _ask(port, GET + second)
            assert data.count(b"HTTP/1.1") == 2 and b" 200 OK" in data and b" 408 " in data
            await until(lambda: app.running == 0 and not server.server_state.connections)

    run(work())


def test_a_body_may_take_its_time_as_long_as_it_comes() -> None:
    async def work() -> None:
        async with serving(App(), replace(PATIENT, header_timeout_s=1.2)) as (port, _):
            head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 8\r\n\r\n"
            data, seconds = await _ask(port, head, *[b"x"] * 8, pause_s=0.2)
            assert data.endswith(b"\r\n\r\n8") and seconds > 1.2

    run(work())


def test_a_client_that_takes_nothing_is_dropped() -> None:
    app = App()

    async def work() -> None:
        async with serving(app) as (port, server):
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
            await until(lambda: app.running == 1)
            await until(lambda: app.running == 0 and not server.server_state.connections)
            writer.close()

    run(work())


def test_a_client_that_reads_slowly_is_served() -> None:
    app = App()

    async def work() -> None:
        async with serving(app, replace(PATIENT, write_timeout_s=1.5)) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
            for _ in range(15):
                await asyncio.sleep(0.15)
                assert await reader.read(1 << 20)
            assert app.running == 1
            writer.close()
            await until(lambda: app.running == 0)

    run(work())


def test_a_long_answer_is_not_broken_off_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Long(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "lifespan":
                await super().__call__(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b"x" * size, "more_body": False})

    size, rounds = 8 << 20, []
    watch = LimitedProtocol._watch_writing
    monkeypatch.setattr(LimitedProtocol, "_watch_writing", lambda self: (rounds.append(1), watch(self))[1])

    async def work() -> None:
        async with serving(Long(), replace(PATIENT, write_timeout_s=1.0)) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
            writer.write(GET)
            await reader.readuntil(b"\r\n\r\n")
            read = 0
            while not reader.at_eof():
                read += len(await reader.read(1 << 17))
                await asyncio.sleep(0 if len(rounds) > 1 else 0.05)  # as slowly as it takes
            writer.close()
        assert len(rounds) > 1
        assert size <= read < size + 10_000  # with the sizes of its chunks

    run(work())


def test_a_half_closed_client_is_gone() -> None:
    app = App()

    async def work() -> None:
        async with serving(app, PATIENT) as (port, server):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.read(1000)
            writer.write_eof()
            await until(lambda: app.running == 0)
            writer.transport.abort()
            await until(lambda: not server.server_state.connections)

    run(work())


def test_heads_are_bounded() -> None:
    async def work() -> None:
        async with serving(App(), PATIENT) as (port, _):
            data, _ = await _ask(port, b"GET / HTTP/1.1\r\nx: " + b"y" * 10_000)
            _refused(data)

    run(work())


def _refused(data: bytes) -> None:
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"application/json" in head
    error = json.loads(body)["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_http")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["TLS", "no host", "two hosts", "a length below zero", "a bad chunk"],
)
def test_what_is_no_http_is_refused_as_everything_is(sent: bytes) -> None:
    app = App()

    async def work() -> None:
        async with serving(app, PATIENT) as (port, server):
            _refused((await _ask(port, sent))[0])
            assert b"200 OK" in (await _ask(port, GET.replace(b"host", b"connection: close\r\nhost")))[0]
            await until(lambda: app.running == 0 and not server.server_state.connections)

    run(work())


def test_connections_are_bounded() -> None:
    async def work() -> None:
        async with serving(App(), replace(PATIENT, max_connections=3)) as (port, server):
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            await until(lambda: len(server.server_state.connections) == 3)
            assert (await _ask(port, GET))[0] == b""
            held.pop()[1].close()
            await until(lambda: len(server.server_state.connections) == 2)
            assert b"200 OK" in (await _ask(port, GET.replace(b"host", b"connection: close\r\nhost")))[0]
            for _, writer in held:
                writer.close()

    run(work())


def test_listeners_share_a_port_and_nobody_else_gets_it() -> None:
    first = bind_listeners("127.0.0.1", 0, 3)
    port = first[0].getsockname()[1]
    assert {listener.getsockname()[1] for listener in first} == {port}
    for listener in first:
        listener.listen()
    for count in (1, 2):
        with pytest.raises(OSError, match="in use"):
            bind_listeners("127.0.0.1", port, count)
    for listener in first:
        listener.close()
    (again,) = bind_listeners("127.0.0.1", port, 1)
    again.close()
    with pytest.raises(socket.gaierror):
        bind_listeners("no.such.host.invalid", 0, 1)
