"""What all endpoints share: the engine, its tokenizer and template, names, and requests on their way to it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from starlette.requests import Request

from kittiwake.config import ServerConfig
from kittiwake.engine.request import SamplingParams
from kittiwake.errors import KittiwakeError
from kittiwake.server.api_errors import ApiError
from kittiwake.server.engine_client import (
    AnswerEvent,
    AnswerStream,
    EngineClient,
    ModelInfo,
    NamedState,
    PromptScores,
    Submission,
)
from kittiwake.server.gate import is_loopback
from kittiwake.server.schema import SamplingFields
from kittiwake.text.chat import TEMPLATES, ChatTemplate
from kittiwake.text.tokenizer import Tokenizer

LONG_TEXT_CHARS = 20_000
"""Encoding a text of this size takes about a millisecond; longer ones are encoded beside the loop."""
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Served:
    """A model as the endpoints need it."""

    info: ModelInfo
    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None

    @property
    def fingerprint(self) -> str:
        """``system_fingerprint``: where it is the same, the same request with the same seed gets the same bits."""
        return f"fp_{self.info.receipt_digest[:16]}"

    def chat_template(self) -> ChatTemplate:
        """Raises ApiError (400) for a model that was not made for conversations."""
        if self.template is None:
            raise ApiError(
                400,
                f"{self.name} has no chat template: it was not made for conversations (use /v1/completions, or start the "
                f"server with --template: {', '.join(TEMPLATES)}, or a Jinja file)",
                param="messages",
                code="no_chat_template",
            )
        return self.template


@dataclass(frozen=True)
class Head:
    """What every part of one answer begins with."""

    id: str
    created_s: int
    served: Served


class Service:
    """The engine behind the endpoints."""

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self.client, self.config = client, config
        self._served: Served | None = None

    def served(self) -> Served:
        """The model. Raises EngineError (503) while it loads."""
        info = self.client.info
        if self._served is None or self._served.info is not info:
            tokenizer = info.tokenizer.open()
            template = info.template.open(tokenizer) if info.template is not None else None
            self._served = Served(info, self.config.served_model_name or info.name, tokenizer, template)
        return self._served

    def model(self, wanted: str | None) -> Served:
        """The model a request names. Raises ApiError (404) for another one."""
        served = self.served()
        if wanted is not None and wanted != served.name:
            raise ApiError(
                404,
                f"the model {wanted[:200]!r} is not served here; {served.name!r} is",
                param="model",
                code="model_not_found",
            )
        return served

    def check_may_control(self) -> None:
        """Raise ApiError (403) where anyone at all could change, or look at, the states that others work with."""
        if not self.config.api_keys and not is_loopback(self.config.host):
            raise ApiError(403, "states need an API key on a server that others can reach (start it with --api-key)")

    def check_states_of(self, asked: SamplingFields) -> None:
        """The same of a request for text, if it names a state."""
        if asked.state is not None or asked.keep_state is not None:
            self.check_may_control()

    def head(self, prefix: str, served: Served) -> Head:
        """A new answer."""
        return Head(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), served)

    def submission(
        self,
        request: Request,
        asked: SamplingFields,
        ids: Sequence[int],
        params: SamplingParams,
        borders: tuple[int, ...] = (),
    ) -> Submission:
        """A request for the engine."""
        limits = [limit for limit in (asked.timeout_s, self.config.request_timeout_s) if limit]
        return Submission(
            request_id=request.scope["state"]["request_id"],
            prompt_ids=tuple(ids),
            params=params,
            client=request.scope["state"]["client"],
            priority=asked.priority or 0,
            deadline_s=min(limits, default=None),
            cache_prompt=asked.cache_prompt is not False,
            border_tokens=borders,
            want_progress=bool(asked.return_progress),
            start_from=asked.state,
            keep_as=asked.keep_state,
        )

    async def score(self, submissions: Sequence[Submission], top: int) -> list[PromptScores]:
        """The log-probabilities of prompts, all or none. Raises ApiError (504) when their time is up."""
        scoring = [asyncio.ensure_future(self.client.score(one, top)) for one in submissions]
        try:
            async with _deadline(min((one.deadline_s for one in submissions if one.deadline_s), default=None)):
                return await asyncio.gather(*scoring)
        finally:
            for task in scoring:
                task.cancel()
            await asyncio.gather(*scoring, return_exceptions=True)

    async def make_state(self, name: str, submission: Submission) -> NamedState:
        """Keep the state after a prompt. Raises ApiError (504) when its time is up."""
        async with _deadline(self.config.request_timeout_s or None):
            return await self.client.make_state(name, submission)

    @asynccontextmanager
    async def submitted(self, submissions: Sequence[Submission]) -> AsyncIterator[list[AnswerStream]]:
        """Hand requests over, all at once and all or none; whatever has not ended at the end is cancelled."""
        # one after the other, each would wait for a step of the engine that the ones before it take alone
        handing = [asyncio.ensure_future(self.client.submit(submission)) for submission in submissions]
        try:
            yield await asyncio.gather(*handing)
        finally:
            for task in handing:
                task.cancel()
            for stream in await asyncio.gather(*handing, return_exceptions=True):
                if not isinstance(stream, BaseException):
                    await stream.aclose()


def later(submission: Submission, begun_s: float) -> Submission:
    """A request with what is left of its time since ``begun_s`` (of ``time.monotonic``). Raises ApiError (504) where
    nothing is."""
    if submission.deadline_s is None:
        return submission
    left_s = submission.deadline_s - (time.monotonic() - begun_s)
    if left_s <= 0:
        raise _too_late(submission.deadline_s)
    return replace(submission, deadline_s=left_s)


def _too_late(seconds: float | None) -> ApiError:
    return ApiError(504, f"the request had not ended after {seconds:g} s", code="deadline")


@asynccontextmanager
async def _deadline(seconds: float | None) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise _too_late(seconds) from None


async def all_events(streams: Sequence[AnswerStream], n: int) -> AsyncGenerator[tuple[AnswerEvent, ...], None]:
    """Events of several requests as they come; ``index`` counts through, ``n`` samples of each in turn."""
    if len(streams) == 1:
        async for events in streams[0]:
            yield events
        return
    queue: asyncio.Queue[tuple[int, tuple[AnswerEvent, ...] | BaseException | None]] = asyncio.Queue(len(streams))
    tasks = [asyncio.ensure_future(_forward(number, stream, queue)) for number, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            number, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield tuple(replace(one, index=number * n + one.index) for one in item)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(
    number: int,
    stream: AnswerStream,
    queue: asyncio.Queue[tuple[int, tuple[AnswerEvent, ...] | BaseException | None]],
) -> None:
    try:
        async for events in stream:
            await queue.put((number, events))
        await queue.put((number, None))
    except Exception as error:
        await queue.put((number, error))


async def beside(size: int, param: str, work: Callable[[], _Result]) -> _Result:
    """Work on ``size`` characters of ``param``: at once where they are few, else in a thread.

    Raises ApiError for what is refused.
    """
    try:
        return work() if size < LONG_TEXT_CHARS else await asyncio.to_thread(work)
    except (KittiwakeError, ApiError) as error:
        refused = error if isinstance(error, ApiError) else ApiError.of(error)
        refused.param = refused.param or (param if refused.status < 500 else None)
        raise refused from None
