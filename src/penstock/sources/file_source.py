"""Base of the sources of files: the list of files, partition columns of their directories, a position, one schema."""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, Protocol
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.errors import ConfigError, DataError, ResumeError, SchemaError
from penstock.files.checksums import FileStamps
from penstock.files.compression import inflate
from penstock.files.filesystems import is_access_error, shown
from penstock.files.listing import FoundFiles, PathLike, list_files, names_of
from penstock.files.ranges.read_ahead import WINDOW_BYTES, request_footers
from penstock.files.ranges.remote_file import InputFile, RemoteFile
from penstock.files.states import Fields, StateFormat, check_fields
from penstock.pipeline.stages import Origin, Source, State

_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")


class Partitions:
    """Partition columns: values of rows that the names of their directories hold."""

    def __init__(self, files: Sequence[InputFile]) -> None:
        folders = files.partitions if isinstance(files, FoundFiles) else []
        self._values = {str(file): _parsed(parts, file) for file, parts in zip(files, folders) if parts}
        names = dict.fromkeys(name for values in self._values.values() for name in values)
        self.schema = pa.schema([(name, self._kind(name)) for name in names])

    def _kind(self, name: str) -> pa.DataType:
        given = [text for values in self._values.values() if (text := values.get(name)) is not None]
        return pa.int64() if given and all(map(_INTEGER.fullmatch, given)) else pa.string()

    def stored(self, columns: list[str] | None, there: Sequence[str]) -> list[str] | None:
        """Requested columns that the files themselves hold; `there` lists the columns known to be in them."""
        if columns is None or not self._values:
            return columns
        inside = [name for name in columns if name in there or name not in self.schema.names]
        if not inside:
            raise ConfigError(
                f"columns={columns!r} are all names of directories ({self._example()}), and no column of the files; "
                "add a column of the files"
            )
        return inside

    def completed(self, schema: pa.Schema, columns: list[str] | None) -> pa.Schema:
        """The schema of files with the partition columns after it, or in the order requested."""
        for field in self.schema:
            if field.name not in schema.names and (columns is None or field.name in columns):
                schema = schema.append(field)
        return schema if columns is None else pa.schema([schema.field(name) for name in columns])

    def filled(self, batch: pa.RecordBatch, path: str | InputFile, wanted: pa.Schema) -> pa.RecordBatch:
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


def _parsed(folders: Sequence[str], file: InputFile) -> dict[str, str | None]:
    values: dict[str, str | None] = {}
    for folder in folders:
        name, _, text = folder.partition("=")
        value = None if text == _NULL else unquote(text)
        if values.setdefault(unquote(name), value) != value:
            raise SchemaError(
                f"{'/'.join(folders)} gives column {unquote(name)!r} two values ({file}); rename one of the directories"
            )
    return values


def _scalar(text: str | None, kind: pa.DataType, name: str, path: str | InputFile) -> pa.Scalar:
    if text is None:
        return pa.scalar(None, kind)
    try:
        return pa.scalar(text).cast(kind)
    except (pa.ArrowException, ValueError) as error:
        raise SchemaError(
            f"column {name!r} is {kind}, and a directory of {path} gives it {text!r}; rename the directory, or make "
            "the types agree"
        ) from error


def _agreed(column: pa.Array, text: str | None, name: str, path: str | InputFile) -> pa.Array:
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
            f"column {name!r} is {other!r} in {path}, whose directory has {name}={_NULL if text is None else text}; "
            "rename the directory, or drop the column from the file"
        )
    return column if not column.null_count else pc.fill_null(plain, expected).cast(column.type)


_HEAD_BYTES = 4096


class FileList:
    """The files of a path, directory, glob or list of them; listed when first needed."""

    def __init__(self, paths: PathLike | Iterable[PathLike], suffixes: tuple[str, ...]) -> None:
        single = isinstance(paths, str) or hasattr(paths, "__fspath__")
        self._paths: list[PathLike] = [paths] if single else list(paths)  # type: ignore[arg-type, list-item]
        self._listed = paths if isinstance(paths, FoundFiles) else None
        self._suffixes = suffixes
        self._found: list[InputFile] | None = None
        self._heads: dict[int, list[int | str]] = {}
        self._sizes: dict[int, int] = {}
        self.stamps = FileStamps()
        """Of the files that were opened since the source began at its first row."""

    @property
    def files(self) -> list[InputFile]:
        if self._found is None:
            self._found = self._listed if self._listed is not None else list_files(self._paths, self._suffixes)
        return self._found

    @cached_property
    def partitions(self) -> Partitions:
        """Partition columns of the files."""
        return Partitions(self.files)

    def name(self, number: int) -> str | None:
        """The name of a file, as `names_of` has it; None after the last."""
        return self._names[number] if number < len(self.files) else None

    @cached_property
    def _names(self) -> list[str]:
        return names_of(self.files)

    def state(self, number: int) -> State:
        """Part of a saved position that identifies the file."""
        etag = self._etag(number)
        return {
            "files": len(self.files),
            "file": number,
            "path": self.name(number),
            "head": self._head(number) if etag is None else None,
            "size": self._size(number),
            **({} if etag is None else {"etag": etag}),
        }

    def _etag(self, number: int) -> str | None:
        """ETag of a remote file, which stands for its content."""
        file = self.files[number] if number < len(self.files) else None
        return file.etag if isinstance(file, RemoteFile) else None

    def _head(self, number: int) -> list[int | str] | None:
        """Number of first bytes (4096 at most) and their hash: a rewritten file differs, a file that grew does not."""
        if number >= len(self.files):
            return None
        if number not in self._heads:
            data = _first_bytes(self.files[number], _HEAD_BYTES)
            self._heads[number] = [len(data), xxhash.xxh3_64_hexdigest(data)]
        return self._heads[number]

    def _size(self, number: int) -> int | None:
        """The size of a file when first requested: a file that is smaller on resume lacks rows."""
        if number >= len(self.files):
            return None
        if number not in self._sizes:
            self._sizes[number] = self.files[number].stat().st_size
        return self._sizes[number]

    def check(self, state: State) -> None:
        """Refuse a position in files that are not these."""
        number, count = state["file"], len(self.files)
        if state["files"] != count:
            raise ResumeError(
                f"the state was saved with {state['files']} input files, now there are {count}; "
                "restore the same files, or start without the state"
            )
        if self.name(number) != state["path"]:
            raise ResumeError(
                f"file {number + 1} of the input was {state['path']!r} when the state was saved and is "
                f"{self.name(number)!r} now; restore the same files, or start without the state"
            )
        if number < count and state["head"] is not None:
            size, digest = _head_of(state["head"])
            if xxhash.xxh3_64_hexdigest(_first_bytes(self.files[number], size)) != digest:
                raise ResumeError(
                    f"{self.files[number]} is not the file the state was saved in: it begins with other bytes now; "
                    "restore it, or start without the state"
                )
        self._check_etag(number, state)
        if number < count and state["size"] is not None and (now := self.files[number].stat().st_size) < state["size"]:
            raise ResumeError(
                f"{self.files[number]} has {now} bytes and had {state['size']} when the state was saved, so rows of it "
                "are gone; restore it, or start without the state"
            )

    def _check_etag(self, number: int, state: State) -> None:
        """Refuse an object that was replaced; a copy on disk must have the same size."""
        if (was := state.get("etag")) is None or number >= len(self.files):
            return
        file, etag = self.files[number], self._etag(number)
        if etag != was if etag is not None else file.stat().st_size != state["size"]:
            raise ResumeError(
                f"{file} is not the file the state was saved in: "
                + (f"its ETag is {etag} now and was {was}" if etag is not None else f"it had {state['size']} bytes")
                + "; restore it, or start without the state"
            )

    def bytes_before(self, number: int) -> int:
        """Size of all files before this one."""
        return self._ends[min(number, len(self._ends)) - 1] if number else 0

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(file.stat().st_size for file in self.files))

    def __str__(self) -> str:
        if len(self._paths) > 2:
            return f"{len(self._paths)} paths"
        return ", ".join(repr(shown(str(path))) for path in self._paths)


def _first_bytes(file: InputFile, size: int) -> bytes:
    if isinstance(file, RemoteFile):
        return bytes(file.read_range(0, size))
    with open(file, "rb") as opened:
        return opened.read(size)


PLACE: Fields = {"files": (int,), "file": (int,), "path": (str, None), "head": (list, None), "size": (int, None)}
"""What `FileList.state` puts into a state."""


def _head_of(saved: Sequence[Any]) -> tuple[int, str]:
    """Number of first bytes of a file, and their hash."""
    check_fields(dict(zip(("bytes", "hash"), saved)), {"bytes": (int,), "hash": (str,)}, "the state of a file")
    return min(saved[0], _HEAD_BYTES), saved[1]


_MOST_CHARACTERS = 2048


def schema_mark(schema: pa.Schema) -> str:
    """The schema as text; a very wide one as a fingerprint, which costs a resumed source another look at its input."""
    text = base64.b85encode(zlib.compress(schema.serialize().to_pybytes(), 9)).decode()
    if len(text) <= _MOST_CHARACTERS:
        return text
    columns = "\n".join(f"{field.name!r} {field.type}" for field in schema)
    return f"blake2b {hashlib.blake2b(columns.encode(), digest_size=16).hexdigest()}"


def is_schema(mark: str) -> bool:
    """True if a mark holds the schema itself."""
    return " " not in mark


def schema_of(mark: str) -> pa.Schema:
    """The schema of a mark in a saved state."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(inflate(base64.b85decode(mark))))
    except (ValueError, OSError, pa.ArrowException) as error:
        raise ResumeError(f"the state is damaged: no schema ({error}); start without the state") from error


def project(schema: pa.Schema, columns: Sequence[str] | None, where: str) -> pa.Schema:
    """Only the requested columns, in that order; each of them must exist."""
    if columns is None:
        return schema
    names = set(schema.names)
    for name in columns:
        if name not in names:
            raise SchemaError(f"column {name!r} not in {where}; it has {schema.names}")
    return pa.schema([schema.field(name) for name in columns])


def check_columns(columns: Sequence[str] | None) -> list[str] | None:
    """The `columns` argument of a source, as a list."""
    if columns is not None and (isinstance(columns, str) or not columns):
        raise ConfigError(f"columns must be a list of at least one name, got {columns!r}")
    return list(columns) if columns is not None else None


_STATE = StateFormat("rows of files", "a source of columnar files", fields=PLACE | {"row": (int,)})
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
    _has_footers: ClassVar[bool] = False
    """True if the schema of a file is at its end."""
    _columns: list[str] | None = None

    def __init__(self, paths: PathLike | Iterable[PathLike], *, allow_empty: bool = False, **shown: object) -> None:
        self._list = FileList(paths, self.suffixes)
        self._allow_empty = allow_empty
        self._shown = shown
        self._schema: pa.Schema | None = None
        self._file = 0
        self._row = 0
        self._opened: OpenedFile | None = None
        self._origin: Origin | None = None
        self.read_ahead_bytes = WINDOW_BYTES
        """Most bytes of a remote file that are requested ahead."""

    # -- implemented by formats ---------------------------------------------------------------------------------------

    def _open(self, path: InputFile) -> OpenedFile:
        raise NotImplementedError(type(self).__name__)

    def _file_schema(self, path: InputFile) -> pa.Schema:
        raise NotImplementedError(type(self).__name__)

    def _file_rows(self, path: InputFile) -> int | None:
        """Rows in a file, if that is known without reading it."""
        raise NotImplementedError(type(self).__name__)

    # -- a source ----------------------------------------------------------------------------------------------------

    @property
    def files(self) -> list[InputFile]:
        """The files this source reads, in order."""
        return self._list.files

    @property
    def schema(self) -> pa.Schema:
        """The schema of every batch; reads the head or the foot of each file the first time."""
        if self._schema is None:
            self._schema = self._common_schema()
        return self._schema

    def shaped(self, batch: pa.RecordBatch, path: InputFile) -> pa.RecordBatch:
        """Rows of one file with the columns and types of all files, and what its directories stand for."""
        return _shaped(self._list.partitions.filled(batch, path, self.schema), self.schema, path)

    def rows_of(
        self, batch: pa.RecordBatch, path: InputFile, row: int
    ) -> tuple[pa.RecordBatch, npt.NDArray[np.int64] | None]:
        """Rows of one file from `row` on, shaped, and the numbers of those that count, from 0; None: all of them."""
        return self.shaped(batch, path), None

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        try:
            return self._next_batch(max_rows)
        except BaseException:  # Ctrl-C, or no memory: what was read and not delivered is read again
            self.close()
            raise

    def _next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        _ = self.schema
        while self._file < len(self.files):
            path = self.files[self._file]
            if self._passes_over(path):
                continue
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
                shaped, kept = self.rows_of(batch, path, self._row)
                self._origin = Origin(str(path), self._row + (int(kept[0]) if kept is not None and len(kept) else 0))
                self._row += batch.num_rows
                if shaped.num_rows:
                    return shaped
        return None

    def size_hint(self) -> int | None:
        try:
            counts = [0 if self._is_passed(path) else self._file_rows(path) for path in self.files]
        except _DAMAGED:
            return None  # reported in its place, when the rows are read
        return None if None in counts else sum(count for count in counts if count is not None)

    def memory_usage(self) -> int:
        opened = self._opened
        return opened.held_bytes() if opened is not None else 0

    def origin(self) -> Origin | None:
        return self._origin

    def file_bytes_read(self) -> int:
        return self._list.bytes_before(self._file)

    def skip_file(self) -> str:
        """After an error: continue with the next file; returns a description of the loss."""
        self._advance()
        return "the rest of the file is unreadable"

    def reset(self) -> None:
        """Back to the first row."""
        self.close()
        self._list.stamps.forget()
        self._file = self._row = 0

    def close(self) -> None:
        """Close the open file. The next read continues at the same position."""
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

    def _is_passed(self, path: InputFile) -> bool:
        return self._allow_empty and not path.stat().st_size

    def _passes_over(self, path: InputFile) -> bool:
        """True after going on to the next file, because this one has no bytes and may have none."""
        if self._opened is not None or not self._is_passed(path):
            return False
        self._advance()
        return True

    def _here(self, path: InputFile) -> OpenedFile:
        if self._opened is None:
            self._list.stamps.note(path)
            opened = self._open(path)
            self._opened = opened
            passed = opened.skip(self._row) if self._row else 0
            if passed < self._row:
                raise ResumeError(
                    f"{path} has {passed} rows now, and the state is at row {self._row}; "
                    "restore the same file, or start from the beginning"
                )
        return self._opened

    def _finish(self, path: InputFile) -> None:
        """The end of a file: it has to be the one whose beginning was read."""
        self._list.stamps.check(path)
        self._advance()

    def _advance(self) -> None:
        self.close()
        self._file, self._row = self._file + 1, 0

    @cached_property
    def _file_schemas(self) -> list[tuple[InputFile, pa.Schema]]:
        """Schema of each file that can be read; damage is reported in its place, when the rows are read."""
        found: list[tuple[InputFile, pa.Schema]] = []
        if self._has_footers:
            request_footers(self.files)
        for path in self.files:
            try:
                self._list.stamps.note(path)
                found.append((path, self._file_schema(path).remove_metadata()))
            except _DAMAGED as error:
                if self._is_passed(path):
                    continue
                failure = self._damaged(error, path, 0)
                if len(self.files) == 1 or not isinstance(failure, DataError):
                    raise failure from error
        return found

    @property
    def names(self) -> list[str]:
        """Columns that any of the files has, whatever their types, and those of the directories."""
        inside = dict.fromkeys(name for _, schema in self._file_schemas for name in schema.names)
        return [*inside, *(name for name in self._list.partitions.schema.names if name not in inside)]

    def conflicts(self) -> list[str]:
        """Columns whose types in several files do not go together."""
        found: dict[str, None] = {}
        known: dict[str, pa.Schema] = {}
        for path, schema in self._file_schemas:
            for field in schema:
                alone = pa.schema([field])
                try:
                    known[field.name] = _unified(known.get(field.name), alone, path)
                except SchemaError:
                    found[field.name] = None
        return list(found)

    def _common_schema(self) -> pa.Schema:
        schema: pa.Schema | None = None
        for path, here in self._file_schemas:
            schema = _unified(schema, here, path)
        return self._list.partitions.completed(schema if schema is not None else pa.schema([]), self._columns)

    def _damaged(self, error: Exception, path: InputFile, row: int) -> Exception:
        if is_access_error(error):
            return error  # missing, permission denied: the system's own message is clear
        self._list.stamps.check(path)
        if not path.stat().st_size:
            return DataError("the file is empty (0 bytes); remove it, or pass allow_empty=True", file=str(path))
        return DataError(f"the file is damaged or truncated: {error}", file=str(path), row=row)

    def __repr__(self) -> str:
        options = [f", {name}={value!r}" for name, value in self._shown.items() if value is not None]
        return f"{type(self).__name__}({self._list}{''.join(options)})"


def _unified(schema: pa.Schema | None, here: pa.Schema, path: InputFile) -> pa.Schema:
    """One schema for the files so far; categories, views and plain values of one type are plain values."""
    if schema is None:
        return here
    for field in here:
        index = schema.get_field_index(field.name)
        before = schema.field(index).type if index >= 0 else field.type
        if before != field.type:
            schema = schema.set(index, schema.field(index).with_type(_plain(before)))
            at = here.get_field_index(field.name)
            here = here.set(at, field.with_type(_plain(field.type)))
    try:
        return pa.unify_schemas([schema, here], promote_options="permissive")
    except pa.ArrowException as error:
        raise SchemaError(
            f"{path} does not match the files before it: {error}; pass columns= with the columns that are needed, or "
            "make the types agree"
        ) from error


_VIEWS = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type of the values, without categories and views."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return _VIEWS.get(kind, kind)


def _shaped(batch: pa.RecordBatch, schema: pa.Schema, path: InputFile) -> pa.RecordBatch:
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
