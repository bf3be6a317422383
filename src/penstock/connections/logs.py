"""Logs of messages with partitions and offsets: the contract that NATS, Redis and Kafka are adapted to.

    log = NatsLog("nats://localhost:4222", "events")
    bounds = log.bounds(0)
    found = log.read(0, bounds.first, max_messages=1000, max_bytes=1 << 20, wait_seconds=0.0)
    found.values, found.following        # what was read, and the offset to read from next

An offset is a whole number that grows along a partition; there may be gaps. Whoever reads keeps the position: nothing
is acknowledged, so the same messages can be read again, from any offset that the broker still has. An adapter raises
ConnectionError for what may work later, and other errors for what will not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import xxhash

from penstock.errors import ConfigError, ResumeError

Answer = TypeVar("Answer")
_USER = re.compile(r"(?<=://)(?:[^/]*@|[^/@:]*:(?!\d+(?:[/?#,]|$))[^@]*@)")
"""A password may have an @ in it, or a / by mistake."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 1.0


@dataclass(frozen=True, slots=True)
class LogBounds:
    """Offsets that a partition has now: from `first` up to, and without, `end`."""

    first: int
    end: int


@dataclass(slots=True)
class Messages:
    """Messages of one partition, in order, as columns."""

    following: int
    """Offset to read from next."""
    caught_up: bool = False
    """True if the partition had no more messages when it was read."""
    offsets: list[int] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    """Milliseconds since 1970, as the broker or the producer set them."""
    keys: list[bytes | None] = field(default_factory=list)
    headers: list[Mapping[str, str] | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.offsets)

    def part(self, start: int, stop: int) -> Messages:
        """Some of the messages; reading goes on after them."""
        cut = slice(start, stop)
        last = stop >= len(self.offsets)
        return Messages(
            self.following if last else self.offsets[stop - 1] + 1,
            self.caught_up and last,
            *(column[cut] for column in (self.offsets, self.values, self.times, self.keys, self.headers)),  # type: ignore[arg-type]
        )

    def extend(self, others: Messages) -> None:
        self.offsets += others.offsets
        self.values += others.values
        self.times += others.times
        self.keys += others.keys
        self.headers += others.headers
        self.following, self.caught_up = others.following, others.caught_up

    @property
    def nbytes(self) -> int:
        return sum(map(len, filter(None, self.values)))


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Messages to publish, as columns. A message that is sent again has the number that it had."""

    run: str
    numbers: Sequence[int]
    """Number of each message in the run, growing."""
    values: Sequence[bytes]
    keys: Sequence[bytes | None]
    partitions: Sequence[int]

    def ids(self) -> list[str]:
        return [message_id(self.run, number, value) for number, value in zip(self.numbers, self.values)]

    def part(self, start: int, stop: int) -> Outgoing:
        cut = slice(start, stop)
        return Outgoing(self.run, self.numbers[cut], self.values[cut], self.keys[cut], self.partitions[cut])


def message_id(run: str, number: int, value: bytes) -> str:
    """Id of a message: its run, its number, and a hash of its value."""
    return f"{run}-{number}-{xxhash.xxh3_64_hexdigest(value)}"


@dataclass(slots=True)
class Published:
    """Messages that a run has published from some offset on."""

    following: int
    """Offset after the last message of the log."""
    ids: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Limits of one look at a partition."""

    messages: int
    nbytes: int = 1 << 20
    """About that many: values alone are counted, and the last message may exceed it."""
    wait_seconds: float = 0.0
    """Longest wait for the first message; others are not waited for."""


class Log(Protocol):
    """Log of a broker. Not thread-safe; it connects when it is first used, and again after `close`."""

    name: str
    """Address without credentials, for messages."""

    def partitions(self) -> list[int]: ...

    def identity(self) -> str | None:
        """Text that differs after the log was deleted and made again; None if the broker has none."""
        ...

    def bounds(self, partition: int) -> LogBounds: ...

    def read(self, partition: int, offset: int, limits: ReadLimits, *, after: bool) -> Messages:
        """Messages from an offset on; at least one, if there is one.

        `after` is True if the message before the offset was read. Raises ResumeError if the broker has dropped messages
        at or after the offset, or has never had it.
        """
        ...

    def offset_at(self, partition: int, milliseconds: int) -> int:
        """Offset of the first message that is not older than a time; the end if there is none."""
        ...

    def publish(self, messages: Outgoing) -> None:
        """Append messages, in order within a partition; returns when the broker has stored them.

        After an error some may be stored: `published` tells which.
        """
        ...

    def new_run(self) -> str:
        """Name for the messages of one run, which no other run has."""
        ...

    def published(self, run: str, partition: int, offset: int) -> Published:
        """Messages of a run from an offset on, which is one that `bounds` or this method returned."""
        ...

    def spell(self, offset: int) -> str:
        """An offset as users of the broker write it."""
        ...

    def parse(self, text: str | int) -> int:
        """The offset that `spell`, or a user, wrote."""
        ...

    def close(self) -> None:
        """Close the connection. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class LogAddress:
    """URL of a log in parts."""

    scheme: str
    server: str
    """Scheme, credentials, hosts and ports: what a client connects to."""
    path: str
    options: Mapping[str, str]

    @classmethod
    def of(cls, url: str, schemes: Sequence[str]) -> LogAddress:
        parts = urlsplit(url)
        if parts.scheme not in schemes or not parts.netloc:
            raise ConfigError(f"expected a URL such as {schemes[0]}://host:port/name, got {hidden(url)!r}")
        if hidden(url) != url and "@" not in parts.netloc:
            raise ConfigError(f"{hidden(url)!r} has a / in its password; in a URL, write it as %2F")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        return cls(parts.scheme, f"{parts.scheme}://{parts.netloc}", unquote(parts.path).strip("/"), options)

    def take(self, known: Sequence[str]) -> None:
        """Refuse options in the query that are not known."""
        for name in self.options:
            if name not in known:
                raise ConfigError(f"{hidden(self.server)} has no option {name!r} in its URL; known: {', '.join(known)}")


def hidden(url: str) -> str:
    """The URL without user, password and token."""
    return _USER.sub("***@", url)


def dropped(log: Log, partition: int, offset: int, first: int) -> ResumeError:
    """Error for a position whose messages the broker has deleted."""
    return ResumeError(
        f"{log.name}, partition {partition}: reading is at offset {log.spell(offset)}, and the broker has dropped "
        f"everything before {log.spell(first)}; what was between is lost to this run: raise the retention of the "
        "broker, or start without the state"
    )


def made_again(log: Log, partition: int, offset: int, end: int) -> ResumeError:
    """Error for a position beyond the end of a log."""
    return ResumeError(
        f"{log.name}, partition {partition}: reading is at offset {log.spell(offset)}, and the log ends at "
        f"{log.spell(end)} now: it was deleted and made again, or restored from a backup; start without the state"
    )


class Retries:
    """Retries of what failed because the connection was lost, for `seconds` after the last success.

    Waits are measured by a clock that does not jump. `stopped` ends them at once.
    """

    def __init__(self, log: Log, seconds: float, stopped: Callable[[float], bool]) -> None:
        self._log, self._seconds, self._stopped = log, seconds, stopped
        """`stopped(seconds)` waits that long, and returns True, at once, if the run is stopped."""

    def __call__(self, action: Callable[[], Answer], after_failure: Callable[[], None] | None = None) -> Answer:
        """The result of an action; `after_failure` runs, with a new connection, before it is repeated."""
        since, pause, failed = time.monotonic(), _FIRST_PAUSE_SECONDS, False
        while True:
            try:
                if failed and after_failure is not None:
                    after_failure()
                return action()
            except ConnectionError as error:
                self._log.close()
                failed = True
                if time.monotonic() - since >= self._seconds:
                    raise ConnectionError(
                        f"{self._log.name}: no connection for {self._seconds:g} s (retry_seconds): {error}"
                    ) from error
                if self._stopped(pause):
                    raise
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
