"""Prometheus figures of all processes of a server.

The parent sets PROMETHEUS_MULTIPROC_DIR for its children before they import this: each then keeps its figures in a file of
that folder, and whichever worker is asked adds up all of them. Without it (tests, one process) they are kept in memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from kittiwake.server.engine_client import AnswerEnd
from kittiwake.server.figure_files import FOLDER_VARIABLE, take_room

_NO_ROOM = take_room()  # before prometheus_client makes the files

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest  # noqa: E402
from prometheus_client.multiprocess import MultiProcessCollector  # noqa: E402

logger = logging.getLogger("kittiwake.server")

REGISTRY = CollectorRegistry()

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 5)
_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STEP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.5, 1, 2.5, 10)
_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)

http_requests = Counter(
    "kittiwake_http_requests", "HTTP requests answered", ["method", "route", "status"], registry=REGISTRY
)
http_seconds = Histogram(
    "kittiwake_http_request_seconds", "From a request to the end of its answer", ["route"], buckets=_LATENCY_S,
    registry=REGISTRY,
)  # fmt: skip
http_in_flight = Gauge(
    "kittiwake_http_requests_in_flight", "HTTP requests being answered", multiprocess_mode="livesum", registry=REGISTRY
)
_ttft = Histogram("kittiwake_ttft_seconds", "From a request to its first token", buckets=_TTFT_S, registry=REGISTRY)
_inter_token = Histogram(
    "kittiwake_inter_token_seconds", "Between two tokens of an answer", buckets=_INTER_TOKEN_S, registry=REGISTRY
)
_queue = Histogram("kittiwake_queue_seconds", "Waiting for a slot", buckets=_TTFT_S, registry=REGISTRY)
_answers = Counter("kittiwake_answers", "Answers that ended", ["reason"], registry=REGISTRY)
_lookups = Counter(
    "kittiwake_cache_lookups", "Prompts looked up in the state cache: hit, or why not", ["result"], registry=REGISTRY
)
_cached_tokens = Counter(
    "kittiwake_cached_prompt_tokens", "Prompt tokens whose state came from the cache", registry=REGISTRY
)
_slow_readers = Counter(
    "kittiwake_slow_readers_dropped", "Answers broken off: their reader was too slow", registry=REGISTRY
)

step_seconds = Histogram("kittiwake_step_seconds", "One step of the engine", buckets=_STEP_S, registry=REGISTRY)
batch_width = Histogram("kittiwake_batch_width", "Sequences in one step", buckets=_WIDTHS, registry=REGISTRY)
rows = Counter("kittiwake_rows", "Rows run by the engine", ["kind"], registry=REGISTRY)


class AnswerMetrics:
    """What a worker sees of its answers."""

    def first_token(self, seconds: float) -> None:
        """The first token came this long after the request."""
        _ttft.observe(seconds)

    def tokens(self, count: int, seconds: float) -> None:
        """So many more tokens came together, this long after the one before."""
        for _ in range(count):
            _inter_token.observe(seconds / count)

    def ended(self, end: AnswerEnd) -> None:
        """An answer ended."""
        _answers.labels(end.reason).inc()
        _queue.observe(end.queue_ms / 1e3)
        if end.cache:
            _lookups.labels(end.cache).inc()
        if end.cached_tokens:
            _cached_tokens.inc(end.cached_tokens)

    def count_slow_reader(self) -> None:
        """An answer was broken off because nobody read it."""
        _slow_readers.inc()


# Figures of the engine that go up and down; its others are counts since its start.
_LEVELS = frozenset(
    ("waiting", "held", "running", "slots", "free_slots", "entries", "bytes", "budget_bytes", "is_paused", "queued")
)


_engine_metrics: dict[str, Gauge | Counter] = {}


class EngineFigures:
    """The engine's own statistics as gauges and counters, brought up to date when they are asked for."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], float] = {}

    def update(self, stats: Any, prefix: str = "kittiwake_engine_") -> None:
        """Take over the numbers of a dataclass; a mapping of numbers is told by label, a dataclass in it by longer names."""
        for field in fields(stats):
            value, name = getattr(stats, field.name), prefix + field.name
            if isinstance(value, Mapping):
                for kind, count in value.items():
                    self._count(name, str(kind), count)
            elif is_dataclass(value):
                self.update(value, f"{name}_")
            elif isinstance(value, int | float) and field.name in _LEVELS:
                self._gauge(name).set(value)
            elif isinstance(value, int | float):
                self._count(name, "", value)

    def _gauge(self, name: str) -> Gauge:
        if name not in _engine_metrics:
            text = _words(name)
            _engine_metrics[name] = Gauge(name, text, multiprocess_mode="livemostrecent", registry=REGISTRY)
        found = _engine_metrics[name]
        assert isinstance(found, Gauge)
        return found

    def _count(self, name: str, kind: str, total: float) -> None:
        if name not in _engine_metrics:
            _engine_metrics[name] = Counter(name, _words(name), ["kind"] if kind else [], registry=REGISTRY)
        metric = _engine_metrics[name]
        assert isinstance(metric, Counter)
        more = total - self._told.get((name, kind), 0.0)
        self._told[name, kind] = total
        (metric.labels(kind) if kind else metric).inc(max(0.0, more))


def _words(name: str) -> str:
    return name.removeprefix("kittiwake_").replace("_", " ")


def log_missing_room() -> None:
    """Say so where this process keeps its figures to itself."""
    if _NO_ROOM:
        logger.warning(
            "the figures of this process are not told by the others: there is no room for them: %s", _NO_ROOM
        )


def render_metrics() -> str:
    """The text that Prometheus reads: of all processes where they share a folder, else of this one."""
    if not os.environ.get(FOLDER_VARIABLE):
        return generate_latest(REGISTRY).decode()
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry).decode()
