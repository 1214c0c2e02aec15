"""Bundles: the same bytes every time, whole or not at all, and read only when everything in them holds."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kittiwake.checkpoints.bundle import Golden, read_bundle
from kittiwake.checkpoints.manifest import FileRecord, SourceRecord, read_manifest
from kittiwake.checkpoints.reader import TensorSource, open_checkpoint
from kittiwake.checkpoints.weights import HEADER_ROOM
from kittiwake.errors import BundleError, CheckpointError, OutputError, UsageError
from tests.checkpoints.cases import (
    GOLDENS,
    SOURCE,
    assert_same,
    build,
    content_of,
    edit_manifest,
    make_tensors,
)

# Writing


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    bundle = read_bundle(build(tmp_path / "b"))
    manifest = bundle.manifest
    assert (manifest.family, manifest.model, manifest.precision) == ("rwkv7", {"layers": 1, "width": 4}, "fp32")
    assert (manifest.builder, manifest.source) == ("0.1.0", SOURCE)
    assert (manifest.tokenizer_kind, manifest.tokenizer_file) == ("world", "vocab.txt")
    assert bundle.tokenizer_files == {"vocab.txt": b"1 'a' 1\n"}
    assert bundle.chat_template == "User: {{ text }}"
    assert bundle.goldens == tuple(GOLDENS)
    assert bundle.extra_files == () and bundle.digests_verified
    assert bundle.source.format == "bundle" and bundle.source.config is None
    for name, tensor in make_tensors().items():
        assert_same(bundle.source.read(name), tensor)
    assert [info.name for info in bundle.source.infos()] == list(make_tensors())
    assert bundle.source.digest() == hashlib.sha256((tmp_path / "b" / "manifest.json").read_bytes()).hexdigest()


def test_the_manifest_declares_every_file_as_it_is(tmp_path: Path) -> None:
    files = content_of(build(tmp_path / "b"))
    manifest = read_manifest(tmp_path / "b")
    assert files.keys() - {"manifest.json"} == manifest.files.keys()
    for name, record in manifest.files.items():
        assert record == FileRecord(len(files[name]), hashlib.sha256(files[name]).hexdigest())
    assert list(json.loads(files["manifest.json"])) == [
        *("format", "kind", "builder", "family", "model", "precision", "tokenizer", "source", "files"),
        *("chat_template", "goldens"),
    ]


def test_building_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    model = {"layers": 1, "width": 4, "extra": {"b": 1, "a": [1, 2.5]}}
    turned = {"extra": {"a": [1, 2.5], "b": 1}, "width": 4, "layers": 1}
    first = build(tmp_path / "one", model=model, max_shard_bytes=HEADER_ROOM + 64)
    second = build(tmp_path / "two", model=turned, max_shard_bytes=HEADER_ROOM + 64)
    assert content_of(first) == content_of(second)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16])
def test_floating_tensors_are_converted_and_integers_kept(
    precision: str, dtype: torch.dtype, stored: torch.dtype, tmp_path: Path
) -> None:
    tensors = make_tensors(stored) | {
        "ids": torch.tensor([1 << 40, -1]),
        "turned": make_tensors(stored)["emb.weight"].t(),
    }
    source = read_bundle(build(tmp_path / "b", tensors=tensors.items(), precision=precision)).source
    for name, tensor in tensors.items():
        assert_same(source.read(name), tensor.to(dtype) if tensor.is_floating_point() else tensor)


def test_float8_weights_become_the_precision_asked_for(tmp_path: Path) -> None:
    tensor = torch.tensor([1.0, -2.5]).to(torch.float8_e4m3fn)
    source = read_bundle(build(tmp_path / "b", tensors=[("x", tensor)], precision="bf16")).source
    assert source.read("x").tolist() == [1.0, -2.5]


def test_tensors_longer_than_a_chunk_come_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kittiwake.checkpoints.weights._CHUNK_ELEMENTS", 5)
    source = read_bundle(build(tmp_path / "b")).source
    for name, tensor in make_tensors().items():
        assert_same(source.read(name), tensor)


def test_shards_keep_to_their_size_and_a_larger_tensor_has_its_own(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(8), "b": torch.ones(8), "big": torch.ones(100), "c": torch.ones(8), "d": torch.ones(9)}
    folder = build(tmp_path / "b", tensors=tensors.items(), max_shard_bytes=HEADER_ROOM + 64)
    shards = sorted(folder.glob("weights-*.safetensors"))
    assert [path.name for path in shards] == [f"weights-0000{i}.safetensors" for i in range(1, 5)]
    names = [[info.name for info in open_checkpoint(path).infos()] for path in shards]
    assert names == [["a", "b"], ["big"], ["c"], ["d"]]
    assert [path.stat().st_size - HEADER_ROOM for path in shards] == [64, 400, 32, 36]
    source = read_bundle(folder).source
    for name, tensor in tensors.items():
        assert_same(source.read(name), tensor)


def test_more_names_than_a_header_holds_open_another_shard(tmp_path: Path) -> None:
    tensors = {f"{i:04}" + "x" * 400: torch.tensor([float(i)]) for i in range(300)}
    folder = build(tmp_path / "b", tensors=tensors.items())
    assert len(list(folder.glob("weights-*.safetensors"))) > 1
    source = read_bundle(folder).source
    assert all(source.read(name).item() == float(name[:4]) for name in tensors)


def test_a_bundle_without_extras_and_with_a_tokenizer_of_no_file(tmp_path: Path) -> None:
    bundle = read_bundle(build(tmp_path / "b", tokenizer=("bytes", {}), chat_template=None, goldens=None))
    assert bundle.manifest.tokenizer_file is None and bundle.tokenizer_files == {}
    assert bundle.chat_template is None and bundle.goldens is None
    assert [path.name for path in sorted((tmp_path / "b").iterdir())] == ["manifest.json", "weights-00001.safetensors"]


def test_the_main_tokenizer_file_comes_first(tmp_path: Path) -> None:
    files = {"tokenizer.json": b"{}", "added.json": b"[]"}
    bundle = read_bundle(build(tmp_path / "b", tokenizer=("bpe", files)))
    assert list(bundle.tokenizer_files) == ["tokenizer.json", "added.json"]
    assert bundle.manifest.tokenizer_file == "tokenizer.json"


def test_goldens_can_be_made_from_the_weights_just_written(tmp_path: Path) -> None:
    def make(source: TensorSource) -> list[Golden]:
        assert source.read("emb.weight").dtype == torch.bfloat16
        return [Golden("x", (1,), (int(source.read("emb.weight").numel()),))]

    bundle = read_bundle(build(tmp_path / "b", precision="bf16", goldens=make))
    assert bundle.goldens == (Golden("x", (1,), (28,)),)


def test_progress_tells_bytes_written_and_checked(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    folder = build(tmp_path / "b", progress=lambda *step: seen.append(step), total_bytes=148)
    written = [(done, total) for what, done, total in seen if what == "writing weights"]
    assert written == sorted(written) and written[-1] == (148, 148)
    seen.clear()
    read_bundle(folder, progress=lambda *step: seen.append(step))
    assert seen and all(what == "checking the bundle" and 0 < done <= total for what, done, total in seen)


MEMORY_SCRIPT = """
import sys, torch
from pathlib import Path
from kittiwake.checkpoints.reader import open_checkpoint
from tests.checkpoints.cases import build

def anon_bytes():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

folder = Path(sys.argv[1])
torch.save({f"w{i}": torch.ones(1 << 22) for i in range(8)}, folder / "m.pth")
source = open_checkpoint(folder / "m.pth")
build(folder / "warm", precision="bf16")
before, peak = anon_bytes(), 0

def watch(*_step):
    global peak
    peak = max(peak, anon_bytes())

tensors = ((info.name, source.read(info.name)) for info in source.infos())
build(folder / "b", tensors=tensors, precision="bf16", progress=watch)
assert peak - before < 32 << 20, f"private memory grew by {peak - before:,} bytes"
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="private memory is read from /proc")
def test_writing_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", MEMORY_SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_source_record_of_an_open_checkpoint(tmp_path: Path) -> None:
    torch.save(make_tensors(), tmp_path / "m.pth")
    digest = hashlib.sha256((tmp_path / "m.pth").read_bytes()).hexdigest()
    assert SourceRecord.of(open_checkpoint(tmp_path / "m.pth")) == SourceRecord("m.pth", "pth", digest)


BAD_TENSORS: dict[str, tuple[Any, str]] = {
    "nan": ([("ok", torch.ones(2)), ("w.bad", torch.tensor([1.0, float("nan")]))], "'w.bad' holds NaN or infinity"),
    "inf": ([("w.bad", torch.tensor([float("-inf")]))], "'w.bad' holds NaN or infinity"),
    "overflow": (
        [("w.big", torch.tensor([1.0, -70000.0]))],
        "'w.big' does not fit float16: its largest value is 70000",
    ),
    "twice": ([("a", torch.ones(1)), ("a", torch.ones(1))], "'a' was given twice"),
    "none": ([], "no tensors were given"),
    "unnamed": ([("", torch.ones(1))], "cannot be called ''"),
    "metadata": ([("__metadata__", torch.ones(1))], "cannot be called"),
    "half a surrogate": ([("\ud800", torch.ones(1))], "cannot be called"),
    "long name": ([("x" * 2000, torch.ones(1))], "cannot be called"),
    "complex": ([("c", torch.ones(1, dtype=torch.complex64))], "'c' cannot be written: torch.complex64"),
    "sparse": ([("s", torch.eye(2, dtype=torch.int64).to_sparse())], "'s' cannot be written"),
    "meta": ([("m", torch.empty(2, device="meta"))], "'m' cannot be written"),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors_are_refused_by_name_and_leave_nothing(case: str, tmp_path: Path) -> None:
    tensors, message = BAD_TENSORS[case]
    with pytest.raises((CheckpointError, UsageError), match=message):
        build(tmp_path / "b", tensors=tensors, precision="fp16")
    assert list(tmp_path.iterdir()) == []


def test_a_value_beyond_fp16_is_fine_in_bf16(tmp_path: Path) -> None:
    build(tmp_path / "b", tensors=[("w", torch.tensor([70000.0]))], precision="bf16")
    with pytest.raises(CheckpointError, match="does not fit bfloat16"):
        build(tmp_path / "c", tensors=[("w", torch.tensor([3.4e38]))], precision="bf16")


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "precision": ({"precision": "int4"}, "precision is 'int4', expected one of"),
    "shard": ({"max_shard_bytes": 1000}, "max_shard_bytes is 1,000"),
    "family": ({"family": "RWKV 7"}, "family is 'RWKV 7'"),
    "tuple in model": ({"model": {"a": (1, 2)}}, "changes in JSON"),
    "number as a model key": ({"model": {1: 2}}, "changes in JSON"),
    "nan in model": ({"model": {"a": float("nan")}}, "cannot be written as JSON"),
    "object in model": ({"model": {"a": object()}}, "cannot be written as JSON"),
    "file path": ({"tokenizer": ("world", {"../vocab": b""})}, r"files names '\.\./vocab'"),
    "manifest": ({"tokenizer": ("world", {"Manifest.json": b""})}, "files names 'Manifest.json'"),
    "weights": ({"tokenizer": ("world", {"weights-00001.safetensors": b""})}, "may not be called"),
    "template": ({"tokenizer": ("world", {"chat_template.jinja": b""})}, "may not be called chat_template.jinja"),
    "goldens": ({"tokenizer": ("world", {"goldens.json": b""})}, "may not be called goldens.json"),
    "two cases": ({"tokenizer": ("world", {"a": b"", "A": b""})}, "differ only in upper and lower case"),
    "template text": ({"chat_template": "\ud800"}, "the chat template is not text"),
    "empty golden": ({"goldens": [Golden("x", (), (1,))]}, "golden of 'x' has no or bad token ids"),
    "negative golden": ({"goldens": [Golden("x", (1,), (-1,))]}, "golden of 'x' has no or bad token ids"),
    "builder": ({"builder": ""}, "builder is ''"),
    "digest": ({"source": SourceRecord("a", "pth", "xyz")}, "source.sha256 is 'xyz'"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_arguments_that_make_no_bundle_are_refused_and_leave_nothing(case: str, tmp_path: Path) -> None:
    changes, message = BAD_ARGUMENTS[case]
    with pytest.raises(UsageError, match=message):
        build(tmp_path / "b", **changes)
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments_are_told_before_any_tensor_is_asked_for(tmp_path: Path) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError
        yield

    for changes, message in BAD_ARGUMENTS.values():
        with pytest.raises(UsageError, match=message):
            build(tmp_path / "b", tensors=tensors(), **changes)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_an_interruption_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(100_000)
        raise error

    with pytest.raises(error):
        build(tmp_path / "b", tensors=tensors())
    assert list(tmp_path.iterdir()) == []


def test_a_process_killed_outright_never_leaves_a_target(tmp_path: Path) -> None:
    script = f"""
import os, signal, torch
from pathlib import Path
from tests.checkpoints.cases import build
def tensors():
    yield "a", torch.ones(100_000)
    os.kill(os.getpid(), signal.SIGKILL)
build(Path({str(tmp_path / "b")!r}), tensors=tensors())
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert not (tmp_path / "b").exists()
    assert all(path.name.startswith(".b.partial-") for path in tmp_path.iterdir())


def test_an_existing_target_is_refused_before_any_tensor_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError
        yield

    with pytest.raises(OutputError, match="already exists"):
        build(tmp_path / "b", tensors=tensors())


@pytest.mark.skipif(sys.platform != "linux", reason="the file-size limit is set as on Linux")
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    script = f"""
import resource, torch
from pathlib import Path
from kittiwake.errors import OutputError
from tests.checkpoints.cases import build
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
try:
    build(Path({str(tmp_path / "b")!r}), tensors=[("a", torch.ones(1 << 20))])
except OutputError as err:
    print(err)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "disk or a quota is full" in run.stdout and "/b cannot be written" in run.stdout, run.stderr
    assert list(tmp_path.iterdir()) == []


SYNCED = ["weights", "vocabulary", "template", "goldens", "manifest", "the folder"]


@pytest.mark.parametrize("failing", range(len(SYNCED)), ids=SYNCED)
def test_a_disk_that_fills_up_at_any_sync_is_told_and_leaves_nothing(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()

    def fsync(_handle: int) -> None:
        if next(calls) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", fsync)
    with pytest.raises(OutputError, match=r"b cannot be written: the disk or a quota is full"):
        build(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []
    build(tmp_path / "b")
    # One more at the end, for the parent, and every one of them was asked for.
    assert next(calls) == failing + 1 + len(SYNCED) + 1


# Reading

Change = Callable[[dict[str, Any]], Any]


def _set(value: Any, *keys: str) -> Change:
    def change(manifest: dict[str, Any]) -> None:
        for key in keys[:-1]:
            manifest = manifest[key]
        manifest[keys[-1]] = value

    return change


WEIGHTS = "weights-00001.safetensors"
RECORD = {"bytes": 1, "sha256": "0" * 64}

MANIFEST_FAULTS: dict[str, tuple[Change, str]] = {
    "newer format": (
        _set(2, "format"),
        r"format 2, written by 'kittiwake 0\.1\.0'; this version reads format 1.*install",
    ),
    "format of a text": (_set("1", "format"), "format is '1', expected a positive integer"),
    "format true": (_set(True, "format"), "format is True"),
    "other kind": (_set("other", "kind"), "is not the manifest of a kittiwake bundle"),
    "unknown key": (_set(1, "lora"), r"the manifest has the unknown key 'lora'.*written by 'kittiwake 0\.1\.0'"),
    "missing key": (lambda m: m.pop("goldens"), "the manifest lacks the key 'goldens'"),
    "unknown tokenizer key": (_set(1, "tokenizer", "x"), "tokenizer has the unknown key 'x'"),
    "unknown file key": (
        _set(1, "files", WEIGHTS, "x"),
        r"files\['weights-00001.safetensors'\] has the unknown key 'x'",
    ),
    "source of a text": (_set("x", "source"), "source is 'x', expected an object"),
    "precision": (_set("fp8", "precision"), "precision is 'fp8', expected one of fp32, fp16, bf16"),
    "precision of a list": (_set(["fp32"], "precision"), "precision is "),
    "other precision": (_set("bf16", "precision"), "'emb.weight' is torch.float32, the manifest says bf16"),
    "model of a list": (_set([], "model"), r"model is \[\], expected an object"),
    "family": (_set("../x", "family"), "family is '../x'"),
    "builder of a number": (_set(3, "builder"), "builder is 3"),
    "undeclared tokenizer": (
        _set("gone.txt", "tokenizer", "file"),
        "tokenizer.file is 'gone.txt', which is not declared",
    ),
    "undeclared template": (_set("x", "chat_template"), "chat_template is 'x', which is not declared"),
    "goldens of a number": (_set(3, "goldens"), "goldens is 3"),
    "weights as template": (_set(WEIGHTS, "chat_template"), "one file is given two uses"),
    "one file twice": (_set("vocab.txt", "chat_template"), "one file is given two uses"),
    "no weights": (lambda m: m["files"].pop(WEIGHTS), "the weight files are"),
    "gap in weights": (_set(RECORD, "files", "weights-00003.safetensors"), "the weight files are"),
    "parent path": (_set(RECORD, "files", "../x"), r"files names '\.\./x', expected a plain name"),
    "absolute path": (_set(RECORD, "files", "/etc/passwd"), "files names '/etc/passwd'"),
    "subfolder": (_set(RECORD, "files", "a/b"), "files names 'a/b'"),
    "hidden": (_set(RECORD, "files", ".x"), "files names '.x'"),
    "the manifest": (_set(RECORD, "files", "MANIFEST.json"), "files names 'MANIFEST.json'"),
    "missing file": (_set(RECORD, "files", "x.txt"), "lacks the file 'x.txt'"),
    "case twins": (_set(RECORD, "files", "VOCAB.txt"), "differ only in upper and lower case"),
    "negative size": (_set(-1, "files", WEIGHTS, "bytes"), r"bytes is -1, expected a size"),
    "fractional size": (_set(1.0, "files", WEIGHTS, "bytes"), r"bytes is 1.0, expected a size"),
    "wrong size": (_set(5, "files", WEIGHTS, "bytes"), "bytes, the manifest declares 5"),
    "short digest": (_set("abc", "files", WEIGHTS, "sha256"), "sha256 is 'abc'"),
    "wrong digest": (_set("0" * 64, "files", WEIGHTS, "sha256"), f"{WEIGHTS} does not have the sha-256"),
    "wrong small digest": (_set("0" * 64, "files", "vocab.txt", "sha256"), "vocab.txt does not have the sha-256"),
}


@pytest.mark.parametrize("case", MANIFEST_FAULTS)
def test_a_manifest_that_does_not_hold_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, message = MANIFEST_FAULTS[case]
    edit_manifest(build(tmp_path / "b"), change)
    with pytest.raises(BundleError, match=message) as caught:
        read_bundle(tmp_path / "b")
    assert str(tmp_path / "b") in caught.value.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "is not the manifest"),
        (b'{"kind": "kittiwake-bundle", "kind": 1}', "the key 'kind' is given twice"),
        (b'{"kind": ' + b"[" * 100_000, "nested more than"),
        (b'{"kind": "' + b"x" * (1 << 20) + b'"}', "larger than the 1,048,576 bytes"),
        (b'{"kind": NaN}', "NaN is not"),
        (b"", "is not JSON"),
    ],
)
def test_a_manifest_that_is_no_strict_json_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (build(tmp_path / "b") / "manifest.json").write_bytes(content)
    with pytest.raises(BundleError, match=message):
        open_checkpoint(tmp_path / "b")


def test_a_folder_without_manifest_is_no_bundle(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone", tmp_path / ("x" * 400), Path("a\0b")):
        with pytest.raises(BundleError, match=r"is not a bundle: it has no manifest\.json"):
            read_bundle(path)


def test_changed_bytes_are_found_and_only_large_ones_can_be_let_pass(tmp_path: Path) -> None:
    folder = build(tmp_path / "b")
    for name in content_of(folder).keys() - {"manifest.json"}:
        data = bytearray((folder / name).read_bytes())
        data[-1] ^= 1
        (folder / name).write_bytes(data)
        with pytest.raises(BundleError, match=f"{name} does not have the sha-256"):
            read_bundle(folder)
        if name != WEIGHTS:
            with pytest.raises(BundleError, match=f"{name} does not have the sha-256"):
                read_bundle(folder, verify_digests=False)
        else:
            assert not read_bundle(folder, verify_digests=False).digests_verified
        data[-1] ^= 1
        (folder / name).write_bytes(data)
    read_bundle(folder)


def test_undeclared_files_are_refused_but_cards_and_dotfiles_stand(tmp_path: Path) -> None:
    folder = build(tmp_path / "b")
    for name in (".DS_Store", "LICENSE", "MODEL_CARD.md", "README.md", "loss.png"):
        (folder / name).write_text("x")
    assert read_bundle(folder).extra_files == (".DS_Store", "LICENSE", "MODEL_CARD.md", "README.md", "loss.png")
    for name in ("weights-00002.safetensors", "tokenizer.json", "run.py", "x\n.txt"):
        (folder / name).write_text("x")
        with pytest.raises(BundleError, match="which its manifest does not declare"):
            read_bundle(folder)
        (folder / name).unlink()


def test_links_may_not_lead_out_of_the_bundle(tmp_path: Path) -> None:
    folder = build(tmp_path / "b")
    for name in ("vocab.txt", WEIGHTS, "manifest.json"):
        outside = tmp_path / f"outside-{name}"
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)
        with pytest.raises(BundleError, match=f"{name} is a link that leads out"):
            read_bundle(folder)
        (folder / name).unlink()
        outside.rename(folder / name)
    (folder / "vocab.txt").unlink()
    (folder / "vocab.txt").symlink_to("vocab.txt")
    with pytest.raises(BundleError, match="is a link that leads out"):
        read_bundle(folder)
    # The bundle itself may be reached through a link.
    (folder / "vocab.txt").unlink()
    (folder / "vocab.txt").write_bytes(b"1 'a' 1\n")
    (tmp_path / "link").symlink_to(folder)
    read_bundle(tmp_path / "link")


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    folder = build(tmp_path / "b")
    (folder / "vocab.txt").unlink()
    (folder / "vocab.txt").mkdir()
    with pytest.raises(BundleError, match=r"vocab\.txt is not a regular file"):
        read_bundle(folder)


GOLDEN_FAULTS: dict[str, tuple[Any, str]] = {
    "object": ({}, "holds a dict, expected a list"),
    "item of a text": (["x"], "item 0 has not exactly the keys"),
    "missing key": ([{"prompt": "x", "prompt_ids": [1]}], "item 0 has not exactly the keys"),
    "extra key": ([{"prompt": "x", "prompt_ids": [1], "completion_ids": [1], "x": 1}], "item 0 has not exactly"),
    "prompt": ([{"prompt": 1, "prompt_ids": [1], "completion_ids": [1]}], "item 0: prompt is not a text"),
    "no ids": ([{"prompt": "x", "prompt_ids": [], "completion_ids": [1]}], "item 0: prompt_ids is not a list"),
    "bool id": ([{"prompt": "x", "prompt_ids": [1], "completion_ids": [True]}], "item 0: completion_ids is not"),
    "negative id": ([{"prompt": "x", "prompt_ids": [-1], "completion_ids": [1]}], "item 0: prompt_ids is not"),
    "huge id": ([{"prompt": "x", "prompt_ids": [1 << 31], "completion_ids": [1]}], "item 0: prompt_ids is not"),
}


@pytest.mark.parametrize("case", GOLDEN_FAULTS)
def test_goldens_of_another_shape_are_refused(case: str, tmp_path: Path) -> None:
    content, message = GOLDEN_FAULTS[case]
    folder = build(tmp_path / "b")
    _replace(folder, "goldens.json", json.dumps(content).encode())
    with pytest.raises(BundleError, match=message):
        read_bundle(folder)


def test_a_template_that_is_no_text_or_too_long_is_refused(tmp_path: Path) -> None:
    folder = build(tmp_path / "b")
    _replace(folder, "chat_template.jinja", b"a\xff")
    with pytest.raises(BundleError, match=r"chat_template\.jinja is not UTF-8 text: byte 1"):
        read_bundle(folder)
    _replace(folder, "chat_template.jinja", b"a" * ((1 << 20) + 1))
    with pytest.raises(BundleError, match=r"chat_template\.jinja has 1,048,577 bytes, at most 1,048,576"):
        read_bundle(folder)


def _replace(folder: Path, name: str, data: bytes) -> None:
    """Other content for a declared file, with the manifest told."""
    (folder / name).write_bytes(data)
    edit_manifest(folder, _set({"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}, "files", name))


def test_weights_of_no_safetensors_format_are_refused(tmp_path: Path) -> None:
    folder = build(tmp_path / "b")
    _replace(folder, WEIGHTS, b"\x80\x02noise")
    with pytest.raises(CheckpointError, match="cut short"):
        read_bundle(folder)
