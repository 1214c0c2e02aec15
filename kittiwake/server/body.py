"""Bodies of requests: read within limits, and as JSON that leaves nothing to guess."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from kittiwake.checkpoints.strict_json import load_json_strict
from kittiwake.errors import InputFileError
from kittiwake.server.api_errors import ApiError

MAX_DEPTH = 64
# Parsing a body of this size takes about a millisecond; longer ones are parsed beside the loop.
LONG_BODY_BYTES = 64 << 10
BODIES_AT_ONCE = 16
"""So many of the largest bodies may be in memory while they are read."""

_Model = TypeVar("_Model", bound=BaseModel)
_UNSUPPORTED = ("extra_forbidden", "none_required")
_SHAPES = {
    "prompt": "must be a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "must be a text or a list of texts",
    "content": "must be a text, or a list of parts of type text",
}


class BodyRoom:
    """Memory for the bodies that are being read, all requests together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.held_bytes = max_bytes, 0

    @contextmanager
    def take(self) -> Iterator[Callable[[int], None]]:
        """A function to ask for so many bytes more, all of which are given back at the end.

        It raises ApiError (503) where there is no room for them.
        """
        mine = 0

        def more(count: int) -> None:
            nonlocal mine
            if self.held_bytes + count > self.max_bytes:
                raise ApiError(503, "too many large requests are being read", headers={"retry-after": "1"})
            mine += count
            self.held_bytes += count

        try:
            yield more
        finally:
            self.held_bytes -= mine


async def read_json(request: Request, model: type[_Model], max_bytes: int) -> _Model:
    """The body as ``model``. Raises ApiError: 400 for what is no such value, 413 and 415 for what is not read at all."""
    _check_is_json(request.headers.get("content-type", ""))
    room: BodyRoom = request.app.state.bodies
    with room.take() as more:
        data = await _read(request, max_bytes, more)
        if len(data) > LONG_BODY_BYTES:
            return await asyncio.to_thread(parse, data, model)
        return parse(data, model)


def parse(data: bytes, model: type[_Model]) -> _Model:
    """JSON text as ``model``. Raises ApiError (400)."""
    try:
        value = load_json_strict(
            data, what="the request body", max_bytes=len(data), max_depth=MAX_DEPTH, error=InputFileError
        )
    except InputFileError as error:
        raise ApiError(400, error.message, code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the request body must be a JSON object, got {type(value).__name__}", code="invalid_json")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _as_api_error(error, value) from None


def _check_is_json(content_type: str) -> None:
    kind, _, rest = content_type.partition(";")
    if kind.strip().lower() != "application/json":
        raise ApiError(415, f"the content type is {content_type[:80]!r}, expected application/json")
    charset = rest.strip().lower().replace('"', "")
    if charset.startswith("charset=") and charset not in ("charset=utf-8", "charset=utf8"):
        raise ApiError(415, f"the body's {charset[:40]} is not read, expected utf-8")


async def _read(request: Request, max_bytes: int, more: Callable[[int], None]) -> bytes:
    """The whole body. Raises ApiError (413) as soon as it is known to be larger, 415 for one that is compressed."""
    _check_size(request, max_bytes)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            more(len(part))
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(400, "the client went away before its request was complete") from None
    return b"".join(parts)


async def save_body(request: Request, path: Path, max_bytes: int) -> int:
    """Write the body to a file; returns its size. Raises ApiError: 413 and 415 as for JSON, 507 where the disk is full."""
    _check_size(request, max_bytes)
    size = 0
    try:
        with path.open("xb") as file:
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                await asyncio.to_thread(file.write, part)
    except ClientDisconnect:
        raise ApiError(400, "the client went away before its request was complete") from None
    except OSError as error:
        raise ApiError(507, f"the upload cannot be written: {error.strerror}") from None
    return size


def _check_size(request: Request, max_bytes: int) -> None:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, f"the content encoding {encoding[:40]!r} is not read, send the body as it is")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> ApiError:
    # The rest is not read: the connection cannot be used again.
    return ApiError(413, f"the body is larger than the {max_bytes:,} bytes allowed", headers={"connection": "close"})


def _as_api_error(error: ValidationError, value: Mapping[str, Any]) -> ApiError:
    """What is wrong, with the field's name as the client wrote it."""
    found = [
        (_path(one["loc"], value, is_missing=one["type"] == "missing"), one) for one in error.errors(include_url=False)
    ]
    # Of a value that may have several forms, each has its own complaint: the one that looked deepest fits best, and of
    # those one about the value rather than about its type.
    path, first = max(
        found,
        key=lambda item: (
            item[1]["type"] in _UNSUPPORTED,
            item[0].startswith(found[0][0]),
            len(item[0]),
            not item[1]["type"].endswith("_type"),
        ),
    )
    if first["type"] in _UNSUPPORTED:
        return ApiError(400, f"{path} is not a field that is supported here", param=path, code="unsupported_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{path} is missing", param=path, code="missing_required_parameter")
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        word = message.partition(" ")[0]
        return ApiError(400, message, param=path or (word if word in value else None), code="invalid_value")
    shown = repr(first["input"])
    shown = shown if len(shown) <= 80 else shown[:76] + " ..."
    shape = _SHAPES.get(path.rpartition(".")[2]) if first["type"].endswith("_type") else None
    what = f"{path} {shape}" if shape else f"{path}: {first['msg']}"
    return ApiError(400, f"{what}, got {shown}", param=path or None, code="invalid_value")


def _path(location: tuple[int | str, ...], value: Any, *, is_missing: bool) -> str:
    """``messages[0].content``: the parts of an error's place that stand in the body, without names of types."""
    path = ""
    for number, part in enumerate(location):
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            path, value = f"{path}[{part}]", value[part]
        elif isinstance(value, dict) and part in value:
            path, value = f"{path}.{part}" if path else str(part), value[part]
        elif is_missing and number == len(location) - 1:
            return f"{path}.{part}" if path else str(part)
    return path
