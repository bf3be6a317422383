"""Parquet and Arrow IPC files."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import orjson
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

from penstock.connections.delta import delta_log_at
from penstock.errors import ConfigError, SchemaError
from penstock.files.checksums import (
    ARROW_TAIL,
    PARQUET_TAIL,
    HashedFile,
    Segment,
    check_file,
    checksum_block,
    hash_buffer,
)
from penstock.files.compression import open_output
from penstock.files.filesystems import is_object_url, local_or_none, name_of
from penstock.files.listing import PathLike, is_service, split_suffix
from penstock.files.parquet_footer import MAGIC, join_footers, split_file
from penstock.memory.budget import column_bytes, parse_bytes
from penstock.pipeline.cores import available_cores
from penstock.pipeline.functions import rows_of
from penstock.pipeline.prefetch import Background
from penstock.pipeline.stages import Sink
from penstock.plugins import formats
from penstock.sinks.delta import DeltaSink
from penstock.sinks.file_sink import FileSink, Writer
from penstock.sinks.row_groups import GroupCuts, joined
from penstock.sinks.services import open_service
from penstock.types import to_rows

_MOST_GROUPS = 8
"""Row groups that are encoded at once; one thread compresses 200 to 400 MB a second."""
_LONG_BYTES = 1 << 20
_BATCH_BYTES = 1 << 20
"""Size of a record batch in an Arrow file."""
_THIN = 4
"""Batches that become one, if their columns take more memory than the data in them."""
_COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "brotli", "none")


class ParquetSink(FileSink):
    """One Parquet file, or a directory of them.

    A row group is closed when its rows take `row_group_bytes` in memory; a pipeline with a small budget makes that a
    sixteenth of it. Several row groups are encoded at once, up to one a core, in at most an eighth of the budget; the
    bytes of the file do not depend on that. Text that hardly repeats is written without a dictionary
    (`dictionary=None` decides by the first row group).

    Pages have the checksums of the format. Checksums of all bytes, footer included, stand in front of the footer, where
    only `ParquetSource` looks for them.
    """

    suffix: ClassVar[str] = ".parquet"

    def __init__(
        self,
        path: PathLike,
        *,
        compression: str = "zstd",
        compression_level: int | None = None,
        row_group_bytes: int | str = "16 MiB",
        dictionary: bool | Sequence[str] | None = None,
        rows_per_file: int | None = None,
    ) -> None:
        super().__init__(path, rows_per_file=rows_per_file)
        _refuse_outer_compression(self._name)
        if compression not in _COMPRESSIONS:
            raise ConfigError(f"unknown compression {compression!r}; expected one of {', '.join(_COMPRESSIONS)}")
        self._compression, self._level = compression, compression_level
        self._row_group_bytes = self._asked_bytes = parse_bytes(row_group_bytes)
        self._groups_at_once = min(_MOST_GROUPS, available_cores())
        self._dictionary = dictionary if dictionary is None or isinstance(dictionary, bool) else list(dictionary)

    def fit_budget(self, nbytes: int) -> None:
        super().fit_budget(nbytes)
        self._row_group_bytes = min(self._asked_bytes, nbytes // 16)
        room = nbytes // 8 // max(1, self._row_group_bytes)
        self._groups_at_once = max(1, min(_MOST_GROUPS, available_cores(), room))

    def _new_writer(self, file: BinaryIO, schema: pa.Schema, *, first: bool) -> Writer:
        return _ParquetWriter(
            file,
            schema,
            self._compression,
            self._level,
            self._row_group_bytes,
            self._dictionary,
            self._groups_at_once,
        )

    def _join(self, segments: Iterable[Path], target: BinaryIO) -> None:
        """Row groups cannot be moved from file to file as they are: they are read and written again."""
        writer: Writer | None = None
        for segment in segments:
            with pq.ParquetFile(segment, buffer_size=1 << 18, pre_buffer=False) as piece:
                check_file(segment, PARQUET_TAIL)
                writer = writer or self._new_writer(target, piece.schema_arrow, first=True)
                for batch in piece.iter_batches(1 << 12):
                    writer.write(batch)
        if writer is not None:
            writer.close()


class ArrowSink(FileSink):
    """One Arrow IPC file (or a directory of them) that readers can memory-map.

    `compression` ("lz4" or "zstd") makes it smaller; without it batches are views of the file when read. A checksum of
    each batch stands in front of the footer, where only `ArrowSource` looks for it.
    """

    suffix: ClassVar[str] = ".arrow"

    def __init__(self, path: PathLike, *, compression: str | None = None, rows_per_file: int | None = None) -> None:
        super().__init__(path, rows_per_file=rows_per_file)
        _refuse_outer_compression(self._name)
        if compression not in (None, "lz4", "zstd"):
            raise ConfigError(f"compression must be 'lz4', 'zstd' or None, got {compression!r}")
        self._compression = compression

    def _new_writer(self, file: BinaryIO, schema: pa.Schema, *, first: bool) -> Writer:
        return _ArrowWriter(file, schema, self._compression)

    def _join(self, segments: Iterable[Path], target: BinaryIO) -> None:
        writer: Writer | None = None
        for segment in segments:
            check_file(segment, ARROW_TAIL)
            with pa.OSFile(str(segment)) as piece:  # mapped, the whole of it would count as memory of the process
                reader = pa.ipc.open_file(piece)
                writer = writer or self._new_writer(target, reader.schema, first=True)
                for number in range(reader.num_record_batches):
                    writer.write(reader.get_batch(number))
        if writer is not None:
            writer.close()


class _ParquetWriter:
    """Writer that encodes several row groups at once, each as a file of its own in memory, and joins them in order.

    The bytes are those of one writer that encodes them one after the other.
    """

    def __init__(
        self,
        file: BinaryIO,
        schema: pa.Schema,
        compression: str,
        level: int | None,
        row_group_bytes: int,
        dictionary: bool | list[str] | None,
        groups_at_once: int,
    ) -> None:
        self._file, self._schema = file, schema
        self._compression, self._level, self._dictionary = compression, level, dictionary
        self._row_group_bytes, self._at_once = row_group_bytes, groups_at_once
        self._groups = GroupCuts(row_group_bytes)
        self._pending: list[pa.RecordBatch] = []
        self._held = 0
        """Bytes of the rows that are not encoded yet."""
        self._merged: list[int] = []
        """For each of these batches, how many times it was made of smaller ones."""
        self._encoding: deque[tuple[Future[pa.Buffer], int]] = deque()
        """Row groups in work, in order, and the bytes of their rows."""
        self._background = Background(groups_at_once)
        self._options: dict[str, Any] | None = None
        self._footers: list[bytes] = []
        self._shifts: list[int] = []
        self._position = 0
        self._segments: list[Segment] = []

    def write(self, batch: pa.RecordBatch) -> None:
        for part, nbytes, ends in self._groups.cut(batch):
            if part.num_rows:
                self._pending.append(part)
                self._merged.append(0)
                self._held += nbytes
            if ends and self._pending:
                self._encode_group()
        while len(self._merged) >= _THIN and self._merged[-_THIN] == self._merged[-1] and self._are_thin():
            self._pending[-_THIN:] = [pa.concat_batches(self._pending[-_THIN:])]
            self._merged[-_THIN:] = [self._merged[-1] + 1]

    def _are_thin(self) -> bool:
        """True if the columns of the last batches take more memory than the data in them."""
        return bool(self._pending[-1].nbytes < column_bytes(len(self._schema)))

    def close(self) -> None:
        if self._pending or self._options is None:
            self._encode_group()
        while self._encoding:
            self._write_group()
        self._background.close()
        footer = join_footers(self._footers, self._shifts)
        self._file.write(checksum_block(self._segments, footer) + footer)

    def abort(self) -> None:
        self._pending, self._merged, self._held = [], [], 0
        self._encoding.clear()
        self._background.close()

    def held_bytes(self) -> int:
        columns = len(self._pending) * column_bytes(len(self._schema))
        return self._held + columns + sum(nbytes for _, nbytes in self._encoding)

    def _encode_group(self) -> None:
        rows = joined(self._pending) if self._pending else None  # pages would tell where a batch began
        self._pending = []
        table = pa.Table.from_batches([] if rows is None else [rows], self._schema)
        if self._options is None:
            self._options = {
                "compression": self._compression,
                "compression_level": self._level,
                "use_dictionary": self._dictionary if self._dictionary is not None else _worth_a_dictionary(table),
                "write_page_checksum": True,
            }
        options = self._options
        if self._held > self._row_group_bytes + _LONG_BYTES:
            # Of a value that is too long for statistics, the writer makes six copies before it leaves them out.
            options = options | {"write_statistics": [name for name in table.column_names if not _is_long(table[name])]}
        self._encoding.append((self._encoded(table, options), self._held))
        self._pending, self._merged, self._held = [], [], 0
        while len(self._encoding) >= self._at_once or (self._encoding and self._encoding[0][0].done()):
            self._write_group()

    def _encoded(self, table: pa.Table, options: dict[str, Any]) -> Future[pa.Buffer]:
        if self._at_once > 1:
            return self._background.submit(lambda: _one_group(table, options))
        made: Future[pa.Buffer] = Future()
        made.set_result(_one_group(table, options))
        return made

    def _write_group(self) -> None:
        """Wait for the first row group in work, and write it."""
        encoded = memoryview(self._encoding[0][0].result())
        self._encoding.popleft()
        groups, footer = split_file(encoded)
        if not self._footers:
            groups = encoded[: len(MAGIC) + len(groups)]
            self._shifts.append(0)
        else:
            self._shifts.append(self._position - len(MAGIC))
        self._footers.append(bytes(footer))
        self._file.write(groups)
        self._segments += hash_buffer(groups, self._position)
        self._position += len(groups)


def _one_group(table: pa.Table, options: dict[str, Any]) -> pa.Buffer:
    """Parquet file with one row group."""
    out = pa.BufferOutputStream()
    with pq.ParquetWriter(out, table.schema, **options) as writer:
        writer.write_table(table, row_group_size=max(1, table.num_rows))
    return out.getvalue()


class _ArrowWriter:
    def __init__(self, file: BinaryIO, schema: pa.Schema, compression: str | None) -> None:
        options = pa.ipc.IpcWriteOptions(compression=compression, emit_dictionary_deltas=True)
        self._file = HashedFile(file)
        self._writer = pa.ipc.new_file(self._file, schema, options=options)
        self._groups = GroupCuts(_BATCH_BYTES)
        self._pending: list[pa.RecordBatch] = []
        self._held = 0
        self._known: dict[int, pa.Array] = {}
        """For each column with a dictionary, an empty array with all the values so far."""

    def write(self, batch: pa.RecordBatch) -> None:
        for part, nbytes, ends in self._groups.cut(batch):
            if part.num_rows:
                self._pending.append(part)
                self._held += nbytes
            if ends:
                self._write_pending()

    def _write_pending(self) -> None:
        if not self._pending:
            return
        batch = joined(self._pending, plain=True)
        self._pending, self._held = [], 0
        columns = [self._grown(i, column) for i, column in enumerate(batch.columns)]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=batch.schema))
        self._file.cut()

    def close(self) -> None:
        self._write_pending()
        self._file.hold()
        self._writer.close()
        self._file.finish(ARROW_TAIL)

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def held_bytes(self) -> int:
        return self._held + sum(int(column.dictionary.nbytes) for column in self._known.values())

    def _grown(self, index: int, column: pa.Array) -> pa.Array:
        """A file has one dictionary for each column, which may only grow: new values go after the known ones."""
        if not pa.types.is_dictionary(column.type):
            return column
        if index in self._known:
            column = pa.chunked_array([self._known[index], column]).unify_dictionaries().chunk(1)
        self._known[index] = column.slice(0, 0)
        return column


def _refuse_outer_compression(name: str) -> None:
    outer = split_suffix(name)[1]
    if outer:
        raise ConfigError(f"{name}: this format compresses inside; leave {outer!r} out and pass compression=")


def _worth_a_dictionary(table: pa.Table) -> bool | list[str]:
    """Columns whose values repeat. Building a dictionary of long text that never repeats costs a fifth of the time."""
    names = []
    for field, column in zip(table.schema, table.columns):
        if pa.types.is_nested(field.type):
            return True  # nested leaves have names of their own: leave the choice to the writer
        if _is_long(column):
            continue
        head = column.slice(0, 1024)
        comparable = pa.types.is_primitive(field.type) or pa.types.is_string(field.type)
        if not comparable or not len(head) or len(head.unique()) <= len(head) // 2:
            names.append(field.name)
    return names or False


def _is_long(column: pa.ChunkedArray) -> bool:
    """True if the values of a column take a megabyte and more each."""
    return bool(column.nbytes > _LONG_BYTES * max(1, len(column)))


class JsonlSink(FileSink):
    """One JSON object a line; `.gz`, `.zst`, `.bz2`, `.lz4` and `.xz` names are compressed.

    Timestamps are written as ISO 8601 text, decimals and durations as text, maps as objects, tensors as nested lists.
    JSON has no NaN and no infinity: they become null. It has no form for binary columns either: they are refused.
    """

    suffix: ClassVar[str] = ".jsonl"

    def __init__(
        self, path: PathLike, *, compression_level: int | None = None, rows_per_file: int | None = None
    ) -> None:
        super().__init__(path, rows_per_file=rows_per_file)
        self._level = compression_level

    def _new_writer(self, file: BinaryIO, schema: pa.Schema, *, first: bool) -> Writer:
        refuse_binary(schema, "write Parquet")
        return _JsonlWriter(file, schema, split_suffix(self._name)[1], self._level)

    @property
    def takes_parts(self) -> bool:
        return not self._is_directory and not split_suffix(self._name)[1]


def refuse_binary(schema: pa.Schema, instead: str) -> None:
    """Refuse columns that JSON cannot hold."""
    binary = [field.name for field in schema if _any(field.type, _is_binary)]
    if binary:
        raise SchemaError(f"JSON cannot hold the binary columns {binary}; drop or encode them, or {instead}")


def json_rows(batch: pa.RecordBatch, options: int | None = None) -> list[bytes]:
    """Rows as JSON objects."""
    if options is None:
        options = _json_options(batch.schema)
    columns = {field.name: _values(column, field) for field, column in zip(batch.schema, batch.columns)}
    return [orjson.dumps(row, _plain, options) for row in rows_of(columns)]


def _json_options(schema: pa.Schema) -> int:
    maps = any(_any(field.type, pa.types.is_map) for field in schema)
    return orjson.OPT_SERIALIZE_NUMPY | (orjson.OPT_NON_STR_KEYS if maps else 0)


class CsvSink(FileSink):
    """Comma separated values with a header line, tabs if the name ends in `.tsv`; compressed by suffix.

    Null and empty text both become empty. Nested and binary columns are refused.
    """

    suffix: ClassVar[str] = ".csv"

    def __init__(
        self,
        path: PathLike,
        *,
        delimiter: str | None = None,
        compression_level: int | None = None,
        rows_per_file: int | None = None,
    ) -> None:
        super().__init__(path, rows_per_file=rows_per_file)
        if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n'):
            raise ConfigError(f"delimiter must be one ASCII character, no quote and no line end, got {delimiter!r}")
        self._delimiter = delimiter or ("\t" if split_suffix(self._name)[0] == ".tsv" else ",")
        self._level = compression_level

    def _new_writer(self, file: BinaryIO, schema: pa.Schema, *, first: bool) -> Writer:
        nested = [field.name for field in schema if pa.types.is_nested(field.type) or _is_binary(field.type)]
        if nested:
            raise SchemaError(
                f"CSV cannot hold the nested or binary columns {nested}; drop them, or write JSON Lines or Parquet"
            )
        return _CsvWriter(file, schema, split_suffix(self._name)[1], self._level, self._delimiter, header=first)

    def part_facts(self) -> list[str]:
        return [self._delimiter]

    @property
    def takes_parts(self) -> bool:
        return not self._is_directory and not split_suffix(self._name)[1]


_ROWS_AT_ONCE = 4096
"""Rows of Python objects at a time: they take many times the memory of Arrow."""


class _JsonlWriter:
    def __init__(self, file: BinaryIO, schema: pa.Schema, codec: str, level: int | None) -> None:
        self._raw = file
        self._out: Any = open_output(file, codec, level)
        self._options = _json_options(schema) | orjson.OPT_APPEND_NEWLINE

    def write(self, batch: pa.RecordBatch) -> None:
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            self._out.write(b"".join(json_rows(batch.slice(start, _ROWS_AT_ONCE), self._options)))

    def close(self) -> None:
        if self._out is not self._raw:
            self._out.close()

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def held_bytes(self) -> int:
        return 0


class _CsvWriter:
    def __init__(
        self, file: BinaryIO, schema: pa.Schema, codec: str, level: int | None, delimiter: str, *, header: bool
    ) -> None:
        self._raw = file
        self._out: Any = open_output(file, codec, level)
        self._options = pcsv.WriteOptions(include_header=False, delimiter=delimiter)
        if header and len(schema):
            names = pcsv.WriteOptions(include_header=True, delimiter=delimiter)
            empty = pa.RecordBatch.from_arrays([pa.array([], pa.string())] * len(schema), schema.names)
            pcsv.write_csv(empty, self._out, names)

    def write(self, batch: pa.RecordBatch) -> None:
        columns = [_as_csv(column, alone=len(batch.columns) == 1) for column in batch.columns]
        if columns:
            pcsv.write_csv(pa.RecordBatch.from_arrays(columns, batch.schema.names), self._out, self._options)

    def close(self) -> None:
        if self._out is not self._raw:
            self._out.close()

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def held_bytes(self) -> int:
        return 0


def _values(column: pa.Array, field: pa.Field) -> list[Any]:
    """A column as what orjson can write."""
    if isinstance(column, pa.ExtensionArray):
        return [row[field.name] for row in to_rows(pa.RecordBatch.from_arrays([column], schema=pa.schema([field])))]
    values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    return values


def _plain(value: Any) -> Any:
    """Values orjson cannot write: nanoseconds as a datetime; decimals and durations as text."""
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _as_csv(column: pa.Array, *, alone: bool) -> pa.Array:
    if pa.types.is_string_view(column.type):
        column = column.cast(pa.string())
    if alone and column.null_count:
        # The only cell of a row: left empty it would be a blank line, which readers pass over. As text it is quoted.
        column = column.cast(pa.string()).fill_null("")
    return column


def _any(kind: pa.DataType, test: Any) -> bool:
    """True if a type, or any inside it, passes a test."""
    if isinstance(kind, pa.BaseExtensionType):
        return _any(kind.storage_type, test)
    if pa.types.is_dictionary(kind):
        return _any(kind.value_type, test)
    return bool(test(kind)) or any(_any(kind.field(i).type, test) for i in range(kind.num_fields))


def _is_binary(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    )


_BUILT_IN: dict[str, Any] = {
    ".parquet": ParquetSink,
    ".pq": ParquetSink,
    ".arrow": ArrowSink,
    ".feather": ArrowSink,
    ".ipc": ArrowSink,
    ".jsonl": JsonlSink,
    ".ndjson": JsonlSink,
    ".csv": CsvSink,
    ".tsv": CsvSink,
}


def open_sink(path: PathLike, **options: Any) -> Sink:
    """The sink that writes files with this path's suffix; of a URL, the sink of its database or broker.

    `postgresql://host/name?table=documents` is a `SqlSink`, `nats://host/STREAM` a `NatsSink`; the path of a Delta
    table that exists is a `DeltaSink`.
    """
    if is_service(path):
        return open_service(str(path), **options)
    suffix = split_suffix(name_of(path))[0]
    if not suffix and _is_table(path):
        return DeltaSink(path, **options)
    makers = _BUILT_IN if suffix in _BUILT_IN else _with_plugins()
    if suffix not in makers:
        hint = "" if suffix else "; a new Delta table is written by DeltaSink (type: delta)"
        raise ConfigError(
            f"no sink writes {suffix or 'a path without a suffix'!r}; known: {', '.join(sorted(makers))}{hint}"
        )
    return makers[suffix](path, **options)  # type: ignore[no-any-return]


def _is_table(path: PathLike) -> bool:
    """True for the place of a Delta table that exists."""
    return (local_or_none(path) is not None or is_object_url(path)) and delta_log_at(path)


def _with_plugins() -> dict[str, Any]:
    """The formats of plugins too. Loaded only when needed: a broken plugin must not affect a JSONL file."""
    added = {suffix: found.sink for found in formats() if found.sink is not None for suffix in found.suffixes}
    return added | _BUILT_IN
