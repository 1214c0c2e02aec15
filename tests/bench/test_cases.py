from __future__ import annotations

import pytest

from kittiwake.bench.cases import Case, InexactError, Trip, measure_case, measure_trip, parse_cases, random_ids
from kittiwake.bench.timing import Effort, Figures, measure_ms
from kittiwake.errors import UsageError

from .fakes import VOCAB, SumModel

ONCE = Effort(least=3, most=3)


def test_cases_keep_their_order_and_repeats() -> None:
    assert parse_cases("1x512, 8X1,1x512") == [Case(1, 512), Case(8, 1), Case(1, 512)]


@pytest.mark.parametrize("text", ["", "1", "x1", "0x1", "1x0", "1x-1", "1x1,", "1x1;2x2", "٣x1"])
def test_what_is_no_case_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="BATCHxTOKENS"):
        parse_cases(text)


def test_a_case_is_one_forward_call_of_all_its_rows() -> None:
    model = SumModel()
    figures = measure_case(model, Case(3, 5), 0, ONCE)
    assert model.calls[-3:] == [(3, 15)] * 3
    assert (figures.case, figures.batch, figures.tokens, figures.samples) == ("3x5", 3, 5, 3)


def _measure_with_several_seeds(model: SumModel) -> None:
    """A cut at 0 cannot show a leak between chunks: one of these seeds cuts elsewhere."""
    for seed in range(8):
        measure_case(model, Case(2, 9), seed, ONCE)


@pytest.mark.parametrize("model", [SumModel(crowd_leak=0.5), SumModel(chunk_leak=1.0)])
def test_no_speed_is_told_for_inexact_work(model: SumModel) -> None:
    with pytest.raises(InexactError, match="no speed") as caught:
        _measure_with_several_seeds(model)
    assert caught.value.exit_code == 1


def test_one_token_cases_pass_their_check() -> None:
    assert measure_case(SumModel(), Case(1, 1), 0, ONCE).tokens == 1


def test_a_trip_feeds_the_depth_once_and_the_prompt_in_pieces() -> None:
    model = SumModel()
    prefill, decode = measure_trip(model, Trip(prompt=10, generate=4, depth=6), seed=1, repeat=2, chunk_rows=4)
    rows = [rows for _, rows in model.calls]
    run = [4, 4, 2, 1, 1, 1, 1]
    assert rows[-len(run) * 3 - 2 :] == [4, 2, *run, *run, *run]
    assert (prefill.tokens, decode.tokens, prefill.samples) == (10, 4, 2)


def test_random_ids_are_in_the_vocabulary_and_repeat_with_the_seed() -> None:
    ids = random_ids(VOCAB, 4, 200, 3)
    assert {token for row in ids for token in row} == set(range(VOCAB))
    assert ids == random_ids(VOCAB, 4, 200, 3) != random_ids(VOCAB, 4, 200, 4)


def test_figures_count_every_sequence() -> None:
    figures = Figures("8x4", 8, 4, median_ms=16.0, samples=5)
    assert figures.tok_s == 2000.0
    assert figures.document() == {"case": "8x4", "batch": 8, "tokens": 4, "median_ms": 16.0, "tok_s": 2000.0}


def test_timing_stops_at_its_budget_and_not_before_the_least() -> None:
    prepared = []
    samples = measure_ms(lambda: None, Effort(least=3, most=50, budget_s=0.0), prepare=lambda: prepared.append(1))
    assert len(samples) == len(prepared) == 3
    assert len(measure_ms(lambda: None, Effort(least=1, most=7, budget_s=60.0))) == 7
