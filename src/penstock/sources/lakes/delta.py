"""Delta tables."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from penstock.connections.delta import open_table
from penstock.errors import ConfigError
from penstock.files.listing import PathLike
from penstock.sources.lakes.base import LakeFile, LakeSource, Snapshot

_FEATURES = {
    *("deletionVectors", "columnMapping", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"),
    *("typeWidening", "typeWidening-preview", "variantType", "variantType-preview"),
}
"""Reader features of tables that are honoured."""
_PRUNING = (str, bool, int, float, datetime.date, datetime.datetime)


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
        return Snapshot(
            str(table.metadata().id),
            table.version(),
            schema,
            self._data_files(table, schema),
            id_key=b"delta.columnMapping.id" if mode == "id" else None,
            name_key=b"delta.columnMapping.physicalName" if mode != "none" else None,
        )

    def _data_files(self, table: Any, schema: pa.Schema) -> list[LakeFile]:
        partitions: list[str] = table.metadata().partition_columns
        chosen = self._chosen(table, schema)
        actions = pa.table(table.get_add_actions())
        deleted = {
            row["filepath"]: np.flatnonzero(~np.array(row["selection_vector"], bool))
            for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors())
            for row in batch.to_pylist()
        }
        deleted = {self._location(path): rows for path, rows in deleted.items()}
        found: list[tuple[int, LakeFile]] = []
        for uri, action in zip(table.file_uris(), actions.to_pylist(), strict=True):
            if chosen is not None and uri not in chosen:
                continue
            values = {
                name: pa.scalar((action["partition"] or {}).get(name), schema.field(name).type) for name in partitions
            }
            rows, place = action["num_records"], self._location(uri)
            file = LakeFile(place, action["size_bytes"], rows, values, deleted.get(place))
            found.append((action["modification_time"], file))
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
