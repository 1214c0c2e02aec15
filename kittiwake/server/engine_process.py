"""The engine process: take calls → step → post what came of it. It never waits for anyone while there is work.

Run as ``python -m kittiwake.server.engine_process`` by the supervisor.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import msgspec
import zmq

from kittiwake.engine.stats import StepReport
from kittiwake.errors import KittiwakeError, RequestError
from kittiwake.server import messages as wire
from kittiwake.server.child import EngineJob, Parent
from kittiwake.server.engine_host import FAULT, Caller, EngineHost, failure_of
from kittiwake.server.metrics import EngineFigures, batch_width, log_missing_room, rows, step_seconds
from kittiwake.server.transport import EngineSocket
from kittiwake.server.watchdog import Watchdog

logger = logging.getLogger("kittiwake.engine")

_RETRY_MS = 20
"""How soon a worker that took nothing is tried again when there is nothing else to do."""
_MAX_BAD_STEPS = 3
"""Steps that fail one after the other before the engine gives itself up: a lost device fails for ever."""
EXIT_BROKEN = 1
PACKAGED_NAME = "kittiwake-demo"
"""What the packaged model is called."""


class EngineLoop:
    """The loop. ``parent`` tells which workers are gone and when to stop; a step may take ``stall_timeout_s`` (0: for ever)."""

    def __init__(self, host: EngineHost, socket: EngineSocket, parent: Parent, *, stall_timeout_s: float = 0.0) -> None:
        self._host, self._socket, self._parent = host, socket, parent
        self._watchdog = Watchdog(stall_timeout_s)
        self._figures = EngineFigures()
        self._bad_steps = 0
        self._is_stopping = False
        self._poller = zmq.Poller()
        self._poller.register(socket.socket, zmq.POLLIN)
        self._poller.register(parent.fileno(), zmq.POLLIN)
        self._rows = {kind: rows.labels(kind) for kind in ("prefill", "decode")}
        host.engine.observer = self._observe

    def run(self) -> None:
        """Serve until the parent says stop or is gone."""
        while not self._is_stopping:
            if self._host.has_work:
                timeout_ms: int | None = 0
                self._watchdog.feed()
            else:
                self._watchdog.rest()
                timeout_ms = _RETRY_MS if self._socket.has_backlog else None
            if any(source == self._parent.fileno() for source, _ in self._poller.poll(timeout_ms)):
                self._hear_parent()
            for worker, message in self._socket.receive():
                self._take(worker, message)
            self._step()
            for worker, notices in self._host.news().items():
                self._post(worker, notices)
            if self._socket.has_backlog:
                self._socket.flush()

    def _hear_parent(self) -> None:
        for word in self._parent.words():
            if word == "stop":
                self._is_stopping = True
            elif word.startswith("gone "):
                worker = word.removeprefix("gone ").encode()
                self._socket.forget(worker)
                self._drop(worker, "its process is gone")
        if self._parent.is_gone:
            self._is_stopping = True

    def _take(self, worker: bytes, message: bytes) -> None:
        """Do what a worker asks for, or begin to."""
        envelope = wire.decode_envelope(message)
        caller = Caller(worker, envelope.call)
        try:
            call = wire.decode_call(envelope.body)
        except (msgspec.DecodeError, KittiwakeError) as error:  # the latter of values that check themselves
            failure = failure_of(RequestError(f"the request cannot be read: {error}"))
            self._post(worker, [wire.Refused(envelope.call, failure)])
            return
        if isinstance(call, wire.Hello):
            self._drop(worker, "it began anew")
            self._post(worker, [wire.Welcome(self._host.info)])
        elif isinstance(call, wire.Cancel):
            self._host.cancel(caller)
        elif isinstance(call, wire.Submit):
            self._submit(caller, call)
        else:
            answer = self._host.answer(caller, call)
            if isinstance(call, wire.Stats):
                self._figures.update(self._host.engine.stats())
            if answer is not None:
                self._post(worker, [answer])

    def _submit(self, caller: Caller, call: wire.Submit) -> None:
        try:
            self._host.submit(caller, call.submission)
        except KittiwakeError as error:
            self._post(caller.worker, [wire.Refused(caller.call, failure_of(error))])
        except Exception:
            logger.exception("a request could not be taken")
            self._post(caller.worker, [wire.Refused(caller.call, FAULT)])
        else:
            self._post(caller.worker, [wire.Accepted(caller.call)])

    def _step(self) -> None:
        try:
            self._host.step()
            done = self._host.step_job()
        except KittiwakeError as error:  # told to the requests of the step
            logger.error("a step was broken off: %s", error.message)
        except Exception:
            self._bad_steps += 1
            logger.exception("a step failed", extra={"in_a_row": self._bad_steps})
            if self._bad_steps >= _MAX_BAD_STEPS:
                logger.critical("the engine cannot go on")
                sys.exit(EXIT_BROKEN)
        else:
            self._bad_steps = 0
            if done is not None:
                caller, notice = done
                self._post(caller.worker, [notice])

    def _post(self, worker: bytes, notices: list[wire.Notice]) -> None:
        if not self._socket.post(worker, notices):
            self._drop(worker, "it takes nothing")

    def _drop(self, worker: bytes, why: str) -> None:
        """End all that a worker began."""
        count = self._host.cancel_worker(worker)
        if count:
            told = {"worker": worker.decode(errors="replace"), "requests": count, "why": why}
            logger.warning("the requests of a worker were ended", extra=told)

    def _observe(self, report: StepReport) -> None:
        step_seconds.observe(report.step_ms / 1e3)
        batch_width.observe(report.sequences)
        self._rows["prefill"].inc(report.prefill_rows)
        self._rows["decode"].inc(report.decode_rows)


def main() -> None:
    """Load the model, tell the parent, serve."""
    parent = Parent()
    job = parent.job(EngineJob, "engine")
    log_missing_room()
    from kittiwake.engine.named_states import NamedStates
    from kittiwake.llm import LLM

    logger.info("loading the model", extra={"model": job.model or "packaged"})
    try:
        llm = LLM(job.model, tokenizer=job.tokenizer, config=job.engine)
        folder = None if job.server.states_dir is None else Path(job.server.states_dir)
        states = NamedStates(llm.state_owner(), budget_bytes=job.server.states_bytes, folder=folder)
        name = job.server.served_model_name or (PACKAGED_NAME if job.model is None else "")
        host = EngineHost(llm, states, name=name, template=job.template, log_prompts=job.server.log_prompts)
    except KittiwakeError as error:
        parent.tell_failure(error)
    except (OSError, MemoryError) as error:
        parent.tell_failure(KittiwakeError(f"the engine cannot start: {str(error) or 'out of memory'}"))
    socket = EngineSocket(Path(job.folder))
    parent.tell_ready()
    logger.info("ready", extra={"model": host.info.name, "slots": job.engine.slots, "load_ms": llm.loaded.load_ms})
    try:
        EngineLoop(host, socket, parent, stall_timeout_s=job.server.stall_timeout_s).run()
    finally:
        socket.close()
        llm.close()
    logger.info("stopped")


if __name__ == "__main__":
    main()
