"""Gathers of a prompt: counted with look-ahead and without, from caches that hold nothing of the run before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kittiwake.bench import gathers
from kittiwake.bench.gathers import GatherFigures, GatherRun, readers_of
from kittiwake.bench.qwen4exp_shapes import Qwen4ExpShape, random_qwen4exp
from kittiwake.bench.trip import Trip, measure_depths
from kittiwake.config import EngineConfig
from kittiwake.load import Loaded, load_model
from tests.bench.fakes import SumModel
from tests.families.qwen4exp_layouts import write_hf

SHAPE = Qwen4ExpShape(ngram_layers=(0, 2))
CONFIG = EngineConfig(threads=1, max_chunk=8)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = write_hf(tmp_path_factory.mktemp("m"), SHAPE, random_qwen4exp(SHAPE, 1, torch.bfloat16))
    return load_model(folder, EngineConfig(threads=1))


def figures(runs: list[tuple[float, float, float, int]]) -> GatherFigures:
    return GatherFigures(tuple(GatherRun(*run, rows=8, ahead=1, gathers=2) for run in runs))


def test_shares_are_over_all_runs_and_times_are_medians() -> None:
    found = figures([(100, 40, 10, 400), (120, 60, 0, 400), (90, 100, 40, 400)])
    assert found.hidden_share == pytest.approx(1 - 50 / 200)
    assert found.forward_ms == 90 and found.reads_per_s == pytest.approx(1200 / 0.2)
    document = found.document()
    assert (document["prefill_ms"], document["gather_ms"], document["waited_ms"]) == (100, 60, 10)
    assert figures([(5, 0, 0, 0)]).document()["hidden_share"] == 1
    assert figures([(9, 2, 3, 1)]).hidden_share == 0


def test_every_depth_tells_how_its_gathers_went(loaded: Loaded) -> None:
    pairs = measure_depths(loaded, Trip(20, 2), [0, 13], CONFIG, 1, repeat=2)
    for prefill, decode in pairs:
        document = prefill.document()["gather"]
        alone = document.pop("without_look_ahead")
        assert document.pop("page_cache") in (gathers.BYPASSED, "cold", "warm", "partly warm", gathers.UNKNOWN)
        assert document.keys() == alone.keys()
        # 20 tokens in chunks of 8 are three gathers of each of two tables, with four rows a token
        assert (document["gathers"], document["gathers_ahead"]) == (6, 4)
        assert (alone["gathers"], alone["gathers_ahead"]) == (6, 0)
        assert document["rows"] == alone["rows"] == 2 * 4 * 20
        for one in (document, alone):
            assert 0 <= one["hidden_share"] <= 1 and one["gather_ms"] > 0 and one["reads"] > 0
            assert one["prefill_ms"] >= one["forward_ms"] > 0
        assert prefill.document()["median_ms"] == document["prefill_ms"]
        assert "gather" not in decode.document()
    assert all(reader.looks_ahead for reader in readers_of(loaded.model)), "as it was before"


def test_no_run_finds_rows_that_the_one_before_it_read(loaded: Loaded) -> None:
    (prefill, _), *_ = measure_depths(loaded, Trip(16, 1), [0], CONFIG, 1, repeat=3)
    assert prefill.gathers is not None
    reads = {run.reads for way in (prefill.gathers.ahead, prefill.gathers.alone) for run in way.runs}
    assert len(reads) == 1


def test_a_model_without_tables_has_no_gathers() -> None:
    model: Any = SumModel()
    assert not readers_of(model)


class _Reader:
    """A table of 1,000 rows of 64 bytes in one file, read through the page cache."""

    is_direct = False

    def __init__(self, path: Path) -> None:
        self.table = self
        self.rows, self.path = 1000, path
        self.parts = [self]

    def where(self, row: int) -> tuple[Path, int]:
        return self.path, 64 * row


def test_the_page_cache_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows"
    path.write_bytes(os.urandom(64000))
    reader: Any = _Reader(path)
    told = ("cold", "warm", "partly warm", gathers.UNKNOWN)  # by a system that does with its pages as it likes
    assert gathers.cached_share(reader) in told
    with path.open("rb") as file:
        os.fsync(file.fileno())
    gathers.drop_pages([path])
    assert gathers.cached_share(reader) in told

    monkeypatch.setattr(os, "preadv", lambda *_: 1)
    assert gathers._page_cache(reader) == "warm"

    def refuse(*_: object) -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "preadv", refuse)
    assert gathers._page_cache(reader) == "cold"

    def fail(*_: object) -> int:
        raise OSError(95, "not supported")

    monkeypatch.setattr(os, "preadv", fail)
    assert gathers._page_cache(reader) == gathers.UNKNOWN
    turns = iter([True, False] * 16)

    def every_other(*_: object) -> int:
        if next(turns):
            raise BlockingIOError
        return 1

    monkeypatch.setattr(os, "preadv", every_other)
    assert gathers.cached_share(reader) == "partly warm"
    reader.is_direct = True
    assert gathers._page_cache(reader) == gathers.BYPASSED
