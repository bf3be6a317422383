"""One file of batches: Arrow IPC, memory-mapped, checksummed, and marked with what it was made for.

Any Arrow reader opens such a file. One record batch is one training batch, one row of it one sample. The checksum
(xxh3 of all bytes) is in the file's name, so a file is whole or is found not to be, whatever wrote it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import xxhash

from penstock.errors import ConfigError, DataError, StaleQueueError
from penstock.files.atomic import naming, sync_directory
from penstock.fsqueue.columns import Arrays, Columns
from penstock.fsqueue.layout import Published
from penstock.fsqueue.queue import Queue, how_to_purge

__all__ = ["COMPRESSIONS", "BatchFile", "Encoded", "Encoder", "read", "write"]

COMPRESSIONS = (None, "zstd", "lz4")

_KEY = b"penstock.queue"
_PER_BATCH = 1024


@dataclass(frozen=True, slots=True)
class Encoded:
    """The bytes of a file, and the name it is published under."""

    data: pa.Buffer
    file: Published


class Encoder:
    """Makes the bytes of one file after the other, in memory that is used again."""

    def __init__(self, *, fingerprint: str, split: str, compression: str | None = None) -> None:
        if compression not in COMPRESSIONS:
            raise ConfigError(f"compression is one of {COMPRESSIONS}, got {compression!r}")
        self.fingerprint, self.split = fingerprint, split
        self.options = pa.ipc.IpcWriteOptions(compression=compression)
        self._room: pa.Buffer | None = None

    def encode(self, batches: Iterable[pa.RecordBatch], number: int, *, same_size: int | None = None) -> Encoded:
        """Batches as the bytes of file `number`: the same bytes, and so the same name, whoever makes them.

        Each is copied before the next one is asked for, so that they may share their memory. `same_size` says that
        there are so many, none larger than the first; then the bytes are valid until the next call.
        """
        coming = iter(batches)
        first = next(coming)
        mark = {"fingerprint": self.fingerprint, "split": self.split, "number": number}
        schema = first.schema.with_metadata({_KEY: orjson.dumps(mark)})
        stream = pa.BufferOutputStream() if same_size is None else self._again(first, schema, same_size)
        with pa.ipc.new_file(stream, schema, options=self.options) as writer:
            writer.write_batch(first)
            count = 1
            for batch in coming:
                writer.write_batch(batch)
                count += 1
        data = stream.getvalue() if self._room is None or same_size is None else self._room.slice(0, stream.tell())
        return Encoded(data, Published(number, count, xxhash.xxh3_64_hexdigest(data)))

    def _again(self, first: pa.RecordBatch, schema: pa.Schema, count: int) -> pa.FixedSizeBufferWriter:
        # The footer holds the schema once more, and the place of each batch.
        need = count * (pa.ipc.get_record_batch_size(first) + _PER_BATCH) + 2 * schema.serialize().size + _PER_BATCH
        if self._room is None or self._room.size < need:
            self._room = pa.allocate_buffer(need)
        return pa.FixedSizeBufferWriter(self._room)


def write(path: Path, data: pa.Buffer, *, durable: bool, shown: Path) -> None:
    """Put bytes into a new file; a failure (a full disk) leaves none and names `shown`."""
    path.unlink(missing_ok=True)  # whatever is there, a link or what a failed call left, is not written to
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
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
        self._memory = np.frombuffer(data, np.uint8)
        self._reader = reader

    def record_batch(self, index: int) -> pa.RecordBatch:
        return self._reader.get_batch(index)

    def arrays(self, index: int, columns: Columns) -> Arrays:
        """Batch `index` as NumPy arrays that may be written to: the file's own memory, copied when first changed."""
        return columns.to_arrays(self.record_batch(index), self._memory)


def read(path: Path, file: Published, queue: Queue, split: str) -> BatchFile:
    """The file at a path, if it is the one that its name says, whole, and made for this queue.

    Raises FileNotFoundError, DataError (damaged, or not a file of batches) or StaleQueueError.
    """
    try:
        with path.open("rb", buffering=0) as handle:
            if os.fstat(handle.fileno()).st_size == 0:
                raise DataError("the file is empty", file=str(path))
            data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"it cannot be opened ({error.strerror or error})", file=str(path)) from error
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
