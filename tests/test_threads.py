"""The law at every number of threads, in a process that has no more of them than it uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.config import EngineConfig
from kittiwake.llm import LLM, SamplingParams
from kittiwake.load import load_tensors
from kittiwake.verify.laws import verify
from kittiwake.verify.trace import fingerprint
from tests.tiny import run_alone

THREADS = (1, 2, 3, 5)
SHAPE = small(2, 96, 32, rank_w=5, rank_a=9, rank_v=7, rank_g=33)
"""Odd ranks, and a channel mix whose sum takes several blocks."""
PROMPTS = ["It was a dark night", "x", "The old man looked at the sea " * 9]


def report(threads: int, *, laws: bool) -> dict[str, Any]:
    """Bits and tokens of the model at this number of threads; with ``laws``, what verify found as well."""
    loaded = load_tensors(random_rwkv7(SHAPE, seed=2), EngineConfig(threads=threads))
    logits, state = run_alone(loaded.model, [(17 * i + 3) % 256 for i in range(300)])
    answers = LLM.from_loaded(loaded).generate(PROMPTS, SamplingParams(max_tokens=24, seed=1))
    results = verify(loaded, EngineConfig()) if laws else []
    return {
        "cases": sum(law.cases for law in results),
        "differing": {law.name: law.differing for law in results if law.differing},
        "bits": fingerprint(logits, state.parts),
        "token_ids": [list(answer.token_ids) for answer in answers],
        "torch_from_rows": sorted({row["wide_from"] for row in loaded.model.describe()["products"]}),
    }


@pytest.fixture(scope="module")
def reports() -> dict[int, dict[str, Any]]:
    """Of a process with five threads, by the number of them that the model may use."""
    code = (
        "import json; from tests.test_threads import THREADS, report; "
        "print(json.dumps([report(threads, laws=True) for threads in THREADS]))"
    )
    environment = {**os.environ, "NUMBA_NUM_THREADS": "5"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(THREADS, json.loads(done.stdout), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("threads", THREADS)
def test_a_model_is_exact_at_every_number_of_threads(reports: dict[int, dict[str, Any]], threads: int) -> None:
    assert reports[threads]["cases"] >= 100
    assert reports[threads]["differing"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("threads", THREADS)
def test_another_process_has_the_same_bits(reports: dict[int, dict[str, Any]], threads: int) -> None:
    here = report(threads, laws=False)
    assert {name: reports[threads][name] for name in ("bits", "token_ids")} == {
        name: here[name] for name in ("bits", "token_ids")
    }


@pytest.mark.slow
def test_bits_across_numbers_of_threads_are_told(
    reports: dict[int, dict[str, Any]], record_property: pytest.RecordProperty
) -> None:
    """They need to agree within one number of threads only; that they do across is no promise, so it is not asked."""
    for threads, found in reports.items():
        print(f"{threads} threads: bits {found['bits'][:16]}, torch from {found['torch_from_rows']} rows")
        record_property(f"bits at {threads} threads", found["bits"])
    record_property("kinds of bits", len({found["bits"] for found in reports.values()}))
    record_property("kinds of answers", len({str(found["token_ids"]) for found in reports.values()}))
