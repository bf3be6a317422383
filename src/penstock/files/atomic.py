"""Files that appear whole or not at all: write beside the target, sync, rename."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.files.listing import PathLike

__all__ = ["AtomicFile", "naming", "sync_directory", "write_atomic"]

_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)


class AtomicFile:
    """A file being written under a hidden name; `commit()` gives it its own.

    As a context manager it commits on success and leaves nothing behind on an exception.
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
        """From now on writes go nowhere, so that whoever writes can close in peace before `abort`."""
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
    """Writes under a hidden name, and complains (of a full disk, say) under the name the user knows."""

    def __init__(self, raw: io.FileIO, shown: str) -> None:
        super().__init__(raw)
        self._shown = shown
        self.discarding = False

    def write(self, data: Any) -> int:
        if self.discarding:
            return memoryview(data).nbytes
        with naming(self._shown):
            return super().write(data)
