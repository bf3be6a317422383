"""`BaseTemplate`: one text for each row of a table."""

from __future__ import annotations

import functools
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.templates.frames import MixedTypes, as_row, as_table

_PLAIN = (str, bytes, int, float, bool, type(None))


def identity(kind: type) -> str:
    """Name of a class of penstock; for any other class module, name and a digest of its code.

    The digest covers the code of its methods, with defaults and closures, and plain attributes, in the class and its
    bases; it does not cover functions that the methods call.
    """
    if _is_ours(kind):
        return kind.__name__
    digest = xxhash.xxh3_128()
    for base in inspect.getmro(kind):
        digest.update(f"\n{base.__module__}.{base.__qualname__}".encode())
        if base is not object and not _is_ours(base):
            for name, value in sorted(vars(base).items()):
                content = "".join(_content(value))
                if content and (callable(value) or not name.startswith("__")):
                    digest.update(f"\n{name} {content}".encode("utf-8", "surrogatepass"))
    return f"{kind.__module__}.{kind.__qualname__} {digest.hexdigest()}"


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def _content(value: Any, within: frozenset[int] = frozenset()) -> Iterator[str]:
    """Content of a value, without addresses or the order of a set; nothing for unknown types."""
    if isinstance(value, _PLAIN):
        yield f"{value!r};"
    elif isinstance(value, (set, frozenset)):
        yield from ("{", *sorted("".join(_content(item)) for item in value), "}")
    elif id(value) not in within:  # a function may close over itself
        parts = _parts(value)
        if parts is not None:
            within |= {id(value)}
            yield from ("[", *(text for part in parts for text in _content(part, within)), "]")


def _parts(value: Any) -> Iterable[Any] | None:
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, value.co_varnames, value.co_freevars, value.co_consts
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return value.__code__, value.__defaults__, value.__kwdefaults__, cells
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, property):
        return value.fget, value.fset
    if isinstance(value, functools.cached_property):
        return (value.func,)
    return None


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


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
