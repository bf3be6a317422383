"""Columns and row numbers to the arrays of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, DataError
from penstock.loaders.samples.columns import SampleColumns
from penstock.loaders.samples.ragged import MemoryRows, mask_of
from penstock.loaders.samples.schema import FILLS, IGNORE, Objective, keeps_type

__all__ = ["Corruption", "Form", "Picked", "SampleTruncation", "assemble", "blank", "count_labels"]

Ints = npt.NDArray[np.int64]


class Corruption(Protocol):
    """What makes a masked-language-model batch of ids; see `MaskedLM`."""

    def corrupt(
        self, input_ids: npt.NDArray[Any], attention_mask: npt.NDArray[Any], rows: Ints, epoch: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """What batches look like, whatever is in them."""

    integer: np.dtype[Any]
    pad_id: int = 0
    multiple: int = 1
    max_length: int | None = None
    truncation: Literal["error", "right", "left"] = "error"
    """What of a row that is longer than `max_length` goes: nothing, its end, or its beginning."""
    to_max_length: bool = False
    """True if every row is padded to `max_length`, and not to the longest row."""
    objective: Objective = None
    corruption: Corruption | None = None

    def __post_init__(self) -> None:
        if self.to_max_length and self.max_length is None:
            raise ConfigError("padding='max_length' needs a max_length to pad to; pass one, or padding='longest'")

    def cut(self, lengths: Ints, rows: Ints) -> SampleTruncation:
        """What is kept of rows of these lengths."""
        limit = self.max_length
        if limit is None or not len(lengths) or int(lengths.max()) <= limit:
            return SampleTruncation(lengths, None)
        if self.truncation == "error":
            at = int(np.argmax(lengths > limit))
            raise DataError(
                f"row {int(rows[at])} has {int(lengths[at])} tokens, and max_length is {limit}; pass a larger "
                "max_length, or truncation='right' (keep the beginning) or 'left' (keep the end)",
                row=int(rows[at]),
            )
        kept = np.minimum(lengths, limit)
        skips = lengths - kept if self.truncation == "left" else None
        return SampleTruncation(kept, skips)

    def width(self, longest: int) -> int:
        """Tokens of a row of a batch whose longest has so many."""
        if self.to_max_length and self.max_length is not None:
            longest = self.max_length
        return -(-max(longest, 1) // self.multiple) * self.multiple


class SampleTruncation(NamedTuple):
    """What is kept of some rows."""

    lengths: Ints
    skips: Ints | None
    """Tokens left out in front; None: of no row."""

    def slice(self, low: int, high: int) -> SampleTruncation:
        return SampleTruncation(self.lengths[low:high], None if self.skips is None else self.skips[low:high])


class Picked(NamedTuple):
    """Samples of a batch: rows `at` of some columns, which are `rows` of the dataset."""

    at: Ints
    rows: Ints
    cut: SampleTruncation
    width: int
    """Tokens of each row of the batch."""


def assemble(columns: SampleColumns, picked: Picked, epoch: int, form: Form) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a batch."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    if columns.ids is not None:
        mask = mask_of(picked.cut.lengths, picked.width, form.integer)
        ids = _grid("input_ids", columns.ids, picked, mask, form.pad_id, form.integer)
        arrays = {"input_ids": ids, "attention_mask": mask}
        for name, column in columns.by_token.items():
            dtype = np.dtype(np.float32) if column.dtype.kind == "f" else form.integer
            arrays[name] = _grid(name, column, picked, mask, FILLS.get(name, 0), dtype)
        if form.corruption is not None:
            corrupted, labels = form.corruption.corrupt(ids, arrays["attention_mask"], picked.rows, epoch)
            arrays["input_ids"] = _as("input_ids", corrupted, form.integer, picked.rows)
            arrays["labels"] = _as("labels", labels, form.integer, picked.rows)
    for name, numbers in columns.fixed.items():
        found = numbers[picked.at]
        arrays[name] = _as(name, found, _type_of(name, found.dtype, form), picked.rows)
    return arrays


def blank(columns: SampleColumns, width: int, form: Form) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a batch without samples: one row of padding that attends to its first token, or a softmax over
    nothing would make NaN; `loss_mask` says that nothing is learned from it."""
    shape = (1, width)
    arrays: dict[str, npt.NDArray[Any]] = {}
    if columns.ids is not None:
        mask = np.zeros(shape, form.integer)
        mask[0, 0] = 1
        arrays = {"input_ids": np.full(shape, form.pad_id, form.integer), "attention_mask": mask}
    for name, column in columns.by_token.items():
        if name != "attention_mask":
            arrays[name] = np.full(shape, FILLS.get(name, 0), np.float32 if column.dtype.kind == "f" else form.integer)
    for name, numbers in columns.fixed.items():
        dtype = _type_of(name, numbers.dtype, form)
        fill = IGNORE if name == "labels" and dtype.kind != "f" else 0
        arrays[name] = np.full((1, *numbers.shape[1:]), fill, dtype)
    if form.corruption is not None:
        arrays["labels"] = np.full(shape, IGNORE, form.integer)
    arrays["loss_mask"] = np.zeros(1, form.integer)
    return arrays


def count_labels(columns: SampleColumns, at: Ints, rows: Ints, epoch: int, form: Form) -> int:
    """Tokens with a label of some samples, however they are put into batches."""
    assert columns.ids is not None
    cut = form.cut(columns.lengths[at], rows)
    picked = Picked(at, rows, cut, int(cut.lengths.max(initial=1)))
    mask = mask_of(cut.lengths, picked.width, form.integer)
    if form.corruption is not None:
        ids = _grid("input_ids", columns.ids, picked, mask, form.pad_id, form.integer)
        given = columns.by_token.get("attention_mask")
        if given is not None:
            mask = _grid("attention_mask", given, picked, mask, 0, form.integer)
        labels = form.corruption.corrupt(ids, mask, rows, epoch)[1]
    else:
        labels = _grid("labels", columns.by_token["labels"], picked, mask, IGNORE, form.integer)
    return int(np.count_nonzero(labels != IGNORE))


def _type_of(name: str, given: np.dtype[Any], form: Form) -> np.dtype[Any]:
    """The type in a batch of numbers that are not by token."""
    kept = given.kind == "f" or (given in (np.bool_, np.uint8) and keeps_type(name))
    return given if kept else form.integer


def _grid(
    name: str, column: MemoryRows, picked: Picked, mask: npt.NDArray[Any], fill: int, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    found = column.grid(picked.at, picked.cut.skips, picked.width)
    if dtype.kind == "f":
        return np.where(mask, found, fill).astype(dtype)  # behind a row may be NaN
    if found.dtype == dtype:
        np.multiply(found, mask, out=found)
        grid = found
    else:
        # What lies behind a row is anything, so it goes before the values are looked at.
        found = np.multiply(found, mask.astype(found.dtype))
        grid = _as(name, found, dtype, picked.rows)
    if fill:
        np.copyto(grid, fill, where=mask == 0)
    return grid


def _as(name: str, found: npt.NDArray[Any], dtype: np.dtype[Any], rows: Ints) -> npt.NDArray[Any]:
    """The same values in another type; an error if one does not fit."""
    if found.dtype == dtype:
        return found
    if found.dtype.kind in "iu" and dtype.kind in "iu" and not np.can_cast(found.dtype, dtype, "safe") and found.size:
        limits = np.iinfo(dtype)
        if int(found.max()) > limits.max or int(found.min()) < limits.min:
            at = np.argwhere((found > limits.max) | (found < limits.min))[0]
            row = int(rows[at[0]])
            hint = "" if name in ("input_ids", "labels") else f"; keep it beside the batch with beside=[{name!r}]"
            raise DataError(
                f"{name} of row {row} has the value {found[tuple(at)]}, which {dtype.name} cannot hold{hint}", row=row
            )
    return found.astype(dtype)
