"""Figures of one process, and of several that share a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

from kittiwake.engine.prefix import CacheStats, DiskStats
from kittiwake.engine.stats import EngineStats
from kittiwake.server.engine_client import AnswerEnd
from kittiwake.server.metrics import _LEVELS, AnswerMetrics, EngineFigures, render_metrics


def _figures(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#"]
    return {name: float(value) for name, _, value in lines}


@dataclass
class Inner:
    entries: int = 3
    hits: dict[str, int] = field(default_factory=lambda: {"memory": 2, "disk": 1})


@dataclass
class Stats:
    waiting: int = 5
    drawn: int = 100
    test_cache: Inner | None = None


def test_engine_figures_are_levels_and_counts() -> None:
    figures = EngineFigures()
    figures.update(Stats(test_cache=Inner()), "kittiwake_test_")
    figures.update(Stats(waiting=2, drawn=130, test_cache=Inner(1, {"memory": 4, "disk": 1})), "kittiwake_test_")
    found = _figures(render_metrics())
    assert found["kittiwake_test_waiting"] == 2
    assert found["kittiwake_test_drawn_total"] == 130
    assert found["kittiwake_test_test_cache_entries"] == 1
    assert found['kittiwake_test_test_cache_hits_total{kind="memory"}'] == 4


def test_every_yes_or_no_of_the_engine_can_go_back() -> None:
    all_of_them = [one for kind in (EngineStats, CacheStats, DiskStats) for one in fields(kind)]
    flags = {one.name for one in all_of_them if one.type == "bool"}
    assert "is_paused" in flags <= _LEVELS


def test_an_engine_that_began_anew_goes_on_counting() -> None:
    EngineFigures().update(Stats(drawn=10), "kittiwake_again_")
    EngineFigures().update(Stats(drawn=4), "kittiwake_again_")
    assert _figures(render_metrics())["kittiwake_again_drawn_total"] == 14


def test_answers_are_counted_by_reason_and_cache() -> None:
    before = _figures(render_metrics())
    metrics = AnswerMetrics()
    metrics.first_token(0.02)
    metrics.tokens(3, 0.03)
    metrics.ended(AnswerEnd("stop", queue_ms=2.0, cached_tokens=7, cache="hit"))
    metrics.ended(AnswerEnd("length", cache="unknown"))
    after = _figures(render_metrics())

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown('kittiwake_answers_total{reason="stop"}') == grown('kittiwake_answers_total{reason="length"}') == 1
    assert grown('kittiwake_cache_lookups_total{result="hit"}') == 1
    assert grown('kittiwake_cache_lookups_total{result="unknown"}') == 1
    assert grown("kittiwake_cached_prompt_tokens_total") == 7
    assert grown("kittiwake_inter_token_seconds_count") == 3
    assert grown("kittiwake_ttft_seconds_count") == 1


def test_processes_that_share_a_folder_are_added_up(tmp_path: Path) -> None:
    code = (
        "from kittiwake.server import metrics\n"
        "metrics.http_requests.labels('GET', '/x', '200').inc(2)\nmetrics.http_in_flight.inc()\n"
        "metrics.step_seconds.observe(0.01)\nprint(metrics.render_metrics())"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    texts = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    ]
    found = _figures(texts[-1])
    assert found['kittiwake_http_requests_total{method="GET",route="/x",status="200"}'] == 6
    assert found["kittiwake_step_seconds_count"] == 3
