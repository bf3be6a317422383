"""A sampler for torch's `DataLoader`: which batch of which epoch is next, epoch after epoch.

    DataLoader(loader, batch_size=None, sampler=loader.sampler(), num_workers=2)

torch asks its sampler in the main process and hands what it says to a worker, whose copy of the loader makes the batch.
A plain number does not say of which epoch, and a worker cannot know: every epoch would be the first again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

from penstock.batching.batch import TrainingBatch
from penstock.errors import ConfigError, ResumeError
from penstock.order.plan import Plan

if TYPE_CHECKING:
    from penstock.loaders.base import DataLoader

__all__ = ["BatchKey", "EpochIterator", "EpochSampler", "asked_by_torch", "named_batch", "refuse"]

_VERSION = 1


class BatchKey(NamedTuple):
    """Names a batch for any copy of a loader: `loader[key]`."""

    epoch: int
    number: int
    """Of the batch, within its epoch."""
    plan_version: int
    """Edits of the plan when the key was made."""


class EpochSampler:
    """The batches of a loader by name: each loop is an epoch, the next loop the next one.

    The first loop is the rest of the epoch that the loader is in, from the loader's position on, so that resuming is
    `loader.load_state_dict(state)` or `loader.seek(step)`. `set_epoch` says which epoch the next loop is. A loop that
    is left early is over: the next one is the next epoch, since nobody knows which of the batches that were made ahead
    were used. torchdata's `StatefulDataLoader` knows, and saves and restores a loop anywhere.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> EpochIterator:
        return EpochIterator(self._loader)

    def __len__(self) -> int:
        """Batches of the epoch of the loop that is running, or else of the next loop."""
        running = self._loader._loop
        if running is not None and not running.over:
            return running.count
        return self._loader.get_num_batches()

    def set_epoch(self, epoch: int) -> None:
        """The next loop is this epoch; from its beginning, unless the loader is in the middle of it."""
        self._loader.set_epoch(epoch)

    def __repr__(self) -> str:
        return f"EpochSampler({self._loader!r})"


class EpochIterator:
    """The keys of one loop. Which epoch that is, is settled when the first key is asked for.

    The loader knows the loop that keys were given for last, as `_loop`, until it is moved.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self._process = os.getpid()
        self._begun = False
        self._beginning: tuple[int, dict[str, Any]] | None = None
        self.epoch, self.count = 0, 0
        self.given, self.made = 0, 0
        """The number of the next key, and of the batch behind the last one that was made in this process."""
        self.over = False
        """Whether all keys of the epoch were given."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BatchKey:
        loader = self._loader
        if not self._begun:
            self._begin(*self._next_loop())
        loader._loop = self
        if self.given >= self.count:
            if not self.over:
                loader._position, self.over = loader._engine.position_of(self.epoch, self.count), True
            raise StopIteration
        key = BatchKey(self.epoch, self.given, _plan_version(loader))
        self.given += 1
        return key

    def position(self) -> Any:
        """Behind the last batch. Known only where this process makes the batches, as soon as they are asked for."""
        if self._process != os.getpid():  # a copy, in a worker process
            return self._loader._position
        if self.made != self.given:
            raise ResumeError(
                "worker processes of torch's DataLoader make the batches, and this process does not know which of them "
                "were used; save the state of torchdata's StatefulDataLoader instead, or go behind the last batch that "
                'was used first: loader.seek(batch.metadata["step"] + 1)'
            )
        return self._loader._engine.position_of(self.epoch, self.given)

    def state_dict(self) -> dict[str, Any]:
        """For `StatefulDataLoader`: which key is next, and of which plan."""
        epoch, given = (self.epoch, self.given) if self._begun else self._next_loop()
        if self._beginning is None or self._beginning[0] != epoch:
            engine = self._loader._engine
            self._beginning = epoch, engine.to_state(engine.position_of(epoch, 0))
        return {"version": _VERSION, "epoch": epoch, "next": given, "loader": self._beginning[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken. A state of another plan is refused."""
        if state.get("version") != _VERSION or not {"epoch", "next", "loader"} <= state.keys():
            raise ResumeError(f"not a state of a sampler of this release: {state!r:.200}")
        self._loader.load_state_dict(state["loader"])
        self._begin(int(state["epoch"]), int(state["next"]))
        self._loader._loop = self

    def _next_loop(self) -> tuple[int, int]:
        """The epoch of the next loop over the loader, and the number of its first batch."""
        last, loader = self._loader._loop, self._loader
        if last is not None and not last.over:
            return last.epoch + 1, 0
        return loader.epoch, loader._engine.number_of(loader._position)

    def _begin(self, epoch: int, number: int) -> None:
        self.epoch, self.given, self.made, self._begun = epoch, number, number, True
        self.count = self._loader._engine.count(epoch)


def asked_by_torch() -> bool:
    """Whether torch's `DataLoader` called the function that calls this one.

    It asks for items as anybody does, so there is no other way to tell it from `loader[5]`, which is well defined.
    """
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("torch.utils.data")


def named_batch(loader: DataLoader, key: BatchKey) -> TrainingBatch:
    """The batch that a sampler has named, for torch's DataLoader."""
    if key.plan_version != _plan_version(loader):
        raise ConfigError(
            f"the plan of the loader has {key.plan_version} edits, and had {_plan_version(loader)} when this worker "
            "process of torch's DataLoader started; edit the plan between loops, and without persistent_workers"
        )
    batch = loader._engine.item(key.epoch, key.number)
    if loader._loop is not None:
        loader._loop.made = key.number + 1
    return batch


def refuse(what: str) -> NoReturn:
    """For a `DataLoader` of torch that goes by numbers of its own."""
    raise ConfigError(
        f"torch's DataLoader {what}; pass the loader's own sampler, batch_size=None and no shuffle: "
        "DataLoader(loader, batch_size=None, sampler=loader.sampler())"
    )


def _plan_version(loader: DataLoader) -> int:
    plan = getattr(loader._engine, "plan", None)
    return plan.version if isinstance(plan, Plan) else 0
