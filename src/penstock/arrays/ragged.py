"""Rows of different lengths in one flat array: how ids and offsets are held between a tokenizer and Arrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arrays.text import flags
from penstock.errors import DataError

__all__ = [
    "Flags",
    "Ints",
    "Ragged",
    "checked_text",
    "joined",
    "list_array",
    "pieces",
    "ragged",
    "row_offsets",
    "spliced",
]

Ints: TypeAlias = npt.NDArray[np.integer[Any]]
Flags: TypeAlias = npt.NDArray[np.bool_]

MOST = 2**31 - 1


class Ragged(NamedTuple):
    """Row i is `values[bounds[i]:bounds[i + 1]]`."""

    values: Ints
    bounds: npt.NDArray[np.int64]


def ragged(rows: Sequence[Ints], dtype: npt.DTypeLike = np.uint32) -> Ragged:
    """One array for each row, put end to end."""
    bounds = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=bounds[1:])
    values = np.concatenate(rows).astype(dtype, copy=False) if rows else np.zeros(0, dtype)
    return Ragged(values, bounds)


def joined(parts: Sequence[Ragged]) -> Ragged:
    """The rows of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    ends = np.cumsum([0, *(part.bounds[-1] for part in parts)])
    bounds = [part.bounds[1:] + end for part, end in zip(parts, ends)]
    return Ragged(
        np.concatenate([part.values for part in parts]) if parts else np.zeros(0, np.uint32),
        np.concatenate([np.zeros(1, np.int64), *bounds]),
    )


def spliced(there: Flags, marked: Ragged, others: Ragged) -> Ragged:
    """Rows of two in one order: those of `marked` where `there` is true, those of `others` elsewhere."""
    lengths = np.empty(len(there), np.int64)
    lengths[there], lengths[~there] = np.diff(marked.bounds), np.diff(others.bounds)
    bounds = np.zeros(len(there) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    values = np.empty(bounds[-1], np.result_type(marked.values, others.values))
    from_marked = np.repeat(there, lengths)
    values[from_marked], values[~from_marked] = marked.values, others.values
    return Ragged(values, bounds)


def list_array(rows: Ragged, dtype: pa.DataType, like: pa.Array | None = None) -> pa.ListArray:
    """The rows as Arrow lists, null where `like` is null."""
    if rows.bounds[-1] > MOST:
        raise DataError(
            f"a batch of {rows.bounds[-1]:,} tokens is more than the {MOST:,} a column can hold; use smaller batches"
        )
    values = pa.array(rows.values.astype(dtype.to_pandas_dtype(), copy=False))
    bounds = pa.array(rows.bounds.astype(np.int32))
    if like is not None and like.null_count:
        return pa.ListArray.from_arrays(bounds, values, mask=pa.array(flags(like.is_null())))
    return pa.ListArray.from_arrays(bounds, values)


def row_offsets(lengths: Ints, bounds: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Where each value begins and ends, counted from the beginning of its row, if values take these lengths."""
    ends = np.cumsum(lengths, dtype=np.int64)
    before = np.concatenate(([0], ends))[bounds[:-1]]
    ends -= np.repeat(before, np.diff(bounds))
    return (ends - lengths).astype(np.int32), ends.astype(np.int32)


def pieces(texts: pa.Array, max_bytes: int) -> Iterator[pa.Array]:
    """The column in slices of about `max_bytes` bytes; a longer row is a slice of its own."""
    dtype = np.int64 if texts.type == pa.large_string() else np.int32
    bounds = (
        np.frombuffer(texts.buffers()[1], dtype)[texts.offset : texts.offset + len(texts) + 1] if len(texts) else None
    )
    start = 0
    while start < len(texts):
        assert bounds is not None
        stop = int(np.searchsorted(bounds, bounds[start] + max_bytes, "right")) - 1
        stop = min(max(stop, start + 1), len(texts))
        yield texts[start:stop]
        start = stop


def checked_text(texts: pa.Array) -> pa.Array:
    """A column of text whose bytes are UTF-8, with an empty text for every null."""
    if texts.type not in (pa.string(), pa.large_string()):
        raise DataError(f"texts must be a string or large_string array, got {texts.type}")
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        row = _first_invalid(texts)
        raise DataError(
            f"the text of row {row} of the batch is not UTF-8: {texts[row].as_buffer().to_pybytes()[:80]!r}; "
            "decode it with the encoding it was written in, or leave the row out",
            row=row,
        ) from None
    return texts.fill_null("") if texts.null_count else texts


def _first_invalid(texts: pa.Array) -> int:
    for row in range(len(texts)):
        try:
            texts[row : row + 1].validate(full=True)
        except pa.ArrowInvalid:
            return row
    raise DataError("the column is not valid Arrow data")  # offsets that point nowhere: no row to blame
