"""Samples as columns: tokens, numbers, and what is kept beside the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DataError, SchemaError
from penstock.loaders.samples.ragged import MemoryRows, numbers_of
from penstock.loaders.samples.schema import (
    IGNORE,
    FieldKind,
    Objective,
    SampleSchema,
    array_of,
    keeps_type,
    read_schema,
)

__all__ = ["LOOKED_AT", "ArrowCells", "ListCells", "SampleColumns", "columns_of_samples", "columns_of_table", "some_of"]


Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ListCells:
    """A column of anything, as a list."""

    values: list[Any]

    def take(self, rows: Ints) -> list[Any]:
        return [self.values[row] for row in rows.tolist()]


@dataclass(frozen=True, slots=True)
class ArrowCells:
    """A column of anything, as Arrow has it."""

    values: pa.ChunkedArray

    def take(self, rows: Ints) -> list[Any]:
        numbers = pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(np.ascontiguousarray(rows))])
        cells: list[Any] = self.values.take(numbers).to_pylist()
        return cells


@dataclass(frozen=True)
class SampleColumns:
    """Some samples: row i of every column is of sample i."""

    rows: int
    ids: MemoryRows | None = None
    """None: samples that have no tokens, only numbers of one shape."""
    by_token: Mapping[str, MemoryRows] = field(default_factory=dict)
    """Of the same lengths as the ids."""
    fixed: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Whole numbers as they were given (bytes and truth values only where batches have them), others as float32."""
    beside: Mapping[str, ListCells | ArrowCells] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        tokens = sum(column.nbytes for column in self.by_token.values())
        numbers = sum(column.nbytes for column in self.fixed.values())
        return tokens + numbers + (0 if self.ids is None else self.ids.nbytes)

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each sample."""
        return np.zeros(self.rows, np.int64) if self.ids is None else self.ids.lengths

    @cached_property
    def ignored(self) -> npt.NDArray[np.bool_] | None:
        """Which samples have a label of their own that is not to be learned; None: none has."""
        labels = self.fixed.get("labels")
        if labels is None or labels.dtype.kind not in "iu":
            return None
        found = (labels == IGNORE).reshape(self.rows, -1).all(axis=1)
        return found if found.any() else None

    def identity(self, digest: Callable[[bytes], object]) -> None:
        """PlanSource what tells these samples from others: how long they are, the ids of some, their numbers beside."""
        if self.ids is not None:
            digest(np.ascontiguousarray(self.ids.lengths).tobytes())
            for row in some_of(len(self.ids)).tolist():
                digest(np.ascontiguousarray(self.ids.row(row), np.int64).tobytes())
        for name in sorted(self.fixed):
            digest(name.encode())
            digest(np.ascontiguousarray(self.fixed[name]).tobytes())


def some_of(rows: int) -> npt.NDArray[np.int64]:
    """A few rows, spread evenly, that stand for all."""
    return np.unique(np.linspace(0, max(rows - 1, 0), min(rows, 64)).astype(np.int64))


LOOKED_AT = 64
"""Rows behind row 0 that are looked at where it does not tell what labels are."""

NumberOf = Callable[[int], int]
"""Which row of the dataset a sample is."""


def columns_of_samples(samples: Sequence[Any], schema: SampleSchema, number_of: NumberOf = int) -> SampleColumns:
    """Samples as columns. `number_of` says which row of the dataset sample i is, for errors."""
    names = (*schema.kinds, *schema.left_out)
    try:
        # Dicts that have as many keys, all of these among them, have these keys.
        if set(map(type, samples)) != {dict} or set(map(len, samples)) != {len(names)}:
            raise KeyError
        columns = {name: list(map(itemgetter(name), samples)) for name in names}
    except KeyError:
        for number, sample in enumerate(samples):
            schema.check_keys(sample, number_of(number))
        columns = {name: [sample[name] for sample in samples] for name in schema.kinds}
    ids = _tokens("input_ids", columns["input_ids"], None, number_of) if schema.has_tokens else None
    by_token: dict[str, MemoryRows] = {}
    fixed: dict[str, npt.NDArray[Any]] = {}
    beside: dict[str, ListCells | ArrowCells] = {}
    for name, kind in schema.kinds.items():
        if name == "input_ids":
            continue
        if kind.role == "tokens":
            by_token[name] = _tokens(name, columns[name], ids, number_of)
        elif kind.role == "fixed":
            fixed[name] = _numbers(name, columns[name], kind, number_of)
        else:
            beside[name] = ListCells(columns[name])
    for name in schema.details:
        entries = columns["metadata"]
        beside[name] = ListCells([each.get(name) if isinstance(each, Mapping) else None for each in entries])
    return SampleColumns(len(samples), ids, _without_plain_mask(by_token), fixed, beside)


def columns_of_table(table: pa.Table, objective: Objective, keep: frozenset[str] = frozenset()) -> SampleColumns:
    """The columns of a table. Those of numbers are views of it where they can be; no row becomes a Python object."""
    if not table.num_rows:
        return SampleColumns(0)
    first = {name: _first_cell(table.column(name)) for name in table.column_names}
    rows = min(table.num_rows, LOOKED_AT + 1)
    told = [name for name in ("input_ids", "labels") if name in table.column_names]
    others = ({name: table.column(name)[row].as_py() for name in told} for row in range(1, rows))
    schema = read_schema(first, objective, keep, others)
    for name in schema.kinds:
        _check_no_nulls(name, table.column(name), schema.kinds[name])
    ids = None
    if schema.has_tokens:
        ids = MemoryRows.of_column(_lists_of("input_ids", table.column("input_ids")))
        _check_not_empty(ids, int)
    by_token: dict[str, MemoryRows] = {}
    fixed: dict[str, npt.NDArray[Any]] = {}
    beside: dict[str, ListCells | ArrowCells] = {}
    for name, kind in schema.kinds.items():
        column = table.column(name)
        if kind.role == "meta":
            beside[name] = ArrowCells(column)
        elif kind.role == "tokens" and ids is not None and name != "input_ids":
            by_token[name] = MemoryRows.of_column(_lists_of(name, column))
            _check_lengths(name, by_token[name], ids, int)
        elif kind.role == "fixed":
            fixed[name] = _checked_numbers(name, _column_numbers(name, column, kind), kind, int)
    for name in schema.details:
        beside[name] = ArrowCells(pc.struct_field(table.column("metadata"), name))
    return SampleColumns(table.num_rows, ids, _without_plain_mask(by_token), fixed, beside)


# Of samples


def _tokens(name: str, values: list[Any], ids: MemoryRows | None, number_of: NumberOf) -> MemoryRows:
    arrays = _arrays(name, values, number_of)
    dtypes = set(map(attrgetter("dtype"), arrays))
    if set(map(attrgetter("ndim"), arrays)) != {1} or not {dtype.kind for dtype in dtypes} <= set("iub"):
        for number, array in enumerate(arrays):
            if array.ndim != 1 or array.dtype.kind not in "iub":
                raise DataError(
                    f"{name} of row {number_of(number)} has shape {array.shape} and type {array.dtype}, and tokens are "
                    "a list of whole numbers",
                    row=number_of(number),
                )
    found = MemoryRows.of_arrays(arrays)
    if ids is None:
        _check_not_empty(found, number_of)
    else:
        _check_lengths(name, found, ids, number_of)
    return found


def _arrays(name: str, values: list[Any], number_of: NumberOf) -> list[npt.NDArray[Any]]:
    if set(map(type, values)) == {np.ndarray}:
        return values
    arrays: list[npt.NDArray[Any]] = []
    for number, value in enumerate(values):
        array = array_of(name, value, number_of(number))
        if array is None:
            raise DataError(
                f"{name} of row {number_of(number)} are no numbers: {value!r:.80}; row 0 has numbers there",
                row=number_of(number),
            )
        arrays.append(array)
    return arrays


def _numbers(name: str, values: list[Any], kind: FieldKind, number_of: NumberOf) -> npt.NDArray[Any]:
    if not kind.shape and set(map(type, values)) <= {int, float, bool, np.float32, np.float64, np.int64, np.int32}:
        stacked = np.asarray(values)
        if stacked.dtype.kind == "O":
            raise DataError(f"{name} has whole numbers that no 64 bits hold")
        return _checked_numbers(name, stacked, kind, number_of)
    arrays = _arrays(name, values, number_of)
    if set(map(np.shape, arrays)) - {kind.shape}:
        number = next(number for number, array in enumerate(arrays) if array.shape != kind.shape)
        raise DataError(
            f"{name} of row {number_of(number)} has shape {arrays[number].shape}, and that of row 0 {kind.shape}; give "
            f"every sample the same shape{_if_by_token(name, kind)}",
            row=number_of(number),
        )
    return _checked_numbers(name, np.stack(arrays), kind, number_of)


# Of both


def _without_plain_mask(by_token: dict[str, MemoryRows]) -> dict[str, MemoryRows]:
    """Without a mask that is all ones, which is the one that is made anyway."""
    mask = by_token.get("attention_mask")
    if mask is not None and mask.all_ones():
        del by_token["attention_mask"]
    return by_token


def _checked_numbers(name: str, numbers: npt.NDArray[Any], kind: FieldKind, number_of: NumberOf) -> npt.NDArray[Any]:
    """Numbers as the batch will have them: whole ones as they are or as bytes, others as float32."""
    real = numbers.dtype.kind == "f"
    if real and not kind.real:
        with np.errstate(invalid="ignore"):
            whole = numbers.astype(np.int64)
        _refuse(numbers != whole, name, numbers, number_of, _not_whole(name))
        numbers = whole
    if not kind.real and kind.narrow is not None:
        return _narrowed(name, numbers, np.dtype(kind.narrow), number_of)
    if not kind.real:
        if numbers.dtype.kind == "b":
            return numbers.astype(np.int8)
        return numbers.astype(np.int16) if numbers.dtype == np.uint8 and keeps_type(name) else numbers
    if name == "labels" and real:
        _refuse(~np.isfinite(numbers), name, numbers, number_of, "a label to be learned; drop the row, or fill it in")
    with np.errstate(over="ignore"):
        narrow = numbers.astype(np.float32)
    if real and numbers.dtype.itemsize > narrow.dtype.itemsize:
        _refuse(np.isinf(narrow) & np.isfinite(numbers), name, numbers, number_of, "within float32; scale it")
    return narrow


def _narrowed(name: str, numbers: npt.NDArray[Any], dtype: np.dtype[Any], number_of: NumberOf) -> npt.NDArray[Any]:
    if numbers.dtype == dtype:
        return numbers
    narrow = numbers.astype(dtype)
    _refuse(narrow != numbers, name, numbers, number_of, f"{dtype}, as that of row 0 is; give every sample one type")
    return narrow


def _not_whole(name: str) -> str:
    if name == "labels":
        return "a whole number, as the label of row 0 and of every class is; pass objective='regression' for fractions"
    return "a whole number, as that of row 0 is; give every sample the same type"


def _refuse(wrong: npt.NDArray[np.bool_], name: str, numbers: npt.NDArray[Any], number_of: NumberOf, why: str) -> None:
    if wrong.any():
        at = tuple(int(place) for place in np.argwhere(wrong)[0])
        row = number_of(at[0])
        raise DataError(f"{name} of row {row} is {numbers[at]}, which is not {why}", row=row)


def _if_by_token(name: str, kind: FieldKind) -> str:
    """What to do if values are by token, which nothing said."""
    if name == "labels":
        return "; for one label for each token, pass objective=None" if kind.by_row and len(kind.shape) == 1 else ""
    return "; rows of tokens are padded if they are called input_ids"


def _check_not_empty(ids: MemoryRows, number_of: NumberOf) -> None:
    if not ids.lengths.all():
        row = number_of(int(np.argmin(ids.lengths)))
        raise DataError(
            f"input_ids of row {row} are empty: nothing in that row could be attended to, and a softmax over nothing "
            "is NaN; drop such rows, or give them one token",
            row=row,
        )


def _check_lengths(name: str, found: MemoryRows, ids: MemoryRows, number_of: NumberOf) -> None:
    different = np.flatnonzero(found.lengths != ids.lengths)
    if len(different):
        row, at = number_of(int(different[0])), int(different[0])
        raise DataError(
            f"{name} of row {row} has {found.lengths[at]} values and input_ids {ids.lengths[at]}; in row 0 both have "
            "equally many, so that they are taken to be by token"
            + ("; pass objective='classification' if they are not" if name == "labels" else ""),
            row=row,
        )


# Of tables


def _first_cell(column: pa.ChunkedArray) -> Any:
    chunk = next(chunk for chunk in column.chunks if len(chunk))
    cell = chunk[0].as_py()
    if isinstance(cell, list) and not cell and pa.types.is_floating(getattr(column.type, "value_type", pa.null())):
        return np.zeros(0, np.float32)
    if _leaf(column.type) == pa.uint8():
        with suppress(TypeError, ValueError):  # of nulls, and of rows of different lengths, which are told later
            return np.asarray(cell, np.uint8)
    return cell


def _leaf(kind: pa.DataType) -> pa.DataType:
    """What the numbers of a column are, in lists of lists too."""
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return kind


def _check_no_nulls(name: str, column: pa.ChunkedArray, kind: FieldKind) -> None:
    if kind.role == "meta" and not (name == "labels" and column.null_count):
        return
    nested = pa.types.is_nested(column.type)
    if column.null_count:
        row = pc.index(pc.is_null(column), True).as_py()
        raise DataError(f"{name} of row {row} is null; drop such rows, or fill them in", row=row)
    if nested and any(chunk.flatten().null_count for chunk in column.chunks):
        row = next(row for row, cell in enumerate(column.to_pylist()) if None in cell)
        raise DataError(f"{name} of row {row} has a null in it; drop such rows, or fill them in", row=row)


def _lists_of(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of lists of whole numbers, or an error."""
    kind = column.type
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not listed or not (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)):
        raise SchemaError(f"the column {name} is {kind}, and tokens are lists of whole numbers, such as list<int32>")
    return column


def _column_numbers(name: str, column: pa.ChunkedArray, kind: FieldKind) -> npt.NDArray[Any]:
    if not pa.types.is_nested(column.type):
        return _flat_numbers(column.chunks)
    if len(kind.shape) > 1:
        return np.stack([np.asarray(cell) for cell in column.to_pylist()])
    ragged = MemoryRows.of_column(column)
    wrong = np.flatnonzero(ragged.lengths != kind.shape[0])
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"{name} of row {row} has {ragged.lengths[row]} values, and that of row 0 {kind.shape[0]}; give every row "
            f"equally many{_if_by_token(name, kind)}",
            row=row,
        )
    return ragged.grid(np.arange(len(ragged)), None, kind.shape[0])


def _flat_numbers(chunks: Sequence[pa.Array]) -> npt.NDArray[Any]:
    return np.concatenate([numbers_of(chunk) for chunk in chunks])
