"""The manifest of a bundle: what it declares, how it is written, and how strictly it is read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kittiwake.checkpoints.files import is_plain_name, quoted
from kittiwake.checkpoints.reader import TensorSource
from kittiwake.checkpoints.strict_json import load_json_strict
from kittiwake.errors import BundleError, UsageError
from kittiwake.progress import Progress

FORMAT = 1
KIND = "kittiwake-bundle"
PRECISIONS: Mapping[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 20
WEIGHTS_NAME = re.compile(r"weights-(\d{5})\.safetensors", re.ASCII)

_WORD = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileRecord:
    """Size and sha-256 (lower-case hex) of one declared file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class SourceRecord:
    """The checkpoint that a bundle was built from: file name, format, and sha-256 as ``TensorSource.digest`` gives it."""

    name: str
    format: str
    sha256: str

    @classmethod
    def of(cls, source: TensorSource, progress: Progress | None = None) -> SourceRecord:
        """Reads the whole source once for its digest."""
        return cls(source.path.resolve().name, source.format, source.digest(progress))


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` says. ``model`` holds JSON values that only the family understands."""

    builder: str
    """Version of kittiwake that wrote the bundle."""
    family: str
    model: Mapping[str, Any]
    precision: str
    tokenizer_kind: str
    tokenizer_file: str | None
    """None for a tokenizer that needs no file."""
    source: SourceRecord
    files: Mapping[str, FileRecord]
    chat_template: str | None = None
    goldens: str | None = None

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weight files in shard order."""
        return tuple(sorted(name for name in self.files if WEIGHTS_NAME.fullmatch(name)))

    @property
    def tokenizer_files(self) -> tuple[str, ...]:
        """Names of every file of the tokenizer, the main one first."""
        others = {*self.weights, self.chat_template, self.goldens, self.tokenizer_file}
        first = (self.tokenizer_file,) if self.tokenizer_file is not None else ()
        return first + tuple(sorted(self.files.keys() - others))

    def to_json(self) -> bytes:
        """The file's bytes: the same for the same content, on every machine."""
        files = {name: {"bytes": record.bytes, "sha256": record.sha256} for name, record in sorted(self.files.items())}
        source = {"name": self.source.name, "format": self.source.format, "sha256": self.source.sha256}
        content = {
            "format": FORMAT,
            "kind": KIND,
            "builder": self.builder,
            "family": self.family,
            "model": json.loads(json.dumps(self.model, sort_keys=True)),
            "precision": self.precision,
            "tokenizer": {"kind": self.tokenizer_kind, "file": self.tokenizer_file},
            "source": source,
            "files": files,
            "chat_template": self.chat_template,
            "goldens": self.goldens,
        }
        return json_bytes(content)


def json_bytes(content: Any) -> bytes:
    """JSON as bundles hold it. Raises UsageError for what strict JSON in UTF-8 cannot say."""
    try:
        return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as err:
        raise UsageError(f"this cannot be written as JSON: {err}") from None


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle, checked by itself (no other file is looked at). Raises BundleError."""
    path = folder / MANIFEST_NAME
    found = False
    with suppress(OSError, ValueError):  # a name that is too long, a folder that may not be searched
        found = path.exists()
    if not found:
        raise BundleError(f"{folder} is not a bundle: it has no {MANIFEST_NAME}", "kittiwake build makes bundles")
    return parse_manifest(path, path)


def parse_manifest(source: Path | bytes, path: Path) -> Manifest:
    """A manifest out of a file or of bytes; ``path`` names it in messages. Raises BundleError."""
    content = load_json_strict(source, what=str(path), max_bytes=MAX_MANIFEST_BYTES, error=BundleError)
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise BundleError(
            f"{path} is not the manifest of a kittiwake bundle", f'expected an object with "kind": "{KIND}"'
        )
    builder = content.get("builder")
    writer = f"kittiwake {builder}" if isinstance(builder, str) else "an unknown version of kittiwake"
    number = content.get("format")
    if type(number) is not int or number < 1:
        raise BundleError(f"{path}: format is {quoted(number)}, expected a positive integer")
    if number > FORMAT:
        raise BundleError(
            f"{path} has bundle format {number}, written by {quoted(writer)}; this version reads format {FORMAT}",
            "install that version or a newer one, or build the bundle again with this one",
        )
    return _ManifestReader(path, writer).read(content)


class _ManifestReader:
    """Checks one manifest field by field; every message names the file, the key and the version that wrote it."""

    def __init__(self, path: Path, writer: str) -> None:
        self.path = path
        self.writer = writer

    def fail(self, message: str) -> BundleError:
        hint = f"the bundle was written by {quoted(self.writer)}: use that version, or build the bundle again"
        return BundleError(f"{self.path}: {message}", hint)

    def read(self, content: dict[str, Any]) -> Manifest:
        top = "format kind builder family model precision tokenizer source files chat_template goldens"
        self.keys(content, top, "the manifest")
        tokenizer, source = content["tokenizer"], content["source"]
        self.keys(tokenizer, "kind file", "tokenizer")
        self.keys(source, "name format sha256", "source")
        if content["precision"] not in list(PRECISIONS):  # a list also takes what cannot be hashed
            raise self.fail(f"precision is {quoted(content['precision'])}, expected one of {', '.join(PRECISIONS)}")
        if not isinstance(content["model"], dict):
            raise self.fail(f"model is {quoted(content['model'])}, expected an object")
        files = self.files(content["files"])
        manifest = Manifest(
            builder=self.text(content["builder"], "builder"),
            family=self.match(content["family"], _WORD, "family"),
            model=content["model"],
            precision=content["precision"],
            tokenizer_kind=self.match(tokenizer["kind"], _WORD, "tokenizer.kind"),
            tokenizer_file=self.declared(tokenizer["file"], files, "tokenizer.file"),
            source=SourceRecord(
                self.text(source["name"], "source.name"),
                self.match(source["format"], _WORD, "source.format"),
                self.match(source["sha256"], _SHA256, "source.sha256"),
            ),
            files=files,
            chat_template=self.declared(content["chat_template"], files, "chat_template"),
            goldens=self.declared(content["goldens"], files, "goldens"),
        )
        self.roles(manifest)
        return manifest

    def keys(self, value: Any, names: str, where: str) -> None:
        """An object with exactly these keys: an unknown one may change the meaning of the rest."""
        if not isinstance(value, dict):
            raise self.fail(f"{where} is {quoted(value)}, expected an object")
        if unknown := sorted(value.keys() - set(names.split())):
            raise self.fail(f"{where} has the unknown key {quoted(unknown[0])}")
        for name in names.split():
            if name not in value:
                raise self.fail(f"{where} lacks the key {quoted(name)}")

    def text(self, value: Any, where: str) -> str:
        if not isinstance(value, str) or not value or len(value) > 1024:
            raise self.fail(f"{where} is {quoted(value)}, expected a text")
        return value

    def match(self, value: Any, pattern: re.Pattern[str], where: str) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise self.fail(f"{where} is {quoted(value)}, expected {pattern.pattern}")
        return value

    def declared(self, value: Any, files: Mapping[str, FileRecord], where: str) -> str | None:
        if value is not None and (not isinstance(value, str) or value not in files):
            raise self.fail(f"{where} is {quoted(value)}, which is not declared in files")
        return value

    def files(self, value: Any) -> dict[str, FileRecord]:
        if not isinstance(value, dict):
            raise self.fail(f"files is {quoted(value)}, expected an object")
        for name, record in value.items():
            if not is_plain_name(name) or name.lower() == MANIFEST_NAME:
                raise self.fail(f"files names {quoted(name)}, expected a plain name in the bundle's own folder")
            self.keys(record, "bytes sha256", f"files[{quoted(name)}]")
            size = record["bytes"]
            if type(size) is not int or not 0 <= size < 1 << 63:
                raise self.fail(f"files[{quoted(name)}].bytes is {quoted(size)}, expected a size")
            self.match(record["sha256"], _SHA256, f"files[{quoted(name)}].sha256")
        if len({name.lower() for name in value}) != len(value):
            raise self.fail("files names two files that differ only in upper and lower case")
        return {name: FileRecord(record["bytes"], record["sha256"]) for name, record in value.items()}

    def roles(self, manifest: Manifest) -> None:
        """Every file has one use, and the weights are numbered from 1."""
        expected = tuple(f"weights-{i + 1:05}.safetensors" for i in range(len(manifest.weights)))
        if not expected or manifest.weights != expected:
            raise self.fail(f"the weight files are {quoted(manifest.weights)}, expected weights-00001.safetensors, ...")
        named = [n for n in (manifest.tokenizer_file, manifest.chat_template, manifest.goldens) if n is not None]
        if len(set(named)) != len(named) or set(named) & set(manifest.weights):
            raise self.fail(f"one file is given two uses: {quoted(named)}")
