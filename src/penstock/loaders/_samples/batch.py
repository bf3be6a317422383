"""A batch of samples: a training batch whose labels may be one number, or a few, for each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from penstock.backends import Backend, batch_dtype, get_backend
from penstock.backends.base import exactly
from penstock.loaders.batch import TrainingBatch

__all__ = ["SampleBatch"]

_EMPTY: dict[str, Any] = dict.fromkeys(
    (
        "attention_mask",
        "labels",
        "loss_mask",
        "position_ids",
        "cu_seqlens",
        "max_seqlen",
        "document_ids",
    )
)
_FIELDS = frozenset(("input_ids", *_EMPTY))


class SampleBatch(TrainingBatch):
    """The arrays of some samples, see `TrainingBatch`.

        input_ids, attention_mask, token_type_ids ...   (rows, tokens), padded at the right
        labels                                          (rows,), (rows, k) as the samples have them, or by token
        num_items_in_batch                              what the summed loss of the batch is to be divided by: the rows,
                                                        or the tokens with a label, of the whole optimizer step on all
                                                        ranks; gradients of micro-batches then add up to the step's
        metadata                                        step, micro_step, micro_steps, update, row, and what the samples
                                                        had beside numbers, as lists

    A rank that has no row left of the last batch of an epoch gets one row of padding: `metadata["blank"]` is true, and
    `loss_mask`, of one number for each row, is 0.
    """

    @classmethod
    def of_assembled(
        cls, arrays: Mapping[str, Any], metadata: dict[str, Any], items: int, backend: Backend, tokens: int
    ) -> Self:
        """Of arrays that were made in the types of the backend, which need no checking."""
        batch = cls.__new__(cls)
        made = vars(batch)
        made.update(_EMPTY)
        others = {}
        convert = backend.from_numpy
        copies = backend.name == "mlx"
        for key, value in arrays.items():
            array = convert(value if copies else np.ascontiguousarray(value))
            if key in _FIELDS:
                made[key] = array
            else:
                others[key] = array
        made["num_items_in_batch"], made["metadata"], made["_others"] = items, metadata, others
        made["_hidden"], made["_num_tokens"] = set(), tokens
        return batch

    def to_numpy(self) -> dict[str, Any]:
        """The arrays and numbers there are, without metadata; labels with a fraction as float32."""
        numpy, own = get_backend("numpy"), self.backend
        found: dict[str, Any] = {}
        for key, value in self._arrays().items():
            array = own.to_numpy(value)
            plain = array.dtype.kind == "f" and key == "labels"
            found[key] = array if plain else exactly(array, batch_dtype(key, array.dtype, numpy), key)
        if self.num_items_in_batch is not None:
            found["num_items_in_batch"] = self.num_items_in_batch
        return found

    def __repr__(self) -> str:
        return super().__repr__().replace("TrainingBatch", "SampleBatch", 1)
