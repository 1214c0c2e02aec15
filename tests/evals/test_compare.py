from __future__ import annotations

from dataclasses import replace

import pytest

from kittiwake.errors import UsageError
from kittiwake.evals.compare import compare_runs

from .fake_runs import outcome, run


def _pair(only_a: int, only_b: int, both: int, neither: int) -> tuple[list[bool], list[bool]]:
    a = [True] * only_a + [False] * only_b + [True] * both + [False] * neither
    b = [False] * only_a + [True] * only_b + [True] * both + [False] * neither
    return a, b


@pytest.mark.parametrize(
    ("only_a", "only_b", "verdict"),
    [(0, 0, "non-inferior"), (0, 17, "non-inferior"), (0, 18, "not shown"), (0, 34, "not shown"), (0, 35, "inferior")],
)
def test_verdicts(only_a: int, only_b: int, verdict: str) -> None:
    a, b = _pair(only_a, only_b, 1600, 5153 - 1600 - only_a - only_b)
    assert compare_runs(run(a), run(b)).verdict == verdict


def test_a_is_the_candidate_and_b_the_measure() -> None:
    """A that does better is never inferior; the same pair turned round may be."""
    a, b = _pair(300, 5, 400, 300)
    assert compare_runs(run(a), run(b)).verdict == "non-inferior"
    assert compare_runs(run(b), run(a)).verdict == "inferior"


def test_the_document_tells_all() -> None:
    a, b = _pair(1, 2, 3, 4)
    mine = run(a, wall_ms=5.0, dtype="bf16")
    other = run(b, wall_ms=20.0)
    document = compare_runs(mine, other, margin=0.01, alpha=0.05).document()
    assert document["verdict"] == "not shown"
    assert (document["margin_points"], document["alpha"], document["total"]) == (1.0, 0.05, 10)
    assert document["difference_points"] == pytest.approx(-10.0)
    low, high = document["interval_points"]
    assert low < -10 < high
    assert document["critical"] > 1.64
    assert document["passages_needed"] > 10
    assert document["same_tokens"] == 7
    assert (document["p50_ratio"], document["times_differ"]) == (0.25, None)
    assert document["only_a"] == [{"index": 0, "target": "word0", "a": "word0", "b": "nothing"}]
    assert document["only_b"] == [
        {"index": 1, "target": "word1", "a": "nothing", "b": "word1"},
        {"index": 2, "target": "word2", "a": "nothing", "b": "word2"},
    ]
    side = document["a"]
    assert (side["correct"], side["accuracy"], side["p50_ms"], side["p99_ms"]) == (4, 0.4, 5.0, 5.0)
    assert side["perplexity"] == pytest.approx(2.71828, rel=1e-5)
    assert (side["dtype"], document["b"]["dtype"]) == ("bf16", "fp32")


def test_the_verdict_is_read_off_the_interval() -> None:
    for only_a, only_b in ((0, 17), (0, 18), (3, 60), (40, 40), (80, 10)):
        a, b = _pair(only_a, only_b, 500, 5153 - 500 - only_a - only_b)
        comparison = compare_runs(run(a), run(b))
        low, high = comparison.document()["interval_points"]
        assert (comparison.verdict == "non-inferior") == (low > -0.5)
        assert (comparison.verdict == "inferior") == (high < -0.5)


def test_runs_that_do_not_belong_together_are_refused_by_what_differs() -> None:
    base = run([True, False, True])
    other_text = replace(
        base, outcomes=(base.outcomes[0], replace(outcome(1, False), digest="0" * 64), base.outcomes[2])
    )
    for other, message in (
        (run([True, False]), "A answered 3 passages, B 2"),
        (other_text, "passage 1 is another text"),
        (run([True, False, True], bos=True), "--bos is off in A and on in B"),
        (
            run([True, False, True], tokenizer="u" * 64),
            "the tokenizer of A is tttttttttttttttt…, of B uuuuuuuuuuuuuuuu…",
        ),
    ):
        with pytest.raises(UsageError, match="do not compare") as caught:
            compare_runs(base, other)
        assert message in caught.value.message


def test_times_of_other_machines_and_batches_are_not_divided() -> None:
    base = run([True])
    for other, message in (
        (run([True], processor="another"), "the processor of A is a processor, of B another"),
        (run([True], threads=4), "the threads of A is 2, of B 4"),
        (run([True], device="cuda"), "the device of A is cpu, of B cuda"),
        (run([True], batch=8), "A answered 1 passages in a call, B 8"),
    ):
        document = compare_runs(base, other).document()
        assert (document["p50_ratio"], document["times_differ"]) == (None, message)
    assert compare_runs(base, run([True], wall_ms=0.0)).document()["p50_ratio"] is None


@pytest.mark.parametrize(
    ("margin", "alpha"), [(0.0, 0.05), (1.0, 0.05), (0.01, 0.0), (0.01, 0.5), (float("nan"), 0.05)]
)
def test_margins_and_levels_out_of_range_are_refused(margin: float, alpha: float) -> None:
    with pytest.raises(UsageError):
        compare_runs(run([True]), run([True]), margin=margin, alpha=alpha)
