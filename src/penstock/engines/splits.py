"""Splits of a pipeline's input: each is read by a source of its own, with the rows and errors of the whole source.

A split never crosses files, so every row knows its file. Text is cut at line starts, columnar files between row groups
or record batches, stores and tables between rows, databases between keys. Row numbers of text begin with 0 in every
split: the records before it are not counted. The job adds them once the splits before are done.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
import pyarrow as pa

from penstock.errors import ConfigError, DataError
from penstock.files.ranges.remote_file import InputFile
from penstock.pipeline.chain import stage_name
from penstock.pipeline.stages import Block, Decoded, Origin, Source
from penstock.sources.blocks import BlockPosition, RecordSpans
from penstock.sources.columnar import ParquetSource
from penstock.sources.file_source import FileList, FileSource
from penstock.sources.lakes.base import LakeSource
from penstock.sources.memory import MemorySource
from penstock.sources.record_source import RecordSource
from penstock.sources.splits import InputSplit, SplitReader, input_files, line_start, open_split, split_input
from penstock.sources.sql import SqlSource
from penstock.sources.store import StoreSource


@dataclass(frozen=True, slots=True)
class Bundle:
    """Splits of one task, in order."""

    splits: tuple[InputSplit, ...]

    @property
    def nbytes(self) -> int:
        return sum(split.nbytes for split in self.splits)

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(split) for split in self.splits]

    @classmethod
    def of(cls, saved: list[dict[str, Any]]) -> Self:
        return cls(tuple(InputSplit(**split) for split in saved))


def bundles_of(source: Any, target_bytes: int) -> list[Bundle]:
    """The input in tasks of about `target_bytes`: large files are cut, small ones go together."""
    check_splittable(source)
    splits = split_input(source, target_bytes)
    if isinstance(source, RecordSource | FileSource):
        splits = list(_with_empty_files(source, splits))
    if not splits:
        splits = [InputSplit(0, 0, 0, 0)]  # no rows, but columns
    return list(_bundled(splits, target_bytes))


def check_splittable(source: Any) -> None:
    """Refuse a source that only the process that made it can read."""
    if isinstance(source, RecordSource | FileSource | StoreSource | MemorySource):
        return
    if isinstance(source, SqlSource):
        if source.has_key:
            return
        raise ConfigError(f"{source!r} cannot be read in parts without a key; pass key= with a unique column")
    raise ConfigError(
        f"{stage_name(source)} can only be read from its beginning on, in one process, so its rows cannot be shared "
        "out; write them to files or to a store first (JSON Lines, Parquet), and read those"
    )


def _with_empty_files(source: Any, splits: list[InputSplit]) -> Iterator[InputSplit]:
    """Also those without bytes: to read them is an error, unless they are allowed."""
    following = iter(splits)
    split = next(following, None)
    for number in range(len(source.files)):
        if split is None or split.file != number:
            yield InputSplit(number, 0, None, 0)
        while split is not None and split.file == number:
            yield split
            split = next(following, None)


_MOST_SPLITS = 256
"""Splits of one task: each costs the start of a pipeline."""


def _bundled(splits: list[InputSplit], target_bytes: int) -> Iterator[Bundle]:
    waiting: list[InputSplit] = []
    size = 0
    for split in splits:
        if waiting and (size + split.nbytes > target_bytes or len(waiting) == _MOST_SPLITS):
            yield Bundle(tuple(waiting))
            waiting, size = [], 0
        waiting.append(split)
        size += split.nbytes
    if waiting:
        yield Bundle(tuple(waiting))


def described(source: Any, bundle: Bundle, names: Sequence[str]) -> str:
    """File and range of the splits of a task, for messages; `names` are those of all files of the input."""
    unit = "byte" if isinstance(source, RecordSource) else "row"

    def one(split: InputSplit) -> str:
        name = names[split.file] if split.file < len(names) else repr(source)
        if not split.start and split.stop is None:
            return name
        return f"{name}, from {unit} {split.start:,} to {split.stop:,}" if split.stop is not None else name

    first = one(bundle.splits[0])
    return first if len(bundle.splits) == 1 else f"{first} and {len(bundle.splits) - 1} more files"


def split_source(source: Any, split: InputSplit) -> RecordSplit | FileSplit | RowSplit:
    """A source of the rows of one split. It looks like the whole source in messages."""
    if isinstance(source, RecordSource):
        return RecordSplit(source, split)
    return FileSplit(source, split) if isinstance(source, FileSource) else RowSplit(source, split)


class _PartOfFile(Source):
    """Part of a file of a source: a source of that file alone, from a place on."""

    _whole: Source
    _alone: FileSource | RecordSource

    def fit_budget(self, nbytes: int) -> None:
        fit = getattr(self._alone, "fit_budget", None)
        if fit is not None:
            fit(nbytes)

    def memory_usage(self) -> int:
        return self._alone.memory_usage()

    def close(self) -> None:
        self._alone.close()

    def __repr__(self) -> str:
        return stage_name(self._whole)


class RecordSplit(_PartOfFile):
    """Records of one file that begin within a range of its bytes."""

    def __init__(self, source: RecordSource, split: InputSplit) -> None:
        self._whole, self._stop = source, split.stop
        self._alone: RecordSource = _alone(source, split.file)
        alone: Any = self._alone
        begin = line_start(source, split)
        self._empty = begin is None
        alone._layouts = {}
        with contextlib.suppress(DataError):  # it comes again with the first block, where the pipeline expects it
            alone._layouts[0] = source.layout_of(split.file)
        alone._start = BlockPosition(0, begin or 0, 0)
        self.schema = source.schema
        self.records = 0
        """Records of the file that were read, good and bad."""

    def next_block(self, max_bytes: int) -> Block | None:
        place = self._alone.place
        if self._empty or place.file or (self._stop is not None and place.offset >= self._stop):
            return None
        most = max_bytes if self._stop is None else min(max_bytes, self._stop - place.offset)
        block = self._alone.next_block(most)
        if block is not None and self._stop is not None:
            block = self._within(block, self._stop)
        if block is not None:
            self.records = block.origin.row + (block.meta["records"] or 0)
        return block

    def _within(self, block: Block, stop: int) -> Block:
        """The records of a block that begin before the end of the split."""
        offset = block.origin.offset or 0
        if offset + block.nbytes <= stop:
            return block
        starts = RecordSpans(block).starts
        count = int(np.searchsorted(starts, stop - offset))
        if count == len(starts):
            return block
        data = block.data.slice(0, int(starts[count]))
        return replace(block, data=data, nbytes=data.size, meta={**block.meta, "records": count})

    def decode(self, block: Block) -> Decoded:
        return self._alone.decode(block)

    def offset_of(self, block: Block, row: int) -> int | None:
        return self._alone.offset_of(block, row)

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        raise NotImplementedError("records are read in blocks")

    def skip_file(self) -> str:
        reason = self._alone.skip_file()
        place = self._alone.place
        self.records = self.records if place.file else place.row
        return reason


class FileSplit(_PartOfFile):
    """Rows of one columnar file from row to row."""

    records = None

    def __init__(self, source: FileSource, split: InputSplit) -> None:
        self._whole, self._stop = source, split.stop
        self._alone: FileSource = _alone(source, split.file)
        alone: Any = self._alone
        alone._file, alone._row = 0, split.start
        self.schema = source.schema

    def fit_budget(self, nbytes: int) -> None:
        super().fit_budget(nbytes)
        if isinstance(self._alone, ParquetSource):
            self._alone._ahead = None  # it would be of the next split

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        alone, stop = self._alone, self._stop
        if alone._file or (stop is not None and alone._row >= stop):
            return None
        return alone.next_batch(max_rows if stop is None else min(max_rows, stop - alone._row))

    def origin(self) -> Origin | None:
        return self._alone.origin()

    def skip_file(self) -> str:
        return self._alone.skip_file()


class RowSplit(Source):
    """Rows of a store, a table in memory or a database, from row to row."""

    records = None

    def __init__(self, source: Any, split: InputSplit) -> None:
        self._whole = source
        self._reader: SplitReader = open_split(source, split)
        self._file = _name_of(source, split.file)
        self._origin: Origin | None = None
        self.schema = source.schema
        self._empty = split.stop is not None and split.stop <= split.start

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        cut = None if self._empty else self._reader.cut(max_rows, _ROWS_BYTES)
        if cut is None:
            return None
        self._origin = Origin(self._file, cut.first)
        batch = self._reader.decode(cut).batch
        return batch if batch.schema.names == self.schema.names else batch.select(self.schema.names)

    def skip_file(self) -> str:
        reason = self._reader.skip_bad()
        return reason if not isinstance(self._whole, StoreSource) else "the rest of the shard is unreadable"

    def origin(self) -> Origin | None:
        return self._origin

    def close(self) -> None:
        self._reader.close()

    def __repr__(self) -> str:
        return stage_name(self._whole)


_ROWS_BYTES = 4 << 20


def _name_of(source: Any, number: int) -> str:
    """Name of one of the files of a source, which may have very many."""
    if isinstance(source, StoreSource):
        return source.shard_place(number) if number < len(source.manifest.shards) else ""
    return input_files(source)[number][0]


def _alone(source: Any, number: int) -> Any:
    """A copy of a source of files that reads one of them, with what follows from all of them."""
    if isinstance(source, LakeSource):
        _ = source.file_of
    if isinstance(source, FileSource):
        _ = source.schema
    alone = copy.copy(source)
    files: list[InputFile] = [source.files[number]]
    alone._list = FileList(files, type(source).suffixes)
    alone._list._found = files
    alone._list.__dict__["partitions"] = source._list.partitions
    return alone


def count_records(source: RecordSource, split: InputSplit) -> int:
    """Records of a split, counted without decoding them."""
    with closing(RecordSplit(source, split)) as reader:
        while reader.next_block(4 << 20) is not None:
            pass
        return reader.records
