"""The engine behind the message socket: calls → engine requests, what a step gives → events, verbs on named states."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kittiwake.engine import named_states
from kittiwake.engine.engine import Engine
from kittiwake.engine.named_states import NamedStates
from kittiwake.engine.request import CacheHints, Delta, KeptState, RequestOptions, TokenLogprob
from kittiwake.engine.scoring import SCORE_ROWS, Given, Scored, Steps, prefill_steps, score_steps
from kittiwake.errors import (
    DeadlineError,
    KittiwakeError,
    OutputError,
    QueueFullError,
    RequestError,
    StateExistsError,
    StateFileError,
    StateMissingError,
    UsageError,
)
from kittiwake.llm import LLM
from kittiwake.server import messages as wire
from kittiwake.server.engine_client import (
    AnswerEnd,
    EngineStats,
    Failure,
    ModelInfo,
    NamedState,
    PromptProgress,
    PromptScores,
    Submission,
    TemplateSource,
    TokenizerSource,
)

logger = logging.getLogger("kittiwake.engine")

_CODES = {
    QueueFullError: "queue_full",
    DeadlineError: "deadline",
    StateMissingError: "state_not_found",
    StateExistsError: "state_exists",
}
FAULT = Failure("the engine has failed at this request", "the server's log says more", 500)
"""What is told of an error that nobody expected."""
_FIGURES_A_STEP = 4096
"""Log-probabilities of a prompt that are written down between two steps of the engine: some ten milliseconds."""


def failure_of(error: KittiwakeError) -> Failure:
    """An error as it is sent, with the word that programs know it by."""
    if isinstance(error, OutputError):  # where the server keeps its files is nothing to a client
        logger.error("a state cannot be written: %s", error)
        return Failure("the server cannot write the state to its disk", "its log says why", 507, "not_written")
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), "")
    return replace(Failure.of(error), code=code, retry_after_s=getattr(error, "retry_after_s", None))


class Caller(NamedTuple):
    """Which call of which worker something belongs to."""

    worker: bytes
    call: int


@dataclass
class _Sample:
    """One completion of a submission inside the engine."""

    caller: Caller
    index: int
    keep_as: str | None
    added_s: float
    request_id: str
    text: list[str] | None = None
    """The answer so far, where it is to be logged."""


@dataclass
class _Job:
    """A verb that takes several forwards."""

    caller: Caller
    steps: Steps[Any]
    finish: Callable[[Any], object]


class EngineHost:
    """An LLM and its named states. Not thread-safe: one loop drives it."""

    def __init__(
        self, llm: LLM, states: NamedStates, *, name: str, template: str | None = None, log_prompts: bool = False
    ) -> None:
        self._llm, self._states, self._log_prompts = llm, states, log_prompts
        self.engine: Engine = llm.engine
        self.info = _describe(llm, name, template)
        self._samples: dict[int, _Sample] = {}
        self._requests: dict[Caller, list[int]] = {}
        self._jobs: deque[_Job] = deque()
        chunk = llm.config.prefill_chunk
        self._job_rows = min(chunk, SCORE_ROWS) if chunk > 0 else SCORE_ROWS
        """Most rows in a forward of a verb, which stands between two steps of those who decode."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.engine.has_work or bool(self._jobs)

    @property
    def running(self) -> int:
        """Submissions that have not ended."""
        return len(self._requests)

    def submit(self, caller: Caller, submission: Submission) -> None:
        """Queue a submission. Raises KittiwakeError for one that cannot be taken."""
        if submission.keep_as is not None:
            if submission.params.n != 1:
                raise RequestError(f"a state is kept of one completion, n is {submission.params.n}")
            named_states.check_name(submission.keep_as)
        options = RequestOptions(
            client=submission.client,
            priority=submission.priority,
            deadline_s=submission.deadline_s,
            cache=CacheHints(use=submission.cache_prompt, borders=submission.border_tokens),
            progress=submission.want_progress,
        )
        requests = self.engine.add_samples(
            submission.prompt_ids,
            submission.params,
            keep_state=submission.keep_as is not None,
            start_from=self._start(submission),
            options=options,
        )
        now_s = time.perf_counter()
        for index, request in enumerate(requests):
            text: list[str] | None = [] if self._log_prompts else None
            self._samples[request] = _Sample(caller, index, submission.keep_as, now_s, submission.request_id, text)
        self._requests[caller] = requests
        self._log_prompt(submission)

    def _log_prompt(self, submission: Submission) -> None:
        if not self._log_prompts:
            return
        told: dict[str, object] = {"request_id": submission.request_id}
        try:
            told["prompt"] = self._llm.decode(submission.prompt_ids)
        except KittiwakeError:  # ids of rows that the model has and its tokenizer does not
            told["prompt_ids"] = submission.prompt_ids
        logger.info("prompt", extra=told)

    def cancel(self, caller: Caller) -> None:
        """End what a call began; nothing is said of it any more."""
        for request in self._requests.pop(caller, []):
            self.engine.forget(request)
            self._samples.pop(request, None)
        self._jobs = deque(job for job in self._jobs if job.caller != caller)

    def cancel_worker(self, worker: bytes) -> int:
        """End everything that a worker began; how much that was."""
        callers = {caller for caller in self._requests if caller.worker == worker}
        callers |= {job.caller for job in self._jobs if job.caller.worker == worker}
        for caller in callers:
            self.cancel(caller)
        return len(callers)

    def step(self) -> None:
        """One step of the engine, and one forward of the verb that waits longest. Raises what the engine raised."""
        if self.engine.has_work:
            self.engine.step()

    def step_job(self) -> tuple[Caller, wire.Notice] | None:
        """One forward of a verb; its answer, if that was the last."""
        if not self._jobs:
            return None
        job = self._jobs.popleft()
        try:
            next(job.steps)
        except StopIteration as end:
            result = end.value
        except KittiwakeError as error:
            return job.caller, wire.Refused(job.caller.call, failure_of(error))
        except Exception:
            logger.exception("a verb failed")
            return job.caller, wire.Refused(job.caller.call, FAULT)
        else:
            self._jobs.append(job)
            return None
        return job.caller, answered(job.caller.call, lambda: job.finish(result))

    def news(self) -> dict[bytes, list[wire.Notice]]:
        """What the steps since the last time gave, by worker."""
        found: dict[Caller, list[wire.EventOut]] = {}
        for delta in self.engine.collect_all():
            sample = self._samples.get(delta.request_id)
            if sample is None:
                continue
            found.setdefault(sample.caller, []).append(self._event(sample, delta))
            if sample.text is not None:
                sample.text.append(delta.text)
            if delta.finish_reason is not None:
                self._forget(delta.request_id, sample.caller)
                if sample.text is not None:
                    told = {"request_id": sample.request_id, "index": sample.index, "answer": "".join(sample.text)}
                    logger.info("answer", extra=told)
        notices: dict[bytes, list[wire.Notice]] = {}
        for caller, events in found.items():
            notices.setdefault(caller.worker, []).append(wire.News(caller.call, events))
        return notices

    def _forget(self, request: int, caller: Caller) -> None:
        del self._samples[request]
        left = self._requests[caller]
        left.remove(request)
        if not left:
            del self._requests[caller]

    def _event(self, sample: _Sample, delta: Delta) -> wire.EventOut:
        if delta.finish_reason is None and delta.progress is None:  # nearly always
            return wire.EventOut(sample.index, delta.text, delta.token_ids, delta.logprobs)
        progress = None
        if delta.progress is not None:
            elapsed_ms = (time.perf_counter() - sample.added_s) * 1e3
            told = delta.progress
            progress = PromptProgress(total=told.total, processed=told.done, cached=told.cached, elapsed_ms=elapsed_ms)
        end = self._end(sample, delta) if delta.finish_reason is not None else None
        return wire.EventOut(sample.index, delta.text, delta.token_ids, delta.logprobs, progress, end)

    def _end(self, sample: _Sample, delta: Delta) -> AnswerEnd:
        reason, failure = delta.finish_reason or "", None
        if delta.error is not None:
            failure = failure_of(delta.error)
        elif sample.keep_as is not None and delta.state is not None:
            reason, failure = self._keep(sample.keep_as, delta.state, reason)
        cache = delta.cache
        timings = delta.timings
        return AnswerEnd(
            reason,
            queue_ms=timings.queue_ms if timings else 0.0,
            prefill_ms=timings.prefill_ms if timings else 0.0,
            decode_ms=timings.decode_ms if timings else 0.0,
            cached_tokens=cache.cached_tokens if cache else 0,
            cache="" if cache is None else cache.miss or "hit",
            failure=failure,
        )

    def _keep(self, name: str, state: KeptState, reason: str) -> tuple[str, Failure | None]:
        """Keep the state after an answer; how that ends, and why not as it did."""
        try:
            self._states.save(name, state, replace=True)
        except KittiwakeError as error:
            return "error", failure_of(error)
        except Exception:  # the others' answers go on
            logger.exception("a state could not be kept")
            return "error", FAULT
        return reason, None

    def answer(self, caller: Caller, verb: wire.Verb) -> wire.Notice | None:
        """Do a verb, or begin one that takes several forwards: then there is no answer yet."""
        call = caller.call
        if isinstance(verb, wire.Score):
            return self._begin(caller, lambda: self._scoring(caller, verb))
        if isinstance(verb, wire.MakeState):
            return self._begin(caller, lambda: self._making(caller, verb))
        if isinstance(verb, wire.Stats):
            return answered(call, self.stats)
        if isinstance(verb, wire.ListStates):
            return answered(call, lambda: [self._shown(state) for state in self._states.list()])
        if isinstance(verb, wire.GetState):
            return answered(call, lambda: self._shown(self._states.get(verb.name)))
        if isinstance(verb, wire.ForkState):
            return answered(call, lambda: self._shown(self._states.fork(verb.name, verb.new_name)))
        if isinstance(verb, wire.DeleteState):
            return answered(call, lambda: self._states.delete(verb.name))
        if isinstance(verb, wire.ImportState):
            return answered(call, lambda: self._import(verb))
        return answered(call, lambda: self._export(verb))

    def stats(self) -> EngineStats:
        """Figures of the engine: plain fields, and all the others by name."""
        found = self.engine.stats()
        return EngineStats(
            running=found.running,
            waiting=found.waiting,
            free_slots=found.free_slots,
            slots=found.slots,
            values=dict(_figures(found)),
        )

    def _begin(self, caller: Caller, make: Callable[[], _Job]) -> wire.Notice | None:
        try:
            self._jobs.append(make())
        except KittiwakeError as error:
            return wire.Refused(caller.call, failure_of(error))
        except Exception:
            logger.exception("a verb failed")
            return wire.Refused(caller.call, FAULT)
        return None

    def _scoring(self, caller: Caller, verb: wire.Score) -> _Job:
        ids = verb.submission.prompt_ids
        start = self._start(verb.submission)
        self.engine.check(ids, verb.submission.params, start)
        self._log_prompt(verb.submission)
        given = Given(np.asarray(ids, dtype=np.int64), start)
        steps = score_steps(self._llm.loaded.model, [given], top=verb.top, max_rows=self._job_rows)
        return _Job(caller, self._scores(ids, steps), lambda scores: scores)

    def _scores(self, ids: tuple[int, ...], steps: Steps[list[Scored]]) -> Steps[PromptScores]:
        """Scores as they are told; those of a long prompt take longer to write down than others may be kept waiting."""
        scored = (yield from steps)[0]
        tokens: list[TokenLogprob | None] = [None] * (len(ids) - len(scored.token_ids))
        places = max(1, _FIGURES_A_STEP // (1 + scored.top_ids.shape[1]))
        for place, token in enumerate(scored.token_ids.tolist()):
            if place % places == 0:
                yield
            pairs = zip(scored.top_ids[place].tolist(), scored.top_log_probs[place].tolist(), strict=True)
            top = tuple(TokenLogprob(other, value, self._bytes(other)) for other, value in pairs)
            tokens.append(TokenLogprob(token, float(scored.log_probs[place]), self._bytes(token), top))
        return PromptScores(tuple(tokens))

    def _bytes(self, token: int) -> bytes:
        tokenizer = self._llm.tokenizer
        return tokenizer.token_bytes(token) if tokenizer.is_valid(token) else b""

    def _making(self, caller: Caller, verb: wire.MakeState) -> _Job:
        named_states.check_name(verb.name)
        if any(state.name == verb.name for state in self._states.list()):
            raise StateExistsError(f"there is a state {verb.name!r} already", "delete it first, or take another name")
        start = self._start(verb.submission)
        ids = verb.submission.prompt_ids
        self.engine.check(ids, verb.submission.params, start)
        self._log_prompt(verb.submission)
        given = Given(np.asarray(ids, dtype=np.int64), start)
        steps = prefill_steps(self._llm.loaded.model, given, max_rows=self._job_rows)
        return _Job(caller, steps, lambda kept: self._shown(self._states.save(verb.name, kept)))

    def _import(self, verb: wire.ImportState) -> NamedState:
        path = Path(verb.path)
        try:
            return self._shown(self._states.upload(verb.name, path))
        except StateFileError as error:
            saved = error
        try:
            kept = self._llm.load_initial_state(path, transpose=verb.transpose)
        except StateFileError as error:
            raise StateFileError(
                f"the file is neither a saved state ({saved.message}) nor a tuned initial state ({error.message})"
            ) from None
        return self._shown(self._states.save(verb.name, kept))

    def _export(self, verb: wire.ExportState) -> None:
        self._llm.save_state(self._states.get(verb.name).kept, Path(verb.path))

    def _start(self, submission: Submission) -> KeptState | None:
        return None if submission.start_from is None else self._states.get(submission.start_from).kept

    @staticmethod
    def _shown(state: named_states.NamedState) -> NamedState:
        kept = state.kept
        return NamedState(
            state.name, state.tokens, state.nbytes, int(state.created_s), digest=kept.saved.digest, initial=kept.initial
        )


def answered(call: int, work: Callable[[], object]) -> wire.Notice:
    """What comes of a verb, as the answer to its call."""
    try:
        return wire.Value(call, wire.encode_value(work()))
    except KittiwakeError as error:
        return wire.Refused(call, failure_of(error))
    except Exception:
        logger.exception("a verb failed")
        return wire.Refused(call, FAULT)


def _figures(value: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of nested dataclasses and mappings by name: ``cache_disk_bytes``, ``cache_hits_memory``."""
    if isinstance(value, Mapping):
        pairs = [(str(key), item) for key, item in value.items()]
    else:
        pairs = [(one.name, getattr(value, one.name)) for one in fields(value)]
    for name, item in pairs:
        if isinstance(item, int | float):
            yield prefix + name, float(item)
        elif isinstance(item, Mapping) or is_dataclass(item):
            yield from _figures(item, f"{prefix}{name}_")


def _describe(llm: LLM, name: str, template: str | None) -> ModelInfo:
    """What workers need to know of the model."""
    loaded = llm.loaded
    try:
        source = TemplateSource.of(llm.chat_template(template))
    except UsageError:
        if template is not None:
            raise
        source = None
    receipt = llm.receipt()
    return ModelInfo(
        name=name or (loaded.path.stem if loaded.path.is_file() else loaded.path.name),
        digest=receipt["model"]["digest"],
        family=loaded.model.config.family,
        dtype=loaded.dtype,
        vocab_size=llm.vocab_size,
        layers=loaded.model.config.layers,
        width=loaded.model.config.width,
        receipt_digest=receipt["digest"],
        created_s=int(time.time()),
        tokenizer=TokenizerSource.of(llm.tokenizer),
        template=source,
    )
