#!/usr/bin/env python3
"""Put a server under mixed load for a while and look for what only time shows.

    python tools/soak.py [MODEL] --minutes 60

Starts its own server. Clients complete, stream, leave in the middle, ask for several samples, send nonsense and ask for
figures, in a seeded random order. Afterwards: every answer that was read to its end had exactly one finish reason a sample
and all its tokens, the same request got the same text every time, no memory grew after the first third, and slots, queue
and connections are back to where they began. Exit code 1 when any of this is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

SAMPLE_S = 2.0
GROWTH_BYTES = 48 << 20
"""Allocators keep some of what they get; more than this is growth."""
PROMPTS = 40


@dataclass
class Report:
    """What was seen."""

    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    """Request → answer."""
    memory: list[dict[int, int]] = field(default_factory=list)

    def check(self, holds: bool, text: str) -> None:
        """Note what does not hold."""
        if not holds and len(self.wrong) < 50:
            self.wrong.append(text)

    def same(self, request: dict[str, Any], text: str) -> None:
        """The same request has the same answer, whoever else is there."""
        key = json.dumps({**request, "stream": None, "stream_options": None}, sort_keys=True)
        self.check(self.texts.setdefault(key, text) == text, f"another answer to {key[:200]}")


class Client:
    """One of many, with luck of its own."""

    def __init__(self, http: httpx.AsyncClient, model: str, number: int, report: Report) -> None:
        self._http, self._model, self._report = http, model, report
        self._luck = random.Random(number)

    async def run(self, end_s: float) -> None:
        """Ask until the time is over."""
        acts = (
            [self._complete] * 4
            + [self._stream] * 6
            + [self._leave] * 3
            + [self._samples] * 2
            + [self._nonsense, self._look]
        )
        while time.monotonic() < end_s:
            act = self._luck.choice(acts)
            try:
                await act()
            except httpx.HTTPError as error:
                self._report.check(False, f"{act.__name__}: {type(error).__name__} {error}")
            self._report.done[act.__name__.strip("_")] += 1
            await asyncio.sleep(self._luck.random() * 0.02)

    def _request(self, **more: Any) -> dict[str, Any]:
        number = self._luck.randrange(PROMPTS)
        chance = random.Random(number)
        prompt = "".join(chance.choice("abcdefgh ijkl mnop.") for _ in range(chance.choice((3, 20, 200, 1500))))
        tokens = chance.choice((1, 5, 20, 60))
        extra = {"temperature": chance.choice((0, 0.8)), "seed": number, "max_tokens": tokens, "ignore_eos": True}
        return {"model": self._model, "prompt": prompt, **extra, **more}

    async def _complete(self) -> None:
        request = self._request()
        found = (await self._http.post("/v1/completions", json=request)).json()
        choice = found["choices"][0]
        self._report.check(choice["finish_reason"] == "length", f"finish reason {choice['finish_reason']}")
        self._report.check(found["usage"]["completion_tokens"] == request["max_tokens"], f"usage {found['usage']}")
        self._report.same(request, choice["text"])

    async def _stream(self) -> None:
        request = self._request(stream=True, stream_options={"include_usage": True})
        texts, reasons, usage = await self._read(request)
        self._report.check(reasons == Counter({0: 1}), f"finish reasons {reasons}")
        self._report.check(usage == request["max_tokens"], f"usage {usage} of {request['max_tokens']}")
        self._report.same(request, texts[0])

    async def _samples(self) -> None:
        request = self._request(stream=True, stream_options={"include_usage": True}, n=3, temperature=0.9)
        texts, reasons, usage = await self._read(request)
        self._report.check(reasons == Counter({0: 1, 1: 1, 2: 1}), f"finish reasons of 3 samples {reasons}")
        self._report.check(usage == 3 * request["max_tokens"], f"usage {usage} of 3 samples")
        self._report.same(request, json.dumps(sorted(texts.items())))

    async def _read(self, request: dict[str, Any]) -> tuple[dict[int, str], Counter[int], int]:
        """Text and number of finish reasons of each sample, and the tokens told by the usage."""
        texts: dict[int, str] = {}
        reasons: Counter[int] = Counter()
        usage, ends = 0, 0
        async with self._http.stream("POST", "/v1/completions", json=request) as response:
            self._report.check(response.status_code == 200, f"status {response.status_code}")
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                self._report.check(ends == 0, "an event after [DONE]")
                if line == "data: [DONE]":
                    ends += 1
                    continue
                event = json.loads(line[6:])
                self._report.check("error" not in event, f"error event {line[:200]}")
                usage += (event.get("usage") or {}).get("completion_tokens", 0)
                for choice in event.get("choices", []):
                    self._report.check(choice["index"] not in reasons, "an event after the finish reason")
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                    if choice["finish_reason"] is not None:
                        reasons[choice["index"]] += 1
        self._report.check(ends == 1, f"{ends} times [DONE]")
        return texts, reasons, usage

    async def _leave(self) -> None:
        request = self._request(stream=True, max_tokens=100_000)
        left = self._luck.choice((0, 1, 5))
        async with self._http.stream("POST", "/v1/completions", json=request) as response:
            if left:
                async for _ in response.aiter_lines():
                    left -= 1
                    if left <= 0:
                        break

    async def _nonsense(self) -> None:
        bodies = (b"{", b"[]", b'{"model": 1}', json.dumps(self._request(max_tokens=-1)).encode(), b"\xff\xfe")
        head = {"content-type": "application/json"}
        answer = await self._http.post("/v1/completions", content=self._luck.choice(bodies), headers=head)
        self._report.check(answer.status_code in (400, 404), f"nonsense got status {answer.status_code}")
        self._report.check("message" in answer.json()["error"], "nonsense got no error object")

    async def _look(self) -> None:
        path = self._luck.choice(("/metrics", "/health", "/ready", "/v1/models"))
        answer = await self._http.get(path)
        self._report.check(answer.status_code == 200, f"{path} got status {answer.status_code}")


def main() -> int:
    """Start a server, load it, and say what was found."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        line = [sys.executable, "-m", "kittiwake", "serve", *([options.model] if options.model else [])]
        line += ["--port", "0", "--ready-file", str(ready), "--slots", "16", "--cache-bytes", str(8 << 20)]
        line += ["--http-workers", str(options.http_workers), "--max-queue", "0"]
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen(line, stderr=log)
            try:
                while not ready.exists() and process.poll() is None:
                    time.sleep(0.05)
                if process.poll() is not None:
                    log.seek(0)
                    print(log.read(), file=sys.stderr)
                    return 1
                report = asyncio.run(_soak(json.loads(ready.read_text()), options))
            finally:
                process.terminate()
                code = process.wait(120)
            report.check(code == 0, f"the server ended with exit code {code}")
    print(json.dumps({"done": report.done, "memory_bytes": report.memory[-1:], "wrong": report.wrong}, indent=2))
    return 1 if report.wrong else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="left out, the packaged model")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--http-workers", type=int, default=2)
    return parser.parse_args()


async def _soak(server: dict[str, Any], options: argparse.Namespace) -> Report:
    report = Report()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server["url"], timeout=120, limits=limits) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        watching = asyncio.create_task(_watch(server["pid"], report))
        end_s = time.monotonic() + options.minutes * 60
        await asyncio.gather(*(Client(http, model, number, report).run(end_s) for number in range(options.clients)))
        watching.cancel()
        await _check_idle(http, report)
    _check_memory(report)
    return report


async def _watch(pid: int, report: Report) -> None:
    """Note the memory of the server's processes now and then."""
    while True:
        report.memory.append({child: _memory_bytes(child) for child in (pid, *_children(pid))})
        await asyncio.sleep(SAMPLE_S)


async def _check_idle(http: httpx.AsyncClient, report: Report) -> None:
    """Slots, queue and requests are back to where they began, within some seconds."""
    figures: dict[str, float] = {}
    for _ in range(600):
        text = (await http.get("/metrics")).text
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        figures = {name: float(value) for name, _, value in lines}
        if (
            figures["kittiwake_engine_free_slots"] == figures["kittiwake_engine_slots"]
            and figures["kittiwake_engine_waiting"] == 0
            and figures["kittiwake_http_requests_in_flight"] == 1  # this one
        ):
            return
        await asyncio.sleep(0.1)
    told = {name: value for name, value in figures.items() if "slots" in name or "waiting" in name or "flight" in name}
    report.check(False, f"not idle at the end: {told}")


def _check_memory(report: Report) -> None:
    """No process holds much more at the end than after the first third."""
    early = report.memory[len(report.memory) // 3]
    late = report.memory[-1]
    report.check(early.keys() == late.keys(), f"processes were replaced: {early.keys()} {late.keys()}")
    for pid in early.keys() & late.keys():
        grown = late[pid] - early[pid]
        report.check(grown < GROWTH_BYTES, f"process {pid} grew by {grown} bytes from {early[pid]}")


def _children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _memory_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
