"""Messages and prompts of requests → token ids, and the places in them where other requests will likely go on otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kittiwake.errors import KittiwakeError, RequestError
from kittiwake.server.schema import ChatMessage
from kittiwake.text.chat import TEMPLATES, ChatTemplate, Message, Segment, TurnTemplate, read_messages, skip_text
from kittiwake.text.jinja_template import JinjaTemplate
from kittiwake.text.tokenizer import Tokenizer

THINKING = "enable_thinking"
"""What the variable is called by which templates, and clients, switch reasoning on and off."""
_PROBE, _OTHER_PROBE = "\ue000", "\ue001"


@dataclass(frozen=True)
class Conversation:
    """Messages made ready for the engine."""

    ids: tuple[int, ...]
    opening: str
    """How the prompt begins the answer, for the reasoning splitter."""
    borders: tuple[int, ...]
    """Counts of tokens, rising, after which later prompts will likely differ."""


def check_messages(messages: Sequence[ChatMessage], *, open_answer: bool = True) -> tuple[Message, ...]:
    """Messages as templates take them. Those of the system or the assistant that say nothing are left out: clients send
    empty system prompts, and repeat answers that had no room to say anything. Raises RequestError."""
    given = []
    for message in messages:
        content: Any = message.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        if message.role != "user" and not (content or "").strip():
            continue
        given.append({"role": message.role, "content": content or ""})
    return read_messages(given, open_answer=open_answer)


def with_reasoning(
    template: ChatTemplate, effort: str | None, variables: Mapping[str, Any] | None
) -> tuple[ChatTemplate, dict[str, Any]]:
    """The template and its variables for a request that may want reasoning on or off.

    Raises RequestError for what the template cannot do, so that nobody waits for reasoning that does not come.
    """
    options = {name: value for name, value in (variables or {}).items() if value is not None}
    wanted = options.get(THINKING)
    if wanted is not None and not isinstance(wanted, bool):
        raise RequestError(f"chat_template_kwargs.{THINKING} must be true or false, got {str(wanted)[:80]!r}")
    if effort is not None:
        if wanted is not None and wanted != (effort != "none"):
            raise RequestError(
                f"reasoning_effort {effort!r} and {THINKING} {str(wanted).lower()} contradict each other"
            )
        wanted = effort != "none"
    if isinstance(template, TurnTemplate):
        unknown = sorted(options.keys() - {THINKING})
        if unknown:
            raise RequestError(f"chat_template_kwargs has {', '.join(unknown)}, which {template.name} does not use")
        return _turn_template(template, wanted), {}
    if isinstance(template, JinjaTemplate):
        if wanted is not None:
            options[THINKING] = wanted
        if effort is not None and template.takes("reasoning_effort"):
            options.setdefault("reasoning_effort", effort)
        for name in options:
            if not template.takes(name):
                what = "reasoning_effort" if effort is not None and name == THINKING else f"chat_template_kwargs.{name}"
                raise RequestError(f"{what} is nothing that the chat template {template.name} uses")
    return template, options


def _turn_template(template: TurnTemplate, wants_reasoning: bool | None) -> TurnTemplate:
    if wants_reasoning is None:
        return template
    if not template.name.startswith("g1"):
        raise RequestError(f"reasoning_effort and {THINKING} are nothing that the chat template {template.name} knows")
    return TEMPLATES["g1-think" if wants_reasoning else "g1-fast"]


def render(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message], options: Mapping[str, Any]
) -> Conversation:
    """A whole conversation, to be answered. Raises RequestError, TokenizerError for a template that fails."""
    rendered = template.render(messages, options=options)
    parts = [tokenizer.encode(part.text, allow_special=part.is_control) for part in rendered.segments]
    ids = tuple(token for part in parts for token in part)
    places = _places(template, messages, rendered.text, options)
    counts = {_tokens_before(tokenizer, rendered.segments, parts, place) for place in places}
    return Conversation(ids, rendered.opening, tuple(sorted(count for count in counts if 0 < count < len(ids))))


def render_after(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message], options: Mapping[str, Any]
) -> Conversation:
    """Messages that follow a state which has seen the earlier ones, the last of them to its end and no further.

    Raises RequestError for a template that does not write earlier turns down, as :func:`render_seen`.
    """
    asked, said = _unused(messages)
    before = (Message("user", asked), Message("assistant", said))
    rendered = template.render((*before, *messages), options=options)
    segments = skip_text(rendered.segments, _find(template, rendered.text, said) + 1)
    return Conversation(_encode(tokenizer, segments), rendered.opening, ())


def render_seen(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message], options: Mapping[str, Any], follows: bool
) -> tuple[int, ...]:
    """The ids of messages that are only to be read, to the end of the last one's text: for a state to go on from."""
    asked, said = _unused(messages)
    last = messages[-1]
    marked = (*messages[:-1], Message(last.role, last.content.rstrip() + asked))
    before = (Message("user", "."), Message("assistant", said)) if follows else ()
    rendered = template.render((*before, *marked), open_answer=False, options=options)
    first = _find(template, rendered.text, said) + 1 if follows else 0
    end = _find(template, rendered.text, asked)
    return _encode(tokenizer, _first_text(skip_text(rendered.segments, first), end - first))


def _unused(messages: Sequence[Message]) -> tuple[str, str]:
    """Two private characters that stand in none of the messages."""
    used = set().union(*(message.content for message in messages))
    free = (char for char in map(chr, range(0xE000, 0xF900)) if char not in used)
    return next(free, _PROBE), next(free, _OTHER_PROBE)


def _find(template: ChatTemplate, text: str, mark: str) -> int:
    place = text.find(mark)
    if place < 0:
        raise RequestError(f"the chat template {template.name} does not write earlier turns down: no state can be used")
    return place


def _encode(tokenizer: Tokenizer, segments: Iterable[Segment]) -> tuple[int, ...]:
    return tuple(token for part in segments for token in tokenizer.encode(part.text, allow_special=part.is_control))


def _first_text(segments: Iterable[Segment], count: int) -> list[Segment]:
    kept = []
    for segment in segments:
        if count <= 0:
            break
        kept.append(Segment(segment.text[:count], segment.is_control and len(segment.text) <= count))
        count -= len(segment.text)
    return kept


def _places(
    template: ChatTemplate, messages: Sequence[Message], text: str, options: Mapping[str, Any]
) -> Iterable[int]:
    """Characters of the prompt that it has in common with likely later ones: the next turn of this conversation (whose
    past is written without reasoning), another last message, another conversation with the same system message."""
    first = next((i for i, message in enumerate(messages) if message.role != "system"), 0)
    variants = [(*messages, Message("assistant", _PROBE))]
    variants += [
        (*messages[:i], Message(messages[i].role, _PROBE), *messages[i + 1 :]) for i in {first, len(messages) - 1}
    ]
    for number, variant in enumerate(variants):
        try:
            other = template.render(variant, open_answer=number > 0, options=options).text
        except KittiwakeError:  # a template that takes no such conversation: then none will come
            continue
        common = _common_length(text, other)
        # What stands after a space is often one token with it.
        yield len(text[:common].rstrip())


def _common_length(one: str, other: str) -> int:
    """How many characters two texts begin with alike; by halves, since texts may be long."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _tokens_before(
    tokenizer: Tokenizer, segments: Sequence[Segment], parts: Sequence[Sequence[int]], chars: int
) -> int:
    """How many tokens end within the first ``chars`` characters; none of those counted reaches beyond."""
    count = 0
    for segment, ids in zip(segments, parts, strict=True):
        if chars < len(segment.text):
            return count + (0 if segment.is_control else _tokens_within(tokenizer, segment.text, ids, chars))
        count += len(ids)
        chars -= len(segment.text)
    return count


def _tokens_within(tokenizer: Tokenizer, text: str, ids: Sequence[int], chars: int) -> int:
    ends = list(accumulate(len(tokenizer.token_bytes(token)) for token in ids))
    if not ends or ends[-1] != len(text.encode()):  # a tokenizer that puts a space in front, or folds characters
        return 0
    limit = len(text[:chars].encode())
    return sum(1 for end in ends if end <= limit)
