"""Adapters for trainers: a sampler for torch's `DataLoader`, and a loader that repeats epochs.

    DataLoader(loader, batch_size=None, sampler=loader.sampler(), num_workers=2)

torch reads its sampler in the main process and sends the keys to worker processes, whose copies of the loader make the
batches. A plain number does not name an epoch, and a worker cannot know it: every epoch would repeat the first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, Self

from penstock.batching.batch import TrainingBatch
from penstock.errors import ConfigError, ResumeError
from penstock.order.plan import Plan

if TYPE_CHECKING:
    from penstock.loaders.base import DataLoader

_VERSION = 1


class BatchKey(NamedTuple):
    """Key of a batch for any copy of a loader: `loader[key]`."""

    epoch: int
    number: int
    """Number of the batch within its epoch."""
    edits: int
    """Number of edits of the plan when the key was made."""


class EpochSampler:
    """Keys of the batches of a loader: each loop is an epoch, the next loop the next one.

    The first loop is the rest of the loader's epoch, so that resuming is `loader.load_state_dict(state)` or
    `loader.seek(step)`. `set_epoch` chooses the epoch of the next loop. A loop that is left early is over: the next one
    is the next epoch, since it is unknown which of the prefetched batches were used. torchdata's `StatefulDataLoader`
    knows that, and saves and restores a loop anywhere.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> EpochIterator:
        return EpochIterator(self._loader)

    def __len__(self) -> int:
        """Batches of the epoch of the running loop, otherwise of the next loop."""
        running = self._loader._loop
        if running is not None and not running.over:
            return running.count
        return self._loader.get_num_batches()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next loop: from its beginning, unless the loader is within it."""
        self._loader.set_epoch(epoch)

    def __repr__(self) -> str:
        return f"EpochSampler({self._loader!r})"


class EpochIterator:
    """Keys of one loop. Its epoch is decided when the first key is requested.

    The loader keeps the loop that got the last keys as `_loop`, until it is moved.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self._process = os.getpid()
        self._begun = False
        self._beginning: tuple[int, dict[str, Any]] | None = None
        self.epoch, self.count = 0, 0
        self.next_key, self.next_batch = 0, 0
        """Number of the next key, and of the next batch that this process makes."""
        self.over = False
        """True after the last key of the epoch."""

    @property
    def in_process(self) -> bool:
        """True in the process that requests the keys, False in its worker processes."""
        return self._process == os.getpid()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BatchKey:
        loader = self._loader
        if not self._begun:
            self._begin(*self._next_loop())
        loader._loop = self
        if self.next_key >= self.count:
            if not self.over:
                loader._position, self.over = loader._engine.position_of(self.epoch, self.count), True
                if loader._counters is not None:
                    loader._counters.stop()  # what follows, such as an evaluation, is no training
            raise StopIteration
        key = BatchKey(self.epoch, self.next_key, _edits(loader))
        self.next_key += 1
        return key

    def position(self) -> Any:
        """Position after the last batch. Known only if this process makes the batches as they are requested."""
        if not self.in_process:
            return self._loader._position
        if self.next_batch != self.next_key:
            raise ResumeError(
                "worker processes of torch's DataLoader make the batches, so the last used batch is unknown here; save "
                "the state of torchdata's StatefulDataLoader, or seek to the step after the last used batch first: "
                'loader.seek(batch.metadata["step"] + 1)'
            )
        return self._loader._engine.position_of(self.epoch, self.next_key)

    def state_dict(self) -> dict[str, Any]:
        """State for `StatefulDataLoader`: the next key, and the plan."""
        epoch, number = (self.epoch, self.next_key) if self._begun else self._next_loop()
        if self._beginning is None or self._beginning[0] != epoch:
            engine = self._loader._engine
            self._beginning = epoch, engine.to_state(engine.position_of(epoch, 0))
        return {"version": _VERSION, "epoch": epoch, "next": number, "loader": self._beginning[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a state. A state of another plan is refused."""
        if state.get("version") != _VERSION or not {"epoch", "next", "loader"} <= state.keys():
            raise ResumeError(f"not a state of a sampler of this release: {state!r:.200}")
        self._loader.load_state_dict(state["loader"])
        self._begin(int(state["epoch"]), int(state["next"]))
        self._loader._loop = self

    def _next_loop(self) -> tuple[int, int]:
        """Epoch of the next loop over the loader, and the number of its first batch."""
        last, loader = self._loader._loop, self._loader
        if last is not None and not last.over:
            return last.epoch + 1, 0
        return loader.epoch, loader._engine.number_of(loader._position)

    def _begin(self, epoch: int, number: int) -> None:
        self.epoch, self.next_key, self.next_batch, self._begun = epoch, number, number, True
        self.count = self._loader._engine.count(epoch)


def called_by_torch() -> bool:
    """True if torch's `DataLoader` called the caller of this function.

    It indexes a dataset as everyone does, so nothing else distinguishes it from `loader[5]`, which is well defined.
    """
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("torch.utils.data")


def batch_of(loader: DataLoader, key: BatchKey) -> TrainingBatch:
    """Batch of a key, for torch's DataLoader."""
    if key.edits != _edits(loader):
        raise ConfigError(
            f"the plan of the loader has {key.edits} edits, and had {_edits(loader)} when this worker process of "
            "torch's DataLoader started; edit the plan between loops, and without persistent_workers"
        )
    batch: TrainingBatch = loader._engine.item(key.epoch, key.number)
    if loader._loop is not None:
        loader._loop.next_batch = key.number + 1
    return batch


def refuse(reason: str) -> NoReturn:
    """Error for a `DataLoader` of torch without the loader's sampler."""
    raise ConfigError(
        f"torch's DataLoader {reason}; pass the loader's own sampler, batch_size=None and no shuffle: "
        "DataLoader(loader, batch_size=None, sampler=loader.sampler()); trainers that make the DataLoader themselves "
        "have a class in penstock.integrations, such as LoaderTrainer of penstock.integrations.transformers"
    )


def _edits(loader: DataLoader) -> int:
    plan = getattr(loader._engine, "plan", None)
    return len(plan.edits) if isinstance(plan, Plan) else 0


class _Loader(Protocol):
    def __iter__(self) -> Iterator[TrainingBatch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class RepeatLoader:
    """Loader as one stream of batches, epoch after epoch, for trainers that count steps.

        class FedTrainer(transformers.Trainer):
            def get_train_dataloader(self):
                return RepeatLoader(self.train_dataset)

    It has neither a length nor `set_epoch`. A trainer that finds those assumes that all epochs are as long as the
    first, also after a resume. Epochs of packed samples differ by a batch now and then, so the trainer would drop the
    last batches of some. The stream ends when the loader has no more epochs (`max_epochs`).
    """

    def __init__(self, loader: _Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[TrainingBatch]:
        empty = False
        while not empty:
            empty = True
            for batch in self.loader:
                empty = False
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """State of the loader: the position after the last delivered batch."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a state; a running loop continues there."""
        self.loader.load_state_dict(state)

    def __repr__(self) -> str:
        return f"RepeatLoader({self.loader!r})"
