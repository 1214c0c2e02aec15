"""Incremental decoding: no character split, dropped or invented."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kittiwake.errors import RequestError
from kittiwake.text.bpe import HFTokenizer
from kittiwake.text.bytes_level import BytesTokenizer
from kittiwake.text.stream import TextStream
from kittiwake.text.tokenizer import Tokenizer
from kittiwake.text.world import WorldTokenizer


def stream_all(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*map(stream.push, ids), stream.flush()]


def test_a_korean_syllable_over_two_tokens_comes_whole(world: WorldTokenizer) -> None:
    pieces = stream_all(world, [18815, 3266, 150, 19052, 18777, 18862])
    assert pieces == ["안", "", "녕", "하", "세", "요", ""]


def test_an_emoji_over_two_tokens_comes_whole(world: WorldTokenizer) -> None:
    assert stream_all(world, [3319, 2417]) == ["", "🙂", ""]


@pytest.mark.parametrize("char", ["a", "é", "녕", "🙂"])
def test_a_character_of_any_length_waits_for_its_last_byte(char: str) -> None:
    stream = TextStream(BytesTokenizer())
    *first, last = char.encode()
    for byte in first:
        assert stream.push(byte) == ""
        assert stream.pending
    assert stream.push(last) == char
    assert not stream.pending
    assert stream.flush() == ""


def test_a_real_replacement_character_is_kept_at_once(world: WorldTokenizer) -> None:
    ids = world.encode("a\ufffdb")
    assert "".join(stream_all(world, ids)) == "a\ufffdb"
    stream = TextStream(BytesTokenizer())
    assert [stream.push(byte) for byte in "\ufffd".encode()] == ["", "", "\ufffd"]


def test_an_open_character_becomes_one_replacement_character_at_the_end() -> None:
    stream = TextStream(BytesTokenizer())
    assert [stream.push(byte) for byte in "🙂".encode()[:3]] == ["", "", ""]
    assert stream.flush() == "\ufffd"
    assert not stream.pending
    assert stream.flush() == ""
    assert stream.push(0x61) == "a"


def test_invalid_bytes_in_the_middle_do_not_hold_back_what_follows() -> None:
    pieces = stream_all(BytesTokenizer(), [0x61, 0xFF, 0x62, 0xF0, 0x9F, 0x63])
    assert pieces == ["a", "\ufffd", "b", "", "", "\ufffdc", ""]


def test_end_of_text_in_the_middle_neither_shows_nor_breaks_a_character(world: WorldTokenizer) -> None:
    assert stream_all(world, [18815, 3266, 0, 65_535, 150]) == ["안", "", "", "", "녕", ""]


def test_an_id_out_of_range_is_refused(world: WorldTokenizer) -> None:
    with pytest.raises(RequestError, match="65536"):
        TextStream(world).push(65_536)


@given(st.binary(max_size=80) | st.text(max_size=40).map(str.encode))
def test_bytes_stream_as_they_decode_whole(data: bytes) -> None:
    assert "".join(stream_all(BytesTokenizer(), list(data))) == data.decode("utf-8", "replace")


@given(st.lists(st.sampled_from([*b"\x61\x80\x8f\xbf\xc2\xc3\xe0\xe4\xed\xef\xf0\xf4\xf5\xff"]), max_size=12))
def test_near_misses_of_utf8_stream_as_they_decode_whole(data: list[int]) -> None:
    assert "".join(stream_all(BytesTokenizer(), data)) == bytes(data).decode("utf-8", "replace")


@given(st.lists(st.integers(0, 65_535) | st.integers(1, 257), max_size=40))
def test_any_world_ids_stream_as_they_decode_whole(world: WorldTokenizer, ids: list[int]) -> None:
    assert "".join(stream_all(world, ids)) == world.decode(ids)


@given(st.text(max_size=60))
def test_text_streams_back(world: WorldTokenizer, byte_level: HFTokenizer, text: str) -> None:
    assert "".join(stream_all(world, world.encode(text))) == text
    ids = byte_level.encode(text)
    assert "".join(stream_all(byte_level, ids)) == byte_level.decode(ids)
