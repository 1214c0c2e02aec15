"""The law over HTTP: an answer has the same tokens and log-probabilities whoever else is there and however it is sent."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kittiwake.load import packaged_model

from .live import LiveServer, live_server, read_until

pytestmark = pytest.mark.slow
PROMPT = "It was a dark night, and the old house by the sea stood empty. " * 3
PARAMS = {
    "max_tokens": 24,
    "temperature": 0.8,
    "top_p": 0.9,
    "seed": 7,
    "logprobs": 3,
    "frequency_penalty": 0.3,
    "return_token_ids": True,
}
Bits = list[tuple[int, float, str]]


def _bits(choice: dict[str, Any]) -> Bits:
    """(token id, its log-probability, those beside it), every float as it was written."""
    tops = [json.dumps(top, sort_keys=True) for top in choice["logprobs"]["top_logprobs"]]
    return list(zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], tops, strict=True))


def _whole(server: LiveServer, **more: Any) -> tuple[Bits, int]:
    """The answer in one piece, and how many prompt tokens came from the cache."""
    found = server.complete(PROMPT, **PARAMS, **more)
    cached: int = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return _bits(found["choices"][0]), cached


def _streamed(server: LiveServer) -> Bits:
    connection = server.open_stream(PROMPT, **PARAMS)
    data = read_until(connection, b"data: [DONE]")
    connection.close()
    events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    pieces = [choice for event in events for choice in event["choices"] if choice["logprobs"]]
    return [bits for piece in pieces for bits in _bits(piece)]


def _other(server: LiveServer, index: int) -> None:
    """Somebody else, of another length every time."""
    server.complete(PROMPT[: 5 + 6 * index], max_tokens=4 + index % 9, seed=index, temperature=index % 2)


def test_the_same_bits_alone_in_a_crowd_cached_streamed_and_from_any_worker(tmp_path: Path) -> None:
    model = packaged_model()
    with live_server(model, tmp_path, "--http-workers", "3", "--slots", "33", "--prefill-chunk", "16") as server:
        expected, cached = _whole(server, cache_prompt=False)
        assert len(expected) == 24 and cached == 0
        _whole(server)
        again, cached = _whole(server)
        assert again == expected and cached > 0
        assert _streamed(server) == expected
        with ThreadPoolExecutor(40) as pool:
            others = [pool.submit(_other, server, index) for index in range(32)]
            mine = [pool.submit(_whole, server, cache_prompt=index % 2 == 0) for index in range(4)]
            streams = [pool.submit(_streamed, server) for _ in range(3)]
            assert all(one.result()[0] == expected for one in mine)
            assert all(one.result() == expected for one in streams)
            assert all(one.result() is None for one in others)
    with live_server(model, tmp_path, "--slots", "1", "--cache-bytes", "0") as server:
        assert _whole(server) == (expected, 0)
        assert _streamed(server) == expected
