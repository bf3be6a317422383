"""What a file holds, as a number: hashed once, and not again while its size, time and inode are the same."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson
import xxhash

from penstock.errors import ChangedFileError
from penstock.files.atomic import write_atomic
from penstock.files.listing import PathLike, names_of

__all__ = ["FileFingerprint", "FileStamp", "FileStamps", "fingerprint_files", "hash_file", "is_settled"]


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


_READ_BYTES = 1 << 20
_SETTLED_NS = 2_000_000_000
_MOST_REMEMBERED = 100_000


@dataclass(frozen=True, slots=True)
class FileFingerprint:
    """A file by its content: two files with the same bytes have the same `xxh3`, whatever they are called."""

    name: str
    """Without its directories, but for those that are called `name=value` and stand for columns."""
    size: int
    xxh3: str
    """Of all its bytes as they lie on the disk, compressed or not; 128 bits as hex."""


def hash_file(path: PathLike) -> str:
    """xxh3-128 of a file, read in pieces of a megabyte: as fast as the disk, some gigabytes a second from memory."""
    digest = xxhash.xxh3_128()
    piece = memoryview(bytearray(_READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()


def fingerprint_files(paths: Iterable[PathLike], *, memo: PathLike | None = None) -> list[FileFingerprint]:
    """The fingerprint of each file, in the order given.

    `memo` is a small file that remembers what was hashed: a file of the same size, times and inode as then is not read
    again. A file that changed within the last two seconds is hashed but not remembered, because it could change once
    more without its time showing it. A damaged memo is made anew. A file that changes while it is hashed is an error.
    """
    remembered = _read_memo(memo)
    fresh: dict[str, list[Any]] = {}
    found = []
    files = paths if isinstance(paths, list) else [*map(Path, paths)]
    for path, name in zip(files, names_of(files)):
        place, stat = str(path.resolve()), path.stat()
        mark = _mark(stat)
        known = remembered.get(place)
        if known is not None and known[:-1] == mark:
            digest = known[-1]
        else:
            stamps = FileStamps()
            stamps.note(path)
            digest = hash_file(path)
            stamps.check(path)
            if _mark(path.stat()) == mark and is_settled(stat):
                fresh[place] = [*mark, digest]
        found.append(FileFingerprint(name, stat.st_size, digest))
    if memo is not None and fresh:
        _write_memo(Path(memo), fresh)
    return found


def is_settled(stat: os.stat_result) -> bool:
    """Whether a file was left alone for long enough that another change would show in its time."""
    return time.time_ns() - stat.st_mtime_ns > _SETTLED_NS


def _mark(stat: os.stat_result) -> list[int]:
    """What changes when a file does. Its time can be set back; the time of that cannot."""
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _read_memo(memo: PathLike | None) -> dict[str, list[Any]]:
    if memo is None:
        return {}
    try:
        kept = orjson.loads(Path(memo).read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return {}
    if not isinstance(kept, dict):
        return {}
    return {place: mark for place, mark in kept.items() if isinstance(mark, list) and len(mark) == 5}


def _write_memo(memo: Path, fresh: dict[str, list[Any]]) -> None:
    # Read again: another process may have added to it. If both write at once, one addition is lost and hashed again.
    kept = _read_memo(memo)
    for place in fresh:
        kept.pop(place, None)
    kept |= fresh
    memo.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(memo, orjson.dumps(dict(list(kept.items())[-_MOST_REMEMBERED:])))
