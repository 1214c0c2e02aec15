"""``tokenizer.json``: exact bytes, control tokens that users spell, lossy and damaged files."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from kittiwake.errors import RequestError, TokenizerError
from kittiwake.text.bpe import HFTokenizer, byte_alphabet
from tests.text.tiny import make_byte_fallback, make_byte_level, make_unigram

MARKS = ["<|endoftext|>", "<|padding|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "</s>", "<unk>", "<s>"]
texts = st.text(max_size=60) | st.lists(st.sampled_from([*MARKS, " ", "  ", "hello", "\n", "é", "<", ">"])).map("".join)


def raw_bytes(tokenizer: HFTokenizer, ids: list[int]) -> bytes:
    return b"".join(map(tokenizer.token_bytes, ids))


def ids_of(tokenizer: HFTokenizer, *tokens: str) -> list[int | None]:
    return [tokenizer._plain.token_to_id(token) for token in tokens]


class TestByteLevel:
    @given(texts)
    def test_token_bytes_are_the_text(self, byte_level: HFTokenizer, text: str) -> None:
        ids = byte_level.encode(text)
        assert raw_bytes(byte_level, ids) == normalize("NFC", text).encode()
        assert byte_level.decode(ids) == normalize("NFC", text)

    @given(texts)
    def test_text_never_becomes_a_control_token(self, byte_level: HFTokenizer, text: str) -> None:
        assert byte_level._controls.isdisjoint(byte_level.encode(text))
        assert all(map(byte_level.is_valid, byte_level.encode(text)))

    def test_control_tokens_are_read_only_when_asked(self, byte_level: HFTokenizer) -> None:
        text = "<|im_start|>hello<think>\n</think><|endoftext|>"
        marks = ids_of(byte_level, "<|im_start|>", "<think>", "</think>", "<|endoftext|>")
        assert None not in marks
        assert not set(marks) & set(byte_level.encode(text))
        assert [i for i in byte_level.encode(text, allow_special=True) if i in marks] == marks
        assert byte_level.decode(byte_level.encode(text)) == text

    def test_control_tokens_decode_to_nothing_but_template_marks_stay_visible(self, byte_level: HFTokenizer) -> None:
        text = "<|im_start|>hello<think>\n</think><|im_end|><|endoftext|>"
        assert byte_level.decode(byte_level.encode(text, allow_special=True)) == "hello<think>\n</think>"

    def test_runs_of_spaces_stay_tokens(self, byte_level: HFTokenizer) -> None:
        assert ids_of(byte_level, "  ")[0] in byte_level.encode("hello  world")
        assert ids_of(byte_level, "   ")[0] in byte_level.encode("hello   world")

    def test_nothing_is_added_truncated_or_padded(self, byte_level: HFTokenizer) -> None:
        ids = byte_level.encode("the end of text, hello world, the end")
        assert 4 < len(ids) < 64
        assert 0 not in ids
        assert 0 not in byte_level.encode("hello", allow_special=True)
        assert byte_level.encode("") == []

    def test_the_alphabet_is_that_of_the_library(self) -> None:
        assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
        assert (byte_alphabet()[0x20], byte_alphabet()[0x0A], byte_alphabet()[0x41]) == ("Ġ", "Ċ", "A")
        assert len(set(byte_alphabet())) == 256

    def test_ends_of_text_are_found_or_given(self, byte_level: HFTokenizer) -> None:
        im_end = byte_level._plain.token_to_id("<|im_end|>")
        assert byte_level.eos_ids == (0, im_end)
        raw = byte_level.files()["tokenizer.json"]
        given_ids = HFTokenizer(raw, eos_ids=[5])
        assert given_ids.eos_ids == (5,)
        assert given_ids.decode([5]) == ""
        assert given_ids.is_valid(5)
        for wrong in (-1, byte_level.vocab_size, "5"):
            with pytest.raises(TokenizerError, match=r"is no token of t\.json"):
                HFTokenizer(raw, "t.json", eos_ids=[wrong])  # type: ignore[list-item]

    def test_ids_out_of_range_are_refused(self, byte_level: HFTokenizer) -> None:
        for wrong in (-1, byte_level.vocab_size):
            with pytest.raises(RequestError, match=f"{wrong} is outside"):
                byte_level.decode([wrong])
            assert not byte_level.is_valid(wrong)
        with pytest.raises(RequestError, match="lone surrogate"):
            byte_level.encode("\udfff")

    def test_bytes_that_utf8_never_has_need_no_token(self, byte_level_json: dict[str, Any]) -> None:
        """GPT-NeoX's vocabulary has 243 single bytes: all but these 13."""
        spec = copy.deepcopy(byte_level_json)
        for value in (0xC0, 0xC1, *range(0xF5, 0x100)):
            rename(spec["model"]["vocab"], byte_alphabet()[value], f"no byte {value}")
        tokenizer = HFTokenizer(json.dumps(spec).encode())
        assert tokenizer.decode(tokenizer.encode("\x00 é 안 🙂 \U0010ffff")) == "\x00 é 안 🙂 \U0010ffff"


class TestByteFallback:
    def test_tokens_are_bytes_behind_a_word_start(self, byte_fallback: HFTokenizer) -> None:
        ids = byte_fallback.encode("hi é\n")
        assert raw_bytes(byte_fallback, ids) == " hi é\n".encode()
        assert byte_fallback._plain.id_to_token(ids[0]) == "\u2581hi"
        assert byte_fallback.eos_ids == (2,)

    @given(texts)
    def test_token_bytes_are_the_text(self, byte_fallback: HFTokenizer, text: str) -> None:
        shown = text.replace("\u2581", " ").encode()
        assert raw_bytes(byte_fallback, byte_fallback.encode(text)) in (shown, b" " + shown)

    @given(texts)
    def test_a_model_that_matches_control_tokens_itself_is_spelled_out(self, unigram: HFTokenizer, text: str) -> None:
        ids = unigram.encode(text)
        assert unigram._controls.isdisjoint(ids)
        assert raw_bytes(unigram, ids) == text.replace("\u2581", " ").encode()

    def test_the_case_is_real(self, unigram: HFTokenizer) -> None:
        assert 1 in unigram._plain.encode("a</s>", add_special_tokens=False).ids
        assert unigram.decode(unigram.encode("a</s>")) == "a</s>"
        assert 1 in unigram.encode("a</s>", allow_special=True)


def rename(table: dict[str, Any], old: str, new: str) -> None:
    table[new] = table.pop(old)


UNDERSCORES = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "never", "split": False}
Change = Callable[[dict[str, Any]], object]
REFUSED: list[tuple[str, Change]] = [
    ("has the decoder none", lambda spec: spec.update(decoder=None)),
    ("has the decoder WordPiece", lambda spec: spec.update(decoder={"type": "WordPiece", "prefix": "#", "cleanup": True})),
    ("no 'model'", lambda spec: spec.pop("model")),
    ("no 'model'", lambda spec: spec.update(model=7)),
    ("cannot be read", lambda spec: spec["model"].pop("vocab")),
    ("cannot be read", lambda spec: spec["model"].pop("merges")),
    ("cannot be read", lambda spec: spec["model"].update(merges=["nothing here"])),
    ("cannot be read", lambda spec: spec.update(version="9.0")),
    ("model.dropout 0.1", lambda spec: spec["model"].update(dropout=0.1)),
    ("does not keep its text", lambda spec: spec.update(pre_tokenizer={"type": "Whitespace"})),
    ("does not keep its text", lambda spec: spec.update(pre_tokenizer=UNDERSCORES)),
    ("no token for 1 of the bytes of UTF-8, the first 0x0A", lambda spec: rename(spec["model"]["vocab"], "Ċ", "zz")),
    ("gives id 5", lambda spec: spec["model"]["vocab"].update({"Ċ": 5})),
    ("expected ids from 0 to", lambda spec: spec["model"]["vocab"].update({"Ċ": 2**32 - 1})),
    ("loads with id", lambda spec: spec["added_tokens"][-1].update(id=9_999)),
    ("loads with id", lambda spec: spec["added_tokens"].pop(-2)),
]  # fmt: skip


@pytest.mark.parametrize(("message", "change"), REFUSED)
def test_files_that_would_mislead_are_refused_by_name(
    byte_level_json: dict[str, Any], message: str, change: Change
) -> None:
    spec = copy.deepcopy(byte_level_json)
    change(spec)
    with pytest.raises(TokenizerError, match=message) as caught:
        HFTokenizer(json.dumps(spec).encode(), "some/tokenizer.json")
    assert "some/tokenizer.json" in str(caught.value)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"model": {}}', b'{"model": ' + b"9" * 9_999 + b"}"],
    ids=lambda raw: repr(raw[:12]),
)
def test_what_is_no_tokenizer_file_is_refused_by_name(raw: bytes) -> None:
    with pytest.raises(TokenizerError, match=r"bad\.json"):
        HFTokenizer(raw, "bad.json")


def test_a_fallback_decoder_needs_a_model_that_falls_back() -> None:
    spec = json.loads(make_byte_fallback().to_str())
    spec["model"]["byte_fallback"] = False
    with pytest.raises(TokenizerError, match="does not fall back"):
        HFTokenizer(json.dumps(spec).encode())


@pytest.mark.parametrize(
    "part",
    [
        {"type": "Replace", "pattern": {"String": "a"}, "content": " "},
        {"type": "Strip", "content": " ", "start": 0, "stop": 1},
        {"type": "Metaspace", "replacement": "_", "prepend_scheme": "never", "split": True},
    ],
)
def test_decoders_that_change_more_than_spaces_are_refused(part: dict[str, Any]) -> None:
    spec = json.loads(make_byte_fallback().to_str())
    spec["decoder"]["decoders"].append(part)
    with pytest.raises(TokenizerError, match=f'does not serve: {{"type": "{part["type"]}"'):
        HFTokenizer(json.dumps(spec).encode())


@pytest.mark.parametrize("make", [make_byte_level, make_byte_fallback, make_unigram])
def test_any_single_change_loads_or_is_a_tokenizer_error(make: Callable[[], Any]) -> None:
    """Every part of a small file replaced by values of other types, out of range or gone."""
    text = make().to_str()
    values: list[Any] = [None, -1, 2**32 - 1, "", [], {}, 1.5, True, {"type": "Nope"}]
    for path in _paths(json.loads(text)):
        for value in [*values, "gone"]:
            spec = json.loads(text)
            parent = spec
            for key in path[:-1]:
                parent = parent[key]
            if value == "gone":
                del parent[path[-1]]
            else:
                parent[path[-1]] = value
            with contextlib.suppress(TokenizerError):
                tokenizer = HFTokenizer(json.dumps(spec).encode())
                assert all(map(tokenizer.is_valid, tokenizer.encode("hi <b>\n 안")))


def _paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Places in a parsed JSON; of long lists and tables the first few."""
    if path:
        yield path
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in list(children)[:5] if len(path) > 1 else list(children):
        yield from _paths(child, (*path, key))
