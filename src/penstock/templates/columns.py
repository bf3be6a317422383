"""How one column is said: its label, its unit, its digits, and what to do about a value that is missing or new."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, Self, get_args

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError
from penstock.templates.values import Unsayable, as_value, plain_text

__all__ = ["ColumnFormat", "Missing", "hidden", "hiding"]


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
