"""Columns made what a spec says they are; a value that cannot be is named with its column and row."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.text import is_text
from penstock.datasets.dates import date_remedy, find_dates, one_array, read_dates
from penstock.datasets.spec import ColumnKind
from penstock.errors import DataError

__all__ = [
    "as_kinds",
    "check_followed",
    "doubtful_columns",
    "first_code",
    "with_codes",
    "with_decimal_commas",
    "with_unclear_points",
]

log = logging.getLogger(__name__)

_TRUE, _FALSE = ("true", "yes", "y", "t", "1"), ("false", "no", "n", "f", "0")
_CODE = r"^[ \t]*[+-]?0([0-9]+([.][0-9]*)?([eE][+-]?[0-9]+)?|[xX][0-9a-fA-F]+)[ \t]*$"
_LONG = r"^[ \t]*[+-]?[0-9]{16,}[ \t]*$"
_EXACT = 2.0**53
"""From here on a float64 does not hold every whole number."""
_COMMAS = r"^[ \t]*[+-]?(0|[1-9][0-9]*)(,[0-9]+)?[ \t]*$"
_THOUSANDS = r"^[ \t]*[+-]?[1-9][0-9]{0,2},[0-9]{3}[ \t]*$"
_POINT_THOUSANDS = r"^[ \t]*[+-]?[1-9][0-9]{0,2}([.][0-9]{3})+[ \t]*$"


def as_kinds(
    table: pa.Table, kinds: Mapping[str, ColumnKind | None], file: str, date_formats: Mapping[str, str]
) -> pa.Table:
    """The table with the named columns as numbers, booleans, dates or texts; other kinds leave a column as it is."""
    for name, kind in kinds.items():
        place = table.schema.get_field_index(name)
        if place < 0 or kind in (None, "categorical", "id", "ignore"):
            continue
        column = table.column(place)
        if kind == "date":
            made = _date(column, name, file, date_formats.get(name))
        else:
            made = _AS[kind](column, name, file)
        if made is not column:
            table = table.set_column(place, name, made)
    return table


def doubtful_columns(table: pa.Table, kinds: Mapping[str, ColumnKind | None], *, has_codes: bool) -> list[str]:
    """Columns whose cells have to be looked at as they are written.

    `has_codes` says that some cell of the file may begin as 007 or 0x1F do.
    """
    doubtful = []
    for field in table.schema:
        kind = kinds.get(field.name)
        if kind not in (None, "categorical", "id") or is_text(field.type) or pa.types.is_null(field.type):
            continue
        whole, fraction = pa.types.is_integer(field.type), pa.types.is_floating(field.type)
        odd = has_codes and (whole or fraction)
        if odd or (kind == "id" and not whole) or (fraction and _reaches(table[field.name], _EXACT)):
            doubtful.append(field.name)
    return doubtful


def with_codes(table: pa.Table, written: pa.Table, kinds: Mapping[str, ColumnKind | None]) -> pa.Table:
    """The table with those columns as they are written that would not come back so from numbers.

    These are 007 and 0x1F, whole numbers that are too long for what stands beside them (beyond 64 bits, or from 2**53
    on beside fractions), and of ids all that are not whole numbers.
    """
    for name in written.column_names:
        place, texts = table.schema.get_field_index(name), written[name]
        whole = pa.types.is_integer(table.schema.field(place).type)
        kept = (kinds.get(name) == "id" and not whole) or _any(texts, _CODE) or (not whole and _long(texts))
        table = table.set_column(place, name, texts) if kept else table
    return table


def first_code(texts: pa.ChunkedArray | pa.Array) -> int | None:
    """The first cell that would not come back from a number as it is written; None where the cells are no texts."""
    if not is_text(texts.type):
        return None
    row = pc.index(pc.fill_null(pc.match_substring_regex(texts, _CODE), False), True).as_py()
    if row < 0 and _long(texts):
        row = pc.index(pc.fill_null(pc.match_substring_regex(texts, _LONG), False), True).as_py()
    return row if row >= 0 else None


def check_followed(table: pa.Table, followed: Mapping[str, pa.DataType], file: str) -> None:
    """Raise if a column that is of numbers only because training is has a code."""
    for name in followed:
        place = table.schema.get_field_index(name)
        row = first_code(table.column(place)) if place >= 0 else None
        if row is not None:
            raise DataError(
                f"column {name!r} has {table.column(place)[row].as_py()!r}, which is not what a number would be "
                "written as, and training reads this column as numbers; say kind: text in the spec, or kind: numeric "
                "if it is a number all the same",
                file=file,
                row=row,
            )


def with_unclear_points(
    table: pa.Table,
    written: pa.Table,
    kinds: Mapping[str, ColumnKind | None],
    followed: Mapping[str, pa.DataType],
    file: str,
) -> pa.Table:
    """The table with those columns as they are written whose points may be thousands, in a file of decimal commas.

    These are columns such as 1.500 and 900. It is announced, and an error where a column is said to be numeric.
    """
    for name in written.column_names:
        place, texts = table.schema.get_field_index(name), written[name]
        pointed = texts.filter(pc.match_substring(texts, "."))
        if not len(pointed) or not _all(pointed, _POINT_THOUSANDS):
            continue
        if kinds.get(name) == "numeric":
            if pa.types.is_floating(followed.get(name, pa.null())):
                continue  # training tells what a point is
            row = pc.index(pc.fill_null(pc.match_substring(texts, "."), False), True).as_py()
            raise DataError(
                f"column {name!r} has {texts[row].as_py()!r}, which may be thousands: other columns of the file have "
                "decimal commas; write the number without a point (or with a comma if it is a fraction), or say kind: "
                "text in the spec",
                file=file,
                row=row,
            )
        log.warning(
            "%s: column %r stays text: the point in %r may be thousands, as other columns have decimal commas; write "
            "the numbers without it, or with a comma if they are fractions",
            file,
            name,
            pointed[0].as_py(),
        )
        table = table.set_column(place, name, texts)
    return table


def with_decimal_commas(table: pa.Table, kinds: Mapping[str, ColumnKind | None], file: str) -> pa.Table:
    """The table with columns of texts such as 1,5 as numbers; it is announced.

    1,500 may be thousands too: a column in which every comma could be one stays text, unless it is said to be numeric.
    """
    for place, field in enumerate(table.schema):
        kind, texts = kinds.get(field.name), table.column(place)
        if kind not in (None, "numeric") or not is_text(field.type) or not _all(texts, _COMMAS) or not _any(texts, ","):
            continue
        unclear = _all(texts.filter(pc.match_substring(texts, ",")), _THOUSANDS)
        if unclear and kind is None:
            continue
        level = logging.WARNING if unclear else logging.INFO
        said = " (they could be thousands, too: write them without commas if they are)" if unclear else ""
        log.log(level, "%s: the commas in column %r are read as decimal points%s", file, field.name, said)
        numbers = pc.replace_substring(pc.utf8_trim_whitespace(texts), ",", ".").cast(pa.float64())
        table = table.set_column(place, field.name, numbers)
    return table


def _numeric(column: pa.ChunkedArray, name: str, file: str) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind) or pa.types.is_decimal(kind):
        return column
    if pa.types.is_boolean(kind):
        return column.cast(pa.int64())
    return _cast(column, pa.float64(), name, file, "a number")


def _date(column: pa.ChunkedArray, name: str, file: str, written: str | None) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_temporal(kind) or pa.types.is_null(kind):
        return column
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):  # 20190131; a number alone has no calendar
        column, written = _plain_texts(column), written or "%Y%m%d"
    elif not is_text(kind):
        raise DataError(f"column {name!r} is {kind}, and cannot be read as a date", file=file)
    if written is None:
        with contextlib.suppress(pa.ArrowInvalid):
            return pc.cast(pc.utf8_trim_whitespace(column), pa.timestamp("us"))
        found = find_dates(one_array(column))
        written = "%Y-%m-%d" if found is None else found.format or found.nearest
        if found is not None and written is None:
            raise DataError(f"column {name!r} cannot be read as dates: {found.doubt}; {date_remedy(name)}", file=file)
    dates = read_dates(one_array(column), str(written))
    what = f"a date of the form {written}; give another date_format in the spec"
    _refuse(column, pa.chunked_array([dates.wrong]), name, file, what)
    return pa.chunked_array([dates.values])


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


def _reaches(column: pa.ChunkedArray, size: float) -> bool:
    return bool(pc.any(pc.greater_equal(pc.abs(column), size)).as_py())


def _long(texts: pa.ChunkedArray | pa.Array) -> bool:
    """Whether a whole number is so large that a float64 may not give it back."""
    found = texts.filter(pc.match_substring_regex(texts, _LONG))
    return bool(len(found)) and _reaches(pc.utf8_trim(found, " \t+-").cast(pa.float64()), _EXACT)


def _any(texts: pa.ChunkedArray, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(texts, pattern)).as_py())


def _all(texts: pa.ChunkedArray, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(texts, pattern)).as_py())


def _refuse(column: pa.ChunkedArray, wrong: pa.ChunkedArray, name: str, file: str, what: str) -> None:
    marks = np.asarray(wrong.combine_chunks().fill_null(False))
    if marks.any():
        row = int(marks.argmax())
        value = column[row].as_py()
        hint = ""
        if "number" in what and re.fullmatch(r"\s*[+-]?[\d.]*,\d+\s*", str(value)):
            hint = " (a decimal comma is read as one where cells are divided by semicolons; else write a point)"
        raise DataError(
            f"column {name!r} has {value!r}, which is not {what}{hint}, and {int(marks.sum())} such values in all; "
            "mend them, or say in the spec that the column is text or categorical",
            file=file,
            row=row,
        )


_AS = {"numeric": _numeric, "boolean": _boolean, "text": _text}
