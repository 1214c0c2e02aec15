"""What the scripts for a card share: captured launches, interleaved medians of their replays, the document they write."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from kittiwake.bench.machine import machine_line
from kittiwake.device import usable_cores

Launch = Callable[[], object]
L2_BYTES = 128 * 2**20
"""Inputs that are walked through in turn take at least this much, so that none is found in a card's L2."""


class Report:
    """Prints lines as they come, with the seconds since the start, and keeps the values for a JSON file."""

    def __init__(self, description: str | None, parts: Sequence[str], arguments: Sequence[str] | None) -> None:
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--parts", default=",".join(parts), help=f"some of {','.join(parts)}")
        parser.add_argument("--json", type=Path, help="where the values go")
        options = parser.parse_args(arguments)
        self._path: Path | None = options.json
        self.parts: list[str] = options.parts.split(",")
        if unknown := set(self.parts) - set(parts):
            parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(parts)}")
        self._began = time.perf_counter()
        self.failures: list[str] = []
        self.document: dict[str, Any] = {"machine": machine_line(usable_cores(), "cuda")}
        self.say(self.document["machine"])

    def say(self, line: str) -> None:
        """A line, at once."""
        sys.stdout.write(f"{line}  [{time.perf_counter() - self._began:.0f} s]\n")
        sys.stdout.flush()

    def check(self, name: str, is_right: bool) -> bool:
        """Keep a check's outcome; one that fails is printed and fails the script."""
        self.document.setdefault("checks", {})[name] = is_right
        if not is_right:
            self.failures.append(name)
            self.say(f"WRONG: {name}")
        return is_right

    def put(self, part: str, name: str, value: Any) -> None:
        """Keep a value; the file is written again, so that a run that is cut off leaves what it had."""
        self.document.setdefault(part, {})[name] = value
        self.document["seconds"] = round(time.perf_counter() - self._began, 1)
        if self._path is not None:
            self._path.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")

    def each(self, works: Mapping[str, Callable[[], None]]) -> int:
        """Run the parts that were asked for; one that raises is told and the rest still run. The exit status."""
        for part in self.parts:
            try:
                works[part]()
            except Exception as err:
                self.check(f"{part}: {type(err).__name__}: {str(err)[:300]}", False)
            with suppress(RuntimeError):  # after an error that a card does not forget
                torch.cuda.empty_cache()
        self.say(f"{len(self.document.get('checks', {}))} checks, {len(self.failures)} wrong")
        self.put("outcome", "wrong", self.failures)
        return 1 if self.failures else 0


def attempted(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a part found; an error is told in its place, so that the parts behind it still run."""
    try:
        return work()
    except Exception as err:
        with suppress(RuntimeError):  # after an error that a card does not forget
            torch.cuda.empty_cache()
        return {"ok": False, "error": f"{type(err).__name__}: {str(err)[:300]}"}


def each_once(works: Sequence[Launch]) -> None:
    """Run each, side by side, so that what it launches is compiled; one that cannot run is told where it is wanted."""

    def once(work: Launch) -> None:
        with torch.cuda.device(0), suppress(Exception):
            work()

    with ThreadPoolExecutor(min(16, usable_cores())) as pool:
        list(pool.map(once, works))


def captured(launches: Sequence[Launch]) -> Launch:
    """The replay of a graph of the launches in order, after a run to compile and to warm up."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph.replay


def medians_us(works: Mapping[Any, tuple[Launch, int]], rounds: int = 5) -> dict[Any, float]:
    """Median µs of each work divided by its count, timed by events in the order A B C C B A in every round."""
    samples: dict[Any, list[float]] = {key: [] for key in works}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for work, _ in works.values():
        work()
    for key in [*works, *reversed(works)] * rounds:
        work, count = works[key]
        begin.record()
        work()
        end.record()
        end.synchronize()
        samples[key].append(begin.elapsed_time(end) * 1e3 / count)
    return {key: statistics.median(taken) for key, taken in samples.items()}


def copies_of(nbytes: int, most: int = 64) -> int:
    """How many inputs of so many bytes are walked through in turn."""
    return max(2, min(most, -(-L2_BYTES // nbytes)))
