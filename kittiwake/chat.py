"""Conversations over a model: messages in, an answer with its reasoning apart. What ``LLM`` and its kin share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kittiwake.engine.request import Completion, Delta, KeptState, SamplingParams, Timings
from kittiwake.errors import RequestError
from kittiwake.text.chat import ChatTemplate, encode_segments, read_messages
from kittiwake.text.reasoning import ReasoningSplitter
from kittiwake.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
"""Objects with ``role`` (system, user, assistant) and ``content``."""


@dataclass(frozen=True)
class ChatDelta:
    """What one step added to an answer. All texts may be empty while something is undecided."""

    content: str
    reasoning: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    """As of :class:`Delta`; set on the last one, like ``timings``, and ``state`` where it was asked for."""
    timings: Timings | None = None
    state: KeptState | None = None


@dataclass(frozen=True)
class ChatCompletion:
    """A finished answer: ``content`` is what was said, ``reasoning`` what was thought before, None where nothing was."""

    content: str
    reasoning: str | None
    completion: Completion
    """Tokens, counts, finish reason and timings; its ``text`` holds both."""

    @property
    def message(self) -> dict[str, str]:
        """The answer as a message, to be put after those it answers."""
        return {"role": "assistant", "content": self.content}


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation made ready for the engine."""

    ids: list[int]
    params: SamplingParams
    """With the template's stops added."""
    opening: str
    """How the prompt begins the answer, for the reasoning splitter."""


def prepare(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Messages,
    params: SamplingParams | None,
    options: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """Check and render messages, and encode them. Raises RequestError, TokenizerError for a template that fails."""
    rendered = template.render(read_messages(messages), options=options)
    return ChatPrompt(encode_segments(tokenizer, rendered.segments), with_stops(params, template), rendered.opening)


def with_stops(params: SamplingParams | None, template: ChatTemplate) -> SamplingParams:
    """The parameters with the template's own stops added. Raises RequestError where they ask for several samples."""
    wanted = params or SamplingParams()
    if wanted.n != 1:
        raise RequestError(f"a chat has one answer, params ask for n {wanted.n}", "ask again with another seed")
    return replace(
        wanted,
        stop=tuple(dict.fromkeys((*wanted.stop, *template.stops))),
        stop_token_ids=tuple(dict.fromkeys((*wanted.stop_token_ids, *template.stop_ids))),
    )


def split_stream(deltas: Iterable[Delta], opening: str) -> Iterator[ChatDelta]:
    """Tell reasoning and answer apart while they come."""
    splitter = ReasoningSplitter(opening)
    for delta in deltas:
        yield split_delta(splitter, delta)


def split_delta(splitter: ReasoningSplitter, delta: Delta) -> ChatDelta:
    """One step of :func:`split_stream`."""
    reasoning, content = splitter.push(delta.text)
    if delta.finish_reason is not None:
        rest = splitter.flush()
        reasoning, content = reasoning + rest.reasoning, content + rest.answer
    return ChatDelta(content, reasoning, delta.token_ids, delta.finish_reason, delta.timings, delta.state)


def split_completion(completion: Completion, opening: str) -> ChatCompletion:
    """The same for a finished answer."""
    splitter = ReasoningSplitter(opening)
    first, last = splitter.push(completion.text), splitter.flush()
    reasoning = first.reasoning + last.reasoning if splitter.has_reasoning else None
    return ChatCompletion(first.answer + last.answer, reasoning, completion)
