"""Files that appear whole or not at all: write beside the target, sync, rename."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from penstock.files.listing import PathLike

__all__ = ["AtomicFile", "sync_directory", "write_atomic"]


class AtomicFile:
    """A file being written under a hidden name; `commit()` gives it its own.

    As a context manager it commits on success and leaves nothing behind on an exception.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        self.temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        self.file: BinaryIO = open(self.temporary, "wb")

    def commit(self) -> None:
        """Make it durable, then visible. The rename replaces an older file in one step."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.temporary, self.path)
        sync_directory(self.path.parent)

    def abort(self) -> None:
        """Forget it; a second call, or one after `commit`, does nothing."""
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


def write_atomic(path: PathLike, data: bytes) -> None:
    """Replace the file at `path` by `data`, durably, in one step."""
    with AtomicFile(path) as target:
        target.file.write(data)


def sync_directory(directory: PathLike) -> None:
    """Make renames in a directory durable, where the system can (not on Windows)."""
    if os.name == "nt":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
