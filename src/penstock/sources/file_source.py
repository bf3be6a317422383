"""What the columnar formats share: a list of files read one after the other, a position, a schema for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Protocol

import pyarrow as pa

from penstock.errors import DataError, ResumeError, SchemaError
from penstock.files.listing import PathLike
from penstock.files.states import StateFormat
from penstock.pipeline.stages import Origin, Source, State
from penstock.sources.file_list import FileList

__all__ = ["FileSource", "OpenedFile"]

_STATE = StateFormat("rows of files", "a source of columnar files")
_DAMAGED = (pa.ArrowException, OSError, EOFError)


class OpenedFile(Protocol):
    """One open file, positioned somewhere in it."""

    def next(self, max_rows: int) -> pa.RecordBatch | None:
        """At most `max_rows` rows; None at the end."""
        ...

    def skip(self, rows: int) -> int:
        """Pass over rows from the beginning; how many there were."""
        ...

    def held_bytes(self) -> int: ...

    def close(self) -> None: ...


class FileSource(Source):
    """Base of the sources whose files know their own schema.

    With several files the schema is that of all of them together: a column that some lack is null there, integers and
    floats widen; types that do not go together are an error that names the file.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    _columns: list[str] | None = None

    def __init__(self, paths: PathLike | Iterable[PathLike], **shown: object) -> None:
        self._list = FileList(paths, self.suffixes)
        self._shown = shown
        self._schema: pa.Schema | None = None
        self._file = 0
        self._row = 0
        self._opened: OpenedFile | None = None
        self._origin: Origin | None = None

    # -- what a format has to say ------------------------------------------------------------------------------------

    def _open(self, path: Path) -> OpenedFile:
        raise NotImplementedError(type(self).__name__)

    def _file_schema(self, path: Path) -> pa.Schema:
        raise NotImplementedError(type(self).__name__)

    def _file_rows(self, path: Path) -> int | None:
        """Rows in a file, if that is known without reading it."""
        raise NotImplementedError(type(self).__name__)

    # -- a source ----------------------------------------------------------------------------------------------------

    @property
    def files(self) -> list[Path]:
        """The files this source reads, in order."""
        return self._list.files

    @property
    def schema(self) -> pa.Schema:
        """The schema of every batch; reads the head or the foot of each file the first time."""
        if self._schema is None:
            self._schema = self._common_schema()
        return self._schema

    def with_partitions(self, batch: pa.RecordBatch, path: Path) -> pa.RecordBatch:
        """Rows as one file has them, with the columns that its directories stand for."""
        partitions = self._list.partitions
        return partitions.filled(batch, path, partitions.completed(pa.schema(batch.schema), self._columns))

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        _ = self.schema
        while self._file < len(self.files):
            path = self.files[self._file]
            try:
                opened = self._here(path)
                self._list.stamps.check(path)  # before each piece: what is mapped must not have become shorter
                batch = opened.next(max_rows)
            except _DAMAGED as error:
                self.close()
                raise self._damaged(error, path, self._row) from error
            if batch is None:
                self._finish(path)
            elif batch.num_rows:
                shaped = self._shaped(batch, path)
                self._origin = Origin(str(path), self._row)
                self._row += batch.num_rows
                return shaped
        return None

    def size_hint(self) -> int | None:
        try:
            counts = [self._file_rows(path) for path in self.files]
        except _DAMAGED:
            return None  # reported in its place, when the rows are read
        return None if None in counts else sum(count for count in counts if count is not None)

    def memory_usage(self) -> int:
        opened = self._opened
        return opened.held_bytes() if opened is not None else 0

    def origin(self) -> Origin | None:
        return self._origin

    def skip_file(self) -> str:
        """After an error: go on with the next file; says so."""
        self._advance()
        return "the rest of the file is unreadable"

    def reset(self) -> None:
        """Back to the first row."""
        self.close()
        self._list.stamps.forget()
        self._file = self._row = 0

    def close(self) -> None:
        """Let go of the open file. Reading again goes on where it was."""
        if self._opened is not None:
            self._opened.close()
        self._opened = None

    def state_dict(self) -> State:
        return _STATE.write(self._list.state(self._file) | {"row": self._row})

    def load_state_dict(self, state: State) -> None:
        state = _STATE.read(state)
        self._list.check(state)
        self.close()
        self._file, self._row = state["file"], state["row"]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _here(self, path: Path) -> OpenedFile:
        if self._opened is None:
            self._list.stamps.note(path)
            opened = self._open(path)
            self._opened = opened
            passed = opened.skip(self._row) if self._row else 0
            if passed < self._row:
                raise ResumeError(
                    f"{path} has {passed} rows now, and row {self._row} of it was asked for; "
                    "restore the same file, or start from the beginning"
                )
        return self._opened

    def _finish(self, path: Path) -> None:
        """The end of a file: it has to be the one whose beginning was read."""
        self._list.stamps.check(path)
        self._advance()

    def _advance(self) -> None:
        self.close()
        self._file, self._row = self._file + 1, 0

    def _common_schema(self) -> pa.Schema:
        schema: pa.Schema | None = None
        for path in self.files:
            try:
                self._list.stamps.note(path)
                here = self._file_schema(path).remove_metadata()
            except _DAMAGED as error:
                failure = self._damaged(error, path, 0)
                if len(self.files) == 1 or not isinstance(failure, DataError):
                    raise failure from error
                continue  # reported in its place, when its rows are read
            try:
                schema = here if schema is None else pa.unify_schemas([schema, here], promote_options="permissive")
            except pa.ArrowException as error:
                raise SchemaError(f"{path} does not go together with the files before it: {error}") from error
        return self._list.partitions.completed(schema if schema is not None else pa.schema([]), self._columns)

    def _shaped(self, batch: pa.RecordBatch, path: Path) -> pa.RecordBatch:
        return _shaped(self._list.partitions.filled(batch, path, self.schema), self.schema, path)

    def _damaged(self, error: Exception, path: Path, row: int) -> Exception:
        if isinstance(error, OSError) and error.errno is not None:
            return error  # missing, permission denied: the system's own message says it
        self._list.stamps.check(path)
        if not path.stat().st_size:
            return DataError("the file is empty (0 bytes); remove it", file=str(path))
        return DataError(f"the file is damaged or cut short: {error}", file=str(path), row=row)

    def __repr__(self) -> str:
        options = [f", {name}={value!r}" for name, value in self._shown.items() if value is not None]
        return f"{type(self).__name__}({self._list}{''.join(options)})"


def _shaped(batch: pa.RecordBatch, schema: pa.Schema, path: Path) -> pa.RecordBatch:
    """A file's batch with the columns and types of all files, and without its metadata."""
    columns = []
    for field in schema:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        column = batch.column(index)
        try:
            columns.append(column if column.type == field.type else column.cast(field.type))
        except pa.ArrowException as error:
            raise SchemaError(
                f"column {field.name!r} of {path} is {column.type} and does not fit {field.type}, "
                f"the type that all files together have: {error}"
            ) from error
    return pa.RecordBatch.from_arrays(columns, schema=schema)
