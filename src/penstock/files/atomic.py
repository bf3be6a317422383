"""Files that appear whole or not at all: write under a hidden name, sync, rename."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import platform
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.errors import ConfigError
from penstock.files.listing import PathLike

fcntl: Any
try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

_ATTEMPTS = 9
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)


class AtomicFile:
    """A file being written under a hidden name; `commit()` gives it its own.

    As a context manager it commits on success and leaves nothing on an exception. While it is open, its writer holds a
    lock on it, by which `remove_leftovers` knows the files of killed writers. With `durable=False` nothing is synced:
    for files that can be made again and whose content is checked.
    """

    def __init__(self, path: PathLike, *, durable: bool = True) -> None:
        self.path, self._durable = Path(path), durable
        for attempt in range(_ATTEMPTS):
            own = f"{os.getpid()}-{_machine()}{secrets.token_hex(2)}"
            self.temporary = self.path.with_name(f".{self.path.name}.{own}.tmp")
            try:
                raw = io.FileIO(str(self.temporary), "x")
            except FileExistsError:
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            if _lock(raw.fileno()) is not False and self.temporary.exists():
                break
            raw.close()  # taken for a leftover in the moment before it was locked
        self.file = _Target(raw, str(self.path))

    def commit(self) -> None:
        """Make it durable, then visible. The rename replaces an older file in one step."""
        with naming(str(self.path)):
            self.file.flush()
            if self._durable:
                os.fsync(self.file.fileno())
            locked = os.dup(self.file.fileno()) if fcntl is not None else None
            self.file.close()
        try:
            self.temporary.replace(self.path)
        finally:
            if locked is not None:
                os.close(locked)
        if self._durable:
            sync_directory(self.path.parent)

    def discard(self) -> None:
        """Discard further writes, so that a writer can close without errors before `abort`."""
        self.file.discarding = True

    def abort(self) -> None:
        """Forget it; a second call, or one after `commit`, does nothing."""
        self.discard()
        with contextlib.suppress(OSError):
            self.file.close()
        self.temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.abort()


def remove_leftovers(path: PathLike) -> None:
    """Delete what killed writers of the file at `path` have left next to it.

    Only files of this machine, and only those that nobody holds locked: a writer on another machine may be alive, and
    network drives do not always tell its locks. Nothing is deleted on Windows, and where there are no locks.
    """
    target = Path(path)
    own = re.compile(rf"\.{re.escape(target.name)}\.\d+-{_machine()}[0-9a-f]{{4}}\.tmp")
    for name in os.listdir(target.parent) if fcntl is not None else ():  # noqa: PTH208 - only the names
        if own.fullmatch(name):
            remove_unlocked(target.with_name(name))


def remove_unlocked(stray: Path) -> None:
    """Delete a file under a hidden name, unless its writer lives."""
    with contextlib.suppress(OSError, ConfigError):  # gone meanwhile, not ours, or no file that we made
        handle = open_own(stray, os.O_RDWR)
        try:
            if _lock(handle):
                stray.unlink()
        finally:
            os.close(handle)


@functools.cache
def _machine() -> str:
    """Four hex digits for this machine."""
    return f"{zlib.crc32(platform.node().encode()) & 0xFFFF:04x}"


def _lock(handle: int) -> bool | None:
    """Lock an open file until it is closed: False if somebody else has it locked, None if that cannot be known."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def write_atomic(path: PathLike, data: bytes | memoryview) -> None:
    """Replace the file at `path` by `data`, durably, in one step."""
    with AtomicFile(path) as target:
        target.file.write(data)


def sync_directory(directory: PathLike) -> None:
    """Make renames in a directory durable, where the system can (not on Windows, nor on every network drive)."""
    if os.name == "nt":
        return
    try:
        handle = os.open(directory, os.O_RDONLY)
    except PermissionError:
        return  # a directory that may be written to but not listed
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Gives an error of the system that names no file (a full disk names none) this one."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, path) from error


class _Target(io.BufferedWriter):
    """Writes under a hidden name; errors (a full disk) have the name that the user knows."""

    def __init__(self, raw: io.FileIO, shown: str) -> None:
        super().__init__(raw)
        self._shown = shown
        self.discarding = False

    def write(self, data: Any) -> int:
        if self.discarding:
            return memoryview(data).nbytes
        with naming(self._shown):
            return super().write(data)


_LINK_ERRNOS = (errno.ELOOP, errno.EMLINK, getattr(errno, "EFTYPE", errno.ELOOP))
"""Error codes of systems that refuse to follow a link."""

MARKERS = ("complete", "run")
"""Files that record completeness and owner of a build: they are deleted last."""


def refuse_link(path: Path) -> None:
    """Raise if there is a symbolic link at a path under which penstock keeps something of its own."""
    if path.is_symlink():
        raise _is_link(path)


def open_own(path: Path, flags: int) -> int:
    """A handle of the regular file at `path`, never of one that a link leads to, nor of one that has other names."""
    refuse_link(path)  # Windows has nothing that refuses it while opening
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in _LINK_ERRNOS:
            raise _is_link(path) from error
        raise
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return handle
    os.close(handle)
    what = "has another name too (a hard link)" if stat.S_ISREG(found.st_mode) else "is no regular file"
    raise ConfigError(f"{path} {what}, and penstock writes only to files that it made; remove it, then try again")


def open_regular(path: PathLike) -> int:
    """A handle to read a file. What is none is an OSError at once: a named pipe would wait for its writer."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_regular(path: PathLike) -> bytes:
    """All bytes of a file; see `open_regular`."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def strangers(directory: Path, own: re.Pattern[str]) -> list[str]:
    """Names in a directory that penstock gives to none of its files there; none if it does not exist.

    A link, or something else than a directory, is refused.
    """
    refuse_link(directory)
    try:
        return sorted(found.name for found in directory.iterdir() if not own.fullmatch(found.name))
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise ConfigError(
            f"{directory} is no directory, and penstock keeps unfinished output there; remove it, then try again"
        ) from None


def check_own_directory(directory: Path, own: re.Pattern[str]) -> None:
    """Make sure that it is not there, or is a directory with nothing in it but what penstock put there."""
    names = strangers(directory, own)
    if names:
        raise ConfigError(
            f"{directory} is where penstock keeps unfinished output, and it holds {names[0]!r}, which penstock did not "
            "write; move it elsewhere, then try again"
        )


def remove_own_directory(directory: Path, own: re.Pattern[str]) -> None:
    """Delete a directory of penstock and all in it; one that holds anything else is refused as a whole."""
    check_own_directory(directory, own)
    # Shards, journals and the like before the file of the owner: killed in between, they are still known as ours.
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name not in MARKERS and not path.is_dir():
            path.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _is_link(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is a symbolic link, and penstock writes and deletes nothing through a link under a name of its own; "
        "remove the link, then try again"
    )
