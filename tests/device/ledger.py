"""What a run on a device proved and measured, for one JSON document at its end."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from kittiwake.bench.machine import describe_card, package_versions


class Ledger:
    """Cases by the law they are of, figures by name, tests by outcome."""

    def __init__(self) -> None:
        self.cases: Counter[str] = Counter()
        self.differing: Counter[str] = Counter()
        self.figures: dict[str, float] = {}
        self.tests: Counter[str] = Counter()
        self.failures: list[str] = []
        self.seconds: dict[str, float] = {}
        self.began = time.perf_counter()

    def case(self, law: str, is_same: bool) -> None:
        """One case of a law, and whether it held."""
        self.cases[law] += 1
        self.differing[law] += not is_same

    def holds(self, law: str) -> bool:
        """Whether a law had cases and none of them differed."""
        return self.cases[law] > 0 and self.differing[law] == 0

    def figure(self, name: str, value: float) -> float:
        """Keep a measured value; of several under one name the largest."""
        self.figures[name] = max(value, self.figures.get(name, value))
        return value

    def document(self) -> dict[str, Any]:
        """JSON values; times in seconds."""
        laws = {law: {"cases": count, "differing": self.differing[law]} for law, count in sorted(self.cases.items())}
        return {
            "card": describe_card(),
            "packages": package_versions(),
            "tests": dict(self.tests),
            "failures": self.failures,
            "cases": sum(self.cases.values()),
            "laws": laws,
            "figures": {name: float(f"{value:.3g}") for name, value in sorted(self.figures.items())},
            "wall_s": round(time.perf_counter() - self.began, 1),
            "slowest_s": {
                name: round(seconds, 1)
                for name, seconds in sorted(self.seconds.items(), key=lambda item: -item[1])[:12]
            },
        }


LEDGER = Ledger()
FOLDER = Path(__file__).parent
