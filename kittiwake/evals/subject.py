"""What a measure asks of a model: the part of ``LLM`` that it drives. A fake of these few names serves in tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from kittiwake.engine.request import Completion, SamplingParams
from kittiwake.errors import UsageError
from kittiwake.text.tokenizer import Prompt, Tokenizer


class Subject(Protocol):
    """A model under measurement."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer in force."""

    @property
    def vocab_size(self) -> int:
        """Rows of the model's output: ids run from 0 to vocab_size - 1."""

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """Answer all prompts; completions in their order."""

    def score(self, ids: Sequence[int]) -> np.ndarray:
        """Natural-log probability of ids[1:], float64 [len(ids) - 1]."""

    def score_stream(self, pieces: Iterable[Sequence[int]]) -> Iterator[np.ndarray]:
        """The same of one text whose ids come in pieces."""


def begin_token(tokenizer: Tokenizer) -> int:
    """The token that stands for the start of a text: RWKV models use their end of text for both.

    Raises UsageError where the tokenizer has none, as that of bytes.
    """
    if not tokenizer.eos_ids:
        raise UsageError(f"the tokenizer '{tokenizer.kind}' has no end-of-text token to begin with", "leave --bos away")
    return tokenizer.eos_ids[0]
