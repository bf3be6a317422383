"""Bytes that two processes see at once: an unnamed file in memory, mapped by both, gone with the last of them."""

from __future__ import annotations

import mmap
import os
import tempfile

import pyarrow as pa

__all__ = ["SharedBytes", "batch_bytes"]

_PAGE = 1 << 16
_KEEP = 8 << 20
"""What is held on to after something larger went through."""


class SharedBytes:
    """A stretch of memory as long as its longest content needs, known to the other process by a file descriptor.

    Only one side writes, and tells the other how many bytes. POSIX only.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = descriptor if descriptor is not None else _unnamed_file()
        self._map: mmap.mmap | None = None

    def room(self, nbytes: int) -> pa.Buffer:
        """That many bytes to write to."""
        size = -(-max(nbytes, 1) // _PAGE) * _PAGE
        now = os.fstat(self.descriptor).st_size
        if size > now or (now > _KEEP and now > 4 * size):
            os.ftruncate(self.descriptor, size)
            self._map = None
        return self.content(nbytes)

    def content(self, nbytes: int) -> pa.Buffer:
        """That many bytes which the other side has written; good until it writes again."""
        size = os.fstat(self.descriptor).st_size
        if self._map is None or len(self._map) != size:
            self._map = mmap.mmap(self.descriptor, size)  # an older map lives as long as buffers that look into it
        return pa.py_buffer(memoryview(self._map)[:nbytes])  # unlike a slice of a buffer, it can be written to

    def write_batch(self, batch: pa.RecordBatch) -> int:
        """A batch as an Arrow IPC stream; how long it is. Nothing is copied but into place."""
        size = batch_bytes(batch)
        sink = pa.FixedSizeBufferWriter(self.room(size))
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return size

    def close(self) -> None:
        """Let go; a second call does nothing."""
        self._map = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def batch_bytes(batch: pa.RecordBatch) -> int:
    """How long a batch is as an Arrow IPC stream, found by writing it to nowhere: costs its columns, not its rows."""
    sink = pa.MockOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return int(sink.size())


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("penstock", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
