"""What stands between a loader and a trainer that has ideas of its own about epochs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from penstock.batching.batch import TrainingBatch

__all__ = ["RepeatLoader"]


class _Loader(Protocol):
    def __iter__(self) -> Iterator[TrainingBatch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class RepeatLoader:
    """A loader as one stream of batches, epoch after epoch, for trainers that are told how many steps to take.

        class FedTrainer(transformers.Trainer):
            def get_train_dataloader(self):
                return RepeatLoader(self.train_dataset)

    It has neither a length nor `set_epoch`. A trainer that finds those counts in epochs all as long as the first, and
    after a resume in ones that begin where it went on; epochs of packed samples differ by a batch now and then, and
    what is behind the end that the trainer expects would be left out. The stream ends when the loader has no more
    epochs, which is when `max_epochs` is used up.
    """

    def __init__(self, loader: _Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[TrainingBatch]:
        some = True
        while some:
            some = False
            for batch in self.loader:
                some = True
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """The state of the loader: behind the batch that was handed out last."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another loader of the same plan was; an iterator that is in use goes on there too."""
        self.loader.load_state_dict(state)

    def __repr__(self) -> str:
        return f"RepeatLoader({self.loader!r})"
