"""A text in blocks has the tokens of the whole, wherever the blocks end."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kittiwake.text.bytes_level import BytesTokenizer
from kittiwake.text.long_text import encode_blocks

TEXT = st.text(alphabet="hello wrd.\n\u3002\u65e5\U0001f600\u0301<|>", max_size=300)


@pytest.mark.parametrize("kind", ["world", "byte_level", "byte_fallback", "unigram", "bytes"])
@given(text=TEXT, cuts=st.lists(st.integers(0, 300), max_size=6), repeat=st.integers(1, 4))
def test_blocks_give_the_tokens_of_the_whole(
    request: pytest.FixtureRequest, kind: str, text: str, cuts: list[int], repeat: int
) -> None:
    tokenizer: Any = BytesTokenizer() if kind == "bytes" else request.getfixturevalue(kind)
    text *= repeat
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    blocks = [text[first:last] for first, last in pairwise(borders)]
    pieces = list(encode_blocks(tokenizer, blocks))
    assert [token for piece in pieces for token in piece] == tokenizer.encode(text)
    assert all(pieces)


@pytest.mark.parametrize("kind", ["world", "byte_level"])
def test_little_is_held_between_blocks(request: pytest.FixtureRequest, kind: str) -> None:
    tokenizer: Any = request.getfixturevalue(kind)
    block = "the end of text, hello world "
    given_out = held_most = read = 0

    def blocks() -> Any:
        nonlocal read
        for _ in range(200):
            read += len(block)
            yield block

    for piece in encode_blocks(tokenizer, blocks()):
        given_out += sum(len(tokenizer.token_bytes(token)) for token in piece)
        held_most = max(held_most, read - given_out)
    assert given_out == 200 * len(block)
    assert held_most < 400
