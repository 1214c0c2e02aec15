"""A model in several GGUF files: which files belong together, and whether they are all there and fit.

Every part says how many there are, which it is, and how many tensors all of them hold; its name says the first two
again. The first part may hold metadata alone. Keys and names are those of llama.cpp's ``llama-gguf-split`` and of the
``gguf`` package's writer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kittiwake.checkpoints.files import FileStamp, quoted
from kittiwake.errors import CheckpointError

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
MAX_PARTS = (1 << 16) - 1
_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL | re.IGNORECASE)
_OF_ONE_FILE = frozenset({NUMBER, "general.alignment"})
"""Keys that each part has for itself."""
_TOGETHER = "put all parts of the model into one folder, under the names they were published with"
_SHOWN = 4


def first_parts(names: Sequence[str]) -> dict[str, int]:
    """Of each model that these file names are, or are parts of: its first name, and how many are of it."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        models.setdefault(_numbered(name, 0) if _NAME.fullmatch(name) else name, []).append(name)
    return {found[0]: len(found) for found in models.values()}


def part_stamps(given: FileStamp, metadata: Mapping[str, Any]) -> list[FileStamp]:
    """Every part of the model that this file is a part of, in order; empty where it is a model by itself.

    Raises CheckpointError for keys that are no such numbers, a file whose name does not tell those of the others, and
    parts that are missing.
    """
    path = given.path
    if COUNT not in metadata:
        return []
    count = _count(metadata, COUNT, path, MAX_PARTS)
    if count < 2:
        return []
    number = _count(metadata, NUMBER, path, count - 1)
    match = _NAME.fullmatch(path.name)
    if match is None or (int(match[2]), int(match[3])) != (number + 1, count):
        raise CheckpointError(
            f"{path} is part {number + 1} of {count} by its metadata, expected a name that ends in "
            f"-{number + 1:05}-of-{count:05}.gguf",
            _TOGETHER,
        )
    names = [_numbered(path.name, other) for other in range(count)]
    missing = [name for name in names if not (path.parent / name).exists()]
    if missing:
        shown = ", ".join(map(quoted, missing[:_SHOWN])) + (" ..." if len(missing) > _SHOWN else "")
        raise CheckpointError(
            f"{path} is one of {count} parts, of which {len(missing)} {'is' if len(missing) == 1 else 'are'} missing "
            f"beside it: {shown}",
            _TOGETHER,
        )
    return [given if name == path.name else FileStamp.of(path.parent / name) for name in names]


def check_whole(parts: Sequence[tuple[Path, Mapping[str, Any], Sequence[str]]]) -> None:
    """Raise CheckpointError unless these parts, (path, metadata, names of tensors) in order, are the whole of one model:
    numbers and counts agree, no tensor is in two of them, none is missing."""
    holders: dict[str, Path] = {}
    first, expected, _ = parts[0]
    total = _count(expected, TENSORS, first)
    for number, (path, metadata, names) in enumerate(parts):
        for key, value, reason in (
            (NUMBER, number, "as its name says"),
            (COUNT, len(parts), f"as in {first.name}"),
            (TENSORS, total, f"as in {first.name}"),
        ):
            if (found := _count(metadata, key, path)) != value:
                raise CheckpointError(f"{path}: {key} is {found:,}, expected {value:,}, {reason}", _TOGETHER)
        for name in names:
            if name in holders:
                raise CheckpointError(f"tensor {quoted(name)} is in both {holders[name]} and {path.name}")
            holders[name] = path
    if len(holders) != total:
        raise CheckpointError(
            f"{first} and its {len(parts) - 1} other parts hold {len(holders):,} tensors, {TENSORS} says {total:,}",
            "some part is of another model, or damaged: get them again",
        )


def merged_metadata(parts: Sequence[tuple[Path, Mapping[str, Any]]]) -> dict[str, Any]:
    """The metadata of all parts as one; what the first says of itself alone stays. Raises CheckpointError for a key to
    which two parts give different values."""
    (first, found), *others = parts
    merged = dict(found)
    for path, metadata in others:
        for key, value in metadata.items():
            if key not in _OF_ONE_FILE and merged.setdefault(key, value) != value:
                raise CheckpointError(
                    f"{path}: {key} is {quoted(value)}, {first.name} says {quoted(merged[key])}", _TOGETHER
                )
    return merged


def _numbered(name: str, number: int) -> str:
    """The name of another part, from the name of one."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return f"{name[: match.start(2)]}{number + 1:05}{name[match.end(2) :]}"


def _count(metadata: Mapping[str, Any], key: str, path: Path, most: int = 1 << 31) -> int:
    """A whole number from the metadata. Raises CheckpointError naming key and value."""
    if key not in metadata:
        raise CheckpointError(f"{path} is one of several parts, and lacks the key {key}", _TOGETHER)
    value = metadata[key]
    if type(value) is not int or not 0 <= value <= most:
        raise CheckpointError(f"{path}: {key} is {quoted(value)}, expected a number from 0 to {most:,}")
    return value
