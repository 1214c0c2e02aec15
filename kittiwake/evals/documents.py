"""Texts from files: plain text, and JSON lines, packed with xz or not."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from kittiwake.errors import InputFileError


def is_json_lines(path: Path) -> bool:
    """Whether the name says that each line is a JSON object with "text"."""
    return path.name.endswith((".jsonl", ".jsonl.xz"))


def read_text_lines(path: Path, limit: int | None = None) -> Iterator[tuple[str, str]]:
    """(title, text) of each line of a .jsonl or .jsonl.xz file, the first ``limit`` of them; blank lines are no lines.

    The title is the line's "title", or its number. Raises InputFileError naming the line.
    """
    count = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if count == limit:
                    return
                if line.strip():
                    count += 1
                    yield _parse(path, number, line)
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputFileError(f"{path}: {reason}") from error


def _open(path: Path) -> IO[str]:
    return lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8")


def _parse(path: Path, number: int, line: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputFileError(f"{path} line {number} is not JSON: {error.msg}") from error
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise InputFileError(f'{path} line {number} has no "text"', 'each line is an object such as {"text": "…"}')
    return str(row.get("title") or f"line {number}"), text


def read_blocks(path: Path, chars: int = 1 << 20) -> Iterator[str]:
    """A UTF-8 file as it is, line ends included, some ``chars`` at a time. Raises InputFileError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while block := file.read(chars):
                yield block
    except UnicodeDecodeError as error:
        raise InputFileError(f"{path} is not UTF-8 text: {error.reason}") from error
    except OSError as error:
        raise InputFileError(f"{path}: {error.strerror}") from error


def read_plain_text(path: Path) -> str:
    """A whole UTF-8 file as it is, line ends included. Raises InputFileError."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputFileError(f"{path} is not UTF-8 text: a bad byte at {error.start}") from error
    except OSError as error:
        raise InputFileError(f"{path}: {error.strerror}") from error
