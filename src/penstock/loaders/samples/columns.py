"""Samples as columns: token-wise fields, numbers of one shape, and metadata."""

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

from penstock.arrays.ragged import is_any_list, offsets_of
from penstock.errors import DataError, SchemaError
from penstock.loaders.samples.schema import (
    IGNORE,
    FieldKind,
    Objective,
    SampleSchema,
    array_of,
    keeps_type,
    read_schema,
)
from penstock.memory.views import LONGEST_STRETCH, memory_as, place_of, stretches_of

Ints = npt.NDArray[np.int64]
_STEPS: dict[str, tuple[int, npt.NDArray[Any], dict[int, npt.NDArray[Any]]]] = {}
"""By dtype: a run of ones followed by zeros, and its sliding windows by width."""


class MemoryRows:
    """Rows of numbers anywhere in memory, read as padded grids.

    Rows are addresses, so that a table of many chunks, a mapped file and small arrays are read without a copy. A grid
    is a single indexing: row p of a view of all memory is the `width` numbers from address p on.
    """

    def __init__(self, places: Ints, lengths: Ints, room: Ints, dtype: np.dtype[Any], held: Any, nbytes: int) -> None:
        self.lengths, self.dtype, self.nbytes = lengths, dtype, nbytes
        self._places, self._room, self._held = places, room, held
        self._memory = memory_as(dtype)
        self._views: dict[int, npt.NDArray[Any]] = {}

    @classmethod
    def of_parts(cls, parts: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]) -> MemoryRows:
        """Rows of several ragged arrays, as (values, offsets).

        Values of one dtype that are aligned are not copied. Values after the last row make it quicker to read.
        """
        dtype = np.result_type(*(numbers.dtype for numbers, _ in parts)) if parts else np.dtype(np.int32)
        dtype = dtype.newbyteorder("=")
        held = []
        places, lengths, room, nbytes = [], [], [], 0
        for numbers, offsets in parts:
            plain = np.require(numbers, dtype, ["C", "A"])
            held.append(plain)
            begin = place_of(plain.ctypes.data, dtype.itemsize) if len(plain) else 0
            starts = offsets[:-1].astype(np.int64)
            places.append(starts + begin)
            lengths.append(np.diff(offsets).astype(np.int64))
            room.append(len(plain) - starts)
            nbytes += plain.nbytes
        return cls(join_ints(places), join_ints(lengths), join_ints(room), dtype, held, nbytes)

    @classmethod
    def of_arrays(cls, arrays: Sequence[npt.NDArray[Any]]) -> MemoryRows:
        """Rows of one array each, copied."""
        lengths = np.array(list(map(len, arrays)), np.int64)
        offsets = offsets_of(lengths)
        total = int(offsets[-1])
        filled = [array for array in arrays if len(array)] if total and not lengths.all() else arrays
        dtype = np.result_type(*set(map(attrgetter("dtype"), filled))) if total else np.dtype(np.int32)
        flat = np.empty(total + int(lengths.max(initial=0)), np.dtype(np.int8) if dtype.kind == "b" else dtype)
        flat[total:] = 0
        if total:
            np.concatenate(filled, out=flat[:total], casting="unsafe")
        return cls.of_parts([(flat, offsets)])

    @classmethod
    def of_column(cls, column: pa.ChunkedArray) -> MemoryRows:
        """Rows of a column of lists without nulls, not copied."""
        parts = []
        for chunk in column.chunks:
            if pa.types.is_fixed_size_list(chunk.type):
                size = chunk.type.list_size
                offsets = np.arange(len(chunk) + 1, dtype=np.int64) * size
                values = chunk.values.slice(chunk.offset * size, len(chunk) * size)
            else:
                offsets, values = numbers_of(chunk.offsets), chunk.values
            parts.append((numbers_of(values), offsets))
        return cls.of_parts(parts)

    def __len__(self) -> int:
        return len(self.lengths)

    def grid(self, rows: Ints, starts: Ints, width: int) -> npt.NDArray[Any]:
        """`width` numbers of each row from `starts` on; numbers after the end of a row are arbitrary."""
        places, room = self._places[rows] + starts, self._room[rows] - starts
        if len(rows) and width <= LONGEST_STRETCH and int(room.min()) >= width:
            found: npt.NDArray[Any] = self._stretches(width)[places]
            return found
        grid = np.zeros((len(rows), width), self.dtype)
        memory, short = self._memory, np.minimum(room, width)
        for number, (place, count) in enumerate(zip(places.tolist(), short.tolist())):
            if count > 0:
                grid[number, :count] = memory[place : place + count]
        return grid

    def row(self, row: int) -> npt.NDArray[Any]:
        place = int(self._places[row])
        return self._memory[place : place + int(self.lengths[row])]

    def all_ones(self) -> bool:
        """True if every number is 1."""
        return all(bool((numbers == 1).all()) for numbers in self._pieces())

    def _pieces(self) -> list[npt.NDArray[Any]]:
        """Numbers of all rows; rows that are adjacent in memory are joined."""
        if not len(self):
            return []
        ends = self._places + self.lengths
        cuts = np.flatnonzero(self._places[1:] != ends[:-1]) + 1
        begins, stops = np.append(0, cuts).tolist(), np.append(cuts, len(self)).tolist()
        return [self._memory[int(self._places[low]) : int(ends[high - 1])] for low, high in zip(begins, stops)]

    def _stretches(self, width: int) -> npt.NDArray[Any]:
        view = self._views.get(width)
        if view is None:
            view = self._views[width] = stretches_of(self.dtype, width)
        return view

    def __getstate__(self) -> dict[str, Any]:
        """State for worker processes: the numbers, because addresses are those of this process."""
        return {"flat": np.concatenate([np.zeros(0, self.dtype), *self._pieces()]), "lengths": self.lengths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows = MemoryRows.of_parts([(state["flat"], offsets_of(state["lengths"]))])
        self.__dict__.update(rows.__dict__)


def join_ints(parts: list[Ints]) -> Ints:
    """Arrays end to end; a single one is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])


def numbers_of(array: pa.Array) -> npt.NDArray[Any]:
    """Numbers of an Arrow array without nulls, as a view; booleans as bytes."""
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    # pyarrow's own conversion imports pandas.
    dtype = np.dtype(
        {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(array.type), str(array.type))
    )
    buffer = array.buffers()[1]
    if buffer is None:
        return np.zeros(0, dtype)
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)


def mask_of(lengths: Ints, width: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Mask (rows, width): 1 for the first `lengths[i]` of row i, then 0. No length exceeds the width."""
    held = _STEPS.get(dtype.str)
    if held is None or held[0] < width:
        size = max(width, 128, 2 * held[0] if held else 0)
        ones = np.zeros(2 * size, dtype)
        ones[:size] = 1
        held = _STEPS[dtype.str] = size, ones, {}
    size, ones, views = held
    view = views.get(width)
    if view is None:
        view = views[width] = np.ndarray((size + 1, width), dtype, ones, 0, (dtype.itemsize, dtype.itemsize))
    mask: npt.NDArray[Any] = view[size - lengths]
    return mask


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
    """Token-wise columns besides the ids, with the same lengths."""
    fixed: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Integers as they are (uint8 and bool only where batches keep them), other numbers as float32."""
    metadata: Mapping[str, ListCells | ArrowCells] = field(default_factory=dict)

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
        """Mask of the samples whose label is ignored; None if there are none."""
        labels = self.fixed.get("labels")
        if labels is None or labels.dtype.kind not in "iu":
            return None
        found = (labels == IGNORE).reshape(self.rows, -1).all(axis=1)
        return found if found.any() else None

    def identity(self, digest: Callable[[bytes], object]) -> None:
        """Feed the lengths, the ids of some samples and all numbers to a digest."""
        if self.ids is not None:
            digest(np.ascontiguousarray(self.ids.lengths).tobytes())
            for row in some_of(len(self.ids)).tolist():
                digest(np.ascontiguousarray(self.ids.row(row), np.int64).tobytes())
        for name in sorted(self.fixed):
            digest(name.encode())
            digest(np.ascontiguousarray(self.fixed[name]).tobytes())


def some_of(rows: int) -> npt.NDArray[np.int64]:
    """A few rows, spread evenly."""
    return np.unique(np.linspace(0, max(rows - 1, 0), min(rows, 64)).astype(np.int64))


EXAMINED_ROWS = 64
"""Rows after row 0 that are read where its labels are ambiguous."""

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
    metadata: dict[str, ListCells | ArrowCells] = {}
    for name, kind in schema.kinds.items():
        if name == "input_ids":
            continue
        if kind.role == "tokens":
            by_token[name] = _tokens(name, columns[name], ids, number_of)
        elif kind.role == "fixed":
            fixed[name] = _numbers(name, columns[name], kind, number_of)
        else:
            metadata[name] = ListCells(columns[name])
    for name in schema.details:
        entries = columns["metadata"]
        metadata[name] = ListCells([each.get(name) if isinstance(each, Mapping) else None for each in entries])
    return SampleColumns(len(samples), ids, _without_plain_mask(by_token), fixed, metadata)


def columns_of_table(table: pa.Table, objective: Objective, keep: frozenset[str] = frozenset()) -> SampleColumns:
    """The columns of a table. Those of numbers are views of it where they can be; no row becomes a Python object."""
    if not table.num_rows:
        return SampleColumns(0)
    first = {name: _first_cell(table.column(name)) for name in table.column_names}
    rows = min(table.num_rows, EXAMINED_ROWS + 1)
    names = [name for name in ("input_ids", "labels") if name in table.column_names]
    others = ({name: table.column(name)[row].as_py() for name in names} for row in range(1, rows))
    schema = read_schema(first, objective, keep, others)
    for name in schema.kinds:
        _check_no_nulls(name, table.column(name), schema.kinds[name])
    ids = None
    if schema.has_tokens:
        ids = MemoryRows.of_column(_lists_of("input_ids", table.column("input_ids")))
        _check_not_empty(ids, int)
    by_token: dict[str, MemoryRows] = {}
    fixed: dict[str, npt.NDArray[Any]] = {}
    metadata: dict[str, ListCells | ArrowCells] = {}
    for name, kind in schema.kinds.items():
        column = table.column(name)
        if kind.role == "meta":
            metadata[name] = ArrowCells(column)
        elif kind.role == "tokens" and ids is not None and name != "input_ids":
            by_token[name] = MemoryRows.of_column(_lists_of(name, column))
            _check_lengths(name, by_token[name], ids, int)
        elif kind.role == "fixed":
            fixed[name] = _checked_numbers(name, _column_numbers(name, column, kind), kind, int)
    for name in schema.details:
        metadata[name] = ArrowCells(pc.struct_field(table.column("metadata"), name))
    return SampleColumns(table.num_rows, ids, _without_plain_mask(by_token), fixed, metadata)


# Of samples


def _tokens(name: str, values: list[Any], ids: MemoryRows | None, number_of: NumberOf) -> MemoryRows:
    arrays = _arrays(name, values, number_of)
    dtypes = set(map(attrgetter("dtype"), arrays))
    if set(map(attrgetter("ndim"), arrays)) != {1} or not {dtype.kind for dtype in dtypes} <= set("iub"):
        for number, array in enumerate(arrays):
            if array.ndim != 1 or array.dtype.kind not in "iub":
                raise DataError(
                    f"{name} of row {number_of(number)} has shape {array.shape} and dtype {array.dtype}, expected a "
                    "list of integers",
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
                f"{name} of row {number_of(number)} must be numbers, as in row 0, got {value!r:.80}",
                row=number_of(number),
            )
        arrays.append(array)
    return arrays


def _numbers(name: str, values: list[Any], kind: FieldKind, number_of: NumberOf) -> npt.NDArray[Any]:
    if not kind.shape and set(map(type, values)) <= {int, float, bool, np.float32, np.float64, np.int64, np.int32}:
        stacked = np.asarray(values)
        if stacked.dtype.kind == "O":
            raise DataError(f"{name} has integers that do not fit into 64 bits")
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
    """The columns without a mask of ones, which every batch gets anyway."""
    mask = by_token.get("attention_mask")
    if mask is not None and mask.all_ones():
        del by_token["attention_mask"]
    return by_token


def _checked_numbers(name: str, numbers: npt.NDArray[Any], kind: FieldKind, number_of: NumberOf) -> npt.NDArray[Any]:
    """Numbers in the dtype of the batch: integers as they are or narrow, others as float32."""
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
        _refuse(~np.isfinite(numbers), name, numbers, number_of, "finite; drop the row, or fill in the label")
    with np.errstate(over="ignore"):
        narrow = numbers.astype(np.float32)
    if real and numbers.dtype.itemsize > narrow.dtype.itemsize:
        _refuse(np.isinf(narrow) & np.isfinite(numbers), name, numbers, number_of, "within float32; scale it")
    return narrow


def _narrowed(name: str, numbers: npt.NDArray[Any], dtype: np.dtype[Any], number_of: NumberOf) -> npt.NDArray[Any]:
    if numbers.dtype == dtype:
        return numbers
    narrow = numbers.astype(dtype)
    _refuse(narrow != numbers, name, numbers, number_of, f"{dtype}, as in row 0; give every sample the same type")
    return narrow


def _not_whole(name: str) -> str:
    if name == "labels":
        return "an integer, as in row 0; pass objective='regression' for fractions"
    return "an integer, as in row 0; give every sample the same type"


def _refuse(wrong: npt.NDArray[np.bool_], name: str, numbers: npt.NDArray[Any], number_of: NumberOf, why: str) -> None:
    if wrong.any():
        at = tuple(int(place) for place in np.argwhere(wrong)[0])
        row = number_of(at[0])
        raise DataError(f"{name} of row {row} is {numbers[at]}, which is not {why}", row=row)


def _if_by_token(name: str, kind: FieldKind) -> str:
    """Advice for values that may be token-wise."""
    if name == "labels":
        return "; for one label for each token, pass objective=None" if kind.by_row and len(kind.shape) == 1 else ""
    return "; rows of tokens are padded if they are called input_ids"


def _check_not_empty(ids: MemoryRows, number_of: NumberOf) -> None:
    if not ids.lengths.all():
        row = number_of(int(np.argmin(ids.lengths)))
        raise DataError(
            f"input_ids of row {row} are empty, and a softmax over no token is NaN; drop such rows, or give them one "
            "token",
            row=row,
        )


def _check_lengths(name: str, found: MemoryRows, ids: MemoryRows, number_of: NumberOf) -> None:
    different = np.flatnonzero(found.lengths != ids.lengths)
    if len(different):
        row, at = number_of(int(different[0])), int(different[0])
        raise DataError(
            f"{name} of row {row} has {found.lengths[at]} values and input_ids {ids.lengths[at]}; in row 0 they have "
            "the same number, so they are token-wise"
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
        with suppress(TypeError, ValueError):  # nulls and rows of different lengths are reported later
            return np.asarray(cell, np.uint8)
    return cell


def _leaf(kind: pa.DataType) -> pa.DataType:
    """Type of the numbers of a column, in nested lists too."""
    while is_any_list(kind):
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
    """Column of lists of integers, or an error."""
    kind = column.type
    if not is_any_list(kind) or not (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)):
        raise SchemaError(f"the column {name} is {kind}, expected lists of integers, such as list<int32>")
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
    return ragged.grid(np.arange(len(ragged)), np.zeros(len(ragged), np.int64), kind.shape[0])


def _flat_numbers(chunks: Sequence[pa.Array]) -> npt.NDArray[Any]:
    return np.concatenate([numbers_of(chunk) for chunk in chunks])
