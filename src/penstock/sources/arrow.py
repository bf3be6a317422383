"""Arrow IPC files and streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from penstock.files.checksums import ARROW_TAIL, Checksums, read_checksums
from penstock.files.compression import open_input
from penstock.files.listing import PathLike, split_suffix
from penstock.memory.views import MappedFile
from penstock.sources.file_source import FileSource, OpenedFile

__all__ = ["ArrowSource"]

_FILE_MAGIC = b"ARROW1\0\0"


class ArrowSource(FileSource):
    """Arrow IPC: file format (`.arrow`, `.feather`), memory-mapped so that batches are views of it, or stream format.

    Which of the two a file is stands in its first bytes, whatever its suffix. A compressed file is read from its
    beginning to its end, so resuming in it decompresses what comes before.

    Batches of `ArrowSink` are compared with their checksums before they are handed out; those of other writers are
    validated (offsets, text, dictionary indices), so that a damaged one is an error and no crash. `verify=False`
    leaves both out: for files that are known to be whole.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".arrow", ".feather", ".ipc", ".arrows")

    def __init__(self, paths: PathLike | Iterable[PathLike], *, verify: bool = True) -> None:
        super().__init__(paths)
        self._verify = verify

    def _file_schema(self, path: Path) -> pa.Schema:
        reader = _Reader(path, verify=self._verify)
        reader.close()
        return reader.schema

    def _file_rows(self, path: Path) -> int | None:
        reader = _Reader(path, verify=self._verify)
        try:
            return reader.rows()
        finally:
            reader.close()

    def _open(self, path: Path) -> OpenedFile:
        return _Reader(path, verify=self._verify)


class _Reader:
    """One open file of either kind."""

    def __init__(self, path: Path, *, verify: bool) -> None:
        self._verify, self._checksums = verify, None
        self._pending: pa.RecordBatch | None = None
        self._file: Any = None
        """What to close: a mapping, or a stream of decompressed bytes."""
        if split_suffix(path)[1]:
            self._ipc, self._random = self._open_compressed(path), False
        else:
            mapped = self._file = MappedFile(path)
            head = mapped.buffer(0, min(len(mapped), len(_FILE_MAGIC))).to_pybytes()
            self._random = head == _FILE_MAGIC
            data = pa.BufferReader(mapped.buffer())
            if verify and self._random:
                self._checksums = read_checksums(path, ARROW_TAIL)
            self._ipc = pa.ipc.open_file(data) if self._random else pa.ipc.open_stream(data)
        self.schema = self._ipc.schema
        self._batches = self._all_batches()

    def rows(self) -> int | None:
        """A stream does not say; a file lists its batches, whose headers do."""
        return int(self._ipc.count_rows()) if self._random else None

    def skip(self, rows: int) -> int:
        left = rows
        for batch in self._batches:
            if batch.num_rows > left:
                self._pending = batch.slice(left)
                return rows
            left -= batch.num_rows
        return rows - left

    def next(self, max_rows: int) -> pa.RecordBatch | None:
        if self._pending is None:
            self._pending = next(self._batches, None)
            if self._pending is None:
                return None
        batch, rest = self._pending.slice(0, max_rows), self._pending.slice(max_rows)
        self._pending = rest if rest.num_rows else None
        return batch

    def held_bytes(self) -> int:
        pending = self._pending
        return pending.nbytes if pending is not None and not self._random else 0  # a mapping is the system's to keep

    def close(self) -> None:
        # Batches that are still in use keep the mapping alive by reference; this only drops our own.
        self._ipc = self._pending = None
        self._batches = iter(())
        self._file.close()

    def _open_compressed(self, path: Path) -> Any:
        # The file format is the stream format with something before and behind it.
        head = memoryview(bytearray(len(_FILE_MAGIC)))
        begin = 0
        stream: Any = open_input(path)
        try:
            stream.readinto(head)
            if head.tobytes() == _FILE_MAGIC:
                begin = len(_FILE_MAGIC)
        finally:
            stream.close()
        self._file = open_input(path, begin)
        try:
            return pa.ipc.open_stream(self._file)
        except BaseException:
            self._file.close()
            raise

    def _all_batches(self) -> Iterator[pa.RecordBatch]:
        checksums = self._checksums
        if not self._random:
            for batch in self._ipc:
                yield self._validated(batch)
            return
        if checksums is not None and any(pa.types.is_dictionary(field.type) for field in _leaves(self.schema)):
            # With the first batch Arrow reads all dictionaries, wherever in the file they are.
            for number in range(len(checksums.ends)):
                self._check_segment(checksums, number)
            checksums = None
        for number in range(self._ipc.num_record_batches):
            if checksums is not None:
                self._check_segment(checksums, number)
            batch = self._ipc.get_batch(number)
            yield batch if self._checksums is not None else self._validated(batch)

    def _check_segment(self, checksums: Checksums, number: int) -> None:
        """Segment n is batch n, with what stands between it and the batch before."""
        low, high = checksums.segment(number)
        checksums.check_data(number, self._file.buffer(low, high - low))

    def _validated(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._verify:
            batch.validate(full=True)
        return batch


def _leaves(fields: Iterable[pa.Field]) -> Iterator[pa.Field]:
    """Fields, and those inside them."""
    for field in fields:
        yield field
        kind = field.type.storage_type if isinstance(field.type, pa.BaseExtensionType) else field.type
        yield from _leaves(kind.field(number) for number in range(kind.num_fields))
