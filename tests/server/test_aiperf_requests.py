"""Requests as NVIDIA's AIPerf sends them, and what it takes an answer for."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from kittiwake.config import ServerConfig
from kittiwake.server.app import create_app
from tests.server.ask import HI, events_of, listening
from tests.server.stub_engine import StubEngine

EXTRA = {"temperature": 0, "ignore_eos": True, "min_tokens": 16}
COMPLETION = {"prompt": "A long prompt", "model": "stub", "stream": True, "max_tokens": 16}
CHAT = {"messages": HI, "model": "stub", "stream": True, "max_completion_tokens": 16}
HEADERS = {
    "X-Request-ID": "8d0a3d0f-3a4b-4f0e-9d4e-000000000000",
    "X-Correlation-ID": "8d0a3d0f-3a4b-4f0e-9d4e-000000000001",
    "X-Session-Affinity": "1",
    "Content-Type": "application/json",
    "User-Agent": "aiperf/1.0",
}


@pytest.fixture(scope="module")
def url() -> Any:
    with listening(create_app(StubEngine(reply="abc"), ServerConfig())) as url:
        yield url


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", COMPLETION),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**{k: v for k, v in CHAT.items() if k != "max_completion_tokens"}, "max_tokens": 16}),
    ],
)
def test_a_streamed_request(url: str, path: str, asked: dict[str, Any]) -> None:
    ask = {**asked, **EXTRA, "stream_options": {"include_usage": True}}
    answer = httpx.post(url + path, json=ask, headers={**HEADERS, "Accept": "text/event-stream"}, timeout=60)
    assert answer.status_code == 200 and answer.headers["x-request-id"] == HEADERS["X-Request-ID"]
    *chunks, usage, done = events_of(answer.text)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} <= {"text_completion", "chat.completion.chunk"}
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 16
    texts = [c.get("text") or c.get("delta", {}).get("content") for chunk in chunks for c in chunk["choices"]]
    assert [text for text in texts if text] == list("abcabcabcabcabca")  # one event a token while it is alone


@pytest.mark.parametrize(("path", "asked"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_a_whole_request(url: str, path: str, asked: dict[str, Any]) -> None:
    answer = httpx.post(
        url + path,
        json={**asked, **EXTRA, "stream": False},
        headers={**HEADERS, "Accept": "application/json"},
        timeout=60,
    )
    content = answer.json()
    assert content["object"] in ("text_completion", "chat.completion")
    choice = content["choices"][0]
    assert (choice.get("text") or choice["message"]["content"]) == "abcabcabcabcabca"
    assert content["usage"]["prompt_tokens"] + 16 == content["usage"]["total_tokens"]


def test_what_it_looks_at_before_it_begins(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["stub"]
        assert client.head("/metrics").status_code == 200
        assert client.get("/metrics").headers["content-type"].startswith("text/plain")
        one = client.post("/v1/completions", json={"prompt": "a", "model": "stub", "max_tokens": 1, "stream": False})
        assert one.status_code == 200
