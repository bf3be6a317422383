"""Types of columns between databases and Arrow, in both directions.

Reading: `numeric(p, s)` is a decimal; `numeric` without a precision is text, because its values may have any number of
digits, and Arrow's decimals have one scale in a column. `json` and `jsonb` are `json`, `uuid` is `uuid`, arrays are
lists. What Arrow has no type for (`inet`, ranges, enums) is read as the text that the server prints.

Writing: integers without a sign become the next larger ones, structs and maps `json`, lists arrays where there are
arrays; SQLite, which has four types, takes decimals, dates and times as text, and lists as JSON.
"""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.ragged import is_any_list
from penstock.connections.sql import DUCKDB, POSTGRESQL, SQLITE, SqlConnection, SqlDialect
from penstock.errors import ConfigError, DataError, SchemaError

_PG_TYPE, _PG_MODE = b"POSTGRESQL:type", b"POSTGRESQL:typmod"
_MOST_DIGITS = 76
_SENT_AS = {"money": "numeric(20, 2)", "_money": "numeric[]", "oid": "bigint", "_oid": "bigint[]"}
_SENT_AS |= {"bit": "text", "bit[]": "text[]", "time with time zone": "text", "time with time zone[]": "text[]"}
"""Types whose values a driver would misread: that of PostgreSQL takes the numbers of `oid` for ones with a sign, and
money for its cents; that of DuckDB leaves out the zone of a time, and sends bits as it keeps them."""
_DAY_MICROSECONDS = 86_400_000_000
_FIRST_DAY = -2_440_588
"""First date of PostgreSQL, in days before 1970. What is before is 'infinity', or too late for Arrow, and wrapped."""
_NAMED_TEXT = {"uuid": pa.uuid(), "json": pa.json_()}
"""Types that the driver of DuckDB delivers as text."""
_KEY_TYPES = "whole numbers, text, dates, timestamps, uuid, decimals and bytes"


_DECLARED = {"INT": pa.int64(), "CHAR": pa.string(), "CLOB": pa.string(), "TEXT": pa.string(), "BLOB": pa.binary()}
_DECLARED |= {"REAL": pa.float64(), "FLOA": pa.float64(), "DOUB": pa.float64()}
"""Types of SQLite by a part of the declared one, in the order in which it looks for them."""


def declared_types(connection: SqlConnection, table: str) -> dict[str, pa.DataType | None]:
    """Types of the columns of a table of SQLite, as far as they were declared."""
    listed = connection.rows("SELECT name, type FROM pragma_table_info(?)", [table])
    return {
        name: next((found for part, found in _DECLARED.items() if part in kind.upper()), None) for name, kind in listed
    }


def with_server_type(field: pa.Field, kind: str) -> pa.Field:
    """The field with a note of its type on the server, for drivers that leave none."""
    return field.with_metadata({_PG_TYPE: kind.lower()})


def server_type(field: pa.Field) -> str:
    """Name of the type on the server, as the driver of PostgreSQL tells it; empty if it is not known."""
    return str((field.metadata or {}).get(_PG_TYPE, b"").decode())


def cast_for_reading(field: pa.Field) -> str | None:
    """Type that the server should send a column as, because Arrow has none for its own; None for others."""
    if server_type(field) in _SENT_AS:
        return _SENT_AS[server_type(field)]
    kind = field.type.value_type if pa.types.is_list(field.type) else field.type
    if not isinstance(kind, pa.OpaqueType) or kind.type_name == "numeric":
        return None
    return "text[]" if pa.types.is_list(field.type) else "text"


def selected(field: pa.Field, name: str, dialect: SqlDialect) -> str:
    """Column in a select list, with the quoted name, cast where Arrow has no type for it."""
    if dialect is POSTGRESQL and pa.types.is_struct(field.type.value_type if is_any_list(field.type) else field.type):
        return f"to_jsonb({name}) AS {name}"  # the driver leaves its fields as they are sent: money, oid, arrays
    kind = cast_for_reading(field)
    value = name if kind is None else f"CAST({name} AS {kind})"
    if dialect is POSTGRESQL and pa.types.is_list(field.type):
        # The driver reads such an array as a flat one. A text that is no number stops the query, and is its message.
        said = "column " + name.replace("'", "''") + " has an array of several dimensions; read it with query=, as "
        said += "to_jsonb(...): "
        refused = f"CASE WHEN array_ndims({name}) > 1 THEN CAST('{said}' || CAST({name} AS text) AS integer) END"
        value = f"CASE WHEN {refused} IS NULL THEN {value} END"
    return value if value == name else f"{value} AS {name}"


def check_times(batch: pa.RecordBatch, dialect: SqlDialect, where: str, row: int) -> None:
    """Refuse dates and times that Arrow has no value for: drivers make other ones of them."""
    for field, column in zip(batch.schema, batch.columns):
        if not _has_times(field.type):
            continue
        for values, rows in _flat_times(column, pa.array(range(len(column)), pa.int64())):
            bad, said = _bad_times(values, dialect)
            if pc.any(bad).as_py():
                place = row + rows[pc.index(bad, True).as_py()].as_py()
                raise DataError(f"column {field.name!r} {said}", file=where, row=place)


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_date32(kind) or pa.types.is_timestamp(kind) or pa.types.is_time64(kind))


def _has_times(kind: pa.DataType) -> bool:
    return _is_time(kind) or any(_has_times(kind.field(at).type) for at in range(kind.num_fields))


def _flat_times(column: pa.Array, rows: pa.Array) -> Iterator[tuple[pa.Array, pa.Array]]:
    """Dates and times in a column, also in structs, maps, lists and unions, with the row of each."""
    kind = column.type
    if pa.types.is_map(kind):
        column = column.cast(pa.list_(kind.field(0)))  # for which there are the functions
        kind = column.type
    if _is_time(kind):
        yield column, rows
    elif not _has_times(kind):
        return
    elif pa.types.is_struct(kind):
        for values in column.flatten():
            yield from _flat_times(values, rows)
    elif pa.types.is_union(kind) and kind.mode == "sparse":  # that of DuckDB
        # `type_codes` of a slice are those of the whole column.
        codes = pa.Array.from_buffers(pa.int8(), len(column), [None, column.buffers()[1]], offset=column.offset)
        for at, code in enumerate(kind.type_codes):
            chosen = pc.equal(codes, code)
            yield from _flat_times(column.field(at).filter(chosen), rows.filter(chosen))
    elif is_any_list(kind):
        yield from _flat_times(pc.list_flatten(column), rows.take(pc.list_parent_indices(column)))


def _bad_times(values: pa.Array, dialect: SqlDialect) -> tuple[pa.Array, str]:
    """Mask of the values that Arrow has no value for, and what they are."""
    kind = values.type
    days = pa.types.is_date32(kind)
    numbers = values.view(pa.int32() if days else pa.int64())
    if pa.types.is_time64(kind):
        said = "is the time 24:00:00, which Arrow has no value for; read it with query=, cast to text"
        return pc.greater_equal(numbers, _DAY_MICROSECONDS * (1000 if kind.unit == "ns" else 1)), said
    said = "is 'infinity', '-infinity' or a time after the year 294246, which Arrow has no value for; "
    said += "read it with query=, cast to text, or null in its place: nullif(..., 'infinity')"
    if dialect is POSTGRESQL:
        return pc.less(numbers, _FIRST_DAY * (1 if days else _DAY_MICROSECONDS)), said
    most = (1 << (31 if days else 63)) - 1
    return pc.or_(pc.equal(numbers, most), pc.equal(numbers, -most)), said


def read_type(field: pa.Field) -> pa.DataType:
    """Arrow type that a column is delivered with."""
    kind = field.type
    if isinstance(kind, pa.OpaqueType) and kind.type_name == "numeric":
        mode = int((field.metadata or {}).get(_PG_MODE, b"-1"))
        precision, scale = (mode - 4) >> 16, ((mode - 4) & 0x7FF ^ 0x400) - 0x400
        if mode < 4 or precision > _MOST_DIGITS or not 0 <= scale <= precision:
            return pa.string()
        return pa.decimal128(precision, scale) if precision <= 38 else pa.decimal256(precision, scale)
    if pa.types.is_list(kind) and isinstance(kind.value_type, pa.OpaqueType):
        return pa.list_(pa.string())
    if isinstance(kind, pa.OpaqueType):
        return kind.storage_type
    if pa.types.is_string(kind) and server_type(field) in _NAMED_TEXT:
        return _NAMED_TEXT[server_type(field)]
    return pa.list_(kind.value_type) if pa.types.is_list(kind) and kind.value_field.metadata else kind


def read_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of a result as it is delivered, without the driver's notes."""
    if len(set(schema.names)) < len(schema.names):
        twice = next(name for name in schema.names if schema.names.count(name) > 1)
        raise ConfigError(f"two columns of the query are called {twice!r}; give one another name with AS")
    return pa.schema([pa.field(field.name, read_type(field)) for field in schema])


def read_batch(batch: pa.RecordBatch, schema: pa.Schema, where: str, row: int) -> pa.RecordBatch:
    """A batch of the driver with the types of `read_schema`."""
    if batch.schema.equals(schema):
        return batch
    columns = [_read_column(batch.column(at), field, where, row) for at, field in enumerate(schema)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _read_column(column: Any, field: pa.Field, where: str, row: int) -> Any:
    if column.type.equals(field.type):
        return column
    if isinstance(column.type, pa.OpaqueType):
        column = column.storage
    elif pa.types.is_list(column.type) and isinstance(column.type.value_type, pa.OpaqueType):
        return pa.ListArray.from_arrays(column.offsets, column.values.storage, mask=column.is_null())
    if isinstance(field.type, pa.UuidType) and pa.types.is_string(column.type):
        return _parse_uuids(column)
    try:
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        if pa.types.is_decimal(field.type):
            text = pc.index_in(pc.utf8_lower(column), pa.array(["nan", "infinity", "-infinity", "inf", "-inf"]))
            bad = pc.index(pc.is_valid(text), True).as_py()
            if bad >= 0:
                raise DataError(
                    f"column {field.name!r} is {column[bad].as_py()!r}, which no decimal can be; read it with "
                    "query=, cast to double precision or to text",
                    file=where,
                    row=row + bad,
                ) from error
        raise DataError(
            f"column {field.name!r} has values of the type {column.type} now, expected {field.type} ({error})",
            file=where,
            row=row,
        ) from error


def _parse_uuids(column: Any) -> Any:
    """Text of UUIDs as their bytes, without an object for each."""
    filled = pc.fill_null(column, str(uuid.UUID(int=0)))
    digits = pc.binary_join(pa.ListArray.from_arrays([0, len(filled)], filled), "")[0].as_py()
    data = pa.py_buffer(bytes.fromhex(digits.replace("-", "")))
    valid = pc.is_valid(column).buffers()[1] if column.null_count else None
    flat = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(column), [valid, data])
    return pa.ExtensionArray.from_storage(pa.uuid(), flat)


# -- keys ------------------------------------------------------------------------------------------------------------


def key_text(value: Any) -> str:
    """Value of a key as text, for a state and for PostgreSQL, which parses it."""
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    return value.isoformat() if isinstance(value, (datetime.date, datetime.datetime)) else str(value)


def key_value(text: str, kind: pa.DataType) -> Any:
    """Value that `key_text` made text of."""
    if pa.types.is_integer(kind):
        return int(text)
    if pa.types.is_floating(kind):
        return float(text)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return bytes.fromhex(text.removeprefix("\\x"))
    if pa.types.is_decimal(kind):
        return decimal.Decimal(text)
    if pa.types.is_date(kind):
        return datetime.date.fromisoformat(text)
    if pa.types.is_timestamp(kind):
        return datetime.datetime.fromisoformat(text)
    return text


def check_key(field: pa.Field) -> None:
    """Refuse a key that has no order, or one that text does not keep."""
    kind = field.type
    tests = (
        pa.types.is_integer,
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_date,
        pa.types.is_decimal,
        pa.types.is_binary,
    )
    micros = pa.types.is_timestamp(kind) and kind.unit != "ns"
    if not (micros or isinstance(kind, pa.UuidType) or any(test(kind) for test in tests)):
        raise ConfigError(f"key {field.name!r} has the type {kind}; a key is one of {_KEY_TYPES}")


# -- writing ---------------------------------------------------------------------------------------------------------

_INTEGERS = {
    pa.int8(): "smallint",
    pa.uint8(): "smallint",
    pa.int16(): "smallint",
    pa.uint16(): "integer",
    pa.int32(): "integer",
    pa.uint32(): "bigint",
    pa.int64(): "bigint",
}
_NAMED_VALUES = {pa.UuidType: "uuid", pa.JsonType: "jsonb"}
"""Values of lists that the driver of PostgreSQL cannot send: they go as text, which the server casts."""


def written_type(field: pa.Field, dialect: SqlDialect) -> str:
    """Type of a column in CREATE TABLE, after `written_table` has converted it."""
    if dialect is POSTGRESQL and is_any_list(field.type) and type(field.type.value_type) in _NAMED_VALUES:
        return f"{_NAMED_VALUES[type(field.type.value_type)]}[]"
    return _sql_type(_written(field, dialect), dialect)


def written_table(table: pa.Table, dialect: SqlDialect) -> pa.Table:
    """Rows as the driver takes them."""
    for at, field in enumerate(table.schema):
        kind = _written(field, dialect)
        if not kind.equals(field.type):
            table = table.set_column(at, pa.field(field.name, kind), _write_column(table.column(at), kind))
    return table


def _written(field: pa.Field, dialect: SqlDialect) -> pa.DataType:
    kind = field.type
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _written(pa.field(field.name, kind.value_type), dialect)
    if isinstance(kind, (pa.JsonType, pa.UuidType)):
        return kind if dialect is not SQLITE else pa.string()
    if isinstance(kind, pa.BaseExtensionType):
        return _written(pa.field(field.name, kind.storage_type), dialect)
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_uint64(kind):
        return pa.decimal128(20, 0) if dialect is not SQLITE else pa.int64()
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_date64(kind):
        return pa.date32()
    if pa.types.is_timestamp(kind) and dialect is not SQLITE:
        return pa.timestamp("us", kind.tz)
    if pa.types.is_time(kind) and dialect is not SQLITE:
        return pa.time64("us")
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if is_any_list(kind) and dialect is not SQLITE:
        inner = _written(pa.field(field.name, kind.value_type), dialect)
        if dialect is POSTGRESQL and type(inner) in _NAMED_VALUES:
            return pa.list_(pa.string())
        if dialect is DUCKDB or not (pa.types.is_nested(inner) or isinstance(inner, pa.BaseExtensionType)):
            return pa.list_(inner)
    if pa.types.is_nested(kind):
        if dialect is DUCKDB and not is_any_list(kind):
            return kind
        return pa.json_() if dialect is not SQLITE else pa.string()
    if dialect is SQLITE and (pa.types.is_decimal(kind) or pa.types.is_temporal(kind)):
        return pa.string()
    return kind


def _write_column(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    have = column.type
    if isinstance(have, (pa.UuidType, pa.JsonType)) and pa.types.is_string(kind):
        texts = [None if value is None else str(value) for value in column.to_pylist()]
        return pa.chunked_array([texts], kind)
    if is_any_list(have) and is_any_list(kind) and type(have.value_type) in _NAMED_VALUES:
        rows = [None if row is None else [None if v is None else str(v) for v in row] for row in column.to_pylist()]
        return pa.chunked_array([rows], kind)
    if pa.types.is_nested(have) and not pa.types.is_nested(kind):
        texts = [None if value is None else orjson.dumps(value, _plain).decode() for value in column.to_pylist()]
        flat = pa.chunked_array([texts], pa.string())
        return flat if pa.types.is_string(kind) else flat.cast(kind)
    if isinstance(have, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], have.storage_type)
    if pa.types.is_timestamp(have) and pa.types.is_string(kind):
        return pa.chunked_array([[None if v is None else v.isoformat() for v in column.to_pylist()]], kind)
    try:
        return column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(f"values of {have} cannot be written as {kind}: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _sql_type(kind: pa.DataType, dialect: SqlDialect) -> str:
    sqlite = dialect is SQLITE
    if pa.types.is_integer(kind):
        return "INTEGER" if sqlite else _INTEGERS[kind]
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision}, {kind.scale})"
    if pa.types.is_list(kind):
        return f"{_sql_type(kind.value_type, dialect)}[]"
    if pa.types.is_struct(kind):
        fields = (f'"{field.name.replace(chr(34), chr(34) * 2)}" {_sql_type(field.type, dialect)}' for field in kind)
        return f"STRUCT({', '.join(fields)})"
    if pa.types.is_map(kind):
        return f"MAP({_sql_type(kind.key_type, dialect)}, {_sql_type(kind.item_type, dialect)})"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz is None else "timestamp with time zone"
    if isinstance(kind, pa.JsonType):
        return "jsonb" if dialect is POSTGRESQL else "json"
    if isinstance(kind, pa.UuidType):
        return "uuid"
    named: Sequence[tuple[Any, str]] = (
        (pa.types.is_boolean, "INTEGER" if sqlite else "boolean"),
        (pa.types.is_float32, "REAL" if sqlite else "real"),
        (pa.types.is_floating, "REAL" if sqlite else "double precision"),
        (pa.types.is_string, "TEXT" if sqlite else "text"),
        (pa.types.is_binary, "bytea" if dialect is POSTGRESQL else "BLOB"),
        (pa.types.is_date, "date"),
        (pa.types.is_time, "time"),
        (pa.types.is_duration, "interval"),
        (pa.types.is_interval, "interval"),
    )
    for test, name in named:
        if test(kind):
            return name
    raise SchemaError(f"no column of {dialect.name} holds {kind}; convert it before the sink")
