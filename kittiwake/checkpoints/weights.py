"""Writing weights: safetensors shards, converted and checked a chunk at a time, so that memory stays at one tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kittiwake.checkpoints.files import quoted, writing
from kittiwake.checkpoints.reader import TensorInfo
from kittiwake.checkpoints.safetensors import DTYPES, MAX_DIMENSIONS
from kittiwake.errors import CheckpointError, UsageError
from kittiwake.progress import Progress

HEADER_ROOM = 1 << 16
"""Bytes that a shard keeps for its length and header, so that the data can be written first and starts on a page border."""
MAX_NAME_BYTES = 1024
_CHUNK_ELEMENTS = 1 << 20
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def finite_chunks(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """A tensor's elements in order, flat, converted to ``dtype`` if floating, at most 1 Mi elements at a time.

    Raises CheckpointError naming the tensor when it holds NaN or infinity, or a value that overflows ``dtype``.
    """
    floating = tensor.is_floating_point()
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        chunk = flat[start : start + _CHUNK_ELEMENTS]
        if not floating:
            yield chunk
            continue
        # 8-bit floats know no isfinite; float32 holds their values exactly.
        wide = chunk.float() if chunk.element_size() == 1 else chunk
        if not bool(torch.isfinite(wide).all()):
            raise CheckpointError(
                f"tensor {quoted(name)} holds NaN or infinity", "the checkpoint is damaged or diverged"
            )
        converted = wide.to(dtype)
        if not bool(torch.isfinite(converted).all()):
            largest, kind = float(wide.abs().max()), str(dtype).removeprefix("torch.")
            raise CheckpointError(
                f"tensor {quoted(name)} does not fit {kind}: its largest value is {largest:g}",
                "build with a precision of wider range: bf16 or fp32",
            )
        yield converted


class SafetensorsWriter:
    """One new safetensors file, written a chunk at a time: the data behind a fixed room, then the header into it.

    Methods raise OSError (see ``files.writing``). End with :meth:`finish`, or :meth:`abandon` when something failed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data_bytes = 0
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._header_bytes = len(_compact(self._header))
        self._file = path.open("xb")
        self._file.seek(HEADER_ROOM)

    def fits(self, info: TensorInfo, max_bytes: int) -> bool:
        """Whether the tensor's header entry fits the room, and the file stays within ``max_bytes``."""
        room = self._header_bytes + len(self._line(info)) <= HEADER_ROOM - 8
        return room and HEADER_ROOM + self.data_bytes + info.nbytes <= max_bytes

    def _line(self, info: TensorInfo) -> bytes:
        return _compact({info.name: self._value(info)})

    def _value(self, info: TensorInfo) -> dict[str, Any]:
        offsets = [self.data_bytes, self.data_bytes + info.nbytes]
        return {"dtype": _DTYPE_NAMES[info.dtype], "shape": list(info.shape), "data_offsets": offsets}

    def begin(self, info: TensorInfo) -> None:
        """Enter a tensor; its data follows in :meth:`write`."""
        self._header_bytes += len(self._line(info))
        self._header[info.name] = self._value(info)

    def write(self, chunk: torch.Tensor) -> None:
        """Append flat elements of the tensor entered last."""
        raw = chunk.contiguous().cpu().view(torch.uint8).numpy()
        self._file.write(raw.data)
        self.data_bytes += raw.nbytes

    def finish(self) -> None:
        """Write the header (padded with spaces, as the format allows) and sync the file to the disk."""
        header = _compact(self._header).ljust(HEADER_ROOM - 8)
        self._file.seek(0)
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close without finishing, whatever the state: a last flush that fails changes nothing any more."""
        with suppress(OSError):
            self._file.close()


def _compact(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _check_writable(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    encoded = name.encode("utf-8", "replace")
    if not name or name == "__metadata__" or len(encoded) > MAX_NAME_BYTES or encoded.decode() != name:
        raise UsageError(f"a tensor cannot be called {quoted(name)}")
    if dtype not in _DTYPE_NAMES or tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise UsageError(f"tensor {quoted(name)} cannot be written: {dtype}, {tensor.layout}, {tensor.device}")
    if tensor.dim() > MAX_DIMENSIONS:
        raise UsageError(f"tensor {quoted(name)} has {tensor.dim()} dimensions, at most {MAX_DIMENSIONS} are written")


class WeightsWriter:
    """Writes tensors into numbered shards, one chunk in memory at a time."""

    def __init__(
        self, folder: Path, out: Path, dtype: torch.dtype, max_bytes: int, progress: Progress | None, total: int
    ) -> None:
        self._folder, self._out = folder, out
        self._dtype, self._max_bytes = dtype, max_bytes
        self._progress, self._total, self._done = progress, total, 0
        self._shard: SafetensorsWriter | None = None
        self._names: list[str] = []

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """The names of the files written, each synced to the disk."""
        seen: set[str] = set()
        try:
            for name, tensor in tensors:
                if name in seen:
                    raise UsageError(f"tensor {quoted(name)} was given twice")
                seen.add(name)
                self._add(name, tensor)
            if not seen:
                raise UsageError("no tensors were given")
            self._finish_shard()
        finally:
            if self._shard is not None:
                self._shard.abandon()
        return self._names

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        _check_writable(name, tensor, dtype)
        info = TensorInfo(name, tuple(tensor.shape), dtype)
        if self._shard is not None and not self._shard.fits(info, self._max_bytes):
            self._finish_shard()
        if self._shard is None:
            with writing(self._out):
                self._names.append(f"weights-{len(self._names) + 1:05}.safetensors")
                self._shard = SafetensorsWriter(self._folder / self._names[-1])
        self._shard.begin(info)
        for chunk in finite_chunks(name, tensor, self._dtype):
            with writing(self._out):
                self._shard.write(chunk)
            self._done += chunk.nbytes
            if self._progress is not None:
                self._progress("writing weights", self._done, self._total)

    def _finish_shard(self) -> None:
        if self._shard is not None:
            with writing(self._out):
                self._shard.finish()
            self._shard = None
