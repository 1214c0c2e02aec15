"""Events of the engine → the choices of an answer, their usage and timings, and log-probabilities in both shapes."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kittiwake.engine.request import TokenLogprob
from kittiwake.server.engine_client import AnswerEnd, AnswerEvent, EngineError, Failure
from kittiwake.text.reasoning import CLOSING, ReasoningSplitter
from kittiwake.text.tokenizer import Tokenizer


@dataclass
class Piece:
    """What was added to a choice: by one event, or by several that were ready together."""

    index: int
    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


class Choice:
    """One answer as it grows. ``opening`` is None where reasoning is not told apart."""

    def __init__(self, index: int, opening: str | None = None, *, keeps: bool = True) -> None:
        self.index = index
        self.text = ""
        self.reasoning = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.end: AnswerEnd | None = None
        self._opening = opening
        self._splitter = None if opening is None else ReasoningSplitter(opening)
        self._keeps = keeps
        self._texts: list[str] = []
        self._thoughts: list[str] = []

    def push(self, event: AnswerEvent, piece: Piece) -> None:
        """Take an event and add what it brings to ``piece``. Raises EngineError where the answer has failed."""
        text, reasoning = event.text, ""
        if self._splitter is not None:
            reasoning, text = self._splitter.push(text)
            if event.end is not None:
                rest = self._splitter.flush()
                reasoning, text = reasoning + rest.reasoning, text + rest.answer
        self.token_ids += event.token_ids
        piece.text += text
        piece.reasoning += reasoning
        piece.token_ids += event.token_ids
        piece.logprobs += event.logprobs
        if self._keeps:
            self._texts.append(text)
            self._thoughts.append(reasoning)
            self.logprobs += event.logprobs
        if event.end is not None:
            self._finish(event.end, piece)

    def _finish(self, end: AnswerEnd, piece: Piece) -> None:
        if end.reason not in ("stop", "length"):
            raise EngineError(end.failure or Failure("the answer was broken off", "ask again", 503, "aborted"))
        self.end = end
        self.text, self.reasoning = "".join(self._texts), "".join(self._thoughts)
        piece.finish_reason = end.reason

    @property
    def has_reasoning(self) -> bool:
        """Whether there was a block of reasoning, be it empty."""
        return self._splitter is not None and self._splitter.has_reasoning

    def reasoning_tokens(self, tokenizer: Tokenizer) -> int:
        """Drawn tokens up to the end of the reasoning; those that close it are counted, unless nothing was thought."""
        if not self.has_reasoning or CLOSING in (self._opening or ""):
            return 0
        before = (self._opening or "").encode()
        pieces = [tokenizer.token_bytes(token) for token in self.token_ids]
        found = (before + b"".join(pieces)).find(CLOSING.encode())
        if found < 0:
            return len(self.token_ids)
        end, count, position = found + len(CLOSING), 0, len(before)
        while position < end:
            position += len(pieces[count])
            count += 1
        return 0 if before and found <= len(before) else count


@dataclass(frozen=True)
class PromptAnswers:
    """A prompt and the choices drawn for it."""

    prompt_tokens: int
    choices: Sequence[Choice]

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not read again; the choices share one prompt."""
        return min(self.prompt_tokens, max((c.end.cached_tokens for c in self.choices if c.end), default=0))


def usage(answers: Iterable[PromptAnswers], tokenizer: Tokenizer) -> dict[str, Any]:
    """Counts as OpenAI has them, over all prompts and choices."""
    answers = list(answers)
    choices = [choice for one in answers for choice in one.choices]
    prompt = sum(one.prompt_tokens for one in answers)
    drawn = sum(len(choice.token_ids) for choice in choices)
    details = {"cached_tokens": sum(one.cached_tokens for one in answers), "cache": _cache_told(answers)}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": drawn,
        "total_tokens": prompt + drawn,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": sum(c.reasoning_tokens(tokenizer) for c in choices)},
    }


def _cache_told(answers: Iterable[PromptAnswers]) -> str:
    """Whether the first prompt was found in the cache, "hit", or why not; empty where it was not looked for."""
    ends = (choice.end for one in answers for choice in one.choices if choice.end is not None)
    return next((end.cache for end in ends), "")


def timings(answers: Iterable[PromptAnswers]) -> dict[str, Any]:
    """What the answer took, in ms and tokens a second; of several choices the longest times and all tokens."""
    answers = list(answers)
    ends = [choice.end for one in answers for choice in one.choices if choice.end is not None]
    cached = sum(one.cached_tokens for one in answers)
    read = sum(one.prompt_tokens for one in answers) - cached
    drawn = sum(len(choice.token_ids) for one in answers for choice in one.choices)
    queue, prefill, decode = (
        max((getattr(end, name) for end in ends), default=0.0) for name in ("queue_ms", "prefill_ms", "decode_ms")
    )
    return {
        "queue_ms": round(queue, 3),
        "cache_n": cached,
        "cache": _cache_told(answers),
        "prompt_n": read,
        "prompt_ms": round(prefill, 3),
        "prompt_per_second": _rate(read, prefill),
        "predicted_n": drawn,
        "predicted_ms": round(decode, 3),
        "predicted_per_second": _rate(drawn, decode),
    }


def _rate(tokens: int, milliseconds: float) -> float | None:
    return round(tokens * 1e3 / milliseconds, 2) if milliseconds > 0 else None


def spelled(token: bytes) -> str:
    """A token as text; bytes that are no whole characters as OpenAI writes them, so that no two look alike."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def chat_logprobs(logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    """The shape of chat completions: one entry a drawn token, those of reasoning and of the end among them."""
    content = [{**_entry(one), "top_logprobs": [_entry(other) for other in one.top]} for one in logprobs]
    return {"content": content, "refusal": None}


def _entry(one: TokenLogprob) -> dict[str, Any]:
    return {"token": spelled(one.token_bytes), "logprob": one.logprob, "bytes": list(one.token_bytes)}


class TextOffsets:
    """Where each token of a text begins, in characters; a token inside a character begins where that does."""

    def __init__(self, chars: int = 0) -> None:
        self._chars = chars
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: bytes) -> int:
        """The offset of the next token."""
        begin = self._chars
        self._chars += len(self._decoder.decode(token))
        return begin


def completion_logprobs(
    logprobs: Iterable[TokenLogprob | None], ids: Sequence[bytes], offsets: TextOffsets
) -> dict[str, Any]:
    """The shape of completions: four lists of the same length. ``ids`` are the bytes of all tokens; a logprob is None
    where a token had nothing before it."""
    found = list(logprobs)
    return {
        "tokens": [spelled(token) for token in ids],
        "token_logprobs": [None if one is None else one.logprob for one in found],
        "top_logprobs": [None if one is None else _top(one) for one in found],
        "text_offset": [offsets.push(token) for token in ids],
    }


def _top(one: TokenLogprob) -> dict[str, float]:
    """The likeliest by their spelling, the token itself among them."""
    likeliest: dict[str, float] = {}
    for other in (*one.top, one):
        likeliest.setdefault(spelled(other.token_bytes), other.logprob)
    return likeliest
