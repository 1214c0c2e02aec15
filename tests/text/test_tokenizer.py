"""Making a tokenizer from a kind, a bundle's files or a path, and telling whether it fits a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kittiwake.errors import RequestError, TokenizerError, UsageError
from kittiwake.text import tokenizer as tokenizer_module
from kittiwake.text import world as world_module
from kittiwake.text.bytes_level import BytesTokenizer
from kittiwake.text.tokenizer import Tokenizer, check_fits, default_tokenizer, load_tokenizer

ALL_KINDS = ["world", "byte_level", "byte_fallback", "unigram", "bytes"]


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "bytes":
        return BytesTokenizer()
    made: Tokenizer = request.getfixturevalue(request.param)
    return made


@pytest.mark.parametrize("tokenizer", ALL_KINDS, indirect=True)
def test_kind_and_files_rebuild_it(tokenizer: Tokenizer) -> None:
    again = load_tokenizer(tokenizer.kind, tokenizer.files())
    assert again.digest() == tokenizer.digest()
    assert len(again.digest()) == 64
    assert again.eos_ids == tokenizer.eos_ids
    ids = range(tokenizer.vocab_size)
    assert [again.token_bytes(i) for i in ids] == [tokenizer.token_bytes(i) for i in ids]
    assert [again.is_valid(i) for i in ids] == [tokenizer.is_valid(i) for i in ids]
    assert again.encode("Hello, 안녕 🙂\n") == tokenizer.encode("Hello, 안녕 🙂\n")


@pytest.mark.parametrize("tokenizer", ALL_KINDS, indirect=True)
def test_end_of_text_is_sampled_but_never_shown(tokenizer: Tokenizer) -> None:
    for eos_id in tokenizer.eos_ids:
        assert tokenizer.is_valid(eos_id)
        assert tokenizer.token_bytes(eos_id) == b""
        assert tokenizer.decode([eos_id]) == ""


class TestBytes:
    @given(st.text(max_size=100))
    def test_round_trip(self, text: str) -> None:
        tokenizer = BytesTokenizer()
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text

    @given(st.binary(max_size=100))
    def test_any_bytes_decode(self, data: bytes) -> None:
        assert BytesTokenizer().decode(data) == data.decode("utf-8", "replace")

    def test_every_id_is_a_byte(self) -> None:
        tokenizer = BytesTokenizer()
        assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.eos_ids) == ("bytes", 256, ())
        assert all(tokenizer.is_valid(value) and tokenizer.token_bytes(value) == bytes([value]) for value in range(256))
        with pytest.raises(RequestError, match="256 is outside the tokenizer's range 0 to 255"):
            tokenizer.decode([256])


class TestLoading:
    def test_from_a_file_and_from_its_folder(self, tmp_path: Path, byte_level: Tokenizer) -> None:
        (tmp_path / "tokenizer.json").write_bytes(byte_level.files()["tokenizer.json"])
        for place in (tmp_path, str(tmp_path), tmp_path / "tokenizer.json"):
            assert load_tokenizer(place).digest() == byte_level.digest()
        assert load_tokenizer(tmp_path, eos_ids=[3]).eos_ids == (3,)

    def test_a_copy_of_the_world_vocabulary_is_world(self, tmp_path: Path) -> None:
        raw = world_module._vocabulary_resource().read_bytes()
        copy = tmp_path / "vocab.txt"
        copy.write_bytes(raw.replace(b"\n", b"\r\n"))
        assert load_tokenizer(copy).kind == "world"
        copy.write_bytes(raw + b"1 'a' 1\n")
        with pytest.raises(TokenizerError, match=r"vocab\.txt is not the RWKV World vocabulary"):
            load_tokenizer(copy)

    def test_a_folder_called_like_a_kind_is_reached_by_its_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, byte_level: Tokenizer
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("world").mkdir()
        Path("world/tokenizer.json").write_bytes(byte_level.files()["tokenizer.json"])
        assert load_tokenizer("world").kind == "world"
        assert load_tokenizer(Path("world")).kind == "hf"

    def test_missing_damaged_and_huge_files_are_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(TokenizerError, match=r"no tokenizer file .*nowhere"):
            load_tokenizer(tmp_path / "nowhere")
        with pytest.raises(TokenizerError, match=r"no tokenizer file .*tokenizer\.json"):
            load_tokenizer(tmp_path)
        with pytest.raises(TokenizerError):
            load_tokenizer("nul\0name")
        damaged = tmp_path / "tokenizer.json"
        damaged.write_bytes(b'{"model": {"type": "BPE"')
        with pytest.raises(TokenizerError, match=r"tokenizer\.json is not JSON"):
            load_tokenizer(damaged)
        monkeypatch.setattr(tokenizer_module, "MAX_FILE_BYTES", 10)
        with pytest.raises(TokenizerError, match="has 24 bytes, at most 10 are read"):
            load_tokenizer(damaged)

    @pytest.mark.parametrize(
        ("kind", "files", "message"),
        [
            ("hf", {}, r"files: none; expected: tokenizer\.json"),
            ("hf", None, r"files: none; expected: tokenizer\.json"),
            ("hf", {"tokenizer.json": b"{}", "extra": b""}, "extra"),
            ("world", {"tokenizer.json": b"{}"}, "expected: none"),
            ("bytes", {"a": b""}, "expected: none"),
            ("wordl", {}, "unknown tokenizer kind 'wordl'; known are world, gpt-neox, hf, bytes"),
        ],
    )
    def test_files_must_be_those_of_the_kind(self, kind: str, files: dict[str, bytes] | None, message: str) -> None:
        with pytest.raises(TokenizerError, match=message):
            load_tokenizer(kind, files)

    @pytest.mark.parametrize("kind", ["world", "bytes"])
    def test_fixed_ends_of_text_cannot_be_replaced(self, kind: str) -> None:
        with pytest.raises(UsageError, match="fixed"):
            load_tokenizer(kind, eos_ids=[1])


class TestFit:
    def test_the_number_of_rows_tells_world_and_bytes(self) -> None:
        assert default_tokenizer(65_536).kind == "world"
        assert default_tokenizer(256).kind == "bytes"

    @pytest.mark.parametrize(
        ("rows", "message"),
        [(8_192, r"8192.*pass the tokenizer\.json"), (0, "0 rows")],
    )
    def test_other_numbers_ask_for_a_file(self, rows: int, message: str) -> None:
        with pytest.raises(TokenizerError, match=message):
            default_tokenizer(rows)

    @pytest.mark.parametrize(
        ("kind", "ids", "rows"),
        [
            ("world", 65_536, 65_536),
            ("bytes", 256, 256),
            ("hf", 50_277, 50_277),
            ("hf", 50_277, 50_432),
            ("hf", 151_669, 151_936),
            ("hf", 100_002, 102_400),
            ("hf", 8_192, 8_192),
        ],
    )
    def test_the_right_one_passes(self, kind: str, ids: int, rows: int) -> None:
        check_fits(stand_in(kind, ids), rows)

    @pytest.mark.parametrize(
        ("kind", "ids", "rows", "message"),
        [
            ("world", 65_536, 50_277, "ids up to 65535, but the model has 50277 rows.*'gpt-neox'"),
            ("world", 65_536, 65_792, "goes with 65536 rows, but the model has 65792"),
            ("hf", 50_277, 65_536, "50277 ids, but the model has 65536 rows.*'world'"),
            ("hf", 50_278, 50_277, "ids up to 50277, but the model has 50277 rows"),
            ("hf", 8_192, 256, "256 rows need tokenizer 'bytes'"),
            ("bytes", 256, 65_536, "too many to be padding.*'world'"),
            ("bytes", 256, 255, "255 rows"),
        ],
    )
    def test_gibberish_from_the_wrong_tokenizer_is_refused(self, kind: str, ids: int, rows: int, message: str) -> None:
        with pytest.raises(TokenizerError, match=message):
            check_fits(stand_in(kind, ids), rows)


def stand_in(kind: str, vocab_size: int) -> Any:
    """Has what check_fits looks at; the real 20B file is not here."""
    return type("StandIn", (), {"kind": kind, "vocab_size": vocab_size})()


def test_importing_the_text_room_loads_no_tokenizer_package() -> None:
    code = (
        "import sys, kittiwake.text.tokenizer, kittiwake.text.stream, kittiwake.text.stops, json;"
        "print(json.dumps(sorted({'tokenizers', 'pyrwkv_tokenizer', 'torch', 'numpy'} & set(sys.modules))))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_a_pointer_in_place_of_a_tokenizer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is a Git LFS pointer.*git lfs pull"):
        load_tokenizer(path)
