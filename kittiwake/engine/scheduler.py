"""Requests → what one step runs: decode rows and prefill chunks side by side."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kittiwake.engine.answer import Answer
from kittiwake.engine.batch import Batch
from kittiwake.engine.request import KeptState
from kittiwake.engine.sampler import Adjustments
from kittiwake.engine.states import SavedState, StateTable


class Stage(Enum):
    """Where a request stands."""

    HELD = "held"
    """Waits for the prompt it shares with another request."""
    WAITING = "waiting"
    RUNNING = "running"
    SETTLING = "settling"
    """Answered; its slot is brought to the last accepted token, to be kept."""
    DONE = "done"


@dataclass(eq=False)
class Request:
    """One request inside the engine."""

    id: int
    answer: Answer
    tokens: list[int]
    """Prompt and drawn tokens, those that its slot has eaten or will eat."""
    fed: int
    """How many of ``tokens`` the slot has eaten."""
    keep_state: bool
    start_from: KeptState | None
    added_s: float
    stage: Stage = Stage.WAITING
    slot: int = 0
    prompt_tokens: int = 0
    base: int = 0
    """Absolute position of tokens[0]: what ``start_from`` had seen."""
    snapshot: tuple[int, SavedState, np.ndarray] | None = None
    """(fed, state, logits) from before text was held back: restored if held text turns out to be a stop string."""
    logits: np.ndarray | None = None
    """float32 [vocab] that follow tokens[:fed], when they are known without a forward."""
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    finish_reason: str | None = None
    adjustments: Adjustments | None = None
    """Bias and penalties, made when the first token is drawn."""
    followers: list[Request] = field(default_factory=list)
    """Held until this one has eaten the prompt, then they go on from its state."""

    @property
    def due(self) -> int:
        """Tokens its slot has yet to eat."""
        return len(self.tokens) - self.fed

    @property
    def position(self) -> int:
        """Absolute position of the token to be drawn next."""
        return self.base + len(self.tokens)


@dataclass(frozen=True)
class Plan:
    """One step: for each request how many tokens it eats now; ``finished`` of them then want logits."""

    parts: list[tuple[Request, int]]

    def batch(self) -> Batch:
        """The packed rows; only a request that eats its last due token wants logits."""
        return Batch.pack(
            [(request.slot, request.tokens[request.fed : request.fed + count]) for request, count in self.parts],
            [[count - 1] if count == request.due else [] for request, count in self.parts],
        )

    @property
    def complete(self) -> list[Request]:
        """Requests that get logits from this step, in row order."""
        return [request for request, count in self.parts if count == request.due]


class Scheduler:
    """First come, first served; everyone who decodes moves at every step, prefill takes the rows that are left."""

    def __init__(self, states: StateTable, prefill_chunk: int, max_rows: int) -> None:
        self._states = states
        self._chunk = prefill_chunk if prefill_chunk > 0 else max_rows
        self._max_rows = max_rows
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._left_out: set[int] = set()
        """Ids of requests that got no row in the last step."""

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.stage = Stage.WAITING
        self.waiting.append(request)

    def add_first(self, requests: list[Request]) -> None:
        """Put requests at the head of the queue, in this order: they came with one that was served already."""
        for request in requests:
            request.stage = Stage.WAITING
        self.waiting.extendleft(reversed(requests))

    def admit(self, now_s: float) -> None:
        """Give free slots to those who wait, in order."""
        while self.waiting and self._states.free_slots:
            request = self.waiting.popleft()
            request.slot = self._states.allocate()
            if request.start_from is not None:
                self._states.restore(request.slot, request.start_from.saved)
            request.stage, request.admitted_s = Stage.RUNNING, now_s
            self.running.append(request)

    def plan(self) -> Plan:
        """Share out at most ``max_rows`` rows. Those left out stand first in line at the next step."""
        left = self._max_rows
        counts: dict[int, int] = {}
        # after those who were left out, decode rows: they are cheap and somebody is reading along
        for request in sorted(self.running, key=lambda r: (r.id not in self._left_out, r.due > 1)):
            count = min(request.due, self._chunk, left)
            if count > 0:
                counts[request.id] = count
                left -= count
        parts = [(request, counts[request.id]) for request in self.running if request.id in counts]
        self._left_out = {request.id for request in self.running if request.due and request.id not in counts}
        self.running.sort(key=lambda request: request.id not in self._left_out)
        return Plan(parts)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands, and free its slot."""
        if request.stage is Stage.WAITING:
            self.waiting.remove(request)
        elif request.stage not in (Stage.DONE, Stage.HELD):
            self.running.remove(request)
            self._states.free(request.slot)
        request.stage = Stage.DONE
