from __future__ import annotations

import json
import sys

import pytest

from kittiwake.cli import output
from kittiwake.cli.options import engine_config, field_help
from kittiwake.config import EngineConfig


def test_table_aligns_words_left_and_numbers_right() -> None:
    rows = [("law", "cases"), ("moved slot", "8"), ("alone", "120")]
    assert output.table(rows) == "law         cases\nmoved slot      8\nalone         120"


def test_a_table_shows_what_a_terminal_would_obey() -> None:
    rows = [("word", "count"), ("a\x1b[31m\nb", "1"), ("Häuser 🐦", "2")]
    assert output.table(rows).splitlines()[1:] == ["a\\x1b[31m\\nb      1", "Häuser 🐦          2"]


def test_outline_is_one_value_a_line() -> None:
    value = {
        "a": 1,
        "b": {"c": True, "d": None},
        "list": [1, 2],
        "empty": {},
        "deep": [{"x": 1.5, "y": 2}, {"x": 3, "y": 40}],
    }
    assert (
        output.outline(value)
        == "a: 1\nb:\n  c: yes\n  d: –\nlist: 1, 2\nempty: none\ndeep:\n    x   y\n  1.5   2\n    3  40"
    )


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (12_345_678, "12.3 MB"), (2_790_000_000, "2.79 GB")]
)
def test_human_bytes(count: int, text: str) -> None:
    assert output.human_bytes(count) == text


def test_json_refuses_what_json_cannot_say() -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        output.emit_json({"x": float("nan")})


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of progress: the seconds in it."""
    seconds = [0.0]
    monkeypatch.setattr("kittiwake.cli.output.time.monotonic", lambda: seconds[0])
    return seconds


def test_progress_says_nothing_of_quick_work_and_now_and_then_of_long_work(
    capsys: pytest.CaptureFixture[str], now: list[float]
) -> None:
    with output.ProgressBars() as progress:
        for done in range(101):
            now[0] += 0.12
            progress("loading weights", done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["loading weights: 41 %", "loading weights: 83 %"]


def test_the_piece_in_work_is_told_when_it_begins_once_the_work_is_known_to_be_long(
    capsys: pytest.CaptureFixture[str], now: list[float]
) -> None:
    with output.ProgressBars() as progress:
        for done, (piece, took_s) in enumerate([("quick", 0.1), ("slow", 5.0), ("next", 0.1), ("last", 300.0)]):
            progress(f"comparing: {piece}", done, 4)
            now[0] += took_s
        progress("comparing", 4, 4)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["comparing: next: 50 %", "comparing: last: 75 %", "comparing: 100 %"]


def test_pieces_of_one_work_share_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with output.ProgressBars() as progress:
        progress("comparing: fla at 1x1", 0, 2)
        progress("comparing: fla at 1x4", 1, 2)
        assert progress._bars is not None
        (task,) = progress._bars.tasks
        assert (task.description, task.completed, task.total) == ("comparing: fla at 1x4", 1, 2)


def test_progress_draws_bars_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with output.ProgressBars() as progress:
        progress("loading weights", 1, 2)
        progress("probing", 0, 0)
    assert capsys.readouterr().out == ""


def test_help_texts_of_the_engine_come_from_its_config() -> None:
    assert set(field_help()) == set(vars(EngineConfig()))
    assert "0" in field_help()["threads"]


def test_more_threads_than_cores_widen_numbas_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_NUM_THREADS", raising=False)
    monkeypatch.setattr("kittiwake.cli.options.usable_cores", lambda: 2)
    assert engine_config(device="cpu", dtype="auto", threads=5).threads == 5
    import os

    assert os.environ["NUMBA_NUM_THREADS"] == "5"


def test_rounded_touches_floats_only() -> None:
    assert json.dumps(output.rounded({"a": 1.23456, "b": 7, "c": True})) == '{"a": 1.235, "b": 7, "c": true}'
