"""GGUF files: what comes out is what the ``gguf`` package wrote; headers that lie are refused."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

from kittiwake.checkpoints.gguf import LongArray
from kittiwake.checkpoints.reader import open_checkpoint
from kittiwake.errors import CheckpointError
from tests.checkpoints.cases import assert_same

F32, F16, Q8_0, Q4_K, BF16, TQ2_0 = 0, 1, 8, 12, 30, 35
UINT32, STRING, ARRAY = 4, 8, 9


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A file of the ``gguf`` package with every type that is read."""
    noise = torch.Generator().manual_seed(0)
    tensors = {
        "a.weight": torch.randn(3, 5, generator=noise),
        "b.weight": torch.randn(7, 2, generator=noise).half(),
        "c.weight": torch.randn(2, 3, 4, generator=noise).bfloat16(),
        "d.weight": torch.randn(6, 64, generator=noise),
        "e.bias": torch.randn(9, generator=noise),
    }
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "rwkv7")
    writer.add_name("a name")
    writer.add_layer_norm_eps(1e-5)
    writer.add_head_count(0)
    writer.add_array("general.tags", ["x", "ÿ"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_bool("truth", True)
    writer.add_token_list([f"t{i}" for i in range(300)])
    writer.add_array("scores", [0.5] * 300)
    for name, tensor in tensors.items():
        if name == "d.weight":
            packed = quantize(tensor.numpy(), GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
            tensors[name] = torch.from_numpy(dequantize(packed, GGMLQuantizationType.Q8_0))
        elif tensor.dtype == torch.bfloat16:
            writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, tensor.numpy())
    _finish(writer)
    return path, tensors


def test_tensors_come_back_bit_for_bit(written: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = written
    with open_checkpoint(path) as source:
        assert source.format == "gguf"
        infos = {info.name: info for info in source.infos()}
        assert infos.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert infos[name].shape == tuple(tensor.shape)
            assert_same(source.read(name), tensor)
        assert (infos["d.weight"].packing, infos["d.weight"].stored_bytes) == ("Q8_0", 6 * 2 * 34)
        assert (infos["a.weight"].packing, infos["a.weight"].stored_bytes) == ("", 60)
        kept = source.read("a.weight")
    assert_same(kept, tensors["a.weight"])  # the mapping outlives the source
    with pytest.raises(CheckpointError, match="was closed"):
        source.read("a.weight")


def test_metadata_comes_back(written: tuple[Path, dict[str, torch.Tensor]]) -> None:
    config = open_checkpoint(written[0]).config
    assert config is not None
    assert config["general.architecture"] == "rwkv7"
    assert config["rwkv7.attention.layer_norm_epsilon"] == 1e-5  # a float32 in the file
    assert (config["rwkv7.attention.head_count"], config["truth"]) == (0, True)
    assert (config["general.tags"], config["numbers"]) == (["x", "ÿ"], [1, -2, 3])
    assert config["tokenizer.ggml.tokens"] == LongArray("string", 300)
    assert str(config["scores"]) == "300 values of float32"


def test_the_packages_own_reader_agrees(written: tuple[Path, dict[str, torch.Tensor]]) -> None:
    theirs = {tensor.name: tensor for tensor in GGUFReader(written[0]).tensors}
    source = open_checkpoint(written[0])
    for info in source.infos():
        assert info.shape == tuple(reversed(theirs[info.name].shape.tolist()))
        if info.dtype == torch.bfloat16:
            continue
        found = dequantize(theirs[info.name].data, theirs[info.name].tensor_type)
        assert np.array_equal(source.read(info.name).float().numpy(), found.reshape(info.shape))


def test_a_tensor_is_the_files_own_pages_and_the_file_is_never_written(
    written: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    path, tensors = written
    before = path.read_bytes()
    source = open_checkpoint(path)
    assert source.read("a.weight").data_ptr() == source.read("a.weight").data_ptr()
    source.read("a.weight").zero_()
    assert path.read_bytes() == before
    assert_same(open_checkpoint(path).read("a.weight"), tensors["a.weight"])


def test_a_file_that_changes_is_noticed(written: tuple[Path, dict[str, torch.Tensor]]) -> None:
    source = open_checkpoint(written[0])
    written[0].write_bytes(written[0].read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="changed while it was open"):
        source.read("a.weight")


def test_a_folder_with_one_file_opens_it(written: tuple[Path, dict[str, torch.Tensor]]) -> None:
    assert open_checkpoint(written[0].parent).format == "gguf"


def test_many_packed_rows_are_unpacked_like_few(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(
        (1 << 15, 64), dtype=np.float32
    )  # more blocks than are taken at once
    packed = quantize(values, GGMLQuantizationType.Q8_0)
    writer = GGUFWriter(tmp_path / "m.gguf", "rwkv7")
    writer.add_tensor("w", packed, raw_dtype=GGMLQuantizationType.Q8_0)
    _finish(writer)
    found = open_checkpoint(tmp_path / "m.gguf").read("w").numpy()
    assert np.array_equal(found, dequantize(packed, GGMLQuantizationType.Q8_0))


def test_a_file_larger_than_memory_is_opened(tmp_path: Path) -> None:
    """Nearly all of it a hole."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    swap = int(re.findall(r"SwapTotal: *(\d+) kB", Path("/proc/meminfo").read_text())[0]) << 10
    rows = (memory + swap) // 320 + (1 << 22)
    path = tmp_path / "m.gguf"
    path.write_bytes(_file([_tensor(sizes=(160, rows), kind=BF16)], data=b""))
    data = path.stat().st_size
    try:
        os.truncate(path, data + 320 * rows)
    except OSError:
        pytest.skip("this file system has no files of that size")
    source = open_checkpoint(path)
    assert source.place("w").nbytes == 320 * rows > memory + swap
    assert source.read("w")[rows - 1].tolist() == [0] * 160


# Headers written by hand


def _text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def _key(name: bytes, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _tensor(name: bytes = b"w", sizes: tuple[int, ...] = (4,), kind: int = F32, offset: int = 0) -> bytes:
    head = _text(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return head + struct.pack("<IQ", kind, offset)


def _file(
    tensors: list[bytes] | None = None,
    keys: list[bytes] | None = None,
    data: bytes = bytes(16),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    tensors = [_tensor()] if tensors is None else tensors
    keys = [] if keys is None else keys
    head = magic + struct.pack("<IQQ", version, *(counts or (len(tensors), len(keys))))
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def _open(path: Path, content: bytes) -> Any:
    path.write_bytes(content)
    return open_checkpoint(path)


def test_the_hand_written_file_is_whole(tmp_path: Path) -> None:
    for number, content in enumerate(
        [
            _file(),
            _file(version=2),
            _file(data=bytes(32)),  # padded to the alignment
            _file([_tensor(), _tensor(b"v", (2, 3), F16, 32)], data=bytes(44)),
            _file(keys=[_key(b"general.alignment", UINT32, struct.pack("<I", 8))], alignment=8),
            _file(keys=[_key(b"split.count", 2, struct.pack("<H", 1))]),
            _file(keys=[_key(b"x", ARRAY, struct.pack("<IQ", STRING, 0))]),
        ]
    ):
        assert _open(tmp_path / f"{number}.gguf", content).read("w").tolist() == [0, 0, 0, 0]


def test_an_alignment_below_the_size_of_an_element_is_read(tmp_path: Path) -> None:
    key = _key(b"general.alignment", UINT32, struct.pack("<I", 1))
    content = _file(
        [_tensor(offset=1), _tensor(b"u", (1,), 24)], [key], b"\7" + struct.pack("<4f", 1, 2, 3, 4), alignment=1
    )
    assert _open(tmp_path / "m.gguf", content).read("w").tolist() == [1, 2, 3, 4]


_HUGE = (1 << 64) - 1
HOSTILE: dict[str, tuple[bytes, str]] = {
    "wrong magic": (_file(magic=b"GGML"), "is no GGUF file: it starts with b'GGML'"),
    "version 1": (_file(version=1), "has GGUF version 1, expected 2 or 3"),
    "version 4": (_file(version=4), "has GGUF version 4"),
    "big-endian": (_file(version=3 << 24), "big-endian"),
    "nothing but the magic": (b"GGUF", "is cut short"),
    "cut in the counts": (_file()[:23], "is cut short"),
    "cut in a tensor": (_file()[:40], "more than 0 is not possible"),
    "cut in the data": (_file()[:-1], "is cut short: tensor 'w' ends at byte 80, the file has 79"),
    "no data": (_file(data=b""), "is cut short: tensor 'w'"),
    "no tensors": (_file([], data=b""), "holds no tensors"),
    "countless tensors": (_file(counts=(_HUGE, 0)), "claims 18,446,744,073,709,551,615 tensors"),
    "many tensors": (_file(counts=(40, 0)), "claims 40 tensors"),
    "countless keys": (_file(counts=(1, 1 << 40)), "claims 1,099,511,627,776 keys"),
    "one tensor too many": (_file(counts=(2, 0), data=bytes(64)), "expected 1 to 4|UTF-8|dimensions"),
    "an endless key": (_file(keys=[_text(b"k", _HUGE) + bytes(16)]), "a key claims .* at most 65,536"),
    "a key past the end": (_file(keys=[_text(b"k", 5000) + bytes(16)]), "is cut short: a key would reach byte"),
    "an endless string": (_file(keys=[_key(b"k", STRING, _text(b"", _HUGE))]), "the value of 'k' claims"),
    "an endless array": (_file(keys=[_key(b"k", ARRAY, struct.pack("<IQ", 0, _HUGE))]), "values, more than the file"),
    "an array of endless strings": (
        _file(keys=[_key(b"k", ARRAY, struct.pack("<IQ", STRING, 65) + _text(b"", _HUGE) * 65)]),
        "holds a string of 18,446,744,073,709,551,615 bytes",
    ),
    "an array of arrays": (
        _file(keys=[_key(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(32))]),
        "array of arrays",
    ),
    "an array of an unknown kind": (_file(keys=[_key(b"k", ARRAY, struct.pack("<IQ", 99, 1))]), "unknown kind 99"),
    "a value of an unknown kind": (_file(keys=[_key(b"k", 13, b"")]), "'k' is of the unknown kind 13"),
    "half a truth": (_file(keys=[_key(b"k", 7, b"\2")]), "truth value 2, expected 0 or 1"),
    "a key twice": (_file(keys=[_key(b"k", 0, b"\1")] * 2), "the key 'k' is given twice"),
    "a key that is no text": (_file(keys=[_key(b"\xff", 0, b"\1")]), "a key is not UTF-8 text"),
    "a tensor twice": (_file([_tensor(), _tensor(offset=32)], data=bytes(48)), "tensor 'w' is given twice"),
    "a name that is no text": (_file([_tensor(b"\xff")]), "the name of a tensor is not UTF-8"),
    "an endless name": (_file([_text(b"", 1 << 20)]), "the name of a tensor claims|is cut short|claims 1 tensors"),
    "no dimensions": (_file([_tensor(sizes=())], data=bytes(64)), "has 0 dimensions, expected 1 to 4"),
    "five dimensions": (_file([_tensor(sizes=(1, 1, 1, 1, 4))]), "has 5 dimensions"),
    "a size of zero": (_file([_tensor(sizes=(4, 0))]), r"has the sizes \(4, 0\), expected sizes above 0"),
    "a negative size": (_file([_tensor(sizes=((1 << 64) - 4,))]), "expected sizes above 0 that a file could hold"),
    "sizes that overflow": (_file([_tensor(sizes=(1 << 32, 1 << 32))]), "that a file could hold"),
    "more than the file": (_file([_tensor(sizes=(1 << 40,))]), "is cut short: tensor 'w' ends at byte"),
    "an unknown type": (_file([_tensor(kind=4)]), "is of the unknown type 4; kittiwake reads F32"),
    "a row that is no multiple of the block": (_file([_tensor(sizes=(33,), kind=Q8_0)]), "expected a multiple of 32"),
    "an offset past the end": (_file([_tensor(offset=64)]), "is cut short: tensor 'w' ends at byte 144"),
    "an endless offset": (_file([_tensor(offset=_HUGE)]), "has the offset 18,446,744,073,709,551,615"),
    "an offset into another tensor": (
        _file([_tensor(), _tensor(b"v")], data=bytes(48)),
        "tensor 'v' has the offset 0, expected 32",
    ),
    "an offset that is not aligned": (_file([_tensor(offset=4)], data=bytes(32)), "has the offset 4, expected 0"),
    "a hole": (_file([_tensor(offset=32)], data=bytes(48)), "has the offset 32, expected 0"),
    "bytes left over": (_file(data=bytes(33)), "bytes after the last tensor"),
    "an alignment of zero": (
        _file(keys=[_key(b"general.alignment", UINT32, bytes(4))]),
        "general.alignment is 0, expected a power of two",
    ),
    "an alignment of 24": (_file(keys=[_key(b"general.alignment", UINT32, struct.pack("<I", 24))]), "is 24, expected"),
    "an alignment of a gigabyte": (
        _file(keys=[_key(b"general.alignment", UINT32, struct.pack("<I", 1 << 30))]),
        "up to 1,048,576",
    ),
    "an alignment in words": (_file(keys=[_key(b"general.alignment", STRING, _text(b"32"))]), "is '32', expected"),
    "one part of three": (
        _file(keys=[_key(b"split.count", 2, struct.pack("<H", 3))]),
        r"is one of several parts, and lacks the key split\.no",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_refused(kind: str, tmp_path: Path) -> None:
    content, message = HOSTILE[kind]
    with pytest.raises(CheckpointError, match=message) as caught:
        _open(tmp_path / "m.gguf", content)
    assert "m.gguf" in caught.value.message
    str(caught.value).encode()


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    keys = [_key(b"general.architecture", STRING, _text(b"rwkv7")), _key(b"n", ARRAY, struct.pack("<IQBB", 0, 2, 1, 2))]
    whole = _file([_tensor(), _tensor(b"q", (32,), Q8_0, 32)], keys, bytes(32 + 34))
    _open(tmp_path / "m.gguf", whole)
    for length in range(len(whole)):
        with pytest.raises(CheckpointError):
            _open(tmp_path / "m.gguf", whole[:length])


def test_types_that_are_not_read_are_listed_and_refused_by_name(tmp_path: Path) -> None:
    content = _file([_tensor(sizes=(256, 2), kind=TQ2_0)], data=bytes(132))
    source = _open(tmp_path / "m.gguf", content)
    info = source.infos()[0]
    assert (info.shape, info.packing, info.stored_bytes) == ((2, 256), "TQ2_0", 132)
    assert info.unreadable.startswith("is of the type TQ2_0; kittiwake reads F32, F16, BF16, Q8_0, Q2_K to Q6_K")
    with pytest.raises(CheckpointError, match="tensor 'w' is of the type TQ2_0"):
        source.read("w")


def test_finer_packings_are_unpacked_to_bfloat16(tmp_path: Path) -> None:
    packed = np.random.default_rng(0).integers(0, 256, (2, 144), dtype=np.uint8)
    packed[:, :4] = np.array([1.5, 0.25], dtype=np.float16).view(np.uint8)  # scale and least of a block
    source = _open(tmp_path / "m.gguf", _file([_tensor(sizes=(256, 2), kind=Q4_K)], data=packed.tobytes()))
    info, values = source.infos()[0], source.read("w")
    assert (info.shape, info.packing, info.stored_bytes, info.unreadable) == ((2, 256), "Q4_K", 288, "")
    expected = torch.from_numpy(dequantize(packed, GGMLQuantizationType.Q4_K)).bfloat16()
    assert values.dtype == info.dtype == torch.bfloat16 and torch.equal(values, expected)
    assert len(values.unique()) > 8


@pytest.mark.parametrize("code", [value.value for value in GGUFValueType if value not in (STRING, ARRAY)])
def test_every_kind_of_number_is_read(code: int, tmp_path: Path) -> None:
    sizes: dict[int, Callable[[], bytes]] = {
        0: lambda: struct.pack("<B", 1), 1: lambda: struct.pack("<b", 1), 2: lambda: struct.pack("<H", 1),
        3: lambda: struct.pack("<h", 1), 4: lambda: struct.pack("<I", 1), 5: lambda: struct.pack("<i", 1),
        6: lambda: struct.pack("<f", 1), 7: lambda: struct.pack("<B", 1), 10: lambda: struct.pack("<Q", 1),
        11: lambda: struct.pack("<q", 1), 12: lambda: struct.pack("<d", 1),
    }  # fmt: skip
    source = _open(tmp_path / "m.gguf", _file(keys=[_key(b"k", code, sizes[code]())]))
    assert source.config["k"] == 1
    assert isinstance(source.config["k"], bool) == (code == 7)
