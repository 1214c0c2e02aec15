from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kittiwake.bench.timing import Figures, PeerFigures
from kittiwake.cli.bench import peer_notes
from kittiwake.load import Loaded
from tests.bench.fakes import SumModel
from tests.engine.pieces import PieceTokenizer

from .conftest import Call, fake_loaded

FIGURES = {"case", "batch", "tokens", "median_ms", "tok_s"}


def _loaded() -> Loaded:
    model: Any = SumModel()
    return Loaded(Path("fake"), "random", model, PieceTokenizer(), "fp32", 2, 0.0, None, None)


@pytest.fixture
def loads(fake_module: Callable[..., ModuleType]) -> list[Any]:
    """A fake loader; what it was asked for is in the list."""
    asked: list[Any] = []

    def load_model(model: object, config: object, **_: object) -> Any:
        asked.append(("model", model))
        return _loaded()

    def load_random(shape: str, config: object, progress: object) -> Any:
        asked.append(("shape", shape))
        return _loaded()

    fake_module("kittiwake.load", load_model=load_model, Loaded=Loaded)
    fake_module("kittiwake.bench.random", load_random=load_random, random_weights=lambda *_: WEIGHTS)
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
    assert document["decode"].keys() == FIGURES | {"step_ms", "forward_ms", "host_share"}
    assert (document["decode"]["tokens"], document["decode"]["batch"]) == (5, 1)
    assert loads == [("shape", "0.1b")]


def test_several_depths_are_a_list_in_the_order_asked(call: Call, loads: list[Any]) -> None:
    arguments = "bench --shape 0.1b --prompt 6 --generate 2 --depth 2K,0,5 --max-chunk 512 --repeat 1".split()
    document = json.loads(call(*arguments, "--json").stdout)
    assert document.keys() == {"depths"}
    assert [one["depth"] for one in document["depths"]] == [2048, 0, 5]
    for one in document["depths"]:
        assert one.keys() == {"depth", "prefill", "decode"}
        assert one["prefill"].keys() == FIGURES
        assert one["prefill"]["case"] == f"prefill 6+2 at {one['depth']}"
    table = call(*arguments).stdout
    assert all(f"{what} 6+2 at {depth}" in table for what in ("prefill", "decode") for depth in (2048, 0, 5))


def test_one_depth_is_no_list_and_may_be_told_in_k(call: Call, loads: list[Any]) -> None:
    document = json.loads(call(*"bench --prompt 4 --generate 1 --depth 1k --repeat 1 --json".split()).stdout)
    assert document.keys() == {"prefill", "decode"} and document["prefill"]["case"] == "prefill 4+1 at 1024"


def test_gathers_have_columns_and_a_line(call: Call, fake_module: Callable[..., ModuleType]) -> None:
    from kittiwake.bench.gathers import GatherFigures, GatherRun, Gathers
    from kittiwake.bench.timing import Figures
    from kittiwake.cli.bench import figures_table, gather_notes

    ahead, alone = (
        GatherFigures((GatherRun(ms, 40.0, waited, 500, 800, 1, 2),)) for ms, waited in ((100, 4), (130, 30))
    )
    one = Figures("prefill 8+1 at 0", 1, 8, 100.0, 1, gathers=Gathers(ahead, alone, "bypassed"))
    other = Figures("decode 8+1 at 0", 1, 1, 9.0, 1)
    cells = {column.header: list(column.cells) for column in figures_table([one, other]).columns}
    assert cells["gather ms"] == ["40.000", ""] and cells["waited ms"] == ["4.000", ""]
    assert cells["hidden share"] == ["0.900", ""]
    assert gather_notes([one, other]) == [
        "prefill 8+1 at 0: page cache bypassed, 500 reads at 12,500 a second; without look-ahead 130.000 ms, 25 % hidden"
    ]


def test_several_requests_at_once(call: Call, loads: list[Any]) -> None:
    document = json.loads(call(*"bench --prompt 3 --generate 2 --requests 4 --repeat 1 --json".split()).stdout)
    assert (document["prefill"]["batch"], document["decode"]["batch"]) == (4, 4)


def test_table_stands_beside_the_machine(call: Call, loads: list[Any]) -> None:
    result = call("bench", "--cases", "1x4", "--repeat", "1")
    assert all(heading in result.stdout for heading in ("case", "median ms", "tokens/s", "runs"))
    assert "1x4" in result.stdout
    assert "kittiwake 0." in result.stdout.splitlines()[-1]


WEIGHTS = SimpleNamespace(shape=None)


def test_a_peer_has_a_column_and_the_reason_stands_below(call: Call, loads: list[Any]) -> None:
    arguments = "bench --shape 0.1b --cases 1x4,2x1 --against fla --repeat 1".split()
    plain = call(*arguments)
    assert plain.code == 0
    assert "against fla" in plain.stdout
    assert "fla: no figure: " in plain.stdout and "how many times" not in plain.stdout
    rows = json.loads(call(*arguments, "--json").stdout)
    assert [row["peers"][0]["name"] for row in rows] == ["fla", "fla"]
    assert all(row["peers"][0]["reason"] for row in rows)


def test_what_a_peers_ratio_is_of_stands_below() -> None:
    """Not of the medians in the table: ours beside it is of the turns with that peer."""
    peers = (PeerFigures("rwkv", "rwkv 1", 57.5, 38.6, 4, is_batched=False), PeerFigures("fla", reason="no card"))
    assert peer_notes([Figures("1x1", 1, 1, 36.1, 9, peers=peers)]) == [
        "rwkv: rwkv 1; * it runs one sequence after another",
        "fla: no figure: no card",
        "×: how many times as fast kittiwake was, by medians of turns with that peer alone",
    ]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib comes with the plots extra")
def test_a_plot_is_drawn_beside_the_figures(call: Call, loads: list[Any], tmp_path: Path) -> None:
    assert call("bench", "--cases", "1x4,2x1", "--repeat", "1", "--plot", tmp_path / "a.png").code == 0
    assert (tmp_path / "a.png").stat().st_size > 1000


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
        "--prompt 4 --depth 4M",
        "--prompt 4 --depth 0,,4",
        "--requests 4",
        "--against torch",
        "--shape 0.1b --against vllm",
        "--shape 0.1b --against torch --prompt 4",
        "--plot picture.gif",
        "--plot a.png --prompt 4",
        "--repeat 0",
        "--prompt 0",
    ],
)
def test_contradictions_are_refused_before_anything_is_loaded(call: Call, loads: list[Any], wrong: str) -> None:
    result = call("bench", *wrong.split(), "--json")
    assert (result.code, result.stdout) == (2, "")
    assert loads == []
