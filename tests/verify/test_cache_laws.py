"""The laws of the prefix cache hold on a sound model, and a single wrong bit breaks them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.config import EngineConfig
from kittiwake.engine.prefix import Found, Prefix, PrefixCache
from kittiwake.engine.prefix_disk import DiskTier
from kittiwake.load import Loaded, load_tensors
from kittiwake.verify import cache_laws
from kittiwake.verify.trace import Trace

LAWS = (cache_laws.from_memory, cache_laws.from_disk)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_tensors(random_rwkv7(small(1, 64, 16), seed=2), EngineConfig(threads=1))


@pytest.fixture(scope="module")
def traces(loaded: Loaded) -> list[Trace]:
    draw = random.Random(0)
    return [Trace(loaded.model, [draw.randrange(256) for _ in range(count)]) for count in (9, 17, 25)]


def outcomes(law: Callable[..., Any], loaded: Loaded, traces: list[Trace]) -> list[bool]:
    return list(law(loaded, traces, random.Random(1)))


@pytest.mark.parametrize("law", LAWS)
def test_a_sound_model_keeps_them(law: Callable[..., Any], loaded: Loaded, traces: list[Trace]) -> None:
    found = outcomes(law, loaded, traces)
    assert len(found) > 10 and all(found)


def nudged(prefix: Prefix) -> Prefix:
    """One bit of the state off."""
    parts = {name: array.copy() for name, array in prefix.saved.parts.items()}
    parts["wkv"].reshape(-1).view(np.uint32)[7] ^= 1 << 22
    return replace(prefix, saved=replace(prefix.saved, parts=parts))


def test_a_cached_state_with_a_wrong_bit_is_seen(
    loaded: Loaded, traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = PrefixCache.find

    def leaking(self: PrefixCache, key: str, tokens: np.ndarray) -> Found:
        found = find(self, key, tokens)
        return found if found.prefix is None else replace(found, prefix=nudged(found.prefix))

    monkeypatch.setattr(PrefixCache, "find", leaking)
    assert not all(outcomes(cache_laws.from_memory, loaded, traces))


def test_a_state_of_one_token_less_is_seen(
    loaded: Loaded, traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = PrefixCache.find

    def behind(self: PrefixCache, key: str, tokens: np.ndarray) -> Found:
        found = find(self, key, tokens)
        if found.prefix is None or found.prefix.count == len(tokens):
            return found
        return replace(found, prefix=replace(found.prefix, count=found.prefix.count + 1))

    monkeypatch.setattr(PrefixCache, "find", behind)
    assert not all(outcomes(cache_laws.from_memory, loaded, traces))


def test_a_file_that_reads_with_a_wrong_bit_is_seen(
    loaded: Loaded, traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = DiskTier.load

    def leaking(self: DiskTier, key: str, tokens: np.ndarray) -> Prefix | None:
        prefix = load(self, key, tokens)
        return None if prefix is None else nudged(prefix)

    monkeypatch.setattr(DiskTier, "load", leaking)
    assert not all(outcomes(cache_laws.from_disk, loaded, traces))


def test_a_cache_that_never_finds_anything_proves_nothing(
    loaded: Loaded, traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixCache, "find", lambda *_: Found(None, "none", 0))
    assert not all(outcomes(cache_laws.from_memory, loaded, traces))
