"""Lease rule and reaping: members whose lease has expired, and the claims and lanes they held.

A member renames its file to the next heartbeat now and then (`penstock.fsqueue.members`). Every observer notes when,
by its own monotonic clock, it first saw a heartbeat. A member whose heartbeat has not changed for its lease is dead.
So clocks need not agree, and file times mean nothing.

Every member reaps while it waits and now and then while it works. It needs no agreement: each action is one rename or
one removal, and whoever comes second finds it done.
"""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import DataError
from penstock.fsqueue.layout import Lanes, Member, QueueFile, SplitDirectory, list_members, remove, temporary_name
from penstock.fsqueue.queue import Queue

logger = logging.getLogger(__name__)

SHORTEST_LEASE = 0.05
_TRIES = 1000


def is_expired(silent_seconds: float, lease_seconds: float) -> bool:
    """The lease rule: True if a member without a heartbeat for so long counts as dead, to itself and to others."""
    return silent_seconds > lease_seconds


def heartbeat_seconds(lease_seconds: float) -> float:
    """Time between two heartbeats: five in a lease."""
    return lease_seconds / 5


class MemberWatch:
    """Observer of the members of a queue: heartbeats, and when it first saw each."""

    def __init__(self, directory: Path, *, lease_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.directory, self.lease_seconds, self.clock = directory, lease_seconds, clock
        self._seen: dict[str, tuple[int | None, float]] = {}
        self._listed: dict[str, Member] = {}
        self._listed_at: float | None = None

    def members(self, *, fresh: bool = False) -> dict[str, Member]:
        """Listed members. The listing is repeated twice per heartbeat, or now if `fresh`."""
        now = self.clock()
        age = None if self._listed_at is None else now - self._listed_at
        if fresh or age is None or age > heartbeat_seconds(self.lease_seconds) / 2:
            self._listed, self._listed_at = list_members(self.directory), now
            for owner, member in self._listed.items():
                self._first_seen(owner, member.beat)
        return self._listed

    def beat_of(self, owner: str) -> int | None:
        """Heartbeat of a member; None if it is not listed."""
        member = self.members().get(owner)
        return None if member is None else member.beat

    def lease_of(self, owner: str) -> float:
        """Lease of a member; our own if it is not listed."""
        member = self._listed.get(owner)
        return self.lease_seconds if member is None else member.lease_seconds

    def is_dead(self, owner: str) -> bool:
        """True if the heartbeat of a member has not changed for its lease."""
        self.members()
        if not self._overdue(owner):
            return False
        self.members(fresh=True)  # we may have been suspended ourselves
        return self._overdue(owner)

    def forget(self, owner: str) -> None:
        """Remove the file of a dead member."""
        member = self._listed.pop(owner, None)
        if member is not None:
            (self.directory / member.name).unlink(missing_ok=True)

    def _overdue(self, owner: str) -> bool:
        member = self._listed.get(owner)
        since = self._first_seen(owner, None if member is None else member.beat)
        return is_expired(self.clock() - since, self.lease_of(owner))

    def _first_seen(self, owner: str, beat: int | None) -> float:
        seen = self._seen.get(owner)
        if seen is None or seen[0] != beat:
            seen = self._seen[owner] = (beat, self.clock())
        return seen[1]


@dataclass(slots=True)
class Reaped:
    """Claims, lanes and files of dead members that were released or removed."""

    claims: list[str] = field(default_factory=list)
    """Claimed files: some of their batches may be delivered twice."""
    lanes: list[int] = field(default_factory=list)
    """Numbers in production: another provider produces them."""
    temporaries: list[str] = field(default_factory=list)
    members: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.claims or self.lanes or self.temporaries or self.members)


class LeaseReaper:
    """Releases what dead members held."""

    def __init__(self, queue: Queue, watch: MemberWatch) -> None:
        self.queue, self.watch = queue, watch
        self.claims_returned = 0
        self._schedule()

    def _schedule(self) -> None:
        self._next = self.watch.clock() + self.watch.lease_seconds / 4

    @property
    def due(self) -> bool:
        """True if a quarter of a lease has passed since the last time."""
        return self.watch.clock() >= self._next

    def reap(self, *, alive: str | None = None) -> Reaped:
        """Release what members hold whose lease has expired; `alive` is the id of the caller.

        A starved process may see its own heartbeat late, but it is not dead.
        """
        self._schedule()

        @functools.cache
        def is_dead(member: str) -> bool:
            # Once for each member: if its lease expired after its files were looked at, it would be removed from the
            # list with files that are still claimed.
            return member != alive and self.watch.is_dead(member)

        owner = f"k{secrets.token_hex(6)}"  # new each time: a forked process has a reaper of its own
        reaped = Reaped()
        for split in self.queue.description.splits:
            directory = self.queue.split(split)
            for file in directory.files():
                if file.owner is not None and is_dead(file.owner) and directory.move(file, file.expired()):
                    reaped.claims.append(file.name)
            self._free_lanes(directory, owner, is_dead, reaped)
            for name, writer in directory.temporaries():
                if is_dead(writer):
                    (directory.path / name).unlink(missing_ok=True)
                    reaped.temporaries.append(name)
        # Members last: when one is gone, so is everything it held.
        for member in list(self.watch.members()):
            if is_dead(member):
                self.watch.forget(member)
                reaped.members.append(member)
        self.claims_returned += len(reaped.claims)
        if reaped:
            logger.warning(
                "%s: lease expired of %s; released %d claimed files and %d numbers, removed %d unfinished files",
                self.queue.path,
                reaped.members or "a member",
                len(reaped.claims),
                len(reaped.lanes),
                len(reaped.temporaries),
            )
        return reaped

    def _free_lanes(
        self, directory: SplitDirectory, owner: str, is_dead: Callable[[str], bool], reaped: Reaped
    ) -> None:
        lanes = self.queue.lanes(directory)
        for lane in lanes.all():
            if lane.owner is None or not is_dead(lane.owner) or not lanes.take(lane, owner):
                continue
            # The lane is ours: its owner, if it is late rather than dead, starts no further publication, and cannot
            # finish one without this file.
            (directory.path / temporary_name(f"{lane.number:012d}", lane.owner)).unlink(missing_ok=True)
            if settle(directory, lanes, lane.number, owner):
                reaped.lanes.append(lane.number)


def settle(directory: SplitDirectory, lanes: Lanes, number: int, owner: str) -> bool:
    """Advance the lane of a number if its file is published; else release it and return True."""
    # The owner may have crashed after publishing the file and before advancing the lane. Readers advance the lane
    # before they delete a file, so a missing file was never published. A listing can miss a file that is being renamed:
    # list twice.
    if any(file.number == number for _ in range(2) for file in directory.files()):
        lanes.advance(number, owner)
        return False
    return lanes.release(number, owner)


class Acknowledger:
    """Deletes consumed files."""

    def __init__(self, queue: Queue, split: str) -> None:
        self.directory = queue.split(split)
        self.lanes = queue.lanes(self.directory)
        self._positions: dict[int, int] = {}  # last known number of each lane; lanes only move up

    def delete(self, file: QueueFile) -> bool:
        """Delete a file; False if it is gone or has another name."""
        self._advance_lane(file.number)
        return remove(self.directory.where(file))

    def _advance_lane(self, number: int) -> None:
        """Advance the lane of a file whose provider died between publishing it and doing so."""
        place = number % self.lanes.count
        # Until the lane is seen past the file: a member that takes the lane over must not find the file gone and the
        # lane unmoved, or it would produce the file again.
        for _ in range(_TRIES):
            # A lane that is at its next number and free, as most are, is found without a listing.
            if self._positions.get(place, 0) > number or self.lanes.advanced(number):
                return
            for lane in self.lanes.all():
                if lane.number == number:
                    self.lanes.advance(number, lane.owner)
                self._positions[lane.number % self.lanes.count] = lane.number
        raise DataError(
            f"the lane of file {number} does not advance; run `penstock queue doctor` to find the cause",
            file=str(self.lanes.path),
        )
