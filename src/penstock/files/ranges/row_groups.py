"""Row groups of Parquet files: one open file, and groups that are decoded elsewhere."""

from __future__ import annotations

import contextlib
import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.files.checksums import Checksums
from penstock.files.parquet_footer import PAGE_HEADER_BYTES, dictionary_entry_bytes
from penstock.files.ranges.read_ahead import WINDOW_BYTES, RangeFile, parquet_metadata, submit
from penstock.files.ranges.remote_file import InputFile, RemoteFile

_READ_AHEAD_BYTES = 1 << 18
MOST_WHOLE_BYTES = 1 << 26
MOST_WHOLE_ROWS = 1 << 16
_PROBE_ROWS, _MOST_ROWS = 64, 1 << 14
_ODD = 4
"""Times as many bytes as a column has in the file, from which its rows are looked at."""
_SMALL_BYTES = 1 << 21
"""Bytes of a row group that fit any budget."""
_PART_ROWS, _MOST_PARTS = 1 << 10, 1 << 8
"""Rows that are looked at together, and most parts of a row group in which they are."""


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Row groups of a file that follow one another, from some row of the first on."""

    path: InputFile
    metadata: Any
    numbers: tuple[int, ...]
    skip: int
    rows: int
    nbytes: int
    """Estimate of their size in memory."""
    checksums: Checksums | None
    pages: bool
    """True to compare the page checksums."""
    columns: list[str] | None
    piece_rows: int
    """Rows of a piece that is decoded at a time."""
    ranges: RangeFile | None = None
    """Of a remote file: the bytes, which were requested."""

    def pieces(self) -> list[pa.RecordBatch]:
        """All rows, piece by piece: decoders use the same memory for each."""
        columns = self.columns
        try:
            with contextlib.ExitStack() as stack:
                if self.checksums is not None:
                    opened = self.ranges or stack.enter_context(open(self.path, "rb", buffering=0))
                    _check_groups(opened, self.metadata, self.numbers, columns, self.checksums)
                source = self.path if self.ranges is None else pa.PythonFile(self.ranges, mode="r")
                options: Any = {"pre_buffer": False, "page_checksum_verification": self.pages}
                if self.ranges is None:  # otherwise a column is read as a whole, into memory that is new each time
                    options["buffer_size"] = _READ_AHEAD_BYTES
                file = stack.enter_context(pq.ParquetFile(source, metadata=self.metadata, **options))
                options = {"row_groups": self.numbers, "columns": columns, "use_threads": False}
                pieces = list(file.iter_batches(self.piece_rows, **options))
        finally:
            if self.ranges is not None:
                self.ranges.close()
        rows, left = sum(piece.num_rows for piece in pieces), self.skip
        if rows != self.skip + self.rows:
            raise pa.ArrowInvalid(f"row groups {self.numbers} hold {rows} rows, and the footer has another number")
        while left and pieces[0].num_rows <= left:
            left -= pieces.pop(0).num_rows
        return [pieces[0].slice(left), *pieces[1:]] if left else pieces

    def each(self) -> Iterator[RowGroups]:
        """One at a time."""
        skip = self.skip
        for number in self.numbers:
            rows = self.metadata.row_group(number).num_rows
            yield replace(self, numbers=(number,), skip=skip, rows=rows - skip, ranges=None)
            skip = 0


class RowWidth:
    """Bytes of a decoded row, from a few rows that were decoded to see it. Files like those before are not probed."""

    def __init__(self) -> None:
        self._seen: tuple[_Form, float] | None = None
        """Form of a row group, and bytes of a row of it as decoded."""

    def of(self, group: Any, columns: list[str] | None) -> float:
        """Width of the rows of a row group: as of the one seen, if their columns are encoded alike; 0 if not."""
        seen = self._seen
        if seen is None:
            return 0.0
        form = _form(group, columns)
        return seen[1] * max(1.0, form[1] / max(1.0, seen[0][1])) if _alike(seen[0], form) else 0.0

    def note(self, group: Any, columns: list[str] | None, row_bytes: float) -> None:
        self._seen = _form(group, columns), row_bytes


_Form = tuple[list[tuple[str, bool]], float]
"""Columns of a row group and whether they have dictionaries, and the mean bytes of its encoded rows."""


def _form(group: Any, columns: list[str] | None) -> _Form:
    chunks = list(_chunks(group, columns))
    encoded = sum(chunk.total_uncompressed_size for chunk in chunks)
    return [(chunk.path_in_schema, chunk.has_dictionary_page) for chunk in chunks], encoded / max(1, group.num_rows)


def _alike(known: _Form, other: _Form) -> bool:
    """True if rows of one row group are probably as wide as those of the other."""
    return known[0] == other[0] and known[1] / 2 <= other[1] <= 2 * known[1]


class Ahead(Protocol):
    """Pieces of a row group that a thread of its own decodes, a few ahead."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the pieces that wait."""
        ...

    def __iter__(self) -> Iterator[pa.RecordBatch]: ...

    def __next__(self) -> pa.RecordBatch: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GroupsAhead:
    """Row groups to decode while another one is read."""

    count: int
    start: Callable[[Iterator[pa.RecordBatch]], Ahead]
    """Begins to decode pieces in a thread."""


class ParquetReader:
    """One open file. How many rows make up a piece is fixed when a row group is begun, so they are cut afterwards.

    Of a local file that is read in pieces, the next row groups are decoded meanwhile if `looks_ahead` says how: a
    column of a row group can be decoded by one thread only.
    """

    def __init__(
        self,
        path: InputFile,
        choose: Callable[[pa.Schema], list[str] | None],
        piece_bytes: int,
        checksums: Checksums | None,
        *,
        pages: bool,
        window: int = WINDOW_BYTES,
        width: RowWidth | None = None,
    ) -> None:
        self._width = RowWidth() if width is None else width
        self._checksums, self._pages = checksums, pages and checksums is None
        self._window = window
        self._ranges = RangeFile(path, window) if isinstance(path, RemoteFile) else None
        self._file = pq.ParquetFile(
            path if self._ranges is None else pa.PythonFile(self._ranges, mode="r"),
            metadata=None if self._ranges is None else parquet_metadata(path),
            buffer_size=_READ_AHEAD_BYTES,
            pre_buffer=False,
            page_checksum_verification=self._pages,
        )
        self._planned = -1
        """Row group whose ranges were requested."""
        self.reads_on = False
        """True to request the next row groups too."""
        self.reads_groups = False
        """True if row groups were taken as a whole."""
        self.looks_ahead: GroupsAhead | None = None
        """Set to decode the next row groups too, if the file is local."""
        self.whole_rows = _MOST_ROWS
        """Most rows of a row group that is taken as a whole, if the file is local."""
        self._path, self._columns, self._piece_bytes = path, choose(self._file.schema_arrow), piece_bytes
        self._group = 0
        self._skip = 0
        self._left = 0
        """Rows of the previous row group that were not delivered yet."""
        self._row_bytes = 0.0
        self._is_nested = any(pa.types.is_nested(field.type) for field in self._file.schema_arrow)
        self._repeated = -1, 0.0
        """Row group whose dictionaries were looked at last, and the bytes of a row by them."""
        self._pieces: Iterator[pa.RecordBatch] = iter(())
        self._pending: pa.RecordBatch | None = None
        self._ahead: deque[tuple[int, Ahead]] = deque()
        """Row groups that are decoded ahead, the one that is read too."""
        self._whole_bytes: int | None = None
        """Largest row group that is taken as a whole; None: none is."""

    def skip(self, rows: int) -> int:
        metadata = self._file.metadata
        self._skip = min(rows, metadata.num_rows)
        passed = self._skip
        while self._group < metadata.num_row_groups and self._skip >= metadata.row_group(self._group).num_rows:
            self._skip -= metadata.row_group(self._group).num_rows
            self._group += 1
        return passed

    def next(self, max_rows: int) -> pa.RecordBatch | None:
        while self._pending is None:
            piece = next(self._pieces, None)
            if piece is None:
                if self._left:
                    raise pa.ArrowInvalid(
                        f"row group {self._group - 1} lacks {self._left} of the rows that the footer counts"
                    )
                if self._group == self._file.metadata.num_row_groups:
                    return None
                self._pieces = self._begin(self._group)
                self._left = self._file.metadata.row_group(self._group).num_rows - self._skip
                self._group += 1
                continue
            self._row_bytes = max(0.5 * self._row_bytes, piece.nbytes / max(1, piece.num_rows))
            if self._row_bytes:  # or the next row groups would be probed, and may be damaged
                self._decode_ahead(self._group)
            drop = min(self._skip, piece.num_rows)
            self._skip -= drop
            if piece.num_rows > drop:
                self._pending = piece.slice(drop)
        batch, rest = self._pending.slice(0, max_rows), self._pending.slice(max_rows)
        self._pending = rest if rest.num_rows else None
        self._left -= batch.num_rows
        return batch

    @property
    def _most_rows(self) -> int:
        return self.whole_rows if self._ranges is None else _MOST_ROWS

    def rows_in(self, nbytes: int) -> int:
        """About how many rows that many bytes are."""
        return max(1, int(nbytes / max(1.0, self._row_bytes)))

    def take_groups(self, max_bytes: int, whole_bytes: int) -> RowGroups | None:
        """The next row groups, if they need not be read one after the other: about `max_bytes`, and one at least."""
        self._whole_bytes = whole_bytes
        if self._left or (self._ahead and self._ahead[-1][0] >= self._group):
            return None
        metadata, first, skip = self._file.metadata, self._group, self._skip
        rows = nbytes = 0
        while self._group < metadata.num_row_groups:
            more_rows = metadata.row_group(self._group).num_rows
            if rows + more_rows > (_MOST_ROWS if rows > skip else self._most_rows):
                break
            more_bytes = self._size_of(self._group)
            if more_bytes > whole_bytes or (rows > skip and nbytes + more_bytes > max_bytes):
                break
            rows, nbytes = rows + more_rows, nbytes + more_bytes
            self._group += 1
        if rows <= skip:
            self._group = first  # there may be empty ones, and reading in pieces passes over them
            return None
        self._skip, self.reads_groups = 0, True
        numbers = tuple(range(first, self._group))
        groups = RowGroups(
            self._path,
            metadata,
            numbers,
            skip,
            rows - skip,
            nbytes,
            checksums=self._checksums,
            pages=self._pages,
            columns=self._columns,
            piece_rows=max(1, min(_MOST_ROWS, int(max(max_bytes, self._piece_bytes) * rows / max(1, nbytes)))),
        )
        return groups if self._ranges is None else self._requested(groups)

    def _requested(self, groups: RowGroups) -> RowGroups:
        """The same row groups, whose bytes are on their way when they are decoded."""
        assert isinstance(self._path, RemoteFile)
        assert self._ranges is not None
        first, *others = [self._spans(number) for number in groups.numbers]
        rest = [part for spans in others for part in spans]
        ranges = RangeFile(self._path, sum(stop - start for start, stop in [*first, *rest]) + MOST_WHOLE_BYTES)
        if self._ranges.held_bytes and first:  # by the probe: its row group is not requested twice
            ranges.take_over(self._ranges, min(start for start, _ in first), max(stop for _, stop in first))
            self._planned = -1
            ranges.plan(first, [rest])
        else:
            ranges.plan([*first, *rest])
        return replace(groups, ranges=ranges, nbytes=groups.nbytes + ranges.held_bytes)

    def _spans(self, group: int) -> list[tuple[int, int]]:
        """Bytes of a row group that are read, and compared with their checksums."""
        found = [_span(chunk) for chunk in _chunks(self._file.metadata.row_group(group), self._columns)]
        return found if self._checksums is None else [self._checksums.around(*span) for span in found]

    def _plan(self, group: int) -> None:
        """Request what is read of a row group, and of the next ones."""
        if self._ranges is not None and self._planned != group:
            self._planned = group
            more = range(group + 1, self._file.metadata.num_row_groups) if self.reads_on else ()
            self._ranges.plan(self._spans(group), map(self._spans, more))

    @property
    def is_at_last_group(self) -> bool:
        """True if the next file should be begun: rows are requested or decoded ahead, and this file has no more."""
        looks = self._ranges is not None or bool(self._ahead) or (self.looks_ahead is not None and self._left > 0)
        return looks and self._group >= self._file.metadata.num_row_groups - 1

    def begin_like(self, before: ParquetReader) -> None:
        """Request the first row group, or begin to decode it.

        Rows of a remote file are as wide as those of the file before, until some are seen.
        """
        self.reads_on, self._whole_bytes, self.looks_ahead = True, before._whole_bytes, before.looks_ahead
        self.whole_rows = before.whole_rows
        if self._ranges is not None:
            self._row_bytes = before._row_bytes
        if self._file.metadata.num_row_groups and not before.reads_groups:
            self._plan(0)
            self._decode_ahead(0)

    def held_bytes(self) -> int:
        pending, ranges = self._pending, self._ranges
        ahead = sum(self._piece_bytes + pieces.held_bytes for _, pieces in tuple(self._ahead))
        return ahead + (pending.nbytes if pending is not None else 0) + (ranges.held_bytes if ranges is not None else 0)

    def close(self) -> None:
        self._pieces = iter(())
        while self._ahead:
            self._ahead.popleft()[1].close()
        self._file.close()
        if self._ranges is not None:
            self._ranges.close()

    def _size_of(self, group: int) -> int:
        """Size of a row group in memory: that in the file, or that of its rows by the ones seen before."""
        metadata = self._file.metadata.row_group(group)
        if self._columns is None:
            encoded = metadata.total_byte_size
        else:
            encoded = sum(chunk.total_uncompressed_size for chunk in _chunks(metadata, self._columns))
        if not self._row_bytes:
            self._probe(group)
        row_bytes, rows = self._row_bytes, metadata.num_rows
        # A few rows of a flat table cannot be large, even if each repeats all of the row group.
        if self._ranges is None and (self._is_nested or encoded * rows > max(self._piece_bytes, _SMALL_BYTES)):
            row_bytes = max(row_bytes, self._repeated_bytes(group))
        return max(int(encoded), int(row_bytes * rows))

    def _probe(self, group: int) -> None:
        # The sizes in the footer are those of encoded values, so a few rows are decoded to see how wide they are. That
        # takes a whole page of each column, and often its dictionary: much of a small file.
        metadata = self._file.metadata.row_group(group)
        self._row_bytes = self._width.of(metadata, self._columns)
        if self._row_bytes:
            return
        if self._ranges is not None and self._planned != group:
            self._ranges.plan(self._spans(group))
        # Of a remote file only this row group is looked at: the others would cost a request for each column.
        repeated = self._repeated_bytes(group) if self._ranges is not None else 0.0
        probe = next(self._iterate(group, _PROBE_ROWS, use_threads=False), None)
        if probe is not None and probe.num_rows:
            self._row_bytes = max(probe.nbytes / probe.num_rows, repeated)
            self._width.note(metadata, self._columns, self._row_bytes)

    def _repeated_bytes(self, group: int) -> float:
        """Bytes that texts kept in dictionaries take in a row of this row group.

        In the file each of them counts once, and rows that were seen may have shorter ones. So the mean of a dictionary
        counts. Where that comes to many times what the file has, long texts may be rare: all rows are looked at.
        """
        if self._repeated[0] != group:
            self._repeated = group, self._look_for_repeats(group)
        return self._repeated[1]

    def _look_for_repeats(self, group: int) -> float:
        metadata = self._file.metadata.row_group(group)
        rows = max(1, int(metadata.num_rows))
        chunks = _chunks(metadata, self._columns)
        texts = [chunk for chunk in chunks if chunk.has_dictionary_page and chunk.physical_type == "BYTE_ARRAY"]
        total, odd = 0.0, []
        for chunk, header in zip(texts, self._dictionary_headers(texts), strict=True):
            width, size = dictionary_entry_bytes(header)
            if size > chunk.total_uncompressed_size:
                continue  # it is damaged, which reading the rows will tell
            nbytes = width * _count_values(chunk)
            if nbytes > max(self._piece_bytes, _ODD * chunk.total_uncompressed_size):
                odd.append((chunk, nbytes))
            else:
                total += nbytes
        if not odd:
            return total / rows
        try:
            return total / rows + self._densest(group, [chunk for chunk, _ in odd])
        except (pa.ArrowException, OSError):  # as above
            return (total + sum(nbytes for _, nbytes in odd)) / rows

    def _dictionary_headers(self, chunks: Sequence[Any]) -> list[bytes]:
        """The first bytes of the dictionary pages of column chunks; none where the file is gone."""
        spans = [(chunk.dictionary_page_offset, chunk.dictionary_page_offset + PAGE_HEADER_BYTES) for chunk in chunks]
        if not spans:
            return []
        if self._ranges is not None:
            assert isinstance(self._path, RemoteFile)
            held = [self._ranges.held(*span) for span in spans]
            asked = {span: submit(self._path.read_range, *span) for span, data in zip(spans, held) if data is None}
            return [bytes(asked[span].result() if data is None else data) for span, data in zip(spans, held)]
        try:
            with open(self._path, "rb", buffering=0) as opened:
                return [_read_at(opened, *span) for span in spans]
        except OSError:
            return [b""] * len(spans)

    def _densest(self, group: int, chunks: Sequence[Any]) -> float:
        """Most bytes a row that the texts of column chunks take in some part of a row group.

        Only dictionaries and indices are decoded. Long texts may lie side by side, so it is not the mean.
        """
        rows = self._file.metadata.row_group(group).num_rows
        encoded = sum(chunk.total_uncompressed_size for chunk in chunks)
        names = [chunk.path_in_schema for chunk in chunks]
        found = 0.0
        with contextlib.ExitStack() as stack:
            opened: Any = self._path
            if isinstance(self._path, RemoteFile):
                ranges = stack.enter_context(contextlib.closing(RangeFile(self._path, self._window)))
                ranges.plan([_span(chunk) for chunk in chunks])
                opened = pa.PythonFile(ranges, mode="r")
            options: Any = {"read_dictionary": names, "pre_buffer": False, "buffer_size": _READ_AHEAD_BYTES}
            file = stack.enter_context(pq.ParquetFile(opened, metadata=self._file.metadata, **options))
            at_once = max(1, min(max(_PART_ROWS, rows // _MOST_PARTS), self._piece_bytes * rows // max(1, encoded)))
            for batch in file.iter_batches(at_once, row_groups=[group], columns=names, use_threads=False):
                found = max(found, sum(map(_text_bytes, batch.columns)) / batch.num_rows)
        return found

    def _begin(self, group: int) -> Iterator[pa.RecordBatch]:
        while self._ahead and self._ahead[0][0] < group:
            self._ahead.popleft()[1].close()
        if self._ahead and self._ahead[0][0] == group:
            return self._ahead[0][1]
        self._plan(group)
        if self._checksums is not None:
            with contextlib.ExitStack() as stack:
                opened = self._ranges or stack.enter_context(open(self._path, "rb", buffering=0))
                _check_groups(opened, self._file.metadata, (group,), self._columns, self._checksums)
        return self._iterate(group, self._rows_of_piece(group))

    def _rows_of_piece(self, group: int) -> int:
        row_bytes = self._size_of(group) / max(1, self._file.metadata.row_group(group).num_rows)
        return max(1, min(_MOST_ROWS, int(self._piece_bytes / max(1.0, row_bytes))))

    def _decode_ahead(self, first: int) -> None:
        """Begin to decode the row groups from `first` on, if they will be read in pieces."""
        looks = self.looks_ahead
        if looks is None or self._ranges is not None:
            return
        metadata = self._file.metadata
        known: _Form | None = None
        for group in range(first, min(first + looks.count, metadata.num_row_groups)):
            if self._ahead and self._ahead[-1][0] >= group:
                continue
            few = metadata.row_group(group).num_rows <= self._most_rows
            if few and self._whole_bytes is not None and self._size_of(group) <= self._whole_bytes:
                return  # workers decode it
            if group:
                known = known or _form(metadata.row_group(max(first - 1, 0)), self._columns)
                if not _alike(known, _form(metadata.row_group(group), self._columns)):
                    return  # several threads at once would decode pieces that are far too large
            self._ahead.append((group, looks.start(self._decoded_apart(group))))

    def _decoded_apart(self, group: int) -> Iterator[pa.RecordBatch]:
        """Pieces of a row group, with a file handle of their own: a thread may use no other's."""
        metadata, columns, rows = self._file.metadata, self._columns, self._rows_of_piece(group)
        path, checksums, pages = self._path, self._checksums, self._pages
        # With a row group for each core, columns side by side only cost a change of threads.
        side_by_side = self.looks_ahead is None or metadata.num_row_groups - group <= self.looks_ahead.count

        def decoded() -> Iterator[pa.RecordBatch]:
            if checksums is not None:
                with open(path, "rb", buffering=0) as opened:
                    _check_groups(opened, metadata, (group,), columns, checksums)
            options: Any = {"buffer_size": _READ_AHEAD_BYTES, "pre_buffer": False, "page_checksum_verification": pages}
            with pq.ParquetFile(path, metadata=metadata, **options) as file:
                yield from file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=side_by_side)

        return decoded()

    def _iterate(self, group: int, rows: int, *, use_threads: bool = True) -> Iterator[Any]:
        return iter(self._file.iter_batches(rows, row_groups=[group], columns=self._columns, use_threads=use_threads))


def _chunks(group: Any, columns: list[str] | None) -> Iterator[Any]:
    """The column chunks of a row group that hold these columns, or all."""
    tops = None if columns is None else tuple(f"{name}." for name in columns)
    for chunk in map(group.column, range(group.num_columns)):
        if tops is None or f"{chunk.path_in_schema}.".startswith(tops):
            yield chunk


def _read_at(file: io.RawIOBase, start: int, stop: int) -> bytes:
    file.seek(start)
    return file.read(stop - start) or b""


def _count_values(chunk: Any) -> int:
    """Number of the values of a column chunk, without nulls and empty lists where they were counted."""
    statistics = chunk.statistics
    nulls = statistics.null_count if statistics is not None and statistics.has_null_count else 0
    return int(chunk.num_values - nulls)


def _text_bytes(array: pa.Array) -> float:
    """Bytes of the texts in an array, also in lists and structs, that are kept in dictionaries."""
    if pa.types.is_dictionary(array.type):
        lengths = pc.binary_length(array.dictionary).cast(pa.int64())
        return float(pc.sum(lengths.take(array.indices.drop_null())).as_py() or 0) + 4 * len(array)
    if pa.types.is_struct(array.type):
        return sum(map(_text_bytes, array.flatten()))
    if pa.types.is_map(array.type):
        return _text_bytes(array.keys) + _text_bytes(array.items)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        return _text_bytes(array.flatten())
    return 0.0


def _span(chunk: Any) -> tuple[int, int]:
    """Bytes of a column chunk."""
    first = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
    return first, first + chunk.total_compressed_size


def _check_groups(
    file: io.RawIOBase, metadata: Any, numbers: Sequence[int], columns: list[str] | None, checksums: Checksums
) -> None:
    """Compare the bytes of row groups with their checksums before anything is made of them."""
    for number in numbers:
        for chunk in _chunks(metadata.row_group(number), columns):
            checksums.check(file, *_span(chunk))
