"""What may be wrong with a queue: every name and every byte of it is looked at, and what is safe to mend is mended.

The verdict on who is dead is the same as that of the members: by watching, for as long as their lease.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import pyarrow as pa

from penstock.errors import DataError, StaleQueueError
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.fsqueue.batch_file import read
from penstock.fsqueue.cursors import RankCursor, all_cursors, done_floor
from penstock.fsqueue.lanes import Lanes
from penstock.fsqueue.layout import Published, SplitDirectory
from penstock.fsqueue.members import Member, MemberWatch, living
from penstock.fsqueue.queue import Queue, how_to_purge
from penstock.fsqueue.rank_claims import is_claim
from penstock.fsqueue.reaper import LeaseReaper
from penstock.memory.budget import format_bytes

__all__ = [
    "NEEDS",
    "Diagnosis",
    "Examination",
    "Finding",
    "check_split",
    "examine",
    "problems_of_the_place",
    "strangers",
]


Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    severity: Severity
    """"error": batches are lost, torn or doubled, or readers stop; "warning": it may come to that; "note": know it."""
    what: str
    where: str
    remedy: str
    repaired: str | None = None
    """What was done about it; None if nothing was."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings about a queue."""

    path: Path
    findings: Sequence[Finding]
    files: int = 0
    """How many were read, from the first byte to the last."""
    batches: int = 0
    bytes: int = 0
    file_system: str = ""

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong, or what was wrong is mended."""
        return all(finding.severity == "note" or finding.repaired is not None for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "path": str(self.path), "sound": self.sound}


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
    return RankCursor.parse(name) is not None or is_claim(name)


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


_DEFAULT_LEASE = 30.0


def examine(
    path: PathLike,
    *,
    repair: bool = False,
    wait_seconds: float | None = None,
    on_wait: Callable[[float, int], None] | None = None,
) -> Diagnosis:
    """Look at everything; with `repair`, do what cannot do harm.

    Members that hold something are watched for as long as their lease, or `wait_seconds` if that is shorter: whoever
    moves lives, who does not is dead, or if the wait was too short, in doubt. `on_wait(seconds, members)` is told.
    Raises QueueNotFoundError if there is no queue.
    """
    path = require_local(path, "a queue")
    try:
        queue = Queue.open(path)
    except StaleQueueError as error:
        return Diagnosis(path, [Finding("error", str(error).partition("; ")[0], f"{path}", how_to_purge(path))])
    findings = list(_directories(queue, repair))
    place, file_system = problems_of_the_place(queue.path)
    findings += place
    if any(finding.severity == "error" and finding.repaired is None for finding in findings):
        return Diagnosis(path, findings, file_system=file_system)
    with queue.guarded():
        exam = Examination(queue, repair)
        watch = MemberWatch(queue.members, lease_seconds=_lease(queue, wait_seconds))
        _watch_members(exam, watch, wait_seconds, on_wait)
        findings += _left_behind(exam, watch)
        own = {"queue.json", "columns.json", "members", *queue.description.splits}
        findings += strangers(queue.path, set(os.listdir(queue.path)) - own)
        findings += strangers(queue.members, [name for name in os.listdir(queue.members) if not _is_member(name)])
        for split in queue.description.splits:
            findings += check_split(exam, split)
    order = ["error", "warning", "note"]
    findings.sort(key=lambda finding: order.index(finding.severity))
    return Diagnosis(path, findings, exam.files, exam.batches, exam.bytes, file_system)


def _directories(queue: Queue, repair: bool) -> Iterator[Finding]:
    """Every directory that belongs to a queue is there."""
    for split in queue.description.splits:
        if not queue.split(split).lanes.is_dir():
            yield Finding(
                "error",
                f"the directory with the numbers of split {split!r} is missing: nobody knows which files were made",
                str(queue.split(split).lanes),
                how_to_purge(queue.path),
            )
    for directory in (queue.members, *(queue.split(split).cursors for split in queue.description.splits)):
        if not directory.is_dir():
            found = Finding("error", "a directory of the queue is missing", str(directory), f"mkdir {directory}")
            if repair and directory.parent.is_dir():
                directory.mkdir(exist_ok=True)
                found = replace(found, repaired="made it")
            yield found


# -- who lives -------------------------------------------------------------------------------------------------------


def _lease(queue: Queue, wait_seconds: float | None) -> float:
    """How long those are watched that hold something and are not listed as members."""
    longest = max((member.lease_seconds for member in living(queue.members).values()), default=_DEFAULT_LEASE)
    return longest if wait_seconds is None else min(wait_seconds, longest)


def _owners(queue: Queue) -> set[str]:
    """Whoever holds something, or says that it lives."""
    found = set(living(queue.members))
    for split in queue.description.splits:
        directory = queue.split(split)
        found |= {file.owner for file in directory.files() if file.owner is not None}
        found |= {owner for _, owner in directory.temporaries()}
        found |= {
            lane.owner for lane in Lanes(directory.lanes, queue.description.lanes).all() if lane.owner is not None
        }
    return found


def _watch_members(
    exam: Examination, watch: MemberWatch, wait_seconds: float | None, on_wait: Callable[[float, int], None] | None
) -> None:
    """Sort the owners into the living, the dead, and those of whom it cannot be said."""
    owners = _owners(exam.queue)
    if not owners:
        return
    listed = watch.look(fresh=True)
    leases = {owner: listed[owner].lease_seconds if owner in listed else watch.lease_seconds for owner in owners}
    first = {owner: listed[owner].beat if owner in listed else None for owner in owners}
    seconds = max(leases.values()) if wait_seconds is None else min(wait_seconds, max(leases.values()))
    if on_wait is not None:
        on_wait(seconds, len(owners))
    for owner in owners:
        watch.is_dead(owner)  # notes when it was seen first
    began, waiting = watch.clock(), set(owners)
    while waiting and watch.clock() - began <= seconds:
        time.sleep(min(0.1, watch.lease_seconds / 10))
        now = watch.look(fresh=True)
        waiting -= {owner for owner in waiting if owner in now and now[owner].beat != first[owner]}
        waiting -= {owner for owner in waiting if owner in first and first[owner] is not None and owner not in now}
    for owner in waiting:
        (exam.dead if watch.is_dead(owner) else exam.unsure).add(owner)


def _left_behind(exam: Examination, watch: MemberWatch) -> Iterator[Finding]:
    """What the dead hold; given back if that is asked for."""
    queue, found = exam.queue, []
    for owner in sorted(exam.unsure):
        yield Finding(
            "warning",
            f"{owner} did not show that it lives while it was watched, which was for less than its lease",
            str(queue.members),
            "watch longer: leave out --wait",
        )
    for split in queue.description.splits:
        directory = queue.split(split)
        for file in directory.files():
            if file.owner in exam.dead:
                batches = file.batches - file.start
                found.append((f"a file with {batches} batches is held by a consumer that is dead", directory.at(file)))
        for name, owner in directory.temporaries():
            if owner in exam.dead:
                found.append(("a provider died while it wrote this file", directory.path / name))
        for lane in Lanes(directory.lanes, queue.description.lanes).all():
            if lane.owner in exam.dead:
                found.append(
                    (f"file {lane.number} was to be made by a provider that is dead", directory.lanes / lane.name)
                )
    for member in living(queue.members).values():
        if member.id in exam.dead:
            what = f"a member that has not moved for its lease of {member.lease_seconds:g} s"
            found.append((what, queue.members / member.name))
    if exam.repair and found:
        LeaseReaper(queue, watch).round()
    remedy = "the next provider or consumer gives it back, or --repair"
    for what, where in found:
        mended = "given back" if exam.repair and not os.path.lexists(where) else None
        yield Finding("warning", what, str(where), remedy, mended)


def _is_member(name: str) -> bool:
    return Member.parse(name) is not None or name.endswith(".tmp")


NEEDS = (
    "a rename within a directory is atomic for all machines, a name that was renamed or deleted is found missing by "
    "the next one who renames it, and listings follow within a second or so; locks, file times and synchronous clocks "
    "are not needed"
)
"""What a queue asks of a file system, shared or not."""

_NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "afs",
    "ceph",
    "gluster",
    "lustre",
    "gpfs",
    "beegfs",
    "fuse",
    "virtiofs",
    "wekafs",
)
_LEAST_FREE = 256 << 20


def problems_of_the_place(directory: Path) -> tuple[list[Finding], str]:
    """What is wrong with a directory as a place for a queue, and the name of its file system."""
    kind = _file_system(directory)
    problems: list[Finding] = _tried(directory)
    free = shutil.disk_usage(directory).free
    if free < _LEAST_FREE:
        problems.append(
            Finding(
                "warning",
                f"only {format_bytes(free)} are free: providers stop when the disk is full",
                str(directory),
                "make room, or lower backlog_files and backlog_bytes",
            )
        )
    if kind.startswith(_NETWORK):
        problems.append(
            Finding(
                "note",
                f"this is a network file system ({kind}); between machines a queue needs this of it: {NEEDS}",
                str(directory),
                "on NFS, mount with lookupcache=positive and a short actimeo, or batches arrive seconds late",
            )
        )
    return problems, kind


def _tried(directory: Path) -> list[Finding]:
    """What did not work of all that members do to their files."""
    old, new = (directory / f".{name}~doctor{secrets.token_hex(4)}.tmp" for name in ("old", "new"))
    problems: list[Finding] = []

    def expect(held: bool, what: str) -> None:
        if not held:
            problems.append(Finding("error", what, str(directory), f"use another file system for the queue: {NEEDS}"))

    try:
        old.write_bytes(b"penstock")
        expect(old.name in os.listdir(directory), "a file that was just made is not listed")
        os.rename(old, new)
        names = os.listdir(directory)
        expect(new.name in names and old.name not in names, "a file that was just renamed is listed under its old name")
        expect(not _renames(old, new), "a file can be renamed a second time, under a name that it no longer has")
        with new.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY) as view:
            expect(view[:] == b"penstock", "a file that is mapped into memory has other contents")
        new.unlink()
        expect(new.name not in os.listdir(directory), "a file that was just deleted is still listed")
    except OSError as error:
        what = f"files cannot be made, renamed, mapped and deleted here: {error.strerror or error}"
        problems.append(
            Finding("error", what, str(directory), "make the directory writable for whoever runs the commands")
        )
    finally:
        for left in (old, new):
            with contextlib.suppress(OSError):  # then the problem is on the list already
                left.unlink(missing_ok=True)
    return problems


def _renames(old: Path, new: Path) -> bool:
    try:
        os.rename(old, new)
    except FileNotFoundError:
        return False
    return True


def _file_system(directory: Path) -> str:
    """`ext4`, `nfs4`, `tmpfs`: the type of the mount that a directory is on; empty if it cannot be told."""
    path = directory.resolve()
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in (path, *path.parents) if parent in mounts), "")
