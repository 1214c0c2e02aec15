from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from .conftest import Call, fake_loaded


@dataclass(frozen=True)
class Law:
    name: str
    cases: int
    differing: int


@pytest.fixture
def prove(fake_module: Callable[..., ModuleType]) -> Callable[[list[Law]], list[Any]]:
    """Let verify find these results; returns the list of what the laws were asked with."""

    def install(results: list[Law]) -> list[Any]:
        asked: list[Any] = []

        def laws(loaded: object, config: object, seed: int, progress: Callable[[str, int, int], None]) -> list[Law]:
            asked.append((loaded, config, seed))
            progress("laws", 1, 1)
            return results

        fake_module("kittiwake.load", load_model=lambda model, config, **_: fake_loaded(model))
        fake_module("kittiwake.verify.laws", verify=laws)
        return asked

    return install


def test_json_contract_of_an_exact_model(call: Call, prove: Callable[[list[Law]], list[Any]]) -> None:
    asked = prove([Law("chunked = stepwise", 40, 0), Law("moved slot", 8, 0)])
    result = call("verify", "some.pth", "--json", "--seed", "7")
    assert result.code == 0
    assert json.loads(result.stdout) == {
        "ok": True,
        "laws": [
            {"name": "chunked = stepwise", "cases": 40, "differing": 0},
            {"name": "moved slot", "cases": 8, "differing": 0},
        ],
    }
    assert asked[0][2] == 7


def test_any_difference_fails(call: Call, prove: Callable[[list[Law]], list[Any]]) -> None:
    prove([Law("chunked = stepwise", 40, 0), Law("moved slot", 8, 1)])
    result = call("verify", "--json")
    assert result.code == 1
    assert json.loads(result.stdout)["ok"] is False
    assert "NOT exact: 1 of 48 cases differ" in call("verify").stdout


@pytest.mark.parametrize("results", [[], [Law("moved slot", 0, 0)]])
def test_nothing_checked_is_nothing_proved(
    call: Call, prove: Callable[[list[Law]], list[Any]], results: list[Law]
) -> None:
    prove(results)
    result = call("verify")
    assert result.code == 1
    assert "nothing proved" in result.stdout


def test_text_ends_with_the_verdict(call: Call, prove: Callable[[list[Law]], list[Any]]) -> None:
    prove([Law("moved slot", 8, 0)])
    result = call("verify")
    assert result.code == 0
    assert result.stdout.splitlines()[-1] == "exact: 8 cases, every bit equal"
