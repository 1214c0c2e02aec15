from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from kittiwake import __version__, errors

from .conftest import Call

COMMANDS = ("run", "chat", "serve", "batch", "verify", "bench", "inspect", "doctor", "build", "eval")


def test_help_names_every_command(call: Call) -> None:
    result = call("--help")
    assert result.code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in result.stdout


@pytest.mark.parametrize("command", [*COMMANDS, "eval lambada", "eval bits"])
def test_each_command_has_help(call: Call, command: str) -> None:
    result = call(*command.split(), "-h")
    assert result.code == 0
    assert result.stdout.startswith(f"Usage: kittiwake {command}")


def test_help_and_version_load_nothing_heavy() -> None:
    script = (
        "import sys, json\nfrom kittiwake.cli.main import main\n"
        "helps = [['--version'], *([*name.split(), '--help'] for name in ('run', 'chat', 'batch', 'eval lambada'))]\n"
        "codes = [main(arguments) for arguments in helps]\n"
        "heavy = [name for name in ('torch', 'numba', 'rich', 'tokenizers') if name in sys.modules]\n"
        "print(json.dumps([codes, heavy]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"kittiwake, version {__version__}")
    assert json.loads(done.stdout.splitlines()[-1]) == [[0, 0, 0, 0, 0], []]


@pytest.mark.parametrize("arguments", [["nonsense"], ["run", "--nonsense"], ["eval", "nonsense"], ["inspect"]])
def test_wrong_usage_is_exit_2_with_a_hint(call: Call, arguments: list[str]) -> None:
    result = call(*arguments)
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert "hint: kittiwake" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["eval"]])
def test_no_command_shows_the_help_on_stderr(call: Call, arguments: list[str]) -> None:
    result = call(*arguments)
    assert (result.code, result.stdout) == (2, "")
    assert "Commands:" in result.stderr


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (errors.CheckpointError("weights.pth is truncated", "copy it again"), 3),
        (errors.BundleError("bad digest"), 3),
        (errors.TokenizerError("does not fit"), 3),
        (errors.UsageError("no such shape"), 2),
        (errors.OutputError("exists"), 2),
        (errors.DeviceError("no such device"), 1),
        (MemoryError(), 1),
        (OSError(28, "No space left on device", "out.bin"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(call: Call, fake_module: Callable[..., ModuleType], raised: BaseException, code: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    fake_module("kittiwake.llm", LLM=fail)
    result = call("run", "--prompt", "x", "--json")
    assert (result.code, result.stdout) == (code, "")
    if isinstance(raised, errors.KittiwakeError):
        hint = f"hint: {raised.hint}\n" if raised.hint else ""
        assert result.stderr == f"error: {raised.message}\n{hint}"
    assert "Traceback" not in result.stderr


def test_a_fault_of_ours_is_told_apart_from_a_failed_check(call: Call, fake_module: Callable[..., ModuleType]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("deep inside")

    fake_module("kittiwake.llm", LLM=fail)
    result = call("run", "--prompt", "x")
    assert (result.code, result.stdout) == (70, "")
    assert "ZeroDivisionError: deep inside" in result.stderr
    assert "fault in kittiwake" in result.stderr


def test_how_idle_threads_wait_is_set_before_torch_comes_in() -> None:
    script = (
        "import os, sys\nfrom kittiwake import device\ndevice.is_busy = lambda: {busy}\n"
        "from kittiwake.cli.main import main\nmain(['--version'])\n"
        "print(os.environ.get('OMP_WAIT_POLICY'), os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    )
    for given, busy, expected in (
        ({}, False, "None 5000"),
        ({}, True, "passive None"),
        ({"OMP_WAIT_POLICY": "active"}, False, "active None"),
    ):
        command = [sys.executable, "-c", script.replace("{busy}", str(busy))]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=given)
        assert done.stdout.splitlines()[-1] == f"{expected} False"


def test_an_empty_model_is_not_the_folder_one_stands_in(call: Call) -> None:
    result = call("run", "", "--prompt", "x")
    assert result.code == 2 and "the path is empty" in result.stderr


def test_closed_standard_streams_are_no_fault() -> None:
    script = "import sys\nfrom kittiwake.cli.main import main\nsys.stdout = None\nsys.exit(main(['--version']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_stderr_that_takes_nothing_changes_no_exit_code() -> None:
    with Path("/dev/full").open("w") as full:
        for arguments, code in ((["doctor", "--device", "cpu", "--json"], 0), (["run", "--threads", "-1"], 2)):
            command = [sys.executable, "-m", "kittiwake", *arguments]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, check=False)
            assert done.returncode == code
            assert bool(done.stdout) == (code == 0)


def test_sigterm_leaves_nothing_temporary(tmp_path: Path) -> None:
    script = """
import signal, sys, tempfile
import kittiwake.load
from kittiwake.cli.main import main

def load_model(*_, **__):
    with tempfile.NamedTemporaryFile(dir=sys.argv[1]):
        signal.raise_signal(signal.SIGTERM)

kittiwake.load.load_model = load_model
try:
    main(["verify", "--json"])
finally:
    print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (143, "True\n", "")
    assert list(tmp_path.iterdir()) == []


def test_too_many_threads_are_refused(call: Call) -> None:
    result = call("run", "--prompt", "x", "--threads", "100000")
    assert result.code == 2 and "threads must be a whole number from 0 to 512, got 100000" in result.stderr
