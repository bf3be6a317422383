"""One file of batches: Arrow IPC, memory-mapped, checksummed, and marked with what it was made for.

Any Arrow reader opens such a file. One record batch is one training batch, one row of it one sample. The checksum
(xxh3 of all bytes) is in the file's name, so a file is whole or is found not to be, whatever wrote it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
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

__all__ = ["COMPRESSIONS", "BatchFile", "Encoded", "encode", "read", "write"]

COMPRESSIONS = (None, "zstd", "lz4")

_KEY = b"penstock.queue"


@dataclass(frozen=True, slots=True)
class Encoded:
    """The bytes of a file, and the name it is published under."""

    data: pa.Buffer
    file: Published


def encode(
    batches: Iterable[pa.RecordBatch],
    number: int,
    *,
    fingerprint: str,
    split: str,
    compression: str | None = None,
) -> Encoded:
    """Batches as the bytes of file `number`: the same bytes, and so the same name, whoever makes them.

    Each is copied before the next one is asked for, so that they may share their memory.
    """
    if compression not in COMPRESSIONS:
        raise ConfigError(f"compression is one of {COMPRESSIONS}, got {compression!r}")
    mark = {"fingerprint": fingerprint, "split": split, "number": number}
    coming = iter(batches)
    first = next(coming)
    schema = first.schema.with_metadata({_KEY: orjson.dumps(mark)})
    stream = pa.BufferOutputStream()
    with pa.ipc.new_file(stream, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for batch in chain([first], coming):
            writer.write_batch(batch)
    data, count = stream.getvalue(), writer.stats.num_record_batches
    return Encoded(data, Published(number, count, xxhash.xxh3_64_hexdigest(data)))


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
