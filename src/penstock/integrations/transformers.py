"""Hugging Face `Trainer` on a loader. The position of the loader is part of every checkpoint.

trainer = LoaderTrainer(model, args, train_dataset=loader)
trainer.train(resume_from_checkpoint=True)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock._optional import require
from penstock.errors import ConfigError, ResumeError
from penstock.integrations.loader_facts import check_world_size, count_batches
from penstock.loaders.adapters import RepeatLoader
from penstock.loaders.base import DataLoader

transformers: Any = require("transformers", "trainers")
require("accelerate", "trainers")
_callbacks: Any = require("transformers.trainer_callback", "trainers")


class LoaderState(transformers.TrainerCallback, _callbacks.ExportableState):  # type: ignore[misc]
    """Callback that saves the state of the loader in the `trainer_state.json` of every checkpoint, and restores it.

    A loader over a `RolloutQueue` is committed after each. The strategies "epoch" (`save_strategy`, `eval_strategy`,
    `logging_strategy`) act at the end of every epoch of the loader, which the trainer does not see, and logs have it.
    """

    loader: RepeatLoader | None = None
    position: Mapping[str, Any] | None = None

    def __init__(self) -> None:
        self._epoch = 0
        self._counts: list[int] = []

    def state(self) -> dict[str, Any]:
        """State for the checkpoint."""
        position = None if self.loader is None else self.loader.state_dict()
        return {"args": {}, "attributes": {"position": position}}

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        """Restore the position of the loader, if the trainer resumes."""
        if not isinstance(train_dataloader, RepeatLoader):
            raise ConfigError(
                f"LoaderState needs a trainer that is fed by a loader, and this one is fed by "
                f"{type(train_dataloader).__name__}; use LoaderTrainer, or LoaderTrainerMixin with your own trainer"
            )
        self.loader = train_dataloader
        if state.global_step:
            saved = (state.stateful_callbacks.get(type(self).__name__) or {}).get("attributes", {}).get("position")
            if saved is None:
                raise ResumeError(
                    f"the checkpoint of step {state.global_step} has no state of the loader: it was saved by another "
                    "trainer; resume from one of LoaderTrainer, or start anew with the model of this one"
                )
            self.loader.load_state_dict(saved)
        self._epoch = self._current_epoch()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let a `RolloutQueue` delete what was used before the checkpoint, which is on disk now."""
        commit = getattr(getattr(self.loader, "loader", None), "commit", None)
        if commit is not None:
            commit()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Act on the end of an epoch of the loader. The trainer itself does so after the last step."""
        epoch = self._current_epoch()
        if epoch > self._epoch and state.global_step < state.max_steps:
            control.should_save |= args.save_strategy == "epoch"
            control.should_evaluate |= args.eval_strategy == "epoch"
            control.should_log |= args.logging_strategy == "epoch"
        self._epoch = epoch
        state.epoch = self._progress(epoch, state.global_step * args.gradient_accumulation_steps, state.epoch)

    def _current_epoch(self) -> int:
        return int(getattr(getattr(self.loader, "loader", None), "epoch", 0))

    def _progress(self, epoch: int, batches: int, otherwise: float) -> float:
        """Epochs of the loader so far, in fractions of each; `otherwise` if they cannot be counted."""
        loader = getattr(self.loader, "loader", None)
        if not isinstance(loader, DataLoader):
            return otherwise
        try:
            while len(self._counts) <= epoch:
                self._counts.append(loader.num_batches_of_epoch(len(self._counts)))
        except TypeError:
            return otherwise
        done = batches - sum(self._counts[:epoch])
        return epoch + min(max(done / max(self._counts[epoch], 1), 0.0), 1.0)


class LoaderTrainerMixin:
    """Mixin for trainers that are fed by a loader: `class MyTrainer(LoaderTrainerMixin, transformers.Trainer)`.

    `train_dataset` is the loader. Its batches are not prepared by Accelerate, which would shard them again, and are not
    skipped on resume: the loader seeks. Without `max_steps` the trainer stops after `num_train_epochs` of the loader;
    accumulation goes on from one epoch to the next, so a last incomplete group is filled from the next epoch. A loader
    as `eval_dataset` is read from its beginning in every evaluation.
    """

    def __init__(self, *given: Any, train_dataset: Any = None, **options: Any) -> None:
        self.loader = _checked_loader(train_dataset)
        super().__init__(*given, train_dataset=self._dataset_for_trainer(), **options)  # type: ignore[call-arg]
        trainer: Any = self
        trainer.args.ignore_data_skip = True
        if trainer.args.max_steps <= 0 and isinstance(self.loader, DataLoader):
            batches = count_batches(self.loader, trainer.args.num_train_epochs, "set max_steps= of the arguments")
            trainer.args.max_steps = max(math.ceil(batches / trainer.args.gradient_accumulation_steps), 1)
        trainer.add_callback(LoaderState())

    def _dataset_for_trainer(self) -> Any:
        """Dataset that the constructor of the trainer gets; its rows are never read."""
        return self.loader

    def get_train_dataloader(self) -> RepeatLoader:
        """Batches of the loader, epoch after epoch."""
        check_world_size(self.loader, self.args.world_size)  # type: ignore[attr-defined]
        return RepeatLoader(self.loader)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """A loader from its beginning; other datasets as the trainer reads them."""
        given = self.eval_dataset if eval_dataset is None else eval_dataset  # type: ignore[attr-defined]
        if isinstance(given, str):
            given = self.eval_dataset[given]  # type: ignore[attr-defined]
        if isinstance(given, DataLoader):
            check_world_size(given, self.args.world_size)  # type: ignore[attr-defined]
            given.reset()
            return given
        return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]


class LoaderTrainer(LoaderTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` whose `train_dataset` is a loader; resumes with the batch after the checkpoint's."""


def _checked_loader(loader: Any) -> Any:
    if not (isinstance(loader, DataLoader) or (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"))):
        raise ConfigError(
            f"train_dataset must be a loader, such as PretrainDataLoader, got {type(loader).__name__}; pass a dataset "
            "to the trainer of transformers itself"
        )
    return loader
