"""Token bytes → text, a token at a time, without splitting or dropping a character."""

from __future__ import annotations

import codecs

from kittiwake.text.tokenizer import Tokenizer


class TextStream:
    """Turns generated token ids into text as they come.

    What push() and flush() return, joined, is the UTF-8 decoding of all token bytes with U+FFFD for what is invalid.
    At most three bytes are held between calls, so a token costs the same however long the text has grown.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.pending = False
        """Whether bytes of an unfinished character are held."""

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; ``""`` when its last character is still open.

        Raises RequestError for an id out of range.
        """
        data = self._tokenizer.token_bytes(token_id)
        if not self.pending and data.isascii():  # nearly always: whole characters, and nothing to join them to
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self.pending = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """End the text: U+FFFD for a character that was never completed, else ``""``. The stream can start anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self.pending = False
        return rest
