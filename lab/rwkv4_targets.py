"""RWKV-4 on the CPU against transformers and the ``rwkv`` package: same random weights in float32, same threads, interleaved.

    python lab/rwkv4_targets.py [--shape rwkv4-169m] [--rounds 5] [--json FILE]

transformers runs in this process, ours and its calls in turn (A B B A); the package runs in processes of its own,
between two measurements of ours. Both must be installed. The fastest call of each counts: what disturbs a machine only
ever adds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from kittiwake.device import waiting_environment

os.environ.update(waiting_environment())  # before torch and numba come in, as the command line does

import torch

from kittiwake.bench.machine import machine_line
from kittiwake.bench.rwkv4_shapes import RWKV4_SHAPES, Rwkv4Shape, random_rwkv4
from kittiwake.config import EngineConfig
from kittiwake.load import Loaded, load_model
from lab.cpu_targets import STEPS, Run, forwards, repeated
from tests.families.rwkv4_layouts import save_hf
from tests.oracles.rwkv_package import time_package

PROMPT = 128
Tensors = Mapping[str, torch.Tensor]


def fastest_ms(runs: Mapping[str, Run], rounds: int) -> dict[str, float]:
    """Least ms of each run: A B C C B A in every round, each after one warm-up call."""
    best = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name in [*runs, *reversed(list(runs))]:
            start = time.perf_counter()
            runs[name]()
            best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    return best


def transformers_runs(folder: Path, vocab: int, threads: int) -> tuple[Run, Run]:
    """transformers' prompt of PROMPT tokens from an empty state, and its STEPS steps after one."""
    from transformers import RwkvForCausalLM

    model = RwkvForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(1, vocab, (1, PROMPT), generator=generator)
    held: dict[str, Any] = {"state": None}

    def call(ids: torch.Tensor, state: Any) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        with torch.no_grad():
            output = model(ids, state=state, use_cache=True)
        torch.set_num_threads(before)
        return output.state

    def run_prompt() -> None:
        held["state"] = call(prompt, None)

    def run_steps() -> None:
        for index in range(STEPS):
            held["state"] = call(prompt[:, index : index + 1], held["state"])

    run_prompt()
    return run_prompt, run_steps


def measure(loaded: Loaded, folder: Path, shape: Rwkv4Shape, rounds: int) -> dict[str, Any]:
    """Ours and transformers' in turn."""
    make = forwards(loaded)
    their_prompt, their_steps = transformers_runs(folder, shape.vocab, loaded.threads)
    prompts = fastest_ms({"ours": make(1, PROMPT), "transformers": their_prompt}, rounds)
    steps = fastest_ms({"ours": repeated(make(1, 1), STEPS), "transformers": their_steps}, rounds)
    step = steps["ours"] / STEPS
    return {
        "prompt_128_ms": prompts["ours"],
        "decode_ms": step,
        "prompt_128_over_stepwise": PROMPT * step / prompts["ours"],
        "prompt_128_over_transformers": prompts["transformers"] / prompts["ours"],
        "decode_over_transformers": steps["transformers"] / steps["ours"],
    }


def against_package(loaded: Loaded, tensors: Tensors, rounds: int) -> dict[str, Any]:
    """The package's prompt and decode against ours before and after it; its fastest single step is taken."""
    make = forwards(loaded)
    prompt, steps = make(1, PROMPT), repeated(make(1, 1), STEPS)
    ours, theirs = {"prompt": float("inf"), "steps": float("inf")}, {"prompt": float("inf"), "steps": float("inf")}
    for _ in range(rounds):
        before = fastest_ms({"prompt": prompt, "steps": steps}, 4)
        timed = time_package(
            tensors, family="rwkv4", prompt_tokens=PROMPT, decode_tokens=STEPS, repeats=8, threads=loaded.threads
        )
        after = fastest_ms({"prompt": prompt, "steps": steps}, 4)
        samples = {"prompt": min(timed.prompt_samples_s), "steps": STEPS * min(timed.decode_samples_s)}
        ours = {name: min(ours[name], before[name], after[name]) for name in ours}
        theirs = {name: min(theirs[name], 1e3 * samples[name]) for name in theirs}
    return {
        "prompt_128_over_package": theirs["prompt"] / ours["prompt"],
        "decode_over_package": theirs["steps"] / ours["steps"],
    }


def main() -> None:
    """Measure and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=RWKV4_SHAPES, default="rwkv4-169m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = RWKV4_SHAPES[options.shape]
    tensors = random_rwkv4(shape, 0, torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        model = save_hf(Path(folder, "model"), shape, tensors)
        loaded = load_model(model, EngineConfig(dtype="fp32"))
        document = {"machine": machine_line(loaded.threads), "model": options.shape, "dtype": loaded.dtype}
        document |= measure(loaded, model, shape, options.rounds)
    document |= against_package(loaded, tensors, max(1, options.rounds // 2))
    text = json.dumps(document, indent=2)
    sys.stdout.write(text + "\n")
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
