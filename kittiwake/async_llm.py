"""``AsyncLLM``: the engine for asyncio, driven by a thread of its own.

The event loop never waits for a step: what it wants is put on a list that the thread reads between two steps, and what
comes out is handed to the loop of whoever asked. The thread sleeps while there is nothing to do.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from kittiwake.chat import ChatCompletion, ChatDelta, Messages, prepare, split_completion, split_delta
from kittiwake.engine.engine import Engine
from kittiwake.engine.request import Completion, Delta, KeptState, SamplingParams
from kittiwake.errors import UsageError
from kittiwake.llm import LLM, join_completion
from kittiwake.text.chat import ChatTemplate
from kittiwake.text.reasoning import ReasoningSplitter
from kittiwake.text.tokenizer import Prompt

# Encoding a text of this size takes about a millisecond; longer ones are encoded beside the loop.
_LONG_TEXT_CHARS = 20_000


class AsyncLLM:
    """A loaded model for asyncio; arguments as of :class:`LLM`, whose loading takes seconds: ``await AsyncLLM.load(...)``
    does it beside the loop.

    Any number of requests may be in flight, from any loop; they are batched together, and each gets the bits it would
    get alone. Cancelling a task, or closing an iterator, ends its request before the next step. Close it when done
    (``async with``, or :meth:`aclose`): what is still in flight then fails with UsageError.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self._start(LLM(model, **options))

    @classmethod
    async def load(cls, model: str | Path | None = None, **options: Any) -> AsyncLLM:
        """Load a model without holding up the loop."""
        return cls.from_llm(await asyncio.to_thread(LLM, model, **options))

    @classmethod
    def from_llm(cls, llm: LLM) -> AsyncLLM:
        """Over an LLM, which is closed together with it."""
        self = cls.__new__(cls)
        self._start(llm)
        return self

    def _start(self, llm: LLM) -> None:
        self.llm = llm
        self._driver = _Driver(llm.engine)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End what is in flight, stop the thread and close the model. Twice is harmless."""
        await asyncio.to_thread(self._driver.close)
        self.llm.close()

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, start_from: KeptState | None = None
    ) -> Completion:
        """Answer one prompt; gather several calls to have them batched. Raises as :meth:`LLM.generate`."""
        wanted = _one(params)
        ids = await self._ids(prompt)
        deltas = self._deltas(ids, wanted, start_from=start_from)
        async with aclosing(deltas):
            return join_completion(len(ids), [delta async for delta in deltas], wanted)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        keep_state: bool = False,
        start_from: KeptState | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Answer one prompt piece by piece; the last Delta has a finish_reason."""
        deltas = self._deltas(await self._ids(prompt), _one(params), keep_state=keep_state, start_from=start_from)
        async with aclosing(deltas):
            async for delta in deltas:
                yield delta

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        template: str | Path | ChatTemplate | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> ChatCompletion:
        """Answer a conversation, as :meth:`LLM.chat`."""
        prompt = prepare(self.llm.chat_template(template), self.llm.tokenizer, messages, params, options)
        return split_completion(await self.generate(prompt.ids, prompt.params), prompt.opening)

    async def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        template: str | Path | ChatTemplate | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[ChatDelta, None]:
        """The same piece by piece, reasoning apart."""
        prompt = prepare(self.llm.chat_template(template), self.llm.tokenizer, messages, params, options)
        splitter = ReasoningSplitter(prompt.opening)
        deltas = self._deltas(prompt.ids, prompt.params)
        async with aclosing(deltas):
            async for delta in deltas:
                yield split_delta(splitter, delta)

    async def _ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if len(prompt) < _LONG_TEXT_CHARS:
            return self.llm.encode(prompt)
        return await asyncio.to_thread(self.llm.encode, prompt)

    async def _deltas(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        keep_state: bool = False,
        start_from: KeptState | None = None,
    ) -> AsyncGenerator[Delta, None]:
        self._driver.engine.check(ids, params, start_from)
        stream = _Stream(asyncio.get_running_loop())
        self._driver.add(stream, lambda engine: engine.add(ids, params, keep_state=keep_state, start_from=start_from))
        try:
            while True:
                item = await stream.queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item.error is not None:
                    raise item.error
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self._driver.drop(stream)


class _Stream:
    """One request's way back to the loop it came from."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.queue: asyncio.Queue[Delta | BaseException] = asyncio.Queue()

    def put(self, items: Sequence[Delta | BaseException]) -> None:
        """Hand items over, from the driver's thread. A loop that is closed has nobody left to read them."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._put_now, items)

    def _put_now(self, items: Sequence[Delta | BaseException]) -> None:
        for item in items:
            self.queue.put_nowait(item)


class _Driver:
    """The thread that steps the engine, and the list of what it is asked to do between steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._news = threading.Condition()
        self._joining: list[tuple[_Stream, Callable[[Engine], int]]] = []
        self._leaving: list[_Stream] = []
        self._is_closed = False
        self._running: dict[_Stream, int] = {}  # touched by the thread alone
        self._thread = threading.Thread(target=self._drive, name="kittiwake-engine", daemon=True)
        self._thread.start()

    def add(self, stream: _Stream, join: Callable[[Engine], int]) -> None:
        """Have a request added before the next step. Raises UsageError once closed."""
        with self._news:
            if self._is_closed:
                raise _closed()
            self._joining.append((stream, join))
            self._news.notify()

    def drop(self, stream: _Stream) -> None:
        """Have a request ended before the next step; one that has ended is left as it is."""
        with self._news:
            self._leaving.append(stream)
            self._news.notify()

    def close(self) -> None:
        """End everything and wait for the thread."""
        with self._news:
            self._is_closed = True
            self._news.notify()
        self._thread.join()

    def _drive(self) -> None:
        while self._take_news():
            try:
                self.engine.step()
            except BaseException as error:
                # The engine has ended the requests that were in the step; were there none, it cannot go on.
                if not self._deliver(error):
                    self._end_all(error)
            self._deliver()
        self._end_all(_closed())

    def _take_news(self) -> bool:
        """Wait until there is something to do, and let requests in and out. False when it is time to end."""
        with self._news:
            self._news.wait_for(lambda: self._is_closed or self._joining or self._leaving or self._running)
            joining, self._joining = self._joining, []
            leaving, self._leaving = set(self._leaving), []
            if self._is_closed:
                self._running.update({stream: 0 for stream, _ in joining})
                return False
        for stream, join in joining:
            if stream in leaving:
                continue
            try:
                self._running[stream] = join(self.engine)
            except BaseException as error:
                stream.put([error])
        for stream in leaving & self._running.keys():
            self.engine.forget(self._running.pop(stream))
        return True

    def _deliver(self, cause: BaseException | None = None) -> int:
        """Hand out what the step gave; returns how many requests it ended. ``cause`` is why, where it broke off."""
        ended = 0
        for stream, request in list(self._running.items()):
            deltas = self.engine.collect(request)
            if deltas and deltas[-1].error is not None and cause is not None:
                deltas[-1].error.__cause__ = cause
            if deltas:
                stream.put(deltas)
            if deltas and deltas[-1].finish_reason is not None:
                del self._running[stream]
                ended += 1
        return ended

    def _end_all(self, error: BaseException) -> None:
        for stream, request in self._running.items():
            self.engine.forget(request)
            stream.put([error])
        self._running.clear()


def _closed() -> UsageError:
    return UsageError("this AsyncLLM is closed")


def _one(params: SamplingParams | None) -> SamplingParams:
    wanted = params or SamplingParams()
    if wanted.n != 1:
        raise UsageError(f"AsyncLLM answers once a call, params ask for n {wanted.n}", "gather calls with other seeds")
    return wanted
