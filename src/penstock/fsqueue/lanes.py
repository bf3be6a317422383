"""Whose turn it is to make which file: numbers handed out by renaming, so that each is made once.

A queue has a fixed number of lanes. Lane i stands for the numbers i, i + lanes, i + 2 lanes, ..., and is one empty
file whose name is the next of them: `000000000042` when nobody makes it, `000000000042.by-<member>` when somebody
does. Who has published 42 renames the lane to 42 + lanes. Files of a number come from the same lane, one after the
other, so no number is made twice; a provider that dies leaves its lane, which others take over when its lease is out.

A split that ends has a file `end-<batches>` beside its lanes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from penstock.fsqueue.layout import rename

__all__ = ["Lane", "Lanes", "lay_out"]

_NAME = re.compile(r"(\d{12,})(?:\.by-([\w-]+))?")
_END = re.compile(r"end-(\d+)")
_LOOKS = 10


class Lane(NamedTuple):
    """A number that is to be made, and who is at it."""

    number: int
    owner: str | None = None

    @property
    def name(self) -> str:
        return f"{self.number:012d}" if self.owner is None else f"{self.number:012d}.by-{self.owner}"


class Lanes:
    """The lanes of one split, as one member of the queue sees them."""

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count = path, count

    def all(self) -> list[Lane]:
        """Every lane, by number."""
        return self._look()[0]

    def end(self) -> int | None:
        """The batches that the split holds in all; None if it has no end."""
        return _end_in(os.listdir(self.path))

    def set_end(self, batches: int | None) -> None:
        """Let the split end after so many batches, or not at all."""
        for name in os.listdir(self.path):
            if _END.fullmatch(name) and name != f"end-{batches}":
                (self.path / name).unlink(missing_ok=True)
        if batches is not None:
            (self.path / f"end-{batches}").touch()

    def ended(self, batches_per_file: int) -> bool:
        """Whether every file up to the end is published."""
        lanes, end = self._look()
        return (
            end is not None
            and len(lanes) >= self.count
            and all(lane.number * batches_per_file >= end for lane in lanes)
        )

    def take(self, lane: Lane, owner: str) -> bool:
        """Whether the number is ours to make."""
        mine = Lane(lane.number, owner)
        return rename(self.path, lane.name, mine.name) or (self.path / mine.name).exists()

    def holds(self, number: int, owner: str) -> bool:
        return (self.path / Lane(number, owner).name).exists()

    def advance(self, number: int, owner: str | None) -> bool:
        """The number is published: on to the next of its lane. False if somebody else has seen to it."""
        return rename(self.path, Lane(number, owner).name, Lane(number + self.count).name)

    def skip(self, lane: Lane, floor: int) -> bool:
        """On to the first number of a free lane that is not below `floor`: nobody needs those before it."""
        rounds = -(-(floor - lane.number) // self.count)
        return rename(self.path, lane.name, Lane(lane.number + rounds * self.count).name)

    def release(self, number: int, owner: str) -> bool:
        """The number was not made: let others make it."""
        return rename(self.path, Lane(number, owner).name, Lane(number).name)

    def _look(self) -> tuple[list[Lane], int | None]:
        """The lanes and the end. A lane that is renamed during a listing can be missed, so we look again."""
        for _ in range(_LOOKS):
            names = os.listdir(self.path)
            lanes = {lane.number % self.count: lane for lane in _lanes_in(names)}
            if len(lanes) == self.count:
                break
        return sorted(lanes.values(), key=lambda lane: lane.number), _end_in(names)


def _lanes_in(names: list[str]) -> list[Lane]:
    found = (_NAME.fullmatch(name) for name in names)
    return sorted((Lane(int(name[1]), name[2]) for name in found if name), key=lambda lane: lane.number)


def _end_in(names: list[str]) -> int | None:
    return min((int(found[1]) for found in map(_END.fullmatch, names) if found), default=None)


def lay_out(directory: Path, count: int) -> None:
    """The lanes of a new queue."""
    for number in range(count):
        (directory / Lane(number).name).touch()
