"""What is told about the machine."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kittiwake.device import (
    SPIN_COUNT,
    captured,
    device_memory_for,
    driver_version,
    find_card,
    is_busy,
    on_its_card,
    resolve_threads,
    usable_cores,
    waiting_environment,
    why_no_cuda,
)
from kittiwake.errors import DeviceError, UsageError


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


H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=143 << 30, L2_cache_size=60 << 20
)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A build of torch for CUDA 13.0, and one card; change its fields to have another."""
    found = SimpleNamespace(**vars(H200))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13010, raising=False)
    return found


def test_a_card_is_described(card: SimpleNamespace) -> None:
    found = find_card().card
    assert found is not None
    assert (found.name, found.capability, found.multiprocessors, found.driver_cuda) == (
        "NVIDIA H200",
        "9.0",
        132,
        "13.1",
    )
    assert found.document()["memory_bytes"] == 143 << 30
    assert "NVIDIA H200 (compute 9.0, 132 SMs)" in found.line
    assert "CUDA 13.0" in found.line


def test_a_build_without_cuda_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert find_card().card is None
    assert "built for the CPU only" in find_card().reason
    assert "built for the CPU only" in why_no_cuda()


def test_a_missing_or_old_driver_is_told_in_torchs_words(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\n Please update")

    monkeypatch.setattr(torch.cuda, "init", fail)
    assert "too old (found version 11040). Please update" in find_card().reason


def test_a_hidden_card_is_told_with_what_hides_it(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_card().reason == "there is no card 0: torch sees 0 (CUDA_VISIBLE_DEVICES is '')"


def test_an_old_card_is_refused_by_its_capability(card: SimpleNamespace) -> None:
    card.major, card.minor, card.name = 7, 5, "Tesla T4"
    assert why_no_cuda() == "Tesla T4 has compute capability 7.5; 8.0 or later is needed"


@pytest.mark.parametrize("missing", ["triton", "cuda.bindings.nvrtc"])
def test_a_missing_library_is_named_with_what_brings_it(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def find(name: str) -> None:
        if name == missing:
            raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", find)
    assert why_no_cuda() == f"{missing} cannot be imported (No module named {missing!r}): pip install 'kittiwake[cuda]'"


def test_a_card_with_everything_is_taken(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: None)
    assert why_no_cuda() == ""


@pytest.mark.parametrize(
    ("more", "limit"),
    [
        ("", ""),
        (" Process 498 has 946.00 MiB memory in use.\nProcess 513 has 1.46 GiB memory in use.", ""),
        (
            " Including non-PyTorch memory, this process has 6.00 GiB memory in use. 452.00 MiB allowed;",
            ", this process may have 452.00 MiB",
        ),
    ],
)
def test_the_end_of_a_cards_memory_is_a_clear_error(more: str, limit: str) -> None:
    said = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free."
        f"{more} Of the allocated memory 6.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
    )
    expected = f"no room for 9 slots: 2.00 GiB were asked for, 1.00 GiB of 8.00 GiB are free{limit} (take fewer)"
    with pytest.raises(DeviceError) as raised, device_memory_for("9 slots", "take fewer"):
        raise torch.OutOfMemoryError(said)
    assert str(raised.value) == f"the card has {expected}"
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_other_faults_are_not_the_end_of_memory() -> None:
    with (
        pytest.raises(DeviceError, match=r"9 slots: the cards are full \(take"),
        device_memory_for("9 slots", "take fewer"),
    ):
        raise torch.OutOfMemoryError("the cards are full\nand more")
    with pytest.raises(RuntimeError, match="another"), device_memory_for("9 slots", "take fewer"):
        raise RuntimeError("another fault")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build  (x)\n", "580.159.03"),
        ("something else\n", None),
    ],
)
def test_the_driver_that_is_loaded(text: str, number: str | None, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(text, encoding="ascii")
    assert driver_version(tmp_path / "version") == number
    assert driver_version(tmp_path / "missing") is None


class OnPlace:
    def __init__(self, place: torch.device, in_use: list[torch.device]) -> None:
        self.place, self._in_use = place, in_use

    @on_its_card
    def launch(self, first: int, *, second: int) -> tuple[list[torch.device], int]:
        return list(self._in_use), first + second


def test_a_method_has_the_card_of_its_owner_whichever_was_current(monkeypatch: pytest.MonkeyPatch) -> None:
    in_use: list[torch.device] = []

    @contextmanager
    def device(place: torch.device) -> Iterator[None]:
        in_use.append(place)
        yield
        in_use.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    second = torch.device("cuda", 1)
    assert OnPlace(second, in_use).launch(1, second=2) == ([second], 3) and not in_use
    assert OnPlace(torch.device("cuda", 0), in_use).launch(1, second=2) == ([], 3)  # it is the current one
    assert OnPlace(torch.device("cpu"), in_use).launch(1, second=2) == ([], 3)


def test_a_capture_is_on_its_own_card_and_its_own_threads_business(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    @contextmanager
    def graph(graph: Any, **options: Any) -> Iterator[None]:
        told.append((graph, options))
        yield
        told.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "a graph")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr("kittiwake.device._capture_stream", lambda card: f"stream of card {card}")
    monkeypatch.setattr(torch.cuda, "graph", graph)
    assert captured(lambda: told.append("work"), (0, 7)) == "a graph"  # type: ignore[comparison-overlap]
    options = {"pool": (0, 7), "stream": "stream of card 1", "capture_error_mode": "thread_local"}
    assert told == [("a graph", options), "work", "end"]
