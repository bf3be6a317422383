"""Batch file: Arrow IPC, memory-mapped, with a checksum in its name and the fingerprint of its queue.

Any Arrow reader opens such a file. A record batch is a training batch, a row is a sample. The checksum (xxh3 of all
bytes) is part of the file's name, so a truncated or changed file is detected.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import xxhash

from penstock.errors import ConfigError, DataError, SchemaError, StaleQueueError
from penstock.files.atomic import naming, open_regular
from penstock.files.listing import PathLike
from penstock.fsqueue.frame import ArrayPlace, Frame
from penstock.fsqueue.layout import QueueFile, remove
from penstock.fsqueue.queue import Queue, how_to_purge
from penstock.types import Field, Schema, from_numpy, to_numpy

Arrays = dict[str, npt.NDArray[Any]]


class BatchColumns:
    """Conversion between NumPy arrays and Arrow batches of one schema."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.arrow: pa.Schema = schema.to_arrow()
        self._columns = [_Column(field, arrow) for field, arrow in zip(schema, self.arrow)]

    @property
    def same_size(self) -> bool:
        """True if batches of the same number of rows have the same size in bytes."""
        return all(column.value is not None for column in self._columns)

    def fit(self, arrays: Mapping[str, Any], rows: int) -> bool:
        """True if arrays have exactly these columns, dtypes and shapes: a fast check of the usual case."""
        return len(arrays) == len(self._columns) and all(
            column.value is not None
            and isinstance(array := arrays.get(column.name), np.ndarray)
            and array.dtype == column.dtype
            and array.shape == (rows, *column.shape)
            for column in self._columns
        )

    def to_batch(self, arrays: Mapping[str, npt.NDArray[Any]]) -> pa.RecordBatch:
        """Arrow batch of arrays with a row per sample; numbers share their memory."""
        return pa.RecordBatch.from_arrays(
            [column.encode(arrays[column.name]) for column in self._columns], schema=self.arrow
        )

    def to_arrays(self, batch: pa.RecordBatch, memory: npt.NDArray[np.uint8]) -> Arrays:
        """Arrays of a batch that was read from `memory`: views of it where possible."""
        return {column.name: column.decode(batch.column(n), memory) for n, column in enumerate(self._columns)}

    def places(self, batch: pa.RecordBatch, memory: npt.NDArray[np.uint8]) -> list[ArrayPlace] | None:
        """Places of the arrays of a batch in `memory`; None unless each of them is a view of it."""
        places = [column.place(batch.column(n), memory) for n, column in enumerate(self._columns)]
        found = [place for place in places if place is not None]
        return found if len(found) == len(places) == batch.num_columns else None

    def copy(self, arrays: Mapping[str, npt.NDArray[Any]], into: Iterable[npt.NDArray[Any]]) -> None:
        """Copy arrays to their places in a file."""
        for column, place in zip(self._columns, into):
            array = arrays[column.name]
            if array.dtype != place.dtype:
                array = column.as_stored(array)
            if array.shape != place.shape:
                raise SchemaError(f"column {column.name!r} has shape {array.shape}, expected {place.shape}")
            np.copyto(place, array, casting="no")


class _Column:
    def __init__(self, field: Field, arrow: pa.Field) -> None:
        self.name, self.field, self.type = field.name, field, arrow.type
        self.schema = Schema([field])
        fixed = field.shape is None or None not in field.shape
        value = arrow.type.value_type if isinstance(arrow.type, pa.FixedShapeTensorType) else arrow.type
        self.value: pa.DataType | None = value if fixed and _is_plain(value) else None
        self.dtype = np.dtype(value.to_pandas_dtype()) if self.value is not None else None
        self.shape = tuple(size for size in field.shape or () if size is not None)
        self.size = math.prod(self.shape)

    def encode(self, array: npt.NDArray[Any]) -> pa.Array:
        if self.value is None or array.dtype != self.dtype or array.shape[1:] != self.shape:
            return from_numpy({self.name: array}, self.schema).column(0)
        flat = np.ascontiguousarray(array)
        values = pa.Array.from_buffers(self.value, flat.size, [None, pa.py_buffer(flat)])
        if self.field.shape is None:
            return values
        rows = pa.Array.from_buffers(self.type.storage_type, len(array), [None], children=[values])
        return pa.ExtensionArray.from_storage(self.type, rows)

    def decode(self, column: pa.Array, memory: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        if self.value is None or column.offset or column.null_count:
            return self._decode_with_arrow(column)
        place = self.place(column, memory)
        if place is not None:
            return place.of(memory)
        # It was compressed: the array is not in `memory`, and read-only.
        found = np.frombuffer(column.buffers()[-1], self.dtype, len(column) * self.size)
        return found.reshape(len(column), *self.shape).copy()

    def place(self, column: pa.Array, memory: npt.NDArray[np.uint8]) -> ArrayPlace | None:
        """Place of the array in `memory`; None if it is not there as it is."""
        if self.value is None or self.dtype is None or column.offset or column.null_count:
            return None
        offset = column.buffers()[-1].address - memory.ctypes.data
        place = ArrayPlace(self.name, (len(column), *self.shape), self.dtype, offset)
        return place if offset >= 0 and place.stop <= len(memory) else None

    def as_stored(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The array that a reader gets for this one."""
        return self.decode(self.encode(array), np.empty(0, np.uint8))

    def _decode_with_arrow(self, column: pa.Array) -> npt.NDArray[Any]:
        try:
            found = to_numpy(column, self.field)
        except SchemaError as error:
            raise SchemaError(f"column {self.name!r}: {error}") from None
        if self.field.shape is not None and None in self.field.shape and len(found):
            shapes = {row.shape for row in found}
            if len(shapes) == 1:  # the usual case
                found = np.stack(list(found))
        return found if found.flags.writeable or found.dtype == object else found.copy()


def _is_plain(value: pa.DataType) -> bool:
    return bool(pa.types.is_integer(value) or pa.types.is_floating(value))


COMPRESSIONS = (None, "zstd", "lz4")

_KEY = b"penstock.queue"
_KNOWN_FRAMES = 8


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """Bytes of a file, and the name it is published under."""

    data: pa.Buffer
    file: QueueFile


class Encoder:
    """Encoder of batch files."""

    def __init__(self, *, fingerprint: str, split: str, compression: str | None = None) -> None:
        if compression not in COMPRESSIONS:
            raise ConfigError(f"compression must be one of {COMPRESSIONS}, got {compression!r}")
        self.fingerprint, self.split = fingerprint, split
        self.options = pa.ipc.IpcWriteOptions(compression=compression)
        # A file whose arrays are filled in, if that can be done.
        self._memory: npt.NDArray[np.uint8] | None = None
        self._frame: Frame | None = None
        self._views: list[list[npt.NDArray[Any]]] = []

    def encode(self, batches: Iterable[pa.RecordBatch], number: int) -> EncodedBatch:
        """Bytes of file `number`: a pure function of the batches, and so is the name."""
        rest = iter(batches)
        first = next(rest)
        schema = first.schema.with_metadata({_KEY: self._mark(number)})
        stream = pa.BufferOutputStream()
        with pa.ipc.new_file(stream, schema, options=self.options) as writer:
            writer.write_batch(first)
            count = 1
            for batch in rest:
                writer.write_batch(batch)
                count += 1
        data = stream.getvalue()
        return EncodedBatch(data, QueueFile(number, count, xxhash.xxh3_64_hexdigest(data)))

    def encode_arrays(
        self, batches: Iterable[Mapping[str, npt.NDArray[Any]]], number: int, count: int, columns: BatchColumns
    ) -> EncodedBatch:
        """The same of `count` batches of arrays, in memory that is used again: valid until the next call.

        Each batch is copied before the next is requested, so they may share memory. All have the same number of rows.
        """
        if not columns.same_size or self.options.compression is not None:
            return self.encode((columns.to_batch(arrays) for arrays in batches), number)
        rest, views = iter(batches), iter(self._views)
        if self._frame is None or len(self._views) != count or self._frame.digits != len(str(number)):
            first = columns.to_batch(next(rest))
            self._prepare([first] * count, number, columns)
            if self._frame is None:
                return self.encode(chain([first], map(columns.to_batch, rest)), number)
            views = iter(self._views[1:])
        for arrays, places in zip(rest, views, strict=True):
            columns.copy(arrays, places)
        memory, frame = self._memory, self._frame
        assert memory is not None
        frame.write_number(memory, number)
        return EncodedBatch(pa.py_buffer(memory), QueueFile(number, count, xxhash.xxh3_64_hexdigest(memory.data)))

    def _prepare(self, batches: list[pa.RecordBatch], number: int, columns: BatchColumns) -> None:
        """Encode a file, and keep it to fill in the arrays of others."""
        self._memory = memory = np.frombuffer(self.encode(batches, number).data, np.uint8).copy()
        self._frame = _frame_of(memory, pa.ipc.open_file(pa.py_buffer(memory)), columns)
        self._views = [] if self._frame is None else [[p.of(memory) for p in batch] for batch in self._frame.batches]

    def _mark(self, number: int) -> bytes:
        return orjson.dumps({"fingerprint": self.fingerprint, "split": self.split, "number": number})


def _frame_of(
    memory: npt.NDArray[np.uint8], reader: pa.ipc.RecordBatchFileReader, columns: BatchColumns
) -> Frame | None:
    """Frame of the bytes of a file; None if it has other bytes that may change, such as lengths."""
    mark: bytes = reader.schema.metadata[_KEY]
    batches = [columns.places(reader.get_batch(index), memory) for index in range(reader.num_record_batches)]
    found = [places for places in batches if places is not None]
    number = orjson.loads(mark)["number"]
    return Frame.of(memory.data, found, mark, number) if len(found) == len(batches) else None


def write(path: PathLike, data: pa.Buffer, *, durable: bool, shown: PathLike) -> None:
    """Write a new file; a failure (a full disk) leaves none, and its error names `shown`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags, 0o666)
    except FileExistsError:
        remove(path)  # never write through a link, or into what a failed call left
        handle = os.open(path, flags, 0o666)
    try:
        with naming(os.fspath(shown)):
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
            if durable:
                os.fsync(handle)
    except BaseException:
        os.close(handle)
        remove(path)
        raise
    os.close(handle)


class BatchFile:
    """Mapped and verified batch file; its arrays stay valid when the file is deleted."""

    def __init__(
        self,
        data: mmap.mmap,
        reader: pa.ipc.RecordBatchFileReader | None,
        frame: Frame | None = None,
        frames: KnownFrames | None = None,
    ) -> None:
        self._data, self._reader, self._frame, self._frames = data, reader, frame, frames

    def record_batch(self, index: int) -> pa.RecordBatch:
        if self._reader is None:
            self._reader = pa.ipc.open_file(pa.py_buffer(self._data))
        return self._reader.get_batch(index)

    def arrays(self, index: int, columns: BatchColumns) -> Arrays:
        """Batch `index` as writable NumPy arrays: memory of the file, copied on write."""
        if self._frame is not None:
            return {place.name: place.of(self._data) for place in self._frame.batches[index]}
        memory = np.frombuffer(self._data, np.uint8)
        batch = self.record_batch(index)
        frames, self._frames = self._frames, None
        if frames is not None and self._reader is not None:
            self._frame = frames.note(self._data, _frame_of(memory, self._reader, columns))
        return columns.to_arrays(batch, memory)


class KnownFrames:
    """KnownFrames of the files that one reader has seen, all of one split."""

    def __init__(self) -> None:
        self._by_size: dict[int, Frame] = {}
        self.usual = True  # False when a file has none: others of the split will have none either

    def of(self, data: mmap.mmap, file: QueueFile) -> Frame | None:
        """The frame of a file, if its bytes are those of a frame that was seen."""
        frame = self._by_size.get(len(data))
        fits = frame is not None and len(frame.batches) == file.batches >= file.start and frame.fits(data, file.number)
        return frame if fits else None

    def note(self, data: mmap.mmap, frame: Frame | None) -> Frame | None:
        """Remember the frame of a file, and return it."""
        self.usual = frame is not None
        if len(self._by_size) >= _KNOWN_FRAMES or frame is None:
            self._by_size.clear()
        if frame is not None:
            self._by_size[len(data)] = frame
        return frame


def read(path: PathLike, file: QueueFile, queue: Queue, split: str, frames: KnownFrames | None = None) -> BatchFile:
    """Open and verify a file: checksum, format, fingerprint of the queue, split and number.

    `frames` are those of this split that were seen before. Raises FileNotFoundError, DataError (damaged, or not a batch
    file) or StaleQueueError.
    """
    data = _map(path)
    if (found := xxhash.xxh3_64_hexdigest(data)) != file.checksum:
        raise DataError(
            f"the checksum of its {len(data)} bytes is {found}, its name has {file.checksum}: "
            "it was truncated or changed after it was published",
            file=str(path),
        )
    frame = None if frames is None else frames.of(data, file)
    if frame is not None:  # so it has passed all that follows
        return BatchFile(data, None, frame)
    try:
        reader = pa.ipc.open_file(pa.py_buffer(data))
        mark = orjson.loads((reader.schema.metadata or {})[_KEY])
        fingerprint, marked_split, number = mark["fingerprint"], mark["split"], mark["number"]
        count = reader.num_record_batches
    except (pa.ArrowInvalid, OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"not a batch file of a queue ({error})", file=str(path)) from None
    if fingerprint != queue.fingerprint:
        raise StaleQueueError(
            f"{path} was made with other metadata (fingerprint {fingerprint}) than this queue's "
            f"({queue.fingerprint}); {how_to_purge(queue.path)}"
        )
    if (marked_split, number, count) != (split, file.number, file.batches) or file.start > count:
        raise DataError(
            f"it was renamed: it is file {number} of split {marked_split!r} with {count} batches, its name has file "
            f"{file.number} of {split!r} with {file.batches}",
            file=str(path),
        )
    return BatchFile(data, reader, frames=frames if frames is not None and frames.usual else None)


def _map(path: PathLike) -> mmap.mmap:
    """Memory of a file, copied on write; raises FileNotFoundError or DataError."""
    try:
        handle = open_regular(path)
        try:
            return mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(handle)
    except FileNotFoundError:
        raise
    except ValueError:
        raise DataError("the file is empty", file=str(path)) from None
    except OSError as error:
        raise DataError(f"cannot be opened ({error.strerror or error})", file=str(path)) from error
