"""GGUF files: tensors and metadata, little-endian, versions 2 and 3.

The header is walked here and every count and offset in it checked against the file before anything is believed; the
``gguf`` package knows the types and unpacks packed ones. Format: docs/gguf.md of the ggml project: "GGUF", version, number of
tensors, number of keys; keys with typed values; names, sizes (fastest first), types and offsets of the tensors; data,
each tensor aligned. A model in several files is read whole, whichever of them is given (gguf_parts.py).
"""

from __future__ import annotations

import math
import mmap
import platform
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kittiwake.checkpoints.files import GET_AGAIN, HEAD_BYTES, FileStamp, quoted, refuse_strangers
from kittiwake.checkpoints.gguf_parts import check_whole, merged_metadata, part_stamps
from kittiwake.checkpoints.reader import FilePlace, FileSource, TensorInfo
from kittiwake.errors import CheckpointError

MAX_TENSORS = 1 << 20
MAX_KEYS = 1 << 16
MAX_KEY_BYTES = 1 << 16
MAX_NAME_BYTES = 1 << 10
MAX_STRING_BYTES = 16 << 20
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
SHORT_ARRAY = 64
"""Arrays of up to this many values are kept; longer ones (vocabularies) are read when they are asked for."""
_DEFAULT_ALIGNMENT = 32
_UNPACK_BLOCKS = 1 << 15
_VERSIONS = (2, 3)
_MAX_INT64 = (1 << 63) - 1

_PLAIN: Mapping[GGMLQuantizationType, torch.dtype] = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
    GGMLQuantizationType.I8: torch.int8,
    GGMLQuantizationType.I16: torch.int16,
    GGMLQuantizationType.I32: torch.int32,
    GGMLQuantizationType.I64: torch.int64,
}
_UNPACKED: Mapping[GGMLQuantizationType, torch.dtype] = {GGMLQuantizationType.Q8_0: torch.float32} | {
    GGMLQuantizationType[name]: torch.bfloat16
    for name in (
        "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS",
        "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M",
    )
}  # fmt: skip
"""What is unpacked, and to what: the finer packings to bfloat16, which is about as fine as they are."""
_READ = "F32, F16, BF16, Q8_0, Q2_K to Q6_K, Q4_0 to Q5_1 and IQ1 to IQ4"
# Kinds of metadata values: name and struct code; strings and arrays are read by themselves.
_SCALARS = {
    0: ("uint8", "B"), 1: ("int8", "b"), 2: ("uint16", "H"), 3: ("int16", "h"), 4: ("uint32", "I"), 5: ("int32", "i"),
    6: ("float32", "f"), 7: ("bool", "B"), 10: ("uint64", "Q"), 11: ("int64", "q"), 12: ("float64", "d"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9
# Python names it from 3.13 on; the number is that of Linux on these processors.
_KNOWN_FLAG = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64", "riscv64") else 0
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", _KNOWN_FLAG)


@dataclass(frozen=True)
class LongArray:
    """An array of the metadata whose values :meth:`GgufSource.values` reads."""

    kind: str
    length: int
    begin: int = field(default=0, repr=False, compare=False)
    """Of its values in the file."""
    nbytes: int = field(default=0, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.length:,} values of {self.kind}"


@dataclass(frozen=True)
class _Entry:
    """One tensor of the header; ``begin`` counts from the start of the file."""

    info: TensorInfo
    kind: GGMLQuantizationType
    begin: int


@dataclass(frozen=True)
class _File:
    """One open file."""

    stamp: FileStamp
    data: mmap.mmap
    metadata: Mapping[str, Any]
    entries: Sequence[_Entry]


class GgufSource(FileSource):
    """Tensors of a GGUF file or of the parts of one, mapped; packed ones are unpacked when read.

    ``config`` is the metadata; ``path`` is the file, or the first part.
    """

    def __init__(self, files: Sequence[_File]) -> None:
        self._maps: Sequence[_File] = files
        self._entries = {entry.info.name: (entry, file) for file in files for entry in file.entries}
        infos = [entry.info for entry, _ in self._entries.values()]
        metadata = merged_metadata([(file.stamp.path, file.metadata) for file in files])
        super().__init__(files[0].stamp.path, "gguf", infos, [file.stamp for file in files], metadata)

    def values(self, key: str, most_bytes: int) -> list[Any]:
        """Every value of an array of the metadata, however long. Raises CheckpointError after close(), for a key that is
        missing or no array, for more than ``most_bytes``, and for strings that are not UTF-8."""
        where = f"{self.path}: the value of {quoted(key)}"
        if not self._is_open:
            raise CheckpointError(f"{self.path} was closed", "open the checkpoint again")
        file = next((file for file in self._maps if key in file.metadata), None)
        if file is None:
            raise CheckpointError(f"{self.path} lacks the key {quoted(key)}")
        found = file.metadata[key]
        if isinstance(found, list):
            return found
        if not isinstance(found, LongArray):
            raise CheckpointError(f"{where} is {quoted(found)}, expected an array")
        if found.nbytes > most_bytes:
            raise CheckpointError(f"{where} takes {found.nbytes:,} bytes, at most {most_bytes:,} are read")
        for stamp in self._files:
            stamp.check_unchanged()
        return _array_values(file.data[found.begin : found.begin + found.nbytes], found, where)

    def _place(self, name: str) -> FilePlace:
        entry, file = self._entries[name]
        return FilePlace(file.stamp.path, entry.begin, entry.info.stored_bytes, entry.kind.name)

    def _tensor(self, name: str) -> torch.Tensor:
        entry, file = self._entries[name]
        info, data = entry.info, file.data
        if info.unreadable:
            raise CheckpointError(f"{file.stamp.path}: tensor {quoted(name)} {info.unreadable}")
        count = math.prod(info.shape)
        if entry.kind in _PLAIN:
            tensor = torch.frombuffer(data, dtype=info.dtype, count=count, offset=entry.begin)
            # An alignment below the size of an element is allowed, and kernels may count on more.
            return (tensor if entry.begin % info.dtype.itemsize == 0 else tensor.clone()).reshape(info.shape)
        packed = np.frombuffer(data, dtype=np.uint8, count=info.packed_bytes, offset=entry.begin)
        return _unpack(packed, entry.kind, count).reshape(info.shape)

    def close(self) -> None:
        """Let go of the files. Tensors already read stay valid: they hold the mapping."""
        super().close()
        self._maps, self._entries = (), {}


def _unpack(packed: np.ndarray, kind: GGMLQuantizationType, count: int) -> torch.Tensor:
    """[count], a few blocks at a time: the package's own way takes several times the tensor's memory."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    flat = torch.empty(count, dtype=_UNPACKED[kind])
    for first in range(0, count // block, _UNPACK_BLOCKS):
        last = min(first + _UNPACK_BLOCKS, count // block)
        values = dequantize(packed[first * block_bytes : last * block_bytes], kind)
        flat[first * block : last * block] = torch.from_numpy(values)
    return flat


def _array_values(raw: bytes, array: LongArray, where: str) -> list[Any]:
    """The values of an array whose lengths were checked when the header was read."""
    values: list[Any] = []
    if array.kind != "string":
        values += np.frombuffer(raw, dtype=np.dtype(array.kind).newbyteorder("<")).tolist()
        return values
    at = 0
    for number in range(array.length):
        (length,) = struct.unpack_from("<Q", raw, at)
        at += 8 + length
        try:
            values.append(raw[at - length : at].decode("utf-8"))
        except UnicodeDecodeError:
            raise CheckpointError(
                f"{where} is not UTF-8 text at {number}: {quoted(raw[at - length : at])}", GET_AGAIN
            ) from None
    return values


def open_gguf(stamp: FileStamp) -> GgufSource:
    """Open a GGUF file, with all its parts where it is one of several; tensors of types that are not read are listed all
    the same, and refused when read.

    Raises CheckpointError for a file that is cut short, of another version or byte order; for counts, lengths, sizes
    and offsets that do not fit the file; for keys or names given twice; and for parts that are missing or do not belong
    together.
    """
    given = _open_file(stamp)
    parts = part_stamps(stamp, given.metadata)
    if not parts:
        return GgufSource([given])
    files = [given if one.path == stamp.path else _open_file(one) for one in parts]
    check_whole([(file.stamp.path, file.metadata, [entry.info.name for entry in file.entries]) for file in files])
    return GgufSource(files)


def _open_file(stamp: FileStamp) -> _File:
    """One file by itself, every count and offset checked."""
    path = stamp.path
    try:
        with path.open("rb") as file:
            refuse_strangers(path, file.read(HEAD_BYTES))
            if stamp.size < 24:
                raise CheckpointError(f"{path} is cut short: {stamp.size} bytes cannot hold a GGUF header", GET_AGAIN)
            data = _mapped(file.fileno())
    except (OSError, ValueError) as err:
        raise CheckpointError(f"{path} cannot be mapped: {err}") from None
    header = _Header(data, path)
    metadata, tensors = header.read()
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(
            f"{path}: general.alignment is {quoted(alignment)}, expected a power of two up to {MAX_ALIGNMENT:,}"
        )
    start = _aligned(header.at, alignment)
    _check_layout(tensors, start, alignment, stamp)
    return _File(stamp, data, metadata, [_Entry(one.info, one.kind, start + one.begin) for one in tensors])


def _mapped(descriptor: int) -> mmap.mmap:
    """The file's own pages, copied on write: nothing can be written through a tensor.

    Linux refuses such a mapping of a file larger than memory, since all of it might be written to, unless it is told to
    reserve nothing.
    """
    if not _NO_RESERVE:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    return mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _check_layout(entries: Sequence[_Entry], start: int, alignment: int, stamp: FileStamp) -> None:
    """The tensors lie one after another, each at the first aligned place; nothing but padding follows the last."""
    path, position, before = stamp.path, 0, "the header"
    for entry in sorted(entries, key=lambda entry: entry.begin):
        name = quoted(entry.info.name)
        end = entry.begin + entry.info.stored_bytes
        if start + end > stamp.size:
            raise CheckpointError(
                f"{path} is cut short: tensor {name} ends at byte {start + end:,}, the file has {stamp.size:,}",
                GET_AGAIN,
            )
        if entry.begin != _aligned(position, alignment):
            raise CheckpointError(
                f"{path}: tensor {name} has the offset {entry.begin:,}, expected {_aligned(position, alignment):,}, "
                f"the first multiple of {alignment} after {before}",
                GET_AGAIN,
            )
        position, before = end, name
    if stamp.size > _aligned(start + position, alignment):
        raise CheckpointError(f"{path} has {stamp.size - start - position:,} bytes after the last tensor", GET_AGAIN)


class _Header:
    """A cursor over the head of the file; every step asks first whether the file goes on that far."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}", GET_AGAIN)

    def read(self) -> tuple[dict[str, Any], list[_Entry]]:
        """Metadata, and the tensors with offsets from the start of the data."""
        magic = self.take(4, "the magic number")
        if magic != b"GGUF":
            raise CheckpointError(f"{self.path} is no GGUF file: it starts with {quoted(magic)}, expected b'GGUF'")
        version = self.number("I", "the version")
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{self.path} is a big-endian GGUF file, only little-endian ones are read")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self.path} has GGUF version {version}, expected {' or '.join(map(str, _VERSIONS))}",
                "convert the model again with a current converter",
            )
        tensor_count, key_count = self.number("Q", "the number of tensors"), self.number("Q", "the number of keys")
        self.check_count(tensor_count, MAX_TENSORS, 33, "tensors")
        self.check_count(key_count, MAX_KEYS, 14, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.text(MAX_KEY_BYTES, "a key")
            if key in metadata:
                raise self.fail(f"the key {quoted(key)} is given twice")
            metadata[key] = self.value(key)
        entries: dict[str, _Entry] = {}
        for _ in range(tensor_count):
            entry = self.tensor()
            if entry.info.name in entries:
                raise self.fail(f"tensor {quoted(entry.info.name)} is given twice")
            entries[entry.info.name] = entry
        return metadata, list(entries.values())

    def take(self, count: int, what: str) -> bytes:
        if count > len(self.data) - self.at:
            raise CheckpointError(
                f"{self.path} is cut short: {what} would reach byte {self.at + count:,}, the file has {len(self.data):,}",
                GET_AGAIN,
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code), what))[0]

    def check_count(self, count: int, most: int, least_bytes: int, what: str) -> None:
        room = (len(self.data) - self.at) // least_bytes
        if count > min(most, room):
            raise self.fail(f"the header claims {count:,} {what}, more than {min(most, room):,} is not possible here")

    def text(self, most: int, what: str) -> str:
        length = self.number("Q", f"the length of {what}")
        if length > most:
            raise self.fail(f"{what} claims {length:,} bytes, at most {most:,} are read")
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as err:
            raise self.fail(f"{what} is not UTF-8 text: byte {err.start} of {quoted(raw)}") from None

    def value(self, key: str) -> Any:
        what = f"the value of {quoted(key)}"
        kind = self.number("I", what)
        if kind == _ARRAY:
            return self.array(what)
        return self.item(kind, what)

    def item(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.text(MAX_STRING_BYTES, what)
        if kind not in _SCALARS:
            raise self.fail(f"{what} is of the unknown kind {kind}")
        name, code = _SCALARS[kind]
        number = self.number(code, what)
        if name == "bool" and number not in (0, 1):
            raise self.fail(f"{what} is the truth value {number}, expected 0 or 1")
        if name == "float32":  # 1e-05 instead of 9.999999747378752e-06: the shortest that rounds to the same float32
            return float(str(np.float32(number)))
        return bool(number) if name == "bool" else number

    def array(self, what: str) -> list[Any] | LongArray:
        kind, length = self.number("I", what), self.number("Q", what)
        if kind == _ARRAY:
            raise self.fail(f"{what} is an array of arrays, which is not read")
        if kind != _STRING and kind not in _SCALARS:
            raise self.fail(f"{what} is an array of the unknown kind {kind}")
        size = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind][1])
        if length > (len(self.data) - self.at) // size:
            raise self.fail(f"{what} claims {length:,} values, more than the file could hold")
        if length <= SHORT_ARRAY:
            return [self.item(kind, what) for _ in range(length)]
        begin = self.at
        if kind != _STRING:
            self.at += length * size
            return LongArray(_SCALARS[kind][0], length, begin, length * size)
        for _ in range(length):
            self.skip_text(what)
        return LongArray("string", length, begin, self.at - begin)

    def skip_text(self, what: str) -> None:
        """Tokens need not be UTF-8, and there are many of them: only their lengths are looked at."""
        length = self.number("Q", what)
        if length > min(MAX_STRING_BYTES, len(self.data) - self.at):
            raise self.fail(f"{what} holds a string of {length:,} bytes, more than is possible here")
        self.at += length

    def tensor(self) -> _Entry:
        name = self.text(MAX_NAME_BYTES, "the name of a tensor")
        what = f"tensor {quoted(name)}"
        dimensions = self.number("I", what)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self.fail(f"{what} has {dimensions:,} dimensions, expected 1 to {MAX_DIMENSIONS}")
        sizes = struct.unpack(f"<{dimensions}Q", self.take(8 * dimensions, what))
        if 0 in sizes or math.prod(sizes) > _MAX_INT64:
            raise self.fail(f"{what} has the sizes {quoted(sizes)}, expected sizes above 0 that a file could hold")
        kind = self.kind(self.number("I", what), what)
        offset = self.number("Q", what)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if sizes[0] % block:
            raise self.fail(f"{what} is {kind.name} with rows of {sizes[0]:,}, expected a multiple of {block}")
        if offset > _MAX_INT64:
            raise self.fail(f"{what} has the offset {offset:,}, which no file has")
        shape = tuple(reversed(sizes))
        if kind in _PLAIN:
            return _Entry(TensorInfo(name, shape, _PLAIN[kind]), kind, offset)
        why_not = "" if kind in _UNPACKED else f"is of the type {kind.name}; kittiwake reads {_READ}"
        packed_bytes = math.prod(sizes) // block * block_bytes
        dtype = _UNPACKED.get(kind, torch.float32)
        return _Entry(TensorInfo(name, shape, dtype, kind.name, packed_bytes, why_not), kind, offset)

    def kind(self, number: int, what: str) -> GGMLQuantizationType:
        try:
            return GGMLQuantizationType(number)
        except ValueError:
            raise self.fail(f"{what} is of the unknown type {number}; kittiwake reads {_READ}") from None
