"""What is learned, picked by `training_type` of the queue's metadata; loss and accuracy as sums that ranks can add.

Whatever the type, the target of a position lies at that position: for "CLM" the queue's `y` is `x` moved by one, and
nothing is moved here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.errors import ConfigError, SchemaError
from penstock.trainer.fields import Batch

__all__ = ["Measured", "Objective"]

_MASKED = ("MLM", "diffusion")
_CAUSAL = ("CLM", "LM", "AR")
_CLASSES = ("classification",)
_IGNORED = -100
"""torch's own number for a target that does not count, where the metadata names none."""


@dataclass(frozen=True)
class Measured:
    """Sums over a batch; the mean loss is `loss / weight`, the accuracy `correct / counted`."""

    loss: Tensor
    """The one that has a gradient."""
    weight: Tensor
    correct: Tensor
    counted: Tensor


@dataclass(frozen=True)
class Objective:
    """Cross-entropy of the targets that count, over tokens or over classes."""

    training_type: str
    causal: bool
    per_sample: bool
    tokens: int
    """Ids an input may have: the vocabulary, and the mask if it lies behind it."""
    answers: int
    """What a target may be, counted from 0."""
    ignore_index: int

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Objective:
        """The objective of a queue; refuses a type nobody knows, and metadata that lacks what the type needs."""
        given = meta.get("training_type")
        known = {name.casefold(): name for name in (*_MASKED, *_CAUSAL, *_CLASSES)}
        name = known.get(str(given).casefold())
        if name is None:
            raise ConfigError(
                f"the queue's metadata has training_type={given!r}; this trainer knows {', '.join(known.values())}; "
                f"let build_meta() give one of them, and prepare again"
            )
        tokens = _whole(meta, "vocab_size", name)
        if isinstance(meta.get("mask_token_id"), int):
            tokens = max(tokens, int(meta["mask_token_id"]) + 1)
        answers = _class_count(meta) if name in _CLASSES else tokens
        ignored = meta.get("ignore_index")
        return cls(
            name, name in _CAUSAL, name in _CLASSES, tokens, answers, _IGNORED if ignored is None else int(ignored)
        )

    def measure(self, logits: Tensor, batch: Batch) -> Measured:
        """Every target that is not `ignore_index`, not padding and has a weight."""
        target = batch.y.reshape(-1)
        flat = logits.float().reshape(target.shape[0], -1)
        weight = self.weights(batch).reshape(-1)
        each = functional.cross_entropy(flat, target, ignore_index=self.ignore_index, reduction="none")
        counted = weight > 0
        right = (flat.detach().argmax(dim=-1) == target) & counted
        return Measured((each * weight).sum(), weight.sum(), right.sum(), counted.sum())

    def weights(self, batch: Batch) -> Tensor:
        """How much each target counts, of the shape of the targets; 0 for those that do not."""
        counts = batch.y != self.ignore_index
        if batch.attend is not None and not self.per_sample:
            counts = counts & batch.attend
        weight = counts.float()
        return weight if batch.weight is None else weight * batch.weight.float()

    def tally(self, batch: Batch) -> Tensor:
        """How often each answer is the right one."""
        return torch.bincount(batch.y[self.weights(batch) > 0], minlength=self.answers)

    def check(self, batch: Batch) -> None:
        """Refuses ids outside the vocabulary, which a GPU would report as a fault somewhere else."""
        counted = batch.y[batch.y != self.ignore_index]
        for what, ids, count in (("token", batch.x, self.tokens), ("target", counted, self.answers)):
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
                raise SchemaError(
                    f"a batch has {what} ids from {int(ids.min())} to {int(ids.max())}, the metadata allows 0 to "
                    f"{count - 1} (and ignore_index={self.ignore_index} as a target); correct "
                    f"sample_batch() or build_meta()"
                )


def _whole(meta: Mapping[str, Any], key: str, training_type: str) -> int:
    value = meta.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"training_type={training_type!r} needs {key} in the queue's metadata, a positive whole number, "
            f"got {value!r}; let build_meta() give it, and prepare again"
        )
    return value


def _class_count(meta: Mapping[str, Any]) -> int:
    names = meta.get("class_names")
    if meta.get("num_classes") is None and names is not None:
        return len(names)
    return _whole(meta, "num_classes", "classification")
