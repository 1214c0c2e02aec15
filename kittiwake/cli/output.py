"""What the commands print. JSON and answers go to stdout; progress, notes, warnings and errors to stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from kittiwake.stdout import answer_stream

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

# Where stderr is no terminal, work that takes longer than this says so, once in as many seconds and at every new piece.
PLAIN_LINE_EVERY_S = 5.0


def emit_json(document: object) -> None:
    """Write one JSON document to stdout. ASCII, so that no terminal or pipe can refuse a character of it."""
    click.echo(json.dumps(document, indent=2, allow_nan=False), file=answer_stream())


def note(text: str) -> None:
    """A line for the person at the terminal, on stderr; where that takes nothing, work and answer are as good without."""
    with suppress(OSError):
        click.echo(text, err=True)


def print_error(message: str, hint: str = "") -> None:
    """``error: …`` and, where there is one, ``hint: …`` on stderr."""
    note(f"{click.style('error:', fg='red', bold=True)} {message}")
    if hint:
        note(f"{click.style('hint:', bold=True)} {hint}")


def table(rows: Iterable[Sequence[str]]) -> str:
    """Rows of cells as aligned columns, the first row the heading; numbers flush right. What a terminal would obey or
    break a line at is escaped: cells may hold what a file says or a model has written."""
    cells = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    body = cells[1:]
    right = [bool(body) and all(_is_number(row[index]) for row in body) for index in range(len(widths))]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _printable(cell: str) -> str:
    if cell.isprintable():
        return cell
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cell)


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "", 1).rstrip(" %").isdigit()


def outline(value: Any, depth: int = 0) -> str:
    """JSON values as an indented outline for people: one ``key: value`` a line, lists of like objects as tables."""
    indent = "  " * depth
    lines: list[str] = []
    if isinstance(value, dict):
        pairs: Iterable[tuple[str, object]] = ((f"{key}:", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        pairs = (("-", item) for item in value)
    else:
        return f"{indent}{_scalar(value)}"
    if _is_records(value):
        return "\n".join(indent + line for line in _records_table(value).splitlines())
    for head, item in pairs:
        if isinstance(item, (dict, list, tuple)) and item and not _is_short(item):
            lines += [f"{indent}{head}", outline(item, depth + 1)]
        else:
            lines.append(f"{indent}{head} {_scalar(item)}")
    return "\n".join(lines)


def _is_records(value: Any) -> bool:
    """A list of objects of plain values with the same keys: best read as a table."""
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(item, dict) for item in value):
        return False
    plain = all(not isinstance(cell, (dict, list, tuple)) for item in value for cell in item.values())
    return plain and all(item.keys() == value[0].keys() for item in value)


def _records_table(records: Sequence[dict[str, object]]) -> str:
    return table([list(records[0]), *([_scalar(cell) for cell in record.values()] for record in records)])


def _is_short(value: object) -> bool:
    """A list of a few plain values, which reads best on the line of its key."""
    return (
        isinstance(value, (list, tuple))
        and not any(isinstance(item, (dict, list, tuple)) for item in value)
        and sum(len(str(item)) + 2 for item in value) <= 90
    )


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_scalar(item) for item in value) or "none"
    if isinstance(value, dict):
        return "none"
    return str(value)


def human_bytes(count: int) -> str:
    """12345678 → "12.3 MB" (powers of 1000, as disks and bandwidths are told)."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


class ProgressBars:
    """The ``progress(what, done, total)`` of kittiwake, drawn: bars on a terminal, now and then a plain line elsewhere."""

    def __init__(self) -> None:
        self._on_terminal = sys.stderr.isatty()
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        self._last_line_s = time.monotonic()
        self._last_line_of = ""

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._on_terminal:
            self._draw(what, done, total)
        elif time.monotonic() - self._last_line_s >= PLAIN_LINE_EVERY_S or self._is_next_piece(what):
            self._last_line_s = time.monotonic()
            self._last_line_of = what
            note(f"{what}: {_share(done, total)}")

    def close(self) -> None:
        """Take the bars off the screen; more progress starts new ones."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._tasks = {}

    def _is_next_piece(self, what: str) -> bool:
        """Whether it is another piece of the work that the last line was of: it may be the one that takes long."""
        return what != self._last_line_of and _work(what) == _work(self._last_line_of)

    def _draw(self, what: str, done: int, total: int) -> None:
        if self._bars is None:
            self._bars = _new_bars()
            self._bars.start()
        work = _work(what)
        if work not in self._tasks:
            self._tasks[work] = self._bars.add_task(what, total=total or None)
        self._bars.update(self._tasks[work], description=what, completed=done, total=total or None)


def _work(what: str) -> str:
    """ "law: alone" → "law"."""
    return what.partition(": ")[0]


def _share(done: int, total: int) -> str:
    return f"{100 * done // total} %" if total > 0 else str(done)


def _new_bars() -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # who leads stdout elsewhere puts it back in an order of their own
    )


def percent(part: float) -> str:
    """0.3249 → "32.49 %"."""
    return f"{100 * part:.2f} %"


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """The same dict with its floats rounded to thousandths, so that JSON figures do not claim what no clock can tell."""
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in values.items()}
