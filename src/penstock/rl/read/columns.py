"""Columns as they were given, Arrow or Python or NumPy, as what a rollout needs: lists of numbers, numbers, objects.

Nothing is judged here but the type of each value. A value of another type is *odd*: its row is kept with nothing in it,
and the caller tells what stands there.
"""

from __future__ import annotations

import os
import reprlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.ragged import Ragged
from penstock.arrays.text import plain
from penstock.chat.formats import reader
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.listing import list_files, split_suffix
from penstock.sources.by_suffix import open_source
from penstock.sources.jsonl import JsonlSource, JsonSource
from penstock.types.columns import as_numpy

__all__ = [
    "JSON_ROLE",
    "Column",
    "Intake",
    "ListColumn",
    "NumberColumn",
    "RolloutProblems",
    "RowNames",
    "as_lists",
    "as_numbers",
    "as_objects",
    "is_listed",
    "joined_lists",
    "narrow",
    "take_in",
]


MOST = 10
"""Problems that are told; the rest are counted."""
ALIKE = 3
"""Rows that are named for one and the same problem."""


@dataclass(slots=True)
class RowNames:
    """Where each row came from: its file and number there, or its number alone; and what it is called."""

    starts: list[int] = field(default_factory=list)
    """The rows at which another stretch of a file begins."""
    files: list[tuple[str, int]] = field(default_factory=list)
    """The file of each stretch, and the number in it of the first row."""
    first_row: int = 0
    ids: Sequence[Any] | None = None

    def of(self, row: int) -> tuple[str | None, int]:
        """The file of a row, if it came from one, and its number."""
        if not self.starts:
            return None, self.first_row + row
        stretch = bisect_right(self.starts, row) - 1
        file, first = self.files[stretch]
        return file, first + row - self.starts[stretch]

    def told(self, row: int) -> str:
        """`rollouts.jsonl, row 5 (id 'a')`"""
        file, number = self.of(row)
        name = self.ids[row] if self.ids is not None else None
        return (f"{file}, " if file is not None else "") + f"row {number}" + (f" (id {name!r})" if name else "")


class RolloutProblems:
    """Collects what is wrong; `refuse` raises one error with all of it."""

    def __init__(self, places: RowNames) -> None:
        self.places = places
        self._told: list[str] = []
        self._more = 0
        self._rows: set[int] = set()
        self._first: int | None = None

    def __bool__(self) -> bool:
        return bool(self._told)

    def add(self, rows: npt.ArrayLike, tell: Callable[[int], str] | str) -> None:
        """The same trouble in some rows; `tell` says it, of each of them or of all.

        A row is told of once: what else is wrong with it may follow from that.
        """
        bad = np.asarray(rows, np.int64).reshape(-1)
        if len(bad) and self._rows:
            bad = bad[~np.isin(bad, list(self._rows))]
        if not len(bad):
            return
        self._rows.update(bad.tolist())
        if self._first is None:
            self._first = int(bad[0])
        for number, row in enumerate(bad[:ALIKE].tolist(), 1):
            more = f" (and {len(bad) - ALIKE} more rows like it)" if number == ALIKE < len(bad) else ""
            text = tell if isinstance(tell, str) else tell(row)
            self._tell(f"{self.places.told(row)}: {text}{more}")

    def add_whole(self, text: str) -> None:
        """Something that is about no single row."""
        self._tell(text)

    def refuse(self) -> None:
        """Raise one `DataError` with every problem, if there are any."""
        if not self._told:
            return
        if len(self._told) + self._more == 1:
            text = self._told[0]
        else:
            rest = [f"... and {self._more} more"] if self._more else []
            text = "\n  ".join([f"{len(self._told) + self._more} problems with the rollouts:", *self._told, *rest])
        error = DataError(text)
        if self._first is not None:
            error.file, error.row = self.places.of(self._first)
        raise error

    def _tell(self, text: str) -> None:
        if len(self._told) < MOST:
            self._told.append(text)
        else:
            self._more += 1


Column: TypeAlias = "pa.ChunkedArray | npt.NDArray[Any] | list[Any]"
"""One entry per row: an Arrow column, an array whose first dimension is the row, or Python objects."""
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Kind = Literal["ids", "floats", "mask"]

KINDS = {"ids": "iu", "floats": "fiu", "mask": "biuf"}
DTYPES: dict[str, Any] = {"ids": np.int64, "floats": np.float32, "mask": np.float32}
EXPECTED = {"ids": "a list of token ids", "floats": "a list of numbers", "mask": "a list of 0 and 1"}


@dataclass(frozen=True, slots=True)
class ListColumn:
    """A list of numbers for each row."""

    ragged: Ragged
    missing: Flags
    """Rows without one."""
    odd: Ints
    """Rows where something else stands, which is empty here."""
    describe: Callable[[int], str]
    """What stands in an odd row."""
    padded: bool = False
    """Whether they came as one array of rows of one length."""

    @property
    def lengths(self) -> Ints:
        return self.ragged.lengths

    def __len__(self) -> int:
        return len(self.missing)

    def with_ragged(self, ragged: Ragged) -> ListColumn:
        return ListColumn(ragged, self.missing, self.odd, self.describe)

    @classmethod
    def of(cls, ragged: Ragged, missing: Flags | None = None) -> ListColumn:
        """Lists with nothing odd about them."""
        none = np.zeros(len(ragged), np.bool_) if missing is None else missing
        return cls(ragged, none, np.empty(0, np.int64), str)


@dataclass(frozen=True, slots=True)
class NumberColumn:
    """A number for each row, NaN where there is none."""

    values: npt.NDArray[np.float64]
    odd: Ints
    describe: Callable[[int], str]


def as_lists(column: Column, kind: Kind) -> ListColumn:
    """Lists of token ids (int64), of numbers (float32; None among them is NaN), or of flags (bool)."""
    if isinstance(column, pa.ChunkedArray):
        found = joined_lists([_from_arrow(chunk, kind) for chunk in column.chunks] or [_from_objects([], kind)])
    elif isinstance(column, np.ndarray) and column.ndim == 2 and column.dtype.kind in KINDS[kind]:
        rows, width = column.shape
        values = np.ascontiguousarray(column).reshape(-1)
        whole = Ragged(_typed(values, kind), np.arange(rows + 1, dtype=np.int64) * width)
        found = ListColumn(whole, np.zeros(rows, np.bool_), np.empty(0, np.int64), str, padded=True)
    else:
        found = _from_objects(list(column), kind)
    return _flags(found) if kind == "mask" else found


def joined_lists(parts: Sequence[ListColumn]) -> ListColumn:
    """Some rows, and those behind them."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(len(part) for part in parts)])
    odd = np.concatenate([part.odd + start for part, start in zip(parts, starts.tolist())])

    def describe(row: int) -> str:
        part = int(np.searchsorted(starts, row, "right")) - 1
        return parts[part].describe(row - int(starts[part]))

    missing = np.concatenate([part.missing for part in parts])
    return ListColumn(Ragged.joined([part.ragged for part in parts]), missing, odd, describe)


def as_numbers(column: Column) -> NumberColumn:
    """One number for each row. True and False are 1 and 0; text, lists and the rest are odd."""
    if isinstance(column, pa.ChunkedArray):
        kind = column.type
        if pa.types.is_null(kind):
            return NumberColumn(np.full(len(column), np.nan), np.empty(0, np.int64), str)
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
            values = column.cast(pa.float64(), safe=False).fill_null(float("nan")).combine_chunks()
            return NumberColumn(_array(values).astype(np.float64), np.empty(0, np.int64), str)
        column = as_objects(column)
    if isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in "biuf":
        return NumberColumn(column.astype(np.float64), np.empty(0, np.int64), str)
    cells = list(column)
    plain_types = (float, int, bool, type(None))
    if all(kind in plain_types or issubclass(kind, np.number | np.bool_) for kind in set(map(type, cells))):
        return NumberColumn(np.array(cells, np.float64).reshape(len(cells)), np.empty(0, np.int64), str)
    numbers = [_number(cell) for cell in cells]
    odd = np.flatnonzero([number is None for number in numbers])
    values = np.array([np.nan if number is None else number for number in numbers], np.float64)
    return NumberColumn(values, odd, lambda row: _described(cells[row]))


def as_objects(column: Column) -> list[Any]:
    """One Python object for each row. Lists of numbers are NumPy arrays, not lists of objects."""
    if isinstance(column, pa.ChunkedArray):
        kind = column.type
        if _is_list(kind) and _is_number(kind.value_type):
            return [cell for chunk in column.chunks for cell in _views(chunk)]
        return [cell for chunk in column.chunks for cell in plain(chunk).to_pylist()]
    if isinstance(column, np.ndarray) and column.ndim == 1:
        return column.tolist()  # type: ignore[no-any-return]
    return list(column)


def is_listed(column: Column) -> bool:
    """Whether the first row that has something has a list of numbers."""
    if isinstance(column, pa.ChunkedArray):
        return _is_list(column.type)
    if isinstance(column, np.ndarray) and column.ndim > 1:
        return True
    first = next((cell for cell in column if cell is not None), None)
    return not isinstance(first, str | bytes | Mapping) and (
        isinstance(first, Sequence) or len(getattr(first, "shape", ())) > 0
    )


def narrow(ragged: Ragged) -> Ragged:
    """Ids as int32 where all of them fit, else as int64."""
    values = ragged.values
    if values.dtype == np.int32 or (len(values) and (values.max() > 2**31 - 1 or values.min() < -(2**31))):
        return ragged
    return Ragged(values.astype(np.int32), ragged.offsets)


# -- Python objects ----------------------------------------------------------------------------------------------------


def _from_objects(cells: list[Any], kind: Kind) -> ListColumn:
    allowed = KINDS[kind]
    arrays: list[npt.NDArray[Any]] = []
    missing = np.zeros(len(cells), np.bool_)
    odd: list[int] = []
    nothing = np.empty(0, DTYPES[kind])
    for row, cell in enumerate(cells):
        if type(cell) is np.ndarray and cell.ndim == 1:
            array: npt.NDArray[Any] | None = cell
        elif cell is None:
            missing[row] = True
            array = nothing
        else:
            array = _as_array(cell, kind)
        if array is None or (array.dtype.kind not in allowed and array.size):
            array = _of_objects(array, kind)
            if array is None:
                odd.append(row)
                array = nothing
        arrays.append(array if array.size else nothing)
    offsets = np.zeros(len(cells) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, arrays), np.int64, len(arrays)), out=offsets[1:])
    values = _typed(np.concatenate(_alike(arrays, kind)), kind) if arrays else nothing
    return ListColumn(Ragged(values, offsets), missing, np.array(odd, np.int64), lambda row: _described(cells[row]))


def _as_array(cell: Any, kind: Kind) -> npt.NDArray[Any] | None:
    """A cell as an array of one dimension; None if it is something else."""
    if isinstance(cell, str | bytes | Mapping) or not (hasattr(cell, "__len__") or hasattr(cell, "__array__")):
        return None
    try:
        array = host(cell) if hasattr(cell, "__array__") or hasattr(cell, "__dlpack__") else np.asarray(cell)
    except (ValueError, TypeError, OverflowError, SchemaError):
        return None
    return array if array.ndim == 1 else None


def _of_objects(array: npt.NDArray[Any] | None, kind: Kind) -> npt.NDArray[Any] | None:
    """Numbers with None among them, which is NaN; floats of a width that only their library knows."""
    if array is None or kind != "floats" or array.dtype.kind not in "OV":
        return None
    if array.dtype.kind == "O" and any(isinstance(value, str | bytes | bool) for value in array):
        return None
    try:
        return array.astype(np.float32)
    except (TypeError, ValueError):
        return None


def host(value: Any) -> npt.NDArray[Any]:
    """A tensor of any framework as a NumPy array, wherever it is and whether or not it has gradients."""
    for step in ("detach", "cpu"):
        if hasattr(value, step):
            value = getattr(value, step)()
    if str(getattr(value, "dtype", "")) == "torch.bfloat16":  # which NumPy does not know
        value = value.float()
    return as_numpy(value)


def _alike(arrays: list[npt.NDArray[Any]], kind: Kind) -> list[npt.NDArray[Any]]:
    """NumPy would join int64 and uint64 to floats, which cannot hold every id."""
    if kind != "ids" or not any(array.dtype == np.uint64 for array in arrays):
        return arrays
    return [_typed(array, kind) for array in arrays]


def _typed(values: npt.NDArray[Any], kind: Kind) -> npt.NDArray[Any]:
    if kind == "ids":
        # What is beyond 2**63 comes out negative, and negative ids are refused.
        return values if values.dtype == np.int32 else values.astype(np.int64, copy=False)
    if kind == "mask":
        return values
    return values.astype(np.float32, copy=False)


def _flags(lists: ListColumn) -> ListColumn:
    """As bool; rows with anything but 0 and 1 are odd."""
    ragged = lists.ragged
    if ragged.values.dtype == np.bool_:
        return lists
    flags = ragged.values != 0
    wrong = flags & (ragged.values != 1)
    if not wrong.any():
        return ListColumn(Ragged(flags, ragged.offsets), lists.missing, lists.odd, lists.describe, lists.padded)
    where = np.flatnonzero(wrong)
    rows, firsts = np.unique(np.searchsorted(ragged.offsets, where, "right") - 1, return_index=True)
    shown = dict(zip(rows.tolist(), ragged.values[where[firsts]].tolist()))

    def describe(row: int) -> str:
        return f"a list with {shown[row]} in it" if row in shown else lists.describe(row)

    odd = np.union1d(lists.odd, rows)
    return ListColumn(Ragged(flags, ragged.offsets), lists.missing, odd, describe, lists.padded)


def _number(cell: Any) -> float | None:
    """A number, NaN for None; None for what is no number."""
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
        odd = np.flatnonzero(~missing)
        return ListColumn(nothing, missing, odd, lambda row: _described(chunk[row].as_py()))
    values = chunk.flatten()
    offsets = np.zeros(len(chunk) + 1, np.int64)
    np.cumsum(_array(pc.list_value_length(chunk).cast(pa.int64()).fill_null(0)), out=offsets[1:])
    if not len(values):
        return ListColumn(Ragged(nothing.values, offsets), missing, np.empty(0, np.int64), str)
    if not _is_number(values.type) or np.dtype(values.type.to_pandas_dtype()).kind not in KINDS[kind]:
        odd = np.flatnonzero(np.diff(offsets))
        return ListColumn(nothing, missing, odd, lambda row: f"{chunk.type}: {reprlib.repr(chunk[row].as_py())}")
    odd = np.empty(0, np.int64)
    if values.null_count and kind == "floats":
        values = values.cast(pa.float32(), safe=False).fill_null(float("nan"))
    elif values.null_count:
        nulls = np.flatnonzero(_array(values.is_null()))
        odd = np.unique(np.searchsorted(offsets, nulls, "right") - 1)
        values = values.fill_null(0)
    described = Ragged(_typed(_array(values), kind), offsets)
    return ListColumn(
        described, missing, odd, lambda row: f"a list with null in it: {reprlib.repr(chunk[row].as_py())}"
    )


def _views(chunk: pa.Array) -> Iterable[npt.NDArray[Any] | None]:
    chunk = plain(chunk)
    if chunk.flatten().null_count:
        return chunk.to_pylist()  # type: ignore[no-any-return]
    values, missing = _array(chunk.flatten()), _array(chunk.is_null()).tolist()
    ends = np.cumsum(_array(pc.list_value_length(chunk).cast(pa.int64()).fill_null(0))).tolist()
    starts = [0, *ends[:-1]]
    return [None if gone else values[a:b] for gone, a, b in zip(missing, starts, ends)]


def _array(values: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or pa.types.is_list_view(kind)
        or pa.types.is_large_list_view(kind)
        or isinstance(kind, pa.FixedShapeTensorType)
    )


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


JSON_ROLE = b"rollout-json"
"""The role of columns that hold JSON text, in Arrow data of our own making."""
BATCH_ROWS = 1 << 16
OF_THE_BATCH = ("num_items_in_batch",)
"""What TRL has in a dict of columns and is none: it follows from the others."""
SEVERAL = "a list of Rollout, dicts or dataclasses, paths, an Arrow table, a dict of columns, or a RolloutTable"


@dataclass(frozen=True, slots=True)
class Intake:
    """Columns under the names they were given, and where each row came from."""

    columns: dict[str, Column]
    rows: int
    places: RowNames
    arrow: bool
    """Whether rows that lack a key of a struct have it all the same, as null."""


def take_in(data: Any, first_row: int = 0) -> Intake:
    """The columns of data in any of the forms that `read_rollouts` takes."""
    if isinstance(data, str | os.PathLike):
        return _from_files(data)
    if isinstance(data, pa.RecordBatch):
        return _from_table(pa.Table.from_batches([data]), RowNames(first_row=first_row))
    if isinstance(data, pa.Table):
        return _from_table(data, RowNames(first_row=first_row))
    if hasattr(data, "batch") and hasattr(data, "non_tensor_batch"):  # verl's DataProto
        tensors = data.batch if data.batch is not None else {}
        return _from_columns({**dict(tensors.items()), **dict(data.non_tensor_batch)}, RowNames(first_row=first_row))
    if isinstance(data, Mapping):
        return _from_columns(data, RowNames(first_row=first_row))
    if hasattr(data, "__arrow_c_stream__"):
        return _from_table(pa.table(data), RowNames(first_row=first_row))
    if is_dataclass(data) or not isinstance(data, Iterable):
        raise ConfigError(f"expected {SEVERAL}, got {type(data).__name__}; put a single rollout into a list")
    items = list(data)
    first = items[0] if items else None
    if isinstance(first, str | os.PathLike):
        return _from_files(items)
    if isinstance(first, pa.RecordBatch | pa.Table):
        tables = [pa.Table.from_batches([item]) if isinstance(item, pa.RecordBatch) else item for item in items]
        return _from_table(pa.concat_tables(tables, promote_options="default"), RowNames(first_row=first_row))
    return _from_rows(items, RowNames(first_row=first_row))


# -- files and Arrow ---------------------------------------------------------------------------------------------------


def _from_files(paths: Any) -> Intake:
    files = list_files(paths)
    json = {*JsonlSource.suffixes, *JsonSource.suffixes}
    # Free metadata is of any type in any row. Fields whose types do not go together come as JSON text, marked as such.
    options = {"mixed": "json"} if all(split_suffix(file)[0] in json for file in files) else {}
    source: Any = open_source(files, **options)
    places = RowNames()
    batches: list[pa.RecordBatch] = []
    rows = 0
    try:
        while (batch := source.next_batch(BATCH_ROWS)) is not None:
            if not batch.num_rows:
                continue
            origin = source.origin()
            places.starts.append(rows)
            places.files.append((origin.file, origin.row) if origin is not None else (str(paths), rows))
            batches.append(batch)
            rows += batch.num_rows
    finally:
        if hasattr(source, "close"):
            source.close()
    return _from_table(pa.Table.from_batches(batches, batches[0].schema if batches else pa.schema([])), places)


def _from_table(table: pa.Table, places: RowNames) -> Intake:
    names = table.column_names
    if len(set(names)) < len(names):
        raise SchemaError(f"two columns have the same name; the columns are {names}")
    columns: dict[str, Column] = {}
    for field in table.schema:
        column = table.column(field.name)
        read = reader(field)
        if (field.metadata or {}).get(b"penstock.role") == JSON_ROLE:
            from penstock.rl.rollout import from_json

            columns[field.name] = from_json(column)
        else:
            columns[field.name] = column if read is None else [read(cell) for cell in as_objects(column)]
    return Intake(columns, table.num_rows, places, arrow=True)


# -- Python objects ----------------------------------------------------------------------------------------------------


def _from_columns(data: Mapping[Any, Any], places: RowNames) -> Intake:
    """A dict of columns: tensors, arrays and lists, all of as many rows."""
    columns: dict[str, Column] = {}
    for name, values in data.items():
        if values is None or name in OF_THE_BATCH:
            continue
        if (
            isinstance(values, str | bytes | Mapping)
            or getattr(values, "ndim", 1) == 0
            or not hasattr(values, "__len__")
        ):
            raise ConfigError(
                f"{name!r} of a dict is {values!r:.60}, and a dict holds columns: a list or an array with an entry per "
                "rollout; put a single rollout into a list"
            )
        if isinstance(values, pa.Array):
            columns[str(name)] = pa.chunked_array([values])
        elif isinstance(values, pa.ChunkedArray):
            columns[str(name)] = values
        elif hasattr(values, "__array__") or hasattr(values, "__dlpack__"):
            array = host(values)
            columns[str(name)] = list(array) if array.dtype.kind in "OUS" else array
        else:
            columns[str(name)] = list(values)
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise SchemaError(
            f"the columns of a dict have as many entries as there are rollouts, got {lengths}; put a single rollout "
            "into a list"
        )
    first = next(iter(columns.values()), None)
    if lengths and not any(_holds_rows(column) for column in columns.values()):
        raise ConfigError(
            f"a dict is columns, each with an entry per rollout, and none of {list(lengths)} holds lists or texts "
            f"({next(iter(lengths))!r} has {list(first or ())[:3]!r}...); put a single rollout into a list"
        )
    return Intake(columns, next(iter(lengths.values()), 0), places, arrow=False)


def _holds_rows(column: Column) -> bool:
    if isinstance(column, np.ndarray):
        return column.ndim > 1
    if isinstance(column, pa.ChunkedArray):
        return True
    return any(hasattr(cell, "__len__") for cell in column)


def _from_rows(items: Sequence[Any], places: RowNames) -> Intake:
    """Dicts, dataclasses and named tuples, of one kind or of several."""
    names: dict[str, None] = {}
    of_type: dict[type, tuple[str, ...]] = {}
    rows: list[Mapping[str, Any]] = []
    for number, item in enumerate(items):
        if isinstance(item, dict):
            row: Mapping[str, Any] = item
        elif is_dataclass(item) and not isinstance(item, type):
            kind = type(item)
            if kind not in of_type:
                of_type[kind] = tuple(field.name for field in fields(item))
            row = {name: value for name in of_type[kind] if (value := getattr(item, name, None)) is not None}
        elif isinstance(item, Mapping):
            row = item
        elif hasattr(item, "_asdict"):
            row = item._asdict()
        else:
            file, at = places.of(number)
            raise DataError(
                f"row {at} is {type(item).__name__} {item!r:.60}, expected a Rollout, a dict or a dataclass",
                file=file,
                row=at,
            )
        if names.keys() != row.keys():
            names.update(dict.fromkeys(row))
        rows.append(row)
    for name in names:
        if not isinstance(name, str):
            raise SchemaError(f"the keys of a rollout are names, got {name!r}")
    columns: dict[str, Column] = {}
    for name in names:
        cells = [row.get(name) for row in rows]
        if any(cell is not None for cell in cells):
            columns[name] = cells
    return Intake(columns, len(rows), places, arrow=False)
