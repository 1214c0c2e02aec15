"""The World tokenizer: goldens of the published vocabulary, both encoders, hostile text and files."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kittiwake.errors import RequestError, TokenizerError
from kittiwake.text import world as world_module
from kittiwake.text.world import WorldTokenizer, parse_vocabulary

GOLDENS = {
    "Hello world": [33155, 40213],
    "你好": [10464, 11685],
    " 42": [3515],
    "\n": [11],
    "\n\n": [261],
    "\n\n\n": [3328],
    "\r\n": [263],
    "  ": [267],
    "User": [24281],
    ":": [59],
    "\n\nUser:": [261, 24281, 59],
    "User: hi\n\nAssistant:": [24281, 59, 4571, 261, 5585, 41693, 59],
    "。\n\nUser:": [28329, 11, 24281, 59],
    "<think>": [61, 35762, 63],
    "</think>": [754, 35762, 63],
    "<think>\n</think": [61, 35762, 63, 11, 754, 35762],
    "🙂": [3319, 2417],
    "안녕하세요": [18815, 3266, 150, 19052, 18777, 18862],
    "A\x00B": [66, 1, 67],
    "<|endoftext|>": [61, 125, 25258, 7588, 2318, 125, 63],
    "": [],
}


def native(text: str) -> list[int]:
    ids: list[int] = world_module._native_encoder().encode(text)
    return ids


def greedy(text: str) -> list[int]:
    return world_module._greedy_encoder().encode(text.encode())


@pytest.mark.parametrize(("text", "ids"), GOLDENS.items())
def test_goldens(world: WorldTokenizer, text: str, ids: list[int]) -> None:
    assert world.encode(text) == world.encode(text, allow_special=True) == ids
    assert native(text) == greedy(text) == ids
    assert world.decode(ids) == text


@pytest.mark.parametrize("token_id", [129, 196, 256])
def test_a_lone_byte_of_a_character_decodes_to_the_replacement_character(world: WorldTokenizer, token_id: int) -> None:
    assert world.decode([token_id]) == "\ufffd"


def test_facts_of_the_vocabulary(world: WorldTokenizer) -> None:
    tokens = [world.token_bytes(token_id) for token_id in range(1, 65_530)]
    assert len(set(tokens)) == 65_529
    assert max(map(len, tokens)) == 128
    assert [world.token_bytes(value + 1) for value in range(256)] == [bytes([value]) for value in range(256)]
    assert sum(token.decode("utf-8", "ignore").encode() != token for token in tokens) == 486
    assert (world.kind, world.vocab_size, world.eos_ids) == ("world", 65_536, (0,))


def test_end_of_text_and_padding_decode_to_nothing_and_padding_is_never_sampled(world: WorldTokenizer) -> None:
    assert world.decode([33155, 0, *range(65_530, 65_536), 40213]) == "Hello world"
    assert world.token_bytes(0) == world.token_bytes(65_535) == b""
    assert [world.is_valid(token_id) for token_id in (-1, 0, 1, 65_529, 65_530, 65_535, 65_536)] == [
        *(False, True, True, True, False, False, False)
    ]


@pytest.mark.parametrize("token_id", [-1, 65_536, 2**70, -(2**70)])
def test_ids_out_of_range_are_refused_by_id_and_range(world: WorldTokenizer, token_id: int) -> None:
    with pytest.raises(RequestError, match=rf"{token_id} is outside .* 0 to 65535"):
        world.decode([1, token_id])


@pytest.mark.parametrize("token_id", ["1", 1.0, None])
def test_ids_that_are_no_integers_are_refused(world: WorldTokenizer, token_id: object) -> None:
    with pytest.raises(RequestError, match="must be an integer"):
        world.token_bytes(token_id)  # type: ignore[arg-type]


@pytest.mark.parametrize("filler", ["", "x" * 10_000])
def test_a_lone_surrogate_is_refused_with_its_place(world: WorldTokenizer, filler: str) -> None:
    with pytest.raises(RequestError, match=rf"U\+D800\) at character {len(filler)}"):
        world.encode(filler + "\ud800")
    with pytest.raises(RequestError, match="must be a string, found bytes"):
        world.encode(b"x")  # type: ignore[arg-type]


@given(st.text(max_size=200))
def test_both_encoders_agree_and_lose_nothing(world: WorldTokenizer, text: str) -> None:
    ids = world.encode(text)
    assert ids == native(text) == greedy(text)
    assert 0 not in ids
    assert b"".join(map(world.token_bytes, ids)) == text.encode()
    assert world.decode(ids) == text


def test_both_encoders_agree_on_the_vocabulary_itself(world: WorldTokenizer) -> None:
    """Texts made of tokens and of their beginnings: the longest matches, and the near misses."""
    generator = random.Random(7)
    tokens = [world.token_bytes(token_id) for token_id in range(1, 65_530)]
    for _ in range(40):
        parts = [token[: generator.randint(1, len(token))] for token in generator.choices(tokens, k=2_000)]
        text = b"".join(parts).decode("utf-8", "replace")
        assert greedy(text) == native(text)
    for token_id, token in enumerate(tokens, start=1):
        if token.decode("utf-8", "ignore").encode() == token:
            assert native(token.decode()) == [token_id]


@pytest.mark.parametrize(
    "text",
    [
        "=" * 9_999,
        "\n" * 9_999,
        " " * 9_999,
        "a" * 9_999,
        "👩‍👩‍👧‍👦" * 999,
        "e\u0301\u0301" * 2_000,
        "\ufffd" * 3_000,
        "\x00" * 5_000,
    ],
    ids=lambda text: repr(text[:2]),
)
def test_both_encoders_agree_on_repetition(world: WorldTokenizer, text: str) -> None:
    assert world.encode(text) == native(text) == greedy(text)
    assert world.decode(world.encode(text)) == text


def test_the_size_at_which_the_encoder_changes_does_not_show(world: WorldTokenizer) -> None:
    for size in range(4_090, 4_100):
        text = ("Hello, world!\n\n안녕 " * 400).encode()[:size].decode("utf-8", "ignore")
        assert world.encode(text) == greedy(text)


def test_a_megabyte_encodes_in_under_a_third_of_a_second(world: WorldTokenizer) -> None:
    text = "The quick brown fox, 안녕하세요, 你好 12345\n\n" * 20_000
    assert len(text.encode()) > 1_000_000
    world.encode(text)
    fastest_s = min(_seconds(world, text) for _ in range(3))
    assert fastest_s < 0.3


def _seconds(world: WorldTokenizer, text: str) -> float:
    start = time.perf_counter()
    world.encode(text)
    return time.perf_counter() - start


@pytest.fixture(scope="module")
def raw() -> bytes:
    return world_module._vocabulary_resource().read_bytes()


class TestVocabularyFile:
    def test_line_ends_do_not_matter(self, raw: bytes) -> None:
        with_crlf = raw.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
        assert len(with_crlf) == 1_159_262
        assert parse_vocabulary(with_crlf, "v") == parse_vocabulary(raw, "v")

    def test_literals_with_spaces_quotes_and_escapes_are_read_as_python_reads_them(self, raw: bytes) -> None:
        table = parse_vocabulary(raw, "v")
        for line in raw.decode().splitlines()[:3_000]:
            first, _, rest = line.partition(" ")
            value = eval(rest.rpartition(" ")[0])  # the shipped file, whose digest is known
            assert table[int(first)] == (value.encode() if isinstance(value, str) else value)

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            (b"33155 'Hello' 5\n", b"33155 'Hello' 6\n", "5 bytes, the line says 6"),
            (b"33155 'Hello' 5\n", b"", "no token with id 33155"),
            (b"33155 'Hello' 5\n", b"33154 'Hello' 5\n", "33154 appears twice|no token with id 33155"),
            (b"33155 'Hello' 5\n", b"0 'Hello' 5\n", "id 0 is outside"),
            (b"33155 'Hello' 5\n", b"65530 'Hello' 5\n", "id 65530 is outside"),
            (b"33155 'Hello' 5\n", b"999999999999 'Hello' 5\n", "is outside"),
            (b"33155 'Hello' 5\n", b"-1 'Hello' 5\n", "expected 'id literal length'"),
            (b"33155 'Hello' 5\n", b"33155 'Hello'\n", "expected 'id literal length'"),
            (b"33155 'Hello' 5\n", b"33155 Hello 5\n", "no Python string or bytes"),
            (b"33155 'Hello' 5\n", b"33155 __import__('os').getcwd() 5\n", "no Python string or bytes"),
            (b"33155 'Hello' 5\n", b"33155 'a', 'b' 5\n", "no Python string or bytes|5"),
            (b"33155 'Hello' 5\n", b"33155 [1] 5\n", "no Python string or bytes"),
            (b"33155 'Hello' 5\n", b"33155 'He\xff' 5\n", "not UTF-8"),
            (b"33155 'Hello' 5\n", b"33155 '' 0\n", "0 bytes"),
        ],
    )
    def test_damage_is_refused(self, raw: bytes, old: bytes, new: bytes, message: str) -> None:
        assert raw.count(old) == 1
        with pytest.raises(TokenizerError, match=message):
            parse_vocabulary(raw.replace(old, new), "v.txt")

    def test_another_vocabulary_in_the_package_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        other = tmp_path_factory.mktemp("vocabulary") / "rwkv_vocab_v20230424.txt"
        other.write_bytes(b"1 'a' 1\n")
        monkeypatch.setattr(world_module, "_vocabulary_resource", lambda: other)
        world_module._shipped_vocabulary.cache_clear()
        try:
            with pytest.raises(TokenizerError, match=r"has SHA-256 .* expected e6dee3d4"):
                WorldTokenizer()
        finally:
            world_module._shipped_vocabulary.cache_clear()

    def test_a_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(world_module, "_PACKAGE", "no_such_package")
        with pytest.raises(TokenizerError, match="pyrwkv-tokenizer"):
            world_module._vocabulary_resource()


@settings(max_examples=200)
@given(st.lists(st.integers(0, 65_535), max_size=30))
def test_any_ids_decode(world: WorldTokenizer, ids: list[int]) -> None:
    """The package's own decode panics on partial bytes; ours must take whatever a sampler produces."""
    assert world.decode(ids) == b"".join(map(world.token_bytes, ids)).decode("utf-8", "replace")
