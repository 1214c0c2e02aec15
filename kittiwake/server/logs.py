"""Log lines on stderr, as text or JSON, one write a line. None holds text of a prompt or an answer unless asked for."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


def set_up_logs(log_format: str, process: str) -> None:
    """Have this process log in one format; ``process`` names it in every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if log_format == "json" else _TextFormatter(process))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("kittiwake").setLevel(logging.INFO)


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    """What was handed over as ``extra``."""
    return {name: value for name, value in vars(record).items() if name not in _PLAIN}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _JsonFormatter(logging.Formatter):
    """One object a line: time, level, process, message, the extras, and a traceback where there is one."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _TextFormatter(logging.Formatter):
    """The same for people: ``time level process message key=value``."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        extras = "".join(f" {name}={_shown(value)}" for name, value in _extras(record).items())
        line = f"{_time(record)} {record.levelname.lower()} {self._process} {record.getMessage()}{extras}"
        if not line.isprintable():  # what a client sent makes no second line, and commands no terminal
            line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    is_plain = text.isprintable() and not any(char.isspace() or char in '"=' for char in text)
    return text if text and is_plain else json.dumps(text)
