"""The engine: requests in and out at any time, one step a call.

schedule → run → sample → deliver. The engine may be driven from several threads; calls take turns.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from kittiwake.engine.answer import Answer
from kittiwake.engine.flight import Flight
from kittiwake.engine.prefix import PrefixCache
from kittiwake.engine.request import (
    Delta,
    KeptState,
    PromptProgress,
    RequestOptions,
    SamplingParams,
    Timings,
    TokenLogprob,
)
from kittiwake.engine.reuse import Reuse
from kittiwake.engine.runner import Runner
from kittiwake.engine.sampler import Draw, Drawn, adjustments_for, describe, fault, sample, warm_up
from kittiwake.engine.scheduler import Plan, Request, Scheduler, Stage
from kittiwake.engine.states import SavedState
from kittiwake.engine.stats import EngineStats, QueueLimits, StepReport, Totals
from kittiwake.errors import DeadlineError, KittiwakeError, QueueFullError, RequestError, StateError
from kittiwake.families.contract import Model, SequencesError
from kittiwake.text.stops import StopMatcher
from kittiwake.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kittiwake.engine.device_steps import DeviceSteps


class Engine:
    """Continuous batching over one model."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        slots: int,
        prefill_chunk: int,
        max_rows: int,
        max_chunk: int = 0,
        cache: PrefixCache | None = None,
        limits: QueueLimits | None = None,
        growing_bytes: int = -1,
    ) -> None:
        """``max_chunk`` bounds a prompt that is alone in a step (0: as ``max_rows``); ``growing_bytes`` is the budget of
        states that grow with the length, see :func:`new_states`."""
        self.model, self.tokenizer = model, tokenizer
        self.runner = Runner(model, slots, growing_bytes)
        self.observer: Callable[[StepReport], None] | None = None
        """Told of every step that ran rows, while the engine waits: it must be quick and must not raise."""
        self._cache, self._limits = cache, limits or QueueLimits()
        self._never = tuple(i for i in range(model.config.vocab_size) if not tokenizer.is_valid(i))
        self._device = self.runner.device_steps(self._never)
        self._flight: Flight | None = None
        # on a device the host reads tokens a step late, when a slot has eaten one more: answers' states are not kept
        self._reuse = Reuse(self.runner.states, cache, answers=self._device is None)
        alone = max_chunk if self._device is None else min(max_chunk, max_rows)
        self._scheduler = Scheduler(self.runner.states, prefill_chunk, max_rows, self._reuse, alone)
        self._totals = Totals()
        self._deadlines: list[tuple[float, int]] = []
        self._ids = itertools.count(1)
        self._requests: dict[int, Request] = {}
        self._of_client: Counter[str] = Counter()
        self._outbox: dict[int, list[Delta]] = {}
        self._fresh: dict[int, None] = {}  # requests with something in their outbox, in order
        self._lock = threading.RLock()
        warm_up()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._scheduler.waiting or self._scheduler.running or self._flight is not None)

    @property
    def free_slots(self) -> int:
        """State slots nobody holds."""
        return self.runner.states.free_slots

    def check(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        start_from: KeptState | None = None,
        options: RequestOptions | None = None,
    ) -> None:
        """Raise RequestError for a request :meth:`add` would not take, StateError for a kept state of another model."""
        vocab = self.model.config.vocab_size
        if start_from is not None:
            self.runner.states.check_saved(start_from.saved)
            if start_from.logits is not None and start_from.logits.shape != (vocab,):
                raise StateError(f"kept logits have shape {start_from.logits.shape}, this model has {vocab} tokens")
        if len(prompt_ids) == 0 and (start_from is None or start_from.logits is None):
            raise RequestError("the prompt is empty", "give at least one token; some models begin with token 0")
        for kind, ids in (("prompt", prompt_ids), ("stop_token_ids", params.stop_token_ids)):
            if not _are_ids(ids, vocab):
                wrong = next(token for token in ids if not _are_ids((token,), vocab))
                raise RequestError(f"{kind} holds {wrong!r}, which is no token id from 0 to {vocab - 1}")
        for token in params.logit_bias:
            if not (token < vocab and self.tokenizer.is_valid(token)):
                raise RequestError(f"logit_bias names token {token}, which this model's tokenizer does not use")
        before = start_from.saved.position if start_from is not None else 0
        self._check_length(before, len(prompt_ids), params.max_tokens)
        borders = options.cache.borders if options is not None else ()
        if borders and borders[-1] > len(prompt_ids):
            raise RequestError(f"a border stands at token {borders[-1]} of a prompt of {len(prompt_ids)}")

    def _check_length(self, before: int, prompt: int, answer: int) -> None:
        """Raise RequestError for a sequence that the memory for growing states could not hold even alone."""
        states = self.runner.states
        if states.spec.growing and before + prompt + answer > states.most_tokens:
            told = f"a prompt of {prompt} tokens" + (f" after {before}" if before else "")
            raise RequestError(
                f"{told} and max_tokens {answer} are more than the {states.most_tokens} tokens that fit the memory for "
                "growing states",
                "shorten the prompt, lower max_tokens, or raise growing_bytes",
            )

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        keep_state: bool = False,
        start_from: KeptState | None = None,
        options: RequestOptions | None = None,
    ) -> int:
        """Queue a request; returns its id. ``start_from`` goes on from a kept state, with nothing more to say if empty.

        Raises QueueFullError where too many wait.
        """
        if params.n != 1:
            raise RequestError(f"one request is one completion, params ask for n {params.n}", "use add_samples")
        return self.add_samples(prompt_ids, params, keep_state=keep_state, start_from=start_from, options=options)[0]

    def add_samples(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        keep_state: bool = False,
        start_from: KeptState | None = None,
        options: RequestOptions | None = None,
    ) -> list[int]:
        """Queue ``params.n`` completions of one prompt, which is eaten once; their ids, in the order of the samples.

        Sample i gives the bits of a request of its own with ``params.for_sample(i)``.
        """
        how = options or RequestOptions()
        self.check(prompt_ids, params, start_from, how)
        prompt, stops = list(map(int, prompt_ids)), StopMatcher(params.stop)
        with self._lock:
            self._check_queue(how.client)
            requests = []
            for index in range(params.n):
                request = Request(
                    id=next(self._ids),
                    answer=Answer(self.tokenizer, params.for_sample(index), stops),
                    tokens=prompt,
                    fed=0,
                    keep_state=keep_state,
                    start_from=start_from,
                    added_s=time.perf_counter(),
                    stage=Stage.HELD,
                    prompt_tokens=len(prompt),
                    options=how,
                )
                if start_from is not None:
                    request.base = start_from.saved.position
                    request.logits = start_from.logits
                if how.deadline_s is not None:
                    heapq.heappush(self._deadlines, (request.added_s + how.deadline_s, request.id))
                self._requests[request.id] = request
                self._of_client[how.client] += 1
                self._outbox[request.id] = []
                requests.append(request)
            self._reuse.open(requests)
            self._drop_old_deadlines()
            self._scheduler.add(_leader(requests))
            return [request.id for request in requests]

    def _check_queue(self, client: str) -> None:
        """Raise QueueFullError where as many wait, beyond the free slots, as may."""
        most, free = self._limits, self.free_slots
        total = len(self._requests) - len(self._scheduler.running)
        own = self._of_client[client] - self._scheduler.shares.slots[client]
        for waiting, limit, whose in (
            (total, most.max_waiting, ""),
            (own, most.max_waiting_per_client, " of this client"),
        ):
            if limit and waiting - free >= limit:
                self._totals.refused += 1
                after_s = self._totals.retry_after_s(waiting, self.runner.states.slots)
                raise QueueFullError(f"{waiting} requests{whose} wait already, at most {limit} may", after_s)

    def step(self) -> bool:
        """Move every request that can move. False when there was nothing to do."""
        with self._lock:
            begin_s = time.perf_counter()
            expired = self._expire(begin_s)
            self._note_admitted(self._scheduler.admit(begin_s))
            # a kept state's logits, nothing to eat
            ready = [r for r in self._scheduler.running if not r.pending and r.due == 0]
            for request in ready:
                self._reuse.save_at_mark(request)
            plan = self._scheduler.plan()
            if not plan.parts and not ready and self._flight is None:
                return expired
            if self._device is not None:
                self._step_on_device(self._device, plan, ready)
                self._report(plan, begin_s)
                return True
            with self._ending([request for request, _ in plan.parts]):
                rows = self._run(plan) if plan.parts else []
            with self._ending([*ready, *(request for request, _ in plan.parts)]):
                self._deliver([(request, np.asarray(request.logits)) for request in ready] + rows)
            self._report(plan, begin_s)
            return True

    def _report(self, plan: Plan, begin_s: float) -> None:
        """Tell the observer of a step."""
        if self.observer is not None and plan.parts:
            self.observer(plan.report((time.perf_counter() - begin_s) * 1e3))

    def _expire(self, now_s: float) -> bool:
        """End requests whose time is up."""
        ended = False
        while self._deadlines and self._deadlines[0][0] <= now_s:
            request = self._requests.get(heapq.heappop(self._deadlines)[1])
            if request is not None:
                ended = True
                limit, drawn = request.options.deadline_s, len(request.answer.tokens)
                error = DeadlineError(f"the request had not ended after {limit:g} s, with {drawn} tokens drawn")
                self._cut_short(request, "error", error)
        return ended

    def _drop_old_deadlines(self) -> None:
        """Forget those of requests that have ended, now and then: under load there may never be a moment without any."""
        if len(self._deadlines) > 2 * len(self._requests) + _FEW_DEADLINES:
            self._deadlines = [one for one in self._deadlines if one[1] in self._requests]
            heapq.heapify(self._deadlines)

    def _note_admitted(self, requests: list[Request]) -> None:
        for request in requests:
            self._totals.prompt_tokens += request.prompt_tokens
            self._totals.cached_tokens += request.cache_use.cached_tokens
            self._post_progress(request)

    def _post_progress(self, request: Request) -> None:
        """Tell how much of the prompt is read, whoever wants to know."""
        if request.options.progress and not request.answer.tokens and request.fed <= request.prompt_tokens:
            progress = PromptProgress(request.prompt_tokens, request.cache_use.cached_tokens, request.fed)
            self._post(Delta(request.id, "", (), progress=progress))

    @contextmanager
    def _ending(self, requests: list[Request]) -> Iterator[None]:
        """End these requests when the body fails: their states may have moved halfway, or rows are lost."""
        try:
            yield
        except BaseException:
            for request in requests:
                if request.id in self._requests:
                    self._cut_short(request, "error", KittiwakeError("the step of this request was broken off"))
            raise

    def _run(self, plan: Plan) -> list[tuple[Request, np.ndarray]]:
        """Run a plan; the requests that got logits, with their row. Those that the forward failed alone end alone."""
        complete, failed = plan.complete, dict[int, KittiwakeError]()
        try:
            logits = self.runner.run(plan.batch())
        except SequencesError as err:
            logits, failed = err.logits, err.errors
        rows = [(request, row) for request, row in zip(complete, logits, strict=True) if request.slot not in failed]
        for request, count in plan.parts:
            request.fed += count
            if request.slot in failed:
                self._cut_short(request, "error", failed[request.slot])
                continue
            self._reuse.save_at_mark(request)
            self._post_progress(request)
        return rows

    def _step_on_device(self, device: DeviceSteps, plan: Plan, ready: list[Request]) -> None:
        """Launch a step, then read the tokens of the one before it, while the device works."""
        if ready:
            with self._ending(ready):
                for request in ready:
                    self._prepare_draw(device, request)
                known = np.stack([np.asarray(request.logits) for request in ready])
                self._land(device, device.launch_known(known, self._flight_of(ready, ready)))
        flight = None
        if plan.parts:
            with self._ending([request for request, _ in plan.parts]):
                flight = self._launch(device, plan)
        before, self._flight = self._flight, flight
        if before is not None:
            with self._ending(before.rows):
                self._land(device, before)
        if flight is not None and flight.must_land:
            self._flight = None
            with self._ending(flight.rows):
                self._land(device, flight)

    def _launch(self, device: DeviceSteps, plan: Plan) -> Flight:
        """Enqueue a plan and the draws that it leads to."""
        batch, complete = plan.batch(), plan.complete
        drawn = [one for one, count in plan.parts if count == one.due and one.stage is Stage.RUNNING]
        for request in drawn:
            self._prepare_draw(device, request)
        for request, count in plan.parts:
            request.fed += count
        flight = self._flight_of(complete, drawn)
        device.launch(batch, flight)
        for request, _ in plan.parts:
            self._reuse.save_at_mark(request)
            self._post_progress(request)
        flight.must_land = flight.must_land or any(request.taken is not None for request in complete)
        return flight

    def _prepare_draw(self, device: DeviceSteps, request: Request) -> None:
        """Bring the sampler's settings of a slot up to its next draw."""
        answer, params = request.answer, request.answer.params
        count = len(answer.tokens) + request.pending
        if count == 0:
            before = request.start_from.tokens if request.start_from is not None else ()
            given = (*before, *request.tokens) if params.repetition_penalty != 1.0 else ()
            device.begin(request.slot, params, request.position, given, answer.banned_now)
        elif count == params.min_tokens:
            device.let_end(request.slot, answer.ends)

    def _flight_of(self, rows: list[Request], drawn: list[Request]) -> Flight:
        """A flight yet to be launched; its requests count the token to come."""
        must_land = any(request.stage is Stage.SETTLING for request in rows)
        for request in drawn:
            request.pending += 1
            count = len(request.answer.tokens) + request.pending
            is_free = self._is_free(request, count)
            request.runs_ahead = is_free and count < request.answer.params.max_tokens
            must_land = must_land or not is_free
        return Flight(rows, drawn, must_land)

    @staticmethod
    def _is_free(request: Request, count: int) -> bool:
        """Whether nothing but its token is wanted of a row, so that the host need not see it before the next one."""
        params = request.answer.params
        return not (request.keep_state or params.logprobs or count < params.min_tokens)

    def _land(self, device: DeviceSteps, flight: Flight) -> None:
        """Read what a flight drew and go on from there."""
        tokens = device.land(flight)
        now_s = time.perf_counter()
        alive = [request for request in flight.rows if request.stage is not Stage.DONE]
        for request in alive:
            if request.taken is not None:
                self._scheduler.add_first(self._reuse.publish(request, flight.row(request)), now_s)
        for request in alive:
            if request.stage is Stage.SETTLING and request.due == 0:
                self._end_kept(request, flight.row(request))
        for request in flight.drawn:
            request.pending -= 1
            if request.stage is not Stage.RUNNING:
                continue
            request.first_token_s = request.first_token_s or now_s
            token = tokens[request.slot]
            if token < 0:
                self._end(request, "error", error=fault(token))
                continue
            params = request.answer.params
            if request.keep_state or params.logprobs:
                row = flight.row(request)
                self._take(request, token, row, self._logprobs(request, token, describe(row, params, token)))
            else:
                self._take(request, token, None, ())

    def _deliver(self, rows: list[tuple[Request, np.ndarray]]) -> None:
        """Sample a token for each row, or settle a request whose state is to be kept."""
        for request, row in rows:
            if request.taken is not None:
                self._scheduler.add_first(self._reuse.publish(request, row), time.perf_counter())
        drawing = [(one, row) for one, row in rows if one.stage is Stage.RUNNING and one.due == 0]
        for request, row in rows:
            if request.stage is Stage.SETTLING and request.due == 0:
                self._end_kept(request, row)
        if not drawing:
            return
        drawn = sample(np.stack([row for _, row in drawing]), [self._draw(request) for request, _ in drawing])
        now_s = time.perf_counter()
        for (request, row), one in zip(drawing, drawn, strict=True):
            request.first_token_s = request.first_token_s or now_s
            if one.token is None:
                self._end(request, "error", error=one.error)
            else:
                self._take(request, one.token, row, self._logprobs(request, one.token, one))

    def _draw(self, request: Request) -> Draw:
        """What the next token of a request is drawn with."""
        params = request.answer.params
        if not request.answer.tokens:  # nothing drawn yet: all that stands there was given
            before = request.start_from.tokens if request.start_from is not None else ()
            given = (*before, *request.tokens) if params.repetition_penalty != 1.0 else ()
            request.adjustments = adjustments_for(params, given, self.model.config.vocab_size)
        return Draw(params, request.position, self._never + request.answer.banned_now, request.adjustments)

    def _logprobs(self, request: Request, token: int, drawn: Drawn) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of a drawn token, if its request asked for them."""
        if not request.answer.params.logprobs:
            return ()
        top = tuple(TokenLogprob(other, value, self._bytes(other)) for other, value in drawn.top)
        return (TokenLogprob(token, drawn.logprob, self._bytes(token), top),)

    def _bytes(self, token: int) -> bytes:
        return self.tokenizer.token_bytes(token) if self.tokenizer.is_valid(token) else b""

    def _take(self, request: Request, token: int, row: np.ndarray | None, logprobs: tuple[TokenLogprob, ...]) -> None:
        """A token was drawn from ``row``, the logits after everything the slot has eaten."""
        settles = request.keep_state or self._reuse.wants_answer(request)
        was_decided = settles and request.answer.is_decided
        step = request.answer.push(token)
        if request.adjustments is not None:
            request.adjustments.push(token)
        if settles:
            request.logits = row
        if settles and step.finish_reason is None:
            if request.answer.is_decided:
                request.snapshot = None
            elif was_decided:
                request.snapshot = (request.fed, self.runner.states.snapshot(request.slot), np.asarray(row))
        if step.finish_reason is None:
            request.tokens.append(token)
            self._post(Delta(request.id, step.text, (token,), logprobs=logprobs))
        elif request.keep_state or self._is_worth_settling(request):
            self._post(Delta(request.id, step.text, (token,), logprobs=logprobs))
            self._settle(request, token, step.finish_reason)
        else:
            self._end(request, step.finish_reason, text=step.text, token_ids=(token,), logprobs=logprobs)

    def _is_worth_settling(self, request: Request) -> bool:
        """Whether the state after an answer that has ended saves a next turn enough."""
        count = request.prompt_tokens + request.answer.accepted
        return self._reuse.wants_answer(request) and self._reuse.is_worth_keeping(request, count)

    def _settle(self, request: Request, last: int, reason: str) -> None:
        """Bring the slot to the last accepted token: eat what is missing, or go back to a snapshot and eat from there."""
        request.finish_reason, request.stage = reason, Stage.SETTLING
        if self._device is not None:
            self._device.end(request.slot)  # what it eats from now on is followed by no draw
        request.tokens.append(last)
        del request.tokens[request.prompt_tokens + request.answer.accepted :]
        if request.fed > len(request.tokens):
            assert request.snapshot is not None, "text was taken back that was never held"
            request.fed, saved, request.logits = request.snapshot
            self.runner.states.rewind(request.slot, saved)
        if request.due == 0:
            self._end_kept(request, np.asarray(request.logits))

    def _end_kept(self, request: Request, row: np.ndarray) -> None:
        """The slot has eaten all tokens that count; ``row`` are the logits that follow."""
        saved = self.runner.states.save(request.slot)
        self._reuse.keep_answer(request, saved, row)
        state = self._keep(request, saved, row) if request.keep_state else None
        self._end(request, request.finish_reason or "stop", state=state)

    def _keep(self, request: Request, saved: SavedState, row: np.ndarray) -> KeptState:
        """The state of a request as a value of its own."""
        start = request.start_from
        tokens = (start.tokens if start is not None else ()) + tuple(request.tokens)
        initial = start.initial if start is not None else ""
        return KeptState(saved, tokens, np.array(row, dtype=np.float32), initial)

    def _end(
        self,
        request: Request,
        reason: str,
        *,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        state: KeptState | None = None,
        error: KittiwakeError | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """Free the slot and post the last Delta. Those who waited for its prompt eat it themselves."""
        now_s = time.perf_counter()
        if self._device is not None and request.slot:
            self._device.end(request.slot)
        self._scheduler.remove(request)
        self._leave(request, now_s)
        del self._requests[request.id]
        self._of_client[request.options.client] -= 1
        if not self._of_client[request.options.client]:
            del self._of_client[request.options.client]
        if not self._requests:
            self._deadlines.clear()
        if request.admitted_s:
            self._totals.note_held(now_s - request.admitted_s)
        self._totals.finished[reason] += 1
        admitted_s = request.admitted_s or now_s
        first_s = request.first_token_s or now_s
        timings = Timings(
            queue_ms=(admitted_s - request.added_s) * 1e3,
            prefill_ms=(first_s - admitted_s) * 1e3,
            decode_ms=(now_s - first_s) * 1e3,
            wait_ms=request.waited_s * 1e3,
        )
        last = Delta(request.id, text, token_ids, reason, timings, state, error, logprobs, cache=request.cache_use)
        self._post(last)

    def _cut_short(self, request: Request, reason: str, error: KittiwakeError | None = None) -> None:
        """End a request that has not; one whose answer is whole, and only its state is not kept yet, just ends."""
        if request.stage is Stage.SETTLING and not request.keep_state:
            self._end(request, request.finish_reason or "stop")
        else:
            self._end(request, reason, error=error)

    def _leave(self, request: Request, now_s: float) -> None:
        """Let those who wait for a request that ends read what it has not read."""
        heirs = [follower for follower in request.followers if follower.is_held]
        others = [other for other in request.parked if other.is_held]
        request.followers, request.parked = [], []
        self._scheduler.add_first(([_leader(heirs)] if heirs else []) + others, now_s)

    def _post(self, delta: Delta) -> None:
        self._outbox[delta.request_id].append(delta)
        self._fresh[delta.request_id] = None
        self._totals.generated_tokens += len(delta.token_ids)

    def collect(self, request_id: int) -> list[Delta]:
        """What happened to a request since the last call; empties its outbox, and forgets it after its last Delta."""
        with self._lock:
            if request_id not in self._outbox:
                raise RequestError(f"request {request_id} is not known: never added, or its end was collected already")
            self._fresh.pop(request_id, None)
            return self._empty(request_id)

    def _empty(self, request_id: int) -> list[Delta]:
        """What is in an outbox, which goes with its last Delta."""
        deltas = self._outbox[request_id]
        if deltas and deltas[-1].finish_reason is not None:
            del self._outbox[request_id]
        else:
            self._outbox[request_id] = []
        return deltas

    def collect_all(self) -> list[Delta]:
        """What happened to all requests since the last call, those of a request in order; as :meth:`collect` of each."""
        with self._lock:
            fresh, self._fresh = self._fresh, {}
            return [delta for request_id in fresh for delta in self._empty(request_id)]

    def abort(self, request_id: int) -> None:
        """End a request now with reason "abort" and free its slot; one that has ended is left as it is."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is not None:
                self._cut_short(request, "abort")

    def forget(self, request_id: int) -> None:
        """Abort a request that nobody will collect any more, and drop what it has still in its outbox."""
        with self._lock:
            self.abort(request_id)
            self._outbox.pop(request_id, None)
            self._fresh.pop(request_id, None)

    def stats(self) -> EngineStats:
        """The engine in numbers."""
        with self._lock:
            scheduler, totals = self._scheduler, self._totals
            return EngineStats(
                waiting=len(scheduler.waiting),
                held=len(self._requests) - len(scheduler.waiting) - len(scheduler.running),
                running=len(scheduler.running),
                slots=self.runner.states.slots,
                free_slots=self.free_slots,
                finished=dict(totals.finished),
                refused=totals.refused,
                prompt_tokens=totals.prompt_tokens,
                cached_tokens=totals.cached_tokens,
                generated_tokens=totals.generated_tokens,
                cache=self._cache.stats() if self._cache is not None else None,
            )

    def close(self) -> None:
        """Let the cache write what it has still to write. The engine is not to be used any more."""
        if self._cache is not None:
            self._cache.close()


_FEW_DEADLINES = 64


def _are_ids(ids: Sequence[int], vocab: int) -> bool:
    """Whether all of these are ids of a vocabulary; quick, since a prompt may be long and others wait meanwhile."""
    if len(ids) == 0:
        return True
    kinds = set(map(type, ids))
    return all(kind is int or issubclass(kind, np.integer) for kind in kinds) and min(ids) >= 0 and max(ids) < vocab


def _leader(requests: list[Request]) -> Request:
    """The first of some held requests, made to eat the prompt that they share; the rest follow it."""
    leader = requests[0]
    leader.followers = requests[1:]
    leader.marks = [leader.prompt_tokens] if leader.followers else []
    for follower in leader.followers:
        follower.waits_for = leader.prompt_tokens
    return leader
