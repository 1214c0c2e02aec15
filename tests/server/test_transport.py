from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kittiwake.engine.request import SamplingParams, TokenLogprob
from kittiwake.server import messages as wire
from kittiwake.server.engine_client import AnswerEnd, AnswerEvent, Failure, PromptProgress, Submission
from kittiwake.server.transport import private_folder, socket_address


def test_the_folder_is_private_and_goes_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    for runtime in (str(tmp_path), str(long), str(tmp_path / "missing")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        with private_folder() as folder:
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert len(socket_address(folder)) < 107 + len("ipc://")
            (folder / "something").write_text("left over")
        assert not folder.exists()


def test_what_killed_servers_left_is_removed_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    code = (
        "import os, signal\nfrom kittiwake.server.transport import private_folder\n"
        "with private_folder() as folder:\n    print(folder, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    left = Path(done.stdout.strip())
    assert left.is_dir()
    foreign = tmp_path / "kittiwake-without-a-lock"
    foreign.mkdir()
    with private_folder() as first:
        assert not left.exists()
        with private_folder() as second:
            assert first.exists() and second.exists() and foreign.exists()


def test_calls_come_over_as_they_were() -> None:
    params = SamplingParams(stop=("a", "é"), logit_bias={5: -1.5}, seed=2**63 - 1, logprobs=True, top_logprobs=2, n=3)
    submission = Submission("req", (1, 2, 3), params, client="0@::1", deadline_s=2.5, border_tokens=(1, 2), keep_as="x")
    for body in (wire.Submit(submission), wire.Score(submission, 4), wire.Cancel(), wire.ImportState("a", "/b", True)):
        envelope = wire.decode_envelope(wire.encode_call(7, body))
        assert (envelope.call, wire.decode_call(envelope.body)) == (7, body)


def test_notices_come_over_as_they_were() -> None:
    logprob = TokenLogprob(3, -0.1, b"\xff", (TokenLogprob(4, -2.0, b"a"),))
    end = AnswerEnd("error", 1.0, 2.0, 3.0, 4, "hit", Failure("x", "y", 504, "deadline", 1.5))
    full = {"index": 2, "text": "é", "token_ids": (5, 6), "logprobs": (logprob,), "end": end}
    progress = PromptProgress(10, 5, 2, 0.5)
    news = wire.News(4, [wire.EventOut(**full), wire.EventOut(progress=progress)])
    refused = wire.Refused(9, Failure("no", http_status=404))
    found = wire.decode_notices(wire.encode_notices([wire.Accepted(1), news, refused, wire.Lost()]))
    assert (found[0], found[2], found[3]) == (wire.Accepted(1), refused, wire.Lost())
    assert (found[1].call, found[1].events) == (4, [AnswerEvent(**full), AnswerEvent(progress=progress)])
