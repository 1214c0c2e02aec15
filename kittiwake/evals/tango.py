"""Two answerers on the same questions: is the one's share of right answers at most a margin below the other's?

Tango's score test and interval for the difference of paired proportions. Of ``n`` questions ``only_a`` were right by A
alone and ``only_b`` by B alone; the difference is p(A) - p(B), estimated by (only_a - only_b) / n. Questions that both
or neither got right count in ``n`` only. Unlike Wald's, the interval stays inside -1 … 1 and has a width where no
answer differs.
Source: Tango 1998, Statistics in Medicine 17:891-908, equations (24) to (26).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

_BISECTIONS = 200
_GRID = 200
_MOST_DISCORDANT = 1000.0
"""Expected discordant answers of one kind up to which the critical value is searched: beyond, it is the normal one."""
_SPREAD = 8.0
"""Standard deviations around an expected count that are enumerated."""


@dataclass(frozen=True)
class Counts:
    """Discordant answers among ``n`` paired ones. Raises ValueError for counts that no ``n`` questions can give."""

    only_a: int
    only_b: int
    n: int

    def __post_init__(self) -> None:
        if self.n < 1 or self.only_a < 0 or self.only_b < 0 or self.only_a + self.only_b > self.n:
            raise ValueError(f"{self.only_a} and {self.only_b} discordant answers of {self.n} cannot be")

    @property
    def difference(self) -> float:
        """Share of right answers of A, less B's."""
        return (self.only_a - self.only_b) / self.n


def score(counts: Counts, difference: float) -> float:
    """The score statistic for a true ``difference`` p(A) - p(B): about standard normal if it is true.

    Above 0 where A did better than that. ±inf where the difference cannot be; 0 where it is the observed one.
    """
    found = _scores(np.array(counts.only_a), np.array(counts.only_b), counts.n, difference)
    return float(found)


def _scores(only_a: np.ndarray, only_b: np.ndarray, n: int, difference: float) -> np.ndarray:
    """The statistic of many counts, float64 of their common shape."""
    a, b = only_a.astype(np.float64), only_b.astype(np.float64)
    above = a - b - n * difference
    # the likeliest p(only B) under the difference: the larger root of 2n q² + linear q - product
    linear = (2 * n - a + b) * difference - a - b
    product = b * difference * (1 - difference)
    root = np.sqrt(np.maximum(linear**2 + 8 * n * product, 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        # two forms of one root: each loses its digits where the other keeps them
        share = np.where(linear > 0, 2 * product / (root + linear), (root - linear) / (4 * n))
        variance = n * (2 * share + difference * (1 - difference))
        return np.where(above == 0, 0.0, above / np.sqrt(np.maximum(variance, 0.0)))


def interval(counts: Counts, critical: float) -> tuple[float, float]:
    """The differences whose score is within ±``critical``: the outermost of them, from -1 to 1.

    With the normal quantile of 1 - alpha it is Tango's two-sided interval of level 1 - 2 alpha.
    """
    return _limit(counts, critical, -1.0), _limit(counts, critical, 1.0)


def _limit(counts: Counts, critical: float, edge: float) -> float:
    """The limit on the side of ``edge`` (±1), by bisection: the score falls as the difference grows."""
    inside, outside = counts.difference, edge
    for _ in range(_BISECTIONS):
        middle = (inside + outside) / 2
        if middle in (inside, outside):
            break
        if abs(score(counts, middle)) <= critical:
            inside = middle
        else:
            outside = middle
    return inside


@lru_cache(maxsize=16)
def critical_value(n: int, margin: float, alpha: float) -> float:
    """What the score at a difference of -``margin`` must exceed for a verdict, either way.

    The normal quantile of 1 - ``alpha``, raised to where neither verdict is wrong with a probability above ``alpha``
    if the true difference is -``margin``, whatever the rate of discordant answers: the counts are small and lopsided,
    which the quantile alone does not see. Exact sums over the counts, the largest over a grid of rates.
    """
    if n < 1 or not 0 < margin < 1 or not 0 < alpha < 0.5:
        raise ValueError(f"n {n}, margin {margin}, alpha {alpha}")
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1.0, n + 1)))])
    most = min((1 - margin) / 2, _MOST_DISCORDANT / n)
    rates = np.concatenate([[0.0], np.geomspace(min(0.01 / n, most / 2), most, _GRID)])
    found = np.array([_critical_at(n, margin, alpha, rate, log_factorials) for rate in rates])
    best = int(found.argmax())
    near = np.linspace(rates[max(0, best - 1)], rates[min(len(rates) - 1, best + 1)], _GRID // 4)
    refined = max(_critical_at(n, margin, alpha, rate, log_factorials) for rate in near)
    return max(NormalDist().inv_cdf(1 - alpha), float(found[best]), refined)


def _critical_at(n: int, margin: float, alpha: float, rate: float, log_factorials: np.ndarray) -> float:
    """The same where only A is right with probability ``rate`` and only B with ``rate + margin``."""
    a, b = _likely(n, rate)[None, :], _likely(n, rate + margin)[:, None]
    possible = a + b <= n
    same = np.where(possible, n - a - b, 0)
    log_share = _times_log(a, rate) + _times_log(b, rate + margin) + _times_log(same, 1 - 2 * rate - margin)
    log_ways = log_factorials[n] - log_factorials[a] - log_factorials[b] - log_factorials[same]
    shares = np.where(possible, np.exp(log_share + log_ways), 0.0)[possible]
    scores = np.broadcast_to(_scores(a, b, n, -margin), possible.shape)[possible]
    return max(_exceeded(scores, shares, alpha), _exceeded(-scores, shares, alpha))


def _likely(n: int, rate: float) -> np.ndarray:
    """Counts that a binomial of ``n`` gives at all often, int64."""
    reach = _SPREAD * math.sqrt(n * rate * (1 - rate)) + 12
    return np.arange(max(0, math.floor(n * rate - reach)), min(n, math.ceil(n * rate + reach)) + 1)


def _times_log(counts: np.ndarray, rate: float) -> np.ndarray:
    """counts · log(rate), 0 · log(0) being 0."""
    if rate <= 0:
        return np.where(counts == 0, 0.0, -np.inf)
    return counts * math.log(rate)


def _exceeded(scores: np.ndarray, shares: np.ndarray, alpha: float) -> float:
    """The smallest value that the scores exceed with a probability of at most ``alpha``."""
    order = np.argsort(-scores, kind="stable")
    total = np.cumsum(shares[order])
    first = int(np.searchsorted(total, alpha, side="right"))
    return float(scores[order[min(first, len(order) - 1)]])


def passages_needed(margin: float, critical: float) -> int:
    """Questions without any discordant answer from which on they show that A is not worse by ``margin``."""
    return math.floor(critical**2 * (1 - margin) / margin) + 1
