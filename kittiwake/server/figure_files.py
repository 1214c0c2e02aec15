"""The files in which the processes of a server keep their figures, one a kind and process.

prometheus_client maps them into memory as they are first written to, without room on the disk: a disk that is full by then
ends the process with SIGBUS. So their room is taken when a process begins, before prometheus_client is imported.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
ROOM_BYTES = {
    "counter": 256 << 10,
    "histogram": 128 << 10,
    "gauge_livesum": 16 << 10,
    "gauge_livemostrecent": 32 << 10,
}
"""What a process may need, more than it does: routes, methods and statuses are few."""


def take_room() -> str:
    """Take the room for this process. Where there is none its figures are kept in its own memory; returns why then."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return ""
    paths = {kind: _path(Path(folder), kind, os.getpid()) for kind in ROOM_BYTES}
    try:
        for kind, path in paths.items():
            with path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, ROOM_BYTES[kind])
    except OSError as error:
        for path in paths.values():
            with suppress(OSError):
                path.unlink()
        del os.environ[FOLDER_VARIABLE]
        return error.strerror or str(error)
    return ""


def give_back(folder: str, pid: int) -> None:
    """Keep no more room for a process that is gone than its figures fill."""
    for kind in ROOM_BYTES:
        with suppress(OSError):
            path = _path(Path(folder), kind, pid)
            with path.open("rb") as file:
                used = int.from_bytes(file.read(4), "little")  # how their files begin
            os.truncate(path, used)


def _path(folder: Path, kind: str, pid: int) -> Path:
    return folder / f"{kind}_{pid}.db"
