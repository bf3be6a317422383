"""Sharing a split among any number of consumers: each takes a file by renaming it, and keeps it for its lease.

Files come in the order they were made, as far as they are free. Without a crash every batch is delivered once. When a
consumer dies, its files are ready again after the lease, with a mark on their name, and whatever it had already been
given out of them comes a second time, and is counted.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError
from penstock.fsqueue.batch_file import BatchFile
from penstock.fsqueue.cursors import all_cursors
from penstock.fsqueue.layout import Published
from penstock.fsqueue.queue import how_to_purge
from penstock.fsqueue.reaper import Acknowledger
from penstock.fsqueue.split_reader import Delivered, Split

__all__ = ["SharedReader"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ClaimedFile:
    """A file that is ours."""

    file: Published
    next: int
    """The batch in it that comes next."""
    committed: int
    """What comes before this batch is done with, whatever happens to us."""
    opened: BatchFile | None = None

    @property
    def finished(self) -> bool:
        return self.next >= self.file.batches


class SharedReader:
    """One consumer's share of a split."""

    def __init__(self, split: Split, *, on_commit: bool) -> None:
        self.split, self.on_commit = split, on_commit
        self.counts = split.counts
        self._directory = split.queue.split(split.name)
        self._acknowledger = Acknowledger(split.queue, split.name)
        self._ready: deque[Published] = deque()
        self._current: ClaimedFile | None = None
        self._waiting: deque[ClaimedFile] = deque()
        """Files that a state said are ours: they come first."""
        self._finished: dict[int, ClaimedFile] = {}
        """Files that were delivered to the end, and are not acknowledged yet."""
        self._lapses = split.member.lapses
        self._checked = False

    def next(self) -> Delivered | None:
        if not self._checked:
            self._check_order()
        while True:
            self._check_lease()
            held = self._current
            if held is None or held.finished:
                self._finish()
                if self._take() is None:
                    return None
                continue
            if held.opened is None and not self._open(held):
                self._current = None
                continue
            assert held.opened is not None
            index = held.next
            held.next += 1
            self.counts.delivered += 1
            self.counts.redelivered += held.file.returns > 0
            return Delivered(held.opened, index, held.file.number)

    def state(self) -> dict[str, Any]:
        held = [held for held in (self._current, *self._waiting) if held is not None]
        return {
            "member": self.split.member.id,
            "held": [[held.file.number, held.next] for held in held if not held.finished],
            "finished": sorted([*self._finished, *(held.file.number for held in held if held.finished)]),
        }

    def load(self, state: Mapping[str, Any], *, same_queue: bool = True) -> None:
        self.close()
        places: dict[int, int] = dict(state["held"])
        finished = set(state["finished"])
        kept: dict[int, ClaimedFile] = {}
        for file in self._directory.files():
            if file.owner not in (state["member"], None):
                continue
            if file.number in finished and not self.on_commit:
                self._acknowledger.delete(file)  # the trainer died before it could
            elif file.number in finished:
                mine = file.taken(self.split.member.id)
                if self._directory.move(file, mine):
                    self._finished[file.number] = ClaimedFile(mine, file.batches, file.start)
            elif file.owner is not None or file.number in places:
                mine = file.taken(self.split.member.id)
                if self._directory.move(file, mine):
                    start = max(places.get(file.number, 0), file.start)
                    kept[file.number] = ClaimedFile(mine, start, start)
        lost = [number for number in places if number not in kept]
        if lost:
            self.counts.lost += len(lost)
            logger.warning(
                "split %r of %s: the state holds files %s, which are there no more: they were delivered to the end "
                "after it was taken, or other consumers took them over when the lease ran out",
                self.split.name,
                self.split.queue.path,
                lost,
            )
        # What the state had begun comes first, then what was taken after it: as the run went before.
        begun = [kept.pop(number) for number in places if number in kept]
        self._waiting.extend([*begun, *(kept[number] for number in sorted(kept))])

    def commit(self, state: Mapping[str, Any]) -> None:
        for number in state["finished"]:
            held = self._finished.pop(number, None)
            if held is None and self._current is not None and self._current.file.number == number:
                held, self._current = self._current, None
            if held is not None:
                self._acknowledge(held)
        places = dict(state["held"])
        for held in self._all_held():
            held.committed = max(held.committed, places.get(held.file.number, 0))

    def close(self) -> None:
        """Acknowledge what is done with, and give the rest back: from the batch on that was not delivered, or, if
        that is what counts, not committed.
        """
        self._finish()
        for held in self._all_held():
            start = held.committed if self.on_commit else held.next
            if not self._directory.move(held.file, held.file.given_back(start)):
                self.counts.lost += 1
        self._current = None
        self._waiting.clear()
        self._finished.clear()
        self._ready.clear()

    def _take(self) -> ClaimedFile | None:
        if self._waiting:
            self._current = self._waiting.popleft()
        else:
            file = self.split.wait_for(self._claim, others=True)
            self._current = None if file is None else ClaimedFile(file, file.start, file.start)
        return self._current

    def _all_held(self) -> list[ClaimedFile]:
        return [*([] if self._current is None else [self._current]), *self._waiting, *self._finished.values()]

    def _open(self, held: ClaimedFile) -> bool:
        """Whether the file could be opened; if it was put aside, as asked, or taken from us, that is counted."""
        try:
            held.opened = self.split.open(held.file)
        except FileNotFoundError:
            self._count_lost(held)
            return False
        if held.opened is None:
            self.counts.skipped += held.file.batches - held.next
        return held.opened is not None

    def _claim(self) -> Published | None:
        """The first ready file that nobody was faster to take."""
        self._lapses = self.split.member.lapses
        for refreshed in (False, True):
            if refreshed:
                self._ready.extend(file for file in self._directory.files() if file.owner is None)
            while self._ready:
                file = self._ready.popleft()
                mine = file.taken(self.split.member.id)
                if self._directory.move(file, mine):
                    return mine
        return None

    def _finish(self) -> None:
        held = self._current
        if held is None or not held.finished:
            return
        self._current = None
        held.opened = None
        if self.on_commit:
            self._finished[held.file.number] = held
        else:
            self._acknowledge(held)

    def _acknowledge(self, held: ClaimedFile) -> None:
        if self._acknowledger.delete(held.file):
            self.counts.files += 1
        else:
            self._count_lost(held)

    def _count_lost(self, held: ClaimedFile) -> None:
        os.stat(self._directory.path)  # raises if it is not the file alone that is gone
        self.counts.lost += 1
        logger.warning(
            "file %s of %s was taken over by another consumer: our lease ran out", held.file.name, self._directory.path
        )

    def _check_order(self) -> None:
        """Refuse to take batches away from a run that reads in strict order and has not let go of them."""
        cursors = all_cursors(self._directory.cursors)
        if cursors:
            raise ConfigError(
                f"split {self.split.name!r} of {self.split.queue.path} is read in strict order ({len(cursors)} of "
                f"{cursors[0].world} ranks are at batch {min(cursor.done for cursor in cursors)} or behind it), and a "
                'consumer with order="any" would take its batches; pass order="strict", or, if that run is over, '
                f"{how_to_purge(self.split.queue.path)}"
            )
        self._checked = True

    def _check_lease(self) -> None:
        """After a pause that may have cost us the lease, deliver no more of a file that others have."""
        held = self._current
        if held is None or held.finished or not self.split.member.lapsed(self._lapses):
            return
        self._lapses = self.split.member.lapses
        if not self._directory.at(held.file).exists():
            self._count_lost(held)
            self._current = None
