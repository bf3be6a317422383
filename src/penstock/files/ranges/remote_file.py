"""Files that are read where they are: objects in a bucket, files of a web server, files of the Hugging Face Hub.

    file = list_files("s3://corpora/en/part-0.jsonl")[0]
    file.size, file.etag
    head = file.read_range(0, 4096)

A `RemoteFile` stands where a `Path` stands. It is listed with its size and its ETag, and every request is for that
state of it: a file that is another one by then is a `ChangedFileError`.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from penstock._forks import renewed
from penstock.errors import DataError
from penstock.files.filesystems import cut, shown

TAIL_BYTES = 1 << 16
"""Bytes at the end of a file that are requested together: most footers are smaller."""
_TAILS_BYTES = 16 << 20
_FOOTER = ((b"PAR1", 4), (b"ARROW1", 4))
_MARK, _MARK_BYTES = b"penstock", 24
"""Before a footer: checksums are in front of it, see `files/checksums.py`."""


@dataclass(frozen=True, slots=True)
class RemoteFile(os.PathLike[str]):
    """A file at a URL, in the state in which it was listed. `str()` hides passwords; `os.fspath` is the whole URL."""

    root: str
    """URL of the bucket, with its query; of other files their own."""
    key: str
    """Key in the bucket; empty for other files."""
    size: int
    etag: str | None
    """Changes with the content. A web server without ETags has the time of the last change in its place."""
    modified_ns: int = 0

    @property
    def url(self) -> str:
        path, query = cut(self.root)
        return f"{path}/{self.key}{query}" if self.key else self.root

    @property
    def name(self) -> str:
        """Last part of the path, without a query."""
        return (self.key or cut(self.root)[0]).rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def suffixes(self) -> list[str]:
        return PurePosixPath(self.name).suffixes

    def with_name(self, name: str) -> str:
        """URL beside this file."""
        path, query = cut(self.url)
        return f"{shown(path).rpartition('/')[0]}/{name}{shown(query)}"

    def stat(self) -> os.stat_result:
        """Size and time, as they were listed."""
        seconds = self.modified_ns // 10**9
        facts = (stat.S_IFREG | 0o444, 0, 0, 1, 0, 0, self.size, seconds, seconds, seconds)
        return os.stat_result(facts, {"st_mtime_ns": self.modified_ns, "st_ctime_ns": self.modified_ns})

    def read_range(self, start: int, stop: int) -> Any:
        """Bytes from `start` to `stop`, as a buffer: one request, made again where that helps. Whole, or an error."""
        stop = min(stop, self.size)
        if stop <= start:
            return b""
        data = _read(self, start, stop)
        if len(data) != stop - start:
            raise DataError(f"ends at byte {start + len(data)}, and was listed with {self.size} bytes", file=str(self))
        return data

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[Any]:
        """Several ranges, with requests at the same time."""
        from penstock.files.ranges.read_ahead import submit

        waiting = [submit(self.read_range, start, stop) for start, stop in ranges]
        return [answer.result() for answer in waiting]

    def read_bytes(self) -> bytes:
        """All of the file."""
        step = 8 << 20
        parts = self.read_ranges([(at, at + step) for at in range(0, self.size, step)])
        return b"".join(map(bytes, parts))

    def tail(self, start: int) -> tuple[int, Any] | None:
        """Bytes from some place at or before `start` to the end, kept for the next who asks for a footer.

        None if `start` is not near the end.
        """
        return _tails.get(self, start)

    def __str__(self) -> str:
        return shown(self.url)

    def __repr__(self) -> str:
        return f"RemoteFile({str(self)!r}, {self.size} bytes)"

    def __fspath__(self) -> str:
        return self.url


def _read(file: RemoteFile, start: int, stop: int) -> Any:
    if file.root.startswith("hf://"):
        from penstock.files.ranges.hub import read_hub

        return read_hub(file, start, stop)
    if file.key:
        from penstock.files.objects import open_bucket

        return open_bucket(file.root)[0].read(file.key, start, stop, etag=file.etag)
    from penstock.files.ranges.web import read_web

    return read_web(file.root, start, stop, file.size, file.etag)


class _Tails:
    """The last bytes of some files, up to some megabytes of them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[RemoteFile, tuple[int, Any]] = OrderedDict()
        self._bytes = 0
        self._lock = renewed(threading.Lock())

    def get(self, file: RemoteFile, start: int) -> tuple[int, Any] | None:
        with self._lock:
            if (known := self._kept.get(file)) is not None:
                self._kept.move_to_end(file)
        if known is not None and known[0] <= start:
            return known
        begin = max(0, file.size - TAIL_BYTES)
        if start < begin:
            if known is None or start < file.size - _TAILS_BYTES // 4:
                return None
            begin = start  # a long footer, whose length was in the tail
        data = file.read_range(begin, file.size if known is None else known[0])
        if known is not None:
            data = b"".join((data, known[1]))
        elif begin <= (needed := file.size - _footer_bytes(data)) <= start:
            begin, data = needed, bytes(memoryview(data)[needed - begin :])  # the rest may be long, and is not needed
        self._keep(file, begin, data)
        return begin, data

    def _keep(self, file: RemoteFile, begin: int, data: Any) -> None:
        with self._lock:
            before = self._kept.pop(file, None)
            self._kept[file] = (begin, data)
            self._bytes += len(data) - (len(before[1]) if before is not None else 0)
            while self._bytes > _TAILS_BYTES and len(self._kept) > 1:
                _, (_, dropped) = self._kept.popitem(last=False)
                self._bytes -= len(dropped)


def _footer_bytes(tail: Any) -> int:
    """Length of the footer at the end of some bytes; all of them, if there is none or there are checksums."""
    data = bytes(memoryview(tail)[-16:])
    for magic, width in _FOOTER:
        if data.endswith(magic) and len(data) >= len(magic) + width:
            at = len(data) - len(magic) - width
            length = int.from_bytes(data[at : at + width], "little") + len(magic) + width
            mark = bytes(memoryview(tail)[-length - 8 : -length]) if length + 8 <= len(tail) else b""
            return len(tail) if mark == _MARK else length + _MARK_BYTES
    return len(tail)


_tails = _Tails()

InputFile: TypeAlias = Path | RemoteFile
"""Both have a name, suffixes, `stat()`, `read_bytes()`, and text for messages."""
