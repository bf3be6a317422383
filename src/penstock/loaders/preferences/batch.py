"""Batch of preferences: the chosen answers, then the rejected ones; or labelled answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from penstock.batching.backends import Backend, get_backend
from penstock.batching.backends.base import Array, Device
from penstock.batching.batch import TrainingBatch
from penstock.errors import ConfigError

_KL = ("KL_input_ids", "KL_attention_mask", "KL_completion_mask")
EXTRA = ("completion_mask", "label", *_KL)
"""Fields besides those of every batch."""
_FACTS = ("sides", "chosen_tokens")
_BY_ROW = ("input_ids", "attention_mask", "labels", "loss_mask", "position_ids", "document_ids", "completion_mask")


class PreferenceBatch(TrainingBatch):
    """Preferences of one step, as TRL's trainers take them.

        input_ids, attention_mask   (2 x pairs, tokens): chosen answers with their prompts, then the rejected ones
        completion_mask             1 for the tokens of the answers
        label                       (rows,), of labelled answers (KTO): True for a good answer
        KL_input_ids, ...           the same prompts with the answers of other rows (`kl=True`)

    Row i is chosen and row `pairs + i` rejected, after the same prompt. As a mapping it holds these fields and no
    `labels`, which trainers derive from `completion_mask`; `batch.labels` has them. `metadata["row"]` has the rows.
    """

    @classmethod
    def from_numpy(
        cls,
        arrays: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        backend: str | Backend = "torch",
        *,
        device: Device = None,
        num_tokens: int | None = None,
    ) -> Self:
        """Batch of a framework's arrays; `arrays` may have the fields of preferences too."""
        chosen = get_backend(backend)
        plain = {name: value for name, value in arrays.items() if name not in EXTRA}
        batch = super().from_numpy(plain, metadata, chosen, device=device, num_tokens=num_tokens)
        for name in EXTRA:
            if arrays.get(name) is not None:
                batch._others[name] = chosen.from_numpy(arrays[name], device=device)
        return batch

    @classmethod
    def of_collated(
        cls,
        arrays: Mapping[str, Any],
        metadata: dict[str, Any],
        backend: Backend,
        tokens: int,
        *,
        packed: bool = False,
    ) -> Self:
        plain = {name: value for name, value in arrays.items() if name not in (*EXTRA, *_FACTS)}
        facts = {name: arrays[name] for name in _FACTS if name in arrays}
        batch = super().of_collated(plain, metadata | facts, backend, tokens, packed=packed)
        batch._others |= {name: backend.from_numpy(arrays[name]) for name in EXTRA if name in arrays}
        return batch

    def to_numpy(self) -> dict[str, Any]:
        own = self.backend
        others = {name: own.to_numpy(self._others[name]) for name in EXTRA if name in self._others}
        return super().to_numpy() | others

    def as_dict(self, *, num_items_in_batch: bool = False, block_mask: str | None = None) -> dict[str, Any]:
        """Keywords of TRL's collators: input_ids, attention_mask and completion_mask; label and KL_... for KTO."""
        found = super().as_dict(num_items_in_batch=num_items_in_batch, block_mask=block_mask)
        found.pop("labels", None)
        return found

    def __repr__(self) -> str:
        return super().__repr__().replace("TrainingBatch", type(self).__name__, 1)

    @property
    def completion_mask(self) -> Array:
        """Mask (rows, tokens): 1 for the tokens of the answers."""
        return self._others["completion_mask"]

    @property
    def label(self) -> Array | None:
        """True for good answers, one value a row; None for pairs."""
        return self._others.get("label")

    @property
    def num_pairs(self) -> int:
        """Number of pairs; 0 for labelled answers."""
        return len(self.metadata["row"]) if self._paired else 0

    @property
    def chosen(self) -> dict[str, Array]:
        """Fields of the chosen answers, as views."""
        return self._half(0)

    @property
    def rejected(self) -> dict[str, Array]:
        """Fields of the rejected answers, as views."""
        return self._half(1)

    def as_sides(self) -> dict[str, Array]:
        """`chosen_input_ids`, `chosen_attention_mask`, `chosen_labels`, ..., `rejected_...`: for ORPO and SimPO."""
        both = {"chosen_": self.chosen, "rejected_": self.rejected}
        return {prefix + name: value for prefix, half in both.items() for name, value in half.items()}

    @property
    def _paired(self) -> bool:
        return bool(self.metadata.get("sides", 1) == 2)

    def _half(self, which: int) -> dict[str, Array]:
        if not self._paired:
            raise ConfigError("a batch of labelled answers has no chosen and rejected sides; see batch.label")
        fields = {name: getattr(self, name) for name in _BY_ROW}
        fields = {name: value for name, value in fields.items() if value is not None}
        cut = self.metadata.get("chosen_tokens")
        if cut is not None:  # all in one row
            part = slice(0, cut) if which == 0 else slice(cut, self.num_tokens)
            return {name: value[:, part] for name, value in fields.items()}
        middle = self.batch_size // 2
        part = slice(0, middle) if which == 0 else slice(middle, None)
        return {name: value[part] for name, value in fields.items()}
