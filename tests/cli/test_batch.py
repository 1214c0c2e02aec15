from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kittiwake.bench.shapes import random_rwkv7, small

from .conftest import Call

# Imports once, then forks before any thread has started: each child is the whole command, and dies at its time.
KILLER = """
import os, random, signal, sys, time
import kittiwake.batch_file
from kittiwake.cli.main import main
seed, out, *arguments = sys.argv[1:]
draw, kills = random.Random(int(seed)), 0
while True:
    child = os.fork()
    if child == 0:
        os._exit(main(arguments))
    size = os.path.getsize(out) if os.path.exists(out) else 0
    goal = size + draw.randrange(1, 4000)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if kills < 3 and os.path.exists(out) and os.path.getsize(out) >= goal:
            time.sleep(draw.random() * 0.005)
            os.kill(child, signal.SIGKILL)
            kills += 1
            _, status = os.waitpid(child, 0)
            if not os.WIFSIGNALED(status):
                sys.exit(f"{kills}")
            with open(out, "ab") as file:  # what a kill in the middle of a write leaves
                file.write(b'{"id": "r' [: draw.randrange(10)])
            break
        time.sleep(0.001)
    else:
        break
print(kills)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.pth"
    torch.save(random_rwkv7(small(layers=2), seed=3), path)
    return path


def _requests(path: Path, count: int) -> Path:
    lines = [{"id": f"r{index}", "prompt": f"Tale {index}", "max_tokens": 5 + index % 40} for index in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_answers_and_a_summary(call: Call, tiny: Path, tmp_path: Path) -> None:
    asked, out = _requests(tmp_path / "in.jsonl", 5), tmp_path / "out.jsonl"
    result = call("batch", asked, out, tiny, "--concurrency", "2", "--threads", "1")
    assert (result.code, result.stdout) == (0, "")
    assert "[5 answers · " in result.stderr
    assert len(out.read_text().splitlines()) == 5
    again = call("batch", asked, out, tiny)
    assert (again.code, again.stderr) == (0, "[all 5 answers are there already]\n")


def test_wrong_lines_are_exit_2_and_nothing_is_written(call: Call, tiny: Path, tmp_path: Path) -> None:
    asked = tmp_path / "in.jsonl"
    asked.write_text('{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "x", "temprature": 1}\n')
    result = call("batch", asked, tmp_path / "out.jsonl", tiny)
    assert result.code == 2
    assert "line 2: there is no field 'temprature'" in result.stderr
    assert not (tmp_path / "out.jsonl").exists()
    assert call("batch", asked, asked, tiny).code == 2
    assert call("batch", tmp_path / "missing", tmp_path / "out.jsonl", tiny).code == 3


def test_work_that_the_model_refuses_leaves_no_file_and_what_was_there_as_it_was(
    call: Call, tiny: Path, tmp_path: Path
) -> None:
    asked, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text('{"id": "a", "prompt": [99999999]}\n')
    result = call("batch", asked, out, tiny)
    assert result.code == 2 and "99999999, which is no token id" in result.stderr
    assert not out.exists()
    assert call("batch", asked, out, tmp_path / "missing").code == 3
    assert not out.exists()
    out.touch()
    assert call("batch", asked, out, tiny).code == 2
    assert out.read_bytes() == b""


def test_an_answer_that_is_an_error_is_exit_1(call: Call, tiny: Path, tmp_path: Path) -> None:
    asked = tmp_path / "in.jsonl"
    bias = {str(token): -100 for token in range(256)}
    asked.write_text(json.dumps({"id": "a", "prompt": "x", "logit_bias": bias}) + "\n")
    for _ in range(2):
        result = call("batch", asked, tmp_path / "out.jsonl", tiny, "--threads", "1")
        assert result.code == 1
        assert "1 of the answers are errors" in result.stderr


def test_killed_again_and_again_it_loses_and_repeats_nothing(call: Call, tiny: Path, tmp_path: Path) -> None:
    asked, out, whole = _requests(tmp_path / "in.jsonl", 150), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    assert call("batch", asked, whole, tiny, "--threads", "1").code == 0
    arguments = ("batch", asked, out, tiny, "--threads", "1", "--concurrency", "3")
    line = [sys.executable, "-c", KILLER, "1", str(out), *map(str, arguments)]
    done = subprocess.run(line, check=True, capture_output=True, text=True, timeout=250)
    assert int(done.stdout) >= 2, done.stderr
    assert sorted(out.read_text().splitlines()) == sorted(whole.read_text().splitlines())
