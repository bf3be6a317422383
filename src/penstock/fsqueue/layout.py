"""What lies where in a queue directory, and what the names of its files say.

    queue/
      queue.json      what the batches are, and the fingerprint that every file of them carries
      members/        one file per living provider and consumer (`penstock.fsqueue.members`)
      train/          one directory per split
        000000000042-n8-s0-r0-1f83d9abfb41bd6b.arrow                  eight batches, ready
        000000000043-n8-s0-r0-5be0cd19137e2179.arrow.by-c3f09a2b7c41  taken by a consumer
        lanes/        whose turn it is to make which file (`penstock.fsqueue.lanes`)
        cursors/      how far the ranks of a strict reader are, and who reads each (`penstock.fsqueue.ordered_reader`)

All that happens to a file happens by renaming it within its directory: a name is either the old one or the new one,
for every process and on every file system, and of two that rename the same file one finds it gone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["Published", "SplitDirectory", "name_of_temporary", "rename"]

_NAME = re.compile(
    r"(?P<number>\d{12,})-n(?P<batches>\d+)-s(?P<start>\d+)-r(?P<returns>\d+)-(?P<checksum>[0-9a-f]{16})\.arrow"
    r"(?:\.by-(?P<owner>[\w-]+))?"
)
_TEMPORARY = re.compile(r"\.[\w-]+~(?P<owner>[\w-]+)\.tmp")
_BAD = ".bad"


@dataclass(frozen=True, slots=True)
class Published:
    """A file of batches as its name tells it."""

    number: int
    batches: int
    checksum: str
    start: int = 0
    """The first batch in it that is still to be delivered."""
    returns: int = 0
    """How often a lease on it ran out: each time some of its batches may have been delivered already."""
    owner: str | None = None
    """The consumer that has taken it; None if it is ready."""

    @property
    def name(self) -> str:
        ready = f"{self.number:012d}-n{self.batches}-s{self.start}-r{self.returns}-{self.checksum}.arrow"
        return ready if self.owner is None else f"{ready}.by-{self.owner}"

    @classmethod
    def parse(cls, name: str) -> Published | None:
        """None for any other name."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        number, batches, start, returns, checksum, owner = found.groups()
        return cls(int(number), int(batches), checksum, int(start), int(returns), owner)

    def taken(self, owner: str) -> Published:
        return replace(self, owner=owner)

    def given_back(self, start: int) -> Published:
        """Ready again, from batch `start` on."""
        return replace(self, owner=None, start=start)

    def lost(self) -> Published:
        """Ready again because its owner died."""
        return replace(self, owner=None, returns=self.returns + 1)


@dataclass(frozen=True, slots=True)
class SplitDirectory:
    """The directory of one split."""

    path: Path

    @property
    def lanes(self) -> Path:
        return self.path / "lanes"

    @property
    def cursors(self) -> Path:
        return self.path / "cursors"

    def files(self) -> list[Published]:
        """What is published, by number; names of other programs are not looked at."""
        # A file that is renamed during the listing can be missed or met twice: both pass, since nothing is decided
        # by a listing alone.
        found = {(file.number, file.owner): file for file in map(Published.parse, self.names()) if file is not None}
        return sorted(found.values(), key=lambda file: file.number)

    def names(self) -> list[str]:
        return os.listdir(self.path)

    def strangers(self) -> Iterator[str]:
        """Names that are none of the queue's own."""
        own = {"lanes", "cursors"}
        for name in self.names():
            kept = name.removesuffix(_BAD)
            if name not in own and Published.parse(kept) is None and _TEMPORARY.fullmatch(name) is None:
                yield name

    def temporaries(self) -> Iterator[tuple[str, str]]:
        """`(name, owner)` of files that are being written, or were when their writer died."""
        for name in self.names():
            if found := _TEMPORARY.fullmatch(name):
                yield name, found["owner"]

    def rejected(self) -> list[Published]:
        """Files that were put aside because they could not be read."""
        aside = (Published.parse(name.removesuffix(_BAD)) for name in self.names() if name.endswith(_BAD))
        return sorted((file for file in aside if file is not None), key=lambda file: file.number)

    def reject(self, file: Published) -> Path:
        """Put a file aside under a name that nobody takes."""
        target = self.path / (file.name + _BAD)
        self.rename(file.name, target.name)
        return target

    def at(self, file: Published) -> Path:
        return self.path / file.name

    def move(self, old: Published, new: Published) -> bool:
        """Whether it was us who renamed it."""
        if self.rename(old.name, new.name):
            return True
        # A network file system that repeats a request whose answer was lost finds its own work done. Nobody but us
        # gives a file our name.
        return new.owner is not None and self.at(new).exists()

    def rename(self, old: str, new: str) -> bool:
        return rename(self.path, old, new)


def rename(directory: Path, old: str, new: str) -> bool:
    """Rename within a directory; False if the old name is gone because another was faster."""
    try:
        os.rename(directory / old, directory / new)
    except FileNotFoundError:
        return False
    return True


def name_of_temporary(label: str, owner: str) -> str:
    """The name of a file that is being written; listings show who writes it."""
    return f".{label}~{owner}.tmp"
