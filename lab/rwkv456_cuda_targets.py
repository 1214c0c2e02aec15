"""RWKV-4, 5 and 6 on a card: every version exact and right on small shapes, then the speeds of two published ones.

    python lab/rwkv456_cuda_targets.py [--parts check,rwkv4,rwkv6] [--profile] [--json FILE]

Needs about a minute on an H200, and more where products must be tuned first. Weights are random; a time is a median, from
the call to the logits' being there, on the host's clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from card import attempted

from kittiwake.bench.machine import machine_line
from kittiwake.bench.random import load_random
from kittiwake.bench.rwkv4_shapes import Rwkv4Shape, random_rwkv4
from kittiwake.bench.rwkv56_shapes import Rwkv5Shape, Rwkv6Shape, random_rwkv5, random_rwkv6
from kittiwake.config import EngineConfig
from kittiwake.device import usable_cores
from kittiwake.engine.batch import Batch
from kittiwake.families.cuda_rows import cut, shape_of
from kittiwake.layers import cuda_probe
from kittiwake.load import load_tensors
from tests.device.runs import Runs
from tests.device.untuned import untuned
from tests.oracles import rwkv4_float64, rwkv6_float64
from tests.oracles.measure import relative_error

SMALL: dict[str, Any] = {
    "4": Rwkv4Shape(3, 64, vocab=256, attention=96),
    "5.0": Rwkv5Shape(3, 128, "5.0", 32, vocab=256),
    "5.1": Rwkv5Shape(3, 60, "5.1", 10, vocab=256),
    "5.2": Rwkv5Shape(3, 128, "5.2", 64, vocab=256),
    "6": Rwkv6Shape(3, 128, 8, 16, 64, vocab=256),
    "6, odd": Rwkv6Shape(7, 60, 3, 5, 10, vocab=256),
}
MAKERS: dict[type, Callable[..., dict[str, torch.Tensor]]] = {
    Rwkv4Shape: random_rwkv4,
    Rwkv5Shape: random_rwkv5,
    Rwkv6Shape: random_rwkv6,
}
LIMITS = {"fp32": 2e-5, "fp16": 5e-2, "bf16": 3e-1}


def check(name: str, dtype: str) -> dict[str, Any]:
    """One version: errors against the equations in float64, and whether splits and crowds have the bits of single steps."""
    shape = SMALL[name]
    tensors = MAKERS[type(shape)](shape, 1)
    runs = Runs(load_tensors(tensors, EngineConfig(device="cuda", dtype=dtype)).model, slots=40)
    trace = runs.trace(40)
    oracle: Any = rwkv4_float64 if isinstance(shape, Rwkv4Shape) else rwkv6_float64
    logits = oracle.run(tensors, trace.ids)[0]
    error = relative_error(trace.logits, logits)
    splits = [runs.split(trace, pieces) for pieces in ([40], [39, 1], [1, 39], *(runs.pieces(40) for _ in range(4)))]
    crowds = [runs.crowd(trace, others) for others in (1, 5, 30)]
    found = {"error": float(f"{error:.2g}"), "splits": all(splits), "crowds": all(crowds)}
    return found | {"ok": all(splits) and all(crowds) and error < LIMITS[dtype]}


class Speeds:
    """A model of a published shape, and medians of its forwards in ms."""

    def __init__(self, shape: str, dtype: str, slots: int) -> None:
        began = time.perf_counter()
        self.runs = Runs(load_random(shape, EngineConfig(device="cuda", dtype=dtype)).model, slots + 1)
        self.model: Any = self.runs.model
        torch.cuda.synchronize()
        self.slots = self.runs.slots(slots)
        self.load_s = time.perf_counter() - began

    def batch(self, requests: int, tokens: int) -> Batch:
        """Random tokens."""
        return Batch.pack([(slot, self.runs.ids(tokens)) for slot in self.slots[:requests]])

    def replay(self, batch: Batch) -> None:
        """As the engine runs it."""
        self.model.forward_on_device(batch, self.runs.states)

    def eager(self, batch: Batch) -> None:
        """The same kernels, launched one by one from Python."""
        piece = cut(batch, self.model.most_rows)[0]
        shape, _ = shape_of(piece, self.model.most_rows)
        x, y = self.model._eager(piece, shape, self.runs.states, None)
        self.model._logits(x, y, self.model._buffer().views(shape))

    def check(self, tokens: int) -> bool:
        """A prompt has the bits of its tokens one by one."""
        runs = self.runs
        trace = runs.trace(tokens)
        return all(
            runs.split(trace, pieces) for pieces in ([tokens], [tokens - 1, 1], [tokens // 3, tokens - tokens // 3])
        )


def median_ms(work: Callable[[], None], count: int) -> float:
    """After two runs to warm up."""
    times = []
    for index in range(count + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if index > 1:
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def profile(speeds: Speeds, batches: dict[str, Batch]) -> dict[str, list[str]]:
    """Kernels of a replayed graph by their share: µs in all, calls, name."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    found = {}
    for name, batch in batches.items():
        speeds.replay(batch)
        torch.cuda.synchronize()
        with recorded(activities=[ProfilerActivity.CUDA]) as events:
            speeds.replay(batch)
            torch.cuda.synchronize()
        rows = sorted(events.key_averages(), key=lambda row: -row.device_time_total)
        found[name] = [f"{row.device_time_total:.0f} us {row.count} x {row.key[:60]}" for row in rows[:14]]
    return found


def rwkv4(wants_profile: bool) -> dict[str, Any]:
    """169M in float32: a prompt of 128 tokens against its tokens one by one, launched eagerly and by graphs."""
    speeds = Speeds("rwkv4-169m", "fp32", 4)
    prompt, steps = speeds.batch(1, 128), [speeds.batch(1, 1) for _ in range(128)]
    found: dict[str, Any] = {"load_s": round(speeds.load_s, 1), "ok": speeds.check(40)}
    prompt_ms = median_ms(partial(speeds.replay, prompt), 30)

    def each(run: Callable[[Batch], None]) -> Callable[[], None]:
        def all_of_them() -> None:
            for step in steps:
                run(step)

        return all_of_them

    eager_ms, graph_ms = median_ms(each(speeds.eager), 3), median_ms(each(speeds.replay), 5)
    found |= {"prompt_128_ms": prompt_ms, "eager_128_ms": eager_ms, "graph_128_ms": graph_ms}
    found |= {"times_eager": eager_ms / prompt_ms, "times_graph": graph_ms / prompt_ms}
    found["picks"] = {pick["shape"]: pick["up_to_rows"] for pick in speeds.model.describe()["picks"]}
    found["replaced"] = {
        pick["shape"]: pick["replaced"] for pick in speeds.model.describe()["picks"] if pick["replaced"]
    }
    if wants_profile:
        found["profile"] = profile(speeds, {"prompt of 128": prompt, "step": steps[0]})
    return found


def rwkv6(wants_profile: bool) -> dict[str, Any]:
    """1.6B in float16: decoding at 1, 8 and 32 requests, and prompts of 1,024."""
    speeds = Speeds("rwkv6-1.6b", "fp16", 32)
    found: dict[str, Any] = {"load_s": round(speeds.load_s, 1)}
    cases = {(requests, 1): 50 for requests in (1, 8, 32)} | {(1, 1024): 10, (8, 1024): 4}
    for (requests, tokens), count in cases.items():
        batch = speeds.batch(requests, tokens)
        ms = median_ms(partial(speeds.replay, batch), count)
        found[f"{requests}x{tokens}"] = {"ms": round(ms, 3), "tok_s": round(requests * tokens / ms * 1e3)}
    speeds.runs.free(speeds.slots)
    found["ok"] = speeds.check(24) and speeds.runs.crowd(speeds.runs.trace(24), 20)
    found["replaced"] = {
        pick["shape"]: pick["replaced"] for pick in speeds.model.describe()["picks"] if pick["replaced"]
    }
    if wants_profile:
        speeds.slots = speeds.runs.slots(32)
        found["profile"] = profile(speeds, {"step": speeds.batch(1, 1), "prompt of 1,024": speeds.batch(1, 1024)})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON document a part; 1 when a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="check,rwkv4,rwkv6")
    parser.add_argument("--dtypes", default="fp32,fp16")
    parser.add_argument("--profile", action="store_true", help="time by kernel as well")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    document: dict[str, Any] = {"machine": machine_line(usable_cores(), "cuda")}
    checks = []

    def tell(part: str, work: Callable[[], dict[str, Any]]) -> None:
        found = attempted(work)
        document[part], document["seconds"] = found, round(time.perf_counter() - began, 1)
        checks.append(found["ok"])
        line = {part: {name: value for name, value in found.items() if name != "picks"}, "at_s": document["seconds"]}
        sys.stdout.write(json.dumps(line, default=_rounded) + "\n")
        sys.stdout.flush()
        if options.json:
            options.json.write_text(json.dumps(document, indent=1, default=_rounded) + "\n", encoding="utf-8")

    for part in options.parts.split(","):
        if part == "check":
            for name, dtype in itertools.product(SMALL, options.dtypes.split(",")):
                with untimed():
                    tell(f"{name} {dtype}", partial(check, name, dtype))
        else:
            tell(part, partial({"rwkv4": rwkv4, "rwkv6": rwkv6}[part], options.profile))
    sys.stdout.write(json.dumps({"all checks passed": all(checks)}) + "\n")
    return 0 if all(checks) else 1


@contextmanager
def untimed() -> Iterator[None]:
    """Products of small shapes are not timed when their models load."""
    tune, keep = cuda_probe._tune, cuda_probe._keep
    cuda_probe._tune, cuda_probe._keep = untuned, lambda *_: None
    try:
        yield
    finally:
        cuda_probe._tune, cuda_probe._keep = tune, keep


def _rounded(value: Any) -> Any:
    return float(value) if isinstance(value, np.floating) else bool(value)


if __name__ == "__main__":
    sys.exit(main())
