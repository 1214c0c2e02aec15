from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from kittiwake.server.logs import set_up_logs


@pytest.fixture(autouse=True)
def _keep_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("kittiwake")
    before = list(root.handlers), root.level, ours.level
    yield
    root.handlers[:], level, own = before
    root.setLevel(level)
    ours.setLevel(own)


def _lines(capsys: pytest.CaptureFixture[str], log_format: str, message: str, **extra: object) -> list[str]:
    set_up_logs(log_format, "http3")
    logging.getLogger("kittiwake.server").info(message, extra=extra)
    return capsys.readouterr().err.splitlines()


def test_json_lines_are_objects(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = _lines(capsys, "json", "a \n request", request_id="r\u00e91", ms=1.5)
    entry = json.loads(line)
    assert entry.pop("time").endswith("Z")
    expected = {"level": "info", "process": "http3", "message": "a \n request", "request_id": "r\u00e91", "ms": 1.5}
    assert entry == expected


def test_text_lines_hold_the_same_and_stay_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = _lines(capsys, "text", "request", path="/x\r\nerror forged", ms=1.23456789, name_of="", status=200)
    assert line.partition(" ")[2] == 'info http3 request path="/x\\r\\nerror forged" ms=1.23457 name_of="" status=200'


def test_what_a_client_sends_commands_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for log_format in ("text", "json"):
        (line,) = _lines(capsys, log_format, "no \x1b[2J \u2028 file", path="/\x1b]0;mine\x07\x9b1m", client="\x00")
        assert line.isprintable() and "no \\" in line
    (line,) = _lines(capsys, "text", "request", path="/\u00e9\x1b")
    assert line.endswith(r'request path="/\u00e9\u001b"')


def test_a_traceback_comes_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("json", "engine")
    try:
        raise ZeroDivisionError("deep inside")
    except ZeroDivisionError:
        logging.getLogger("kittiwake.engine").exception("a step failed")
    entry = json.loads(capsys.readouterr().err)
    assert entry["level"] == "error" and "deep inside" in entry["traceback"]


def test_what_other_packages_chat_about_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("text", "engine")
    logging.getLogger("somebody").info("hello")
    logging.getLogger("somebody").warning("look")
    assert len(capsys.readouterr().err.splitlines()) == 1
