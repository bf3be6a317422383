"""Delta tables: rows that are added in one commit, once, whatever is killed."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import orjson
import pyarrow as pa

from penstock.arrays.ragged import is_any_list
from penstock.connections.delta import address, brief, open_table, require_deltalake, transaction_version
from penstock.errors import ConfigError, ResumeError, SchemaError
from penstock.files.filesystems import local_or_none, shown
from penstock.files.listing import PathLike
from penstock.files.objects import open_bucket
from penstock.memory.budget import parse_bytes
from penstock.pipeline.chain import describe_difference
from penstock.pipeline.checkpoint import schema_from_text, schema_to_text
from penstock.pipeline.stages import Sink, State
from penstock.sinks.delta_files import (
    BucketPlace,
    DataFile,
    FolderPlace,
    PartitionedFiles,
    Place,
    journal_data,
    journal_files,
)

_FEATURES = {
    *("appendOnly", "invariants", "deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"),
    *("domainMetadata", "variantType", "variantType-preview", "inCommitTimestamp"),
}
"""Features of tables that need nothing of a writer that only adds files; invariants are looked for in the schema."""
_PARTITIONS = (
    *(pa.types.is_string, pa.types.is_integer, pa.types.is_boolean, pa.types.is_date32, pa.types.is_timestamp),
    *(pa.types.is_decimal, pa.types.is_floating),
)
_COLUMN_RULES = ("delta.invariants", "delta.generationExpression", "delta.identity")
"""Marks in the schema of a table: columns with rules."""
_ATTEMPTS = 5


class DeltaSink(Sink):
    """Rows for a Delta table, which is made if it does not exist; they appear in one commit, at the end.

        DeltaSink("lake/chats", partition_by=["lang"])                  # adds to the table
        DeltaSink("s3://bucket/chats", mode="overwrite")                # replaces its rows; older versions stay

    With `run(checkpoint=...)` every row is in the table once, whatever is killed and resumed: each commit carries the
    name of the run and a number (`txn` in the log of the table), by which a commit that was made already is known.
    `commit="checkpoint"` adds the rows of each checkpoint once the next one is due, so that others see them earlier.
    Several sinks may add to one table at once. Data files are written while the run goes on, beside a local table or
    into the place of a remote one, where nobody reads what is not in the log.

    Columns are those of the table, and safely cast to their types; a column that is missing is null. A table with
    constraints, generated columns or column mapping is refused: this sink would not keep them.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        mode: Literal["append", "overwrite"] = "append",
        partition_by: Sequence[str] = (),
        commit: Literal["end", "checkpoint"] = "end",
        file_bytes: int | str = "256 MiB",
    ) -> None:
        if mode not in ("append", "overwrite"):
            raise ConfigError(f"mode must be 'append' or 'overwrite', got {mode!r}")
        if commit not in ("end", "checkpoint"):
            raise ConfigError(f"commit must be 'end' or 'checkpoint', got {commit!r}")
        self.location = os.fspath(path)
        self._mode, self._commit_at = mode, commit
        self._partition_by = [partition_by] if isinstance(partition_by, str) else list(partition_by)
        self._row_group_bytes, self._file_bytes = 16 << 20, parse_bytes(file_bytes)
        self.path: Path | None = local_or_none(path)
        """The directory of a local table."""
        self._durable = self._published = False
        self._begin_run(secrets.token_hex(8))

    def _begin_run(self, run: str) -> None:
        self._run = run
        self._schema: pa.Schema | None = None
        self._target: pa.Schema | None = None
        """Columns of the rows as the table has them; None before the first batch."""
        self._files: PartitionedFiles | None = None
        self._finished: list[DataFile] = []
        """Files of a run without checkpoints."""
        self._journals = self._saved = 0
        """Lists of files that were written, and those that a checkpoint has named."""
        self._here: Place | None = None

    # -- a sink ------------------------------------------------------------------------------------------------------

    def fit_budget(self, nbytes: int) -> None:
        # A row group is in memory as rows, sorted by partition, and encoded.
        self._row_group_bytes = min(16 << 20, max(1 << 16, nbytes // 32))

    def consume(self, batch: pa.RecordBatch) -> None:
        if self._published:
            raise ConfigError(f"{self!r} has published its rows; call reset() before writing again")
        if self._schema is None or self._target is None:
            self._schema = self._schema or batch.schema
            self._target = self._table_schema(self._schema)
        if not batch.schema.equals(self._schema):
            difference = describe_difference(self._schema, batch.schema)
            raise SchemaError(f"{self!r} got another schema than before: {difference}")
        if batch.num_rows:
            self._writer.write(self._cast(batch))

    def flush(self) -> None:
        """Commit. Doing it again, or after a crash in the middle of it, is safe."""
        if self._published:
            return
        if self._durable:
            self._write_journal()
            self._commit(self._journals)
        elif self._schema is not None:
            self._finished += self._files.finish() if self._files is not None else []
            self._commit(1)
        self._published = True
        self._place.remove()

    def memory_usage(self) -> int:
        return self._files.held_bytes() if self._files is not None else 0

    def checkpoint(self) -> State:
        if not self._durable:
            raise ConfigError("checkpoint() without restore(): a plain run cannot be resumed; call restore({}) first")
        if self._commit_at == "checkpoint" and self._saved:
            self._commit(self._saved)  # the checkpoint that names them is saved, or this one would not be made
        self._write_journal()
        self._saved = self._journals
        schema = schema_to_text(self._schema) if self._schema is not None else None
        return {"run": self._run, "journals": self._journals, "schema": schema}

    def restore(self, token: State) -> None:
        self._drop_open()
        self._durable, self._published = True, False
        self._begin_run(token.get("run") or self._run)
        self._journals = self._saved = int(token.get("journals", 0))
        self._schema = schema_from_text(token["schema"]) if token.get("schema") else None
        done = self._committed()
        if done >= self._journals and self._journals and token.get("finishing"):
            self._published = True
            self._place.remove()
            return
        left = [file.name for number in range(done, self._journals) for file in self._journal(number + 1)]
        self._place.sweep(self._journals, set(left))

    def abort(self) -> None:
        """Remove what was not committed, except what a checkpoint needs."""
        self._drop_open()
        if not self._durable and not self._published:
            for file in self._finished:
                self._place.delete(file.name)
            self._finished = []
            self._place.remove()

    close = abort

    def reset(self) -> None:
        """Ready for another run."""
        self.abort()
        self._durable = self._published = False
        self._begin_run(secrets.token_hex(8))

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _place(self) -> Place:
        if self._here is None:
            if self.path is not None:
                self._here = FolderPlace(self.path, self._run)
            else:
                self._here = BucketPlace(*open_bucket(self.location), self._run)
        return self._here

    @property
    def _writer(self) -> PartitionedFiles:
        if self._files is None:
            assert self._target is not None
            self._files = PartitionedFiles(
                self._place,
                self._target,
                self._partition_by,
                row_group_bytes=self._row_group_bytes,
                file_bytes=self._file_bytes,
                before=self._journals,
            )
        return self._files

    def _drop_open(self) -> None:
        if self._files is not None:
            self._files.abort()
        self._files = None

    def _write_journal(self) -> None:
        """List the files since the last time, durably."""
        files = self._files.finish() if self._files is not None else []
        if files or (self._schema is not None and not self._journals):
            self._place.write_journal(self._journals + 1, journal_data(files))
            self._journals += 1

    def _journal(self, number: int) -> list[DataFile]:
        try:
            return journal_files(self._place.read_journal(number))
        except FileNotFoundError as error:
            raise ResumeError(
                f"the checkpoint needs {error.filename or error}, which is gone; delete the checkpoint to start again"
            ) from error

    def _table(self) -> Any:
        """The table; None if there is none yet."""
        try:
            return open_table(self.location)
        except FileNotFoundError:
            return None

    def _committed(self) -> int:
        """Number of the last list of files of this run that is in the table."""
        table = self._table()
        return 0 if table is None else transaction_version(table, self.location, self._run)

    def _commit(self, number: int) -> None:
        """Add the files of all lists up to one that are not in the table yet."""
        if not number:
            return
        deltalake = require_deltalake()
        for attempt in range(_ATTEMPTS):
            table = self._table()
            done = 0 if table is None else transaction_version(table, self.location, self._run)
            if done >= number:
                return
            lists = [self._journal(each + 1) for each in range(done, number)] if self._durable else [self._finished]
            try:
                self._add(deltalake, table, [file for files in lists for file in files], done, number)
                return
            except (deltalake.exceptions.DeltaError, OSError) as error:
                if attempt == _ATTEMPTS - 1 or not self._is_worth_another(deltalake, table, error):
                    raise ConnectionError(
                        f"the rows could not be added to the Delta table {shown(self.location)!r}: {brief(error)}; "
                        "nothing of them is in it; run again"
                    ) from error

    def _is_worth_another(self, deltalake: Any, table: Any, error: Exception) -> bool:
        """True if somebody else made the table, or a commit of somebody else was in the way of adding rows."""
        conflict = isinstance(error, deltalake.exceptions.CommitFailedError)
        return (table is None and self._table() is not None) or (conflict and self._mode == "append")

    def _add(self, deltalake: Any, table: Any, files: Sequence[DataFile], done: int, number: int) -> None:
        self._place.publish([file.name for file in files])
        now = time.time_ns() // 1_000_000
        actions = [
            deltalake.transaction.AddAction(
                path=file.name,
                size=file.size,
                partition_values=file.partition,
                modification_time=now,
                data_change=True,
                stats=orjson.dumps(file.statistics).decode(),
            )
            for file in files
        ]
        properties = deltalake.CommitProperties(app_transactions=[deltalake.Transaction(self._run, number)])
        if table is None:
            url, options = address(self.location)
            schema = self._target if self._target is not None else self._new_schema(self._known_schema())
            deltalake.transaction.create_table_with_add_actions(
                url,
                deltalake.Schema.from_arrow(schema),
                actions,
                mode="error",
                partition_by=self._partition_by,
                storage_options=options or None,
                commit_properties=properties,
            )
            return
        mode = "overwrite" if self._mode == "overwrite" and not done else "append"
        table.create_write_transaction(
            actions, mode, table.schema(), table.metadata().partition_columns, commit_properties=properties
        )

    def _known_schema(self) -> pa.Schema:
        assert self._schema is not None
        return self._schema

    # -- columns -----------------------------------------------------------------------------------------------------

    def _table_schema(self, given: pa.Schema) -> pa.Schema:
        """The columns of the rows with the types of the table, which has to be one that can be written to."""
        table = self._table()
        if table is None:
            return self._new_schema(given)
        self._check_table(table)
        there = pa.schema(table.schema().to_arrow())
        partitions = table.metadata().partition_columns
        if self._partition_by and self._partition_by != partitions:
            raise ConfigError(
                f"the Delta table {shown(self.location)!r} is partitioned by {partitions}, and "
                f"partition_by={self._partition_by} was given; omit it"
            )
        self._partition_by = list(partitions)
        for field in given:
            if field.name not in there.names:
                raise SchemaError(
                    f"column {field.name!r} is not in the Delta table {shown(self.location)!r}, which has "
                    f"{there.names}; drop it, or add it to the table first (DeltaTable.alter.add_columns)"
                )
        missing = [field.name for field in there if field.name not in given.names and not field.nullable]
        missing += [name for name in partitions if name not in given.names]
        if missing:
            raise SchemaError(f"the rows have no column {missing[0]!r}, which {shown(self.location)!r} needs")
        return pa.schema([field for field in there if field.name in given.names])

    def _new_schema(self, given: pa.Schema) -> pa.Schema:
        deltalake = require_deltalake()
        for name in self._partition_by:
            if name not in given.names:
                raise ConfigError(f"partition_by: there is no column {name!r}; the rows have {given.names}")
        if len(self._partition_by) == len(given.names):
            raise ConfigError(f"partition_by={self._partition_by} are all columns; leave one for the files")
        empty = [field.name for field in given if pa.types.is_null(field.type)]
        if empty:
            raise SchemaError(f"column {empty[0]!r} has no type, because all values are null; cast it, or drop it")
        try:
            plain = pa.schema([pa.field(field.name, _plain_type(field.type)) for field in given])
            made = pa.schema(deltalake.Schema.from_arrow(plain).to_arrow())
        except Exception as error:
            raise SchemaError(f"a Delta table cannot hold these columns: {brief(error)}") from error
        for name in self._partition_by:
            if not any(holds(made.field(name).type) for holds in _PARTITIONS):
                raise ConfigError(f"partition_by: {name!r} is {made.field(name).type}, and no type of partitions")
        return made

    def _check_table(self, table: Any) -> None:
        """Refuse a table whose rules this sink would break."""
        protocol, settings = table.protocol(), table.metadata().configuration
        where = f"the Delta table {shown(self.location)!r}"
        unknown = sorted({*(protocol.writer_features or ())} - _FEATURES)
        unknown += [name for name in settings if name.startswith("delta.constraints.")]
        if settings.get("delta.columnMapping.mode", "none") != "none":
            unknown.append("columnMapping")
        if settings.get("delta.enableChangeDataFeed", "false").lower() == "true" and self._mode == "overwrite":
            unknown.append("changeDataFeed")
        text = table.schema().to_json()
        unknown += [name for name in _COLUMN_RULES if name in text]
        if unknown:
            raise ConfigError(
                f"{where} has {unknown[0]!r}, which this sink does not keep; write to another table, and add its rows "
                "with deltalake"
            )
        if self._mode == "overwrite" and settings.get("delta.appendOnly", "false").lower() == "true":
            raise ConfigError(
                f"{where} is append-only (delta.appendOnly), so its rows cannot be replaced; use 'append'"
            )

    def _cast(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        assert self._target is not None
        columns = []
        for field in self._target:
            column = batch.column(field.name)
            try:
                columns.append(column if column.type == field.type else column.cast(field.type))
            except pa.ArrowException as error:
                raise SchemaError(
                    f"column {field.name!r} is {column.type}, and {field.type} in the Delta table "
                    f"{shown(self.location)!r}: {error}"
                ) from error
            if not field.nullable and columns[-1].null_count:
                raise SchemaError(f"column {field.name!r} has nulls, and {shown(self.location)!r} takes none in it")
        return pa.RecordBatch.from_arrays(columns, schema=self._target)

    def __repr__(self) -> str:
        mode = "" if self._mode == "append" else f", mode={self._mode!r}"
        return f"DeltaSink({shown(self.location)!r}{mode})"


_PLAIN = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
}
"""Types that hold all values of those that Delta does not have; deltalake would take ones that are too small."""


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Type of a column of a new table. Times are in microseconds, as readers know them, and in UTC."""
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if pa.types.is_map(kind):
        return pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain_type(field.type)) for field in kind])
    if is_any_list(kind):
        return pa.list_(kind.value_field.with_type(_plain_type(kind.value_type)))
    return _PLAIN.get(kind, kind)
