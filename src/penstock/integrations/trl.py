"""TRL's trainers on a loader: SFT on chats, DPO on preferences, GRPO on rollouts. TRL prepares and generates nothing.

    trainer = LoaderSFTTrainer(model, args, train_dataset=ConversationDataLoader(...), processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=True)

Sharding, resume and the number of steps are those of `penstock.integrations.transformers.LoaderTrainerMixin`.
"""

from __future__ import annotations

from typing import Any

from penstock._optional import require
from penstock.errors import ConfigError
from penstock.integrations.transformers import LoaderTrainerMixin
from penstock.loaders.adapters import RepeatLoader
from penstock.loaders.preference import PreferenceDataLoader
from penstock.loaders.rollout import RolloutDataLoader

trl: Any = require("trl", "trainers")
datasets: Any = require("datasets", "trainers")

_PREPARED = {
    "packing": "pass packing= to the loader",
    "padding_free": "pass padding_free= to the loader",
    "assistant_only_loss": "the masks of ConversationDataLoader mark the turns of the assistant",
    "completion_only_loss": "the masks of the loader say what is trained on",
}
"""Options of `SFTConfig` for what the loader has done."""


class LoaderSFTTrainer(LoaderTrainerMixin, trl.SFTTrainer):  # type: ignore[misc]
    """`SFTTrainer` whose `train_dataset` is a loader, such as `ConversationDataLoader` with `padding_free=True`."""

    def __init__(self, model: Any, args: Any = None, **options: Any) -> None:
        args = trl.SFTConfig("out") if args is None else args
        for name, remedy in _PREPARED.items():
            if getattr(args, name, None):
                raise ConfigError(f"{name}={getattr(args, name)!r} of SFTConfig has no effect on a loader; {remedy}")
        if hasattr(args, "dataset_kwargs"):
            args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
        super().__init__(model, args=args, **options)

    def _dataset_for_trainer(self) -> Any:
        return datasets.Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})


class LoaderDPOTrainer(LoaderTrainerMixin, trl.DPOTrainer):  # type: ignore[misc]
    """`DPOTrainer` whose `train_dataset` is a `PreferenceDataLoader` of pairs."""

    def __init__(self, model: Any, ref_model: Any = None, args: Any = None, **options: Any) -> None:
        if not isinstance(options.get("train_dataset"), PreferenceDataLoader):
            raise ConfigError(
                f"train_dataset must be a PreferenceDataLoader, got {type(options.get('train_dataset')).__name__}"
            )
        if getattr(args, "precompute_ref_log_probs", False):
            raise ConfigError(
                "precompute_ref_log_probs=True reads a dataset, and the batches come from a loader; leave it out"
            )
        super().__init__(model, ref_model=ref_model, args=args, **options)

    def _dataset_for_trainer(self) -> Any:
        return datasets.Dataset.from_dict({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]})


class LoaderGRPOTrainer(LoaderTrainerMixin, trl.GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` whose `train_dataset` is a `RolloutDataLoader`: its loss, on rollouts that others generated.

    Rewards and advantages are those of the loader (`preset="trl"` for TRL's numbers), so there are no reward functions,
    and options of generation have no effect. With a live source, set `loader.policy_version` before each rollout batch.
    """

    def __init__(self, model: Any, args: Any = None, **options: Any) -> None:
        if not isinstance(options.get("train_dataset"), RolloutDataLoader):
            raise ConfigError(
                f"train_dataset must be a RolloutDataLoader, got {type(options.get('train_dataset')).__name__}"
            )
        super().__init__(model, reward_funcs=_no_reward, args=args, **options)

    def _dataset_for_trainer(self) -> Any:
        return datasets.Dataset.from_dict({"prompt": ["a"]})

    def get_train_dataloader(self) -> RepeatLoader:
        """Batches of the loader as inputs of TRL's loss."""
        super().get_train_dataloader()
        return _TrlInputs(self.loader)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        device = self.accelerator.device
        return {key: value.to(device) if hasattr(value, "to") else value for key, value in generation_batch.items()}


class _TrlInputs(RepeatLoader):
    """Rollout batches by TRL's names."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch.as_trl()  # type: ignore[attr-defined]


def _no_reward(completions: Any, **_: Any) -> list[float]:
    """Reward function that TRL's constructor asks for; nothing is generated."""
    raise ConfigError("LoaderGRPOTrainer generates nothing, so it cannot evaluate; evaluate with TRL's GRPOTrainer")
