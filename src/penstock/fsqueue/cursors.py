"""How far the ranks of a strict reader are, each in the name of one empty file in `cursors/`.

    r0of2~read1600~done1536       rank 0 of 2 has been given its batches below 1600, and is done with those below 1536

Files wait until they are read, and stay until every rank is done with them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.distributed.ranks import Rank
from penstock.fsqueue.layout import rename

__all__ = ["RankCursor", "RankCursors", "all_cursors", "done_floor", "read_floor"]

_NAME = re.compile(r"r(\d+)of(\d+)~read(\d+)~done(\d+)")


@dataclass(frozen=True, slots=True)
class RankCursor:
    """One rank's place, in batches of the whole split."""

    rank: int
    world: int
    read: int
    done: int

    @property
    def name(self) -> str:
        return f"r{self.rank}of{self.world}~read{self.read}~done{self.done}"

    @classmethod
    def parse(cls, name: str) -> RankCursor | None:
        found = _NAME.fullmatch(name)
        return None if found is None else cls(*map(int, found.groups()))


class RankCursors:
    """The cursor of one rank among those of its world."""

    def __init__(self, directory: Path, rank: Rank) -> None:
        self.directory, self.rank = directory, rank
        self._mine: RankCursor | None = None

    def begin(self, position: int, done: int | None = None) -> None:
        """Start at a position, done with what lies before it, or before `done`.

        Cursors that are done with more than was read, or of another number of ranks, are removed.

        They say nothing of this run, and while they stood, files could be deleted that a rank has yet to read again.
        Those of this run come back when their ranks move on; until all are there nothing is deleted.
        """
        for name in os.listdir(self.directory):
            other = RankCursor.parse(name)
            if other is not None and (
                other.rank == self.rank.rank or other.world != self.rank.world_size or other.done > position
            ):
                (self.directory / name).unlink(missing_ok=True)
        self._mine = None
        self.move(position, position if done is None else done)

    def move(self, read: int, done: int) -> None:
        """Say where this rank is."""
        new = RankCursor(self.rank.rank, self.rank.world_size, read, done)
        if self._mine is None or not rename(self.directory, self._mine.name, new.name):
            (self.directory / new.name).touch()
        self._mine = new

    def end(self) -> None:
        """This rank reads no more, and nobody is to wait for it."""
        if self._mine is not None:
            (self.directory / self._mine.name).unlink(missing_ok=True)
            self._mine = None


def all_cursors(directory: Path) -> list[RankCursor]:
    found = [cursor for cursor in map(RankCursor.parse, os.listdir(directory)) if cursor is not None]
    latest: dict[tuple[int, int], RankCursor] = {}
    for cursor in found:  # in the middle of a rename a listing may show both names: the older one is on the safe side
        key = (cursor.rank, cursor.world)
        latest[key] = min(latest.get(key, cursor), cursor, key=lambda cursor: cursor.done)
    return list(latest.values())


def read_floor(directory: Path) -> int:
    """Every rank that reads in strict order has been given its batches below this."""
    return min((cursor.read for cursor in all_cursors(directory)), default=0)


def done_floor(directory: Path, world: int) -> int:
    """Every rank is done with its batches below this; 0 while one of them has not said."""
    places = {cursor.rank: cursor.done for cursor in all_cursors(directory) if cursor.world == world}
    return min(places.values()) if len(places) == world else 0
