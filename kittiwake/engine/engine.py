"""The engine: requests in and out at any time, one step a call.

schedule → run → sample → deliver. The engine may be driven from several threads; calls take turns.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kittiwake.engine.answer import Answer
from kittiwake.engine.request import Delta, KeptState, SamplingParams, Timings, TokenLogprob
from kittiwake.engine.runner import Runner
from kittiwake.engine.sampler import Draw, Drawn, adjustments_for, sample, warm_up
from kittiwake.engine.scheduler import Plan, Request, Scheduler, Stage
from kittiwake.errors import KittiwakeError, RequestError, StateError
from kittiwake.families.contract import Model
from kittiwake.text.tokenizer import Tokenizer


class Engine:
    """Continuous batching over one model."""

    def __init__(self, model: Model, tokenizer: Tokenizer, *, slots: int, prefill_chunk: int, max_rows: int) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.runner = Runner(model, slots)
        self._scheduler = Scheduler(self.runner.states, prefill_chunk, max_rows)
        self._ids = itertools.count(1)
        self._requests: dict[int, Request] = {}
        self._outbox: dict[int, list[Delta]] = {}
        self._lock = threading.RLock()
        warm_up()
        self._never = tuple(i for i in range(model.config.vocab_size) if not tokenizer.is_valid(i))

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    @property
    def free_slots(self) -> int:
        """State slots nobody holds."""
        return self.runner.states.free_slots

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, start_from: KeptState | None = None) -> None:
        """Raise RequestError for a request :meth:`add` would not take, StateError for a kept state of another model."""
        vocab = self.model.config.vocab_size
        if start_from is not None:
            self.runner.states.check_saved(start_from.saved)
            if start_from.logits is not None and start_from.logits.shape != (vocab,):
                raise StateError(f"kept logits have shape {start_from.logits.shape}, this model has {vocab} tokens")
        if len(prompt_ids) == 0 and (start_from is None or start_from.logits is None):
            raise RequestError("the prompt is empty", "give at least one token; some models begin with token 0")
        for kind, ids in (("prompt", prompt_ids), ("stop_token_ids", params.stop_token_ids)):
            for token in ids:
                if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < vocab:
                    raise RequestError(f"{kind} holds {token!r}, which is no token id from 0 to {vocab - 1}")
        for token in params.logit_bias:
            if not (token < vocab and self.tokenizer.is_valid(token)):
                raise RequestError(f"logit_bias names token {token}, which this model's tokenizer does not use")

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        keep_state: bool = False,
        start_from: KeptState | None = None,
    ) -> int:
        """Queue a request; returns its id. ``start_from`` goes on from a kept state, with nothing more to say if empty."""
        if params.n != 1:
            raise RequestError(f"one request is one completion, params ask for n {params.n}", "use add_samples")
        return self.add_samples(prompt_ids, params, keep_state=keep_state, start_from=start_from)[0]

    def add_samples(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        keep_state: bool = False,
        start_from: KeptState | None = None,
    ) -> list[int]:
        """Queue ``params.n`` completions of one prompt, which is eaten once; their ids, in the order of the samples.

        Sample i gives the bits of a request of its own with ``params.for_sample(i)``.
        """
        self.check(prompt_ids, params, start_from)
        prompt = [int(token) for token in prompt_ids]
        with self._lock:
            requests = []
            for index in range(params.n):
                request = Request(
                    id=next(self._ids),
                    answer=Answer(self.tokenizer, params.for_sample(index)),
                    tokens=prompt,
                    fed=0,
                    keep_state=keep_state,
                    start_from=start_from,
                    added_s=time.perf_counter(),
                    stage=Stage.HELD,
                    prompt_tokens=len(prompt),
                )
                if start_from is not None:
                    request.base = start_from.saved.position
                    request.logits = start_from.logits
                self._requests[request.id] = request
                self._outbox[request.id] = []
                requests.append(request)
            self._scheduler.add(_leader(requests))
            return [request.id for request in requests]

    def step(self) -> bool:
        """Move every request that can move. False when there was nothing to do."""
        with self._lock:
            self._scheduler.admit(time.perf_counter())
            ready = [r for r in self._scheduler.running if r.due == 0]  # a kept state's logits, nothing to eat
            plan = self._scheduler.plan()
            if not plan.parts and not ready:
                return False
            with self._ending([request for request, _ in plan.parts]):
                rows = self._run(plan) if plan.parts else []
            with self._ending([*ready, *(request for request, _ in plan.parts)]):
                self._deliver([(request, np.asarray(request.logits)) for request in ready] + rows)
            return True

    @contextmanager
    def _ending(self, requests: list[Request]) -> Iterator[None]:
        """End these requests when the body fails: their states may have moved halfway, or rows are lost."""
        try:
            yield
        except BaseException:
            for request in requests:
                if request.id in self._requests:
                    self._end(request, "error", error=KittiwakeError("the step of this request was broken off"))
            raise

    def _run(self, plan: Plan) -> list[tuple[Request, np.ndarray]]:
        """Run a plan; the requests that got logits, with their row."""
        complete = plan.complete
        logits = self.runner.run(plan.batch())
        for request, count in plan.parts:
            request.fed += count
        return list(zip(complete, logits, strict=True))

    def _deliver(self, rows: list[tuple[Request, np.ndarray]]) -> None:
        """Sample a token for each row, or settle a request whose state is to be kept."""
        drawing = [(request, row) for request, row in rows if request.stage is Stage.RUNNING]
        for request, row in rows:
            if request.stage is Stage.SETTLING:
                self._end_kept(request, row)
            elif request.followers:
                self._fork(request, row)
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

    def _fork(self, leader: Request, row: np.ndarray) -> None:
        """The prompt is eaten: let those who share it go on from here, in slots of their own."""
        kept = self._keep(leader, row)
        followers = [request for request in leader.followers if request.stage is Stage.HELD]
        for request in followers:
            request.start_from, request.logits, request.base = kept, kept.logits, kept.saved.position
            request.tokens, request.prompt_tokens = [], 0
        leader.followers = []
        self._scheduler.add_first(followers)

    def _take(self, request: Request, token: int, row: np.ndarray, logprobs: tuple[TokenLogprob, ...]) -> None:
        """A token was drawn from ``row``, the logits after everything the slot has eaten."""
        was_decided = request.answer.is_decided
        step = request.answer.push(token)
        if request.adjustments is not None:
            request.adjustments.push(token)
        if request.keep_state:
            request.logits = row
        if request.keep_state and step.finish_reason is None:
            if request.answer.is_decided:
                request.snapshot = None
            elif was_decided:
                request.snapshot = (request.fed, self.runner.states.save(request.slot), row)
        if step.finish_reason is None:
            request.tokens.append(token)
            self._post(Delta(request.id, step.text, (token,), logprobs=logprobs))
        elif request.keep_state:
            self._post(Delta(request.id, step.text, (token,), logprobs=logprobs))
            self._settle(request, token, step.finish_reason)
        else:
            self._end(request, step.finish_reason, text=step.text, token_ids=(token,), logprobs=logprobs)

    def _settle(self, request: Request, last: int, reason: str) -> None:
        """Bring the slot to the last accepted token: eat what is missing, or go back to a snapshot and eat from there."""
        request.finish_reason, request.stage = reason, Stage.SETTLING
        request.tokens.append(last)
        del request.tokens[request.prompt_tokens + request.answer.accepted :]
        if request.fed > len(request.tokens):
            assert request.snapshot is not None, "text was taken back that was never held"
            request.fed, saved, request.logits = request.snapshot
            self.runner.states.restore(request.slot, saved)
        if request.due == 0:
            self._end_kept(request, np.asarray(request.logits))

    def _end_kept(self, request: Request, row: np.ndarray) -> None:
        self._end(request, request.finish_reason or "stop", state=self._keep(request, row))

    def _keep(self, request: Request, row: np.ndarray) -> KeptState:
        """The state of a request whose slot has eaten all its tokens; ``row`` are the logits that follow."""
        start = request.start_from
        tokens = (start.tokens if start is not None else ()) + tuple(request.tokens)
        initial = start.initial if start is not None else ""
        return KeptState(self.runner.states.save(request.slot), tokens, np.array(row, dtype=np.float32), initial)

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
        self._scheduler.remove(request)
        heirs = [follower for follower in request.followers if follower.stage is Stage.HELD]
        request.followers = []
        if heirs:
            self._scheduler.add_first([_leader(heirs)])
        del self._requests[request.id]
        now_s = time.perf_counter()
        admitted_s = request.admitted_s or now_s
        first_s = request.first_token_s or now_s
        timings = Timings(
            queue_ms=(admitted_s - request.added_s) * 1e3,
            prefill_ms=(first_s - admitted_s) * 1e3,
            decode_ms=(now_s - first_s) * 1e3,
        )
        self._post(Delta(request.id, text, token_ids, reason, timings, state, error, logprobs))

    def _post(self, delta: Delta) -> None:
        self._outbox[delta.request_id].append(delta)

    def collect(self, request_id: int) -> list[Delta]:
        """What happened to a request since the last call; empties its outbox, and forgets it after its last Delta."""
        with self._lock:
            if request_id not in self._outbox:
                raise RequestError(f"request {request_id} is not known: never added, or its end was collected already")
            deltas, self._outbox[request_id] = self._outbox[request_id], []
            if deltas and deltas[-1].finish_reason is not None:
                del self._outbox[request_id]
            return deltas

    def abort(self, request_id: int) -> None:
        """End a request now with reason "abort" and free its slot; one that has ended is left as it is."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is not None:
                self._end(request, "abort")

    def forget(self, request_id: int) -> None:
        """Abort a request that nobody will collect any more, and drop what it has still in its outbox."""
        with self._lock:
            self.abort(request_id)
            self._outbox.pop(request_id, None)


def _leader(requests: list[Request]) -> Request:
    """The first of some held requests, made to eat the prompt that they share; the rest follow it."""
    leader = requests[0]
    leader.tokens, leader.followers = list(leader.tokens), requests[1:]
    return leader
