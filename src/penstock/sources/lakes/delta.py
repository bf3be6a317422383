"""Delta tables."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Sequence
from typing import Any, ClassVar
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from penstock.connections.delta import naming, open_table
from penstock.errors import ConfigError, DataError
from penstock.files.filesystems import local_or_none, shown
from penstock.files.listing import PathLike
from penstock.sources.lakes.base import LakeFile, LakeSource, Snapshot

_FEATURES = {
    *("deletionVectors", "columnMapping", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"),
    *("typeWidening", "typeWidening-preview", "variantType", "variantType-preview"),
}
"""Reader features of tables that are honoured."""
_ESCAPED = re.compile(rb"(\\u00[0-9A-Fa-f]{2})+")
_PRUNING = (str, bool, int, float, datetime.date, datetime.datetime)


class _Names:
    """Names of files below a table: deltalake spells them in two ways, and an encoded place of the table in both."""

    def __init__(self, table_uri: str) -> None:
        self._url = f"{table_uri.rstrip('/')}/"
        self._place = self._url.removeprefix("file://")

    def of_file(self, uri: str) -> str:
        """Name of a data file, which is as the storage has it; the whole of what is not below the table."""
        return uri.removeprefix(self._place)

    def of_vector(self, url: str) -> str:
        """The same of the file of a deletion vector, which is encoded."""
        return unquote(url.removeprefix(self._url)) if url.startswith(self._url) else url


def _partition_value(given: pa.Scalar | None, field: pa.Field, file: str) -> pa.Scalar:
    """Value of a partition column as the log means it: bytes are written there as `\\u0000\\u00FF`."""
    try:
        value = None if given is None else given.as_py()
    except (ValueError, OverflowError) as error:
        raise DataError(
            f"the partition column {field.name!r} has a value that is no {field.type} of Python ({error}); write the "
            "file anew with another value",
            file=file,
        ) from error
    if pa.types.is_binary(field.type) and isinstance(value, bytes) and _ESCAPED.fullmatch(value):
        value = bytes(int(each, 16) for each in value.split(b"\\u")[1:])
    try:
        return pa.scalar(value, field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(
            f"deltalake reads the partition column {field.name!r} as {value!r}, which is no {field.type} ({error}); "
            "write the table with another partition column",
            file=file,
        ) from error


def _member(partitions: pa.StructArray | None, column: str, number: int) -> pa.Scalar | None:
    """The value of a column in a file; None if the log has none."""
    if partitions is None or partitions.type.get_field_index(column) < 0 or not partitions[number].is_valid:
        return None
    return partitions.field(column)[number]


class DeltaSource(LakeSource):
    """Rows of a Delta table, at `path` or at a URL, as they are in one version; by default the last.

        DeltaSource("lake/chats", version=12, columns=["text", "lang"], filter=[("lang", "in", ["de", "en"])])

    The version is fixed when the source is first used, is part of its state, and of the lineage of stores. Files of
    other partitions, and those whose statistics exclude all rows of the `filter`, are not opened; of the others only
    the `columns` are read. Rows that a deletion vector marks are left out, columns are found as the table's column
    mapping says, and columns that were added later are null in older files. Files come in the order in which they were
    added. A reader feature that is not known here is refused by its name.
    """

    kind: ClassVar[str] = "Delta table"

    def __init__(
        self,
        path: PathLike,
        *,
        version: int | None = None,
        columns: Sequence[str] | None = None,
        filter: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(os.fspath(path), version, columns, filter, {"version": version})

    def _load(self, version: int | None, columns: int | None = None) -> Snapshot:
        table = open_table(self.location, version)
        features = {*(table.protocol().reader_features or ())} - _FEATURES
        if features:
            raise ConfigError(
                f"{self._where} needs the reader feature {min(features)!r}, which penstock does not know, and its rows "
                "could be others without it; write them to a table without it, or read them with deltalake"
            )
        schema = pa.schema(table.schema().to_arrow())
        mode = table.metadata().configuration.get("delta.columnMapping.mode", "none")
        with naming(self.location):
            files = self._data_files(table, schema)
        return Snapshot(
            str(table.metadata().id),
            table.version(),
            schema,
            files,
            id_key=b"delta.columnMapping.id" if mode == "id" else None,
            name_key=b"delta.columnMapping.physicalName" if mode != "none" else None,
        )

    def _data_files(self, table: Any, schema: pa.Schema) -> list[LakeFile]:
        partitions: list[str] = table.metadata().partition_columns
        chosen = self._chosen(table, schema)
        actions = pa.table(table.get_add_actions())
        names, home = _Names(table.table_uri), local_or_none(self.location)
        deleted = {
            names.of_vector(row["filepath"]): np.flatnonzero(~np.array(row["selection_vector"], bool))
            for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors())
            for row in batch.to_pylist()
        }
        found: list[tuple[int, LakeFile]] = []
        given = actions["partition"].combine_chunks() if "partition" in actions.column_names else None
        actions = actions.select(["size_bytes", "num_records", "modification_time"])
        for number, (uri, action) in enumerate(zip(table.file_uris(), actions.to_pylist(), strict=True)):
            name = names.of_file(uri)
            rows_gone = deleted.pop(name, None)
            if chosen is not None and uri not in chosen:
                continue
            values = {
                column: _partition_value(_member(given, column, number), schema.field(column), shown(uri))
                for column in partitions
            }
            place = self._location(uri) if home is None or name == uri else str(home.resolve() / name)
            file = LakeFile(place, action["size_bytes"], action["num_records"], values, rows_gone)
            found.append((action["modification_time"], file))
        if deleted:
            raise DataError(
                f"rows of {next(iter(deleted))} are marked as deleted, and no file of the table has this name, so they "
                "would come back; write the table anew (OPTIMIZE, REORG TABLE ... APPLY (PURGE))",
                file=shown(self.location),
            )
        return [file for _, file in sorted(found, key=lambda each: (each[0], each[1].location))]

    def _chosen(self, table: Any, schema: pa.Schema) -> set[str] | None:
        """Files that may have rows of the filter; None: all."""
        if self._filter is None:
            return None
        terms = []
        for name, op, value in self._filter.typed(schema):
            plain = value.to_pylist() if isinstance(value, pa.Array) else value.as_py()
            if all(isinstance(each, _PRUNING) for each in (plain if isinstance(plain, list) else [plain])):
                terms.append((name, op, plain))
        return None if not terms else set(table.file_uris(file_pruning_predicate=terms))
