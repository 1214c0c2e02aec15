"""Bundles, format 1: a folder with a model's weights, its tokenizer, and the token ids that prove it still answers alike.

``manifest.json`` declares every other file with its size and sha-256. Nothing in a bundle depends on when or where it was
built: the same inputs give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kittiwake.checkpoints.files import FileStamp, new_folder, quoted, sha256_file, write_file, writing
from kittiwake.checkpoints.manifest import (
    MANIFEST_NAME,
    PRECISIONS,
    WEIGHTS_NAME,
    FileRecord,
    Manifest,
    SourceRecord,
    json_bytes,
    parse_manifest,
    read_manifest,
)
from kittiwake.checkpoints.reader import TensorSource
from kittiwake.checkpoints.safetensors import SafetensorsSource
from kittiwake.checkpoints.strict_json import load_json_strict
from kittiwake.checkpoints.weights import HEADER_ROOM, WeightsWriter
from kittiwake.errors import BundleError, UsageError
from kittiwake.progress import Progress

GOLDENS_NAME = "goldens.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
MAX_GOLDENS_BYTES = 16 << 20
MAX_CHAT_TEMPLATE_BYTES = 1 << 20
MAX_TOKENIZER_BYTES = 256 << 20
DEFAULT_SHARD_BYTES = 2 << 30

_EXTRA_NAME = re.compile(r"\..*|(README|LICENSE|NOTICE|MODEL_CARD)[A-Za-z._-]*|.*\.(md|png|svg)", re.DOTALL)
_AGAIN = "copy or build the bundle again"


@dataclass(frozen=True)
class Golden:
    """A prompt, its token ids, and the ids that greedy decoding must give after them."""

    prompt: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


@dataclass(frozen=True)
class Bundle:
    """An open bundle. ``source`` reads its tensors; close it when done."""

    path: Path
    manifest: Manifest
    source: TensorSource
    tokenizer_files: Mapping[str, bytes] = field(repr=False)
    chat_template: str | None = field(repr=False)
    goldens: tuple[Golden, ...] | None = field(repr=False)
    """None where the bundle was built without."""
    extra_files: tuple[str, ...]
    """Names found beside the declared files and not read: model cards, licences, pictures, dotfiles."""
    digests_verified: bool


# Reading


def read_bundle(path: str | Path, *, verify_digests: bool = True, progress: Progress | None = None) -> Bundle:
    """Open a bundle after checking everything it declares.

    Sizes are always compared; the sha-256 of every file too, unless ``verify_digests`` is False (the small files are
    read whole anyway and checked all the same). Undeclared files are refused by name, except dotfiles, README, LICENSE,
    NOTICE and MODEL_CARD files, ``.md``, ``.png`` and ``.svg``, which are listed in ``extra_files`` and never read.
    Raises BundleError, and CheckpointError for a weight file that is no safetensors file.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    extras = _check_listing(folder, manifest)
    total, done = sum(record.bytes for record in manifest.files.values()), 0
    small: dict[str, bytes] = {}
    for name, record in manifest.files.items():
        if name not in manifest.weights:
            small[name] = _read_small(folder, name, record, _limit(name, manifest))
        elif verify_digests and sha256_file(folder / name, _within(progress, done, total)) != record.sha256:
            raise _wrong_digest(folder / name)
        done += record.bytes
    return Bundle(
        path=folder,
        manifest=manifest,
        source=_open_weights(folder, manifest),
        tokenizer_files={name: small[name] for name in manifest.tokenizer_files},
        chat_template=None if manifest.chat_template is None else _text(folder, manifest.chat_template, small),
        goldens=None if manifest.goldens is None else _goldens(folder / manifest.goldens, small[manifest.goldens]),
        extra_files=extras,
        digests_verified=verify_digests,
    )


def _within(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Progress of one file, told as part of the whole bundle."""
    if progress is None:
        return None
    report = progress
    return lambda _what, done, _total: report("checking the bundle", before + done, total)


def _check_listing(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """Declared files are there with their sizes and inside the folder; return the names of harmless other files."""
    try:
        root = folder.resolve(strict=True)
        found = sorted(entry.name for entry in folder.iterdir())
    except OSError as err:
        raise BundleError(f"the folder {folder} cannot be read: {err.strerror}") from None
    for name in (MANIFEST_NAME, *manifest.files):
        if name in found and _leads_out(folder / name, root):
            raise BundleError(f"{folder / name} is a link that leads out of the bundle", _AGAIN)
    for name, record in manifest.files.items():
        if name not in found:
            raise BundleError(f"{folder} lacks the file {quoted(name)}, which its manifest declares", _AGAIN)
        size = FileStamp.of(folder / name, BundleError).size
        if size != record.bytes:
            raise BundleError(f"{folder / name} has {size:,} bytes, the manifest declares {record.bytes:,}", _AGAIN)
    others = [name for name in found if name not in manifest.files and name != MANIFEST_NAME]
    for name in others:
        if not _EXTRA_NAME.fullmatch(name):
            raise BundleError(
                f"{folder} holds {quoted(name)}, which its manifest does not declare",
                "remove it; beside the declared files only a model card, licence, picture or dotfile may stand",
            )
    return tuple(others)


def _leads_out(path: Path, root: Path) -> bool:
    try:
        return path.resolve(strict=True).parent != root
    except (OSError, RuntimeError):  # a link to nothing, or a loop of links
        return True


def _limit(name: str, manifest: Manifest) -> int:
    limits = {manifest.chat_template: MAX_CHAT_TEMPLATE_BYTES, manifest.goldens: MAX_GOLDENS_BYTES}
    return limits.get(name, MAX_TOKENIZER_BYTES)


def _read_small(folder: Path, name: str, record: FileRecord, limit: int) -> bytes:
    path = folder / name
    if record.bytes > limit:
        raise BundleError(f"{path} has {record.bytes:,} bytes, at most {limit:,} are read")
    try:
        data = path.read_bytes()
    except OSError as err:
        raise BundleError(f"{path} cannot be read: {err.strerror}") from None
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise _wrong_digest(path)
    return data


def _wrong_digest(path: Path) -> BundleError:
    return BundleError(
        f"{path} does not have the sha-256 that the manifest declares", f"it was changed or damaged: {_AGAIN}"
    )


def _text(folder: Path, name: str, small: Mapping[str, bytes]) -> str:
    try:
        return small[name].decode("utf-8")
    except UnicodeDecodeError as err:
        raise BundleError(f"{folder / name} is not UTF-8 text: byte {err.start}") from None


def _goldens(path: Path, data: bytes) -> tuple[Golden, ...]:
    content = load_json_strict(data, what=str(path), max_bytes=MAX_GOLDENS_BYTES, error=BundleError)
    if not isinstance(content, list):
        raise BundleError(f"{path} holds a {type(content).__name__}, expected a list")
    for number, item in enumerate(content):
        if not isinstance(item, dict) or item.keys() != {"prompt", "prompt_ids", "completion_ids"}:
            raise BundleError(f"{path}: item {number} has not exactly the keys prompt, prompt_ids and completion_ids")
        if not isinstance(item["prompt"], str):
            raise BundleError(f"{path}: item {number}: prompt is not a text")
        for key in ("prompt_ids", "completion_ids"):
            if not _is_ids(item[key]):
                raise BundleError(f"{path}: item {number}: {key} is not a list of token ids with at least one in it")
    return tuple(Golden(i["prompt"], tuple(i["prompt_ids"]), tuple(i["completion_ids"])) for i in content)


def _is_ids(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple))
    return is_list and len(value) > 0 and all(type(token) is int and 0 <= token < 1 << 31 for token in value)


def _open_weights(folder: Path, manifest: Manifest) -> SafetensorsSource:
    stamps = [FileStamp.of(folder / name, BundleError) for name in manifest.weights]
    source = SafetensorsSource(folder, stamps, kind="bundle", digest_files=(folder / MANIFEST_NAME,))
    dtype = PRECISIONS[manifest.precision]
    for info in source.infos():
        if info.dtype.is_floating_point and info.dtype != dtype:
            raise BundleError(
                f"{folder}: tensor {quoted(info.name)} is {info.dtype}, the manifest says {manifest.precision}"
            )
    return source


# Writing


def write_bundle(
    out: str | Path,
    *,
    family: str,
    model: Mapping[str, Any],
    precision: str,
    tensors: Iterable[tuple[str, torch.Tensor]],
    tokenizer: tuple[str, Mapping[str, bytes]],
    source: SourceRecord,
    builder: str,
    chat_template: str | None = None,
    goldens: Sequence[Golden] | Callable[[TensorSource], Sequence[Golden]] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
    total_bytes: int = 0,
) -> Manifest:
    """Write a bundle to the new folder ``out``: whole, or not at all.

    - ``tensors`` is consumed once; floating tensors are converted to ``precision`` ("fp32", "fp16", "bf16") a chunk at a
      time, integers are kept. No more than the current tensor is held.
    - ``tokenizer``: its kind and its files, the main one first; no files for one that needs none.
    - ``goldens``: a list, or a function that is given the tensors just written and returns the list.
    - ``max_shard_bytes``: most bytes of a weight file; a tensor larger than that has a file of its own.
    - ``progress("writing weights", done, total_bytes)`` counts bytes as stored; pass ``total_bytes`` if it is known.

    Raises UsageError for arguments that no bundle could hold, CheckpointError naming a tensor with NaN, infinity or a
    value beyond ``precision``, and OutputError when ``out`` exists or cannot be written (see ``files.new_folder``).
    """
    out = Path(out)
    small = dict(tokenizer[1])
    if chat_template is not None:
        _claim(small, CHAT_TEMPLATE_NAME, _encode(chat_template))
    if goldens is not None:
        _claim(small, GOLDENS_NAME, b"" if callable(goldens) else _goldens_json(goldens))
    draft = Manifest(
        builder=builder,
        family=family,
        model=dict(model),
        precision=precision,
        tokenizer_kind=tokenizer[0],
        tokenizer_file=next(iter(tokenizer[1]), None),
        source=source,
        files={"weights-00001.safetensors": _record(b"")} | {name: _record(data) for name, data in small.items()},
        chat_template=None if chat_template is None else CHAT_TEMPLATE_NAME,
        goldens=None if goldens is None else GOLDENS_NAME,
    )
    _check_arguments(draft, small, max_shard_bytes)
    with new_folder(out) as partial:
        writer = WeightsWriter(partial, out, PRECISIONS[precision], max_shard_bytes, progress, total_bytes)
        weights = [partial / name for name in writer.write(tensors)]
        if callable(goldens):
            with SafetensorsSource(partial, [FileStamp.of(path) for path in weights], kind="bundle") as written:
                small[GOLDENS_NAME] = _goldens_json(goldens(written))
        files = {path.name: FileRecord(FileStamp.of(path).size, sha256_file(path, progress)) for path in weights}
        manifest = replace(draft, files=files | {name: _record(data) for name, data in small.items()})
        for name, data in (small | {MANIFEST_NAME: manifest.to_json()}).items():
            with writing(out):
                write_file(partial / name, data)
        # What this version would refuse must not leave it: the number of shards is known only now.
        parse_manifest(manifest.to_json(), out / MANIFEST_NAME)
    return manifest


def _record(data: bytes) -> FileRecord:
    return FileRecord(len(data), hashlib.sha256(data).hexdigest())


def _encode(chat_template: str) -> bytes:
    try:
        return chat_template.encode()
    except UnicodeEncodeError as err:
        raise UsageError(f"the chat template is not text that UTF-8 can hold: {err}") from None


def _claim(files: dict[str, bytes], name: str, data: bytes) -> None:
    if name in files:
        raise UsageError(f"a tokenizer file may not be called {name}")
    files[name] = data


def _check_arguments(draft: Manifest, small: Mapping[str, bytes], max_shard_bytes: int) -> None:
    """Everything that can be known before hours of writing: the manifest to be is read as a reader would."""
    if max_shard_bytes <= HEADER_ROOM:
        raise UsageError(f"max_shard_bytes is {max_shard_bytes:,}, expected more than the {HEADER_ROOM:,} of a header")
    for name in small:
        if WEIGHTS_NAME.fullmatch(name):
            raise UsageError(f"a tokenizer file may not be called {quoted(name)}")
    if json.loads(json_bytes(draft.model)) != draft.model:
        raise UsageError(f"the model section {quoted(draft.model)} changes in JSON", "use lists and text keys only")
    try:
        parse_manifest(draft.to_json(), Path(MANIFEST_NAME))
    except BundleError as err:
        raise UsageError(f"these arguments make no bundle: {err.message}") from None


def _goldens_json(goldens: Sequence[Golden]) -> bytes:
    for golden in goldens:
        if not _is_ids(golden.prompt_ids) or not _is_ids(golden.completion_ids):
            raise UsageError(f"the golden of {quoted(golden.prompt)} has no or bad token ids")
    lines = [
        {"prompt": g.prompt, "prompt_ids": list(g.prompt_ids), "completion_ids": list(g.completion_ids)}
        for g in goldens
    ]
    return json_bytes(lines)
