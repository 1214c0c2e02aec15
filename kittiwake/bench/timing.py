"""How work is timed: warmed up, several times, the median taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    """One measured case: ``batch`` sequences of ``tokens`` tokens each took ``median_ms``."""

    case: str
    batch: int
    tokens: int
    median_ms: float
    samples: int

    @property
    def tok_s(self) -> float:
        """Tokens a second over all sequences together."""
        return 1000 * self.batch * self.tokens / self.median_ms

    def document(self) -> dict[str, str | int | float]:
        """The JSON contract of ``bench``: case, batch, tokens, median_ms, tok_s."""
        return {
            "case": self.case,
            "batch": self.batch,
            "tokens": self.tokens,
            "median_ms": round(self.median_ms, 4),
            "tok_s": round(self.tok_s, 2),
        }


@dataclass(frozen=True)
class Effort:
    """How often to run: at least ``least`` times, then on until ``budget_s`` is used up or ``most`` runs are in.

    The median of many short runs, or of a few long ones, at a bounded price.
    """

    least: int = 5
    most: int = 200
    budget_s: float = 2.0


def measure_ms(
    work: Callable[[], object], effort: Effort, *, prepare: Callable[[], object] | None = None
) -> list[float]:
    """Wall ms of each run of ``work``; ``prepare`` runs before each of them, untimed. The caller warms up."""
    samples: list[float] = []
    used_s = 0.0
    while len(samples) < effort.least or (used_s < effort.budget_s and len(samples) < effort.most):
        if prepare is not None:
            prepare()
        started = time.perf_counter()
        work()
        took_s = time.perf_counter() - started
        samples.append(1000 * took_s)
        used_s += took_s
    return samples


def median_ms(samples: Sequence[float]) -> float:
    """The median of the samples; robust against the odd run that shared its core."""
    return statistics.median(samples)
