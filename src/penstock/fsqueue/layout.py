"""Layout of a queue directory, and the state that the names of its files hold.

    queue/
      queue.json      metadata, settings, and the fingerprint of both, which every batch file carries
      members/        one file per live provider or consumer: its id, lease, heartbeat and batch count
        c3f09a2b7c41~l30~b17~d4242
      train/          one directory per split
        000000000042-n8-s0-r0-1f83d9abfb41bd6b.arrow                  file 42: eight batches, ready
        000000000043-n8-s0-r0-5be0cd19137e2179.arrow.by-c3f09a2b7c41  file 43, claimed by a consumer
        lanes/        file numbers to produce, and who produces them (`Lanes`)
        cursors/      position of each rank in strict order, and its reader (`penstock.fsqueue.ordered_reader`)
          r0of2~read1600~done1536

Every change of state is a rename within one directory: each process, on every file system, sees the old name or the
new one, and of two processes that rename the same file one finds it gone.
"""

from __future__ import annotations

import functools
import operator
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from penstock.files.listing import PathLike

_FILE = re.compile(r"(\d{12,})-n(\d+)-s(\d+)-r(\d+)-([0-9a-f]{16})\.arrow(?:\.by-([\w-]+))?")
_TEMPORARY = re.compile(r"\.[\w-]+~([\w-]+)\.tmp")
_REJECTED = ".bad"
_MEMBER = re.compile(r"([\w-]+)~l([\d.]+)~b(\d+)~d(\d+)")
_CURSOR = re.compile(r"r(\d+)of(\d+)~read(\d+)~done(\d+)")
_KNOWN_NAMES = 1 << 12
"""Names whose meaning is remembered: of two listings, one after the other, most names are the same."""


@dataclass(frozen=True, slots=True)
class QueueFile:
    """Name of a published batch file."""

    number: int
    batches: int
    checksum: str
    start: int = 0
    """First batch that is not delivered yet."""
    returns: int = 0
    """Number of leases on it that expired: some of its batches may have been delivered before."""
    owner: str | None = None
    """Consumer that has claimed it; None if it is ready."""

    @property
    def name(self) -> str:
        ready = f"{self.number:012d}-n{self.batches}-s{self.start}-r{self.returns}-{self.checksum}.arrow"
        return ready if self.owner is None else f"{ready}.by-{self.owner}"

    @staticmethod
    @functools.lru_cache(_KNOWN_NAMES)
    def parse(name: str) -> QueueFile | None:
        """The file of a name; None for any other name."""
        found = _FILE.fullmatch(name)
        if found is None:
            return None
        number, batches, start, returns, checksum, owner = found.groups()
        return QueueFile(int(number), int(batches), checksum, int(start), int(returns), owner)

    def claimed(self, owner: str) -> QueueFile:
        return QueueFile(self.number, self.batches, self.checksum, self.start, self.returns, owner)

    def released(self, start: int) -> QueueFile:
        """Ready again, from batch `start` on."""
        return replace(self, owner=None, start=start)

    def expired(self) -> QueueFile:
        """Ready again, because the lease of its owner has expired."""
        return replace(self, owner=None, returns=self.returns + 1)


@dataclass(frozen=True)
class SplitDirectory:
    """Directory of one split."""

    path: Path

    @functools.cached_property
    def lanes(self) -> Path:
        return self.path / "lanes"

    @functools.cached_property
    def cursors(self) -> Path:
        return self.path / "cursors"

    def names(self) -> list[str]:
        return os.listdir(self.path)

    def files(self) -> list[QueueFile]:
        """Published files by number, claimed ones included."""
        # A file that is renamed during a listing can be missed or listed twice. Nothing is decided by a listing alone.
        found = {(file.number, file.owner): file for file in map(QueueFile.parse, self.names()) if file is not None}
        return sorted(found.values(), key=operator.attrgetter("number"))

    def unknown_names(self) -> Iterator[str]:
        """Names that the queue did not make."""
        for name in self.names():
            known = QueueFile.parse(name.removesuffix(_REJECTED)) or _TEMPORARY.fullmatch(name)
            if name not in ("lanes", "cursors") and known is None:
                yield name

    def temporaries(self) -> Iterator[tuple[str, str]]:
        """`(name, owner)` of unfinished files."""
        for name in self.names():
            if found := _TEMPORARY.fullmatch(name):
                yield name, found[1]

    def where(self, file: QueueFile) -> str:
        """Path of a file, for calls of the system."""
        return f"{self.path}/{file.name}"

    def rejected(self) -> list[QueueFile]:
        """Unreadable files that were set aside."""
        found = (QueueFile.parse(name.removesuffix(_REJECTED)) for name in self.names() if name.endswith(_REJECTED))
        return sorted((file for file in found if file is not None), key=lambda file: file.number)

    def reject(self, file: QueueFile) -> Path:
        """Set an unreadable file aside, under a name that no reader claims."""
        rename(self.path, file.name, file.name + _REJECTED)
        return self.path / (file.name + _REJECTED)

    def at(self, file: QueueFile) -> Path:
        return self.path / file.name

    def move(self, old: QueueFile, new: QueueFile) -> bool:
        """Rename a file; False if another process was faster."""
        # A network file system that repeats a request, because the answer was lost, finds the rename done. No other
        # process uses a name with our id.
        return rename(self.path, old.name, new.name) or (new.owner is not None and self.at(new).exists())

    def read_floor(self) -> int:
        """First batch that some rank has not been given yet; 0 without cursors."""
        return min((cursor.read for cursor in list_cursors(self.cursors)), default=0)

    def done_floor(self, world: int) -> int:
        """First batch that some rank is not done with; 0 while a rank has no cursor."""
        done = {cursor.rank: cursor.done for cursor in list_cursors(self.cursors) if cursor.world == world}
        return min(done.values()) if len(done) == world else 0


@dataclass(frozen=True, slots=True)
class Member:
    """Name of the file of a live provider or consumer."""

    id: str
    lease_seconds: float
    beat: int = 0
    done: int = 0
    """Batches published or delivered so far."""

    @property
    def name(self) -> str:
        lease = f"{self.lease_seconds:.3f}".rstrip("0").rstrip(".")
        return f"{self.id}~l{lease}~b{self.beat}~d{self.done}"

    @classmethod
    def parse(cls, name: str) -> Member | None:
        found = _MEMBER.fullmatch(name)
        return None if found is None else cls(found[1], float(found[2]), int(found[3]), int(found[4]))


def list_members(directory: Path) -> dict[str, Member]:
    """Members listed in a directory by id; some of them may be dead."""
    found: dict[str, Member] = {}
    for member in map(Member.parse, os.listdir(directory)):
        # During a rename a listing may show both names.
        if member is not None and (member.id not in found or found[member.id].beat < member.beat):
            found[member.id] = member
    return found


@dataclass(frozen=True, slots=True)
class RankCursor:
    """Position of one rank in strict order, in batches of the whole split."""

    rank: int
    world: int
    read: int
    """The rank has been given its batches below this one."""
    done: int
    """The rank is done with its batches below this one."""

    @property
    def name(self) -> str:
        return f"r{self.rank}of{self.world}~read{self.read}~done{self.done}"

    @classmethod
    def parse(cls, name: str) -> RankCursor | None:
        found = _CURSOR.fullmatch(name)
        return None if found is None else cls(*map(int, found.groups()))


def list_cursors(directory: Path) -> list[RankCursor]:
    """Cursors of all ranks. During a rename a listing may show two: the older one is the safe one."""
    found: dict[tuple[int, int], RankCursor] = {}
    for cursor in map(RankCursor.parse, os.listdir(directory)):
        if cursor is not None:
            key = (cursor.rank, cursor.world)
            found[key] = min(found.get(key, cursor), cursor, key=lambda cursor: cursor.done)
    return list(found.values())


def rename(directory: Path, old: str, new: str) -> bool:
    """Rename within a directory; False if the old name is gone."""
    try:
        os.rename(f"{directory}/{old}", f"{directory}/{new}")
    except FileNotFoundError:
        return False
    return True


def remove(path: PathLike) -> bool:
    """Remove a file; False if it is gone."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def temporary_name(label: str, owner: str) -> str:
    """Name of an unfinished file of a member."""
    return f".{label}~{owner}.tmp"


LANES = 64
"""Number of lanes of a new queue: as many files can be in production at once."""

_NAME = re.compile(r"(\d{12,})(?:\.by-([\w-]+))?")
_END = re.compile(r"end-(\d+)")
# A lane that is renamed during a listing can be missed: list again, at most this often.
_LISTINGS = 10


class Lane(NamedTuple):
    """Number of a file to produce, and the member that produces it."""

    number: int
    owner: str | None = None

    @property
    def name(self) -> str:
        return f"{self.number:012d}" if self.owner is None else f"{self.number:012d}.by-{self.owner}"

    @staticmethod
    @functools.lru_cache(_KNOWN_NAMES)
    def parse(name: str) -> Lane | None:
        """The lane of a name; None for any other name."""
        found = _NAME.fullmatch(name)
        return None if found is None else Lane(int(found[1]), found[2])


_NUMBER = operator.attrgetter("number")


class Lanes:
    """Lanes of one split: file numbers, handed out by renaming, so that each file is produced once.

    Lane i holds the numbers i, i + lanes, i + 2 lanes, ... as one empty file that is named by the next of them:
    `000000000042` if it is free, `000000000042.by-<member>` while a member produces it. After publishing 42 the member
    renames the lane to 42 + lanes. When a member dies, others take its lane over after its lease. A split that ends has
    a file `end-<batches>` next to its lanes.
    """

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count = path, count

    def create(self) -> None:
        """Make the lanes of a new queue."""
        self.path.mkdir(parents=True)
        for number in range(self.count):
            (self.path / Lane(number).name).touch()

    def all(self) -> list[Lane]:
        """Every lane, by number."""
        return self._list()[0]

    def end(self) -> int | None:
        """Number of batches of the split; None if it has no end."""
        return min(self.ends(), default=None)

    def ends(self, names: list[str] | None = None) -> list[int]:
        """Every end that is set: one at most, unless somebody made files by hand."""
        names = os.listdir(self.path) if names is None else names
        return sorted(int(found[1]) for name in names if name[0] == "e" and (found := _END.fullmatch(name)))

    def set_end(self, batches: int | None) -> None:
        """Set the number of batches after which the split ends, or None for no end."""
        for end in self.ends():
            if end != batches:
                (self.path / f"end-{end}").unlink(missing_ok=True)
        if batches is not None:
            (self.path / f"end-{batches}").touch()

    def ended(self, batches_per_file: int) -> bool:
        """True if every file up to the end is published."""
        lanes, end = self._list()
        return (
            end is not None
            and len(lanes) >= self.count
            and all(lane.number * batches_per_file >= end for lane in lanes)
        )

    def passed(self, number: int) -> bool:
        """True if the file of a number was published: its lane is at a later number."""
        return any(lane.number > number for lane in self.all() if (lane.number - number) % self.count == 0)

    def reserved_end(self) -> int:
        """One more than the highest number that was ever reserved."""
        return max(0, *(lane.number + 1 - (lane.owner is None) * self.count for lane in self.all()))

    def advanced(self, number: int) -> bool:
        """True if the lane of a number is at the next one, and free; False says nothing."""
        return os.path.exists(f"{self.path}/{Lane(number + self.count).name}")

    def take(self, lane: Lane, owner: str) -> bool:
        """Reserve the number of a lane; False if another member was faster."""
        mine = Lane(lane.number, owner)
        return rename(self.path, lane.name, mine.name) or (self.path / mine.name).exists()

    def holds(self, number: int, owner: str) -> bool:
        """True if a member holds the lane of a number. Any error but a missing name says nothing about that: raised."""
        try:
            os.stat(f"{self.path}/{Lane(number, owner).name}")
        except FileNotFoundError:
            return False
        return True

    def advance(self, number: int, owner: str | None) -> bool:
        """Move the lane of a published number to its next number; False if that is done."""
        return rename(self.path, Lane(number, owner).name, Lane(number + self.count).name)

    def skip(self, lane: Lane, floor: int) -> bool:
        """Move a free lane to its first number that is not below `floor`."""
        rounds = -(-(floor - lane.number) // self.count)
        return rename(self.path, lane.name, Lane(lane.number + rounds * self.count).name)

    def release(self, number: int, owner: str) -> bool:
        """Free a number that was not produced."""
        return rename(self.path, Lane(number, owner).name, Lane(number).name)

    def misplaced(self) -> tuple[set[int], set[int]]:
        """Lanes that are missing, and lanes that exist more than once, in every one of several listings."""
        missing, doubled = set(range(self.count)), set(range(self.count))
        for _ in range(_LISTINGS):
            found = [lane.number % self.count for lane in _parse(os.listdir(self.path))]
            missing -= set(found)
            doubled &= {place for place in found if found.count(place) > 1}
            if not missing and not doubled:
                break
        return missing, doubled

    def unknown_names(self) -> list[str]:
        """Names that the queue did not make."""
        return [name for name in os.listdir(self.path) if not (_NAME.fullmatch(name) or _END.fullmatch(name))]

    def _list(self) -> tuple[list[Lane], int | None]:
        for _ in range(_LISTINGS):
            names = os.listdir(self.path)
            found = _parse(names)
            end = min(self.ends(names), default=None) if len(names) > len(found) else None
            lanes = {lane.number % self.count: lane for lane in found}
            if len(lanes) == self.count:
                break
        return found if len(lanes) == len(found) else sorted(lanes.values(), key=_NUMBER), end


def _parse(names: list[str]) -> list[Lane]:
    """Lanes of a listing, by number: of two for one lane the later one counts."""
    return sorted(filter(None, map(Lane.parse, names)), key=_NUMBER)
