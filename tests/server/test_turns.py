"""Conversations over a real engine: what a next turn finds in the cache, and that it changes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp

from kittiwake.config import ServerConfig
from kittiwake.server.app import create_app
from tests.server.ask import listening
from tests.server.running import client_of, running_engine

SYSTEM = {"role": "system", "content": "You are a bird that lives on a cliff and knows everything about the sea. " * 2}
FIRST = {"role": "user", "content": "Where do you sleep when the storm comes from the west, and who is with you?"}
ANSWER = {
    "role": "assistant",
    "content": "In a nest on the cliff, where the wind does not come, with my mate.",
    "reasoning_content": "It asks about sleep.",
}


@asynccontextmanager
async def _app_over(folder: Path) -> AsyncIterator[ASGIApp]:
    async with client_of(folder) as client:
        yield create_app(client, ServerConfig())


def _ask(url: str, *messages: dict[str, str], **fields: Any) -> tuple[list[int], int, int]:
    """Drawn ids, tokens of the prompt, and those of them that were cached."""
    ask = {
        "messages": list(messages),
        "max_tokens": 4,
        "seed": 5,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    content = httpx.post(f"{url}/v1/chat/completions", json=ask, timeout=60).raise_for_status().json()
    usage = content["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == content["timings"]["cache_n"]
    return content["choices"][0]["token_ids"], usage["prompt_tokens"], cached


def test_a_next_turn_reads_only_what_is_new_though_the_reasoning_is_gone(tmp_path: Path) -> None:
    later = [SYSTEM, FIRST, ANSWER, {"role": "user", "content": "And when it is calm?"}]
    other = [SYSTEM, {"role": "user", "content": "How deep is the sea in front of your cliff?"}]
    edited = [SYSTEM, FIRST, ANSWER, {"role": "user", "content": "Why?"}]
    with running_engine(tmp_path, cache_ram_bytes=1 << 26) as engine, listening(_app_over(tmp_path)) as url:
        thinking = {"reasoning_effort": "high"}
        _, first, cached = _ask(url, SYSTEM, FIRST, **thinking)
        assert cached == 0
        drawn, _, cached = _ask(url, *later, **thinking)
        assert cached == first - len(" <think")
        fresh, _, none = _ask(url, *later, **thinking, cache_prompt=False)
        assert (fresh, none) == (drawn, 0)
        again, prompt, cached = _ask(url, *later, **thinking)
        assert (again, cached) == (drawn, prompt)
        _, _, cached = _ask(url, *other, **thinking)
        assert cached == len(f"System: {SYSTEM['content'].strip()}\n\nUser:")
        _, prompt, cached = _ask(url, *edited, **thinking)
        assert cached == prompt - len(" Why?\n\nAssistant: <think")
        assert engine.is_idle
