"""A child process of the server: how it is told its job and its end, and what it tells its parent.

A child is a fresh interpreter. Its standard input brings its job as one line of JSON, then words of the parent, and ends
when the parent does, however that ends. Its standard output carries one line of JSON: ready, or why not.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any, NoReturn, TypeVar

import msgspec

from kittiwake.config import EngineConfig, ServerConfig
from kittiwake.errors import KittiwakeError
from kittiwake.server.logs import set_up_logs

EXIT_FAULT = 70
_PR_SET_PDEATHSIG = 1


class EngineJob(msgspec.Struct):
    """What the engine process is to do."""

    parent: int
    folder: str
    model: str | None
    tokenizer: str | None
    template: str | None
    engine: EngineConfig
    server: ServerConfig


class WorkerJob(msgspec.Struct):
    """What an HTTP worker is to do."""

    parent: int
    folder: str
    name: str
    listener: int
    """File descriptor of its bound socket."""
    server: ServerConfig


Job = TypeVar("Job", EngineJob, WorkerJob)


class Parent:
    """The parent's end of a child's standard input and output."""

    def __init__(self) -> None:
        self._status = os.dup(1)
        os.dup2(2, 1)  # whatever else is printed goes where the log goes
        self._read = b""
        self.is_gone = False

    def fileno(self) -> int:
        """What to wait on for words of the parent."""
        return 0

    def job(self, kind: type[Job], process: str) -> Job:
        """The job; also ties this process to its parent and sets up its log."""
        while b"\n" not in self._read and not self.is_gone:
            self._read_more()
        if self.is_gone:
            sys.exit(0)
        line, _, self._read = self._read.partition(b"\n")
        job = msgspec.json.decode(line, type=kind)
        set_up_logs(job.server.log_format, getattr(job, "name", process))
        # A terminal's Ctrl-C and a service manager's signals are for the parent, which tells its children.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if sys.platform == "linux":  # a child deep in a step dies with its parent too
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != job.parent:
            sys.exit(0)
        return job

    def words(self) -> list[str]:
        """What the parent has said since the last time; waits until it says something, or is gone."""
        self._read_more()
        *lines, self._read = self._read.split(b"\n")
        return [line.decode() for line in lines]

    def tell_ready(self) -> None:
        """This process does its job now."""
        self._tell({"ready": True})

    def tell_failure(self, error: KittiwakeError) -> NoReturn:
        """It cannot be done; ends the process."""
        self._tell({"message": error.message, "hint": error.hint, "exit_code": error.exit_code})
        sys.exit(error.exit_code)

    def _read_more(self) -> None:
        data = os.read(0, 1 << 16)
        self.is_gone = not data
        self._read += data

    def _tell(self, what: dict[str, Any]) -> None:
        try:
            os.write(self._status, json.dumps(what).encode() + b"\n")
        except BrokenPipeError:
            sys.exit(0)


def encode_job(job: EngineJob | WorkerJob) -> bytes:
    """The line that a child reads."""
    return msgspec.json.encode(job) + b"\n"
