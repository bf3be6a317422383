"""Columns that stand in the names of directories: rows of `d/lang=en/part-0.parquet` have a column `lang`, "en".

Hive, Spark, Arrow and DuckDB write data sets so. Names and values are percent-decoded; `__HIVE_DEFAULT_PARTITION__` is
null, and so is a column in files that are in no directory of its name. A column is int64 if all of its values are
integers as Python prints them, so that 007 stays what it is, and text otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ConfigError, SchemaError
from penstock.files.listing import FoundFiles

__all__ = ["Partitions"]

_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")


class Partitions:
    """What the directories of some files say about their rows."""

    def __init__(self, files: Sequence[Path]) -> None:
        folders = files.partitions if isinstance(files, FoundFiles) else []
        self._values = {str(file): _parsed(parts, file) for file, parts in zip(files, folders) if parts}
        names = dict.fromkeys(name for values in self._values.values() for name in values)
        self.schema = pa.schema([(name, self._kind(name)) for name in names])

    def _kind(self, name: str) -> pa.DataType:
        given = [text for values in self._values.values() if (text := values.get(name)) is not None]
        return pa.int64() if given and all(map(_INTEGER.fullmatch, given)) else pa.string()

    def stored(self, columns: list[str] | None, there: Sequence[str]) -> list[str] | None:
        """Of the columns asked for those that are to be found in the files; `there` is what is known to be in them."""
        if columns is None or not self._values:
            return columns
        inside = [name for name in columns if name in there or name not in self.schema.names]
        if not inside:
            raise ConfigError(
                f"columns={columns!r} are all names of directories ({self._example()}), and no column of the files; "
                "ask for one of theirs too"
            )
        return inside

    def completed(self, schema: pa.Schema, columns: list[str] | None) -> pa.Schema:
        """The schema of files with the columns of directories behind it, or in the order asked for."""
        for field in self.schema:
            if field.name not in schema.names and (columns is None or field.name in columns):
                schema = schema.append(field)
        return schema if columns is None else pa.schema([schema.field(name) for name in columns])

    def filled(self, batch: pa.RecordBatch, path: str | Path, wanted: pa.Schema) -> pa.RecordBatch:
        """Rows of a file with those of its directories' columns that are `wanted`.

        What the file itself has in such a column must be the same, or null, which is then filled.
        """
        if not self._values:
            return batch
        values = self._values.get(str(path), {})
        for field in self.schema:
            if field.name not in wanted.names:
                continue
            index = batch.schema.get_field_index(field.name)
            if index < 0:
                kind = wanted.field(field.name).type
                column = pa.repeat(_scalar(values.get(field.name), kind, field.name, path), batch.num_rows)
                batch = batch.append_column(pa.field(field.name, kind), column)
            elif field.name in values:
                column = _agreed(batch.column(index), values[field.name], field.name, path)
                batch = batch.set_column(index, batch.schema.field(index), column)
        return batch

    def _example(self) -> str:
        return ", ".join(f"{name}={text}" for name, text in next(iter(self._values.values())).items())


def _parsed(folders: Sequence[str], file: Path) -> dict[str, str | None]:
    values: dict[str, str | None] = {}
    for folder in folders:
        name, _, text = folder.partition("=")
        value = None if text == _NULL else unquote(text)
        if values.setdefault(unquote(name), value) != value:
            raise SchemaError(
                f"{'/'.join(folders)} gives column {unquote(name)!r} two values ({file}); rename one of the directories"
            )
    return values


def _scalar(text: str | None, kind: pa.DataType, name: str, path: str | Path) -> pa.Scalar:
    if text is None:
        return pa.scalar(None, kind)
    try:
        return pa.scalar(text).cast(kind)
    except (pa.ArrowException, ValueError) as error:
        raise SchemaError(
            f"column {name!r} is {kind}, and a directory of {path} gives it {text!r}; rename the directory, or make "
            "the types agree"
        ) from error


def _agreed(column: pa.Array, text: str | None, name: str, path: str | Path) -> pa.Array:
    """The column of the file, with null filled; every other value must be that of the directory."""
    if column.null_count == len(column) and text is None:
        return column
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    plain = column.cast(kind)
    expected = _scalar(text, kind, name, path)
    same = pc.is_null(plain) if text is None else pc.equal(plain, expected).fill_null(True)
    if not pc.all(same).as_py():
        other = plain.filter(pc.invert(same))[0].as_py()
        raise SchemaError(
            f"column {name!r} is {other!r} in {path}, whose directory says {name}={_NULL if text is None else text}; "
            "rename the directory, or drop the column from the file"
        )
    return column if not column.null_count else pc.fill_null(plain, expected).cast(column.type)
