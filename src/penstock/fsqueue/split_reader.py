"""Common part of the two readers of a split: waiting for files, opening them, setting unreadable ones aside."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.errors import DataError, ResumeError, StaleQueueError
from penstock.fsqueue.batch_file import BatchFile, KnownFrames, read
from penstock.fsqueue.layout import Lanes, QueueFile, SplitDirectory
from penstock.fsqueue.members import Backoff, QueueMember
from penstock.fsqueue.queue import Queue

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ReadCounts:
    """Counts of one reader."""

    delivered: int = 0
    """Batches delivered."""
    files: int = 0
    """Files acknowledged."""
    redelivered: int = 0
    """Batches of files whose lease had expired: another consumer may have had them."""
    lost: int = 0
    """Files that others took over because our lease expired."""
    skipped: int = 0
    """Batches of unreadable files."""
    waited_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Delivered:
    """Delivered batch: an open file, and the index of the batch in it."""

    opened: BatchFile
    index: int
    number: int


class QueueReader(Protocol):
    """Order in which the batches of a split are read."""

    counts: ReadCounts

    def next(self) -> Delivered | None:
        """The next batch; waits for it. None at the end of the split."""

    def state(self) -> dict[str, Any]: ...
    def load(self, state: Mapping[str, Any], *, same_queue: bool = True) -> None: ...
    def commit(self, state: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class SplitFiles:
    """One member's access to the files of one split."""

    member: QueueMember
    name: str
    timeout_seconds: float | None = 600.0
    poll_seconds: float | None = None
    on_error: str = "raise"
    counts: ReadCounts = field(default_factory=ReadCounts)
    queue: Queue = field(init=False)
    directory: SplitDirectory = field(init=False)
    lanes: Lanes = field(init=False)
    _frames: KnownFrames = field(init=False, default_factory=KnownFrames)

    def __post_init__(self) -> None:
        self.queue = self.member.queue
        self.directory = self.queue.split(self.name)
        self.lanes = self.queue.lanes(self.directory)

    def open(self, file: QueueFile) -> BatchFile | None:
        """Open a file; None if it is unreadable and `on_error="skip"` has set it aside.

        Raises FileNotFoundError if it is gone.
        """
        try:
            return read(self.directory.where(file), file, self.queue, self.name, self._frames)
        except (DataError, StaleQueueError) as error:
            if self.on_error == "raise":
                if isinstance(error, StaleQueueError):
                    raise
                raise DataError(
                    f"{error.reason}; `penstock queue doctor {self.queue.path} --repair` sets it aside, "
                    'on_error="skip" does so while reading',
                    file=error.file,
                ) from None
            aside = self.directory.reject(file)
            logger.warning("%s; set aside as %s, skipping %d batches", error, aside.name, file.batches - file.start)
            return None

    def wait_for(
        self,
        find: Callable[[], QueueFile | None],
        *,
        claims: bool = False,
        at_end: Callable[[], bool] | None = None,
        describe: Callable[[], str] | None = None,
    ) -> QueueFile | None:
        """The file that `find` returns, waiting until it does; None at the end of the split.

        With `claims` the end is not reached while a claimed file may come back: its owner has to be seen alive. With
        `at_end` the end is reached when that is true. `describe` says what is missing.
        """
        backoff: Backoff | None = None
        beats: dict[str, int | None] = {}
        while True:
            with self.queue.guarded():
                self.member.reap_if_due()
                found = find()
                if found is None and self.lanes.ended(self.queue.description.batches_per_file):
                    found = find()  # a file published between the two
                    waits = at_end is not None and not at_end()
                    if found is None and not waits and not (claims and self._may_come_back(beats)):
                        break
            if found is not None:
                break
            if backoff is None:
                backoff = Backoff(
                    self.timeout_seconds, describe or self.describe_missing, poll_seconds=self.poll_seconds
                )
            backoff.pause()
        if backoff is not None:
            self.counts.waited_seconds += backoff.waited
        return found

    def _may_come_back(self, beats: dict[str, int | None]) -> bool:
        owners = {file.owner for file in self.directory.files() if file.owner is not None}
        return self.any_silent(owners, beats)

    def any_silent(self, owners: set[str], beats: dict[str, int | None]) -> bool:
        """True if one of these members has shown no heartbeat since `beats` were noted, and may be dead.

        A member that is not listed shows none: another one has removed it from the list, and releases its files.
        """
        now = {owner: self.member.watch.beat_of(owner) for owner in owners - {self.member.id}}
        return any(beat is None or beats.setdefault(owner, beat) == beat for owner, beat in now.items())

    def describe_missing(self) -> str:
        """`a batch of split 'train' in ...: ...`, for the message at the time limit."""
        floor = self.directory.read_floor() // self.queue.description.batches_per_file
        files = [file for file in self.directory.files() if file.owner is not None or file.number >= floor]
        claimed = sum(file.owner is not None for file in files)
        providers = sum(member.startswith("p") for member in self.member.watch.members(fresh=True))
        start = "run `python prepare.py <config>`" if self.queue.repeatable else "start what fills the queue"
        remedy = "look at their output, and at `penstock queue status`" if providers else start
        return (
            f"a batch of split {self.name!r} in {self.queue.path}: {len(files) - claimed} files are ready, {claimed} "
            f"are claimed by consumers, {providers or 'no'} provider{'s' * (providers != 1)} listed; {remedy}"
        )


def check_queue_state(state: Mapping[str, Any], queue: Queue, order: str) -> bool:
    """True if a state is of this very queue; raises ResumeError if it cannot be resumed from it."""
    if state["order"] != order:
        raise ResumeError(f"the state has order={state['order']!r}, this reader has order={order!r}")
    if state["fingerprint"] != queue.fingerprint:
        raise ResumeError(
            f"the state is of a queue with fingerprint {state['fingerprint']}, {queue.path} has {queue.fingerprint}: "
            "its batches were made otherwise; use the config of the run, or start without the state"
        )
    same_queue = bool(state.get("queue") == queue.id)
    if not same_queue and not (order == "strict" and queue.repeatable):
        raise ResumeError(
            f"the state is of a queue that was at {queue.path} before this one was made, and its files are gone; start "
            "without the state"
        )
    return same_queue
