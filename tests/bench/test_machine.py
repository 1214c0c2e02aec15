from __future__ import annotations

import json
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
