"""How both ways of asking are answered: in one, or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from kittiwake.engine.request import SamplingParams
from kittiwake.server.api_errors import ApiError, JsonResponse
from kittiwake.server.engine_client import AnswerEvent, Submission
from kittiwake.server.schema import SamplingFields
from kittiwake.server.service import Service, all_events
from kittiwake.server.sse import ClientGoneError, EventResponse, while_connected
from kittiwake.server.writers import Wishes, Writer

MAX_WHOLE_LOGPROBS = 1 << 22
"""Log-probabilities of an answer that is collected before it is sent."""
MAX_PROMPT_LOGPROBS = 1 << 18
"""And of the prompts of one request."""
MAX_COPIED_TOKENS = 1 << 24
"""Tokens of the prompts of all answers of one request."""


def check_size(service: Service, prompts: int, params: SamplingParams, stream: bool) -> None:
    """Raise ApiError (400) for more answers than one request may ask for, or more than can be held until they end."""
    most, answers = service.config.max_prompts, prompts * params.n
    if answers > most:
        what = "n" if prompts == 1 else "prompt"
        raise ApiError(400, f"{answers} answers are asked for, at most {most} are drawn", param=what, code="too_many")
    figures = answers * params.max_tokens * (1 + params.top_logprobs)
    if params.logprobs and not stream and figures > MAX_WHOLE_LOGPROBS:
        raise ApiError(
            400,
            f"logprobs: {figures} log-probabilities are more than the {MAX_WHOLE_LOGPROBS} that are held until the answer "
            "ends (ask for a stream, or for fewer tokens)",
            param="logprobs",
            code="too_many",
        )


def check_copies(tokens: int, n: int) -> None:
    """Raise ApiError (400) for more copies of prompts of ``tokens`` tokens in all than one request may ask for: each answer
    keeps one."""
    if n > 1 and tokens * n > MAX_COPIED_TOKENS:
        message = f"n: {n} answers to {tokens} tokens of prompt are more than {MAX_COPIED_TOKENS} tokens in all"
        raise ApiError(400, message, param="n", code="too_many")


def check_echo(service: Service, chars: int, tokens: int, params: SamplingParams) -> None:
    """Raise ApiError (400) for prompts that would come back too many times, or with too many log-probabilities."""
    most = 4 * service.config.max_body_bytes
    if chars * params.n > most:
        message = f"echo: {chars * params.n} characters would come back, at most {most} do"
        raise ApiError(400, message, param="echo", code="too_many")
    figures = tokens * params.n * (1 + params.top_logprobs)
    if params.logprobs and figures > MAX_PROMPT_LOGPROBS:
        message = f"logprobs: {figures} of the prompt are more than the {MAX_PROMPT_LOGPROBS} of one request"
        raise ApiError(400, f"{message} (score it in pieces)", param="logprobs", code="too_many")


def wishes(asked: SamplingFields, logprobs: bool) -> Wishes:
    """What is told beside the text."""
    options = asked.stream_options
    wants_usage = options is not None and bool(options.include_usage)
    return Wishes(logprobs=logprobs, usage=wants_usage, token_ids=bool(asked.return_token_ids))


async def answer(
    service: Service,
    request: Request,
    submissions: Sequence[Submission],
    writer: Writer,
    *,
    stream: bool,
    seed: int,
    opening: bytes = b"",
) -> Response:
    """Ask the engine and answer the client; without submissions ``opening`` and ``writer`` hold all there is to say."""
    headers = {"x-seed": str(seed)}
    if stream:
        chunks = _chunks(service, submissions, writer, opening)
        return EventResponse(chunks, comment_s=service.config.comment_s, headers=headers)
    try:
        await while_connected(request.receive, _collect(service, submissions, writer))
    except ClientGoneError:
        return Response(status_code=499)  # for the log: nobody reads it
    return JsonResponse(writer.whole(), headers=headers)


async def _chunks(
    service: Service, submissions: Sequence[Submission], writer: Writer, opening: bytes
) -> AsyncGenerator[bytes, None]:
    if opening:
        yield opening
    async with aclosing(_events(service, submissions)) as batches:
        async for events in batches:
            chunk = writer.push(events)
            if chunk:
                yield chunk
    yield writer.close()


async def _collect(service: Service, submissions: Sequence[Submission], writer: Writer) -> None:
    async with aclosing(_events(service, submissions)) as batches:
        async for events in batches:
            writer.take(events)


async def _events(service: Service, submissions: Sequence[Submission]) -> AsyncGenerator[tuple[AnswerEvent, ...], None]:
    if submissions:
        n = submissions[0].params.n
        async with service.submitted(submissions) as streams, aclosing(all_events(streams, n)) as batches:
            async for events in batches:
                yield events
