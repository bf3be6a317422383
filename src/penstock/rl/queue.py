"""Rollouts in a directory: whatever was appended is there until a checkpoint behind it was committed.

An append is one file, which appears whole or not at all, so a producer that dies in the middle of a write leaves
nothing that anybody reads. All ranks read all of it, in the order in which it was appended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import orjson

from penstock.distributed.ranks import Rank
from penstock.errors import ConfigError, StalledError
from penstock.files.atomic import write_atomic
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.fsqueue.backoff import Backoff
from penstock.fsqueue.members import Membership, MemberWatch
from penstock.fsqueue.ordered_reader import StrictReader
from penstock.fsqueue.publisher import Limits, Publisher
from penstock.fsqueue.queue import Queue
from penstock.fsqueue.reaper import LeaseReaper
from penstock.fsqueue.sink import description_for
from penstock.fsqueue.split_reader import Split
from penstock.rl.appended import empty_table
from penstock.rl.arrow import ROLLOUT_SCHEMA, from_record_batch, to_record_batch
from penstock.rl.live import (
    check_alike,
    check_group_rule,
    columns_of,
    listed,
    read_entry,
    rows_without_id,
    with_ids,
)
from penstock.rl.sources import Entries
from penstock.rl.table import RolloutTable

if TYPE_CHECKING:
    from penstock.transforms.tokenization import Tokenizer

__all__ = ["RolloutQueue"]

_SPLIT = "rollouts"
_COLUMNS = "columns.json"


class RolloutQueue:
    """Rollouts in a directory that inference engines append to and loaders read, each in processes of their own.

        with RolloutQueue("rollouts/") as queue:          # an inference engine
            queue.append(rollouts)

        loader = RolloutDataLoader(RolloutQueue("rollouts/"), rollout_batch_size=512, policy_version=0)

    Whoever comes first makes it. `max_waiting` is how many appends may lie there unread; one more waits for room, up to
    `timeout_seconds`, as the loader waits for rollouts. With `durable` an append that has returned survives a power
    cut, for some milliseconds each. What was read is deleted when the loader commits a state behind it, so the disk
    holds what comes between two checkpoints.

    All rollouts of a queue have the columns of the first append (log-probs, values, ...), or are refused by `append`.
    Those that have no id are called by their append and their row in it, `"17:0"`. An append that cannot be read, since
    something has damaged its file, ends the loop over the loader; with `on_bad="skip"` it is put aside, and counted.

    `finish()` says that no more will come from anybody.
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
        on_bad: Literal["raise", "skip"] = "raise",
        group_prompts: Literal["equal", "any"] = "equal",
    ) -> None:
        if on_bad not in ("raise", "skip"):
            raise ConfigError(f"on_bad is 'raise' or 'skip', got {on_bad!r}")
        if timeout_seconds is not None and not timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds must be positive, or None, got {timeout_seconds!r}")
        self.directory = require_local(directory, "the directory of a RolloutQueue")
        self.limits, self.durable = Limits(max_waiting), durable
        self.timeout_seconds, self.lease_seconds = timeout_seconds, lease_seconds
        self.tokenizer, self.columns, self.on_bad = tokenizer, columns, on_bad
        check_group_rule(group_prompts)
        self.group_prompts: Literal["equal", "any"] = group_prompts
        self._producing: _Producing | None = None

    def append(self, rollouts: Any) -> None:
        """One rollout, or several, of which groups are whole unless the loader was told a `group_size`."""
        rollouts = listed(rollouts)
        table = read_entry(rollouts, self.tokenizer, self.columns, group_prompts=self.group_prompts)
        unnamed = rows_without_id(rollouts, table, self.columns)
        batch = to_record_batch(table)
        producing = self._join()
        while True:
            number = self._reserve(producing)
            try:
                with producing.queue.guarded():
                    producing.check_columns(table)
                    named = to_record_batch(with_ids(table, unnamed, number)) if unnamed.any() else batch
                    if producing.publisher.publish(number, [named]):
                        return
            except BaseException:
                producing.publisher.give_up(number)
                raise
            # Our lease ran out and somebody else has used the number: the rollouts get the next one.

    def finish(self) -> None:
        """No more rollouts will come, from anybody: a loader stops when it has used what is there."""
        producing = self._join()
        if producing.publisher.lanes.end() is None:
            number = self._reserve(producing, room=False)
            producing.publisher.lanes.set_end(number)
            producing.publisher.give_up(number)

    def close(self) -> None:
        """Leave; what was appended stays. A second call does nothing."""
        producing, self._producing = self._producing, None
        if producing is not None:
            producing.member.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RolloutQueue({str(self.directory)!r})"

    def entries(self, rank: Rank, tokenizer: Tokenizer | None) -> Entries:
        """For a loader. What is in the queue has token ids already."""
        return _QueueEntries(self, rank)

    def _open(self) -> Queue:
        # One lane: numbers are made one after the other, so no gap stays behind a producer that died.
        settings = {"batches_per_file": 1, "lanes": 1}
        return Queue.create(self.directory, description_for(ROLLOUT_SCHEMA.to_arrow(), {}, settings, [_SPLIT]))

    def _join(self) -> _Producing:
        if self._producing is None:
            self._producing = _Producing(self, self._open())
        return self._producing

    def _reserve(self, producing: _Producing, *, room: bool = True) -> int:
        patience = Backoff(self.timeout_seconds, producing.what_is_missing)
        while True:
            with producing.queue.guarded():
                number = producing.reserve(room)
            if number is not None:
                return number
            patience.pause()


class _Producing:
    """One producer's place in a queue."""

    def __init__(self, owner: RolloutQueue, queue: Queue) -> None:
        self.queue = queue
        facts = {"role": "provider", "class": "RolloutQueue"}
        self.member = Membership(queue.members, "p", lease_seconds=owner.lease_seconds, facts=facts)
        self.publisher = Publisher(queue, _SPLIT, self.member, limits=owner.limits, durable=owner.durable)
        self._caretaker = LeaseReaper(queue, MemberWatch(queue.members, lease_seconds=owner.lease_seconds))
        self._columns: list[str] | None = None
        with queue.guarded():
            self.member.join()

    def reserve(self, room: bool) -> int | None:
        if self._caretaker.due:
            self._caretaker.round()
        if not room:
            (lane,) = self.publisher.lanes.all()
            return lane.number if lane.owner is None and self.publisher.lanes.take(lane, self.member.id) else None
        if (end := self.publisher.lanes.end()) is not None:
            raise ConfigError(
                f"{self.queue.path} was finished after {end} appends: it was said that no more rollouts would come"
            )
        return self.publisher.reserve()

    def check_columns(self, table: RolloutTable) -> None:
        """Raises if the rollouts have other columns than the first that were appended. For whoever has the lane."""
        if self._columns is None:
            path = self.queue.path / _COLUMNS
            if not path.exists():
                write_atomic(path, orjson.dumps(columns_of(table)))
            self._columns = orjson.loads(path.read_bytes())
        check_alike(self._columns, table)

    def what_is_missing(self) -> str:
        waiting = len(self.publisher.directory.files())
        return (
            f"room in {self.queue.path}: {waiting} appends lie there, and max_waiting is "
            f"{self.publisher.limits.backlog_files}; is the trainer still reading?"
        )


class _QueueEntries:
    """The appends of a queue, as one rank reads them. Those that are still needed are held."""

    def __init__(self, owner: RolloutQueue, rank: Rank) -> None:
        self._owner, self._rank = owner, rank
        self._reading: tuple[Queue, Membership, StrictReader] | None = None
        self._tables: dict[int, RolloutTable] = {}
        self._columns: list[str] | None = None
        self._first: int | None = None
        self._next: int | None = None

    @property
    def name(self) -> str:
        return str(self._owner)

    def first(self) -> int:
        if self._first is None:  # where the reader is moves on, and the beginning stays
            self._first = int(self._reader().state()["position"])
        return self._first

    def get(self, number: int, missing: Callable[[], str]) -> RolloutTable | None:
        if self._next is None or (number < self._next and number not in self._tables):
            self.restore(number)
        while number not in self._tables:
            table, at = self._read(missing)
            assert self._next is not None
            for skipped in range(max(self._next, number), at):
                self._tables[skipped] = empty_table()
            if table is None:
                self._next = at
                return self._tables.get(number)
            self._next = None  # if something is wrong with it, it is read again and not passed over
            if self._columns is None:
                self._columns = columns_of(table)
            check_alike(self._columns, table)
            if at >= number:  # those before it were used up, and are in the way of others that were not
                self._tables[at] = table
            self._next = at + 1
        return self._tables[number]

    def _read(self, missing: Callable[[], str]) -> tuple[RolloutTable | None, int]:
        """The next append that can be read and its number; None at the end."""
        reader, queue = self._reader(), self._queue
        try:
            with queue.guarded():
                delivered = reader.next()
        except StalledError:
            raise StalledError(
                f"waited {self._owner.timeout_seconds:g} s for {missing()} in {queue.path}; is anybody appending? "
                f"see `penstock queue status {queue.path}`"
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

    def _reader(self) -> StrictReader:
        if self._reading is None:
            owner, rank = self._owner, self._rank
            queue = owner._open()
            facts = {"role": "consumer", "order": "strict", "rank": rank.rank, "world": rank.world_size}
            member = Membership(queue.members, "c", lease_seconds=owner.lease_seconds, facts=facts)
            caretaker = LeaseReaper(queue, MemberWatch(queue.members, lease_seconds=owner.lease_seconds))
            with queue.guarded():
                member.join()
            split = Split(queue, _SPLIT, member, caretaker, owner.timeout_seconds, None, owner.on_bad)
            self._reading = queue, member, StrictReader(split, rank, on_commit=True, every_rank=True)
        return self._reading[2]
