"""Our own OpenAPI document: bodies from the request models, answers in the shapes that are really sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

_REFUSALS = {
    400: "A value, or a field, that is not taken; `param` names it",
    401: "No API key, or a wrong one",
    403: "Not allowed here",
    404: "No such model or state",
    409: "A name that is taken, or a state that does not fit",
    413: "The body is too large",
    415: "A content type that is not read",
    422: "A file that cannot be used",
    429: "Too many requests wait; `retry-after` says when to try again",
    500: "Failed",
    503: "The engine is loading, stopping, or gone",
    504: "The request's time was up",
    507: "No room for another state",
}
_NULLABLE = {"type": ["string", "null"]}
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE,
                "code": _NULLABLE,
            },
        }
    },
}
_COUNT = {"type": "integer", "minimum": 0}
_USAGE = {
    "type": "object",
    "required": [
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
        "prompt_tokens_details",
        "completion_tokens_details",
    ],
    "properties": {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": {
            "type": "object",
            "properties": {"cached_tokens": _COUNT, "cache": {"type": "string"}},
        },
        "completion_tokens_details": {"type": "object", "properties": {"reasoning_tokens": _COUNT}},
    },
}


def _answer(name: str, choice: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "system_fingerprint", "choices", "usage", "timings"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": name},
            "created": _COUNT,
            "model": {"type": "string"},
            "system_fingerprint": {"type": "string"},
            "choices": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["index", "finish_reason", "logprobs", *choice],
                    "properties": {
                        "index": _COUNT,
                        "finish_reason": {"enum": ["stop", "length"]},
                        "logprobs": {"type": ["object", "null"]},
                        **choice,
                    },
                },
            },
            "usage": _USAGE,
            "timings": {"type": "object"},
        },
    }


def _object(name: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["object", *properties],
        "properties": {"object": {"const": name}, **properties},
    }


_TEXT = {"type": "string"}
_ANSWERS: dict[str, dict[str, Any]] = {
    "chat.completion": _answer(
        "chat.completion",
        {
            "message": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {"role": {"const": "assistant"}, "content": _TEXT, "reasoning_content": _TEXT},
            }
        },
    ),
    "text_completion": _answer("text_completion", {"text": _TEXT}),
    "list": _object("list", data={"type": "array", "items": {"type": "object", "required": ["id", "object"]}}),
    "model": _object("model", id=_TEXT, created=_COUNT, owned_by=_TEXT),
    "state": _object(
        "state", id=_TEXT, created=_COUNT, tokens=_COUNT, bytes=_COUNT, digest=_NULLABLE, initial=_NULLABLE
    ),
    "deleted": _object("state.deleted", id=_TEXT, deleted={"const": True}),
    "tokens": {
        "type": "object",
        "required": ["count", "tokens"],
        "properties": {
            "count": _COUNT,
            "tokens": {"type": "array", "items": _COUNT},
            "token_strs": {"type": "array", "items": _TEXT},
        },
    },
    "text": {"type": "object", "required": ["prompt", "content"], "properties": {"prompt": _TEXT, "content": _TEXT}},
    "status": {"type": "object", "required": ["status"], "properties": {"status": _TEXT, "model": _TEXT}},
}
_OTHER_TYPES = {"metrics": "text/plain", "bytes": "application/octet-stream"}
_ANSWERING = (400, 404, 409, 413, 415, 429, 500, 503, 504, 507)
_WITH_BODY = {"tokens": (400, 413, 415), "text": (400, 413, 415)}


def answers_in(name: str, *statuses: int, ok: int = 200, events: bool = False) -> dict[int | str, dict[str, Any]]:
    """``responses`` of an endpoint whose answer is called ``name``, with the refusals it may give.

    ``events``: it answers requests for text, which may be streamed.
    """
    if name in _OTHER_TYPES:
        content: dict[str, Any] = {_OTHER_TYPES[name]: {"schema": _TEXT}}
    else:
        content = {"application/json": {"schema": _ANSWERS[name]}}
    if events:
        content["text/event-stream"] = {"schema": {}}
        statuses = _ANSWERING
    named = {401, 403, 503, *statuses, *_WITH_BODY.get(name, ())}
    if name not in ("status", "metrics"):
        named |= {400}
    if ok == 201:
        named |= {400, 413, 415, 507}
    refusals = {
        status: {"description": _REFUSALS[status], "content": {"application/json": {"schema": ERROR_SCHEMA}}}
        for status in sorted(named)
    }
    return {ok: {"description": "Done", "content": content}, **refusals}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of an endpoint that reads its body itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _schema(model)}}}}


def upload_body() -> dict[str, Any]:
    """That of an endpoint that takes bytes."""
    schema = {"type": "string", "format": "binary", "minLength": 1}
    return {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": schema}}}}


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    """A model's JSON schema with everything it refers to inside it."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    found: dict[str, Any] = _inlined(schema, definitions)
    return found


def _inlined(value: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        if "$ref" in value:
            target = definitions[value["$ref"].rpartition("/")[2]]
            return _inlined({**target, **{key: one for key, one in value.items() if key != "$ref"}}, definitions)
        return {key: _inlined(one, definitions) for key, one in value.items()}
    if isinstance(value, list):
        return [_inlined(one, definitions) for one in value]
    return value


def docs_page(document: Mapping[str, Any]) -> str:
    """The document as a page to read: no scripts, nothing from elsewhere."""
    from html import escape

    parts = [_PAGE_HEAD.replace("TITLE", escape(document["info"]["title"]))]
    parts.append(f"<p>{escape(document['info'].get('description', ''))}</p>")
    parts.append('<p>The same for programs: <a href="openapi.json">openapi.json</a></p>')
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>")
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if body:
                parts.append(_fields(body["schema"]))
    return "\n".join(parts)


_PAGE_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>TITLE</title>
<meta name="viewport" content="width=device-width">
<style>body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse}td{border-top:1px solid #ccc;padding:.2em .8em .2em 0;vertical-align:top}</style>
<h1>TITLE</h1>"""


def _fields(schema: Mapping[str, Any]) -> str:
    from html import escape

    required = set(schema.get("required", ()))
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code>{' (required)' if name in required else ''}</td>"
        f"<td>{escape(field.get('description', ''))}</td></tr>"
        for name, field in schema["properties"].items()
    )
    return f"<table>{rows}</table>"
