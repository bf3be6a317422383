"""Reader for any order: shares a split among any number of consumers, each of which claims files by renaming them.

Files are claimed in the order of their numbers, as far as they are ready. Without a crash every batch is delivered
once. When a consumer dies, its files are ready again after its lease, with a mark in their name. Batches of them that
it had delivered are delivered a second time, and counted.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError
from penstock.fsqueue.batch_file import BatchFile
from penstock.fsqueue.layout import QueueFile, list_cursors
from penstock.fsqueue.leases import Acknowledger
from penstock.fsqueue.queue import how_to_purge
from penstock.fsqueue.split_reader import Delivered, SplitFiles

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05


@dataclass(slots=True)
class ClaimedFile:
    """File that this consumer has claimed."""

    file: QueueFile
    next: int
    """Next batch to deliver."""
    committed: int
    """Batches before this one are committed."""
    opened: BatchFile | None = None

    @property
    def finished(self) -> bool:
        return self.next >= self.file.batches


class ClaimingReader:
    """Claims of one consumer on a split. With `on_commit` files stay until they are committed."""

    def __init__(self, split: SplitFiles, *, on_commit: bool) -> None:
        self.split, self.on_commit = split, on_commit
        self.counts = split.counts
        self._directory, self._member = split.directory, split.member
        self._acknowledger = Acknowledger(split.queue, split.name)
        self._ready: deque[QueueFile] = deque()
        self._current: ClaimedFile | None = None
        self._resumed: deque[ClaimedFile] = deque()  # claimed files of a loaded state: they come first
        # Files that were delivered to the end and are not acknowledged yet.
        self._finished: dict[int, ClaimedFile] = {}
        self._lapses = self._member.lapses
        self._order_checked = False

    def next(self) -> Delivered | None:
        if not self._order_checked:
            self._check_order()
        while True:
            self._check_lease()
            current = self._current
            if current is None or current.finished:
                self._finish()
                if self._take() is None:
                    return None
                continue
            if current.opened is None and not self._open(current):
                self._current = None
                continue
            assert current.opened is not None
            index = current.next
            current.next += 1
            self.counts.delivered += 1
            self.counts.redelivered += current.file.returns > 0
            return Delivered(current.opened, index, current.file.number)

    def state(self) -> dict[str, Any]:
        held = [each for each in (self._current, *self._resumed) if each is not None]
        return {
            "member": self._member.id,
            "held": [[each.file.number, each.next] for each in held if not each.finished],
            "finished": sorted([*self._finished, *(each.file.number for each in held if each.finished)]),
        }

    def load(self, state: Mapping[str, Any], *, same_queue: bool = True) -> None:
        self.close()
        self._wait_for_files_of(state)
        positions: dict[int, int] = dict(state["held"])
        finished = set(state["finished"])
        held: dict[int, ClaimedFile] = {}
        for file in self._directory.files():
            if file.owner not in (state["member"], None):
                continue
            mine = file.claimed(self._member.id)
            if file.number in finished and not self.on_commit:
                self._acknowledger.delete(file)  # the trainer died before it could
            elif file.number in finished:
                if self._directory.move(file, mine):
                    self._finished[file.number] = ClaimedFile(mine, file.batches, file.start)
            elif (file.owner is not None or file.number in positions) and self._directory.move(file, mine):
                start = max(positions.get(file.number, 0), file.start)
                held[file.number] = ClaimedFile(mine, start, start)
        if lost := [number for number in positions if number not in held]:
            self.counts.lost += len(lost)
            logger.warning(
                "split %r of %s: files %s of the state are gone: they were delivered to the end after it was taken, or "
                "other consumers took them over when the lease expired",
                self.split.name,
                self.split.queue.path,
                lost,
            )
        # As the run went before: files that the state had begun, then those that were claimed after it.
        begun = [held.pop(number) for number in positions if number in held]
        self._resumed.extend([*begun, *(held[number] for number in sorted(held))])

    def commit(self, state: Mapping[str, Any]) -> None:
        for number in state["finished"]:
            claimed = self._finished.pop(number, None)
            if claimed is None and self._current is not None and self._current.file.number == number:
                claimed, self._current = self._current, None
            if claimed is not None:
                self._acknowledge(claimed)
        positions = dict(state["held"])
        for claimed in self._all():
            claimed.committed = max(claimed.committed, positions.get(claimed.file.number, 0))

    def close(self) -> None:
        """Acknowledge consumed files and release the rest, from the first batch not delivered (or not committed)."""
        self._finish()
        for claimed in self._all():
            start = claimed.committed if self.on_commit else claimed.next
            if not self._directory.move(claimed.file, claimed.file.released(start)):
                self.counts.lost += 1
        self._current = None
        self._resumed.clear()
        self._finished.clear()
        self._ready.clear()

    def _wait_for_files_of(self, state: Mapping[str, Any]) -> None:
        """Wait until files that a state has begun or finished are free, if a member that may be dead has claimed them.

        That happens when a run that had resumed from this state was killed, too: its claims become ours again, from the
        position of the state, and finished files are not read again. A member that is seen alive keeps its claims.
        """
        begun = {*state["finished"], *(number for number, _ in state["held"])}
        beats: dict[str, int | None] = {}
        while True:
            self._member.reap_if_due()
            files = [file for file in self._directory.files() if file.number in begun]
            owners = {file.owner for file in files if file.owner is not None} - {state["member"]}
            if not self.split.any_silent(owners, beats):
                return
            time.sleep(_POLL_SECONDS)

    def _take(self) -> ClaimedFile | None:
        if self._resumed:
            self._current = self._resumed.popleft()
        else:
            file = self.split.wait_for(self._claim, claims=True)
            self._current = None if file is None else ClaimedFile(file, file.start, file.start)
        return self._current

    def _all(self) -> list[ClaimedFile]:
        return [*([] if self._current is None else [self._current]), *self._resumed, *self._finished.values()]

    def _open(self, claimed: ClaimedFile) -> bool:
        """Open a file; False if it was set aside or taken over, which is counted."""
        try:
            claimed.opened = self.split.open(claimed.file)
        except FileNotFoundError:
            self._count_lost(claimed)
            return False
        if claimed.opened is None:
            self.counts.skipped += claimed.file.batches - claimed.next
        return claimed.opened is not None

    def _claim(self) -> QueueFile | None:
        """Claim the first ready file that no other consumer claims first."""
        self._lapses = self._member.lapses
        for listing in (False, True):
            if listing:
                self._ready.extend(file for file in self._directory.files() if file.owner is None)
            while self._ready:
                file = self._ready.popleft()
                mine = file.claimed(self._member.id)
                if self._directory.move(file, mine):
                    return mine
        return None

    def _finish(self) -> None:
        current = self._current
        if current is None or not current.finished:
            return
        self._current = None
        current.opened = None
        if self.on_commit:
            self._finished[current.file.number] = current
        else:
            self._acknowledge(current)

    def _acknowledge(self, claimed: ClaimedFile) -> None:
        if self._acknowledger.delete(claimed.file):
            self.counts.files += 1
        else:
            self._count_lost(claimed)

    def _count_lost(self, claimed: ClaimedFile) -> None:
        os.stat(self._directory.path)  # raises if the whole queue is gone
        self.counts.lost += 1
        logger.warning(
            "file %s of %s was taken over by another consumer: our lease expired",
            claimed.file.name,
            self._directory.path,
        )

    def _check_order(self) -> None:
        """Refuse to claim batches of a run that reads in strict order."""
        cursors = list_cursors(self._directory.cursors)
        if cursors:
            raise ConfigError(
                f"split {self.split.name!r} of {self.split.queue.path} is read in strict order ({len(cursors)} of "
                f"{cursors[0].world} ranks, done up to batch {min(cursor.done for cursor in cursors)}), and a consumer "
                'with order="any" would take its batches; pass order="strict", or, if that run is over, '
                f"{how_to_purge(self.split.queue.path)}"
            )
        self._order_checked = True

    def _check_lease(self) -> None:
        """After a pause in which the lease may have expired, stop delivering a file that others have claimed."""
        current = self._current
        if current is None or current.finished or not self._member.lapsed(self._lapses):
            return
        self._lapses = self._member.lapses
        if not self._directory.at(current.file).exists():
            self._count_lost(current)
            self._current = None
