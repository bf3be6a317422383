"""What the two ways of reading a split have in common: waiting for files, opening them, putting bad ones aside."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.errors import DataError, StaleQueueError
from penstock.fsqueue.backoff import Backoff
from penstock.fsqueue.batch_file import BatchFile, read
from penstock.fsqueue.cursors import read_floor
from penstock.fsqueue.lanes import Lanes
from penstock.fsqueue.layout import Published
from penstock.fsqueue.members import Membership
from penstock.fsqueue.queue import Queue
from penstock.fsqueue.reaper import LeaseReaper

__all__ = ["Delivered", "QueueReader", "ReadCounts", "Split"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ReadCounts:
    """What one reader has seen."""

    delivered: int = 0
    """Batches."""
    files: int = 0
    """Files that were acknowledged."""
    redelivered: int = 0
    """Batches out of files whose lease had run out before: another consumer may have had them already."""
    lost: int = 0
    """Files that others took from us because our own lease ran out."""
    skipped: int = 0
    """Batches of files that could not be read and were put aside."""
    waited_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Delivered:
    """One batch: which of which file."""

    opened: BatchFile
    index: int
    number: int


class QueueReader(Protocol):
    """A way of reading one split, batch by batch."""

    counts: ReadCounts

    def next(self) -> Delivered | None:
        """The next batch, waiting for it; None at the end of a split that ends."""

    def state(self) -> dict[str, Any]: ...
    def load(self, state: Mapping[str, Any], *, same_queue: bool = True) -> None: ...
    def commit(self, state: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Split:
    """One split of a queue in the hands of one reader: its directory, and how to wait there."""

    queue: Queue
    name: str
    member: Membership
    caretaker: LeaseReaper
    timeout_seconds: float | None
    poll_seconds: float | None
    on_bad: str
    counts: ReadCounts = field(default_factory=ReadCounts)

    def open(self, file: Published) -> BatchFile | None:
        """The contents of a file; None if it could not be read and was put aside, as asked.

        Raises FileNotFoundError if it is gone.
        """
        directory = self.queue.split(self.name)
        try:
            return read(directory.at(file), file, self.queue, self.name)
        except (DataError, StaleQueueError) as error:
            if self.on_bad == "raise":
                if isinstance(error, StaleQueueError):
                    raise
                raise DataError(
                    f"{error.reason}; `penstock queue doctor {self.queue.path} --repair` puts it aside, "
                    'on_bad="skip" does so without stopping',
                    file=error.file,
                ) from None
            aside = directory.reject(file)
            logger.warning("%s; put aside as %s, %d batches are skipped", error, aside.name, file.batches - file.start)
            return None

    def wait_for(
        self,
        look: Callable[[], Published | None],
        *,
        others: bool = False,
        at_end: Callable[[], bool] | None = None,
        missing: Callable[[], str] | None = None,
    ) -> Published | None:
        """What `look` finds, as soon as it finds something; None at the end of the split.

        With `others` that is not before everybody who has files is seen to live: what the dead had taken comes back.
        With `at_end` that is not before it says so: a file before the end is waited for, whoever has it. `missing` says
        what it is waited for.
        """
        patience: Backoff | None = None
        beats: dict[str, int | None] = {}
        while True:
            with self.queue.guarded():
                if self.caretaker.due:
                    self.caretaker.round()
                found = look()
                if found is None and self.lanes.ended(self.queue.description.batches_per_file):
                    found = look()  # what was published between the two
                    waits = at_end is not None and not at_end()
                    if found is None and not waits and not (others and self._may_come_back(beats)):
                        break
            if found is not None:
                break
            if patience is None:
                describe = missing or self.what_is_missing
                patience = Backoff(self.timeout_seconds, describe, poll_seconds=self.poll_seconds)
            patience.pause()
        if patience is not None:
            self.counts.waited_seconds += patience.waited
        return found

    def _may_come_back(self, beats: dict[str, int | None]) -> bool:
        """Whether somebody has files who has not moved on since `beats` were noted, and may be dead."""
        owners = {file.owner for file in self.queue.split(self.name).files() if file.owner is not None}
        now = {owner: self.caretaker.watch.beat_of(owner) for owner in owners - {self.member.id}}
        return any(beats.setdefault(owner, beat) == beat for owner, beat in now.items())

    @property
    def lanes(self) -> Lanes:
        return Lanes(self.queue.split(self.name).lanes, self.queue.description.lanes)

    def what_is_missing(self) -> str:
        """`a batch of split 'train' in ...: ...`, for the message at the deadline."""
        directory = self.queue.split(self.name)
        read = read_floor(directory.cursors) // self.queue.description.batches_per_file
        files = [file for file in directory.files() if file.owner is not None or file.number >= read]
        taken = sum(file.owner is not None for file in files)
        providers = [m for m in self.caretaker.watch.look(fresh=True).values() if m.id.startswith("p")]
        at_work = f"{len(providers)} providers are listed" if providers else "no provider is at work"
        start = "run `python prepare.py <config>`" if self.queue.repeatable else "start what fills the queue"
        remedy = "look at their output, and at `penstock queue status`" if providers else start
        return (
            f"a batch of split {self.name!r} in {self.queue.path}: {len(files) - taken} files are ready, {taken} are "
            f"taken by consumers, {at_work}; {remedy}"
        )
