"""Stdout is for answers: what libraries, compilers and other programs write there is led to stderr."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import TextIO

_OUT, _ERR = 1, 2
_outside: TextIO | None = None
"""While stdout is led to stderr: a stream to where it led before."""


def answer_stream() -> TextIO:
    """Where answers go: stdout, inside :func:`stdout_on_stderr` the one outside it."""
    return _outside or sys.stdout


@contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """Inside, whatever Python, C and child processes write to stdout goes to stderr, except to :func:`answer_stream`.

    It holds for the whole process, all threads; inside another one it changes nothing.
    """
    global _outside
    if _outside is not None:
        yield
        return
    with ExitStack() as stack:
        outside = _move_descriptor(sys.stdout, stack)
        stack.enter_context(redirect_stdout(sys.stderr))
        _outside = outside
        try:
            yield
        finally:
            _outside = None


def _move_descriptor(stream: TextIO, stack: ExitStack) -> TextIO:
    """Point descriptor 1 to stderr until the stack ends. Returns ``stream``, or one in its place if it writes there."""
    _flush(stream)
    try:
        kept = os.dup(_OUT)
    except OSError:  # it is closed, and so it stays
        return stream
    stack.callback(os.close, kept)
    outside = stream
    if _descriptor(stream) == _OUT:
        outside = stack.enter_context(
            os.fdopen(kept, "w", encoding=stream.encoding, errors=stream.errors, closefd=False)
        )
    stack.callback(os.dup2, kept, _OUT)
    stack.callback(_flush, stream)  # what was kept back inside belongs inside
    try:
        os.dup2(_ERR, _OUT)
    except OSError:  # stderr is closed: what would be written there is dropped
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), _OUT)
    return outside


def _flush(stream: TextIO) -> None:
    """Write out what Python and C keep back."""
    if not getattr(stream, "closed", True):
        stream.flush()
    ctypes.CDLL(None).fflush(None)


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):  # a capture in memory, or closed
        return None
