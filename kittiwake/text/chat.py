"""Messages → the text a chat model was trained on. Templates of turns as data; Jinja ones stand in jinja_template.py.

Rendering gives *segments*: text, and control tokens that the template itself wrote. Text of a message can never become
a control token, whatever it spells, because only control segments are encoded with special tokens allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kittiwake.errors import RequestError
from kittiwake.text.reasoning import split_reasoning
from kittiwake.text.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant")
MAX_MESSAGES = 100_000
_KEYS = {"role", "content", "reasoning_content"}


@dataclass(frozen=True)
class Message:
    """One checked message; ``role`` is one of ROLES, ``content`` is not empty."""

    role: str
    content: str


@dataclass(frozen=True)
class Segment:
    """A run of text, or (``is_control``) the spelling of one control token that the template wrote."""

    text: str
    is_control: bool = False


@dataclass(frozen=True)
class Rendered:
    """A conversation as the model is to read it."""

    segments: tuple[Segment, ...]
    opening: str = ""
    """How the prompt begins the answer already, such as ``<think``: for :class:`ReasoningSplitter`."""

    @property
    def text(self) -> str:
        """All segments laid end to end."""
        return "".join(segment.text for segment in self.segments)


class ChatTemplate(Protocol):
    """A way to write a conversation down."""

    @property
    def name(self) -> str:
        """What it is called in messages: a name of TEMPLATES, or the file it came from."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings that end an answer."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer, beside the tokenizer's end of text."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        open_answer: bool = True,
        as_said: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Write the messages down; ``open_answer`` begins the answer that is to come.

        ``as_said`` leaves the assistant's messages as they are, apart from spaces around them: for going on from a
        state that has seen them so. ``options`` are variables of a Jinja template. Raises RequestError for messages or
        options that the template does not take, TokenizerError for a template that fails.
        """


@dataclass(frozen=True)
class TurnTemplate:
    """Turns as plain text, blank lines between them, no control tokens."""

    name: str
    user: str
    """Format of a user message: ``{}`` is its text."""
    lead: str
    """What stands before an answer: ``Assistant:``."""
    system: str = "{}"
    stops: tuple[str, ...] = ()
    opening: str = ""
    """How an answer is begun for the model, after the lead."""
    gap: str = "\n\n"
    """What stands between a message and the lead of its answer."""
    stop_ids: tuple[int, ...] = field(default=(), init=False)

    def render(
        self,
        messages: Sequence[Message],
        *,
        open_answer: bool = True,
        as_said: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """See :class:`ChatTemplate`. Blank lines inside messages close up, since a blank line ends a turn."""
        if options:
            raise RequestError(f"the chat template {self.name} has no option {', '.join(sorted(options))}")
        text = ""
        for message in messages:
            if message.role == "assistant":
                text += (self.gap if text else "") + self._answer(message.content, as_said)
            else:
                form = self.user if message.role == "user" else self.system
                text += ("\n\n" if text else "") + form.replace("{}", clean(message.content))
        if open_answer:
            text += self.gap + self.lead + (f" {self.opening}" if self.opening else "")
        return Rendered((Segment(text),), self.opening if open_answer else "")

    def _answer(self, content: str, as_said: bool) -> str:
        answer = content.strip() if as_said else clean(split_reasoning(content).answer)
        return f"{self.lead} {answer}" if answer else self.lead


def _g1(name: str, opening: str) -> TurnTemplate:
    # No blank line among the stops: answers of these models have paragraphs.
    return TurnTemplate(name, "User: {}", "Assistant:", "System: {}", ("\n\nUser:", "\nUser:"), opening)


TEMPLATES: Mapping[str, TurnTemplate] = {
    template.name: template
    for template in (
        _g1("g1", ""),
        _g1("g1-think", "<think"),
        _g1("g1-fast", "<think>\n</think"),
        TurnTemplate("raven", "Bob: {}", "Alice:", stops=("\n\n", "\nBob:")),
        TurnTemplate("qa", "Question: {}", "Answer:", stops=("\n\n", "\nQuestion:")),
        TurnTemplate("plain", "{}", "", gap=""),
    )
}
"""Templates by name: g1 for World and G1 models (plain, thinking, made to answer at once), raven and qa for older ones,
plain for models that were never taught to chat and write on from what is said."""


def clean(text: str) -> str:
    """A message as a turn may hold it: LF line ends, no blank line, no space around it."""
    return re.sub(r"\n{2,}", "\n", text.replace("\r\n", "\n")).strip()


def read_messages(messages: object, *, open_answer: bool = True) -> tuple[Message, ...]:
    """Check messages as an API has them: objects with ``role`` and ``content``.

    ``developer`` is taken for ``system``; content is a text, or a list of parts of type "text", which are joined.
    ``reasoning_content`` of an answer is left out, as earlier reasoning always is. Raises RequestError naming the
    message and the value, also when the last one is not there to be answered (``open_answer``).
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise RequestError(f"messages must be a list of messages, got {_short(messages)}")
    found = [_read_message(number, message) for number, message in enumerate(messages, start=1)]
    if not found:
        raise RequestError("there are no messages", "give at least one message with role user")
    if len(found) > MAX_MESSAGES:
        raise RequestError(f"{len(found)} messages are more than the {MAX_MESSAGES} that are taken")
    if open_answer and found[-1].role == "assistant":
        raise RequestError("the last message is the assistant's, so there is nothing to answer", "end with role user")
    return tuple(found)


def _read_message(number: int, message: object) -> Message:
    where = f"message {number}"
    if isinstance(message, Message):
        message = {"role": message.role, "content": message.content}
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content, got {_short(message)}")
    unknown = sorted(str(key) for key in message if key not in _KEYS)
    if unknown:
        raise RequestError(f"{where} has {', '.join(unknown)}, which chat does not use", f"keys: {', '.join(_KEYS)}")
    role = message.get("role")
    if role == "developer":
        role = "system"
    if role not in ROLES:
        raise RequestError(f"{where} has the role {_short(role)}", f"roles: {', '.join(ROLES)} (or developer)")
    reasoning = message.get("reasoning_content")
    if reasoning is not None and (role != "assistant" or not isinstance(reasoning, str)):
        raise RequestError(f"{where} ({role}): reasoning_content is a text that only the assistant's messages have")
    content = _read_content(f"{where} ({role})", message.get("content"))
    if not content.strip():
        raise RequestError(f"{where} ({role}) is empty", "leave it out, or give it some text")
    return Message(str(role), content)


def _read_content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"{where}: content must be a text, got {_short(content)}")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise RequestError(f"{where}: a content part of type {_short(kind)}", "this model reads text only")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise RequestError(f"{where}: a text part has exactly type and text, got {_short(dict(part))}")
        texts.append(part["text"])
    return "".join(texts)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:76] + " ..."


def encode_segments(tokenizer: Tokenizer, segments: Iterable[Segment]) -> list[int]:
    """Token ids. Each segment is encoded by itself: merges do not reach over the border of a control token, which is
    where a tokenizer divides its text anyway."""
    return [token for part in segments for token in tokenizer.encode(part.text, allow_special=part.is_control)]


def skip_text(segments: Iterable[Segment], count: int) -> list[Segment]:
    """The segments after the first ``count`` characters; what is left of a cut control token is text."""
    rest = []
    for segment in segments:
        if count < len(segment.text):
            rest.append(Segment(segment.text[count:], segment.is_control and count == 0))
        count = max(0, count - len(segment.text))
    return rest
