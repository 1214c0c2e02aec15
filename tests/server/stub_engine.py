"""An engine for tests of the HTTP side: it says what it is told to, a token an event, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kittiwake.engine.answer import Answer
from kittiwake.engine.request import SamplingParams, TokenLogprob
from kittiwake.server.engine_client import (
    AnswerEnd,
    AnswerEvent,
    EngineError,
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
from kittiwake.text.tokenizer import Tokenizer, load_tokenizer

RECEIPT = "ab" * 32


def stub_info(tokenizer: Tokenizer | None = None, template: TemplateSource | None = None) -> ModelInfo:
    """A model whose tokens are bytes, unless told otherwise, and that talks as g1 does."""
    tokenizer = tokenizer or load_tokenizer("bytes")
    return ModelInfo(
        name="stub",
        digest="cd" * 32,
        family="rwkv7",
        dtype="fp32",
        vocab_size=tokenizer.vocab_size,
        layers=2,
        width=32,
        receipt_digest=RECEIPT,
        created_s=1_700_000_000,
        tokenizer=TokenizerSource.of(tokenizer),
        template=template or TemplateSource("g1"),
    )


@dataclass
class StubEngine:
    """Answers every prompt with ``reply`` and then ends of text, or goes round in it where those are to be ignored."""

    reply: str | bytes | Sequence[int] = "Hello there."
    info: ModelInfo = field(default_factory=stub_info)
    is_alive: bool = True
    is_ready: bool = True
    step_s: float = 0.0
    """Time between two tokens."""
    prefill_s: float = 0.0
    """Time before the first one."""
    burst: int = 1
    """Tokens that are ready together."""
    fail_after: int | None = None
    """Tokens after which an answer ends with a failure."""
    die_after: int | None = None
    """Tokens after which the engine is gone."""
    refuse: Failure | None = None
    """What submissions are refused with."""
    cached_tokens: int = 0
    submitted: list[Submission] = field(default_factory=list)
    cancelled: list[Submission] = field(default_factory=list)
    finished: list[Submission] = field(default_factory=list)
    states: dict[str, NamedState] = field(default_factory=dict)
    imported: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokenizer = self.info.tokenizer.open()

    async def submit(self, submission: Submission) -> StubStream:
        self._check(submission)
        self.submitted.append(submission)
        return StubStream(self, submission)

    def _check(self, submission: Submission) -> None:
        if self.refuse is not None:
            raise EngineError(self.refuse)
        if not submission.prompt_ids and submission.start_from is None:
            raise EngineError(Failure("the prompt is empty", "give at least one token", 400))
        for token in submission.prompt_ids:
            if not 0 <= token < self.info.vocab_size:
                raise EngineError(Failure(f"prompt holds {token}, which is no token id", "", 400))
        if submission.start_from is not None:
            self._known(submission.start_from)

    def _known(self, name: str) -> NamedState:
        if name not in self.states:
            raise EngineError(Failure(f"there is no state {name!r}", "", 404, "state_not_found"))
        return self.states[name]

    def reply_ids(self) -> list[int]:
        """The tokens of the reply."""
        if isinstance(self.reply, str):
            return self.tokenizer.encode(self.reply)
        return list(self.reply)

    def end_id(self) -> int | None:
        """The id that ends a text, if there is one."""
        return self.tokenizer.eos_ids[0] if self.tokenizer.eos_ids else None

    def logprob(self, token: int, params: SamplingParams) -> TokenLogprob:
        """A made-up figure that differs from token to token."""
        top = tuple(
            TokenLogprob(other, -1.0 - rank, self.tokenizer.token_bytes(other))
            for rank, other in enumerate(range(token, token + params.top_logprobs))
            if other < self.info.vocab_size
        )
        return TokenLogprob(token, -token / 64, self.tokenizer.token_bytes(token), top)

    async def score(self, submission: Submission, top: int) -> PromptScores:
        self._check(submission)
        self.submitted.append(submission)
        params = SamplingParams(logprobs=True, top_logprobs=top)
        scored = [self.logprob(token, params) for token in submission.prompt_ids]
        return PromptScores((None, *scored[1:]) if submission.start_from is None else tuple(scored))

    async def stats(self) -> EngineStats:
        running = len(self.submitted) - len(self.finished) - len(self.cancelled)
        return EngineStats(running=running, slots=4, free_slots=max(0, 4 - running))

    async def metrics_text(self) -> str:
        return "# HELP stub_up always\nstub_up 1\n"

    async def list_states(self) -> tuple[NamedState, ...]:
        return tuple(self.states[name] for name in sorted(self.states))

    async def get_state(self, name: str) -> NamedState:
        return self._known(name)

    def _put(self, name: str, tokens: int, initial: str = "") -> NamedState:
        if name in self.states:
            raise EngineError(Failure(f"there is a state {name!r} already", "", 409, "state_exists"))
        self.states[name] = NamedState(name, tokens, 1024, 1_700_000_000, initial=initial)
        return self.states[name]

    async def make_state(self, name: str, submission: Submission) -> NamedState:
        self._check(submission)
        self.submitted.append(submission)
        return self._put(name, len(submission.prompt_ids))

    async def fork_state(self, name: str, new_name: str) -> NamedState:
        return self._put(new_name, self._known(name).tokens)

    async def delete_state(self, name: str) -> None:
        del self.states[self._known(name).name]

    async def import_state(self, name: str, path: Path, *, transpose: bool = False) -> NamedState:
        data = path.read_bytes()
        if data.startswith(b"damaged"):
            raise EngineError(Failure(f"{path} is damaged", "", 422))
        made = self._put(name, 0, "ef" * 32)
        self.imported[name] = data
        return made

    async def export_state(self, name: str, path: Path) -> None:
        path.write_bytes(b"state " + self._known(name).name.encode())


class StubStream:
    """The answer to one submission."""

    def __init__(self, engine: StubEngine, submission: Submission) -> None:
        self._engine, self._submission = engine, submission
        self._events = self._run()
        self._is_over = False

    def __aiter__(self) -> AsyncIterator[tuple[AnswerEvent, ...]]:
        return self

    async def __anext__(self) -> tuple[AnswerEvent, ...]:
        try:
            return await anext(self._events)
        except StopAsyncIteration:
            if not self._is_over:
                self._is_over = True
                self._engine.finished.append(self._submission)
            raise

    async def aclose(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._engine.cancelled.append(self._submission)
        await self._events.aclose()

    async def _run(self) -> AsyncIterator[tuple[AnswerEvent, ...]]:
        engine, submission = self._engine, self._submission
        total = len(submission.prompt_ids)
        if submission.want_progress:
            for part in (total // 2, total):
                yield (AnswerEvent(progress=PromptProgress(total, part, engine.cached_tokens, 1.0)),)
        if engine.prefill_s:
            await asyncio.sleep(engine.prefill_s)
        samples = [self._sample(index) for index in range(submission.params.n)]
        while samples:
            ready: list[AnswerEvent] = []
            for sample in list(samples):
                for _ in range(engine.burst):
                    event = next(sample)
                    ready.append(event)
                    if event.end is not None:
                        samples.remove(sample)
                        break
            if engine.die_after is not None and engine.die_after <= 0:
                raise EngineError(Failure("the engine has stopped", "", 503))
            if engine.die_after is not None:
                engine.die_after -= 1
            yield tuple(ready)
            await asyncio.sleep(engine.step_s)
        if submission.keep_as is not None:
            engine.states.pop(submission.keep_as, None)
            engine._put(submission.keep_as, total)

    def _sample(self, index: int):  # type: ignore[no-untyped-def]
        engine, params = self._engine, self._submission.params.for_sample(index)
        answer = Answer(engine.tokenizer, params)
        ids, end = engine.reply_ids(), engine.end_id()
        for count in range(10**9):
            if engine.fail_after is not None and count >= engine.fail_after:
                failure = Failure("logits are not finite", "", 500)
                yield AnswerEvent(index, end=AnswerEnd("error", failure=failure))
                return
            if count < len(ids) or params.ignore_eos or params.min_tokens > count:
                token = ids[count % len(ids)]
            elif end is not None:
                token = end
            else:
                yield AnswerEvent(index, answer._rest(), end=self._end("stop"))
                return
            step = answer.push(token)
            logprobs = (engine.logprob(token, params),) if params.logprobs else ()
            event = AnswerEvent(index, step.text, (token,), logprobs)
            if step.finish_reason is not None:
                yield replace(event, end=self._end(step.finish_reason))
                return
            yield event

    def _end(self, reason: str) -> AnswerEnd:
        cached = self._engine.cached_tokens
        return AnswerEnd(reason, 1.0, 10.0, 20.0, cached, "hit" if cached else "no_checkpoint")
