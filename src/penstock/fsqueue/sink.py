"""`QueueSink`: batches of any columns into a queue, from the end of a pipeline or by hand."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from penstock.errors import ConfigError, SchemaError
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.fsqueue.backoff import Backoff
from penstock.fsqueue.members import Membership, MemberWatch
from penstock.fsqueue.publisher import Limits, Publisher
from penstock.fsqueue.queue import Description, Queue, schema_of
from penstock.fsqueue.reaper import LeaseReaper
from penstock.pipeline.chain import describe_difference
from penstock.pipeline.functions import arrow_schema
from penstock.pipeline.stages import Sink
from penstock.types import Field, Schema

__all__ = ["QueueSink", "description_for", "nullable"]

logger = logging.getLogger(__name__)

_LANES = 64


class QueueSink(Sink):
    """Puts batches into one split of a queue, `batches_per_file` to a file; waits while enough is waiting there.

    The queue is made with the first batch, or refused if it is there and was made for other columns, another `meta` or
    other files. Batches go in as they come; with `batch_rows` they are cut and joined, so that each but the last has so
    many rows. A file appears when it is full; `flush` publishes what is left, and ends the split: readers stop behind
    it. With `end=False` it goes on for ever, which is for several sinks on one split, and for sinks that flush often.

    `limits` says how much may wait, `timeout_seconds` how long a sink waits for room before it raises StalledError.
    `splits` are all that the queue will have. `durable` makes every file survive a power cut, for some milliseconds
    each. Holds up to one file of batches, and one batch more.
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
        durable: bool = False,
        end: bool = True,
        timeout_seconds: float | None = None,
        lease_seconds: float = 30.0,
    ) -> None:
        for name, value in (("batch_rows", batch_rows), ("batches_per_file", batches_per_file)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} must be a positive whole number, got {value!r}")
        if timeout_seconds is not None and not timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds must be positive, or None, got {timeout_seconds!r}")
        self.path, self.split = require_local(queue_dir, "queue_dir"), split
        self.splits = list(splits or [split])
        if split not in self.splits:
            raise ConfigError(f"splits are all that the queue will have: {split!r} is not in {self.splits}")
        self.meta = dict(meta or {})
        self.batch_rows, self.batches_per_file = batch_rows, batches_per_file
        self.limits = _as_limits(limits)
        self.compression, self.durable, self.end = compression, durable, end
        self.timeout_seconds, self.lease_seconds = timeout_seconds, lease_seconds
        given = arrow_schema(schema)
        if given is None and "batch_schema" in self.meta:
            given = schema_of(self.meta).to_arrow()
        self._schema: pa.Schema | None = None if given is None else _canonical(given)
        self._place: _Place | None = None
        self._rows: list[pa.RecordBatch] = []
        """Rows that are not yet a batch."""
        self._batches: list[pa.RecordBatch] = []
        """Batches that are not yet a file."""
        self._number: int | None = None
        """The number that is ours to publish next."""
        self._patience: Backoff | None = None
        self._ended: int | None = None
        self.rows_published = 0
        """How many rows are in files that readers can see."""

    @property
    def publisher(self) -> Publisher | None:
        """What was published so far: `files`, `batches`, `bytes`. None before the first batch."""
        return None if self._place is None else self._place.publisher

    def wait_for_room(self, timeout: float) -> bool:
        """Whether the next batch can be taken at once, waiting for it if needed."""
        until = time.monotonic() + timeout
        while self._is_full:
            if self._place is not None and not self._publish(self._place) and time.monotonic() >= until:
                return False
        return True

    def consume(self, batch: pa.RecordBatch) -> None:
        """Take a batch, when the files that are full have found room. Those that it fills may find theirs later."""
        place = self._begin(batch.schema)
        fitted = self._fitted(batch)
        while self._is_full:
            self._publish(place)
        self._rows.append(fitted)
        while (piece := self._next_batch()) is not None:
            self._batches.append(piece)
        while self._is_full and self._reserve(place, wait=False):
            self._publish(place)

    def flush(self) -> None:
        """Publish what is left, waiting for room, and end the split, unless `end=False`. Again does nothing."""
        if self._place is None and (self._schema is None or self._ended is not None):
            if self._ended is None:
                logger.warning("%s: no batch came and no schema was given, so no queue was made", self)
            return
        place = self._place if self._place is not None else self._begin(self._schema)
        if (rest := self._next_batch(last=True)) is not None:
            self._batches.append(rest)
        while self._batches:
            self._publish(place)
        if self.end:
            with place.queue.guarded():
                self._ended = place.finish()
        self._leave()

    def memory_usage(self) -> int:
        return sum(batch.nbytes for batch in (*self._rows, *self._batches))

    def abort(self) -> None:
        """Drop what was not published; what was is in the queue to stay."""
        if dropped := sum(batch.num_rows for batch in (*self._rows, *self._batches)):
            logger.warning("%s: %d rows that were not published yet are dropped", self, dropped)
        self._rows, self._batches = [], []
        self._leave()

    close = abort

    def reset(self) -> None:
        """Ready for another run, which adds to the split."""
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

    def _begin(self, schema: pa.Schema) -> _Place:
        if self._place is None:
            if self._ended is not None:
                raise ConfigError(
                    f"flush() has ended split {self.split!r} of {self.path} after {self._ended} batches; "
                    "to flush in between, make the sink with end=False"
                )
            self._schema = _canonical(schema) if self._schema is None else self._schema
            settings = {"batch_rows": self.batch_rows, "batches_per_file": self.batches_per_file}
            queue = Queue.create(self.path, description_for(self._schema, self.meta, settings, self.splits))
            self._place = _Place(self, queue)
        return self._place

    def _fitted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with the queue's columns; raises SchemaError if it has others."""
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
            raise SchemaError(f"{self} holds batches with other columns: {difference}") from None
        return pa.RecordBatch.from_arrays(columns, schema=wanted)

    def _next_batch(self, *, last: bool = False) -> pa.RecordBatch | None:
        """The rows of one batch out of those that wait; None if they are too few."""
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
        """Whether a whole file waits for room."""
        return len(self._batches) >= self.batches_per_file

    def _reserve(self, place: _Place, *, wait: bool) -> bool:
        """Whether there is a number for us; if not, and we are to wait, some time has passed."""
        if self._number is None:
            with place.queue.guarded():
                self._number = place.reserve()
        if self._number is not None:
            self._patience = None
        elif wait:
            self._patience = self._patience or Backoff(self.timeout_seconds, place.what_is_missing)
            self._patience.pause()
        return self._number is not None

    def _publish(self, place: _Place) -> bool:
        """Publish one file of the batches that wait, if there is room for it or after a moment."""
        if not self._reserve(place, wait=True):
            return False
        number, self._number = self._number, None
        assert number is not None
        batches = self._batches[: self.batches_per_file]
        try:
            with place.queue.guarded():
                published = place.publish(number, _one_dictionary(batches))
        except BaseException as error:
            place.publisher.give_up(number)
            if isinstance(error, pa.ArrowInvalid | pa.ArrowNotImplementedError):
                raise SchemaError(f"{self} cannot write these columns: {error}") from error
            raise
        # If our lease ran out, another sink has put batches of its own under the number: ours get the next one.
        if published:
            self.rows_published += sum(batch.num_rows for batch in batches)
            del self._batches[: len(batches)]
        return published

    def _leave(self) -> None:
        place, self._place = self._place, None
        number, self._number, self._patience = self._number, None, None
        if place is not None:
            if number is not None:
                place.publisher.give_up(number)
            place.member.leave()


class _Place:
    """A sink's place in a queue, from its first batch to the last."""

    def __init__(self, sink: QueueSink, queue: Queue) -> None:
        self.queue = queue
        facts = {"role": "provider", "class": "QueueSink", "split": sink.split}
        self.member = Membership(queue.members, "p", lease_seconds=sink.lease_seconds, facts=facts)
        self.publisher = Publisher(
            queue, sink.split, self.member, limits=sink.limits, compression=sink.compression, durable=sink.durable
        )
        self._last: tuple[int, int] | None = None
        """The file that we published last: its number, its batches."""
        self._caretaker = LeaseReaper(queue, MemberWatch(queue.members, lease_seconds=sink.lease_seconds))
        with queue.guarded():
            self._go_on_behind_the_end()
            self.member.join()

    def _go_on_behind_the_end(self) -> None:
        """Take back the end that an earlier sink has set, if more can be added there."""
        try:
            self.publisher.set_end()
        except ConfigError:
            raise ConfigError(
                f"split {self.publisher.split!r} of {self.queue.path} has ended already, after "
                f"{self.publisher.lanes.end()} batches: a run into it was complete, and its last file is not full, so "
                f"nothing can be added behind it; to make the queue anew, run `penstock queue purge {self.queue.path}` "
                "first, or give the sink another directory; several runs add to one queue if all their sinks have "
                "end=False"
            ) from None

    def reserve(self) -> int | None:
        if self._caretaker.due:
            self._caretaker.round()
        end = self.publisher.lanes.end()
        if end is not None:
            raise ConfigError(
                f"another sink has ended split {self.publisher.split!r} of {self.queue.path} after {end} batches; "
                "several sinks on one split have to be made with end=False"
            )
        return self.publisher.reserve()

    def publish(self, number: int, batches: Sequence[pa.RecordBatch]) -> bool:
        self._last = (number, len(batches))
        return self.publisher.publish(number, batches)

    def finish(self) -> int:
        """Let the split end behind everything that was made or is being made; returns after how many batches."""
        lanes, per_file = self.publisher.lanes, self.queue.description.batches_per_file
        found = lanes.all()
        made = max(lane.number + 1 if lane.owner is not None else lane.number - lanes.count + 1 for lane in found)
        for lane in found:
            # A number that another sink gave up on: nobody will make it now.
            if lane.owner is None and lane.number < made:
                lanes.advance(lane.number, None)
        end = max(made, 0) * per_file
        if self._last is not None and self._last[0] == made - 1:
            end -= per_file - self._last[1]  # ours is the last file, and may not be full
        lanes.set_end(end)
        return end

    def what_is_missing(self) -> str:
        """For the message at the deadline."""
        files = self.publisher.directory.files()
        taken = sum(file.owner is not None for file in files)
        return (
            f"room in split {self.publisher.split!r} of {self.queue.path}: {len(files) - taken} files are ready and "
            f"{taken} taken, {self.publisher.limits}; start a reader, see `penstock queue status {self.queue.path}`, "
            "or allow more with limits="
        )


def _as_limits(given: Limits | Mapping[str, int] | None) -> Limits | None:
    if not isinstance(given, Mapping):
        return given
    if unknown := [name for name in given if name not in Limits.__dataclass_fields__]:
        raise ConfigError(f"limits has {', '.join(Limits.__dataclass_fields__)}, got {', '.join(map(repr, unknown))}")
    return Limits(**given)


def description_for(
    schema: pa.Schema, meta: Mapping[str, Any], settings: Mapping[str, Any], splits: Sequence[str]
) -> Description:
    """The description of a queue whose batches have an Arrow schema."""
    entries = []
    for field in Schema.from_arrow(schema):
        entry: dict[str, Any] = {"name": field.name, "dtype": field.dtype}
        if field.shape is not None:
            entry["shape"] = list(field.shape)
        if field.role is not None:
            entry["role"] = field.role
        entries.append(entry)
    return Description({"batch_schema": entries, **meta}, {"lanes": _LANES, **settings}, splits)


def nullable(schema: pa.Schema) -> pa.Schema:
    """The columns of a queue as pipelines have them: `batch_schema` does not say which may hold nulls."""
    return pa.schema([field.with_nullable(True) for field in schema])


def _canonical(schema: pa.Schema) -> pa.Schema:
    """What every batch of the queue gets: only what `batch_schema` can say."""
    for field in schema:
        if pa.types.is_null(field.type):
            raise SchemaError(
                f"column {field.name!r} has no type: there are only nulls in it; cast it to a type, or drop it, "
                "or pass schema= to the sink"
            )
    fields = Schema.from_arrow(schema)
    return nullable(Schema([Field(f.name, f.dtype, f.shape, f.role) for f in fields]).to_arrow())


def _as_type(column: pa.Array, field: pa.Field) -> pa.Array:
    """A column as a field wants it: the same type, or one that is spelled the same."""
    if column.type == field.type or pa.types.is_null(column.type):
        return column if column.type == field.type else pa.nulls(len(column), field.type)
    if Field.from_arrow(pa.field("", column.type)).spelling != Field.from_arrow(pa.field("", field.type)).spelling:
        raise SchemaError("another type")
    return column.cast(field.type)


def _one_dictionary(batches: Sequence[pa.RecordBatch]) -> Sequence[pa.RecordBatch]:
    """The batches with one dictionary for each column that has one, as a file of them needs."""
    if len(batches) == 1 or "dictionary<" not in str(batches[0].schema):
        return batches
    unified: list[pa.RecordBatch] = pa.Table.from_batches(batches).unify_dictionaries().to_batches()
    return unified


def _joined(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.concat_batches(_one_dictionary(parts))
