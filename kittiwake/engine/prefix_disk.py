"""The disk tier of the prefix cache: a folder of state files that outlives the process.

A file is written beside its place by a thread of its own, synced, renamed, and the folder synced: it is there whole or
not at all, whenever the process or the machine stops. It is a state file (:mod:`kittiwake.engine.state_file`) of another
kind, with what decides its bits in its metadata, and its sha-256 is checked before it is used. Several processes, of one
model or of several, may share a folder; all of its files count towards the budget.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kittiwake.engine.prefix import DiskStats, Origin, Prefix
from kittiwake.engine.request import KeptState
from kittiwake.engine.state_file import FORMAT, StateOwner, encode_state, load_state, read_label
from kittiwake.engine.token_tree import Node, TokenTree
from kittiwake.errors import OutputError, StateError, StateFileError

KIND = "kittiwake-prefix"
SUFFIX = ".prefix"
STAGED_BYTES = 256 << 20
"""Most bytes of states that wait to be written; those that come on top are not written."""
PAUSE_S = 60.0
"""How long nothing is written after a write that failed."""
RESCAN_S = 60.0
"""How often the folder is looked at for what other processes did."""
CLOSE_S = 30.0

_LABEL = ("format", "family", "model", "dtype", "build", "origin")
"""What a file is told by, beside its tokens: keys of its metadata."""
_MOST_DIGITS = 18
"""Of a position; what is longer is none."""

logger = logging.getLogger(__name__)


class Files:
    """What the tier does to the file system, step by step."""

    def create(self, path: Path) -> int:
        """A new file only its owner may read, open for writing and locked for as long as it is."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle

    def write(self, handle: int, data: bytes | memoryview) -> None:
        """All of the data."""
        left = memoryview(data)
        while left:
            left = left[os.write(handle, left) :]

    def sync(self, handle: int) -> None:
        """Bring a file, or a folder, to the disk."""
        os.fsync(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file its name; one that has it already holds the same state."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink(missing_ok=True)


@dataclass
class _File:
    """A file of the folder. ``node`` is None where it is not of this model and build."""

    name: str
    nbytes: int
    used_s: float
    key: str = ""
    node: Node[_File] | None = None


@dataclass(frozen=True)
class _Job:
    name: str
    origin: Origin
    tokens: np.ndarray
    prefix: Prefix

    def kept(self) -> KeptState:
        """The state with all tokens that it has seen."""
        start = self.origin.start
        before, initial = (start.tokens, start.initial) if start is not None else ((), "")
        return KeptState(self.prefix.saved, (*before, *self.tokens.tolist()), self.prefix.logits, initial)


@dataclass
class _Counts:
    written: int = 0
    dropped: int = 0
    evicted: int = 0
    hits: int = 0
    foreign: int = 0
    corrupt: int = 0
    failed: int = 0


@dataclass
class _Index:
    """What is known of the folder, under one lock."""

    trees: dict[str, TokenTree[_File]] = field(default_factory=dict)
    files: dict[str, _File] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, file: _File, tokens: np.ndarray | None = None) -> None:
        """Enter a file; one of this model and build with its tokens."""
        self.drop(file.name)
        self.files[file.name] = file
        self.nbytes += file.nbytes
        if tokens is not None:
            file.node = self.trees.setdefault(file.key, TokenTree()).insert(tokens, file)

    def drop(self, name: str) -> None:
        """Forget a file."""
        file = self.files.pop(name, None)
        if file is None:
            return
        self.nbytes -= file.nbytes
        if file.node is not None:
            self.trees[file.key].remove(file.node)
            if not self.trees[file.key]:
                del self.trees[file.key]

    def find(self, key: str, tokens: np.ndarray) -> tuple[_File | None, int]:
        """The file of the longest prefix, and how many tokens are shared with any."""
        if key not in self.trees:
            return None, 0
        node, common = self.trees[key].find(tokens)
        return (node.value if node is not None else None), common

    def victim(self) -> _File:
        """The file unused for longest among those that a longer one makes up for, else among all."""
        covered = [file for file in self.files.values() if file.node is not None and file.node.is_covered]
        return min(covered or self.files.values(), key=lambda file: file.used_s)


class DiskTier:
    """A folder of states under a budget of bytes. Reads come from the engine's thread, writes from one of its own."""

    def __init__(
        self, folder: Path, budget_bytes: int, owner: StateOwner, build: str, *, files: Files | None = None
    ) -> None:
        """Looks through the folder, which is made where it is missing; ``build`` is the digest of what decides bits.

        Raises OutputError for a folder that cannot be used.
        """
        self._folder, self._budget, self._owner, self._build = folder, budget_bytes, owner, build
        self._files = files or Files()
        self._label = {
            "format": str(FORMAT),
            "family": owner.family,
            "model": owner.model,
            "dtype": owner.dtype,
            "build": build,
        }
        self._index, self._counts = _Index(), _Counts()
        self._news = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._queued: dict[str, int] = {}
        self._paused_until_s = self._scanned_s = 0.0
        self._is_closed = False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_partials()
            self._scan()
        except OSError as err:
            raise OutputError(f"the cache folder {folder} cannot be used: {err.strerror or err}") from None
        self._writer = threading.Thread(target=self._write_all, name="kittiwake-cache-writer", daemon=True)
        self._writer.start()

    # reading

    def find(self, key: str, tokens: np.ndarray) -> tuple[int, int]:
        """(tokens of the longest prefix that is kept, tokens shared with any)."""
        with self._news:
            file, common = self._index.find(key, tokens)
            return (file.node.depth if file is not None and file.node is not None else 0), common

    def load(self, key: str, tokens: np.ndarray) -> Prefix | None:
        """The longest prefix of ``tokens``, every byte checked; damaged files are removed on the way."""
        while True:
            with self._news:
                file, _ = self._index.find(key, tokens)
                count = file.node.depth if file is not None and file.node is not None else 0
            if file is None:
                return None
            prefix = self._read(file, tokens[:count])
            if prefix is not None:
                return prefix

    def _read(self, file: _File, tokens: np.ndarray) -> Prefix | None:
        """A file that is said to hold these tokens; None, and it is forgotten, where it does not."""
        path = self._folder / file.name
        base = _base(file.key)
        more = {"build": self._build, "origin": file.key}
        try:
            kept = load_state(path, self._owner, kind=KIND, more=more)
            if kept.logits is None or not np.array_equal(np.asarray(kept.tokens[base:], dtype=np.int32), tokens):
                raise StateFileError(f"{path} holds another text than it did")
        except (StateFileError, OSError) as err:
            self._put_aside(file, err)
            return None
        with self._news:
            file.used_s = time.time()
            self._counts.hits += 1
        with suppress(OSError):
            os.utime(path)
        kept.logits.flags.writeable = False
        return Prefix(len(tokens), kept.saved, kept.logits)

    # writing

    def put(self, origin: Origin, tokens: np.ndarray, prefix: Prefix) -> None:
        """Have a state written some time, unless it is there or the writer is behind or paused. Never waits."""
        key = origin.key
        name = file_name({**self._label, "origin": key}, tokens)
        nbytes = prefix.saved.nbytes + prefix.logits.nbytes
        with self._news:
            if name in self._index.files or name in self._queued or self._is_closed:
                return
            behind = sum(self._queued.values())
            if time.monotonic() < self._paused_until_s or (behind and behind + nbytes > STAGED_BYTES):
                self._counts.dropped += 1
                return
            self._jobs.append(_Job(name, origin, tokens, prefix))
            self._queued[name] = nbytes
            self._news.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                self._write(job)
            except OSError as err:
                self._pause(err)
            except StateError as err:  # a state that says something else of itself than it is
                with self._news:
                    self._counts.failed += 1
                logger.warning("a cached state is not written: %s", err)
            except Exception:  # the thread lives on: who closes the tier waits for what is queued
                with self._news:
                    self._counts.failed += 1
                logger.exception("a cached state is not written")
            finally:
                with self._news:
                    del self._queued[job.name]
                    self._news.notify_all()

    def _pause(self, err: OSError) -> None:
        with self._news:
            self._counts.failed += 1
            self._paused_until_s = time.monotonic() + PAUSE_S
            self._counts.dropped += len(self._jobs)
            for job in self._jobs:
                del self._queued[job.name]
            self._jobs.clear()
        what = "the disk is full" if err.errno in (errno.ENOSPC, errno.EDQUOT) else (err.strerror or str(err))
        logger.warning("cached states are not written for %d s: %s: %s", PAUSE_S, self._folder, what)

    def _write(self, job: _Job) -> None:
        """Write one file and enter it. Raises OSError; nothing is left behind then."""
        target = self._folder / job.name
        if time.monotonic() - self._scanned_s > RESCAN_S or target.exists():
            self._scan()
        if job.name in self._index.files:  # another process wrote it
            return
        key = job.origin.key
        more = {"build": self._build, "origin": key}
        pieces = list(encode_state(job.kept(), self._owner, kind=KIND, more=more))
        nbytes = sum(len(piece) for piece in pieces)
        if nbytes > self._budget:
            with self._news:
                self._counts.dropped += 1
            return
        self._make_room(nbytes)
        partial = self._folder / f".{job.name}.{secrets.token_hex(6)}.partial"
        handle = self._files.create(partial)
        try:
            for piece in pieces:
                self._files.write(handle, piece)
            self._files.sync(handle)
            self._files.rename(partial, target)
        except OSError:
            with suppress(OSError):
                self._files.remove(partial)
            raise
        finally:
            os.close(handle)
        with self._news:
            self._index.add(_File(job.name, nbytes, time.time(), key), job.tokens)
            self._counts.written += 1
        with _opened(self._folder) as folder:
            self._files.sync(folder)

    def _make_room(self, nbytes: int) -> None:
        """Remove files until as many bytes fit."""
        with self._news:
            while self._index.files and self._index.nbytes + nbytes > self._budget:
                file = self._index.victim()
                self._index.drop(file.name)
                self._files.remove(self._folder / file.name)
                self._counts.evicted += 1

    # the folder

    def _remove_partials(self) -> None:
        """Remove what processes left that were stopped in a write; a file that is being written is locked."""
        for path in self._folder.glob(f".*{SUFFIX}.*.partial"):
            with suppress(OSError):
                handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._files.remove(path)
                finally:
                    os.close(handle)

    def _scan(self) -> None:
        """Bring the index up to what is in the folder."""
        self._scanned_s = time.monotonic()
        seen = set()
        for entry in os.scandir(self._folder):
            if entry.name.endswith(SUFFIX) and not entry.name.startswith(".") and entry.is_file(follow_symlinks=False):
                seen.add(entry.name)
                if entry.name not in self._index.files:
                    with suppress(FileNotFoundError):  # removed by another process just now
                        self._enter(entry)
        with self._news:
            for name in self._index.files.keys() - seen:
                self._index.drop(name)

    def _enter(self, entry: os.DirEntry[str]) -> None:
        """Enter a file as what its label says it is; one without a sound label is removed."""
        info = entry.stat()
        file = _File(entry.name, info.st_size, info.st_mtime)
        path = Path(entry.path)
        try:
            content, tokens = read_label(path)
            if content.get("kind") != KIND or not content.get("format", "").isdecimal():
                raise StateFileError(f"{path} is no cached state")
            if content["format"] == str(FORMAT) and entry.name != _name_of(content, tokens, path):
                raise StateFileError(f"{path} does not hold what its name says")
        except (StateFileError, OSError) as err:
            self._put_aside(file, err)
            return
        with self._news:
            if all(content.get(key) == value for key, value in self._label.items()):
                file.key = content["origin"]
                self._index.add(file, tokens[_base(file.key) :])
            else:
                self._counts.foreign += 1
                self._index.add(file)

    def _put_aside(self, file: _File, err: Exception) -> None:
        """Have nothing more to do with a file that could not be used: remove it where it is damaged. One that cannot be
        read, or not be removed, only counts towards the budget: it may well be somebody else's."""
        path = self._folder / file.name
        with self._news:
            self._index.drop(file.name)
            if not path.exists():
                return
            is_readable = _is_readable(path)
            if is_readable:
                self._counts.corrupt += 1
                with suppress(OSError):
                    self._files.remove(path)
            else:
                self._counts.foreign += 1
            is_left = path.exists()
            if is_left:
                self._index.add(_File(file.name, file.nbytes, file.used_s))
        what = "is damaged" if is_readable else "cannot be read"
        logger.warning("a cached state %s and was %s: %s", what, "left where it is" if is_left else "removed", err)

    def stats(self) -> DiskStats:
        """The tier in numbers."""
        with self._news:
            return DiskStats(
                entries=sum(file.node is not None for file in self._index.files.values()),
                bytes=self._index.nbytes,
                budget_bytes=self._budget,
                queued=len(self._queued),
                is_paused=time.monotonic() < self._paused_until_s,
                **vars(self._counts),
            )

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until nothing is queued; False where that takes too long."""
        with self._news:
            return self._news.wait_for(lambda: not self._queued, timeout_s)

    def close(self) -> None:
        """Write what is queued, for a while, and end. Twice is harmless."""
        self.flush()
        with self._news:
            self._is_closed = True
            self._jobs.clear()
            self._news.notify_all()
        self._writer.join(CLOSE_S)


def file_name(label: Mapping[str, str], tokens: np.ndarray) -> str:
    """The name of the file of a text: the same for the same model, build, origin and tokens."""
    told = "\0".join(label[key] for key in _LABEL)
    digest = hashlib.sha256(told.encode() + b"\0" + np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    return digest.hexdigest()[:40] + SUFFIX


def _name_of(content: Mapping[str, str], tokens: np.ndarray, path: Path) -> str:
    """What a file of this format must be named. Raises StateFileError where its metadata is not that of one."""
    base = _base(content.get("origin", ""))
    if not content.keys() >= set(_LABEL) or not 0 <= base < len(tokens):
        raise StateFileError(f"{path} is no cached state")
    return file_name(content, tokens[base:])


def _is_readable(path: Path) -> bool:
    """Whether a file's bytes can be had at all, whatever they are."""
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError:
        return False
    return True


def _base(key: str) -> int:
    """How many of the tokens in a file stand before the text that an origin's key is of."""
    digits = key.partition("@")[2]
    return int(digits) if digits.isdecimal() and digits.isascii() and len(digits) <= _MOST_DIGITS else 0


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)
