"""Types of CSV columns from the text of their cells, and conversion to the kinds of a spec."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.text import is_text
from penstock.datasets.dates import date_remedy, find_dates, one_array, read_dates
from penstock.datasets.spec import ColumnKind
from penstock.errors import DataError

log = logging.getLogger(__name__)

Kinds = Mapping[str, ColumnKind | None]

_TRUE, _FALSE = ("true", "yes", "y", "t", "1"), ("false", "no", "n", "f", "0")
_WORDS = pa.array(["true", "True", "TRUE", "false", "False", "FALSE"])
"""Cells of a boolean column. 0 and 1 are numbers: a column of them would change its type with the first `true`."""
_TYPES = (
    pa.date32(),
    pa.timestamp("s"),
    pa.timestamp("ns"),
    pa.timestamp("s", "UTC"),
    pa.timestamp("ns", "UTC"),
)
_CODE = r"^[ \t]*[+-]?0([0-9]+([.][0-9]*)?([eE][+-]?[0-9]+)?|[xX][0-9a-fA-F]+)[ \t]*$"
_LONG = r"^[ \t]*[+-]?[0-9]{16,}[ \t]*$"
_EXACT = 2.0**53
"""From here on a float64 does not hold every integer."""
_COMMAS = r"^[ \t]*[+-]?(0|[1-9][0-9]*)(,[0-9]+)?[ \t]*$"
_THOUSANDS = r"^[ \t]*[+-]?[1-9][0-9]{0,2},[0-9]{3}[ \t]*$"
_POINT_THOUSANDS = r"^[ \t]*[+-]?[1-9][0-9]{0,2}([.][0-9]{3})+[ \t]*$"


# -- types from cells ------------------------------------------------------------------------------------------------


def typed_columns(
    texts: pa.Table,
    kinds: Kinds,
    followed: Mapping[str, pa.DataType],
    file: str,
    *,
    has_codes: bool,
    decimal_commas: bool,
) -> pa.Table:
    """Columns of text as numbers, booleans and dates where every cell is one; "text" columns stay.

    A column stays text if a cell would not be written back the same from a number: 007 and 0x1F (`has_codes` is False
    if the file has none), and integers that are too long. An "id" column stays text unless all cells are integers.
    """
    columns = {}
    for name in texts.column_names:
        cells, kind = texts[name], kinds.get(name)
        column = cells if kind == "text" else _typed(cells)
        if (kind in (None, "categorical", "id") or name in followed) and not is_text(column.type):
            whole = pa.types.is_integer(column.type)
            number = whole or pa.types.is_floating(column.type)
            code = number and has_codes and _any(cells, _CODE)
            long = number and not whole and _long(cells)
            no_id = kind == "id" and not whole and not pa.types.is_null(column.type)
            column = cells if code or long or no_id else column
        columns[name] = column
    table = pa.table(columns)
    if decimal_commas:
        with_commas = _with_decimal_commas(table, kinds, file)
        table = table if with_commas is table else _with_ambiguous_points(with_commas, texts, kinds, followed, file)
    return table


def _typed(cells: pa.ChunkedArray) -> pa.ChunkedArray:
    """Column of the first type that every cell has."""
    if cells.null_count == len(cells):
        return pa.chunked_array([pa.nulls(len(cells))])
    trimmed = pc.utf8_trim(cells, " \t")
    for number in (pa.int64(), pa.float64()):  # no number is a date or a word: most columns need no other attempt
        with contextlib.suppress(pa.ArrowInvalid):
            return pc.cast(trimmed, number)
    if pc.all(pc.is_in(cells.drop_null(), _WORDS)).as_py():
        return pc.cast(pc.utf8_lower(cells), pa.bool_())
    if _all(cells, r"^[0-9]{2}:[0-9]{2}(:[0-9]{2})?$"):
        with contextlib.suppress(pa.ArrowInvalid):
            moments = pc.cast(pc.binary_join_element_wise("1970-01-01", cells, " "), pa.timestamp("s"))
            return pc.cast(moments, pa.time32("s"))
    for kind in _TYPES:
        with contextlib.suppress(pa.ArrowInvalid):
            return pc.cast(trimmed if pa.types.is_date(kind) else cells, kind)
    return cells


def first_code(texts: pa.ChunkedArray | pa.Array) -> int | None:
    """First cell that a number would not be written back as; None if the cells are not text."""
    if not is_text(texts.type):
        return None
    row = _first(pc.match_substring_regex(texts, _CODE))
    return _first(pc.match_substring_regex(texts, _LONG)) if row is None and _long(texts) else row


def check_followed(table: pa.Table, followed: Mapping[str, pa.DataType], file: str) -> None:
    """Raise for a code in a column that is numeric only because it is in the training file."""
    names = set(table.column_names)
    for name in followed:
        row = first_code(table[name]) if name in names else None
        if row is not None:
            raise DataError(
                f"column {name!r} has {table[name][row].as_py()!r}, which is not how a number is written, and the "
                "training file has numbers there; set kind: text in the spec, or kind: numeric if it is a number",
                file=file,
                row=row,
            )


def _with_decimal_commas(table: pa.Table, kinds: Kinds, file: str) -> pa.Table:
    """Table with columns of cells such as 1,5 as numbers; this is logged.

    1,500 may be thousands: a column in which every comma may separate them stays text, unless its kind is "numeric".
    """
    for place, field in enumerate(table.schema):
        kind, cells = kinds.get(field.name), table.column(place)
        if kind not in (None, "numeric") or not is_text(field.type) or not _all(cells, _COMMAS) or not _any(cells, ","):
            continue
        ambiguous = _all(cells.filter(pc.match_substring(cells, ",")), _THOUSANDS)
        if ambiguous and kind is None:
            continue
        hint = " (they may be thousands; if so, write them without commas)" if ambiguous else ""
        level = logging.WARNING if ambiguous else logging.INFO
        log.log(level, "%s: the commas in column %r are read as decimal points%s", file, field.name, hint)
        numbers = pc.cast(pc.replace_substring(pc.utf8_trim_whitespace(cells), ",", "."), pa.float64())
        table = table.set_column(place, field.name, numbers)
    return table


def _with_ambiguous_points(
    table: pa.Table, texts: pa.Table, kinds: Kinds, followed: Mapping[str, pa.DataType], file: str
) -> pa.Table:
    """Table of a file with decimal commas, in which columns such as 1.500 stay text, since points may be thousands.

    This is logged, and an error if the column's kind is "numeric".
    """
    for place, field in enumerate(table.schema):
        cells = texts[field.name]
        pointed = cells.filter(pc.match_substring(cells, "."))
        if not pa.types.is_floating(field.type) or not len(pointed) or not _all(pointed, _POINT_THOUSANDS):
            continue
        if kinds.get(field.name) == "numeric":
            if pa.types.is_floating(followed.get(field.name, pa.null())):
                continue  # the training file decides
            raise DataError(
                f"column {field.name!r} has {pointed[0].as_py()!r}, which may be thousands, since other columns have "
                "decimal commas; write it without a point (or with a comma if it is a fraction), or set kind: text",
                file=file,
                row=_first(pc.match_substring(cells, ".")),
            )
        log.warning(
            "%s: column %r stays text: the point in %r may be thousands, since other columns have decimal commas; "
            "write the numbers without it, or with a comma if they are fractions", file, field.name, pointed[0].as_py(),
        )  # fmt: skip
        table = table.set_column(place, field.name, cells)
    return table


# -- kinds -----------------------------------------------------------------------------------------------------------


def as_kinds(table: pa.Table, kinds: Kinds, file: str, date_formats: Mapping[str, str]) -> pa.Table:
    """Table with the named columns as numbers, booleans, dates or text; other kinds leave a column unchanged."""
    for name, kind in kinds.items():
        place = table.schema.get_field_index(name)
        if place < 0:
            continue
        column = table.column(place)
        if kind == "date":
            made = _date(column, name, file, date_formats.get(name))
        elif kind == "numeric":
            made = _numeric(column, name, file)
        elif kind == "boolean":
            made = _boolean(column, name, file)
        else:
            made = _plain_texts(column) if kind == "text" and not is_text(column.type) else column
        table = table if made is column else table.set_column(place, name, made)
    return table


def _numeric(column: pa.ChunkedArray, name: str, file: str) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind) or pa.types.is_decimal(kind):
        return column
    if pa.types.is_boolean(kind):
        return column.cast(pa.int64())
    try:
        return pc.cast(pc.utf8_trim_whitespace(column) if is_text(kind) else column, pa.float64())
    except pa.ArrowInvalid:
        wrong = [value is not None and not _is_number(value) for value in column.to_pylist()]
        _refuse(column, np.array(wrong), name, file, "a number")
        raise
    except pa.ArrowNotImplementedError:
        raise DataError(f"column {name!r} is {kind}, and cannot be read as a number", file=file) from None


def _is_number(value: object) -> bool:
    try:
        pc.cast(pa.scalar(value.strip() if isinstance(value, str) else value), pa.float64())
    except pa.ArrowInvalid:
        return False
    return True


def _date(column: pa.ChunkedArray, name: str, file: str, written: str | None) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_temporal(kind) or pa.types.is_null(kind):
        return column
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):  # 20190131
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
    _refuse(column, dates.wrong, name, file, f"a date of the form {written}; give another date_format in the spec")
    return pa.chunked_array([dates.values])


def _boolean(column: pa.ChunkedArray, name: str, file: str) -> pa.ChunkedArray:
    if pa.types.is_boolean(column.type) or pa.types.is_null(column.type):
        return column
    texts = pc.utf8_lower(pc.utf8_trim_whitespace(_plain_texts(column)))
    true, false = (pc.is_in(texts, pa.array(words)) for words in (_TRUE, _FALSE))
    wrong = pc.and_(pc.is_valid(texts), pc.invert(pc.or_(true, false)))
    _refuse(column, np.asarray(wrong), name, file, "a boolean (true, yes, 1; false, no, 0)")
    return pc.if_else(pc.is_valid(texts), true, pa.scalar(None, pa.bool_()))


def _plain_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_floating(column.type) and pc.all(pc.equal(pc.floor(column), column)).as_py():  # 1.0 is written 1
        column = column.cast(pa.int64())
    return column.cast(pa.string())


def _refuse(column: pa.ChunkedArray, wrong: npt.NDArray[np.bool_], name: str, file: str, what: str) -> None:
    if wrong.any():
        row = int(wrong.argmax())
        value = column[row].as_py()
        hint = ""
        if "number" in what and re.fullmatch(r"\s*[+-]?[\d.]*,\d+\s*", str(value)):
            hint = " (decimal commas are read in files of semicolons only; write a point)"
        raise DataError(
            f"column {name!r} has {value!r}, which is not {what}{hint}; {int(wrong.sum())} values are wrong: correct "
            "them, or set the kind of the column to text or categorical in the spec",
            file=file,
            row=row,
        )


def _long(texts: pa.ChunkedArray | pa.Array) -> bool:
    """True if an integer is so large that a float64 may not hold it."""
    found = texts.filter(pc.match_substring_regex(texts, _LONG))
    return bool(len(found)) and bool(
        pc.any(pc.greater_equal(pc.utf8_trim(found, " \t+-").cast(pa.float64()), _EXACT)).as_py()
    )


def _first(flags: pa.ChunkedArray | pa.Array) -> int | None:
    row = int(pc.index(pc.fill_null(flags, False), True).as_py())
    return None if row < 0 else row


def _any(texts: pa.ChunkedArray, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(texts, pattern)).as_py())


def _all(texts: pa.ChunkedArray, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(texts, pattern)).as_py())
