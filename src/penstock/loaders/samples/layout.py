"""Layout of batches of samples: arrays of a batch from columns and row numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from penstock.arrays.truncation import Truncation
from penstock.batching.backends import batch_dtype, get_backend
from penstock.batching.backends.base import exactly
from penstock.batching.batch import NO_FIELDS, TrainingBatch
from penstock.errors import DataError
from penstock.loaders.samples.columns import MemoryRows, SampleColumns, mask_of
from penstock.loaders.samples.schema import FILLS, IGNORE, Objective, keeps_type

Ints = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]


class Corruption(Protocol):
    """Masking of ids for masked language models; see `MaskedLM`."""

    def corrupt(
        self, input_ids: npt.NDArray[Any], attention_mask: npt.NDArray[Any], rows: Ints, epoch: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleLayout:
    """Layout of batches: dtype, padding, truncation and masking."""

    integer: np.dtype[Any]
    pad_id: int = 0
    multiple: int = 1
    truncation: Truncation
    to_max_length: bool = False
    """Pad every row to the limit of `truncation` instead of the longest row."""
    objective: Objective = None
    corruption: Corruption | None = None

    def width(self, longest: int) -> int:
        """Width of a batch whose longest row has this many tokens."""
        if self.to_max_length and self.truncation.max_length is not None:
            longest = self.truncation.max_length
        return -(-max(longest, 1) // self.multiple) * self.multiple


class PickedRows(NamedTuple):
    """Rows of a batch: rows `at` of the columns, which are `rows` of the dataset."""

    at: Ints
    rows: Ints
    starts: Ints
    """First token of each row that is kept."""
    lengths: Ints
    width: int
    """Width of the batch."""


def assemble(
    columns: SampleColumns, picked: PickedRows, epoch: int, layout: SampleLayout
) -> dict[str, npt.NDArray[Any]]:
    """Arrays of a batch."""
    arrays: Arrays = {}
    if columns.ids is not None:
        mask = mask_of(picked.lengths, picked.width, layout.integer)
        ids = _grid("input_ids", columns.ids, picked, mask, layout.pad_id, layout.integer)
        arrays = {"input_ids": ids, "attention_mask": mask}
        for name, column in columns.by_token.items():
            dtype = np.dtype(np.float32) if column.dtype.kind == "f" else layout.integer
            arrays[name] = _grid(name, column, picked, mask, FILLS.get(name, 0), dtype)
        if layout.corruption is not None:
            corrupted, labels = layout.corruption.corrupt(ids, arrays["attention_mask"], picked.rows, epoch)
            arrays["input_ids"] = _as("input_ids", corrupted, layout.integer, picked.rows)
            arrays["labels"] = _as("labels", labels, layout.integer, picked.rows)
    for name, numbers in columns.fixed.items():
        found = numbers[picked.at]
        arrays[name] = _as(name, found, _type_of(name, found.dtype, layout), picked.rows)
    return arrays


def blank(columns: SampleColumns, width: int, layout: SampleLayout) -> Arrays:
    """Arrays of a batch without samples: one row of padding whose `loss_mask` is 0. It attends to its first token,
    because a softmax over nothing is NaN."""
    shape = (1, width)
    arrays: Arrays = {}
    if columns.ids is not None:
        mask = np.zeros(shape, layout.integer)
        mask[0, 0] = 1
        arrays = {"input_ids": np.full(shape, layout.pad_id, layout.integer), "attention_mask": mask}
    for name, column in columns.by_token.items():
        if name != "attention_mask":
            arrays[name] = np.full(
                shape, FILLS.get(name, 0), np.float32 if column.dtype.kind == "f" else layout.integer
            )
    for name, numbers in columns.fixed.items():
        dtype = _type_of(name, numbers.dtype, layout)
        fill = IGNORE if name == "labels" and dtype.kind != "f" else 0
        arrays[name] = np.full((1, *numbers.shape[1:]), fill, dtype)
    if layout.corruption is not None:
        arrays["labels"] = np.full(shape, IGNORE, layout.integer)
    arrays["loss_mask"] = np.zeros(1, layout.integer)
    return arrays


def count_labels(columns: SampleColumns, at: Ints, rows: Ints, epoch: int, layout: SampleLayout) -> int:
    """Labelled tokens of some samples."""
    assert columns.ids is not None
    cut = layout.truncation.parts(columns.lengths[at], rows)
    picked = PickedRows(at, rows, cut.starts, cut.lengths, int(cut.lengths.max(initial=1)))
    mask = mask_of(cut.lengths, picked.width, layout.integer)
    if layout.corruption is not None:
        ids = _grid("input_ids", columns.ids, picked, mask, layout.pad_id, layout.integer)
        given = columns.by_token.get("attention_mask")
        if given is not None:
            mask = _grid("attention_mask", given, picked, mask, 0, layout.integer)
        labels = layout.corruption.corrupt(ids, mask, rows, epoch)[1]
    else:
        labels = _grid("labels", columns.by_token["labels"], picked, mask, IGNORE, layout.integer)
    return int(np.count_nonzero(labels != IGNORE))


def _type_of(name: str, given: np.dtype[Any], layout: SampleLayout) -> np.dtype[Any]:
    """Dtype in a batch of numbers that are not token-wise."""
    kept = given.kind == "f" or (given in (np.bool_, np.uint8) and keeps_type(name))
    return given if kept else layout.integer


def _grid(
    name: str, column: MemoryRows, picked: PickedRows, mask: npt.NDArray[Any], fill: int, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    found = column.grid(picked.at, picked.starts, picked.width)
    if dtype.kind == "f":
        return np.where(mask, found, fill).astype(dtype)  # padding may hold NaN
    if found.dtype == dtype:
        np.multiply(found, mask, out=found)
        grid = found
    else:
        # Padding holds anything, so it is zeroed before the values are checked.
        found = np.multiply(found, mask.astype(found.dtype))
        grid = _as(name, found, dtype, picked.rows)
    if fill:
        np.copyto(grid, fill, where=mask == 0)
    return grid


def _as(name: str, found: npt.NDArray[Any], dtype: np.dtype[Any], rows: Ints) -> npt.NDArray[Any]:
    """The values in another dtype; an error if one does not fit."""
    if found.dtype == dtype:
        return found
    if found.dtype.kind in "iu" and dtype.kind in "iu" and not np.can_cast(found.dtype, dtype, "safe") and found.size:
        limits = np.iinfo(dtype)
        if int(found.max()) > limits.max or int(found.min()) < limits.min:
            at = np.argwhere((found > limits.max) | (found < limits.min))[0]
            row = int(rows[at[0]])
            hint = "" if name in ("input_ids", "labels") else f"; use metadata_fields=[{name!r}]"
            raise DataError(
                f"{name} of row {row} has the value {found[tuple(at)]}, which {dtype.name} cannot hold{hint}", row=row
            )
    return found.astype(dtype)


_FIELDS = set(NO_FIELDS)


class SampleBatch(TrainingBatch):
    """Batch of samples; see `TrainingBatch`.

        input_ids, attention_mask, token_type_ids ...   (rows, tokens), padded on the right
        labels                                          (rows,), (rows, k) as the samples have them, or by token
        num_items_in_batch                              denominator of the summed loss: rows, or labelled tokens, of the
                                                        optimizer step on all ranks; gradients of micro-batches add up
        metadata                                        step, micro_step, micro_steps, update, row, and the fields of
                                                        samples that are no numbers, as lists

    A rank without rows in the last batch of an epoch gets one row of padding: `metadata["blank"]` is true, and
    `loss_mask`, one number for each row, is 0. Samples without tokens make batches without `input_ids` and
    `attention_mask`: `batch["x"]` and their other fields.
    """

    @classmethod
    def of_arrays(cls, arrays: dict[str, Any], metadata: dict[str, Any], items: int, tokens: int) -> Self:
        """Batch of arrays of a framework, unchecked."""
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
        """Number of rows."""
        return int(next(iter(self._arrays().values())).shape[0])

    @property
    def num_tokens(self) -> int:
        """Tokens without padding; 0 for samples without tokens."""
        return super().num_tokens if self.input_ids is not None else 0

    def __getitem__(self, key: str) -> Any:
        # Rows of samples are never packed, so their mask is delivered unchanged.
        value = self.__dict__[key] if key == "attention_mask" and key not in self._hidden else None
        return super().__getitem__(key) if value is None else value

    def to_numpy(self) -> dict[str, Any]:
        """Arrays and numbers, without metadata; floating-point labels as float32."""
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
