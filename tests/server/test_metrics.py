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
from kittiwake.server.figure_files import FOLDER_VARIABLE, ROOM_BYTES, give_back
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


FILL = """
import itertools, os
from kittiwake.server import metrics
from kittiwake.server.app import create_app
from kittiwake.server.worker import _CLOSED, _METHODS, _UNKNOWN
from kittiwake.config import ServerConfig
from kittiwake.engine.prefix import CacheStats, DiskStats
from kittiwake.engine.stats import EngineStats
from tests.server.stub_engine import StubEngine

routes = {route.path for route in create_app(StubEngine(), ServerConfig()).state.routes} | {_UNKNOWN, "/docs", "/openapi.json"}
for route, method, status in itertools.product(routes, sorted(_METHODS)[:4], range(8)):
    metrics.http_requests.labels(method, route, str(400 + status)).inc()
for route in routes:
    metrics.http_seconds.labels(route).observe(1.0)
metrics.http_in_flight.inc()
disk = DiskStats(*range(12))
cache = CacheStats(1, 2, 3, {"memory": 1, "disk": 2, "shared": 3}, {"unknown": 1, "changed": 2}, 4, 5, 6, disk)
metrics.EngineFigures().update(EngineStats(1, 2, 3, 4, 5, {"stop": 1, "length": 2}, 6, 7, 8, 9, cache))
print(os.getpid())
"""


def _run(code: str, folder: Path) -> str:
    environment = {**os.environ, FOLDER_VARIABLE: str(folder)}
    line = [sys.executable, "-c", code]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout


def test_figures_have_their_room_on_the_disk_before_it_may_be_full(tmp_path: Path) -> None:
    pid = int(_run(FILL, tmp_path))
    files = {path.name: path.stat() for path in tmp_path.iterdir()}
    assert {name: one.st_size for name, one in files.items()} == {
        f"{kind}_{pid}.db": size for kind, size in ROOM_BYTES.items()
    }
    assert all(one.st_blocks * 512 >= one.st_size for one in files.values())
    give_back(str(tmp_path), pid)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < sum(ROOM_BYTES.values()) / 2
    asked = "from kittiwake.server import metrics\nprint(metrics.render_metrics())"
    found = _figures(_run(asked, tmp_path))
    assert sum(value for name, value in found.items() if name.startswith("kittiwake_http_requests_total")) > 400
    assert found['kittiwake_http_request_seconds_count{route="/v1/completions"}'] == 1


def test_a_process_without_room_for_its_figures_keeps_them_to_itself(tmp_path: Path) -> None:
    full = (
        "import errno, os\n"
        "def fail(*_): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "os.posix_fallocate = fail\n"
        "from kittiwake.server import metrics\n"
        "metrics.http_requests.labels('GET', '/x', '200').inc(2)\n"
        "metrics.log_missing_room()\n"
        "print(metrics.render_metrics())"
    )
    assert _figures(_run(full, tmp_path))['kittiwake_http_requests_total{method="GET",route="/x",status="200"}'] == 2
    assert not list(tmp_path.iterdir())
