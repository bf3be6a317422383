"""Columns of rollouts as they were given (Arrow, NumPy or Python), and their values as lists, numbers and objects.

Only types are checked here. A value of another type is *odd*: its row is kept empty, and the caller reports the value.
Problems are collected with their rows, and raised as one error.
"""

from __future__ import annotations

import os
import reprlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.ragged import Ragged, is_any_list, is_number, offsets_of
from penstock.arrays.text import plain
from penstock.chat.formats import reader
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.listing import list_files, split_suffix
from penstock.rl.read.engines import engine_rollouts, has_engine_columns, with_chosen_logprobs
from penstock.rl.rollout import JSON_ROLE, from_json
from penstock.sources.by_suffix import open_source
from penstock.sources.inputs import as_input
from penstock.sources.jsonl import JsonlSource, JsonSource
from penstock.sources.tables import kind_of, readable
from penstock.types.columns import as_numpy

Column: TypeAlias = "pa.ChunkedArray | npt.NDArray[Any] | list[Any]"
"""One entry per row: an Arrow column, an array whose first dimension is the row, or Python objects."""
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Kind: TypeAlias = Literal["ids", "floats", "mask"]

KINDS = {"ids": "iu", "floats": "fiu", "mask": "biuf"}
DTYPES: dict[str, Any] = {"ids": np.int64, "floats": np.float32, "mask": np.float32}
EXPECTED = {"ids": "a list of token ids", "floats": "a list of numbers", "mask": "a list of 0 and 1"}
BATCH_ROWS = 1 << 16
_PART = 1 << 15
"""Ids that are looked at and copied at a time."""
BATCH_FACTS = ("num_items_in_batch",)
"""Entries of TRL's dict of columns that are no columns."""

MAX_PROBLEMS = 10
"""Problems in a message; further ones are counted."""
MAX_ROWS = 3
"""Rows that a message names for one problem."""


# -- problems ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RowNames:
    """File, number and id of each row, for messages."""

    starts: list[int] = field(default_factory=list)
    """First row of each run of rows from one file."""
    files: list[tuple[str, int]] = field(default_factory=list)
    """File of each run, and the number of its first row there."""
    first_row: int = 0
    ids: Sequence[Any] | None = None

    def of(self, row: int) -> tuple[str | None, int]:
        """File of a row, if it came from one, and its number."""
        if not self.starts:
            return None, self.first_row + row
        run = bisect_right(self.starts, row) - 1
        file, first = self.files[run]
        return file, first + row - self.starts[run]

    def describe(self, row: int, *, with_id: bool = True) -> str:
        """`rollouts.jsonl, row 5 (id 'a')`"""
        file, number = self.of(row)
        name = self.ids[row] if with_id and self.ids is not None else None
        return (f"{file}, " if file is not None else "") + f"row {number}" + (f" (id {name!r})" if name else "")


class RolloutProblems:
    """Problems of a data set; `refuse` raises one error with all of them."""

    def __init__(self, rows: RowNames) -> None:
        self.rows = rows
        self._texts: list[str] = []
        self._count = 0
        self._reported: set[int] = set()
        self._first: int | None = None

    def __bool__(self) -> bool:
        return bool(self._texts)

    def add(self, rows: npt.ArrayLike, problem: Callable[[int], str] | str) -> None:
        """Report a problem of rows, as one text or one for each row.

        A row is reported once: its other problems may be consequences.
        """
        bad = np.asarray(rows, np.int64).reshape(-1)
        if len(bad) and self._reported:
            bad = bad[~np.isin(bad, list(self._reported))]
        if not len(bad):
            return
        self._reported.update(bad.tolist())
        if self._first is None:
            self._first = int(bad[0])
        for number, row in enumerate(bad[:MAX_ROWS].tolist(), 1):
            more = f" (and {len(bad) - MAX_ROWS} more rows like it)" if number == MAX_ROWS < len(bad) else ""
            text = problem if isinstance(problem, str) else problem(row)
            self.add_whole(f"{self.rows.describe(row)}: {text}{more}")

    def add_tokens(self, lists: Ragged, bad: Flags, problem: Callable[[Any, int], str]) -> None:
        """Report rows with a bad token; `problem` gets the value and the index of the first one."""
        rows, at = first_of_rows(lists, bad)
        first = dict(zip(rows.tolist(), at.tolist()))
        self.add(rows, lambda row: problem(lists.values[first[row]], first[row] - int(lists.offsets[row])))

    def add_whole(self, text: str) -> None:
        """Report a problem of no particular row."""
        self._count += 1
        if len(self._texts) < MAX_PROBLEMS:
            self._texts.append(text)

    def refuse(self) -> None:
        """Raise one `DataError` with every problem, if there are any."""
        if not self._texts:
            return
        text = self._texts[0]
        if self._count > 1:
            more = self._count - len(self._texts)
            rest = [f"... and {more} more"] if more else []
            text = "\n  ".join([f"{self._count} problems with the rollouts:", *self._texts, *rest])
        error = DataError(text)
        if self._first is not None:
            error.file, error.row = self.rows.of(self._first)
        raise error


def first_of_rows(lists: Ragged, flags: Flags) -> tuple[Ints, Ints]:
    """Rows with a True, and the index of the first one in the values."""
    where = np.flatnonzero(flags)
    rows, first = np.unique(np.searchsorted(lists.offsets, where, "right") - 1, return_index=True)
    return rows, where[first]


# -- values ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListColumn:
    """List of numbers for each row."""

    ragged: Ragged
    missing: Flags
    """Rows without a list."""
    odd: Ints
    """Rows with another value, which are empty here."""
    describe: Callable[[int], str]
    """Description of the value of an odd row."""
    padded: bool = False
    """True if the column was one two-dimensional array."""

    @property
    def lengths(self) -> Ints:
        return self.ragged.lengths

    def __len__(self) -> int:
        return len(self.missing)

    def with_ragged(self, ragged: Ragged) -> ListColumn:
        return ListColumn(ragged, self.missing, self.odd, self.describe)

    @classmethod
    def of(cls, ragged: Ragged, missing: Flags | None = None) -> ListColumn:
        """Lists without odd values."""
        none = np.zeros(len(ragged), np.bool_) if missing is None else missing
        return cls(ragged, none, np.empty(0, np.int64), str)


@dataclass(frozen=True, slots=True)
class NumberColumn:
    """Number for each row, NaN if there is none."""

    values: npt.NDArray[np.float64]
    odd: Ints
    describe: Callable[[int], str]


def as_lists(column: Column, kind: Kind) -> ListColumn:
    """Lists of token ids (int64), of numbers (float32; None among them is NaN), or of flags (bool)."""
    if isinstance(column, pa.ChunkedArray):
        found = _joined([_from_arrow(chunk, kind) for chunk in column.chunks] or [_from_objects([], kind)])
    elif isinstance(column, np.ndarray) and column.ndim == 2 and column.dtype.kind in KINDS[kind]:
        rows, width = column.shape
        values = _typed(np.ascontiguousarray(column).reshape(-1), kind)
        whole = Ragged(values, np.arange(rows + 1, dtype=np.int64) * width)
        found = ListColumn(whole, np.zeros(rows, np.bool_), np.empty(0, np.int64), str, padded=True)
    else:
        found = _from_objects(list(column), kind)
    return _flags(found) if kind == "mask" else found


def as_numbers(column: Column) -> NumberColumn:
    """Numbers, one a row. True and False are 1 and 0; text, lists and the rest are odd."""
    none = np.empty(0, np.int64)
    if isinstance(column, pa.ChunkedArray):
        if pa.types.is_null(column.type):
            return NumberColumn(np.full(len(column), np.nan), none, str)
        if is_number(column.type):
            values = column.cast(pa.float64(), safe=False).fill_null(float("nan")).combine_chunks()
            return NumberColumn(_array(values).astype(np.float64), none, str)
        column = as_objects(column)
    if isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in "biuf":
        return NumberColumn(column.astype(np.float64), none, str)
    cells = list(column)
    numeric = (float, int, bool, type(None))
    if all(kind in numeric or issubclass(kind, np.number | np.bool_) for kind in set(map(type, cells))):
        return NumberColumn(np.array(cells, np.float64).reshape(len(cells)), none, str)
    numbers = [_number(cell) for cell in cells]
    odd = np.flatnonzero([number is None for number in numbers])
    values = np.array([np.nan if number is None else number for number in numbers], np.float64)
    return NumberColumn(values, odd, lambda row: _described(cells[row]))


def as_objects(column: Column) -> list[Any]:
    """Python objects, one a row. Lists of numbers are NumPy arrays."""
    if isinstance(column, pa.ChunkedArray):
        if _is_list(column.type) and is_number(column.type.value_type):
            return [cell for chunk in column.chunks for cell in _views(chunk)]
        return [cell for chunk in column.chunks for cell in plain(chunk).to_pylist()]
    if isinstance(column, np.ndarray) and column.ndim == 1:
        return column.tolist()  # type: ignore[no-any-return]
    return list(column)


def has_lists(column: Column) -> bool:
    """True if the first value that is not null is a list of numbers."""
    if isinstance(column, pa.ChunkedArray):
        return _is_list(column.type)
    if isinstance(column, np.ndarray) and column.ndim > 1:
        return True
    first = next((cell for cell in column if cell is not None), None)
    return not isinstance(first, str | bytes | Mapping) and (
        isinstance(first, Sequence) or len(getattr(first, "shape", ())) > 0
    )


def _joined(parts: Sequence[ListColumn]) -> ListColumn:
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(len(part) for part in parts)])
    odd = np.concatenate([part.odd + start for part, start in zip(parts, starts.tolist())])

    def describe(row: int) -> str:
        part = int(np.searchsorted(starts, row, "right")) - 1
        return parts[part].describe(row - int(starts[part]))

    missing = np.concatenate([part.missing for part in parts])
    return ListColumn(Ragged.joined([part.ragged for part in parts]), missing, odd, describe)


def _from_objects(cells: list[Any], kind: Kind) -> ListColumn:
    arrays: list[npt.NDArray[Any]] = []
    odd: list[int] = []
    nothing = np.empty(0, DTYPES[kind])
    for row, cell in enumerate(cells):
        array = nothing if cell is None else _as_array(cell)
        if array is None or (array.dtype.kind not in KINDS[kind] and array.size):
            array = _as_floats(array) if kind == "floats" else None
            if array is None:
                odd.append(row)
                array = nothing
        arrays.append(array if array.size else nothing)
    if kind == "ids" and any(array.dtype == np.uint64 for array in arrays):
        arrays = [_typed(array, kind) for array in arrays]  # NumPy would join int64 and uint64 to floats
    offsets = offsets_of([*map(len, arrays)])
    values = _as_int32(arrays, offsets) if kind == "ids" else None
    if values is None:
        values = _typed(np.concatenate(arrays), kind) if arrays else nothing
    missing = np.array([cell is None for cell in cells], np.bool_)
    ragged = Ragged(values, offsets)
    return ListColumn(ragged, missing, np.array(odd, np.int64), lambda row: _described(cells[row]))


def _as_int32(arrays: list[npt.NDArray[Any]], offsets: Ints) -> npt.NDArray[np.int32] | None:
    """Arrays of int64 end to end as int32; None for others, and for numbers below 0 or from 2**31 on.

    A part at a time, which stays in cache between the look at it and the copy.
    """
    if any(array.dtype != np.int64 for array in arrays):
        return None
    values = np.empty(int(offsets[-1]), np.int32)
    row = 0
    while row < len(arrays):
        end = max(row + 1, int(np.searchsorted(offsets, offsets[row] + _PART, "right")) - 1)
        part = arrays[row] if end == row + 1 else np.concatenate(arrays[row:end])
        if int(np.bitwise_or.reduce(part)) >> 31:
            return None
        values[offsets[row] : offsets[end]] = part
        row = end
    return values


def _as_array(cell: Any) -> npt.NDArray[Any] | None:
    """Cell as an array of one dimension; None for anything else."""
    if type(cell) is np.ndarray and cell.ndim == 1:
        return cell
    if isinstance(cell, str | bytes | Mapping) or not (hasattr(cell, "__len__") or hasattr(cell, "__array__")):
        return None
    try:
        array = _host(cell) if hasattr(cell, "__array__") or hasattr(cell, "__dlpack__") else np.asarray(cell)
    except (ValueError, TypeError, OverflowError, SchemaError):
        return None
    return array if array.ndim == 1 else None


def _as_floats(array: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    """Numbers with None among them, which is NaN, or floats of a type that NumPy does not have."""
    if array is None or array.dtype.kind not in "OV":
        return None
    if array.dtype.kind == "O" and any(isinstance(value, str | bytes | bool) for value in array):
        return None
    try:
        return array.astype(np.float32)
    except (TypeError, ValueError):
        return None


def _host(value: Any) -> npt.NDArray[Any]:
    """Tensor of any framework and device as a NumPy array, without gradients."""
    for step in ("detach", "cpu"):
        if hasattr(value, step):
            value = getattr(value, step)()
    if str(getattr(value, "dtype", "")) == "torch.bfloat16":  # NumPy has no bfloat16
        value = value.float()
    return as_numpy(value)


def _typed(values: npt.NDArray[Any], kind: Kind) -> npt.NDArray[Any]:
    if kind == "mask" or (kind == "ids" and values.dtype == np.int32):
        return values
    # Ids from 2**63 on become negative, and negative ids are refused.
    return values.astype(DTYPES[kind], copy=False)


def _flags(lists: ListColumn) -> ListColumn:
    """Lists as bool; rows with anything but 0 and 1 are odd."""
    ragged = lists.ragged
    if ragged.values.dtype == np.bool_:
        return lists
    flags = ragged.values != 0
    rows, at = first_of_rows(ragged, flags & (ragged.values != 1))
    shown = dict(zip(rows.tolist(), ragged.values[at].tolist()))

    def describe(row: int) -> str:
        return f"a list with {shown[row]} in it" if row in shown else lists.describe(row)

    odd = np.union1d(lists.odd, rows).astype(np.int64)
    return ListColumn(Ragged(flags, ragged.offsets), lists.missing, odd, describe, lists.padded)


def _number(cell: Any) -> float | None:
    """Number, NaN for None; None for anything else."""
    if cell is None:
        return float("nan")
    if isinstance(cell, int | float | np.number | np.bool_):
        return float(cell)
    if isinstance(cell, str | bytes) or getattr(cell, "shape", None) != ():
        return None
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


def _described(cell: Any) -> str:
    shape = getattr(cell, "shape", None)
    if shape is not None and len(shape):
        return f"an array of {getattr(cell, 'dtype', '?')} of shape {tuple(shape)}"
    if isinstance(cell, list | tuple):
        kinds = "/".join(dict.fromkeys("None" if item is None else type(item).__name__ for item in cell))
        return f"a list of {len(cell)} {kinds or 'things'}"
    return reprlib.repr(cell)


# -- Arrow -------------------------------------------------------------------------------------------------------------


def _from_arrow(chunk: pa.Array, kind: Kind) -> ListColumn:
    chunk = plain(chunk)
    if isinstance(chunk, pa.ExtensionArray):
        chunk = chunk.storage
    missing = _array(chunk.is_null())
    nothing = Ragged(np.empty(0, DTYPES[kind]), np.zeros(len(chunk) + 1, np.int64))
    if not _is_list(chunk.type):
        return ListColumn(nothing, missing, np.flatnonzero(~missing), lambda row: _described(chunk[row].as_py()))
    values, offsets = chunk.flatten(), _list_offsets(chunk)
    odd = np.empty(0, np.int64)
    if not len(values):
        return ListColumn(Ragged(nothing.values, offsets), missing, odd, str)
    if not is_number(values.type) or np.dtype(values.type.to_pandas_dtype()).kind not in KINDS[kind]:
        odd = np.flatnonzero(np.diff(offsets))
        return ListColumn(nothing, missing, odd, lambda row: f"{chunk.type}: {reprlib.repr(chunk[row].as_py())}")
    if values.null_count and kind == "floats":
        values = values.cast(pa.float32(), safe=False).fill_null(float("nan"))
    elif values.null_count:
        nulls = np.flatnonzero(_array(values.is_null()))
        odd = np.unique(np.searchsorted(offsets, nulls, "right") - 1)
        values = values.fill_null(0)
    ragged = Ragged(_typed(_array(values), kind), offsets)
    return ListColumn(ragged, missing, odd, lambda row: f"a list with null in it: {reprlib.repr(chunk[row].as_py())}")


def _views(chunk: pa.Array) -> Iterable[npt.NDArray[Any] | None]:
    chunk = plain(chunk)
    if chunk.flatten().null_count:
        return chunk.to_pylist()  # type: ignore[no-any-return]
    rows, missing = Ragged(_array(chunk.flatten()), _list_offsets(chunk)), _array(chunk.is_null()).tolist()
    return [None if gone else rows[row] for row, gone in enumerate(missing)]


def _list_offsets(chunk: pa.Array) -> Ints:
    return offsets_of(_array(pc.list_value_length(chunk).cast(pa.int64()).fill_null(0)))


def _array(values: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _is_list(kind: pa.DataType) -> bool:
    views = pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    return is_any_list(kind) or bool(views) or isinstance(kind, pa.FixedShapeTensorType)


# -- data in any form --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GivenColumns:
    """Columns under the names they were given, and the origin of each row."""

    columns: dict[str, Column]
    num_rows: int
    rows: RowNames
    arrow: bool
    """True for Arrow data, whose structs have all keys in every row, as null where they were missing."""


def read_columns(data: Any, first_row: int = 0, *, engines: bool = True) -> GivenColumns:
    """Columns of data in any form that `read_rollouts` takes; outputs of engines as they are without `engines`."""
    rows = RowNames(first_row=first_row)
    data = list(data) if isinstance(data, Iterator) and not hasattr(data, "__arrow_c_stream__") else data
    if engines and (outputs := engine_rollouts(data)) is not None:
        return _from_rows(outputs, rows)
    given = _read_columns(data, rows)
    if not engines or not given.arrow or not has_engine_columns(given.columns):
        return given
    cells = zip(*(as_objects(column) for column in given.columns.values()))
    outputs = engine_rollouts(
        [{name: cell for name, cell in zip(given.columns, row) if cell is not None} for row in cells]
    )
    return given if outputs is None else _from_rows(outputs, given.rows)


def _read_columns(data: Any, rows: RowNames) -> GivenColumns:
    if isinstance(data, str | os.PathLike):
        return _from_files(data)
    if kind_of(data) is not None or hasattr(data, "next_batch"):
        return _from_source(as_input(data), rows)
    if isinstance(data, pa.RecordBatch | pa.Table):
        return _from_table(pa.Table.from_batches([data]) if isinstance(data, pa.RecordBatch) else data, rows)
    if hasattr(data, "batch") and hasattr(data, "non_tensor_batch"):  # verl's DataProto
        tensors = data.batch if data.batch is not None else {}
        return _from_columns({**dict(tensors.items()), **dict(data.non_tensor_batch)}, rows)
    if isinstance(data, Mapping):
        return _from_columns(data, rows)
    if hasattr(data, "__arrow_c_stream__"):
        return _from_table(readable(pa.table(data)).slice(), rows)
    if is_dataclass(data) or not isinstance(data, Iterable):
        raise ConfigError(
            "expected a list of Rollout, dicts or dataclasses, paths, an Arrow table, a dict of columns, or a "
            f"RolloutTable, got {type(data).__name__}; put a single rollout into a list"
        )
    items = list(data)
    first = items[0] if items else None
    if isinstance(first, str | os.PathLike):
        return _from_files(items)
    if isinstance(first, pa.RecordBatch | pa.Table):
        tables = [pa.Table.from_batches([item]) if isinstance(item, pa.RecordBatch) else item for item in items]
        return _from_table(pa.concat_tables(tables, promote_options="default"), rows)
    return _from_rows(items, rows)


def _from_files(paths: Any) -> GivenColumns:
    files = list_files(paths)
    json = {*JsonlSource.suffixes, *JsonSource.suffixes}
    # Metadata may have any type in any row: fields of mixed types are read as JSON text, and marked as such.
    options = {"mixed": "json"} if all(split_suffix(file)[0] in json for file in files) else {}
    source: Any = open_source(files, **options)
    names = RowNames()
    batches: list[pa.RecordBatch] = []
    rows = 0
    try:
        while (batch := source.next_batch(BATCH_ROWS)) is not None:
            if not batch.num_rows:
                continue
            origin = source.origin()
            names.starts.append(rows)
            names.files.append((origin.file, origin.row) if origin is not None else (str(paths), rows))
            batches.append(batch)
            rows += batch.num_rows
    finally:
        if hasattr(source, "close"):
            source.close()
    return _from_table(pa.Table.from_batches(batches, batches[0].schema if batches else pa.schema([])), names)


def _from_source(source: Any, rows: RowNames) -> GivenColumns:
    batches = []
    while (batch := source.next_batch(BATCH_ROWS)) is not None:
        batches.append(batch)
    return _from_table(pa.Table.from_batches(batches, batches[0].schema if batches else pa.schema([])), rows)


def _from_table(table: pa.Table, rows: RowNames) -> GivenColumns:
    names = table.column_names
    if len(set(names)) < len(names):
        raise SchemaError(f"column names must be unique, got {names}")
    columns: dict[str, Column] = {}
    for each in table.schema:
        column, read = table.column(each.name), reader(each)
        if (each.metadata or {}).get(b"penstock.role") == JSON_ROLE.encode():
            columns[each.name] = from_json(column)
        else:
            columns[each.name] = column if read is None else [read(cell) for cell in as_objects(column)]
    return GivenColumns(columns, table.num_rows, rows, arrow=True)


def _from_columns(data: Mapping[Any, Any], rows: RowNames) -> GivenColumns:
    """Dict of columns: tensors, arrays and lists with the same number of rows."""
    columns: dict[str, Column] = {}
    for name, values in data.items():
        if values is None or name in BATCH_FACTS:
            continue
        single = isinstance(values, str | bytes | Mapping) or getattr(values, "ndim", 1) == 0
        if single or not hasattr(values, "__len__"):
            raise ConfigError(
                f"{name!r} of a dict is {values!r:.60}, expected a column: a list or an array with an entry per "
                "rollout; put a single rollout into a list"
            )
        column: Column
        if isinstance(values, pa.Array | pa.ChunkedArray):
            column = pa.chunked_array([values]) if isinstance(values, pa.Array) else values
        elif getattr(values, "is_nested", False):  # torch's nested tensors, which verl has for rows without padding
            column = [_host(part) for part in values.unbind()]
        elif hasattr(values, "__array__") or hasattr(values, "__dlpack__"):
            array = _host(values)
            column = list(array) if array.dtype.kind in "OUS" else array
        else:
            column = list(values)
        columns[str(name)] = column
    columns = with_chosen_logprobs(columns)
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise SchemaError(
            f"columns must have the same number of rollouts, got {lengths}; put a single rollout into a list"
        )
    if lengths and not any(_holds_rows(column) for column in columns.values()):
        name, column = next(iter(columns.items()))
        raise ConfigError(
            f"a dict holds columns, with an entry per rollout, and none of {list(lengths)} has lists or texts "
            f"({name!r} has {list(column)[:3]!r}...); put a single rollout into a list"
        )
    return GivenColumns(columns, next(iter(lengths.values()), 0), rows, arrow=False)


def _holds_rows(column: Column) -> bool:
    if isinstance(column, np.ndarray):
        return column.ndim > 1
    return isinstance(column, pa.ChunkedArray) or any(hasattr(cell, "__len__") for cell in column)


def _from_rows(items: Sequence[Any], rows: RowNames) -> GivenColumns:
    """Dicts, dataclasses and named tuples, of one kind or of several."""
    names: dict[str, None] = {}
    found: list[Mapping[str, Any]] = []
    for number, item in enumerate(items):
        if isinstance(item, Mapping):
            row: Mapping[str, Any] = item
        elif is_dataclass(item) and not isinstance(item, type):
            row = {name: value for name in _field_names(type(item)) if (value := getattr(item, name, None)) is not None}
        elif hasattr(item, "_asdict"):
            row = item._asdict()
        elif hasattr(item, "model_dump"):  # pydantic
            row = item.model_dump()
        else:
            file, at = rows.of(number)
            raise DataError(
                f"row {at} is {type(item).__name__} {item!r:.60}, expected a Rollout, a dict or a dataclass",
                file=file,
                row=at,
            )
        if names.keys() != row.keys():
            names.update(dict.fromkeys(row))
        found.append(row)
    columns: dict[str, Column] = {}
    for name in names:
        if not isinstance(name, str):
            raise SchemaError(f"keys of a rollout must be text, got {name!r}")
        cells = [row.get(name) for row in found]
        if any(cell is not None for cell in cells):
            columns[name] = cells
    return GivenColumns(with_chosen_logprobs(columns), len(found), rows, arrow=False)


@lru_cache(maxsize=64)
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))
