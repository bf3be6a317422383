"""Rollout queue: rollouts in a directory, kept until a later checkpoint is committed.

An append is one file, published atomically: a producer that dies while writing leaves nothing to read. All ranks read
all appends, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import orjson

from penstock.distributed.ranks import Rank
from penstock.errors import ConfigError, StalledError
from penstock.files.atomic import read_regular, write_atomic
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.fsqueue.members import Backoff, QueueMember, QueueOptions
from penstock.fsqueue.ordered_reader import OrderedReader
from penstock.fsqueue.publisher import Limits, Publisher
from penstock.fsqueue.queue import Queue
from penstock.fsqueue.sink import description_for
from penstock.fsqueue.split_reader import SplitFiles
from penstock.fsqueue.status import look, queue_readings
from penstock.rl.live import AppendReader, GroupPrompts, check_same_columns, check_timeout, with_ids
from penstock.rl.read.text import TextRule
from penstock.rl.rollout import ROLLOUT_SCHEMA, RolloutTable, from_record_batch, to_record_batch
from penstock.rl.sources import Appends

if TYPE_CHECKING:
    from penstock.transforms.tokenization import Tokenizer

_SPLIT = "rollouts"
_COLUMNS = "columns.json"


class RolloutQueue:
    """Rollouts in a directory that inference engines append to and loaders read, in any process.

        with RolloutQueue("rollouts/") as queue:          # an inference engine
            queue.append(rollouts)

        loader = RolloutDataLoader(RolloutQueue("rollouts/"), rollout_batch_size=512, policy_version=0)

    The first process creates it. `max_waiting` is the number of unread appends; one more waits for room, up to
    `timeout_seconds`, as the loader does for rollouts. With `durable`, an append that has returned survives a power
    cut, which takes some milliseconds each. The loader deletes used appends when it commits a later state, so the disk
    holds what comes between two checkpoints.

    All appends must have the per-token columns of the first (log-probs, values, ...). A rollout without an id is named
    by its append and row, `"17:0"`. A damaged file ends the loop over the loader; with `on_error="skip"` it is set
    aside and counted.

    `finish()` ends the queue for all producers. `template`, `add_bos` and `add_eos` are for rollouts of text, as of
    `RolloutDataLoader`.
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        max_waiting: int = 1024,
        durable: bool = True,
        timeout_seconds: float | None = 600.0,
        lease_seconds: float = 30.0,
        tokenizer: Tokenizer | None = None,
        columns: Mapping[str, Any] | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        group_prompts: GroupPrompts = "equal",
        template: str | None = None,
        add_bos: bool = False,
        add_eos: bool = False,
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise ConfigError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
        self.directory = require_local(directory, "the directory of a RolloutQueue")
        self.limits, self.durable = Limits(max_waiting), durable
        self.timeout_seconds, self.lease_seconds = check_timeout(timeout_seconds), lease_seconds
        text_rule = TextRule(chat_template=template, add_bos=add_bos, add_eos=add_eos)
        self.reader, self.on_error = AppendReader(tokenizer, columns, group_prompts, text_rule), on_error
        self._producer: _Producer | None = None

    def append(self, rollouts: Any) -> None:
        """Append one rollout or several; groups in them are complete unless the loader has a `group_size`."""
        table, unnamed = self.reader.read(rollouts)
        batch = to_record_batch(table)
        producer = self._join()
        while True:
            number = self._reserve(producer)
            try:
                with producer.queue.guarded():
                    producer.check_columns(table)
                    named = to_record_batch(with_ids(table, unnamed, number)) if unnamed.any() else batch
                    if producer.publisher.publish(number, [named]):
                        return
            except BaseException:
                producer.publisher.give_up(number)
                raise
            # The lease expired and another producer used the number: try the next one.

    def finish(self) -> None:
        """End the queue for all producers: a loader stops once it has used what is there."""
        producer = self._join()
        if producer.publisher.lanes.end() is None:
            number = self._reserve(producer, room=False)
            producer.publisher.lanes.set_end(number)
            producer.publisher.give_up(number)

    def metrics(self) -> dict[str, float]:
        """Metrics of the queue under the names that exporters use: backlog, leases, members, appends."""
        status = look(self._open())
        (split,) = status.splits
        return queue_readings(status) | {
            "penstock_rollouts_capacity": self.limits.backlog_files or 0,
            "penstock_rollouts_appends_total": split.made_batches,
        }

    def close(self) -> None:
        """Leave the queue; appends stay. A second call does nothing."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.member.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RolloutQueue({str(self.directory)!r})"

    def appends(self, rank: Rank, tokenizer: Tokenizer | None) -> Appends:
        """Appends for a loader. Rollouts in the queue have token ids already."""
        return _QueueAppends(self, rank)

    def _open(self) -> Queue:
        # One lane: numbers are published in order, so a producer that dies leaves no gap.
        settings = {"batches_per_file": 1, "lanes": 1}
        return Queue.create(self.directory, description_for(ROLLOUT_SCHEMA.to_arrow(), {}, settings, [_SPLIT]))

    def _join(self) -> _Producer:
        if self._producer is None:
            self._producer = _Producer(self, self._open())
        return self._producer

    def _reserve(self, producer: _Producer, *, room: bool = True) -> int:
        backoff = Backoff(self.timeout_seconds, producer.missing)
        while True:
            with producer.queue.guarded():
                number = producer.reserve(room)
            if number is not None:
                return number
            backoff.pause()


class _Producer:
    """Producer of a queue: its membership and its lease."""

    def __init__(self, owner: RolloutQueue, queue: Queue) -> None:
        self.queue = queue
        options = QueueOptions(lease_seconds=owner.lease_seconds, durable=owner.durable)
        self.member = QueueMember.provider(queue, {"class": "RolloutQueue"}, options)
        self.publisher = Publisher(self.member, _SPLIT, limits=owner.limits)
        self._columns: list[str] | None = None
        self.member.join()

    def reserve(self, room: bool) -> int | None:
        self.member.reap_if_due()
        if not room:
            (lane,) = self.publisher.lanes.all()
            return lane.number if lane.owner is None and self.publisher.lanes.take(lane, self.member.id) else None
        if (end := self.publisher.lanes.end()) is not None:
            raise ConfigError(f"{self.queue.path} was finished after {end} appends, so nothing can be appended")
        return self.publisher.reserve()

    def check_columns(self, table: RolloutTable) -> None:
        """Refuse rollouts whose columns differ from those of the first append. The caller owns the lane."""
        if self._columns is None:
            path = self.queue.path / _COLUMNS
            if not path.exists():
                write_atomic(path, orjson.dumps(table.per_token))
            self._columns = orjson.loads(read_regular(path))
        check_same_columns(self._columns, table)

    def missing(self) -> str:
        waiting = len(self.publisher.directory.files())
        return (
            f"room in {self.queue.path}: {waiting} appends wait, and max_waiting is "
            f"{self.publisher.limits.backlog_files}; check that the trainer is reading"
        )


class _QueueAppends:
    """Appends of a queue, read by one rank; those that are still needed are kept in memory."""

    def __init__(self, owner: RolloutQueue, rank: Rank) -> None:
        self._owner, self._rank = owner, rank
        self._reading: tuple[Queue, QueueMember, OrderedReader] | None = None
        self._tables: dict[int, RolloutTable] = {}
        self._columns: list[str] | None = None
        self._first: int | None = None
        self._next: int | None = None

    @property
    def name(self) -> str:
        return str(self._owner)

    def first(self) -> int:
        if self._first is None:  # the position of the reader moves on, the beginning does not
            self._first = int(self._reader().state()["position"])
        return self._first

    def get(self, number: int, missing: Callable[[], str]) -> RolloutTable | None:
        if self._next is None or (number < self._next and number not in self._tables):
            self.restore(number)
        while number not in self._tables:
            table, at = self._read(missing)
            assert self._next is not None
            for skipped in range(max(self._next, number), at):
                self._tables[skipped] = RolloutTable.empty()
            if table is None:
                self._next = at
                return self._tables.get(number)
            self._next = None  # an invalid append is read again, not skipped
            if self._columns is None:
                self._columns = table.per_token
            check_same_columns(self._columns, table)
            if at >= number:  # earlier ones were used; they are only read on the way to unused ones
                self._tables[at] = table
            self._next = at + 1
        return self._tables[number]

    def _read(self, missing: Callable[[], str]) -> tuple[RolloutTable | None, int]:
        """Next readable append and its number; None at the end."""
        reader, queue = self._reader(), self._queue
        try:
            with queue.guarded():
                delivered = reader.next()
        except StalledError:
            raise StalledError(
                f"waited {self._owner.timeout_seconds:g} s for {missing()} in {queue.path}; check that an inference "
                f"engine is appending, see `penstock queue status {queue.path}`"
            ) from None
        if delivered is None:
            return None, int(reader.state()["position"])
        try:
            return from_record_batch(delivered.opened.record_batch(delivered.index)), delivered.number
        except Exception:
            self._next = None
            raise

    def release(self, number: int, needed: Set[int]) -> None:
        for old in [held for held in self._tables if held < number and held not in needed]:
            del self._tables[old]

    def facts(self) -> dict[str, Any]:
        queue = self._owner._open()
        return {"kind": "RolloutQueue", "schema": queue.fingerprint, "queue": queue.id}

    def check_saved(self, unused: bool) -> None:
        pass

    def restore(self, first: int) -> bool:
        self._tables.clear()
        with self._owner._open().guarded():
            self._reader().load({"position": first})
        self._next = first
        return True

    def commit(self, number: int) -> None:
        with self._queue.guarded():
            self._reader().commit({"position": number})

    def close(self) -> None:
        reading, self._reading = self._reading, None
        self._tables.clear()
        if reading is not None:
            queue, member, reader = reading
            try:
                if queue.path.is_dir():
                    reader.close()
            finally:
                member.leave()

    @property
    def _queue(self) -> Queue:
        self._reader()
        assert self._reading is not None
        return self._reading[0]

    def _reader(self) -> OrderedReader:
        if self._reading is None:
            owner, rank = self._owner, self._rank
            queue = owner._open()
            options = QueueOptions(lease_seconds=owner.lease_seconds)
            member = QueueMember.consumer(queue, "strict", rank, options).join()
            split = SplitFiles(member, _SPLIT, owner.timeout_seconds, None, owner.on_error)
            self._reading = queue, member, OrderedReader(split, rank, on_commit=True, every_rank=True)
        return self._reading[2]
