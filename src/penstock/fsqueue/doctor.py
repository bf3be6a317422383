"""Doctor: checks every name and every byte of a queue, and repairs what is safe to repair.

Members are judged by the same lease rule as everywhere: by watching them for as long as their lease.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import pyarrow as pa

from penstock.errors import DataError, StaleQueueError
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.fsqueue.batch_file import read
from penstock.fsqueue.layout import Member, QueueFile, SplitDirectory, list_cursors, list_members, rename
from penstock.fsqueue.leases import LeaseReaper, MemberWatch, is_expired
from penstock.fsqueue.members import QueueOptions
from penstock.fsqueue.ordered_reader import is_cursor_name
from penstock.fsqueue.queue import QUEUE_FILE, Queue, how_to_purge
from penstock.memory.budget import format_bytes

_SEVERITIES = ("error", "warning", "note")
_NEEDS = (
    "a rename within a directory is atomic for all machines, a name that was renamed or deleted is found missing by "
    "the next one who renames it, and listings follow within a second or so; locks, file times and synchronous clocks "
    "are not needed"
)
"""Requirements on a file system, shared or not."""
_NETWORK = re.compile("nfs|cifs|smb|9p|afs|ceph|gluster|lustre|gpfs|beegfs|fuse|virtiofs|wekafs")
_LEAST_FREE = 256 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a queue."""

    severity: Literal["error", "warning", "note"]
    """"error": batches are lost, torn or doubled, or readers stop; "warning": that may happen; "note": information."""
    what: str
    where: str
    remedy: str
    repaired: str | None = None
    """Repair that was made, if any."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Findings about a queue."""

    path: Path
    findings: Sequence[Finding]
    files: int = 0
    """Files that were read completely."""
    batches: int = 0
    bytes: int = 0
    file_system: str = ""

    @property
    def sound(self) -> bool:
        """True if there are only notes and repaired problems."""
        return all(finding.severity == "note" or finding.repaired is not None for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "path": str(self.path), "sound": self.sound}


def examine(
    path: PathLike,
    *,
    repair: bool = False,
    wait_seconds: float | None = None,
    on_wait: Callable[[float, int], None] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Diagnosis:
    """Check everything; with `repair`, repair what cannot do harm.

    Members that hold something are watched for their lease, or for `wait_seconds` if that is shorter. A member with a
    heartbeat lives; one without is dead, or undecided after a shorter wait. `on_wait(seconds, members)` is called
    before, `progress(files, files_in_all)` while files are read. Raises QueueNotFoundError if there is no queue.
    """
    path = require_local(path, "a queue")
    try:
        queue = Queue.open(path)
    except StaleQueueError as error:
        return Diagnosis(path, [Finding("error", str(error).partition("; ")[0], f"{path}", how_to_purge(path))])
    findings, file_system = check_file_system(queue.path)
    for split in queue.description.splits:
        if not (lanes := queue.split(split).lanes).is_dir():
            what = f"the lanes of split {split!r} are missing: it is unknown which files were produced"
            findings.append(Finding("error", what, str(lanes), how_to_purge(queue.path)))
    if any(finding.severity == "error" for finding in findings):
        return Diagnosis(path, findings, file_system=file_system)
    with queue.guarded():
        checkup = _Checkup(queue, repair, progress)
        findings += checkup.members(wait_seconds, on_wait)
        own = {QUEUE_FILE, "columns.json", "members", *queue.description.splits}
        findings += _unknown(queue.path, set(os.listdir(queue.path)) - own)
        names = [name for name in os.listdir(queue.members) if not name.endswith(".tmp")]
        findings += _unknown(queue.members, [name for name in names if Member.parse(name) is None])
        checkup.total = sum(sum(1 for _ in queue.split(split).files()) for split in queue.description.splits)
        for split in queue.description.splits:
            findings += checkup.split(split)
    findings.sort(key=lambda finding: _SEVERITIES.index(finding.severity))
    return Diagnosis(path, findings, checkup.files, checkup.batches, checkup.bytes, file_system)


@dataclass(slots=True)
class _Checkup:
    queue: Queue
    repair: bool
    progress: Callable[[int, int], object] | None = None
    seen: int = 0
    """Files that were looked at, readable or not."""
    total: int = 0
    """Files at the beginning."""
    dead: set[str] = field(default_factory=set)
    undecided: set[str] = field(default_factory=set)
    """Owners without a heartbeat, watched for less than their lease."""
    unreadable: set[str] = field(default_factory=set)
    """Names of files."""
    files: int = 0
    batches: int = 0
    bytes: int = 0

    # -- members -----------------------------------------------------------------------------------------------------

    def members(self, wait_seconds: float | None, on_wait: Callable[[float, int], None] | None) -> Iterator[Finding]:
        """Watch the members, then report what dead ones hold, and release it with `repair`."""
        leases = [member.lease_seconds for member in list_members(self.queue.members).values()]
        lease = max(leases, default=QueueOptions().lease_seconds)
        lease = lease if wait_seconds is None else min(wait_seconds, lease)
        watch = MemberWatch(self.queue.members, lease_seconds=lease)
        self._watch(watch, wait_seconds, on_wait)
        for owner in sorted(self.undecided):
            what = f"{owner} had no heartbeat while it was watched, which was for less than its lease"
            yield Finding("warning", what, str(self.queue.members), "watch longer: leave out --wait-seconds")
        found = list(self._held_by_dead())
        if self.repair and found:
            LeaseReaper(self.queue, watch).reap()
        for what, where in found:
            repaired = "released" if self.repair and not os.path.lexists(where) else None
            remedy = "the next provider or consumer releases it, or --repair"
            yield Finding("warning", what, str(where), remedy, repaired)

    def _watch(
        self, watch: MemberWatch, wait_seconds: float | None, on_wait: Callable[[float, int], None] | None
    ) -> None:
        """Sort owners into live, dead and undecided."""
        owners = self._owners()
        if not owners:
            return
        listed = watch.members(fresh=True)
        first = {owner: listed[owner].beat if owner in listed else None for owner in owners}
        lease = max(watch.lease_of(owner) for owner in owners)
        seconds = lease if wait_seconds is None else min(wait_seconds, lease)
        if on_wait is not None:
            on_wait(seconds, len(owners))
        for owner in owners:
            watch.is_dead(owner)  # notes when it was first seen
        began, silent = watch.clock(), set(owners)
        while silent and not is_expired(watched := watch.clock() - began, lease):
            if wait_seconds is not None and watched > wait_seconds:
                break
            time.sleep(min(0.1, watch.lease_seconds / 10))
            now = watch.members(fresh=True)
            silent -= {owner for owner in silent if owner in now and now[owner].beat != first[owner]}
            silent -= {owner for owner in silent if first[owner] is not None and owner not in now}
        for owner in silent:
            (self.dead if watch.is_dead(owner) else self.undecided).add(owner)

    def _owners(self) -> set[str]:
        """Members that are listed, or hold something."""
        found: set[str | None] = {*list_members(self.queue.members)}
        for directory in map(self.queue.split, self.queue.description.splits):
            found |= {file.owner for file in directory.files()}
            found |= {owner for _, owner in directory.temporaries()}
            found |= {lane.owner for lane in self.queue.lanes(directory).all()}
        return {owner for owner in found if owner is not None}

    def _held_by_dead(self) -> Iterator[tuple[str, Path]]:
        for directory in map(self.queue.split, self.queue.description.splits):
            for file in directory.files():
                if file.owner in self.dead:
                    batches = file.batches - file.start
                    yield f"a file with {batches} batches is claimed by a consumer that is dead", directory.at(file)
            for name, owner in directory.temporaries():
                if owner in self.dead:
                    yield "a provider died while it wrote this file", directory.path / name
            for lane in self.queue.lanes(directory).all():
                if lane.owner in self.dead:
                    yield f"file {lane.number} is reserved by a provider that is dead", directory.lanes / lane.name
        for member in list_members(self.queue.members).values():
            if member.id in self.dead:
                lease = f"{member.lease_seconds:g} s"
                yield f"a member without a heartbeat for its lease of {lease}", self.queue.members / member.name

    # -- splits ------------------------------------------------------------------------------------------------------

    def split(self, name: str) -> Iterator[Finding]:
        """Check everything in a split but its members."""
        directory = self.queue.split(name)
        yield from _unknown(directory.path, directory.unknown_names())
        yield from _unknown(
            directory.cursors, [each for each in os.listdir(directory.cursors) if not is_cursor_name(each)]
        )
        yield from self._files(name, directory)
        yield from self._numbers(directory)
        yield from self._lanes(directory)
        yield from self._cursors(directory)
        if rejected := directory.rejected():
            what = f"set aside as unreadable: {len(rejected)}, with {sum(file.batches for file in rejected)} batches"
            yield Finding("note", what, str(directory.path), "delete the *.bad files when you know the cause")

    def _files(self, split: str, directory: SplitDirectory) -> Iterator[Finding]:
        """Every file is complete, of this queue, and readable."""
        for file in directory.files():
            where = directory.at(file)
            if self.progress is not None:
                self.progress(self.seen, max(self.total, self.seen))
            self.seen += 1
            try:
                size = _read_all(where, file, self.queue, split)
            except FileNotFoundError:
                continue  # consumed in the meantime
            except StaleQueueError as error:
                what = str(error).partition("; ")[0].removeprefix(f"{where} ")
            except DataError as error:
                what = error.reason
            else:
                self.files, self.batches, self.bytes = self.files + 1, self.batches + file.batches, self.bytes + size
                continue
            self.unreadable.add(file.name)
            repaired = None
            if self.repair and (file.owner is None or file.owner in self.dead) and where.exists():
                repaired = f"set aside as {directory.reject(file).name}"
            remedy = '--repair sets it aside; its batches are lost, and strict readers need on_error="skip" to continue'
            yield Finding("error", f"unreadable: {what}", str(where), remedy, repaired)

    def _numbers(self, directory: SplitDirectory) -> Iterator[Finding]:
        """Every number exists once, and its lane is past it."""
        # During a rename a listing can show both names, but hardly two listings in a row.
        for number in sorted(_doubled(directory) & _doubled(directory)):
            names = sorted(name for name in directory.names() if name.startswith(f"{number:012d}-"))
            what = f"file {number} exists {len(names)} times: its batches are delivered more than once"
            remedy = "delete the copy, or rename it to end with .bad; somebody copied or renamed it by hand"
            yield Finding("error", what, ", ".join(str(directory.path / name) for name in names), remedy)
        published = {file.number for file in directory.files() if file.name not in self.unreadable}
        lanes = self.queue.lanes(directory)
        for lane in lanes.all():
            if lane.number in published and lane.owner is None:
                repaired = "advanced the lane" if self.repair and lanes.advance(lane.number, None) else None
                what = f"file {lane.number} is published, and would be produced again"
                where = str(directory.lanes / lane.name)
                yield Finding("error", what, where, "--repair advances the lane to its next number", repaired)

    def _lanes(self, directory: SplitDirectory) -> Iterator[Finding]:
        """Each lane exists once, and there is one end at most."""
        lanes, where = self.queue.lanes(directory), str(directory.lanes)
        yield from _unknown(directory.lanes, lanes.unknown_names())
        if len(ends := lanes.ends()) > 1:
            what = f"the split has {len(ends)} ends, {', '.join(map(str, ends))}: readers stop at the first"
            yield Finding("error", what, where, "delete all end-* files but one, or run prepare.py with max_batches")
        missing, doubled = lanes.misplaced()
        if missing:
            what = f"{len(missing)} of {lanes.count} lanes are missing ({_some(missing)}): their files are not produced"
            yield Finding("error", what, where, how_to_purge(self.queue.path))
        if doubled:
            what = f"{len(doubled)} lanes exist more than once ({_some(doubled)}): files are produced twice"
            remedy = "keep the highest number of each lane and delete the others, while no member is at work"
            yield Finding("error", what, where, remedy)

    def _cursors(self, directory: SplitDirectory) -> Iterator[Finding]:
        """Cursors are those of one run, and consumed files are deleted."""
        cursors, where = list_cursors(directory.cursors), str(directory.cursors)
        worlds = sorted({cursor.world for cursor in cursors})
        if len(worlds) > 1:
            what = f"there are cursors of runs with {' and '.join(map(str, worlds))} ranks, both in strict order"
            remedy = "let one run at a time read a split; if there is only one, delete the cursors of the other"
            yield Finding("warning", what, where, remedy)
        if len(worlds) != 1:
            return
        if missing := sorted(set(range(worlds[0])) - {cursor.rank for cursor in cursors}):
            what = f"no cursor of ranks {missing} of {worlds[0]}: nothing is deleted until they have one"
            yield Finding("note", what, where, "start all ranks")
        floor = directory.done_floor(worlds[0]) // self.queue.description.batches_per_file
        if consumed := [file.number for file in directory.files() if file.number < floor]:
            what = f"{len(consumed)} files (the first is {consumed[0]}) are consumed by all ranks, and not deleted yet"
            yield Finding("note", what, str(directory.path), "the ranks delete them when they open their next file")


def _read_all(path: Path, file: QueueFile, queue: Queue, split: str) -> int:
    """Size of a file, after reading all of it."""
    opened = read(path, file, queue, split)
    expected = [(column.name, column.type) for column in queue.description.schema.to_arrow()]
    for index in range(file.batches):
        try:
            batch = opened.record_batch(index)
            batch.validate(full=True)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"batch {index} cannot be read ({error})", file=str(path)) from None
        if [(column.name, column.type) for column in batch.schema] != expected:
            given = ", ".join(f"{column.name} {column.type}" for column in batch.schema)
            raise DataError(f"its columns are {given}, not those of batch_schema", file=str(path))
    return path.stat().st_size


def _doubled(directory: SplitDirectory) -> set[int]:
    counts = Counter(file.number for file in map(QueueFile.parse, directory.names()) if file is not None)
    return {number for number, count in counts.items() if count > 1}


def _some(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)[:8]))


def _unknown(directory: Path, names: Iterable[str]) -> Iterator[Finding]:
    for name in sorted(names):
        what = "not a file of the queue: no member reads or deletes it"
        yield Finding("warning", what, str(directory / name), "move it to another directory")


# -- file system -----------------------------------------------------------------------------------------------------


def check_file_system(directory: Path) -> tuple[list[Finding], str]:
    """Problems of a directory as a place for a queue, and the type of its file system."""
    kind = _file_system(directory)
    findings = _try_operations(directory)
    free = shutil.disk_usage(directory).free
    if free < _LEAST_FREE:
        what = f"only {format_bytes(free)} are free: providers stop when the disk is full"
        remedy = "free some space, or lower backlog_files and backlog_bytes"
        findings.append(Finding("warning", what, str(directory), remedy))
    if _NETWORK.match(kind):
        what = f"this is a network file system ({kind}); for several machines a queue needs this: {_NEEDS}"
        remedy = "on NFS, mount with lookupcache=positive and a short actimeo, or batches arrive seconds late"
        findings.append(Finding("note", what, str(directory), remedy))
    return findings, kind


def _try_operations(directory: Path) -> list[Finding]:
    """Try every operation of the protocol; returns those that failed."""
    old, new = (directory / f".{name}~doctor{secrets.token_hex(4)}.tmp" for name in ("old", "new"))
    findings: list[Finding] = []

    def expect(holds: bool, what: str) -> None:
        if not holds:
            findings.append(Finding("error", what, str(directory), f"use another file system for the queue: {_NEEDS}"))

    try:
        old.write_bytes(b"penstock")
        expect(old.name in os.listdir(directory), "a new file is not listed")
        os.rename(old, new)
        names = os.listdir(directory)
        expect(new.name in names and old.name not in names, "a renamed file is listed under its old name")
        expect(not rename(directory, old.name, new.name), "a file can be renamed twice, from its old name")
        with new.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY) as view:
            expect(view[:] == b"penstock", "a mapped file has other contents")
        new.unlink()
        expect(new.name not in os.listdir(directory), "a deleted file is still listed")
    except OSError as error:
        what = f"files cannot be created, renamed, mapped and deleted here: {error.strerror or error}"
        findings.append(Finding("error", what, str(directory), "make the directory writable for all members"))
    finally:
        for path in (old, new):
            with contextlib.suppress(OSError):  # reported already
                path.unlink(missing_ok=True)
    return findings


def _file_system(directory: Path) -> str:
    """Type of the mount of a directory, such as `ext4` or `nfs4`; empty if unknown."""
    path = directory.resolve()
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in (path, *path.parents) if parent in mounts), "")
