"""A batch of samples: a training batch whose labels may be one number, or a few, for each row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import numpy.typing as npt

from penstock.batching.backends import Backend, batch_dtype, get_backend
from penstock.batching.backends.base import exactly
from penstock.batching.batch import NO_FIELDS, TrainingBatch

__all__ = ["SampleBatch", "converter_of"]

_FIELDS = set(NO_FIELDS)


def converter_of(backend: Backend, arrays: Iterable[npt.NDArray[Any]]) -> Callable[[npt.NDArray[Any]], Any]:
    """What makes arrays of a framework of parts of these, which were made in its types."""
    return backend.converter(arrays)


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
    `loss_mask`, of one number for each row, is 0. Samples without tokens make batches without `input_ids` and
    `attention_mask`: `batch["x"]` and what else they have.
    """

    @classmethod
    def of_arrays(cls, arrays: dict[str, Any], metadata: dict[str, Any], items: int, tokens: int) -> Self:
        """Of arrays of a framework, which need no checking."""
        batch = cls.__new__(cls)
        batch.__dict__ = {
            **NO_FIELDS,
            **arrays,
            "num_items_in_batch": items,
            "metadata": metadata,
            "_others": {},
            "_hidden": set(),
            "_num_tokens": tokens,
        }
        if not arrays.keys() <= _FIELDS:
            batch._others = {key: batch.__dict__.pop(key) for key in arrays if key not in _FIELDS}
        return batch

    @property
    def batch_size(self) -> int:
        """Rows."""
        return int(next(iter(self._arrays().values())).shape[0])

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding; 0 of samples that have none."""
        return super().num_tokens if self.input_ids is not None else 0

    def __getitem__(self, key: str) -> Any:
        # Rows of samples are never packed, so their mask is given as it is too.
        value = self.__dict__[key] if key == "attention_mask" and key not in self._hidden else None
        return super().__getitem__(key) if value is None else value

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
