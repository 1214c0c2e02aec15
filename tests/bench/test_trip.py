from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kittiwake.bench.cases import InexactError
from kittiwake.bench.floors import Ceilings
from kittiwake.bench.trip import Trip, measure_trip
from kittiwake.config import EngineConfig
from kittiwake.load import Loaded
from tests.engine.pieces import PieceTokenizer

from .fakes import SumModel


def _loaded(model: SumModel) -> Loaded:
    whatever: Any = model
    return Loaded(Path("fake"), "random", whatever, PieceTokenizer(), "fp32", 1, 0.0, None, None)


def test_a_trip_feeds_the_prompt_in_pieces_and_decodes_step_by_step() -> None:
    model = SumModel()
    prefill, decode = measure_trip(
        _loaded(model),
        Trip(prompt=10, generate=4, depth=6),
        EngineConfig(max_rows=4, max_chunk=4, threads=1),
        1,
        repeat=2,
    )
    rows = ",".join(str(rows) for _, rows in model.calls)
    run = "4,4,2,1,1,1,1"  # the first token is drawn from the logits kept with the prompt's state
    assert ",".join([run] * 3) in rows
    assert ",".join([run] * 4) not in rows
    assert (prefill.batch, prefill.tokens, decode.batch, decode.tokens) == (1, 10, 1, 4)
    assert (prefill.samples, decode.samples) == (2, 2)
    assert decode.extra["step_ms"] == pytest.approx(decode.median_ms / 4)
    assert 0.0 <= decode.extra["host_share"] < 1.0


def test_requests_decode_side_by_side() -> None:
    model = SumModel()
    ceilings = Ceilings(1e9, 1e9, "")
    prefill, decode = measure_trip(
        _loaded(model), Trip(3, 5, requests=4), EngineConfig(threads=1), 1, repeat=1, ceilings=ceilings
    )
    assert (4, 12) in model.calls
    assert model.calls.count((4, 4)) >= 10
    assert (decode.batch, decode.tokens) == (4, 5)
    assert prefill.floor_ms is not None
    # five steps: 4 bytes of weights, four states of 4 bytes read and written
    assert decode.floor_ms == pytest.approx(5 * (4 + 32) / 1e6)


def test_inexact_work_has_no_trip() -> None:
    with pytest.raises(InexactError):
        measure_trip(_loaded(SumModel(crowd_leak=1.0)), Trip(3, 2, requests=2), EngineConfig(threads=1), 0, repeat=1)
