"""Figures of cases as a picture: tokens a second against the floor, and latency against the length of a prompt."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kittiwake.bench.timing import Figures
from kittiwake.errors import OutputError, UsageError

FORMATS = (".png", ".svg", ".pdf")
_OURS, _FLOOR = "#1f6f8b", "#c9c9c9"
_PEERS = ("#e07b39", "#8e5ea2", "#4a9d5b", "#c2404d")
"""Colours that can be told from ours and from one another."""


def check_plot(path: Path) -> None:
    """Raise UsageError or OutputError for a picture that could not be drawn, before anything is measured."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"a plot ends in {', '.join(FORMATS)}, got {path.name!r}")
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent} is no folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OutputError(f"{path} cannot be written")
    try:
        import matplotlib  # noqa: F401
    except ImportError as err:
        raise UsageError("plots need matplotlib", "pip install 'kittiwake[plots]'") from err


def draw_plot(figures: Sequence[Figures], title: str, path: Path) -> None:
    """Write both diagrams into one picture. Raises OutputError where the file cannot be written."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(12, 5), layout="constrained")
    picture.suptitle(title, fontsize=9)
    left, right = picture.subplots(1, 2)
    _draw_speeds(left, figures)
    _draw_latencies(right, [one for one in figures if one.batch == 1])
    try:
        picture.savefig(path, dpi=150)
    except OSError as err:
        raise OutputError(f"{path} cannot be written: {err.strerror or err}") from err


def _draw_speeds(axes: Any, figures: Sequence[Figures]) -> None:
    """Bars of tokens a second, a grey one behind each for what the floor allows; peers as marks."""
    places = range(len(figures))
    if any(one.floor_ms for one in figures):
        allowed = [1000 * one.batch * one.tokens / one.floor_ms if one.floor_ms else 0.0 for one in figures]
        axes.bar(places, allowed, width=0.8, color=_FLOOR, label="floor of the device")
    axes.bar(places, [one.tok_s for one in figures], width=0.5, color=_OURS, label="kittiwake")
    for name, colour in _colours(figures).items():
        points = [
            (place, 1000 * one.batch * one.tokens / peer.median_ms)
            for place, one in zip(places, figures, strict=True)
            for peer in one.peers
            if peer.name == name and not peer.reason
        ]
        axes.plot(*zip(*points, strict=True), linestyle="", marker="D", markersize=5, color=colour, label=name)
    axes.set(yscale="log", ylabel="tokens/s", xlabel="sequences × tokens")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_xticks(list(places), [one.case for one in figures], rotation=60)
    axes.legend(fontsize=8)


def _draw_latencies(axes: Any, figures: Sequence[Figures]) -> None:
    """Ms of one sequence's forward against its tokens; an empty frame where no case has one sequence."""
    axes.set(xlabel="tokens of one sequence", ylabel="ms")
    if not figures:
        return
    rows = sorted(figures, key=lambda one: one.tokens)
    tokens = [one.tokens for one in rows]
    axes.plot(tokens, [one.median_ms for one in rows], marker="o", color=_OURS, label="kittiwake")
    if all(one.floor_ms for one in rows):
        axes.plot(tokens, [one.floor_ms for one in rows], color=_FLOOR, linewidth=3, label="floor of the device")
    for name, colour in _colours(rows).items():
        points = [
            (one.tokens, peer.median_ms) for one in rows for peer in one.peers if peer.name == name and not peer.reason
        ]
        axes.plot(*zip(*points, strict=True), marker="D", markersize=5, linewidth=1, color=colour, label=name)
    axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(fontsize=8)


def _colours(figures: Sequence[Figures]) -> dict[str, str]:
    """A colour for each peer that has a figure."""
    names = dict.fromkeys(peer.name for one in figures for peer in one.peers if not peer.reason)
    return dict(zip(names, _PEERS, strict=False))
