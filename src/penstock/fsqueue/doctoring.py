"""What may be wrong with a queue: every name and every byte of it is looked at, and what is safe to mend is mended.

The verdict on who is dead is the same as that of the members: by watching, for as long as their lease.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from penstock.errors import StaleQueueError
from penstock.files.listing import PathLike
from penstock.files.places import require_local
from penstock.fsqueue.caretaking import Caretaker
from penstock.fsqueue.checking import Examination, check_split, strangers
from penstock.fsqueue.findings import Diagnosis, Finding
from penstock.fsqueue.lanes import Lanes
from penstock.fsqueue.members import Member, Watch, living
from penstock.fsqueue.probing import problems_of_the_place
from penstock.fsqueue.queue import Queue, how_to_purge

__all__ = ["Diagnosis", "Finding", "examine"]

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
        watch = Watch(queue.members, lease_seconds=_lease(queue, wait_seconds))
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
    exam: Examination, watch: Watch, wait_seconds: float | None, on_wait: Callable[[float, int], None] | None
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


def _left_behind(exam: Examination, watch: Watch) -> Iterator[Finding]:
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
        Caretaker(queue, watch).round()
    remedy = "the next provider or consumer gives it back, or --repair"
    for what, where in found:
        mended = "given back" if exam.repair and not os.path.lexists(where) else None
        yield Finding("warning", what, str(where), remedy, mended)


def _is_member(name: str) -> bool:
    return Member.parse(name) is not None or name.endswith(".tmp")
