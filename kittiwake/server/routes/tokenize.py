"""POST /tokenize and /detokenize"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kittiwake.server.answers import spelled
from kittiwake.server.api_errors import JsonResponse
from kittiwake.server.body import read_json
from kittiwake.server.conversation import check_messages, render, with_reasoning
from kittiwake.server.openapi import answers_in, body_of
from kittiwake.server.routes.chat import text_size
from kittiwake.server.routes.completions import check_ids, decode
from kittiwake.server.schema import DetokenizeRequest, TokenizeRequest
from kittiwake.server.service import Served, Service, beside


def tokenize_router(service: Service) -> APIRouter:
    """The endpoints over a service."""
    router = APIRouter()

    @router.post(
        "/tokenize",
        summary="Text → token ids",
        openapi_extra=body_of(TokenizeRequest),
        responses=answers_in("tokens", 404),
    )
    async def tokenize(request: Request) -> Response:
        asked = await read_json(request, TokenizeRequest, service.config.max_body_bytes)
        served = service.model(asked.model)
        size = text_size(asked.messages) if asked.messages else len(asked.prompt or asked.content or "")
        ids = await beside(size, "messages" if asked.messages else "prompt", lambda: _ids(served, asked))
        content: dict[str, object] = {"count": len(ids), "tokens": ids}
        if asked.return_token_strs:
            content["token_strs"] = await beside(size, "prompt", lambda: _spell(served, ids))
        return JsonResponse(content)

    @router.post(
        "/detokenize",
        summary="Token ids → text",
        openapi_extra=body_of(DetokenizeRequest),
        responses=answers_in("text", 404),
    )
    async def detokenize(request: Request) -> Response:
        asked = await read_json(request, DetokenizeRequest, service.config.max_body_bytes)
        served = service.model(asked.model)
        text = await beside(len(asked.tokens), "tokens", lambda: _decode(served, asked.tokens))
        return JsonResponse({"prompt": text, "content": text})

    return router


def _spell(served: Served, ids: list[int]) -> list[str]:
    return [spelled(served.tokenizer.token_bytes(token)) for token in ids]


def _decode(served: Served, ids: list[int]) -> str:
    check_ids(served, ids, "tokens")
    return decode(served, ids)


def _ids(served: Served, asked: TokenizeRequest) -> list[int]:
    if asked.messages is None:
        text = asked.prompt if asked.prompt is not None else asked.content or ""
        return served.tokenizer.encode(text, allow_special=bool(asked.parse_special))
    messages = check_messages(asked.messages)
    template, options = with_reasoning(served.chat_template(), None, asked.chat_template_kwargs)
    return list(render(template, served.tokenizer, messages, options).ids)
