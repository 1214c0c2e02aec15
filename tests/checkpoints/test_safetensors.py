"""Safetensors: every fault of a header is named; shards and index must agree exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kittiwake.checkpoints.reader import open_checkpoint
from kittiwake.errors import CheckpointError
from tests.checkpoints.cases import assert_same, make_tensors, save_sharded

Header = dict[str, Any]


def write_raw(path: Path, header: bytes | Header, data: bytes = bytes(24), length: int | None = None) -> Path:
    """A file with any header over 24 bytes of data, at any claimed length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD: Header = {"a": entry([2, 2], 0, 16), "b": entry([2], 16, 24)}


def test_file_order_is_that_of_the_data(tmp_path: Path) -> None:
    source = open_checkpoint(write_raw(tmp_path / "m.safetensors", {"b": GOOD["b"], "a": GOOD["a"]}))
    assert [info.name for info in source.infos()] == ["a", "b"]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64, torch.bool])
def test_rare_dtypes_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.tensor([0, 1, 1, 0]).to(dtype)
    save_file({"x": tensor}, tmp_path / "m.safetensors")
    assert_same(open_checkpoint(tmp_path / "m.safetensors").read("x"), tensor)


def test_a_misaligned_tensor_is_read_into_aligned_memory(tmp_path: Path) -> None:
    data = b"\x01" + torch.tensor([1.5, -2.0]).numpy().tobytes()
    header = {"odd": entry([1], 0, 1, "U8"), "x": entry([2], 1, 9)}
    tensor = open_checkpoint(write_raw(tmp_path / "m.safetensors", header, data)).read("x")
    assert tensor.tolist() == [1.5, -2.0] and tensor.data_ptr() % 4 == 0


def changed(**change: Any) -> Header:
    return GOOD | change


REFUSED: dict[str, tuple[bytes | Header, str]] = {
    "not json": (b"{oops    ", "header of .* is not JSON"),
    "duplicate tensor": (b'{"a": 1, "a": 2}', "the key 'a' is given twice"),
    "not utf-8": (b'{"\xff": 1}', "is not UTF-8"),
    "metadata of numbers": (changed(__metadata__={"a": 1}), "__metadata__ is not an object of strings"),
    "unknown dtype": (changed(b=entry([2], 16, 24, "F128")), "tensor 'b' has the dtype 'F128'.*known dtypes: F64"),
    "dtype of a number": (changed(b=entry([2], 16, 24, 7)), "tensor 'b' has the dtype 7"),
    "negative size": (changed(b=entry([-2], 16, 24)), r"tensor 'b' has the shape \[-2\]"),
    "fractional size": (changed(b=entry([2.0], 16, 24)), r"tensor 'b' has the shape \[2\.0\]"),
    "true as a size": (changed(b=entry([2, True], 16, 24)), "tensor 'b' has the shape"),
    "shape of a text": (changed(b=entry("2", 16, 24)), "tensor 'b' has the shape"),
    "too many dimensions": (changed(b=entry([1] * 16 + [2], 16, 24)), "tensor 'b' has the shape"),
    "huge sizes": (changed(b=entry([1 << 62, 1 << 62], 16, 24)), "tensor 'b' spans 8 bytes where"),
    "size and span differ": (changed(b=entry([3], 16, 24)), "tensor 'b' spans 8 bytes where F32 .* needs 12"),
    "offsets turned": (changed(b=entry([2], 24, 16)), r"tensor 'b' has data_offsets \[24, 16\]"),
    "negative offset": (changed(b=entry([2], -8, 0)), "tensor 'b' has data_offsets"),
    "three offsets": (changed(b={"dtype": "F32", "shape": [2], "data_offsets": [16, 20, 24]}), "'b' has data_offsets"),
    "unknown key": (changed(b=entry([2], 16, 24) | {"scale": 1}), "tensor 'b' has .*scale.*expected exactly dtype"),
    "missing key": (changed(b={"dtype": "F32", "shape": [2]}), "expected exactly dtype"),
    "entry of a number": (changed(b=5), "tensor 'b' has a int"),
    "overlap": (changed(b=entry([3], 12, 24)), "'a' and 'b' overlap"),
    "same place": (changed(b=entry([2, 2], 0, 16)), "'a' and 'b' overlap"),
    "hole": ({"a": GOOD["a"], "b": entry([1], 20, 24)}, "'a' and 'b' leave a hole"),
    "hole in front": ({"b": entry([2], 16, 24)}, "starts with a hole of 16 bytes"),
    "beyond the end": (changed(c=entry([2], 24, 32)), "cut short: 24 of 32 bytes of data"),
    "trailing bytes": ({"a": GOOD["a"]}, "8 bytes after the last tensor"),
    "no tensors": ({}, "24 bytes after the last tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_faulty_header_is_refused_by_name(case: str, tmp_path: Path) -> None:
    header, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(write_raw(tmp_path / "m.safetensors", header))
    assert "m.safetensors" in caught.value.message


@pytest.mark.parametrize("header", [b"[]", b"3", b'"text"', b"null"])
def test_a_header_that_is_no_object_is_refused(header: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected an object"):
        open_checkpoint(write_raw(tmp_path / "m.safetensors", header))


def test_header_lengths_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for length in (25 + 200, 1 << 40, (1 << 64) - 1):
        with pytest.raises(CheckpointError, match="cut short"):
            open_checkpoint(write_raw(tmp_path / "m.safetensors", b"{}", length=length))
    (tmp_path / "m.safetensors").write_bytes(b"\x01\x02")
    with pytest.raises(CheckpointError, match="cut short: 2 bytes"):
        open_checkpoint(tmp_path / "m.safetensors")
    write_raw(tmp_path / "m.safetensors", {}, b"")
    with pytest.raises(CheckpointError, match="holds no tensors"):
        open_checkpoint(tmp_path / "m.safetensors")


def test_a_giant_header_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little") + b"{")
        file.truncate(300_000_000)  # sparse: takes no room on the disk
    with pytest.raises(CheckpointError, match="claims a header of 200,000,000 bytes"):
        open_checkpoint(path)


def test_a_header_whose_length_spells_another_format_is_still_read(tmp_path: Path) -> None:
    raw = json.dumps(GOOD).encode().ljust(ord("{"))
    assert len(open_checkpoint(write_raw(tmp_path / "m.safetensors", raw)).infos()) == 2


def test_shards_read_like_one_file(tmp_path: Path) -> None:
    tensors = make_tensors()
    save_sharded(tmp_path, tensors)
    source = open_checkpoint(tmp_path)
    assert source.path == tmp_path
    for name, tensor in tensors.items():
        assert_same(source.read(name), tensor)


def test_shards_behind_links_are_read(tmp_path: Path) -> None:
    """A Hugging Face cache keeps every file behind a link."""
    save_sharded(tmp_path / "blobs", make_tensors())
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    assert len(open_checkpoint(tmp_path / "snapshot").infos()) == 5


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _move(index: Header) -> None:
    index["weight_map"]["emb.weight"] = SECOND


def _drop(index: Header) -> None:
    del index["weight_map"]["emb.weight"]


def _invent(index: Header) -> None:
    index["weight_map"]["ghost"] = FIRST


def _place(shard: Any) -> Callable[[Header], None]:
    return lambda index: index["weight_map"].update({"emb.weight": shard})


INDEX_FAULTS: dict[str, tuple[Callable[[Header], None], str]] = {
    "wrong shard": (_move, rf"places 'emb\.weight' in {SECOND}; it is in {FIRST}"),
    "unlisted tensor": (_drop, r"holds tensor 'emb\.weight', which .*index\.json does not list"),
    "invented tensor": (_invent, f"{FIRST} lacks tensor 'ghost'"),
    "missing shard": (_place("gone.safetensors"), r"gone\.safetensors does not exist"),
    "parent folder": (_place("../x.safetensors"), r"places 'emb\.weight' in '\.\./x\.safetensors'"),
    "absolute": (_place("/etc/x.safetensors"), "expected a .safetensors file in the same folder"),
    "backslash": (_place("..\\x.safetensors"), "expected a .safetensors file in the same folder"),
    "itself": (_place("model.safetensors.index.json"), "expected a .safetensors file in the same folder"),
    "a number": (_place(3), r"places 'emb\.weight' in 3"),
    "unknown key": (lambda index: index.update(extra=1), "unknown key 'extra'"),
    "no map": (lambda index: index.pop("weight_map"), "has no object weight_map"),
    "empty map": (lambda index: index["weight_map"].clear(), "lists no tensors"),
}


@pytest.mark.parametrize("case", INDEX_FAULTS)
def test_an_index_that_disagrees_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, message = INDEX_FAULTS[case]
    save_sharded(tmp_path, make_tensors())
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    change(content)
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    tensors = make_tensors()
    save_sharded(tmp_path, tensors)
    save_file({"emb.weight": tensors["emb.weight"], "scale": tensors["scale"]}, tmp_path / SECOND)
    with pytest.raises(CheckpointError, match=rf"'emb\.weight' is in both {FIRST} and {SECOND}"):
        open_checkpoint(tmp_path)
