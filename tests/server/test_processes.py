"""Whole servers: processes killed at bad moments, clients that misbehave, and the end in good order."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from .live import (
    LiveServer,
    live_server,
    memory_bytes,
    post,
    read_all,
    read_until,
    server_children,
    wait_for,
    write_tiny_model,
)

pytestmark = pytest.mark.slow
ENDLESS = {"max_tokens": 10_000_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One for the tests that leave it as it was."""
    options = ("--http-workers", "3", "--slots", "8", "--max-queue", "100000", "--header-timeout-s", "1")
    with live_server(model, tmp_path_factory.mktemp("server"), *options, "--write-timeout-s", "2") as found:
        yield found


def _answer(server: LiveServer, index: int) -> tuple[Any, ...]:
    found = server.complete("x" * (1 + index % 7), max_tokens=12, seed=index, logprobs=2, temperature=0.5 * (index % 3))
    choice = found["choices"][0]
    return choice["text"], json.dumps(choice["logprobs"]), choice["finish_reason"]


def test_answers_are_the_same_alone_in_a_crowd_and_with_one_worker(
    server: LiveServer, model: Path, tmp_path: Path
) -> None:
    alone = [_answer(server, index) for index in range(24)]
    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(lambda index: _answer(server, index), range(24))) == alone
    with live_server(model, tmp_path, "--slots", "2", "--cache-bytes", "0") as other, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda index: _answer(other, index), range(24))) == alone


def test_a_thousand_abandoned_streams_leave_nothing_behind(server: LiveServer) -> None:
    def abandon(count: int) -> None:
        for index in range(count):
            connection = server.open_stream("x" * (index % 40 + 1), **ENDLESS)
            if index % 3 == 0:
                read_until(connection, b"data:")
            connection.close()

    engine = server.pids("engine_process")[0]
    abandon(30)
    wait_for(server.is_idle)
    before = {pid: memory_bytes(pid) for pid in server.children()}
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(abandon, [100] * 10))
    wait_for(server.is_idle)
    assert engine in server.children()
    grown = {pid: memory_bytes(pid) - before[pid] for pid in before}
    assert max(grown.values()) < 48 << 20, grown
    assert len(server.complete("x", max_tokens=5, ignore_eos=True)["choices"][0]["text"]) > 0


def test_a_reader_that_does_not_read_is_dropped(server: LiveServer) -> None:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    body = {"model": "tiny", "prompt": "x", "stream": True, "logprobs": 5, **ENDLESS}
    before = server.figure("kittiwake_engine_prompt_tokens_total")
    connection.sendall(post("/v1/completions", body))
    wait_for(lambda: server.figure("kittiwake_engine_prompt_tokens_total") > before)
    wait_for(server.is_idle)
    connection.close()


def test_a_half_closed_client_frees_its_slot(server: LiveServer) -> None:
    connection = server.open_stream(**ENDLESS)
    read_until(connection, b"data:")
    connection.shutdown(socket.SHUT_WR)
    read_all(connection)
    connection.close()
    wait_for(server.is_idle)


def test_slow_heads_and_bodies_are_cut_off(server: LiveServer) -> None:
    for sent in (b"", b"GET /hea", post("/v1/completions", {"model": "tiny"})[:-3]):
        started_s = time.monotonic()
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(sent)
            reply = read_all(connection)
        assert time.monotonic() - started_s > 0.5
        assert reply.startswith(b"HTTP/1.1 408 ")


def test_huge_heads_and_bodies_are_refused(server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-junk: " + b"x" * 100_000)
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(head + b"content-length: 100000000000\r\n\r\n{")
        assert read_until(connection, b"}").startswith(b"HTTP/1.1 413 ")
    assert server.get("/health")[0] == 200


def test_figures_of_all_workers_are_added_up(server: LiveServer) -> None:
    name = 'kittiwake_http_requests_total{method="GET",route="/health",status="200"}'
    before = server.figure(name)
    for _ in range(30):
        server.get("/health")
    assert server.figure(name) == before + 30


def test_the_log_tells_of_requests_but_none_of_their_text(server: LiveServer) -> None:
    server.complete("a secret of mine", max_tokens=3)
    server.call("POST", "/v1/completions?key=hidden", {"model": "tiny", "prompt": "a secret of mine", "bogus": 1})
    wait_for(lambda: " status=400 " in server.log)
    assert "method=POST path=/v1/completions status=200" in server.log
    assert "secret" not in server.log and "hidden" not in server.log


def test_a_worker_that_is_killed_is_started_again(server: LiveServer) -> None:
    streams = [server.open_stream(**ENDLESS) for _ in range(6)]
    for stream in streams:
        read_until(stream, b"data:")
    workers = server.pids("worker")
    assert len(workers) == 3
    os.kill(workers[0], signal.SIGKILL)
    wait_for(lambda: len(server.pids("worker")) == 3 and workers[0] not in server.children())
    for stream in streams:
        stream.close()
    wait_for(server.is_idle)
    wait_for(lambda: "has died" in server.log)
    for _ in range(12):  # some of them come to the new one
        assert server.complete("x", max_tokens=2)["usage"]["completion_tokens"] >= 1


def test_children_die_with_a_parent_that_is_killed(server: LiveServer) -> None:
    children = server.children()
    assert len(children) == 4
    server.process.kill()
    wait_for(lambda: not children.keys() & server_children().keys())


def _keep_asking(server: LiveServer) -> set[tuple[str, int, str]]:
    """Path, status and code of what a server answers until it ends: it says 503 for two seconds only."""
    seen = set()
    ask = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    while server.process.poll() is None:
        for method, path, body in (("POST", "/v1/completions", ask), ("GET", "/health", None)):
            with suppress(OSError, http.client.HTTPException):  # its last moments
                status, text = server.call(method, path, body)
                seen.add((path, status, "" if status == 200 else json.loads(text)["error"]["code"]))
    return seen


def test_an_engine_that_dies_ends_streams_with_an_error_and_the_server(model: Path, tmp_path: Path) -> None:
    with live_server(model, tmp_path, "--http-workers", "2") as server:
        streams = [server.open_stream(**ENDLESS) for _ in range(4)]
        for stream in streams:
            read_until(stream, b"data:")
        children = server.children()
        with ThreadPoolExecutor(6) as pool:
            readers = [pool.submit(read_all, stream) for stream in streams]
            askers = [pool.submit(_keep_asking, server) for _ in range(2)]
            os.kill(server.pids("engine_process")[0], signal.SIGKILL)
            for reader in readers:
                assert b'"code":"engine_gone"' in reader.result().replace(b'": "', b'":"')
            seen = set().union(*(asker.result() for asker in askers))
        assert {("/v1/completions", 503, "engine_gone"), ("/health", 503, "engine_gone")} <= seen
        for stream in streams:
            stream.close()
        assert server.wait() == 1
        assert "the engine has died (signal SIGKILL)" in server.log
        assert not children.keys() & server_children().keys()


def test_an_engine_that_dies_is_started_again_where_that_was_asked_for(model: Path, tmp_path: Path) -> None:
    with live_server(model, tmp_path, "--restart-engine", "--drain-s", "5") as server:
        expected = server.complete("abc", max_tokens=9, seed=3)["choices"][0]["text"]
        os.kill(server.pids("engine_process")[0], signal.SIGKILL)
        wait_for(lambda: server.get("/ready")[0] == 503)
        wait_for(lambda: server.get("/ready")[0] == 200, 120)
        assert server.complete("abc", max_tokens=9, seed=3)["choices"][0]["text"] == expected
        # the end in good order: what runs is let run for a while, then told
        endless = server.open_stream(**ENDLESS)
        short = server.open_stream("x", max_tokens=100, ignore_eos=True)
        for stream in (endless, short):
            read_until(stream, b"data:")
        children = server.children()
        server.signal(signal.SIGTERM)
        assert b"data: [DONE]" in read_all(short)
        assert b"shutting down" in read_all(endless)
        for stream in (endless, short):
            stream.close()
        assert server.wait() == 0
        assert not children.keys() & server_children().keys()


def test_a_second_signal_ends_it_at_once(model: Path, tmp_path: Path) -> None:
    with live_server(model, tmp_path) as server:
        stream = server.open_stream(**ENDLESS)
        read_until(stream, b"data:")
        children = server.children()
        server.signal(signal.SIGINT)
        wait_for(lambda: "stopping" in server.log)
        server.signal(signal.SIGINT)
        started_s = time.monotonic()
        assert server.wait() == 130
        stream.close()
        assert time.monotonic() - started_s < 25  # running answers would get 30
        assert not children.keys() & server_children().keys()


def _serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "kittiwake", "serve", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=240, check=False)


def test_a_port_that_is_taken_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for workers in ("1", "3"):
            done = _serve("--port", str(port), "--http-workers", workers)
            assert done.returncode == 2
            assert f"127.0.0.1 port {port} cannot be listened on: Address already in use" in done.stderr


def test_a_model_that_cannot_be_loaded_ends_as_every_command_does(tmp_path: Path) -> None:
    (tmp_path / "bad.pth").write_bytes(b"nonsense" * 100)
    done = _serve(str(tmp_path / "bad.pth"), "--port", "0")
    assert done.returncode == 3
    assert "bad.pth" in done.stderr.splitlines()[-2] + done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
