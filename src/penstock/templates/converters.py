"""Rows to text without ceremony: `TabularTextConverter().convert_row(row)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pyarrow as pa

from penstock._dtypes import did_you_mean
from penstock.errors import ConfigError
from penstock.templates.base_template import BaseTemplate
from penstock.templates.columns import ColumnFormat
from penstock.templates.frames import MixedTypes, as_row, as_table
from penstock.templates.sentences import SentenceTemplate
from penstock.templates.styles import STYLES

__all__ = ["TabularTextConverter", "hiding"]

_HIDDEN: ContextVar[tuple[str, ...]] = ContextVar("hidden", default=())


@contextmanager
def hiding(columns: Sequence[str]) -> Iterator[None]:
    """Within it, a style says nothing of these columns, unless `only` names them.

    A dataset hides its target this way while it makes a sample, so that `TabularTextConverter().convert_row(row)` of a
    row that still has its label does not put the answer into the text.
    """
    token = _HIDDEN.set((*_HIDDEN.get(), *columns))
    try:
        yield
    finally:
        _HIDDEN.reset(token)


class TabularTextConverter:
    """The text of a row, and of a whole table at once; both are the same text.

        TabularTextConverter().convert_row(row)                                       every column, in short sentences
        TabularTextConverter(style="json", target="Survived").convert_batch(df)
        TabularTextConverter("{Name} was {Age:.0f}[, from {Embarked}].").convert_batch("train.csv")

    `template` is a template, or a sentence as it is written; without one the text is made from the columns, in a
    `style`: natural, key_value, markdown, json or list. `columns`, `only` and `exclude` are those of the style. The
    `target` is never in the text, and need not be in the data; within a `KaggleDataset` neither is the target of its
    spec, if the text is made from all columns. Tables are whatever `as_table` takes.
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
        self._says_all = template is None and only is None
        if template is None:
            left_out = (exclude,) if isinstance(exclude, str) else tuple(exclude)
            self.template = make_style(
                style,
                columns={name: rule for name, rule in (columns or {}).items() if name not in self.target},
                only=only,
                exclude=[name for name in left_out if name not in self.target],
            )
        elif only is not None or exclude:
            raise ConfigError("only= and exclude= choose the columns of a style; a template has chosen its own")
        elif isinstance(template, str):
            self.template = SentenceTemplate("sentence", template, columns=columns)
        elif columns is not None:
            raise ConfigError("columns= is for styles and written sentences; a template has its own formats")
        else:
            self.template = template
        for name in self.target:
            if name in self.template.columns(()):
                raise ConfigError(f"template {self.template.name!r} says {name!r}, which is the target")

    def convert_row(self, row: Any) -> str:
        """The text of one row: a pandas Series, a mapping, a named tuple."""
        values = as_row(row)
        for name in self._left_out():
            values.pop(name, None)
        return self.template.render_row(values)

    def convert_batch(self, data: Any) -> list[str]:
        """The text of every row of a table, in order."""
        return texts_of(self.template, self._without_target(data))

    def convert_table(self, data: Any) -> pa.StringArray | pa.LargeStringArray:
        """The same as an Arrow array, whose type is `large_string` only where the texts pass two gigabytes."""
        return array_of(self.template, self._without_target(data))

    def _without_target(self, data: Any) -> pa.Table:
        table = as_table(data, mixed=self.mixed)
        here = [name for name in self._left_out() if name in table.schema.names]
        return table.drop_columns(here) if here else table

    def _left_out(self) -> set[str]:
        return {*self.target, *(_HIDDEN.get() if self._says_all else ())}

    def __repr__(self) -> str:
        target = f", target={list(self.target)}" if self.target else ""
        return f"TabularTextConverter({self.template!r}{target})"


def make_style(style: str, **options: Any) -> BaseTemplate:
    """A style by its name."""
    if style not in STYLES:
        hint = did_you_mean(str(style), STYLES) or f"; the styles are {', '.join(STYLES)}"
        raise ConfigError(f"unknown style {style!r}{hint}")
    return STYLES[style](**options)


def texts_of(template: BaseTemplate, table: pa.Table) -> list[str]:
    """What a template says of each row, as Python texts."""
    if not table.num_rows and not table.num_columns:
        return []  # no rows at all have no columns either
    texts: list[str] = []
    for chunk in template.render_chunks(table):
        texts += chunk.to_pylist()
    return texts


def array_of(template: BaseTemplate, table: pa.Table) -> pa.StringArray | pa.LargeStringArray:
    """The same as one Arrow array."""
    if not table.num_rows and not table.num_columns:
        return pa.array([], pa.string())
    texts = template.render(table)
    if texts.num_chunks == 1:
        return texts.chunk(0)
    if texts.nbytes > 1 << 31:
        texts = texts.cast(pa.large_string())
    return texts.combine_chunks()
