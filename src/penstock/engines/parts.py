"""Parts: the rows that a task leaves in the job's directory, and the source that reads parts in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.engines.job_directory import JobDirectory
from penstock.engines.records import PartRecord, PhaseRecords
from penstock.files.states import StateFormat
from penstock.memory.views import MappedFile
from penstock.pipeline.checkpoint import schema_from_text, schema_to_text
from penstock.pipeline.stages import Origin, Sink, Source, State
from penstock.sinks.file_sink import FileSink
from penstock.store.shard_writer import plain_batch, plain_schema, row_bytes

_STATE = StateFormat("parts of a job", "the parts of a job", fields={"part": (int,), "row": (int,)})


class _PartFile(Sink):
    """Rows of a task in a file that is made with the first batch."""

    _path: Path
    _file: Any = None
    _writer: Any = None

    def flush(self) -> None:
        """Rows of the next split may follow."""

    def close(self) -> None:
        """Complete the file; one without a batch is empty."""
        if self._writer is None:
            self._path.touch()
            return
        self._writer.close()
        self._file.close()

    def release(self) -> None:
        """Close the file, complete or not."""
        if self._file is not None:
            self._file.close()


class PartSink(_PartFile):
    """Rows of a task, as an Arrow stream in a file; optionally with the bytes of each row as a store counts them."""

    def __init__(self, path: Path, *, measure: bool = False) -> None:
        self._path, self._measure = path, measure
        self.schema: pa.Schema | None = None
        self.rows = self.nbytes = 0
        self.sizes: list[npt.NDArray[np.int64]] = []

    def consume(self, batch: pa.RecordBatch) -> None:
        if self._writer is None:
            self.schema = batch.schema
            self._file = pa.OSFile(str(self._path), "wb")
            self._writer = pa.ipc.new_stream(self._file, batch.schema)
        if not batch.num_rows:
            return
        self._writer.write_batch(batch)
        self.rows += batch.num_rows
        self.nbytes += batch.nbytes
        if self._measure:
            self.sizes.append(row_bytes(plain_batch(batch, plain_schema(batch.schema))))

    def __repr__(self) -> str:
        return "the rows of a part"


class EncodedSink(_PartFile):
    """Rows of a task as the bytes that a sink of text makes of them, without a header: parts are laid end to end."""

    def __init__(self, path: Path, encoder: FileSink) -> None:
        self._path, self._encoder = path, encoder
        self.schema: pa.Schema | None = None
        self.rows = self.nbytes = 0

    def consume(self, batch: pa.RecordBatch) -> None:
        if self._writer is None:
            self.schema = batch.schema
            self._file = open(self._path, "wb")  # noqa: SIM115 - closed by `close`
            self._writer = self._encoder.part_writer(self._file, batch.schema)
        if batch.num_rows:
            self._writer.write(batch)
            self.rows += batch.num_rows
            self.nbytes += batch.nbytes

    def __repr__(self) -> str:
        return repr(self._encoder)


def part_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Batches of a part, as views of the mapped file."""
    if not path.stat().st_size:
        return
    with pa.ipc.open_stream(pa.BufferReader(MappedFile(path).buffer())) as reader:
        yield from reader


def row_ranges(batches: Iterator[pa.RecordBatch], start: int, stop: int) -> Iterator[pa.RecordBatch]:
    """Rows `start` to `stop` of some batches."""
    at = 0
    for batch in batches:
        low, high = max(start - at, 0), min(stop - at, batch.num_rows)
        if high > low:
            yield batch.slice(low, high - low)
        at += batch.num_rows
        if at >= stop:
            return


class PartsSource(Source):
    """Rows of the parts of a phase, in order, with the file that each comes from."""

    def __init__(
        self, directory: JobDirectory, records: PhaseRecords, names: Sequence[str], schema: pa.Schema | None
    ) -> None:
        self._directory, self._records, self._names, self.schema = directory, records, names, schema
        self._parts = records.complete
        self._part = self._row = 0
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._pending: pa.RecordBatch | None = None
        self._open = ExitStack()
        self._origin: Origin | None = None

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        while self._part < len(self._parts):
            batch = self._next_here(max_rows)
            if batch is not None:
                self._row += batch.num_rows
                return batch
            self._close_part()
            self._part, self._row = self._part + 1, 0
        return None

    def _next_here(self, max_rows: int) -> pa.RecordBatch | None:
        part = self._parts[self._part]
        if not part.rows:
            return None
        if self._batches is None:
            path = self._open.enter_context(self._directory.opened(f"{self._records.name(self._part)}.rows"))
            self._batches = row_ranges(part_batches(path), self._row, part.rows)
        if self._pending is None:
            self._pending = next(self._batches, None)
            if self._pending is None:
                return None
        file, left = _file_at(part, self._row)
        batch = self._pending.slice(0, min(max_rows, left))
        rest = self._pending.slice(batch.num_rows)
        self._pending = rest if rest.num_rows else None
        self._origin = Origin(self._names[file] if file < len(self._names) else "")
        return batch

    def origin(self) -> Origin | None:
        return self._origin

    def size_hint(self) -> int | None:
        return int(self._records.sums["rows"])

    def state_dict(self) -> State:
        return _STATE.write({"part": self._part, "row": self._row})

    def load_state_dict(self, state: State) -> None:
        state = _STATE.read(state)
        self.close()
        self._part, self._row = state["part"], state["row"]

    def reset(self) -> None:
        self.close()
        self._part = self._row = 0

    def close(self) -> None:
        self._close_part()

    def _close_part(self) -> None:
        self._batches = self._pending = None
        self._open.close()

    def __repr__(self) -> str:
        return f"{len(self._parts)} parts of {self._directory.shown}"


def _file_at(part: PartRecord, row: int) -> tuple[int, int]:
    """File that a row comes from, and how many rows from there on do."""
    at = 0
    for file, rows in zip(part.files, part.run_rows):
        at += rows
        if row < at:
            return file, at - row
    raise IndexError(f"row {row} of a part with {at}")


def schema_text(schema: pa.Schema | None) -> str | None:
    return None if schema is None else schema_to_text(schema)


def schema_of(text: str | None) -> pa.Schema | None:
    return None if text is None else schema_from_text(text)
