"""Reading a split in the order it was made, on one rank or many: a run can be repeated, and resumed to the batch.

Nobody claims files. The world's step s is the batches `start + s * world` to `start + (s + 1) * world - 1`, and rank
r takes the r-th of them. Each rank says in its cursor how far it is; a file is deleted once all ranks are done with it.
So the state is one number, the same on every rank, and another world size goes on from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from penstock.distributed.ranks import Rank
from penstock.errors import DataError, ResumeError
from penstock.fsqueue.backoff import Backoff
from penstock.fsqueue.batch_file import BatchFile
from penstock.fsqueue.cursors import RankCursors, done_floor
from penstock.fsqueue.layout import Published
from penstock.fsqueue.queue import how_to_purge
from penstock.fsqueue.rank_claims import RankClaim
from penstock.fsqueue.reaper import Acknowledger
from penstock.fsqueue.split_reader import Delivered, Split

__all__ = ["StrictReader"]


_LOOK_AROUND = 0.1
"""Seconds between two looks at what else may have happened, while a file is waited for."""


class StrictReader:
    """One rank's way through a split."""

    def __init__(self, split: Split, rank: Rank, *, on_commit: bool, every_rank: bool = False) -> None:
        self.split, self.rank, self.on_commit = split, rank, on_commit
        # With `every_rank` a step of the world is one batch, which all of them get.
        self._stride, self._offset = (1, 0) if every_rank else (rank.world_size, rank.rank)
        self.counts = split.counts
        self._per_file = split.queue.description.batches_per_file
        self._directory = split.queue.split(split.name)
        self._cursors = RankCursors(self._directory.cursors, rank)
        self._position: int | None = None
        """The first batch of the world's next step; None before the first."""
        self._done = 0
        self._known: dict[int, Published] = {}
        self._aside: dict[int, Published] = {}
        self._opened: tuple[int, BatchFile | None] | None = None
        self._end: int | None = None
        """Where the split ends, as far as was known when the file was opened."""
        self._acknowledger = Acknowledger(split.queue, split.name)
        self._deleted = 0
        self._next_look = -math.inf
        self._claim = RankClaim(split, rank)

    def next(self) -> Delivered | None:
        if self._position is None:
            self._start()
        self._claim.check()
        while self._position is not None:
            number, index = divmod(self._position + self._offset, self._per_file)
            if self._opened is None or self._opened[0] != number:
                self._enter_file(self._position)
                if self._is_behind_the_end(self._position) or not self._open(number):
                    return None
            if self._is_behind_the_end(self._position):
                return None
            assert self._opened is not None
            self._position += self._stride
            opened = self._opened[1]
            if opened is not None:
                self.counts.delivered += 1
                return Delivered(opened, index, number)
            self.counts.skipped += 1
        return None

    def state(self) -> dict[str, Any]:
        position = self._low() if self._position is None else self._position
        return {"position": position}

    def load(self, state: Mapping[str, Any], *, same_queue: bool = True) -> None:
        self._claim.take()  # one that may be dead is waited for, no longer than its lease
        position = int(state["position"])
        low = min([self._low(), *(file.number * self._per_file for file in self._directory.rejected()[:1])])
        if position < low:
            raise ResumeError(
                f"the state goes on with batch {position} of split {self.split.name!r}, and those below {low} were "
                "done with and deleted, by this run after the state was taken, or by another reader of the queue; "
                f"resume from a later state, or {how_to_purge(self.split.queue.path)}, and it makes them again"
            )
        self._opened, self._known, self._end = None, {}, self.split.lanes.end()
        # Loading is no commit: an earlier state may still be gone back to. But of a queue that was purged and made
        # again there is none, and nobody needs what lies before this one.
        self._start(position, done=low if self.on_commit and same_queue else position)

    def commit(self, state: Mapping[str, Any]) -> None:
        position = int(state["position"])
        if self._position is None:
            self._start()
        assert self._position is not None
        if position > self._position:
            raise ResumeError(
                f"commit is for a state of the past: it is at batch {position} of split {self.split.name!r}, "
                f"and the reader at {self._position}"
            )
        self._done = max(self._done, position)
        self._cursors.move(self._position, self._done)
        self._sweep()

    def close(self) -> None:
        if self._position is not None and self._claim.held:  # else another reader goes on from where we were
            if not self.on_commit:
                self._done = self._position
            self._cursors.move(self._position, self._done)
            self._sweep()
            self._mark_begun()
            if self.rank.world_size == 1 and self._done == self._position:
                self._cursors.end()  # nothing is to come again: the files say it all
        self._opened = None
        self._claim.release()

    def _start(self, position: int | None = None, done: int | None = None) -> None:
        """Begin at a position, or with the first batch that is not done with."""
        self._claim.take(self.split.timeout_seconds)
        position = self._low() if position is None else position
        self._position = position
        self._done = position if done is None else min(done, position)
        self._cursors.begin(position, self._done)

    def _enter_file(self, position: int) -> None:
        """Say that what lies behind us was read, and if nobody commits, that it is done with."""
        if not self.on_commit:
            self._done = position
        self._cursors.move(position, self._done)
        self._deleted = 0  # others may have made files that nobody needs any more
        self._sweep()
        self._end = self.split.lanes.end()

    def _is_behind_the_end(self, position: int) -> bool:
        """Whether the split ends before every rank has a batch. None gets one then: ranks stop after the same step."""
        return self._end is not None and position + self._stride > self._end

    def _open(self, number: int) -> bool:
        """Wait for a file and open it; False at the end. One that was put aside is passed over, if that was asked."""
        patience = Backoff(self.split.timeout_seconds, lambda: f"file {number} to be where it is listed")
        while True:
            file = self.split.wait_for(
                partial(self._find, number), at_end=self._at_end, missing=partial(self._what_is_missing, number)
            )
            if file is None:
                return False
            try:
                opened = self.split.open(file) if number in self._known else None
                break
            except FileNotFoundError:
                del self._known[number]  # another rank has renamed it
                patience.pause()
        if opened is None and self.split.on_bad == "raise":
            raise DataError(
                f"file {number} of split {self.split.name!r} was put aside, and strict order cannot do without it; "
                'on_bad="skip" goes on with the next one',
                file=str(self._directory.at(file)),
            )
        self._opened, self._end = (number, opened), self.split.lanes.end()
        return True

    def _at_end(self) -> bool:
        """Whether the split ends in front of us. A file before the end comes: whoever has it gives it back, or dies."""
        self._end = self.split.lanes.end()
        return self._position is not None and self._is_behind_the_end(self._position)

    def _what_is_missing(self, number: int) -> str:
        """For the message at the deadline."""
        owner = next((file.owner for file in self._directory.files() if file.number == number and file.owner), None)
        if owner is None:
            return self.split.what_is_missing()
        member = self.split.caretaker.watch.look(fresh=True).get(owner)
        lease = self.split.caretaker.watch.lease_seconds if member is None else member.lease_seconds
        return (
            f"file {number} of split {self.split.name!r} in {self.split.queue.path}, which consumer {owner} with "
            f'order="any" has taken: if it is dead, the file comes back {lease:g} s after its last sign of life, so '
            "pass a longer timeout_seconds; if it lives, close it, and let all consumers of a split have the same order"
        )

    def _find(self, number: int) -> Published | None:
        if number not in self._known:
            self._known = {file.number: file for file in self._directory.files() if file.owner is None}
            if number not in self._known and self.split.caretaker.watch.clock() >= self._next_look:
                self._next_look = self.split.caretaker.watch.clock() + _LOOK_AROUND
                self._aside = {file.number: file for file in self._directory.rejected()}
                self._check_not_gone(number)
                self._sweep()
        return self._known.get(number) or self._aside.get(number)

    def _check_not_gone(self, number: int) -> None:
        """Raises if the file was made, and is there no more."""
        lanes = self.split.lanes
        made = any(lane.number > number for lane in lanes.all() if (lane.number - number) % lanes.count == 0)
        if made and number not in self._aside and all(file.number != number for file in self._directory.files()):
            raise DataError(
                f"file {number} of split {self.split.name!r} in {self.split.queue.path} was made and is gone: a "
                'consumer with order="any" had it, or somebody deleted it; let all consumers of a split have the same '
                "order, and resume from a state that is not older than what was committed"
            )

    def _low(self) -> int:
        """The first batch that is not done with: of the first file that is there, or has still to be made."""
        made = min(lane.number for lane in self.split.lanes.all()) * self._per_file
        return min([made, *(file.number * self._per_file + file.start for file in self._directory.files()[:1])])

    def _mark_begun(self) -> None:
        """Note on the file in the middle of which the ranks stop where they did, for a reader that has no state."""
        floor = done_floor(self._directory.cursors, self.rank.world_size)
        number, start = divmod(floor, self._per_file)
        for file in self._directory.files():
            if file.number == number and file.owner is None and start > file.start:
                self._directory.move(file, file.given_back(start))

    def _sweep(self) -> None:
        """Delete the files that every rank is done with."""
        done = done_floor(self._directory.cursors, self.rank.world_size)
        at_the_end = self._end is not None and done >= self._end
        floor = done // self._per_file + (at_the_end and done % self._per_file > 0)  # the last file may be a short one
        if floor <= self._deleted:
            return
        for file in self._directory.files():
            if file.number < floor and file.owner is None and self._acknowledger.delete(file):
                self.counts.files += 1
        self._deleted = floor
