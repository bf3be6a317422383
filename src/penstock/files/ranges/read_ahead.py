"""Reading remote files ahead of whoever uses their bytes: several requests at a time, a bounded number of bytes.

A `RemoteReadAhead` is for files that are read from front to back, one after the other; a `RangeFile` for files of which
some ranges are read, such as the column chunks of Parquet. What was requested counts as held from then on.
"""

from __future__ import annotations

import io
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any, TypeVar

import pyarrow as pa

from penstock._forks import renewed
from penstock.files.ranges.remote_file import InputFile, RemoteFile

Result = TypeVar("Result")

WINDOW_BYTES = 32 << 20
"""Most bytes that are requested ahead, where the memory is not known."""
_LEAST_WINDOW, _MOST_WINDOW = 1 << 18, 64 << 20
_SHARE = 8
"""Part of a memory budget that is read ahead: one in so many."""
_PARTS = 4
"""Requests for a window at the same time: few large ones, since servers read whole blocks."""
_LEAST_PART, _FIRST_PART, _MOST_PART = 1 << 16, 1 << 18, 8 << 20
_TOGETHER_BYTES = 1 << 16
_MOST_REQUESTS = 32
_pools: dict[int, ThreadPoolExecutor] = {}


def submit(work: Callable[..., Result], *arguments: Any) -> Future[Result]:
    """Make a request in one of the threads that all readers of the process share."""
    pool = _pools.get(os.getpid())
    if pool is None:
        _pools.clear()  # those of a parent process have no threads here
        pool = _pools.setdefault(os.getpid(), ThreadPoolExecutor(_MOST_REQUESTS, thread_name_prefix="penstock-request"))
    return pool.submit(work, *arguments)


def window_for(budget_bytes: int) -> int:
    """Bytes to read ahead within a memory budget."""
    return max(_LEAST_WINDOW, min(_MOST_WINDOW, budget_bytes // _SHARE))


def _part_of(window_bytes: int) -> int:
    """Bytes of a request where so many are requested ahead: a power of two."""
    return 1 << (max(_LEAST_PART, min(_MOST_PART, window_bytes // _PARTS)).bit_length() - 1)


class _Lane:
    """A range of a file that is read from front to back, in parts that are requested ahead."""

    def __init__(self, file: RemoteFile, start: int, stop: int, part_bytes: int) -> None:
        self.file, self.start, self.stop = file, start, stop
        self._part_bytes, self.requested = part_bytes, start
        self._parts: deque[tuple[int, int, Future[Any]]] = deque()
        self.held = 0

    @property
    def over(self) -> bool:
        """True if all of it was requested."""
        return self.requested >= self.stop

    def request(self, most: int | None = None, *, aligned: bool = False) -> int:
        """Request the next part; how many bytes it has. An aligned one ends at a multiple of its size: servers keep
        objects in blocks, and some read all of a block for any part of it."""
        size = self._part_bytes if most is None else most
        if aligned:
            size -= (self.requested + size) % size
        size = min(size, self.stop - self.requested)
        start, self.requested = self.requested, self.requested + size
        self._parts.append((start, self.requested, submit(self.file.read_range, start, self.requested)))
        self.held += size
        return size

    def covers(self, position: int) -> bool:
        """True if the byte is in a part, or in the next one to request."""
        first = self._parts[0][0] if self._parts else self.requested
        return first <= position <= self.requested and position < self.stop

    def part_at(self, position: int) -> tuple[int, memoryview]:
        """Start and bytes of the part that holds a byte; the parts before it are given up."""
        while self._parts and self._parts[0][1] <= position:
            self._drop()
        if not self._parts:
            self.request()
        start, _, answer = self._parts[0]
        return start, memoryview(answer.result())

    def held_at(self, start: int, stop: int) -> memoryview | None:
        """The bytes from `start` on, up to `stop`, of the first part, if they are in it."""
        if not self._parts or not self._parts[0][0] <= start < self._parts[0][1]:
            return None
        first, _, answer = self._parts[0]
        return memoryview(answer.result())[start - first : stop - first]

    def close(self) -> None:
        while self._parts:
            self._drop()

    def _drop(self) -> None:
        start, stop, answer = self._parts.popleft()
        answer.cancel()
        self.held -= stop - start


class SharedParts:
    """Parts of files that many readers read small ranges of: each is requested once, and kept.

    For files that are no larger than the memory for them; all readers of all their ranges share one.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[RemoteFile, int], Future[Any]] = {}
        self._lock = renewed(threading.Lock())

    def part_at(self, file: RemoteFile, position: int) -> tuple[int, memoryview]:
        """Start and bytes of the part of a file that holds a byte."""
        start = position - position % _LEAST_PART
        with self._lock:
            answer = self._parts.get((file, start))
            if answer is None:
                answer = submit(file.read_range, start, start + _LEAST_PART)
                self._parts[file, start] = answer
        try:
            return start, memoryview(answer.result())
        except BaseException:
            with self._lock:
                if self._parts.get((file, start)) is answer:
                    del self._parts[file, start]  # the next who asks requests it again
            raise


class KeptParts:
    """Parts of files that are read twice from front to back: the first ones are kept, up to `most_bytes` of them."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._parts: deque[tuple[RemoteFile, int, memoryview]] = deque()
        self._full = False
        self.held_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Empty, in another process."""
        return KeptParts, (self._most,)

    def keep(self, file: RemoteFile, start: int, data: memoryview) -> None:
        """Keep a part, if there was room for all before it."""
        if self._parts and self._parts[-1][:2] == (file, start):
            return
        self._full = self._full or self.held_bytes + len(data) > self._most
        if not self._full:
            self._parts.append((file, start, data))
            self.held_bytes += len(data)

    def part_at(self, file: RemoteFile, position: int) -> tuple[int, memoryview] | None:
        """Start and bytes of the part that holds a byte, if it was kept. Those before it are given up."""
        while self._parts:
            known, start, data = self._parts[0]
            if known == file and start <= position < start + len(data):
                return start, data
            self._parts.popleft()
            self.held_bytes -= len(data)
        return None

    @property
    def is_at_last(self) -> bool:
        """True if no other part was kept after the one that was taken last."""
        return len(self._parts) == 1

    def clear(self) -> None:
        """Give all up; what is read next is kept again."""
        self._parts.clear()
        self.held_bytes, self._full = 0, False


class RemoteReadAhead:
    """Files that are read one after the other, each from some offset to its end.

    The first request is small and the number of bytes ahead grows as they are used, up to `window_bytes`, beyond the
    end of a file into the next ones. `until` is a byte of the last file after which nothing is requested ahead; its
    last record is read in steps of `record_bytes`, which grow. With `shared` parts it holds nothing itself. What it
    reads goes to `keeps`, for another reader, and what is in `kept` is not requested.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        window_bytes: int,
        *,
        until: int | None = None,
        record_bytes: int = _LEAST_PART // 4,
        shared: SharedParts | None = None,
        keeps: KeptParts | None = None,
        kept: KeptParts | None = None,
    ) -> None:
        self._files, self._window, self.until = files, window_bytes, until
        self._keeps, self._kept = keeps, kept
        self._record_bytes, self._shared = record_bytes, shared
        self._part_bytes = _part_of(window_bytes)
        self._lanes: deque[tuple[int, _Lane]] = deque()
        self._allowed = 0
        self.first_bytes = _FIRST_PART
        """Bytes of the first request."""

    @property
    def held_bytes(self) -> int:
        return sum(lane.held for _, lane in tuple(self._lanes))

    def open(self, number: int, offset: int = 0) -> RemoteStream:
        """A stream of the bytes of file `number`, from an offset on."""
        return RemoteStream(self, self._file(number), number, offset)

    def part_at(self, number: int, position: int) -> tuple[int, memoryview]:
        """Start and bytes of the part of a file that holds a byte."""
        if self._shared is not None:
            return self._shared.part_at(self._file(number), position)
        if self._kept is not None and (found := self._kept.part_at(self._file(number), position)) is not None:
            self._request_behind(number, found[0] + len(found[1]))
            return found
        while self._lanes and self._lanes[0][0] < number:
            self._lanes.popleft()[1].close()
        if not self._lanes or self._lanes[0][0] != number or not self._lanes[0][1].covers(position):
            self.close()
            self._lanes.append((number, self._lane(number, position)))
            self._allowed = self._lanes[0][1].request(min(self.first_bytes, self._needed(position)))
        lane = self._lanes[0][1]
        if self.until is None:
            self._request_more()
        elif position >= lane.requested:
            lane.request(self._needed(position))
        start, data = lane.part_at(position)
        self._allowed = min(self._window, 2 * max(self._allowed, len(data)))
        if self._keeps is not None:
            self._keeps.keep(self._file(number), start, data)
        return start, data

    def close(self) -> None:
        while self._lanes:
            self._lanes.popleft()[1].close()
        self._allowed = 0

    def _request_behind(self, number: int, position: int) -> None:
        """Request what follows the last of the kept parts, while that is used."""
        assert self._kept is not None
        if self._lanes or not self._kept.is_at_last or self.until is not None:
            return
        if position >= self._file(number).size:
            number, position = number + 1, 0
        if number < len(self._files) and isinstance(self._files[number], RemoteFile) and self._file(number).size:
            self._lanes.append((number, self._lane(number, position)))
            self._allowed = self._lanes[0][1].request(min(self.first_bytes, self._needed(position)))

    def _file(self, number: int) -> RemoteFile:
        file = self._files[number]
        assert isinstance(file, RemoteFile)
        return file

    def _lane(self, number: int, start: int) -> _Lane:
        file = self._file(number)
        return _Lane(file, start, file.size, self._part_bytes)

    def _needed(self, position: int) -> int:
        """Bytes of a request: of a range all, with the rest of its last record; behind it little at a time."""
        if self.until is None:
            return self._part_bytes
        if position >= self.until:
            return min(self._part_bytes, max(self._record_bytes, position - self.until))
        return max(self._record_bytes, min(self._window, self.until + self._record_bytes - position))

    def _request_more(self) -> None:
        """Fill the window."""
        held = self.held_bytes
        while held < self._allowed:
            number, lane = self._lanes[-1]
            if lane.over:
                number += 1
                if number >= len(self._files) or not isinstance(self._files[number], RemoteFile):
                    return
                self._lanes.append((number, self._lane(number, 0)))
                continue
            held += lane.request(min(self._part_bytes, self._allowed), aligned=True)


class _SeekableFile(io.RawIOBase):
    """A position in a remote file, which reading from it begins at."""

    _file: RemoteFile
    _position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}[whence]
        self._position = max(0, base + offset)
        return self._position


class RemoteStream(_SeekableFile):
    """Bytes of a remote file from front to back."""

    def __init__(self, ahead: RemoteReadAhead, file: RemoteFile, number: int, offset: int) -> None:
        self._ahead, self._file, self._number, self._position = ahead, file, number, offset
        self._start, self._data = 0, memoryview(b"")

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        if self._position >= self._file.size or not len(view):
            return 0
        at = self._position - self._start
        if not 0 <= at < len(self._data):
            self._data = memoryview(b"")  # before the next is waited for
            self._start, self._data = self._ahead.part_at(self._number, self._position)
            at = self._position - self._start
        taken = min(len(view), len(self._data) - at)
        view[:taken] = self._data[at : at + taken]
        self._position += taken
        return taken

    def close(self) -> None:
        self._data = memoryview(b"")
        super().close()


class RangeFile(_SeekableFile):
    """Random access to a remote file. Ranges that were planned are requested before they are read."""

    def __init__(self, file: RemoteFile, window_bytes: int = WINDOW_BYTES) -> None:
        self._file, self._window = file, window_bytes
        self._position = 0
        self._lanes: list[_Lane] = []
        self._starts: list[int] = []
        self._depth = 1

    @property
    def held_bytes(self) -> int:
        return sum(lane.held for lane in tuple(self._lanes))

    def plan(self, ranges: Sequence[tuple[int, int]], following: Iterable[Sequence[tuple[int, int]]] = ()) -> None:
        """Request ranges that will be read, and those of the `following` plans as far as the window goes.

        They are held until a plan does not have them any more. Ranges that are larger than the window are read ahead in
        parts, as if each were a file of its own, and must be read from front to back.
        """
        wanted: list[tuple[int, int]] = []
        total = 0
        for group in chain([ranges], following):
            joined = _joined(group)
            total += sum(stop - start for start, stop in joined)
            if total > self._window:
                break
            wanted += [
                (at, min(at + _MOST_PART, stop)) for start, stop in joined for at in range(start, stop, _MOST_PART)
            ]
        before: dict[tuple[int, int], _Lane | None] = {(lane.start, lane.stop): lane for lane in self._lanes}
        if wanted or not ranges:
            part, self._depth = _MOST_PART, 0
        else:
            wanted = [*ranges]
            part = max(_LEAST_PART, min(_MOST_PART, self._window // (2 * len(wanted))))
            self._depth = max(0, self._window // (len(wanted) * part) - 1)
            self._forget()
            before = {}
        self._lanes = [before.pop(each, None) or _Lane(self._file, *each, part) for each in sorted(wanted)]
        self._starts = [lane.start for lane in self._lanes]
        for dropped in before.values():
            if dropped is not None:
                dropped.close()
        for lane in self._lanes if not self._depth and part == _MOST_PART else ():
            if not lane.over:
                lane.request()

    def take_over(self, other: RangeFile, start: int, stop: int) -> None:
        """Have what another reader of the file has requested between two bytes, for the next plan."""
        self._lanes = [lane for lane in other._lanes if start <= lane.start and lane.stop <= stop]
        other._lanes = [lane for lane in other._lanes if lane not in self._lanes]
        for each in (self, other):
            each._starts = [lane.start for lane in each._lanes]

    def stream(self) -> None:
        """Plan to read all of the file, from front to back."""
        self._forget()
        part = _part_of(self._window)
        self._depth = self._window // part - 1
        self._lanes, self._starts = [_Lane(self._file, 0, self._file.size, part)], [0]

    def read_at(self, start: int, stop: int) -> Any:
        """Bytes as a buffer, without a copy where they are in one part."""
        stop = min(stop, self._file.size)
        pieces: list[Any] = []
        while start < stop:
            data = self._piece(start, stop)
            pieces.append(data)
            start += len(data)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def held(self, start: int, stop: int) -> memoryview | None:
        """The bytes from `start` on, up to `stop`, if they were requested and are still here."""
        number = bisect_right(self._starts, start) - 1
        lane = self._lanes[number] if number >= 0 else None
        return None if lane is None else lane.held_at(start, stop)

    def _piece(self, start: int, stop: int) -> memoryview:
        number = bisect_right(self._starts, start) - 1
        lane = self._lanes[number] if number >= 0 else None
        if lane is not None and start < lane.stop:
            if not lane.covers(start):
                lane.close()
                lane = self._lanes[number] = _Lane(self._file, start, lane.stop, lane._part_bytes)
            begin, data = lane.part_at(start)
            while self._depth and not lane.over and lane.held < (self._depth + 1) * lane._part_bytes:
                lane.request(aligned=True)
            return data[start - begin : stop - begin]
        tail = self._file.tail(start)
        if tail is not None:
            return memoryview(tail[1])[start - tail[0] : stop - tail[0]]
        return memoryview(self._file.read_range(start, stop))

    def _forget(self) -> None:
        for lane in self._lanes:
            lane.close()
        self._lanes, self._starts = [], []

    # -- a file ------------------------------------------------------------------------------------------------------

    def read(self, size: int = -1) -> bytes:
        return bytes(self._take(size))

    def read_buffer(self, size: int | None = -1) -> pa.Buffer:
        """For Arrow, which takes it without a copy."""
        return pa.py_buffer(self._take(-1 if size is None else size))

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self._take(len(view))
        view[: len(data)] = data
        return len(data)

    def _take(self, size: int) -> Any:
        stop = self._file.size if size < 0 else min(self._file.size, self._position + size)
        data = self.read_at(self._position, stop)
        self._position = max(self._position, stop)
        return data

    def close(self) -> None:
        self._forget()
        super().close()


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, near ones together."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start - found[-1][1] <= _TOGETHER_BYTES:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def open_raw(path: InputFile, offset: int = 0) -> io.RawIOBase:
    """The bytes of a file from an offset on, as they lie there."""
    if isinstance(path, RemoteFile):
        return RemoteReadAhead([path], WINDOW_BYTES).open(0, offset)
    file = io.FileIO(os.fspath(path))
    file.seek(offset)
    return file


def request_footers(files: Sequence[InputFile]) -> None:
    """Request the ends of remote files at the same time, for those who ask for them next; errors come then too."""
    waiting = [submit(file.tail, max(0, file.size - 8)) for file in files if isinstance(file, RemoteFile) and file.size]
    for answer in waiting:
        answer.exception()


def parquet_metadata(path: InputFile) -> Any:
    """Footer of a Parquet file; of a remote one by one request, or none if somebody has asked before."""
    import pyarrow.parquet as pq  # here: most readers of this module need none of it

    if not isinstance(path, RemoteFile):
        return pq.read_metadata(path)
    with RangeFile(path) as file:
        end = bytes(file.read_at(max(0, path.size - 8), path.size))
        length = int.from_bytes(end[:4], "little") + 8 if end.endswith(b"PAR1") else len(end)
        if length > path.size:
            raise pa.ArrowInvalid(f"the footer would be longer than the file, which has {path.size} bytes")
        footer = file.read_at(path.size - length, path.size)
    return pq.read_metadata(
        pa.BufferReader(b"PAR1" + bytes(footer))
    )  # a file without rows, which a reader never misses
