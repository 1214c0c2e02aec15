"""What the HTTP side needs of an engine, wherever that runs: one protocol and the plain values that cross it.

Every value is a frozen dataclass of plain types, so that it can be sent to another process as it is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kittiwake.engine.request import SamplingParams, TokenLogprob
from kittiwake.errors import KittiwakeError
from kittiwake.text.chat import TEMPLATES, ChatTemplate, TurnTemplate
from kittiwake.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Failure:
    """An error as data: what :class:`EngineError` is made of on this side."""

    message: str
    hint: str = ""
    http_status: int = 500
    code: str = ""
    """A word for programs ("queue_full", "deadline", "state_not_found", …); empty where the status says it all."""
    retry_after_s: float | None = None
    """When to try again, where that is known: the Retry-After of a 429 or 503."""

    @classmethod
    def of(cls, error: KittiwakeError) -> Failure:
        """The same error as data."""
        if isinstance(error, EngineError):
            return error.failure
        return cls(error.message, error.hint, error.http_status)


class EngineError(KittiwakeError):
    """What an engine client raises: refused or failed, with the HTTP status of its cause.

    400 and 404 and 409: the request or the state it names; 429: a queue is full; 503: the engine is gone, loading or
    shutting down; 504: the deadline of the request has passed.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, failure.hint)
        self.failure = failure
        self.http_status = failure.http_status


@dataclass(frozen=True)
class Submission:
    """A request on its way to the engine."""

    request_id: str
    """The id of the HTTP request, for logs."""
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    """With ``n``: the samples come in one stream, told apart by their index."""
    client: str = ""
    """Whom it belongs to, for fairness between clients."""
    priority: int = 0
    """Higher goes first; 0 is usual."""
    deadline_s: float | None = None
    """Seconds from now after which it is given up (EngineError 504)."""
    cache_prompt: bool = True
    """False: the state is computed from the first token on; nothing is looked up."""
    border_tokens: tuple[int, ...] = ()
    """Places in the prompt (tokens before them, ascending) where later requests will likely branch off."""
    want_progress: bool = False
    """Whether events tell how far the prompt has been read."""
    start_from: str | None = None
    """A named state that the prompt follows."""
    keep_as: str | None = None
    """Keep the state after the answer under this name (``n`` is 1); one that exists is replaced."""


@dataclass(frozen=True)
class PromptProgress:
    """How far a prompt has been read: ``processed`` of ``total`` tokens, ``cached`` of them from a cache."""

    total: int
    processed: int
    cached: int
    elapsed_ms: float


@dataclass(frozen=True)
class AnswerEnd:
    """How a sample ended, and what it took."""

    reason: str
    """"stop", "length", "abort" (cancelled) or "error"."""
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    cached_tokens: int = 0
    """Prompt tokens whose state came from a cache."""
    cache: str = ""
    """"hit", or why not: "no_checkpoint", "prefix_changed", "disabled", …"""
    failure: Failure | None = None
    """Why, where the reason is "error"."""


@dataclass(frozen=True)
class AnswerEvent:
    """What happened to one sample: new tokens, progress of its prompt, or its end; any of them together."""

    index: int = 0
    """Which of the ``n`` samples."""
    text: str = ""
    """Whole characters only; it may trail the tokens while a character or a stop string is undecided."""
    token_ids: tuple[int, ...] = ()
    """Drawn tokens, an ending one included."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of ``token_ids`` where they were asked for."""
    progress: PromptProgress | None = None
    end: AnswerEnd | None = None
    """Set exactly once a sample, on its last event."""


class AnswerStream(Protocol):
    """The events of one accepted submission, those that are ready together in one tuple.

    Iteration ends after the last sample's end. A sample that fails has an end with a failure; an engine that goes away
    makes ``__anext__`` raise EngineError (503).
    """

    def __aiter__(self) -> AsyncIterator[tuple[AnswerEvent, ...]]:
        """Itself."""

    async def __anext__(self) -> tuple[AnswerEvent, ...]:
        """What is ready, as soon as there is anything: never an empty tuple."""

    async def aclose(self) -> None:
        """Nobody will read on: cancels whatever has not ended, at once and without waiting. Twice is harmless."""


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of the tokens of a prompt, each given all before it."""

    tokens: tuple[TokenLogprob | None, ...]
    """One a token, with the likeliest beside it as asked; None for a first token that has nothing before it."""


@dataclass(frozen=True)
class NamedState:
    """A state that is kept under a name."""

    name: str
    tokens: int
    """How many tokens it has seen; 0 for a tuned initial state."""
    size_bytes: int
    created_s: int
    """Unix time."""
    digest: str = ""
    """sha-256 (hex) that tells states with different values apart."""
    initial: str = ""
    """sha-256 (hex) of the tuned state that it began from; empty where it began from zeros."""


@dataclass(frozen=True)
class EngineStats:
    """What the engine is doing now."""

    running: int = 0
    waiting: int = 0
    free_slots: int = 0
    slots: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    """Further figures by name."""


@dataclass(frozen=True)
class TokenizerSource:
    """Enough to make a tokenizer again: arguments of :func:`load_tokenizer`."""

    kind: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerSource:
        """That of a tokenizer at hand."""
        return cls(tokenizer.kind, dict(tokenizer.files()), tuple(tokenizer.eos_ids))

    def open(self) -> Tokenizer:
        """The tokenizer. Raises TokenizerError for files that make none."""
        return load_tokenizer(self.kind, self.files, self.eos_ids if self.kind == "hf" else None)


@dataclass(frozen=True)
class TemplateSource:
    """Enough to make a chat template again: a name of TEMPLATES, or the text of a Jinja one."""

    name: str
    jinja: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, template: ChatTemplate) -> TemplateSource:
        """That of a template of TEMPLATES, or of a Jinja one. Raises TypeError for one of any other kind."""
        if isinstance(template, TurnTemplate) and TEMPLATES.get(template.name) == template:
            return cls(template.name)
        from kittiwake.text.jinja_template import JinjaTemplate

        if isinstance(template, JinjaTemplate):
            return cls(template.name, template.source, dict(template.special_tokens))
        raise TypeError(f"a {type(template).__name__} cannot be sent to another process")

    def open(self, tokenizer: Tokenizer) -> ChatTemplate:
        """The template. Raises TokenizerError for one that cannot be used with this tokenizer."""
        if self.jinja is None:
            return TEMPLATES[self.name]
        from kittiwake.text.jinja_template import JinjaTemplate

        return JinjaTemplate(self.jinja, self.name, tokenizer, self.special_tokens)


@dataclass(frozen=True)
class ModelInfo:
    """The model that an engine runs."""

    name: str
    """What it is called where no ``--served-model-name`` is given: the last part of its path."""
    digest: str
    """sha-256 (hex) of its weights."""
    family: str
    dtype: str
    vocab_size: int
    layers: int
    width: int
    receipt_digest: str
    """Digest of its receipt: where it is the same, the same request gets the same bits."""
    created_s: int
    """Unix time at which it was loaded."""
    tokenizer: TokenizerSource
    template: TemplateSource | None = None
    """None for a model that was not made for conversations."""


class EngineClient(Protocol):
    """An engine, from a coroutine's side. Every method may raise EngineError (503) when the engine is gone."""

    @property
    def info(self) -> ModelInfo:
        """The model. Known before the first request is taken."""

    @property
    def is_alive(self) -> bool:
        """Whether there is an engine: False once it has died, or has been stopped."""

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken: False while the engine loads, drains or is gone."""

    async def submit(self, submission: Submission) -> AnswerStream:
        """Hand over a request; returns when the engine has taken it into its queue.

        Raises EngineError where it does not: 400 (a value the engine cannot honour), 404 (no such state), 409 (a state
        that does not fit), 429 (a queue is full), 503.
        """

    async def score(self, submission: Submission, top: int) -> PromptScores:
        """Log-probabilities of ``prompt_ids``, with the ``top`` likeliest of each place; nothing is drawn."""

    async def stats(self) -> EngineStats:
        """What the engine is doing now."""

    async def list_states(self) -> tuple[NamedState, ...]:
        """All named states, by name."""

    async def get_state(self, name: str) -> NamedState:
        """One of them. Raises EngineError (404) where there is none."""

    async def make_state(self, name: str, submission: Submission) -> NamedState:
        """Keep the state after exactly ``prompt_ids`` (following ``start_from``, if set); nothing is drawn.

        Raises EngineError (409) for a name that is taken.
        """

    async def fork_state(self, name: str, new_name: str) -> NamedState:
        """The same state under a second name. Raises EngineError (404 or 409)."""

    async def delete_state(self, name: str) -> None:
        """Forget a state; requests that started from it go on. Raises EngineError (404)."""

    async def import_state(self, name: str, path: Path, *, transpose: bool = False) -> NamedState:
        """Keep the state in a file: one that was saved, or a tuned initial state (``transpose``: [K, V] matrices).

        The file is read before this returns. Raises EngineError: 409 for a name that is taken, 422 for a file that is
        damaged or of another model.
        """

    async def export_state(self, name: str, path: Path) -> None:
        """Write a state to a new file that :meth:`import_state` and ``kittiwake run --load-state`` read."""

    async def metrics_text(self) -> str:
        """Figures of the engine and of all HTTP workers together, in the text form of Prometheus."""
