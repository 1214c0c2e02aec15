"""Safetensors files: one, or shards with an index.

The header is checked here, with messages that name the offender, before the ``safetensors`` library maps the data. The
format: 8 bytes of little-endian header length, a JSON object ``{name: {dtype, shape, data_offsets}}``, then the data
without holes (source: the format section of the safetensors project's README).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kittiwake.checkpoints.files import GET_AGAIN, HEAD_BYTES, FileStamp, is_plain_name, quoted, refuse_strangers
from kittiwake.checkpoints.reader import MAX_HEADER_BYTES, FilePlace, FileSource, TensorInfo
from kittiwake.checkpoints.strict_json import load_json_strict
from kittiwake.errors import CheckpointError

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_KINDS = {dtype: kind for kind, dtype in DTYPES.items()}

MAX_INDEX_BYTES = 64 << 20
MAX_DIMENSIONS = 16
_MAX_INT64 = (1 << 63) - 1


@dataclass(frozen=True)
class Entry:
    """One tensor of a header: what it is, and its bytes ``begin`` to ``end`` counted from the start of the data."""

    info: TensorInfo
    begin: int
    end: int


def read_header(stamp: FileStamp) -> list[Entry]:
    """The tensors of a safetensors file in file order, checked against each other and against the file's size.

    Raises CheckpointError for a header that does not fit, is not strict JSON or names an unknown dtype; for shapes and
    offsets that disagree, overlap or leave holes; and for a file cut short or with bytes left over.
    """
    path = stamp.path
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            length = int.from_bytes(head[:8], "little")
            file.seek(8)
            if stamp.size < 8 or length > stamp.size - 8:
                refuse_strangers(path, head)
                raise CheckpointError(f"{path} is cut short: {stamp.size:,} bytes cannot hold its header", GET_AGAIN)
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path} claims a header of {length:,} bytes, at most {MAX_HEADER_BYTES:,} are read"
                )
            header = load_json_strict(file.read(length), what=f"the header of {path}", max_bytes=MAX_HEADER_BYTES)
    except OSError as err:
        raise CheckpointError(f"{path} cannot be read: {err.strerror}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"the header of {path} is a JSON {type(header).__name__}, expected an object")
    _check_metadata(header.pop("__metadata__", {}), path)
    entries = sorted((_entry(name, value, path) for name, value in header.items()), key=lambda e: (e.begin, e.end))
    _check_layout(entries, stamp.size - 8 - length, path)
    return entries


def _check_metadata(metadata: Any, path: Path) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"the header of {path}: __metadata__ is not an object of strings")


def _entry(name: str, value: Any, path: Path) -> Entry:
    where = f"{path}: tensor {quoted(name)}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        keys = quoted(sorted(value)) if isinstance(value, dict) else f"a {type(value).__name__}"
        raise CheckpointError(f"{where} has {keys}, expected exactly dtype, shape and data_offsets")
    dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"{where} has the dtype {quoted(value['dtype'])}", f"known dtypes: {', '.join(DTYPES)}")
    shape, offsets = value["shape"], value["data_offsets"]
    if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(
            f"{where} has the shape {quoted(shape)}, expected at most {MAX_DIMENSIONS} non-negative integers"
        )
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has data_offsets {quoted(offsets)}, expected [begin, end]")
    info = TensorInfo(name, tuple(shape), dtype)
    if info.nbytes != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{where} spans {offsets[1] - offsets[0]:,} bytes where {value['dtype']} {quoted(shape)} needs {info.nbytes:,}"
        )
    return Entry(info, offsets[0], offsets[1])


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= _MAX_INT64 for size in value)


def _check_layout(entries: Sequence[Entry], data_bytes: int, path: Path) -> None:
    """The data is one run from 0 to the end of the file: no overlap, no hole, nothing missing, nothing over."""
    if entries and entries[0].begin != 0:
        raise CheckpointError(f"{path}: the data starts with a hole of {entries[0].begin:,} bytes", GET_AGAIN)
    for before, after in pairwise(entries):
        if after.begin != before.end:
            fault = "overlap" if after.begin < before.end else "leave a hole between them"
            raise CheckpointError(
                f"{path}: tensors {quoted(before.info.name)} and {quoted(after.info.name)} {fault}", GET_AGAIN
            )
    end = entries[-1].end if entries else 0
    if end > data_bytes:
        raise CheckpointError(f"{path} is cut short: {data_bytes:,} of {end:,} bytes of data are there", GET_AGAIN)
    if end < data_bytes:
        raise CheckpointError(f"{path} has {data_bytes - end:,} bytes after the last tensor", GET_AGAIN)


class SafetensorsSource(FileSource):
    """Tensors of one safetensors file or of several; data stays in the files until it is touched."""

    def __init__(
        self,
        path: Path,
        stamps: Sequence[FileStamp],
        *,
        kind: str = "safetensors",
        config: Mapping[str, Any] | None = None,
        digest_files: Sequence[Path] = (),
    ) -> None:
        """``stamps``: the files in shard order. Raises CheckpointError also for a name that two shards hold."""
        self._handles: dict[str, Any] = {}
        infos: list[TensorInfo] = []
        holders: dict[str, Path] = {}
        self._begins: dict[str, int] = {}
        for stamp in stamps:
            entries = read_header(stamp)
            handle = _map(stamp.path)
            data = stamp.size - (entries[-1].end if entries else 0)  # the data reaches to the end of the file
            self._begins |= {entry.info.name: data + entry.begin for entry in entries}
            for info in (entry.info for entry in entries):
                if info.name in holders:
                    both = f"{holders[info.name].name} and {stamp.path.name}"
                    raise CheckpointError(f"{path}: tensor {quoted(info.name)} is in both {both}")
                holders[info.name] = stamp.path
                self._handles[info.name] = handle
                infos.append(info)
        super().__init__(path, kind, infos, stamps, config, digest_files)
        self._holders = holders

    def shard_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._holders[name]

    def _place(self, name: str) -> FilePlace:
        info = self._infos[name]
        return FilePlace(self._holders[name], self._begins[name], info.nbytes, _KINDS[info.dtype])

    def _tensor(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._handles[name].get_tensor(name)
        except (SafetensorError, RuntimeError, ValueError) as err:
            raise CheckpointError(f"{self._holders[name]}: tensor {quoted(name)} cannot be mapped: {err}") from None
        # The format does not align tensors to their element size, and kernels may count on it.
        return tensor if tensor.data_ptr() % tensor.element_size() == 0 else tensor.clone()

    def close(self) -> None:
        """Let go of the files. Tensors already read stay valid: they hold their mapping."""
        super().close()
        self._handles.clear()


def _map(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, RuntimeError, ValueError) as err:
        raise CheckpointError(f"{path} cannot be mapped: {err}") from None


def open_single(stamp: FileStamp, config: Mapping[str, Any] | None, config_files: Sequence[Path]) -> SafetensorsSource:
    """One safetensors file, with the config of its folder if it was opened as a folder. Raises CheckpointError."""
    return SafetensorsSource(stamp.path, [stamp], config=config, digest_files=(stamp.path, *config_files))


def open_sharded(folder: Path, config: Mapping[str, Any] | None, config_files: Sequence[Path]) -> SafetensorsSource:
    """A folder with ``model.safetensors.index.json``: every tensor of the index in its shard, and no other.

    The index's ``metadata`` (a total size, often wrong where tensors are shared) is not used. Raises CheckpointError.
    """
    index = folder / "model.safetensors.index.json"
    weight_map = _read_index(index)
    stamps = [FileStamp.of(folder / shard) for shard in sorted(set(weight_map.values()))]
    source = SafetensorsSource(folder, stamps, config=config, digest_files=(*(s.path for s in stamps), *config_files))
    names = {info.name for info in source.infos()}
    for name, shard in weight_map.items():
        if name not in names:
            raise CheckpointError(
                f"{folder / shard} lacks tensor {quoted(name)}, which {index.name} places there", GET_AGAIN
            )
        if source.shard_of(name).name != shard:
            raise CheckpointError(f"{index} places {quoted(name)} in {shard}; it is in {source.shard_of(name).name}")
    for name in names - weight_map.keys():
        raise CheckpointError(f"{source.shard_of(name)} holds tensor {quoted(name)}, which {index.name} does not list")
    return source


def _read_index(index: Path) -> dict[str, str]:
    content = load_json_strict(index, what=str(index), max_bytes=MAX_INDEX_BYTES)
    if not isinstance(content, dict) or not isinstance(content.get("weight_map"), dict):
        raise CheckpointError(f"{index} has no object weight_map", "it is not an index of safetensors shards")
    if unknown := content.keys() - {"weight_map", "metadata"}:
        raise CheckpointError(f"{index} has the unknown key {quoted(min(unknown))}")
    weight_map = content["weight_map"]
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not is_plain_name(shard) or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} places {quoted(name)} in {quoted(shard)}", "expected a .safetensors file in the same folder"
            )
    if not weight_map:
        raise CheckpointError(f"{index} lists no tensors")
    return dict(weight_map)
