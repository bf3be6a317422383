"""`BaseTemplate`: one text for each row of a table."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.content_hash import UnnamedError, content_hash
from penstock.templates.frames import MixedTypes, as_row, as_table


def identity(kind: type) -> str:
    """Name of a class of penstock; for any other class module, name and a hash of its content.

    The content is its code and that of its bases, with everything of the user's own that they refer to.
    """
    if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return kind.__name__
    try:
        content = content_hash(kind)
    except UnnamedError as error:
        raise ConfigError(
            f"{kind.__qualname__} has no content to tell it from other templates ({error}); give it an attribute "
            "`fingerprint`, a text that changes with its texts"
        ) from error
    return f"{kind.__module__}.{kind.__qualname__} {content}"


logger = logging.getLogger(__name__)

_RULES = 1
"""Part of the fingerprint; raised when the same template renders other texts."""
_SLICE_BYTES = 64 << 20
_MAX_BYTES = (1 << 31) - 1


class BaseTemplate(ABC):
    """One text for each row of a table, rendered column by column.

    A subclass has a `name`, returns the `columns` that it uses and the `rules` that decide its text, and renders the
    texts of a few thousand rows at once in `render_slice`.
    """

    name: str
    version: str = "1"
    slice_rows: int = 65_536
    """Rows rendered at once; this bounds the memory of intermediate results."""

    def __init__(self, name: str, *, version: str | int = "1") -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the name of a template must be a text that is not empty, got {name!r}")
        self.name, self.version = name, version_text(version)

    @abstractmethod
    def columns(self, available: Sequence[str]) -> tuple[str, ...]:
        """Columns that it uses of a table with these columns; for `()`, the columns that it requires."""

    @abstractmethod
    def render_slice(self, table: pa.Table, first_row: int) -> pa.Array:
        """Texts of these rows, as `string` or `large_string`. `first_row` is the number of the first, for errors."""

    @abstractmethod
    def rules(self) -> dict[str, Any]:
        """Everything that decides the text, as JSON values."""

    def render(self, table: pa.Table) -> pa.ChunkedArray:
        """Text of every row, as `string`, with a chunk for each slice of the table."""
        return pa.chunked_array(list(self.render_chunks(table)), pa.string())

    def render_chunks(self, table: pa.Table) -> Iterator[pa.StringArray]:
        """The same slice by slice, for texts that do not fit into memory."""
        self.validate(table.schema)
        used = table.select(list(self.columns(table.schema.names)))
        self._warn_of_empty_columns(used)
        for start, part in self._slices(used):
            yield from _as_strings(self.render_slice(part, start))

    def render_row(self, row: Any) -> str:
        """Text of one row, equal to its text in a table."""
        values = as_row(row)
        self.validate(list(values))
        used = {name: [values[name]] for name in self.columns(list(values))}
        # A row without columns is still a row.
        table = pa.table(used) if used else pa.table({"": pa.nulls(1)})
        return str(self.render_slice(table, 0)[0].as_py())

    def convert_row(self, row: Any) -> str:
        """Text of one row: a pandas Series, a mapping, a named tuple."""
        return self.render_row(row)

    def convert_batch(self, data: Any, *, mixed: MixedTypes = "error") -> list[str]:
        """Text of every row of anything that `as_table` takes, in order."""
        table = as_table(data, mixed=mixed)
        if not table.num_rows and not table.num_columns:
            return []  # an empty list has no columns
        texts: list[str] = []
        for chunk in self.render_chunks(table):
            texts += chunk.to_pylist()
        return texts

    def convert_table(self, data: Any, *, mixed: MixedTypes = "error") -> pa.StringArray | pa.LargeStringArray:
        """The same as an Arrow array, of type `large_string` if the texts exceed two gigabytes."""
        table = as_table(data, mixed=mixed)
        if not table.num_rows and not table.num_columns:
            return pa.array([], pa.string())
        texts = self.render(table)
        if texts.num_chunks == 1:
            return texts.chunk(0)
        if texts.nbytes > 1 << 31:
            texts = texts.cast(pa.large_string())
        return texts.combine_chunks()

    def validate(self, columns: pa.Schema | pa.Table | Sequence[str]) -> None:
        """Raise `SchemaError` if a required column is not among these."""
        names = names_of(columns)
        for name in self.columns(()):
            if name not in names:
                hint = did_you_mean(name, names)
                raise SchemaError(f"template {self.name!r} uses column {name!r}, the data has {names}{hint}")

    def describe(self) -> dict[str, Any]:
        """Kind, name, version and rules."""
        return {"kind": type(self).__name__, "name": self.name, "version": self.version, **self.rules()}

    @property
    def fingerprint(self) -> str:
        """Digest that is equal for templates that render the same texts, under any name.

        It covers the rules and the class; for a class outside of penstock also its code.
        """
        content = [_RULES, identity(type(self)), self.rules()]
        return str(xxhash.xxh3_128_hexdigest(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, BaseTemplate) and other.describe() == self.describe()

    def __hash__(self) -> int:
        return hash((self.name, self.version))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, version={self.version!r})"

    def _slices(self, table: pa.Table) -> Iterator[tuple[int, pa.Table]]:
        rows = table.num_rows
        step = max(1, min(self.slice_rows, rows * _SLICE_BYTES // max(1, table.nbytes) if rows else 1))
        for start in range(0, rows, step):
            yield start, table.slice(start, min(step, rows - start))  # or a table without columns would grow

    def missing_rules(self) -> Mapping[str, str]:
        """Rules for missing values by column, if they are not `omit`."""
        return {}

    def _warn_of_empty_columns(self, table: pa.Table) -> None:
        """Warn once of each column without a value: most often a file was read or joined wrongly."""
        warned: set[str] = self.__dict__.setdefault("_warned", set())  # a subclass may skip our constructor
        for name, column in zip(table.schema.names, table.columns):
            if table.num_rows > 1 and name not in warned and _is_empty(column):
                warned.add(name)
                what = _CONSEQUENCES[self.missing_rules().get(name, "omit")]
                rows = table.num_rows
                logger.warning("template %r: column %r is missing in all %d rows, so %s", self.name, name, rows, what)


_CONSEQUENCES = {
    "omit": "every text omits it (missing='omit')",
    "say": "it is unknown in every text (missing='say')",
    "error": "this is an error (missing='error')",
}


def version_text(version: str | int) -> str:
    """Version as text: 2 is "2"."""
    if isinstance(version, int) and not isinstance(version, bool):
        return str(version)
    if not isinstance(version, str) or not version:
        raise ConfigError(f"the version of a template must be text or an integer, got {version!r}")
    return version


def _is_empty(column: pa.ChunkedArray) -> bool:
    if column.null_count or not pa.types.is_floating(column.type):
        return bool(column.null_count == len(column))
    return bool(pc.all(pc.is_nan(column)).as_py())


def names_of(columns: pa.Schema | pa.Table | Sequence[str]) -> list[str]:
    """Names of a schema, of a table, or of a list of names."""
    return list(columns.names if isinstance(columns, pa.Schema) else getattr(columns, "column_names", columns))


def _as_strings(texts: pa.Array) -> Iterator[pa.Array]:
    """Texts with 32-bit offsets, in as few pieces as possible."""
    if texts.type == pa.string():
        yield texts
    elif texts.nbytes - 8 * len(texts) <= _MAX_BYTES - 64:
        yield texts.cast(pa.string())
    elif len(texts) == 1:
        raise DataError(f"the text of one row has {texts.nbytes:,} bytes; the limit of Arrow is {_MAX_BYTES:,}")
    else:
        middle = len(texts) // 2
        yield from _as_strings(texts.slice(0, middle))
        yield from _as_strings(texts.slice(middle))
