"""What may be wrong with one split of a queue: its files, their numbers, its lanes and its cursors."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from penstock.errors import DataError, StaleQueueError
from penstock.fsqueue.cursors import Cursor, all_cursors, done_floor
from penstock.fsqueue.filing import read
from penstock.fsqueue.findings import Finding
from penstock.fsqueue.lanes import Lanes
from penstock.fsqueue.layout import Published, SplitDirectory
from penstock.fsqueue.queue import Queue, how_to_purge
from penstock.fsqueue.rank_claims import is_claim

__all__ = ["Examination", "check_split", "strangers"]

_LANE = re.compile(r"(\d{12,})(?:\.by-([\w-]+))?")
_END = re.compile(r"end-\d+")
_LOOKS = 10


@dataclass(slots=True)
class Examination:
    """A queue that is looked at, and what was seen of it so far."""

    queue: Queue
    repair: bool = False
    dead: set[str] = field(default_factory=set)
    unsure: set[str] = field(default_factory=set)
    """Owners that did not move, watched for less than their lease."""
    unreadable: set[str] = field(default_factory=set)
    """Names of files."""
    files: int = 0
    batches: int = 0
    bytes: int = 0


def _belongs_to_cursors(name: str) -> bool:
    return Cursor.parse(name) is not None or is_claim(name)


def check_split(exam: Examination, name: str) -> Iterator[Finding]:
    """Everything about a split but who lives."""
    directory = exam.queue.split(name)
    yield from strangers(directory.path, directory.strangers())
    yield from strangers(directory.cursors, _others(directory.cursors, _belongs_to_cursors))
    yield from _files(exam, name, directory)
    yield from _numbers(exam, directory)
    yield from _lanes(exam.queue, directory)
    yield from _cursors(exam, directory)
    if aside := directory.rejected():
        yield Finding(
            "note",
            f"put aside as unreadable: {len(aside)}, with {sum(file.batches for file in aside)} batches",
            str(directory.path),
            "delete the *.bad files when you have seen what happened to them",
        )


def _files(exam: Examination, split: str, directory: SplitDirectory) -> Iterator[Finding]:
    """Every file is whole, of this queue, and can be read."""
    for file in directory.files():
        where = directory.at(file)
        try:
            size = _read_all(where, file, exam.queue, split)
        except FileNotFoundError:
            continue  # done with in the meantime
        except StaleQueueError as error:
            what = str(error).partition("; ")[0].removeprefix(f"{where} ")
        except DataError as error:
            what = error.reason
        else:
            exam.files, exam.batches, exam.bytes = exam.files + 1, exam.batches + file.batches, exam.bytes + size
            continue
        exam.unreadable.add(file.name)
        mended = None
        if exam.repair and (file.owner is None or file.owner in exam.dead) and where.exists():
            mended = f"put aside as {directory.reject(file).name}"
        yield Finding(
            "error",
            f"unreadable: {what}",
            str(where),
            '--repair puts it aside; its batches are lost, and strict readers need on_bad="skip" to go on',
            mended,
        )


def _read_all(path: Path, file: Published, queue: Queue, split: str) -> int:
    """The size of a file, all of which could be read."""
    opened = read(path, file, queue, split)
    wanted = queue.description.schema.to_arrow()
    for index in range(file.batches):
        try:
            batch = opened.record_batch(index)
            batch.validate(full=True)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"batch {index} cannot be read ({error})", file=str(path)) from None
        if [(column.name, column.type) for column in batch.schema] != [(column.name, column.type) for column in wanted]:
            given = ", ".join(f"{column.name} {column.type}" for column in batch.schema)
            raise DataError(f"its columns are {given}, not those of batch_schema", file=str(path))
    return path.stat().st_size


def _numbers(exam: Examination, directory: SplitDirectory) -> Iterator[Finding]:
    """Every number is there once, and its lane is past it."""
    # A file that is renamed in the middle of a listing can show up under both names, but hardly in two listings.
    twice = _twice(directory) & _twice(directory)
    for number in sorted(twice):
        names = sorted(name for name in directory.names() if name.startswith(f"{number:012d}-"))
        yield Finding(
            "error",
            f"file {number} is there {len(names)} times: its batches come more than once",
            ", ".join(str(directory.path / name) for name in names),
            "delete the copy, or rename it to end with .bad; somebody has copied or renamed it by hand",
        )
    there = {file.number for file in directory.files() if file.name not in exam.unreadable}
    lanes = Lanes(directory.lanes, exam.queue.description.lanes)
    for lane in lanes.all():
        if lane.number in there and lane.owner is None:
            mended = "moved the lane on" if exam.repair and lanes.advance(lane.number, None) else None
            yield Finding(
                "error",
                f"file {lane.number} is there, and would be made again",
                str(directory.lanes / lane.name),
                "--repair moves the lane on to its next number",
                mended,
            )


def _twice(directory: SplitDirectory) -> set[int]:
    seen: dict[int, set[str]] = defaultdict(set)
    for name in directory.names():
        if (file := Published.parse(name)) is not None:
            seen[file.number].add(name)
    return {number for number, names in seen.items() if len(names) > 1}


def _lanes(queue: Queue, directory: SplitDirectory) -> Iterator[Finding]:
    """Each lane is there once, and there is one end at most."""
    yield from strangers(
        directory.lanes, _others(directory.lanes, lambda name: bool(_LANE.fullmatch(name) or _END.fullmatch(name)))
    )
    ends = sorted(name for name in os.listdir(directory.lanes) if _END.fullmatch(name))
    if len(ends) > 1:
        yield Finding(
            "error",
            f"the split has {len(ends)} ends: {', '.join(ends)}; readers stop at the first",
            str(directory.lanes),
            "delete all but one, or run prepare.py with max_batches",
        )
    count = queue.description.lanes
    missing, doubled = _incomplete(directory.lanes, count)
    for _ in range(_LOOKS):  # a lane that is just being renamed can be missed, or seen twice
        if not missing and not doubled:
            return
        again = _incomplete(directory.lanes, count)
        missing, doubled = missing & again[0], doubled & again[1]
    if missing:
        shown = ", ".join(map(str, sorted(missing)[:8]))
        yield Finding(
            "error",
            f"{len(missing)} of {count} lanes are missing ({shown}): their files are not made, and nothing ends",
            str(directory.lanes),
            how_to_purge(queue.path),
        )
    if doubled:
        shown = ", ".join(map(str, sorted(doubled)[:8]))
        yield Finding(
            "error",
            f"{len(doubled)} lanes are there more than once ({shown}): files are made twice",
            str(directory.lanes),
            "keep the highest number of each lane, and delete the others, while nobody is at work",
        )


def _incomplete(directory: Path, count: int) -> tuple[set[int], set[int]]:
    """The lanes that are missing, and those that are there twice."""
    found = [int(lane[1]) % count for lane in map(_LANE.fullmatch, os.listdir(directory)) if lane]
    return set(range(count)) - set(found), {place for place in found if found.count(place) > 1}


def _cursors(exam: Examination, directory: SplitDirectory) -> Iterator[Finding]:
    """The cursors are those of one world, and what they are done with is gone."""
    cursors = all_cursors(directory.cursors)
    worlds = sorted({cursor.world for cursor in cursors})
    if len(worlds) > 1:
        yield Finding(
            "warning",
            f"there are cursors of worlds of {' and '.join(map(str, worlds))} ranks: two runs read in strict order",
            str(directory.cursors),
            "let one run at a time read a split; if there is but one, delete the cursors of the other world",
        )
        return
    if not worlds:
        return
    if missing := sorted(set(range(worlds[0])) - {cursor.rank for cursor in cursors}):
        yield Finding(
            "note",
            f"no cursor of ranks {missing} of {worlds[0]}: until they say where they are, nothing is deleted",
            str(directory.cursors),
            "start all ranks",
        )
    floor = done_floor(directory.cursors, worlds[0]) // exam.queue.description.batches_per_file
    if behind := [file.number for file in directory.files() if file.number < floor]:
        yield Finding(
            "note",
            f"{len(behind)} files (the first is {behind[0]}) are done with by all ranks, and not deleted yet",
            str(directory.path),
            "the ranks delete them when they begin with their next file",
        )


def strangers(directory: Path, names: Iterable[str]) -> Iterator[Finding]:
    """Names that are none of the queue's own."""
    for name in sorted(names):
        yield Finding(
            "warning",
            "no file of the queue: nobody reads it, and nobody deletes it",
            str(directory / name),
            "move it somewhere else",
        )


def _others(directory: Path, is_own: Callable[[str], bool]) -> list[str]:
    return [name for name in os.listdir(directory) if not is_own(name)]
