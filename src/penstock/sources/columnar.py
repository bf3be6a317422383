"""Parquet files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import ConfigError, DataError, PenstockError
from penstock.files.checksums import ARROW_TAIL, PARQUET_TAIL, Checksums, read_checksums
from penstock.files.compression import open_input
from penstock.files.listing import PathLike, split_suffix
from penstock.files.ranges.read_ahead import WINDOW_BYTES, RangeFile, parquet_metadata, window_for
from penstock.files.ranges.remote_file import InputFile, RemoteFile
from penstock.files.ranges.row_groups import (
    MOST_WHOLE_BYTES,
    MOST_WHOLE_ROWS,
    GroupsAhead,
    ParquetReader,
    RowGroups,
    RowWidth,
)
from penstock.memory import MemoryBudget
from penstock.memory.views import MappedFile
from penstock.pipeline.cores import available_cores
from penstock.pipeline.prefetch import ReadAhead
from penstock.pipeline.stages import Block, Decoded, Origin, Rejected
from penstock.sources.file_source import _DAMAGED, FileSource, OpenedFile, check_columns, project

_PIECE_BYTES, _WHOLE_BYTES = 1 << 21, 1 << 24
_MOST_PARTS = 64
"""A row group that is larger than so many batches is read in pieces, however small it is."""
_MOST_GROUPS_AHEAD, _MOST_PIECES_AHEAD = 7, 1 << 10
_LEAST_BUDGET = 256 << 20
"""Least memory budget with row groups decoded ahead: a decoder and its piece in work take some megabytes."""
_LOST = "the rest of a row group is unreadable"


class ParquetSource(FileSource):
    """Parquet, row group by row group, only the requested `columns`.

    One worker of the pipeline decodes a row group that is small against the memory budget: a 64th of it, 64 MiB and
    65,536 rows at most, or 16,384 rows of a remote file. It is transformed in pieces. Others are read in pieces of
    about two megabytes, one after the other, so a row group may be larger than memory. With a budget of 256 MiB or more
    the next ones of a local file are decoded meanwhile, in threads of their own, and an eighth of the budget may wait.
    Resuming begins at the row group that holds the row and passes over the rows before it. Damage costs the rest of the
    row group it is in; the next one can be read without it.

    `verify="own"` compares what is read with the checksums that `ParquetSink` writes; files of other writers have none,
    and are read as they are. `"pages"` has Arrow compare the page checksums of those too. `"none"` compares nothing.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")
    _has_footers: ClassVar[bool] = True

    def __init__(
        self,
        paths: PathLike | Iterable[PathLike],
        *,
        columns: Sequence[str] | None = None,
        verify: Literal["own", "pages", "none"] = "own",
        allow_empty: bool = False,
    ) -> None:
        if verify not in ("own", "pages", "none"):
            raise ConfigError(f"verify must be 'own', 'pages' or 'none', got {verify!r}")
        self._columns, self._verify = check_columns(columns), verify
        self._piece_bytes, self._whole_bytes = _PIECE_BYTES, _WHOLE_BYTES
        self._whole_rows = 0
        self._width = RowWidth()
        self._ahead: GroupsAhead | None = None
        self._following: tuple[InputFile, ParquetReader] | None = None
        """The next file, if the rows of this one are used up soon."""
        super().__init__(paths, allow_empty=allow_empty, columns=self._columns)

    def _file_schema(self, path: InputFile) -> pa.Schema:
        self._checksums(path)
        schema = parquet_metadata(path).schema.to_arrow_schema()
        return project(schema, self._list.partitions.stored(self._columns, schema.names), str(path))

    def _checksums(self, path: InputFile) -> Checksums | None:
        """Checksums of the file, if it has any; its footer is then reliable."""
        return read_checksums(path, PARQUET_TAIL) if self._verify != "none" else None

    def _file_rows(self, path: InputFile) -> int | None:
        return int(parquet_metadata(path).num_rows)

    def fit_budget(self, nbytes: int) -> None:
        """Smaller pieces, and fewer row groups as a whole, if there is less memory."""
        self._piece_bytes = max(1 << 14, min(_PIECE_BYTES, nbytes // 64))
        self._whole_bytes = min(MOST_WHOLE_BYTES, nbytes // 64)
        self._whole_rows = MOST_WHOLE_ROWS
        self.read_ahead_bytes = window_for(nbytes)
        count = min(available_cores() - 1, _MOST_GROUPS_AHEAD)
        if count and nbytes >= _LEAST_BUDGET:
            self._ahead = GroupsAhead(count, partial(_PiecesAhead, nbytes=min(nbytes // 32, nbytes // 8 // count)))

    def with_columns(self, columns: Sequence[str], *, allow_empty: bool = False) -> ParquetSource:
        """The same files, with these columns alone."""
        return ParquetSource(self.files, columns=columns, allow_empty=allow_empty)

    def _stored_columns(self, schema: pa.Schema) -> list[str] | None:
        """Names of the columns to read in a file of this schema; None: all."""
        return self._columns

    def _open(self, path: InputFile) -> ParquetReader:
        pages = self._verify == "pages"
        return ParquetReader(
            path,
            self._stored_columns,
            self._piece_bytes,
            self._checksums(path),
            pages=pages,
            window=self.read_ahead_bytes // 2,
            width=self._width,
        )

    def _here(self, path: InputFile) -> OpenedFile:
        if self._opened is None and self._following is not None:
            known, opened = self._following
            self._following = None
            if known == path and not self._row:
                self._opened = opened
            else:
                opened.close()
        reader = super()._here(path)
        assert isinstance(reader, ParquetReader)
        reader.reads_on, reader.looks_ahead = True, self._ahead
        reader.whole_rows = max(reader.whole_rows, self._whole_rows)
        if reader.is_at_last_group and self._following is None:
            self._open_following(reader)
        return reader

    def _open_following(self, reader: ParquetReader) -> None:
        """Request or decode the first rows of the next file, while the last ones of this are used."""
        number = self._file + 1
        following = self.files[number] if number < len(self.files) else None
        if following is not None and (not isinstance(following, RemoteFile) or following.size):
            try:
                self._list.stamps.note(following)
                opened = self._open(following)
            except (*_DAMAGED, PenstockError):
                return  # reported when it is read
            try:
                opened.begin_like(reader)
            except (*_DAMAGED, PenstockError):
                opened.close()
                return
            self._following = (following, opened)

    def memory_usage(self) -> int:
        following = self._following
        return super().memory_usage() + (following[1].held_bytes() if following is not None else 0)

    def close(self) -> None:
        super().close()
        if self._following is not None:
            self._following[1].close()
            self._following = None

    def _advance(self) -> None:
        following, self._following = self._following, None
        super()._advance()
        self._following = following

    # -- in blocks, decoded elsewhere --------------------------------------------------------------------------------

    def next_block(self, max_bytes: int) -> Block | None:
        """Some row groups that are still to be decoded, or some rows of a large one."""
        _ = self.schema  # known before the first rows are delivered, since decode runs on other threads
        while self._file < len(self.files):
            path = self.files[self._file]
            if self._passes_over(path):
                continue
            origin = Origin(str(path), self._row)
            try:
                reader = self._here(path)
                self._list.stamps.check(path)
                assert isinstance(reader, ParquetReader)
                groups = reader.take_groups(max_bytes, min(self._whole_bytes, _MOST_PARTS * max_bytes))
                batch = reader.next(reader.rows_in(max_bytes)) if groups is None else None
                if batch is not None:
                    self._list.stamps.check(path)  # a thread that decodes ahead opens the file by its name
            except _DAMAGED as error:
                self.close()
                raise self._damaged(error, path, self._row) from error
            if groups is not None:
                self._row += groups.rows
                return Block(origin, groups, groups.nbytes, {"records": groups.rows})
            if batch is None:
                self._finish(path)
                continue
            self._row += batch.num_rows
            rows, kept = self.rows_of(batch, path, origin.row)
            return Block(origin, rows, batch.nbytes, {"records": batch.num_rows, "kept": _numbers(kept)})
        return None

    def decode(self, block: Block) -> Decoded:
        pieces = self.decode_pieces(block)
        if len(pieces) == 1:
            return pieces[0]
        rows = tuple(chain.from_iterable(piece.rows or () for piece in pieces))
        kept = None if len(rows) == block.data.rows else rows
        return Decoded(pa.concat_batches([piece.batch for piece in pieces]), rows=kept)

    def decode_pieces(self, block: Block) -> list[Decoded]:
        """Rows of a block in pieces of about two megabytes, or of as much as was asked for."""
        groups = block.data
        if isinstance(groups, pa.RecordBatch):
            return [Decoded(groups, rows=block.meta.get("kept"))]
        try:
            pieces = groups.pieces()
        except _DAMAGED:
            self._list.stamps.check(groups.path)
            return [self._rescue(block, groups)]
        self._list.stamps.check(groups.path)
        found: list[Decoded] = []
        first = 0
        for piece in pieces:
            rows, kept = self.rows_of(piece, groups.path, block.origin.row + first)
            numbers = range(first, first + piece.num_rows) if kept is None else _numbers(kept + first)
            found.append(Decoded(rows, rows=numbers if len(pieces) > 1 or kept is not None else None))
            first += piece.num_rows
        return found

    def offset_of(self, block: Block, row: int) -> int | None:
        """A row of Parquet is in many places of its file."""
        return None

    def skip_file(self) -> str:
        """After an error: skip to the next row group, or to the next file if there is none; returns a description."""
        try:
            metadata = parquet_metadata(self.files[self._file])
        except _DAMAGED:
            return super().skip_file()
        self.close()
        end = 0
        for group in range(metadata.num_row_groups):
            end += metadata.row_group(group).num_rows
            if end > self._row:
                self._row = end
                return _LOST
        return super().skip_file()

    def _rescue(self, block: Block, groups: RowGroups) -> Decoded:
        """Of each row group the rows before the damage."""
        good: list[pa.RecordBatch] = []
        rejected: list[Rejected] = []
        numbers: list[int] = []
        first = block.origin.row
        for group in groups.each():
            row = first
            reader = self._open(groups.path)
            try:
                reader.skip(row)
                while row < first + group.rows and (batch := reader.next(first + group.rows - row)) is not None:
                    rows, kept = self.rows_of(batch, groups.path, row)
                    good.append(rows)
                    before = row - block.origin.row
                    numbers += range(before, before + batch.num_rows) if kept is None else (kept + before).tolist()
                    row += batch.num_rows
            except _DAMAGED as error:
                failure = self._damaged(error, groups.path, row)
                if not isinstance(failure, DataError):
                    raise failure from error
                rejected.append(Rejected(failure.file, failure.row, None, repr(self), _LOST, failure.reason))
            finally:
                reader.close()
            first += group.rows
        none = pa.RecordBatch.from_pylist([], schema=self.schema)
        return Decoded(pa.concat_batches(good) if good else none, tuple(rejected), tuple(numbers))


class _PiecesAhead(ReadAhead[pa.RecordBatch]):
    """Pieces of a row group that a thread decodes, up to some bytes ahead of the reader, and one at least."""

    def __init__(self, pieces: Iterator[pa.RecordBatch], *, nbytes: int) -> None:
        self._room = MemoryBudget(nbytes)
        super().__init__(
            pieces, _MOST_PIECES_AHEAD, budget=self._room, size=lambda piece: int(piece.nbytes), always_one=True
        )

    @property
    def held_bytes(self) -> int:
        """Bytes of the pieces that wait."""
        return self._room.used


def _numbers(kept: npt.NDArray[np.int64] | None) -> tuple[int, ...] | None:
    return None if kept is None else tuple(kept.tolist())


_FILE_MAGIC = b"ARROW1\0\0"
_COPIED_BYTES = 1 << 25
"""Record batches up to this size are read into memory."""


class ArrowSource(FileSource):
    """Arrow IPC: file format (`.arrow`, `.feather`) or stream format.

    The first bytes of a file decide which of the two it is, not its suffix. A compressed file is read from its
    beginning to its end, so resuming in it decompresses what comes before.

    Batches of `ArrowSink` are compared with their checksums before they are delivered; those of other writers are
    validated (offsets, text, dictionary indices), so that a damaged one is an error and no crash. They are read into
    memory, so nothing that happens to the file afterwards changes them. `verify=False` leaves all this out, for files
    that are known to be whole and stay so: batches are views of the mapped file. Files whose first batch is larger than
    32 MiB, or a 16th of the memory budget, are mapped too: a batch may be larger than memory.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".arrow", ".feather", ".ipc", ".arrows")

    def __init__(
        self,
        paths: PathLike | Iterable[PathLike],
        *,
        columns: Sequence[str] | None = None,
        verify: bool = True,
        allow_empty: bool = False,
    ) -> None:
        self._columns = check_columns(columns)
        super().__init__(paths, allow_empty=allow_empty, columns=self._columns)
        self._verify = verify
        self._copied_bytes = _COPIED_BYTES

    def fit_budget(self, nbytes: int) -> None:
        """Map batches that are large against the memory there is."""
        self._copied_bytes = min(_COPIED_BYTES, nbytes // 16)
        self.read_ahead_bytes = window_for(nbytes)

    def _file_schema(self, path: InputFile) -> pa.Schema:
        reader = _ArrowReader(path, verify=self._verify)
        reader.close()
        return project(reader.schema, self._list.partitions.stored(self._columns, reader.schema.names), str(path))

    def _file_rows(self, path: InputFile) -> int | None:
        reader = _ArrowReader(path, verify=self._verify)
        try:
            return reader.rows()
        finally:
            reader.close()

    def _open(self, path: InputFile) -> OpenedFile:
        return _ArrowReader(path, verify=self._verify, copied_bytes=self._copied_bytes, window=self.read_ahead_bytes)


class _ArrowReader:
    """One open file of either kind."""

    def __init__(self, path: InputFile, *, verify: bool, copied_bytes: int = 0, window: int = WINDOW_BYTES) -> None:
        self._path, self._verify, self._copied_bytes = path, verify, copied_bytes
        self._checksums: Checksums | None = None
        self._pending: pa.RecordBatch | None = None
        self._file: Any = None
        """Resource to close: a mapping, or a stream of decompressed bytes."""
        if split_suffix(path)[1]:
            self._ipc, self._random = self._open_compressed(path), False
        elif isinstance(path, RemoteFile):
            self._ipc = self._open_remote(path, window)
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
        """None for a stream. A file lists its batches, whose headers have the numbers."""
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
        mapped = isinstance(self._file, MappedFile)  # which is the system's to keep
        ahead = self._file.held_bytes if isinstance(self._file, RangeFile) else 0
        return ahead + (pending.nbytes if pending is not None and not mapped else 0)

    def close(self) -> None:
        # Batches that are still in use keep the mapping alive by reference; this only drops our own.
        self._ipc = self._pending = None
        self._batches = iter(())
        self._file.close()

    def _open_remote(self, path: RemoteFile, window: int) -> Any:
        ranges = self._file = RangeFile(path, window)
        self._random = bytes(ranges.read_at(0, len(_FILE_MAGIC))) == _FILE_MAGIC
        if self._verify and self._random:
            self._checksums = read_checksums(path, ARROW_TAIL)
        file = pa.PythonFile(ranges, mode="r")
        return pa.ipc.open_file(file) if self._random else pa.ipc.open_stream(file)

    def _open_compressed(self, path: InputFile) -> Any:
        # The file format is the stream format with a header and a footer.
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

    def _copy_batches(self) -> None:
        """Read batches into memory from here on, if they are small: a mapped file that is truncated while somebody uses
        a batch of it ends the process."""
        mapped = self._file
        try:
            first = self._ipc.get_batch(0) if self._random else next(iter(pa.ipc.open_stream(mapped.buffer())))
            if first.get_total_buffer_size() > self._copied_bytes:
                return
        except (pa.ArrowException, OSError, ValueError, StopIteration):
            pass  # there is none, or it is damaged, which is reported in its place
        self._file = pa.OSFile(str(self._path))
        self._ipc = pa.ipc.open_file(self._file) if self._random else pa.ipc.open_stream(self._file)
        mapped.close()

    def _all_batches(self) -> Iterator[pa.RecordBatch]:
        if self._verify and isinstance(self._file, MappedFile):
            self._copy_batches()
        if isinstance(self._file, RangeFile):
            self._file.stream()
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
        if isinstance(self._file, MappedFile):
            checksums.check_data(number, self._file.buffer(low, high - low))
        elif isinstance(self._file, RangeFile):
            checksums.check_data(number, self._file.read_at(low, high))
        else:
            with open(self._path, "rb", buffering=0) as file:
                checksums.check(file, low, high)

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
