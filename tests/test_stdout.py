from __future__ import annotations

import io
import os
import sys

import pytest

from kittiwake.stdout import answer_stream, stdout_on_stderr


def test_stdout_leads_to_stderr_inside_and_back_again_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    @stdout_on_stderr()
    def fail() -> None:
        print("printed")
        os.write(1, b"written\n")
        os.system("echo child")
        print("answer", file=answer_stream(), flush=True)
        raise ValueError("broken")

    before = sys.stdout
    with pytest.raises(ValueError, match="broken"):
        fail()
    os.write(1, b"after\n")
    assert sys.stdout is before is answer_stream()
    captured = capfd.readouterr()
    assert captured.out == "answer\nafter\n"
    assert sorted(captured.err.split()) == ["child", "printed", "written"]


def test_one_inside_another_changes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with stdout_on_stderr():
        with stdout_on_stderr():
            print("answer", file=answer_stream(), flush=True)
        os.write(1, b"written\n")
        print("answer", file=answer_stream(), flush=True)
    assert capfd.readouterr() == ("answer\nanswer\n", "written\n")


@pytest.mark.parametrize("stream", [None, io.StringIO(), io.TextIOWrapper(io.BytesIO())])
def test_stdout_may_be_nothing_or_a_stream_in_memory(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None
) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    with stdout_on_stderr():
        assert answer_stream() is (stream or sys.stderr)
        os.write(1, b"written\n")
        print("printed")
    assert sys.stdout is stream
    if isinstance(stream, io.StringIO):
        assert stream.getvalue() == ""
        stream.close()
        with stdout_on_stderr():
            print("printed")
    assert capfd.readouterr().out == ""
