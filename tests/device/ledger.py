"""What a run on a device proved and measured: kept by test, told by its report, gathered for one JSON document."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kittiwake.bench.machine import describe_card, package_versions

PROPERTY = "device ledger"
"""Under this name a test's report carries its ledger, from another process too."""
_WRITE_AFTER_S = 1.0
_MESSAGE_CHARACTERS = 400


class Ledger:
    """Of one test: cases by the law they are of, figures by name."""

    def __init__(self) -> None:
        self.cases: Counter[str] = Counter()
        self.differing: Counter[str] = Counter()
        self.figures: dict[str, float] = {}

    def case(self, law: str, is_same: bool) -> None:
        """One case of a law, and whether it held."""
        self.cases[law] += 1
        self.differing[law] += not is_same

    def holds(self, law: str) -> bool:
        """Whether this test had cases of a law and none of them differed."""
        return self.cases[law] > 0 and self.differing[law] == 0

    def figure(self, name: str, value: float) -> float:
        """Keep a measured value; of several under one name the largest."""
        self.figures[name] = max(float(value), self.figures.get(name, -math.inf))
        return value

    def take(self) -> dict[str, dict[str, float]]:
        """All of it as JSON values; the next test begins with nothing."""
        taken = {"cases": dict(self.cases), "differing": dict(self.differing), "figures": self.figures}
        self.cases, self.differing, self.figures = Counter(), Counter(), {}
        return taken


LEDGER = Ledger()


class Summary:
    """All tests of a run, as their reports come; written again and again, so that a run that is cut off leaves what it had."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._ledger = Ledger()
        self._tests: Counter[str] = Counter()
        self._failures: dict[str, str] = {}
        self._seconds: Counter[str] = Counter()
        self._began = self._written = time.perf_counter()
        self._machine: dict[str, Any] = {}

    def add(self, report: pytest.TestReport) -> None:
        """Take in what a report tells."""
        _, _, name = report.nodeid.rpartition("/")
        if report.when == "call" or report.outcome != "passed":
            self._tests[report.outcome] += 1
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._failures[name] = str(getattr(crash, "message", report.longrepr))[:_MESSAGE_CHARACTERS]
        self._seconds[name] += report.duration
        for key, told in report.user_properties:
            if key == PROPERTY:
                self._ledger.cases.update(told["cases"])
                self._ledger.differing.update(told["differing"])
                for figure, value in told["figures"].items():
                    self._ledger.figure(figure, value)
        if time.perf_counter() - self._written > _WRITE_AFTER_S:
            self.write(is_complete=False)

    def write(self, *, is_complete: bool) -> None:
        """Write the document where one is wanted."""
        if self._path is None or not self._tests:
            return
        self._machine = self._machine or {"card": describe_card(), "packages": package_versions()}
        self._path.write_text(
            json.dumps(self.document() | {"complete": is_complete}, indent=1) + "\n", encoding="utf-8"
        )
        self._written = time.perf_counter()

    def document(self) -> dict[str, Any]:
        """JSON values; times in seconds, those of tests added up over all processes."""
        cases, differing = self._ledger.cases, self._ledger.differing
        return {
            **self._machine,
            "tests": dict(self._tests),
            "failures": self._failures,
            "cases": sum(cases.values()),
            "laws": {law: {"cases": count, "differing": differing[law]} for law, count in sorted(cases.items())},
            "figures": {name: _short(value) for name, value in sorted(self._ledger.figures.items())},
            "wall_s": round(time.perf_counter() - self._began, 1),
            "tests_s": round(sum(self._seconds.values()), 1),
            "slowest_s": {name: round(seconds, 1) for name, seconds in self._seconds.most_common(20)},
        }


def _short(value: float) -> float | str:
    return float(f"{value:.3g}") if math.isfinite(value) else str(value)
