"""A whole server as a user starts it: the command, its processes, and plain sockets to talk to it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kittiwake.bench.shapes import random_rwkv7, small


def write_tiny_model(folder: Path) -> Path:
    """A random RWKV-7 of two layers whose tokens are bytes."""
    path = folder / "tiny.pth"
    torch.save(random_rwkv7(small(), seed=3), path)
    return path


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait for something to become true, as long as it may take on a busy machine; what it gave."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"it did not happen within {seconds} s")


class LiveServer:
    """A running ``kittiwake serve``."""

    def __init__(self, process: subprocess.Popen[bytes], ready: dict[str, Any], log: Path) -> None:
        self.process, self.port, self._log = process, ready["port"], log
        assert ready["pid"] == process.pid

    @property
    def log(self) -> str:
        """What it has written to stderr."""
        return self._log.read_text()

    def children(self) -> dict[int, str]:
        """Process id → module of its children that live."""
        return {pid: module for pid, module in server_children().items() if _parent(pid) == self.process.pid}

    def pids(self, module: str) -> list[int]:
        """Children that run a module."""
        return [pid for pid, name in self.children().items() if name == module]

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET on a connection of its own."""
        return self.call("GET", path)

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """The same of any request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def complete(self, prompt: str, **more: Any) -> dict[str, Any]:
        """The answer of /v1/completions."""
        status, text = self.call("POST", "/v1/completions", {"model": "tiny", "prompt": prompt, **more})
        assert status == 200, text
        found: dict[str, Any] = json.loads(text)
        return found

    def open_stream(self, prompt: str = "x", **more: Any) -> socket.socket:
        """A socket on which a streamed completion has been asked for."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=120)
        connection.sendall(post("/v1/completions", {"model": "tiny", "prompt": prompt, "stream": True, **more}))
        return connection

    def figure(self, name: str) -> float:
        """A figure of /metrics; 0 where it is not there yet."""
        status, text = self.get("/metrics")
        assert status == 200
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name + " "))

    def is_idle(self) -> bool:
        """Whether no request holds anything."""
        return (
            self.figure("kittiwake_engine_running") == 0
            and self.figure("kittiwake_engine_waiting") == 0
            and self.figure("kittiwake_engine_free_slots") == self.figure("kittiwake_engine_slots")
        )

    def signal(self, number: signal.Signals) -> None:
        """Send the parent a signal."""
        self.process.send_signal(number)

    def wait(self, seconds: float = 120.0) -> int:
        """Its exit code."""
        return self.process.wait(seconds)


@contextmanager
def live_server(model: Path, folder: Path, *options: str) -> Iterator[LiveServer]:
    """Start a server and wait until it takes requests; whatever is left of it at the end is killed."""
    ready_file, log = folder / f"ready-{time.monotonic_ns()}.json", folder / f"log-{time.monotonic_ns()}.txt"
    line = [sys.executable, "-m", "kittiwake", "serve", str(model), "--port", "0", "--ready-file", str(ready_file)]
    with log.open("wb") as stderr:
        process = subprocess.Popen([*line, "--served-model-name", "tiny", "--threads", "1", *options], stderr=stderr)
    children: dict[int, str] = {}
    try:
        wait_for(lambda: ready_file.exists() or process.poll() is not None, 240)
        assert process.poll() is None, log.read_text()
        server = LiveServer(process, json.loads(ready_file.read_text()), log)
        yield server
        children = server.children()
    finally:
        process.kill()
        process.wait()
        for pid in children:
            wait_for(lambda pid=pid: pid not in server_children())


def server_children() -> dict[int, str]:
    """Process id → module, of all live children of servers on this machine."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if "-m" in words and words[words.index("-m") + 1].startswith("kittiwake.server."):
                found[int(entry.name)] = words[words.index("-m") + 1].rpartition(".")[2]
    return found


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def post(path: str, body: Any) -> bytes:
    """A POST as bytes."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    """What comes up to a mark, or until the other side closes."""
    data = b""
    while mark not in data:
        piece = connection.recv(1 << 16)
        if not piece:
            return data
        data += piece
    return data


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other side closes, or breaks off."""
    data = b""
    while True:
        try:
            piece = connection.recv(1 << 16)
        except ConnectionError:
            return data
        if not piece:
            return data
        data += piece


def memory_bytes(pid: int) -> int:
    """Memory a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
