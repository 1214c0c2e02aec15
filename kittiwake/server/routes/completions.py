"""POST /v1/completions"""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kittiwake.errors import KittiwakeError
from kittiwake.server.api_errors import ApiError
from kittiwake.server.body import read_json
from kittiwake.server.openapi import answers_in, body_of
from kittiwake.server.params import completion_params
from kittiwake.server.routes.answering import answer, check_copies, check_echo, check_size, wishes
from kittiwake.server.schema import CompletionRequest
from kittiwake.server.service import Served, Service, beside, later
from kittiwake.server.sse import ClientGoneError, while_connected
from kittiwake.server.writers import CompletionWriter


def completions_router(service: Service) -> APIRouter:
    """The endpoint over a service."""
    router = APIRouter()

    @router.post(
        "/v1/completions",
        summary="Write on from a prompt",
        openapi_extra=body_of(CompletionRequest),
        responses=answers_in("text_completion", events=True),
    )
    async def create_completion(request: Request) -> Response:
        asked = await read_json(request, CompletionRequest, service.config.max_body_bytes)
        service.check_states_of(asked)
        served = service.model(asked.model)
        params = completion_params(asked, service.config)
        prompts = as_prompts(asked.prompt)
        check_size(service, len(prompts), params, bool(asked.stream))
        if asked.keep_state and len(prompts) > 1:
            raise ApiError(
                400, "keep_state keeps the state after one answer, there are several prompts", param="keep_state"
            )
        size = sum(len(prompt) for prompt in prompts)
        ids = await beside(size, "prompt", lambda: [encode(served, p, bool(asked.parse_special)) for p in prompts])
        check_copies(sum(map(len, ids)), params.n)
        submissions = [service.submission(request, asked, one, params) for one in ids]
        scores, echoed = None, None
        if asked.echo:
            echoed = await beside(size, "prompt", lambda: [_text_of(served, prompt) for prompt in prompts])
            check_echo(service, sum(map(len, echoed)), sum(map(len, ids)), params)
            if params.logprobs:
                begun_s, scoring = time.monotonic(), service.score(submissions, params.top_logprobs)
                try:
                    scores = await while_connected(request.receive, scoring)
                except ClientGoneError:
                    return Response(status_code=499)
                submissions = [later(one, begun_s) for one in submissions]
        writer = CompletionWriter(
            service.head("cmpl", served),
            ids,
            params.n,
            wishes(asked, params.logprobs),
            keeps=not asked.stream,
            echo=echoed,
            scores=scores,
        )
        opening = writer.opening() if asked.stream else b""
        if asked.max_tokens == 0:
            opening, submissions = opening + writer.echo_only(), []
        return await answer(
            service, request, submissions, writer, stream=bool(asked.stream), seed=params.seed, opening=opening
        )

    return router


def as_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str] | list[list[int]]:
    """One prompt or several as a list of them."""
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if isinstance(prompt[0], int) else prompt


def encode(served: Served, prompt: str | list[int], parse_special: bool) -> list[int]:
    """The ids of a prompt. Raises RequestError for a text that cannot be encoded, ApiError for ids that do not exist."""
    if isinstance(prompt, str):
        return served.tokenizer.encode(prompt, allow_special=parse_special)
    check_ids(served, prompt, "prompt")
    return prompt


def check_ids(served: Served, ids: Sequence[int], param: str) -> None:
    """Raise ApiError (400) for a token id that the model does not have."""
    vocab = served.info.vocab_size
    wrong = next((token for token in ids if token >= vocab), None)
    if wrong is not None:
        message = f"{param} holds {wrong}, which is no token id from 0 to {vocab - 1}"
        raise ApiError(400, message, param=param, code="invalid_value")


def _text_of(served: Served, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else decode(served, prompt)


def decode(served: Served, ids: Sequence[int]) -> str:
    """The text of ids. Raises ApiError (400) for one that has no text because the tokenizer does not know it."""
    try:
        return served.tokenizer.decode(ids)
    except KittiwakeError as error:
        raise ApiError.of(error) from None
