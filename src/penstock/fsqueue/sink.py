"""`QueueSink`: batches of any columns into a queue, from the end of a pipeline or by hand."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import pyarrow as pa

from penstock._suggest import check_options
from penstock.errors import ConfigError, SchemaError
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.fsqueue.layout import LANES
from penstock.fsqueue.members import Backoff, QueueKeywords, QueueMember, QueueOptions
from penstock.fsqueue.publisher import Limits, Publisher, check_positive
from penstock.fsqueue.queue import Description, Queue, schema_of
from penstock.pipeline.chain import describe_difference
from penstock.pipeline.functions import arrow_schema
from penstock.pipeline.stages import Sink
from penstock.types import Field, Schema

logger = logging.getLogger(__name__)


class QueueSink(Sink):
    """Writes batches into one split of a queue, `batches_per_file` per file; waits while the backlog is full.

    The first batch creates the queue. A queue that exists with other columns, another `meta` or other file sizes is
    refused. `batch_rows` cuts and joins batches, so that each but the last has that many rows. A file appears when it
    is full. `flush` publishes the rest and ends the split. With `end=False` the split has no end, for several sinks on
    one split, and for sinks that flush often.

    `limits` bounds the backlog; `splits` are all splits that the queue will have. Fields of `QueueOptions` can be given
    as keywords; without `options` a sink waits for room without a time limit. Holds one file of batches, and one batch
    more.
    """

    def __init__(
        self,
        queue_dir: PathLike,
        split: str = "train",
        *,
        schema: pa.Schema | Schema | Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
        splits: Sequence[str] | None = None,
        batch_rows: int | None = None,
        batches_per_file: int = 8,
        limits: Limits | Mapping[str, int] | None = None,
        compression: str | None = None,
        end: bool = True,
        options: QueueOptions | Mapping[str, Any] | None = None,
        **keywords: Unpack[QueueKeywords],
    ) -> None:
        check_positive("batch_rows", batch_rows)
        check_positive("batches_per_file", batches_per_file)
        self.path, self.split = require_local(queue_dir, "queue_dir"), split
        self.splits = list(splits or [split])
        if split not in self.splits:
            raise ConfigError(f"splits must list all splits of the queue: {split!r} is not in {self.splits}")
        self.meta = dict(meta or {})
        self.batch_rows, self.batches_per_file = batch_rows, batches_per_file
        self.limits = _as_limits(limits)
        self.compression, self.end = compression, end
        self.options = QueueOptions.of(options, keywords, timeout_seconds=None)
        given = arrow_schema(schema)
        if given is None and "batch_schema" in self.meta:
            given = schema_of(self.meta).to_arrow()
        self._schema: pa.Schema | None = None if given is None else _canonical(given)
        self._output: _SplitWriter | None = None
        self._rows: list[pa.RecordBatch] = []  # rows that do not fill a batch yet
        self._batches: list[pa.RecordBatch] = []  # batches that do not fill a file yet
        self._number: int | None = None  # reserved number of the next file
        self._backoff: Backoff | None = None
        self._ended: int | None = None
        self.rows_published = 0
        """Rows in published files."""

    @property
    def publisher(self) -> Publisher | None:
        """Counts of published `files`, `batches` and `bytes`; None before the first batch."""
        return None if self._output is None else self._output.publisher

    def wait_for_room(self, timeout_seconds: float) -> bool:
        """Wait for room; True if the next batch can be consumed at once."""
        until = time.monotonic() + timeout_seconds
        while self._is_full:
            if self._output is not None and not self._publish(self._output) and time.monotonic() >= until:
                return False
        return True

    def consume(self, batch: pa.RecordBatch) -> None:
        """Add a batch, after full files have been published. Files that it fills may be published later."""
        output = self._begin(batch.schema)
        cast = self._cast(batch)
        while self._is_full:
            self._publish(output)
        self._rows.append(cast)
        while (piece := self._next_batch()) is not None:
            self._batches.append(piece)
        while self._is_full and self._reserve(output, wait=False):
            self._publish(output)

    def flush(self) -> None:
        """Publish the rest, waiting for room, and end the split, unless `end=False`. A second call does nothing."""
        if self._output is None and (self._schema is None or self._ended is not None):
            if self._ended is None:
                logger.warning("%s: there was neither a batch nor a schema, so no queue was created", self)
            return
        output = self._output if self._output is not None else self._begin(self._schema)
        if (rest := self._next_batch(last=True)) is not None:
            self._batches.append(rest)
        while self._batches:
            self._publish(output)
        if self.end:
            with output.queue.guarded():
                self._ended = output.finish()
        self._leave()

    def memory_usage(self) -> int:
        return sum(batch.nbytes for batch in (*self._rows, *self._batches))

    def abort(self) -> None:
        """Drop what was not published."""
        if dropped := sum(batch.num_rows for batch in (*self._rows, *self._batches)):
            logger.warning("%s: dropped %d rows that were not published", self, dropped)
        self._rows, self._batches = [], []
        self._leave()

    close = abort

    def reset(self) -> None:
        """Prepare for another run, which adds to the split."""
        self.abort()
        self._ended = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.flush()
        else:
            self.abort()

    def __repr__(self) -> str:
        return f"QueueSink({str(self.path)!r}, {self.split!r})"

    def _begin(self, schema: pa.Schema) -> _SplitWriter:
        if self._output is None:
            if self._ended is not None:
                raise ConfigError(
                    f"flush() ended split {self.split!r} of {self.path} after {self._ended} batches; "
                    "to flush several times, make the sink with end=False"
                )
            self._schema = _canonical(schema) if self._schema is None else self._schema
            settings = {"batch_rows": self.batch_rows, "batches_per_file": self.batches_per_file}
            queue = Queue.create(self.path, description_for(self._schema, self.meta, settings, self.splits))
            self._output = _SplitWriter(self, queue)
        return self._output

    def _cast(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with the columns of the queue; raises SchemaError if it has others."""
        wanted = self._schema
        assert wanted is not None
        if batch.schema.equals(wanted, check_metadata=True):
            return batch
        try:
            if sorted(batch.schema.names) != sorted(wanted.names):
                raise SchemaError("other columns")
            columns = [_as_type(batch.column(field.name), field) for field in wanted]
        except SchemaError:
            difference = describe_difference(wanted, batch.schema)
            raise SchemaError(f"{self} has other columns: {difference}") from None
        return pa.RecordBatch.from_arrays(columns, schema=wanted)

    def _next_batch(self, *, last: bool = False) -> pa.RecordBatch | None:
        """One batch of the rows held; None if they are too few."""
        held = sum(part.num_rows for part in self._rows)
        wanted = self.batch_rows or held
        if not held or (held < wanted and not last):
            return None
        joined = self._rows[0] if len(self._rows) == 1 else _joined(self._rows)
        rest = joined.slice(wanted)
        self._rows = [rest] if rest.num_rows else []
        return joined.slice(0, wanted)

    @property
    def _is_full(self) -> bool:
        """True if a whole file is held."""
        return len(self._batches) >= self.batches_per_file

    def _reserve(self, output: _SplitWriter, *, wait: bool) -> bool:
        """Reserve a number; if there is none, pause when `wait` is set."""
        if self._number is None:
            with output.queue.guarded():
                self._number = output.reserve()
        if self._number is not None:
            self._backoff = None
        elif wait:
            self._backoff = self._backoff or Backoff(self.options.timeout_seconds, output.describe_missing)
            self._backoff.pause()
        return self._number is not None

    def _publish(self, output: _SplitWriter) -> bool:
        """Publish one file of the batches held; False, after a pause, if there is no room."""
        if not self._reserve(output, wait=True):
            return False
        number, self._number = self._number, None
        assert number is not None
        batches = self._batches[: self.batches_per_file]
        try:
            with output.queue.guarded():
                published = output.publish(number, _one_dictionary(batches))
        except BaseException as error:
            output.publisher.give_up(number)
            if isinstance(error, pa.ArrowInvalid | pa.ArrowNotImplementedError):
                raise SchemaError(f"{self} cannot write these columns: {error}") from error
            raise
        # If our lease expired, another sink has used the number: ours get the next one.
        if published:
            self.rows_published += sum(batch.num_rows for batch in batches)
            del self._batches[: len(batches)]
        return published

    def _leave(self) -> None:
        output, self._output = self._output, None
        number, self._number, self._backoff = self._number, None, None
        if output is not None:
            if number is not None:
                output.publisher.give_up(number)
            output.member.leave()


class _SplitWriter:
    """Membership of a sink in a queue, from its first batch to the last."""

    def __init__(self, sink: QueueSink, queue: Queue) -> None:
        self.queue = queue
        self.member = QueueMember.provider(queue, {"class": "QueueSink", "split": sink.split}, sink.options)
        self.publisher = Publisher(self.member, sink.split, limits=sink.limits, compression=sink.compression)
        self._last: tuple[int, int] | None = None  # number and batches of the file that was published last
        with queue.guarded():
            self._remove_end()
        self.member.join()

    def _remove_end(self) -> None:
        """Remove the end that an earlier sink has set, if more batches can follow it."""
        try:
            self.publisher.set_end()
        except ConfigError:
            raise ConfigError(
                f"split {self.publisher.split!r} of {self.queue.path} ended after {self.publisher.lanes.end()} "
                "batches, and its last file is not full, so nothing can follow it; to fill the queue anew, run "
                f"`penstock queue purge {self.queue.path}` first, or give the sink another directory; several runs can "
                "add to one queue if all their sinks have end=False"
            ) from None

    def reserve(self) -> int | None:
        self.member.reap_if_due()
        end = self.publisher.lanes.end()
        if end is not None:
            raise ConfigError(
                f"another sink ended split {self.publisher.split!r} of {self.queue.path} after {end} batches; "
                "several sinks on one split need end=False"
            )
        return self.publisher.reserve()

    def publish(self, number: int, batches: Sequence[pa.RecordBatch]) -> bool:
        self._last = (number, len(batches))
        return self.publisher.publish(number, batches)

    def finish(self) -> int:
        """End the split after everything that was published or is in production; returns the number of batches."""
        lanes, per_file = self.publisher.lanes, self.queue.description.batches_per_file
        files = lanes.reserved_end()
        for lane in lanes.all():
            if lane.owner is None and lane.number < files:
                lanes.advance(lane.number, None)  # another sink gave the number up: nobody will produce it now
        end = files * per_file
        if self._last is not None and self._last[0] == files - 1:
            end -= per_file - self._last[1]  # our last file may not be full
        lanes.set_end(end)
        return end

    def describe_missing(self) -> str:
        files = self.publisher.directory.files()
        claimed = sum(file.owner is not None for file in files)
        return (
            f"room in split {self.publisher.split!r} of {self.queue.path}: {len(files) - claimed} files are ready and "
            f"{claimed} claimed, {self.publisher.limits}; start a reader, see `penstock queue status {self.queue.path}`"
            ", or allow more with limits="
        )


def _as_limits(given: Limits | Mapping[str, int] | None) -> Limits | None:
    if not isinstance(given, Mapping):
        return given
    check_options(given, Limits.__dataclass_fields__, "limit")
    return Limits(**given)


def description_for(
    schema: pa.Schema, meta: Mapping[str, Any], settings: Mapping[str, Any], splits: Sequence[str]
) -> Description:
    """Description of a queue with batches of an Arrow schema."""
    entries = []
    for field in Schema.from_arrow(schema):
        entry: dict[str, Any] = {"name": field.name, "dtype": field.dtype}
        if field.shape is not None:
            entry["shape"] = list(field.shape)
        if field.role is not None:
            entry["role"] = field.role
        entries.append(entry)
    return Description({"batch_schema": entries, **meta}, {"lanes": LANES, **settings}, splits)


def nullable(schema: pa.Schema) -> pa.Schema:
    """The schema with all columns nullable: `batch_schema` does not say which may hold nulls."""
    return pa.schema([field.with_nullable(True) for field in schema])


def _canonical(schema: pa.Schema) -> pa.Schema:
    """The schema reduced to what `batch_schema` can express."""
    for field in schema:
        if pa.types.is_null(field.type):
            raise SchemaError(
                f"column {field.name!r} has no type: it holds only nulls; cast it to a type, drop it, "
                "or pass schema= to the sink"
            )
    fields = Schema.from_arrow(schema)
    return nullable(Schema([Field(f.name, f.dtype, f.shape, f.role) for f in fields]).to_arrow())


def _as_type(column: pa.Array, field: pa.Field) -> pa.Array:
    """The column as the type of a field, if that has the same spelling."""
    if column.type == field.type or pa.types.is_null(column.type):
        return column if column.type == field.type else pa.nulls(len(column), field.type)
    if Field.from_arrow(pa.field("", column.type)).spelling != Field.from_arrow(pa.field("", field.type)).spelling:
        raise SchemaError("another type")
    return column.cast(field.type)


def _one_dictionary(batches: Sequence[pa.RecordBatch]) -> Sequence[pa.RecordBatch]:
    """The batches with one dictionary per dictionary column, as a file needs."""
    if len(batches) == 1 or "dictionary<" not in str(batches[0].schema):
        return batches
    unified: list[pa.RecordBatch] = pa.Table.from_batches(batches).unify_dictionaries().to_batches()
    return unified


def _joined(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.concat_batches(_one_dictionary(parts))
