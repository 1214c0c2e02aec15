"""RWKV models in the parts of a GGUF file: the bits of the one file, its bundle and digest included."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from gguf import GGUFWriter

from kittiwake.bench.rwkv56_shapes import Rwkv6Shape, random_rwkv6
from kittiwake.bench.shapes import Rwkv7Shape, random_rwkv7
from kittiwake.build import build_bundle
from kittiwake.checkpoints.bundle import read_bundle
from kittiwake.checkpoints.reader import open_checkpoint
from kittiwake.config import EngineConfig
from kittiwake.load import load_model
from tests.families import layouts, rwkv56_layouts
from tests.families.agreement import run, same_run

SEVEN, SIX = Rwkv7Shape(2, 64, 16, 16, 8, 16, 64, 256), Rwkv6Shape(2, 64, 6, 10, 16, 256)
IDS = [1, 2, 250, 3, 3, 9]


def write(path: Path, number: int) -> None:
    if number == 7:
        layouts.save_gguf(path, SEVEN, random_rwkv7(SEVEN, seed=1), tokenizer="none")
    else:
        rwkv56_layouts.save_gguf(path, SIX, random_rwkv6(SIX, seed=1))


@pytest.mark.parametrize("number", [6, 7])
def test_parts_are_the_file(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "whole.gguf", number)
    (tmp_path / "parts").mkdir()
    split = functools.partial(GGUFWriter, split_max_tensors=20, small_first_shard=True)
    monkeypatch.setattr(layouts, "GGUFWriter", split)
    write(tmp_path / "parts" / "m.gguf", number)
    parts = sorted((tmp_path / "parts").iterdir())
    assert len(parts) > 2
    expected = load_model(tmp_path / "whole.gguf", EngineConfig(threads=2), tokenizer="bytes")
    for given in (parts[1], tmp_path / "parts"):
        found = load_model(given, EngineConfig(threads=2), tokenizer="bytes")
        assert found.model.config == expected.model.config
        assert same_run(run(found.model, IDS), run(expected.model, IDS))
    bundles = [
        build_bundle(path, tmp_path / f"bundle-{path.name}", tokenizer="bytes", goldens=0)
        for path in (parts[2], tmp_path / "parts", tmp_path / "whole.gguf")
    ]
    weights = {tuple(path.read_bytes() for path in sorted(bundle.glob("weights-*"))) for bundle in bundles}
    assert len(weights) == 1
    source = read_bundle(bundles[0]).manifest.source
    assert source == read_bundle(bundles[1]).manifest.source
    assert (source.name, source.sha256) == (parts[0].name, open_checkpoint(parts[0]).digest())
