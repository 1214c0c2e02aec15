"""The prefix cache as an option of LLM: what is refused, what is wired, and that the disk tier minds the receipt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kittiwake.config import EngineConfig
from kittiwake.engine.prefix import least_tokens
from kittiwake.engine.request import SamplingParams
from kittiwake.errors import OutputError, UsageError
from kittiwake.llm import LLM
from tests.engine.drive import prompt_of
from tests.tiny import tiny_model

PARAMS = SamplingParams(max_tokens=9, seed=3)
RAM = 1 << 24


def make(threads: int = 1, **options: Any) -> LLM:
    return LLM.from_loaded(tiny_model(threads), EngineConfig(slots=4, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_ram_bytes": -2}, "cache_ram_bytes must be a whole number from -1"),
        ({"cache_ram_bytes": 1.5}, "cache_ram_bytes"),
        ({"cache_min_tokens": -1}, "cache_min_tokens must be a whole number from 0"),
        ({"cache_disk": ""}, "cache_disk must be the path of a folder"),
        ({"cache_disk": 5}, "cache_disk must be the path of a folder"),
        ({"cache_disk": "x", "cache_ram_bytes": 0}, "cache_disk needs memory"),
        ({"cache_disk_bytes": 0}, "cache_disk_bytes"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"max_waiting_per_client": True}, "max_waiting_per_client"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EngineConfig(**options)


def test_a_library_keeps_nothing_unless_told() -> None:
    assert make().engine.stats().cache is None
    llm = make(cache_ram_bytes=RAM)
    stats = llm.engine.stats().cache
    assert stats is not None and stats.budget_bytes == RAM and stats.disk is None
    auto = make(cache_ram_bytes=-1).engine.stats().cache
    assert auto is not None and auto.budget_bytes > 0


def test_short_prompts_are_kept_where_copying_a_state_is_cheap() -> None:
    assert (least_tokens("cpu"), least_tokens("cuda:0")) == (32, 512)
    for options, kept in (({}, 1), ({"cache_min_tokens": 50}, 0), ({"cache_min_tokens": 20}, 2)):
        llm = make(cache_ram_bytes=RAM, **options)
        llm.generate([prompt_of(20), prompt_of(40, 1)], SamplingParams(max_tokens=1, temperature=0.0))
        stats = llm.engine.stats().cache
        assert stats is not None and stats.entries == kept, options


def test_answers_are_the_same_with_and_without(tmp_path: Path) -> None:
    prompts = [prompt_of(40), [*prompt_of(40), 1], prompt_of(40, 1), prompt_of(40)]
    expected = [(one.text, one.token_ids) for one in make().generate(prompts, PARAMS)]
    for _ in range(2):
        with make(cache_ram_bytes=RAM, cache_disk=str(tmp_path / "cache")) as llm:
            for _ in range(2):
                assert [(one.text, one.token_ids) for one in llm.generate(prompts, PARAMS)] == expected
                assert [(one.text, one.token_ids) for p in prompts for one in llm.generate([p], PARAMS)] == expected
            disk = llm.engine.stats().cache.disk  # type: ignore[union-attr]
    assert disk is not None and disk.hits > 0


def test_states_of_another_receipt_are_not_used(tmp_path: Path) -> None:
    """Another number of threads may give other bits: what it kept is left alone."""
    options: dict[str, Any] = {"cache_ram_bytes": RAM, "cache_disk": str(tmp_path)}
    with make(2, **options) as llm:
        llm.generate([prompt_of(40)], PARAMS)
    with make(1, **options) as llm:
        stats = llm.engine.stats().cache
        assert stats is not None and stats.disk is not None
        assert stats.disk.entries == 0 and stats.disk.foreign > 0
    with make(2, **options) as llm:
        llm.generate([prompt_of(40)], PARAMS)
        assert llm.engine.stats().cache.hits == {"disk": 1}  # type: ignore[union-attr]


def test_a_folder_that_cannot_be_used_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cache folder"):
        make(cache_ram_bytes=RAM, cache_disk=str(tmp_path / "file" / "cache"))


def test_limits_of_the_queue_are_wired() -> None:
    llm = make(max_waiting=1)
    engine = llm.engine
    for _ in range(5):
        engine.add([1], PARAMS)
    with pytest.raises(Exception, match="5 requests wait already"):
        engine.add([1], PARAMS)
    assert replace(llm.config, max_waiting=0).max_waiting == 0
