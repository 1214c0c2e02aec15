from __future__ import annotations

import math
from itertools import product
from statistics import NormalDist

import pytest

from kittiwake.evals.tango import Counts, critical_value, interval, passages_needed, score

Z_95 = NormalDist().inv_cdf(0.95)
Z_975 = NormalDist().inv_cdf(0.975)


def test_the_example_of_the_paper() -> None:
    """Section 6.1 (soft contact lenses): 44 pairs, one discordant, margin 0.1: Z 1.709, p 0.044, lower limit -0.096."""
    counts = Counts(only_a=0, only_b=1, n=44)
    assert score(counts, -0.1) == pytest.approx(1.709, abs=5e-4)
    assert 1 - NormalDist().cdf(score(counts, -0.1)) == pytest.approx(0.044, abs=5e-4)
    assert interval(counts, Z_95)[0] == pytest.approx(-0.096, abs=5e-4)


@pytest.mark.parametrize(
    ("only_a", "only_b", "n", "z", "low", "high"),
    [
        # PropCIs 0.3-0, scoreci.mp
        (28, 25, 618, Z_95, -0.0148, 0.0247),
        (48, 41, 549, Z_95, -0.0157, 0.0414),
        # Bentur et al. 2009, in Fagerland, Lydersen and Laake 2014
        (1, 7, 21, Z_975, -0.5172, -0.0260),
    ],
)
def test_published_intervals(only_a: int, only_b: int, n: int, z: float, low: float, high: float) -> None:
    assert interval(Counts(only_a, only_b, n), z) == pytest.approx((low, high), abs=6e-5)


def _restricted(counts: Counts, difference: float) -> tuple[float, float]:
    """The likeliest (p(only A), p(only B)) under a difference, by a search that knows no formula."""
    a, b, same = counts.only_a, counts.only_b, counts.n - counts.only_a - counts.only_b

    def log_likelihood(share: float) -> float:
        parts = ((a, share + difference), (b, share), (same, 1 - 2 * share - difference))
        return sum(count * math.log(max(p, 1e-300)) for count, p in parts if count)

    low, high = max(0.0, -difference), (1 - difference) / 2
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(120):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if log_likelihood(left) < log_likelihood(right):
            low = left
        else:
            high = right
    return (low + high) / 2 + difference, (low + high) / 2


HOSTILE = [(0, 0), (1, 0), (0, 1), (3, 0), (0, 3), (1, 1), (5, 2), (2, 5), (6, 6), (12, 0), (0, 12), (11, 1), (1, 11)]


@pytest.mark.parametrize(("only_a", "only_b"), HOSTILE)
@pytest.mark.parametrize("difference", [-0.97, -0.5, -0.1, -0.005, 0.0, 0.005, 0.2, 0.6, 0.99])
def test_the_score_is_that_of_the_likeliest_shares(only_a: int, only_b: int, difference: float) -> None:
    counts = Counts(only_a, only_b, 12)
    share_a, share_b = _restricted(counts, difference)
    variance = 12 * (share_a + share_b - difference**2)
    above = only_a - only_b - 12 * difference
    if above == 0:
        assert score(counts, difference) == 0
    else:
        assert score(counts, difference) == pytest.approx(above / math.sqrt(variance), rel=1e-5)


@pytest.mark.parametrize(
    ("only_a", "only_b", "n"),
    [(a, b, 12) for a, b in HOSTILE]
    + [(0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 17, 5153), (900, 950, 5153), (0, 1, 10**6)],
)
def test_the_limits_solve_the_score_equation(only_a: int, only_b: int, n: int) -> None:
    counts = Counts(only_a, only_b, n)
    low, high = interval(counts, Z_975)
    assert -1 <= low <= counts.difference <= high <= 1
    if low > -1:
        assert score(counts, low) == pytest.approx(Z_975, abs=1e-6)
    else:
        assert only_b == n
    if high < 1:
        assert score(counts, high) == pytest.approx(-Z_975, abs=1e-6)
    else:
        assert only_a == n
    mirrored = interval(Counts(only_b, only_a, n), Z_975)
    assert mirrored == pytest.approx((-high, -low), abs=1e-12)


def test_no_difference_at_all_still_has_a_width() -> None:
    low, high = interval(Counts(0, 0, 100), Z_95)
    assert low == -high
    # with no discordant pair the score at d is sqrt(n d / (1 - d)), so that d = z² / (n + z²)
    assert high == pytest.approx(Z_95**2 / (100 + Z_95**2), rel=1e-9)


def test_mcnemar_at_no_difference() -> None:
    assert score(Counts(9, 4, 100), 0.0) == pytest.approx((9 - 4) / math.sqrt(13), rel=1e-12)


@pytest.mark.parametrize("counts", [(0, 0, 0), (-1, 0, 5), (0, -1, 5), (3, 3, 5)])
def test_impossible_counts_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        Counts(*counts)


@pytest.mark.parametrize(("only_a", "passes_to", "fails_from"), [(0, 17, 35), (10, 24, 49), (20, 32, 61)])
def test_where_the_verdicts_of_lambada_lie(only_a: int, passes_to: int, fails_from: int) -> None:
    """5,153 passages and half a point: figures of another implementation of the same gate."""
    critical = critical_value(5153, 0.005, 0.05)
    assert critical == pytest.approx(1.727, abs=1e-3)
    for only_b, passes, fails in (
        (passes_to, True, False),
        (passes_to + 1, False, False),
        (fails_from - 1, False, False),
        (fails_from, False, True),
    ):
        found = score(Counts(only_a, only_b, 5153), -0.005)
        assert (found > critical, found < -critical) == (passes, fails)


@pytest.mark.parametrize(("n", "margin"), [(1, 0.005), (2, 0.3), (9, 0.1), (40, 0.05), (40, 0.3)])
def test_neither_verdict_is_wrong_too_often(n: int, margin: float) -> None:
    """Every table of n pairs, summed exactly, for many rates of discordance."""
    critical = critical_value(n, margin, 0.05)
    tables = [(a, b, score(Counts(a, b, n), -margin)) for a, b in product(range(n + 1), repeat=2) if a + b <= n]
    for step in range(101):
        share_a = step / 100 * (1 - margin) / 2
        share_b, same = share_a + margin, max(1 - 2 * share_a - margin, 0.0)
        wrong = {True: 0.0, False: 0.0}
        for a, b, found in tables:
            if abs(found) > critical:
                ways = math.comb(n, a) * math.comb(n - a, b)
                wrong[found > 0] += ways * share_a**a * share_b**b * same ** (n - a - b)
        assert max(wrong.values()) <= 0.0501


def test_the_critical_value_is_never_below_the_normal_one() -> None:
    for n in (1, 30, 700):
        assert critical_value(n, 0.005, 0.05) >= Z_95
    assert critical_value(20_000, 0.05, 0.05) == pytest.approx(Z_95, abs=0.06)
    for bad in ((0, 0.1, 0.05), (5, 0.0, 0.05), (5, 1.0, 0.05), (5, 0.1, 0.5)):
        with pytest.raises(ValueError, match="margin"):
            critical_value(*bad)


def test_how_many_equal_answers_show_it() -> None:
    needed = passages_needed(0.005, 1.7)
    assert score(Counts(0, 0, needed), -0.005) > 1.7 >= score(Counts(0, 0, needed - 1), -0.005)
