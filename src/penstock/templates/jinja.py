"""Templates in Jinja: everything a program can say, one row at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.templates.base_template import BaseTemplate
from penstock.templates.columns import ColumnFormat, as_formats, hidden
from penstock.templates.format_column import ColumnFormatter
from penstock.templates.frames import as_row
from penstock.templates.values import TEXT, Unsayable, clean, python_values, whole

__all__ = ["JinjaTemplate"]

_WHOLE_ROW = ("row", "said")


class JinjaTemplate(BaseTemplate):
    """A Jinja template, run in the same sandbox as chat templates. Some ten times slower than a sentence.

    Columns are variables of their names, with plain Python values and none where one is missing. `row["any name"]`
    reaches every column, `said["any name"]` its text by its `ColumnFormat`.

        JinjaTemplate("ages", "{{ Name }} is {% if Age is none %}of unknown age{% else %}{{ said.Age }}{% endif %}.")
    """

    slice_rows = 4096

    def __init__(
        self,
        name: str,
        source: str,
        *,
        version: str | int = "1",
        columns: Mapping[str, ColumnFormat | Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(name, version=version)
        self.source, self.formats = source, as_formats(columns)
        self._variables = self._find_variables()
        self._sayers: dict[str, ColumnFormatter] = {}

    def columns(self, available: Sequence[str] = ()) -> tuple[str, ...]:
        named = tuple(name for name in self._variables if name not in _WHOLE_ROW)
        if any(name in _WHOLE_ROW for name in self._variables):
            left_out = {*named, *hidden()}
            return (*named, *(name for name in available if name not in left_out))
        return named

    def validate(self, columns: pa.Schema | pa.Table | Sequence[str]) -> None:
        super().validate(columns)
        names = columns.names if isinstance(columns, pa.Schema) else getattr(columns, "column_names", columns)
        for name in self.formats:
            if name not in names:
                hint = did_you_mean(name, names)
                raise SchemaError(f"template {self.name!r} has a format for column {name!r}, not in the data{hint}")

    def render_slice(self, table: pa.Table, first_row: int) -> pa.Array:
        columns = {}
        for name in table.schema.names:
            try:
                columns[name] = python_values(clean(table[name]))
            except Unsayable as reason:
                raise DataError(f"column {name!r}: {reason}") from None
        texts = []
        for row in range(table.num_rows):
            values = {name: column[row] for name, column in columns.items()}
            texts.append(self._text(values, f", row {first_row + row}"))
        return pa.array(texts, TEXT)

    def render_row(self, row: Any) -> str:
        values = as_row(row)
        self.validate(list(values))
        return self._text({name: values[name] for name in self.columns(list(values))}, "")

    def rules(self) -> dict[str, Any]:
        return {"source": self.source, "columns": {name: rule.to_dict() for name, rule in self.formats.items()}}

    def _text(self, values: dict[str, Any], where: str) -> str:
        import jinja2  # here: it takes a while to load

        values = {name: whole(value) for name, value in values.items()}
        variables = {name: value for name, value in values.items() if name in self._variables}
        try:
            if "said" in self._variables:
                variables["said"] = {name: self._sayer(name).one(value) for name, value in values.items()}
            return str(self._program.render(**{"row": values, **variables}))
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
            raise DataError(f"template {self.name!r}{where}: {error}") from error

    @property
    def _program(self) -> Any:
        from penstock.chat.sandbox import compiled

        return compiled(self.source, marks=False)  # once in a process

    def _find_variables(self) -> tuple[str, ...]:
        import jinja2
        from jinja2.meta import find_undeclared_variables

        from penstock.chat.sandbox import Sandbox, sandboxed

        environment = sandboxed(Sandbox, marks=False)
        try:
            found = find_undeclared_variables(environment.parse(self.source))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"template {self.name!r}, line {error.lineno}: {error.message}") from error
        return tuple(sorted(found - environment.globals.keys()))

    def _sayer(self, column: str) -> ColumnFormatter:
        if column not in self._sayers:
            self._sayers[column] = ColumnFormatter(column, self.formats.get(column, ColumnFormat()))
        return self._sayers[column]
