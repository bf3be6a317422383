"""Members of a queue: options, waiting, and `QueueMember`, which joins, renews its lease, reaps and leaves.

Every provider and consumer keeps one file in `members/` and renames it to the next heartbeat several times per lease. A
rename needs no disk space, so a member lives on a full disk, too.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, TypedDict

import orjson

from penstock._suggest import check_options
from penstock.distributed.ranks import Rank
from penstock.errors import ConfigError, StalledError
from penstock.files.atomic import naming, read_regular
from penstock.fsqueue.layout import Member, rename
from penstock.fsqueue.leases import SHORTEST_LEASE, LeaseReaper, MemberWatch, heartbeat_seconds, is_expired
from penstock.fsqueue.queue import Queue
from penstock.metrics.readings import Readings
from penstock.metrics.targets import Metrics, MetricsConfig
from penstock.metrics.watch import MetricsWatch
from penstock.pipeline.control import PeriodicThread

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE, _PAUSE, _LONG_PAUSE = 0.0005, 0.004, 0.025
_LONG_WAIT, _WARN_AFTER = 30.0, 15.0


class QueueKeywords(TypedDict, total=False):
    """Fields of `QueueOptions`, as keywords of whatever takes them."""

    lease_seconds: float
    timeout_seconds: float | None
    poll_seconds: float | None
    durable: bool
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """Options of every member of a queue."""

    lease_seconds: float = 30.0
    """Seconds without a heartbeat after which a member counts as dead, and others take over what it holds."""
    timeout_seconds: float | None = 600.0
    """Longest wait for a batch, or of a sink for room, before StalledError; None: no limit."""
    poll_seconds: float | None = None
    """Pause between two listings while waiting; None: short at first, then longer."""
    durable: bool = False
    """Flush published files to disk, so that they survive a power failure; some milliseconds each."""
    metrics: Metrics = None
    """Where metrics of the queue and of this member go; see docs/metrics.md."""

    def __post_init__(self) -> None:
        if not SHORTEST_LEASE <= self.lease_seconds < math.inf:
            raise ConfigError(f"lease_seconds must be finite and at least {SHORTEST_LEASE}, got {self.lease_seconds}")
        for name in ("timeout_seconds", "poll_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be positive, or None, got {value!r}")
        if self.metrics is not None:
            object.__setattr__(self, "metrics", MetricsConfig.of(self.metrics))

    @classmethod
    def of(
        cls,
        options: QueueOptions | Mapping[str, Any] | None,
        keywords: Mapping[str, Any],
        *,
        without: Collection[str] = (),
        **defaults: Any,
    ) -> QueueOptions:
        """Options with keywords that override them.

        `defaults` are those of the caller, for a `QueueOptions` too that leaves them as they are; options in `without`
        have no effect on the caller and are refused.
        """
        known = [each.name for each in fields(cls) if each.name not in without]
        if isinstance(options, QueueOptions):
            # By identity: a value that was given counts as given, also where it equals the default.
            values = {each.name: (getattr(options, each.name), each.default) for each in fields(cls)}
            options = {name: value for name, (value, default) in values.items() if value is not default}
        given = {**(options or {}), **keywords}
        check_options(given, known)
        return cls(**{**defaults, **given})


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError for a value that is not allowed."""
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


class Backoff:
    """Wait with growing pauses, a time limit, and a warning that says what is missing.

    Pauses grow to 4 ms during the first 30 s and to 25 ms later, or to `longest_seconds`, or are `poll_seconds` each.
    A listing costs some 50 us, on a network more. Without `describe` a long wait is normal and not logged.
    """

    def __init__(
        self,
        timeout_seconds: float | None,
        describe: Callable[[], str] | None = None,
        *,
        poll_seconds: float | None = None,
        longest_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout_seconds, self.describe, self.clock = timeout_seconds, describe, clock
        self.poll_seconds, self.longest_seconds = poll_seconds, longest_seconds
        self._since: float | None = None
        self._warned = False

    @property
    def waited(self) -> float:
        return 0.0 if self._since is None else self.clock() - self._since

    def pause(self) -> None:
        """Sleep; raises StalledError when the time is up."""
        if self._since is None:
            self._since = self.clock()
        waited = self.waited
        if self.timeout_seconds is not None and waited >= self.timeout_seconds:
            missing = "an event" if self.describe is None else self.describe()
            raise StalledError(f"waited {self.timeout_seconds:g} s for {missing}")
        if waited > _WARN_AFTER and not self._warned and self.describe is not None:
            self._warned = True
            logger.warning("waiting for %s", self.describe())
        longest = self.longest_seconds or (_PAUSE if waited < _LONG_WAIT else _LONG_PAUSE)
        seconds = min(max(_SHORTEST_PAUSE, waited / 20), longest) if self.poll_seconds is None else self.poll_seconds
        if self.timeout_seconds is not None:
            seconds = min(seconds, max(self.timeout_seconds - waited, 0.0))
        time.sleep(seconds)


class QueueMember:
    """Provider ("p") or consumer ("c") of a queue, from `join` to `leave`.

    A thread sends heartbeats. If it could not (the process was stopped, the machine slept), the lease may have expired
    and others may have taken over what this member held: `lapsed` tells.
    """

    def __init__(
        self,
        queue: Queue,
        role: str,
        facts: Mapping[str, Any],
        options: QueueOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queue, self.role, self.facts, self.clock = queue, role, facts, clock
        self.options = options or QueueOptions()
        self.lease_seconds = self.options.lease_seconds
        self.watch = MemberWatch(queue.members, lease_seconds=self.lease_seconds, clock=clock)
        self.reaper = LeaseReaper(queue, self.watch)
        self.id = self._new_id()
        self.done = 0
        """Batches published or delivered so far."""
        self.lapses = 0
        """Number of times that the lease may have expired."""
        self._beat = 0
        self._name: str | None = None
        self._renewed_at = clock()
        self._process = os.getpid()
        self.readings: Callable[[], Readings] | None = None
        """Metrics of the queue and of this member, if somebody may want them."""
        self._metrics_watch: MetricsWatch | None = None
        self._heartbeat = PeriodicThread(heartbeat_seconds(self.lease_seconds), self.beat, name=f"penstock-{self.id}")

    @classmethod
    def consumer(cls, queue: Queue, order: str, rank: Rank, options: QueueOptions) -> Self:
        """A consumer that has not joined yet."""
        facts = {"role": "consumer", "order": order, "rank": rank.rank, "world": rank.world_size}
        return cls(queue, "c", facts, options)

    @classmethod
    def provider(cls, queue: Queue, facts: Mapping[str, Any], options: QueueOptions) -> Self:
        """A provider that has not joined yet."""
        return cls(queue, "p", {"role": "provider", **facts}, options)

    def _new_id(self) -> str:
        return f"{self.role}{secrets.token_hex(6)}"

    @property
    def joined(self) -> bool:
        """True if this process has joined."""
        return self._name is not None and self._process == os.getpid()

    def lapsed(self, since: int) -> bool:
        """True if the lease may have expired after `lapses` was `since`."""
        # In this order: a late heartbeat counts the lapse before it renews the lease.
        return self._overdue or self.lapses != since

    @property
    def _overdue(self) -> bool:
        return is_expired(self.clock() - self._renewed_at, self.lease_seconds)

    def join(self) -> Self:
        """Become visible to the other members; a second call does nothing.

        A member that has not joined gets an id of its own in a forked process. One that has joined cannot be used
        there: two processes would share its name.
        """
        if self._name is not None:
            if self._process != os.getpid():
                raise ConfigError(
                    f"this {self.facts.get('role', 'member')} of {self.queue.path} joined in process {self._process}, "
                    f"before process {os.getpid()} was forked from it; make one in each process"
                )
            return self
        if self._process != os.getpid():
            self._process, self.id = os.getpid(), self._new_id()
        with self.queue.guarded():
            self._enter()
        self._heartbeat.start()
        metrics = self.options.metrics
        if self.readings is not None and isinstance(metrics, MetricsConfig):
            name, rank = str(self.facts.get("role", "member")), self.facts.get("rank")
            description = f"{name} of {self.queue.path}"
            self._metrics_watch = metrics.watch("queue", name, self.readings, description=description, rank=rank)
        return self

    def beat(self) -> None:
        """Renew the lease."""
        old = self._name
        if old is None:
            return
        if self._overdue:
            self.lapses += 1
        now = self.clock()  # before the rename: the lease counts from when others can see it
        new = Member(self.id, self.lease_seconds, self._beat + 1, self.done).name
        try:
            if rename(self.queue.members, old, new):
                self._name, self._beat, self._renewed_at = new, self._beat + 1, now
            elif self.queue.members.is_dir():
                self._enter()  # others reaped us
        except OSError as error:
            logger.warning("%s cannot renew its lease on %s: %s", self.id, self.queue.path, error)

    def reap_if_due(self) -> None:
        """Release what dead members hold, four times per lease."""
        if self.reaper.due:
            self.reaper.reap(alive=self.id)

    def end_metrics(self, error: BaseException | None = None) -> None:
        """Write the last metrics, while they can still be read."""
        if self._metrics_watch is not None:
            self._metrics_watch.end(error=error)

    def leave(self) -> None:
        """Become invisible; a second call does nothing."""
        self.end_metrics()
        self._heartbeat.stop()
        name, self._name = self._name, None
        if name is not None:
            (self.queue.members / name).unlink(missing_ok=True)

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
        path = self.queue.members / name  # its final name: what is left if we die here is reaped as any member
        try:
            path.write_bytes(orjson.dumps(facts))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                path.unlink(missing_ok=True)
                raise
            # A consumer makes room on a full disk, if it can join: the name is all that others need.
            with naming(str(path)):
                os.truncate(path, 0)
        self._name, self._renewed_at = name, now


def is_running(facts: Mapping[str, Any]) -> bool | None:
    """True if the process of a member runs; None if that cannot be seen from here.

    Only Linux identifies machine, process and start time. Elsewhere, and for processes on other machines or in other
    containers, the lease decides.
    """
    here = _process_facts()
    if not here or facts.get("machine") != here["machine"]:
        return None
    return _start_time(int(facts["pid"])) == facts.get("started")


def _process_facts() -> dict[str, Any]:
    """Identity of this process; empty where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return {}
    started = _start_time(os.getpid())
    return {} if started is None else {"machine": machine, "started": started}


def _start_time(pid: int) -> str | None:
    """Start of a process in ticks since boot; None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def facts_of(directory: Path, member: Member) -> dict[str, Any]:
    """Facts that a member wrote about itself: role, host, process; empty if it is gone."""
    for name in [member.name, *(name for name in os.listdir(directory) if name.startswith(f"{member.id}~"))]:
        try:
            facts: dict[str, Any] = orjson.loads(read_regular(directory / name))
            return facts
        except (OSError, ValueError):
            continue
    return {}
