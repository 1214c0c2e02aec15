from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.chat import ChatDelta
from kittiwake.cli.chat import AnswerWriter

from .conftest import Call

# A terminal of its own, so that Ctrl-C is what a terminal makes of it: a signal. Who runs the tests may ignore it.
LAUNCH = """
import fcntl, signal, sys, termios
signal.signal(signal.SIGINT, signal.default_int_handler)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from kittiwake.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.pth"
    torch.save(random_rwkv7(small(layers=2), seed=3), path)
    return path


class Terminal:
    """A program at a pseudo-terminal: type something, wait for something."""

    def __init__(self, *arguments: str | Path) -> None:
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb", "NO_COLOR": "1"},
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """What came up to and with ``text``, which is then forgotten."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self._master], [], [], max(0, end - time.monotonic()))
            if not ready:
                raise AssertionError(f"no {text!r} in {self.seen!r}")
            try:
                self.seen += os.read(self._master, 65536).decode("utf-8", "replace")
            except OSError:  # the program has ended
                if text not in self.seen:
                    raise AssertionError(f"it ended without {text!r}: {self.seen!r}") from None
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def interrupt_until(self, text: str) -> str:
        """Ctrl-C, again where nothing came of it: a line editor misses one that comes before it begins to wait."""
        for _ in range(6):
            self.type("\x03")
            with suppress(AssertionError):
                return self.wait_for(text, seconds=10)
        raise AssertionError(f"no {text!r} in {self.seen!r}")

    def end(self) -> int:
        """Its exit code."""
        return self._process.wait(60)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(tiny: Path) -> Iterator[Terminal]:
    terminal = Terminal("chat", tiny, "--max-tokens", "6", "--threads", "1")
    yield terminal
    terminal.close()


def test_a_talk_at_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    banner = terminal.wait_for("> ", seconds=250)
    assert "kittiwake chat · tiny.pth · template plain" in banner
    assert "never taught to converse" in banner
    terminal.type(
        '/set logit_bias {"97": 100, "98": 99}\n'
    )  # nothing but a and b, so that no answer looks like a prompt
    terminal.wait_for("> ")
    terminal.type("hello\n")
    answer = terminal.wait_for("> ")
    assert "[6 tokens · " in answer
    assert "tokens/s · first after" in answer
    assert "5 read" in answer
    assert "ended by length" in answer
    terminal.type("/retry\n")
    assert ", 0 read" in terminal.wait_for("> ")
    terminal.type("one\\\ntwo\n")
    terminal.wait_for(". ")
    terminal.wait_for("> ")
    terminal.type('"""\nthree\n\nfour\n"""\n')
    terminal.wait_for("tokens/s")
    terminal.wait_for("> ")
    terminal.type(f"/save {tmp_path}/talk.json\n")
    assert "saved to" in terminal.wait_for("> ")
    terminal.type("/set max_tokens 90000\n")
    assert "(max_tokens is 90000)" in terminal.wait_for("> ")
    terminal.type("go on\n")
    terminal.wait_for("aa")
    terminal.type("\x03")
    assert "ended by Ctrl-C" in terminal.wait_for("> ")
    terminal.type("/set warmth 3\n")
    assert "no sampling parameter 'warmth'" in terminal.wait_for("> ")
    terminal.type("/nonsense\n")
    assert "no command /nonsense" in terminal.wait_for("> ")
    terminal.type("half a line")
    terminal.wait_for("half a line")
    terminal.interrupt_until("Ctrl-D leaves")
    terminal.wait_for("> ")
    terminal.type("/help\n")
    assert "/retry" in terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    saved = json.loads((tmp_path / "talk.json").read_text())
    said = [message["content"] for message in saved["messages"] if message["role"] == "user"]
    assert said == ["hello", "one\ntwo", "three\n\nfour"]


@pytest.fixture
def piped(call: Call, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    def talk(text: str, *options: str | Path) -> object:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
        return call("chat", tiny, "--threads", "1", "--max-tokens", "5", *options)

    return talk  # type: ignore[return-value]


def test_piped_input_gives_answers_on_stdout_and_nothing_else(piped, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "talk.json"
    result = piped(f'hello\n\n/set temperature 0\nagain\n"""\na\nb\n"""\n/save {path}\n/quit\nnever read\n')
    assert result.code == 0
    assert result.stderr.startswith("This model has no chat template") and result.stderr.count("\n") == 2
    messages = json.loads(path.read_text())["messages"]
    assert [message["content"] for message in messages[::2]] == ["hello", "again", "a\nb"]
    for message in messages[1::2]:
        assert message["content"] in result.stdout
    assert ">" not in result.stdout.replace("".join(message["content"] for message in messages), "")


def test_a_saved_talk_is_taken_up(piped, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "talk.json"
    first = piped(f"hello\n/save {path}\nagain\n")
    later = piped("again\n", "--load", path)
    assert first.code == later.code == 0
    assert first.stdout.endswith(later.stdout)
    assert len(later.stdout) > 1


@pytest.mark.parametrize(
    ("text", "options", "code", "complaint"),
    [
        ("/nonsense\n", (), 2, "no command /nonsense"),
        ("/retry\n", (), 2, "no answer to draw anew"),
        ("/save\n", (), 2, "/save needs the name of a file"),
        ("/load /nowhere/x.json\n", (), 3, "no session file"),
        ("/set temperature\n", (), 2, "needs a value"),
        ("/set temperature -1\n", (), 2, "temperature"),
        ('"""\nnever closed\n', (), 2, "the input ends inside"),
        ("x\n", ("--template", "nope"), 2, "no chat template 'nope'"),
        ("x\n", ("--temperature", "0", "--top-p", "0.5"), 2, "contradicts"),
    ],
)
def test_errors_in_a_pipe_end_it(piped, text: str, options: tuple[str, ...], code: int, complaint: str) -> None:  # type: ignore[no-untyped-def]
    result = piped(text, *options)
    assert result.code == code
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr


def test_reasoning_is_shown_apart_at_a_terminal_only(capsys: pytest.CaptureFixture[str]) -> None:
    for is_terminal, shown in ((True, "well\n\nYes\n"), (False, "Yes\n")):
        writer = AnswerWriter(is_terminal)
        for delta in (ChatDelta("", "we", (1,)), ChatDelta("", "ll", (2,)), ChatDelta("Yes", "", (3,), "stop")):
            writer.write(delta)
        writer.end()
        assert capsys.readouterr().out == shown
        assert writer.tokens == 3
