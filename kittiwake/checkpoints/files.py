"""Files and folders as such: what a path leads to, digests, and writing a folder whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kittiwake.errors import CheckpointError, InputFileError, OutputError
from kittiwake.progress import Progress

GET_AGAIN = "the download stopped early or the file is damaged: get it again"
"""What to do about a file that is not whole."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_READ_BYTES = 1 << 20
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def quoted(value: object) -> str:
    """A value from a file as it may be shown: escaped, and at most 120 characters of it."""
    text = repr(value)
    return text if len(text) <= 120 else text[:116] + " ..."


def is_plain_name(name: str) -> bool:
    """Whether a name from a file can only mean a file in its own folder: ASCII letters, digits, dot, dash, underline."""
    return _PLAIN_NAME.fullmatch(name) is not None and not name.endswith(".")


@dataclass(frozen=True)
class FileStamp:
    """A regular file as it was when opened, so that a later change under a mapping is noticed."""

    path: Path
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path, error: type[InputFileError] = CheckpointError) -> FileStamp:
        """Raises ``error`` when the path is missing, unreadable, or not a regular file (a pipe would block us)."""
        if any("\ud800" <= char <= "\udfff" for char in str(path)):  # torch could not open it, nor a manifest name it
            raise error(f"{quoted(str(path))} is a path that is not UTF-8 text", "rename it")
        try:
            info = path.stat()
        except FileNotFoundError:
            raise error(f"{path} does not exist", "check the path; kittiwake opens local files only") from None
        except (OSError, ValueError) as err:
            raise error(f"{path} cannot be read: {_reason(err)}") from None
        if not stat.S_ISREG(info.st_mode):
            raise error(f"{path} is not a regular file")
        if not os.access(path, os.R_OK):
            raise error(f"{path} cannot be read: Permission denied", "change its permissions, or copy it")
        return cls(path, info.st_size, info.st_mtime_ns, info.st_ino)

    def check_unchanged(self) -> None:
        """Raises CheckpointError when the file was replaced or rewritten. Reading a mapping of a file that shrank
        would end the process, so this is asked before every tensor; a change after that cannot be caught."""
        if FileStamp.of(self.path) != self:
            raise CheckpointError(f"{self.path} changed while it was open", "open the checkpoint again")


LFS_POINTER = b"version https://git-lfs"
"""How the small files begin that stand for large ones in a Git repository."""
HEAD_BYTES = 512
"""How much of a file tells what it is."""


def refuse_strangers(path: Path, head: bytes) -> None:
    """Raise CheckpointError for content that people do hand over by mistake, saying what it is; ``head`` is the file's
    first HEAD_BYTES."""
    if not head:
        raise CheckpointError(f"{path} is empty (0 bytes)", "the download failed: get it again")
    if head.startswith(LFS_POINTER):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the file itself", "run: git lfs pull")
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise CheckpointError(
            f"{path} is a web page, not a checkpoint", "download the file itself, not the page about it"
        )
    if text.startswith((b"{", b"[")):
        raise CheckpointError(f"{path} is a JSON text, not tensors", "give the folder that it belongs to")


def _reason(err: OSError | ValueError) -> str:
    return err.strerror or str(err) if isinstance(err, OSError) else str(err)


def sha256_file(path: Path, progress: Progress | None = None) -> str:
    """sha-256 of a file in lower-case hex, read 1 MiB at a time. Raises CheckpointError when it cannot be read."""
    total = FileStamp.of(path).size
    digest, done = hashlib.sha256(), 0
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
                done += len(block)
                if progress is not None:
                    progress(f"sha-256 of {path.name}", done, total)
    except OSError as err:
        raise CheckpointError(f"{path} cannot be read: {_reason(err)}") from None
    return digest.hexdigest()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError of the block into an OutputError about ``path``; wrap nothing but writes in it."""
    try:
        yield
    except OSError as err:
        raise _output_error(path, err) from None


def _output_error(path: Path, err: OSError) -> OutputError:
    if err.errno in _FULL_DISK:
        return OutputError(
            f"{path} cannot be written: the disk or a quota is full ({err.strerror})",
            "free some space, or choose another place; nothing was left behind",
        )
    if err.errno == errno.ENAMETOOLONG:
        return OutputError(f"{path} cannot be written: the name is too long", "choose a shorter name")
    if err.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return OutputError(f"{path} cannot be written: {err.strerror}", "choose a folder that you can write to")
    return OutputError(f"{path} cannot be written: {err.strerror or err}")


def write_file(path: Path, data: bytes) -> None:
    """A new file with this content, on the disk when the call returns. Raises OSError (see :func:`writing`)."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside ``target`` to fill; renamed to ``target`` at the end, removed when anything fails.

    The hidden name is ``.NAME.partial-RANDOM``. Raises OutputError when the target exists (before or after the work;
    nothing is ever overwritten), when its parent is missing or not writable, and when the disk is full. Only a process
    killed outright leaves the hidden folder; the target itself never exists half-written.
    """
    _check_target(target)
    partial = target.parent / f".{target.name[:40]}.partial-{secrets.token_hex(6)}"
    try:
        with writing(target):
            partial.mkdir()
        yield partial
        with writing(target):
            _sync_folder(partial)
            _rename_new(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    with suppress(OSError):  # some file systems cannot sync a folder; the rename itself has happened
        _sync_folder(target.parent)


@contextmanager
def new_file(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """The path of a hidden file beside ``target`` to write; synced and renamed to ``target`` at the end.

    As :func:`new_folder`, for one file. ``replace`` allows a target that is a file already: it is replaced whole, in
    one step.
    """
    check_new_file(target, replace=replace)
    partial = target.parent / f".{target.name[:40]}.partial-{secrets.token_hex(6)}"
    try:
        yield partial
        with writing(target):
            _sync_file(partial)
            if replace:
                partial.replace(target)
            else:
                _link_new(partial, target)
    except BaseException:
        with suppress(
            OSError
        ):  # a disk that takes no more may not let go either; what is told is why nothing was written
            partial.unlink()
        raise
    with suppress(OSError):
        _sync_folder(target.parent)


def check_new_file(target: Path, *, replace: bool = False) -> None:
    """Raise OutputError where :func:`new_file` would, so that it is told before the work."""
    if not replace:
        _check_target(target)
        return
    with writing(target), suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(target.lstat().st_mode):
            raise OutputError(f"{target} is not a regular file", "choose another name")
        return
    _check_target(target)


def _link_new(partial: Path, target: Path) -> None:
    """Give a file a name that is free: a link fails where the name is taken, a rename would not."""
    try:
        target.hardlink_to(partial)
    except FileExistsError:
        raise _exists(target) from None
    except OSError:  # a file system without hard links
        _rename_new(partial, target)
        return
    partial.unlink()


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _check_target(target: Path) -> None:
    if target.name in ("", "..") or "\0" in str(target):
        raise OutputError(f"{target} does not name a new folder or file", "give a name that does not exist yet")
    # Not lexists: it says False for a name that is too long, which should be told before the work.
    with writing(target), suppress(FileNotFoundError, NotADirectoryError):
        target.lstat()
        raise _exists(target)
    if not target.parent.is_dir():
        raise OutputError(f"{target} cannot be written: the folder {target.parent} does not exist", "create it first")


def _exists(target: Path) -> OutputError:
    return OutputError(f"{target} already exists", "kittiwake never overwrites; remove it or choose another name")


def _rename_new(partial: Path, target: Path) -> None:
    """Rename onto a name that is free. A file or a filled folder that appears in the last instant makes the rename
    itself fail; an empty folder that does is replaced, which loses nothing."""
    if os.path.lexists(target):
        raise _exists(target)
    try:
        partial.rename(target)
    except OSError as err:
        if err.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR):
            raise _exists(target) from None
        raise


def _sync_folder(folder: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as err:
        if err.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
