"""Reader for strict order: batches in the order of their numbers, on one rank or many, so that a run can be repeated.

No file is claimed. Step s of W ranks is the batches `start + s * W` to `start + (s + 1) * W - 1`; rank r takes the r-th
of them. Each rank keeps its position in a cursor; a file is deleted once all ranks are done with it. The state is one
number, the same on every rank, and can be resumed with another number of ranks.

A rank has one reader at a time. While it reads, an empty file in `cursors/` says so:

    r0of2.by-c3f09a2b7c41         consumer c3f09a2b7c41 reads rank 0 of 2
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from penstock.distributed.ranks import Rank
from penstock.errors import ConfigError, DataError, ResumeError, StalledError
from penstock.fsqueue.batch_file import BatchFile
from penstock.fsqueue.layout import QueueFile, RankCursor, list_cursors, rename
from penstock.fsqueue.leases import Acknowledger
from penstock.fsqueue.members import Backoff, facts_of, is_running
from penstock.fsqueue.queue import how_to_purge
from penstock.fsqueue.split_reader import Delivered, SplitFiles

_CLAIM = re.compile(r"r(\d+)of(\d+)\.by-([\w-]+)")
# Pause between two checks of what else may have happened, while waiting for a file.
_CHECK_SECONDS = 0.1
# Listings in which a member has to be missing: one can miss a file that is being renamed.
_LISTINGS = 3


class OrderedReader:
    """Position of one rank in a split. With `every_rank` all ranks read every batch."""

    def __init__(self, split: SplitFiles, rank: Rank, *, on_commit: bool, every_rank: bool = False) -> None:
        self.split, self.rank, self.on_commit = split, rank, on_commit
        self._stride, self._offset = (1, 0) if every_rank else (rank.world_size, rank.rank)
        self.counts = split.counts
        self._directory, self._per_file = split.directory, split.queue.description.batches_per_file
        self._cursor: RankCursor | None = None
        self._position: int | None = None  # first batch of the next step; None before the start
        self._done = 0
        self._ready: dict[int, QueueFile] = {}
        self._rejected: dict[int, QueueFile] = {}
        self._opened: tuple[int, BatchFile | None] | None = None
        self._end: int | None = None  # end of the split, as known when the file was opened
        self._acknowledger = Acknowledger(split.queue, split.name)
        self._deleted = 0
        self._next_check = -math.inf
        self._claim = RankClaim(split, rank)

    def next(self) -> Delivered | None:
        if self._position is None:
            self._start()
        self._claim.check()
        while self._position is not None:
            number, index = divmod(self._position + self._offset, self._per_file)
            if self._opened is None or self._opened[0] != number:
                self._enter_file(self._position)
                if self._is_past_end(self._position) or not self._open(number):
                    return None
            if self._is_past_end(self._position):
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
        return {"position": self._first_available() if self._position is None else self._position}

    def load(self, state: Mapping[str, Any], *, same_queue: bool = True) -> None:
        self._claim.take()  # waits for a reader that may be dead, no longer than its lease
        position = int(state["position"])
        low = min([self._first_available(), *(file.number * self._per_file for file in self._directory.rejected()[:1])])
        if position < low:
            raise ResumeError(
                f"the state resumes at batch {position} of split {self.split.name!r}, and batches below {low} are "
                "deleted: this run committed a later state, or another reader consumed them; resume from a later "
                f"state, or {how_to_purge(self.split.queue.path)}, which produces them again"
            )
        self._opened, self._ready, self._end = None, {}, self.split.lanes.end()
        # Loading does not commit: an earlier state can still be loaded. A queue that was purged and created again has
        # no earlier state, and nobody needs the batches before this one.
        self._start(position, done=max(low, self._committed(position)) if self.on_commit and same_queue else position)

    def commit(self, state: Mapping[str, Any]) -> None:
        position = int(state["position"])
        if self._position is None:
            self._start()
        assert self._position is not None
        if position > self._position:
            raise ResumeError(
                f"cannot commit a state of the future: batch {position} of split {self.split.name!r}, the reader is at "
                f"{self._position}"
            )
        self._done = max(self._done, position)
        self._move_cursor(self._position, self._done)
        self._delete_consumed()

    def close(self) -> None:
        if self._position is not None and self._claim.held:  # else another reader has continued from our position
            if not self.on_commit:
                self._done = self._position
            self._move_cursor(self._position, self._done)
            self._delete_consumed()
            self._mark_partly_read()
            if self.rank.world_size == 1 and self._done == self._position and self._cursor is not None:
                # Nothing has to be delivered again: the files hold the whole state.
                (self._directory.cursors / self._cursor.name).unlink(missing_ok=True)
                self._cursor = None
        self._opened = None
        self._claim.release()

    def _start(self, position: int | None = None, done: int | None = None) -> None:
        """Start at a position, or at the first batch that is not consumed."""
        self._claim.take(self.split.timeout_seconds)
        self._position = self._first_available() if position is None else position
        self._done = self._position if done is None else min(done, self._position)
        # Cursors of another number of ranks, or done with more than this run has read, belong to another run: files
        # could be deleted that a rank has yet to read. Cursors of this run come back when their ranks move; until all
        # are there nothing is deleted.
        for cursor in map(RankCursor.parse, os.listdir(self._directory.cursors)):
            if cursor is not None and (
                cursor.rank == self.rank.rank or cursor.world != self.rank.world_size or cursor.done > self._position
            ):
                (self._directory.cursors / cursor.name).unlink(missing_ok=True)
        self._cursor = None
        self._move_cursor(self._position, self._done)

    def _committed(self, position: int) -> int:
        """Batch that this rank had committed up to, by the cursor that a reader before left; 0 if beyond `position`."""
        mine = (self.rank.rank, self.rank.world_size)
        done = (cursor.done for cursor in list_cursors(self._directory.cursors) if (cursor.rank, cursor.world) == mine)
        return max((each for each in done if each <= position), default=0)

    def _move_cursor(self, read: int, done: int) -> None:
        new = RankCursor(self.rank.rank, self.rank.world_size, read, done)
        if self._cursor is None or not rename(self._directory.cursors, self._cursor.name, new.name):
            (self._directory.cursors / new.name).touch()
        self._cursor = new

    def _enter_file(self, position: int) -> None:
        """Move the cursor: what comes before this file has been delivered."""
        if not self.on_commit:
            self._done = position
        self._move_cursor(position, self._done)
        self._deleted = 0  # others may have published files that no rank needs any more
        self._delete_consumed()
        self._end = self.split.lanes.end()

    def _is_past_end(self, position: int) -> bool:
        """True if the split ends before every rank has a batch. Then no rank gets one: all stop after the same step."""
        return self._end is not None and position + self._stride > self._end

    def _open(self, number: int) -> bool:
        """Wait for a file and open it; False at the end. With `on_error="skip"`, one that was set aside is skipped."""
        backoff = Backoff(self.split.timeout_seconds, lambda: f"file {number}, which is listed and cannot be opened")
        while True:
            file = self.split.wait_for(
                partial(self._find, number), at_end=self._at_end, describe=partial(self._describe_missing, number)
            )
            if file is None:
                return False
            try:
                opened = self.split.open(file) if number in self._ready else None
                break
            except FileNotFoundError:
                del self._ready[number]  # another rank has renamed it
                backoff.pause()
        if opened is None and self.split.on_error == "raise":
            raise DataError(
                f"file {number} of split {self.split.name!r} was set aside, and strict order needs it; "
                'on_error="skip" continues with the next one',
                file=str(self._directory.at(file)),
            )
        self._opened, self._end = (number, opened), self.split.lanes.end()
        return True

    def _at_end(self) -> bool:
        """True if the split ends at our position. A missing file before the end comes back: it is claimed."""
        self._end = self.split.lanes.end()
        return self._position is not None and self._is_past_end(self._position)

    def _describe_missing(self, number: int) -> str:
        owner = next((file.owner for file in self._directory.files() if file.number == number and file.owner), None)
        if owner is None:
            return self.split.describe_missing()
        self.split.member.watch.members(fresh=True)
        return (
            f"file {number} of split {self.split.name!r} in {self.split.queue.path}, which consumer {owner} with "
            f'order="any" has claimed: if it is dead, the file is released {self.split.member.watch.lease_of(owner):g} '
            "s after its last heartbeat, so pass a longer timeout_seconds; if it lives, close it, and use one order "
            "for all consumers of a split"
        )

    def _find(self, number: int) -> QueueFile | None:
        if number not in self._ready:
            self._ready = {file.number: file for file in self._directory.files() if file.owner is None}
            if number not in self._ready and self.split.member.clock() >= self._next_check:
                self._next_check = self.split.member.clock() + _CHECK_SECONDS
                self._rejected = {file.number: file for file in self._directory.rejected()}
                self._check_not_gone(number)
                self._delete_consumed()
        return self._ready.get(number) or self._rejected.get(number)

    def _check_not_gone(self, number: int) -> None:
        """Raise if the file was published and does not exist any more."""
        if (
            self.split.lanes.passed(number)
            and number not in self._rejected
            and all(file.number != number for file in self._directory.files())
        ):
            raise DataError(
                f"file {number} of split {self.split.name!r} in {self.split.queue.path} was published and is gone: a "
                'consumer with order="any" consumed it, or somebody deleted it; use one order for all consumers of a '
                "split, and resume from a state that is not older than the last commit"
            )

    def _first_available(self) -> int:
        """First batch that is not consumed: of the first file, published or not, or set aside right before it."""
        unpublished = min(lane.number for lane in self.split.lanes.all()) * self._per_file
        first = min([unpublished, *(file.number * self._per_file + file.start for file in self._directory.files()[:1])])
        set_aside = {file.number for file in self._directory.rejected()}
        while first % self._per_file == 0 and first // self._per_file - 1 in set_aside:
            first -= self._per_file
        return first

    def _mark_partly_read(self) -> None:
        """Write the position into the name of the file where the ranks stop, for a reader without a state."""
        number, start = divmod(self._directory.done_floor(self.rank.world_size), self._per_file)
        for file in self._directory.files():
            if file.number == number and file.owner is None and start > file.start:
                self._directory.move(file, file.released(start))

    def _delete_consumed(self) -> None:
        """Delete the files that every rank is done with."""
        done = self._directory.done_floor(self.rank.world_size)
        at_the_end = self._end is not None and done >= self._end
        floor = done // self._per_file + (at_the_end and done % self._per_file > 0)  # the last file may be short
        if floor <= self._deleted:
            return
        for file in self._directory.files():
            if file.number < floor and file.owner is None and self._acknowledger.delete(file):
                self.counts.files += 1
        self._deleted = floor


class _Claim(NamedTuple):
    rank: Rank
    owner: str

    @property
    def name(self) -> str:
        return f"r{self.rank.rank}of{self.rank.world_size}.by-{self.owner}"


def is_cursor_name(name: str) -> bool:
    """True if a name in `cursors/` is a cursor or the claim of a reader."""
    return RankCursor.parse(name) is not None or _CLAIM.fullmatch(name) is not None


class RankClaim:
    """Claim of one reader on a rank of a split.

    The claim is written before those of others are read, so of two readers at least one sees the other.
    """

    def __init__(self, split: SplitFiles, rank: Rank) -> None:
        self.split, self.rank = split, rank
        self._member, self._watch = split.member, split.member.watch
        self._directory = split.directory.cursors
        self._name: str | None = None
        self._lapses = 0
        self._beats: dict[str, int | None] = {}  # heartbeat at which each other reader was first seen

    def take(self, timeout_seconds: float | None = None) -> None:
        """Claim the rank, waiting for the lease of a reader that may be dead; a second call does nothing.

        Raises ConfigError while another reader lives, and StalledError if that is not known in time.
        """
        if self._name is not None:
            return
        name = _Claim(self.rank, self._member.id).name
        (self._directory / name).touch()
        try:
            others: list[_Claim] = []
            backoff = Backoff(timeout_seconds, lambda: self._describe_wait(others[0]))
            while others := [other for other in self._conflicts() if not self._is_gone(other)]:
                for other in others:
                    beat = self._watch.beat_of(other.owner)
                    if self._beats.setdefault(other.owner, beat) != beat or self._runs_here(other):
                        raise ConfigError(self._describe_conflict(other))
                backoff.pause()
        except BaseException:
            (self._directory / name).unlink(missing_ok=True)
            raise
        self._name, self._lapses = name, self._member.lapses

    def check(self) -> None:
        """Raise StalledError if our lease has expired and another reader has the rank."""
        if self._name is None or not self._member.lapsed(self._lapses):
            return
        self._lapses = self._member.lapses
        if not self.held:
            raise StalledError(
                f"{self._what} was taken over by another reader: this one, {self._member.id}, had no heartbeat for "
                f"longer than its lease of {self._member.lease_seconds:g} s; pass a longer lease_seconds, or end "
                "one of them"
            )

    @property
    def held(self) -> bool:
        return self._name is not None and (self._directory / self._name).exists()

    def release(self) -> None:
        """Let others read the rank; a second call does nothing."""
        name, self._name = self._name, None
        if name is not None:
            (self._directory / name).unlink(missing_ok=True)

    def _conflicts(self) -> list[_Claim]:
        """Claims on the same rank, or of another number of ranks."""
        found = [
            _Claim(Rank(int(claim[1]), int(claim[2])), claim[3])
            for claim in map(_CLAIM.fullmatch, os.listdir(self._directory))
            if claim is not None and claim[3] != self._member.id
        ]
        return [other for other in found if other.rank == self.rank or other.rank.world_size != self.rank.world_size]

    def _is_gone(self, other: _Claim) -> bool:
        """True if a reader has left or died; its claim is then removed."""
        listed = any(other.owner in self._watch.members(fresh=True) for _ in range(_LISTINGS))
        gone = not listed or self._watch.is_dead(other.owner) or self._runs_here(other) is False
        if gone:
            (self._directory / other.name).unlink(missing_ok=True)
        return gone

    def _facts(self, other: _Claim) -> dict[str, Any]:
        member = self._watch.members().get(other.owner)
        return {} if member is None else facts_of(self.split.queue.members, member)

    def _runs_here(self, other: _Claim) -> bool | None:
        """True if its process runs on this machine; None if that cannot be seen."""
        return is_running(self._facts(other))

    @property
    def _what(self) -> str:
        return (
            f"rank {self.rank.rank} of {self.rank.world_size} of split {self.split.name!r} in {self.split.queue.path}"
        )

    def _describe_conflict(self, other: _Claim) -> str:
        facts = self._facts(other)
        process = f" (process {facts['pid']} on {facts['host']}, since {facts['since']})" if "pid" in facts else ""
        as_rank = "" if other.rank == self.rank else f" as rank {other.rank.rank} of {other.rank.world_size}"
        return (
            f"{self._what} is read{as_rank} by {other.owner}{process}, and two readers in strict order would both get "
            "its batches; close that one first, give each reader a rank of its own with rank= and world_size=, or pass "
            'order="any" to share the queue'
        )

    def _describe_wait(self, other: _Claim) -> str:
        return (
            f"a heartbeat of {other.owner}, which reads {self._what} and may be dead: that is known "
            f"{self._watch.lease_of(other.owner):g} s after its last heartbeat, so pass a longer timeout_seconds"
        )
