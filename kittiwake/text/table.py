"""What every tokenizer here shares: a table from token id to exact bytes, and the checks at its edges."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from kittiwake.errors import RequestError

TOKENIZER_FILE = "tokenizer.json"
# The largest published tokenizer files have some 35 MB.
MAX_FILE_BYTES = 128 << 20


def utf8(text: str) -> bytes:
    """The UTF-8 bytes of ``text``.

    Raises RequestError for anything that is not a string, and for lone surrogates: JSON can spell them (``"\\ud800"``),
    but no byte sequence means them, so no token can either.
    """
    if not isinstance(text, str):
        raise RequestError(f"text to encode must be a string, found {type(text).__name__}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}",
            "send text that has a UTF-8 form",
        ) from None


class TokenTable:
    """Token id → bytes. An entry is the token's bytes, ``b""`` for a token that is no text (end of text, control),
    or None for an id that means nothing (padding, a hole in the vocabulary).

    Ids come from users as well as from the sampler, so each look-up is checked: a negative id must not count from the
    end of the table.
    """

    control_texts: tuple[str, ...] = ()

    def __init__(self, table: Sequence[bytes | None], eos_ids: tuple[int, ...]) -> None:
        self._table = tuple(table)
        self.vocab_size = len(self._table)
        self.eos_ids = eos_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, which may be part of a character; ``b""`` for end of text and unused ids.

        Raises RequestError for an id outside 0 … vocab_size - 1 or one that is no integer.
        """
        try:
            index = operator.index(token_id)
        except TypeError:
            raise RequestError(f"a token id must be an integer, found {token_id!r}") from None
        if not 0 <= index < self.vocab_size:
            raise RequestError(f"token id {index} is outside the tokenizer's range 0 to {self.vocab_size - 1}")
        return self._table[index] or b""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``: their bytes laid end to end, then UTF-8 with U+FFFD for what is not valid.

        Raises RequestError for an id out of range.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def control_spans(self, text: str) -> list[tuple[int, int]]:
        """Where ``text`` spells control tokens: nowhere, in a vocabulary that has none."""
        return []

    def is_valid(self, token_id: int) -> bool:
        """Whether a sampler may produce ``token_id``; False, never an error, for ids beyond the vocabulary.

        A model may have more rows than the tokenizer has ids: its spare rows are masked by this answer too.
        """
        return 0 <= token_id < self.vocab_size and self._table[token_id] is not None
