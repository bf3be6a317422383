"""Base of the sources of lake tables: data files of one version of a table, without the rows that it has deleted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.errors import ConfigError, DataError, ResumeError, SchemaError
from penstock.files.checksums import FileFingerprint
from penstock.files.filesystems import is_remote, local_path, shown
from penstock.files.listing import FoundFiles, list_files
from penstock.files.ranges.remote_file import InputFile
from penstock.files.states import StateFormat
from penstock.pipeline.stages import State
from penstock.sources.columnar import ParquetSource
from penstock.sources.file_source import FileList, check_columns, project

_STATE = StateFormat(
    "rows of a table",
    "a source of a lake table",
    fields={
        **dict.fromkeys(("snapshot", "files", "file", "row"), (int,)),
        "table": (str,),
        "path": (str, None),
        "columns": (int, None),
    },
)
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_LISTS = ("in", "not in")
FilterTerm = tuple[str, str, Any]


@dataclass(frozen=True, slots=True)
class LakeFile:
    """A data file of a table, as its log describes it."""

    location: str
    """Local path or URL."""
    size: int
    rows: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    """Columns that the file itself need not hold, such as those of its partition, with their one value."""
    deleted: npt.NDArray[np.int64] | None = None
    """Numbers of the deleted rows, ascending; None if there are none."""

    @property
    def name(self) -> str:
        return self.location.rpartition("/")[2]

    @property
    def facts(self) -> list[Any]:
        """Facts that its rows depend on, apart from the columns of the table."""
        gone = None if self.deleted is None else xxhash.xxh3_128_hexdigest(self.deleted.tobytes())
        return [self.name, self.size, sorted((name, str(value)) for name, value in self.values.items()), gone]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version of a table: its columns and its data files."""

    table: str
    """Identity of the table, which a new table at the same place does not share."""
    version: int
    schema: pa.Schema
    files: list[LakeFile]
    id_key: bytes | None = None
    """Metadata of a column that has its id in files; None: columns are found by name."""
    name_key: bytes | None = None
    """Metadata of a column that has its name in files, where that is another."""
    names: Mapping[bytes, tuple[str, ...]] = field(default_factory=dict)
    """Names of columns by id, for files that hold no ids."""
    columns: int | None = None
    """Number of the schema, where a table changes its columns without a new version."""


class RowFilter:
    """Condition on rows: all of some comparisons `(column, operator, value)`. A null fulfils none."""

    def __init__(self, given: Sequence[Sequence[Any]]) -> None:
        if isinstance(given, str) or not given or any(isinstance(term, str) or len(term) != 3 for term in given):
            raise ConfigError(
                f"filter must be a list of (column, operator, value), such as [('year', '>', 2023)]; got {given!r:.200}"
            )
        self.terms: list[FilterTerm] = [(str(name), "=" if op == "==" else op, value) for name, op, value in given]
        for name, op, value in self.terms:
            if op not in (*_COMPARISONS, *_LISTS):
                known = ", ".join((*_COMPARISONS, *_LISTS))
                raise ConfigError(f"filter on {name!r}: unknown operator {op!r}; known: {known}")
            listed = isinstance(value, (list, tuple, set, frozenset))
            if listed != (op in _LISTS):
                expected = "a list of values" if op in _LISTS else "one value"
                raise ConfigError(f"filter on {name!r}: {op!r} takes {expected}, got {value!r:.80}")
            if value is None or (listed and None in value):
                raise ConfigError(f"filter on {name!r}: null is no value to compare with; compare with others")

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _, _ in self.terms))

    def typed(self, schema: pa.Schema) -> list[FilterTerm]:
        """The terms with values of the columns' types."""
        project(schema, self.names, "the table")
        return [(name, op, self._typed(schema.field(name), op, value)) for name, op, value in self.terms]

    def _typed(self, column: pa.Field, op: str, value: Any) -> Any:
        try:
            if op in _LISTS:
                return pa.array([_scalar(each, column.type).as_py() for each in value], column.type)
            return _scalar(value, column.type)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"filter on {column.name!r}: {value!r:.80} is no {column.type} ({error})") from error

    def mask(self, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """True for the rows that fulfil it."""
        kept = np.ones(batch.num_rows, bool)
        for name, op, value in self.typed(batch.schema):
            column = batch.column(name)
            if op in _LISTS:
                found = pc.is_in(column, value_set=value)
                found = pc.and_(found if op == "in" else pc.invert(found), pc.is_valid(column))
            else:
                found = _COMPARISONS[op](column, value)
            kept &= pc.fill_null(found, fill_value=False).to_numpy(zero_copy_only=False)
        return kept

    def __repr__(self) -> str:
        return repr(self.terms)


def _scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    return pa.scalar(value).cast(kind) if isinstance(value, str) else pa.scalar(value, kind)


class LakeSource(ParquetSource):
    """Base of the sources that read one version of a table of Parquet files.

    The version is fixed when the source is first used, and is part of its state: a table that moves on during a run, or
    before it is resumed, is read as it was. Files that cannot have a row of the `filter` are not opened.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()

    kind: ClassVar[str] = "table"
    """Name of a table of this kind, for messages."""

    def __init__(
        self,
        path: str,
        version: int | None,
        columns: Sequence[str] | None,
        filter: Sequence[Any] | None,
        options: Mapping[str, object],
    ) -> None:
        if version is not None and (isinstance(version, bool) or not isinstance(version, int) or version < 0):
            raise ConfigError(f"the version of {shown(path)} must be a whole number, got {version!r}")
        super().__init__([], columns=columns, verify="none")
        self.location = path
        self._version = version
        self._filter = None if filter is None else RowFilter(filter)
        self._shown = {**options, "columns": self._columns, "filter": self._filter}
        self._snapshot: Snapshot | None = None
        self._list = _TableFiles(self)

    # -- implemented by kinds of tables ------------------------------------------------------------------------------

    def _load(self, version: int | None, columns: int | None = None) -> Snapshot:
        """The version of the table, or the last one, with the files that may have rows of the filter."""
        raise NotImplementedError(type(self).__name__)

    # -- a source ----------------------------------------------------------------------------------------------------

    @property
    def snapshot(self) -> Snapshot:
        """The version that is read, found when it is first needed."""
        if self._snapshot is None:
            found = self._load(self._version)
            self._version, self._snapshot = found.version, found
        return self._snapshot

    @property
    def version(self) -> int:
        """Number of the version that is read."""
        return self.snapshot.version

    @property
    def schema(self) -> pa.Schema:
        if self._schema is None:
            self._schema = project(self._plain, self._columns, self._where)
            if self._filter is not None:
                self._filter.typed(self._plain)
        return self._schema

    @property
    def names(self) -> list[str]:
        return list(self._plain.names if self._columns is None else self._columns)

    def conflicts(self) -> list[str]:
        return []

    def with_columns(self, columns: Sequence[str], *, allow_empty: bool = False) -> Self:
        """The same version of the table, with these columns alone."""
        other = type(self).__new__(type(self))
        other.__dict__ |= self.__getstate__()
        other._columns = check_columns(columns)
        other._shown = {**self._shown, "columns": other._columns}
        other._schema = None
        other._list = _TableFiles(other)
        return other

    def size_hint(self) -> int | None:
        if self._filter is not None:
            return None
        rows = [
            None if file.rows is None else file.rows - (0 if file.deleted is None else len(file.deleted))
            for file in self.snapshot.files
        ]
        return None if None in rows else sum(count for count in rows if count is not None)

    def rows_of(
        self, batch: pa.RecordBatch, path: InputFile, row: int
    ) -> tuple[pa.RecordBatch, npt.NDArray[np.int64] | None]:
        file = self.file_of[str(path)]
        kept: npt.NDArray[np.bool_] | None = None
        if file.deleted is not None:
            low, high = np.searchsorted(file.deleted, [row, row + batch.num_rows])
            if high > low:
                kept = np.ones(batch.num_rows, bool)
                kept[file.deleted[low:high] - row] = False
        shaped = self._conformed(batch, file)
        if self._filter is not None:
            fulfilled = self._filter.mask(shaped)
            kept = fulfilled if kept is None else kept & fulfilled
        shaped = shaped.select(self.schema.names)
        if kept is None or kept.all():
            return shaped, None
        return shaped.filter(pa.array(kept)), np.flatnonzero(kept)

    def shaped(self, batch: pa.RecordBatch, path: InputFile) -> pa.RecordBatch:
        raise NotImplementedError("rows of a table may be deleted, so they have numbers; use rows_of")

    def state_dict(self) -> State:
        snapshot = self.snapshot
        name = snapshot.files[self._file].name if self._file < len(snapshot.files) else None
        return _STATE.write(
            {
                "table": snapshot.table,
                "snapshot": snapshot.version,
                "files": len(snapshot.files),
                "file": self._file,
                "path": name,
                "row": self._row,
                "columns": snapshot.columns,
            }
        )

    def load_state_dict(self, state: State) -> None:
        state = _STATE.read(state)
        before, version = self._version, state["snapshot"]
        if before is not None and before != version and self._snapshot is None:
            raise ResumeError(
                f"the state was saved in version {version} of {self._where}, and version {before} was requested; "
                "request the same, or start without the state"
            )
        if self._snapshot is None or (self._snapshot.version, self._snapshot.columns) != (version, state["columns"]):
            try:
                found = self._load(version, state["columns"])
            except (ConfigError, DataError, FileNotFoundError) as error:
                raise ResumeError(f"the state cannot be resumed: {error}; start without the state") from error
        else:
            found = self._snapshot
        number, count = state["file"], len(found.files)
        name = found.files[number].name if number < count else None
        if (found.table, count, name) != (state["table"], state["files"], state["path"]):
            raise ResumeError(
                f"{self._where} is not the table that the state was saved in, or is read with another filter: version "
                f"{version} has {count} files to read and had {state['files']}; restore the table, or start without "
                "the state"
            )
        self.close()
        self._version, self._snapshot, self._schema = version, found, None
        self._list = _TableFiles(self)
        self.__dict__.pop("file_of", None)
        self.__dict__.pop("_plain", None)
        self._file, self._row = number, state["row"]

    def fingerprints(self) -> list[FileFingerprint]:
        """Content of the version: its files, deleted rows, columns and filter. Data files of a table never change."""
        snapshot = self.snapshot
        described = [snapshot.table, str(self.schema), repr(self._filter), *(file.facts for file in snapshot.files)]
        digest = xxhash.xxh3_128_hexdigest(repr(described).encode())
        name = f"{self.kind} {shown(self.location).rstrip('/').rpartition('/')[2]}, version {snapshot.version}"
        return [FileFingerprint(name.replace("=", " "), sum(file.size for file in snapshot.files), digest)]

    def identity(self) -> list[Any]:
        """Mark of the version, another for versions whose files have the same names and sizes."""
        return [self.fingerprints()[0].xxh3]

    def __getstate__(self) -> dict[str, Any]:
        _ = self.snapshot  # other processes read the same version
        return self.__dict__ | {"_opened": None, "_following": None, "_origin": None}

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return f"the {self.kind} {shown(self.location)!r}"

    @cached_property
    def _plain(self) -> pa.Schema:
        """The columns of the table, without its marks."""
        return pa.schema([pa.field(each.name, _without_marks(each.type)) for each in self.snapshot.schema])

    @cached_property
    def file_of(self) -> dict[str, LakeFile]:
        """Files of the version, by the path that is read."""
        return {str(path): file for path, file in zip(self.files, self.snapshot.files, strict=True)}

    def _location(self, uri: str) -> str:
        """A local path, or a URL with the login and the query that the URL of the table has."""
        if uri.startswith("file:"):
            local = local_path(uri)
            return uri if local is None else str(local)
        if not is_remote(uri) or not is_remote(self.location):
            return uri
        scheme, _, rest = uri.partition("://")
        table, _, query = self.location.partition("?")
        login, at, _ = table.partition("://")[2].partition("/")[0].rpartition("@")
        if scheme in ("abfs", "abfss", "az") or login == rest.partition("@")[0]:
            login = at = ""  # the container, or there already
        return f"{'s3' if scheme in ('s3a', 's3n') else scheme}://{login}{at}{rest}{'?' if query else ''}{query}"

    def _file_schema(self, path: InputFile) -> pa.Schema:
        return self.schema

    def _common_schema(self) -> pa.Schema:
        return self.schema

    def _file_rows(self, path: InputFile) -> int | None:
        return self.file_of[str(path)].rows

    @property
    def _needed(self) -> list[pa.Field]:
        """Columns to read, with their marks: those requested, and those of the filter."""
        names = dict.fromkeys([*self.schema.names, *(self._filter.names if self._filter is not None else ())])
        return [self.snapshot.schema.field(name) for name in names]

    def _stored_columns(self, schema: pa.Schema) -> list[str] | None:
        """Names of the needed columns in a file."""
        found = [self._find(list(schema), wanted) for wanted in self._needed]
        return [schema.field(index).name for index in found if index is not None]

    def _find(self, there: Sequence[pa.Field], wanted: pa.Field) -> int | None:
        """Position of a column among those of a file, by id or name."""
        snapshot, marks = self.snapshot, wanted.metadata or {}
        if not there:
            return None
        number = None if snapshot.id_key is None else marks.get(snapshot.id_key)
        if number is None or (snapshot.name_key is not None and not any(map(_id_of, there))):
            name = None if snapshot.name_key is None else marks.get(snapshot.name_key)
            names: tuple[str, ...] = (wanted.name if name is None else name.decode(),)
        elif any(map(_id_of, there)):
            return next((index for index, each in enumerate(there) if _id_of(each) == number), None)
        elif snapshot.names:
            names = snapshot.names.get(number, ())
        else:
            raise SchemaError(
                f"a file of {self._where} has no column ids, and the table no mapping of names, so its columns cannot "
                "be told; add the property schema.name-mapping.default to the table"
            )
        return next((index for index, each in enumerate(there) if each.name in names), None)

    def _conformed(self, batch: pa.RecordBatch, file: LakeFile) -> pa.RecordBatch:
        """A batch of a file with the needed columns of the table."""
        there, columns, fields = list(batch.schema), [], []
        for wanted in self._needed:
            index, kind = self._find(there, wanted), _without_marks(wanted.type)
            if index is not None:
                try:
                    column = self._column(batch.column(index), there[index], wanted)
                except (pa.ArrowException, NotImplementedError) as error:
                    raise SchemaError(
                        f"column {wanted.name!r} is {there[index].type} in {file.name} and {kind} in {self._where}: "
                        f"{error}"
                    ) from error
            elif wanted.name in file.values:
                column = pa.repeat(file.values[wanted.name], batch.num_rows)
            else:
                column = pa.nulls(batch.num_rows, kind)
            columns.append(column)
            fields.append(pa.field(wanted.name, kind))
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))

    def _column(self, column: pa.Array, there: pa.Field, wanted: pa.Field) -> pa.Array:
        """A column as the table has it: members of structs by id or name, missing ones null, types widened."""
        kind = _without_marks(wanted.type)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if self._agree(there, wanted):
            return column if column.type == kind else column.cast(kind)
        if pa.types.is_struct(kind) and pa.types.is_struct(column.type):
            inside = [column.type.field(number) for number in range(column.type.num_fields)]
            members = []
            for member in (wanted.type.field(number) for number in range(kind.num_fields)):
                index = self._find(inside, member)
                empty = pa.nulls(len(column), _without_marks(member.type))
                members.append(empty if index is None else self._column(column.field(index), inside[index], member))
            return pa.StructArray.from_arrays(members, fields=list(kind), mask=pc.is_null(column))
        if pa.types.is_list(column.type) and pa.types.is_list(kind):
            lengths = pc.fill_null(pc.list_value_length(column), 0).cast(pa.int32())
            offsets = pa.array(np.concatenate([[0], np.cumsum(lengths.to_numpy())]), pa.int32())
            values = self._column(column.flatten(), column.type.value_field, wanted.type.value_field)
            return pa.ListArray.from_arrays(offsets, values, type=kind, mask=pc.is_null(column))
        raise NotImplementedError("members of this type were changed")

    def _agree(self, there: pa.Field, wanted: pa.Field) -> bool:
        """True if the members of two types are the same, in order and by name, so that a cast is enough."""
        have, want = there.type, wanted.type
        if not want.num_fields:
            return not have.num_fields
        if have.num_fields != want.num_fields or have.id != want.id:
            return False
        if not pa.types.is_struct(want):
            return all(self._agree(have.field(n), want.field(n)) for n in range(want.num_fields))
        inside = [have.field(number) for number in range(have.num_fields)]
        members = [want.field(number) for number in range(want.num_fields)]
        return all(
            self._find(inside, member) == number
            and inside[number].name == member.name
            and self._agree(inside[number], member)
            for number, member in enumerate(members)
        )

    def _damaged(self, error: Exception, path: InputFile, row: int) -> Exception:
        if isinstance(error, FileNotFoundError):
            return self._gone(path.name)
        return super()._damaged(error, path, row)

    def _gone(self, name: str, count: int = 1) -> Exception:
        more = f" and {count - 1} more" if count > 1 else ""
        return DataError(
            f"version {self._version} of {self._where} needs the file {name}{more}, which is gone: it was vacuumed, or "
            "its snapshot expired; read a later version",
            file=shown(self.location),
        )

    def __repr__(self) -> str:
        options = [f", {name}={value!r}" for name, value in self._shown.items() if value is not None]
        return f"{type(self).__name__}({shown(self.location)!r}{''.join(options)})"


class _TableFiles(FileList):
    """The files of a version of a table; their sizes are those of its log."""

    def __init__(self, source: LakeSource) -> None:
        super().__init__([], ())
        self._source = source

    @property
    def files(self) -> list[InputFile]:
        if self._found is None:
            there = self._source.snapshot.files
            locations = [file.location for file in there]
            if locations and is_remote(locations[0]):
                try:
                    self._found = list_files(locations)
                except FileNotFoundError as error:
                    raise self._source._gone(str(error)) from error
            else:
                paths = [*map(Path, locations)]
                self._found = FoundFiles(paths, (), [()] * len(locations))
                gone = [path.name for path in paths if not path.exists()]
                if gone:
                    self._found = None
                    raise self._source._gone(gone[0], len(gone))
        return self._found


def _id_of(column: pa.Field) -> bytes | None:
    found: bytes | None = (column.metadata or {}).get(b"PARQUET:field_id")
    return found


def _without_marks(kind: pa.DataType) -> pa.DataType:
    """A type without the metadata of its members."""
    if pa.types.is_struct(kind):
        return pa.struct([_plain_field(kind.field(number)) for number in range(kind.num_fields)])
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if pa.types.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    if pa.types.is_map(kind):
        return pa.map_(_without_marks(kind.key_type), _without_marks(kind.item_type))
    return kind


def _plain_field(member: pa.Field) -> pa.Field:
    return pa.field(member.name, _without_marks(member.type))
