"""The texts of one column by its rules: value by value, and a whole Arrow array at once.

Both give the same text. Arrays of plain texts, integers, floats and booleans stay in Arrow; for everything else each
distinct value is formatted once, in Python, and the results are taken where they occur.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ConfigError, DataError
from penstock.templates.columns import ColumnFormat
from penstock.templates.values import (
    TEXT,
    FineDuration,
    FineMoment,
    Unsayable,
    clean,
    distinct,
    float_texts,
    is_text,
    join,
    json_text,
    plain_text,
    python_values,
    whole,
)

__all__ = ["ColumnFormatter", "JsonColumnFormatter", "check_spec"]


_WIDE = re.compile(r"\d{4}")
_DATE_PART = re.compile(r"%[A-Za-z]")


class ColumnFormatter:
    """Says the values of one column. `spec`, a format in a template, goes before the column's own digits.

    None, or a null, is a value that is missing and may be left out; under the other rules there is none.
    """

    def __init__(self, column: str, rules: ColumnFormat, spec: str = "") -> None:
        self.column, self.rules, self.spec = column, rules, spec
        self._digits = spec or _digits(rules)
        self._as_is = not (rules.categories or self._digits)
        self._dressed = bool(rules.prefix or rules.unit)
        self._tail = f" {rules.unit}" if rules.unit else ""

    def one(self, value: Any) -> str | None:
        """The text of a value that `as_value` has made plain Python."""
        if value is None:
            return self._absent(1, 1, None)
        try:
            return self._text(value)
        except Unsayable as reason:
            raise DataError(f"column {self.column!r}: {reason}", data=value) from None

    def many(self, column: pa.Array | pa.ChunkedArray, first_row: int = 0) -> pa.Array:
        """The texts of a column, as `large_string`; `first_row` is the number of its first row in errors."""
        try:
            values = clean(column)
        except Unsayable as reason:
            raise DataError(f"column {self.column!r}: {reason}") from None
        texts = self._quickly(values)
        if texts is None:
            texts = self._one_by_one(values, first_row)
        if not values.null_count:
            return texts
        instead = self._absent(values.null_count, len(values), first_row + values.is_null().index(True).as_py())
        return texts if instead is None else pc.fill_null(texts, pa.scalar(instead, TEXT))

    @property
    def missing_text(self) -> str:
        """What is said where a value is missing and nothing can be left out."""
        return "unknown" if self.rules.missing_text is None else self.rules.missing_text

    def _text(self, value: Any) -> str:
        rules = self.rules
        if rules.categories:
            return self._category(plain_text(value))
        if isinstance(value, bool):
            return _padded(self._truth(value), self.spec)
        if isinstance(value, (date, datetime, time, FineMoment)):
            return self._moment(value)
        text = self._number(value) if self._digits else plain_text(value)
        return f"{rules.prefix}{text}{self._tail}" if self._dressed else text

    def _truth(self, value: bool) -> str:
        given = self.rules.true_text if value else self.rules.false_text
        return plain_text(value) if given is None else given

    def _category(self, text: str) -> str:
        rules = self.rules
        name = rules.categories.get(text)
        if name is not None:
            return name
        if rules.unseen == "error":
            raise Unsayable(
                f"the category {text!r:.80} is new; known are {_some(list(rules.categories))}; "
                "add it to categories, or choose unseen='keep' or a text to say instead"
            )
        return text if rules.unseen == "keep" else rules.unseen

    def _moment(self, value: Any) -> str:
        form = self.spec if _DATE_PART.search(self.spec) else self.rules.date_format
        if form:
            return str(value.strftime(form))
        return _padded(plain_text(value), self.spec)

    def _number(self, value: Any) -> str:
        if isinstance(value, (str, timedelta, FineDuration)):
            if not self.spec:
                raise Unsayable(f"decimals and thousands are for numbers, got {plain_text(value)!r:.80}")
            return _padded(plain_text(value), self.spec)
        value = whole(value)  # as the same number is said in a column of integers
        if not isinstance(value, (int, float, Decimal)):
            raise Unsayable(f"the format {self._digits!r} is for numbers, got {value!r:.80}")
        try:
            return format(value, self._digits)
        except (ValueError, OverflowError) as error:
            raise Unsayable(f"the format {self._digits!r} does not go with {value!r:.80}: {error}") from None

    def _absent(self, count: int, rows: int, row: int | None) -> str | None:
        """What stands for a missing value, unless the rule is to stop."""
        rule = self.rules.missing
        if rule == "omit":
            return None
        if rule == "say":
            return self._said_missing()
        if row is None:
            what = "is missing"
        else:
            what = f"is missing in all {rows} rows" if count == rows > 1 else f"is missing, first in row {row}"
        raise DataError(
            f"column {self.column!r} {what}, and its rule is missing='error'; "
            "fill the value in, or choose missing='omit' or missing='say'",
            row=row,
        )

    def _said_missing(self) -> str:
        return self.missing_text

    def _quickly(self, values: pa.Array) -> pa.Array | None:
        """The texts of an array without Python, or None where that would not do."""
        kind = values.type
        if pa.types.is_null(kind):
            return pa.nulls(len(values), TEXT)
        if not self._as_is:
            return None
        if pa.types.is_boolean(kind):
            return pc.if_else(values, pa.scalar(self._truth(True), TEXT), pa.scalar(self._truth(False), TEXT))
        if is_text(kind):
            texts = values
        elif pa.types.is_integer(kind):
            texts = pc.cast(values, TEXT)
        elif pa.types.is_floating(kind):
            texts = float_texts(values)
        else:
            return None
        if self._dressed:
            return join(self.rules.prefix, texts, self._tail)
        return texts

    def _one_by_one(self, values: pa.Array, first_row: int) -> pa.Array:
        uniques, codes = distinct(values)
        texts: list[str | None] = []
        for number, value in enumerate(self._python(uniques)):
            try:
                texts.append(None if value is None else self._text(value))
            except Unsayable as reason:
                row = first_row + (number if codes is None else codes.index(number).as_py())
                raise DataError(f"column {self.column!r}, row {row}: {reason}", row=row, data=value) from None
        said = pa.array(texts, TEXT)
        return said if codes is None else said.take(codes)

    def _python(self, uniques: pa.Array) -> list[Any]:
        try:
            return python_values(uniques)
        except Unsayable as reason:
            raise DataError(f"column {self.column!r}: {reason}") from None


def check_spec(spec: str, where: str) -> None:
    """Refuse a format that neither numbers, nor texts, nor dates have."""
    if _WIDE.search(spec):
        raise ConfigError(f"{where}: the format {spec!r} would make texts of more than 999 characters")
    if _DATE_PART.search(spec):
        return
    for sample in (1, 1.5, "text"):
        try:
            format(sample, spec)
        except ValueError:
            continue
        return
    raise ConfigError(f"{where}: {spec!r} is no format; such as .2f, >10 or ',' for numbers, %d %B %Y for dates")


def _digits(rules: ColumnFormat) -> str:
    """The format that `decimals` and `thousands` mean; a rounded -0.001 is 0.00."""
    comma = "," if rules.thousands else ""
    return comma if rules.decimals is None else f"z{comma}.{rules.decimals}f"


def _padded(text: str, spec: str) -> str:
    try:
        return format(text, spec)
    except ValueError:
        raise Unsayable(f"the format {spec!r} is for numbers, got {text!r:.80}") from None


def _some(values: Sequence[str]) -> str:
    shown = ", ".join(map(repr, values[:8]))
    return f"{shown} and {len(values) - 8} more" if len(values) > 8 else shown


_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_TO_ESCAPE = r'["\\\x00-\x1f]'


class JsonColumnFormatter(ColumnFormatter):
    """As `ColumnFormatter`, but each text is a JSON value. Infinity, which JSON lacks, is the text "inf"."""

    def _text(self, value: Any) -> str:
        rules = self.rules
        worded = bool(rules.categories or rules.prefix or rules.unit)
        if not worded:
            if isinstance(value, bool) and self._usual_truth():
                return "true" if value else "false"
            if isinstance(value, (list, tuple, dict)):
                return json_text(value)
        text = super()._text(value)
        number = isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)
        if number and not worded and not rules.thousands and _NUMBER.fullmatch(text):
            return text
        return json_text(text)

    def _said_missing(self) -> str:
        return "null" if self.rules.missing_text is None else json_text(self.rules.missing_text)

    def _usual_truth(self) -> bool:
        return self.rules.true_text is None and self.rules.false_text is None

    def _quickly(self, values: pa.Array) -> pa.Array | None:
        kind = values.type
        if pa.types.is_null(kind):
            return pa.nulls(len(values), TEXT)
        if self._dressed or not self._as_is or (pa.types.is_boolean(kind) and not self._usual_truth()):
            return None
        if pa.types.is_boolean(kind):
            return pc.cast(values, TEXT)
        texts = super()._quickly(values)
        if texts is None:
            return None
        if is_text(kind):
            return _quoted(texts)
        if pa.types.is_floating(kind):
            infinite = pc.is_inf(values)
            if pc.any(infinite).as_py():
                return pc.if_else(infinite, join('"', texts, '"'), texts)
        return texts


def _quoted(texts: pa.Array) -> pa.Array:
    quoted = join('"', texts, '"')
    special = pc.fill_null(pc.match_substring_regex(texts, _TO_ESCAPE), False)
    if not pc.any(special).as_py():
        return quoted
    return pc.replace_with_mask(quoted, special, pa.array(map(json_text, texts.filter(special).to_pylist()), TEXT))
