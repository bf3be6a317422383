"""Iceberg tables."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.connections.iceberg import open_table
from penstock.errors import ConfigError, DataError
from penstock.files.filesystems import shown
from penstock.files.listing import PathLike
from penstock.sources.lakes.base import LakeFile, LakeSource, RowFilter, Snapshot

_PRUNING = (str, bool, int, float, datetime.date, datetime.datetime)
_FIELD_ID = b"PARQUET:field_id"


class IcebergSource(LakeSource):
    """Rows of an Iceberg table as they are in one snapshot; by default the current one.

        IcebergSource("warehouse/chats")                                     # the directory of a table, or its URL
        IcebergSource("ns.chats", catalog="sqlite:///catalog.db", snapshot=6154384325344826334)

    `catalog` is the URL of a SQL or REST catalog, or the name of one in the configuration of pyiceberg. The snapshot is
    fixed when the source is first used, is part of its state, and of the lineage of stores. Files that cannot have rows
    of the `filter`, by their partition or statistics, are not opened; of the others only the `columns` are read.
    Columns are found by their ids, so that a renamed one is the same one; those that were added later are null in older
    files. Rows with position deletes or deletion vectors are left out; equality deletes are refused.
    """

    kind: ClassVar[str] = "Iceberg table"

    def __init__(
        self,
        path: PathLike,
        *,
        catalog: str | None = None,
        snapshot: int | None = None,
        columns: Sequence[str] | None = None,
        filter: Sequence[Any] | None = None,
    ) -> None:
        described = {"catalog": None if catalog is None else shown(catalog), "snapshot": snapshot}
        super().__init__(os.fspath(path), snapshot, columns, filter, described)
        self._catalog = catalog

    def _load(self, version: int | None, columns: int | None = None) -> Snapshot:
        table = open_table(self.location, self._catalog)
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        found = table.current_snapshot() if version is None else table.snapshot_by_id(version)
        if found is None and version:
            known = ", ".join(str(each.snapshot_id) for each in table.snapshots()[-5:]) or "none"
            raise ConfigError(
                f"{self._where} has no snapshot {version}; it never had, or it expired; the last are: {known}"
            )
        if columns is None:
            columns = table.schema().schema_id if version is None else getattr(found, "schema_id", None)
        known = table.schemas().get(columns)
        if known is None:
            raise ConfigError(f"the metadata of {self._where} has no schema {columns}; request another snapshot")
        schema = _narrow(schema_to_pyarrow(known, include_field_ids=True))
        identity = str(table.metadata.table_uuid)
        if found is None:
            return Snapshot(identity, 0, schema, [], columns=columns)
        scan = table.scan(snapshot_id=found.snapshot_id)
        if self._filter is not None:
            scan = scan.filter(_expression(self._filter, schema, scan.projection()))
        try:
            tasks = list(scan.plan_files())
        except (ValueError, NotImplementedError) as error:
            if "equality delete" not in str(error):
                raise DataError(
                    f"the files of the table cannot be listed: {error}", file=shown(self.location)
                ) from error
            raise ConfigError(
                f"{self._where} has equality deletes, which penstock does not apply, so deleted rows would come back; "
                "compact the table (rewrite its data files), or read it with an engine that applies them"
            ) from error
        except FileNotFoundError as error:
            raise DataError(
                f"snapshot {found.snapshot_id} of {self._where} needs a manifest that is gone ({error}); read a later "
                "one",
                file=shown(self.location),
            ) from error
        return Snapshot(
            identity,
            found.snapshot_id,
            schema,
            self._data_files(table, schema, self._defaults(known, schema), tasks),
            id_key=_FIELD_ID,
            names=_mapped_names(table.name_mapping()),
            columns=columns,
        )

    def _defaults(self, known: Any, schema: pa.Schema) -> dict[str, Any]:
        """Values of columns that were added with one, for files that do not have them."""
        from pyiceberg.schema import index_by_id

        by_id = {int(column.metadata[_FIELD_ID]): column for column in schema}
        values = {}
        for number, field in index_by_id(known).items():
            if field.initial_default is None:
                continue
            if number not in by_id:
                raise ConfigError(
                    f"{self._where} has a default for {field.name!r}, a member of a column, which penstock does not "
                    "know; rewrite its data files"
                )
            values[by_id[number].name] = _partition_scalar(field.initial_default, by_id[number].type)
        return values

    def _data_files(
        self, table: Any, schema: pa.Schema, defaults: Mapping[str, Any], tasks: Sequence[Any]
    ) -> list[LakeFile]:
        deletes = _Deletes(table.io)
        found: list[LakeFile] = []
        for task in tasks:
            file = task.file
            if file.file_format.value.lower() != "parquet":
                raise ConfigError(
                    f"{self._where} has {file.file_format.value} files, and only Parquet is read; rewrite them as "
                    "Parquet"
                )
            found.append(
                LakeFile(
                    self._location(file.file_path),
                    file.file_size_in_bytes,
                    file.record_count,
                    {**defaults, **_partition_values(table, file, schema)},
                    deletes.of(file.file_path, task.delete_files),
                )
            )
        return sorted(found, key=lambda file: file.location)

    def _location(self, uri: str) -> str:
        """A local path, or a URL. Paths of Iceberg are not encoded: the directory of `a/b` is called `a%2Fb`."""
        path = uri.removeprefix("file:")
        return super()._location(uri) if path == uri or os.name == "nt" else f"/{path.lstrip('/')}"


class _Deletes:
    """Positions of deleted rows; each file of them is read once."""

    def __init__(self, io: Any) -> None:
        self._io = io
        self._read: dict[str, dict[str, Any]] = {}

    def of(self, path: str, files: Any) -> npt.NDArray[np.int64] | None:
        from pyiceberg.io.pyarrow import _read_deletes

        parts = []
        for file in files:
            # A puffin file may hold the deletion vectors of many data files.
            if file.file_path not in self._read:
                self._read[file.file_path] = _read_deletes(self._io, file)
            positions = self._read[file.file_path].get(path)
            if positions is not None:
                parts.append(np.asarray(positions.to_numpy(), np.int64))
        return np.unique(np.concatenate(parts)) if parts else None


def _partition_values(table: Any, file: Any, schema: pa.Schema) -> dict[str, Any]:
    """Columns whose one value the partition holds: a file that was added to the table may lack them."""
    spec = table.specs()[file.spec_id]
    by_id = {int(column.metadata[_FIELD_ID]): column for column in schema}
    values = {}
    for number, part in enumerate(spec.fields):
        column = by_id.get(part.source_id)
        if column is not None and str(part.transform) == "identity":
            values[column.name] = _partition_scalar(file.partition[number], column.type)
    return values


def _partition_scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    if isinstance(value, int) and (pa.types.is_temporal(kind)):  # days or microseconds since 1970
        return pa.scalar(value, pa.int32() if pa.types.is_date32(kind) else pa.int64()).cast(kind)
    return pa.scalar(value, kind)


def _expression(given: RowFilter, schema: pa.Schema, planned: Any) -> Any:
    """The filter for pyiceberg, as far as it can choose files by it; columns have the names of the `planned` schema."""
    from pyiceberg import expressions as ex

    makers = {
        "=": ex.EqualTo,
        "!=": ex.NotEqualTo,
        "<": ex.LessThan,
        "<=": ex.LessThanOrEqual,
        ">": ex.GreaterThan,
        ">=": ex.GreaterThanOrEqual,
        "in": ex.In,
        "not in": ex.NotIn,
    }
    found: Any = ex.AlwaysTrue()
    for name, op, value in given.typed(schema):
        plain = value.to_pylist() if isinstance(value, pa.Array) else value.as_py()
        stored = planned.find_column_name(int(schema.field(name).metadata[_FIELD_ID]))
        if stored and all(isinstance(each, _PRUNING) for each in (plain if isinstance(plain, list) else [plain])):
            found = ex.And(found, makers[op](stored, plain))
    return found


def _mapped_names(mapping: Any) -> dict[bytes, tuple[str, ...]]:
    """Names of columns by id, for files that have no ids."""
    found: dict[bytes, tuple[str, ...]] = {}

    def collect(fields: Sequence[Any]) -> None:
        for each in fields:
            if each.field_id is not None:
                found[str(each.field_id).encode()] = tuple(each.names)
            collect(each.fields)

    if mapping is not None:
        collect(mapping.root)
    return found


def _narrow(schema: pa.Schema) -> pa.Schema:
    """The schema with the types that Parquet files are read as: with 32-bit offsets."""
    return pa.schema([column.with_type(_narrow_type(column.type)) for column in schema])


def _narrow_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        return pa.list_(_narrow_field(kind.value_field))
    if pa.types.is_struct(kind):
        return pa.struct([_narrow_field(kind.field(number)) for number in range(kind.num_fields)])
    if pa.types.is_map(kind):
        return pa.map_(_narrow_field(kind.key_field), _narrow_field(kind.item_field))
    return kind


def _narrow_field(member: pa.Field) -> pa.Field:
    return member.with_type(_narrow_type(member.type))
