"""GGUF files in several parts: any of them opens all, and what does not belong together is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from kittiwake.checkpoints.gguf import LongArray
from kittiwake.checkpoints.reader import open_checkpoint
from kittiwake.checkpoints.row_table import RowTable
from kittiwake.errors import CheckpointError

ROWS = np.arange(640, dtype=np.float32).reshape(20, 32)
ARRAYS = {f"t{number}": ROWS * (number + 1) for number in range(5)}


def write(
    folder: Path, arrays: dict[str, np.ndarray] = ARRAYS, *, small_first: bool = False, most: int = 2
) -> list[Path]:
    """A model of the package's own writer, ``most`` tensors a part; the parts in order."""
    folder.mkdir(exist_ok=True)
    writer = GGUFWriter(folder / "m.gguf", "rwkv7", split_max_tensors=most, small_first_shard=small_first)
    writer.add_name("a name")
    writer.add_token_list([f"tök{number}" for number in range(100)])
    writer.add_array("numbers", list(range(-50, 50)))
    for name, values in arrays.items():
        writer.add_tensor(name, values)
    finish(writer)
    return sorted(folder.glob("*.gguf"))


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def part(path: Path, keys: dict[str, Any], tensors: tuple[str, ...] = (), alignment: int | None = None) -> Path:
    """One part by itself, with these keys; numbers are written as converters do."""
    writer = GGUFWriter(path, "rwkv7")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in keys.items():
        if isinstance(value, int) and value >= 0:
            (writer.add_uint16 if key != "split.tensors.count" else writer.add_int32)(key, value)
        elif isinstance(value, int):
            writer.add_int32(key, value)
        else:
            writer.add_string(key, value)
    for name in tensors:
        writer.add_tensor(name, ROWS)
    finish(writer)
    return path


@pytest.mark.parametrize("small_first", [False, True])
def test_any_part_opens_all_of_them(small_first: bool, tmp_path: Path) -> None:
    parts = write(tmp_path, small_first=small_first)
    assert [path.name for path in parts] == [f"m-{i + 1:05}-of-{len(parts):05}.gguf" for i in range(3 + small_first)]
    digests = set()
    for given in (*parts, tmp_path):
        with open_checkpoint(given) as source:
            assert source.path == parts[0]
            assert {info.name for info in source.infos()} == ARRAYS.keys()
            for name, values in ARRAYS.items():
                assert torch.equal(source.read(name), torch.from_numpy(values))
            assert source.config is not None and source.config["general.name"] == "a name"
            assert source.config["split.tensors.count"] == 5
            digests.add(source.digest())
    assert len(digests) == 1


def test_a_model_in_parts_is_that_of_one_file(tmp_path: Path) -> None:
    write(tmp_path / "whole", most=0)
    write(tmp_path / "parts")
    with open_checkpoint(tmp_path / "whole") as whole, open_checkpoint(tmp_path / "parts") as parts:
        assert [info.name for info in whole.infos()] == [info.name for info in parts.infos()]
        for name in ARRAYS:
            assert torch.equal(whole.read(name), parts.read(name))
        assert whole.config is not None and parts.config is not None
        assert whole.config == {key: value for key, value in parts.config.items() if not key.startswith("split.")}


def test_the_digest_covers_every_part(tmp_path: Path) -> None:
    parts = write(tmp_path)
    before = open_checkpoint(parts[0]).digest()
    for path in parts:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert open_checkpoint(parts[0]).digest() != before
        path.write_bytes(whole)
    assert open_checkpoint(parts[0]).digest() == before


def test_a_part_that_changes_is_noticed(tmp_path: Path) -> None:
    parts = write(tmp_path)
    source = open_checkpoint(parts[0])
    parts[2].write_bytes(parts[2].read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match=r"m-00003-of-00003\.gguf changed while it was open"):
        source.read("t0")


def test_rows_are_read_where_they_lie_in_any_part(tmp_path: Path) -> None:
    parts = write(tmp_path)
    source = open_checkpoint(parts[1])
    for name, values in ARRAYS.items():
        place = source.place(name)
        assert place.path == parts[int(name[1:]) // 2]
        table = RowTable([place], 32)
        path, at = table.where(7)
        assert path.read_bytes()[at : at + 128] == values[7].tobytes()


def test_packed_tensors_are_unpacked_in_any_part(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "rwkv7", split_max_tensors=1)
    packed = quantize(ROWS, GGMLQuantizationType.Q8_0)
    for name in "ab":
        writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
    finish(writer)
    expected = torch.from_numpy(dequantize(packed, GGMLQuantizationType.Q8_0))
    source = open_checkpoint(tmp_path)
    assert torch.equal(source.read("a"), expected) and torch.equal(source.read("b"), expected)


def test_long_arrays_are_read_from_whichever_part_has_them(tmp_path: Path) -> None:
    source: Any = open_checkpoint(write(tmp_path, small_first=True)[2])
    assert source.config["tokenizer.ggml.tokens"] == LongArray("string", 100)
    assert source.values("tokenizer.ggml.tokens", 10_000) == [f"tök{number}" for number in range(100)]
    assert source.values("numbers", 10_000) == list(range(-50, 50))
    with pytest.raises(CheckpointError, match=r"'numbers' takes 400 bytes, at most 399 are read"):
        source.values("numbers", 399)
    with pytest.raises(CheckpointError, match=r"'general.name' is 'a name', expected an array"):
        source.values("general.name", 399)
    with pytest.raises(CheckpointError, match=r"lacks the key 'nothing'"):
        source.values("nothing", 399)
    source.close()
    with pytest.raises(CheckpointError, match="was closed"):
        source.values("numbers", 400)


def test_parts_behind_links_are_found_beside_the_links(tmp_path: Path) -> None:
    """As in the cache of the Hugging Face Hub, whose files are called by their digests."""
    (tmp_path / "links").mkdir()
    for number, path in enumerate(write(tmp_path / "blobs")):
        (tmp_path / "links" / path.name).symlink_to(path.rename(path.with_name(f"blob{number}")))
    source = open_checkpoint(tmp_path / "links")
    assert torch.equal(source.read("t4"), torch.from_numpy(ARRAYS["t4"]))


def test_parts_may_be_named_in_capitals(tmp_path: Path) -> None:
    parts = [path.rename(path.with_name(path.name.upper())) for path in write(tmp_path)]
    for given in (tmp_path, parts[2]):
        with open_checkpoint(given) as source:
            assert source.path == parts[0] and {info.name for info in source.infos()} == ARRAYS.keys()
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"of which 1 is missing beside it: 'M-00002-OF-00003\.GGUF'"):
        open_checkpoint(tmp_path)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    parts = write(tmp_path, most=1)
    for path in (parts[1], parts[3]):
        path.unlink()
    for given in (parts[0], parts[4], tmp_path):
        with pytest.raises(
            CheckpointError, match=r"one of 5 parts, of which 2 are missing .*'m-00002-of-00005\.gguf', 'm-00004"
        ):
            open_checkpoint(given)


def test_many_missing_parts_are_counted(tmp_path: Path) -> None:
    only = part(
        tmp_path / "m-00007-of-65535.gguf", {"split.no": 6, "split.count": 65535, "split.tensors.count": 9}, ("a",)
    )
    with pytest.raises(
        CheckpointError, match=r"of which 65534 are missing beside it: .*'m-00004-of-65535\.gguf' \.\.\."
    ):
        open_checkpoint(only)


def test_a_folder_with_more_than_the_parts_of_one_is_not_guessed_at(tmp_path: Path) -> None:
    parts = write(tmp_path)
    shutil.copy(parts[0], tmp_path / "mmproj.gguf")
    with pytest.raises(
        CheckpointError,
        match=r"holds 2 checkpoints: 'm-00001-of-00003\.gguf' and 2 more parts of it, 'mmproj\.gguf' .*name the file",
    ):
        open_checkpoint(tmp_path)
    for path in parts:
        shutil.copy(path, tmp_path / path.name.replace("m-", "n-"))
    (tmp_path / "mmproj.gguf").unlink()
    with pytest.raises(
        CheckpointError, match=r"holds 2 checkpoints: 'm-0.* parts of it, 'n-00001-of-00003\.gguf' and 2 m"
    ):
        open_checkpoint(tmp_path)
    assert open_checkpoint(parts[1]).path == parts[0]


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    parts = write(tmp_path)
    (tmp_path / "other").mkdir()
    for name in ("model.gguf", "m-00002-of-00003.gguf", "m-00001-of-00004.gguf", "m-1-of-3.gguf"):
        found = Path(shutil.copy(parts[0], tmp_path / "other" / name))
        with pytest.raises(CheckpointError, match=r"part 1 of 3 .*a name that ends in -00001-of-00003\.gguf"):
            open_checkpoint(found)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
A = {"split.no": 0, "split.count": 2, "split.tensors.count": 2}
B = {**A, "split.no": 1}
Change = Callable[[Path, Path], object]
MISFITS: dict[str, tuple[Change, str]] = {
    "two first parts": (lambda a, b: part(b, A, ("b",)), r"-00002.*: split\.no is 0, expected 1, as its name says"),
    "another count": (
        lambda a, b: part(b, {**B, "split.count": 3}, ("b",)),
        r"-00002.*: split\.count is 3, expected 2, as in m-00001-of-00002\.gguf",
    ),
    "another count of tensors": (
        lambda a, b: part(b, {**B, "split.tensors.count": 3}, ("b",)),
        r"-00002.*: split\.tensors\.count is 3, expected 2, as in m-00001",
    ),
    "no number": (lambda a, b: part(b, {"split.count": 2}, ("b",)), r"-00002.* lacks the key split\.no"),
    "no count of tensors": (
        lambda a, b: part(a, {"split.no": 0, "split.count": 2}, ("a",)),
        r"-00001.* lacks the key split\.tensors\.count",
    ),
    "a number that is a text": (lambda a, b: part(a, {**A, "split.no": "0"}, ("a",)), r"split\.no is '0', expected a num"),
    "a number beyond the count": (lambda a, b: part(a, {**A, "split.no": 2}, ("a",)), r"split\.no is 2, expected .* 0 to 1"),
    "a count that is a text": (lambda a, b: part(a, {**A, "split.count": "2"}, ("a",)), r"split\.count is '2', expected"),
    "a negative count": (lambda a, b: part(a, {**A, "split.count": -2}, ("a",)), r"split\.count is -2, expected"),
    "a tensor twice": (lambda a, b: part(b, B, ("a",)), r"tensor 'a' is in both .*-00001-of-00002\.gguf and m-00002"),
    "a tensor too few": (lambda a, b: part(b, B, ()), r"its 1 other parts hold 1 tensors, split\.tensors\.count says 2"),
    "a tensor too many": (lambda a, b: part(b, B, ("b", "c")), r"hold 3 tensors, split\.tensors\.count says 2"),
    "another model": (
        lambda a, b: part(b, {**B, "general.name": "other"}, ("b",)),
        r"-00002.*: general\.name is 'other', m-00001-of-00002\.gguf says 'mine'",
    ),
    "a part that is no GGUF": (lambda a, b: b.write_bytes(b"x" * 99), r"-00002.* is no GGUF file"),
    "a part that is empty": (lambda a, b: b.write_bytes(b""), r"-00002.* is empty \(0 bytes\)"),
    "a part that is a pointer": (lambda a, b: b.write_bytes(LFS), r"-00002.* is a Git LFS pointer, .*git lfs pull"),
    "a part that is cut": (lambda a, b: b.write_bytes(b.read_bytes()[:-1]), r"-00002.* is cut short"),
    "a part that is a folder": (lambda a, b: (b.unlink(), b.mkdir()), r"-00002.* is not a regular file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISFITS)
def test_parts_that_do_not_belong_together_are_refused(kind: str, tmp_path: Path) -> None:
    first = part(tmp_path / "m-00001-of-00002.gguf", {**A, "general.name": "mine"}, ("a",))
    second = part(tmp_path / "m-00002-of-00002.gguf", B, ("b",))
    assert len(open_checkpoint(first).infos()) == 2
    change, message = MISFITS[kind]
    change(first, second)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(first)


def test_parts_may_be_aligned_each_in_its_way(tmp_path: Path) -> None:
    part(tmp_path / "m-00001-of-00002.gguf", A, ("a",), alignment=64)
    part(tmp_path / "m-00002-of-00002.gguf", {**B, "extra.key": 7}, ("b",), alignment=8)
    source = open_checkpoint(tmp_path)
    assert torch.equal(source.read("b"), torch.from_numpy(ROWS))
    assert source.config is not None and source.config["extra.key"] == 7


def test_a_model_of_one_part_is_a_file_like_any_other(tmp_path: Path) -> None:
    path = part(tmp_path / "any.gguf", {"split.no": 0, "split.count": 1, "split.tensors.count": 1}, ("a",))
    assert torch.equal(open_checkpoint(path).read("a"), torch.from_numpy(ROWS))
    with pytest.raises(CheckpointError, match="holds no tensors"):
        open_checkpoint(part(tmp_path / "none.gguf", {"split.count": 1}))
