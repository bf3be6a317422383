"""Example plugin: INI files as source and sink, and a transform to capitals.

Each section of an INI file is a row: the column `section` has its name, text columns have its options.
"""

from __future__ import annotations

import configparser
import io
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DataError, SchemaError
from penstock.files.atomic import write_atomic
from penstock.files.listing import PathLike, list_files
from penstock.pipeline import Sink, Source, State, Transform
from penstock.plugins import Format
from penstock.sources import MemorySource

__all__ = ["INI", "IniSink", "IniSource", "Shout"]


class IniSource(Source):
    """Sections of INI files as rows. The first batch reads all files into memory: they are small."""

    def __init__(self, paths: PathLike | Iterable[PathLike]) -> None:
        self._paths = paths
        self._rows: MemorySource | None = None

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        return self._read().next_batch(max_rows)

    def reset(self) -> None:
        self._read().reset()

    def state_dict(self) -> State:
        return self._read().state_dict()

    def load_state_dict(self, state: State) -> None:
        self._read().load_state_dict(state)

    def _read(self) -> MemorySource:
        if self._rows is None:
            rows = [row for path in list_files(self._paths, (".ini",)) for row in _sections(str(path))]
            # One column per option of any section: the schema must not depend on the first rows.
            names = dict.fromkeys(["section", *(name for row in rows for name in row)])
            columns = {name: pa.array([row.get(name) for row in rows], pa.string()) for name in names}
            self._rows = MemorySource(pa.table(columns))
        return self._rows

    def __repr__(self) -> str:
        return f"IniSource({self._paths!r})"


class IniSink(Sink):
    """Rows as sections of one INI file, named by the column `section`. Nulls are omitted."""

    def __init__(self, path: PathLike) -> None:
        self.path = path
        self._parser = _parser()

    def consume(self, batch: pa.RecordBatch) -> None:
        if "section" not in batch.schema.names:
            raise SchemaError(f"{self!r} needs a column 'section', the batch has {batch.schema.names}")
        for row in batch.to_pylist():
            section = row.pop("section")
            self._parser[section] = {name: str(value) for name, value in row.items() if value is not None}

    def flush(self) -> None:
        text = io.StringIO()
        self._parser.write(text)
        write_atomic(self.path, text.getvalue().encode())

    def __repr__(self) -> str:
        return f"IniSink({str(self.path)!r})"


class Shout(Transform):
    """Text in capitals, with exclamation marks."""

    def __init__(self, column: str, marks: int = 1) -> None:
        if marks < 0:
            raise ValueError(f"marks cannot be negative, got {marks}")
        self._column, self._marks = column, marks

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        at = batch.schema.get_field_index(self._column)
        if at < 0:
            raise SchemaError(f"column {self._column!r} not found; the batch has {batch.schema.names}")
        loud: Any = pc.binary_join_element_wise(pc.utf8_upper(batch.column(at)), "!" * self._marks, "")
        return batch.set_column(at, batch.schema.field(at), loud)

    def __repr__(self) -> str:
        return f"Shout({self._column!r}, marks={self._marks})"


INI = Format(name="ini", suffixes=(".ini",), source=IniSource, sink=IniSink)


def _parser() -> configparser.ConfigParser:
    # No default section, and no interpolation of %.
    return configparser.ConfigParser(default_section="", interpolation=None)


def _sections(path: str) -> list[dict[str, str]]:
    parser = _parser()
    try:
        with open(path, encoding="utf-8") as file:
            parser.read_file(file)
    except (configparser.Error, UnicodeDecodeError) as error:
        raise DataError(str(error), file=path) from error
    return [{"section": name, **parser[name]} for name in parser.sections()]
