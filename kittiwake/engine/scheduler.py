"""Requests → what one step runs: decode rows and prefill chunks side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kittiwake.engine.answer import Answer
from kittiwake.engine.batch import Batch
from kittiwake.engine.fair_queue import FairQueue, Shares, level
from kittiwake.engine.prefix import Origin, Prefix
from kittiwake.engine.request import CacheUse, KeptState, RequestOptions
from kittiwake.engine.reuse import Reuse
from kittiwake.engine.sampler import Adjustments
from kittiwake.engine.states import SavedState, StateTable
from kittiwake.engine.stats import StepReport

DRAWN = -1
"""Stands for the token that was drawn last for a slot, which only the device knows yet."""


class Stage(Enum):
    """Where a request stands."""

    HELD = "held"
    """Waits for another request that reads the beginning of its prompt."""
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
    """Prompt and drawn tokens, those that its slot has eaten or will eat. Its own once it has a slot."""
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
    """Samples of the same prompt, held until this one has eaten it; then they go on from its state."""
    options: RequestOptions = field(default_factory=RequestOptions)
    origin: Origin | None = None
    """What its text follows, as the cache sees it; None where it uses no cache."""
    prompt: np.ndarray | None = None
    """The prompt, int32 [prompt_tokens], where it uses the cache."""
    resume: Prefix | None = None
    """What its slot begins with, instead of ``start_from``."""
    marks: list[int] = field(default_factory=list)
    """Counts of tokens at which the slot stops and its state is taken, ascending."""
    turn: int = 0
    """The last step that read of its prompt."""
    turn_s: float = 0.0
    """When that was."""
    taken: tuple[int, SavedState] | None = None
    """The mark that the slot came to last, and its state there, until the logits are there too."""
    last_mark: int = 0
    """Up to where the cache has its text."""
    parked: list[Request] = field(default_factory=list)
    """Requests of others, held until this one has read the beginning that they share."""
    waits_for: int = 0
    """The count of tokens at which it is let go, while it is held."""
    held_s: float = 0.0
    """When it was held last; 0 where it is not."""
    waited_s: float = 0.0
    """How long it was held."""
    cache_use: CacheUse = field(default_factory=CacheUse)
    pending: int = 0
    """Tokens drawn on the device that the host has not read yet."""
    runs_ahead: bool = False
    """Whether its slot may eat such a token."""

    @property
    def due(self) -> int:
        """Tokens its slot has yet to eat and may eat now."""
        if self.pending:
            return 1 if self.runs_ahead else 0
        return len(self.tokens) - self.fed

    @property
    def due_to_mark(self) -> int:
        """Tokens its slot may eat in one go."""
        return min(self.due, self.marks[0] - self.fed) if self.marks else self.due

    @property
    def position(self) -> int:
        """Absolute position of the token to be drawn next."""
        return self.base + len(self.tokens)

    @property
    def most_tokens(self) -> int:
        """What its slot may have seen at most when it ends."""
        return self.base + self.prompt_tokens + self.answer.params.max_tokens

    @property
    def is_held(self) -> bool:
        """Whether it waits for another one's prefix."""
        return self.stage is Stage.HELD


@dataclass(frozen=True)
class Plan:
    """One step: for each request how many tokens it eats now."""

    parts: list[tuple[Request, int]]
    ahead: tuple[tuple[int, list[int]], ...] = ()
    """What the one prompt that is being read is expected to read next; see :attr:`Batch.ahead`."""

    def batch(self) -> Batch:
        """The packed rows; only a request that eats its last due token, or comes to a mark, wants logits."""
        flat: list[int] = []
        starts, want = [0], []
        for request, count in self.parts:
            flat += (DRAWN,) if request.pending else request.tokens[request.fed : request.fed + count]
            if count == request.due_to_mark:
                want.append(len(flat) - 1)
            starts.append(len(flat))
        slots = [request.slot for request, _ in self.parts]
        token_ids, firsts, places, wanted = (np.array(one, dtype=np.int64) for one in (flat, starts, slots, want))
        return Batch(token_ids, firsts, places, wanted, self.ahead)

    @property
    def complete(self) -> list[Request]:
        """Requests that get logits from this step, in row order."""
        return [request for request, count in self.parts if count == request.due_to_mark]

    def report(self, step_ms: float) -> StepReport:
        """What was run, once it was."""
        rows = sum(count for _, count in self.parts)
        decode = sum(count for request, count in self.parts if request.fed > request.prompt_tokens)
        return StepReport(step_ms, rows, rows - decode, decode, len(self.parts))


class Scheduler:
    """Everyone who decodes moves at every step, prefill takes a bounded part of the rows that are left.

    Slots and prefill rows are shared fairly over clients, those of one client by priority and in turn.
    ``prefill_chunk`` bounds the prompt tokens of a step in which others decode (0: no bound), ``max_chunk`` those of a
    prompt that is alone in a step (0: as ``max_rows``).
    """

    def __init__(
        self,
        states: StateTable,
        prefill_chunk: int,
        max_rows: int,
        reuse: Reuse | None = None,
        max_chunk: int = 0,
    ) -> None:
        self._states = states
        self._reuse = reuse or Reuse(states)
        self._chunk = prefill_chunk if prefill_chunk > 0 else max_rows
        self._max_rows = max_rows
        self._max_chunk = max_chunk if max_chunk > 0 else max_rows
        self.waiting = FairQueue()
        self.running: list[Request] = []
        self.shares = Shares()
        self._left_out: set[int] = set()
        """Ids of requests that got no row in the last step because there was none left."""
        self._step = 0
        self._now_s = 0.0

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.stage = Stage.WAITING
        self.waiting.push(request)

    def add_first(self, requests: list[Request], now_s: float = 0.0) -> None:
        """Put requests at the head of their queues, in this order: they have waited for one that was served already."""
        for request in reversed(requests):
            if request.held_s:
                request.waited_s += now_s - request.held_s
                request.held_s = 0.0
            request.stage = Stage.WAITING
            self.waiting.push(request, first=True)

    def admit(self, now_s: float) -> list[Request]:
        """Give free slots to those who wait; returns who got one.

        Who gets a slot has room for all it may grow to; while the next in turn has not, nobody overtakes it.
        """
        self._now_s = now_s
        admitted = []
        while self.waiting and self._states.free_slots:
            request = self.waiting.pop(now_s, self.shares)
            room = request.most_tokens if self._states.spec.growing else 0
            if not self._states.can_hold(room):
                self.waiting.push(request, first=True)
                break
            if self._reuse.parks(request, self.running):
                request.stage, request.held_s = Stage.HELD, now_s
                continue
            request.slot = self._states.allocate(room)
            self._begin(request)
            request.stage, request.admitted_s = Stage.RUNNING, now_s
            self.shares.take_slot(request.options.client, now_s)
            self.running.append(request)
            admitted.append(request)
        return admitted

    def _begin(self, request: Request) -> None:
        """Bring the slot to where the request goes on from."""
        request.tokens = list(request.tokens)  # samples share a prompt until they draw
        if request.resume is not None:
            self._states.restore(request.slot, request.resume.saved)
            request.fed, request.logits = request.resume.count, request.resume.logits
            request.resume = None
        elif request.start_from is not None:
            self._states.restore(request.slot, request.start_from.saved)
        self._reuse.count(request)

    def plan(self) -> Plan:
        """Share out at most ``max_rows`` rows. Those for whom none is left stand first in line at the next step."""
        self._step += 1
        prompts: list[Request] = []
        decoding: list[Request] = []
        for request in self.running:
            if (due := request.due) > 0:
                (decoding if due == 1 else prompts).append(request)
        if not prompts and not self._left_out and len(decoding) <= self._max_rows:  # nearly always
            return Plan([(request, 1) for request in decoding])
        left = most = self._max_chunk if len(prompts) == 1 and not decoding else self._max_rows
        # a prompt alone is read as fast as it can be; one beside others must not hold them up
        prefill_left = self._chunk if decoding else most
        # decode rows first: they are cheap and somebody is reading along
        order = decoding + sorted(prompts, key=self._rank)
        if self._left_out:
            order.sort(key=lambda request: request.id not in self._left_out)
        counts: dict[int, int] = {}
        for request in order:
            if request.due == 1:
                count = min(1, left)
            elif (count := min(request.due_to_mark, left, prefill_left)) > 0:
                prefill_left -= count
                self.shares.charge(self._payer(request), count, request.options.priority)
                request.turn, request.turn_s = self._step, self._now_s
            if count > 0:
                counts[request.id] = count
                left -= count
        parts = [(request, counts[request.id]) for request in self.running if request.id in counts]
        self._left_out = set() if left else {request.id for request in order if request.id not in counts}
        if self._left_out:
            self.running.sort(key=lambda request: request.id not in self._left_out)
        limit = most - len(decoding)
        return Plan(parts, self._expect(prompts, counts, min(self._chunk, limit) if decoding else limit))

    @staticmethod
    def _expect(prompts: list[Request], counts: dict[int, int], limit: int) -> tuple[tuple[int, list[int]], ...]:
        """The chunk after this one, where a single prompt is being read: of several, others' turns decide its size."""
        if len(prompts) != 1 or prompts[0].id not in counts:
            return ()
        request, first = prompts[0], prompts[0].fed + counts[prompts[0].id]
        border = next((mark for mark in request.marks if mark > first), len(request.tokens))
        last = min(border, first + limit)
        return ((request.slot, request.tokens[first:last]),) if first < last else ()

    def _rank(self, request: Request) -> tuple[float, float, int]:
        """Which prompt goes first: by the rows its client has had, and among those of one client by priority and turn."""
        rows = self.shares.rows(self._payer(request))
        return rows, -level(request, request.turn_s, self._now_s), request.turn

    def _payer(self, request: Request) -> str:
        """The client whose share the next rows are: of those who wait for them, the least served."""
        if not request.parked:
            return request.options.client
        clients = {one.options.client for one in request.parked if one.is_held} | {request.options.client}
        return min(clients, key=lambda client: (self.shares.rows(client), client))

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands, and free its slot."""
        if request.stage is Stage.WAITING:
            self.waiting.remove(request)
        elif request.stage not in (Stage.DONE, Stage.HELD):
            self.running.remove(request)
            self._states.free(request.slot)
            self.shares.give_slot(request.options.client)
        request.stage = Stage.DONE
