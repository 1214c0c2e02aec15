#!/usr/bin/env python3
"""Time a server: N clients at once, each streaming one completion after the other.

Needs nothing but Python. Several processes share the clients, so that the server is what is measured; each client is a
plain socket whose events are taken apart by hand. Tokens are counted by the server's own usage figures.

    python tools/serve_bench.py --url http://127.0.0.1:8000 --clients 1,32,128 --prompt-tokens 128 --tokens 256
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Plan:
    """What every client does."""

    host: str
    port: int
    model: str
    prompt_tokens: int
    tokens: int
    vocab: int
    api_key: str
    stream: bool
    start_s: float
    """time.time() at which all begin."""
    seconds: float
    requests: int
    """A client's; 0: as many as fit into ``seconds``."""


@dataclass
class Found:
    """What the clients of a process saw; times in seconds."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Between two events with text, divided by the tokens of the later one as far as they are told."""
    latency: list[float] = field(default_factory=list)
    overhead: list[float] = field(default_factory=list)
    """Latency beyond the time that the engine itself says it took; only where the server tells that."""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """(end, tokens) of each answer."""
    failed: list[str] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0


def main() -> int:
    """Run each number of clients, print a table or JSON."""
    options = _options()
    rows = []
    for clients in options.clients:
        for _ in range(options.warm_up):
            _run(options, clients, warm=True)
        rows.append(_row(clients, *_run(options, clients)))
        if not options.json:
            _print_row(rows[-1], first=len(rows) == 1)
    if options.json:
        print(json.dumps(rows, indent=2))
    return 1 if any(row["failed"] for row in rows) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="", help="left out, the first of /v1/models")
    parser.add_argument("--clients", default="1", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer; ends of text are ignored")
    parser.add_argument("--requests", type=int, default=0, help="of each client; 0: those that fit into --seconds")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--processes", type=int, default=0, help="that hold the clients; 0: one for each 64")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds of one request a client before it counts")
    parser.add_argument("--no-stream", action="store_true")
    parser.add_argument("--api-key", default=os.environ.get("KITTIWAKE_API_KEY", ""))
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _run(options: argparse.Namespace, clients: int, *, warm: bool = False) -> tuple[list[Found], float]:
    """What all clients saw, and the seconds from the first request to the last token."""
    url = urlsplit(options.url)
    host, port = url.hostname or "127.0.0.1", url.port or 80
    if not options.model:
        options.model, options.vocab = asyncio.run(_first_model(host, port, options.api_key))
    plan = Plan(
        host=host,
        port=port,
        model=options.model,
        prompt_tokens=options.prompt_tokens,
        tokens=options.tokens,
        vocab=getattr(options, "vocab", 0) or 1000,
        api_key=options.api_key,
        stream=not options.no_stream,
        start_s=time.time() + 1.0,
        seconds=options.seconds,
        requests=1 if warm else options.requests,
    )
    processes = min(clients, options.processes or -(-clients // 64))
    shares = [range(index, clients, processes) for index in range(processes)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        found = pool.starmap(_share, [(plan, list(share), warm) for share in shares])
    begin = min(one.first_s for one in found)
    return found, max(one.last_s for one in found) - begin


def _share(plan: Plan, numbers: list[int], warm: bool) -> Found:
    """One process's clients."""
    return asyncio.run(_clients(plan, numbers, warm))


async def _clients(plan: Plan, numbers: list[int], warm: bool) -> Found:
    found = Found()
    await asyncio.sleep(max(0.0, plan.start_s - time.time()))
    found.first_s = time.time()
    await asyncio.gather(*(_client(plan, number, found, warm) for number in numbers))
    found.last_s = max((end for end, _ in found.arrivals), default=time.time())
    return found


async def _client(plan: Plan, number: int, found: Found, warm: bool) -> None:
    """Ask again and again on one connection."""
    chance = random.Random(number * 1000003 + warm)
    end_s = time.time() + plan.seconds
    reader, writer = await asyncio.open_connection(plan.host, plan.port, limit=1 << 22)
    count = 0
    try:
        while (count < plan.requests) if plan.requests else (time.time() < end_s):
            count += 1
            body = {
                "model": plan.model,
                "prompt": [chance.randrange(1, plan.vocab) for _ in range(plan.prompt_tokens)],
                "max_tokens": plan.tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": plan.stream,
                "cache_prompt": False,
            }
            if plan.stream:
                body["stream_options"] = {"include_usage": True}
            try:
                await _ask(reader, writer, plan, body, found)
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                found.failed.append(f"{type(error).__name__}: {error}"[:300])
                return
    finally:
        writer.close()


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, plan: Plan, body: dict[str, Any], found: Found
) -> None:
    """One request; its times go into ``found``."""
    writer.write(_request("POST", "/v1/completions", plan, json.dumps(body).encode()))
    asked = last = time.perf_counter()
    first, tokens, engine_s = 0.0, 0, -1.0
    async for piece in _pieces(reader):
        now = time.perf_counter()
        if b'"timings":{' in piece:
            engine_s = _engine_seconds(piece)
        if not plan.stream:
            tokens += json.loads(piece)["usage"]["completion_tokens"]
            first = last = now
            continue
        events = piece.count(b'"finish_reason"')
        usage = piece.rpartition(b'"completion_tokens":')[2] if b'"completion_tokens":' in piece else b""
        if usage:
            tokens += int(usage[:12].partition(b",")[0].strip(b" }\n"))
        if b'"error"' in piece:
            raise ValueError(piece.decode(errors="replace")[:300])
        if events:
            if first:
                found.gaps.append(now - last)
            else:
                first = now
            last = now
    if tokens != plan.tokens:
        raise ValueError(f"an answer of {tokens} tokens, asked for {plan.tokens}")
    found.ttft.append(first - asked)
    found.latency.append(time.perf_counter() - asked)
    if engine_s >= 0:
        found.overhead.append(found.latency[-1] - engine_s)
    found.arrivals.append((time.time(), tokens))


def _engine_seconds(piece: bytes) -> float:
    """Queue, prompt and decoding, as the answer tells them."""
    told = json.loads(piece.partition(b'"timings":')[2].partition(b"}")[0] + b"}")
    return (told["queue_ms"] + told["prompt_ms"] + told["predicted_ms"]) / 1e3


async def _pieces(reader: asyncio.StreamReader) -> Any:
    """The body of a response as it comes. Raises ValueError for a status that is not 200."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head[9:12])
    lowered = head.lower()
    if b"transfer-encoding: chunked" in lowered:
        while True:
            size = int((await reader.readuntil(b"\r\n")).strip(), 16)
            data = (await reader.readexactly(size + 2))[:-2]
            if status != 200:
                raise ValueError(f"status {status}: {data[:300]!r}")
            if size == 0:
                return
            yield data
    size = int(lowered.partition(b"content-length:")[2].partition(b"\r\n")[0])
    data = await reader.readexactly(size)
    if status != 200:
        raise ValueError(f"status {status}: {data[:300]!r}")
    yield data


def _request(method: str, path: str, plan: Any, body: bytes) -> bytes:
    key = f"authorization: Bearer {plan.api_key}\r\n" if plan.api_key else ""
    head = f"{method} {path} HTTP/1.1\r\nhost: {plan.host}:{plan.port}\r\ncontent-type: application/json\r\n{key}"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


async def _first_model(host: str, port: int, api_key: str) -> tuple[str, int]:
    """Name and vocabulary size of the model that is served."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(_request("GET", "/v1/models", argparse.Namespace(host=host, port=port, api_key=api_key), b""))
    try:
        async for piece in _pieces(reader):
            model = json.loads(piece)["data"][0]
            return model["id"], model.get("kittiwake", {}).get("vocab_size", 0)
    finally:
        writer.close()
    raise ValueError("no answer")


_TIMES = ("ttft", "gaps", "latency", "overhead")


def _row(clients: int, found: list[Found], seconds: float) -> dict[str, Any]:
    """Figures of one round."""
    tokens = sum(count for one in found for _, count in one.arrivals)
    together = {name: sorted(value for one in found for value in getattr(one, name)) for name in _TIMES}
    row: dict[str, Any] = {
        "clients": clients,
        "processes": len(found),
        "answers": len(together["latency"]),
        "failed": sum(len(one.failed) for one in found),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tok_s": round(tokens / seconds, 1) if seconds else 0.0,
    }
    for name, values in together.items():
        for share in (50, 90, 99):
            row[f"{name}_p{share}_ms"] = round(_share_of(values, share) * 1e3, 3)
    if row["failed"]:
        row["first_failure"] = next(text for one in found for text in one.failed)
    return row


def _share_of(values: list[float], percent: int) -> float:
    return values[min(len(values) - 1, len(values) * percent // 100)] if values else 0.0


_COLUMNS = (
    "clients", "answers", "failed", "tok_s", "ttft_p50_ms", "ttft_p99_ms", "gaps_p50_ms", "gaps_p99_ms",
    "latency_p50_ms", "overhead_p50_ms",
)  # fmt: skip


def _print_row(row: dict[str, Any], *, first: bool) -> None:
    if first:
        print("  ".join(f"{name:>15}" for name in _COLUMNS))
    print("  ".join(f"{row[name]!s:>15}" for name in _COLUMNS), flush=True)
    if row["failed"]:
        print(f"first failure: {row['first_failure']}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
