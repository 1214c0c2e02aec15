"""JSON read strictly: what a lenient parser would guess at is refused, with the place named."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any, NoReturn

from kittiwake.checkpoints.files import LFS_POINTER
from kittiwake.errors import CheckpointError, InputFileError

MAX_INT_DIGITS = 20
"""Longest integer accepted: enough for any 64-bit value, short enough never to be a burden to print."""


class _RefusedError(ValueError):
    """Raised inside the parser's hooks; turned into the caller's error with the file's name."""


def load_json_strict(
    source: Path | bytes,
    *,
    what: str,
    max_bytes: int = 1 << 20,
    max_depth: int = 32,
    error: type[InputFileError] = CheckpointError,
) -> Any:
    """The JSON value in a file or in bytes.

    ``what`` names the document in messages (a path, or "header of PATH"). Raises ``error`` for: an unreadable file, more
    than ``max_bytes`` bytes, text that is not UTF-8 or not JSON, a key given twice, NaN or Infinity (also as 1e999),
    integers of more than 20 digits, nesting deeper than ``max_depth``, and strings with half a surrogate pair.
    """
    data = source if isinstance(source, bytes) else _read(source, what, max_bytes, error)
    if len(data) > max_bytes:
        raise error(
            f"{what} is larger than the {max_bytes:,} bytes allowed", "it is damaged, or not what its name says"
        )
    if data.startswith(LFS_POINTER):
        raise error(f"{what} is a Git LFS pointer, not the file itself", "run: git lfs pull")
    try:
        text = data.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_short_int,
        )
        _check_tree(value, max_depth)
    except UnicodeDecodeError as err:
        raise error(f"{what} is not UTF-8 text: byte {err.start} is {data[err.start]:#04x}", _HINT) from None
    except RecursionError:
        raise error(f"{what} is nested more than {max_depth} levels deep", _HINT) from None
    except _RefusedError as err:
        raise error(f"{what}: {err}", _HINT) from None
    except ValueError as err:
        raise error(f"{what} is not JSON: {err}", _HINT) from None
    return value


_HINT = "get the file again from where it came"


def _read(path: Path, what: str, max_bytes: int, error: type[InputFileError]) -> bytes:
    """At most ``max_bytes`` + 1 bytes of a regular file (a pipe or device is never opened: it could block)."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise error(f"{what} is not a regular file")
        with path.open("rb") as file:
            return file.read(max_bytes + 1)
    except (OSError, ValueError) as err:
        reason = err.strerror if isinstance(err, OSError) else str(err)
        raise error(f"{what} cannot be read: {reason}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RefusedError(f"the key {key[:100]!r} is given twice")
            seen.add(key)
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise _RefusedError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _RefusedError(f"the number {text[:40]} is out of range")
    return value


def _short_int(text: str) -> int:
    if len(text) > MAX_INT_DIGITS:
        raise _RefusedError(f"an integer of {len(text)} digits is out of range")
    return int(text)


def _check_tree(root: Any, max_depth: int) -> None:
    """Depth, and strings that could not be written out again. A loop, not recursion: the input chooses the depth."""
    level = [root]
    for _ in range(max_depth + 1):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value.values())
                for key in value:
                    _check_string(key)
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, str):
                _check_string(value)
        if not below:
            return
        level = below
    raise _RefusedError(f"nested more than {max_depth} levels deep")


def _check_string(text: str) -> None:
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise _RefusedError(f"the string {text[:100]!r} holds half a surrogate pair")
