from __future__ import annotations

import pytest

from kittiwake.bench.timing import Effort, Figures, PeerFigures, interleaved_ms, measure_ms, timed


def test_figures_count_every_sequence() -> None:
    figures = Figures("8x4", 8, 4, median_ms=16.0, samples=5)
    assert figures.tok_s == 2000.0
    assert figures.document() == {"case": "8x4", "batch": 8, "tokens": 4, "median_ms": 16.0, "tok_s": 2000.0}


def test_a_floor_and_peers_add_keys_and_change_none() -> None:
    peers = (
        PeerFigures("slow", "1.0", 32.0, 8.0, 4, is_batched=False, difference=1e-6),
        PeerFigures("gone", reason="no"),
    )
    document = Figures("8x4", 8, 4, 16.0, 5, 4.0, "bytes", peers, {"step_ms": 2.0}).document()
    assert document.items() >= Figures("8x4", 8, 4, 16.0, 5).document().items()
    assert (document["floor_ms"], document["floor_share"], document["floor_by"], document["step_ms"]) == (
        4.0,
        0.25,
        "bytes",
        2.0,
    )
    slow, gone = document["peers"]
    assert (slow["tok_s"], slow["ours_is_faster"], slow["batched"]) == (1000.0, 4.0, False)
    assert gone == {"name": "gone", "version": "", "reason": "no"}


def test_timing_stops_at_its_budget_and_not_before_the_least() -> None:
    assert len(measure_ms(timed(lambda: None), Effort(least=3, most=50, budget_s=0.0))) == 3
    assert len(measure_ms(timed(lambda: None), Effort(least=1, most=7, budget_s=60.0))) == 7


@pytest.mark.parametrize("least", [1, 2, 3, 5, 7, 200])
def test_rounds_share_the_whole_effort(least: int) -> None:
    parts = Effort(least=least, most=200, budget_s=2.0).rounds()
    assert len(parts) == min(4, least)
    assert (sum(part.least for part in parts), sum(part.most for part in parts)) == (least, 200)
    assert sum(part.budget_s for part in parts) == pytest.approx(2.0)


def test_sides_take_turns_a_b_b_a() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return 1.0

    samples = interleaved_ms([lambda: side("a"), lambda: side("b")], Effort(least=4, most=4))
    assert "".join(order) == "abbaabba"
    assert [len(one) for one in samples] == [4, 4]
