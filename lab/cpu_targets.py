"""The CPU figures of docs/benchmarks.md, as ratios within one run: everything compared is interleaved (A B B A).

    python lab/cpu_targets.py [--shape 0.1b | MODEL] [--rounds 5] [--package] [--json FILE]

``--package`` also runs the ``rwkv`` package on the same weights (it must be installed), in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from kittiwake.device import usable_cores, waiting_environment

os.environ.update(waiting_environment())  # before torch and numba come in, as the command line does

import numpy as np
import torch

from kittiwake.bench.machine import machine_line
from kittiwake.bench.random import load_random
from kittiwake.bench.shapes import SHAPES, random_rwkv7
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StateTable
from kittiwake.layers.linear import LinearGroup
from kittiwake.load import Loaded, load_model
from kittiwake.ops.matmul.cpu import ACTIVATIONS, activate_columns

Run = Callable[[], object]
STEPS = 16
"""Decode steps timed as one run: a stream decodes step after step."""


def repeated(run: Run, times: int) -> Run:
    """The run several times over."""

    def several() -> None:
        for _ in range(times):
            run()

    return several


def interleaved_ms(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Median ms of each run: A B C C B A in every round, each after one warm-up call."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs) + list(runs)[::-1]
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name in order:
            start = time.perf_counter()
            runs[name]()
            samples[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}


class PlainGroup(LinearGroup):
    """The same products through plain torch calls on [N, K] weights: nobody's bits are promised."""

    def __call__(self, x: np.ndarray, rows: int, y: np.ndarray) -> np.ndarray:
        """One ``linear`` a product, unpadded."""
        if not hasattr(self, "plain"):
            self.plain = [
                torch.cat([self.piece(tile).float() for tile in self._tiles if tile.product is p], dim=1)
                .t()
                .contiguous()
                for p in self.products
            ]
        x_rows, y_rows, column = torch.from_numpy(x), torch.from_numpy(y), 0
        for p, weight in zip(self.products, self.plain, strict=True):
            y_rows[:rows, column : column + p.columns] = torch.nn.functional.linear(
                x_rows[:rows, p.x_column : p.x_column + p.depth], weight
            )
            if p.activation != "none":
                activate_columns(y, rows, column, column + p.columns, ACTIVATIONS.index(p.activation))
            column += p.columns
        return y


def forwards(loaded: Loaded) -> Callable[[int, int], Run]:
    """``make(batch, tokens)`` → a forward of that case from where the states stand."""
    vocab = loaded.model.config.vocab_size
    table = StateTable(loaded.model.state_spec, 16)
    slots = [table.allocate() for _ in range(16)]
    draw = np.random.default_rng(0)

    def make(sequences: int, tokens: int) -> Run:
        parts = [(slots[i], draw.integers(1, vocab, tokens).tolist()) for i in range(sequences)]
        batch = Batch.pack(parts)
        return lambda: loaded.model.forward(batch, table)

    return make


def as_plain(loaded: Loaded, run: Run) -> Run:
    """The same forward with every group's products through plain torch calls."""
    groups = {id(group): group for group in loaded.model._groups.values()}  # type: ignore[attr-defined]

    def plain() -> object:
        for group in groups.values():
            group.__class__ = PlainGroup
        try:
            return run()
        finally:
            for group in groups.values():
                group.__class__ = LinearGroup

    return plain


def measure(loaded: Loaded, rounds: int) -> dict[str, Any]:
    """All ratios of one model."""
    make = forwards(loaded)
    one, eight, prompt = make(1, 1), make(8, 1), make(1, 512)
    sums = torch.randn(64 << 20)  # 256 MiB, at least four times the last-level cache
    steps = {"one": one, "eight": eight, "plain": as_plain(loaded, one), "sum": sums.sum}
    decode = interleaved_ms({name: repeated(run, STEPS) for name, run in steps.items()}, 2 * rounds)
    decode = {name: total / STEPS for name, total in decode.items()}
    prompts = interleaved_ms({"prompt": prompt, "plain": as_plain(loaded, prompt)}, rounds)
    read_gb_s = loaded.model.weight_bytes / decode["one"] / 1e6
    sum_gb_s = sums.numel() * 4 / decode["sum"] / 1e6
    return {
        "decode_ms": decode["one"],
        "decode_tok_s": 1e3 / decode["one"],
        "prompt_512_ms": prompts["prompt"],
        "prompt_512_over_stepwise": 512 * decode["one"] / prompts["prompt"],
        "eight_requests_over_one": 8 * decode["one"] / decode["eight"],
        "weights_read_gb_s": read_gb_s,
        "sum_gb_s": sum_gb_s,
        "decode_over_sum": read_gb_s / sum_gb_s,
        "exactness_cost_decode": decode["one"] / decode["plain"] - 1,
        "exactness_cost_prompt_512": prompts["prompt"] / prompts["plain"] - 1,
    }


def against_package(shape: str, loaded: Loaded, rounds: int) -> dict[str, Any]:
    """Our prompt of 512 and decode against the ``rwkv`` package's, same weights in float32, alternating processes."""
    from tests.oracles.rwkv_package import time_package

    tensors = {name: tensor.float() for name, tensor in random_rwkv7(SHAPES[shape], 0, torch.bfloat16).items()}
    make = forwards(loaded)
    prompt, one = make(1, 512), make(1, 1)
    ratios: dict[str, list[float]] = {"prompt": [], "decode": []}
    for _ in range(rounds):
        ours = [interleaved_ms({"prompt": prompt}, 1)["prompt"], interleaved_ms({"one": one}, 20)["one"]]
        theirs = time_package(tensors, prompt_tokens=512, decode_tokens=20, repeats=3, threads=usable_cores())
        ours += [interleaved_ms({"prompt": prompt}, 1)["prompt"], interleaved_ms({"one": one}, 20)["one"]]
        ratios["prompt"].append(theirs.prompt_s * 1e3 / statistics.median((ours[0], ours[2])))
        ratios["decode"].append(theirs.decode_s * 1e3 / statistics.median((ours[1], ours[3])))
    return {f"{name}_over_package": statistics.median(values) for name, values in ratios.items()}


def main() -> None:
    """Measure and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a bundle or checkpoint; left out, the packaged model or --shape")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--package", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = EngineConfig(dtype=options.dtype)
    loaded = load_random(options.shape, config) if options.shape else load_model(options.model, config)
    document: dict[str, Any] = {
        "machine": machine_line(loaded.threads),
        "model": loaded.path.name if options.model else options.shape or "the packaged model",
        "dtype": loaded.dtype,
    }
    document |= measure(loaded, options.rounds)
    if options.package and options.shape:
        document |= against_package(options.shape, loaded, max(1, options.rounds // 3))
    text = json.dumps(document, indent=2)
    sys.stdout.write(text + "\n")
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
