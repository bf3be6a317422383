"""Whether a file is still what it was when it was first looked at: its size, its time, its inode."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from penstock.errors import ChangedFileError
from penstock.files.listing import PathLike

__all__ = ["FileStamp", "FileStamps"]


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What changes when somebody writes to a regular file, cuts it, or puts another in its place."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: PathLike) -> Self | None:
        """None for what is no regular file: a pipe has no state that could stay the same."""
        found = Path(path).stat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ino) if stat.S_ISREG(found.st_mode) else None


class FileStamps:
    """The stamps of some files, each taken when its file is first noted. May be used by several threads at once."""

    def __init__(self) -> None:
        self._stamps: dict[str, FileStamp | None] = {}

    def note(self, path: PathLike) -> None:
        """From now on the file has to stay as it is; what was noted before counts on."""
        name = os.fspath(path)
        if name not in self._stamps:
            self._stamps.setdefault(name, FileStamp.of(name))

    def check(self, path: PathLike) -> None:
        """Raise if a file that was noted is another now. Costs a look at the file, some microseconds."""
        name = os.fspath(path)
        was = self._stamps.get(name)
        if was is None:
            return
        try:
            now = FileStamp.of(name)
        except FileNotFoundError:
            raise ChangedFileError("it was removed", file=name) from None
        if now is None or now == was:
            return
        if now.inode != was.inode:
            reason = "another file took its place"
        elif now.size != was.size:
            reason = f"it had {was.size} bytes and has {now.size} now"
        else:
            reason = "it was written to"
        raise ChangedFileError(reason, file=name)

    def check_all(self) -> None:
        for name in list(self._stamps):
            self.check(name)

    def forget(self) -> None:
        """Files may have changed; they are noted anew."""
        self._stamps.clear()
