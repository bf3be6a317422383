"""Lightning on a loader: a data module whose state is part of every checkpoint.

trainer.fit(model, datamodule=LoaderDataModule(loader), ckpt_path=checkpoint)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from penstock._optional import require
from penstock.errors import ConfigError
from penstock.integrations.loader_facts import check_world_size
from penstock.loaders.base import DataLoader


def _lightning() -> ModuleType:
    """Package whose trainer is in use: `lightning.pytorch`, or `pytorch_lightning`, whose classes are others."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if name in sys.modules:
            return sys.modules[name]
    try:
        return require("lightning.pytorch", "trainers")
    except ModuleNotFoundError as error:
        if error.name != "lightning":
            raise
        return require("pytorch_lightning", "trainers")


class LoaderDataModule(_lightning().LightningDataModule):  # type: ignore[misc]
    """Data module of a loader. It is restored from every checkpoint, in the middle of an epoch and at its end.

    Lightning restores a bare loader only in the middle of an epoch. `val_loader` is read from its beginning in every
    validation. Lightning takes all epochs to be as long as the first; where they are not, that is an error, unless
    `max_steps` ends the run. `reload_dataloaders_every_n_epochs` does not help: a resume at the end of an epoch then
    loses the next one.
    """

    def __init__(self, train_loader: Any, val_loader: Any = None) -> None:
        super().__init__()
        self.train_loader, self.val_loader = train_loader, val_loader
        if val_loader is not None:  # Lightning warns of a method without a validation_step
            self.val_dataloader = self._val_dataloader

    def train_dataloader(self) -> Any:
        """The loader itself: Lightning calls `set_epoch` and moves batches by their `to`."""
        trainer = self.trainer
        if trainer is not None:
            check_world_size(self.train_loader, trainer.world_size)
            self._check_epochs(trainer)
        return self.train_loader

    def _val_dataloader(self) -> Any:
        if self.trainer is not None:
            check_world_size(self.val_loader, self.trainer.world_size)
        return _FromBeginning(self.val_loader)

    def state_dict(self) -> dict[str, Any]:
        """State of the loader."""
        return dict(self.train_loader.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to the position of a checkpoint."""
        self.train_loader.load_state_dict(state_dict)

    def _check_epochs(self, trainer: Any) -> None:
        """Refuse epochs of different lengths, of which Lightning would cut the longer ones."""
        loader, epochs = self.train_loader, trainer.max_epochs
        if trainer.max_steps != -1 or epochs in (None, -1) or not isinstance(loader, DataLoader):
            return
        try:
            counts = [loader.num_batches_of_epoch(epoch) for epoch in range(epochs)]
        except TypeError:
            return  # a stream: Lightning reads it to its end
        if len(set(counts)) > 1:
            raise ConfigError(
                f"the first {epochs} epochs of the loader have from {min(counts)} to {max(counts)} batches, and "
                f"Lightning would take {counts[0]} of each; pass max_steps={sum(counts)} and max_epochs=-1"
            )


class _FromBeginning:
    """Loader that every loop reads from its beginning."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        self.loader.reset()
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)
