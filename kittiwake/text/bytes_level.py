"""Tokens that are bytes: a vocabulary of 256 without an end-of-text id."""

from __future__ import annotations

import hashlib

from kittiwake.text.table import TokenTable, utf8


class BytesTokenizer(TokenTable):
    """Token id = byte value. No file is needed to rebuild it, and no id is left over to mean end of text."""

    kind = "bytes"

    def __init__(self) -> None:
        super().__init__([bytes([value]) for value in range(256)], eos_ids=())

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """The UTF-8 bytes of ``text``; there are no special tokens, so ``allow_special`` changes nothing.

        Raises RequestError for text without a UTF-8 form.
        """
        return list(utf8(text))

    def files(self) -> dict[str, bytes]:
        """Nothing: the kind alone rebuilds this tokenizer."""
        return {}

    def digest(self) -> str:
        """Hex SHA-256 of the 256 bytes in order."""
        return hashlib.sha256(bytes(range(256))).hexdigest()
