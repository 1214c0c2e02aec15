"""A long prompt needs no more memory than a short one: measured in processes of their own, as their peak."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kittiwake.bench.shapes import random_rwkv7, small
from tests.text.tiny import make_byte_level

SCRIPT = """
import json, resource, sys
from kittiwake import LLM, SamplingParams
model, tokenizer, words = sys.argv[1:]
llm = LLM(model, tokenizer=tokenizer, threads=1)
text = "hello world, the end of text\\n" * int(words)
tokens = [llm.generate(text, SamplingParams(max_tokens=2, ignore_eos=True))[0].prompt_tokens]
peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
tokens.append(len(llm.score(text)) + 1)
peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(json.dumps([tokens, peaks]))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model and a byte-level BPE."""
    folder = tmp_path_factory.mktemp("long")
    torch.save(random_rwkv7(small(1, 64, 16, vocab=320), seed=1), folder / "model.pth")
    (folder / "tokenizer.json").write_text(make_byte_level().to_str(), encoding="utf-8")
    return folder / "model.pth", folder / "tokenizer.json"


@pytest.mark.slow
def test_a_prompt_sixteen_times_as_long_needs_the_same_memory(files: tuple[Path, Path]) -> None:
    peaks = []
    for lines in (900, 900 * 16):
        line = [sys.executable, "-c", SCRIPT, *map(str, files), str(lines)]
        ran = subprocess.run(line, check=True, capture_output=True, text=True)
        tokens, peaks_kib = json.loads(ran.stdout)
        assert min(tokens) >= lines * 8
        peaks.append(peaks_kib)
    for what, short, long in zip(("generated", "scored"), *peaks, strict=True):
        assert long < 1.05 * short, (what, peaks)
