"""Who is at work on a queue, and who has died: leases that need no clock in common and no file times.

Every provider and consumer keeps one file in `members/`, and renames it now and then to the next beat:

    c3f09a2b7c41~l30~b17~d4242        consumer c3f09a2b7c41, lease 30 s, 17th beat, 4242 batches so far

Whoever looks on keeps in mind when, by its own monotonic clock, it first saw a beat. A member whose beat has not
changed for its lease is dead. A rename takes no room, so a member beats on a full disk too.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from penstock.errors import ConfigError
from penstock.files.atomic import naming
from penstock.fsqueue.layout import rename
from penstock.pipeline.control import PeriodicThread

__all__ = ["Member", "MemberWatch", "Membership", "facts_of", "is_running", "living"]

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

_NAME = re.compile(r"(?P<id>[\w-]+)~l(?P<lease>[\d.]+)~b(?P<beat>\d+)~d(?P<done>\d+)")
_BEATS_PER_LEASE = 5
_SHORTEST_LEASE = 0.05


@dataclass(frozen=True, slots=True)
class Member:
    """A member as the name of its file tells it."""

    id: str
    lease_seconds: float
    beat: int = 0
    done: int = 0
    """The batches it has published or delivered so far."""

    @property
    def name(self) -> str:
        lease = f"{self.lease_seconds:.3f}".rstrip("0").rstrip(".")
        return f"{self.id}~l{lease}~b{self.beat}~d{self.done}"

    @classmethod
    def parse(cls, name: str) -> Member | None:
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        return cls(found["id"], float(found["lease"]), int(found["beat"]), int(found["done"]))


class Membership:
    """This process, or this object in it, as a member of a queue, from `join` to `leave`.

    A thread beats. If it could not (the process was stopped, the machine slept), the lease may have run out and others
    have taken what was ours: `lapsed` says so to whoever holds something since then.
    """

    def __init__(
        self,
        directory: Path,
        role: str,
        *,
        lease_seconds: float,
        facts: Mapping[str, Any],
        clock: Clock = time.monotonic,
    ) -> None:
        if not _SHORTEST_LEASE <= lease_seconds < math.inf:
            raise ConfigError(f"lease_seconds must be at least {_SHORTEST_LEASE}, and finite, got {lease_seconds!r}")
        self.role = role
        self.id = self._draw()
        self.directory, self.lease_seconds, self.facts, self.clock = directory, lease_seconds, facts, clock
        self.done = 0
        self.lapses = 0
        """How often the lease may have run out."""
        self._beat = 0
        self._name: str | None = None
        self._last = clock()
        self._process = os.getpid()
        self._ticker = PeriodicThread(lease_seconds / _BEATS_PER_LEASE, self.beat, name=f"penstock-{self.id}")

    def _draw(self) -> str:
        return f"{self.role}{secrets.token_hex(6)}"

    @property
    def joined(self) -> bool:
        """Whether it is seen, and by this process's doing."""
        return self._name is not None and self._process == os.getpid()

    def lapsed(self, since: int) -> bool:
        """Whether the lease may have run out after `lapses` was `since`: what was taken then may be ours no more."""
        # In this order, since a beat that comes late counts itself before it renews the lease.
        return self._overdue or self.lapses != since

    @property
    def _overdue(self) -> bool:
        return self.clock() - self._last > self.lease_seconds

    def join(self) -> None:
        """Be seen from now on; a second call does nothing.

        What was made in one process is another member in every process that is forked from it, and what has joined
        cannot go along at all: two would have one name.
        """
        if self._name is not None:
            if self._process != os.getpid():
                raise ConfigError(
                    f"this {self.facts.get('role', 'member')} of {self.directory.parent} was at work in process "
                    f"{self._process} before process {os.getpid()} was forked from it; make one in each process"
                )
            return
        if self._process != os.getpid():
            self._process, self.id = os.getpid(), self._draw()
        self._enter()
        self._ticker.start()

    def beat(self) -> None:
        """Show that we live."""
        old = self._name
        if old is None:
            return
        if self._overdue:
            self.lapses += 1
        now = self.clock()  # before the rename: the lease counts from when others can see it
        new = Member(self.id, self.lease_seconds, self._beat + 1, self.done).name
        try:
            if rename(self.directory, old, new):
                self._name, self._beat, self._last = new, self._beat + 1, now
            elif self.directory.is_dir():
                self._enter()  # others took us for dead, and tidied up
        except OSError as error:
            logger.warning("%s cannot renew its lease on %s: %s", self.id, self.directory.parent, error)

    def leave(self) -> None:
        """Be seen no more; a second call does nothing."""
        self._ticker.stop()
        name, self._name = self._name, None
        if name is not None:
            (self.directory / name).unlink(missing_ok=True)

    def _enter(self) -> None:
        facts = {
            **self.facts,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            **_process_facts(),
        }
        now = self.clock()
        name = Member(self.id, self.lease_seconds, self._beat, self.done).name
        # Under its own name from the start: what is left of one who dies here goes the way of all members.
        try:
            (self.directory / name).write_bytes(orjson.dumps(facts))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                (self.directory / name).unlink(missing_ok=True)
                raise
            # A consumer makes room on a full disk, if it is let in: the name says all that others need.
            with naming(str(self.directory / name)):
                os.truncate(self.directory / name, 0)
        self._name, self._last = name, now


class MemberWatch:
    """Sees to it who lives: what one onlooker has seen of the members of a queue, and when."""

    def __init__(self, directory: Path, *, lease_seconds: float, clock: Clock = time.monotonic) -> None:
        self.directory, self.lease_seconds, self.clock = directory, lease_seconds, clock
        self._seen: dict[str, tuple[int | None, float]] = {}
        self._present: dict[str, Member] = {}
        self._looked: float | None = None

    def beat_of(self, owner: str) -> int | None:
        """The beat that a member is at; None if it is not listed."""
        member = self.look().get(owner)
        return None if member is None else member.beat

    def is_dead(self, owner: str) -> bool:
        """Whether a member has not moved for as long as its lease. One that is not listed has the lease of ours."""
        self.look()
        if not self._overdue(owner):
            return False
        self.look(fresh=True)  # we may have slept ourselves
        return self._overdue(owner)

    def look(self, *, fresh: bool = False) -> dict[str, Member]:
        """The members that are listed; not more often than is of use, unless `fresh`."""
        now = self.clock()
        if fresh or self._looked is None or now - self._looked > self.lease_seconds / (2 * _BEATS_PER_LEASE):
            self._present, self._looked = living(self.directory), now
            for owner, member in self._present.items():
                self._note(owner, member.beat)
        return self._present

    def forget(self, owner: str) -> None:
        """Remove what a dead member left here."""
        member = self._present.pop(owner, None)
        if member is not None:
            (self.directory / member.name).unlink(missing_ok=True)

    def _overdue(self, owner: str) -> bool:
        member = self._present.get(owner)
        since = self._note(owner, None if member is None else member.beat)
        return self.clock() - since > (self.lease_seconds if member is None else member.lease_seconds)

    def _note(self, owner: str, beat: int | None) -> float:
        seen = self._seen.get(owner)
        if seen is None or seen[0] != beat:
            seen = self._seen[owner] = (beat, self.clock())
        return seen[1]


def living(directory: Path) -> dict[str, Member]:
    """The members listed in a directory, dead ones among them, by id."""
    found: dict[str, Member] = {}
    for name in os.listdir(directory):
        member = Member.parse(name)
        # In the middle of a rename a listing may show both names.
        if member is not None and (member.id not in found or found[member.id].beat < member.beat):
            found[member.id] = member
    return found


def is_running(facts: Mapping[str, Any]) -> bool | None:
    """Whether the process of a member runs, as its facts tell; None if that cannot be seen from here.

    Only Linux tells a machine, its process numbers and the start of a process apart from all others; on others, and of
    processes on other machines or in other containers, the lease alone says it.
    """
    here = _process_facts()
    if not here or facts.get("machine") != here["machine"]:
        return None
    return _started(int(facts["pid"])) == facts.get("started")


def _process_facts() -> dict[str, Any]:
    """What tells this process from all others that ever were; nothing where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return {}
    started = _started(os.getpid())
    return {} if started is None else {"machine": machine, "started": started}


def _started(pid: int) -> str | None:
    """When a process was started, in ticks since the machine was; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def facts_of(directory: Path, member: Member) -> dict[str, Any]:
    """What a member says of itself; nothing if it is gone."""
    for name in [member.name, *(name for name in os.listdir(directory) if name.startswith(f"{member.id}~"))]:
        try:
            facts: dict[str, Any] = orjson.loads((directory / name).read_bytes())
            return facts
        except (OSError, ValueError):
            continue
    return {}
