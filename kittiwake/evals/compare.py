"""Two runs of LAMBADA on the same passages → whether A's answers are as good as B's, within a margin.

A is the candidate (a faster path, a narrower precision), B what it is measured against. Tango's score at a difference
of minus the margin decides: above the critical value A is non-inferior, below its negative inferior, between them
nothing is shown, and more passages are needed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import compress
from typing import Any

from kittiwake.errors import UsageError
from kittiwake.evals.runs import Outcome, Run
from kittiwake.evals.tango import Counts, critical_value, interval, passages_needed, score

MARGIN_POINTS = 0.5
ALPHA = 0.05
NON_INFERIOR = "non-inferior"
INFERIOR = "inferior"
NOT_SHOWN = "not shown"


@dataclass(frozen=True)
class Comparison:
    """Both runs and the verdict on them. ``margin`` is a share (0.005 is half a point), ``alpha`` the chance of a wrong
    verdict where the true difference is just the margin. Made by :func:`compare_runs`."""

    a: Run
    b: Run
    margin: float
    alpha: float

    @cached_property
    def only_a(self) -> tuple[tuple[Outcome, Outcome], ...]:
        """(A's, B's) outcomes of the passages that A alone got right."""
        return self._pairs(True)

    @cached_property
    def only_b(self) -> tuple[tuple[Outcome, Outcome], ...]:
        """The same for B alone."""
        return self._pairs(False)

    def _pairs(self, a_is_right: bool) -> tuple[tuple[Outcome, Outcome], ...]:
        pairs = list(zip(self.a.outcomes, self.b.outcomes, strict=True))
        return tuple(compress(pairs, (a.correct is a_is_right and b.correct is not a_is_right for a, b in pairs)))

    @cached_property
    def counts(self) -> Counts:
        """The discordant passages."""
        return Counts(len(self.only_a), len(self.only_b), len(self.a.outcomes))

    @cached_property
    def critical(self) -> float:
        """What the score must exceed."""
        return critical_value(self.counts.n, self.margin, self.alpha)

    @cached_property
    def score(self) -> float:
        """Tango's statistic at a difference of minus the margin."""
        return score(self.counts, -self.margin)

    @property
    def verdict(self) -> str:
        """One of NON_INFERIOR, INFERIOR and NOT_SHOWN."""
        if self.score > self.critical:
            return NON_INFERIOR
        return INFERIOR if self.score < -self.critical else NOT_SHOWN

    @property
    def times_differ(self) -> str:
        """Why the times of A and B do not compare, or nothing."""
        a, b = self.a.answerer, self.b.answerer
        if (self.a.batch, self.b.batch) != (1, 1):
            return f"A answered {self.a.batch} passages in a call, B {self.b.batch}"
        for what in ("processor", "device", "threads"):
            mine, other = getattr(a, what), getattr(b, what)
            if mine != other:
                return f"the {what} of A is {mine}, of B {other}"
        return ""

    def document(self) -> dict[str, Any]:
        """The JSON result."""
        low, high = interval(self.counts, self.critical)
        a_ms, b_ms = self.a.wall_ms(50), self.b.wall_ms(50)
        return {
            "verdict": self.verdict,
            "margin_points": round(100 * self.margin, 9),
            "alpha": self.alpha,
            "total": self.counts.n,
            "difference_points": round(100 * self.counts.difference, 6),
            "interval_points": [round(100 * low, 6), round(100 * high, 6)],
            "score": round(self.score, 6),
            "critical": round(self.critical, 6),
            "passages_needed": passages_needed(self.margin, self.critical),
            "same_tokens": sum(
                a.token_ids == b.token_ids for a, b in zip(self.a.outcomes, self.b.outcomes, strict=True)
            ),
            "p50_ratio": round(a_ms / b_ms, 4) if b_ms > 0 and not self.times_differ else None,
            "times_differ": self.times_differ or None,
            "a": _side(self.a),
            "b": _side(self.b),
            "only_a": [_discordant(*pair) for pair in self.only_a],
            "only_b": [_discordant(*pair) for pair in self.only_b],
        }


def _side(run: Run) -> dict[str, Any]:
    return {
        **asdict(run.answerer),
        "correct": run.correct,
        "accuracy": run.correct / len(run.outcomes),
        "perplexity": run.perplexity,
        "p50_ms": run.wall_ms(50),
        "p99_ms": run.wall_ms(99),
        "batch": run.batch,
        "busy": run.busy,
    }


def _discordant(a: Outcome, b: Outcome) -> dict[str, Any]:
    return {"index": a.index, "target": a.target, "a": a.predicted, "b": b.predicted}


def check_gate(margin: float, alpha: float) -> None:
    """Raise UsageError for a margin or a chance of error that cannot be."""
    if not 0 < margin < 1:
        raise UsageError(f"the margin must be above 0 and below 100 points, got {100 * margin:g}")
    if not 0 < alpha < 0.5:
        raise UsageError(f"alpha must be above 0 and below 0.5, got {alpha:g}")


def compare_runs(a: Run, b: Run, *, margin: float = MARGIN_POINTS / 100, alpha: float = ALPHA) -> Comparison:
    """Compare two runs of the same passages. Raises UsageError naming what differs between them that must not."""
    check_gate(margin, alpha)
    differing = _difference(a, b)
    if differing:
        raise UsageError(f"the runs do not compare: {differing}", "give both runs the same passages and tokenizer")
    return Comparison(a, b, margin, alpha)


def _difference(a: Run, b: Run) -> str:
    """What differs between the tasks of two runs, or nothing."""
    for mine, other in zip(a.outcomes, b.outcomes, strict=False):
        if (mine.digest, mine.target) != (other.digest, other.target):
            return f"passage {mine.index} is another text, its last word {mine.target!r} in A and {other.target!r} in B"
    if len(a.outcomes) != len(b.outcomes):
        return f"A answered {len(a.outcomes)} passages, B {len(b.outcomes)}"
    if a.bos != b.bos:
        return f"--bos is {_on(a.bos)} in A and {_on(b.bos)} in B"
    if a.answerer.tokenizer != b.answerer.tokenizer:
        return f"the tokenizer of A is {a.answerer.tokenizer[:16]}…, of B {b.answerer.tokenizer[:16]}…"
    return ""


def _on(value: bool) -> str:
    return "on" if value else "off"
