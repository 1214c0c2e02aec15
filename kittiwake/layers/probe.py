"""The load-time probe: which products have equal bits on this machine, and from how many rows torch is faster.

"Probe, do not trust": for every weight shape torch's product is compared bit for bit with our K-in-order kernel at many
row counts. Where some block of the sum over K makes them equal, both serve the shape; where none does, ours serves all
row counts. Results are cached by processor, versions, threads and shape.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from kittiwake.device import cache_dir, processor_name
from kittiwake.layers.linear import LinearGroup, Pick, Product, padded, threads_in_force
from kittiwake.ops.jit import kernels_digest
from kittiwake.progress import Progress

PROBE_ROWS = (4, 7, 8, 12, 17, 20, 28, 36, 52, 64, 68, 100, 132, 257, 508, 512, 516)
TIMED_ROWS = (8, 16, 32, 64, 128, 256)
_ENOUGH_COLUMNS = 16384
_SAFE_BLOCK = 192
_LIBRARY_SETTINGS = ("MKL_", "ATEN_", "DNNL_", "ONEDNN_", "OPENBLAS_")

Shape = tuple[int, int]
"""(K, N) of a product."""


def pick_products(shapes: Iterable[Shape], threads: int, progress: Progress | None = None) -> dict[Shape, Pick]:
    """A pick for every (K, N), from the cache where it stands there."""
    wanted = sorted(set(shapes))
    path = cache_dir() / "probe" / f"{_machine_key(threads)}.json"
    known = _read_cache(path)
    fresh = False
    for index, shape in enumerate(wanted):
        if progress is not None:
            progress("probing products", index, len(wanted))
        if shape not in known:
            known[shape] = probe_shape(shape, threads)
            fresh = True
    if fresh:
        _write_cache(path, known)
        _give_memory_back()
    if progress is not None:
        progress("probing products", len(wanted), len(wanted))
    return {shape: known[shape] for shape in wanted}


def _give_memory_back() -> None:
    """Ask the C library to return what the probe freed, so that loading does not come on top of it (glibc only)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def probe_shape(shape: Shape, threads: int) -> Pick:
    """Compare and time one (K, N) now, without the cache."""
    depth, columns = shape
    # columns are summed one by one, in tiles: some of them stand for a very wide product
    columns = min(columns, _ENOUGH_COLUMNS)
    generator = torch.Generator().manual_seed(depth * 1_000_003 + columns)
    weight = torch.randn(columns, depth, generator=generator)
    x = _hostile_rows(max(PROBE_ROWS), depth, generator)
    with threads_in_force(threads):
        for k_block in _candidate_blocks(depth):
            group = _group(weight, k_block, threads)
            if all(_same_bits(group, x, rows) for rows in PROBE_ROWS):
                return Pick(k_block, _crossover(group, x))
    return Pick(_SAFE_BLOCK, 0)


def _hostile_rows(rows: int, depth: int, generator: torch.Generator) -> np.ndarray:
    """Random rows with exponents from 2**-20 to 2**20, so that the order of a sum shows in its bits."""
    scale = torch.exp2(torch.randint(-20, 21, (padded(rows), depth), generator=generator).float())
    return (torch.randn(padded(rows), depth, generator=generator) * scale).numpy()


def _candidate_blocks(depth: int) -> list[int]:
    """Blocks of the sum over K to try, the likeliest first; all that reach K are the same."""
    halves = [-(-depth // parts) for parts in (2, 3, 4)]
    blocks = [192, 256, 384, 128, 320, 336, 512, 96, 64, 768, 1024]
    blocks += [-(-half // 4) * 4 for half in halves] + halves + [depth]
    seen: list[int] = []
    for block in blocks:
        if (effective := min(block, depth)) not in seen:
            seen.append(effective)
    return seen


def _group(weight: torch.Tensor, k_block: int, threads: int) -> LinearGroup:
    columns, depth = weight.shape
    product = Product("probe", depth, columns, 0)
    group = LinearGroup([product], {(depth, columns): Pick(k_block, 1)}, "fp32", threads)
    group.load("probe", weight)
    return group


def _same_bits(group: LinearGroup, x: np.ndarray, rows: int) -> bool:
    narrow = np.full((padded(rows), group.columns), np.nan, dtype=np.float32)
    wide = np.full_like(narrow, np.nan)
    part = x[: padded(rows)].copy()
    part[rows:] = 0
    group.run_narrow(part, rows, narrow)
    group.run_wide(part, rows, wide)
    return bool(np.array_equal(narrow[:rows].view(np.int32), wide[:rows].view(np.int32)))


def _crossover(group: LinearGroup, x: np.ndarray) -> int:
    """The timed row count from which torch gains the most in all; beyond the largest one, torch is taken anyway.

    Gains are ratios, summed from the largest count down: one disturbed timing then moves nothing by itself.
    """
    best, gain, best_gain = TIMED_ROWS[-1] * 2, 0.0, 0.0
    for rows in reversed(TIMED_ROWS):
        y = np.zeros((padded(rows), group.columns), dtype=np.float32)
        part = x[: padded(rows)]
        narrow = _best_seconds(lambda p=part, r=rows, o=y: group.run_narrow(p, r, o))  # type: ignore[misc]
        wide = _best_seconds(lambda p=part, r=rows, o=y: group.run_wide(p, r, o))  # type: ignore[misc]
        gain += math.log(narrow / wide)
        if gain >= best_gain:
            best, best_gain = rows, gain
    return best


def _best_seconds(run: Callable[[], None]) -> float:
    run()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def _machine_key(threads: int) -> str:
    # MKL_CBWR and the like choose other kernels inside the library, with other bits
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_LIBRARY_SETTINGS))
    text = "|".join(
        (
            processor_name(),
            torch.__version__,
            np.__version__,
            kernels_digest(),
            str(threads),
            str(PROBE_ROWS),
            "2",
            *settings,
        )
    )
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _read_cache(path: Path) -> dict[Shape, Pick]:
    """What an earlier load found; an unreadable cache is no cache."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        picks = {(e["depth"], e["columns"]): Pick(e["k_block"], e["wide_from"]) for e in entries}
        numbers = [(number, 1) for shape, pick in picks.items() for number in (*shape, pick.k_block)]
        numbers += [(pick.wide_from, 0) for pick in picks.values()]
        makes_sense = all(type(number) is int and number >= low for number, low in numbers)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return picks if makes_sense else {}


def _write_cache(path: Path, picks: dict[Shape, Pick]) -> None:
    entries = [
        {"depth": depth, "columns": columns, "k_block": p.k_block, "wide_from": p.wide_from}
        for (depth, columns), p in sorted(picks.items())
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(entries, file)
        Path(name).replace(path)
    except OSError:
        pass  # a cache that cannot be written costs the next load a second, nothing else
