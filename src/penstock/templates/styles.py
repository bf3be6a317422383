"""Styles: templates over all columns, as sentences, keys and values, lists, Markdown or JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import pyarrow as pa
import pyarrow.compute as pc

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, SchemaError
from penstock.templates.base_template import BaseTemplate, names_of
from penstock.templates.columns import ColumnFormat, ColumnFormatter, JsonColumnFormatter, as_formats, hidden
from penstock.templates.frames import as_row
from penstock.templates.values import TEXT, join, join_parts, json_text

__all__ = ["STYLES", "JsonTemplate", "KeyValueTemplate", "ListTemplate", "MarkdownTemplate", "NaturalTemplate"]

_BREAKS = r"\r\n|\r|\n"


class StyleTemplate(BaseTemplate):
    """One part for each column, joined the same way in every row; the part of a missing value is omitted.

    `columns` has the formats of columns, `only` selects columns and their order, `exclude` omits columns. A column that
    the data lacks is an error in all three: a misspelt target would be in the text.
    """

    default_name: ClassVar[str]
    opening: str = ""
    between: str = " "
    ending: str = ""
    tail: str = ""
    formatter: ClassVar[type[ColumnFormatter]] = ColumnFormatter

    def __init__(
        self,
        name: str | None = None,
        *,
        version: str | int = "1",
        columns: Mapping[str, ColumnFormat | Mapping[str, Any]] | None = None,
        only: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        super().__init__(self.default_name if name is None else name, version=version)
        self.formats = as_formats(columns)
        self.only = None if only is None else _names(only, "only")
        self.exclude = _names(exclude, "exclude")
        both = [column for column in self.only or () if column in self.exclude]
        if both:
            raise ConfigError(f"column {both[0]!r} is in only= and in exclude=")
        self._formatters: dict[str, ColumnFormatter] = {}

    def columns(self, available: Sequence[str] = ()) -> tuple[str, ...]:
        if self.only is not None:
            return self.only
        left_out = {*self.exclude, *hidden()}
        return tuple(name for name in available if name not in left_out)

    def validate(self, columns: pa.Schema | pa.Table | Sequence[str]) -> None:
        super().validate(columns)
        names = names_of(columns)
        for what, wanted in (("a format for", self.formats), ("exclude=", self.exclude)):
            for name in wanted:
                if name not in names:
                    hint = did_you_mean(name, names)
                    raise SchemaError(
                        f"template {self.name!r} has {what} column {name!r}, the data has {list(names)}{hint}"
                    )

    def missing_rules(self) -> Mapping[str, str]:
        return {name: rule.missing for name, rule in self.formats.items()}

    def render_slice(self, table: pa.Table, first_row: int) -> pa.Array:
        parts = []
        for name in self.columns(table.schema.names):
            formatter = self._formatter(name)
            texts = self.escaped(formatter.many(table[name], first_row))
            parts.append((self.lead(formatter.rules, name), texts, self.tail))
        if not parts:
            return pa.repeat(pa.scalar(self.opening + self.ending, TEXT), table.num_rows)
        texts = join_parts(parts, self.between)
        return join(self.opening, texts, self.ending) if self.opening or self.ending else texts

    def render_row(self, row: Any) -> str:
        values = as_row(row)
        self.validate(list(values))
        parts = []
        for name in self.columns(list(values)):
            formatter = self._formatter(name)
            text = formatter.one(values[name])
            if text is not None:
                parts.append(f"{self.lead(formatter.rules, name)}{self.escape(text)}{self.tail}")
        return f"{self.opening}{self.between.join(parts)}{self.ending}"

    def rules(self) -> dict[str, Any]:
        return {
            "columns": {name: rule.to_dict() for name, rule in self.formats.items()},
            "only": None if self.only is None else list(self.only),
            "exclude": sorted(self.exclude),
        }

    def lead(self, rules: ColumnFormat, column: str) -> str:
        """Text before the value of a column."""
        raise NotImplementedError

    def escape(self, text: str) -> str:
        """Value, escaped for the style."""
        return text

    def escaped(self, texts: pa.Array) -> pa.Array:
        """The same for an array."""
        return texts

    def _formatter(self, column: str) -> ColumnFormatter:
        if column not in self._formatters:
            self._formatters[column] = self.formatter(column, self.formats.get(column, ColumnFormat()))
        return self._formatters[column]


class NaturalTemplate(StyleTemplate):
    """Short sentence for each column: "The Age is 22. The Sex is male."; a description replaces the name."""

    default_name = "natural"
    tail = "."

    def lead(self, rules: ColumnFormat, column: str) -> str:
        return f"The {rules.subject(column)} is "


class KeyValueTemplate(StyleTemplate):
    """Names and values on one line: "Age: 22 | Sex: male"."""

    default_name = "key_value"

    def __init__(self, name: str | None = None, *, between: str = " | ", colon: str = ": ", **options: Any) -> None:
        super().__init__(name, **options)
        self.between, self.colon = between, colon

    def lead(self, rules: ColumnFormat, column: str) -> str:
        return f"{rules.label(column)}{self.colon}"

    def rules(self) -> dict[str, Any]:
        return {**super().rules(), "between": self.between, "colon": self.colon}


class ListTemplate(StyleTemplate):
    """Line for each column, as in TabLLM: "- Age: 22". Further lines of a value are indented."""

    default_name = "list"
    between = "\n"

    def lead(self, rules: ColumnFormat, column: str) -> str:
        return f"- {self.escape(rules.label(column))}: "

    def escape(self, text: str) -> str:
        return text.replace("\n", "\n  ")

    def escaped(self, texts: pa.Array) -> pa.Array:
        return pc.replace_substring(texts, "\n", "\n  ") if _has(texts, "\n") else texts


class MarkdownTemplate(StyleTemplate):
    """Markdown table of two columns, or a list of "- **Age**: 22"; bars, backslashes and line ends are escaped."""

    default_name = "markdown"

    def __init__(self, name: str | None = None, *, layout: Literal["table", "list"] = "table", **options: Any) -> None:
        super().__init__(name, **options)
        if layout not in ("table", "list"):
            raise ConfigError(f"layout must be 'table' or 'list', got {layout!r}")
        self.layout = layout
        self.opening = "| Column | Value |\n| --- | --- |" if layout == "table" else ""
        self.between = "" if layout == "table" else "\n"
        self.tail = " |" if layout == "table" else ""

    def lead(self, rules: ColumnFormat, column: str) -> str:
        label = self.escape(rules.label(column))
        return f"\n| {label} | " if self.layout == "table" else f"- **{label}**: "

    def escape(self, text: str) -> str:
        text = text.replace("\\", "\\\\").replace("|", "\\|")
        return text.replace("\r\n", "<br>").replace("\r", "<br>").replace("\n", "<br>")

    def escaped(self, texts: pa.Array) -> pa.Array:
        if _has(texts, "\\"):
            texts = pc.replace_substring(texts, "\\", "\\\\")
        if _has(texts, "|"):
            texts = pc.replace_substring(texts, "|", "\\|")
        if _has(texts, "\n") or _has(texts, "\r"):
            texts = pc.replace_substring_regex(texts, _BREAKS, "<br>")
        return texts

    def rules(self) -> dict[str, Any]:
        return {**super().rules(), "layout": self.layout}


class JsonTemplate(StyleTemplate):
    """JSON object: numbers and booleans as such; a missing value is omitted, or null with `missing="say"`."""

    default_name = "json"
    opening, between, ending = "{", ", ", "}"
    formatter = JsonColumnFormatter

    def validate(self, columns: pa.Schema | pa.Table | Sequence[str]) -> None:
        super().validate(columns)
        names = names_of(columns)
        keys: dict[str, str] = {}
        for name in self.columns(list(names)):
            other = keys.setdefault(self._formatter(name).rules.label(name), name)
            if other != name:
                raise SchemaError(f"template {self.name!r}: columns {other!r} and {name!r} would have the same key")

    def lead(self, rules: ColumnFormat, column: str) -> str:
        return f"{json_text(rules.label(column))}: "


STYLES: Mapping[str, Callable[..., StyleTemplate]] = {
    kind.default_name: kind
    for kind in (NaturalTemplate, KeyValueTemplate, MarkdownTemplate, JsonTemplate, ListTemplate)
}
"""Styles by name."""


def _names(given: Sequence[str], option: str) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(f"{option} holds column names, got {name!r}")
        if names.count(name) > 1:
            raise ConfigError(f"column {name!r} is in {option}= twice")
    return names


def _has(texts: pa.Array, sign: str) -> bool:
    return bool(pc.any(pc.match_substring(texts, sign)).as_py())
