"""qwen4exp on a card: the law and the errors on small shapes, then the speed of released layers by depth.

    python lab/qwen4exp_cuda_targets.py [--parts check,cpu,exact,speed] [--shape qwen4exp-8of48] [--dtype bf16]
                                        [--depths 0,4096,32768,131072] [--tuned] [--plain] [--profile] [--json FILE]
                                        [--cases "two n-gram layers"] [--dtypes fp32]

Random weights, drawn on the card; the n-gram table is small and lies in a temporary file. Depths are reached by reading
that many tokens. A time is a median, from the call to the logits' being on the host. Products that nothing is known of
take a kind for each row count without being timed, unless ``--tuned``; ``--plain`` keeps launches from overlapping.

Floors: what must be read and written at the measured rate of a copy, or multiplied at that of a wide product. A step
reads the weights of one token's experts, its state, the keys that it sees and every block key; a chunk reads all weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from card import attempted
from safetensors.torch import save_file

from kittiwake.bench.floors import Ceilings, Demand, measure_ceilings
from kittiwake.bench.machine import machine_line
from kittiwake.bench.qwen4exp_shapes import Qwen4ExpShape, qwen4exp_config, random_qwen4exp
from kittiwake.bench.random import RandomSource, RandomWeights, load_random
from kittiwake.config import EngineConfig
from kittiwake.device import usable_cores
from kittiwake.engine.batch import Batch
from kittiwake.engine.cuda_states import CudaStateTable
from kittiwake.engine.states import SavedState, new_states
from kittiwake.errors import DeviceError
from kittiwake.families.cuda_model import DTYPES
from kittiwake.families.qwen4exp import cuda_model
from kittiwake.families.qwen4exp.cuda_model import Qwen4ExpCuda
from kittiwake.families.qwen4exp.geometry import Geometry
from kittiwake.layers import cuda_probe
from kittiwake.load import load_model, load_source
from tests.device.untuned import untuned
from tests.families.qwen4exp_cases import CASES, ids_of
from tests.oracles.measure import relative_error

HEADS = Qwen4ExpShape(
    layers=4, width=256, attention_layers=(1, 3), heads=12, head_size=256, rotary_size=64, theta=1e7, index_size=128,
    budget=32, key_heads=4, value_heads=12, key_size=128, value_size=128, stream_rank=40, experts=64, experts_used=10,
    expert_width=80, shared_width=80, ngram_layers=(0, 2), ngram_heads=8, ngram_row=16,
)  # fmt: skip
FIXTURE = Path(__file__).parent.parent / "tests" / "fixtures" / "qwen4exp_transformers.npz"
LIMITS = {"fp32": 2e-5, "fp16": 5e-2, "bf16": 3e-1}
CHUNK = 4096
STEPS = 40


class Law:
    """Runs of one model that must have the same bits, and how many of the values compared had not."""

    def __init__(self, model: Qwen4ExpCuda, length: int, seed: int = 0) -> None:
        self.model, self._rng = model, np.random.default_rng(seed)
        self.vocab, self.ids = model.config.vocab_size, self._rng.integers(0, model.config.vocab_size, length).tolist()
        self.states = new_states(model, 20, 64 * model.state_spec.page_bytes)
        self.compared = self.differing = 0
        slot = self.states.allocate()
        self.logits = [self._step([(slot, [token])])[0] for token in self.ids]
        self.state = self.states.save(slot)
        self.states.free(slot)

    def _step(self, sequences: list[tuple[int, list[int]]]) -> np.ndarray:
        return self.model.forward(Batch.pack(sequences), self.states)

    def _compare(self, found: np.ndarray, expected: np.ndarray) -> None:
        kind = np.uint64 if found.dtype.itemsize == 8 else np.uint32
        self.compared += found.size
        self.differing += int(
            (np.ascontiguousarray(found).view(kind) != np.ascontiguousarray(expected).view(kind)).sum()
        )

    def run(self, pieces: Sequence[int], others: int = 0) -> None:
        """The text in these pieces, among so many sequences that prefill and decode at its side."""
        slots = [self.states.allocate() for _ in range(others)]
        mine, at = self.states.allocate(), 0
        for length in pieces:
            place = int(self._rng.integers(0, others + 1))
            sequences = [
                (slot, self._rng.integers(0, self.vocab, self._rng.choice([1, 1, 1, 5])).tolist()) for slot in slots
            ]
            sequences.insert(place, (mine, self.ids[at : at + length]))
            at += length
            self._compare(self._step(sequences)[place], self.logits[at - 1])
        for name, part in self.states.save(mine).parts.items():
            self._compare(part, self.state.parts[name])
        for slot in (*slots, mine):
            self.states.free(slot)

    def document(self) -> dict[str, Any]:
        return {"values_compared": self.compared, "values_differing": self.differing, "ok": self.differing == 0}


def laws(model: Qwen4ExpCuda, length: int) -> dict[str, Any]:
    """One text: stepwise by graphs against whole, cut, and among 3 and 17 others."""
    law = Law(model, length)
    for pieces in ([length], [length - 1, 1], [1, length - 1], [length // 3, 1, length - length // 3 - 1]):
        law.run(pieces)
    for others in (3, 17):
        law.run([length // 2, 1, 1, length - length // 2 - 2], others)
    return law.document()


def check(name: str, dtype: str) -> dict[str, Any]:
    """A small shape: its error against the logits that transformers gave in float32, and the law."""
    shape, seed = CASES[name]
    with tempfile.TemporaryDirectory() as folder:  # a table in memory would be rounded to bfloat16
        save_file(random_qwen4exp(shape, seed, torch.float32), Path(folder) / "model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps(qwen4exp_config(shape)), encoding="utf-8")
        model: Any = load_model(folder, EngineConfig(device="cuda", dtype=dtype)).model
        ids, states = ids_of(shape, seed), new_states(model, 1, 4 * model.state_spec.page_bytes)
        logits = model.forward(Batch.pack([(states.allocate(), ids)], [list(range(len(ids)))]), states)
        law = laws(model, 50)
        model.close()
    with np.load(FIXTURE) as fixture:
        error = relative_error(logits, fixture[name])
    return {"error": float(f"{error:.2g}")} | law | {"ok": law["ok"] and error < LIMITS[dtype]}


def check_heads(dtype: str) -> dict[str, Any]:
    """Heads of the released sizes, against the CPU's model in float32; its kernels take a while to compile."""
    source = RandomSource(RandomWeights(HEADS, 1), "heads as released")
    models = [
        load_source(source, EngineConfig(device="cpu", dtype="fp32")).model,
        load_source(source, EngineConfig(device="cuda", dtype=dtype)).model,
    ]
    ids = np.random.default_rng(1).integers(0, HEADS.vocab, 60).tolist()
    found, parts = [], []
    for model in models:
        states = new_states(model, 1, 4 * model.state_spec.page_bytes)
        slot = states.allocate()
        found.append(model.forward(Batch.pack([(slot, ids)], [list(range(60))]), states))
        parts.append(states.save(slot).parts)
    error = relative_error(found[1], found[0])
    worst = {part: float(f"{relative_error(parts[1][part], parts[0][part]):.2g}") for part in parts[0]}
    document = {"error": float(f"{error:.2g}"), "states": worst} | laws(models[1], 50)  # type: ignore[arg-type]
    return document | {"ok": document["ok"] and error < LIMITS[dtype]}


class Speeds:
    """One model, and medians of its prompts and steps at some depth."""

    def __init__(self, model: Qwen4ExpCuda, most_tokens: int, ceilings: Ceilings, dtype: torch.dtype) -> None:
        self.model, self.g, self.ceilings = model, Geometry.of(model.config), ceilings
        self.element_bytes = dtype.itemsize
        spec = model.state_spec
        self.states: Any = new_states(model, 2, spec.pages_for(most_tokens) * spec.page_bytes)
        assert isinstance(self.states, CudaStateTable)
        self.slot = self.states.allocate()
        self.rng = np.random.default_rng(0)

    def ids(self, count: int) -> list[int]:
        return self.rng.integers(0, self.model.config.vocab_size, count).tolist()

    def eat(self, count: int, slot: int | None = None) -> None:
        """Read so many tokens; the logits of the last."""
        self.model.forward(Batch.pack([(self.slot if slot is None else slot, self.ids(count))]), self.states)

    def depth(self, tokens: int) -> tuple[SavedState, float]:
        """Read up to here; what brings the slot back, and the seconds that took."""
        began = time.perf_counter()
        while (left := tokens - int(self.states.positions[self.slot])) > 0:
            self.eat(min(CHUNK, left))
        torch.cuda.synchronize()
        return self.states.snapshot(self.slot), time.perf_counter() - began

    def median_ms(self, work: Callable[[], None], back: SavedState, count: int, turns: int = 1) -> float:
        times = []
        for index in range(count + 1):
            self.states.rewind(self.slot, back)
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(turns):
                work()
            torch.cuda.synchronize()
            if index:
                times.append((time.perf_counter() - began) * 1e3 / turns)
        return statistics.median(times)

    def demand(self, rows: int, depth: int) -> Demand:
        """What ``rows`` tokens of one sequence at a depth cannot do without."""
        g, model = self.g, self.model
        layers, seen = len(g.attention_layers), depth + rows // 2
        attended = min(seen, g.index_budget + g.index_ratio - 1)
        blocks = seen // g.index_ratio if seen // g.index_ratio > g.index_budget // g.index_ratio else 0
        weights = model.weight_bytes // self.element_bytes
        head = g.width * g.vocab_size
        attention = rows * layers * (2 * g.heads * g.head_size * attended + blocks * g.index_heads * g.index_size)
        recurrence = rows * len(g.delta_layers) * 3 * g.value_width * g.key_size
        flops = 2 * (rows * (weights - head) + head + attention + recurrence)
        reads = model.weight_bytes if rows == 1 else model.all_weight_bytes
        keys = layers * 4 * (2 * attended * g.kv_heads * g.head_size + blocks * g.index_size)
        return Demand(reads + 2 * model.state_spec.slot_bytes + keys, flops)

    def figures(self, ms: float, rows: int, depth: int) -> dict[str, Any]:
        demand = self.demand(rows, depth)
        floor_ms, by = demand.floor(self.ceilings)
        return {
            "ms": round(ms, 3), "tok_s": round(rows / ms * 1e3, 1), "floor_ms": round(floor_ms, 3), "floor_by": by,
            "reached": round(floor_ms / ms, 3), "active_mib": demand.nbytes >> 20, "gflop": round(demand.flops / 1e9, 1),
        }  # fmt: skip

    def at(self, depth: int, profile: bool) -> dict[str, Any]:
        """A chunk and steps at this depth."""
        back, reached_s = self.depth(depth)
        waits = [self.waited_ms()]
        prompt = self.median_ms(lambda: self.eat(CHUNK), back, 4)
        waits.append(self.waited_ms())
        step = self.median_ms(lambda: self.eat(1), back, 3, STEPS)
        waits.append(self.waited_ms())
        found: dict[str, Any] = {"reached_s": round(reached_s, 2)}
        found |= {"prefill": self.figures(prompt, CHUNK, depth), "decode": self.figures(step, 1, depth)}
        for kind, runs, (began, ended) in (("prefill", 5, waits[:2]), ("decode", 4 * STEPS, waits[1:])):
            found[kind]["ngram_wait_ms"] = round((ended - began) / runs, 3)
        if profile:
            found["profile"] = {"chunk": self.kernels(CHUNK, back), "step": self.kernels(1, back)}
        self.states.rewind(self.slot, back)
        return found

    def waited_ms(self) -> float:
        """How long the host has waited for rows of the n-gram tables so far."""
        return sum(reader.stats.wait_ms for reader in self.model.readers)

    def in_turns(self, rounds: int = 5) -> dict[str, float]:
        """Steps at the depth that was reached, and at the start of another sequence, by turns: host and card drift alike."""
        times: dict[int, list[float]] = {self.slot: [], self.states.allocate(): []}
        for slot in [*times, *reversed(times)] * rounds:
            self.eat(1, slot)
            began = time.perf_counter()
            for _ in range(STEPS // 2):
                self.eat(1, slot)
            times[slot].append((time.perf_counter() - began) * 2e3 / STEPS)
        deep, first = (statistics.median(taken) for taken in times.values())
        return {"deep_ms": round(deep, 3), "first_ms": round(first, 3), "slower_than_first": round(deep / first - 1, 3)}

    def kernels(self, rows: int, back: SavedState) -> list[str]:
        """Kernels by their share: µs in all, calls, name."""
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as recorded

        self.states.rewind(self.slot, back)
        with recorded(activities=[ProfilerActivity.CUDA]) as events:
            self.eat(rows)
            torch.cuda.synchronize()
        found = sorted(events.key_averages(), key=lambda row: -row.device_time_total)
        return [f"{row.device_time_total:.0f} us {row.count} x {row.key[:60]}" for row in found[:16]]


def released(options: argparse.Namespace, tell: Callable[[str, Any], None]) -> dict[str, Any]:
    """The law on the large shape, and its speeds; ``ok``: whether the law held."""
    began = time.perf_counter()
    if options.shape == "qwen4exp-8of48" and torch.cuda.get_device_properties(0).total_memory < 70 << 30:
        raise DeviceError(f"{options.shape} takes some 45 GB in 16 bits", "take qwen4exp-4of48 on this card")
    model: Any = load_random(options.shape, EngineConfig(device="cuda", dtype=options.dtype)).model
    model.overlap = model.overlap and not options.plain
    torch.cuda.synchronize()
    memory = {"weights_gib": torch.cuda.memory_allocated() / 2**30, "workspace_gib": model.workspace_bytes / 2**30}
    tell("load", {"s": time.perf_counter() - began, "overlap": model.overlap, **memory})
    tell(
        "replaced",
        [pick for row in (*model.describe()["picks"], *model.describe()["experts"]) for pick in row["replaced"]],
    )
    is_exact = True
    if "exact" in options.parts:
        document = laws(model, 24)
        is_exact = document["ok"]
        tell("exact", document)
    if "speed" in options.parts:
        ceilings = measure_ceilings("cuda", options.dtype)
        tell("ceilings", ceilings.line)
        depths = [int(depth) for depth in options.depths.split(",")]
        speeds = Speeds(model, max(depths) + 2 * CHUNK, ceilings, DTYPES[options.dtype])
        first: dict[str, Any] = {}
        for depth in sorted(depths):
            found = speeds.at(depth, options.profile)
            first = first or found
            for kind in ("prefill", "decode"):
                found[kind]["slower_than_first"] = round(found[kind]["ms"] / first[kind]["ms"] - 1, 3)
            tell(f"depth {depth}", found)
        tell(f"steps at {max(depths)} and 0 in turns", speeds.in_turns())
        tell("ngram", model.describe()["ngram_tables"][0]["gathered"] if model.describe()["ngram_tables"] else {})
    return {"ok": is_exact}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON document a part; 1 when a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="check,exact,speed")
    parser.add_argument("--cases", default="two n-gram layers", help=f"small shapes: {', '.join(CASES)}, or all")
    parser.add_argument("--dtypes", default="fp32", help="of the small shapes")
    parser.add_argument("--shape", default="qwen4exp-8of48")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"))
    parser.add_argument("--depths", default="0,4096,32768,131072")
    parser.add_argument("--tuned", action="store_true", help="time the products of shapes that nothing is known of")
    parser.add_argument("--plain", action="store_true", help="let no launch begin before the one in front has ended")
    parser.add_argument("--profile", action="store_true", help="time by kernel as well")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    if not options.tuned:
        cuda_probe._tune, cuda_probe._keep = untuned, lambda *_: None
    cuda_model.WARMING = (1, 3, 16)  # the others compile when they are met: a shape takes some fifty kernels
    began, document = time.perf_counter(), {"machine": machine_line(usable_cores(), "cuda")}

    def tell(part: str, found: Any) -> None:
        document[part] = found
        line = {part: found, "at_s": round(time.perf_counter() - began, 1)}
        sys.stdout.write(json.dumps(line, default=_rounded) + "\n")
        sys.stdout.flush()
        if options.json:
            options.json.write_text(json.dumps(document, indent=1, default=_rounded) + "\n", encoding="utf-8")

    checks = []
    dtypes, cases = options.dtypes.split(","), list(CASES) if options.cases == "all" else options.cases.split(",")
    works: dict[str, Callable[[], dict[str, Any]]] = {}
    if "check" in options.parts:
        works |= {f"{name} {dtype}": partial(check, name, dtype) for name in cases for dtype in dtypes}
    if "cpu" in options.parts:
        works |= {f"heads as released {dtype}": partial(check_heads, dtype) for dtype in dtypes}
    for name, work in works.items():
        found = attempted(work)
        checks.append(found["ok"])
        tell(name, found)
    if {"exact", "speed"} & set(options.parts):
        found = attempted(partial(released, options, tell))
        checks.append(found["ok"])
        tell("released", found)
    tell("all checks passed", all(checks))
    return 0 if all(checks) else 1


def _rounded(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


if __name__ == "__main__":
    sys.exit(main())
