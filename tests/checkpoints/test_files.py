"""Names, digests, and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

import pytest

from kittiwake.checkpoints.files import is_plain_name, new_folder, quoted, sha256_file, write_file, writing
from kittiwake.errors import CheckpointError, OutputError


def test_plain_names_cannot_lead_anywhere() -> None:
    assert all(map(is_plain_name, ("a", "model-00001-of-00002.safetensors", "rwkv_vocab.txt", "A.b-c_d")))
    bad = ("", ".", "..", ".hidden", "a/b", "a\\b", "/etc", "C:x", "a\0", "a\n", "a b", "ä", "x" * 129, "a.", "-rf")
    assert not any(map(is_plain_name, bad))


def test_values_from_files_are_shown_escaped_and_short() -> None:
    assert quoted("a\x1b[31m\ud800") == r"'a\x1b[31m\ud800'"
    assert len(quoted("x" * 1000)) == 120


def test_sha256_of_a_file(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000
    (tmp_path / "f").write_bytes(data)
    seen: list[int] = []
    assert (
        sha256_file(tmp_path / "f", lambda _what, done, _total: seen.append(done)) == hashlib.sha256(data).hexdigest()
    )
    assert seen == [1 << 20, 2 << 20, len(data)]
    with pytest.raises(CheckpointError, match="does not exist"):
        sha256_file(tmp_path / "gone")


def test_a_new_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with new_folder(target) as partial:
        assert partial.parent == tmp_path and partial.name.startswith(".out.partial-")
        write_file(partial / "a", b"1")
        assert not target.exists()
    assert (target / "a").read_bytes() == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, OSError])
def test_a_failure_inside_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    def work() -> None:
        with new_folder(tmp_path / "out") as partial:
            write_file(partial / "a", b"1")
            raise error

    with pytest.raises(error):
        work()
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_exists_or_appears_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "folder", "link"):
        with pytest.raises(OutputError, match="already exists"), new_folder(tmp_path / name):
            raise AssertionError("the work must not start")
    with pytest.raises(OutputError, match="late already exists"), new_folder(tmp_path / "late"):
        (tmp_path / "late").write_text("mine")
    assert (tmp_path / "late").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "late", "link"]


def test_a_filled_folder_that_wins_the_last_instant_is_never_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kittiwake.checkpoints.files.os.path.lexists", lambda _: False)
    with pytest.raises(OutputError, match="already exists"), new_folder(tmp_path / "out"):
        (tmp_path / "out" / "mine").mkdir(parents=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_targets_that_cannot_be_are_told_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for target, message in (
        (tmp_path / "gone" / "out", "gone does not exist"),
        (tmp_path / ("x" * 300), "name is too long"),
        (tmp_path / "file" / "out", "does not exist|Not a directory"),
        (tmp_path / "..", "does not name a new folder"),
        (Path("/"), "does not name a new folder"),
        (tmp_path / "a\0b", "does not name a new folder"),
    ):
        with pytest.raises(OutputError, match=message), new_folder(target):
            raise AssertionError("the work must not start")


@pytest.mark.parametrize("name", ["x" * 255, "😀" * 63])
def test_a_long_name_that_the_system_allows_works(name: str, tmp_path: Path) -> None:
    with new_folder(tmp_path / name):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "disk or a quota is full.*free some space"),
        (errno.EDQUOT, "disk or a quota is full"),
        (errno.EACCES, "Permission denied.*folder that you can write to"),
        (errno.EROFS, "Read-only file system"),
        (errno.ENAMETOOLONG, "name is too long"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_write_errors_say_what_to_do(number: int, message: str) -> None:
    import os

    with pytest.raises(OutputError, match=message), writing(Path("out")):
        raise OSError(number, os.strerror(number))
