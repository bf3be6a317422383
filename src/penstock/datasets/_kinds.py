"""Columns made what a spec says they are; a value that cannot be is named with its column and row."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.datasets._spec import ColumnKind
from penstock.errors import DataError

__all__ = ["as_kinds", "is_text"]

_TRUE, _FALSE = ("true", "yes", "y", "t", "1"), ("false", "no", "n", "f", "0")


def as_kinds(table: pa.Table, kinds: Mapping[str, ColumnKind | None], file: str) -> pa.Table:
    """The table with the named columns as numbers, booleans, dates or texts; other kinds leave a column as it is."""
    for name, kind in kinds.items():
        place = table.schema.get_field_index(name)
        if place < 0 or kind in (None, "categorical", "id", "ignore"):
            continue
        column = table.column(place)
        made = _AS[kind](column, name, file)
        if made is not column:
            table = table.set_column(place, name, made)
    return table


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _numeric(column: pa.ChunkedArray, name: str, file: str) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind) or pa.types.is_decimal(kind):
        return column
    if pa.types.is_boolean(kind):
        return column.cast(pa.int64())
    return _cast(column, pa.float64(), name, file, "a number")


def _date(column: pa.ChunkedArray, name: str, file: str) -> pa.ChunkedArray:
    if pa.types.is_temporal(column.type) or pa.types.is_null(column.type):
        return column
    return _cast(column, pa.timestamp("us"), name, file, "an ISO date such as 2024-05-17")


def _boolean(column: pa.ChunkedArray, name: str, file: str) -> pa.ChunkedArray:
    if pa.types.is_boolean(column.type) or pa.types.is_null(column.type):
        return column
    texts = pc.utf8_lower(pc.utf8_trim_whitespace(_plain_texts(column)))
    true, false = (pc.is_in(texts, pa.array(words)) for words in (_TRUE, _FALSE))
    wrong = pc.and_(pc.is_valid(texts), pc.invert(pc.or_(true, false)))
    _refuse(column, wrong, name, file, "a boolean (true, yes, 1; false, no, 0)")
    return pc.if_else(pc.is_valid(texts), true, pa.scalar(None, pa.bool_()))


def _text(column: pa.ChunkedArray, name: str, file: str) -> pa.ChunkedArray:
    return column if is_text(column.type) else _plain_texts(column)


def _plain_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_floating(column.type):  # 1.0 is 1 to whoever wrote the file
        whole = pc.all(pc.equal(pc.floor(column), column)).as_py()
        column = column.cast(pa.int64()) if whole else column
    return column.cast(pa.string())


def _cast(column: pa.ChunkedArray, to: pa.DataType, name: str, file: str, what: str) -> pa.ChunkedArray:
    try:
        return pc.cast(pc.utf8_trim_whitespace(column) if is_text(column.type) else column, to)
    except pa.ArrowInvalid:
        wrong = [value is not None and not _fits(value, to) for value in column.to_pylist()]
        _refuse(column, pa.chunked_array([wrong], pa.bool_()), name, file, what)
        raise
    except pa.ArrowNotImplementedError:
        raise DataError(f"column {name!r} is {column.type}, and cannot be read as {what}", file=file) from None


def _fits(value: object, to: pa.DataType) -> bool:
    try:
        pc.cast(pa.scalar(value.strip() if isinstance(value, str) else value), to)
    except pa.ArrowInvalid:
        return False
    return True


def _refuse(column: pa.ChunkedArray, wrong: pa.ChunkedArray, name: str, file: str, what: str) -> None:
    marks = np.asarray(wrong.combine_chunks().fill_null(False))
    if marks.any():
        row = int(marks.argmax())
        raise DataError(
            f"column {name!r} has {column[row].as_py()!r}, which is not {what}, and {int(marks.sum())} such values in "
            "all; mend them, or say in the spec that the column is text or categorical",
            file=file,
            row=row,
        )


_AS = {"numeric": _numeric, "date": _date, "boolean": _boolean, "text": _text}
