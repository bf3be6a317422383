"""One file of batches: Arrow IPC, memory-mapped, checksummed, and marked with what it was made for.

Any Arrow reader opens such a file. One record batch is one training batch, one row of it one sample. The checksum
(xxh3 of all bytes) is in the file's name, so a file is whole or is found not to be, whatever wrote it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import xxhash

from penstock.errors import ConfigError, DataError, StaleQueueError
from penstock.files.atomic import naming, sync_directory
from penstock.fsqueue.layout import Published
from penstock.fsqueue.queue import Queue, how_to_purge
from penstock.types import Field, Schema, to_numpy

__all__ = ["Arrays", "BatchFile", "Encoded", "encode", "read", "to_arrays", "write"]

Arrays = dict[str, npt.NDArray[Any]]
COMPRESSIONS = (None, "zstd", "lz4")

_KEY = b"penstock.queue"


@dataclass(frozen=True, slots=True)
class Encoded:
    """The bytes of a file, and the name it is published under."""

    data: pa.Buffer
    file: Published


def encode(
    batches: Sequence[pa.RecordBatch],
    number: int,
    *,
    fingerprint: str,
    split: str,
    compression: str | None = None,
) -> Encoded:
    """Batches as the bytes of file `number`: the same bytes, and so the same name, whoever makes them."""
    if compression not in COMPRESSIONS:
        raise ConfigError(f"compression is one of {COMPRESSIONS}, got {compression!r}")
    mark = {"fingerprint": fingerprint, "split": split, "number": number}
    schema = batches[0].schema.with_metadata({_KEY: orjson.dumps(mark)})
    stream = pa.BufferOutputStream()
    with pa.ipc.new_file(stream, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data = stream.getvalue()
    return Encoded(data, Published(number, len(batches), xxhash.xxh3_64_hexdigest(data)))


def write(path: Path, data: pa.Buffer, *, durable: bool, shown: Path) -> None:
    """Put bytes into a new file; a failure (a full disk) leaves none and names `shown`."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)
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
    """A file of batches, mapped and checked; its arrays live on when the file is deleted."""

    def __init__(self, data: mmap.mmap, reader: pa.ipc.RecordBatchFileReader) -> None:
        self._data, self._reader = data, reader
        self._address = int(np.frombuffer(data, np.uint8, 1).ctypes.data)

    def record_batch(self, index: int) -> pa.RecordBatch:
        return self._reader.get_batch(index)

    def arrays(self, index: int, schema: Schema) -> Arrays:
        """Batch `index` as NumPy arrays that may be written to: the file's own memory, copied when first changed."""
        batch = self.record_batch(index)
        return {field.name: self._array(batch.column(n), field) for n, field in enumerate(schema)}

    def _array(self, column: pa.Array, field: Field) -> npt.NDArray[Any]:
        array = to_arrays(column, field)
        if array.flags.writeable or array.dtype == object or not array.flags.c_contiguous:
            return array
        place = array.ctypes.data - self._address
        if place >= 0 and place + array.nbytes <= len(self._data):
            return np.frombuffer(self._data, array.dtype, array.size, place).reshape(array.shape)
        return array.copy()  # it was compressed


def read(path: Path, file: Published, queue: Queue, split: str) -> BatchFile:
    """The file at a path, if it is the one that its name says, whole, and made for this queue.

    Raises FileNotFoundError, DataError (damaged, or not a file of batches) or StaleQueueError.
    """
    with path.open("rb", buffering=0) as handle:
        if os.fstat(handle.fileno()).st_size == 0:
            raise DataError("the file is empty", file=str(path))
        data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    if (found := xxhash.xxh3_64_hexdigest(data)) != file.checksum:
        raise DataError(
            f"the checksum of its {len(data)} bytes is {found}, its name says {file.checksum}: "
            "it was cut short or changed after it was published",
            file=str(path),
        )
    try:
        reader = pa.ipc.open_file(pa.py_buffer(data))
        mark = orjson.loads((reader.schema.metadata or {})[_KEY])
        fingerprint, marked_split, number = mark["fingerprint"], mark["split"], mark["number"]
        count = reader.num_record_batches
    except (pa.ArrowInvalid, OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"not a file of this queue's format ({error})", file=str(path)) from None
    if fingerprint != queue.fingerprint:
        raise StaleQueueError(
            f"{path} was made with other metadata (fingerprint {fingerprint}) than this queue's "
            f"({queue.fingerprint}); {how_to_purge(queue.path)}"
        )
    if (marked_split, number, count) != (split, file.number, file.batches) or file.start > count:
        raise DataError(
            f"it says it is file {number} of split {marked_split!r} with {count} batches, and its name says file "
            f"{file.number} of {split!r} with {file.batches}; it was renamed",
            file=str(path),
        )
    return BatchFile(data, reader)


def to_arrays(column: pa.Array, field: Field) -> npt.NDArray[Any]:
    """A column as one array with a row per sample, of variable shapes too if all rows of the batch agree."""
    if field.shape is None or None not in field.shape:
        return to_numpy(column, field)
    rows = list(to_numpy(column, field))
    if not rows:
        return np.empty((0, *(size or 0 for size in field.shape)), field.dtype)
    first = rows[0]
    if any(row.shape != first.shape for row in rows):
        return to_numpy(column, field)
    return np.stack(rows)
