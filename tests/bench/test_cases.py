from __future__ import annotations

import numpy as np
import pytest
import torch

from kittiwake.bench.cases import (
    CARD_CASES,
    CPU_CASES,
    Case,
    InexactError,
    check_splits,
    measure_cases,
    parse_cases,
    random_ids,
)
from kittiwake.bench.floors import Ceilings
from kittiwake.bench.subject import Subject
from kittiwake.bench.timing import Effort
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StateTable
from kittiwake.errors import DeviceError, UsageError

from .fakes import VOCAB, SumModel

ONCE = Effort(least=3, most=3)


def test_cases_keep_their_order_and_repeats() -> None:
    assert parse_cases("1x512, 8X1,1x512") == [Case(1, 512), Case(8, 1), Case(1, 512)]


def test_default_cases_parse() -> None:
    assert len(parse_cases(CPU_CASES)) == 4
    assert Case(320, 1) in parse_cases(CARD_CASES)


@pytest.mark.parametrize("text", ["", "1", "x1", "0x1", "1x0", "1x-1", "1x1,", "1x1;2x2", "٣x1"])
def test_what_is_no_case_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="BATCHxTOKENS"):
        parse_cases(text)


def test_a_case_is_one_forward_call_of_all_its_rows() -> None:
    model = SumModel()
    (figures,) = measure_cases(Subject(model, 3), [Case(3, 5)], 0, ONCE)
    assert model.calls[-3:] == [(3, 15)] * 3
    assert (figures.case, figures.batch, figures.tokens, figures.samples) == ("3x5", 3, 5, 3)


def test_cases_are_timed_in_turns_forwards_and_backwards() -> None:
    model = SumModel()
    figures = measure_cases(Subject(model, 2), parse_cases("1x4,2x3,1x4"), 0, Effort(least=2, most=2))
    assert model.calls[-6:] == [(1, 4), (2, 6), (1, 4), (1, 4), (2, 6), (1, 4)]
    assert [(one.case, one.samples) for one in figures] == [("1x4", 2), ("2x3", 2), ("1x4", 2)]


def test_timed_calls_go_on_from_states_that_are_not_zero() -> None:
    model = SumModel()
    subject = Subject(model, 4)
    measure_cases(subject, [Case(4, 2)], 3, ONCE)
    positions = [int(subject.states.positions[slot]) for slot in subject.slots]
    assert len(set(positions)) == 1
    assert positions[0] > 3 * 2
    assert len({float(subject.states.part("sum")[0, slot, 0]) for slot in subject.slots}) > 1


def _measure_with_several_seeds(model: SumModel) -> None:
    """A cut at 0 cannot show a leak between chunks: one of these seeds cuts elsewhere."""
    for seed in range(8):
        measure_cases(Subject(model, 2), [Case(2, 9)], seed, ONCE)


@pytest.mark.parametrize("model", [SumModel(crowd_leak=0.5), SumModel(chunk_leak=1.0)])
def test_no_speed_is_told_for_inexact_work(model: SumModel) -> None:
    with pytest.raises(InexactError, match="no speed") as caught:
        _measure_with_several_seeds(model)
    assert caught.value.exit_code == 1


def test_one_token_cases_pass_their_check() -> None:
    assert measure_cases(Subject(SumModel(), 1), [Case(1, 1)], 0, ONCE)[0].tokens == 1


def test_splits_pass_where_nothing_leaks_and_name_the_cut_where_it_does() -> None:
    model = SumModel()
    check_splits(Subject(model, 1), 0)
    assert model.calls[1:68] == [(1, 1)] * 67
    # the state after n rows in one call is off by n, which the next token triples: only cuts show it
    with pytest.raises(InexactError, match="token by token"):
        check_splits(Subject(SumModel(chunk_leak=1.0), 1), 0)


class OddCut(SumModel):
    """Exact token by token; a chunk that is neither whole nor one token leaves another state."""

    def forward(self, batch, states):  # type: ignore[no-untyped-def]
        logits = super().forward(batch, states)
        if batch.rows not in (1, 67):
            states.part("sum")[0, batch.slots] += 1
        return logits


def test_random_splits_are_checked_too() -> None:
    with pytest.raises(InexactError, match="cut before the tokens"):
        check_splits(Subject(OddCut(), 1), 0)


class CardModel(SumModel):
    """Runs where nobody waits for it unless told to."""

    def __init__(self, log: list[str], **leaks: float) -> None:
        super().__init__(**leaks)
        self.device, self.can_run_ahead, self.log = "cuda", True, log

    def forward_on_device(self, batch: Batch, states: StateTable) -> torch.Tensor:
        self.log.append("forward")
        return torch.from_numpy(np.ascontiguousarray(self.forward(batch, states)))


@pytest.fixture
def card_log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done on a card that is not there."""
    log: list[str] = []
    monkeypatch.setattr("kittiwake.bench.subject.new_states", lambda model, slots: StateTable(model.state_spec, slots))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    return log


def test_on_a_card_every_timed_call_waits_for_its_end(card_log: list[str]) -> None:
    (figures,) = measure_cases(Subject(CardModel(card_log), 2), [Case(2, 3)], 0, ONCE)
    assert figures.samples == 3
    assert card_log == ["forward", "wait"] * 5  # twice to warm up


def test_a_model_whose_tokens_the_host_draws_is_timed_with_its_logits_there(card_log: list[str]) -> None:
    model = CardModel(card_log)
    model.can_run_ahead = False
    subject = Subject(model, 2)
    logits = subject.call(subject.pack([[1, 2], [3, 4]]))()
    assert isinstance(logits, np.ndarray) and len(logits) == 2 and card_log == []


def test_on_a_card_splits_are_checked_before_anything_is_timed(card_log: list[str]) -> None:
    with pytest.raises(InexactError, match="a prompt of 67 tokens"):
        measure_cases(Subject(CardModel(card_log, chunk_leak=1.0), 1), [Case(1, 1)], 0, ONCE)
    assert card_log == []


def test_states_that_do_not_fit_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: object, slots: int) -> StateTable:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("kittiwake.bench.subject.new_states", fail)
    with pytest.raises(DeviceError, match="no room for 320 states of 4 bytes"):
        Subject(SumModel(), 320)


def test_ceilings_put_a_floor_beside_a_figure() -> None:
    ceilings = Ceilings(copy_bytes_s=1e9, flop_s=1e9, product="none")
    (figures,) = measure_cases(Subject(SumModel(), 2), [Case(2, 3)], 0, ONCE, ceilings=ceilings)
    # 4 bytes of weights, two states of 4 bytes read and written
    assert figures.floor_ms == pytest.approx(20 / 1e6)
    assert figures.floor_by == "bytes"
    assert figures.floor_share == pytest.approx(figures.floor_ms / figures.median_ms)


def test_random_ids_are_in_the_vocabulary_and_repeat_with_the_seed() -> None:
    ids = random_ids(VOCAB, 4, 200, 3)
    assert {token for row in ids for token in row} == set(range(VOCAB))
    assert ids == random_ids(VOCAB, 4, 200, 3) != random_ids(VOCAB, 4, 200, 4)
