from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from kittiwake import __version__
from kittiwake.bench import machine


def test_description_is_json_and_names_what_counts() -> None:
    found = machine.describe_machine()
    assert json.loads(json.dumps(found)) == found
    assert found["kittiwake"] == __version__
    assert found["usable_cores"] >= 1
    assert {"torch", "numpy", "numba"} <= found["packages"].keys()


def test_line_holds_the_processor_threads_and_versions() -> None:
    line = machine.machine_line(2)
    assert machine.processor_name() in line
    assert "torch" in line
    assert "numba" in line


@pytest.mark.parametrize(("text", "cores"), [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None)])
def test_quota_of_a_container(text: str, cores: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(machine, "_QUOTA", tmp_path / "cpu.max")
    assert machine.cpu_quota_cores() == cores


def test_what_cannot_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_QUOTA", tmp_path / "missing")
    monkeypatch.setattr(machine, "_CPU", tmp_path / "missing")
    assert machine.cpu_quota_cores() is None
    assert machine.processor_caches() == {}
    assert machine.memory_bytes("NoSuchField") is None


def test_tested_ranges_are_those_of_the_project_file() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ranges = dict(re.fullmatch(r"([\w-]+)(>=.+)", line).groups() for line in project["dependencies"])  # type: ignore[union-attr]
    assert ranges == {name: f">={low},<{high}" for name, (low, high) in machine.TESTED.items()}
    assert project["requires-python"] == ">={},<{}".format(*machine.TESTED_PYTHON)


@pytest.mark.parametrize(
    ("installed", "ok"),
    [("2.11", True), ("2.13.0+cpu", True), ("2.14.9", True), ("2.15.0", False), ("2.9.1", False), ("2.11rc1", True)],
)
def test_an_installed_version_is_compared_as_numbers(installed: str, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "package_versions", lambda: {"torch": installed})
    rows = {row["name"]: row for row in machine.checked_versions()}
    assert (rows["torch"]["ok"], rows["torch"]["tested"]) == (ok, ">=2.11,<2.15")
    assert (rows["numba"]["installed"], rows["numba"]["ok"]) == (None, False)
    assert rows["Python"]["ok"]


def test_everything_installed_here_is_tested() -> None:
    assert all(row["ok"] for row in machine.checked_versions())
