"""What other code writes to stdout, in whatever way, goes to stderr. In processes of their own: descriptors are theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.cli.main import cli

# noise(where) writes in each way there is; what C keeps in its buffer, and an old stream in its own, comes out last.
NOISE = """
import ctypes, os, subprocess, sys
C, OLD = ctypes.CDLL(None), sys.stdout

def noise(where):
    print(f"noise: print in {where}")
    if OLD is not None:
        OLD.write(f"noise: an old stream in {where}\\n")
    os.write(1, f"noise: write in {where}\\n".encode())
    C.printf(b"noise: printf in %s\\n", where.encode())
    subprocess.run(["echo", f"noise: a child in {where}"], check=True)
"""
WAYS = ("print", "an old stream", "write", "printf", "a child")

BENCH = f"""
{NOISE}
from kittiwake.bench import against, random
from kittiwake.bench.peers.eager_torch import EagerTorch
from kittiwake.bench.shapes import small
from kittiwake.cli.main import main

class Noisy(EagerTorch):
    def __init__(self, task):
        noise("build")
        super().__init__(task)

    def start(self, batch):
        noise("start")
        super().start(batch)

    def forward(self, ids):
        if ids.shape[0] == 3:
            noise("a forward call that fails")
            raise RuntimeError("it breaks down")
        noise("forward")
        return super().forward(ids)

random.ALL_SHAPES["0.1b"] = small(2, 128, 64)
against.PEERS = {{**against.PEERS, "torch": Noisy}}
sys.exit(main(sys.argv[1:]))
"""
PLACES = ("build", "start", "forward", "a forward call that fails")

LAMBADA = f"""
{NOISE}
from kittiwake.evals import references

class Noisy:
    version = "noisy 1.0"

    def __init__(self, weights, device, dtype):
        noise("build")

    def last(self, ids, state):
        noise("forward")
        return references.torch.zeros(65536), state

references.RwkvPackage = Noisy
from kittiwake.cli.main import main
sys.exit(main(sys.argv[1:]))
"""

DOCTOR = f"""
{NOISE}
from kittiwake.bench import machine

describe = machine.describe_machine
def describe_machine():
    noise("a probe")
    return describe()

machine.describe_machine = describe_machine
from kittiwake.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def _run(script: str, *arguments: str | Path, shell: str = "") -> subprocess.CompletedProcess[str]:
    """The script with stdout on a pipe, or as ``shell`` redirects it."""
    start = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{script}", *map(str, arguments)]
    command = ["bash", "-c", f'"$@" {shell}', "bash", *start] if shell else start
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def _assert_noise(stderr: str, places: tuple[str, ...]) -> None:
    for place in places:
        for way in WAYS:
            assert f"noise: {way} in {place}\n" in stderr


BENCH_ARGUMENTS = "bench --shape 0.1b --cases 1x4,3x1 --against torch --repeat 1 --device cpu --threads 1".split()


def test_bench_writes_one_json_document_whatever_a_peer_does() -> None:
    done = _run(BENCH, *BENCH_ARGUMENTS, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["case"] for row in rows] == ["1x4", "3x1"]
    assert [row["peers"][0].get("reason", "") for row in rows] == ["", "RuntimeError: it breaks down"]
    _assert_noise(done.stderr, PLACES)


def test_a_peer_writes_nothing_into_the_table_either() -> None:
    done = _run(BENCH, *BENCH_ARGUMENTS)
    assert done.returncode == 0, done.stderr
    assert "against torch" in done.stdout
    assert "noise" not in done.stdout
    _assert_noise(done.stderr, PLACES)


@pytest.mark.parametrize("options", [["--json"], []])
def test_a_reference_writes_nothing_into_the_figures(tmp_path: Path, options: list[str]) -> None:
    torch.save(random_rwkv7(small(layers=2, vocab=65536), seed=3), tmp_path / "model.pth")
    data = tmp_path / "passages.jsonl"
    data.write_text('{"text": "the cat sat"}\n', encoding="utf-8")
    arguments = ("eval", "lambada", tmp_path / "model.pth", "--data", data, "--reference", "rwkv", "--device", "cpu")
    done = _run(LAMBADA, *arguments, *options)
    assert done.returncode == 0, done.stderr
    assert "noise" not in done.stdout
    if options:
        assert json.loads(done.stdout)["total"] == 1
    _assert_noise(done.stderr, ("build", "forward"))


def test_any_command_with_json_keeps_stdout_for_its_document(tmp_path: Path) -> None:
    target = tmp_path / "doctor.json"
    done = _run(DOCTOR, "doctor", "--device", "cpu", "--json", shell=f"> {target}")
    assert done.returncode == 0, done.stderr
    assert json.loads(target.read_text(encoding="utf-8"))["model"]
    _assert_noise(done.stderr, ("a probe",))


def test_clicks_runner_sees_the_document_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine(*_: object) -> dict[str, object]:
        print("noise")
        return {"model": "a model"}

    monkeypatch.setattr("kittiwake.cli.doctor.examine", examine)
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    assert (result.exit_code, json.loads(result.stdout), result.stderr) == (0, {"model": "a model"}, "noise\n")


def test_an_error_leaves_stdout_empty() -> None:
    fails = (
        "import kittiwake.load\ndef load_model(*_, **__): raise OSError('no')\nkittiwake.load.load_model = load_model"
    )
    done = _run(f"{fails}\n{DOCTOR}", "doctor", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    _assert_noise(done.stderr, ("a probe",))


def test_a_reader_that_goes_away_is_no_error() -> None:
    done = _run(DOCTOR, "doctor", "--device", "cpu", "--json", shell="| true; exit ${PIPESTATUS[0]}")
    assert done.returncode == 141, done.stderr
    assert "error" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_descriptors_are_no_fault(closed: str) -> None:
    done = _run(DOCTOR, "doctor", "--device", "cpu", "--json", shell=closed)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if closed == "2>&-":
        assert json.loads(done.stdout)["model"]
    else:
        assert done.stdout == ""
