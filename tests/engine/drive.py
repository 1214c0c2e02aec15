"""Driving an engine in tests: requests to their end, models that fail on purpose."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kittiwake.engine.batch import Batch
from kittiwake.engine.engine import Engine
from kittiwake.engine.prefix import PrefixCache
from kittiwake.engine.request import Delta, KeptState, SamplingParams
from kittiwake.engine.states import StateTable
from kittiwake.engine.stats import QueueLimits
from kittiwake.families.contract import Model
from kittiwake.text.tokenizer import Tokenizer
from tests.tiny import tiny_model


def make_engine(
    *,
    slots: int = 4,
    chunk: int = 0,
    max_rows: int = 2048,
    model: Model | None = None,
    tokenizer: Tokenizer | None = None,
    cache: PrefixCache | None = None,
    limits: QueueLimits | None = None,
) -> Engine:
    """An engine over the tiny model, or another."""
    loaded = tiny_model()
    return Engine(
        model or loaded.model,
        tokenizer or loaded.tokenizer,
        slots=slots,
        prefill_chunk=chunk,
        max_rows=max_rows,
        cache=cache,
        limits=limits,
    )


@dataclass
class Outcome:
    """Everything that was collected of one request."""

    deltas: list[Delta] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def reason(self) -> str | None:
        return self.deltas[-1].finish_reason if self.deltas else None

    @property
    def state(self) -> KeptState:
        state = self.deltas[-1].state
        assert state is not None
        return state


def finish(engine: Engine, *numbers: int) -> list[Outcome]:
    """Step until these requests have ended."""
    outcomes = {number: Outcome() for number in numbers}
    while any(outcome.reason is None for outcome in outcomes.values()):
        moved = engine.step()
        for number, outcome in outcomes.items():
            if outcome.reason is None:
                deltas = engine.collect(number)
                outcome.deltas += deltas
                assert moved or deltas or threading.active_count() > 1, f"request {number} hangs"
    return list(outcomes.values())


def ask(engine: Engine, prompt: Sequence[int], params: SamplingParams, **options: Any) -> Outcome:
    """One request from its beginning to its end."""
    return finish(engine, engine.add(prompt, params, **options))[0]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random bytes, the same every time."""
    ids: list[int] = np.random.default_rng([length, seed]).integers(0, 256, length).tolist()
    return ids


class Tampered:
    """A model whose every forward passes through ``tamper(batch, states, run)``."""

    def __init__(self, tamper: Callable[[Batch, StateTable, Callable[[], np.ndarray]], np.ndarray]) -> None:
        self.inner = tiny_model().model
        self.config, self.state_spec = self.inner.config, self.inner.state_spec
        self.device = self.inner.device
        self.tamper = tamper

    @property
    def weight_bytes(self) -> int:
        return self.inner.weight_bytes

    def forward(self, batch: Batch, states: StateTable) -> np.ndarray:
        return self.tamper(batch, states, lambda: self.inner.forward(batch, states))

    def describe(self) -> dict[str, Any]:
        return self.inner.describe()
