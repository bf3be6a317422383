"""Views instead of copies: slices of batches and their sizes, mapped files, and memory as one array."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_DEPTH = 5
"""Deeper values are not examined: a value may contain itself."""
_EXAMINED = 4
"""Items examined at either end of a long list."""


def slice_batch(batch: pa.RecordBatch, start: int, rows: int) -> pa.RecordBatch:
    """Rows `start` to `start + rows`, or as many of them as there are, sharing the memory of `batch`."""
    if start < 0 or rows < 0:
        raise ValueError(f"start and rows cannot be negative, got {start} and {rows}")
    return batch.slice(start, rows)


def split_batch(
    batch: pa.RecordBatch, *, max_rows: int | None = None, max_bytes: int | None = None
) -> Iterator[pa.RecordBatch]:
    """The batch in order as slices within both limits, sharing its memory; itself, if it is within them already.

    A single row above `max_bytes` comes alone. What all parts share anyway, such as a dictionary, is not counted.
    Cutting by bytes measures a slice about log2(rows) times for each part, some microseconds each.
    """
    if max_rows is None and max_bytes is None:
        raise ValueError("split_batch needs max_rows, max_bytes or both")
    if max_rows is not None and max_rows <= 0:
        raise ValueError(f"max_rows must be positive, got {max_rows}")
    if max_bytes is not None and max_bytes <= 0:
        raise ValueError(f"max_bytes must be positive, got {max_bytes}")
    return _parts(batch, max_rows or max(1, batch.num_rows), max_bytes)


def batch_nbytes(batch: pa.RecordBatch) -> int:
    """Bytes the rows of this batch occupy: of a slice only its own; of shared dictionaries all, each time."""
    return int(batch.nbytes)


def owned_nbytes(batch: pa.RecordBatch) -> int:
    """Bytes this batch keeps alive: whole buffers and the buffers they are slices of, each byte counted once.

    A batch read from a `pyarrow.memory_map` counts the whole mapping, because that is what Arrow says it was cut from.
    """
    spans = sorted({span for column in batch.columns for span in _spans(column)})
    total, reached = 0, 0
    for start, end in spans:
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def object_nbytes(value: Any, depth: int = 0) -> int:
    """Bytes of a Python value and everything in it, estimated by a few items for long lists."""
    own = max(sys.getsizeof(value), int(getattr(value, "nbytes", 0)))
    if depth == _DEPTH:
        return own
    if isinstance(value, Mapping):
        return own + sum(object_nbytes(item, depth + 1) for item in value.values())
    if not isinstance(value, (list, tuple, set, frozenset)):
        return own
    items = value
    if isinstance(value, (list, tuple)) and len(value) > 2 * _EXAMINED:
        items = [*value[:_EXAMINED], *value[-_EXAMINED:]]
    return own + sum(object_nbytes(item, depth + 1) for item in items) * len(value) // max(1, len(items))


def compact(batch: pa.RecordBatch, *, min_used: float = 0.5) -> pa.RecordBatch:
    """The batch itself, or a copy if it uses less than `min_used` of the memory it keeps alive.

    Call it on what stays for long: a few rows in a shuffle window must not pin the megabytes they were cut from.
    """
    owned = owned_nbytes(batch)
    if batch_nbytes(batch) >= min_used * owned:
        return batch
    columns = [pa.concat_arrays([column]) for column in batch.columns]
    copy = pa.RecordBatch.from_arrays(columns, schema=batch.schema)
    # Arrow cannot shorten everything: a dense union keeps its children whole. Then a copy would only cost.
    return copy if owned_nbytes(copy) < owned else batch


class MappedFile:
    """A file as read-only memory, read by the system page by page when touched.

    Buffers from it are views. They stay valid after `close`, which drops this reference only: the mapping goes when
    the last view does. Opens the file when constructed, as `open` does, so a missing file is an error right there.
    The file must not be truncated meanwhile: touching pages that are gone kills the process (SIGBUS).

        with MappedFile("corpus.jsonl") as file:
            header = file.buffer(0, 4096)
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = fspath(path)
        self._map: mmap.mmap | None = None
        self._closed = False
        with open(self.path, "rb") as file:
            self._size = file.seek(0, 2)
            if self._size:  # mmap refuses to map nothing
                try:
                    self._map = mmap.mmap(file.fileno(), self._size, access=mmap.ACCESS_READ)
                except OSError as error:
                    raise OSError(error.errno, error.strerror, self.path) from None

    def __len__(self) -> int:
        return self._size

    def buffer(self, offset: int = 0, length: int | None = None) -> pa.Buffer:
        """`length` bytes from `offset` (default: to the end), without copying."""
        start, end = self._range(offset, length)
        return pa.py_buffer(memoryview(self._map or b"")[start:end])

    def drop(self, offset: int = 0, length: int | None = None) -> None:
        """Tell the system that these bytes are not needed soon, so that a long scan does not fill the memory.

        They may be touched again and will be read again. Only pages that lie wholly in the range are dropped; does
        nothing on systems without such advice.
        """
        start, end = self._range(offset, length)
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if end < self._size:  # the last page of the file has nothing else in it
            end -= end % mmap.PAGESIZE
        if self._map is not None and start < end and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Drop our reference to the mapping; a second call does nothing."""
        self._map, self._closed = None, True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MappedFile({self.path!r}, {self._size} bytes{', closed' if self._closed else ''})"

    def _range(self, offset: int, length: int | None) -> tuple[int, int]:
        if self._closed:
            raise ValueError(f"{self.path} is closed; take the views before closing it")
        end = self._size if length is None else offset + length
        if not 0 <= offset <= end <= self._size:
            raise ValueError(f"bytes {offset} to {end} are not within the {self._size} bytes of {self.path}")
        return offset, end


def _parts(batch: pa.RecordBatch, max_rows: int, max_bytes: int | None) -> Iterator[pa.RecordBatch]:
    room = None if max_bytes is None else max_bytes + batch_nbytes(batch.slice(0, 0))
    start = 0
    while start < batch.num_rows:
        rows = min(max_rows, batch.num_rows - start)
        if room is not None:
            rows = _rows_within(batch, start, rows, room)
        yield batch if rows == batch.num_rows else batch.slice(start, rows)
        start += rows
    if not batch.num_rows:
        yield batch


def _rows_within(batch: pa.RecordBatch, start: int, most: int, max_bytes: int) -> int:
    """Number of rows from `start` that fit in `max_bytes`: at least one, at most `most`."""
    if most <= 1 or batch_nbytes(batch.slice(start, most)) <= max_bytes:
        return most
    fits, too_many = 1, most
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if batch_nbytes(batch.slice(start, middle)) <= max_bytes:
            fits = middle
        else:
            too_many = middle
    return fits


def _spans(array: pa.Array) -> Iterator[tuple[int, int]]:
    """Address ranges of the outermost buffers of an array: two slices of one buffer give the same range."""
    for buffer in array.buffers():
        if buffer is None:
            continue
        while buffer.parent is not None:
            buffer = buffer.parent
        yield buffer.address, buffer.address + buffer.size
    yield from _dictionary_spans(array)


def _dictionary_spans(array: pa.Array) -> Iterator[tuple[int, int]]:
    # `buffers()` lists those of all children, but not those of dictionaries, however deep they are.
    if isinstance(array, pa.DictionaryArray):
        yield from _spans(array.dictionary)
    elif isinstance(array, pa.ExtensionArray):
        yield from _dictionary_spans(array.storage)
    elif isinstance(array, pa.StructArray | pa.UnionArray):
        for i in range(array.type.num_fields):
            yield from _dictionary_spans(array.field(i))
    elif isinstance(array, pa.MapArray):
        yield from _dictionary_spans(array.keys)
        yield from _dictionary_spans(array.items)
    elif hasattr(array, "values"):  # lists of every kind, run-end encoding
        yield from _dictionary_spans(array.values)


_BEGIN = 1 << 16
"""First address: nothing is mapped below it, and an array cannot begin at address 0."""
_BITS = 47
"""Bits of an address in user space."""
LONGEST_STRETCH = 1 << 13
"""Longest row of a view; longer rows are as quick to copy one by one."""


@lru_cache(maxsize=16)
def memory_as(dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """All memory of the process as one read-only array of a dtype.

    Indices come from buffers that are held. Reading memory that is not mapped ends the process.
    """
    return np.asarray(_Memory(((1 << _BITS) // dtype.itemsize,), (dtype.itemsize,), dtype.str))


@lru_cache(maxsize=64)
def stretches_of(dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
    """All memory as overlapping rows: row p is the `length` numbers from index p on."""
    if length > LONGEST_STRETCH:
        raise ValueError(f"length must be at most {LONGEST_STRETCH}, got {length}")
    shape = ((1 << _BITS) // dtype.itemsize, length)
    return np.asarray(_Memory(shape, (dtype.itemsize, dtype.itemsize), dtype.str))


def place_of(address: int, itemsize: int) -> int:
    """Index of an address in `memory_as`."""
    place, rest = divmod(address - _BEGIN, itemsize)
    if rest or place < 0:
        raise ValueError(f"address {address:#x} is not aligned to {itemsize} bytes")
    return place


def keep_freed(nbytes: int) -> None:
    """Make the allocator keep up to about `nbytes` that are freed, instead of giving them back and asking again.

    Giving them back costs a page fault for every 4 KiB that is used next, which for the arrays of a batch is more than
    filling them. glibc keeps what is smaller than the largest block it has seen freed; elsewhere this does nothing.
    """
    np.empty(nbytes, np.uint8)


class _Memory:
    """Array interface over all memory."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], kind: str) -> None:
        self.__array_interface__ = {
            "data": (_BEGIN, True),
            "shape": shape,
            "strides": strides,
            "typestr": kind,
            "version": 3,
        }
