"""What the engine tells of itself: totals, queue limits, and a report of each step."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from kittiwake.engine.prefix import CacheStats

_WEIGHT = 0.1
_LONGEST_RETRY_S = 600


@dataclass(frozen=True)
class QueueLimits:
    """Most requests that wait beyond the slots that are free, of all clients and of one; 0 sets no limit."""

    max_waiting: int = 0
    max_waiting_per_client: int = 0


@dataclass(frozen=True)
class StepReport:
    """One step: rows run and the time they took, tokens drawn and handed out included."""

    step_ms: float
    rows: int
    prefill_rows: int
    decode_rows: int
    sequences: int
    """How many requests moved: the width of the batch."""


@dataclass(frozen=True)
class EngineStats:
    """The engine in numbers; counts since it was made."""

    waiting: int
    held: int
    """Waiting for another request that reads the beginning of their prompt."""
    running: int
    slots: int
    free_slots: int
    finished: dict[str, int]
    """Requests that have ended, by finish reason."""
    refused: int
    """Requests that found the queue full."""
    prompt_tokens: int
    """Of requests that got a slot, tokens from the cache among them."""
    cached_tokens: int
    generated_tokens: int
    cache: CacheStats | None


class Totals:
    """Counters behind :class:`EngineStats`, and how long a request holds its slot."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()
        self.refused = self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self._hold_s = 0.0

    def note_held(self, seconds: float) -> None:
        """A request gave its slot back after that long."""
        self._hold_s = seconds if self._hold_s == 0.0 else self._hold_s + _WEIGHT * (seconds - self._hold_s)

    def retry_after_s(self, waiting: int, slots: int) -> int:
        """When one of that many waiting requests can be expected to have left the queue: whole seconds, at least 1."""
        return max(1, min(_LONGEST_RETRY_S, math.ceil(self._hold_s * (waiting + 1) / slots)))
