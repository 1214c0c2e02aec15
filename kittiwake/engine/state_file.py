"""A kept state in a file, format 1: one safetensors file, whole or not at all, bit for bit what was kept.

Its ``__metadata__`` says what it belongs to (family, digest and dtype of the model) and how far it has come (position,
hash of the tokens); its tensors are the parts of the state (``state.NAME``, [L, *shape], of growing parts [L, rows,
*shape]), the last logits and the tokens themselves. One sha-256 covers all of it. The same state gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kittiwake import __version__
from kittiwake.checkpoints.files import FileStamp, new_file, quoted, writing
from kittiwake.checkpoints.safetensors import read_header
from kittiwake.checkpoints.strict_json import load_json_strict
from kittiwake.engine.request import KeptState
from kittiwake.engine.states import SavedState, StateSpec
from kittiwake.errors import CheckpointError, StateFileError

FORMAT = 1
KIND = "kittiwake-state"
MAX_HEADER_BYTES = 1 << 20

_KEYS = frozenset(
    {"kind", "format", "builder", "family", "model", "dtype", "position", "tokens_sha256", "initial", "sha256"}
)
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "uint8": "U8"}
_DAMAGED = "the file is damaged: save the state again, or get the file again from where it came"


@dataclass(frozen=True)
class StateOwner:
    """The model that a state belongs to; all of it must be the same where the state goes on."""

    family: str
    model: str
    """64 hex digits (``Loaded.digest``)."""
    dtype: str
    """How the weights are kept: "fp32" or "bf16"."""
    spec: StateSpec
    vocab_size: int


def save_state(path: Path, kept: KeptState, owner: StateOwner, *, replace: bool = False) -> None:
    """Write a kept state to a new file, synced to the disk; nothing is left behind when that fails.

    Raises StateError for a state of another model, OutputError where the file cannot be written or, without
    ``replace``, exists.
    """
    pieces = list(encode_state(kept, owner))
    with new_file(path, replace=replace) as partial, writing(path), partial.open("xb") as file:
        for piece in pieces:
            file.write(piece)


def encode_state(
    kept: KeptState, owner: StateOwner, *, kind: str = KIND, more: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a state file, piece by piece; ``more`` are further entries of its metadata.

    Raises StateError for a state of another model.
    """
    tensors = _tensors(kept)
    check_parts(kept, owner, "the state")
    content = {
        "kind": kind,
        "format": str(FORMAT),
        "builder": __version__,
        "family": owner.family,
        "model": owner.model,
        "dtype": owner.dtype,
        "position": str(kept.saved.position),
        "tokens_sha256": hashlib.sha256(_bytes(tensors["tokens"].pieces[0])).hexdigest(),
        "initial": kept.initial,
        **(more or {}),
    }
    content["sha256"] = _digest(content, tensors)
    header = _header(content, tensors)
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors.values():
        yield from map(_bytes, tensor.pieces)


def load_state(path: Path, owner: StateOwner, *, kind: str = KIND, more: Mapping[str, str] | None = None) -> KeptState:
    """The state a file holds. Raises StateFileError for a file that is damaged, is none, or is of another model.

    ``kind`` and ``more`` are as it was written with.
    """
    keys = _KEYS | (more or {}).keys()
    try:
        content, arrays = _read(path, kind, keys)
    except CheckpointError as err:
        raise StateFileError(err.message, _DAMAGED) from None
    _check_owner(path, content, owner)
    for key, value in (more or {}).items():
        if content[key] != value:
            raise StateFileError(f"{path}: {key} is {quoted(content[key])}, expected {quoted(value)}")
    parts = {name.removeprefix("state."): array for name, array in arrays.items() if name.startswith("state.")}
    tokens = tuple(arrays["tokens"].tolist())
    kept = KeptState(SavedState(int(content["position"]), parts), tokens, arrays.get("logits"), content["initial"])
    check_parts(kept, owner, str(path))
    logits = None if kept.logits is None else kept.logits.copy()  # nothing holds on to the bytes of the file
    return replace(kept, saved=owner.spec.in_pages(kept.saved), logits=logits)


def read_label(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    """Metadata and tokens of a state file of any kind, format and model, to tell what it is without reading all of it.

    Raises StateFileError for a file that holds no such thing, or tokens of another hash; nothing else is checked.
    """
    try:
        stamp = FileStamp.of(path, StateFileError)
        entries = {entry.info.name: entry for entry in read_header(stamp)}
    except CheckpointError as err:
        raise StateFileError(err.message, _DAMAGED) from None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        raw = file.read(length) if length <= MAX_HEADER_BYTES else b"{}"
        content = load_json_strict(raw, what=f"the header of {path}", error=StateFileError).get("__metadata__")
        entry = entries.get("tokens")
        if not isinstance(content, dict) or entry is None or len(entry.info.shape) != 1:
            raise StateFileError(f"{path} is not a saved state of kittiwake")
        file.seek(8 + length + entry.begin)
        tokens = np.fromfile(file, dtype="<i4", count=entry.info.shape[0])
    if content.get("tokens_sha256") != hashlib.sha256(_bytes(tokens)).hexdigest():
        raise StateFileError(f"{path}: the hash of its tokens is another", _DAMAGED)
    return content, tokens.astype(np.int32, copy=False)


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the file, and its values in order."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: tuple[np.ndarray, ...]
    """Contiguous and little-endian."""

    @classmethod
    def of(cls, array: np.ndarray) -> _Tensor:
        """A whole array."""
        return cls(array.dtype, array.shape, (_little(array),))

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(piece.nbytes for piece in self.pieces)


def _little(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))


def _tensors(kept: KeptState) -> dict[str, _Tensor]:
    """Every tensor of the file in file order. Pages of the state are not copied."""
    tensors = {}
    for name, (shape, dtype) in sorted(kept.saved.kinds().items()):
        pieces = tuple(map(_little, kept.saved.paged.pieces(name)))
        tensors[f"state.{name}"] = _Tensor(np.dtype(dtype), shape, pieces)
    if kept.logits is not None:
        tensors["logits"] = _Tensor.of(kept.logits)
    tensors["tokens"] = _Tensor.of(np.asarray(kept.tokens, dtype=np.int32))
    # widest types first, so that every array lies on a multiple of its size
    return dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _digest(content: dict[str, str], tensors: dict[str, _Tensor]) -> str:
    """sha-256 (hex) over the header without its digest, and the data."""
    covered = {key: value for key, value in content.items() if key != "sha256"}
    digest = hashlib.sha256(_header(covered, tensors))
    for tensor in tensors.values():
        for piece in tensor.pieces:
            digest.update(_bytes(piece))
    return digest.hexdigest()


def _header(content: dict[str, str], tensors: dict[str, _Tensor]) -> bytes:
    """The header's one spelling, padded so that the data begins on a multiple of eight."""
    header: dict[str, Any] = {"__metadata__": content}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _read(path: Path, kind: str = KIND, keys: Set[str] = _KEYS) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Metadata and tensors of a state file, every byte checked; whose state it is, is not looked at."""
    stamp = FileStamp.of(path, StateFileError)
    entries = read_header(stamp)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        raw = file.read(length) if length <= MAX_HEADER_BYTES else b"{}"
        header = load_json_strict(raw, what=f"the header of {path}", error=StateFileError)
        content = _check_content(path, header.get("__metadata__"), kind, keys)
        data = np.fromfile(file, dtype=np.uint8)
    stamp.check_unchanged()
    names = {short: name for name, short in _DTYPES.items()}
    arrays = {}
    for entry in entries:
        dtype = names.get(header[entry.info.name]["dtype"])
        if dtype is None:
            raise StateFileError(
                f"{path}: {quoted(entry.info.name)} is {entry.info.dtype}, which no state has", _DAMAGED
            )
        values = data[entry.begin : entry.end].view(np.dtype(dtype).newbyteorder("<"))
        arrays[entry.info.name] = values.reshape(entry.info.shape).astype(dtype, copy=False)
    tensors = {name: _Tensor.of(array) for name, array in arrays.items()}
    if _header(content, tensors) != raw or _digest(content, tensors) != content["sha256"]:
        raise StateFileError(f"{path} does not hold what was saved: its sha-256 is another", _DAMAGED)
    _check_tokens(path, content, arrays)
    return content, arrays


def _check_content(path: Path, content: Any, kind: str, keys: Set[str]) -> dict[str, str]:
    """The metadata of a state file in a format that this version reads."""
    if not isinstance(content, dict) or content.get("kind") != kind:
        raise StateFileError(f"{path} is not a saved state of kittiwake", "kittiwake run --save-state makes one")
    number, builder = content.get("format", ""), content.get("builder", "")
    if not number.isascii() or not number.isdigit() or len(number) > 9 or int(number) < 1:
        raise StateFileError(f"{path}: format is {quoted(number)}, expected a positive number", _DAMAGED)
    if int(number) > FORMAT:
        raise StateFileError(
            f"{path} has state format {int(number)}, written by kittiwake {quoted(builder)}; this version reads {FORMAT}",
            "use that version or a newer one",
        )
    if content.keys() != keys:
        wrong = sorted(content.keys() ^ keys)
        raise StateFileError(f"{path}: the header lacks or should not have {quoted(wrong)}", _DAMAGED)
    return dict(content)


def _check_tokens(path: Path, content: dict[str, str], arrays: dict[str, np.ndarray]) -> None:
    """Position, tokens and their hash agree."""
    tokens = arrays.get("tokens")
    if tokens is None or tokens.dtype != np.int32 or tokens.ndim != 1:
        raise StateFileError(f"{path} holds no list of tokens", _DAMAGED)
    if content["position"] != str(len(tokens)):
        raise StateFileError(
            f"{path} is at position {quoted(content['position'])} after {len(tokens)} tokens", _DAMAGED
        )
    if content["tokens_sha256"] != hashlib.sha256(_bytes(tokens.astype("<i4"))).hexdigest():
        raise StateFileError(f"{path}: the hash of its tokens is another", _DAMAGED)


def _check_owner(path: Path, content: dict[str, str], owner: StateOwner) -> None:
    """Raise StateFileError naming everything that differs."""
    differing = [
        f"{what} {quoted(content[what])}, here {quoted(here)}"
        for what, here in (("family", owner.family), ("model", owner.model), ("dtype", owner.dtype))
        if content[what] != here
    ]
    if differing:
        hint = "a state goes on only with the very model that made it, its weights kept in the same dtype"
        raise StateFileError(f"{path} is the state of another model: {'; '.join(differing)}", hint)


def check_parts(kept: KeptState, owner: StateOwner, what: str) -> None:
    """Raise StateFileError unless shapes, types and token ids are the model's."""
    expected = owner.spec.saved_kinds(kept.saved.position)
    found = kept.saved.kinds()
    if found.keys() != expected.keys():
        raise StateFileError(f"{what} has the parts {sorted(found)}, this model's are {sorted(expected)}")
    for name, (shape, dtype) in expected.items():
        if found[name] != (shape, dtype):
            raise StateFileError(f"{what}: part {name} is {found[name][1]} {found[name][0]}, expected {dtype} {shape}")
    logits = kept.logits
    if logits is not None and (logits.shape != (owner.vocab_size,) or logits.dtype != np.float32):
        raise StateFileError(
            f"{what}: logits are {logits.dtype} {logits.shape}, expected float32 {(owner.vocab_size,)}"
        )
    if logits is None and kept.tokens:
        raise StateFileError(f"{what} has seen {len(kept.tokens)} tokens but holds no logits")
    if kept.saved.position != len(kept.tokens):
        raise StateFileError(f"{what} is at position {kept.saved.position} after {len(kept.tokens)} tokens")
    if kept.tokens and not 0 <= min(kept.tokens) <= max(kept.tokens) < owner.vocab_size:
        raise StateFileError(f"{what} holds token ids outside the vocabulary of {owner.vocab_size}")
