"""POST /v1/chat/completions"""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kittiwake.engine.request import SamplingParams
from kittiwake.errors import RequestError
from kittiwake.server.api_errors import ApiError
from kittiwake.server.body import read_json
from kittiwake.server.conversation import Conversation, check_messages, render, render_after, with_reasoning
from kittiwake.server.openapi import answers_in, body_of
from kittiwake.server.params import chat_params
from kittiwake.server.routes.answering import answer, check_copies, check_size, wishes
from kittiwake.server.schema import ChatMessage, ChatRequest
from kittiwake.server.service import Served, Service, beside
from kittiwake.server.writers import ChatWriter
from kittiwake.text.chat import ChatTemplate

_SHORTEST_CHARS = 100
"""What a message without text costs, counted in characters."""


def chat_router(service: Service) -> APIRouter:
    """The endpoint over a service."""
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        summary="Answer a conversation",
        openapi_extra=body_of(ChatRequest),
        responses=answers_in("chat.completion", events=True),
    )
    async def create_chat_completion(request: Request) -> Response:
        asked = await read_json(request, ChatRequest, service.config.max_body_bytes)
        service.check_states_of(asked)
        served = service.model(asked.model)
        params = chat_params(asked, service.config)
        check_size(service, 1, params, bool(asked.stream))
        follows = asked.state is not None and (await service.client.get_state(asked.state)).tokens > 0
        size = text_size(asked.messages)
        template, found = await beside(size, "messages", lambda: _prepare(served, asked, follows))
        check_copies(len(found.ids), params.n)
        params = with_stops(params, template, asked)
        borders = () if asked.state is not None else found.borders
        told = wishes(asked, bool(asked.logprobs))
        head = service.head("chatcmpl", served)
        writer = ChatWriter(head, found.ids, params.n, told, found.opening, keeps=not asked.stream)
        submission = service.submission(request, asked, found.ids, params, borders)
        return await answer(service, request, [submission], writer, stream=bool(asked.stream), seed=params.seed)

    return router


def text_size(messages: list[ChatMessage]) -> int:
    """Characters of messages, roughly: a message costs some however short it is."""
    return sum(_SHORTEST_CHARS + len(text) for message in messages for text in _texts(message))


def _texts(message: ChatMessage) -> list[str]:
    content = message.content or ""
    return [content] if isinstance(content, str) else [part.text for part in content]


def _prepare(served: Served, asked: ChatRequest, follows: bool) -> tuple[ChatTemplate, Conversation]:
    messages = check_messages(asked.messages)
    template, options = with_reasoning(served.chat_template(), asked.reasoning_effort, asked.chat_template_kwargs)
    rendering = render_after if follows else render
    return template, rendering(template, served.tokenizer, messages, options)


def with_stops(params: SamplingParams, template: ChatTemplate, asked: ChatRequest) -> SamplingParams:
    """The parameters with the template's own ends of an answer added, unless those are to be ignored."""
    if asked.ignore_eos:
        return params
    try:
        return replace(
            params,
            stop=tuple(dict.fromkeys((*params.stop, *template.stops))),
            stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *template.stop_ids))),
        )
    except RequestError as error:
        raise ApiError.of(error) from None
