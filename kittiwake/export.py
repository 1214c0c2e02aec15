"""Logits or hidden rows of a text → one file, written as they come, so that memory stays bounded."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from kittiwake.checkpoints.files import new_file, writing
from kittiwake.checkpoints.reader import TensorInfo
from kittiwake.checkpoints.weights import SafetensorsWriter
from kittiwake.engine.request import KeptState
from kittiwake.errors import RequestError
from kittiwake.llm import LLM
from kittiwake.progress import Progress

WHAT = ("logits", "hidden")
FORMATS = ("npz", "safetensors")


class _Writer(Protocol):
    """An array at a time, its rows a chunk at a time."""

    def begin(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> None: ...

    def write(self, rows: np.ndarray) -> None: ...


class _NpzWriter:
    """Arrays as numpy's ``savez`` lays them out: one uncompressed member each."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._member: Any = None

    def begin(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        self.end()
        self._member = self._archive.open(f"{name}.npy", "w", force_zip64=True)
        head = {"descr": np.dtype(dtype).newbyteorder("<").str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._member, head)

    def write(self, rows: np.ndarray) -> None:
        self._member.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)

    def end(self) -> None:
        if self._member is not None:
            self._member.close()


class _SafetensorsWriter:
    """The same for safetensors."""

    def __init__(self, file: SafetensorsWriter) -> None:
        self._file = file

    def begin(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        self._file.begin(TensorInfo(name, shape, torch.from_numpy(np.empty(0, dtype)).dtype))

    def write(self, rows: np.ndarray) -> None:
        self._file.write(torch.from_numpy(np.ascontiguousarray(rows).reshape(-1)))


@contextmanager
def _open(path: Path, layout: str) -> Iterator[_Writer]:
    if layout == "npz":
        with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
            npz = _NpzWriter(archive)
            try:
                yield npz
            finally:
                npz.end()
        return
    file = SafetensorsWriter(path)
    try:
        yield _SafetensorsWriter(file)
        file.finish()
    finally:
        file.abandon()


def export_rows(
    llm: LLM,
    ids: Sequence[int],
    out: Path,
    *,
    what: str,
    layout: str,
    layers: Sequence[int] | None = None,
    last: int | None = None,
    start_from: KeptState | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write what a model says of ``ids`` to a new file; JSON values that describe it come back.

    The file holds ``token_ids`` int64 [T], and ``logits`` float32 [R, vocab], or ``hidden`` float32 [R, layers, C] with
    ``layers`` int64: of the ``last`` R tokens, or of all. ``layout`` is "npz" or "safetensors". Raises RequestError for
    ids or layers the model does not have, OutputError for a file that exists or cannot be written.
    """
    if last is not None and not 1 <= last <= len(ids):
        raise RequestError(f"the last {last} rows were asked for of {len(ids)} tokens")
    first = 0 if last is None else len(ids) - last
    chosen = llm.check_layers(layers) if what == "hidden" else ()
    pieces = llm.stream_rows(ids, layers=chosen, want_logits=what == "logits", start_from=start_from)
    tail = (llm.vocab_size,) if what == "logits" else (len(chosen), llm.loaded.model.config.width)
    shape = (len(ids) - first, *tail)
    with new_file(out) as partial, writing(out), _open(partial, layout) as file:
        file.begin("token_ids", (len(ids),), np.int64)
        file.write(np.asarray(ids, dtype=np.int64))
        if what == "hidden":
            file.begin("layers", (len(chosen),), np.int64)
            file.write(np.asarray(chosen, dtype=np.int64))
        file.begin(what, shape, np.float32)
        for piece in pieces:
            rows = piece.logits if what == "logits" else piece.hidden
            file.write(rows[max(0, first - piece.first) :])
            if progress is not None:
                progress("tokens", piece.first + piece.count, len(ids))
    return {"file": str(out), "what": what, "format": layout, "tokens": len(ids), "shape": list(shape)}
