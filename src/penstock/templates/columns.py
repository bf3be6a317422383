"""How one column is said: its label, its unit, its digits, and what to do about a value that is missing or new."""

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

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, DataError
from penstock.templates.values import (
    TEXT,
    FineDuration,
    FineMoment,
    Unsayable,
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

__all__ = ["ColumnFormat", "ColumnFormatter", "JsonColumnFormatter", "Missing", "check_spec", "hidden", "hiding"]


Missing = Literal["omit", "say", "error"]
"""What to do about a missing value: leave its part of the text out, say that it is missing, or stop."""

_NOTHING: Mapping[Any, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnFormat:
    """The rules for one column. Without any: digits, floats in their shortest form, yes and no, ISO dates.

        ColumnFormat(name="fare", prefix="£", decimals=2)                       £7.25
        ColumnFormat(unit="years", missing="say")                               22 years, unknown
        ColumnFormat(categories={"S": "Southampton"}, unseen="keep")            Southampton

    A category is looked up by what it would be said as, so `{1: "first"}` also finds "1" and 1.0.
    """

    name: str = ""
    """What the column is called in the text; empty: as it is called in the table."""
    description: str = ""
    """What it means, in a few words that can follow "The": sentences say it instead of the name."""
    unit: str = ""
    """Said after numbers and texts, with a space between."""
    prefix: str = ""
    """Said before them, without one, such as a currency."""
    decimals: int | None = None
    """Digits after the point, rounded; None: as many as the number has."""
    thousands: bool = False
    """Whether to write 1,000,000."""
    missing: Missing = "omit"
    missing_text: str | None = None
    """Under `missing="say"`, and outside the brackets of a sentence; None: "unknown", and null in JSON."""
    categories: Mapping[Any, str] = field(default_factory=lambda: _NOTHING)
    """Values and their names; empty: the values are said themselves."""
    unseen: str = "error"
    """A value that `categories` lacks: "error" stops, "keep" says the value, any other text is said instead."""
    true_text: str | None = None
    """None: "yes", and true in JSON."""
    false_text: str | None = None
    date_format: str = ""
    """As in `strftime`; empty: ISO 8601, and only the date at midnight."""

    def __post_init__(self) -> None:
        if self.missing not in get_args(Missing):
            raise ConfigError(f"missing must be 'omit', 'say' or 'error', got {self.missing!r}")
        if self.decimals is not None and (type(self.decimals) is not int or not 0 <= self.decimals <= 100):
            raise ConfigError(f"decimals must be a whole number from 0 to 100, or None, got {self.decimals!r}")
        if not isinstance(self.thousands, bool):
            raise ConfigError(f"thousands must be true or false, got {self.thousands!r}")
        for key in ("name", "description", "unit", "prefix", "unseen", "date_format"):
            if not isinstance(getattr(self, key), str):
                raise ConfigError(f"{key} must be text, got {getattr(self, key)!r}")
        for key in ("missing_text", "true_text", "false_text"):
            if not isinstance(getattr(self, key), str | None):
                raise ConfigError(f"{key} must be text or None, got {getattr(self, key)!r}")
        if not isinstance(self.categories, Mapping):
            raise ConfigError(f"categories must map values to names, got {self.categories!r}")
        object.__setattr__(self, "categories", MappingProxyType(_by_text(self.categories)))

    def label(self, column: str) -> str:
        """What a column with this format is called in the text."""
        return self.name or column

    def subject(self, column: str) -> str:
        """What a sentence about it begins with."""
        return self.description or self.label(column)

    def to_dict(self) -> dict[str, Any]:
        """The rules that are not the usual ones, JSON-able."""
        usual = ColumnFormat()
        rules = {part.name: getattr(self, part.name) for part in fields(self)}
        return {
            key: dict(value) if key == "categories" else value
            for key, value in rules.items()
            if value != getattr(usual, key)
        }

    @classmethod
    def from_dict(cls, rules: Mapping[str, Any]) -> Self:
        if not isinstance(rules, Mapping):
            raise ConfigError(f"the rules of a column are keys such as 'unit: years', got {rules!r}")
        known = [part.name for part in fields(cls)]
        for key in rules:
            if key not in known:
                hint = did_you_mean(str(key), known) or f"; the rules are {', '.join(known)}"
                raise ConfigError(f"unknown rule {key!r} for a column{hint}")
        return cls(**rules)

    def __reduce__(self) -> tuple[Any, ...]:
        return ColumnFormat.from_dict, (self.to_dict(),)  # a mapping proxy cannot be pickled


def as_formats(given: Mapping[str, ColumnFormat | Mapping[str, Any]] | None) -> dict[str, ColumnFormat]:
    """Formats by column, each given as itself or as the keys of one."""
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
        except Unsayable as error:
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
    """Within it, a template that says whatever columns a row has says nothing of these; one that names them does.

    A dataset hides its target this way while it makes a sample, so that `TabularTextConverter().convert_row(row)` of a
    row that still has its label does not put the answer into the text.
    """
    token = _HIDDEN.set((*_HIDDEN.get(), *columns))
    try:
        yield
    finally:
        _HIDDEN.reset(token)


def hidden() -> tuple[str, ...]:
    """The columns that are hidden here."""
    return _HIDDEN.get()


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
