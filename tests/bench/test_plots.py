from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from kittiwake.bench.plots import check_plot, draw_plot
from kittiwake.bench.timing import Figures, PeerFigures
from kittiwake.errors import OutputError, UsageError

has_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib comes with the plots extra"
)
PEERS = (PeerFigures("torch", "1", 8.0, 2.0, 4), PeerFigures("fla", reason="no card"))


@has_matplotlib
@pytest.mark.parametrize("floor_ms", [0.5, None])
def test_a_picture_is_drawn(floor_ms: float | None, tmp_path: Path) -> None:
    figures = [
        Figures("1x1", 1, 1, 2.0, 5, floor_ms, "bytes", PEERS),
        Figures("1x64", 1, 64, 3.0, 5, floor_ms, "bytes", PEERS),
        Figures("8x1", 8, 1, 2.5, 5, floor_ms, "bytes"),
    ]
    path = tmp_path / "cases.png"
    check_plot(path)
    draw_plot(figures, "a machine", path)
    assert path.read_bytes().startswith(b"\x89PNG")


@has_matplotlib
def test_a_picture_without_lone_sequences_or_floors(tmp_path: Path) -> None:
    draw_plot([Figures("8x1", 8, 1, 2.5, 5)], "", tmp_path / "cases.svg")
    assert "<svg" in (tmp_path / "cases.svg").read_text(encoding="utf-8")


def test_what_cannot_be_drawn_is_refused_before_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"\.png"):
        check_plot(tmp_path / "cases.gif")
    with pytest.raises(OutputError, match="no folder"):
        check_plot(tmp_path / "missing" / "cases.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="plots"):
        check_plot(tmp_path / "cases.png")
