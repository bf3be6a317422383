"""What the columnar formats share: a list of files read one after the other, a position, a schema for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from penstock.errors import DataError, ResumeError, SchemaError
from penstock.files.listing import PathLike, list_files
from penstock.pipeline.stages import Origin, Source, State

__all__ = ["FileSource"]


class FileSource(Source):
    """Base of the sources whose files know their own schema.

    With several files the schema is that of all of them together: a column that some lack is null there, integers and
    floats widen; types that do not go together are an error that names the file.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, paths: PathLike | Iterable[PathLike]) -> None:
        single = isinstance(paths, str) or hasattr(paths, "__fspath__")
        self._paths: Any = paths if single else list(paths)  # type: ignore[arg-type]
        self._files: list[Path] | None = None
        self._schema: pa.Schema | None = None
        self._file = 0
        self._row = 0
        self._reader: Any = None
        self._origin: Origin | None = None

    def _file_schema(self, path: Path) -> pa.Schema:
        raise NotImplementedError(type(self).__name__)

    def _file_rows(self, path: Path) -> int | None:
        """Rows in a file, if that is known without reading it."""
        raise NotImplementedError(type(self).__name__)

    def _open(self, path: Path, row: int) -> Any:
        """A reader that begins at a row."""
        raise NotImplementedError(type(self).__name__)

    def _next(self, reader: Any, max_rows: int) -> pa.RecordBatch | None:
        """At most `max_rows` rows from a reader; None at its end."""
        raise NotImplementedError(type(self).__name__)

    @property
    def files(self) -> list[Path]:
        if self._files is None:
            self._files = list_files(self._paths, self.suffixes)
        return self._files

    @property
    def schema(self) -> pa.Schema:
        if self._schema is None:
            self._schema = self._common_schema()
        return self._schema

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        while self._file < len(self.files):
            path = self.files[self._file]
            schema = self.schema
            try:
                if self._reader is None:
                    self._reader = self._open(path, self._row)
                batch = self._next(self._reader, max_rows)
            except (pa.ArrowException, OSError, EOFError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                raise DataError(
                    f"the file is damaged or cut short: {error}", file=str(path), row=self._row
                ) from error
            if batch is None:
                self._advance()
                continue
            if batch.num_rows:
                self._origin = Origin(str(path), self._row)
                self._row += batch.num_rows
                return _shaped(batch, schema, path)
        return None

    def size_hint(self) -> int | None:
        counts = [self._file_rows(path) for path in self.files]
        return None if None in counts else sum(count for count in counts if count is not None)

    def origin(self) -> Origin | None:
        return self._origin

    def skip_file(self) -> None:
        """After an error: go on with the next file."""
        self._advance()

    def reset(self) -> None:
        self.close()
        self._file = self._row = 0

    def close(self) -> None:
        if self._reader is not None:
            self._close_reader(self._reader)
        self._reader = None

    def _close_reader(self, reader: Any) -> None:
        if hasattr(reader, "close"):
            reader.close()

    def state_dict(self) -> State:
        files = self.files
        return {
            "files": len(files),
            "file": self._file,
            "path": files[self._file].name if self._file < len(files) else None,
            "row": self._row,
        }

    def load_state_dict(self, state: State) -> None:
        files = self.files
        path = files[state["file"]].name if state["file"] < len(files) else None
        if state["files"] != len(files) or state["path"] != path:
            raise ResumeError(
                f"the state was saved in file {state['path']!r}, {state['file'] + 1} of {state['files']}; "
                f"now there are {len(files)} files and that one is {path!r}; restore the same files"
            )
        self.close()
        self._file, self._row = state["file"], state["row"]

    def _advance(self) -> None:
        self.close()
        self._file, self._row = self._file + 1, 0

    def _common_schema(self) -> pa.Schema:
        schema: pa.Schema | None = None
        for path in self.files:
            try:
                here = self._file_schema(path).remove_metadata()
            except (pa.ArrowException, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                if len(self.files) == 1:
                    raise DataError(f"the file is damaged or cut short: {error}", file=str(path), row=0) from error
                continue  # reported in its place, when its rows are read
            if schema is None:
                schema = here
            elif not here.equals(schema):
                try:
                    schema = pa.unify_schemas([schema, here], promote_options="permissive")
                except pa.ArrowException as error:
                    raise SchemaError(f"{path} does not go together with the files before it: {error}") from error
        return schema if schema is not None else pa.schema([])

    def __repr__(self) -> str:
        paths = self._paths
        if isinstance(paths, list) and len(paths) > 2:
            return f"{type(self).__name__}({len(paths)} paths)"
        return f"{type(self).__name__}({', '.join(repr(str(p)) for p in (paths if isinstance(paths, list) else [paths]))})"


def _shaped(batch: pa.RecordBatch, schema: pa.Schema, path: Path) -> pa.RecordBatch:
    """A file's batch with the columns and types of all files."""
    if batch.schema.equals(schema):
        return batch
    columns = []
    for field in schema:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            columns.append(pa.nulls(batch.num_rows, field.type))
        else:
            column = batch.column(index)
            columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
