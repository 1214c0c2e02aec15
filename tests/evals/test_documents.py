from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from kittiwake.errors import InputFileError
from kittiwake.evals.documents import read_plain_text, read_text_lines

LINES = '{"title": "A", "text": "first"}\n\n{"text": "s\\u00e9cond"}\n'


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.xz"])
def test_lines_are_read_packed_or_not(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    raw = LINES.encode()
    path.write_bytes(lzma.compress(raw) if name.endswith("xz") else raw)
    assert list(read_text_lines(path)) == [("A", "first"), ("line 3", "sécond")]
    assert list(read_text_lines(path, 1)) == [("A", "first")]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("not json", "line 1 is not JSON"),
        ('{"words": "x"}', 'line 1 has no "text"'),
        ('{"text": 3}', 'line 1 has no "text"'),
        ('["text"]', 'line 1 has no "text"'),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(line)
    with pytest.raises(InputFileError, match=says):
        list(read_text_lines(path))


@pytest.mark.parametrize("raw", [b"not xz at all", lzma.compress(LINES.encode())[:40]])
def test_a_damaged_archive_is_an_input_file_error(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "data.jsonl.xz"
    path.write_bytes(raw)
    with pytest.raises(InputFileError, match=r"data\.jsonl\.xz"):
        list(read_text_lines(path))


def test_text_of_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(InputFileError, match="bad byte at 3"):
        read_plain_text(path)
    lines = tmp_path / "data.jsonl"
    lines.write_bytes(b'{"text": "caf\xe9"}')
    with pytest.raises(InputFileError, match="utf-8"):
        list(read_text_lines(lines))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"gone\.txt: No such file"):
        read_plain_text(tmp_path / "gone.txt")
    with pytest.raises(InputFileError, match=r"gone\.jsonl: No such file"):
        list(read_text_lines(tmp_path / "gone.jsonl"))
