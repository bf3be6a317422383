"""Base of the sources of messages: positions, ends, states, batches that leave in time."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.connections.logs import Log, Messages, Retries
from penstock.errors import ConfigError, DataError, ResumeError, StoppedError
from penstock.files.states import StateFormat
from penstock.pipeline.config import check_max_wait
from penstock.pipeline.functions import arrow_schema
from penstock.pipeline.stages import Origin, Rejected, Source, State
from penstock.sources.file_source import is_schema, schema_mark, schema_of
from penstock.sources.logs.messages import BadMessage, MessageDecoder
from penstock.sources.logs.partition import LogPosition, PartitionReader

Place = int | str | datetime
"""Offset, id or time in a log."""
MessageFormat = Literal["json", "text", "bytes", "arrow"]
Metadata = Sequence[str] | Mapping[str, str]

_STATE = StateFormat(
    "messages of a log",
    "a source of messages",
    fields={
        "log": (str,),
        "identity": (str, None),
        "positions": (dict, None),
        "ends": (dict, None),
        "schema": (str, None),
        "row": (int,),
    },
)
_LEARN_MESSAGES = 256
_LEAST_BYTES, _MOST_BYTES = 1 << 16, 4 << 20
_IDLE_SECONDS = 10.0
"""After that long without messages an empty batch tells the pipeline that the source is alive."""
_PAUSE_SECONDS = 0.02
_MOST_PLACE = (1 << 63) - 1


class LogSource(Source):
    """Base of the sources of messages. A subclass makes the log; nothing is opened before the first read.

    The position is in the state of the source, not in the broker: nothing is acknowledged, no group is joined.
    """

    def __init__(
        self,
        *,
        start: Place,
        until: Place | None,
        format: str,
        schema: pa.Schema | Any | None,
        columns: Sequence[str] | None,
        metadata: Metadata,
        max_wait_seconds: float | None,
        retry_seconds: float,
    ) -> None:
        self.max_wait_seconds = check_max_wait(max_wait_seconds)
        """Longest wait of a row for the others of its batch; `PipelineConfig(max_wait_seconds=...)` sets it too."""
        if isinstance(retry_seconds, bool) or not retry_seconds >= 0:
            raise ConfigError(f"retry_seconds must be a number of seconds, 0 for no retries, got {retry_seconds!r}")
        self._log = self._new_log()
        self._start, self._until = start, until
        self._check_places()
        self._retry_seconds = retry_seconds
        self._decoder = MessageDecoder(self._log, format, arrow_schema(schema), columns, metadata)
        self._format, self._columns = format, columns
        self._fetch_bytes = 1 << 20
        self._readers: dict[int, PartitionReader] | None = None
        self._ends: dict[int, int] | None = None
        self._identity: str | None = None
        self._loader_bounds: dict[int, tuple[int, int | None]] = {}
        """Where loaders begin and end, the same in every epoch."""
        self._turn = 0
        self._chunk: _Chunk | None = None
        self._first = self._row = 0
        self._origin: Origin | None = None
        self._stopped = False

    @abstractmethod
    def _new_log(self) -> Log:
        """Log of this source, not connected yet."""

    # -- a source ----------------------------------------------------------------------------------------------------

    @property
    def schema(self) -> pa.Schema:
        """Columns of every batch; looks at the first messages, and waits for them, unless it was given."""
        while self._decoder.schema is None and not self._stopped:
            self._learn(None)
        return self._decoder.schema if self._decoder.schema is not None else pa.schema([])

    def column_names(self) -> list[str]:
        """Names of the columns."""
        return list(self.schema.names)

    def keep_json(self, columns: Mapping[str, Collection[str]]) -> bool:
        """Keep these columns of JSON messages as JSON text, for a stage that wants it; True if they are kept so."""
        if self._row or not self._decoder.keep_json(columns):
            return False
        chunk = self._chunk
        if chunk is not None and self._decoder.schema is None:  # of messages that were looked at already
            self._decoder.learn(chunk.messages)
            self._chunk = _Chunk.of(self._decoder, chunk.partition, chunk.begin, chunk.messages)
        return True

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        if self._chunk is None or self._chunk.over:
            empty = self._next_chunk(max_rows)
            if self._chunk is None or self._chunk.over:
                return empty
        chunk = self._chunk
        assert chunk is not None
        bad = chunk.due()
        if bad is not None:
            raise self._poison(chunk, bad)
        self._first = self._row
        self._origin = self._origin_at(chunk, chunk.message)
        batch = chunk.take(max_rows)
        self._row += batch.num_rows
        return batch

    def origin(self) -> Origin | None:
        return self._origin

    def skip_file(self) -> str:
        """After an error: skip the bad message; returns its description."""
        assert self._chunk is not None
        self._row += 1
        return self._chunk.skip().kind

    def memory_usage(self) -> int:
        held = sum(reader.held_bytes for reader in (self._readers or {}).values())
        return held + (self._chunk.batch.nbytes if self._chunk is not None else 0)

    def fit_budget(self, nbytes: int) -> None:
        """Fetch less at once if there is less memory."""
        self._fetch_bytes = max(_LEAST_BYTES, min(_MOST_BYTES, nbytes // 32))

    @property
    def reading_thread(self) -> int | None:
        return None

    def interrupt(self) -> None:
        """Make a `next_batch` that waits return; called from another thread when a run is stopped."""
        self._stopped = True

    def reset(self) -> None:
        """Back to where reading began: the first message now, if it began with the first."""
        self.close()
        self._readers = self._ends = self._chunk = self._origin = None
        self._first = self._row = self._turn = 0
        self._stopped = False

    def close(self) -> None:
        """Close the connection. The next read opens it again, at the same position."""
        self._log.close()

    def state_dict(self) -> State:
        log, positions, ends = self._log, None, None
        if self._readers is not None:
            found = {partition: reader.position for partition, reader in self._readers.items()}
            if self._chunk is not None and not self._chunk.over:
                found[self._chunk.partition] = self._chunk.position()
            spelled = found.items()
            positions = {str(number): [log.spell(at.offset), at.rows, at.after] for number, at in spelled}
        if self._ends is not None:
            ends = {str(number): log.spell(end) for number, end in self._ends.items()}
        known = self._decoder.schema is not None and not self._decoder.given
        return _STATE.write(
            {
                "log": log.name,
                "identity": self._identity,
                "positions": positions,
                "ends": ends,
                "schema": schema_mark(self._decoder.found) if known else None,
                "row": self._row,
            }
        )

    def load_state_dict(self, state: State) -> None:
        state = _STATE.read(state)
        if state["log"] != self._log.name:
            raise ResumeError(f"the state was saved over {state['log']}, this source reads {self._log.name}")
        self.reset()
        try:
            given = {
                int(number): LogPosition(self._log.parse(at[0]), int(at[1]), bool(at[2]))
                for number, at in (state["positions"] or {}).items()
            }
            ends = {int(number): self._log.parse(end) for number, end in (state["ends"] or {}).items()}
        except (TypeError, ValueError, LookupError) as error:
            raise ResumeError(f"the state is damaged: {error!r}; load another copy of it") from error
        mark = state["schema"]
        if mark is not None and not self._decoder.given:
            if not is_schema(mark):
                raise ResumeError(
                    "the messages have too many columns for a state to hold their types; pass schema= to resume"
                )
            self._decoder.learned(schema_of(mark))
        self._row = self._first = state["row"]
        if state["positions"] is not None:
            self._identity = state["identity"]
            self._ends = ends if state["ends"] is not None else None
            if self._ends is None:
                given = self._first_of_new_partitions() | given
            self._open(given)

    def __repr__(self) -> str:
        until = "" if self._until == "end" else f", until={_shown(self._until)}"
        start = "" if self._start == "earliest" else f", start={_shown(self._start)}"
        form = "" if self._format == "json" else f", format={self._format!r}"
        columns = "" if self._columns is None else f", columns={list(self._columns)!r}"
        metadata = f", metadata={self._decoder.metadata!r}" if self._decoder.metadata else ""
        return f"{type(self).__name__}({self._log.name!r}{start}{until}{form}{columns}{metadata})"

    # -- for loaders that read partitions on their own ----------------------------------------------------------------

    def sampled_identity(self) -> list[Any]:
        """Identity for the plan of a stream: the log and where reading begins."""
        return [self._log.name, _shown(self._start), self._log_partitions()]

    def partition_name(self, index: int) -> str:
        return f"{self._log.name}, partition {self._log_partitions()[index]}"

    @property
    def partition_count(self) -> int:
        return len(self._log_partitions())

    def open_partition(self, index: int, at: int) -> OpenedPartition:
        """A reader of one partition with a connection of its own, from the start, or from an offset (`at` - 1)."""
        number = self._log_partitions()[index]
        log = self._new_log()
        retries = Retries(log, self._retry_seconds, self._pause)
        if number not in self._loader_bounds:
            self._loader_bounds[number] = self._bounds(log, retries, number)
        start, end = self._loader_bounds[number]
        position = LogPosition(at - 1, after=True) if at else LogPosition(start)
        self.schema  # noqa: B018 - it is learned now, if it was not given
        reader = self._new_reader(log, number, position, end, retries)
        return OpenedPartition(log, reader, self._decoder, self.partition_name(index))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _retrying(self) -> Retries:
        return Retries(self._log, self._retry_seconds, self._pause)

    def _pause(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._stopped and (left := until - time.monotonic()) > 0:
            time.sleep(min(_PAUSE_SECONDS, left))
        return self._stopped

    def _log_partitions(self) -> list[int]:
        if not hasattr(self, "_numbers"):
            self._numbers = self._retrying()(self._log.partitions)
        return self._numbers

    def _begin(self) -> dict[int, PartitionReader]:
        if self._readers is None:
            log, retries = self._log, self._retrying()
            self._identity = retries(log.identity)
            bounds = {number: self._bounds(log, retries, number) for number in self._log_partitions()}
            if self._until is not None:
                self._ends = {number: end for number, (_, end) in bounds.items() if end is not None}
            self._open({number: LogPosition(start) for number, (start, _) in bounds.items()})
        assert self._readers is not None
        return self._readers

    def _first_of_new_partitions(self) -> dict[int, LogPosition]:
        """Beginnings of all partitions: one that was added since a state was saved is read from its first message."""
        retries, found = self._retrying(), {}
        for number in self._log_partitions():
            bounds = retries(partial(self._log.bounds, number))
            found[number] = LogPosition(bounds.first)
        return found

    def _open(self, positions: Mapping[int, LogPosition]) -> None:
        retries = self._retrying()
        identity = retries(self._log.identity)
        if self._identity is not None and identity != self._identity:
            raise ResumeError(
                f"{self._log.name} was deleted and made again since the state was saved ({self._identity}, now "
                f"{identity}); start without the state"
            )
        ends = self._ends or {}
        self._readers = {
            number: self._new_reader(self._log, number, at, ends.get(number), retries)
            for number, at in sorted(positions.items())
        }

    def _new_reader(
        self, log: Log, number: int, position: LogPosition, end: int | None, retries: Retries
    ) -> PartitionReader:
        reader = PartitionReader(log, number, position, end, retries, lambda: self._stopped)
        reader.fetch_bytes = self._fetch_bytes
        return reader

    def _check_places(self) -> None:
        for name, place, words in (("start", self._start, ("earliest", "latest")), ("until", self._until, ("end",))):
            if place is None or place in words or isinstance(place, datetime):
                continue
            if isinstance(place, bool) or not isinstance(place, int | str):
                raise ConfigError(f"{name} must be {' or '.join(map(repr, words))}, an offset or a time, got {place!r}")
            if _time(place) is None:
                try:
                    self._log.parse(place)
                except ValueError as error:
                    raise ConfigError(
                        f"{name} must be {' or '.join(map(repr, words))}, an offset or a time such as "
                        f"'2026-01-31T12:00:00Z', got {place!r}"
                    ) from error

    def _bounds(self, log: Log, retries: Retries, number: int) -> tuple[int, int | None]:
        """Offsets at which reading of a partition begins and ends."""
        bounds = retries(lambda: log.bounds(number))

        def at(place: Place) -> int:
            when = _time(place)
            if when is None:
                return log.parse(place)  # type: ignore[arg-type]
            milliseconds = int(when.timestamp() * 1000)
            return retries(lambda: log.offset_at(number, milliseconds))

        start = {"earliest": bounds.first, "latest": bounds.end}.get(self._start)  # type: ignore[arg-type]
        end = None if self._until is None else bounds.end if self._until == "end" else at(self._until)
        return at(self._start) if start is None else start, end

    def _learn(self, wait_seconds: float | None) -> None:
        """Take the columns of the first messages, which are delivered in their place too."""
        readers = self._begin()
        ready = self._ready(_LEARN_MESSAGES, wait_seconds)
        if ready is not None:
            reader, begin, messages = ready
            self._decoder.learn(messages)
            self._chunk = _Chunk.of(self._decoder, reader.partition, begin, messages)
        elif all(reader.over for reader in readers.values()):
            self._decoder.learned(pa.schema([]))

    def _next_chunk(self, max_rows: int) -> pa.RecordBatch | None:
        """Read on. Without a chunk afterwards: None at the end, or an empty batch if nothing came for a while."""
        self._chunk = None
        readers = self._begin()
        if self._decoder.schema is None:
            self._learn(_IDLE_SECONDS)
        else:
            ready = self._ready(max_rows, _IDLE_SECONDS)
            if ready is not None:
                reader, begin, messages = ready
                self._chunk = _Chunk.of(self._decoder, reader.partition, begin, messages)
        if self._chunk is not None or all(reader.over for reader in readers.values()):
            return None
        if self._stopped:
            raise StoppedError("reading was interrupted before the end of the messages")
        return pa.RecordBatch.from_pylist([], schema=self._decoder.schema or pa.schema([]))

    def _ready(self, most: int, idle_seconds: float | None) -> tuple[PartitionReader, LogPosition, Messages] | None:
        """Messages of the partition whose turn it is: waits for the first of them, and shortly for others.

        With an end, partitions follow one another. Without, each has its turn when it has messages.
        """
        until = None if idle_seconds is None else time.monotonic() + idle_seconds
        while not self._stopped and (until is None or time.monotonic() < until):
            open_readers = [reader for reader in self._begin().values() if not reader.over]
            if not open_readers:
                return None
            if self._ends is not None:
                open_readers = open_readers[:1]
            alone = len(open_readers) == 1
            for number in range(len(open_readers)):
                reader = open_readers[(self._turn + number) % len(open_readers)]
                begin = reader.position
                messages = reader.take(1 if self._ends is None else most, self._fetch_bytes, 0.2 if alone else 0.0)
                if not len(messages):
                    continue
                self._turn = (self._turn + number + 1) % len(open_readers)
                if len(messages) < most:
                    messages.extend(reader.take(most - len(messages), self._fetch_bytes, self.max_wait_seconds))
                return reader, begin, messages
            if not alone:
                self._pause(_PAUSE_SECONDS)
        return None

    def _origin_at(self, chunk: _Chunk, message: int) -> Origin:
        offset = chunk.messages.offsets[message]
        name = f"{self._log.name}, partition {chunk.partition}"
        if offset > _MOST_PLACE:
            return Origin(f"{name}, id {self._log.spell(offset)}", self._row)
        return Origin(name, self._row, offset)

    def _poison(self, chunk: _Chunk, bad: BadMessage) -> DataError:
        offset = chunk.messages.offsets[bad.index]
        where = f"{self._log.name}, partition {chunk.partition}, offset {self._log.spell(offset)}"
        self._origin = self._origin_at(chunk, bad.index)
        place = offset if offset <= _MOST_PLACE else None
        return DataError(bad.reason, file=where, row=self._row, offset=place, data=bad.data)


@dataclass(frozen=True, slots=True)
class OpenedPartition:
    """A partition that a loader reads by itself; what is taken depends on the log alone, never on time."""

    log: Log
    reader: PartitionReader
    decoder: MessageDecoder
    name: str

    def take(self, max_messages: int, max_bytes: int) -> Messages:
        """The next messages; none at the end. Waits until there are as many."""
        found = self.reader.take(max_messages, max_bytes, None)
        if len(found) < max_messages and not self.reader.over and found.nbytes < max_bytes:
            raise StoppedError("reading was interrupted before the end of the messages")
        return found

    def decode(self, messages: Messages) -> tuple[pa.RecordBatch, npt.NDArray[np.int64], tuple[Rejected, ...]]:
        """Rows, their places, and messages that are no rows."""
        rows = self.decoder.decode(messages, self.reader.partition)
        places = np.array([self.place(offset) for offset in messages.offsets], np.int64)
        rejected = [self._rejected(messages, bad) for bad in rows.bad]
        return rows.batch, places[rows.owners], tuple(rejected)

    def _rejected(self, messages: Messages, bad: BadMessage) -> Rejected:
        offset = messages.offsets[bad.index]
        where = f"{self.name}, offset {self.log.spell(offset)}"
        return Rejected(where, None, self.place(offset), "reading", bad.kind, bad.reason, bad.data)

    def place(self, offset: int) -> int:
        """An offset as a number of 64 bits: of an id of Redis its milliseconds."""
        return offset if offset <= _MOST_PLACE else offset >> 64

    def close(self) -> None:
        self.log.close()


@dataclass(slots=True)
class _Chunk:
    """Decoded messages of one partition, which are delivered in parts."""

    partition: int
    begin: LogPosition
    messages: Messages
    batch: pa.RecordBatch
    owners: npt.NDArray[np.int64]
    bad: deque[BadMessage]
    used: int = 0
    """Rows that are delivered, or passed over."""
    message: int = field(default=0)
    """Number of the next message."""

    @classmethod
    def of(cls, decoder: MessageDecoder, partition: int, begin: LogPosition, messages: Messages) -> _Chunk:
        rows = decoder.decode(messages, partition)
        chunk = cls(partition, begin, messages, rows.batch, rows.owners, deque(rows.bad))
        if begin.rows:  # the first rows of the first message were delivered before
            chunk.used = min(begin.rows, int(np.searchsorted(rows.owners, 1)))
        chunk._settle()
        return chunk

    @property
    def over(self) -> bool:
        return self.message >= len(self.messages)

    def due(self) -> BadMessage | None:
        """The bad message that comes next; None if a row does."""
        return self.bad[0] if self.bad and self.bad[0].index == self.message else None

    def take(self, max_rows: int) -> pa.RecordBatch:
        stop = min(self.used + max_rows, self.batch.num_rows)
        if self.bad:
            stop = min(stop, int(np.searchsorted(self.owners, self.bad[0].index)))
        part = self.batch.slice(self.used, stop - self.used)
        self.used = stop
        self._settle()
        return part

    def skip(self) -> BadMessage:
        bad = self.bad.popleft()
        self.message = bad.index + 1
        self._settle()
        return bad

    def position(self) -> LogPosition:
        """Place of the next row."""
        rows = self.used - int(np.searchsorted(self.owners, self.message))
        if not self.message:
            return LogPosition(self.begin.offset, rows, self.begin.after)
        return LogPosition(self.messages.offsets[self.message - 1] + 1, max(0, rows), after=True)

    def _settle(self) -> None:
        """Set the next message: that of the next row or bad message; those between have no rows."""
        following = int(self.owners[self.used]) if self.used < len(self.owners) else len(self.messages)
        self.message = min(following, self.bad[0].index) if self.bad else following


def _time(place: Any) -> datetime | None:
    """The time that a text names; None for an offset. Without a zone it is UTC."""
    if not isinstance(place, datetime) and (not isinstance(place, str) or "T" not in place):
        return None
    try:
        found = place if isinstance(place, datetime) else datetime.fromisoformat(place)
    except ValueError as error:
        raise ConfigError(f"{place!r} is no time; expected one such as '2026-01-31T12:00:00Z'") from error
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _shown(place: Place | None) -> str:
    return repr(place.isoformat() if isinstance(place, datetime) else place)
