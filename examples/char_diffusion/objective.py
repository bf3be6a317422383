"""Objective of a queue: which arrays of a batch are what, by role, and loss and accuracy, by `training_type`.

The target of a position is at that position: for "CLM" the queue's `y` is `x` shifted by one, nothing is shifted here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.errors import ConfigError, SchemaError

__all__ = ["Batch", "BatchFields", "Objective"]

_MASKED, _CAUSAL, _CLASSES = ("MLM", "diffusion"), ("CLM", "LM", "AR"), ("classification",)
_ROLES = {
    "input": ("input",),
    "target": ("target", "label"),
    "mask": ("mask", "attention_mask"),
    "weight": ("loss_mask", "weight"),
}


@dataclass(frozen=True)
class Batch:
    """Tensors of a batch, on the device."""

    x: Tensor
    """Token ids [batch, length]."""
    y: Tensor
    """Targets: [batch, length], or [batch] of classes."""
    mask: Tensor | None = None
    """[batch, length], false for padding."""
    weight: Tensor | None = None
    """Weight of each target; 0 or false excludes it."""


@dataclass(frozen=True)
class BatchFields:
    """Names of the arrays of `batch_schema` that the trainer uses."""

    x: str
    y: str
    mask: str | None
    weight: str | None
    unused: tuple[str, ...]

    @classmethod
    def from_schema(cls, schema: Sequence[Mapping[str, Any]], *, block_size: int, per_sample: bool) -> BatchFields:
        """Read the roles. `per_sample`: the target is one class per row, not one per position."""
        defaults = {"x": "input", "y": "target"}
        fields = [(e["name"], e.get("role") or defaults.get(e["name"]), tuple(e.get("shape") or ())) for e in schema]

        def find(use: str, shape: tuple[int, ...] | None) -> str | None:
            """The field of a role, and of a shape unless any will do."""
            of_role = [(name, size) for name, role, size in fields if role in _ROLES[use]]
            fitting = [name for name, size in of_role if shape in (None, size)]
            if len(fitting) == 1 or (not of_role and use in ("mask", "weight")):
                return fitting[0] if fitting else None
            wanted = f"role {' or '.join(map(repr, _ROLES[use]))}" + (
                f" and shape {list(shape)}" if shape is not None else ""
            )
            listed = ", ".join(f"{name} ({role!r}, {list(size)})" for name, role, size in fields)
            raise SchemaError(f"training needs one array with {wanted}, batch_schema has {len(fitting)}: {listed}")

        x = find("input", None)
        shape = next(size for name, _, size in fields if name == x)
        if len(shape) != 1:
            raise SchemaError(f"the input {x!r} has shape {list(shape)} per row, expected [length]")
        if shape[0] > block_size:
            raise ConfigError(
                f"rows of {x!r} have {shape[0]} positions, the config has block_size={block_size}; use the config of "
                "the queue, or purge it and prepare it again"
            )
        target = () if per_sample else shape
        used = [x, find("target", target), find("mask", shape), find("weight", target)]
        return cls(*used, tuple(name for name, *_ in fields if name not in used))

    def read(self, batch: Any) -> Batch:
        """Select the tensors of a batch of the consumer: a pair (X, Y), or a dict of arrays."""
        if not isinstance(batch, Mapping):
            batch = dict(zip((self.x, self.y), batch, strict=True))
        mask = None if self.mask is None else batch[self.mask].bool()
        return Batch(batch[self.x].long(), batch[self.y].long(), mask, batch[self.weight] if self.weight else None)


@dataclass(frozen=True)
class Objective:
    """Cross-entropy over tokens or classes."""

    training_type: str
    tokens: int
    """Number of input ids: the vocabulary, and the mask token if it follows it."""
    answers: int
    """Number of target ids."""
    ignore_index: int

    @property
    def causal(self) -> bool:
        return self.training_type in _CAUSAL

    @property
    def per_sample(self) -> bool:
        return self.training_type in _CLASSES

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Objective:
        """The objective that the queue's metadata names; raises ConfigError if it is unknown or incomplete."""
        known = {name.casefold(): name for name in (*_MASKED, *_CAUSAL, *_CLASSES)}
        name = known.get(str(meta.get("training_type")).casefold())
        if name is None:
            raise ConfigError(
                f"the queue's metadata has training_type={meta.get('training_type')!r}; this trainer knows "
                f"{', '.join(known.values())}; return one of them from build_meta(), and prepare again"
            )
        tokens = max(_count(meta, "vocab_size", name), (meta.get("mask_token_id") or 0) + 1)
        if name in _CLASSES:
            named = len(meta.get("class_names") or ()) or None
            answers = _count({"num_classes": meta.get("num_classes") or named}, "num_classes", name)
        else:
            answers = tokens
        ignored = meta.get("ignore_index")
        return cls(name, tokens, answers, -100 if ignored is None else int(ignored))  # -100 is torch's default

    def measure(self, logits: Tensor, batch: Batch) -> Tensor:
        """Sums over the targets that count: [loss, weight, correct, counted]; only the loss has a gradient."""
        target = batch.y.reshape(-1)
        flat = logits.float().reshape(target.shape[0], -1)
        weight = self.weights(batch).reshape(-1)
        losses = functional.cross_entropy(flat, target, ignore_index=self.ignore_index, reduction="none")
        counted = weight > 0
        correct = (flat.detach().argmax(dim=-1) == target) & counted
        return torch.stack([(losses * weight).sum(), weight.sum(), correct.sum().float(), counted.sum().float()])

    def weights(self, batch: Batch) -> Tensor:
        """Weight of each target: 0 for `ignore_index` and padding."""
        counts = batch.y != self.ignore_index
        if batch.mask is not None and not self.per_sample:
            counts = counts & batch.mask
        return counts.float() if batch.weight is None else counts.float() * batch.weight.float()

    def histogram(self, batch: Batch) -> Tensor:
        """Number of targets per answer."""
        return torch.bincount(batch.y[self.weights(batch) > 0], minlength=self.answers)

    def check(self, batch: Batch) -> None:
        """Raise for ids outside of the vocabulary, which a GPU would report as an obscure fault."""
        targets = batch.y[batch.y != self.ignore_index]
        for what, ids, count in (("token", batch.x, self.tokens), ("target", targets, self.answers)):
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
                raise SchemaError(
                    f"a batch has {what} ids from {int(ids.min())} to {int(ids.max())}, the metadata allows 0 to "
                    f"{count - 1} (and ignore_index={self.ignore_index}); correct sample_batch() or build_meta()"
                )


def _count(meta: Mapping[str, Any], key: str, training_type: str) -> int:
    value = meta.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"training_type={training_type!r} needs {key} in the queue's metadata, a positive integer, got {value!r}; "
            "return it from build_meta(), and prepare again"
        )
    return value
