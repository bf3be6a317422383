"""`TabularTextConverter`: rows to text in one call."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, SchemaError
from penstock.templates.base_template import BaseTemplate
from penstock.templates.columns import ColumnFormat
from penstock.templates.frames import MixedTypes, as_row, as_table
from penstock.templates.sentences import SentenceTemplate
from penstock.templates.styles import STYLES

__all__ = ["TabularTextConverter", "make_style"]

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
