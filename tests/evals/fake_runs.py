"""Runs of LAMBADA that no model made."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from kittiwake.evals.runs import Answerer, Outcome, Run

ANSWERER = Answerer(
    implementation="kittiwake",
    version="0.1.0",
    model="some.pth",
    digest="d" * 64,
    family="rwkv7",
    dtype="fp32",
    device="cpu",
    processor="a processor",
    threads=2,
    tokenizer="t" * 64,
)


def outcome(index: int, right: bool, wall_ms: float = 10.0, log_prob: float | None = -1.0) -> Outcome:
    """A passage whose last word is "wordI", answered rightly or with "nothing"."""
    target = f"word{index}"
    said = target if right else "nothing"
    digest = hashlib.sha256(target.encode()).hexdigest()
    return Outcome(index, digest, target, said, right, f" {said}.", (index, int(right)), 7, log_prob, wall_ms)


def run(
    right: Sequence[bool],
    *,
    wall_ms: float = 10.0,
    bos: bool = False,
    batch: int = 1,
    busy: bool = False,
    **changes: object,
) -> Run:
    """A run with these passages right; ``changes`` are fields of its answerer."""
    outcomes = tuple(outcome(index, one, wall_ms) for index, one in enumerate(right))
    return Run(replace(ANSWERER, **changes), bos, batch, busy, outcomes)  # type: ignore[arg-type]
