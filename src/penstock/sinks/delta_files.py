"""Data files of a Delta table that is being written: one open for each partition, in a directory or in a bucket."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from penstock.errors import ResumeError, SchemaError
from penstock.files.atomic import sync_directory, write_atomic
from penstock.files.objects import Bucket

_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_LONGEST_FOLDER = 120
_LONGEST_STATISTIC = 32
_MOST_STATISTICS = 32
_JOURNAL = "files-{:06d}.json"


@dataclass(frozen=True, slots=True)
class DataFile:
    """A finished file, as the log of the table describes it."""

    name: str
    """Path below the table."""
    size: int
    partition: dict[str, str | None]
    statistics: dict[str, Any]


class Place(Protocol):
    """Place of the files of a run until they are committed."""

    most_open: int
    """Number of files that may be open at once."""

    def create(self, name: str) -> Any: ...

    def finish(self, name: str, file: Any) -> int:
        """Make a file durable; its size."""
        ...

    def give_up(self, name: str, file: Any) -> None: ...

    def delete(self, name: str) -> None: ...

    def held_bytes(self, file: Any) -> int: ...

    def write_journal(self, number: int, data: bytes) -> None: ...

    def read_journal(self, number: int) -> bytes: ...

    def sweep(self, journals: int, names: set[str]) -> None:
        """Remove what the first journals do not list."""
        ...

    def publish(self, names: Sequence[str]) -> None:
        """Put files where the log will look for them; again after a crash in the middle."""
        ...

    def remove(self) -> None:
        """Remove everything that is not the table's."""
        ...


class FolderPlace:
    """A hidden directory beside the table: files are renamed into the table before they are committed."""

    most_open = 64

    def __init__(self, table: Path, run: str) -> None:
        self._table = table
        self._home = table.with_name(f".{table.name}.penstock-{run}")

    def create(self, name: str) -> Any:
        if not self._table.parent.is_dir():
            raise FileNotFoundError(
                f"no such directory: {str(self._table.parent)!r}; make it before writing {self._table.name}"
            )
        path = self._home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("wb")

    def finish(self, name: str, file: Any) -> int:
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
        file.close()
        return int(size)

    def give_up(self, name: str, file: Any) -> None:
        file.close()
        self.delete(name)

    def delete(self, name: str) -> None:
        (self._home / name).unlink(missing_ok=True)

    def held_bytes(self, file: Any) -> int:
        return 0

    def write_journal(self, number: int, data: bytes) -> None:
        self._home.mkdir(exist_ok=True)
        write_atomic(self._home / _JOURNAL.format(number), data)

    def read_journal(self, number: int) -> bytes:
        return (self._home / _JOURNAL.format(number)).read_bytes()

    def sweep(self, journals: int, names: set[str]) -> None:
        kept = {self._home / name for name in names}
        kept |= {self._home / _JOURNAL.format(number + 1) for number in range(journals)}
        for path in self._home.rglob("*"):
            if path.is_file() and path not in kept:
                path.unlink()
        there = [name for name in names if not (self._home / name).exists() and not (self._table / name).exists()]
        if there:
            raise ResumeError(
                f"the checkpoint needs {self._home / there[0]}, which is gone; delete the checkpoint to start again"
            )

    def publish(self, names: Sequence[str]) -> None:
        folders = set()
        for name in names:
            source, target = self._home / name, self._table / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.exists():
                source.replace(target)
            folders.add(target.parent)
        for folder in folders:
            sync_directory(folder)

    def remove(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)


class BucketPlace:
    """Keys of the table itself: what is not in its log is not seen. Journals are in `_penstock` beside the log."""

    most_open = 8

    def __init__(self, bucket: Bucket, key: str, run: str) -> None:
        self._bucket, self._key = bucket, key
        self._home = f"{key}/_penstock/{run}".lstrip("/")

    def _place(self, name: str) -> str:
        return f"{self._key}/{name}".lstrip("/")

    def create(self, name: str) -> Any:
        return self._bucket.writer(self._place(name))

    def finish(self, name: str, file: Any) -> int:
        size = file.tell()
        file.commit()
        return int(size)

    def give_up(self, name: str, file: Any) -> None:
        file.abort()

    def delete(self, name: str) -> None:
        self._bucket.delete(self._place(name))

    def held_bytes(self, file: Any) -> int:
        return int(file.held_bytes())

    def write_journal(self, number: int, data: bytes) -> None:
        self._bucket.write(f"{self._home}/{_JOURNAL.format(number)}", data)

    def read_journal(self, number: int) -> bytes:
        return bytes(self._bucket.read(f"{self._home}/{_JOURNAL.format(number)}"))

    def sweep(self, journals: int, names: set[str]) -> None:
        """Files of an attempt that was killed stay, unseen, until the table is vacuumed: listing it costs more."""

    def publish(self, names: Sequence[str]) -> None:
        return

    def remove(self) -> None:
        for found in list(self._bucket.objects(f"{self._home}/")):
            self._bucket.delete(found.key)


def journal_data(files: Sequence[DataFile]) -> bytes:
    return orjson.dumps([asdict(file) for file in files])


def journal_files(data: bytes) -> list[DataFile]:
    try:
        return [DataFile(**facts) for facts in orjson.loads(data)]
    except (ValueError, TypeError) as error:
        raise ResumeError(
            f"a list of written files is damaged ({error}); delete the checkpoint to start again"
        ) from error


class _OpenFile:
    """One open Parquet file and the rows that wait for a row group."""

    def __init__(self, name: str, file: Any, schema: pa.Schema, partition: dict[str, str | None]) -> None:
        self.name, self.file, self.partition, self._schema = name, file, partition, schema
        self._footers: list[Any] = []
        self._writer = pq.ParquetWriter(
            file, schema, compression="zstd", write_page_checksum=True, metadata_collector=self._footers
        )
        self.waiting: list[pa.RecordBatch] = []
        self.waiting_bytes = self.written_bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self.waiting.append(batch)
        self.waiting_bytes += batch.nbytes

    def write_group(self) -> None:
        if self.waiting:
            self._writer.write_table(pa.Table.from_batches(self.waiting, self._schema))
            self.written_bytes += self.waiting_bytes
            self.waiting, self.waiting_bytes = [], 0

    def abandon(self) -> None:
        """Release the writer; a footer that cannot be written is not missed."""
        self.waiting, self.waiting_bytes = [], 0
        with contextlib.suppress(Exception):
            self.file.discarding = True  # of an upload: nothing more is sent
        with contextlib.suppress(Exception):
            self._writer.close()

    def close(self) -> Any:
        """Write what is left, and the footer, which is returned."""
        self.write_group()
        self._writer.close()
        return self._footers[0]


class PartitionedFiles:
    """Rows written as Parquet files, by partition; a file ends at `file_bytes` of rows, or when too many are open."""

    def __init__(
        self,
        place: Place,
        schema: pa.Schema,
        partition_by: Sequence[str],
        *,
        row_group_bytes: int,
        file_bytes: int,
        before: int = 0,
    ) -> None:
        """`before`: lists of files that were written earlier; names are in the order of the rows."""
        self._place, self._partition_by = place, list(partition_by)
        self._schema = pa.schema([field for field in schema if field.name not in partition_by])
        self._row_group_bytes, self._file_bytes = row_group_bytes, file_bytes
        self._open: dict[tuple[str | None, ...], _OpenFile] = {}
        """By the values of their partition, the one that was used last at the end."""
        self._finished: list[DataFile] = []
        self._before, self._attempt, self._count = before, secrets.token_hex(6), 0

    def write(self, batch: pa.RecordBatch) -> None:
        for values, rows in self._parts(batch):
            file = self._file(values)
            file.add(rows)
            if file.waiting_bytes >= self._row_group_bytes:
                file.write_group()
            if file.written_bytes >= self._file_bytes:
                self._end(values)
        while sum(file.waiting_bytes for file in self._open.values()) > self._row_group_bytes:
            max(self._open.values(), key=lambda file: file.waiting_bytes).write_group()

    def finish(self) -> list[DataFile]:
        """End all open files; the files that were finished since the last call."""
        for values in list(self._open):
            self._end(values)
        finished, self._finished = self._finished, []
        return finished

    def abort(self) -> None:
        """Remove what `finish` has not returned."""
        for file in self._open.values():
            file.abandon()
            self._place.give_up(file.name, file.file)
        for done in self._finished:
            self._place.delete(done.name)
        self._open, self._finished = {}, []

    def held_bytes(self) -> int:
        return sum(file.waiting_bytes + self._place.held_bytes(file.file) for file in self._open.values())

    def _parts(self, batch: pa.RecordBatch) -> Iterator[tuple[tuple[str | None, ...], pa.RecordBatch]]:
        """The rows of each partition."""
        rows = batch.select(self._schema.names)
        if not self._partition_by:
            yield (), rows
            return
        codes = np.zeros(batch.num_rows, np.int64)
        for name in self._partition_by:
            encoded = batch.column(name).dictionary_encode(null_encoding="encode")
            codes = codes * max(1, len(encoded.dictionary)) + encoded.indices.to_numpy(zero_copy_only=False)
            codes = np.unique(codes, return_inverse=True)[1]
        order = np.argsort(codes, kind="stable")
        bounds = np.flatnonzero(np.diff(codes[order], prepend=-1)).tolist()
        sorted_rows = rows.take(pa.array(order)) if len(bounds) > 1 else rows
        for start, stop in zip(bounds, [*bounds[1:], batch.num_rows]):
            first = int(order[start])
            values = tuple(partition_text(batch.column(name)[first], name) for name in self._partition_by)
            yield values, sorted_rows.slice(start, stop - start)

    def _file(self, values: tuple[str | None, ...]) -> _OpenFile:
        found = self._open.pop(values, None)
        if found is None:
            if len(self._open) >= self._place.most_open:
                self._end(next(iter(self._open)))
            partition = dict(zip(self._partition_by, values))
            self._count += 1
            name = f"{folder_of(partition)}part-{self._before:05d}-{self._count:06d}-{self._attempt}.zstd.parquet"
            found = _OpenFile(name, self._place.create(name), self._schema, partition)
        self._open[values] = found
        return found

    def _end(self, values: tuple[str | None, ...]) -> None:
        file = self._open.pop(values)
        statistics = _statistics(file.close(), self._schema)
        size = self._place.finish(file.name, file.file)
        self._finished.append(DataFile(file.name, size, file.partition, statistics))


def folder_of(partition: Mapping[str, str | None]) -> str:
    """Directories of a partition, as Hive names them; the log has the values, so a long one is cut."""
    folders = []
    for name, value in partition.items():
        text = _NO_VALUE if value is None else quote(value, safe="")
        if len(text) > _LONGEST_FOLDER:
            text = f"{text[: _LONGEST_FOLDER // 2].rpartition('%')[0]}-{xxhash.xxh3_64_hexdigest(text.encode())}"
        folders.append(f"{quote(name, safe='')}={text}/")
    return "".join(folders)


def partition_text(value: pa.Scalar, name: str) -> str | None:
    """The value of a partition column as the log has it."""
    plain = value.as_py()
    if plain is None:
        return None
    if isinstance(plain, bool):
        return "true" if plain else "false"
    if isinstance(plain, datetime.datetime):
        if plain.tzinfo is not None:
            plain = plain.astimezone(datetime.UTC).replace(tzinfo=None)
        return plain.isoformat(" ", "microseconds")
    if isinstance(plain, decimal.Decimal):
        return f"{plain:f}"
    if isinstance(plain, float) and not math.isfinite(plain):
        return "NaN" if math.isnan(plain) else "Infinity" if plain > 0 else "-Infinity"
    if plain == "":
        raise SchemaError(
            f"column {name!r} has an empty text, and in the partitions of a Delta table that is the same as null; "
            "replace it, or partition by another column"
        )
    return str(plain)


def _statistics(footer: Any, schema: pa.Schema) -> dict[str, Any]:
    """Rows, and least, greatest and missing values of the first plain columns: readers choose files by them.

    Numbers with fractions have no bounds: those of Parquet leave out NaN, which other readers count as the greatest.
    """
    lows: dict[str, Any] = {}
    highs: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    columns = {footer.schema.column(number).path: number for number in range(len(footer.schema))}
    for field in list(schema)[:_MOST_STATISTICS]:
        if field.name not in columns or not any(holds(field.type) for holds in _WITH_STATISTICS):
            continue
        number = columns[field.name]
        groups = [footer.row_group(group).column(number).statistics for group in range(footer.num_row_groups)]
        if not groups or any(group is None or not group.has_null_count for group in groups):
            continue
        nulls[field.name] = sum(group.null_count for group in groups)
        filled = [group for group in groups if group.num_values]
        if filled and all(group.has_min_max for group in filled) and not pa.types.is_floating(field.type):
            low, high = min(group.min for group in filled), max(group.max for group in filled)
            if isinstance(low, datetime.date):
                low, high = low.isoformat(), high.isoformat()
            if isinstance(low, str):
                low = low[:_LONGEST_STATISTIC]
            if not isinstance(high, str) or len(high) <= _LONGEST_STATISTIC:  # a cut one would not be the greatest
                lows[field.name], highs[field.name] = low, high
    return {"numRecords": footer.num_rows, "minValues": lows, "maxValues": highs, "nullCount": nulls}


_WITH_STATISTICS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_string, pa.types.is_date32)
