"""How fast the rows of an n-gram table come from a disk, and how much of that a forward hides.

    python lab/ngram_gather.py FOLDER [--gib 8.25] [--rounds 3] [--readers 32] [--json FILE] [--keep]

Writes a table of random bfloat16 rows (160 numbers, the released model's) to FOLDER, measures, and deletes it. Every
gather asks for 16 rows a token of tokens that no gather has asked for before, so no row comes from the pool's own cache
by more than chance. "Cold" for direct reads: they go past the page cache, and the file's pages were dropped first;
for buffered reads the pages are dropped before every gather; "warm" repeats the gather just made.

The forward is synthetic: float32 products on every core for a set time, layer 0's share of 48 before the rows are
waited for, as in the real one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from kittiwake.device import usable_cores, waiting_environment

os.environ.update(waiting_environment())  # before torch and numba come in, as the command line does

import numpy as np
import torch

from kittiwake.bench.machine import machine_line
from kittiwake.checkpoints.reader import FilePlace
from kittiwake.checkpoints.row_table import RowTable
from kittiwake.engine.batch import Batch
from kittiwake.families.qwen4exp.ngram import NgramHash, next_history
from kittiwake.families.qwen4exp.ngram_reader import NgramReader

ROW_VALUES, ROW_BYTES, HEADS = 160, 320, 16
VOCAB, EOS = 248_320, 248_044
LAYERS = 48
CHUNKS = (2048, 4096)
NONE = np.full((1, 2), -1, dtype=np.int64)


def write_table(path: Path, rows: int) -> float:
    """Random finite bfloat16 rows, on the disk when it returns; seconds it took."""
    rng, began = np.random.default_rng(1), time.perf_counter()
    left = rows * ROW_BYTES
    with path.open("xb", buffering=0) as file:
        while left:
            block = np.frombuffer(rng.bytes(min(left, 64 << 20)), dtype=np.uint16)
            # without the highest bit of the exponent every number is finite
            left -= file.write((block & np.uint16(0xBFFF)).data)
        os.fsync(file.fileno())
    drop_pages(path)
    return time.perf_counter() - began


def drop_pages(path: Path) -> None:
    """Have the system forget the file's pages."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def raw_reads_per_second(path: Path, threads: int, seconds: float = 3.0) -> float:
    """What the disk gives: random direct reads of 4 KiB by a pool of Python threads that know nothing of tables."""
    pages, until = path.stat().st_size // 4096, time.perf_counter() + seconds

    def read(seed: int) -> int:
        rng, count = np.random.default_rng(seed), 0
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, 4096) as page:
            while time.perf_counter() < until:
                for place in rng.integers(0, pages, 64):
                    os.preadv(descriptor, [page], int(place) * 4096)
                count += 64
        os.close(descriptor)
        return count

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(read, range(threads)))
    return total / (time.perf_counter() - began)


class Prompt:
    """Random tokens that go on for ever, in chunks."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng([7, seed])

    def chunk(self, count: int) -> np.ndarray:
        return self._rng.integers(0, VOCAB, count)


def batch_of(tokens: np.ndarray, following: np.ndarray | None = None) -> Batch:
    """A lone prompt's chunk, and the one expected next."""
    rows = np.array([0, len(tokens)])
    ahead = () if following is None else ((1, following),)
    return Batch(tokens, rows, np.array([1]), np.zeros(0, np.int64), ahead=ahead)


def gathers(
    make: Callable[[], NgramReader], chunk: int, rounds: int, seed: int, before: Callable[[], None]
) -> dict[str, Any]:
    """Gathers with nothing beside them: medians, and reads a second."""
    reader, prompt = make(), Prompt(seed)
    reader.take(reader.begin(batch_of(prompt.chunk(64)), NONE))  # kernels compiled, threads awake
    times, rates, figures = [], [], {}
    for _ in range(rounds):
        tokens = prompt.chunk(chunk)
        before()
        stats, began = reader.stats, (reader.stats.gather_ms, reader.stats.reads, reader.stats.read_bytes)
        reader.take(reader.begin(batch_of(tokens), NONE))
        spent, reads = stats.gather_ms - began[0], stats.reads - began[1]
        times.append(spent)
        rates.append(reads / spent * 1e3)
        figures = {"reads": reads, "read_bytes": stats.read_bytes - began[2]}
    last = tokens
    began_ms = reader.stats.gather_ms
    reader.take(reader.begin(batch_of(last), NONE))
    again = reader.stats.gather_ms - began_ms
    reader.close()
    return {
        "gather_ms": round(statistics.median(times), 1),
        "gather_ms_all": [round(t, 1) for t in times],
        "reads_per_s": round(statistics.median(rates)),
        "same_rows_again_ms": round(again, 1),
        **figures,
    }


class Forward:
    """Float32 products on every core for a set time."""

    def __init__(self) -> None:
        self._left, self._right = torch.randn(2, 512, 512).unbind()

    def run(self, milliseconds: float) -> None:
        until = time.perf_counter() + milliseconds / 1e3
        while time.perf_counter() < until:
            torch.mm(self._left, self._right)


def hidden(
    reader: NgramReader, forward_ms: float, chunk: int, rounds: int, seed: int, alone_ms: float
) -> dict[str, Any]:
    """A prompt of ``rounds + 1`` chunks behind forwards of this length; the first chunk, which nothing hides, left out."""
    prompt, forward = Prompt(seed), Forward()
    chunks = [prompt.chunk(chunk) for _ in range(rounds + 2)]
    history, rows = NONE, []
    for number in range(rounds + 1):
        tokens = chunks[number]
        waited, gathered = reader.stats.wait_ms, reader.stats.gather_ms
        ticket = reader.begin(batch_of(tokens, chunks[number + 1]), history)
        forward.run(forward_ms / LAYERS)
        reader.take(ticket)
        forward.run(forward_ms * (LAYERS - 1) / LAYERS)
        history = next_history(tokens, np.array([0, chunk]), history)
        if number:
            rows.append(
                {
                    "wait_ms": reader.stats.wait_ms - waited,
                    "gather_ms": reader.stats.gather_ms - gathered,
                }
            )
    waits, gather_ms = [row["wait_ms"] for row in rows], [row["gather_ms"] for row in rows]
    allowed = [max(0.0, gathered - forward_ms) + 0.1 * gathered for gathered in gather_ms]
    return {
        "forward_ms": round(forward_ms, 1),
        "gather_alone_ms": round(alone_ms, 1),
        "gather_ms": [round(value, 1) for value in gather_ms],
        "wait_ms": [round(value, 2) for value in waits],
        "allowed_wait_ms": [round(value, 1) for value in allowed],
        "holds": all(wait <= most for wait, most in zip(waits, allowed, strict=True)),
        "hidden_share": round(1 - sum(waits) / sum(gather_ms), 4),
        "ahead_used": reader.stats.ahead_used,
    }


def digest(reader: NgramReader, tokens: np.ndarray, chunk: int) -> str:
    """sha-256 of the rows of a prompt read in chunks, the look-ahead in use."""
    history, found = NONE, hashlib.sha256()
    for first in range(0, len(tokens), chunk):
        part, following = tokens[first : first + chunk], tokens[first + chunk : first + 2 * chunk]
        rows = reader.take(reader.begin(batch_of(part, following), history))[: len(part)]
        found.update(np.ascontiguousarray(rows).data)
        history = next_history(part, np.array([0, len(part)]), history)
    return found.hexdigest()


def digests(make: Callable[..., NgramReader]) -> dict[str, Any]:
    """The same prompt at chunk sizes, with and without look-ahead, direct and buffered: one digest for all."""
    tokens = Prompt(99).chunk(8192)
    tokens[::97] = EOS
    found = {}
    for looks_ahead in (True, False):
        for chunk in (64, 512, 2048, 4096, 8192):
            reader = make(looks_ahead=looks_ahead, cache_bytes=0)
            found[f"chunk {chunk}, {'with' if looks_ahead else 'without'} look-ahead"] = digest(reader, tokens, chunk)
            reader.close()
    reader = make(is_direct=False)
    found["chunk 2048, buffered, cached"] = digest(reader, tokens, 2048)
    reader.close()
    return {"sha256": sorted(set(found.values())), "ways": list(found), "is_one": len(set(found.values())) == 1}


def tell(key: str, results: dict[str, Any]) -> None:
    """Say how far it has come."""
    sys.stderr.write(f"{key}: {results[key]}\n")


def measure(path: Path, hashing: NgramHash, rounds: int, readers: int) -> dict[str, Any]:
    table = RowTable([FilePlace(path, 0, hashing.total_rows(128) * ROW_BYTES, "BF16")], ROW_VALUES)

    def make(**options: Any) -> NgramReader:
        return NgramReader(table, hashing, **{"readers": readers, **options})

    first = make()
    results: dict[str, Any] = {"table": first.describe()}
    first.close()
    results["raw_4k_reads_per_s"] = {threads: round(raw_reads_per_second(path, threads)) for threads in (1, 8, 32)}
    seed = 0
    for chunk in CHUNKS:
        for name, options, before in (
            ("direct, cold", {}, lambda: None),
            ("buffered, cold", {"is_direct": False, "cache_bytes": 0}, lambda: drop_pages(path)),
        ):
            seed += 1
            results[f"{name}, {chunk} tokens"] = gathers(lambda o=options: make(**o), chunk, rounds, seed, before)
            tell(f"{name}, {chunk} tokens", results)
        alone = results[f"direct, cold, {chunk} tokens"]["gather_ms"]
        for ratio in (0.5, 1.0, 1.5):
            seed += 1
            reader = make()
            key = f"behind a forward of {ratio} gathers, {chunk} tokens"
            results[key] = hidden(reader, ratio * alone, chunk, rounds, seed, alone)
            reader.close()
            tell(key, results)
    for count in (8, 16, 64):
        seed += 1
        results[f"{count} readers, 2048 tokens"] = gathers(lambda c=count: make(readers=c), 2048, 2, seed, lambda: None)
    results["same bytes"] = digests(make)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=8.25)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--readers", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", action="store_true", help="leave the table, and use it if it is there")
    options = parser.parse_args()
    torch.set_num_threads(usable_cores())
    hashing = NgramHash.derive(VOCAB, 3, 8, int(options.gib * 2**30 / ROW_BYTES / HEADS), 0, 1234, EOS)
    path = options.folder / "ngram_table.rows"
    seconds = 0.0
    if not (options.keep and path.exists()):
        seconds = write_table(path, hashing.total_rows(128))
    try:
        results = {
            "machine": machine_line(usable_cores()),
            "python": platform.python_version(),
            "load_average": os.getloadavg(),
            "write_s": round(seconds, 1),
            **measure(path, hashing, options.rounds, options.readers),
        }
    finally:
        if not options.keep:
            path.unlink()
    text = json.dumps(results, indent=1)
    sys.stdout.write(text + "\n")
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
