"""A request and what it asks of the sampler."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kittiwake.engine.states import SavedState
from kittiwake.errors import KittiwakeError, RequestError

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is drawn. Checked when made: a value that cannot be honoured raises RequestError.

    ``temperature`` 0 is greedy (ties to the lowest id). Otherwise logits are divided by it, then ``top_k`` (0: off)
    and ``top_p`` (1: off) filter, ties at the border kept. ``seed`` and the absolute position of a token key its noise,
    so the same request draws the same tokens alone or in a crowd. ``stop`` strings are matched on text and not
    emitted; ``stop_token_ids`` end the completion and are not part of its text. ``ignore_eos`` goes on past the
    tokenizer's end-of-text; ``min_tokens`` bans ends of text and stop ids until that many tokens stand.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, None)
        _check_int("top_k", self.top_k, 0, None)
        _check_int("seed", self.seed, 0, MAX_SEED)
        _check_float("temperature", self.temperature, 0.0, None)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false, got {self.ignore_eos!r}")
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0 and at most 1, got 0", "for greedy decoding set temperature to 0")
        if self.temperature == 0.0 and (self.top_k != 0 or self.top_p != 1.0):
            raise RequestError(
                f"temperature 0 is greedy and contradicts top_k {self.top_k} and top_p {self.top_p}",
                "leave top_k at 0 and top_p at 1, or raise the temperature",
            )
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"a stop string must be a non-empty string, got {text!r}")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, None)


def _as_tuple(name: str, values: object) -> tuple[Any, ...]:
    if isinstance(values, bytes) or not isinstance(values, Iterable):
        raise RequestError(f"{name} must be a list, got {values!r}")
    return tuple(values)


def _check_int(name: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be a whole number, got {value!r}")
    if value < low or (high is not None and value > high):
        raise RequestError(f"{name} must be {_range(low, high)}, got {value}")


def _check_float(name: str, value: object, low: float, high: float | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or value < low or (high is not None and value > high):
        raise RequestError(f"{name} must be {_range(low, high)}, got {value}")


def _range(low: float, high: float | None) -> str:
    return f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"


@dataclass(frozen=True)
class Timings:
    """Wall time of one request in ms: waiting for a slot, prompt, decoding."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True)
class KeptState:
    """A sequence to go on from: the state after ``tokens``, and the logits that follow them.

    ``tokens`` are the prompt and every accepted token; text cut off by a stop string is not in it.
    """

    saved: SavedState
    tokens: tuple[int, ...]
    logits: np.ndarray
    """float32 [vocab]"""


@dataclass(frozen=True)
class Delta:
    """What one step added to a request. ``text`` may be empty while a stop string or a character is undecided."""

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    """None while it runs; "stop" (end of text, stop id, stop string), "length", "abort" or "error"."""
    timings: Timings | None = None
    """Set on the last Delta."""
    state: KeptState | None = None
    """Set on the last Delta of a request that asked to keep its state."""
    error: KittiwakeError | None = None
    """Why, when finish_reason is "error"."""


@dataclass(frozen=True)
class Completion:
    """A finished answer. ``token_ids`` are all drawn tokens, an ending token included; ``text`` stops before a stop string."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: str
    timings: Timings = field(default_factory=Timings)

    @property
    def completion_tokens(self) -> int:
        """How many tokens were drawn."""
        return len(self.token_ids)
