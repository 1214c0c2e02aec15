"""open_checkpoint: the right reader for the content, and a plain word for what is no checkpoint."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file

from kittiwake.checkpoints.reader import TensorInfo, TensorSource, open_checkpoint
from kittiwake.errors import CheckpointError
from tests.checkpoints.cases import assert_same, build, make_tensors, save_sharded

Tensors = dict[str, torch.Tensor]


def _pth(path: Path, tensors: Tensors) -> Path:
    torch.save(tensors, path / "m.pth")
    return path / "m.pth"


def _legacy(path: Path, tensors: Tensors) -> Path:
    torch.save(tensors, path / "m.pth", _use_new_zipfile_serialization=False)
    return path / "m.pth"


def _safetensors(path: Path, tensors: Tensors) -> Path:
    save_file(tensors, path / "m.safetensors")
    return path / "m.safetensors"


def _sharded(path: Path, tensors: Tensors) -> Path:
    save_sharded(path / "m", tensors)
    return path / "m"


def _gguf(path: Path, tensors: Tensors) -> Path:
    writer = GGUFWriter(path / "m.gguf", "rwkv7")
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path / "m.gguf"


FORMATS = {"pth": _pth, "legacy": _legacy, "safetensors": _safetensors, "sharded": _sharded}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8]
)
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_back_names_shapes_and_bits(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = make_tensors(dtype)
    with open_checkpoint(FORMATS[kind](tmp_path, tensors)) as source:
        assert source.format == ("pth" if kind in ("pth", "legacy") else "safetensors")
        infos = {info.name: info for info in source.infos()}
        assert infos.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert infos[name] == TensorInfo(name, tuple(tensor.shape), dtype)
            assert infos[name].nbytes == tensor.nbytes
            assert_same(source.read(name), tensor)


def test_content_decides_not_the_suffix(tmp_path: Path) -> None:
    tensors = make_tensors()
    _pth(tmp_path, tensors).rename(tmp_path / "a.safetensors.bak")
    _safetensors(tmp_path, tensors).rename(tmp_path / "b.pth")
    assert open_checkpoint(tmp_path / "a.safetensors.bak").format == "pth"
    assert open_checkpoint(str(tmp_path / "b.pth")).format == "safetensors"


def test_folder_with_config_gives_it_parsed(tmp_path: Path) -> None:
    save_file(make_tensors(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    assert open_checkpoint(tmp_path).config == {"hidden_size": 4}
    assert open_checkpoint(tmp_path / "model.safetensors").config is None
    (tmp_path / "config.json").write_text('{"a": 1, "a": 2}')
    with pytest.raises(CheckpointError, match=r"config\.json: the key 'a' is given twice"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config\.json holds a list, expected a JSON object"):
        open_checkpoint(tmp_path)


def test_folder_with_one_file_opens_it_and_with_two_asks(tmp_path: Path) -> None:
    _pth(tmp_path, make_tensors())
    (tmp_path / "README.md").write_text("words")
    assert open_checkpoint(tmp_path).path == tmp_path / "m.pth"
    torch.save(make_tensors(), tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match=r"holds 2 checkpoints: 'm\.pth', 'other\.pth' \(name the file"):
        open_checkpoint(tmp_path)
    save_file(make_tensors(), tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).format == "safetensors"


def test_folder_with_a_bundle_opens_it(tmp_path: Path) -> None:
    source = open_checkpoint(build(tmp_path / "b"))
    assert source.format == "bundle"
    assert_same(source.read("emb.weight"), make_tensors()["emb.weight"])


def test_folder_with_single_and_sharded_weights_is_ambiguous(tmp_path: Path) -> None:
    save_sharded(tmp_path, make_tensors())
    save_file(make_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"both model\.safetensors and model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


STRANGERS = {
    "empty": (b"", "is empty"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer.*git lfs pull"),
    "html": (b"\n<!DOCTYPE html><html></html>", "is a web page"),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(16), "holds no tensors"),
    "json": (b'{"weight_map": {}}', "is a JSON text"),
    "noise": (b"\x01\x02\x03\x04 noise", "is of an unknown kind.*expected a PyTorch"),
    "npz": (b"PK\x05\x06" + bytes(18), r"zip archive without data\.pkl"),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_what_is_no_checkpoint_is_named(kind: str, tmp_path: Path) -> None:
    content, message = STRANGERS[kind]
    path = tmp_path / "model.what"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in caught.value.message and caught.value.hint


@pytest.mark.parametrize("kind", ["empty", "lfs", "html"])
def test_a_shard_that_is_none_is_named_for_what_it_is(kind: str, tmp_path: Path) -> None:
    """As after a clone without Git LFS, or a download that fetched a page."""
    content, message = STRANGERS[kind]
    save_sharded(tmp_path, make_tensors())
    shard = max(tmp_path.glob("*.safetensors"))
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert str(shard) in caught.value.message and caught.value.hint


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_pointer_in_place_of_a_json_file_is_named(name: str, tmp_path: Path) -> None:
    save_sharded(tmp_path, make_tensors())
    (tmp_path / name).write_bytes(STRANGERS["lfs"][0])
    with pytest.raises(CheckpointError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
        open_checkpoint(tmp_path)


def test_shards_without_their_index_ask_for_it(tmp_path: Path) -> None:
    save_sharded(tmp_path, make_tensors())
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoints: .*shards need their model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["MODEL.SAFETENSORS", "Model.Pth"])
def test_a_folder_knows_suffixes_in_capitals(name: str, tmp_path: Path) -> None:
    if name.endswith("S"):
        save_file(make_tensors(), tmp_path / name)
    else:
        torch.save(make_tensors(), tmp_path / name)
    with open_checkpoint(tmp_path) as source:
        assert source.path == tmp_path / name


def test_the_folder_of_a_hub_cache_tells_where_its_model_lies(tmp_path: Path) -> None:
    """Files there are links to blobs that are called by their digests."""
    for name in ("blobs", "refs", "snapshots"):
        (tmp_path / name).mkdir()
    with pytest.raises(
        CheckpointError, match=r"holds no checkpoint; found 'blobs', .* lies in a folder below snapshots/"
    ):
        open_checkpoint(tmp_path)
    folder = tmp_path / "snapshots" / "main"
    folder.mkdir()
    save_sharded(folder, make_tensors())
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(tmp_path / "blobs" / f"{number}")
        path.symlink_to(f"../../blobs/{number}")
    with open_checkpoint(folder) as source:
        assert_same(source.read("emb.weight"), make_tensors()["emb.weight"])


def test_a_path_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.pth does not exist"):
        open_checkpoint(tmp_path / "gone.pth")
    with pytest.raises(CheckpointError, match="holds no checkpoint; found nothing: it is empty"):
        open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"holds no checkpoint; found 'notes\.txt'"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="name too long"):
        open_checkpoint(tmp_path / ("x" * 400))
    with pytest.raises(CheckpointError, match="null byte"):
        open_checkpoint("a\0b")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_is_refused_and_never_waited_on(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.pth")
    for path in (tmp_path / "model.pth", tmp_path):
        with pytest.raises(CheckpointError, match="not a regular file"):
            open_checkpoint(path)


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux")
def test_a_path_that_is_no_text_is_refused_in_words_that_can_be_printed(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"m\xff.pth")
    torch.save(make_tensors(), tmp_path / "m.pth")
    (tmp_path / "m.pth").rename(path)
    with pytest.raises(CheckpointError, match="is not UTF-8 text") as caught:
        open_checkpoint(path)
    assert str(caught.value).encode()


def _open(tmp_path: Path) -> TensorSource:
    return open_checkpoint(_safetensors(tmp_path, make_tensors()))


def test_an_unknown_name_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor 'emb\.wieght' \(the nearest name is 'emb\.weight'\)"):
        _open(tmp_path).read("emb.wieght")


@pytest.mark.parametrize("kind", ["pth", "safetensors"])
def test_closing_keeps_tensors_already_read(kind: str, tmp_path: Path) -> None:
    tensors = make_tensors()
    source = open_checkpoint(FORMATS[kind](tmp_path, tensors))
    tensor = source.read("emb.weight")
    source.close()
    source.close()
    assert_same(tensor, tensors["emb.weight"])
    with pytest.raises(CheckpointError, match="was closed"):
        source.read("emb.weight")


@pytest.mark.parametrize("kind", ["pth", "safetensors"])
def test_a_file_that_changed_is_not_read_on(kind: str, tmp_path: Path) -> None:
    path = FORMATS[kind](tmp_path, make_tensors())
    source = open_checkpoint(path)
    path.write_bytes(b"short")
    with pytest.raises(CheckpointError, match="changed while it was open"):
        source.read("emb.weight")
    path.unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        source.read("emb.weight")


def test_digest_of_one_file_is_its_sha256_and_of_several_covers_all(tmp_path: Path) -> None:
    path = _safetensors(tmp_path, make_tensors())
    seen: list[tuple[str, int, int]] = []
    digest = open_checkpoint(path).digest(lambda what, done, total: seen.append((what, done, total)))
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert seen[-1] == ("sha-256 of m.safetensors", path.stat().st_size, path.stat().st_size)

    folder = _sharded(tmp_path, make_tensors())
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in sorted(folder.glob("*.safetensors"))]
    assert open_checkpoint(folder).digest() == hashlib.sha256("".join(lines).encode()).hexdigest()
    (folder / "config.json").write_text("{}")
    assert open_checkpoint(folder).digest() != hashlib.sha256("".join(lines).encode()).hexdigest()


MEMORY_SCRIPT = """
import sys
from pathlib import Path
from kittiwake.checkpoints.reader import open_checkpoint

def anon_bytes():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

for small, big in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    warm = open_checkpoint(small); warm.read("small").double().sum()
    before = anon_bytes()
    source = open_checkpoint(big)
    total = float(source.read("big").sum())
    grown = anon_bytes() - before
    assert total == 1 << 24, (big, total)
    assert grown < 8 << 20, f"private memory grew by {grown:,} bytes for {big}"
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="private memory is read from /proc")
def test_reading_a_tensor_takes_no_private_memory(tmp_path: Path) -> None:
    paths: list[Path] = []
    for kind in ("pth", "safetensors", "gguf"):
        write = _gguf if kind == "gguf" else FORMATS[kind]
        for size, tensor in (("small", torch.ones(1 << 12)), ("big", torch.ones(1 << 24))):
            folder = tmp_path / f"{kind}-{size}"
            folder.mkdir()
            paths.append(write(folder, {size: tensor}))
    command = [sys.executable, "-c", MEMORY_SCRIPT, *map(str, paths)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
