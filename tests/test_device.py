"""What is told about the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kittiwake.device import SPIN_COUNT, is_busy, resolve_threads, usable_cores, waiting_environment
from kittiwake.errors import UsageError


def test_a_machine_is_busy_when_others_have_work_for_our_cores(tmp_path: Path) -> None:
    load, left = tmp_path / "loadavg", (os.cpu_count() or 1) - usable_cores()
    load.write_text(f"9.00 9.00 9.00 {left + 1}/300 4242\n", encoding="ascii")
    assert not is_busy(load)
    load.write_text(f"0.00 0.00 0.00 {left + 2}/300 4242\n", encoding="ascii")
    assert is_busy(load)
    load.write_text("nonsense", encoding="ascii")
    assert not is_busy(load)
    assert not is_busy(tmp_path / "missing")


def test_a_choice_of_the_user_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert waiting_environment() == {}
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr("kittiwake.device.is_busy", lambda: False)
    assert waiting_environment() == {"GOMP_SPINCOUNT": str(SPIN_COUNT)}
    monkeypatch.setattr("kittiwake.device.is_busy", lambda: True)
    assert waiting_environment() == {"OMP_WAIT_POLICY": "passive"}


def test_more_threads_than_numba_can_start_are_refused() -> None:
    assert 1 <= resolve_threads(0) <= usable_cores()
    with pytest.raises(UsageError, match="threads 1000 is more than"):
        resolve_threads(1000)
