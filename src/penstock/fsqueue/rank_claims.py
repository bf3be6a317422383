"""Who reads a rank of a split in strict order: one reader at a time, or two would both get its batches.

A reader keeps one empty file in `cursors/` while it reads:

    r0of2.by-c3f09a2b7c41         consumer c3f09a2b7c41 reads rank 0 of 2

It puts its file there before it looks for those of others, so that of two at least one sees the other.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from penstock.distributed.ranks import Rank
from penstock.errors import ConfigError, StalledError
from penstock.fsqueue.backoff import Backoff
from penstock.fsqueue.members import facts_of, is_running
from penstock.fsqueue.split_reader import Split

__all__ = ["RankClaim", "is_claim"]

_NAME = re.compile(r"r(\d+)of(\d+)\.by-([\w-]+)")
_LOOKS = 3
"""How often a member is looked for that is not listed: a listing can miss a file that is just being renamed."""


def is_claim(name: str) -> bool:
    """Whether a file in `cursors/` says who reads a rank."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class _Other:
    rank: Rank
    owner: str

    @property
    def name(self) -> str:
        return f"r{self.rank.rank}of{self.rank.world_size}.by-{self.owner}"


class RankClaim:
    """One reader's claim on a rank of a split."""

    def __init__(self, split: Split, rank: Rank) -> None:
        self.split, self.rank = split, rank
        self._directory = split.queue.split(split.name).cursors
        self._held: str | None = None
        self._lapses = 0
        self._beats: dict[str, int | None] = {}
        """The beat at which each other reader was first seen."""

    def take(self, timeout_seconds: float | None = None) -> None:
        """Be the one reader of the rank, waiting for the lease of one that may be dead; again does nothing.

        Raises ConfigError while another one lives, and StalledError if that is not known in time.
        """
        if self._held is not None:
            return
        member, watch = self.split.member, self.split.caretaker.watch
        name = _Other(self.rank, member.id).name
        (self._directory / name).touch()
        try:
            waiting: list[_Other] = []
            patience = Backoff(timeout_seconds, lambda: self._describe_wait(waiting[0]))
            while True:
                waiting = [other for other in self._others() if not self._is_gone(other)]
                for other in waiting:
                    beat = watch.beat_of(other.owner)
                    if self._beats.setdefault(other.owner, beat) != beat or self._runs_here(other):
                        raise ConfigError(self._refusal(other))
                if not waiting:
                    break
                patience.pause()
        except BaseException:
            (self._directory / name).unlink(missing_ok=True)
            raise
        self._held, self._lapses = name, member.lapses

    def check(self) -> None:
        """Raises if our lease may have run out, and another reader has the rank."""
        member = self.split.member
        if self._held is None or not member.lapsed(self._lapses):
            return
        self._lapses = member.lapses
        if not (self._directory / self._held).exists():
            raise StalledError(
                f"{self._what()} was taken over by another reader: this one, {member.id}, showed no sign of life for "
                f"longer than its lease of {member.lease_seconds:g} s; pass a longer lease_seconds, or end one of them"
            )

    @property
    def held(self) -> bool:
        """Whether the rank is still ours."""
        return self._held is not None and (self._directory / self._held).exists()

    def release(self) -> None:
        """Let others read the rank; again does nothing."""
        held, self._held = self._held, None
        if held is not None:
            (self._directory / held).unlink(missing_ok=True)

    def _others(self) -> list[_Other]:
        """Claims that go against ours: on the same rank, or of another number of ranks."""
        found = []
        for name in os.listdir(self._directory):
            if (claim := _NAME.fullmatch(name)) is None or claim[3] == self.split.member.id:
                continue
            other = _Other(Rank(int(claim[1]), int(claim[2])), claim[3])
            if other.rank == self.rank or other.rank.world_size != self.rank.world_size:
                found.append(other)
        return found

    def _is_gone(self, other: _Other) -> bool:
        """Whether a reader has left or died; then its claim is removed."""
        watch = self.split.caretaker.watch
        listed = any(other.owner in watch.look(fresh=True) for _ in range(_LOOKS))
        gone = not listed or watch.is_dead(other.owner) or self._runs_here(other) is False
        if gone:
            (self._directory / other.name).unlink(missing_ok=True)
        return gone

    def _runs_here(self, other: _Other) -> bool | None:
        """Whether its process runs on this machine; None if that cannot be seen from here."""
        member = self.split.caretaker.watch.look().get(other.owner)
        return None if member is None else is_running(facts_of(self.split.queue.members, member))

    def _what(self) -> str:
        return (
            f"rank {self.rank.rank} of {self.rank.world_size} of split {self.split.name!r} in {self.split.queue.path}"
        )

    def _refusal(self, other: _Other) -> str:
        member = self.split.caretaker.watch.look().get(other.owner)
        facts = {} if member is None else facts_of(self.split.queue.members, member)
        process = f" (process {facts['pid']} on {facts['host']}, since {facts['since']})" if "pid" in facts else ""
        theirs = "" if other.rank == self.rank else f" as rank {other.rank.rank} of {other.rank.world_size}"
        return (
            f"{self._what()} is read{theirs} by {other.owner}{process}, and two readers in strict order would both get "
            "its batches; close that one first, give each reader a rank of its own with rank= and world_size=, or pass "
            'order="any" to share the queue'
        )

    def _describe_wait(self, other: _Other) -> str:
        member = self.split.caretaker.watch.look().get(other.owner)
        lease = self.split.caretaker.watch.lease_seconds if member is None else member.lease_seconds
        return (
            f"a sign of life of {other.owner}, which reads {self._what()} and may be dead: that is known {lease:g} s "
            "after its last sign of life, so pass a longer timeout_seconds"
        )
