"""The answer to one request as it grows: tokens → text, stop strings, and which tokens are accepted."""

from __future__ import annotations

from typing import NamedTuple

from kittiwake.engine.request import SamplingParams
from kittiwake.text.stops import StopMatcher
from kittiwake.text.stream import TextStream
from kittiwake.text.tokenizer import Tokenizer


class Step(NamedTuple):
    """What one token did: text that may be shown now, and why the answer ended, if it did."""

    text: str
    finish_reason: str | None


class Answer:
    """Follows the tokens drawn for a request.

    A token is *accepted* when all of its text stands before the end of the answer: tokens that spelled a stop string,
    and an end-of-text token, are drawn but not accepted.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, stops: StopMatcher | None = None) -> None:
        """``stops`` is a matcher of ``params.stop`` for another answer, where there is one."""
        self.params = params
        self.tokens: list[int] = []
        self._ends = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(tokenizer.eos_ids)
        )
        self._stream = TextStream(tokenizer)
        self._stops = StopMatcher(params.stop) if stops is None else stops.another()
        self._chars_before_stops = 0
        self._borders: list[int | None] = []  # a token's end in chars of the answer; None inside a character
        self._chars = 0
        self._end_chars: int | None = None
        self._ended_by_token = False

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end the answer."""
        return tuple(sorted(self._ends))

    @property
    def banned_now(self) -> tuple[int, ...]:
        """Ids the next token may not be: ends of the answer while it is shorter than ``min_tokens``."""
        if len(self.tokens) >= self.params.min_tokens:
            return ()
        return self.ends

    @property
    def is_decided(self) -> bool:
        """Whether no drawn token can still be taken back: no text and no character is held."""
        return self._stops.held == 0 and not self._stream.pending

    def push(self, token: int) -> Step:
        """Take the next drawn token."""
        self.tokens.append(token)
        if token in self._ends:
            self._ended_by_token = True
            return Step(self._rest(), "stop")
        piece = self._stream.push(token)
        self._chars += len(piece)
        self._borders.append(None if self._stream.pending else self._chars)
        text = self._through_stops(piece)
        if self._end_chars is not None:
            return Step(text, "stop")
        if len(self.tokens) >= self.params.max_tokens:
            rest = self._rest()
            return Step(text + rest, "stop" if self._end_chars is not None else "length")
        return Step(text, None)

    def _through_stops(self, piece: str) -> str:
        """Match a piece of text against the stop strings; they count from the ``min_tokens``-th token on."""
        if len(self.tokens) < self.params.min_tokens:
            self._chars_before_stops += len(piece)
            return piece
        result = self._stops.push(piece)
        if result.hit is not None and self._end_chars is None:
            self._end_chars = self._chars_before_stops + self._stops.accepted_chars
        return result.text

    def _rest(self) -> str:
        """Text still held when the answer ends; an open last character becomes U+FFFD."""
        if self._end_chars is not None:
            return ""
        text = self._through_stops(self._stream.flush())
        return text if self._end_chars is not None else text + self._stops.flush()

    @property
    def accepted(self) -> int:
        """How many of the drawn tokens are part of the answer, once it has ended."""
        drawn = len(self.tokens) - (1 if self._ended_by_token else 0)
        if self._end_chars is None:
            return drawn
        whole = [i + 1 for i, end in enumerate(self._borders) if end is not None and end <= self._end_chars]
        return max(whole, default=0)
