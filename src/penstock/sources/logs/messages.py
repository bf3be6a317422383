"""Messages of a log as rows: JSON objects, text, bytes, or Arrow record batches."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from penstock.connections.logs import Log, Messages
from penstock.errors import ConfigError, SchemaError
from penstock.files.json_values import loads
from penstock.files.listing import FoundFiles
from penstock.pipeline.chain import describe_difference
from penstock.pipeline.stages import Block, Origin
from penstock.sources.file_source import check_columns, project
from penstock.sources.json_types import TypeConflictError, infer, merge
from penstock.sources.jsonl import JsonlSource

FORMATS = ("json", "text", "bytes", "arrow")
METADATA: dict[str, pa.DataType] = {
    "partition": pa.int32(),
    "offset": pa.int64(),
    "key": pa.binary(),
    "timestamp": pa.timestamp("ms", "UTC"),
    "headers": pa.map_(pa.string(), pa.string()),
}
_COLUMNS = {"text": pa.field("text", pa.string()), "bytes": pa.field("value", pa.binary())}
_SHOWN_BYTES = 80
_NEWLINE, _RETURN = b"\n\r"


@dataclass(frozen=True, slots=True)
class BadMessage:
    """A message that is no row."""

    index: int
    """Number among the messages that were decoded."""
    kind: str
    reason: str
    data: bytes | None


@dataclass(frozen=True, slots=True)
class MessageRows:
    """Rows of some messages, and the messages that are none."""

    batch: pa.RecordBatch
    owners: npt.NDArray[np.int64]
    """For each row the number of its message."""
    bad: list[BadMessage]


class MessageDecoder:
    """Makes rows of messages; the schema is given, or learned once from the first messages and then held."""

    def __init__(
        self,
        log: Log,
        form: str,
        schema: pa.Schema | None,
        columns: Sequence[str] | None,
        metadata: Sequence[str] | Mapping[str, str],
    ) -> None:
        if form not in FORMATS:
            raise ConfigError(f"format must be one of {', '.join(map(repr, FORMATS))}, got {form!r}")
        self._log, self._form, self._wanted = log, form, check_columns(columns)
        self.metadata = _checked(metadata)
        if form in _COLUMNS and (schema is not None or columns is not None):
            raise ConfigError(f"format={form!r} has one column, {_COLUMNS[form].name!r}; omit schema= and columns=")
        self._json = _JsonMessages(schema, self._wanted) if form == "json" else None
        self.given = schema is not None or form in _COLUMNS
        self.schema: pa.Schema | None = None
        """Columns of the rows, metadata included; None before they are known."""
        self.found = pa.schema([])
        """Columns of the values, as a state keeps them."""
        if form in _COLUMNS:
            self.learned(pa.schema([_COLUMNS[form]]))
        elif schema is not None:
            self.learned(project(schema, self._wanted, "the schema"))

    def learned(self, values: pa.Schema) -> None:
        """Take the columns of the values, as they are given or come from a state."""
        self.found = values
        if self._json is not None:
            values = self._json.take(values)
        self._values = values
        for column in self.metadata.values():
            if column in values.names:
                raise ConfigError(
                    f"{self._log.name}: the messages have a field {column!r}; give the column another name, as in "
                    f"metadata={{{next(iter(self.metadata))!r}: '_{column}'}}"
                )
        own = [pa.field(name, self._kind(what)) for what, name in self.metadata.items()]
        self.schema = pa.schema([*values, *own])

    def keep_json(self, columns: Mapping[str, Collection[str]]) -> bool:
        """As `JsonlSource.keep_json`."""
        kept = self._json is not None and self._json.keep_json(columns)
        if kept and not self.given:
            self.schema = None
        return kept

    def learn(self, messages: Messages) -> None:
        """Take the columns of the first messages; there may be none."""
        if self._json is not None:
            try:
                found = self._json.learn([value for value in messages.values if value])
            except SchemaError as error:
                raise SchemaError(f"{self._log.name}, first messages: {error}") from error
        else:
            found = pa.schema([])
            for value in messages.values:
                batches = _ipc(value or b"")
                if not isinstance(batches, str):
                    found = batches.schema
                    break
            found = project(found, self._wanted, self._log.name) if len(found) else found
        self.learned(found)

    def decode(self, messages: Messages, partition: int) -> MessageRows:
        """Rows of messages, in order."""
        assert self.schema is not None
        if self._json is not None:
            rows = self._json.decode(messages.values)
        elif self._form == "arrow":
            rows = self._decode_arrow(messages.values)
        else:
            rows = self._decode_plain(messages.values)
        if not self.metadata:
            return rows
        own = [self._column(what, messages, partition).take(pa.array(rows.owners)) for what in self.metadata]
        return MessageRows(
            pa.RecordBatch.from_arrays([*rows.batch.columns, *own], schema=self.schema), rows.owners, rows.bad
        )

    def _decode_plain(self, values: Sequence[bytes | None]) -> MessageRows:
        column = pa.array(values, pa.binary())
        bad: list[BadMessage] = []
        try:
            made = column.cast(self._values.field(0).type)
        except pa.ArrowInvalid:
            bad = [
                BadMessage(at, "invalid UTF-8", f"not valid UTF-8: {value[:_SHOWN_BYTES]!r}", value)
                for at, value in enumerate(values)
                if value is not None and not _is_text(value)
            ]
            made = None
        bad += [_without_value(at) for at, value in enumerate(values) if value is None]
        bad.sort(key=lambda one: one.index)
        owners = np.delete(np.arange(len(values)), [one.index for one in bad])
        if made is None or bad:
            made = column.take(pa.array(owners)).cast(self._values.field(0).type)
        return MessageRows(pa.RecordBatch.from_arrays([made], schema=self._values), owners, bad)

    def _decode_arrow(self, values: Sequence[bytes | None]) -> MessageRows:
        tables: list[pa.Table] = []
        owners: list[npt.NDArray[np.int64]] = []
        bad: list[BadMessage] = []
        for at, value in enumerate(values):
            found = _ipc(value) if value is not None else "the message has no value"
            if isinstance(found, pa.Table):
                found = self._fitted(found)
            if isinstance(found, str):
                bad.append(BadMessage(at, "no Arrow data", found, value))
                continue
            tables.append(found)
            owners.append(np.full(found.num_rows, at, np.int64))
        table = pa.concat_tables(tables).combine_chunks() if tables else self._values.empty_table()
        batches = table.to_batches()
        batch = batches[0] if batches else pa.RecordBatch.from_pylist([], schema=self._values)
        return MessageRows(batch, np.concatenate([np.zeros(0, np.int64), *owners]), bad)

    def _fitted(self, table: pa.Table) -> pa.Table | str:
        table = table.replace_schema_metadata(None)
        if table.schema.equals(self._values):
            return table
        try:
            return table.select(self._values.names).cast(self._values)
        except (KeyError, pa.ArrowException):
            return f"its columns are others than expected: {describe_difference(self._values, table.schema)}"

    def _kind(self, what: str) -> pa.DataType:
        spelled_as_text = what == "offset" and not self._log.spell(1).isdigit()
        return pa.string() if spelled_as_text else METADATA[what]

    def _column(self, what: str, messages: Messages, partition: int) -> pa.Array:
        kind = self._kind(what)
        match what:
            case "partition":
                return pa.array(np.full(len(messages), partition, np.int32))
            case "offset":
                offsets: Any = messages.offsets
                return pa.array(map(self._log.spell, offsets) if pa.types.is_string(kind) else offsets, kind)
            case "key":
                return pa.array(messages.keys, kind)
            case "timestamp":
                return pa.array(messages.times, pa.int64()).cast(kind)
        return pa.array([list(each.items()) if each else [] for each in messages.headers], kind)


class _JsonMessages(JsonlSource):
    """Parser of JSON Lines over messages: each is a line."""

    format_name = "JSON"

    def __init__(self, schema: pa.Schema | None, columns: list[str] | None) -> None:
        super().__init__(FoundFiles([], (), []), schema=schema, columns=columns)

    def take(self, schema: pa.Schema) -> pa.Schema:
        if not self._given:
            self._learn(schema)
        return self.schema

    def _learn(self, found: pa.Schema) -> None:
        self.found = found
        super()._learn(found)

    def learn(self, values: Sequence[bytes]) -> pa.Schema:
        lines = [line for value in values if (line := _line(value)) is not None]
        if not lines:
            return pa.schema([])
        self._learn_from(self._lines(lines), self._columns)
        return self.found

    def _scan_rows(self, block: Block, known: pa.DataType) -> pa.DataType:
        """Types of most messages, of each field: one message of another type is a bad row, and stops no run."""
        votes: dict[str, list[tuple[pa.DataType, int]]] = {field.name: [(field.type, 1)] for field in known}
        conflicts: dict[str, TypeConflictError] = {}
        for line in bytes(block.data).splitlines():
            try:
                row = loads(line)
            except ValueError:
                continue  # reported in its place, when the rows are read
            for name, value in row.items() if isinstance(row, dict) else ():
                found = votes.setdefault(name, [])
                if value is None or (self._columns is not None and name not in self._columns):
                    continue
                try:
                    _vote(found, infer(value, name), name)
                except TypeConflictError as error:  # inside of the value
                    conflicts[name] = error
        for name, conflict in conflicts.items():
            if not votes[name]:
                raise SchemaError(
                    f"field {conflict.path!r} has values of {conflict.first} and of {conflict.second} in one message; "
                    "make the data agree, or pass columns= without it"
                ) from None
        kinds = {name: max(found, key=lambda one: one[1])[0] if found else pa.null() for name, found in votes.items()}
        return pa.struct(list(kinds.items()))

    def decode(self, values: Sequence[bytes | None]) -> MessageRows:  # type: ignore[override]
        if (fast := self._decode_lines(values)) is not None:
            return fast
        bad: list[BadMessage] = []
        lines, owners = [], []
        for at, value in enumerate(values):
            line = _line(value) if value else None
            if line is None:
                bad.append(_without_value(at) if not value else _not_json(at, value))
                continue
            lines.append(line)
            owners.append(at)
        if not lines:
            return MessageRows(self._none(), np.zeros(0, np.int64), bad)
        decoded, numbers = self._decode(self._lines(lines)), np.array(owners, np.int64)
        bad += [
            BadMessage(int(numbers[one.row or 0]), one.kind, one.reason, values[int(numbers[one.row or 0])])
            for one in decoded.rejected
        ]
        bad.sort(key=lambda one: one.index)
        kept = numbers if decoded.rows is None else numbers[list(decoded.rows)]
        return MessageRows(decoded.batch, kept, bad)

    def _decode_lines(self, values: Sequence[bytes | None]) -> MessageRows | None:
        """Rows of messages that are lines already and all good, as nearly always; None for others."""
        if not all(values):
            return None
        block = self._lines(values)  # type: ignore[arg-type]
        data = np.frombuffer(block.data, np.uint8)
        if np.count_nonzero(data == _NEWLINE) != len(values) or (data == _RETURN).any():
            return None
        decoded = self._decode(block)
        whole = not decoded.rejected and decoded.batch.num_rows == len(values)
        return MessageRows(decoded.batch, np.arange(len(values)), []) if whole else None

    def _lines(self, lines: Sequence[bytes]) -> Block:
        data = pa.py_buffer(b"\n".join(lines) + b"\n")
        meta = {"records": len(lines), "file": 0, "layout": self._layout(0)}
        return Block(Origin("messages"), data, data.size, meta)


def _vote(votes: list[tuple[pa.DataType, int]], kind: pa.DataType, name: str) -> None:
    """Count a type with those that it goes together with."""
    for at, (other, count) in enumerate(votes):
        with contextlib.suppress(TypeConflictError):
            votes[at] = (merge(other, kind, name), count + 1)
            return
    votes.append((kind, 1))


def _line(value: bytes) -> bytes | None:
    """The message as one line; None if it is blank, or no JSON in which a newline is space."""
    if b"\n" not in value and b"\r" not in value:
        return value if not value.isspace() else None
    try:
        orjson.loads(value)
    except ValueError:
        return None
    return value.replace(b"\n", b" ").replace(b"\r", b" ")


def _not_json(index: int, value: bytes) -> BadMessage:
    return BadMessage(index, "invalid JSON", f"not valid JSON: {value[:_SHOWN_BYTES]!r}", value)


def _without_value(index: int) -> BadMessage:
    return BadMessage(index, "no value", "the message has no value", None)


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _ipc(value: bytes) -> pa.Table | str:
    """The rows of a stream or file of Arrow IPC; the reason if it is none."""
    try:
        if value[:6] == b"ARROW1":
            return pa.ipc.open_file(pa.py_buffer(value)).read_all()
        return pa.ipc.open_stream(pa.py_buffer(value)).read_all()
    except (pa.ArrowException, OSError) as error:
        return f"not Arrow IPC ({error}): {value[:_SHOWN_BYTES]!r}"


def _checked(metadata: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    if isinstance(metadata, str):
        raise ConfigError(f"metadata must be a list of names, or a dict of name and column, got {metadata!r}")
    named = dict(metadata) if isinstance(metadata, Mapping) else {name: name for name in metadata}
    for name in named:
        if name not in METADATA:
            raise ConfigError(f"metadata knows {', '.join(METADATA)}; got {name!r}")
    return named
