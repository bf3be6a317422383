"""Lanes: file numbers, handed out by renaming, so that each file is produced once.

A queue has a fixed number of lanes. Lane i holds the numbers i, i + lanes, i + 2 lanes, ... as one empty file that is
named by the next of them: `000000000042` if it is free, `000000000042.by-<member>` while a member produces it. After
publishing 42 the member renames the lane to 42 + lanes. When a member dies, others take its lane over after its lease.

A split that ends has a file `end-<batches>` next to its lanes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from penstock.fsqueue.layout import rename

__all__ = ["LANES", "Lane", "Lanes"]

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


class Lanes:
    """Lanes of one split."""

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
        return sorted(int(found[1]) for found in map(_END.fullmatch, names) if found)

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

    def take(self, lane: Lane, owner: str) -> bool:
        """Reserve the number of a lane; False if another member was faster."""
        mine = Lane(lane.number, owner)
        return rename(self.path, lane.name, mine.name) or (self.path / mine.name).exists()

    def holds(self, number: int, owner: str) -> bool:
        return (self.path / Lane(number, owner).name).exists()

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
            lanes = {lane.number % self.count: lane for lane in _parse(names)}
            if len(lanes) == self.count:
                break
        return sorted(lanes.values(), key=lambda lane: lane.number), min(self.ends(names), default=None)


def _parse(names: list[str]) -> list[Lane]:
    """Lanes of a listing, by number: of two for one lane the later one counts."""
    found = (_NAME.fullmatch(name) for name in names)
    return sorted((Lane(int(name[1]), name[2]) for name in found if name), key=lambda lane: lane.number)
