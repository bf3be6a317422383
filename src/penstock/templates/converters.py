"""Converters of tables to text, and their styles: sentences, keys and values, lists, Markdown or JSON."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import pyarrow as pa
import pyarrow.compute as pc

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, SchemaError
from penstock.templates.base_template import BaseTemplate, names_of
from penstock.templates.columns import ColumnFormat, ColumnFormatter, JsonColumnFormatter, as_formats, hidden
from penstock.templates.frames import MixedTypes, as_row, as_table
from penstock.templates.sentences import SentenceTemplate
from penstock.templates.values import TEXT, join, join_parts, json_text

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


_NEAR = 0.8


class TabularTextConverter:
    """Text of a row, or of all rows of a table at once; both give the same text.

        TabularTextConverter().convert_row(row)                                       every column, in short sentences
        TabularTextConverter(style="json", target="Survived").convert_batch(df)
        TabularTextConverter("{Name} was {Age:.0f}[, from {Embarked}].").convert_batch("train.csv")

    `template` is a template, a written sentence, or the name of a style; the default is a `style` over the columns:
    natural, key_value, markdown, json or list. `columns`, `only` and `exclude` are options of the style. The `target`
    is never in the text and need not be in the data, but a column that looks like a misspelt target is an error. Inside
    a `KaggleDataset` a style omits the target of its spec too. Tables are anything that `as_table` takes.
    """

    def __init__(
        self,
        template: BaseTemplate | str | None = None,
        *,
        style: str = "natural",
        columns: Mapping[str, ColumnFormat | Mapping[str, Any]] | None = None,
        only: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        target: str | Sequence[str] | None = None,
        mixed: MixedTypes = "error",
    ) -> None:
        self.target = () if target is None else (target,) if isinstance(target, str) else tuple(target)
        self.mixed = mixed
        if isinstance(template, str) and template in STYLES:
            if style not in ("natural", template):
                raise ConfigError(f"{template!r} and style={style!r} are two styles; pass one")
            style, template = template, None
        if template is None:
            left_out = (exclude,) if isinstance(exclude, str) else tuple(exclude)
            self.template = make_style(
                style,
                columns={name: rule for name, rule in (columns or {}).items() if name not in self.target},
                only=only,
                exclude=[name for name in left_out if name not in self.target],
            )
        elif only is not None or exclude:
            raise ConfigError("only= and exclude= are for styles; a template has its own columns")
        elif isinstance(template, str):
            if "{" not in template:
                hint = did_you_mean(template, STYLES) or f"; the styles are {', '.join(STYLES)}"
                raise ConfigError(
                    f"{template!r:.80} is neither a sentence with columns such as '{{Age}}' nor a style{hint}"
                )
            self.template = SentenceTemplate("sentence", template, columns=columns)
        elif columns is not None:
            raise ConfigError("columns= is for styles and written sentences; a template has its own formats")
        else:
            self.template = template
        for name in self.target:
            if name in self.template.columns(()):
                raise ConfigError(f"template {self.template.name!r} renders {name!r}, the target")

    def convert_row(self, row: Any) -> str:
        """Text of one row: a pandas Series, a mapping, a named tuple."""
        values = as_row(row)
        for name in targets_in(values, self.target, self.template):
            del values[name]
        return self.template.render_row(values)

    def convert_batch(self, data: Any) -> list[str]:
        """Text of every row of a table, in order."""
        return self.template.convert_batch(self._without_target(data))

    def convert_table(self, data: Any) -> pa.StringArray | pa.LargeStringArray:
        """The same as an Arrow array, of type `large_string` if the texts exceed two gigabytes."""
        return self.template.convert_table(self._without_target(data))

    def _without_target(self, data: Any) -> pa.Table:
        table = as_table(data, mixed=self.mixed)
        here = targets_in(table.schema.names, self.target, self.template)
        return table.drop_columns(here) if here else table

    def __repr__(self) -> str:
        target = f", target={list(self.target)}" if self.target else ""
        return f"TabularTextConverter({self.template!r}{target})"


def targets_in(names: Iterable[str], target: Sequence[str], template: BaseTemplate) -> list[str]:
    """Targets among some columns; raises for a column that looks like a misspelt target."""
    columns = list(names)
    for name in target:
        if name not in columns and (near := _misspelt(name, template.columns(columns))) is not None:
            raise SchemaError(
                f"target {name!r} is not in the data, and {near!r} would be in the text; "
                f"pass target={near!r} if it is the target, or no target for data without one"
            )
    return [name for name in target if name in columns]


def _misspelt(name: str, columns: Sequence[str]) -> str | None:
    """Column that differs from a name by a letter or two; columns with different numbers are different."""
    for column in columns:
        a, b = name.casefold(), column.casefold()
        if re.findall(r"\d+", a) == re.findall(r"\d+", b) and difflib.SequenceMatcher(None, a, b).ratio() >= _NEAR:
            return column
    return None


def make_style(style: str, **options: Any) -> BaseTemplate:
    """Style of a name."""
    if style not in STYLES:
        hint = did_you_mean(str(style), STYLES) or f"; the styles are {', '.join(STYLES)}"
        raise ConfigError(f"unknown style {style!r}{hint}")
    return STYLES[style](**options)
