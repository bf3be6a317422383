"""Checksums of the bytes of a file that ends in a footer, kept in front of the footer, where other readers do not look.

    data                          Parquet or Arrow IPC, as any reader expects it
    (end, xxh3) of each segment   segments follow one another from the first byte on
    segments, xxh3 of all that is not data, b"penstock"
    footer, its length, the magic bytes of the format

A file without this block is one of another writer, and is read without it.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Self

import orjson
import pyarrow as pa
import xxhash

from penstock.errors import ChangedFileError, DataError
from penstock.files.atomic import write_atomic
from penstock.files.listing import PathLike, names_of
from penstock.files.ranges.read_ahead import RangeFile, open_raw
from penstock.files.ranges.remote_file import InputFile, RemoteFile

PARQUET_TAIL, ARROW_TAIL = b"PAR1", b"ARROW1"
_MARK = b"penstock"
_SEGMENT, _END, _LENGTH = struct.Struct("<QQ"), struct.Struct("<QQ8s"), struct.Struct("<I")
_SEGMENT_BYTES = 1 << 17

Readable = io.RawIOBase | io.BufferedIOBase
Segment = tuple[int, int]
"""End of the segment, and the xxh3 of its bytes."""


@dataclass(frozen=True, slots=True)
class Checksums:
    """The segments of one file."""

    ends: list[int]
    digests: list[int]

    def segment(self, number: int) -> tuple[int, int]:
        """The bytes it is about: from, to."""
        return (self.ends[number - 1] if number else 0), self.ends[number]

    def around(self, start: int, stop: int) -> tuple[int, int]:
        """The bytes of all segments that hold some of these."""
        first, last = bisect_right(self.ends, start), bisect_right(self.ends, stop - 1)
        return self.segment(first)[0], self.segment(last)[1]

    def check_data(self, number: int, data: Any) -> None:
        """Raise ArrowInvalid unless these are the bytes of a segment as they were written."""
        self._compare(number, xxhash.xxh3_64_intdigest(data))

    def check(self, file: Readable, start: int, stop: int) -> None:
        """Read the segments that hold these bytes and compare them; raises ArrowInvalid where they differ."""
        first, last = bisect_right(self.ends, start), bisect_right(self.ends, stop - 1)
        at, _ = self.segment(first)
        file.seek(at)
        scratch = _scratch()
        for number in range(first, last + 1):
            digest = xxhash.xxh3_64()
            while at < self.ends[number]:
                got = file.readinto(scratch[: self.ends[number] - at])
                if not got:
                    raise pa.ArrowInvalid(f"the file ends at byte {at}, {self.ends[-1] - at} bytes too early")
                digest.update(scratch[:got])
                at += got
            self._compare(number, digest.intdigest())

    def _compare(self, number: int, digest: int) -> None:
        if digest != self.digests[number]:
            low, high = self.segment(number)
            raise pa.ArrowInvalid(f"bytes {low} to {high} are not those that were written: their checksum differs")


def read_checksums(path: InputFile, tail: bytes) -> Checksums | None:
    """The checksums of a file, whose footer is compared with its own; None if it has none.

    Raises ArrowInvalid if the footer or the checksums were changed.
    """
    with RangeFile(path) if isinstance(path, RemoteFile) else open(path, "rb", buffering=0) as file:
        size = file.seek(0, io.SEEK_END)
        ending = len(tail) + _LENGTH.size
        if size < ending:
            return None
        (length,) = _LENGTH.unpack(_read(file, size - ending, _LENGTH.size))
        start = size - ending - length - _END.size
        if start < 0:
            return None
        rest = bytes(_read(file, start, size - start))
        count, digest, mark = _END.unpack_from(rest)
        if mark != _MARK or not rest.endswith(tail):
            return None
        first = start - count * _SEGMENT.size
        listed = bytes(_read(file, first, start - first)) if first >= 0 else b""
    if first < 0 or _digest(listed, count, rest[_END.size :]) != digest:
        raise pa.ArrowInvalid("the footer is not the one that was written: its checksum differs")
    segments = list(_SEGMENT.iter_unpack(listed))
    if any(low > high for (low, _), (high, _) in pairwise([(0, 0), *segments])) or (
        segments and segments[-1][0] != first
    ):
        raise pa.ArrowInvalid("the checksums of the file do not go with its size")
    return Checksums([end for end, _ in segments], [digest for _, digest in segments])


def check_file(path: Path, tail: bytes) -> None:
    """Compare all of a file with its checksums, if it has any; a DataError where they differ."""
    try:
        checksums = read_checksums(path, tail)
        if checksums is not None and checksums.ends:
            with open(path, "rb", buffering=0) as file:
                checksums.check(file, 0, checksums.ends[-1])
    except pa.ArrowInvalid as error:
        raise DataError(f"the file is damaged: {error}", file=str(path)) from error


def checksum_block(segments: list[Segment], footer: bytes) -> bytes:
    """The checksums of a file, which stand in front of its footer; the segments cover all that is before them."""
    return _block(segments, footer)


def hash_buffer(data: memoryview, start: int) -> Iterator[Segment]:
    """Bytes that begin at `start` of a file in segments of 128 KiB."""
    for low in range(0, len(data), _SEGMENT_BYTES):
        part = data[low : low + _SEGMENT_BYTES]
        yield start + low + len(part), xxhash.xxh3_64_intdigest(part)


class HashedFile(io.RawIOBase):
    """A file that is written from front to back, hashed on the way: a segment ends where `cut` is called."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self._position = file, xxhash.xxh3_64(), 0
        self._segments: list[Segment] = []
        self._held: bytearray | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._position += size
        if self._held is not None:
            self._held += data
        else:
            self._digest.update(data)
            self._file.write(data)
        return size

    def cut(self) -> None:
        """End a segment here."""
        self._segments.append((self._position, self._digest.intdigest()))
        self._digest.reset()

    def hold(self) -> None:
        """Hold back what is written from here on: it ends with the footer, which follows the checksums."""
        self._held = bytearray()

    def finish(self, tail: bytes) -> None:
        """Write what was held, with the checksums in front of the footer."""
        held = bytes(self._held or b"")
        (length,) = _LENGTH.unpack_from(held, len(held) - len(tail) - _LENGTH.size)
        at = len(held) - len(tail) - _LENGTH.size - length
        self._digest.update(held[:at])
        self._position -= len(held) - at
        self.cut()
        self._file.write(held[:at] + _block(self._segments, held[at:]) + held[at:])


def _block(segments: list[Segment], footer: bytes) -> bytes:
    listed = b"".join(_SEGMENT.pack(*segment) for segment in segments)
    return listed + _END.pack(len(segments), _digest(listed, len(segments), footer), _MARK)


def _digest(listed: bytes, count: int, footer: bytes) -> int:
    return xxhash.xxh3_64_intdigest(listed + count.to_bytes(8, "little") + footer)


_local = threading.local()


def _scratch() -> memoryview:
    """Memory of this thread to read into: new memory would cost more than reading and hashing do."""
    if not hasattr(_local, "scratch"):
        _local.scratch = memoryview(bytearray(_SEGMENT_BYTES))
    scratch: memoryview = _local.scratch
    return scratch


def _read(file: Readable, start: int, size: int, into: memoryview | None = None) -> memoryview:
    """Exactly these bytes."""
    view, filled = memoryview(bytearray(size)) if into is None else into[:size], 0
    file.seek(start)
    while filled < size:
        got = file.readinto(view[filled:])
        if not got:
            raise pa.ArrowInvalid(f"the file ends at byte {start + filled}, {size - filled} bytes too early")
        filled += got
    return view


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Stat values that change when a regular file is written, truncated or replaced."""

    size: int
    mtime_ns: int
    inode: int
    etag: str | None = None
    """Of a remote file, which is read in the state that has it."""

    @classmethod
    def of(cls, path: PathLike) -> Self | None:
        """None for what is no regular file: a pipe has no state that could stay the same."""
        if isinstance(path, RemoteFile):
            return cls(path.size, path.modified_ns, 0, path.etag)
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
            self._stamps.setdefault(name, FileStamp.of(path))

    def check(self, path: PathLike) -> None:
        """Raise if a file that was noted is another now. Costs a look at the file, some microseconds.

        For a remote file, each request does that; here it is compared as it was listed.
        """
        name = os.fspath(path)
        was = self._stamps.get(name)
        if was is None or (was.etag is not None and not isinstance(path, RemoteFile)):
            return
        try:
            now = FileStamp.of(path)
        except FileNotFoundError:
            raise ChangedFileError("it was removed", file=name) from None
        if now is None or now == was:
            return
        name = str(path)
        if now.inode != was.inode or now.etag != was.etag:
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
        """Forget the stamps: files may have changed since."""
        self._stamps.clear()


_READ_BYTES = 1 << 20
_SETTLED_NS = 2_000_000_000
_MOST_REMEMBERED = 100_000


@dataclass(frozen=True, slots=True)
class FileFingerprint:
    """A file by its content: two files with the same bytes have the same `xxh3`, under any names."""

    name: str
    """Without its directories, but for those that are called `name=value` and stand for columns."""
    size: int
    xxh3: str
    """Of all its bytes as they lie on the disk, compressed or not; 128 bits as hex."""


def hash_file(path: PathLike) -> str:
    """xxh3-128 of a file, read in pieces of a megabyte: as fast as the disk, some gigabytes a second from memory."""
    digest = xxhash.xxh3_128()
    piece = memoryview(bytearray(_READ_BYTES))
    with open_raw(path) if isinstance(path, RemoteFile) else open(path, "rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()


def fingerprint_files(paths: Iterable[PathLike], *, memo: PathLike | None = None) -> list[FileFingerprint]:
    """The fingerprint of each file, in the order given.

    `memo` is a small file that remembers what was hashed: a file of the same size, times and inode as then is not read
    again. A file that changed within the last two seconds is hashed but not remembered, because it could change once
    more without its time showing it. A damaged memo is made again. A file that changes while it is hashed is an error.
    """
    remembered = _read_memo(memo)
    fresh: dict[str, list[Any]] = {}
    found = []
    files = paths if isinstance(paths, list) else [*map(Path, paths)]
    for path, name in zip(files, names_of(files)):
        if isinstance(path, RemoteFile):
            found.append(FileFingerprint(name, path.size, _remote_hash(path)))
            continue
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


def _remote_hash(file: RemoteFile) -> str:
    """Hash of the ETag, which stands for the bytes without reading them; of the bytes, if there is none."""
    return hash_file(file) if file.etag is None else xxhash.xxh3_128_hexdigest(f"etag {file.etag}".encode())


def remembered_hash(name: str, files: Sequence[Path], memo: PathLike, make: Callable[[], str]) -> str:
    """Hash that `make` computes from some files, remembered in the memo as long as the files are what they were."""
    stats = [file.stat() for file in files]
    marks = [_mark(stat) for stat in stats]
    whole = xxhash.xxh3_64_intdigest(orjson.dumps(marks)) >> 1
    mark = [sum(stat.st_size for stat in stats), len(stats), whole, 0]  # as many numbers as a file has
    known = _read_memo(memo).get(name)
    if known is not None and known[:-1] == mark:
        return str(known[-1])
    digest = make()
    if all(map(is_settled, stats)) and [_mark(file.stat()) for file in files] == marks:
        _write_memo(Path(memo), {name: [*mark, digest]})
    return digest


def is_settled(stat: os.stat_result) -> bool:
    """True if a file is old enough that another change would show in its time."""
    return time.time_ns() - stat.st_mtime_ns > _SETTLED_NS


def _mark(stat: os.stat_result) -> list[int]:
    """Stat values that change when a file does. Its mtime can be set back, its ctime cannot."""
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
