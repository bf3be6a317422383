"""Tidying up after the dead: what they had taken is given back, and what they half wrote is removed.

Every member does it in passing, while it waits and now and then while it works. It needs no agreement: each step is
one rename or one removal, and whoever comes second finds it done.
"""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import dataclass, field

from penstock.errors import DataError
from penstock.fsqueue.lanes import Lanes
from penstock.fsqueue.layout import Published, SplitDirectory, name_of_temporary
from penstock.fsqueue.members import MemberWatch
from penstock.fsqueue.queue import Queue

__all__ = ["Acknowledger", "Found", "LeaseReaper", "settle"]

logger = logging.getLogger(__name__)

_TRIES = 1000


@dataclass(slots=True)
class Found:
    """What was given back or removed."""

    claims: list[str] = field(default_factory=list)
    """Files that had been taken by a consumer that died: some of their batches may come a second time."""
    lanes: list[int] = field(default_factory=list)
    """Numbers that a provider had begun with when it died: they are made anew."""
    temporaries: list[str] = field(default_factory=list)
    members: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.claims or self.lanes or self.temporaries or self.members)


class LeaseReaper:
    """Looks after one queue, as one of its members."""

    def __init__(self, queue: Queue, watch: MemberWatch) -> None:
        self.queue, self.watch = queue, watch
        self.id = ""
        self.claims_returned = 0
        self._next = watch.clock() + watch.lease_seconds / 4

    @property
    def due(self) -> bool:
        """Whether some time has passed since the last round."""
        return self.watch.clock() >= self._next

    def round(self) -> Found:
        """Look at everything once. What its owner's lease has run out on is free again afterwards."""
        self._next = self.watch.clock() + self.watch.lease_seconds / 4
        self.id = f"k{secrets.token_hex(6)}"  # every time another: a forked process has a caretaker of its own
        found = Found()
        for split in self.queue.description.splits:
            directory = self.queue.split(split)
            self._free_claims(directory, found)
            self._free_lanes(directory, found)
            for name, owner in directory.temporaries():
                if self.watch.is_dead(owner):
                    (directory.path / name).unlink(missing_ok=True)
                    found.temporaries.append(name)
        # Last, so that whoever sees a member gone sees nothing of it left.
        for owner in list(self.watch.look()):
            if self.watch.is_dead(owner):
                self.watch.forget(owner)
                found.members.append(owner)
        self.claims_returned += len(found.claims)
        if found:
            logger.warning("%s: after the death of %s: %s", self.queue.path, found.members or "a member", _told(found))
        return found

    def _free_claims(self, directory: SplitDirectory, found: Found) -> None:
        for file in directory.files():
            if file.owner is not None and self.watch.is_dead(file.owner) and directory.move(file, file.lost()):
                found.claims.append(file.name)

    def _free_lanes(self, directory: SplitDirectory, found: Found) -> None:
        lanes = Lanes(directory.lanes, self.queue.description.lanes)
        for lane in lanes.all():
            if lane.owner is None or not self.watch.is_dead(lane.owner) or not lanes.take(lane, self.id):
                continue
            # The lane is ours, so its owner, if it is late rather than dead, begins to publish no more; and what it
            # had begun to publish it cannot end without this file.
            temporary = name_of_temporary(f"{lane.number:012d}", lane.owner)
            (directory.path / temporary).unlink(missing_ok=True)
            if settle(directory, lanes, lane.number, self.id):
                found.lanes.append(lane.number)


def settle(directory: SplitDirectory, lanes: Lanes, number: int, owner: str) -> bool:
    """The owner of a lane will make nothing: on to the next number, or True if this one has to be made anew."""
    # The file may have been published, by somebody who died before he could say so. Who acknowledges a file moves its
    # lane on first, so a file that is not there was never published. We look twice: one that is just being renamed can
    # be missed by a listing.
    if any(file.number == number for _ in range(2) for file in directory.files()):
        lanes.advance(number, owner)
        return False
    return lanes.release(number, owner)


class Acknowledger:
    """Deletes files that are done with."""

    def __init__(self, queue: Queue, split: str) -> None:
        self.directory = queue.split(split)
        self.lanes = Lanes(self.directory.lanes, queue.description.lanes)
        self._passed: dict[int, int] = {}
        """The number that each lane was seen at; lanes only go up."""

    def delete(self, file: Published) -> bool:
        """Delete a file; False if it is no longer there under the name we know."""
        self._move_lane(file.number)
        try:
            os.unlink(self.directory.at(file))
        except FileNotFoundError:
            return False
        return True

    def _move_lane(self, number: int) -> None:
        """Move the file's lane on, in case its provider died between publishing the file and doing so itself."""
        place = number % self.lanes.count
        # Until it is seen to be past the file: if another takes the lane over in between, it must not find the file
        # gone and the lane where it was, or the file would be made once more.
        for _ in range(_TRIES):
            if self._passed.get(place, 0) > number:
                return
            for lane in self.lanes.all():
                if lane.number == number:
                    self.lanes.advance(number, lane.owner)
                self._passed[lane.number % self.lanes.count] = lane.number
        raise DataError(
            f"the lane of file {number} does not move on; `penstock queue doctor` says what is wrong with the queue",
            file=str(self.lanes.path),
        )


def _told(found: Found) -> str:
    parts = [
        f"{len(found.claims)} files given back",
        f"{len(found.lanes)} numbers to be made anew",
        f"{len(found.temporaries)} unfinished files removed",
    ]
    return ", ".join(parts)
