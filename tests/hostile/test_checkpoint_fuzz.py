"""Damaged checkpoint files: whatever bytes change or go missing, an error of ours comes out, or the data does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kittiwake.checkpoints.gguf import GgufSource
from kittiwake.checkpoints.reader import open_checkpoint
from kittiwake.errors import BundleError, CheckpointError, InputFileError
from kittiwake.load import find_tokenizer, own_template
from tests.checkpoints.cases import assert_same, build, make_tensors, save_sharded
from tests.text.gguf_metadata import add_keys, vocabulary
from tests.text.tiny import make_qwen

_GGUF = b"GGUF\3\0\0\0\1\0\0\0\0\0\0\0"
FORMATS = ("pth", "legacy", "safetensors", "sharded", "gguf", "gguf parts", "bundle")

_FLIPS = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), max_size=4)
_CUTS = st.tuples(st.integers(0, 1 << 20), st.sampled_from(["keep", "cut", "insert", "zero", "append"]))
_FUZZ = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def _make(kind: str, folder: Path) -> list[Path]:
    """Write a small checkpoint; return its files."""
    tensors = make_tensors()
    if kind in ("pth", "legacy"):
        torch.save(tensors, folder / "m.pth", _use_new_zipfile_serialization=kind == "pth")
    elif kind == "safetensors":
        save_file(tensors, folder / "m.safetensors")
    elif kind == "sharded":
        save_sharded(folder, tensors)
        (folder / "config.json").write_text('{"hidden_size": 4, "names": ["a", "b"]}')
    elif kind == "gguf":
        _save_gguf(folder / "m.gguf")
    elif kind == "gguf parts":
        _save_gguf(folder / "m.gguf", split_max_tensors=1, small_first_shard=True)
    else:
        folder.rmdir()
        build(folder)
    return sorted(folder.iterdir())


def _save_gguf(path: Path, keys: dict[str, Any] | None = None, **options: Any) -> None:
    writer = GGUFWriter(path, "rwkv7", **options)
    writer.add_name("tiny")
    if keys is None:
        writer.add_token_list([f"token {i}" for i in range(70)])
    add_keys(writer, keys or {})
    writer.add_tensor("a", np.arange(12, dtype=np.float32).reshape(3, 4))
    packed = quantize(np.ones((2, 32), np.float32), GGMLQuantizationType.Q8_0)
    writer.add_tensor("b", packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _damage(data: bytes, flips: list[tuple[int, int]], cut: tuple[int, str]) -> bytes:
    raw = bytearray(data)
    for place, mask in flips:
        # Headers and directories stand at both ends: half of the flips go near one of them.
        span = min(len(raw), 400) if place % 2 else len(raw)
        place = place // 2 % span
        raw[place if mask % 2 else len(raw) - 1 - place] ^= mask
    place, kind = cut[0] % (len(raw) + 1), cut[1]
    if kind == "cut":
        del raw[place:]
    elif kind == "insert":
        raw[place:place] = b"\x00\xff{"
    elif kind == "zero":
        raw[place : place + 16] = bytes(len(raw[place : place + 16]))
    elif kind == "append":
        raw += b"\x00" * (place % 70)
    return bytes(raw)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_files_raise_our_errors_or_give_tensors(kind: str, tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir()
    files = [path.name for path in _make(kind, good)]
    work = tmp_path / "work"

    @_FUZZ
    @given(which=st.integers(0, len(files) - 1), flips=_FLIPS, cut=_CUTS)
    def check(which: int, flips: list[tuple[int, int]], cut: tuple[int, str]) -> None:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(good, work)
        victim = work / files[which]
        before = victim.read_bytes()
        victim.write_bytes(_damage(before, flips, cut))
        try:
            source = open_checkpoint(work)
            if isinstance(source, GgufSource) and "tokenizer.ggml.tokens" in (source.config or {}):
                source.values("tokenizer.ggml.tokens", 1 << 20)
            tensors = {info.name: source.read(info.name) for info in source.infos()}
            for tensor in tensors.values():
                assert bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) is not None
        except (CheckpointError, BundleError) as err:
            str(err).encode()
            return
        # What is protected by digests or checksums was read only if nothing that matters changed.
        if kind in ("bundle", "pth"):
            for name, tensor in make_tensors().items():
                assert_same(tensors[name], tensor)

    check()


def test_damaged_vocabularies_raise_our_errors_or_give_a_tokenizer(tmp_path: Path) -> None:
    good, work = tmp_path / "good.gguf", tmp_path / "work.gguf"
    _save_gguf(good, vocabulary(make_qwen(), 384) | {"tokenizer.chat_template": "{{ messages }}{{ eos_token }}"})
    before = good.read_bytes()

    @_FUZZ
    @given(flips=_FLIPS, cut=_CUTS)
    def check(flips: list[tuple[int, int]], cut: tuple[int, str]) -> None:
        work.write_bytes(_damage(before, flips, (cut[0], "zero" if cut[1] == "zero" else "keep")))
        try:
            source = open_checkpoint(work)
            own_template(source)
            tokenizer = find_tokenizer(work, 384, None, source).tokenizer
        except InputFileError as err:
            str(err).encode()
            return
        assert tokenizer.decode(tokenizer.encode("hello <think>")) == "hello <think>"

    check()


@given(st.binary(max_size=300))
@_FUZZ
@pytest.mark.parametrize(
    "head", [b"", b"PK\x03\x04", b"PK\x05\x06", b"\x80\x02", b"\x80\x04", b"\x10\0\0\0\0\0\0\0{", _GGUF]
)
@pytest.mark.parametrize("name", ["m.pth", "m.safetensors", "m"])
def test_noise_is_refused(head: bytes, name: str, tmp_path: Path, data: bytes) -> None:
    (tmp_path / name).write_bytes(head + data)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / name)
