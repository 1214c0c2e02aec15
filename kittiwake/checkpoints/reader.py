"""Bytes on disk → named tensors. Knows formats, knows no model, runs no code from a file."""

from __future__ import annotations

import difflib
import hashlib
import math
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from kittiwake.checkpoints.files import HEAD_BYTES, FileStamp, quoted, refuse_strangers, sha256_file
from kittiwake.checkpoints.gguf_parts import first_parts
from kittiwake.checkpoints.strict_json import load_json_strict
from kittiwake.errors import CheckpointError
from kittiwake.progress import Progress

MAX_CONFIG_BYTES = 4 << 20
MAX_HEADER_BYTES = 100_000_000
"""The most a safetensors header may hold; the ``safetensors`` library has the same limit."""

_PICKLE_SUFFIXES = (".pth", ".pt", ".bin", ".pkl")
_SHARD = re.compile(r"-[0-9]{5}-of-[0-9]{5}\.safetensors$")
_SHOWN = 4
_EXPECTED = (
    "expected a PyTorch .pth, a .safetensors or .gguf file, or a folder that holds one of them or a kittiwake bundle"
)


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape and torch dtype of one stored tensor, known without reading its data."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """What ``read`` gives."""
    packing: str = ""
    """The file's own type (such as "Q8_0") where that is none of torch's: ``read`` unpacks it."""
    packed_bytes: int = 0
    unreadable: str = ""
    """Why ``read`` refuses it, as what comes after its name in a sentence; empty where it does not."""

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes, unpacked."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """Size of the data in the file."""
        return self.packed_bytes if self.packing else self.nbytes


@dataclass(frozen=True)
class FilePlace:
    """Where values lie in a file, as they are stored."""

    path: Path
    begin: int
    nbytes: int
    kind: str
    """The file's own name of the type: "F32", "F16", "BF16", "Q8_0", "IQ4_NL" and so on."""


class TensorSource(Protocol):
    """An open checkpoint: tensors by name."""

    path: Path
    format: str
    """"pth", "safetensors", "gguf" or "bundle"."""
    config: Mapping[str, Any] | None
    """The config.json that came with it, if any; of a GGUF file its metadata."""

    def infos(self) -> Sequence[TensorInfo]:
        """Every tensor in the source, in file order."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor, mapped from the file where the format allows (do not write to it). Raises CheckpointError."""

    def place(self, name: str) -> FilePlace:
        """Where the tensor's values lie, row after row. Raises CheckpointError where that cannot be told."""

    def digest(self, progress: Progress | None = None) -> str:
        """sha-256 (hex) over the source's files, computed when first asked for."""

    def close(self) -> None:
        """Let go of the files. Tensors already read stay valid. Leaving a ``with`` block does it too."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None: ...


class FileSource:
    """What every format's source shares; a format adds :meth:`_tensor`."""

    def __init__(
        self,
        path: Path,
        kind: str,
        infos: Sequence[TensorInfo],
        files: Sequence[FileStamp],
        config: Mapping[str, Any] | None = None,
        digest_files: Sequence[Path] = (),
    ) -> None:
        """``kind`` is the format; ``files`` are watched for changes; ``digest_files`` (else ``files``) go into digest()."""
        if not infos:
            raise CheckpointError(f"{path} holds no tensors", _EXPECTED)
        self.path = path
        self.format = kind
        self.config = config
        self._infos = {info.name: info for info in infos}
        self._files = tuple(files)
        self._digest_files = tuple(digest_files) or tuple(stamp.path for stamp in files)
        self._digest: str | None = None
        self._is_open = True

    def infos(self) -> Sequence[TensorInfo]:
        """Every tensor in the source, in file order."""
        return tuple(self._infos.values())

    def read(self, name: str) -> torch.Tensor:
        """The tensor, mapped from the file where the format allows: do not write to it.

        Raises CheckpointError for a name the source does not have (the nearest one is named), after close(), and when
        a file changed since it was opened.
        """
        self._check_name(name)
        for stamp in self._files:
            stamp.check_unchanged()
        return self._tensor(name)

    def _check_name(self, name: str) -> None:
        if not self._is_open:
            raise CheckpointError(f"{self.path} was closed", "open the checkpoint again")
        if name not in self._infos:
            near = difflib.get_close_matches(name, self._infos, n=1)
            hint = f"the nearest name is {quoted(near[0])}" if near else ""
            raise CheckpointError(f"{self.path} has no tensor {quoted(name)}", hint)

    def _tensor(self, name: str) -> torch.Tensor:
        raise NotImplementedError

    def place(self, name: str) -> FilePlace:
        """Where the tensor's values lie in a file, row after row, without gaps.

        Raises CheckpointError for a name the source does not have, after close(), and for formats in which values need
        not lie in one piece (pickles).
        """
        self._check_name(name)
        return self._place(name)

    def _place(self, name: str) -> FilePlace:
        raise CheckpointError(
            f"{self.path}: tensor {quoted(name)} cannot be read from its file row by row",
            "convert the model to safetensors",
        )

    def digest(self, progress: Progress | None = None) -> str:
        """sha-256 in hex, computed once: of the one file, or over the lines ``HEX  NAME\\n`` of several, by name.

        May be asked for after close(). Raises CheckpointError when a file changed since it was opened.
        """
        if self._digest is None:
            digests = {path.name: sha256_file(path, progress) for path in sorted(self._digest_files)}
            for stamp in self._files:
                stamp.check_unchanged()
            lines = "".join(f"{value}  {name}\n" for name, value in digests.items())
            single = len(digests) == 1
            self._digest = next(iter(digests.values())) if single else hashlib.sha256(lines.encode()).hexdigest()
        return self._digest

    def close(self) -> None:
        """Let go of the files. Tensors already read stay valid. Closing twice is harmless."""
        self._is_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_checkpoint(path: str | Path, *, progress: Progress | None = None) -> TensorSource:
    """Open a checkpoint: a file or a folder, told apart by what is in it rather than by its name.

    - a zip or legacy pickle written by ``torch.save``, read without running code from it;
    - a ``.safetensors`` file;
    - a GGUF file, or any part of one that is in several (``NAME-00001-of-00004.gguf``), the others beside it;
    - a folder with ``manifest.json``: a bundle (``progress`` goes to ``read_bundle``);
    - a folder with ``model.safetensors`` or ``model.safetensors.index.json``, its ``config.json`` read strictly if there;
    - a folder with exactly one file named ``.safetensors``, ``.pth``, ``.pt``, ``.gguf`` or ``pytorch_model.bin``, or
      with the parts of exactly one GGUF file.

    Raises CheckpointError (BundleError for a bundle) naming the path, what was found and what to do.
    """
    path = Path(path)
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError):
        is_folder = False  # opening it as a file says what is wrong
    if is_folder:
        return _open_folder(path, progress)
    return _open_file(path, None, ())


def _open_folder(folder: Path, progress: Progress | None) -> TensorSource:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as err:
        raise CheckpointError(f"the folder {folder} cannot be read: {err.strerror}") from None
    if "manifest.json" in names:
        from kittiwake.checkpoints.bundle import read_bundle

        return read_bundle(folder, progress=progress).source
    config_files = (folder / "config.json",) if "config.json" in names else ()
    config = read_config_file(config_files[0]) if config_files else None
    if "model.safetensors.index.json" in names:
        if "model.safetensors" in names:
            raise CheckpointError(
                f"{folder} holds both model.safetensors and model.safetensors.index.json",
                "it is not clear which one is meant: remove one, or name the file",
            )
        from kittiwake.checkpoints.safetensors import open_sharded

        return open_sharded(folder, config, config_files)
    return _open_file(folder / _pick_file(folder, names), config, config_files)


def _pick_file(folder: Path, names: Sequence[str]) -> str:
    """The one file that is meant. ``model.safetensors`` comes first: its folder often holds the same as a pickle too."""
    if "model.safetensors" in names:
        return "model.safetensors"
    suffixes = (".safetensors", ".pth", ".pt", ".gguf")
    found = [n for n in names if (n.lower().endswith(suffixes) and n[0] != ".") or n == "pytorch_model.bin"]
    models = first_parts(found)
    if len(models) == 1:
        return next(iter(models))
    if models:
        shown = [
            quoted(name) + (f" and {parts - 1} more parts of it" if parts > 1 else "") for name, parts in models.items()
        ]
        more = " ..." if len(shown) > _SHOWN else ""
        is_shards = all(_SHARD.search(name) for name in found)
        raise CheckpointError(
            f"{folder} holds {len(models)} checkpoints: {', '.join(shown[:_SHOWN])}{more}",
            "shards need their model.safetensors.index.json beside them"
            if is_shards
            else "name the file that is meant",
        )
    listed = ", ".join(map(quoted, names[:6])) + (" ..." if len(names) > 6 else "")
    is_hub_cache = {"blobs", "snapshots"} <= set(names)
    raise CheckpointError(
        f"{folder} holds no checkpoint; found {listed or 'nothing: it is empty'}",
        "a model in the cache of the Hugging Face Hub lies in a folder below snapshots/" if is_hub_cache else _EXPECTED,
    )


def read_config_file(path: Path) -> dict[str, Any]:
    """A ``config.json``: strict JSON, at most 4 MiB, one object. Raises CheckpointError."""
    config = load_json_strict(path, what=str(path), max_bytes=MAX_CONFIG_BYTES)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a {type(config).__name__}, expected a JSON object")
    return config


def _open_file(path: Path, config: Mapping[str, Any] | None, config_files: Sequence[Path]) -> TensorSource:
    stamp = FileStamp.of(path)
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as err:
        raise CheckpointError(f"{path} cannot be read: {err.strerror}") from None
    # Asked first: the length that a safetensors file starts with may spell the first letter of anything else.
    looks_gguf = head[:4] == b"GGUF"
    looks_safetensors = not looks_gguf and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= MAX_HEADER_BYTES
    if not looks_safetensors:
        refuse_strangers(path, head)
    if looks_safetensors or path.suffix.lower() == ".safetensors":
        from kittiwake.checkpoints.safetensors import open_single

        return open_single(stamp, config, config_files)
    if head[:1] == b"\x80" or path.suffix.lower() in _PICKLE_SUFFIXES or head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        from kittiwake.checkpoints.pth import open_pth

        return open_pth(stamp, config, config_files)
    if looks_gguf or path.suffix.lower() == ".gguf":
        from kittiwake.checkpoints.gguf import open_gguf

        return open_gguf(stamp)
    raise CheckpointError(f"{path} is of an unknown kind: it starts with {quoted(head[:16])}", _EXPECTED)
