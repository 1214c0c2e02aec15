"""JSON as strictly as the edges need it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kittiwake.checkpoints.strict_json import load_json_strict
from kittiwake.errors import BundleError, CheckpointError


def test_plain_json_comes_back_as_it_is(tmp_path: Path) -> None:
    value = {"a": [1, -2, 2.5, "ü", None, True], "b": {"c": {}}}
    text = '{"a": [1, -2, 2.5, "\\u00fc", null, true], "b": {"c": {}}}'
    assert load_json_strict(text.encode(), what="x") == value
    (tmp_path / "x.json").write_text(text)
    assert load_json_strict(tmp_path / "x.json", what="x") == value
    assert load_json_strict(b'"\\ud83d\\ude00"', what="x") == "😀"


REFUSED = {
    "duplicate key": (b'{"a": {"k": 1, "k": 2}}', "the key 'k' is given twice"),
    "nan": (b"[NaN]", "NaN is not a JSON number"),
    "infinity": (b"-Infinity", "-Infinity is not a JSON number"),
    "overflowing float": (b"[1e999]", "number 1e999 is out of range"),
    "long integer": (b"[" + b"9" * 5000 + b"]", "an integer of 5000 digits"),
    "not utf-8": (b'{"a": "\xff"}', "is not UTF-8 text: byte 7 is 0xff"),
    "byte order mark": (b"\xef\xbb\xbf{}", "is not JSON"),
    "half a surrogate": (b'{"\\ud800": 1}', "half a surrogate pair"),
    "half a surrogate inside": (b'[["\\udfff"]]', "half a surrogate pair"),
    "deep": (b"[" * 40 + b"]" * 40, "nested more than 32 levels"),
    "depth bomb": (b"[" * 500_000, "nested more than 32 levels|is not JSON"),
    "depth bomb of objects": (b'{"a":' * 100_000, "nested more than 32 levels|is not JSON"),
    "cut short": (b'{"a": ', "is not JSON"),
    "two values": (b"{} {}", "is not JSON"),
    "nothing": (b"", "is not JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_lenient_parser_would_guess_at_is_refused(case: str) -> None:
    data, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        load_json_strict(data, what="the header of m")
    assert caught.value.message.startswith("the header of m")


def test_limits_are_kept_and_the_callers_error_is_raised(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(b'"' + b"x" * 100 + b'"')
    assert load_json_strict(path, what="m", max_bytes=102) == "x" * 100
    with pytest.raises(BundleError, match="larger than the 101 bytes"):
        load_json_strict(path, what="m", max_bytes=101, error=BundleError)
    assert load_json_strict(b"[[1]]", what="m", max_depth=2) == [[1]]
    with pytest.raises(CheckpointError, match="more than 1 levels"):
        load_json_strict(b"[[1]]", what="m", max_depth=1)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        load_json_strict(tmp_path / "gone.json", what="gone.json")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        load_json_strict(tmp_path, what="folder")
