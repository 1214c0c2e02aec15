"""Hostile files through the commands: exit code 3, a line that names file and fault, no traceback, no code run, and
neither memory nor time beyond what an honest file of that size takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call, call  # noqa: F401  a fixture
from tests.hostile.files import FILES, _bundle

MOST_SECONDS = 10.0
MOST_MB = 200.0

# All files in one process, which first does honest work, so that what is imported late is not counted.
RUNNER = """
import contextlib, io, json, pathlib, sys, time
from kittiwake.cli.main import main

def peak_mb():
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0

def run(*arguments):
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    out, err, before, start = io.StringIO(), io.StringIO(), peak_mb(), time.perf_counter()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return [code, out.getvalue(), err.getvalue(), time.perf_counter() - start, peak_mb() - before]

good, *paths = sys.argv[1:]
run("run", good, "--prompt", "x", "-n", "2")
run("inspect", good)
found = {}
for path in paths:
    found[path] = [run("inspect", path), run("run", path, "--prompt", "x", "--json")]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """kind → (folder, path, [inspect, run]), each as RUNNER tells it."""
    made = {}
    for kind, (make, _) in FILES.items():
        folder = tmp_path_factory.mktemp(kind.replace(" ", "-"))
        made[kind] = (folder, make(folder))
    good = _bundle(tmp_path_factory.mktemp("good"))
    line = [sys.executable, "-c", RUNNER, str(good), *(str(path) for _, path in made.values())]
    done = subprocess.run(line, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {kind: (folder, path, found[str(path)]) for kind, (folder, path) in made.items()}


# Readable as files, whatever they hold: inspect tells why no model comes of them, and ends with 0.
READABLE = {"tensors of no model", "bundle of a billion layers", "bundle of no layers"}


@pytest.mark.parametrize("kind", FILES)
def test_a_hostile_file_is_refused_by_name(outcomes: dict[str, Any], kind: str) -> None:
    folder, path, (inspected, ran) = outcomes[kind]
    for command, (code, out, err, seconds, megabytes) in (("inspect", inspected), ("run", ran)):
        if command == "inspect" and kind in READABLE and code == 0:
            assert "kittiwake does not run it" in out
        else:
            assert (code, out) == (3, ""), (command, err)
            assert err.startswith("error: "), err
            assert FILES[kind][1] in err, (command, err)
            assert path.name in err or folder.name in err
        assert "Traceback" not in err
        assert len(err) < 2000
        assert seconds < MOST_SECONDS
        assert megabytes < MOST_MB
    assert not (folder / "ran").exists(), "code out of the file was run"


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "loop turns"),
        ("{{ 'a' * 10 ** 10 }}", "10000000000"),
        ("{% if %}", "line 1"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_bundle_with_a_hostile_template(
    call: Call,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    word: str,
) -> None:
    bundle = _bundle(tmp_path, template=template)
    requests = tmp_path / "in.jsonl"
    requests.write_text('{"id": "a", "messages": [{"role": "user", "content": "x"}]}\n')
    result = call("batch", requests, tmp_path / "out.jsonl", bundle, "--threads", "1")
    assert result.code == 3
    assert "chat_template.jinja" in result.stderr
    assert word in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 200_000,
        b'{"model": {}}',
        b'{"model": {"type": "BPE", "vocab": {"a": 999999999999}}}',
        b"\xff" * 99,
    ],
)
def test_a_hostile_tokenizer(call: Call, tmp_path: Path, content: bytes) -> None:  # noqa: F811
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    bundle = _bundle(tmp_path)
    result = call("run", bundle, "--prompt", "x", "--tokenizer", path, "--json")
    assert (result.code, result.stdout) == (3, "")
    assert "tokenizer.json" in result.stderr
    assert "Traceback" not in result.stderr
