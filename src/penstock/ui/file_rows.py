"""Rows of data files as they are: JSON Lines, CSV, text, Parquet, Arrow, and what other sources read."""

from __future__ import annotations

import csv
import io
import os
import threading
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from penstock.errors import ConfigError, DataError
from penstock.files.json_values import loads
from penstock.files.ranges.remote_file import InputFile
from penstock.sources.blocks import BlockPosition, BlockReader
from penstock.sources.by_suffix import SourceFiles, find_source
from penstock.sources.columnar import ArrowSource, ParquetSource
from penstock.sources.csv import CsvLayout, CsvSource
from penstock.sources.file_source import FileSource
from penstock.sources.jsonl import JsonlSource, JsonSource
from penstock.sources.record_source import RecordSource
from penstock.sources.splits import InputSplit, open_split
from penstock.sources.text import TextSource
from penstock.ui.matches import Query, characters, characters_in
from penstock.ui.rows import Deadline, RowDetail, RowPage, RowPlace, RowSummary, snippet

_ALONE = (JsonlSource, JsonSource, CsvSource, TextSource, ParquetSource, ArrowSource)
"""Sources of which a file can be opened without the others."""
_BLOCK_BYTES, _PAGE_BYTES = 1 << 20, 1 << 17
_BATCH_ROWS, _BATCH_BYTES = 4096, 4 << 20
_RAW_BYTES = 1 << 20
_MARK_ROWS = 2_000
"""Rows between two places that are remembered."""


class FileRows:
    """Rows of files of one format, each with its number in its file. Only rows that are shown or searched are read.

    Files in text are read from any place that was passed before, so that going back is as quick as going on. Types are
    those of the record itself: no scan of the whole file decides on them.
    """

    unit = "characters"

    def __init__(self, place: str) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._files: SourceFiles | None = None
        self._marks: dict[int, tuple[int, list[tuple[int, int]]]] = {}

    @property
    def format_name(self) -> str:
        return str(self._found().kind.__name__).removesuffix("Source")

    def files(self) -> Sequence[tuple[str, int | None]]:
        found = self._found()
        rows = _count(found) if len(found.files) == 1 else None
        return [(os.fspath(file) if isinstance(file, os.PathLike) else str(file), rows) for file in found.files]

    def page(self, at: RowPlace, count: int) -> RowPage:
        return self._look(at, count, None, Deadline(float("inf")))

    def search(self, query: Query, at: RowPlace, count: int, deadline: Deadline) -> RowPage:
        return self._look(at, count, query, deadline)

    def find(self, file: int, row: int, deadline: Deadline) -> tuple[RowPlace, bool]:
        found = self._found()
        self._check_file(found, file)
        if not _is_text(found):
            rows = _count(SourceFiles(found.kind, [found.files[file]])) if issubclass(found.kind, _ALONE) else None
            if rows is not None and row >= rows:
                raise ConfigError(f"row {row:,} does not exist; the file has {rows:,} rows, counted from 0")
            return RowPlace(file, 0, row), True
        at = self._mark_before(file, row)
        for block in self._blocks(found, at, _BLOCK_BYTES):
            if block.problem is None and block.first <= row < block.first + len(block.starts):
                return RowPlace(file, block.offset + int(block.starts[row - block.first]), row), True
            at = block.after(file)
            if deadline.over:
                # However short the way was, the next request begins here.
                self._remember(found.files[file], file, at.row, at.offset, least_rows=1)
                return at, False
        raise ConfigError(f"row {row:,} does not exist; the file has {at.row:,} rows, counted from 0")

    def row(self, at: RowPlace) -> RowDetail:
        found = self._found()
        self._check_file(found, at.file)
        if _is_text(found):
            records = self._records(found, at)
            block, number = next(records, (None, 0))
            if block is not None:
                following = next((each.place(at.file, which) for each, which in records), None)
                if block.problem is not None:
                    return RowDetail(at, {}, problem=block.problem, following=following)
                value, problem = block.value(number)
                raw = block.record(number)[:_RAW_BYTES].decode(errors="replace").rstrip("\r\n")
                return RowDetail(at, _as_row(value), raw=raw, problem=problem, following=following)
        else:
            for batch, row in self._batches(found, at, 2):
                following = RowPlace(at.file, 0, row + 1) if batch.num_rows > 1 else None
                return RowDetail(at, batch.slice(0, 1).to_pylist()[0], following=following)
        raise ConfigError(f"row {at.row:,} does not exist in file {at.file}")

    # -- looking -----------------------------------------------------------------------------------------------------

    def _look(self, at: RowPlace, count: int, query: Query | None, deadline: Deadline) -> RowPage:
        found = self._found()
        self._check_file(found, at.file)
        rows: list[RowSummary] = []
        place: RowPlace | None = at
        for file in range(at.file, len(found.files)):
            begin = at if file == at.file else RowPlace(file)
            look = self._look_in_text if _is_text(found) else self._look_in_batches
            place = look(found, begin, count, query, deadline, rows)
            if place is not None:
                return RowPage(rows, at, place)
        return RowPage(rows, at, None)

    def _look_in_text(
        self,
        found: SourceFiles,
        at: RowPlace,
        count: int,
        query: Query | None,
        deadline: Deadline,
        rows: list[RowSummary],
    ) -> RowPlace | None:
        """Add matching rows of one file; where to go on, or None at its end."""
        for block in self._blocks(found, at, _PAGE_BYTES if query is None else _BLOCK_BYTES):
            if block.problem is not None:
                if query is None:
                    rows.append(RowSummary(block.place(at.file, 0), None, "", problem=block.problem))
            elif query is None or block.may_have(query):
                for number in block.filled():
                    if len(rows) == count:
                        return block.place(at.file, number)
                    value, problem = block.value(number)
                    if query is not None and (problem or not _fits(query, value)):
                        continue
                    place = block.place(at.file, number)
                    shown = snippet(_readable(value), query) if not problem else _raw_snippet(block.record(number))
                    length = characters(value) if not problem else None
                    rows.append(RowSummary(place, length, shown, problem=problem))
            at = block.after(at.file)
            if deadline.over or len(rows) >= count:
                return at
        return None

    def _look_in_batches(
        self,
        found: SourceFiles,
        at: RowPlace,
        count: int,
        query: Query | None,
        deadline: Deadline,
        rows: list[RowSummary],
    ) -> RowPlace | None:
        wanted = _BATCH_ROWS if query is not None else count + 1
        for batch, first in self._batches(found, at, wanted):
            hits = np.ones(batch.num_rows, bool)
            if query is not None and query.text:
                hits &= query.in_batch(batch)
            if query is not None and query.by_length:
                hits &= query.fitting(characters_in(batch))
            for number in np.flatnonzero(hits).tolist():
                if len(rows) == count:
                    return RowPlace(at.file, 0, first + number)
                value = batch.slice(number, 1).to_pylist()[0]
                place = RowPlace(at.file, 0, first + number)
                rows.append(RowSummary(place, characters(value), snippet(_readable(value), query)))
            if deadline.over:
                return RowPlace(at.file, 0, first + batch.num_rows)
        return None

    # -- reading -----------------------------------------------------------------------------------------------------

    def _blocks(self, found: SourceFiles, at: RowPlace, nbytes: int) -> Iterator[_TextBlock]:
        """Blocks of records of one file, from a place on. With 1 byte, each has one record."""
        source: RecordSource = found.kind([found.files[at.file]], allow_empty=True)
        reader = source.reader_of(0, BlockPosition(0, at.offset, at.row))
        decode = _decoder(source)
        with closing(source), closing(reader):
            while True:
                place = reader.place
                try:
                    raw = reader.next(nbytes)
                except DataError as error:
                    problem = error.reason
                    reader.skip_bad()
                    yield _TextBlock(b"", place, _NONE, _NONE, decode, problem, _end(reader, place))
                    continue
                if raw is None:
                    return
                data = raw.data.to_pybytes()
                starts, stops = source.layout_of(0).cutter.spans(np.frombuffer(data, np.uint8))
                self._remember(found.files[at.file], at.file, raw.place.row, raw.place.offset)
                yield _TextBlock(data, raw.place, starts, stops, decode, None, None)

    def _records(self, found: SourceFiles, at: RowPlace) -> Iterator[tuple[_TextBlock, int]]:
        """Records one by one, blank ones left out."""
        for block in self._blocks(found, at, 1):
            numbers = [0] if block.problem is not None else block.filled()
            yield from ((block, number) for number in numbers)

    def _batches(self, found: SourceFiles, at: RowPlace, count: int) -> Iterator[tuple[pa.RecordBatch, int]]:
        alone = issubclass(found.kind, _ALONE)
        source: Any = found.kind([found.files[at.file]], allow_empty=True) if alone else found.open()
        number, row = (0 if alone else at.file), at.row
        with closing(source), closing(open_split(source, InputSplit(number, 0, None, 1), at.row)) as reader:
            while (cut := reader.cut(count, _BATCH_BYTES)) is not None:
                batch = reader.decode(cut).batch
                yield batch, row
                row += cut.records

    def _found(self) -> SourceFiles:
        with self._lock:
            if self._files is None:
                found = find_source(self._place)
                kind = getattr(found, "kind", None)
                if not isinstance(found, SourceFiles) or not isinstance(kind, type):
                    raise ConfigError(f"{self._place} holds no files of rows that penstock ui can show")
                if not issubclass(kind, RecordSource | FileSource):
                    raise ConfigError(f"{self._place}: penstock ui does not show what {kind.__name__} reads")
                self._files = found
            return self._files

    def _check_file(self, found: SourceFiles, file: int) -> None:
        if not 0 <= file < len(found.files):
            raise ConfigError(f"file {file} does not exist; there are {len(found.files):,}, counted from 0")

    # -- places that were passed -------------------------------------------------------------------------------------

    def _remember(self, path: InputFile, file: int, row: int, offset: int, least_rows: int = _MARK_ROWS) -> None:
        size = path.stat().st_size
        with self._lock:
            known, marks = self._marks.get(file, (0, []))
            if size < known:
                marks = []  # another file of the same name
            at = bisect_right(marks, (row, 1 << 62))
            if row and (not at or row - marks[at - 1][0] >= least_rows):
                insort(marks, (row, offset))
            self._marks[file] = (size, marks)

    def _mark_before(self, file: int, row: int) -> RowPlace:
        with self._lock:
            marks = self._marks.get(file, (0, []))[1]
            at = bisect_right(marks, (row, 1 << 62))
            return RowPlace(file, marks[at - 1][1], marks[at - 1][0]) if at else RowPlace(file)


class _TextBlock:
    """Records of a file in text, decoded one by one when they are looked at."""

    def __init__(
        self,
        data: bytes,
        place: BlockPosition,
        starts: Any,
        stops: Any,
        decode: Callable[[bytes], Any],
        problem: str | None,
        end: BlockPosition | None,
    ) -> None:
        self._data, self.starts, self._stops, self._decode = data, starts, stops, decode
        self.first, self.offset, self.problem, self._end = place.row, place.offset, problem, end

    def place(self, file: int, number: int) -> RowPlace:
        start = int(self.starts[number]) if len(self.starts) else 0
        return RowPlace(file, self.offset + start, self.first + number)

    def after(self, file: int) -> RowPlace:
        """Place of the record after the last."""
        if self._end is not None:
            return RowPlace(file, self._end.offset, self._end.row)
        return RowPlace(file, self.offset + len(self._data), self.first + len(self.starts))

    def record(self, number: int) -> bytes:
        return self._data[int(self.starts[number]) : int(self._stops[number])]

    def filled(self) -> Iterator[int]:
        return (number for number in range(len(self.starts)) if self.record(number).strip())

    def value(self, number: int) -> tuple[Any, str]:
        """Value of a record; or None, and the reason why it has none."""
        try:
            return self._decode(self.record(number)), ""
        except (ValueError, csv.Error) as error:
            return None, str(error)

    def may_have(self, query: Query) -> bool:
        """False if no record of the block can match: a look at all bytes at once, before any is decoded."""
        if not query.text or not query.text.isascii() or any(each in query.text for each in '"\\/'):
            return True
        if not query.text.isprintable():
            return True
        return query.is_in(self._data) or b"\\u" in self._data


_NONE = np.empty(0, np.int64)


def _end(reader: BlockReader, before: BlockPosition) -> BlockPosition:
    """Position after a bad record; after the last file there is none, and reading there ends at once."""
    return reader.place if not reader.place.file else BlockPosition(0, 1 << 62, before.row + 1)


def _decoder(source: RecordSource) -> Callable[[bytes], Any]:
    if isinstance(source, JsonlSource):
        return _json
    if isinstance(source, CsvSource):
        layout = source.layout_of(0)
        assert isinstance(layout, CsvLayout)
        return lambda record: _csv(record, layout)
    return lambda record: {"text": record.decode().rstrip("\r\n")}


def _json(record: bytes) -> Any:
    try:
        return orjson.loads(record)
    except orjson.JSONDecodeError:
        return loads(record)  # lone surrogates, NaN, numbers of any length


def _csv(record: bytes, layout: CsvLayout) -> dict[str, Any]:
    cells = next(csv.reader(io.StringIO(record.decode(), newline=""), delimiter=layout.delimiter), [])
    if len(cells) != len(layout.names):
        raise ValueError(f"{len(cells)} cells, and the header has {len(layout.names)}")
    return dict(zip(layout.names, cells))


def _fits(query: Query, value: Any) -> bool:
    if query.by_length and not query.fits_length(characters(value)):
        return False
    return not query.text or query.is_in_value(value)


def _as_row(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"value": value}


def _readable(value: Any) -> str:
    """Texts of a row with their names, the longest fields of a chat as role and content."""
    row = _as_row(value)
    parts = []
    for name, each in row.items():
        if isinstance(each, list) and each and isinstance(each[0], dict):
            parts += [f"{turn.get('role') or turn.get('from') or name}: {_content(turn)}" for turn in each[:50]]
        else:
            text = each if isinstance(each, str) else orjson.dumps(each, default=str, option=_ANY).decode()[:10_000]
            parts.append(text if len(row) == 1 else f"{name}: {text}")
    return "  ".join(parts)


_ANY = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def _content(turn: dict[str, Any]) -> str:
    content = next((turn[name] for name in ("content", "value", "text") if name in turn), turn)
    return content if isinstance(content, str) else str(content)[:10_000]


def _raw_snippet(record: bytes) -> str:
    return snippet(record[:2_000].decode(errors="replace"))


def _is_text(found: SourceFiles) -> bool:
    return issubclass(found.kind, RecordSource)


def _count(found: SourceFiles) -> int | None:
    """Rows of files, where a footer says so."""
    if _is_text(found):
        return None
    source: Any = found.open()
    with closing(source):
        rows: int | None = source.size_hint()
        return rows
