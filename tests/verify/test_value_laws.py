"""The laws of states and scores hold on a sound model, and a single wrong bit breaks each of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.config import EngineConfig
from kittiwake.engine import scoring, state_file
from kittiwake.engine.engine import Engine
from kittiwake.engine.request import KeptState
from kittiwake.load import Loaded, load_tensors
from kittiwake.verify import value_laws
from kittiwake.verify.trace import Trace

LAWS = (value_laws.restored, value_laws.restored_from_file, value_laws.forked, value_laws.scored)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_tensors(random_rwkv7(small(1, 64, 16), seed=2), EngineConfig(threads=1))


@pytest.fixture(scope="module")
def traces(loaded: Loaded) -> list[Trace]:
    draw = random.Random(0)
    return [Trace(loaded.model, [draw.randrange(256) for _ in range(count)]) for count in (1, 2, 9, 17)]


@pytest.mark.parametrize("law", LAWS)
def test_a_sound_model_keeps_them(law: Callable[..., Any], loaded: Loaded, traces: list[Trace]) -> None:
    outcomes = list(law(loaded, traces, random.Random(1)))
    assert outcomes
    assert all(outcomes)


def _nudged(state: KeptState) -> KeptState:
    """One bit of the state off."""
    parts = {name: array.copy() for name, array in state.saved.parts.items()}
    parts["wkv"].reshape(-1).view(np.uint32)[7] ^= 1 << 22
    return replace(state, saved=replace(state.saved, parts=parts))


@pytest.mark.parametrize("law", [value_laws.restored, value_laws.forked])
def test_a_state_restored_with_a_wrong_bit_is_seen(
    law: Callable[..., Any], loaded: Loaded, traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Engine.add_samples

    def leaking(self: Engine, *args: Any, start_from: KeptState | None = None, **more: Any) -> Any:
        return add(self, *args, start_from=None if start_from is None else _nudged(start_from), **more)

    monkeypatch.setattr(Engine, "add_samples", leaking)
    assert not all(law(loaded, traces, random.Random(1)))


def test_a_file_that_reads_with_a_wrong_bit_is_seen(
    loaded: Loaded, traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = state_file.load_state
    monkeypatch.setattr(state_file, "load_state", lambda *args: _nudged(load(*args)))
    assert not any(value_laws.restored_from_file(loaded, traces, random.Random(1)))


def test_a_score_with_a_wrong_bit_is_seen(loaded: Loaded, traces: list[Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    exact = scoring.log_probs
    monkeypatch.setattr(scoring, "log_probs", lambda *args: np.nextafter(exact(*args), -np.inf))
    assert not any(value_laws.scored(loaded, traces, random.Random(1)))
