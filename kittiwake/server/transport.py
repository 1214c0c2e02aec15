"""Message sockets between the engine and the HTTP workers: in a private folder, never waiting, bounded."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from kittiwake.server.messages import Lost, Notice, encode_notices

QUEUE_MESSAGES = 256
"""Messages of a worker that zmq keeps: some seconds of steps."""
BACKLOG_BYTES = 64 << 20
"""Bytes kept beside them before a worker counts as stuck."""
_SOCKET = "engine"
_LOCK = "lock"
_PREFIX = "kittiwake-"
_LONGEST_PATH = 100  # of a Unix socket, 107 with the name


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder that only this user may enter, removed at the end; those that killed servers left go with it."""
    parent = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not os.access(parent, os.W_OK) or len(str(parent)) > _LONGEST_PATH - 24:
        parent = Path("/tmp")
    _remove_left_over(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 0700
    with (folder / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held as long as this process lives: its children do not inherit it
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_left_over(parent: Path) -> None:
    """Remove the folders of this user whose server is gone."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def socket_address(folder: Path) -> str:
    """Where the engine listens."""
    return f"ipc://{folder / _SOCKET}"


@dataclass
class _Peer:
    """What one worker has still to be told."""

    backlog: deque[bytes] = field(default_factory=deque)
    backlog_bytes: int = 0
    is_stuck: bool = False


class EngineSocket:
    """The engine's end. Nothing here waits: what a worker does not take now is kept for it, up to a bound."""

    def __init__(self, folder: Path, *, backlog_bytes: int = BACKLOG_BYTES) -> None:
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full or vanished worker is told, not passed over
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(socket_address(folder))
        self._backlog_bytes = backlog_bytes
        self._peers: dict[bytes, _Peer] = {}

    @property
    def has_backlog(self) -> bool:
        """Whether a worker has been told less than there is to tell."""
        return any(peer.backlog or peer.is_stuck for peer in self._peers.values())

    def receive(self) -> Iterator[tuple[bytes, bytes]]:
        """(worker, message) of everything that has come."""
        while True:
            try:
                worker, message = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield worker, message

    def post(self, worker: bytes, notices: list[Notice]) -> bool:
        """Tell a worker. False when it is gone or stuck: then it hears of none of its calls any more."""
        peer = self._peers.setdefault(worker, _Peer())
        if peer.is_stuck:
            return False
        data = encode_notices(notices)
        if peer.backlog or not self._send(worker, data):
            if worker not in self._peers:
                return False
            peer.backlog.append(data)
            peer.backlog_bytes += len(data)
            if peer.backlog_bytes > self._backlog_bytes:
                peer.backlog.clear()
                peer.backlog_bytes, peer.is_stuck = 0, True
                return False
        return True

    def flush(self) -> None:
        """Try again what could not be sent."""
        for worker, peer in list(self._peers.items()):
            while peer.backlog and self._send(worker, peer.backlog[0]):
                peer.backlog_bytes -= len(peer.backlog.popleft())
            if peer.is_stuck and self._send(worker, encode_notices([Lost()])):
                peer.is_stuck = False

    def forget(self, worker: bytes) -> None:
        """A worker is gone."""
        self._peers.pop(worker, None)

    def close(self) -> None:
        """Close the sockets; what is not sent yet gets a moment to go out."""
        self.socket.close(linger=200)
        self._context.term()

    def _send(self, worker: bytes, data: bytes) -> bool:
        """Hand a message to zmq; a worker that is gone is forgotten."""
        try:
            self.socket.send_multipart([worker, data], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._peers.pop(worker, None)
            return False
        return True
