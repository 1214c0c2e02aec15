"""Tokens of a text that is longer than memory should hold: the tokens of the whole, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kittiwake.text.bpe import HFTokenizer
from kittiwake.text.bytes_level import BytesTokenizer
from kittiwake.text.tokenizer import Tokenizer
from kittiwake.text.world import WorldTokenizer

WORLD_LONGEST_BYTES = 128
"""The longest World token: what stands further off cannot change a choice."""


def encode_blocks(tokenizer: Tokenizer, blocks: Iterable[str]) -> Iterator[list[int]]:
    """The ids of the text that ``blocks`` make up, piece by piece; laid end to end they are those of the whole.

    Between blocks only the text whose tokens are not yet sure is held: a few characters for World and bytes, a word for
    a byte-level ``tokenizer.json``. For other kinds nothing is sure before the end, so the whole text is held.
    """
    held = ""
    for block in blocks:
        held += block
        ids, chars = _sure(tokenizer, held)
        held = held[chars:]
        if ids:
            yield ids
    if held:
        yield tokenizer.encode(held)


def _sure(tokenizer: Tokenizer, text: str) -> tuple[list[int], int]:
    """Tokens that a text begins with whatever follows it, and how many characters they spell."""
    if isinstance(tokenizer, BytesTokenizer):
        return tokenizer.encode(text), len(text)
    if isinstance(tokenizer, HFTokenizer):
        chars = tokenizer.last_cut(text)
        return tokenizer.encode(text[:chars]) if chars else [], chars
    if isinstance(tokenizer, WorldTokenizer):
        return _sure_world(tokenizer, text)
    return [], 0


def _sure_world(tokenizer: WorldTokenizer, text: str) -> tuple[list[int], int]:
    """Greedy matches whose choice saw all it could see, up to the border of a character."""
    ids = tokenizer.encode(text)
    tail = b""
    while ids and (len(tail) < WORLD_LONGEST_BYTES or tail[0] & 0xC0 == 0x80):
        tail = tokenizer.token_bytes(ids.pop()) + tail
    return ids, len(text) - len(tail.decode("utf-8")) if ids else 0
