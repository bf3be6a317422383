"""Written templates: sentences such as `"{Name} was {Age:.0f} years old[, from {Embarked}]."`, and Jinja."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.templates.base_template import BaseTemplate, names_of
from penstock.templates.columns import ColumnFormat, ColumnFormatter, as_formats, check_spec, hidden
from penstock.templates.frames import as_row
from penstock.templates.values import TEXT, NoText, clean, join, python_values, whole


@dataclass(frozen=True, slots=True)
class Slot:
    """Column in a sentence."""

    column: str
    spec: str


@dataclass(frozen=True, slots=True)
class Optional:
    """Part in brackets, omitted if a value in it is missing. `start` and `stop` are its place in the text."""

    parts: tuple[str | Slot | Optional, ...]
    start: int
    stop: int


Part = str | Slot | Optional


class SentenceTemplate(BaseTemplate):
    """Text with columns in it.

        SentenceTemplate("titanic_v1", "{Name} was a {Sex} passenger[ aged {Age:.0f}][, from {Embarked}].",
                         columns={"Embarked": ColumnFormat(categories={"S": "Southampton", ...})})

    `{column}` is formatted by its `ColumnFormat`, `{column:spec}` by a Python format (`strftime` for dates). A part in
    `[...]` is omitted if a column in it is missing and its rule is `omit`; parts may be nested. Outside of brackets a
    missing value is written as "unknown", or as the column's `missing_text`. `{{ }} [[ ]]` are literal characters,
    except that a `]` inside a part always ends it; a name with `:`, `}` or spaces at its ends is quoted: `{"a:b"}`.
    """

    def __init__(
        self,
        name: str,
        text: str,
        *,
        version: str | int = "1",
        columns: Mapping[str, ColumnFormat | Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(name, version=version)
        self.text = text
        self.formats = as_formats(columns)
        self._parts = _parsed(name, text)
        self._formatters = {
            slot: ColumnFormatter(slot.column, self.formats.get(slot.column, ColumnFormat()), slot.spec)
            for slot in _slots(self._parts)
        }
        self._columns = tuple(dict.fromkeys(slot.column for slot in _slots(self._parts)))
        if unused := [column for column in self.formats if column not in self._columns]:
            raise ConfigError(
                f"template {name!r} has a format for column {unused[0]!r}, which its text does not use; "
                f"it uses {list(self._columns)}"
            )

    @classmethod
    def of(
        cls, name: str, text: str, *, version: str | int = "1", columns: Mapping[str, ColumnFormat | Mapping[str, Any]]
    ) -> SentenceTemplate:
        """Sentence with those of the formats of a whole table that it uses."""
        used = {slot.column for slot in _slots(_parsed(name, text))}
        return cls(name, text, version=version, columns={key: rule for key, rule in columns.items() if key in used})

    def without(self, columns: Collection[str]) -> SentenceTemplate:
        """Sentence without the `[...]` parts that name one of these columns.

        Columns that it does not use are ignored; one outside of brackets is an error.
        """
        left_out = {columns} if isinstance(columns, str) else set(columns)
        for part in self._parts:
            if isinstance(part, Slot) and part.column in left_out:
                raise ConfigError(
                    f"template {self.name!r} names column {part.column!r} outside of [...], so it cannot be omitted; "
                    "put that part in brackets, or write another sentence"
                )
        text = "".join(_kept(self.text, self._parts, left_out, 0, len(self.text)))
        return SentenceTemplate.of(self.name, text, version=self.version, columns=self.formats)

    def columns(self, available: Sequence[str] = ()) -> tuple[str, ...]:
        return self._columns

    def missing_rules(self) -> Mapping[str, str]:
        rules = {slot.column: "say" for slot in self._parts if isinstance(slot, Slot)}
        return rules | {name: rule.missing for name, rule in self.formats.items() if rule.missing != "omit"}

    def render_slice(self, table: pa.Table, first_row: int) -> pa.Array:
        said = {slot: formatter.many(table[slot.column], first_row) for slot, formatter in self._formatters.items()}

        def rendered(parts: Sequence[Part], *, must: bool) -> pa.Array:
            pieces: list[Any] = []
            for part in parts:
                if isinstance(part, Slot):
                    texts = said[part]
                    if must and texts.null_count:
                        texts = pc.fill_null(texts, pa.scalar(self._formatters[part].missing_text, TEXT))
                    pieces.append(texts)
                elif isinstance(part, Optional):
                    pieces.append(pc.fill_null(rendered(part.parts, must=False), pa.scalar("", TEXT)))
                else:
                    pieces.append(part)
            return join(*pieces)

        return rendered(self._parts, must=True)

    def render_row(self, row: Any) -> str:
        values = as_row(row)
        self.validate(list(values))
        said = {slot: formatter.one(values[slot.column]) for slot, formatter in self._formatters.items()}

        def rendered(parts: Sequence[Part], *, must: bool) -> str | None:
            pieces: list[str] = []
            for part in parts:
                if isinstance(part, Slot):
                    text = said[part]
                    if text is None:
                        if not must:
                            return None
                        text = self._formatters[part].missing_text
                    pieces.append(text)
                elif isinstance(part, Optional):
                    pieces.append(rendered(part.parts, must=False) or "")
                else:
                    pieces.append(part)
            return "".join(pieces)

        return rendered(self._parts, must=True) or ""

    def rules(self) -> dict[str, Any]:
        return {"text": self.text, "columns": {name: rule.to_dict() for name, rule in self.formats.items()}}


def _slots(parts: Sequence[Part]) -> Iterator[Slot]:
    for part in parts:
        if isinstance(part, Slot):
            yield part
        elif isinstance(part, Optional):
            yield from _slots(part.parts)


def _parsed(name: str, text: str) -> tuple[Part, ...]:
    if not isinstance(text, str):
        raise ConfigError(f"the text of template {name!r} must be a str, got {type(text).__name__}")
    parts = _Parser(text, f"template {name!r}").parse()
    if not any(_slots(parts)):
        raise ConfigError(
            f"the text of template {name!r} names no column: {text!r:.80}; write columns in braces, such as {{Age}}"
        )
    return parts


def _kept(text: str, parts: Sequence[Part], left_out: Collection[str], start: int, stop: int) -> Iterator[str]:
    """Text from `start` to `stop`, which has these parts, without the brackets that name an excluded column."""
    for part in parts:
        if not isinstance(part, Optional):
            continue
        yield text[start : part.start]
        start = part.stop
        here = {inner.column for inner in part.parts if isinstance(inner, Slot)}
        if not here & set(left_out):
            inside = _kept(text, part.parts, left_out, part.start + 1, part.stop - 1)
            # Without a column it is never omitted, and needs no brackets.
            bare = {slot.column for slot in _slots(part.parts)} <= set(left_out)
            yield from inside if bare else ("[", *inside, "]")
    yield text[start:stop]


class _Parser:
    """Parser of a written sentence."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where, self.at = text, where, 0

    def parse(self) -> tuple[Part, ...]:
        parts = self._parts(opened=None)
        assert self.at == len(self.text)
        return parts

    def _parts(self, opened: int | None) -> tuple[Part, ...]:
        """Parts up to the closing bracket; `opened` is the place of the opening one."""
        parts: list[Part] = []
        words: list[str] = []

        def end_words() -> None:
            if words:
                parts.append("".join(words))
                words.clear()

        while self.at < len(self.text):
            sign = self.text[self.at]
            if sign in "{}[]" and self.text[self.at : self.at + 2] == sign * 2 and not self._closes_two(sign, opened):
                words.append(sign)
                self.at += 2
            elif sign == "{":
                end_words()
                parts.append(self._slot())
            elif sign == "[":
                end_words()
                parts.append(self._optional())
            elif sign == "]" and opened is not None:
                end_words()
                return tuple(parts)
            elif sign in "}]":
                raise self._error(self.at, f"{sign!r} has no opening bracket; write {sign * 2!r} for a literal one")
            else:
                words.append(sign)
                self.at += 1
        if opened is not None:
            raise self._error(opened, "'[' is never closed; write '[[' for a literal '['")
        end_words()
        return tuple(parts)

    def _closes_two(self, sign: str, opened: int | None) -> bool:
        """True if `]]` ends two nested parts, and is not a literal `]`."""
        return sign == "]" and opened is not None

    def _optional(self) -> Optional:
        start = self.at
        self.at += 1
        parts = self._parts(opened=start)
        self.at += 1
        if not any(_slots(parts)):
            raise self._error(start, "a part in [...] needs a column; write [[ and ]] for literal brackets")
        return Optional(parts, start, self.at)

    def _slot(self) -> Slot:
        start = self.at
        self.at += 1
        quote = self.text[self.at : self.at + 1]
        if quote and quote in "\"'":
            end = self.text.find(quote, self.at + 1)
            if end < 0:
                raise self._error(start, f"the quote {quote} is never closed")
            column = self.text[self.at + 1 : end]
            self.at = end + 1
            if self.text[self.at : self.at + 1] not in (":", "}"):
                raise self._error(start, "a quoted name is followed by ':' or '}'")
        else:
            column = None
        end = self.text.find("}", self.at)
        inside = self.text[self.at : end] if end >= 0 else ""
        if end < 0 or "{" in inside:
            raise self._error(start, "'{' is never closed; write '{{' for a literal '{'")
        name, _, spec = inside.partition(":")
        column = name.strip() if column is None else column
        if not column:
            raise self._error(start, "a column needs a name, such as {Age}")
        check_spec(spec, f"{self.where}, column {column!r}")
        self.at = end + 1
        return Slot(column, spec)

    def _error(self, at: int, reason: str) -> ConfigError:
        around = self.text[max(0, at - 20) : at + 30]
        return ConfigError(f"{self.where}, character {at}: {reason} (at {around!r})")


_WHOLE_ROW = ("row", "said")


class JinjaTemplate(BaseTemplate):
    """Jinja template, run in the sandbox of chat templates; about ten times slower than a sentence.

    Columns are variables with plain Python values, and none for a missing one. `row["any name"]` is the value of any
    column, `said["any name"]` its text by its `ColumnFormat`.

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
        self._formatters: dict[str, ColumnFormatter] = {}

    def columns(self, available: Sequence[str] = ()) -> tuple[str, ...]:
        named = tuple(name for name in self._variables if name not in _WHOLE_ROW)
        if any(name in _WHOLE_ROW for name in self._variables):
            left_out = {*named, *hidden()}
            return (*named, *(name for name in available if name not in left_out))
        return named

    def validate(self, columns: pa.Schema | pa.Table | Sequence[str]) -> None:
        super().validate(columns)
        names = names_of(columns)
        for name in self.formats:
            if name not in names:
                hint = did_you_mean(name, names)
                raise SchemaError(f"template {self.name!r} has a format for column {name!r}, not in the data{hint}")

    def render_slice(self, table: pa.Table, first_row: int) -> pa.Array:
        columns = {}
        for name in table.schema.names:
            try:
                columns[name] = python_values(clean(table[name]))
            except NoText as reason:
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
        values = {name: whole(value) for name, value in values.items()}
        variables = {name: value for name, value in values.items() if name in self._variables}
        try:
            if "said" in self._variables:
                variables["said"] = {name: self._formatter(name).one(value) for name, value in values.items()}
            return str(self._program.render(**{"row": values, **variables}))
        except Exception as error:  # a template can raise anything
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
        except (RecursionError, ValueError) as error:  # too deep, or a number of too many digits
            raise ConfigError(f"template {self.name!r} cannot be compiled: {error}") from None
        return tuple(sorted(found - environment.globals.keys()))

    def _formatter(self, column: str) -> ColumnFormatter:
        if column not in self._formatters:
            self._formatters[column] = ColumnFormatter(column, self.formats.get(column, ColumnFormat()))
        return self._formatters[column]
