"""Named states: /v1/states"""

from __future__ import annotations

import logging
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Query
from fastapi import Path as InPath
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from kittiwake.engine.request import SamplingParams
from kittiwake.server.api_errors import ApiError, JsonResponse
from kittiwake.server.body import read_json, save_body
from kittiwake.server.conversation import check_messages, render_seen, with_reasoning
from kittiwake.server.engine_client import EngineError, NamedState, Submission
from kittiwake.server.openapi import answers_in, body_of, upload_body
from kittiwake.server.routes.chat import text_size
from kittiwake.server.routes.completions import encode
from kittiwake.server.schema import STATE_NAME, ForkStateRequest, MakeStateRequest
from kittiwake.server.service import Served, Service, beside
from kittiwake.server.sse import ClientGoneError, while_connected

logger = logging.getLogger("kittiwake.server")

_NAME = InPath(pattern=STATE_NAME, description="name of a state")


def states_router(service: Service) -> APIRouter:
    """The endpoints over a service."""
    router = APIRouter()
    config = service.config

    @router.get("/v1/states", summary="All named states", responses=answers_in("list", 403))
    async def list_states() -> Response:
        service.check_may_control()
        return JsonResponse({"object": "list", "data": [_shown(one) for one in await service.client.list_states()]})

    @router.post(
        "/v1/states",
        summary="Keep the state after a prompt or messages",
        status_code=201,
        openapi_extra=body_of(MakeStateRequest),
        responses=answers_in("state", 403, 404, 409, 429, ok=201),
    )
    async def make_state(request: Request) -> Response:
        service.check_may_control()
        asked = await read_json(request, MakeStateRequest, config.max_body_bytes)
        served = service.model(asked.model)
        follows = asked.state is not None and (await service.client.get_state(asked.state)).tokens > 0
        size = text_size(asked.messages) if asked.messages else len(asked.prompt or ())
        ids = await beside(size, "messages" if asked.messages else "prompt", lambda: _ids(served, asked, follows))
        state = request.scope["state"]
        submission = Submission(
            state["request_id"], tuple(ids), SamplingParams(), client=state["client"], start_from=asked.state
        )
        try:
            made = await while_connected(request.receive, service.make_state(asked.name, submission))
        except ClientGoneError:
            return Response(status_code=499)
        return JsonResponse(_shown(made), 201)

    @router.get("/v1/states/{name}", summary="One of them", responses=answers_in("state", 403, 404))
    async def get_state(name: str = _NAME) -> Response:
        service.check_may_control()
        _check_name(name)
        return JsonResponse(_shown(await service.client.get_state(name)))

    @router.put(
        "/v1/states/{name}",
        summary="Upload a saved state, or a tuned initial state (.pth or .safetensors), as it is",
        status_code=201,
        openapi_extra=upload_body(),
        responses=answers_in("state", 403, 409, 413, 415, 422, ok=201),
    )
    async def upload_state(
        request: Request,
        name: str = _NAME,
        transpose: bool = Query(False, description="matrices of an initial state are [K, V] a head"),
    ) -> Response:
        service.check_may_control()
        _check_name(name)
        kind = request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/octet-stream":
            raise ApiError(415, f"the content type is {kind[:80]!r}, expected application/octet-stream")
        with _temporary_folder("upload") as folder:
            path = Path(folder) / "upload"
            if await save_body(request, path, config.max_state_bytes) == 0:
                raise ApiError(400, "the body is empty, expected the bytes of a state", code="invalid_value")
            try:
                made = await service.client.import_state(name, path, transpose=transpose)
            except EngineError as error:  # where the file lay is nothing to the client
                message = error.message.replace(str(path), "the upload")
                raise EngineError(replace(error.failure, message=message)) from None
        return JsonResponse(_shown(made), 201)

    @router.get(
        "/v1/states/{name}/content",
        summary="Download a state: kittiwake run --load-state reads it, and PUT takes it back",
        responses=answers_in("bytes", 403, 404, 507),
    )
    async def download_state(name: str = _NAME) -> Response:
        service.check_may_control()
        _check_name(name)
        folder = _temporary_folder("download")
        try:
            path = Path(folder.name) / "state"
            await service.client.export_state(name, path)
        except BaseException:
            folder.cleanup()
            raise
        return _WholeFile(
            path,
            media_type="application/octet-stream",
            filename=f"{name}.state",
            headers={"accept-ranges": "none"},
            background=BackgroundTask(folder.cleanup),
        )

    @router.post(
        "/v1/states/{name}/fork",
        summary="The same state under a second name",
        status_code=201,
        openapi_extra=body_of(ForkStateRequest),
        responses=answers_in("state", 403, 404, 409, ok=201),
    )
    async def fork_state(request: Request, name: str = _NAME) -> Response:
        service.check_may_control()
        _check_name(name)
        asked = await read_json(request, ForkStateRequest, config.max_body_bytes)
        return JsonResponse(_shown(await service.client.fork_state(name, asked.name)), 201)

    @router.delete("/v1/states/{name}", summary="Forget a state", responses=answers_in("deleted", 403, 404))
    async def delete_state(name: str = _NAME) -> Response:
        service.check_may_control()
        _check_name(name)
        await service.client.delete_state(name)
        return JsonResponse({"id": name, "object": "state.deleted", "deleted": True})

    return router


class _WholeFile(FileResponse):
    """A file that is never sent in parts: each request writes it anew, so that parts of two may not fit together."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        headers = [one for one in scope["headers"] if one[0] not in (b"range", b"if-range")]
        await super().__call__({**scope, "headers": headers}, receive, send)


def _temporary_folder(what: str) -> tempfile.TemporaryDirectory[str]:
    """Raises ApiError (507) where none can be made."""
    try:
        return tempfile.TemporaryDirectory(prefix=f"kittiwake-{what}-")
    except OSError as error:
        logger.error("no temporary folder can be made: %s", error)
        raise ApiError(507, "the server has no room for temporary files; its log says why") from None


def _check_name(name: str) -> None:
    if re.fullmatch(STATE_NAME, name) is None:
        raise ApiError(400, f"{name[:80]!r} is no name of a state: {STATE_NAME}", param="name", code="invalid_value")


def _ids(served: Served, asked: MakeStateRequest, follows: bool) -> tuple[int, ...]:
    if asked.messages is None:
        assert asked.prompt is not None
        return tuple(encode(served, asked.prompt, bool(asked.parse_special)))
    messages = check_messages(asked.messages, open_answer=False)
    template, options = with_reasoning(served.chat_template(), None, asked.chat_template_kwargs)
    return render_seen(template, served.tokenizer, messages, options, follows)


def _shown(state: NamedState) -> dict[str, Any]:
    return {
        "id": state.name,
        "object": "state",
        "created": state.created_s,
        "tokens": state.tokens,
        "bytes": state.size_bytes,
        "digest": state.digest or None,
        "initial": state.initial or None,
    }
