"""The engine as an HTTP worker sees it: an :class:`EngineClient` over a message socket.

The reader never waits for a client: what a stream does not take is kept for it up to a bound, and beyond that the stream
is broken off and its request cancelled. An engine that dies is told by its socket; everything that waits for it fails then.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kittiwake.server import messages as wire
from kittiwake.server.engine_client import (
    AnswerEvent,
    EngineError,
    EngineStats,
    Failure,
    ModelInfo,
    NamedState,
    PromptScores,
    Submission,
)
from kittiwake.server.metrics import AnswerMetrics, render_metrics
from kittiwake.server.transport import socket_address

logger = logging.getLogger("kittiwake.server")

LOOK_TIMEOUT_S = 30.0
"""An engine that does not even tell how it is, or what states there are, in that time counts as stuck."""
DEADLINE_GRACE_S = 5.0
"""How much later than the engine a worker gives up a request whose time is over: an engine that hangs says nothing."""
_METRICS_TIMEOUT_S = 1.0
_Read = TypeVar("_Read")


class RemoteEngine:
    """One worker's end. Use it as an async context manager; methods as of :class:`EngineClient`."""

    def __init__(self, folder: Path, worker: str, *, max_buffered_bytes: int = 1 << 20) -> None:
        self._address = socket_address(folder)
        self._worker = worker
        self._max_buffered_bytes = max_buffered_bytes
        self._context = zmq.asyncio.Context()
        self._calls = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[msgspec.Raw | None]] = {}
        self._streams: dict[int, RemoteStream] = {}
        self._info: ModelInfo | None = None
        self._is_up = False
        self._closing: Failure | None = None
        self._welcome = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._metrics = AnswerMetrics()

    async def __aenter__(self) -> RemoteEngine:
        self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fail_all(_gone("the HTTP worker ends"))
        tasks = self._close_socket()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        self._context.destroy(linger=0)

    async def wait_ready(self) -> None:
        """Return when the engine takes requests."""
        await self._welcome.wait()

    @property
    def info(self) -> ModelInfo:
        """The model. Raises EngineError (503) before the engine was there for the first time."""
        if self._info is None:
            raise EngineError(Failure("the model is loading", "try again", 503, "engine_loading", 1.0))
        return self._info

    @property
    def is_alive(self) -> bool:
        """Whether there is an engine that has loaded."""
        return self._is_up

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._is_up and self._closing is None

    def stop_taking(self) -> None:
        """Refuse new requests from here on; those that run go on."""
        self._closing = Failure("the server is shutting down", "try another one, or later", 503, "shutting_down", 5.0)

    def break_off(self) -> None:
        """End all that still runs: the server shuts down and its time is over."""
        self.stop_taking()
        for call in list(self._streams):
            self._send(call, wire.Cancel())
        assert self._closing is not None
        self._fail_all(self._closing)

    async def submit(self, submission: Submission) -> RemoteStream:
        """Hand over a request; returns when it stands in the queue."""
        self._check_up()
        call = next(self._calls)
        stream = RemoteStream(self, call, submission.params.n, self._max_buffered_bytes, self._metrics)
        self._streams[call] = stream
        if submission.deadline_s is not None:
            stream.expiry = asyncio.get_running_loop().call_later(
                submission.deadline_s + DEADLINE_GRACE_S, self._expire, call, submission.deadline_s
            )
        try:
            await self._call(call, wire.Submit(submission))
        except BaseException:
            await stream.aclose()
            raise
        return stream

    async def score(self, submission: Submission, top: int) -> PromptScores:
        """Log-probabilities of a prompt."""
        return await self._ask(wire.Score(submission, top), PromptScores)

    async def stats(self) -> EngineStats:
        """What the engine is doing now. Raises EngineError (503) where it is stuck."""
        return await self._look(wire.Stats(), EngineStats)

    async def list_states(self) -> tuple[NamedState, ...]:
        """All named states."""
        return await self._look(wire.ListStates(), tuple[NamedState, ...])

    async def get_state(self, name: str) -> NamedState:
        """One of them."""
        return await self._look(wire.GetState(name), NamedState)

    async def make_state(self, name: str, submission: Submission) -> NamedState:
        """Keep the state after a prompt."""
        return await self._ask(wire.MakeState(name, submission), NamedState)

    async def fork_state(self, name: str, new_name: str) -> NamedState:
        """The same state under a second name."""
        return await self._ask(wire.ForkState(name, new_name), NamedState)

    async def delete_state(self, name: str) -> None:
        """Forget a state."""
        await self._ask(wire.DeleteState(name), type(None))

    async def import_state(self, name: str, path: Path, *, transpose: bool = False) -> NamedState:
        """Keep the state in a file."""
        return await self._ask(wire.ImportState(name, str(path.absolute()), transpose), NamedState)

    async def export_state(self, name: str, path: Path) -> None:
        """Write a state to a file."""
        await self._ask(wire.ExportState(name, str(path.absolute())), type(None))

    async def metrics_text(self) -> str:
        """Figures of all processes of this server. Those of an engine that is gone or busy are from when it last told."""
        with suppress(EngineError, TimeoutError):
            await asyncio.wait_for(self._ask(wire.Stats(), EngineStats), _METRICS_TIMEOUT_S)
        return render_metrics()

    def _check_up(self) -> None:
        if self._closing is not None:
            raise EngineError(self._closing)
        if not self._is_up:
            raise EngineError(_gone("the engine is gone, or loading again"))

    async def _ask(self, verb: wire.Verb, kind: type[_Read]) -> _Read:
        self._check_up()
        value = await self._call(next(self._calls), verb)
        assert value is not None
        return wire.decode_value(value, kind)

    async def _look(self, verb: wire.Verb, kind: type[_Read]) -> _Read:
        """What changes nothing and takes no forward. Raises EngineError (503) where the engine is stuck."""
        try:
            return await asyncio.wait_for(self._ask(verb, kind), LOOK_TIMEOUT_S)
        except TimeoutError:
            raise EngineError(_gone(f"the engine has not answered for {LOOK_TIMEOUT_S:g} s")) from None

    async def _call(self, call: int, body: wire.Call) -> msgspec.Raw | None:
        """Send a call and wait for what answers it. Cancelled, the engine is told."""
        future: asyncio.Future[msgspec.Raw | None] = asyncio.get_running_loop().create_future()
        self._waiting[call] = future
        self._send(call, body)
        try:
            return await future
        except asyncio.CancelledError:
            if call not in self._streams:  # a stream cancels itself
                self._send(call, wire.Cancel())
            raise
        finally:
            self._waiting.pop(call, None)

    def _send(self, call: int, body: wire.Call) -> None:
        """Put a message on its way; the socket keeps what the engine, in the middle of a step, does not take yet."""
        if self._tasks:
            self._socket.send(wire.encode_call(call, body))

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self._worker.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(self._address)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        self._send(0, wire.Hello())

    def _close_socket(self) -> list[asyncio.Task[None]]:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        return [task for task in tasks if task is not asyncio.current_task()]

    async def _watch(self) -> None:
        """Wait until the engine's end of the socket is gone; then begin anew: what was sent to it must not reach another."""
        await recv_monitor_message(self._monitor)
        logger.error("the engine is gone", extra={"running": len(self._streams)})
        self._fail_all(_gone("the engine has died"))
        self._close_socket()
        self._open()

    async def _read(self) -> None:
        while True:
            data = await self._socket.recv()
            try:
                for notice in wire.decode_notices(data):
                    self._take(notice)
            except Exception:  # nobody may wait for what was in it
                logger.exception("what the engine said could not be taken: everything begins anew")
                self._fail_all(_gone("the HTTP worker has lost its answers"))
                self._send(0, wire.Hello())
            await asyncio.sleep(0)  # the readers' turn, however much there is to read

    def _take(self, notice: Any) -> None:
        if isinstance(notice, wire.Welcome):
            self._info, self._is_up = notice.info, True
            self._welcome.set()
        elif isinstance(notice, wire.Lost):
            self._fail_all(
                Failure("the HTTP worker stood still and lost its answers", "", 503, "engine_gone"), down=False
            )
        elif isinstance(notice, wire.Accepted):
            self._settle(notice.call, None)
        elif isinstance(notice, wire.Value):
            self._settle(notice.call, notice.value)
        elif isinstance(notice, wire.Refused):
            self._settle(notice.call, EngineError(notice.failure))
        elif (stream := self._streams.get(notice.call)) is not None:
            stream.push(notice.events)

    def _settle(self, call: int, outcome: msgspec.Raw | EngineError | None) -> None:
        future = self._waiting.get(call)
        if future is None or future.done():
            return
        if isinstance(outcome, EngineError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _fail_all(self, failure: Failure, *, down: bool = True) -> None:
        if down:
            self._is_up = False
        for call in list(self._waiting):
            self._settle(call, EngineError(failure))
        for call, stream in list(self._streams.items()):
            self.drop(call)
            stream.fail(EngineError(failure))

    def _expire(self, call: int, deadline_s: float) -> None:
        """The engine should have ended a request some time ago, and has not."""
        stream = self._streams[call]
        error = EngineError(Failure(f"the request had not ended after {deadline_s:g} s", "", 504, "deadline"))
        self.cancel(call)
        self._settle(call, error)
        stream.fail(error)

    def drop(self, call: int) -> bool:
        """A stream has ended by itself, or nobody reads it any more; whether it was still there."""
        stream = self._streams.pop(call, None)
        if stream is not None and stream.expiry is not None:
            stream.expiry.cancel()
        return stream is not None

    def cancel(self, call: int) -> None:
        """Have the engine end a submission before its next step."""
        if self.drop(call):
            self._send(call, wire.Cancel())


class RemoteStream:
    """The events of one submission."""

    def __init__(
        self, engine: RemoteEngine, call: int, samples: int, max_buffered_bytes: int, metrics: AnswerMetrics
    ) -> None:
        self._engine, self._call = engine, call
        self.expiry: asyncio.TimerHandle | None = None
        """When it is given up; stopped with it."""
        self._running = samples
        self._max_buffered_bytes = max_buffered_bytes
        self._events: list[AnswerEvent] = []
        self._buffered_bytes = 0
        self._error: EngineError | None = None
        self._news: asyncio.Future[None] | None = None
        self._metrics = metrics
        self._last_s: dict[int, float] = {}
        self._started_s = time.perf_counter()

    def __aiter__(self) -> RemoteStream:
        return self

    async def __anext__(self) -> tuple[AnswerEvent, ...]:
        if not self._events:
            if self._error is not None:
                raise self._error
            if self._running == 0:
                raise StopAsyncIteration
            self._news = asyncio.get_running_loop().create_future()
            try:
                await self._news
            finally:
                self._news = None
            if not self._events:  # woken by a failure
                assert self._error is not None
                raise self._error
        events, self._events, self._buffered_bytes = tuple(self._events), [], 0
        return events

    async def aclose(self) -> None:
        """Cancel what has not ended."""
        self._engine.cancel(self._call)
        self._events, self._running = [], 0

    def push(self, events: list[AnswerEvent]) -> None:
        """Take events from the engine. Too many that nobody reads end the stream; what came at once is never too many."""
        now_s = time.perf_counter()
        is_read = not self._events
        for event in events:
            self._observe(event, now_s)
            self._buffered_bytes += _size_bytes(event)
            if event.end is not None:
                self._running -= 1
        self._events += events
        if self._running == 0:
            self._engine.drop(self._call)
        elif self._buffered_bytes > self._max_buffered_bytes and not is_read:
            self._engine.cancel(self._call)
            self._metrics.count_slow_reader()
            logger.warning("a reader is too slow: its answer was broken off", extra={"bytes": self._buffered_bytes})
            self._events, self._running = [], 0
            self.fail(EngineError(Failure("the answer was not read fast enough", "", 503, "slow_reader")))
        self._wake()

    def fail(self, error: EngineError) -> None:
        """End the stream with an error, after what it holds."""
        if self._running or not self._events:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _observe(self, event: AnswerEvent, now_s: float) -> None:
        if event.token_ids:
            before_s = self._last_s.get(event.index)
            if before_s is None:
                self._metrics.first_token(now_s - self._started_s)
            else:
                self._metrics.tokens(len(event.token_ids), now_s - before_s)
            self._last_s[event.index] = now_s
        if event.end is not None:
            self._metrics.ended(event.end)


def _size_bytes(event: AnswerEvent) -> int:
    """About what an event holds on to."""
    return (
        100
        + len(event.text)
        + 8 * len(event.token_ids)
        + sum(100 * (1 + len(logprob.top)) for logprob in event.logprobs)
    )


def _gone(message: str) -> Failure:
    return Failure(message, "try again in a moment", 503, "engine_gone", 2.0)
