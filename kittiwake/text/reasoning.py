"""What a model thinks before it answers (``<think> … </think>``), told apart from the answer while it streams."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

OPENING = "<think>"
CLOSING = "</think>"
_SPACES = " \t\r\n"


class Split(NamedTuple):
    """Text of one piece, by what it belongs to."""

    reasoning: str
    answer: str


class _Stage(Enum):
    START = "start"
    REASONING = "reasoning"
    ANSWER = "answer"


class ReasoningSplitter:
    """Splits text that arrives in pieces; the outcome is the same wherever the pieces are cut.

    Only a block that the text begins with is reasoning: ``<think>`` further on is part of the answer, which may well
    speak of it. Spaces and newlines in front of the reasoning and in front of the answer are dropped, everything else
    is kept. Reasoning that is never closed is reasoning to its end.

    ``prefix`` is how the prompt began the answer already (``<think``, say): it decides like text of the answer, and of
    a finished block nothing is returned.
    """

    def __init__(self, prefix: str = "") -> None:
        self._stage = _Stage.START
        self._is_untouched = False  # nothing came after the prefix
        self._held = ""
        self._at_start = True  # nothing but space so far of the reasoning, or of the answer
        self._has_reasoning = False
        self.push(prefix)
        self._is_untouched = True

    @property
    def has_reasoning(self) -> bool:
        """Whether a block was opened."""
        return self._has_reasoning

    def push(self, text: str) -> Split:
        """Take the next piece; returns what is decided."""
        reasoning, answer = [], []
        self._is_untouched = self._is_untouched and not text
        while text:
            stage = self._stage
            if stage is _Stage.START:
                text = self._start(text)
            elif stage is _Stage.REASONING:
                found, text = self._reason(text)
                reasoning.append(found)
            else:
                answer.append(self._without_lead(text))
                text = ""
        return Split("".join(reasoning), "".join(answer))

    def flush(self) -> Split:
        """The text has ended: what was held back goes where the text stands."""
        held, self._held = "" if self._is_untouched else self._held, ""
        if self._stage is _Stage.REASONING:
            return Split(self._without_lead(held), "")
        return Split("", held)

    def _start(self, text: str) -> str:
        """Look for the opening; returns the text that the next stage has to take."""
        text, self._held = (self._held + text).lstrip(_SPACES), ""
        if text.startswith(OPENING):
            self._stage, self._has_reasoning = _Stage.REASONING, True
            return text.removeprefix(OPENING)
        if OPENING.startswith(text):
            self._held = text
            return ""
        self._stage = _Stage.ANSWER
        return text

    def _reason(self, text: str) -> tuple[str, str]:
        """(reasoning that is decided, text after the closing)."""
        text, self._held = self._held + text, ""
        inner, closing, rest = text.partition(CLOSING)
        if closing:
            found = self._without_lead(inner)
            self._stage, self._at_start = _Stage.ANSWER, True
            return found, rest
        keep = next((n for n in range(len(CLOSING) - 1, 0, -1) if text.endswith(CLOSING[:n])), 0)
        decided = text[: len(text) - keep]
        self._held = text[len(decided) :]
        return self._without_lead(decided), ""

    def _without_lead(self, text: str) -> str:
        if self._at_start:
            text = text.lstrip(_SPACES)
            self._at_start = not text
        return text


def split_reasoning(text: str, prefix: str = "") -> Split:
    """The same for a whole text."""
    splitter = ReasoningSplitter(prefix)
    first, last = splitter.push(text), splitter.flush()
    return Split(first.reasoning + last.reasoning, first.answer + last.answer)
