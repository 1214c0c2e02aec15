from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.bench.fakes import SumModel

from .conftest import Call, fake_loaded

FIGURES = {"case", "batch", "tokens", "median_ms", "tok_s"}


@pytest.fixture
def loads(fake_module: Callable[..., ModuleType]) -> list[Any]:
    """A fake loader; what it was asked for is in the list."""
    asked: list[Any] = []

    def load_model(model: object, config: object, **_: object) -> Any:
        asked.append(("model", model))
        return fake_loaded(SumModel())

    def load_random(shape: str, config: object, progress: object) -> Any:
        asked.append(("shape", shape))
        return fake_loaded(SumModel())

    fake_module("kittiwake.load", load_model=load_model)
    fake_module("kittiwake.bench.random", load_random=load_random)
    return asked


def test_json_is_a_list_of_figures_in_the_order_asked(call: Call, loads: list[Any]) -> None:
    result = call("bench", "--cases", "1x4,2x3,1x4", "--repeat", "2", "--json")
    assert result.code == 0
    rows = json.loads(result.stdout)
    assert [row["case"] for row in rows] == ["1x4", "2x3", "1x4"]
    for row in rows:
        assert row.keys() == FIGURES
        assert row["tok_s"] == pytest.approx(1000 * row["batch"] * row["tokens"] / row["median_ms"], rel=0.05)
    assert loads == [("model", None)]


def test_prompt_and_decoding(call: Call, loads: list[Any]) -> None:
    result = call(*"bench --shape 0.1b --prompt 12 --generate 5 --depth 3 --repeat 2 --json".split())
    document = json.loads(result.stdout)
    assert document.keys() == {"prefill", "decode"}
    assert (document["prefill"].keys(), document["prefill"]["tokens"]) == (FIGURES, 12)
    assert (document["decode"].keys(), document["decode"]["tokens"]) == (FIGURES, 5)
    assert loads == [("shape", "0.1b")]


def test_table_stands_beside_the_machine(call: Call, loads: list[Any]) -> None:
    result = call("bench", "--cases", "1x4", "--repeat", "1")
    assert result.stdout.splitlines()[0].split() == [
        "case",
        "sequences",
        "tokens",
        "each",
        "median",
        "ms",
        "tokens/s",
        "runs",
    ]
    assert "kittiwake 0." in result.stdout.splitlines()[-1]


def test_inexact_work_has_no_speed(call: Call, fake_module: Callable[..., ModuleType]) -> None:
    fake_module("kittiwake.load", load_model=lambda *_, **__: fake_loaded(SumModel(crowd_leak=1.0)))
    result = call("bench", "--cases", "4x2", "--json")
    assert (result.code, result.stdout) == (1, "")
    assert "other bits" in result.stderr


def test_an_unknown_shape_is_named_with_the_known_ones(call: Call) -> None:
    result = call("bench", "--shape", "9b", "--json")
    assert (result.code, result.stdout) == (2, "")
    assert "'9b'" in result.stderr
    assert "0.1b" in result.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        "--cases 1by4",
        "some.pth --shape 0.1b",
        "--prompt 4 --cases 1x4",
        "--generate 4",
        "--depth 4",
        "--repeat 0",
        "--prompt 0",
    ],
)
def test_contradictions_are_refused_before_anything_is_loaded(call: Call, loads: list[Any], wrong: str) -> None:
    result = call("bench", *wrong.split(), "--json")
    assert (result.code, result.stdout) == (2, "")
    assert loads == []
