"""Status of a queue: one snapshot of its names, or two for rates. Nothing is changed.

before = look(queue); time.sleep(1); status = look(queue).since(before)
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.config.shared import load_shared_config
from penstock.errors import QueueNotFoundError
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.fsqueue.layout import QueueFile, RankCursor, list_cursors, list_members
from penstock.fsqueue.leases import is_expired
from penstock.fsqueue.members import facts_of
from penstock.fsqueue.queue import QUEUE_FILE, Queue
from penstock.metrics.readings import Readings, key_of


@dataclass(frozen=True, slots=True)
class SplitStatus:
    """Files and batches of one split."""

    name: str
    ready_files: int
    ready_batches: int
    """Batches of ready files that are not delivered yet."""
    ready_bytes: int
    taken_files: int
    taken_batches: int
    aside_files: int
    """Unreadable files that were set aside."""
    being_written: int
    returned_files: int
    """Files whose consumer died: some of their batches are delivered twice."""
    oldest_seconds: float | None
    """Age of the oldest ready file, by the clocks of this machine and of the disk."""
    made_batches: int
    end: int | None
    """Number of batches after which the split ends; None if it has no end."""
    cursors: Sequence[RankCursor] = ()
    published_per_second: float | None = None
    delivered_per_second: float | None = None

    @property
    def gone_batches(self) -> int:
        """Batches that are neither ready nor claimed: delivered, as far as names show."""
        if self.cursors:
            return max(cursor.read for cursor in self.cursors)
        return self.made_batches - self.ready_batches - self.taken_batches

    @property
    def finished(self) -> bool:
        return self.end is not None and self.made_batches >= self.end and not self.ready_files and not self.taken_files


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One provider or consumer."""

    id: str
    role: str
    lease_seconds: float
    beat: int
    batches: int
    """Published or delivered at its last heartbeat."""
    silent_seconds: float | None
    """Seconds since its last heartbeat, by the clocks of this machine and of the disk."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Host, process id, start time, and more."""
    alive: bool | None = None
    """True if it had a heartbeat between two snapshots; None if they were too close to tell."""

    @property
    def seems_alive(self) -> bool:
        """Estimate for display; the lease rule uses no clock of the disk."""
        if self.alive is not None:
            return self.alive
        return self.silent_seconds is None or not is_expired(self.silent_seconds, self.lease_seconds)


@dataclass(frozen=True, slots=True)
class Status:
    """Snapshot of a queue."""

    path: Path
    fingerprint: str
    meta: Mapping[str, Any]
    settings: Mapping[str, Any]
    splits: Sequence[SplitStatus]
    members: Sequence[MemberStatus]
    at: float
    """Time of the snapshot, by the monotonic clock."""
    seconds: float | None = None
    """Seconds between the two snapshots of the rates."""

    def since(self, before: Status) -> Status:
        """This snapshot with rates since an earlier one, and members that are known to live."""
        seconds = max(self.at - before.at, 1e-9)
        old_splits = {split.name: split for split in before.splits}
        old_members = {member.id: member for member in before.members}
        return replace(
            self,
            seconds=seconds,
            splits=[_rated(split, old_splits.get(split.name), seconds) for split in self.splits],
            members=[_judged(member, old_members.get(member.id), seconds) for member in self.members],
        )

    def with_role(self, role: str) -> list[MemberStatus]:
        return [member for member in self.members if member.role == role and member.seems_alive]

    @property
    def advice(self) -> str:
        """The bottleneck, in a sentence."""
        providers, consumers = self.with_role("provider"), self.with_role("consumer")
        ready = sum(split.ready_files for split in self.splits)
        if all(split.finished for split in self.splits):
            return "every split has been read to its end"
        if not providers and not consumers:
            return f"no member is at work; {_files(ready)} ready for a trainer" if ready else "no member is at work"
        if not providers and not all(split.end is not None for split in self.splits):
            rest = f"; {_files(ready)} left for the trainer" if ready else ", and the trainer waits"
            return f"no provider is at work{rest}: run `python prepare.py <config>`"
        if not consumers:
            return f"no trainer is at work; {_files(ready)} ready for one"
        return self._bottleneck(len(consumers))

    def _bottleneck(self, consumers: int) -> str:
        # Splits that nobody reads, such as a validation split between two evaluations, tell nothing.
        read = [split for split in self.splits if split.gone_batches or split.taken_files] or list(self.splits)
        ready = min(split.ready_files for split in read)
        if ready == 0:
            return "the provider is the bottleneck: trainers wait for files; start more `python prepare.py <config>`"
        made = sum(split.published_per_second or 0.0 for split in read)
        gone = sum(split.delivered_per_second or 0.0 for split in read)
        if gone > 1.1 * made and ready <= 4 * consumers:
            return "the provider is slower than the trainer: the queue is running empty"
        if ready <= consumers:
            return "provider and trainer are about equally fast: few files are ready"
        return "the trainer is the bottleneck: files are ready for it, as they should be"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        facts = asdict(self)
        del facts["at"]
        return {**facts, "path": str(self.path), "advice": self.advice}


def look(queue: Queue) -> Status:
    """Take a snapshot, without rates."""
    with queue.guarded():
        return Status(
            queue.path,
            queue.fingerprint,
            dict(queue.description.meta),
            dict(queue.description.settings),
            [_split_status(queue, split) for split in queue.description.splits],
            _members(queue),
            time.monotonic(),
        )


def queue_readings(status: Status) -> Readings:
    """Metrics of a queue by name: backlog, leases and members."""
    found: Readings = {}
    for split in status.splits:
        values = {
            "ready_files": split.ready_files,
            "ready_batches": split.ready_batches,
            "ready_bytes": split.ready_bytes,
            "leased_files": split.taken_files,
            "leased_batches": split.taken_batches,
            "aside_files": split.aside_files,
            "returned_files": split.returned_files,
            "oldest_seconds": split.oldest_seconds or 0.0,
            "published_batches_total": split.made_batches,
            "delivered_batches_total": split.gone_batches,
        }
        for name, value in values.items():
            found[key_of(f"penstock_queue_{name}", split=split.name)] = value
    for role in ("provider", "consumer"):
        members = [member for member in status.members if member.role == role]
        alive = sum(member.seems_alive for member in members)
        found[key_of("penstock_queue_members", role=role, state="alive")] = alive
        found[key_of("penstock_queue_members", role=role, state="stale")] = len(members) - alive
    return found


def find_queue(place: PathLike) -> Path:
    """Path of the queue of a place: a queue, the directory of a dataset that has one, or a config file."""
    place = require_local(place, "a queue")
    if place.is_file():
        config = load_shared_config(place)
        named = config.get("queue_dir")
        if named is None and "dataset" not in config:
            raise QueueNotFoundError(f"{place} names neither a dataset nor a queue_dir, so it has no queue")
        return Path(named) if named is not None else Path(config.get("data_root", "data")) / config["dataset"] / "queue"
    if not (place / QUEUE_FILE).exists() and (place / "queue" / QUEUE_FILE).exists():
        return place / "queue"
    return place


def _split_status(queue: Queue, name: str) -> SplitStatus:
    directory = queue.split(name)
    names = directory.names()
    files = [file for file in map(QueueFile.parse, names) if file is not None]
    ready = [file for file in files if file.owner is None]
    claimed = [file for file in files if file.owner is not None]
    stats = [found for file in ready if (found := _stat(directory.at(file))) is not None]
    lanes = queue.lanes(directory)
    end, per_file = lanes.end(), queue.description.batches_per_file
    made = sum(lane.number // lanes.count for lane in lanes.all()) * per_file
    return SplitStatus(
        name,
        len(ready),
        sum(file.batches - file.start for file in ready),
        sum(found.st_size for found in stats),
        len(claimed),
        sum(file.batches - file.start for file in claimed),
        len(directory.rejected()),
        len(list(directory.temporaries())),
        sum(file.returns > 0 for file in files),
        max((max(0.0, time.time() - found.st_mtime) for found in stats), default=None),
        made if end is None else min(made, end),
        end,
        sorted(_cursors(directory.cursors), key=lambda cursor: (cursor.world, cursor.rank)),
    )


def _cursors(directory: Path) -> list[RankCursor]:
    return list_cursors(directory) if directory.is_dir() else []  # git drops empty directories


def _members(queue: Queue) -> list[MemberStatus]:
    found: list[MemberStatus] = []
    if not queue.members.is_dir():
        return found
    for member in list_members(queue.members).values():
        facts = facts_of(queue.members, member)
        stat = _stat(queue.members / member.name)
        # A rename changes the ctime of a file, not its mtime.
        silent = None if stat is None else max(0.0, time.time() - stat.st_ctime)
        role = str(facts.get("role") or {"p": "provider", "c": "consumer"}.get(member.id[0], "member"))
        found.append(MemberStatus(member.id, role, member.lease_seconds, member.beat, member.done, silent, facts))
    return sorted(found, key=lambda member: (member.role != "provider", str(member.facts.get("since")), member.id))


def _rated(split: SplitStatus, before: SplitStatus | None, seconds: float) -> SplitStatus:
    if before is None:
        return split
    return replace(
        split,
        published_per_second=max(0, split.made_batches - before.made_batches) / seconds,
        delivered_per_second=max(0, split.gone_batches - before.gone_batches) / seconds,
    )


def _judged(member: MemberStatus, before: MemberStatus | None, seconds: float) -> MemberStatus:
    if before is None or before.beat != member.beat:
        return replace(member, alive=True)
    return replace(member, alive=False) if is_expired(seconds, member.lease_seconds) else member


def _stat(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _files(number: int) -> str:
    return "1 file is" if number == 1 else f"{number:,} files are"
