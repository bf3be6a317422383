"""Base of the sinks that publish rows as messages: numbers of messages, checkpoints, what a crash has left."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter

import pyarrow as pa
import xxhash

from penstock.connections.logs import Log, Outgoing, Retries
from penstock.errors import ConfigError, DataError, ResumeError, SchemaError
from penstock.pipeline.stages import Sink, State
from penstock.sinks.formats import json_rows, refuse_binary

_AT_ONCE_ROWS = 1024
_AT_ONCE_BYTES = 4 << 20
_LOOK_BACK_MESSAGES = 50_000
"""Messages that are looked through at most after a lost connection."""


class LogSink(Sink):
    """Base of the sinks of messages: a message for each row, published as the rows come.

    Under `run(checkpoint=...)` every row is published exactly once. A checkpoint has the end of the log; a resumed run
    looks at the messages of its own that came after it, and leaves those rows out when they come again. Each message
    has an id, made of the run, a number and a hash of its value, so that what the client sends twice after a lost
    answer is stored once. Without a checkpoint a run that is repeated publishes its rows again.
    """

    def __init__(self, *, column: str | None, key: str | None, retry_seconds: float) -> None:
        if isinstance(retry_seconds, bool) or not retry_seconds >= 0:
            raise ConfigError(f"retry_seconds must be a number of seconds, 0 for no retries, got {retry_seconds!r}")
        self._log = self._new_log()
        self._column, self._key = column, key
        self._retries = Retries(self._log, retry_seconds, _pause)
        self._run: str | None = None
        self._partitions: list[int] = []
        self._ends: dict[int, int] = {}
        """Offset after the last message of this run that is known to be stored, of each partition."""
        self._number = 0
        """Number of the next message."""
        self._unconfirmed = 0
        """Messages published since the ends were asked for."""
        self._there: Counter[str] = Counter()
        """Values that are published, and come again because a run was resumed."""
        self.rows_published = 0
        """Rows that the broker has stored."""

    @abstractmethod
    def _new_log(self) -> Log:
        """Log of this sink, not connected yet."""

    def _partitions_of_log(self) -> list[int]:
        return self._retries(self._log.partitions)

    def consume(self, batch: pa.RecordBatch) -> None:
        self._begin()
        values, keys = self._values(batch), self._keys(batch)
        for start, stop in _pieces(values):
            self._publish(values[start:stop], keys[start:stop])
        self.rows_published += batch.num_rows

    def flush(self) -> None:
        """Nothing is left: a row is published before the next batch is consumed."""
        self._log.close()

    def memory_usage(self) -> int:
        return 100 * len(self._there)

    def checkpoint(self) -> State:
        self._begin()
        self._move_ends()
        ends = {str(partition): self._log.spell(end) for partition, end in self._ends.items()}
        token = {"run": self._run, "number": self._number, "rows": self.rows_published, "ends": ends}
        # Rows of a run before this one that are still to come again are behind the ends, where nobody looks for them.
        return token | ({"there": dict(self._there)} if self._there else {})

    def restore(self, token: State) -> None:
        self.reset()
        if token.get("run") is None:
            return
        try:
            self._run, self._number = str(token["run"]), int(token["number"])
            self.rows_published = int(token["rows"])
            self._ends = {int(number): self._log.parse(end) for number, end in token["ends"].items()}
            before = Counter({str(digest): int(count) for digest, count in token.get("there", {}).items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ResumeError(f"the checkpoint of {self!r} is damaged: {error!r}; delete it to start again") from error
        self._partitions = sorted(self._ends)
        self._note_published(first=self._number)
        self._there += before

    def abort(self) -> None:
        """Close the connection. What is published stays: a log has no way back."""
        self._log.close()

    close = abort

    def reset(self) -> None:
        """Ready for another run, which appends its rows."""
        self._log.close()
        self._run, self._ends, self._number, self.rows_published, self._unconfirmed = None, {}, 0, 0, 0
        self._there.clear()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._run is None:
            self._partitions = self._partitions_of_log()
            self._move_ends()
            self._run = self._retries(self._log.new_run)

    def _publish(self, values: list[bytes], keys: list[bytes | None]) -> None:
        if self._there:
            left = [at for at, value in enumerate(values) if not self._came_again(value)]
            values, keys = [values[at] for at in left], [keys[at] for at in left]
        if not values:
            return
        assert self._run is not None
        numbers = range(self._number, self._number + len(values))
        partitions = [self._partition(number, key) for number, key in zip(numbers, keys)]
        waiting = [Outgoing(self._run, numbers, values, keys, partitions)]

        def leave_out_what_is_there() -> None:
            found = self._stored()
            sent = waiting[0]
            kept = [at for at, number in enumerate(sent.numbers) if number not in found]
            waiting[0] = Outgoing(
                sent.run,
                *([column[at] for at in kept] for column in (sent.numbers, sent.values, sent.keys, sent.partitions)),  # type: ignore[arg-type]
            )

        self._retries(lambda: self._log.publish(waiting[0]), leave_out_what_is_there)
        self._number = numbers.stop
        self._unconfirmed += len(values)
        if self._unconfirmed >= _LOOK_BACK_MESSAGES:
            self._move_ends()

    def _move_ends(self) -> None:
        """Everything published so far is stored: nobody has to look at it again."""
        self._ends = {each: self._end_of(each) for each in self._partitions}
        self._unconfirmed = 0

    def _end_of(self, partition: int) -> int:
        return self._retries(lambda: self._log.bounds(partition)).end

    def _stored(self) -> dict[int, str]:
        """Numbers and hashes of the messages of this run that were stored after what was known."""
        found: dict[int, str] = {}
        for partition, end in self._ends.items():
            for one in self._log.published(self._run or "", partition, end).ids:
                _, number, digest = one.rsplit("-", 2)
                found[int(number)] = digest
        return found

    def _note_published(self, first: int) -> None:
        found = self._retries(self._stored)
        new = {number: digest for number, digest in found.items() if number >= first}
        self._there = Counter(new.values())
        self._number = max(new, default=first - 1) + 1

    def _came_again(self, value: bytes) -> bool:
        digest = xxhash.xxh3_64_hexdigest(value)
        if not self._there.get(digest):
            return False
        self._there[digest] -= 1
        if not self._there[digest]:
            del self._there[digest]
        return True

    def _partition(self, number: int, key: bytes | None) -> int:
        """By key, so that messages of a key stay in order; in turns without one."""
        at = xxhash.xxh3_64_intdigest(key) if key is not None else number
        return self._partitions[at % len(self._partitions)]

    def _values(self, batch: pa.RecordBatch) -> list[bytes]:
        if self._column is None:
            batch = batch.drop_columns([self._key]) if self._key is not None and self._drops_key(batch) else batch
            refuse_binary(batch.schema, "name the one to publish as column=")
            return json_rows(batch)
        return _filled(self._bytes_of(batch, self._column), self._column)

    def _drops_key(self, batch: pa.RecordBatch) -> bool:
        """True if the key has no place in a JSON object."""
        kind = batch.schema.field(self._key).type
        return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))

    def _keys(self, batch: pa.RecordBatch) -> list[bytes | None]:
        if self._key is None:
            return [None] * batch.num_rows
        return self._bytes_of(batch, self._key)

    def _bytes_of(self, batch: pa.RecordBatch, name: str) -> list[bytes | None]:
        if name not in batch.schema.names:
            raise SchemaError(f"{self!r}: there is no column {name!r} in {batch.schema.names}")
        try:
            found: list[bytes | None] = batch[name].cast(pa.large_binary()).to_pylist()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SchemaError(f"{self!r}: column {name!r} is {batch[name].type}, expected text or bytes") from error
        return found

    def __repr__(self) -> str:
        column = f", column={self._column!r}" if self._column is not None else ""
        key = f", key={self._key!r}" if self._key is not None else ""
        return f"{type(self).__name__}({self._log.name!r}{column}{key})"


def _filled(values: list[bytes | None], name: str) -> list[bytes]:
    for at, value in enumerate(values):
        if value is None:
            raise DataError(f"column {name!r} is null, and a message needs a value; drop such rows", row=at)
    return values  # type: ignore[return-value]


def _pieces(values: list[bytes]) -> list[tuple[int, int]]:
    """Parts to publish at once, by number and bytes."""
    bounds, nbytes = [0], 0
    for at, value in enumerate(values):
        if at - bounds[-1] >= _AT_ONCE_ROWS or (nbytes and nbytes + len(value) > _AT_ONCE_BYTES):
            bounds.append(at)
            nbytes = 0
        nbytes += len(value)
    return list(zip(bounds, [*bounds[1:], len(values)])) if values else []


def _pause(seconds: float) -> bool:
    time.sleep(seconds)
    return False
