"""How work is timed: warmed up, several times in interleaved rounds, the median taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kittiwake.bench.gathers import Gathers

Timed = Callable[[], float]
"""Does its work once and tells the ms it took, up to where its last result is there."""


@dataclass(frozen=True)
class PeerFigures:
    """Another program at the same case, timed in turns with ours; or the reason why it has no figure."""

    name: str
    version: str = ""
    median_ms: float = 0.0
    ours_ms: float = 0.0
    """Our median over the same turns."""
    samples: int = 0
    is_batched: bool = True
    """False: it ran the sequences one after another, which is all it can do."""
    difference: float = 0.0
    """Relative RMS of its logits against ours."""
    reason: str = ""

    @property
    def speed(self) -> float:
        """How many times faster we are."""
        return self.median_ms / self.ours_ms

    def document(self, batch: int, tokens: int) -> dict[str, Any]:
        """JSON values: the figures, or the name and the reason."""
        if self.reason:
            return {"name": self.name, "version": self.version, "reason": self.reason}
        return {
            "name": self.name,
            "version": self.version,
            "median_ms": round(self.median_ms, 4),
            "tok_s": round(1000 * batch * tokens / self.median_ms, 2),
            "ours_ms": round(self.ours_ms, 4),
            "ours_is_faster": round(self.speed, 3),
            "batched": self.is_batched,
            "relative_rms_difference": float(f"{self.difference:.3g}"),
        }


@dataclass(frozen=True)
class Figures:
    """One measured case: ``batch`` sequences of ``tokens`` tokens each took ``median_ms``."""

    case: str
    batch: int
    tokens: int
    median_ms: float
    samples: int
    floor_ms: float | None = None
    """What the device's measured ceilings allow at best."""
    floor_by: str = ""
    """ "bytes" or "operations": which of the two the floor comes from."""
    peers: tuple[PeerFigures, ...] = ()
    extra: dict[str, float] = field(default_factory=dict)
    """More keys for the document: times in ms (``…_ms``) and shares of 1."""
    gathers: Gathers | None = None
    """Of a prompt of a model that reads n-gram tables: how its gathers went."""

    @property
    def tok_s(self) -> float:
        """Tokens a second over all sequences together."""
        return 1000 * self.batch * self.tokens / self.median_ms

    @property
    def floor_share(self) -> float | None:
        """How much of what the device allows is reached: 1 is all of it."""
        return None if self.floor_ms is None else self.floor_ms / self.median_ms

    def document(self) -> dict[str, Any]:
        """The JSON contract of ``bench``: case, batch, tokens, median_ms, tok_s; what else was measured after them."""
        document: dict[str, Any] = {
            "case": self.case,
            "batch": self.batch,
            "tokens": self.tokens,
            "median_ms": round(self.median_ms, 4),
            "tok_s": round(self.tok_s, 2),
        }
        if self.floor_ms is not None and self.floor_share is not None:
            document |= {
                "floor_ms": round(self.floor_ms, 4),
                "floor_share": round(self.floor_share, 4),
                "floor_by": self.floor_by,
            }
        document |= {key: round(value, 4) for key, value in self.extra.items()}
        if self.gathers is not None:
            document["gather"] = self.gathers.document()
        if self.peers:
            document["peers"] = [peer.document(self.batch, self.tokens) for peer in self.peers]
        return document


@dataclass(frozen=True)
class Effort:
    """How often to run: at least ``least`` times, then on until ``budget_s`` is used up or ``most`` runs are in.

    The median of many short runs, or of a few long ones, at a bounded price.
    """

    least: int = 5
    most: int = 200
    budget_s: float = 2.0

    def rounds(self) -> list[Effort]:
        """The same effort over up to four rounds, every one with at least one run."""
        count = min(4, self.least)
        shares = [
            (self.least // count + (i < self.least % count), self.most // count + (i < self.most % count))
            for i in range(count)
        ]
        return [Effort(least, max(least, top), self.budget_s / count) for least, top in shares]


def timed(work: Callable[[], object]) -> Timed:
    """``work`` with a clock around it; its results must be there when it returns."""

    def run() -> float:
        started = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - started)

    return run


def measure_ms(work: Timed, effort: Effort) -> list[float]:
    """Ms of each run. The caller warms up."""
    samples: list[float] = []
    used_ms = 0.0
    while len(samples) < effort.least or (used_ms < 1000 * effort.budget_s and len(samples) < effort.most):
        samples.append(work())
        used_ms += samples[-1]
    return samples


def interleaved_ms(
    works: Sequence[Timed], effort: Effort, progress: Callable[[int, int], None] | None = None
) -> list[list[float]]:
    """Ms of each run of each work, in rounds that go through them forwards and backwards (A B, B A, …).

    What changes slowly on the machine then touches all of them alike. ``progress(done, total)`` counts works.
    """
    samples: list[list[float]] = [[] for _ in works]
    rounds = effort.rounds()
    for index, part in enumerate(rounds):
        order = range(len(works)) if index % 2 == 0 else range(len(works) - 1, -1, -1)
        for turn, place in enumerate(order):
            if progress is not None:
                progress(index * len(works) + turn, len(rounds) * len(works))
            samples[place] += measure_ms(works[place], part)
    return samples


def median_ms(samples: Sequence[float]) -> float:
    """The median of the samples; robust against the odd run that shared its core."""
    return statistics.median(samples)
