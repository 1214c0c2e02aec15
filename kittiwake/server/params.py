"""Fields of a request → how the engine is to draw."""

from __future__ import annotations

import secrets

from kittiwake.config import ServerConfig
from kittiwake.engine.request import SamplingParams
from kittiwake.errors import RequestError
from kittiwake.server.api_errors import ApiError
from kittiwake.server.schema import ChatRequest, CompletionRequest, SamplingFields

COMPLETION_TOKENS = 16
"""What OpenAI's completions draw where a request does not say."""


def chat_params(asked: ChatRequest, config: ServerConfig) -> SamplingParams:
    """Raises ApiError (400) for values that contradict each other."""
    wanted = asked.max_completion_tokens or asked.max_tokens
    return _params(asked, config, wanted, config.default_max_tokens, bool(asked.logprobs), asked.top_logprobs or 0)


def completion_params(asked: CompletionRequest, config: ServerConfig) -> SamplingParams:
    """The same for completions; with ``max_tokens`` 0 nothing is to be drawn, and 1 stands in its place."""
    wanted = max(1, asked.max_tokens) if asked.max_tokens is not None else None
    return _params(asked, config, wanted, COMPLETION_TOKENS, asked.logprobs is not None, asked.logprobs or 0)


def _params(
    asked: SamplingFields, config: ServerConfig, wanted: int | None, usual: int, logprobs: bool, top_logprobs: int
) -> SamplingParams:
    most = config.max_answer_tokens
    if most and wanted is not None and wanted > most:
        raise ApiError(
            400, f"max_tokens {wanted} is more than the {most} allowed", param="max_tokens", code="invalid_value"
        )
    max_tokens = wanted if wanted is not None else max(min(usual, most or usual), asked.min_tokens or 0)
    temperature = 1.0 if asked.temperature is None else asked.temperature
    # Both mean the likeliest token, which no filter takes away: clients send them together with whatever they have set.
    is_greedy = temperature == 0 or asked.top_p == 0
    stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=asked.min_tokens or 0,
            temperature=0.0 if is_greedy else temperature,
            top_k=0 if is_greedy else max(0, asked.top_k or 0),
            top_p=1.0 if is_greedy or asked.top_p is None else asked.top_p,
            min_p=0.0 if is_greedy else asked.min_p or 0.0,
            seed=_seed(asked.seed),
            n=asked.n or 1,
            stop=stop,
            stop_token_ids=tuple(asked.stop_token_ids or ()),
            ignore_eos=bool(asked.ignore_eos),
            presence_penalty=asked.presence_penalty or 0.0,
            frequency_penalty=asked.frequency_penalty or 0.0,
            repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
            logit_bias={int(token): bias for token, bias in (asked.logit_bias or {}).items()},
            sampling_order=asked.sampling_order or "standard",
            logprobs=logprobs,
            top_logprobs=top_logprobs,
        )
    except RequestError as error:
        raise ApiError.of(error) from None


def _seed(wanted: int | None) -> int:
    """A seed as the engine takes it: negative ones, which OpenAI has too, take the place of large ones."""
    return secrets.randbits(53) if wanted is None else wanted & (2**63 - 1)
