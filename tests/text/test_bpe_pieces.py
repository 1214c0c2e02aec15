"""Long texts are encoded in pieces: the same tokens as in one go, at a fraction of the memory."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kittiwake.text import bpe
from kittiwake.text.bpe import HFTokenizer

TEXTS = st.text(alphabet="hello wrd'stvm.,0\n\té\u0301안<|>", max_size=120)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe, "PIECE_CHARS", 5)


@given(text=TEXTS)
def test_pieces_give_the_tokens_of_the_whole(byte_level: HFTokenizer, text: str) -> None:
    whole = list(byte_level._plain.encode(text, add_special_tokens=False).ids)
    assert "".join(bpe._pieces(text)) == text
    assert [token for piece in bpe._pieces(text) for token in byte_level._ids(byte_level._plain, piece)] == whole
    assert byte_level._ids(byte_level._plain, text) == whole


def test_a_long_text_is_cut_and_keeps_its_special_tokens(byte_level: HFTokenizer) -> None:
    text = "hello world <|im_end|> the end of text " * 9
    assert len(list(bpe._pieces(text))) > 20
    for special in (False, True):
        backend = byte_level._with_specials if special else byte_level._plain
        assert byte_level.encode(text, allow_special=special) == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}},
        {"normalizer": {"type": "Lowercase"}},
    ],
)
def test_others_are_never_cut(byte_level_json: dict[str, Any], change: dict[str, Any]) -> None:
    assert bpe._splits_at_words(byte_level_json, [])
    assert not bpe._splits_at_words({**copy.deepcopy(byte_level_json), **change}, [])


def test_added_tokens_that_reach_across_words_forbid_cuts(byte_level_json: dict[str, Any]) -> None:
    spec = copy.deepcopy(byte_level_json)
    number = max(token["id"] for token in spec["added_tokens"]) + 1
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": number, "content": "o w", "special": False})
    tokenizer = HFTokenizer(json.dumps(spec).encode())
    text = "hello world " * 20
    assert not tokenizer._may_cut
    assert tokenizer.encode(text) == tokenizer._plain.encode(text, add_special_tokens=False).ids


def test_only_byte_level_files_are_cut(
    byte_level: HFTokenizer, byte_fallback: HFTokenizer, unigram: HFTokenizer
) -> None:
    assert [one._may_cut for one in (byte_level, byte_fallback, unigram)] == [True, False, False]
