"""Conversion of tables of any kind to Arrow tables, and of rows to dicts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from operator import itemgetter
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from penstock.errors import ConfigError, DataError, SchemaError
from penstock.templates.values import FineDuration, FineMoment, NoText, as_value, is_text, plain_text

MixedTypes = Literal["error", "text"]
"""Treatment of a column with values of several types: raise, or convert each value to text."""

_READ_ROWS = 65_536
_NUMBERS = (int, float)


def as_table(data: Any, *, mixed: MixedTypes = "error") -> pa.Table:
    """Arrow table of a pandas or Polars frame, Arrow data, a mapping of columns, rows as dicts, or a file.

    Files are CSV, Parquet or JSONL. Arrow and Polars data, and most of a pandas frame, are not copied. Column names
    become text and must differ; the index of a pandas frame is dropped. Templates treat NaN as missing.
    """
    if mixed not in get_args(MixedTypes):
        raise ConfigError(f"mixed must be 'error' or 'text', got {mixed!r}")
    return _distinct_names(_table(data, mixed))


def as_row(row: Any) -> dict[str, Any]:
    """Dict of plain Python values of a row: a pandas Series, a mapping, a named tuple, an Arrow table of one row.

    NaN, NaT and pd.NA are None.
    """
    cells = list(_cells(row))
    twice = [name for name, count in Counter(name for name, _ in cells).items() if count > 1]
    if twice:
        raise SchemaError(_twice(twice[0], [name for name, _ in cells]))
    found = {}
    for name, value in cells:
        try:
            found[name] = as_value(value)
        except NoText as reason:
            raise DataError(f"column {name!r}: {reason}", data=value) from None
    return found


def _table(data: Any, mixed: MixedTypes) -> pa.Table:
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if isinstance(data, (str, os.PathLike)):
        return _read(data)
    if _is_pandas(data, "DataFrame"):
        return _from_pandas(data, mixed)
    if _is_pandas(data, "Series") or (isinstance(data, tuple) and hasattr(data, "_fields")):
        raise SchemaError(
            f"expected a table, got one row, a {type(data).__name__}; see convert_row, or put it in a list"
        )
    if hasattr(data, "__arrow_c_stream__"):
        return _from_stream(data)
    if hasattr(data, "next_batch"):
        return _drain(data)
    if isinstance(data, np.ndarray) and data.dtype.names:
        data = {name: data[name] for name in data.dtype.names}
    if isinstance(data, Mapping):
        return _from_columns(data, mixed)
    if isinstance(data, Iterable) and not isinstance(data, np.ndarray):
        return _from_rows(list(data), mixed)
    hint = "; call collect() on it first" if hasattr(data, "collect") else ""
    raise SchemaError(
        f"expected a pandas or Polars frame, an Arrow table, a mapping of columns, a list of rows or a path, "
        f"got {type(data).__name__}{hint}"
    )


def _read(path: str | os.PathLike[str]) -> pa.Table:
    from penstock.sources.by_suffix import open_source  # frames in memory need none of the formats

    source = open_source(path)
    try:
        return _drain(source)
    finally:
        if hasattr(source, "close"):
            source.close()


def _drain(source: Any) -> pa.Table:
    batches = []
    while (batch := source.next_batch(_READ_ROWS)) is not None:
        batches.append(batch)
    schema = batches[0].schema if batches else getattr(source, "schema", None)
    return pa.Table.from_batches(batches, schema) if schema is not None else pa.table({})


def _is_pandas(data: Any, name: str) -> bool:
    """True for a pandas object, by its class, so that pandas need not be installed."""
    return any(c.__module__.partition(".")[0] == "pandas" and c.__name__ == name for c in type(data).__mro__)


def _from_stream(data: Any) -> pa.Table:
    for name in getattr(data, "columns", ()):
        if isinstance(name, str) and "\0" in name:  # ends a name in C, and makes Polars abort the process
            raise SchemaError(f"the column {name!r} has a zero byte in its name; rename it")
    return pa.table(data)


def _from_pandas(frame: Any, mixed: MixedTypes) -> pa.Table:
    names = [str(name) for name in frame.columns]
    for name, count in Counter(names).items():
        if count > 1:
            raise SchemaError(_twice(name, names))
    columns = [_from_series(frame.iloc[:, at], name, mixed) for at, name in enumerate(names)]
    return _assembled(names, columns)


def _from_series(series: Any, name: str, mixed: MixedTypes) -> pa.Array | pa.ChunkedArray:
    try:
        array = pa.Array.from_pandas(series)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return _column(list(series), name, mixed)
    return _column(list(series), name, mixed) if _is_guessed(series, array.type) else array


def _is_guessed(series: Any, kind: pa.DataType) -> bool:
    """True if Arrow converted Python objects of several types to one: times lose the zone, booleans become numbers."""
    held = getattr(series.dtype, "categories", series)
    if held.dtype != object:
        return False
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if is_text(kind):
        return False
    clock = pa.types.is_timestamp(kind) or pa.types.is_duration(kind)  # zones and nanoseconds are lost too
    return clock or len(set(map(type, held)) - {type(None)}) > 1


def _from_columns(columns: Mapping[Any, Any], mixed: MixedTypes) -> pa.Table:
    arrays = []
    for name, values in columns.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise SchemaError(
                f"column {str(name)!r} is {values!r:.80}, expected its values in a list or an array; "
                "for one row see convert_row"
            )
        if isinstance(values, (pa.Array, pa.ChunkedArray)):
            arrays.append(values)
        elif _is_pandas(values, "Series"):
            arrays.append(_from_series(values, str(name), mixed))
        elif isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "biufMm":
            arrays.append(pa.array(values, from_pandas=True))
        else:
            arrays.append(_column(list(values), str(name), mixed))
    return _assembled([str(name) for name in columns], arrays)


def _from_rows(rows: Sequence[Any], mixed: MixedTypes) -> pa.Table:
    found = [as_row(row) for row in rows]
    names = list(dict.fromkeys(name for row in found for name in row))
    return _assembled(names, [_column([row.get(name) for row in found], name, mixed) for name in names])


def _assembled(names: Sequence[str], columns: Sequence[Any]) -> pa.Table:
    lengths = {name: len(column) for name, column in zip(names, columns)}
    if len(set(lengths.values())) > 1:
        (short, few), (long, many) = min(lengths.items(), key=itemgetter(1)), max(lengths.items(), key=itemgetter(1))
        raise SchemaError(f"columns must be equally long: {short!r} has {few} values, {long!r} has {many}")
    return pa.Table.from_arrays(list(columns), names=list(names))


def _column(values: Sequence[Any], name: str, mixed: MixedTypes) -> pa.Array:
    """Python values as an array; `mixed` decides about values of several types."""
    cells = [_cell(value, name, row) for row, value in enumerate(values)]
    kinds = {_kind(cell): row for row, cell in reversed(list(enumerate(cells))) if cell is not None}
    reason: Exception | None = None
    if len(kinds) <= 1:
        try:
            return pa.array(cells, from_pandas=True)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            reason = error
    if mixed == "text":
        return pa.array([_mixed_text(cell, name, row) for row, cell in enumerate(cells)], pa.large_string())
    if reason is None:
        (first, a), (second, b) = sorted(kinds.items(), key=itemgetter(1))[:2]
        raise SchemaError(
            f"column {name!r} has several types: {first} in row {a} ({cells[a]!r:.40}) and {second} in row {b} "
            f"({cells[b]!r:.40}); convert them to one, or pass mixed='text'"
        )
    raise SchemaError(f"column {name!r} cannot be converted to Arrow: {reason}; pass mixed='text'") from reason


def _cell(value: Any, name: str, row: int) -> Any:
    try:
        return as_value(value)
    except NoText as reason:
        raise DataError(f"column {name!r}, row {row}: {reason}", row=row, data=value) from None


def _kind(value: Any) -> str:
    """Name of a type; integers and floats are one type, and lists and tuples; timestamps differ by zone."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, _NUMBERS):
        return "number"
    if isinstance(value, FineDuration):
        return "timedelta"
    value = value.moment if isinstance(value, FineMoment) else value
    if isinstance(value, datetime) and value.tzinfo is not None:
        return f"datetime in {value.tzinfo}"
    return "list" if isinstance(value, tuple) else type(value).__name__


def _mixed_text(value: Any, name: str, row: int) -> str | None:
    try:
        return None if value is None else plain_text(value)
    except NoText as reason:
        raise DataError(f"column {name!r}, row {row}: {reason}", row=row, data=value) from None


def _cells(row: Any) -> Iterable[tuple[str, Any]]:
    if _is_pandas(row, "Series"):
        # Iterating over a Series of narrow floats would widen them, and 0.1 would be 0.10000000149011612.
        narrow = getattr(row.dtype, "kind", "") == "f" and getattr(row.dtype, "itemsize", 8) < 8
        values = row.to_numpy() if narrow else row
        return ((str(name), value) for name, value in zip(row.index, values))
    if isinstance(row, Mapping):
        return ((str(name), value) for name, value in row.items())
    if isinstance(row, tuple) and hasattr(row, "_fields"):
        return zip(row._fields, row)
    if isinstance(row, (pa.Table, pa.RecordBatch)):
        if row.num_rows != 1:
            raise SchemaError(f"expected one row, got a {type(row).__name__} of {row.num_rows}; see convert_batch")
        return zip(row.schema.names, (column[0] for column in row.columns))
    if isinstance(row, np.void) and row.dtype.names:
        return zip(row.dtype.names, row.item())
    raise SchemaError(f"expected a row as a pandas Series or a mapping, got {type(row).__name__}; see convert_batch")


def _distinct_names(table: pa.Table) -> pa.Table:
    names = table.schema.names
    for name, count in Counter(names).items():
        if count > 1:
            raise SchemaError(_twice(name, names))
    return table


def _twice(name: str, names: Sequence[str]) -> str:
    return f"{names.count(name)} columns are called {name!r}; rename all but one; the columns are {list(names)}"
