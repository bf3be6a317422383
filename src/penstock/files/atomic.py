"""Files that appear whole or not at all: write under a hidden name, sync, rename."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.errors import ConfigError
from penstock.files.listing import PathLike

_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)


class AtomicFile:
    """A file being written under a hidden name; `commit()` gives it its own.

    As a context manager it commits on success and leaves nothing on an exception.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        self.temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        self.file = _Target(io.FileIO(str(self.temporary), "x"), str(self.path))

    def commit(self) -> None:
        """Make it durable, then visible. The rename replaces an older file in one step."""
        with naming(str(self.path)):
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
        self.temporary.replace(self.path)
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
