"""What bias, penalties and log-probabilities cost of decode speed, as ratios within one run.

    python tools/sampling_cost.py --shape 0.1b --steps 64 --requests 1

Every setting has an engine of its own over one model, and the engines take their decode steps in turn, one step each,
so that whatever else the machine does falls on all alike. Wall and processor time of a step, medians over the steps.
The plain setting stands in the list twice: how far the second is from 1 is how far to trust the rest. One JSON document
on stdout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

from kittiwake.bench.machine import machine_line
from kittiwake.bench.random import load_random
from kittiwake.config import EngineConfig
from kittiwake.engine.engine import Engine
from kittiwake.engine.request import SamplingParams
from kittiwake.load import Loaded

BIASES = {token: (-1.0 if token % 2 else 1.0) for token in range(1000, 1300)}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias of 300 tokens": {"logit_bias": BIASES},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "logprobs": {"logprobs": True},
    "logprobs and 20 top": {"logprobs": True, "top_logprobs": 20},
    "min_p": {"min_p": 0.05},
    "rwkv order": {"sampling_order": "rwkv"},
    "plain again": {},
    "bias, penalties, logprobs, min_p": {
        "logit_bias": BIASES,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logprobs": True,
        "top_logprobs": 20,
        "min_p": 0.05,
    },
}


class Subject:
    """One setting, decoding step by step."""

    def __init__(self, loaded: Loaded, params: SamplingParams, prompt: list[int], requests: int) -> None:
        self.engine = Engine(
            loaded.model, loaded.tokenizer, slots=requests, prefill_chunk=0, max_rows=len(prompt) * requests
        )
        for index in range(requests):
            self.engine.add(prompt, replace(params, seed=index))
        self.engine.step()  # eats the prompts
        self.wall_ms: list[float] = []
        self.cpu_ms: list[float] = []

    def step(self) -> None:
        """One decode step, timed."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.engine.step()
        self.cpu_ms.append(1000 * (time.process_time() - cpu))
        self.wall_ms.append(1000 * (time.perf_counter() - wall))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="0.1b")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--prompt", type=int, default=128, help="distinct tokens, which the repetition penalty reads")
    options = parser.parse_args()
    loaded = load_random(options.shape, EngineConfig(threads=options.threads))
    prompt = list(range(500, 500 + options.prompt))
    plain = SamplingParams(max_tokens=options.steps + 9, temperature=0.8, top_p=0.9, ignore_eos=True)
    subjects = {
        name: Subject(loaded, replace(plain, **more), prompt, options.requests) for name, more in SETTINGS.items()
    }
    for turn in range(options.steps + 2):
        names = list(subjects) if turn % 2 else list(reversed(subjects))
        for name in names:
            subjects[name].step()
    wall = {name: statistics.median(subject.wall_ms[2:]) for name, subject in subjects.items()}  # two warm up
    cpu = {name: statistics.median(subject.cpu_ms[2:]) for name, subject in subjects.items()}
    document = {
        "what": vars(options),
        "plain_step_ms": round(wall["plain"], 3),
        "wall_ratio": {name: round(value / wall["plain"], 4) for name, value in wall.items()},
        "cpu_ratio": {name: round(value / cpu["plain"], 4) for name, value in cpu.items()},
        "machine": machine_line(loaded.threads),
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
