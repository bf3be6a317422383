"""Columns in and out: a column's contents checked, as NumPy arrays, and built from arrays or Python values.

Everything here takes Arrow arrays and `pyarrow.Field`s, whose metadata says what an Arrow type cannot (see `dtypes`).
"""

from __future__ import annotations

import reprlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from numbers import Integral, Number
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock._suggest import check_options
from penstock.arrays.ragged import is_list
from penstock.arrays.text import arrow_of, text_array
from penstock.errors import SchemaError
from penstock.types.dtypes import (
    Shape,
    is_tensor_storage,
    parse,
    shape_text,
    sparse_size,
    spell,
    spelling_of,
    tensor_parts,
)

NumpyArray = npt.NDArray[Any]


# --- what is wrong with a column ---


def refuse(problems: Sequence[str], what: str) -> None:
    """Raise one error with every problem, if there are any."""
    if len(problems) == 1:
        raise SchemaError(problems[0])
    if problems:
        raise SchemaError("\n  ".join([f"{len(problems)} problems with the {what}:", *problems]))


def content_problems(array: pa.Array, field: pa.Field | None) -> list[str]:
    """Check what the Arrow type does not promise: no nulls, tensors of the right shape, valid sparse vectors."""
    if field is None:
        return []
    array = _storage(array)
    problems = []
    if not field.nullable and array.null_count:
        problems.append(f"{_null_count(array)} in a column that allows none")
    if "not null" in (spelling := spell(field)) and _has_inner_nulls(array):
        problems.append(f"nulls inside values where {spelling} allows none")
    tensor, size = tensor_parts(field), sparse_size(field)
    try:
        if tensor is not None and None in tensor[1]:
            problems += _tensor_problems(array, tensor[1])
        elif size is not None:
            problems += _sparse_problems(array, size)
    except SchemaError as e:
        problems.append(f"inside its values: {e}")
    return problems


def _tensor_problems(array: pa.StructArray, shape: Shape) -> Iterator[str]:
    rows, array = _rows_with_values(array), array.drop_null()
    _, offsets = ragged_parts(array)
    lengths, shapes = np.diff(offsets), _view(array.field("shape"), allow_copy=True)
    fits = (shapes >= 0).all(axis=1) & (shapes.prod(axis=1, dtype=np.int64) == lengths)
    for axis, size in enumerate(shape):
        fits &= size is None or shapes[:, axis] == size
    if not fits.all():
        bad = fits.argmin()
        got = f"{shape_text(shapes[bad].tolist())} with {lengths[bad]} values"
        yield f"row {rows[bad]}: expected a tensor of shape {shape_text(shape)}, got {got}"


def _sparse_problems(array: pa.StructArray, size: int) -> Iterator[str]:
    rows, array = _rows_with_values(array), array.drop_null()
    indices, offsets = ragged_parts(array.field("indices"))
    counts, values = np.diff(offsets), np.diff(ragged_parts(array.field("values"))[1])
    if (bad := np.flatnonzero(counts != values)).size:
        yield f"row {rows[bad[0]]}: {counts[bad[0]]} indices for {values[bad[0]]} values"
    owner = np.repeat(rows, counts)
    if (bad := np.flatnonzero((indices < 0) | (indices >= size))).size:
        yield f"row {owner[bad[0]]}: index {indices[bad[0]]} is outside a vector of size {size}"
    order = np.lexsort((indices, owner))
    twice = (np.diff(indices[order]) == 0) & (np.diff(owner[order]) == 0)
    if (bad := order[1:][twice]).size:
        yield f"row {owner[bad[0]]}: index {indices[bad[0]]} is there more than once"


def _has_inner_nulls(array: pa.Array) -> bool:
    array = _storage(array).drop_null()
    kind = array.type
    parts: list[tuple[pa.Field, pa.Array]] = []
    if not len(array):
        return False
    if pa.types.is_struct(kind):
        parts = [(part, array.field(number)) for number, part in enumerate(kind)]
    elif pa.types.is_map(kind):  # whose keys and items, unlike a list's flatten(), are those of the whole buffer
        first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
        parts = [(kind.key_field, array.keys[first:last]), (kind.item_field, array.items[first:last])]
    elif hasattr(kind, "value_field"):
        parts = [(kind.value_field, array.flatten())]
    return any((values.null_count and not part.nullable) or _has_inner_nulls(values) for part, values in parts)


# --- Arrow to NumPy ---


def to_array(array: pa.Array, field: pa.Field, allow_copy: bool) -> NumpyArray:
    """A column as NumPy values, as `penstock.types.schema.to_numpy` promises for its field."""
    actual = spelling_of(array.type)
    if actual not in (spell(field), spelling_of(_storage(field.type))):
        raise SchemaError(f"expected {spell(field)}, got {actual}")
    if sparse_size(field) is not None:
        if not allow_copy:
            raise SchemaError(f"a view of {spell(field)} is impossible: the zeros are not stored")
        return to_dense(array, field)
    tensor = tensor_parts(field)
    if tensor is None:
        return _view(array, allow_copy)
    if None in tensor[1]:
        return _tensor_views(_storage(array), field, allow_copy)
    return _view(_storage(array), allow_copy).reshape(len(array), *tensor[1])


def ragged_parts(array: pa.Array, allow_copy: bool = True) -> tuple[NumpyArray, NumpyArray]:
    """The values of all rows one after the other, and where each row begins and ends in them."""
    array = _storage(array)
    if is_tensor_storage(array.type):
        _refuse_nulls(array)
        array = array.field("data")
    if not is_list(array.type):
        raise SchemaError(f"expected lists or variable-shape tensors, got {spelling_of(array.type)}")
    _refuse_nulls(array)
    # A writer may leave out the offsets of no rows at all, and pyarrow would read them all the same.
    offsets = array.offsets.to_numpy() if len(array) else np.zeros(1, np.int32)
    values = array.values[offsets[0] : offsets[-1]]
    return _view(values, allow_copy, at="at value"), offsets - offsets[0] if offsets[0] else offsets


def to_dense(array: pa.Array, field: pa.Field) -> NumpyArray:
    """Sparse vectors as a (rows, size) array."""
    _refuse_nulls(array)
    refuse(content_problems(array, field), "sparse vectors")
    indices, offsets = ragged_parts(array.field("indices"))
    values, _ = ragged_parts(array.field("values"))
    dense: NumpyArray = np.zeros((len(array), sparse_size(field) or 0), values.dtype)
    dense[np.repeat(np.arange(len(array)), np.diff(offsets)), indices] = values
    return dense


def to_cells(array: pa.Array, field: pa.Field) -> list[Any]:
    """One value for each row: tensors are NumPy arrays, everything else is plain Python."""
    tensor = tensor_parts(field)
    if tensor is None:
        return list(array.to_pylist())
    if None in tensor[1]:
        return list(_tensor_views(_storage(array), field, allow_copy=True))
    return list(_scatter(array, _view(array.drop_null(), allow_copy=True)))


def one_chunk(column: pa.Array | pa.ChunkedArray, allow_copy: bool) -> pa.Array:
    """A column in one piece, which costs a copy if it was in several."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    if column.num_chunks and not allow_copy:
        raise SchemaError(f"a view is impossible: the column is in {column.num_chunks} chunks; see combine_chunks()")
    return column.combine_chunks()


def _view(array: pa.Array, allow_copy: bool, at: str = "in row") -> NumpyArray:
    """A column as NumPy values, by its Arrow type alone."""
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return _view(array.storage, allow_copy, at).reshape(len(array), *kind.shape)
    if pa.types.is_fixed_size_list(kind):
        _refuse_nulls(array, at)
        inner = _view(array.flatten(), allow_copy, at="at value")
        return inner.reshape(len(array), kind.list_size, *inner.shape[1:])
    if is_list(kind):
        return _scatter(array, _list_views(array, allow_copy))
    if _numpy_dtype(kind) is None:
        if not allow_copy:
            raise SchemaError(f"a view of {spelling_of(kind)} is impossible: it has no NumPy dtype, only objects")
        return np.fromiter(array.to_pylist(), object, len(array))
    _refuse_nulls(array, at)
    if not allow_copy:
        _refuse_conversion(kind)
    return np.asarray(array.to_numpy(zero_copy_only=not _is_converted(kind)))


def _list_views(array: pa.Array, allow_copy: bool) -> Iterator[NumpyArray]:
    values, offsets = ragged_parts(array.drop_null() if allow_copy else array, allow_copy)
    return (values[start:end] for start, end in pairwise(offsets.tolist()))


def _tensor_views(array: pa.Array, field: pa.Field, allow_copy: bool) -> NumpyArray:
    refuse(content_problems(array, field.with_nullable(True)), "tensors")
    if not allow_copy:
        _refuse_nulls(array)
    present = array.drop_null()
    cells = zip(_list_views(present.field("data"), allow_copy), _view(present.field("shape"), allow_copy))
    return _scatter(array, (cell.reshape(shape) for cell, shape in cells))


def _scatter(array: pa.Array, cells: Iterable[NumpyArray]) -> NumpyArray:
    """One object for each row: the next cell, or None where the array is null."""
    found = np.empty(len(array), object)
    for row, cell in zip(_rows_with_values(array), cells):
        found[row] = cell
    return found


def _numpy_dtype(kind: pa.DataType) -> np.dtype[Any] | None:
    """The NumPy dtype with the same values; None if there is none but `object`."""
    if pa.types.is_timestamp(kind):
        return np.dtype(f"datetime64[{kind.unit}]")  # NumPy has no time zones; Arrow's values are in UTC all the same.
    if pa.types.is_duration(kind):
        return np.dtype(f"timedelta64[{kind.unit}]")
    if pa.types.is_date(kind):
        return np.dtype("datetime64[D]" if pa.types.is_date32(kind) else "datetime64[ms]")
    number = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return np.dtype(str(kind.to_pandas_dtype().__name__)) if number else None


def _is_converted(kind: pa.DataType) -> bool:
    return bool(pa.types.is_boolean(kind) or pa.types.is_date(kind))


def _refuse_conversion(kind: pa.DataType) -> None:
    if _is_converted(kind):
        raise SchemaError(f"a view of {spelling_of(kind)} is impossible: NumPy stores it in another width than Arrow")


def _refuse_nulls(array: pa.Array, at: str = "in row") -> None:
    if array.null_count:
        raise SchemaError(f"{_null_count(array, at)} and NumPy has no null; fill or drop them first")


def _null_count(array: pa.Array, at: str = "in row") -> str:
    count = array.null_count
    return f"{count} null{'s' if count > 1 else ''}, the first {at} {array.is_null().index(True).as_py()},"


def _rows_with_values(array: pa.Array) -> NumpyArray:
    return np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False))


def _storage(value: Any) -> Any:
    """An array, or a type, without its extension type."""
    if isinstance(value, pa.BaseExtensionType):
        return value.storage_type
    return value.storage if isinstance(value, pa.ExtensionArray) else value


# --- NumPy to Arrow ---


def as_numpy(value: Any) -> NumpyArray:
    """Input as an array whose first dimension is the row and whose bytes Arrow can read."""
    if isinstance(value, np.ma.MaskedArray):
        raise SchemaError("NumPy masks are not read; pyarrow.array(...) turns them into nulls")
    try:
        if hasattr(value, "__array__"):
            array: NumpyArray = np.asarray(value)
        elif hasattr(value, "__dlpack__"):
            array = np.from_dlpack(value)
        else:
            raise SchemaError(f"expected an array, got {type(value).__name__}; numpy.asarray(...) makes one")
    except (BufferError, RuntimeError, TypeError) as e:  # such as a tensor on a GPU, or one that requires grad
        raise SchemaError(f"{type(value).__name__} cannot be read as a NumPy array: {e}") from e
    if array.ndim == 0:
        raise SchemaError("expected an array whose first dimension is the row, got one without dimensions")
    if not array.dtype.isnative:
        raise SchemaError(f"the bytes of {array.dtype.str} are in the other order; astype makes them native")
    return array


def from_array(array: NumpyArray, field: pa.Field | None, allow_copy: bool) -> pa.Array:
    """An array as a column, sharing its memory where Arrow can; without a field, of the type that it has itself."""
    if field is None and array.dtype.kind not in "OUST":  # those are typed by their values
        field = parse(_array_spelling(array))
    item, shape = (None, ()) if field is None else _layout(field)
    dtype = None if item is None else _numpy_dtype(item)
    if array.ndim == 1 and (array.dtype.kind == "O" or (dtype is None and array.dtype.kind in "UST")):
        if not allow_copy:
            raise SchemaError(f"a view is impossible: Arrow cannot share values of {array.dtype}")
        return to_column(array.tolist(), field)
    if field is None:
        raise SchemaError(f"expected one value per row, got {array.dtype} of shape {array.shape}")
    if dtype is None or array.dtype != dtype or not _fits(array.shape[1:], shape):
        raise SchemaError(f"expected {spell(field)}, got {_array_spelling(array)}")
    if not allow_copy:
        _refuse_conversion(item)
        if not array.flags.c_contiguous:
            raise SchemaError("a view is impossible: the array is not in C order")
    values = pa.array(np.ascontiguousarray(array).reshape(-1), item)
    if None not in shape:
        return _nest(values, field.type, len(array))
    shapes = np.broadcast_to(np.array(array.shape[1:], np.int32), (len(array), len(shape)))
    return _variable_tensors(values, shapes, field.type)


def _array_spelling(array: NumpyArray) -> str:
    name = spelling_of(array.dtype)
    return name if array.ndim == 1 else f"tensor<{name}>{shape_text(array.shape[1:])}"


def _layout(field: pa.Field) -> tuple[pa.DataType, Shape]:
    """The Arrow type of the numbers in an array for this field, and its dimensions after the first."""
    if (tensor := tensor_parts(field)) is not None:
        return tensor
    kind, shape = field.type, []
    while pa.types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    return kind, tuple(shape)


def _fits(given: Shape, shape: Shape) -> bool:
    return len(given) == len(shape) and all(size in (None, got) for size, got in zip(shape, given))


def _nest(values: pa.Array, kind: pa.DataType, rows: int, validity: pa.Buffer | None = None) -> pa.Array:
    """Flat values as rows of a tensor or fixed-size list type, without copying them."""
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _nest(values, kind.storage_type, rows, validity))
    if not pa.types.is_fixed_size_list(kind):
        return values
    inner = _nest(values, kind.value_type, rows * kind.list_size)
    return pa.Array.from_buffers(kind, rows, [validity], children=[inner])


def _variable_tensors(
    values: pa.Array, shapes: NumpyArray, kind: pa.DataType, nulls: pa.Array | None = None
) -> pa.StructArray:
    ends = np.concatenate([[0], np.cumsum(shapes.prod(axis=1, dtype=np.int64))])
    data = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values)
    sizes = pa.array(np.ascontiguousarray(shapes).reshape(-1), pa.int32())
    shape = _nest(sizes, kind.field("shape").type, len(shapes))
    return pa.StructArray.from_arrays([data, shape], fields=list(kind), mask=nulls)


# --- Python values to Arrow ---

_MISFIT = (pa.ArrowException, ArithmeticError, TypeError, ValueError)


def to_column(values: Sequence[Any], field: pa.Field | None) -> pa.Array:
    """Python values as a column; without a field, of the type that holds them all.

    Unlike `pyarrow.array`, which makes 0 of 0.5 for an int64, it refuses what would be lost, and names the row; only
    floats are rounded to the width of the field, and times cut to its unit. Whether nulls are allowed, and whether a
    sparse vector makes sense, is left to `content_problems`.
    """
    try:
        return _build(values, field)
    except pa.ArrowNotImplementedError as e:
        raise SchemaError(f"pyarrow cannot make {spell(field) if field else 'a column'} from these values ({e})") from e
    except _MISFIT as e:
        reason = e

    def fails(count: int) -> bool:
        try:
            _build(values[:count], field)
        except _MISFIT:
            return True
        return False

    row = bisect_left(range(1, len(values)), True, key=fails)
    given = " ".join(reprlib.repr(values[row]).split())  # on one line, even an array
    if field is not None:
        raise SchemaError(f"row {row}: expected {spell(field)}, got {given} ({reason})") from reason
    before = f"the {spelling_of(_build(values[:row], None).type)} of the rows before" if row else "any column"
    raise SchemaError(f"row {row}: {given} does not fit {before}; give a schema ({reason})") from reason


def _build(values: Sequence[Any], field: pa.Field | None) -> pa.Array:
    if field is None:
        return pa.array(values)
    if (tensor := tensor_parts(field)) is not None:
        return _build_tensors(values, field.type, *tensor)
    if sparse_size(field) is not None:
        values = [dict(zip(("indices", "values"), v, strict=True)) if isinstance(v, tuple) else v for v in values]
    made = _built_alike(values, field.type)
    if made is not None:
        return made
    _refuse_losses(values, field.type)
    return pa.array(values, field.type)


_ALIKE = {int: (pa.int8(), pa.int16(), pa.int32(), pa.int64()), float: (pa.float64(),), str: (pa.string(),)}


def _built_alike(values: Sequence[Any], kind: pa.DataType) -> pa.Array | None:
    """As `pa.array`, for values that are all of the one Python type of a column, and not subclasses of it.

    It does without the import of pandas, which each process of workers would pay for.
    """
    alike = type(values[0]) if len(set(map(type, values))) == 1 else object
    if kind not in _ALIKE.get(alike, ()):
        return None
    try:
        return text_array(values) if alike is str else arrow_of(np.array(values, kind.to_pandas_dtype()))
    except (OverflowError, ValueError):
        return None  # pyarrow says what is wrong with them


def _build_tensors(values: Sequence[Any], kind: pa.DataType, item: pa.DataType, shape: Shape) -> pa.Array:
    sizes, dtype = [size or 0 for size in shape], _numpy_dtype(item)
    cells = [np.zeros(sizes, dtype) if value is None else np.asarray(value) for value in values]
    for cell in cells:
        if not _fits(cell.shape, shape) or cell.dtype.kind not in "biufO":
            raise SchemaError(f"it is {cell.dtype} of shape {shape_text(cell.shape)}")
    flat = pa.concat_arrays([pa.array([], item), *(pa.array(cell.reshape(-1), item) for cell in cells)])
    nulls = [value is None for value in values]
    if None not in shape:
        present = pa.array(np.logical_not(nulls))
        return _nest(flat, kind, len(cells), present.buffers()[1] if any(nulls) else None)
    shapes = np.array([cell.shape for cell in cells], np.int32).reshape(len(cells), len(shape))
    return _variable_tensors(flat, shapes, kind, pa.array(nulls, pa.bool_()))


def _refuse_losses(values: Iterable[Any], kind: pa.DataType) -> None:
    """Raise where pyarrow would lose something and not say so: a fraction, an unknown key, a text taken for a list."""
    present = [value for value in values if value is not None]
    classes = set(map(type, present))
    if pa.types.is_integer(kind) or pa.types.is_temporal(kind):
        if any(issubclass(c, Number) and not issubclass(c, Integral) for c in classes):
            for value in present:
                if issubclass(type(value), Number) and value % 1:
                    raise SchemaError(f"{value!r} is not a whole number")
    elif pa.types.is_struct(kind):
        known = [part.name for part in kind]
        records = [record for value in present if (record := _as_record(value, known)) is not None]
        check_options(sorted(set(map(str, chain.from_iterable(records)))), known, "key", error=SchemaError)
        for part in kind:
            _refuse_losses([record.get(part.name) for record in records], part.type)
    elif pa.types.is_map(kind):
        pairs = [pair for value in present for pair in (value.items() if isinstance(value, Mapping) else value)]
        _refuse_losses([key for key, _ in pairs], kind.key_type)
        _refuse_losses([value for _, value in pairs], kind.item_type)
    elif pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        _refuse_losses(present, kind.value_type)
    elif isinstance(kind, pa.BaseExtensionType):
        _refuse_losses(present, kind.storage_type)
    elif hasattr(kind, "value_field"):
        if classes & {str, bytes}:
            raise SchemaError("a text is not a list")
        _refuse_losses(chain.from_iterable(present), kind.value_type)


def _as_record(value: Any, names: Sequence[str]) -> Mapping[Any, Any] | None:
    """A struct in any form that pyarrow takes: a mapping, a tuple of values in order, or a list of pairs."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple):
        return dict(zip(names, value))
    if isinstance(value, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        return dict(value)
    return None
