"""When an epoch is over: as soon as no rank has data left, and for all of them at the same step."""

from __future__ import annotations

import os

from penstock.distributed.ranks import Rank
from penstock.distributed.rendezvous import DirectoryRendezvous, Rendezvous, find_rendezvous
from penstock.distributed.synchronization import EndOfEpoch
from penstock.errors import ConfigError
from penstock.files.listing import PathLike

__all__ = ["Ending"]


class Ending:
    """Asks the other ranks, where there are any, and where it is not said before how many steps there are."""

    def __init__(
        self, rank: Rank, steps: int | None, rendezvous: Rendezvous | PathLike | None, timeout_seconds: float
    ) -> None:
        self._rank, self._steps, self._timeout_seconds = rank, steps, timeout_seconds
        self._given = rendezvous
        self._pass: EndOfEpoch | None = None
        self._end: int | None = None
        self._following: tuple[int, int] | None = None
        """(epoch, step) that the present pass goes on with."""

    def check(self) -> None:
        """Raise if ranks have to agree and cannot."""
        if self._agreed:
            self._place()

    @property
    def _agreed(self) -> bool:
        """Whether ranks ask each other; with a number of steps they need not."""
        return self._rank.world_size > 1 and (self._steps is None or self._given is not None)

    def more(self, epoch: int, step: int, has_data: bool) -> bool:
        """Whether the step takes place, on this rank and on all others; waits for them if this one has no data."""
        if self._steps is not None and step >= self._steps:
            return False
        if not self._agreed:
            return has_data or self._rank.world_size > 1
        if self._pass is None or self._following not in ((epoch, step), (epoch, step + 1)):
            self._end = None
            self._pass = EndOfEpoch(self._place(), self._rank, epoch, self._timeout_seconds, name="stream")
        self._following = (epoch, step + 1)
        if has_data:
            self._pass.passed(step)
            return True
        self._end = step if self._end is None else self._end
        self._pass.ended(self._end)
        return self._pass.more(step)

    def forget(self) -> None:
        """Another pass begins."""
        self._pass = None

    def _place(self) -> Rendezvous:
        if self._given is None:
            try:
                return find_rendezvous()
            except ConfigError as error:
                raise ConfigError(
                    f"{self._rank}: how long the ranks' shares of a stream are is found out by reading them, so they "
                    f"have to agree on the end, and {error}; or pass steps_per_epoch"
                ) from None
        return DirectoryRendezvous(self._given) if isinstance(self._given, (str, os.PathLike)) else self._given
