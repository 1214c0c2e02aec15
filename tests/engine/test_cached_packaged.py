"""The packaged model behind a cache: the same answers alone, in a crowd, cached and after a restart; and far sooner."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kittiwake.config import EngineConfig
from kittiwake.engine.engine import Engine
from kittiwake.engine.request import Delta, RequestOptions, SamplingParams
from kittiwake.llm import LLM
from kittiwake.load import Loaded, load_model

STORY = (
    "Once upon a time there was a little girl who lived by the sea with her cat. One day she found a box in the sand."
)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_model(None, EngineConfig(threads=2))


def make(loaded: Loaded, cached: bool, **options: object) -> LLM:
    ram = 1 << 28 if cached else 0
    return LLM.from_loaded(loaded, EngineConfig(threads=2, cache_ram_bytes=ram, prefill_chunk=16, **options))  # type: ignore[arg-type]


Answer = tuple[list[int], list[object], str | None]


def ask(engine: Engine, asked: Sequence[tuple[list[int], SamplingParams]]) -> list[Answer]:
    """Token ids, log-probabilities and finish reason of each, all at once."""
    numbers = [
        engine.add(ids, params, options=RequestOptions(client=str(index % 5)))
        for index, (ids, params) in enumerate(asked)
    ]
    deltas: dict[int, list[Delta]] = {number: [] for number in numbers}
    while engine.has_work:
        engine.step()
        for delta in engine.collect_all():
            assert delta.error is None
            deltas[delta.request_id].append(delta)
    return [
        (
            [token for delta in one for token in delta.token_ids],
            [logprob for delta in one for logprob in delta.logprobs],
            one[-1].finish_reason,
        )
        for one in deltas.values()
    ]


def requests(llm: LLM) -> list[tuple[list[int], SamplingParams]]:
    """33 requests: stories that begin alike and part, drawn in every way."""
    ids, draw = llm.encode(STORY), random.Random(7)
    made = []
    for index in range(33):
        prompt = ids[: draw.randint(3, len(ids))] + llm.encode((" She", " Then the cat", "")[index % 3])
        params = SamplingParams(
            max_tokens=draw.randint(1, 14),
            temperature=(0.0, 0.8, 1.2)[index % 3],
            seed=index,
            repetition_penalty=(1.0, 1.3)[index % 2],
            presence_penalty=(0.0, 0.4)[index // 2 % 2],
            logprobs=True,
            top_logprobs=index % 4,
            stop=(".",) if index % 5 == 0 else (),
        )
        made.append((prompt, params))
    return made


@pytest.mark.slow
def test_alone_in_a_crowd_cached_fresh_and_after_a_restart_are_the_same_bits(loaded: Loaded, tmp_path: Path) -> None:
    fresh = make(loaded, False)
    asked = requests(fresh)
    alone = [ask(fresh.engine, [one])[0] for one in asked]
    assert ask(fresh.engine, asked) == alone
    disk = {"cache_min_tokens": 4, "cache_disk": str(tmp_path)}
    with make(loaded, True, **disk) as llm:
        assert ask(llm.engine, asked) == alone  # beginnings shared on the way
        assert ask(llm.engine, asked) == alone  # every prompt cached
        assert [ask(llm.engine, [one])[0] for one in asked[:8]] == alone[:8]
        stats = llm.engine.stats()
        assert stats.cache is not None and stats.cache.hits["shared"] > 0 and stats.cache.hits["memory"] >= 33
        assert stats.free_slots == stats.slots
    with make(loaded, True, **disk) as llm:
        assert ask(llm.engine, asked) == alone
        stats = llm.engine.stats()
        assert stats.cache is not None and stats.cache.hits["disk"] > 0
        assert stats.cache.disk is not None and stats.cache.disk.corrupt == stats.cache.disk.foreign == 0


@pytest.mark.slow
def test_a_cached_prompt_of_4000_tokens_begins_at_least_twenty_times_sooner(loaded: Loaded) -> None:
    llm = make(loaded, True)
    ids = (llm.encode(STORY) * 200)[:4000]

    def first_token_s(prompt: list[int]) -> float:
        begin = time.perf_counter()
        ask(llm.engine, [(prompt, SamplingParams(max_tokens=1, temperature=0.0))])
        return time.perf_counter() - begin

    first_token_s(ids[:40])
    cold = first_token_s(ids)
    warm = min(first_token_s(ids + llm.encode(" Then") * count) for count in (0, 1, 2))
    assert cold >= 20 * warm
