"""Format of a column: its name, unit, digits, missing and unknown values; value by value, and for whole arrays.

Both give the same text. Arrays of plain text, integers, floats and booleans stay in Arrow; of other types each distinct
value is formatted once in Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Literal, Self, get_args

import pyarrow as pa
import pyarrow.compute as pc

from penstock._suggest import check_options
from penstock.errors import ConfigError, DataError
from penstock.templates.values import (
    TEXT,
    FineDuration,
    FineMoment,
    NoText,
    as_value,
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

Missing = Literal["omit", "say", "error"]
"""Treatment of a missing value: omit its part of the text, write `missing_text`, or raise."""

_NOTHING: Mapping[Any, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnFormat:
    """Format of one column. Default: digits, floats in their shortest form, yes and no, ISO dates.

        ColumnFormat(name="fare", prefix="£", decimals=2)                       £7.25
        ColumnFormat(unit="years", missing="say")                               22 years, unknown
        ColumnFormat(categories={"S": "Southampton"}, unseen="keep")            Southampton

    A category is looked up by its text, so `{1: "first"}` also finds "1" and 1.0.
    """

    name: str = ""
    """Name of the column in the text; empty: its name in the table."""
    description: str = ""
    """Meaning of the column, in words that can follow "The"; sentences use it instead of the name."""
    unit: str = ""
    """Unit after numbers and text, separated by a space."""
    prefix: str = ""
    """Text directly before them, such as a currency."""
    decimals: int | None = None
    """Digits after the point, rounded; None: all that the number has."""
    thousands: bool = False
    """True: write 1,000,000."""
    missing: Missing = "omit"
    missing_text: str | None = None
    """Text for `missing="say"`, and outside of the brackets of a sentence; None: "unknown", and null in JSON."""
    categories: Mapping[Any, str] = field(default_factory=lambda: _NOTHING)
    """Names of values; empty: the values themselves."""
    unseen: str = "error"
    """Treatment of a value that `categories` lacks: "error" raises, "keep" writes the value, other text replaces it."""
    booleans: tuple[str, str] | None = None
    """Texts of true and false; None: "yes" and "no", and true and false in JSON."""
    date_format: str = ""
    """Format of `strftime`; empty: ISO 8601, without the time at midnight."""

    def __post_init__(self) -> None:
        if self.missing not in get_args(Missing):
            raise ConfigError(f"missing must be 'omit', 'say' or 'error', got {self.missing!r}")
        if self.decimals is not None and (type(self.decimals) is not int or not 0 <= self.decimals <= 100):
            raise ConfigError(f"decimals must be an integer from 0 to 100, or None, got {self.decimals!r}")
        if not isinstance(self.thousands, bool):
            raise ConfigError(f"thousands must be true or false, got {self.thousands!r}")
        for key in ("name", "description", "unit", "prefix", "unseen", "date_format"):
            if not isinstance(getattr(self, key), str):
                raise ConfigError(f"{key} must be text, got {getattr(self, key)!r}")
        if not isinstance(self.missing_text, str | None):
            raise ConfigError(f"missing_text must be text or None, got {self.missing_text!r}")
        if self.booleans is not None:
            texts = tuple(self.booleans)
            if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
                raise ConfigError(f"booleans must be the texts of true and false, got {self.booleans!r}")
            object.__setattr__(self, "booleans", texts)
        if not isinstance(self.categories, Mapping):
            raise ConfigError(f"categories must map values to names, got {self.categories!r}")
        object.__setattr__(self, "categories", MappingProxyType(_by_text(self.categories)))

    def label(self, column: str) -> str:
        """Name of a column in the text."""
        return self.name or column

    def subject(self, column: str) -> str:
        """Subject of a sentence about the column."""
        return self.description or self.label(column)

    def to_dict(self) -> dict[str, Any]:
        """Rules that differ from the default, as JSON values."""
        default = ColumnFormat()
        rules = {part.name: getattr(self, part.name) for part in fields(self)}
        return {
            key: dict(value) if key == "categories" else value
            for key, value in rules.items()
            if value != getattr(default, key)
        }

    @classmethod
    def from_dict(cls, rules: Mapping[str, Any]) -> Self:
        if not isinstance(rules, Mapping):
            raise ConfigError(f"the format of a column has keys such as 'unit: years', got {rules!r}")
        known = [part.name for part in fields(cls)]
        check_options(rules, known, "rule", where="format of a column")
        return cls(**rules)

    def __reduce__(self) -> tuple[Any, ...]:
        return ColumnFormat.from_dict, (self.to_dict(),)  # a mapping proxy cannot be pickled


def as_formats(given: Mapping[str, ColumnFormat | Mapping[str, Any]] | None) -> dict[str, ColumnFormat]:
    """Formats by column, each given as a ColumnFormat or as a mapping."""
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"columns must map names to ColumnFormat(...), got {given!r:.80}; to choose some, use only=")
    formats = {}
    for column, rules in (given or {}).items():
        try:
            formats[column] = rules if isinstance(rules, ColumnFormat) else ColumnFormat.from_dict(rules)
        except ConfigError as error:
            raise ConfigError(f"column {column!r}: {error}") from None
    return formats


def _by_text(categories: Mapping[Any, str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for value, name in categories.items():
        try:
            text = plain_text(as_value(value))
        except NoText as error:
            raise ConfigError(f"categories: {error}") from None
        if not isinstance(name, str):
            raise ConfigError(f"categories: the name of {value!r} must be text, got {name!r}")
        if names.get(text, name) != name:
            raise ConfigError(f"categories: {text!r} has two names, {names[text]!r} and {name!r}")
        names[text] = name
    return names


_HIDDEN: ContextVar[tuple[str, ...]] = ContextVar("hidden", default=())


@contextmanager
def hiding(columns: Sequence[str]) -> Iterator[None]:
    """While active, templates that render whole rows omit these columns; a template that names them does not.

    A dataset hides its target this way, so that `TabularTextConverter().convert_row(row)` of a row with its label does
    not put the answer into the text.
    """
    token = _HIDDEN.set((*_HIDDEN.get(), *columns))
    try:
        yield
    finally:
        _HIDDEN.reset(token)


def hidden() -> tuple[str, ...]:
    """Columns that are hidden now."""
    return _HIDDEN.get()


_WIDE = re.compile(r"\d{4}")
_DATE_PART = re.compile(r"%[A-Za-z]")


class ColumnFormatter:
    """Formatter of the values of one column. `spec`, a format in a template, replaces the column's own digits.

    None or null is a missing value that may be omitted; with the other rules there is none.
    """

    def __init__(self, column: str, rules: ColumnFormat, spec: str = "") -> None:
        self.column, self.rules, self.spec = column, rules, spec
        self._digits = spec or _digits(rules)
        self._as_is = not (rules.categories or self._digits)
        self._framed = bool(rules.prefix or rules.unit)
        self._tail = f" {rules.unit}" if rules.unit else ""

    def one(self, value: Any) -> str | None:
        """Text of a plain Python value from `as_value`."""
        if value is None:
            return self._absent(1, 1, None)
        try:
            return self._text(value)
        except NoText as reason:
            raise DataError(f"column {self.column!r}: {reason}", data=value) from None

    def many(self, column: pa.Array | pa.ChunkedArray, first_row: int = 0) -> pa.Array:
        """Texts of a column, as `large_string`; `first_row` is the number of its first row, for errors."""
        try:
            values = clean(column)
        except NoText as reason:
            raise DataError(f"column {self.column!r}: {reason}") from None
        texts = self._by_arrow(values)
        if texts is None:
            texts = self._by_value(values, first_row)
        if not values.null_count:
            return texts
        instead = self._absent(values.null_count, len(values), first_row + values.is_null().index(True).as_py())
        return texts if instead is None else pc.fill_null(texts, pa.scalar(instead, TEXT))

    @property
    def missing_text(self) -> str:
        """Text of a missing value that cannot be omitted."""
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
        return f"{rules.prefix}{text}{self._tail}" if self._framed else text

    def _truth(self, value: bool) -> str:
        texts = self.rules.booleans
        return plain_text(value) if texts is None else texts[0 if value else 1]

    def _category(self, text: str) -> str:
        rules = self.rules
        name = rules.categories.get(text)
        if name is not None:
            return name
        if rules.unseen == "error":
            raise NoText(
                f"the category {text!r:.80} is unknown; known: {_some(list(rules.categories))}; "
                "add it to categories, or pass unseen='keep' or a text that replaces it"
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
                raise NoText(f"decimals and thousands are for numbers, got {plain_text(value)!r:.80}")
            return _padded(plain_text(value), self.spec)
        value = whole(value)  # as in a column of integers
        if not isinstance(value, (int, float, Decimal)):
            raise NoText(f"the format {self._digits!r} is for numbers, got {value!r:.80}")
        try:
            return format(value, self._digits)
        except (ValueError, OverflowError) as error:
            raise NoText(f"the format {self._digits!r} does not go with {value!r:.80}: {error}") from None

    def _absent(self, count: int, rows: int, row: int | None) -> str | None:
        """Text of a missing value, unless the rule is to raise."""
        rule = self.rules.missing
        if rule == "omit":
            return None
        if rule == "say":
            return self._missing()
        if row is None:
            what = "is missing"
        else:
            what = f"is missing in all {rows} rows" if count == rows > 1 else f"is missing, first in row {row}"
        raise DataError(
            f"column {self.column!r} {what}, and its rule is missing='error'; "
            "fill it, or choose missing='omit' or missing='say'",
            row=row,
        )

    def _missing(self) -> str:
        return self.missing_text

    def _by_arrow(self, values: pa.Array) -> pa.Array | None:
        """Texts of an array by Arrow alone; None if that is not possible."""
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
        if self._framed:
            return join(self.rules.prefix, texts, self._tail)
        return texts

    def _by_value(self, values: pa.Array, first_row: int) -> pa.Array:
        uniques, codes = distinct(values)
        texts: list[str | None] = []
        for number, value in enumerate(self._python(uniques)):
            try:
                texts.append(None if value is None else self._text(value))
            except NoText as reason:
                row = first_row + (number if codes is None else codes.index(number).as_py())
                raise DataError(f"column {self.column!r}, row {row}: {reason}", row=row, data=value) from None
        made = pa.array(texts, TEXT)
        return made if codes is None else made.take(codes)

    def _python(self, uniques: pa.Array) -> list[Any]:
        try:
            return python_values(uniques)
        except NoText as reason:
            raise DataError(f"column {self.column!r}: {reason}") from None


def check_spec(spec: str, where: str) -> None:
    """Raise for a format that is not one of numbers, text or dates."""
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
    raise ConfigError(f"{where}: {spec!r} is not a format such as .2f, >10 or ',' for numbers, or %d %B %Y for dates")


def _digits(rules: ColumnFormat) -> str:
    """Format of `decimals` and `thousands`; a rounded -0.001 is 0.00."""
    comma = "," if rules.thousands else ""
    return comma if rules.decimals is None else f"z{comma}.{rules.decimals}f"


def _padded(text: str, spec: str) -> str:
    try:
        return format(text, spec)
    except ValueError:
        raise NoText(f"the format {spec!r} is for numbers, got {text!r:.80}") from None


def _some(values: Sequence[str]) -> str:
    shown = ", ".join(map(repr, values[:8]))
    return f"{shown} and {len(values) - 8} more" if len(values) > 8 else shown


_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_TO_ESCAPE = r'["\\\x00-\x1f]'


class JsonColumnFormatter(ColumnFormatter):
    """`ColumnFormatter` whose texts are JSON values. Infinity, which JSON lacks, is the text "inf"."""

    def _text(self, value: Any) -> str:
        rules = self.rules
        worded = bool(rules.categories or rules.prefix or rules.unit)
        if not worded:
            if isinstance(value, bool) and self.rules.booleans is None:
                return "true" if value else "false"
            if isinstance(value, (list, tuple, dict)):
                return json_text(value)
        text = super()._text(value)
        number = isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)
        if number and not worded and not rules.thousands and _NUMBER.fullmatch(text):
            return text
        return json_text(text)

    def _missing(self) -> str:
        return "null" if self.rules.missing_text is None else json_text(self.rules.missing_text)

    def _by_arrow(self, values: pa.Array) -> pa.Array | None:
        kind = values.type
        if pa.types.is_null(kind):
            return pa.nulls(len(values), TEXT)
        if self._framed or not self._as_is or (pa.types.is_boolean(kind) and self.rules.booleans is not None):
            return None
        if pa.types.is_boolean(kind):
            return pc.cast(values, TEXT)
        texts = super()._by_arrow(values)
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
