"""The adapter under lm-eval itself, offline, on task files of this folder; what it reports is reckoned again here."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.engine.request import SamplingParams
from kittiwake.llm import LLM

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed (the extra 'eval')"
)

TASKS = Path(__file__).parent / "tasks"
SCRIPT = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
import kittiwake.evals.lm_eval_adapter

tasks = TaskManager(include_path=sys.argv[1], include_defaults=False)
report = lm_eval.simple_evaluate(
    model="kittiwake", model_args=f"model={sys.argv[2]},threads=1", tasks=sys.argv[4].split(","), task_manager=tasks,
    log_samples=True, bootstrap_iters=0, batch_size=int(sys.argv[3]),
)
samples = {
    task: [{"arguments": one["arguments"], "resps": one["resps"]} for one in rows]
    for task, rows in report["samples"].items()
}
json.dump({"results": report["results"], "samples": samples}, open(sys.argv[5], "w"), default=str)
"""
NAMES = ("kittiwake_choice", "kittiwake_rolling", "kittiwake_generate")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.pth"
    torch.save(random_rwkv7(small(2, 64, 16), seed=3), path)
    return path


def evaluate(folder: Path, model: Path, batch: int) -> Any:
    """Run the three tasks through lm-eval in a process of its own."""
    for file in TASKS.iterdir():
        text = file.read_text(encoding="utf-8").replace("DATA/", f"{folder}/")
        (folder / file.name).write_text(text, encoding="utf-8")
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    out = folder / "report.json"
    line = [sys.executable, "-c", SCRIPT, str(folder), str(model), str(batch), ",".join(NAMES), str(out)]
    ran = subprocess.run(line, env={**os.environ, **offline}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(out.read_text())


@pytest.mark.slow
def test_lm_eval_reports_what_the_model_says(tmp_path_factory: pytest.TempPathFactory, model: Path) -> None:
    report = evaluate(tmp_path_factory.mktemp("run"), model, 2)
    llm = LLM(model, threads=1)
    for sample in report["samples"]["kittiwake_choice"]:
        for (context, continuation), response in zip(sample["arguments"], sample["resps"], strict=True):
            ids = (context + continuation).encode()  # tokens are bytes, so a border is a border
            values = llm.score(list(ids)).tolist()
            kept = context.rstrip().encode()
            total = math.fsum(values[len(kept) - 1 :]) if kept else math.fsum(values) - math.log(256)
            assert response[0][0] == total
    for sample in report["samples"]["kittiwake_rolling"]:
        ids = list(sample["arguments"][0][0].encode())
        total = (math.fsum(llm.score(ids).tolist()) if len(ids) > 1 else 0.0) - math.log(256)
        assert sample["resps"][0][0] == total
    params = SamplingParams(max_tokens=12, temperature=0.0, stop=("\n", "zz"))
    for sample in report["samples"]["kittiwake_generate"]:
        assert sample["resps"][0][0] == llm.generate(sample["arguments"][0][0], params)[0].text
    texts = [json.loads(line)["text"] for line in (TASKS / "texts.jsonl").read_text(encoding="utf-8").splitlines()]
    bits = -sum(sample["resps"][0][0] for sample in report["samples"]["kittiwake_rolling"]) / math.log(2)
    per_byte = report["results"]["kittiwake_rolling"]["bits_per_byte,none"]
    assert per_byte == pytest.approx(bits / sum(len(text.encode()) for text in texts))


@pytest.mark.slow
def test_the_batch_size_changes_nothing(tmp_path_factory: pytest.TempPathFactory, model: Path) -> None:
    reports = [evaluate(tmp_path_factory.mktemp("run"), model, batch)["samples"] for batch in (1, 64)]
    assert reports[0] == reports[1]


@pytest.fixture
def adapter() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lm-eval and what it imports
        from kittiwake.evals import lm_eval_adapter
    return lm_eval_adapter


def test_generation_options_are_used_or_refused(adapter: Any) -> None:
    greedy = adapter.sampling_params({"until": "\n", "do_sample": False, "temperature": 0.7, "max_gen_toks": 5}, 1)
    assert greedy == SamplingParams(max_tokens=5, temperature=0.0, stop=("\n",))
    sampled = adapter.sampling_params({"until": ["a", "b"], "temperature": 0.7, "top_p": 0.9}, 3)
    assert sampled == SamplingParams(max_tokens=256, temperature=0.7, top_p=0.9, seed=3, stop=("a", "b"))
    assert adapter.sampling_params({}, 0) == SamplingParams(max_tokens=256, temperature=0.0)
    with pytest.raises(Exception, match="does not know: num_beams"):
        adapter.sampling_params({"num_beams": 4}, 0)


def test_batch_sizes(adapter: Any) -> None:
    assert adapter._batch_size("auto", None) == 64
    assert adapter._batch_size("auto:4", 16) == 16
    assert adapter._batch_size("8", None) == adapter._batch_size(8, None) == 8
    for wrong in (0, "x", "-1"):
        with pytest.raises(Exception, match="batch_size"):
            adapter._batch_size(wrong, None)


def test_options_of_the_model_are_used_or_refused(adapter: Any, model: Path) -> None:
    with pytest.raises(Exception, match="no option nonsense"):
        adapter.KittiwakeLM(model, nonsense=1)
    with pytest.raises(Exception, match="device must be"):
        adapter.KittiwakeLM(model, device="tpu")
    with pytest.raises(Exception, match="no end-of-text token"):
        adapter.KittiwakeLM(model, bos=True)
