"""A queue as the end of one pipeline and the beginning of another: two pipelines joined by a directory.

    Pipeline(JsonlSource("in.jsonl"), [Tokenize(tokenizer)], QueueSink("queue")).run()        # in one process
    for batch in Pipeline(QueueSource("queue"), [Filter("n_tokens > 8")]): ...                # in another

Both work without a pipeline too: `sink.consume(batch)` and `sink.flush()`; `for batch in source`.
Batches may have any columns that `penstock.types` can spell: numbers, tensors, strings, lists, structs, with nulls.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Self

import pyarrow as pa

from penstock.distributed.ranks import find_rank
from penstock.errors import ConfigError, DataError, QueueNotFoundError, ResumeError, StalledError
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.files.states import StateFormat
from penstock.fsqueue.claiming_reader import SharedReader
from penstock.fsqueue.members import Membership, MemberWatch
from penstock.fsqueue.ordered_reader import StrictReader
from penstock.fsqueue.queue import Queue
from penstock.fsqueue.reaper import LeaseReaper
from penstock.fsqueue.sink import QueueSink, nullable
from penstock.fsqueue.split_reader import Delivered, QueueReader, ReadCounts, Split
from penstock.pipeline.stages import Origin, Source, State

__all__ = ["QueueSink", "QueueSource"]

logger = logging.getLogger(__name__)

_STATE = StateFormat("queue", "a QueueSource")
_LOOK_SECONDS = 0.5
_A_WHILE, _LONG_POLL = 30.0, 0.025
_FIRST_WORD = 15.0
_ALL_ROWS = 1 << 62


class QueueSource(Source):
    """The batches of one split of a queue, until it ends, if it does; waits for what is not there yet.

    `order="any"` shares the split with other readers, whoever comes first; `order="strict"` deals it out to the ranks
    in the order it was made.

    A file stays in the queue until all of it is done with. With `acknowledge="delivered"` that is when the batch after
    it is asked for, in a loop over the source or over a pipeline; `pipeline.run()` is done with what it has published,
    or with what a checkpoint keeps. What a pipeline has only read ahead when it stops, fails or is killed comes again,
    to whoever reads next. With `"committed"` no loop is done with anything before `commit(state)`: for trainers that
    go back to their last checkpoint. A state resumes at the row, as long as nothing after it was done with.

    While there is nothing, `next_batch` returns an empty batch every half second, so that a pipeline can be stopped,
    and raises StalledError, saying what is missing, after `timeout_seconds`. A queue that does not exist raises
    QueueNotFoundError, unless it is made within `wait_for_queue_seconds`. A file that cannot be read raises DataError,
    or with `on_bad="skip"` is put aside and counted.
    """

    def __init__(
        self,
        queue_dir: PathLike,
        split: str = "train",
        *,
        order: Literal["any", "strict"] = "any",
        acknowledge: Literal["delivered", "committed"] = "delivered",
        rank: int | None = None,
        world_size: int | None = None,
        timeout_seconds: float | None = 600.0,
        wait_for_queue_seconds: float = 0.0,
        lease_seconds: float = 30.0,
        on_bad: Literal["raise", "skip"] = "raise",
    ) -> None:
        for name, value, allowed in (
            ("order", order, ("any", "strict")),
            ("acknowledge", acknowledge, ("delivered", "committed")),
            ("on_bad", on_bad, ("raise", "skip")),
        ):
            if value not in allowed:
                raise ConfigError(f"{name} is one of {', '.join(map(repr, allowed))}, got {value!r}")
        if timeout_seconds is not None and not timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds must be positive, or None, got {timeout_seconds!r}")
        self.queue_dir, self.split = require_local(queue_dir, "queue_dir"), split
        self.order, self.acknowledge, self.on_bad = order, acknowledge, on_bad
        self.timeout_seconds, self.lease_seconds = timeout_seconds, lease_seconds
        self.wait_for_queue_seconds = wait_for_queue_seconds
        self.rank = find_rank(rank, world_size)
        self.counts = ReadCounts()
        """What was delivered so far, delivered twice, lost, skipped, and how long it was waited for."""
        self._queue: Queue | None = None
        self._schema: pa.Schema | None = None
        self._place: _Place | None = None
        self._pending: pa.RecordBatch | None = None
        """What is left of the batch that was begun."""
        self._row = 0
        """How many rows of it, or after loading a state of the one to come, were delivered."""
        self._batch: tuple[int, int] | None = None
        """Which batch that is: the number of its file, and its index there."""
        self._before: State | None = None
        """The reader's state in front of it."""
        self._origin: Origin | None = None
        self._first_row = 0
        """The row of its file that the batch begins with."""
        self._holds = False
        """Whether a pipeline says what is done with."""
        self._delivered: State | None = None
        """The reader's state behind what was delivered last."""
        self._told: State | None = None
        """The last of these that the reader was told of."""
        self._to_commit: deque[State] = deque()
        self._waiting_since: float | None = None
        self._warned = False
        self._put_aside = False

    @property
    def meta(self) -> Mapping[str, Any]:
        """What whoever made the queue says about its batches."""
        return self._open_queue().meta

    @property
    def schema(self) -> pa.Schema:
        if self._schema is None:
            self._schema = nullable(self._open_queue().description.schema.to_arrow())
        return self._schema

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        if self._pending is None:
            place = self._open()
            self._pass_on(place)
            self._before = place.reader.state()
            try:
                delivered = self._next(place)
            except StalledError as error:
                self._keep_waiting(error)
                return pa.RecordBatch.from_pylist([], schema=self.schema)
            if delivered is None:
                self._pass_on(place, everything=True)
                return None
            self._begin(delivered)
        assert self._pending is not None
        assert self._batch is not None
        part, rest = self._pending.slice(0, max_rows), self._pending.slice(max_rows)
        self._origin = Origin(f"{self.queue_dir / self.split / f'{self._batch[0]:012d}'}", self._first_row + self._row)
        self._row += part.num_rows
        self._pending = rest
        if not rest.num_rows:
            self._pending, self._batch, self._row = None, None, 0
        return part

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """The batches as they were put in."""
        while (batch := self.next_batch(_ALL_ROWS)) is not None:
            if batch.num_rows:
                yield batch

    def origin(self) -> Origin | None:
        return self._origin

    def skip_file(self) -> str:
        """After a file that could not be read: put it aside, and go on with the next; says so."""
        self._put_aside = True
        return "a file of the queue is unreadable"

    def state_dict(self) -> State:
        """Where this reader is. In strict order it is the same on every rank, and loads on any number of them."""
        begun = self._pending is not None
        facts = {
            "order": self.order,
            "split": self.split,
            "fingerprint": None if self._place is None else self._place.queue.fingerprint,
            "queue": None if self._place is None else self._place.queue.id,
            "reader": self._before if begun else None if self._place is None else self._place.reader.state(),
            "batch": self._batch,
            "row": self._row,
        }
        return _STATE.write(facts)

    def load_state_dict(self, state: State) -> None:
        """Go on with the row that would have come next."""
        self._check(state)
        self.close()
        if state["reader"] is None:
            return
        place = self._open()
        if state["fingerprint"] != place.queue.fingerprint:
            raise ResumeError(
                f"the state is of a queue with fingerprint {state['fingerprint']}, {self.queue_dir} has "
                f"{place.queue.fingerprint}: its batches were made otherwise; start without the state"
            )
        same_queue = state.get("queue") == place.queue.id
        if not same_queue and not (self.order == "strict" and place.queue.repeatable):
            raise ResumeError(
                f"the state is of a queue that was at {self.queue_dir} before this one was made, and what it names is "
                "gone; start without the state"
            )
        with place.queue.guarded():
            if self.order == "any":
                place.wait_for_files_of(state["reader"])
            place.reader.load(state["reader"], same_queue=same_queue)
        self._row = state["row"]
        self._batch = None if state["batch"] is None else (state["batch"][0], state["batch"][1])

    def hold(self) -> None:
        """For pipelines: until the source is closed, `delivered` and `commit` say what is done with, and nothing else.

        All three may be called while another thread reads, which then does what is to be done before the next batch.
        """
        self._holds = True

    def delivered(self, state: State) -> None:
        """What came before `state` was asked past by whoever loops over the pipeline."""
        if self.acknowledge == "delivered" and state["reader"] is not None:
            self._delivered = state["reader"]

    def commit(self, state: Mapping[str, Any] | None = None) -> None:
        """What was delivered before `state` is done with and may be deleted.

        It is a state of this source, or of its pipeline; None stands for all that this source has handed out, so it is
        not for pipelines, which read ahead.
        """
        state = self.state_dict() if state is None else state.get("source", state)
        self._check(state)
        if state["reader"] is None:
            return
        closed = self._place is None
        if closed:
            self.load_state_dict(dict(state))
        self._to_commit.append(state["reader"])
        if closed:
            self.close()

    def reset(self) -> None:
        """Begin anew, with what is in the queue: all that is not done with."""
        self.close()

    def close(self) -> None:
        """Give back what is not done with; reading again takes up what is there then.

        Without a pipeline, and if that is what counts, every batch that was handed out whole has been delivered.
        """
        place, self._place = self._place, None
        if place is not None and self._delivers_itself:
            self._delivered = place.reader.state() if self._pending is None else self._before
        self._pending = self._batch = self._before = self._origin = self._waiting_since = None
        self._row = 0
        if place is not None:
            self._pass_on(place, everything=True)
            place.close()
        self._delivered = self._told = None
        self._to_commit.clear()
        self._holds = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"QueueSource({str(self.queue_dir)!r}, {self.split!r}, order={self.order!r})"

    def _open_queue(self) -> Queue:
        if self._queue is None:
            until = time.monotonic() + self.wait_for_queue_seconds
            while self._queue is None:
                try:
                    self._queue = Queue.open(self.queue_dir)
                except QueueNotFoundError:
                    if time.monotonic() >= until:
                        raise
                    time.sleep(_LONG_POLL)
            self._queue.split(self.split)
        return self._queue

    def _open(self) -> _Place:
        if self._place is None:
            self._place = _Place(self, self._open_queue())
        return self._place

    def _next(self, place: _Place) -> Delivered | None:
        """The next batch; raises StalledError if there is none for a moment."""
        place.split.on_bad = "skip" if self._put_aside else self.on_bad
        waited = 0.0 if self._waiting_since is None else time.monotonic() - self._waiting_since
        place.split.poll_seconds = None if waited < _A_WHILE else _LONG_POLL
        with place.queue.guarded():
            delivered = place.reader.next()
        self._put_aside, self._waiting_since = False, None
        place.member.done += delivered is not None
        return delivered

    @property
    def _delivers_itself(self) -> bool:
        return self.acknowledge == "delivered" and not self._holds

    def _pass_on(self, place: _Place, *, everything: bool = False) -> None:
        """Tell the reader what is done with: when that frees a file, or at once, if everything is wanted."""
        if self._delivers_itself and self._pending is None and not everything:
            self._delivered = place.reader.state()
        done = [self._to_commit.popleft() for _ in range(len(self._to_commit))]
        delivered = self._delivered
        if delivered is not None and delivered is not self._told and (everything or place.frees_a_file(delivered)):
            self._told = delivered
            done.append(delivered)
        if done and place.queue.path.is_dir():
            for state in done:
                place.reader.commit(state)

    def _keep_waiting(self, error: StalledError) -> None:
        """Raises when the time is up; says once, after a while, what is waited for."""
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since, self._warned = now - _LOOK_SECONDS, False
        waited, missing = now - self._waiting_since, str(error).partition(" for ")[2]
        if self.timeout_seconds is not None and waited >= self.timeout_seconds:
            self._waiting_since = None
            raise StalledError(f"waited {self.timeout_seconds:g} s for {missing}") from None
        if waited >= _FIRST_WORD and not self._warned:
            self._warned = True
            logger.warning("waiting for %s", missing)

    def _begin(self, delivered: Delivered) -> None:
        key = (delivered.number, delivered.index)
        if self._batch != key:
            # Not the one that the state was in the middle of: others have that, all of it.
            self._batch, self._row = key, 0
        opened = delivered.opened
        batch = opened.record_batch(delivered.index)
        try:
            whole = pa.RecordBatch.from_arrays(batch.columns, schema=self.schema)
        except (pa.ArrowInvalid, pa.ArrowTypeError, ValueError) as error:
            raise DataError(
                f"its columns are not those of the queue ({error})", file=str(self.queue_dir / self.split), row=None
            ) from None
        self._first_row = sum(opened.record_batch(index).num_rows for index in range(delivered.index))
        self._pending = whole.slice(self._row)

    def _check(self, state: Mapping[str, Any]) -> None:
        _STATE.read(state)
        for name in ("order", "split"):
            if state[name] != getattr(self, name):
                raise ResumeError(f"the state is of {name}={state[name]!r}, this source has {getattr(self, name)!r}")


class _Place:
    """A source's place in a queue: its membership and its reader."""

    def __init__(self, source: QueueSource, queue: Queue) -> None:
        self.queue, self._file = queue, -1
        lease, rank = source.lease_seconds, source.rank
        facts = {"role": "consumer", "order": source.order, "rank": rank.rank, "world": rank.world_size}
        self.member = Membership(queue.members, "c", lease_seconds=lease, facts=facts)
        caretaker = LeaseReaper(queue, MemberWatch(queue.members, lease_seconds=lease))
        moment = min(_LOOK_SECONDS, source.timeout_seconds or _LOOK_SECONDS)
        self.split = Split(queue, source.split, self.member, caretaker, moment, None, source.on_bad, source.counts)
        with queue.guarded():
            self.member.join()
        self.reader: QueueReader = (
            StrictReader(self.split, rank, on_commit=True)
            if source.order == "strict"
            else SharedReader(self.split, on_commit=True)
        )

    def frees_a_file(self, state: State) -> bool:
        """Whether a file may be done with at this state that was not at the last one asked for.

        To tell the others costs a strict reader a few system calls, so it is not done for every batch.
        """
        if "position" not in state:
            return bool(state["finished"])
        before, self._file = self._file, state["position"] // self.queue.description.batches_per_file
        return before != self._file

    def wait_for_files_of(self, state: State) -> None:
        """Wait until the files that a state of ours has begun are free, if somebody has them who may be dead.

        So it is when a run that had gone on from this state was killed too: what it took over is to be ours again, from
        the row on that the state says. Who is seen to live keeps what it has.
        """
        begun = {number for number, _ in state["held"]}
        beats: dict[str, int | None] = {}
        while True:
            if self.split.caretaker.due:
                self.split.caretaker.round()
            files = [file for file in self.queue.split(self.split.name).files() if file.number in begun]
            owners = {file.owner for file in files if file.owner is not None} - {state["member"], self.member.id}
            now = {owner: self.split.caretaker.watch.beat_of(owner) for owner in owners}
            if not any(beats.setdefault(owner, beat) == beat for owner, beat in now.items()):
                return
            time.sleep(_LONG_POLL)

    def close(self) -> None:
        try:
            if self.queue.path.is_dir():
                self.reader.close()
        finally:
            self.member.leave()
