"""`QueueSource`: a queue as the source of a pipeline; with `QueueSink` a directory joins two pipelines.

    Pipeline(JsonlSource("in.jsonl"), [Tokenize(tokenizer)], QueueSink("queue")).run()        # in one process
    for batch in Pipeline(QueueSource("queue"), [Filter("n_tokens > 8")]): ...                # in another

Both work without a pipeline, too: `sink.consume(batch)` and `sink.flush()`; `for batch in source`. Batches may have any
columns that `penstock.types` can spell: numbers, tensors, strings, lists, structs, with nulls.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import pyarrow as pa

from penstock.distributed.ranks import find_rank
from penstock.errors import DataError, QueueNotFoundError, ResumeError, StalledError
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.files.states import StateFormat
from penstock.fsqueue.consumer import check_reading, open_reader
from penstock.fsqueue.members import QueueKeywords, QueueMember, QueueOptions
from penstock.fsqueue.queue import Queue
from penstock.fsqueue.sink import nullable
from penstock.fsqueue.split_reader import Delivered, ReadCounts, SplitFiles, check_queue_state
from penstock.pipeline.stages import Origin, Source, State

logger = logging.getLogger(__name__)

_STATE = StateFormat("queue", "a QueueSource")
# Longest wait of `next_batch`.
_WAIT_SECONDS = 0.5
_LONG_WAIT, _LONG_POLL = 30.0, 0.025
_WARN_AFTER = 15.0
_ALL_ROWS = 1 << 62


class QueueSource(Source):
    """Batches of one split of a queue, until its end, if it has one; waits for batches that are not there yet.

    `order="any"` shares the split with other readers; `order="strict"` gives each rank its batches in the order of
    their numbers.

    A file stays in the queue until all of it is consumed. With `acknowledge="delivered"` a batch is consumed when the
    next one is requested, in a loop over the source or over a pipeline; `pipeline.run()` has consumed what it has
    published, or what a checkpoint holds. Rows that a pipeline has only prefetched when it stops, fails or is killed
    are delivered again, to the next reader. With `"committed"` a loop consumes nothing before `commit(state)`: for
    trainers that return to their last checkpoint. A state resumes at the row, unless later rows are consumed.

    While there is no batch, `next_batch` returns an empty one every half second, so that a pipeline can be stopped, and
    raises StalledError after `timeout_seconds`. A queue that does not exist raises QueueNotFoundError, unless it is
    created within `wait_for_queue_seconds`. An unreadable file raises DataError, or with `on_error="skip"` is set aside
    and counted. Fields of `QueueOptions` can be given as keywords.
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
        wait_for_queue_seconds: float = 0.0,
        on_error: Literal["raise", "skip"] = "raise",
        options: QueueOptions | Mapping[str, Any] | None = None,
        **keywords: Unpack[QueueKeywords],
    ) -> None:
        check_reading(order, acknowledge, on_error)
        self.queue_dir, self.split = require_local(queue_dir, "queue_dir"), split
        self.order, self.acknowledge, self.on_error = order, acknowledge, on_error
        self.options = QueueOptions.of(options, keywords, without=("durable",))
        self.wait_for_queue_seconds = wait_for_queue_seconds
        self.rank = find_rank(rank, world_size)
        self.counts = ReadCounts()
        """Batches delivered, redelivered, lost and skipped so far, and seconds of waiting."""
        self._queue: Queue | None = None
        self._schema: pa.Schema | None = None
        self._input: _SplitInput | None = None
        self._pending: pa.RecordBatch | None = None  # rest of the current batch
        self._row = 0  # rows of the current batch that were delivered; after loading a state, of the batch to come
        self._batch: tuple[int, int] | None = None  # current batch: number of its file, and index in it
        self._before: State | None = None  # state of the reader before the current batch
        self._origin: Origin | None = None
        self._first_row = 0  # row of its file at which the current batch begins
        self._held = False  # whether a pipeline decides what is consumed
        self._delivered: State | None = None  # state of the reader after what was delivered last
        self._acknowledged: State | None = None  # last of these states that the reader has committed
        self._to_commit: deque[State] = deque()
        self._waiting_since: float | None = None
        self._warned = False
        self._skip_next = False

    @property
    def meta(self) -> Mapping[str, Any]:
        """Metadata of the queue."""
        return self._open_queue().meta

    @property
    def schema(self) -> pa.Schema:
        if self._schema is None:
            self._schema = nullable(self._open_queue().description.schema.to_arrow())
        return self._schema

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        if self._pending is None:
            opened = self._open()
            self._acknowledge(opened)
            self._before = opened.reader.state()
            try:
                delivered = self._next(opened)
            except StalledError as error:
                self._check_timeout(error)
                return pa.RecordBatch.from_pylist([], schema=self.schema)
            if delivered is None:
                self._acknowledge(opened, everything=True)
                return None
            self._begin(delivered)
            self._before = _with_file(self._before, delivered)
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
        """Batches as they were published."""
        while (batch := self.next_batch(_ALL_ROWS)) is not None:
            if batch.num_rows:
                yield batch

    def origin(self) -> Origin | None:
        return self._origin

    def skip_file(self) -> str:
        """After an unreadable file: set it aside and continue with the next; returns the reason."""
        self._skip_next = True
        return "a file of the queue is unreadable"

    def state_dict(self) -> State:
        """Position of this reader. In strict order it is the same on every rank, and loads on any number of ranks."""
        opened = self._input
        facts = {
            "order": self.order,
            "split": self.split,
            "fingerprint": None if opened is None else opened.queue.fingerprint,
            "queue": None if opened is None else opened.queue.id,
            "reader": self._before if self._pending is not None else None if opened is None else opened.reader.state(),
            "batch": self._batch,
            "row": self._row,
        }
        return _STATE.write(facts)

    def load_state_dict(self, state: State) -> None:
        """Resume with the next row."""
        self._check(state)
        self.close()
        if state["reader"] is None:
            return
        opened = self._open()
        same_queue = check_queue_state(state, opened.queue, self.order)
        with opened.queue.guarded():
            opened.reader.load(state["reader"], same_queue=same_queue)
        self._row = state["row"]
        self._batch = None if state["batch"] is None else (state["batch"][0], state["batch"][1])

    def hold(self) -> None:
        """For pipelines: until the source is closed, only `delivered` and `commit` decide what is consumed.

        All three may be called while another thread reads; the reading thread acts on them before the next batch.
        """
        self._held = True

    def delivered(self, state: State) -> None:
        """A loop over the pipeline has requested the batch after `state`."""
        if self.acknowledge == "delivered" and state["reader"] is not None:
            self._delivered = state["reader"]

    def commit(self, state: Mapping[str, Any] | None = None) -> None:
        """Acknowledge what was delivered before `state`: it may be deleted.

        `state` is one of this source, or of its pipeline. None stands for everything that this source has delivered; it
        is not for pipelines, which prefetch.
        """
        state = self.state_dict() if state is None else state.get("source", state)
        self._check(state)
        if state["reader"] is None:
            return
        closed = self._input is None
        if closed:
            self.load_state_dict(dict(state))
        self._to_commit.append(state["reader"])
        if closed:
            self.close()

    def reset(self) -> None:
        """Start again, with everything in the queue that is not consumed."""
        self.close()

    def close(self) -> None:
        """Release what is not consumed; reading again continues with what is there then.

        Without a pipeline, and with `acknowledge="delivered"`, every batch that was delivered completely is consumed.
        """
        opened, self._input = self._input, None
        if opened is not None and self._acknowledges_itself:
            self._delivered = opened.reader.state() if self._pending is None else self._before
        self._pending = self._batch = self._before = self._origin = self._waiting_since = None
        self._row = 0
        if opened is not None:
            self._acknowledge(opened, everything=True)
            opened.close()
        self._delivered = self._acknowledged = None
        self._to_commit.clear()
        self._held = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"QueueSource({str(self.queue_dir)!r}, {self.split!r}, order={self.order!r})"

    def _open_queue(self) -> Queue:
        until = time.monotonic() + self.wait_for_queue_seconds
        while self._queue is None:
            try:
                queue = Queue.open(self.queue_dir)
                queue.split(self.split)
                self._queue = queue
            except QueueNotFoundError:
                if time.monotonic() >= until:
                    raise
                time.sleep(_LONG_POLL)
        return self._queue

    def _open(self) -> _SplitInput:
        if self._input is None:
            self._input = _SplitInput(self, self._open_queue())
        return self._input

    def _next(self, opened: _SplitInput) -> Delivered | None:
        """The next batch; raises StalledError if there is none for a moment."""
        opened.split.on_error = "skip" if self._skip_next else self.on_error
        waited = 0.0 if self._waiting_since is None else time.monotonic() - self._waiting_since
        opened.split.poll_seconds = self.options.poll_seconds or (None if waited < _LONG_WAIT else _LONG_POLL)
        with opened.queue.guarded():
            delivered = opened.reader.next()
        self._skip_next, self._waiting_since = False, None
        opened.member.done += delivered is not None
        return delivered

    @property
    def _acknowledges_itself(self) -> bool:
        return self.acknowledge == "delivered" and not self._held

    def _acknowledge(self, opened: _SplitInput, *, everything: bool = False) -> None:
        """Commit what is consumed: when that completes a file, or now, if `everything`."""
        if self._acknowledges_itself and self._pending is None and not everything:
            self._delivered = opened.reader.state()
        states = [self._to_commit.popleft() for _ in range(len(self._to_commit))]
        delivered = self._delivered
        if (
            delivered is not None
            and delivered is not self._acknowledged
            and (everything or opened.completes_file(delivered))
        ):
            self._acknowledged = delivered
            states.append(delivered)
        if states and opened.queue.path.is_dir():
            for state in states:
                opened.reader.commit(state)

    def _check_timeout(self, error: StalledError) -> None:
        """Raise when the time is up; warn once before."""
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since, self._warned = now - _WAIT_SECONDS, False
        waited, missing = now - self._waiting_since, str(error).partition(" for ")[2]
        timeout = self.options.timeout_seconds
        if timeout is not None and waited >= timeout:
            self._waiting_since = None
            raise StalledError(f"waited {timeout:g} s for {missing}") from None
        if waited >= _WARN_AFTER and not self._warned:
            self._warned = True
            logger.warning("waiting for %s", missing)

    def _begin(self, delivered: Delivered) -> None:
        key = (delivered.number, delivered.index)
        if self._batch != key:
            # Not the batch of the state: another reader has that one, all of it.
            self._batch, self._row = key, 0
        opened = delivered.opened
        try:
            whole = pa.RecordBatch.from_arrays(opened.record_batch(delivered.index).columns, schema=self.schema)
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
                raise ResumeError(f"the state has {name}={state[name]!r}, this source has {getattr(self, name)!r}")


def _with_file(state: State, current: Delivered) -> State:
    """State of a reader before its current batch, whose file it had not claimed by then if the batch is the first one.

    Without it a run that resumes in the middle of the batch would not know the file when others had claimed it since.
    """
    if "held" not in state or any(number == current.number for number, _ in state["held"]):
        return state
    return state | {"held": [[current.number, current.index], *state["held"]]}


class _SplitInput:
    """Membership of a source in a queue, and its reader."""

    def __init__(self, source: QueueSource, queue: Queue) -> None:
        self.queue, self._file = queue, -1
        self.member = QueueMember.consumer(queue, source.order, source.rank, source.options).join()
        moment = min(_WAIT_SECONDS, source.options.timeout_seconds or _WAIT_SECONDS)
        self.split = SplitFiles(self.member, source.split, moment, None, source.on_error, source.counts)
        self.reader = open_reader(self.split, source.order, source.rank, on_commit=True)

    def completes_file(self, state: State) -> bool:
        """True if a file may be consumed at this state that was not at the last one.

        A commit costs a strict reader a few system calls, so it is not done for every batch.
        """
        if "position" not in state:
            return bool(state["finished"])
        before, self._file = self._file, state["position"] // self.queue.description.batches_per_file
        return before != self._file

    def close(self) -> None:
        try:
            if self.queue.path.is_dir():
                self.reader.close()
        finally:
            self.member.leave()
