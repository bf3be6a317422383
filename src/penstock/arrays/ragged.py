"""Ragged array: rows of different lengths in one flat array of values, with offsets, as Arrow's lists have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arrays.text import arrow_of, flags, numbers_of
from penstock.errors import DataError

Ints: TypeAlias = npt.NDArray[np.integer[Any]]
Flags: TypeAlias = npt.NDArray[np.bool_]

MOST = 2**31 - 1
_FEW_OWNERS = 8
_FEW_STARTS = 16


def is_list(kind: pa.DataType) -> bool:
    """True for lists with offsets, which lie one after the other; those of a list view need not."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def is_any_list(kind: pa.DataType) -> bool:
    """True for lists with offsets and lists of a fixed size."""
    return is_list(kind) or bool(pa.types.is_fixed_size_list(kind))


def is_number(kind: pa.DataType) -> bool:
    """True for integers, floats and booleans."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def offsets_of(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Offsets of rows with these lengths: 0, and the running sum."""
    sizes = np.asarray(lengths)
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def by_owner(owners: npt.NDArray[np.int64], count: int) -> list[tuple[int, Any]]:
    """(owner, index of what it owns) for each of `count` owners that has anything; the cost is by those."""
    if count == 1:
        return [(0, slice(None))]
    if count <= _FEW_OWNERS:
        return [(owner, np.flatnonzero(owners == owner)) for owner in range(count)]
    order = np.argsort(owners, kind="stable")
    heads = np.flatnonzero(np.diff(owners[order], prepend=-1))
    return list(zip(owners[order[heads]].tolist(), np.split(order, heads[1:]) if len(heads) else ()))


def owners_of(starts: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> npt.NDArray[np.integer[Any]]:
    """The number of the last start that is not above each place; -1 before the first.

    Places in any order are compared with few starts one by one: a search would be guessed wrong at every turn.
    """
    if len(starts) > _FEW_STARTS:
        return np.searchsorted(starts, places, side="right") - 1
    owners = np.full(len(places), -1, np.int8)
    for start in starts.tolist():
        owners += places >= start
    return owners


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of different lengths: row i is `values[offsets[i]:offsets[i + 1]]`. The first offset need not be 0."""

    values: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def flat(self) -> npt.NDArray[Any]:
        """Values of all rows, without values before the first and after the last row."""
        return self.values[self.offsets[0] : self.offsets[-1]]

    @classmethod
    def of(cls, rows: Sequence[npt.ArrayLike], dtype: npt.DTypeLike) -> Self:
        """One array for each row, copied end to end."""
        arrays = [np.asarray(row, dtype) for row in rows]
        return cls(np.concatenate(arrays) if arrays else np.empty(0, dtype), offsets_of([len(a) for a in arrays]))

    @classmethod
    def of_lists(cls, lists: pa.Array) -> Self:
        """View of a column of Arrow lists without nulls. The first offset is 0; booleans are copied.

        A null inside a list is a DataError: NumPy would make floats of all values.
        """
        # A writer may leave out the offsets of no rows at all, and pyarrow would read them all the same.
        offsets = numbers_of(lists.offsets).astype(np.int64) if len(lists) else np.zeros(1, np.int64)
        values = lists.values.slice(offsets[0], offsets[-1] - offsets[0])
        if values.null_count:
            at = int(flags(values.is_null()).argmax())
            row = int(np.searchsorted(offsets - offsets[0], at, side="right")) - 1
            raise DataError(
                f"row {row} of a column of lists has a null inside; expected a value in every place", row=row
            )
        plain = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
        return cls(numbers_of(values) if plain else values.to_numpy(zero_copy_only=False), offsets - offsets[0])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Rows of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        offsets = [np.zeros(1, np.int64)]
        for part in parts:
            offsets.append(part.offsets[1:] - part.offsets[0] + offsets[-1][-1])
        values = [part.flat for part in parts]
        return cls(np.concatenate(values) if values else np.zeros(0, np.uint32), np.concatenate(offsets))

    def take(self, rows: npt.ArrayLike) -> Self:
        """Some rows, in the order given, as a copy."""
        chosen = np.asarray(rows, np.int64)
        starts, stops = self.offsets[chosen], self.offsets[chosen + 1]
        parts = [self.values[low:high] for low, high in zip(starts.tolist(), stops.tolist(), strict=True)]
        return type(self)(np.concatenate(parts) if parts else self.values[:0], offsets_of(stops - starts))


def spliced(there: Flags, marked: Ragged, others: Ragged) -> Ragged:
    """Rows of two arrays in one order: those of `marked` where `there` is true, those of `others` elsewhere."""
    lengths = np.empty(len(there), np.int64)
    lengths[there], lengths[~there] = marked.lengths, others.lengths
    offsets = offsets_of(lengths)
    values = np.empty(offsets[-1], np.result_type(marked.values, others.values))
    from_marked = np.repeat(there, lengths)
    values[from_marked], values[~from_marked] = marked.values, others.values
    return Ragged(values, offsets)


def list_array(rows: Ragged, dtype: pa.DataType, like: pa.Array | None = None) -> pa.ListArray:
    """Rows as Arrow lists, null where `like` is null."""
    if rows.offsets[-1] > MOST:
        raise DataError(
            f"a batch of {rows.offsets[-1]:,} tokens is more than the {MOST:,} a column can hold; use smaller batches"
        )
    values = arrow_of(rows.values.astype(dtype.to_pandas_dtype(), copy=False))
    offsets = arrow_of(rows.offsets.astype(np.int32))
    if like is not None and like.null_count:
        return pa.ListArray.from_arrays(offsets, values, mask=pa.array(flags(like.is_null())))
    return pa.ListArray.from_arrays(offsets, values)


def row_offsets(lengths: Ints, offsets: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Begin and end of each value, counted from the beginning of its row, if values take these lengths."""
    ends = np.cumsum(lengths, dtype=np.int64)
    before = np.concatenate(([0], ends))[offsets[:-1]]
    ends -= np.repeat(before, np.diff(offsets))
    return (ends - lengths).astype(np.int32), ends.astype(np.int32)
