"""The parent of a server, without its children."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest

from kittiwake.config import EngineConfig, ServerConfig
from kittiwake.server import supervisor
from kittiwake.server.supervisor import Supervisor


def test_a_ready_file_that_cannot_be_removed_is_no_fault_of_a_clean_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, unlink = tmp_path / "ready", Path.unlink

    async def serve(self: Supervisor, listeners: list[socket.socket]) -> int:
        ready.write_text("{}")
        return 0

    def refuse(self: Path, missing_ok: bool = False) -> None:
        if self == ready:
            raise OSError(errno.EROFS, "Read-only file system")
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(supervisor, "set_up_logs", lambda *_: None)
    monkeypatch.setattr(Supervisor, "_run", serve)
    server = Supervisor(None, EngineConfig(), ServerConfig(port=0), ready_file=ready)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert server.run() == 0
    assert server.run() == 0 and not ready.exists()
