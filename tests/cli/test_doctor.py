from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kittiwake.cli.doctor import (
    advice,
    card_advice,
    describe_loaded,
    describe_proof,
    is_writable,
    model_advice,
    report_text,
    version_advice,
)
from kittiwake.errors import BundleError
from tests.bench.fakes import SumModel

from .conftest import Call, fake_loaded

GOOD_MACHINE: dict[str, Any] = {
    "features": ["avx2", "fma"],
    "settings": {"GOMP_SPINCOUNT": "5000"},
    "cpu_quota_cores": None,
    "usable_cores": 2,
    "cache_folder": "/tmp",
    "memory_available_bytes": 8 << 30,
}
GOOD_RUNTIME: dict[str, Any] = {"threads": 2, "torch_mkl": True}


def test_json_tells_machine_runtime_and_what_was_picked(call: Call, fake_module: Callable[..., ModuleType]) -> None:
    fake_module("kittiwake.load", load_model=lambda *_, **__: fake_loaded(SumModel()))
    result = call("doctor", "--json")
    assert result.code == 0
    report = json.loads(result.stdout)
    assert report.keys() == {"machine", "card", "kernel_languages", "versions", "runtime", "model", "warnings"}
    assert report["card"]["usable"] != bool(report["card"]["reason"])
    assert [row["name"] for row in report["kernel_languages"]] == ["Triton", "CUDA C++ (NVRTC)", "TileLang"]
    assert all(row["ok"] or row["note"] for row in report["kernel_languages"])
    assert report["model"]["device"] == "cpu"
    assert {"name", "installed", "tested", "ok"} == report["versions"][0].keys()
    assert report["model"]["proved"] == {"shapes": 0, "equal_bits": 0, "own_kernel_only": []}
    assert report["model"]["picked"] == {"kind": "fake"}
    assert report["model"]["state_bytes_per_sequence"] == 4
    assert report["runtime"]["threads"] == 2


def test_text_is_an_outline(call: Call, fake_module: Callable[..., ModuleType]) -> None:
    fake_module("kittiwake.load", load_model=lambda *_, **__: fake_loaded(SumModel()))
    result = call("doctor")
    assert result.code == 0
    assert "\n  processor: " in result.stdout
    assert "\n    kind: fake" in result.stdout


def test_machine_is_told_even_without_a_model(call: Call, fake_module: Callable[..., ModuleType]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BundleError("manifest.json is missing")

    fake_module("kittiwake.load", load_model=fail)
    result = call("doctor", "--json")
    assert result.code == 1
    report = json.loads(result.stdout)
    assert report["model"] is None
    assert "packaged model cannot be loaded: manifest.json is missing" in report["warnings"][0]
    named = call("doctor", "some-bundle", "--json")
    assert (named.code, named.stdout) == (3, "")


def test_a_good_machine_gets_no_advice() -> None:
    assert advice(GOOD_MACHINE, GOOD_RUNTIME) == []


@pytest.mark.parametrize(
    ("machine", "runtime", "word"),
    [
        ({"features": ["avx"]}, {}, "AVX2"),
        ({"settings": {}}, {}, "GOMP_SPINCOUNT"),
        ({"settings": {"OMP_WAIT_POLICY": "active"}}, {}, "GOMP_SPINCOUNT"),
        ({"cpu_quota_cores": 1.5}, {}, "--threads 1"),
        ({}, {"threads": 5}, "take turns"),
        ({"cache_folder": "/dev/null/cache"}, {}, "KITTIWAKE_CACHE"),
        ({"memory_available_bytes": 1 << 20}, {}, "memory"),
        ({}, {"torch_mkl": False}, "MKL"),
    ],
)
def test_each_shortcoming_is_named(machine: dict[str, Any], runtime: dict[str, Any], word: str) -> None:
    found = advice(GOOD_MACHINE | machine, GOOD_RUNTIME | runtime)
    assert len(found) == 1
    assert word in found[0]


def test_a_folder_yet_to_be_made_is_writable_where_its_parent_is(tmp_path: Path) -> None:
    assert is_writable(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    assert not is_writable(tmp_path / "file")


def test_versions_no_test_has_run_with_are_named() -> None:
    rows = [
        {"name": "torch", "installed": "2.13.0", "tested": ">=2.11,<2.15", "ok": True},
        {"name": "numba", "installed": "0.70.0", "tested": ">=0.61,<0.69", "ok": False},
        {"name": "gguf", "installed": None, "tested": ">=0.19,<0.20", "ok": False},
    ]
    found = version_advice(rows)
    assert [sentence.split(" ")[0] for sentence in found] == ["numba", "gguf"]
    assert "0.70.0 was never tested" in found[0]
    assert "is not installed" in found[1]


NO_CARD: dict[str, Any] = {"usable": False, "reason": "torch is built for the CPU only", "driver": None}
H200: dict[str, Any] = {
    "usable": True,
    "reason": "",
    "name": "NVIDIA H200",
    "capability": "9.0",
    "memory_bytes": 143 << 30,
    "driver": "580.159.03",
}


def test_a_card_that_is_not_used_is_told_with_the_reason() -> None:
    assert card_advice(NO_CARD) == card_advice(H200) == []
    old = H200 | {"usable": False, "reason": "compute capability 7.5; 8.0 or later is needed"}
    assert card_advice(old) == [f"NVIDIA H200 is here, but models run on the CPU: {old['reason']}"]
    assert "driver 580.159.03" in card_advice(NO_CARD | {"driver": "580.159.03"})[0]


PICKED: dict[str, Any] = {
    "device": "cuda",
    "weight_bytes": 3 << 30,
    "state_bytes": 12 << 20,
    "workspace_bytes": 1 << 30,
    "graphs": {"buckets": [1, 2, 4], "bytes": 1 << 20},
    "picks": [
        {
            "shape": "2048x2048",
            "up_to_rows": {
                "1": "narrow 16x8x256x4",
                "8": "tile 16x32x64x2x4",
                "16": "tile 16x32x64x2x4",
                "more": "library",
            },
            "reason": "measured on this card; bits proved",
            "replaced": [],
        },
        {
            "shape": "8192x2048",
            "up_to_rows": {"1": "tile 16x32x64x2x4", "more": "tile 64x64x64x4x3"},
            "reason": "measured on this kind of card; bits proved",
            "replaced": ["library for more rows"],
        },
    ],
}
CARD_MODEL: dict[str, Any] = {
    "device": "cuda",
    "dtype": "fp16",
    "weight_bytes_per_step": 3 << 30,
    "state_bytes_per_sequence": 12 << 20,
    "picked": PICKED,
    "proved": describe_proof(PICKED),
}


class CardModel(SumModel):
    """Says that it runs on a card."""

    def __init__(self) -> None:
        super().__init__()
        self.device = "cuda"

    def describe(self) -> dict[str, Any]:
        return PICKED


def test_picks_on_a_card_are_told_with_reasons_and_memory() -> None:
    loaded: Any = fake_loaded(CardModel())
    described = describe_loaded(loaded)
    assert described["proved"] == {"shapes": 2, "equal_bits": 1, "own_kernel_only": ["8192x2048"]}
    machine = GOOD_MACHINE | {"memory_bytes": 1 << 30, "packages": {}}
    report = {"machine": machine, "card": H200, "kernel_languages": [], "versions": [], "runtime": {}}
    text = report_text(report | {"model": described, "warnings": []})
    picks = "1: narrow 16x8x256x4, 16: tile 16x32x64x2x4, more: library"
    parts = (
        "name: NVIDIA H200",
        "memory: 154 GB",
        "workspace: 1.07 GB",
        picks,
        "library for more rows",
        "buckets: 1, 2, 4",
    )
    for part in parts:
        assert part in text


def test_tilings_of_experts_are_told_beside_the_picks() -> None:
    row = {"up_to_pairs_an_expert": {"8": "16x32", "24": "32x32", "more": "32x32"}, "reason": "default; bits proved"}
    experts = [
        {"shape": "10 of 512 experts 2560x640", "replaced": []} | row,
        {"shape": "2 of 8 experts 32x12", "replaced": ["128x64 for more pairs an expert"]} | row,
    ]
    picked = PICKED | {"experts": experts}
    proof = describe_proof(picked)
    assert proof == {"shapes": 4, "equal_bits": 2, "own_kernel_only": ["8192x2048", "2 of 8 experts 32x12"]}
    report = {"machine": GOOD_MACHINE | {"memory_bytes": 1 << 30, "packages": {}}, "card": H200, "kernel_languages": []}
    model = CARD_MODEL | {"picked": picked, "proved": proof}
    text = report_text(report | {"versions": [], "runtime": {}, "model": model, "warnings": []})
    assert "8: 16x32, more: 32x32" in text and "128x64 for more pairs an expert" in text


@pytest.mark.parametrize(
    ("change", "card", "word"),
    [
        ({"proved": {"shapes": 2, "equal_bits": 2, "own_kernel_only": []}}, {}, None),
        ({}, {}, "1 of 2 shapes"),
        ({"dtype": "fp32"}, {}, "--dtype"),
        ({"proved": {"shapes": 2, "equal_bits": 2, "own_kernel_only": []}}, {"memory_bytes": 4 << 30}, "room for 0"),
    ],
)
def test_what_would_make_a_model_on_a_card_better_is_told(
    change: dict[str, Any], card: dict[str, Any], word: str | None
) -> None:
    found = model_advice(CARD_MODEL | change, GOOD_MACHINE, H200 | card)
    assert len(found) == (word is not None)
    assert word is None or word in found[0]


MODEL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "bf16",
    "weight_bytes_per_step": 1000,
    "picked": {"threads": 2},
    "proved": {"shapes": 3, "equal_bits": 3, "own_kernel_only": []},
}


def test_what_was_proved_is_counted() -> None:
    products = [
        {"depth": 64, "columns": 8, "k_block": 192, "wide_from": 0},
        {"depth": 64, "columns": 64, "k_block": 64, "wide_from": 32},
    ]
    assert describe_proof({"products": products}) == {"shapes": 2, "equal_bits": 1, "own_kernel_only": [[64, 8]]}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, None),
        ({"dtype": "fp32"}, "--dtype bf16"),
        ({"picked": {"threads": 1}}, "1 of 2 usable cores"),
        ({"weight_bytes_per_step": 16 << 30}, "are free"),
        ({"proved": {"shapes": 3, "equal_bits": 2, "own_kernel_only": [[64, 8]]}}, "1 of 3 shapes"),
    ],
)
def test_what_would_make_a_model_faster_is_told(change: dict[str, Any], word: str | None) -> None:
    found = model_advice(MODEL | change, GOOD_MACHINE, NO_CARD)
    assert len(found) == (word is not None)
    assert word is None or word in found[0]
