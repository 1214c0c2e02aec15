from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kittiwake.bench.cases import InexactError, random_ids
from kittiwake.bench.floors import Ceilings
from kittiwake.bench.subject import Subject
from kittiwake.bench.trip import Trip, measure_depths, parse_depths
from kittiwake.config import EngineConfig
from kittiwake.engine.states import PartKind, StatePart, StateSpec
from kittiwake.errors import KittiwakeError, PagesError, UsageError
from kittiwake.llm import LLM
from kittiwake.load import Loaded
from tests.engine.pieces import PieceTokenizer

from .fakes import SumModel


def _loaded(model: SumModel) -> Loaded:
    whatever: Any = model
    return Loaded(Path("fake"), "random", whatever, PieceTokenizer(), "fp32", 1, 0.0, None, None)


def test_a_trip_feeds_the_prompt_in_pieces_and_decodes_step_by_step() -> None:
    model = SumModel()
    ((prefill, decode),) = measure_depths(
        _loaded(model),
        Trip(prompt=10, generate=4, depth=6),
        [6],
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
    ((prefill, decode),) = measure_depths(
        _loaded(model), Trip(3, 5, requests=4), [0], EngineConfig(threads=1), 1, repeat=1, ceilings=ceilings
    )
    assert (4, 12) in model.calls
    assert model.calls.count((4, 4)) >= 10
    assert (decode.batch, decode.tokens) == (4, 5)
    assert prefill.floor_ms is not None
    # five steps: 4 bytes of weights, four states of 4 bytes read and written
    assert decode.floor_ms == pytest.approx(5 * (4 + 32) / 1e6)


def test_inexact_work_has_no_trip() -> None:
    with pytest.raises(InexactError):
        measure_depths(
            _loaded(SumModel(crowd_leak=1.0)), Trip(3, 2, requests=2), [0], EngineConfig(threads=1), 0, repeat=1
        )


def test_depths_are_numbers_of_tokens_and_k_is_1024() -> None:
    assert parse_depths("0") == [0]
    assert parse_depths("0, 4096,32K,128k,4096") == [0, 4096, 32768, 131072, 4096]


@pytest.mark.parametrize("text", ["", "4,", "-1", "4M", "1.5K", "K", "0x10", "12345678901"])
def test_what_is_no_depth_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="a depth is a number of tokens"):
        parse_depths(text)


def test_every_depth_is_read_from_where_the_one_before_it_ended_and_measured_in_turns() -> None:
    model = SumModel()
    told: list[tuple[str, int, int]] = []
    pairs = measure_depths(
        _loaded(model),
        Trip(prompt=3, generate=2),
        [8, 0, 5, 8],
        EngineConfig(max_rows=4, max_chunk=4, threads=1),
        1,
        repeat=2,
        progress=lambda what, done, total: told.append((what, done, total)),
    )
    assert [prefill.case for prefill, _ in pairs] == [f"prefill 3+2 at {depth}" for depth in (8, 0, 5, 8)]
    assert [decode.case for _, decode in pairs] == [f"decode 3+2 at {depth}" for depth in (8, 0, 5, 8)]
    assert all((one.samples, one.batch) == (2, 1) for pair in pairs for one in pair)
    rows = ",".join(str(rows) for _, rows in model.calls)
    # the prompt at 0; 5 tokens, the prompt there; 3 tokens more, the prompt there
    assert ",3,4,1,3,3,3," in rows
    reading = [(done, total) for what, done, total in told if what == "reading up to the depths"]
    assert (reading[0], reading[-1]) == ((0, 17), (17, 17)) and reading == sorted(reading)
    timing = [done for what, done, _ in told if what == "timing prompt and decoding"]
    assert timing == list(range(12))


def test_a_text_at_a_depth_is_the_one_that_was_read_up_to_it() -> None:
    """The states before a prompt are those of its own text: one model that reads it all gives the same."""
    model = SumModel()
    seen: list[tuple[int, float]] = []
    forward = model.forward

    def noted(batch: Any, states: Any) -> Any:
        logits = forward(batch, states)
        seen.append((int(states.positions[batch.slots[0]]), float(states.part("sum")[0, batch.slots[0], 0])))
        return logits

    model.forward = noted  # type: ignore[method-assign]
    measure_depths(_loaded(model), Trip(3, 1), [0, 4, 9], EngineConfig(threads=1), 1, repeat=2)
    sums: dict[int, set[float]] = {}
    for position, value in seen:
        sums.setdefault(position, set()).add(value)
    ids = random_ids(16, 1, 12, 1)[0]
    value, expected = 0.0, {}
    for position, token in enumerate(ids, start=1):
        value = (value * 3 + token) % 1009
        expected[position] = value
    assert expected[7] in sums[7] and expected[12] in sums[12]  # after the prompts at 4 and 9


def _growing(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> SumModel:
    """A model with pages of 8 tokens, 32 bytes each, and so much memory; its forward fills none of them."""
    model = SumModel()
    model.state_spec = StateSpec(
        1, (StatePart("sum", (1,)), StatePart("keys", (1,), kind=PartKind.GROWING)), page_tokens=8
    )
    forward = model.forward

    def reserving(batch: Any, states: Any) -> Any:
        states.reserve(batch.slots, batch.starts[1:] - batch.starts[:-1])
        return forward(batch, states)

    model.forward = reserving  # type: ignore[method-assign]
    for module in ("engine.states", "bench.trip", "bench.cases", "bench.subject"):
        monkeypatch.setattr(f"kittiwake.{module}.available_memory", lambda: free_bytes)
    return model


def test_depths_that_the_pages_do_not_hold_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _growing(monkeypatch, 100_000)  # half of it: 1,562 pages
    with pytest.raises(PagesError, match=r"2 requests at a depth of 6,400 tokens .* holds 12,496 in all"):
        measure_depths(_loaded(model), Trip(3, 2, requests=2), [0, 6400], EngineConfig(threads=1), 1, repeat=1)
    assert max(rows for _, rows in model.calls) <= 6
    with pytest.raises(KittiwakeError, match=r"1 request at a depth of 1,200 tokens need .* 100,000 are free"):
        measure_depths(_loaded(model), Trip(3, 2), [1200, 0], EngineConfig(threads=1), 1, repeat=1)


def test_depths_that_just_fit_are_measured_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages that the last timed step needs are there, whatever kept states leave free by then."""
    model = _growing(monkeypatch, 100_000)
    asked: list[int] = []
    made = LLM.from_loaded.__func__  # type: ignore[attr-defined]

    def noted(cls: Any, loaded: Any, config: EngineConfig) -> Any:
        asked.append(config.growing_bytes)
        return made(cls, loaded, config)

    monkeypatch.setattr(LLM, "from_loaded", classmethod(noted))
    pairs = measure_depths(_loaded(model), Trip(3, 2, requests=2), [40, 0], EngineConfig(threads=1), 1, repeat=1)
    assert [decode.batch for _, decode in pairs] == [2, 2]
    assert asked == [2 * 31 * 32]  # 40 + 3 + 201 steps of a bare forward: 31 pages a request


def test_a_text_longer_than_memory_is_refused_before_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SumModel()
    with pytest.raises(KittiwakeError, match=r"1 request at a depth of 999,999,999,999 tokens need .* are free"):
        measure_depths(_loaded(model), Trip(3, 2), [0, 999_999_999_999], EngineConfig(threads=1), 1, repeat=1)
    with pytest.raises(KittiwakeError, match=r"random tokens take .* are free .*fewer tokens at once"):
        random_ids(16, 999_999, 99_999_999, 1)


def test_more_states_than_memory_holds_are_refused() -> None:
    with pytest.raises(
        KittiwakeError, match=r"1,000,000,000,000,000 states of 4 bytes are more than .*fewer sequences"
    ):
        Subject(SumModel(), 10**15)  # type: ignore[arg-type]
