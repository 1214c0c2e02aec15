from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.cli import eval_compare
from kittiwake.evals.runs import Run, load_run, save_run
from tests.evals.fake_runs import run

from .conftest import Call, FakeLLM


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str, Run], Path]:
    def save(name: str, made: Run) -> Path:
        path = tmp_path / f"{name}.json"
        save_run(path, made)
        return path

    return save


Saved = Callable[[str, Run], Path]


def test_equal_runs_of_enough_passages_pass(call: Call, saved: Saved) -> None:
    a = saved("a", run([True] * 400 + [False] * 400, wall_ms=5.0, dtype="bf16"))
    b = saved("b", run([True] * 400 + [False] * 400, wall_ms=10.0))
    result = call("eval", "compare", a, b)
    assert result.code == 0, result.stderr
    assert "800 of 800 passages with the same tokens; none that only one side got right" in result.stdout
    assert "400 of 800   50.00 %" in result.stdout
    assert "p50 of A / p50 of B: 0.5" in result.stdout
    assert result.stdout.endswith("non-inferior: A is not 0.5 points below B\n")
    document = json.loads(call("eval", "compare", a, b, "--json").stdout)
    assert document["verdict"] == "non-inferior"


def test_a_worse_run_fails(call: Call, saved: Saved) -> None:
    a = saved("a", run([True] * 300 + [False] * 500, busy=True))
    b = saved("b", run([True] * 400 + [False] * 400, threads=9))
    result = call("eval", "compare", a, b, "--json")
    assert result.code == 1
    document = json.loads(result.stdout)
    assert (document["verdict"], len(document["only_b"])) == ("inferior", 100)
    text = call("eval", "compare", a, b)
    assert text.code == 1
    assert "only B right      300  word300    nothing  word300" in text.stdout
    assert "… and 80 more" in text.stdout
    assert "times do not compare: the threads of A is 2, of B 9" in text.stdout
    assert "others kept the machine busy while A ran" in text.stdout
    assert "INFERIOR: A is more than 0.5 points below B" in text.stdout
    assert call("eval", "compare", b, a).code == 0
    assert call("eval", "compare", a, b, "--margin", "20").code == 0


def test_too_few_passages_show_nothing_and_say_how_many_would(call: Call, saved: Saved) -> None:
    a, b = saved("a", run([True, False])), saved("b", run([True, False]))
    result = call("eval", "compare", a, b)
    assert result.code == 1
    assert "not shown: A may be 0.5 points below B, and may not; 2 passages are too few" in result.stdout
    assert "non-inferior" not in result.stdout


def test_runs_of_other_passages_and_bad_files_are_refused(call: Call, saved: Saved, tmp_path: Path) -> None:
    a, b = saved("a", run([True, False])), saved("b", run([True]))
    result = call("eval", "compare", a, b, "--json")
    assert (result.code, result.stdout) == (2, "")
    assert "A answered 2 passages, B 1" in result.stderr
    (tmp_path / "bad.json").write_text("{}")
    result = call("eval", "compare", a, tmp_path / "bad.json")
    assert (result.code, result.stdout) == (3, "")
    assert call("eval", "compare", a, tmp_path / "gone.json").code == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.json",), "A is a saved run: name B"),
        (("a.json", "--reference", "rwkv"), "A is a saved run: name B"),
        (("model.pth", "--data", "d.jsonl"), "A would be compared with itself"),
        ((), "A would be compared with itself"),
        (("model.pth", "--dtype-b", "fp32"), "--data is missing"),
        (("a.json", "b.json", "--data", "d.jsonl"), "A and B are saved runs: --data does not reach it"),
        (("a.json", "b.json", "--limit", "3"), "--limit does not reach it"),
        (("a.json", "b.json", "--no-bos"), "--bos does not reach it"),
        (("a.json", "b.json", "--tokenizer", "world"), "--tokenizer does not reach it"),
        (("a.json", "b.json", "--group-norm-eps", "1e-5"), "--group-norm-eps does not reach it"),
        (("a.json", "b.json", "--rescale-every", "6"), "--rescale-every does not reach it"),
        (("model.pth", "b.json", "--dtype-b", "fp32"), "B is a saved run: --dtype-b does not reach it"),
        (("model.pth", "b.json", "--reference", "rwkv"), "B is a saved run: --reference does not reach it"),
        (("a.json", "model.pth", "--dtype", "fp32", "--dtype-b", "bf16"), "A is a saved run: --dtype does not"),
        (("a.json", "b.json", "--margin", "0"), "--margin"),
        (("a.json", "b.json", "--alpha", "0.5"), "--alpha"),
        (("a.json", "b.json", "--margin", "nan"), "the margin must be above 0 and below 100 points, got nan"),
        (("a.json", "b.json", "--reference", "llama"), "--reference"),
    ],
)
def test_wrong_usage_is_told_before_any_work(call: Call, arguments: tuple[str, ...], message: str) -> None:
    result = call("eval", "compare", *arguments)
    assert (result.code, result.stdout) == (2, "")
    assert message in result.stderr


@dataclass
class Children:
    """Stands for subprocess.run: writes the run that a child would, and remembers what it was asked."""

    code: int = 0
    asked: list[list[str]] = field(default_factory=list)

    def __call__(self, command: list[str], **options: Any) -> SimpleNamespace:
        assert options == {"stdout": subprocess.DEVNULL, "check": False}
        arguments = command[command.index("eval") :]
        if self.code == 0:
            save_run(Path(arguments[-1]), run([True] * 800))
        self.asked.append(arguments[2:-2])
        assert (arguments[1], arguments[-2]) == ("lambada", "--save")
        return SimpleNamespace(returncode=self.code)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    fake = Children()
    monkeypatch.setattr(eval_compare.subprocess, "run", fake)
    return fake


def _value(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


def test_two_precisions_run_one_after_the_other(call: Call, children: Children, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    options = ("--limit", "9", "--bos", "--tokenizer", "bytes", "--threads", "1", "--rescale-every", "6")
    result = call("eval", "compare", "m.pth", "--dtype", "bf16", "--dtype-b", "fp32", "--data", data, *options)
    assert result.code == 0, result.stderr
    common = ["--rescale-every", "6", "--data", str(data), "--threads", "1"]
    common += ["--limit", "9", "--bos", "--tokenizer", "bytes"]
    model = str(Path("m.pth").absolute())
    assert children.asked == [[model, "--device", "auto", "--dtype", dtype, *common] for dtype in ("bf16", "fp32")]


def test_a_reference_runs_the_weights_of_a_as_they_are(call: Call, children: Children, tmp_path: Path) -> None:
    options = ("--dtype", "bf16", "--group-norm-eps", "1e-05", "--data", tmp_path / "d.jsonl")
    assert call("eval", "compare", "m.pth", "--reference", "transformers", *options).code == 0
    a, b = children.asked
    assert a[0] == b[0] == str(Path("m.pth").absolute())
    assert (_value(a, "--dtype"), _value(b, "--dtype")) == ("bf16", "auto")
    assert "--reference" not in a
    assert _value(b, "--reference") == "transformers"
    assert "--group-norm-eps" in a
    assert "--group-norm-eps" not in b


def test_a_saved_run_is_compared_with_a_model(call: Call, children: Children, saved: Saved, tmp_path: Path) -> None:
    kept = saved("kept", run([True] * 800))
    assert call("eval", "compare", kept, "m.pth", "--dtype", "fp32", "--data", tmp_path / "d.jsonl").code == 0
    assert call("eval", "compare", "m.pth", kept, "--data", tmp_path / "d.jsonl").code == 0
    assert call("eval", "compare", kept, "o.pth", "--reference", "rwkv", "--data", tmp_path / "d.jsonl").code == 0
    assert [Path(asked[0]).name for asked in children.asked] == ["m.pth", "m.pth", "o.pth"]
    assert [_value(asked, "--dtype") for asked in children.asked] == ["fp32", "auto", "auto"]


def test_a_bad_saved_run_is_told_before_the_other_side_runs(call: Call, children: Children, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    assert call("eval", "compare", "m.pth", bad, "--data", tmp_path / "d.jsonl").code == 3
    assert children.asked == []


def test_the_packaged_model_is_a_where_none_is_named(call: Call, children: Children, tmp_path: Path) -> None:
    assert call("eval", "compare", "--reference", "rwkv", "--data", tmp_path / "d.jsonl").code == 0
    assert [asked[:2] for asked in children.asked] == [["--device", "auto"]] * 2


@pytest.mark.parametrize(("code", "told"), [(3, 3), (2, 2), (130, 130), (-9, 1)])
def test_a_side_that_fails_ends_the_comparison(
    call: Call, children: Children, tmp_path: Path, code: int, told: int
) -> None:
    children.code = code
    result = call("eval", "compare", "m.pth", "--reference", "rwkv", "--data", tmp_path / "d.jsonl", "--json")
    assert (result.code, result.stdout, len(children.asked)) == (told, "", 1)
    assert ("ended by signal 9" in result.stderr) == (code == -9)


class ReceiptLLM(FakeLLM):
    def receipt(self, _: object = None) -> dict[str, Any]:
        return {
            "model": {"digest": "d" * 64, "family": "rwkv7", "dtype": "fp32", "tokenizer": "t" * 64},
            "device": {"kind": "cpu", "processor": "a processor", "threads": 2},
            "versions": {"kittiwake": "0.1.0"},
        }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "lambada.jsonl"
    path.write_text("".join(json.dumps({"text": f"passage ends with {gold}"}) + "\n" for gold in ("the", "cat")))
    return path


def test_lambada_keeps_its_run(call: Call, fake_module: Callable[..., Any], data: Path, tmp_path: Path) -> None:
    fake_module("kittiwake.llm", LLM=ReceiptLLM())
    path = tmp_path / "run.json"
    result = call("eval", "lambada", "some.pth", "--data", data, "--save", path, "--json")
    assert result.code == 0, result.stderr
    figures = json.loads(result.stdout)
    assert (figures["correct"], figures["total"]) == (1, 2)
    # the fake gives every token a quarter, and a word with its space has four
    assert figures["perplexity"] == pytest.approx(4**4)
    kept = load_run(path)
    assert [one.predicted for one in kept.outcomes] == ["the", "the"]
    assert (kept.answerer.model, kept.answerer.digest, kept.batch) == ("some.pth", "d" * 64, 1)
    again = call("eval", "lambada", "--data", data, "--save", path)
    assert (again.code, again.stdout) == (2, "")
    assert "exists" in again.stderr
    text = call("eval", "lambada", "--data", data, "--save", tmp_path / "other.json").stdout
    assert "perplexity of the last word 256.0" in text


def test_a_reference_answers_one_passage_at_a_time(call: Call, llm: FakeLLM, data: Path) -> None:
    result = call("eval", "lambada", "--data", data, "--reference", "rwkv", "--batch", "2")
    assert (result.code, result.stdout) == (2, "")
    assert "one passage at a time" in result.stderr


@pytest.mark.slow
def test_two_precisions_of_a_tiny_model_in_processes_of_their_own(call: Call, tmp_path: Path, data: Path) -> None:
    model = tmp_path / "tiny.pth"
    torch.save(random_rwkv7(small(), seed=3), model)
    result = call("eval", "compare", model, "--dtype", "bf16", "--dtype-b", "fp32", "--data", data, "--json")
    assert result.code == 1, result.stderr
    document = json.loads(result.stdout)
    assert (document["verdict"], document["total"]) == ("not shown", 2)
    assert (document["a"]["dtype"], document["b"]["dtype"]) == ("bf16", "fp32")
    assert document["a"]["digest"] == document["b"]["digest"]
    assert document["p50_ratio"] > 0
    broken = call("eval", "compare", tmp_path / "gone.pth", "--dtype-b", "fp32", "--data", data, "--json")
    assert (broken.code, broken.stdout) == (3, "")
