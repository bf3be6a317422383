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
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import xxhash

from penstock.errors import ConfigError, DataError, SchemaError, StaleQueueError
from penstock.files.atomic import naming, open_regular, sync_directory
from penstock.fsqueue.layout import QueueFile
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
        buffer = column.buffers()[-1]
        offset, count = buffer.address - memory.ctypes.data, len(column) * self.size
        size = count * self.dtype.itemsize if self.dtype is not None else 0
        if not 0 <= offset <= len(memory) - size:
            # It was compressed: the array is not in `memory`, and read-only.
            return np.frombuffer(buffer, self.dtype, count).reshape(len(column), *self.shape).copy()
        return memory[offset : offset + size].view(self.dtype).reshape(len(column), *self.shape)

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
_PER_BATCH = 1024


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """Bytes of a file, and the name it is published under."""

    data: pa.Buffer
    file: QueueFile


class Encoder:
    """Encoder of batch files; reuses its memory."""

    def __init__(self, *, fingerprint: str, split: str, compression: str | None = None) -> None:
        if compression not in COMPRESSIONS:
            raise ConfigError(f"compression must be one of {COMPRESSIONS}, got {compression!r}")
        self.fingerprint, self.split = fingerprint, split
        self.options = pa.ipc.IpcWriteOptions(compression=compression)
        self._buffer: pa.Buffer | None = None

    def encode(self, batches: Iterable[pa.RecordBatch], number: int, *, same_size: int | None = None) -> EncodedBatch:
        """Bytes of file `number`: a pure function of the batches, and so is the name.

        Each batch is copied before the next is requested, so they may share memory. `same_size` is the number of
        batches if none is larger than the first; the bytes are then valid until the next call.
        """
        rest = iter(batches)
        first = next(rest)
        mark = {"fingerprint": self.fingerprint, "split": self.split, "number": number}
        schema = first.schema.with_metadata({_KEY: orjson.dumps(mark)})
        stream = pa.BufferOutputStream() if same_size is None else self._reused(first, schema, same_size)
        with pa.ipc.new_file(stream, schema, options=self.options) as writer:
            writer.write_batch(first)
            count = 1
            for batch in rest:
                writer.write_batch(batch)
                count += 1
        data = stream.getvalue() if self._buffer is None or same_size is None else self._buffer.slice(0, stream.tell())
        return EncodedBatch(data, QueueFile(number, count, xxhash.xxh3_64_hexdigest(data)))

    def _reused(self, first: pa.RecordBatch, schema: pa.Schema, count: int) -> pa.FixedSizeBufferWriter:
        # The footer repeats the schema and lists the offset of each batch.
        need = count * (pa.ipc.get_record_batch_size(first) + _PER_BATCH) + 2 * schema.serialize().size + _PER_BATCH
        if self._buffer is None or self._buffer.size < need:
            self._buffer = pa.allocate_buffer(need)
        return pa.FixedSizeBufferWriter(self._buffer)


def write(path: Path, data: pa.Buffer, *, durable: bool, shown: Path) -> None:
    """Write a new file; a failure (a full disk) leaves none, and its error names `shown`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags, 0o666)
    except FileExistsError:
        path.unlink(missing_ok=True)  # never write through a link, or into what a failed call left
        handle = os.open(path, flags, 0o666)
    try:
        with naming(str(shown)):
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
            if durable:
                os.fsync(handle)
    except BaseException:
        os.close(handle)
        path.unlink(missing_ok=True)
        raise
    os.close(handle)
    if durable:
        sync_directory(path.parent)


class BatchFile:
    """Mapped and verified batch file; its arrays stay valid when the file is deleted."""

    def __init__(self, data: mmap.mmap, reader: pa.ipc.RecordBatchFileReader) -> None:
        self._memory = np.frombuffer(data, np.uint8)
        self._reader = reader

    def record_batch(self, index: int) -> pa.RecordBatch:
        return self._reader.get_batch(index)

    def arrays(self, index: int, columns: BatchColumns) -> Arrays:
        """Batch `index` as writable NumPy arrays: memory of the file, copied on write."""
        return columns.to_arrays(self.record_batch(index), self._memory)


def read(path: Path, file: QueueFile, queue: Queue, split: str) -> BatchFile:
    """Open and verify a file: checksum, format, fingerprint of the queue, split and number.

    Raises FileNotFoundError, DataError (damaged, or not a batch file) or StaleQueueError.
    """
    try:
        with open(open_regular(path), "rb", buffering=0) as handle:
            if os.fstat(handle.fileno()).st_size == 0:
                raise DataError("the file is empty", file=str(path))
            data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"cannot be opened ({error.strerror or error})", file=str(path)) from error
    if (found := xxhash.xxh3_64_hexdigest(data)) != file.checksum:
        raise DataError(
            f"the checksum of its {len(data)} bytes is {found}, its name has {file.checksum}: "
            "it was truncated or changed after it was published",
            file=str(path),
        )
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
    return BatchFile(data, reader)
