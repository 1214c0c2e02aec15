"""Small hostile files, made on the spot: what each is, and a word that the refusal must hold."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.build import build_bundle
from tests.checkpoints.cases import make_tensors

Maker = Callable[[Path], Path]
"""Makes the file or folder in an empty folder, and returns what is to be opened."""


class _Runs:
    """Unpickled by a careless reader, this makes a file called "ran"."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._mark}",)


def _archive(
    path: Path, pickled: bytes, *, data: bytes = b"\0" * 64, compress: bool = False, again: bool = False
) -> Path:
    """A zip as torch.save writes it, around a pickle of one's own."""
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("m/data.pkl", pickled)
        archive.writestr("m/data/0", data)
        archive.writestr("m/version", "3\n")
        if again:
            archive.writestr("m/data/1", b"x")
    return path


def _tensor(size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, elements: int = 16) -> bytes:
    """The pickle of {"a": a tensor}, sizes as claimed."""

    class Storage:
        pass

    class Tensor:
        def __reduce__(self) -> tuple[Any, ...]:
            from torch._utils import _rebuild_tensor_v2

            return _rebuild_tensor_v2, (storage, offset, size, stride, False, {})

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", elements) if value is storage else None

    storage = Storage()
    out = io.BytesIO()
    Pickler(out, protocol=2).dump({"a": Tensor()})
    return out.getvalue()


def _safetensors(path: Path, header: object, data: bytes = b"\0" * 16, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def _one(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes}


def _sharded(folder: Path, weight_map: object, **more: object) -> Path:
    save_file({"a": torch.zeros(4)}, folder / "s1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map, **more}))
    return folder


def _linked(folder: Path) -> Path:
    _sharded(folder, {"a": "s2.safetensors"})
    (folder / "s2.safetensors").symlink_to("s3.safetensors")
    (folder / "s3.safetensors").symlink_to("s2.safetensors")
    return folder


def _two_shards(folder: Path) -> Path:
    save_file({"a": torch.zeros(4)}, folder / "s2.safetensors")
    return _sharded(folder, {"a": "s1.safetensors", "b": "s2.safetensors"})


def _bundle(
    folder: Path, change: Callable[[dict[str, Any]], object] | None = None, template: str | None = None
) -> Path:
    """A bundle that works, but for a change of its manifest."""
    checkpoint, out = folder / "m.pth", folder / "bundle"
    torch.save(random_rwkv7(small(layers=2), seed=3), checkpoint)
    build_bundle(checkpoint, out, goldens=0, chat_template=template)
    checkpoint.unlink()
    if change is not None:
        path = out / "manifest.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
    return out


def _bytes(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _loop(folder: Path) -> Path:
    (folder / "m.pth").symlink_to("m.pth")
    return folder / "m.pth"


FILES: dict[str, tuple[Maker, str]] = {
    "pickle runs code": (lambda f: _archive(f / "m.pth", pickle.dumps(_Runs(f / "ran"), 2)), "system"),
    "old pickle runs code": (lambda f: _bytes(f / "m.pth", pickle.dumps(_Runs(f / "ran"), 2)), "system"),
    "pickle calls eval": (lambda f: _archive(f / "m.pth", b"c__builtin__\neval\n(S'1'\ntR."), "eval"),
    "pickle nested": (lambda f: _archive(f / "m.pth", b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."), "m.pth"),
    "pickle claims a giant text": (
        lambda f: _archive(f / "m.pth", b"\x80\x02X\xff\xff\xff\x7fabc."),
        "m.pth",
    ),
    "pickle doubles itself": (
        lambda f: _archive(f / "m.pth", b"\x80\x02](h\0" + b"".join(b"(h\0h\0l" for _ in range(60)) + b"."),
        "m.pth",
    ),
    "zip bomb": (lambda f: _archive(f / "m.pth", b"\0" * 50_000_000, compress=True), "compressed"),
    "members twice": (
        lambda f: _bytes(
            f / "m.pth",
            _archive(f / "n.pth", _tensor((4,), (1,)), again=True).read_bytes().replace(b"m/data/1", b"m/data/0"),
        ),
        "two members of one name",
    ),
    "negative shape": (lambda f: _archive(f / "m.pth", _tensor((-4,), (1,))), "m.pth"),
    "negative stride": (lambda f: _archive(f / "m.pth", _tensor((4,), (-1,))), "m.pth"),
    "offset past the end": (lambda f: _archive(f / "m.pth", _tensor((4,), (1,), offset=1 << 40)), "m.pth"),
    "shape past the end": (lambda f: _archive(f / "m.pth", _tensor((1 << 40,), (1,))), "m.pth"),
    "a broadcast giant": (lambda f: _archive(f / "m.pth", _tensor((1 << 40, 4), (0, 1))), "m.pth"),
    "storage past the end": (lambda f: _archive(f / "m.pth", _tensor((4,), (1,), elements=1 << 40)), "m.pth"),
    "an endless header": (lambda f: _safetensors(f / "m.safetensors", _one(), length=1 << 60), "header"),
    "a giant header": (lambda f: _safetensors(f / "m.safetensors", _one(), length=99_000_000), "header"),
    "header nested": (lambda f: _safetensors(f / "m.safetensors", b'{"a":' + b"[" * 100_000), "m.safetensors"),
    "name twice": (
        lambda f: _safetensors(f / "m.safetensors", (json.dumps(_one())[:-1] + "," + json.dumps(_one())[1:]).encode()),
        "twice",
    ),
    "negative size": (lambda f: _safetensors(f / "m.safetensors", _one(shape=[-4])), "shape"),
    "overflowing size": (lambda f: _safetensors(f / "m.safetensors", _one(shape=[1 << 33, 1 << 33])), "m.safetensors"),
    "data past the end": (
        lambda f: _safetensors(f / "m.safetensors", _one(shape=[1 << 30], data_offsets=[0, 4 << 30])),
        "m.safetensors",
    ),
    "data backwards": (lambda f: _safetensors(f / "m.safetensors", _one(data_offsets=[16, 0])), "data_offsets"),
    "overlap": (
        lambda f: _safetensors(f / "m.safetensors", _one() | {"b": _one()["a"]}),
        "m.safetensors",
    ),
    "unknown type": (lambda f: _safetensors(f / "m.safetensors", _one(dtype="F31")), "F31"),
    "index leads out": (lambda f: _sharded(f, {"a": "../s1.safetensors"}), "../s1.safetensors"),
    "index leads to itself": (
        lambda f: _sharded(f, {"a": "model.safetensors.index.json"}),
        "model.safetensors.index.json",
    ),
    "index leads to a ring of links": (_linked, "s2.safetensors"),
    "index names what is not there": (lambda f: _sharded(f, {"a": "s1.safetensors", "b": "s1.safetensors"}), "'b'"),
    "index lacks a shard": (lambda f: _sharded(f, {"a": "s9.safetensors"}), "s9.safetensors"),
    "index swaps tensors": (_two_shards, "m"),
    "index of numbers": (lambda f: _sharded(f, {"a": 3}), "index"),
    "index of a list": (lambda f: _sharded(f, ["a"]), "weight_map"),
    "a link to itself": (_loop, "m.pth"),
    "bundle of tomorrow": (lambda f: _bundle(f, lambda m: m.update(format=99)), "format 99"),
    "bundle with a new key": (lambda f: _bundle(f, lambda m: m.update(quantum=1)), "quantum"),
    "bundle leads out": (
        lambda f: _bundle(f, lambda m: m["files"].update({"../../x": {"bytes": 1, "sha256": "0" * 64}})),
        "../../x",
    ),
    "bundle with another digest": (
        lambda f: _bundle(f, lambda m: m["files"]["weights-00001.safetensors"].update(sha256="0" * 64)),
        "weights-00001.safetensors",
    ),
    "bundle that is too long": (
        lambda f: _bundle(f, lambda m: m["files"]["weights-00001.safetensors"].update(bytes=1 << 60)),
        "weights-00001.safetensors",
    ),
    "bundle of a billion layers": (lambda f: _bundle(f, lambda m: m["model"].update(layers=10**9)), "bundle"),
    "bundle of no layers": (lambda f: _bundle(f, lambda m: m["model"].update(layers=0)), "layers"),
    "tensors of no model": (
        lambda f: (torch.save(make_tensors(), f / "m.pth"), f / "m.pth")[1],
        "m.pth",
    ),
}
