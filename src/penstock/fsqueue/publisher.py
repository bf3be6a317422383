"""Publisher: writes batch files into a split, as long as the backlog has room.

number = publisher.reserve()        # None while the backlog is full, or at the end
publisher.publish(number, batches)
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import ConfigError
from penstock.files.atomic import sync_directory
from penstock.fsqueue.batch_file import Arrays, BatchColumns, EncodedBatch, Encoder, write
from penstock.fsqueue.layout import Lane, QueueFile, list_cursors, remove, rename, temporary_name
from penstock.fsqueue.leases import settle
from penstock.fsqueue.members import QueueMember
from penstock.fsqueue.queue import how_to_purge
from penstock.memory.budget import parse_bytes

_KNOWN_FILES, _KNOWN_SECONDS = 8, 0.05
"""Files that one listing of the lanes serves, and for how long. A number that becomes free meanwhile waits for them."""
_PART_OF_ROOM = 8
"""Part of the room in the backlog that one listing may fill: eight providers can do so at once."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest backlog of a split: providers pause while it is full."""

    backlog_files: int = 64
    backlog_bytes: int | str | None = None

    def __post_init__(self) -> None:
        check_positive("backlog_files", self.backlog_files)
        check_positive("backlog_bytes", self.most_bytes)

    @property
    def most_bytes(self) -> int | None:
        """`backlog_bytes` as a number."""
        if self.backlog_bytes is None:
            return None
        try:
            return parse_bytes(self.backlog_bytes)
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"backlog_bytes: {error}") from None


def check_positive(name: str, value: int | None) -> None:
    """Raise ConfigError for anything but a positive integer or None."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{name} must be a positive integer, got {value!r}")


class Publisher:
    """Writer of one member into one split. `max_batches` ends the split."""

    def __init__(
        self,
        member: QueueMember,
        split: str,
        *,
        limits: Limits | None = None,
        compression: str | None = None,
        max_batches: int | None = None,
    ) -> None:
        check_positive("max_batches", max_batches)
        self.queue, self.split, self.member = member.queue, split, member
        self.limits, self.max_batches = limits or Limits(), max_batches
        self._encoder = Encoder(fingerprint=self.queue.fingerprint, split=split, compression=compression)
        self.directory = self.queue.split(split)
        self.lanes = self.queue.lanes(self.directory)
        self.files = self.batches = self.bytes = 0
        self.backlog = 0
        """Ready files at the last look."""
        self.late = 0
        """Files produced in vain: our lease expired, and another provider produced them."""
        self._last_size = 0
        self._next_look = 0  # number of files, produced by all providers, at which to look at the backlog again
        self._sizes: dict[int, int] = {}  # bytes of each ready file, by number
        self._idle: deque[int] = deque()  # free numbers that may be taken without another listing
        self._listed_at = 0.0

    @property
    def ended(self) -> bool:
        """True if every file up to the end is published."""
        return self.lanes.ended(self.queue.description.batches_per_file)

    def set_end(self) -> None:
        """Make `max_batches` the end of the split.

        An end in the middle of a file is final: the batches that would fill that file are not produced.
        """
        old, per_file = self.lanes.end(), self.queue.description.batches_per_file
        if old is not None and old == self.max_batches:
            return
        produced = self.lanes.reserved_end() * per_file
        if self.max_batches is not None and produced > self.max_batches:
            raise ConfigError(
                f"split {self.split!r} of {self.queue.path} already has batches up to {produced}, so it cannot end "
                f"after max_batches={self.max_batches}; use a larger number or none, or {how_to_purge(self.queue.path)}"
            )
        if old is not None and old % per_file and self._has_begun(old // per_file):
            raise ConfigError(
                f"split {self.split!r} of {self.queue.path} ends after {old} batches, in the middle of a file of "
                f"{per_file}, so it cannot continue to max_batches={self.max_batches}; {how_to_purge(self.queue.path)}"
            )
        self.lanes.set_end(self.max_batches)

    def batches_in(self, number: int) -> range:
        """Batches of file `number`."""
        per_file = self.queue.description.batches_per_file
        low, high = number * per_file, (number + 1) * per_file
        return range(low, high if self.max_batches is None else min(high, self.max_batches))

    def reserve(self) -> int | None:
        """Reserve the lowest free number; None if the backlog is full, or nothing is left to produce."""
        if self._idle and time.monotonic() - self._listed_at < _KNOWN_SECONDS:
            number = self._idle.popleft()
            if self.lanes.take(Lane(number), self.member.id):
                return number
        self._idle.clear()
        self._listed_at = time.monotonic()
        lanes = self._skip_consumed(self.lanes.all())
        end = None if self.max_batches is None else -(-self.max_batches // self.queue.description.batches_per_file)
        idle = [lane for lane in lanes if lane.owner is None]
        if not idle or (end is not None and idle[0].number >= end):
            return None
        # A lane's number tells how many of its files were produced.
        producing = len(lanes) - len(idle)
        begun = sum([lane.number // self.lanes.count for lane in lanes]) + producing
        if begun >= self._next_look:
            ready = self._ready()
            self._next_look = begun - producing + self._room(ready)
            if begun >= self._next_look and not self._is_needed(idle[0].number, ready):
                return None
        free = [lane.number for lane in idle if end is None or lane.number < end]
        for place, number in enumerate(free, 1):
            if self.lanes.take(Lane(number), self.member.id):
                more = min((self._next_look - begun - 1) // _PART_OF_ROOM, _KNOWN_FILES - 1)
                self._idle.extend(free[place : place + max(more, 0)])
                return number
        return None

    def publish(self, number: int, batches: Iterable[pa.RecordBatch]) -> bool:
        """Write and publish the batches of a reserved number; False if another provider has produced it."""
        return self._publish(self._encoder.encode(batches, number))

    def publish_arrays(self, number: int, batches: Iterable[Arrays], count: int, columns: BatchColumns) -> bool:
        """The same with `count` batches of arrays, which have the same number of rows."""
        return self._publish(self._encoder.encode_arrays(batches, number, count, columns))

    def _publish(self, encoded: EncodedBatch) -> bool:
        number, durable = encoded.file.number, self.member.options.durable
        target = self.directory.where(encoded.file)
        temporary = temporary_name(f"{number:012d}", self.member.id)
        path = f"{self.directory.path}/{temporary}"
        write(path, encoded.data, durable=durable, shown=target)
        # Our lease may have expired unnoticed. Whoever takes the lane over removes the temporary file next, then looks
        # for the target: either both of the following succeed, or nothing is published.
        ours = self.lanes.holds(number, self.member.id)
        if not ours or not rename(self.directory.path, temporary, encoded.file.name):
            remove(path)
            os.stat(self.directory.lanes)  # raises if the whole queue is gone
            self.late += 1
            return False
        if durable:
            sync_directory(self.directory.path)  # first: a lane that is past a file that is gone would lose its batches
        self.lanes.advance(number, self.member.id)
        self._last_size = encoded.data.size
        self.files += 1
        self.batches += encoded.file.batches
        self.bytes += encoded.data.size
        self.member.done += encoded.file.batches
        return True

    def give_up(self, number: int) -> None:
        """Free a reserved number, unless its file is published."""
        if self.directory.path.is_dir():
            settle(self.directory, self.lanes, number, self.member.id)

    def _has_begun(self, number: int) -> bool:
        held = any(lane.number == number and lane.owner is not None for lane in self.lanes.all())
        return held or self.lanes.passed(number)

    def _room(self, ready: list[QueueFile]) -> int:
        """Number of files that fit into the backlog."""
        self.backlog = len(ready)
        room = self.limits.backlog_files - len(ready)
        if (most := self.limits.most_bytes) is not None:
            known = self._sizes  # no file changes its size
            self._sizes = {f.number: known.get(f.number) or _size(self.directory.where(f)) for f in ready}
            used = sum(self._sizes.values())
            each = self._last_size or used // max(len(ready), 1) or most
            fit = (most - used) // each
            room = min(room, fit if ready else max(fit, 1))  # an empty backlog admits one file of any size
        return room

    def _skip_consumed(self, lanes: list[Lane]) -> list[Lane]:
        """Advance free lanes past the files that all ranks in strict order are done with.

        That happens when a run resumes from its checkpoint on a queue that was purged.
        """
        cursors = list_cursors(self.directory.cursors)
        if not cursors:
            return lanes
        floor = self.directory.done_floor(cursors[0].world) // self.queue.description.batches_per_file
        consumed = [lane for lane in lanes if lane.owner is None and lane.number < floor]
        for lane in consumed:
            self.lanes.skip(lane, floor)
        return self.lanes.all() if consumed else lanes

    def _is_needed(self, number: int, ready: list[QueueFile]) -> bool:
        """True if readers in strict order may wait for this file: it is produced even if the backlog is full.

        That holds if no ready file comes before it, and for every file of the next step of all ranks: ranks that are
        ahead wait for the others. A cursor may lag behind its rank by a step, or by a file.
        """
        if not ready or number < ready[0].number:
            return True
        cursors = list_cursors(self.directory.cursors)
        if not cursors:
            return False
        needed = min(cursor.read for cursor in cursors) + 2 * max(cursor.world for cursor in cursors) - 1
        return number <= needed // self.queue.description.batches_per_file + 1

    def _ready(self) -> list[QueueFile]:
        """Backlog: files that are neither claimed nor read in strict order."""
        floor = self.directory.read_floor() // self.queue.description.batches_per_file
        return [file for file in self.directory.files() if file.owner is None and file.number >= floor]


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
