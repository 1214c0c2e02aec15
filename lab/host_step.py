"""What the host does for each token of a step beside a device: the engine, the events, their message.

``python lab/host_step.py --requests 32,128,384 --json FILE``. The engine runs as on a card, a step ahead of what it reads,
but the card takes no time: forward and draw give tokens drawn beforehand. Times are of the process, on one thread.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import torch

from kittiwake import LLM, SamplingParams
from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.engine.batch import Batch
from kittiwake.engine.flight import Flight
from kittiwake.engine.named_states import NamedStates
from kittiwake.engine.runner import Runner
from kittiwake.server import messages as wire
from kittiwake.server.engine_client import Submission
from kittiwake.server.engine_host import Caller, EngineHost

WORKERS = 4
PROMPT_TOKENS = 8
STEPS = 40


class InstantDevice:
    """What the engine asks of ``DeviceSteps``; every step is there at once."""

    def __init__(self, runner: Runner, never: Sequence[int]) -> None:
        slots = runner.states.slots + 1
        self._tokens = np.random.default_rng(0).integers(32, 120, (64, slots), dtype=np.int32)
        self._logits = torch.zeros((1, 1))
        self._turn = 0

    def begin(
        self, slot: int, params: SamplingParams, position: int, given: Sequence[int], ends: Sequence[int]
    ) -> None:
        """Nothing is set up."""

    def let_end(self, slot: int, ends: Sequence[int]) -> None:
        """Nor changed."""

    def end(self, slot: int) -> None:
        """Nor given up."""

    def launch(self, batch: Batch, flight: Flight) -> Flight:
        """Tokens for all."""
        self._turn = (self._turn + 1) % len(self._tokens)
        flight.logits, flight.tokens = self._logits, self._tokens[self._turn]
        return flight

    def launch_known(self, rows: np.ndarray, flight: Flight) -> Flight:
        """The same."""
        return self.launch(Batch.pack([(1, [0])]), flight)

    def land(self, flight: Flight) -> list[int]:
        """The tokens by slot."""
        assert flight.tokens is not None
        tokens: list[int] = flight.tokens.tolist()
        return tokens


def _instant(self: Runner, never: Sequence[int]) -> InstantDevice:
    return InstantDevice(self, never)


class Host:
    """An engine process without its sockets, all requests past their prompts."""

    def __init__(self, model: Path, requests: int) -> None:
        self.llm = LLM(model, threads=1, slots=requests, max_rows=max(1024, requests * PROMPT_TOKENS))
        self._host = EngineHost(self.llm, NamedStates(self.llm.state_owner(), budget_bytes=1 << 20), name="tiny")
        params = SamplingParams(max_tokens=1_000_000, temperature=0.0, ignore_eos=True, stop=["\n\n"])
        for index in range(requests):
            caller = Caller(b"http%d" % (index % WORKERS), index)
            prompt = tuple(5 + (index + place) % 90 for place in range(PROMPT_TOKENS))
            self._host.submit(caller, Submission(request_id=str(index), prompt_ids=prompt, params=params))
        self.run(10)

    def run(self, steps: int) -> None:
        """Steps, each with its messages."""
        for _ in range(steps):
            self._host.step()
            for notices in self._host.news().values():
                wire.encode_notices(notices)


def measure(model: Path, requests: int, rounds: int, profile: bool) -> dict[str, Any]:
    """Microseconds of processor time a token: the median and the least of the rounds."""
    host = Host(model, requests)
    taken = []
    for _ in range(rounds):
        begin_s = time.process_time()
        host.run(STEPS)
        taken.append((time.process_time() - begin_s) / (STEPS * requests) * 1e6)
    if profile:
        with cProfile.Profile() as watched:
            host.run(STEPS)
        pstats.Stats(watched, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    host.llm.close()
    found = {"requests": requests, "us_a_token": round(median(taken), 2), "least_us": round(min(taken), 2)}
    return {**found, "tok_s": round(1e6 / median(taken))}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", default="32,128,384")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    Runner.device_steps = _instant  # type: ignore[method-assign, assignment]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny.pth"
        torch.save(random_rwkv7(small(), seed=3), model)
        counts = [int(count) for count in options.requests.split(",")]
        found = [measure(model, count, options.rounds, options.profile) for count in counts]
    for case in found:
        click.echo(
            "{requests:5d} requests: {us_a_token:6.2f} us a token (least {least_us}), {tok_s} tokens/s".format(**case)
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
