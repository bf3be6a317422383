"""Files of batches into a queue, one number at a time, as long as there is room.

number = publisher.reserve()        # None while the backlog is full, or at the end
publisher.publish(number, batches)
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import ConfigError
from penstock.fsqueue.batch_file import Encoder, write
from penstock.fsqueue.cursors import all_cursors, done_floor, read_floor
from penstock.fsqueue.lanes import Lane, Lanes
from penstock.fsqueue.layout import Published, name_of_temporary, rename
from penstock.fsqueue.members import Membership
from penstock.fsqueue.queue import Queue, how_to_purge
from penstock.fsqueue.reaper import settle

__all__ = ["Limits", "Publisher"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may wait in a split: a provider that finds so much of it rests."""

    backlog_files: int = 64
    backlog_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("backlog_files", "backlog_bytes"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))


class Publisher:
    """One member's way of putting files into one split of a queue.

    `max_batches` ends the split. `durable` makes every file survive a power cut, not
    just the death of processes, for some milliseconds each.
    """

    def __init__(
        self,
        queue: Queue,
        split: str,
        member: Membership,
        *,
        limits: Limits | None = None,
        compression: str | None = None,
        durable: bool = False,
        max_batches: int | None = None,
    ) -> None:
        if max_batches is not None:
            _check_positive("max_batches", max_batches)
        self.queue, self.split, self.member = queue, split, member
        self.limits = limits or Limits()
        self.durable, self.max_batches = durable, max_batches
        self._encoder = Encoder(fingerprint=queue.fingerprint, split=split, compression=compression)
        self.directory = queue.split(split)
        self.lanes = Lanes(self.directory.lanes, queue.description.lanes)
        self.files = self.batches = self.bytes = 0
        self.backlog = 0
        """Files that waited when we looked last."""
        self.late = 0
        """Files that were made in vain: our lease ran out, and another provider made them."""
        self._last_size = 0
        self._ceiling = 0
        """How many files may have been made, by all providers, until it is time to look again."""

    @property
    def ended(self) -> bool:
        """Whether every number up to the end is published."""
        return self.lanes.ended(self.queue.description.batches_per_file)

    def set_end(self) -> None:
        """Tell the readers where the split ends, if it does.

        An end in the middle of a file stays: the batches that would have filled it up are not made.
        """
        old, per_file = self.lanes.end(), self.queue.description.batches_per_file
        if old is not None and old == self.max_batches:
            return
        made = max(lane.number + (lane.owner is not None) * self.lanes.count for lane in self.lanes.all())
        made = max(made - self.lanes.count + 1, 0) * per_file
        if self.max_batches is not None and made > self.max_batches:
            raise ConfigError(
                f"split {self.split!r} of {self.queue.path} was made up to batch {made} already, so it cannot end "
                f"after max_batches={self.max_batches}; give a larger number, none, or {how_to_purge(self.queue.path)}"
            )
        if old is not None and old != self.max_batches and old % per_file and self._has_begun(old // per_file):
            raise ConfigError(
                f"split {self.split!r} of {self.queue.path} was made to end after {old} batches, in the middle of a "
                f"file of {per_file}, so it cannot go on to max_batches={self.max_batches}; "
                f"{how_to_purge(self.queue.path)}"
            )
        self.lanes.set_end(self.max_batches)

    def batches_in(self, number: int) -> range:
        """The batches that file `number` holds."""
        per_file = self.queue.description.batches_per_file
        low, high = number * per_file, (number + 1) * per_file
        return range(low, high if self.max_batches is None else min(high, self.max_batches))

    def reserve(self) -> int | None:
        """A number that is ours to make now: the lowest there is. None if there is no room, or nothing left."""
        lanes = self._past_what_is_done_with(self.lanes.all())
        end = None if self.max_batches is None else -(-self.max_batches // self.queue.description.batches_per_file)
        free = [lane for lane in lanes if lane.owner is None and (end is None or lane.number < end)]
        if not free:
            return None
        # Made, or about to be: a lane's number says how often it was gone through.
        begun = sum(lane.number // self.lanes.count + (lane.owner is not None) for lane in lanes)
        if begun >= self._ceiling:
            making = sum(lane.owner is not None for lane in lanes)
            self._ceiling = begun - making + self._room()
            if begun >= self._ceiling and not self._is_next(free[0].number):
                return None
        for lane in free:
            if self.lanes.take(lane, self.member.id):
                return lane.number
        return None

    def publish(self, number: int, batches: Iterable[pa.RecordBatch], *, same_size: int | None = None) -> bool:
        """Make the batches of a number that was reserved visible, all at once; False if another has made it instead.

        `same_size` says that there are so many of them, none larger than the first, which saves memory and time.
        """
        encoded = self._encoder.encode(batches, number, same_size=same_size)
        target = self.directory.at(encoded.file)
        temporary = self.directory.path / name_of_temporary(f"{number:012d}", self.member.id)
        write(temporary, encoded.data, durable=self.durable, shown=target)
        # Our lease may have run out without our knowing. Who takes a lane over removes this file next, then looks for
        # the target: so either both of the following succeed, or nothing is published.
        ours = self.lanes.holds(number, self.member.id)
        if not ours or not rename(self.directory.path, temporary.name, target.name):
            temporary.unlink(missing_ok=True)
            os.stat(self.directory.lanes)  # raises if it is not the file alone that is gone
            self.late += 1
            return False
        self.lanes.advance(number, self.member.id)
        self.files += 1
        self.batches += encoded.file.batches
        self._last_size = encoded.data.size
        self.bytes += encoded.data.size
        self.member.done += encoded.file.batches
        return True

    def give_up(self, number: int) -> None:
        """The number will not be made by us, unless that has just been done."""
        if self.directory.path.is_dir():
            settle(self.directory, self.lanes, number, self.member.id)

    def _has_begun(self, number: int) -> bool:
        """Whether a number was taken, now or ever: its lane has an owner, or is past it."""
        return any(
            lane.number > number or (lane.number == number and lane.owner is not None)
            for lane in self.lanes.all()
            if (lane.number - number) % self.lanes.count == 0
        )

    def _room(self) -> int:
        """How many files may be made beside those that wait, if nobody makes any yet."""
        waiting = self._waiting()
        self.backlog = len(waiting)
        room = self.limits.backlog_files - len(waiting)
        if self.limits.backlog_bytes is not None:
            held = sum(self._size(self.directory.at(file)) for file in waiting)
            each = self._last_size or held // max(len(waiting), 1) or self.limits.backlog_bytes
            fit = (self.limits.backlog_bytes - held) // each
            room = min(room, fit if waiting else max(fit, 1))  # one file is let in whatever its size
        return room

    def _past_what_is_done_with(self, lanes: list[Lane]) -> list[Lane]:
        """The lanes, those moved on that are at numbers which readers in strict order are done with.

        So it is when a run goes on from its checkpoint on a queue that was purged.
        """
        cursors = all_cursors(self.directory.cursors)
        if not cursors:
            return lanes
        floor = done_floor(self.directory.cursors, cursors[0].world) // self.queue.description.batches_per_file
        behind = [lane for lane in lanes if lane.owner is None and lane.number < floor]
        for lane in behind:
            self.lanes.skip(lane, floor)
        return self.lanes.all() if behind else lanes

    def _is_next(self, number: int) -> bool:
        """Whether readers in strict order may be waiting for this number: then it is made, however much waits.

        That is so if nothing before it waits, and for all that the next step of all ranks may need: those that are
        ahead read no more until the others have theirs. A cursor may be behind its rank by a step, or by a file.
        """
        waiting = self._waiting()
        if not waiting or number < waiting[0].number:
            return True
        cursors = all_cursors(self.directory.cursors)
        if not cursors:
            return False
        needed = min(cursor.read for cursor in cursors) + 2 * max(cursor.world for cursor in cursors) - 1
        return number <= needed // self.queue.description.batches_per_file + 1

    def _waiting(self) -> list[Published]:
        """Files that nobody has taken, or read in strict order."""
        read = read_floor(self.directory.cursors) // self.queue.description.batches_per_file
        return [file for file in self.directory.files() if file.owner is None and file.number >= read]

    @staticmethod
    def _size(path: os.PathLike[str]) -> int:
        try:
            return os.stat(path).st_size
        except FileNotFoundError:
            return 0


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a positive whole number, got {value!r}")
