"""Errors as clients of OpenAI's API know them: ``{"error": {"message", "type", "param", "code"}}`` and a status."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from kittiwake.errors import KittiwakeError
from kittiwake.server.engine_client import EngineError
from kittiwake.server.schema import ChatRequest, CompletionRequest

_TYPES = {401: "authentication_error", 403: "permission_error", 409: "conflict_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 413: "too_large", 429: "queue_full", 503: "unavailable", 504: "timeout"}

_FIELDS = frozenset(ChatRequest.model_fields) | frozenset(CompletionRequest.model_fields)


class ApiError(Exception):
    """A refusal or failure on its way to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = code or _CODES.get(status)
        self.headers = dict(headers or {})

    @classmethod
    def of(cls, error: KittiwakeError) -> ApiError:
        """An error of the engine, whose message may begin with the field that it is about."""
        status = error.http_status
        if status < 500 and not isinstance(error, EngineError):
            status = 400  # a value of the request, whatever it would be in a file
        code, headers = None, {}
        if isinstance(error, EngineError):
            code = error.failure.code or None
            if error.failure.retry_after_s is not None:
                headers["retry-after"] = str(max(1, math.ceil(error.failure.retry_after_s)))
            elif status == 429:
                headers["retry-after"] = "1"
        first = error.message.removeprefix("the ").partition(" ")[0]
        param = first if status < 500 and first.partition(".")[0] in _FIELDS else None
        return cls(status, str(error), param=param, code=code, headers=headers)

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON values."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The error as an HTTP answer."""
        return JsonResponse(self.body, self.status, self.headers)


class JsonResponse(Response):
    """JSON values as an answer."""

    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(msgspec.json.encode(content), status_code, headers)
