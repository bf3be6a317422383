"""Choose, drop, rename and retype columns, and the few column helpers the other transforms share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock._suggest import did_you_mean
from penstock.arrays.text import VIEWS, plain
from penstock.errors import ConfigError, SchemaError
from penstock.pipeline.stages import Transform


class Select(Transform):
    """Keep these columns, in this order."""

    def __init__(self, names: str | Iterable[str]) -> None:
        self.names = as_names(names)

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.select([position(batch, name) for name in self.names])

    def __repr__(self) -> str:
        return f"Select({one_or_list(self.names)})"


class Drop(Transform):
    """Remove these columns. A missing column is an error: most often it was misspelt."""

    def __init__(self, names: str | Iterable[str]) -> None:
        self.names = as_names(names)

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        gone = {position(batch, name) for name in self.names}
        kept = [i for i in range(batch.num_columns) if i not in gone]
        if not kept:
            raise SchemaError(f"{self!r} would leave no columns; the batch has only {batch.schema.names}")
        return batch.select(kept)

    def __repr__(self) -> str:
        return f"Drop({one_or_list(self.names)})"


class Rename(Transform):
    """Give columns new names: `Rename({"old": "new"})`. Their order stays."""

    def __init__(self, names: Mapping[str, str]) -> None:
        if not names:
            raise ValueError("names must map at least one old name to a new one, got {}")
        repeated = [name for name, n in Counter(names.values()).items() if n > 1]
        if repeated:
            raise ValueError(f"two columns cannot both become {repeated[0]!r}, got {dict(names)}")
        self.names = dict(names)

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        fields = list(batch.schema)
        for old, new in self.names.items():
            at = position(batch, old)
            fields[at] = fields[at].with_name(new)
        for name, n in Counter(field.name for field in fields).items():
            if n > 1:
                raise SchemaError(f"{self!r} would make {n} columns called {name!r}; drop or rename the other first")
        # rename_columns would lose the metadata of the schema.
        return pa.RecordBatch.from_arrays(batch.columns, schema=pa.schema(fields, metadata=batch.schema.metadata))

    def __repr__(self) -> str:
        return f"Rename({self.names})"


class Cast(Transform):
    """Change column types: `Cast({"age": "int32", "when": pa.date32()})`.

    A value that does not fit (too large, a fraction where an integer is expected, text that is no number) is an error
    with its row; nothing is truncated or wrapped. Rounding to a narrower float is fine, overflow to infinity is not.
    """

    def __init__(self, types: Mapping[str, pa.DataType | str]) -> None:
        if not types:
            raise ValueError("types must name at least one column, got {}")
        self.types = {name: as_type(dtype) for name, dtype in types.items()}

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for name, dtype in self.types.items():
            batch = replace(batch, name, _cast(column(batch, name), dtype, name))
        return batch

    def __repr__(self) -> str:
        return f"Cast({ {name: str(dtype) for name, dtype in self.types.items()} })"


def column(batch: pa.RecordBatch, name: str) -> pa.Array:
    """The column called `name`, or an error with the existing columns."""
    return batch.column(position(batch, name))


def position(batch: pa.RecordBatch, name: str) -> int:
    """Index of the column called `name`."""
    found: list[int] = batch.schema.get_all_field_indices(name)
    if len(found) == 1:
        return found[0]
    names = batch.schema.names
    if found:
        raise SchemaError(f"{len(found)} columns are called {name!r}; the batch has {names}; rename them at the source")
    raise SchemaError(f"column {name!r} not found; the batch has {names}{did_you_mean(name, names)}")


def replace(batch: pa.RecordBatch, name: str, array: pa.Array) -> pa.RecordBatch:
    """The batch with other values, and perhaps another type, in one column. Metadata stays."""
    at = position(batch, name)
    field = batch.schema.field(at).with_type(array.type)
    if array.null_count:
        field = field.with_nullable(True)
    return batch.set_column(at, field, array)


def append(batch: pa.RecordBatch, name: str, array: pa.Array) -> pa.RecordBatch:
    """The batch with one more column, whose name must be new."""
    if name in batch.schema.names:
        raise SchemaError(f"column {name!r} already exists; pass another name with into=..., or drop it first")
    return batch.append_column(name, array)


def like(array: pa.Array, dtype: pa.DataType) -> pa.Array:
    """Undo `plain`: the values in the layout the column had."""
    return array if array.type == dtype else array.cast(dtype)


def keep_rows(batch: pa.RecordBatch, keep: np.ndarray[Any, np.dtype[np.bool_]]) -> pa.RecordBatch:
    """The rows marked True."""
    # The bits are packed here: `pa.array` of a NumPy array imports pandas, which takes as long as 100,000 rows do.
    bits = pa.py_buffer(np.packbits(keep, bitorder="little"))
    mask = pa.Array.from_buffers(pa.bool_(), len(keep), [None, bits])
    return _chosen(batch, lambda rows: rows.filter(mask))


def take_rows(batch: pa.RecordBatch, order: np.ndarray[Any, np.dtype[np.int64]]) -> pa.RecordBatch:
    """The rows at these places, in this order."""
    places = pa.array(order)
    return _chosen(batch, lambda rows: rows.take(places))


def as_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """One column name or several, checked."""
    given = (names,) if isinstance(names, str) else tuple(names)
    if not given:
        raise ConfigError("at least one column name is needed, got none")
    for name in given:
        if not isinstance(name, str):
            raise ConfigError(f"column names must be strings, got {name!r}")
    repeated = [name for name, n in Counter(given).items() if n > 1]
    if repeated:
        raise ConfigError(f"column {repeated[0]!r} is named more than once in {list(given)}")
    return given


def as_type(dtype: pa.DataType | str) -> pa.DataType:
    """An Arrow type, or the type with that name: `"int32"`, `"string"`, `"timestamp[us]"`."""
    if isinstance(dtype, pa.DataType):
        return dtype
    try:
        return pa.type_for_alias(dtype)
    except (ValueError, TypeError):
        raise ValueError(
            f"{dtype!r} is not a type; pass a pa.DataType, or a name such as 'int32' or 'string'"
        ) from None


def one_or_list(names: tuple[str, ...]) -> str:
    """Names as the caller most likely wrote them: `'text'`, or `['title', 'text']`."""
    return repr(names[0]) if len(names) == 1 else repr(list(names))


def brief(value: Any) -> str:
    """The repr of a value, short enough for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _chosen(batch: pa.RecordBatch, choose: Callable[[pa.RecordBatch], pa.RecordBatch]) -> pa.RecordBatch:
    views = [i for i, field in enumerate(batch.schema) if field.type in VIEWS]
    if not views:
        return choose(batch)
    # Arrow can neither filter string views nor take from them.
    rows = batch
    for at in views:
        array = plain(batch.column(at))
        rows = rows.set_column(at, batch.schema.field(at).with_type(array.type), array)
    return choose(rows).cast(batch.schema)


def _cast(array: pa.Array, dtype: pa.DataType, name: str) -> pa.Array:
    array = plain(array)
    try:
        return _fitted(array, dtype)
    except pa.ArrowNotImplementedError:
        raise SchemaError(f"column {name!r} is {array.type}, which cannot be cast to {dtype}") from None
    except pa.ArrowInvalid as error:
        row = _first_unfit(array, dtype)
        raise SchemaError(
            f"column {name!r}, row {row} of the batch: {brief(array[row].as_py())} ({array.type}) does not fit {dtype}"
        ) from error


def _fitted(array: pa.Array, dtype: pa.DataType) -> pa.Array:
    narrow = pa.types.is_floating(dtype) and dtype != pa.float64()
    if not narrow or pa.types.is_integer(array.type):
        return array.cast(dtype)
    wide = array.cast(pa.float64())
    result = wide.cast(dtype)
    # Arrow checks integers for overflow, but lets a large float become infinity.
    if pc.any(pc.and_not(pc.is_inf(result.cast(pa.float64())), pc.is_inf(wide))).as_py():
        raise pa.ArrowInvalid(f"a value overflows {dtype}")
    return result


def _first_unfit(array: pa.Array, dtype: pa.DataType) -> int:
    """The first row that does not fit, by halving: Arrow does not name it."""
    start, stop = 0, len(array)
    while stop - start > 1:
        middle = (start + stop) // 2
        try:
            _fitted(array[start:middle], dtype)
            start = middle
        except pa.ArrowInvalid:
            stop = middle
    return start
