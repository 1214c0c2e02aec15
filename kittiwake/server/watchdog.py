"""The end of a process that makes no progress."""

from __future__ import annotations

import faulthandler
import time


class Watchdog:
    """Ends this process, with a traceback on stderr, when nobody says for too long that there is progress.

    Its thread needs nothing of Python, so a step that hangs deep in a library is ended too.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._fed_s = 0.0

    def feed(self) -> None:
        """There is progress; from here on the time runs again."""
        now_s = time.monotonic()
        if self._seconds and now_s - self._fed_s > min(1.0, self._seconds / 4):
            faulthandler.dump_traceback_later(self._seconds, exit=True)
            self._fed_s = now_s

    def rest(self) -> None:
        """There is nothing to do."""
        if self._fed_s:
            faulthandler.cancel_dump_traceback_later()
            self._fed_s = 0.0
