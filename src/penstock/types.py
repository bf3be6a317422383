"""What the columns of a batch are: one `Schema`, the same for files, queues and training batches.

    schema = Schema([
        Field("tokens", "list<int32>"),
        Field("image", "uint8", shape=(3, 224, 224)),
        Field("frames", "float32", shape=(None, 64)),
        Field("vector", "float32", shape=(768,), role="embedding"),
        Field("terms", "sparse<float32>[10000]"),
        Field("label", "string", nullable=False),
    ])
    batch = from_rows(rows, schema)
    schema.validate(batch)

Tensors of fixed shape are Arrow's `arrow.fixed_shape_tensor`. A tensor of variable shape is a struct of `data` and
`shape`, a sparse vector one of `indices` and `values`; what an Arrow type cannot hold is in the field's metadata.
Below the schema: columns to and from NumPy without copying where Arrow allows it, and to and from rows.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import reprlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from numbers import Integral, Number
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from penstock._dtypes import (
    Shape,
    did_you_mean,
    is_tensor_storage,
    parse,
    shape_text,
    sparse_size,
    spell,
    spelling_of,
    tensor_parts,
)
from penstock.errors import SchemaError

__all__ = [
    "Field",
    "Schema",
    "from_numpy",
    "from_rows",
    "ragged",
    "sparse_from_dense",
    "sparse_from_pairs",
    "sparse_to_dense",
    "to_numpy",
    "to_rows",
]

NumpyArray = npt.NDArray[Any]

_VERSION = 1
_ROLE_KEY = b"penstock.role"


@dataclass(frozen=True, slots=True, init=False)
class Field:
    """One column: its name, its type, the shape of its tensors if it holds tensors, and what it is for.

    `dtype` may be given as a spelling (`"list<int64>"`, see `penstock._dtypes`), a `pyarrow.DataType`, a NumPy dtype,
    or one of `bool`, `int`, `float`, `str`, `bytes`; it is kept as the canonical spelling.
    `role` is free text that travels with the column through Arrow files.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None
    """The shape of each row's tensor, None for a dimension that varies from row to row."""
    role: str | None
    nullable: bool

    def __init__(
        self,
        name: str,
        dtype: object,
        shape: Sequence[int | None] | None = None,
        role: str | None = None,
        nullable: bool = True,
    ) -> None:
        if not isinstance(name, str) or not isinstance(role, str | None):
            raise SchemaError(f"a column's name and role are strings, got {name!r} and {role!r}")
        if not isinstance(nullable, bool):
            raise SchemaError(f"column {name!r}: nullable is True or False, got {nullable!r}")
        try:
            text = spelling_of(dtype)
            if shape is not None:
                text = f"tensor<{text}>{shape_text(map(_dimension, shape))}"
            arrow = parse(text)
        except SchemaError as e:
            raise SchemaError(f"column {name!r}: {e}") from None
        tensor = tensor_parts(arrow)
        text, shape = (spell(arrow), None) if tensor is None else (spelling_of(tensor[0]), tensor[1])
        if text == "null" and not nullable:
            raise SchemaError(f"column {name!r}: a column of type null is nullable, there is nothing else in it")
        for key, value in zip(self.__slots__, (name, text, shape, role, nullable), strict=True):
            object.__setattr__(self, key, value)

    @property
    def spelling(self) -> str:
        """The whole type in one string: the dtype, or `tensor<float32>[3, 224, 224]`."""
        return self.dtype if self.shape is None else f"tensor<{self.dtype}>{shape_text(self.shape)}"

    def to_arrow(self) -> pa.Field:
        arrow = parse(self.spelling)
        metadata = dict(arrow.metadata or {})
        if self.role is not None:
            metadata[_ROLE_KEY] = self.role.encode()
        return pa.field(self.name, arrow.type, self.nullable, metadata or None)

    @classmethod
    def from_arrow(cls, field: pa.Field) -> Self:
        """The same column as penstock says it; metadata that is not penstock's is not kept."""
        try:
            text = spell(field)
        except SchemaError as e:
            raise SchemaError(f"column {field.name!r}: {e}") from None
        role = (field.metadata or {}).get(_ROLE_KEY)
        return cls(field.name, text, role=None if role is None else role.decode(), nullable=field.nullable)

    def __str__(self) -> str:
        return f"{self.name}: {self.spelling}{'' if self.nullable else ' not null'}"


@dataclass(frozen=True, slots=True, init=False)
class Schema:
    """An ordered collection of fields with distinct names: `Schema([Field(...), ...])` or `Schema({"x": "int64"})`."""

    fields: tuple[Field, ...]
    _by_name: Mapping[str, Field] = dataclasses.field(init=False, compare=False, repr=False)

    def __init__(self, fields: Iterable[Field] | Mapping[str, Any] = ()) -> None:
        if isinstance(fields, Mapping):
            fields = [Field(name, dtype) for name, dtype in fields.items()]
        fields = tuple(fields)
        if strangers := [field for field in fields if not isinstance(field, Field)]:
            raise SchemaError(f"a schema holds fields, got {strangers[0]!r}; write Field(name, dtype)")
        if twice := [name for name, count in Counter(field.name for field in fields).items() if count > 1]:
            raise SchemaError(f"column names must differ; given more than once: {', '.join(map(repr, twice))}")
        object.__setattr__(self, "fields", fields)
        object.__setattr__(self, "_by_name", {field.name: field for field in fields})

    @property
    def names(self) -> list[str]:
        return [field.name for field in self.fields]

    def __len__(self) -> int:
        return len(self.fields)

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Field:
        if name in self._by_name:
            return self._by_name[name]
        hint = did_you_mean(str(name), self.names)
        raise SchemaError(f"column {name!r} is not in the schema; it has {self.names}{hint}")

    def select(self, names: Iterable[str]) -> Self:
        """The named columns, in the order of `names`."""
        return type(self)([self[name] for name in names])

    def with_field(self, field: Field) -> Self:
        """With `field` in the place of the column of that name, or at the end."""
        if field.name not in self:
            return type(self)([*self, field])
        return type(self)([field if old.name == field.name else old for old in self])

    def to_arrow(self) -> pa.Schema:
        return pa.schema([field.to_arrow() for field in self])

    @classmethod
    def from_arrow(cls, schema: pa.Schema) -> Self:
        return cls([Field.from_arrow(field) for field in schema])

    def to_dict(self) -> dict[str, Any]:
        """JSON-able and versioned; `from_dict` gives the schema back."""
        return {"version": _VERSION, "fields": [_field_to_dict(field) for field in self]}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        if state.get("version") != _VERSION:
            raise SchemaError(f"a schema of version {state.get('version')!r}; this penstock reads version {_VERSION}")
        if not isinstance(state.get("fields"), list):
            raise SchemaError(f"a schema has a list of fields, got {state.get('fields')!r}")
        for field in state["fields"]:
            for key in sorted(set(field) - set(Field.__slots__)):
                raise SchemaError(f"unknown key {key!r} in field {field}{did_you_mean(key, Field.__slots__)}")
            if not {"name", "dtype"} <= set(field):
                raise SchemaError(f"a field has a name and a dtype, got {field}")
        return cls([Field(**field) for field in state["fields"]])

    def fingerprint(self) -> str:
        """16 hex digits that are the same wherever and whenever the schema is the same, roles and order included."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return xxhash.xxh3_64_hexdigest(canonical.encode())

    def validate(self, batch: pa.RecordBatch | Mapping[str, Any]) -> None:
        """Raise one `SchemaError` that lists every way in which `batch` is not what the schema says.

        A batch, or a mapping of names to NumPy arrays (or what has `__array__` or `__dlpack__`) whose first dimension
        is the row. Columns may come in any order. Arrays with a dtype of objects are converted to be checked.
        """
        if isinstance(batch, pa.RecordBatch):
            _refuse(_batch_problems(batch, self), "batch")
        elif isinstance(batch, Mapping):
            _refuse(_encode_arrays(batch, self, allow_copy=True)[1], "arrays")
        else:
            raise SchemaError(f"expected a RecordBatch or a mapping of names to arrays, got {type(batch).__name__}")

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def to_numpy(column: pa.Array | pa.ChunkedArray, field: Field | None = None, *, allow_copy: bool = True) -> NumpyArray:
    """A column as a NumPy array with one entry per row: a read-only view of the column's memory where there can be one.

        numbers, timestamps, durations          (rows,)              a view
        fixed-shape tensors, fixed-size lists   (rows, *shape)       a view
        variable-shape tensors, lists           (rows,) of arrays    each a view; None for null
        bools, dates                            (rows,)              a copy
        sparse vectors                          (rows, size)         a copy, dense
        strings and the rest                    (rows,) of objects   a copy; None for null

    Nulls among numbers are an error: NumPy has no null. `field` is needed for sparse vectors and variable-shape
    tensors, whose Arrow type does not say what they are. With `allow_copy=False` what needs a copy is an error.
    """
    array = _one_chunk(column, allow_copy)
    arrow = pa.field("", array.type) if field is None else field.to_arrow()
    actual = spelling_of(array.type)
    if actual not in (spell(arrow), spelling_of(_storage(arrow.type))):
        raise SchemaError(f"expected {spell(arrow)}, got {actual}")
    if sparse_size(arrow) is not None:
        if not allow_copy:
            raise SchemaError(f"a view of {spell(arrow)} is impossible: the zeros are not stored")
        return _sparse_to_dense(array, arrow)
    tensor = tensor_parts(arrow)
    if tensor is None:
        return _view(array, allow_copy)
    if None in tensor[1]:
        return _tensor_views(_storage(array), arrow, allow_copy)
    return _view(_storage(array), allow_copy).reshape(len(array), *tensor[1])


def ragged(column: pa.Array | pa.ChunkedArray, *, allow_copy: bool = True) -> tuple[NumpyArray, NumpyArray]:
    """`(values, offsets)` of lists or variable-shape tensors: row i is `values[offsets[i]:offsets[i + 1]]`.

    Both are views when the values are numbers; of a slice only the values, since its offsets are made to start at 0.
    The shapes of tensors are `to_numpy(column.field("shape"))`.
    """
    array = _storage(_one_chunk(column, allow_copy))
    if is_tensor_storage(array.type):
        _refuse_nulls(array)
        array = array.field("data")
    if not _is_list(array.type):
        raise SchemaError(f"expected lists or variable-shape tensors, got {spelling_of(array.type)}")
    _refuse_nulls(array)
    # A writer may leave out the offsets of no rows at all, and pyarrow would read them all the same.
    offsets = array.offsets.to_numpy() if len(array) else np.zeros(1, np.int32)
    values = array.values[offsets[0] : offsets[-1]]
    return _view(values, allow_copy, at="at value"), offsets - offsets[0] if offsets[0] else offsets


def from_numpy(columns: Mapping[str, Any], schema: Schema | None = None, *, allow_copy: bool = True) -> pa.RecordBatch:
    """A batch of NumPy arrays (or what has `__array__` or `__dlpack__`) whose first dimension is the row.

    Numbers in C order are not copied: the batch shares the arrays' memory, so leave them unchanged while it lives.
    Arrays of more than one dimension become fixed-shape tensors unless the schema says otherwise. Nothing is cast:
    an array whose dtype is not the schema's is an error. With `allow_copy=False` what needs a copy is one too.
    """
    arrays, problems = _encode_arrays(columns, schema, allow_copy)
    _refuse(problems, "arrays")
    return _record_batch(arrays, schema)


def to_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The batch as one dict per row; tensors are NumPy arrays, everything else is plain Python."""
    names = batch.schema.names
    if len(set(names)) < len(names):
        raise SchemaError(f"rows cannot hold two columns of the same name; the columns are {names}")
    columns = [_row_values(column, arrow) for column, arrow in zip(batch.columns, batch.schema)]
    return [dict(zip(names, cells)) for cells in (zip(*columns) if columns else repeat((), batch.num_rows))]


def from_rows(rows: Iterable[Mapping[str, Any]], schema: Schema | None = None) -> pa.RecordBatch:
    """A batch of one dict per row; a key that is missing in a row becomes null.

    Without a schema the columns are all the keys that occur, in the order they first occur, with the type that holds
    all their values. With one, values are converted only if nothing is lost, except that floats are rounded to the
    width of their column and times cut to its unit. Tensors may be given as arrays or nested lists, sparse vectors as
    `(indices, values)`.
    """
    rows = list(rows)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise SchemaError(f"row {number}: expected a mapping of column names to values, got {reprlib.repr(row)}")
    keys = list(dict.fromkeys(chain.from_iterable(rows)))
    names = keys if schema is None else schema.names
    for key in keys:
        if schema is not None and key not in schema:
            number = next(number for number, row in enumerate(rows) if key in row)
            raise SchemaError(f"row {number}: key {key!r} is not in the schema{did_you_mean(str(key), names)}")
    if rows and not names:
        raise SchemaError(f"{len(rows)} rows without a single column cannot be kept in a batch")

    arrays: dict[str, pa.Array] = {}
    problems: list[str] = []
    for name in names:
        arrow = None if schema is None else schema[name].to_arrow()
        try:
            arrays[name] = _encode_cells([row.get(name) for row in rows], arrow)
        except SchemaError as e:
            problems.append(f"column {name!r}: {e}")
        else:
            problems += [f"column {name!r}: {problem}" for problem in _content_problems(arrays[name], arrow)]
    _refuse(problems, "rows")
    return _record_batch(arrays, schema)


def sparse_to_dense(column: pa.Array | pa.ChunkedArray, field: Field) -> NumpyArray:
    """Sparse vectors as a (rows, size) array; `field` knows the size."""
    array, arrow = _one_chunk(column, allow_copy=True), field.to_arrow()
    if sparse_size(arrow) is None or array.type != arrow.type:
        raise SchemaError(f"expected sparse vectors, got {spelling_of(array.type)} for {field.spelling}")
    return _sparse_to_dense(array, arrow)


def sparse_from_dense(matrix: NumpyArray) -> pa.StructArray:
    """The non-zero entries of each row of a (rows, size) array, for a field `sparse<...>[size]`."""
    if matrix.ndim != 2:
        raise SchemaError(f"expected an array of (rows, size), got shape {matrix.shape}")
    rows, indices = np.nonzero(matrix)
    offsets = pa.array(np.searchsorted(rows, np.arange(len(matrix) + 1)), pa.int32())
    parts = pa.array(indices, pa.int32()), pa.array(matrix[rows, indices])
    lists = [pa.ListArray.from_arrays(offsets, part) for part in parts]
    return pa.StructArray.from_arrays(lists, ["indices", "values"])


def sparse_from_pairs(pairs: Iterable[tuple[Any, Any] | None], field: Field) -> pa.StructArray:
    """One sparse vector for each `(indices, values)`; None is null."""
    array = _encode_cells(list(pairs), field.to_arrow())
    _refuse(_content_problems(array, field.to_arrow()), "sparse vectors")
    return array


def _dimension(size: object) -> int | None:
    if size is None:
        return None
    if isinstance(size, int | np.integer) and not isinstance(size, bool) and size >= 0:
        return operator.index(size)
    raise SchemaError(f"a shape holds sizes, and None for one that varies, got {size!r}")


def _field_to_dict(field: Field) -> dict[str, Any]:
    """Only what differs from the default, so that a later attribute does not change old fingerprints."""
    state: dict[str, Any] = {"name": field.name, "dtype": field.dtype}
    if field.shape is not None:
        state["shape"] = list(field.shape)
    if field.role is not None:
        state["role"] = field.role
    if not field.nullable:
        state["nullable"] = False
    return state


# --- what is wrong with a batch ---


def _refuse(problems: Sequence[str], what: str) -> None:
    if len(problems) == 1:
        raise SchemaError(problems[0])
    if problems:
        raise SchemaError("\n  ".join([f"{len(problems)} problems with the {what}:", *problems]))


def _name_problems(names: Iterable[str], schema: Schema) -> list[str]:
    given = Counter(list(names))  # a mapping itself would be taken for counts
    missing = [name for name in schema.names if name not in given]
    unknown = [name for name in given if name not in schema]
    return [
        *(f"column {name!r} is missing" for name in missing),
        *(f"column {name!r} is not in the schema{did_you_mean(str(name), missing)}" for name in unknown),
        *(f"column {name!r} is there {count} times" for name, count in given.items() if count > 1),
    ]


def _batch_problems(batch: pa.RecordBatch, schema: Schema) -> list[str]:
    problems = _name_problems(batch.schema.names, schema)
    for given, column in zip(batch.schema, batch.columns):
        if given.name not in schema:
            continue
        arrow = schema[given.name].to_arrow()
        try:
            actual = spell(given)
        except SchemaError as e:
            found = [str(e)]
        else:
            # A column that was computed anew has lost its metadata; its type is still the right one.
            right = actual in (spell(arrow), spelling_of(arrow.type))
            found = _content_problems(column, arrow) if right else [f"expected {spell(arrow)}, got {actual}"]
        problems += [f"column {given.name!r}: {problem}" for problem in found]
    return problems


def _content_problems(array: pa.Array, arrow: pa.Field | None) -> list[str]:
    """What the Arrow type does not promise: no nulls, tensors of the right shape, sparse vectors that make sense."""
    if arrow is None:
        return []
    array = _storage(array)
    problems = []
    if not arrow.nullable and array.null_count:
        problems.append(f"{_null_count(array)} in a column that allows none")
    if "not null" in (spelling := spell(arrow)) and _has_inner_nulls(array):
        problems.append(f"nulls inside values where {spelling} allows none")
    tensor, size = tensor_parts(arrow), sparse_size(arrow)
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
    _, offsets = ragged(array)
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
    indices, offsets = ragged(array.field("indices"))
    counts, values = np.diff(offsets), np.diff(ragged(array.field("values"))[1])
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


def _one_chunk(column: pa.Array | pa.ChunkedArray, allow_copy: bool) -> pa.Array:
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    if column.num_chunks and not allow_copy:
        raise SchemaError(f"a view is impossible: the column is in {column.num_chunks} chunks; see combine_chunks()")
    return column.combine_chunks()


def _storage(value: Any) -> Any:
    """An array, or a type, without its extension type."""
    if isinstance(value, pa.BaseExtensionType):
        return value.storage_type
    return value.storage if isinstance(value, pa.ExtensionArray) else value


def _is_list(kind: pa.DataType) -> bool:
    """Lists that lie one after the other; those of a list view need not."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _rows_with_values(array: pa.Array) -> NumpyArray:
    return np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False))


def _null_count(array: pa.Array, at: str = "in row") -> str:
    count = array.null_count
    return f"{count} null{'s' if count > 1 else ''}, the first {at} {array.is_null().index(True).as_py()},"


def _refuse_nulls(array: pa.Array, at: str = "in row") -> None:
    if array.null_count:
        raise SchemaError(f"{_null_count(array, at)} and NumPy has no null; fill or drop them first")


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


def _view(array: pa.Array, allow_copy: bool, at: str = "in row") -> NumpyArray:
    """What `to_numpy` gives for a column whose Arrow type says all there is to know."""
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return _view(array.storage, allow_copy, at).reshape(len(array), *kind.shape)
    if pa.types.is_fixed_size_list(kind):
        _refuse_nulls(array, at)
        inner = _view(array.flatten(), allow_copy, at="at value")
        return inner.reshape(len(array), kind.list_size, *inner.shape[1:])
    if _is_list(kind):
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
    values, offsets = ragged(array.drop_null() if allow_copy else array, allow_copy=allow_copy)
    return (values[start:end] for start, end in pairwise(offsets.tolist()))


def _tensor_views(array: pa.Array, arrow: pa.Field, allow_copy: bool) -> NumpyArray:
    _refuse(_content_problems(array, arrow.with_nullable(True)), "tensors")
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


def _is_converted(kind: pa.DataType) -> bool:
    return bool(pa.types.is_boolean(kind) or pa.types.is_date(kind))


def _refuse_conversion(kind: pa.DataType) -> None:
    if _is_converted(kind):
        raise SchemaError(f"a view of {spelling_of(kind)} is impossible: NumPy stores it in another width than Arrow")


def _sparse_to_dense(array: pa.Array, arrow: pa.Field) -> NumpyArray:
    _refuse_nulls(array)
    _refuse(_content_problems(array, arrow), "sparse vectors")
    indices, offsets = ragged(array.field("indices"))
    values, _ = ragged(array.field("values"))
    dense: NumpyArray = np.zeros((len(array), sparse_size(arrow) or 0), values.dtype)
    dense[np.repeat(np.arange(len(array)), np.diff(offsets)), indices] = values
    return dense


def _row_values(array: pa.Array, arrow: pa.Field) -> list[Any]:
    tensor = tensor_parts(arrow)
    if tensor is None:
        return list(array.to_pylist())
    if None in tensor[1]:
        return list(_tensor_views(_storage(array), arrow, allow_copy=True))
    return list(_scatter(array, _view(array.drop_null(), allow_copy=True)))


# --- NumPy and Python values to Arrow ---


def _record_batch(arrays: Mapping[str, pa.Array], schema: Schema | None) -> pa.RecordBatch:
    if schema is None:
        return pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays))
    return pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema.to_arrow())


def _encode_arrays(
    columns: Mapping[str, Any], schema: Schema | None, allow_copy: bool
) -> tuple[dict[str, pa.Array], list[str]]:
    """The columns that could be made, and what is wrong with the others."""
    arrays: dict[str, pa.Array] = {}
    rows: dict[str, int] = {}
    problems = [] if schema is None else _name_problems(columns, schema)
    for name, value in columns.items():
        if schema is not None and name not in schema:
            continue
        try:
            array = _as_numpy(value)
            rows[name] = len(array)
            arrow = _field_of(array) if schema is None else schema[name].to_arrow()
            arrays[name] = column = _encode_array(array, arrow, allow_copy)
            problems += [f"column {name!r}: {problem}" for problem in _content_problems(column, arrow)]
        except SchemaError as e:
            problems.append(f"column {name!r}: {e}")
    if len(set(rows.values())) > 1:
        problems.append(f"the columns differ in rows: {', '.join(f'{name!r} has {n}' for name, n in rows.items())}")
    return arrays, problems


def _as_numpy(value: Any) -> NumpyArray:
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


def _field_of(array: NumpyArray) -> pa.Field | None:
    """What an array holds; None if only its values can tell."""
    return None if array.dtype.kind in "OUST" else parse(_array_spelling(array))


def _array_spelling(array: NumpyArray) -> str:
    name = spelling_of(array.dtype)
    return name if array.ndim == 1 else f"tensor<{name}>{shape_text(array.shape[1:])}"


def _encode_array(array: NumpyArray, arrow: pa.Field | None, allow_copy: bool) -> pa.Array:
    item, shape = (None, ()) if arrow is None else _layout(arrow)
    dtype = None if item is None else _numpy_dtype(item)
    if array.ndim == 1 and (array.dtype.kind == "O" or (dtype is None and array.dtype.kind in "UST")):
        if not allow_copy:
            raise SchemaError(f"a view is impossible: Arrow cannot share values of {array.dtype}")
        return _encode_cells(array.tolist(), arrow)
    if arrow is None:
        raise SchemaError(f"expected one value per row, got {array.dtype} of shape {array.shape}")
    if dtype is None or array.dtype != dtype or not _fits(array.shape[1:], shape):
        raise SchemaError(f"expected {spell(arrow)}, got {_array_spelling(array)}")
    if not allow_copy:
        _refuse_conversion(item)
        if not array.flags.c_contiguous:
            raise SchemaError("a view is impossible: the array is not in C order")
    values = pa.array(np.ascontiguousarray(array).reshape(-1), item)
    if None not in shape:
        return _nest(values, arrow.type, len(array))
    shapes = np.broadcast_to(np.array(array.shape[1:], np.int32), (len(array), len(shape)))
    return _variable_tensors(values, shapes, arrow.type)


def _layout(arrow: pa.Field) -> tuple[pa.DataType, Shape]:
    """The Arrow type of the numbers in an array for this field, and its dimensions after the first."""
    if (tensor := tensor_parts(arrow)) is not None:
        return tensor
    kind, shape = arrow.type, []
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


_MISFIT = (pa.ArrowException, ArithmeticError, TypeError, ValueError)


def _encode_cells(values: Sequence[Any], arrow: pa.Field | None) -> pa.Array:
    """Python values as a column; an error names the first row that does not fit."""
    try:
        return _build(values, arrow)
    except pa.ArrowNotImplementedError as e:
        raise SchemaError(f"pyarrow cannot make {spell(arrow) if arrow else 'a column'} from these values ({e})") from e
    except _MISFIT as e:
        reason = e

    def fails(count: int) -> bool:
        try:
            _build(values[:count], arrow)
        except _MISFIT:
            return True
        return False

    row = bisect_left(range(1, len(values)), True, key=fails)
    given = " ".join(reprlib.repr(values[row]).split())  # on one line, even an array
    if arrow is not None:
        raise SchemaError(f"row {row}: expected {spell(arrow)}, got {given} ({reason})") from reason
    before = f"the {spelling_of(_build(values[:row], None).type)} of the rows before" if row else "any column"
    raise SchemaError(f"row {row}: {given} does not fit {before}; give a schema ({reason})") from reason


def _build(values: Sequence[Any], arrow: pa.Field | None) -> pa.Array:
    if arrow is None:
        return pa.array(values)
    if (tensor := tensor_parts(arrow)) is not None:
        return _build_tensors(values, arrow.type, *tensor)
    if sparse_size(arrow) is not None:
        values = [dict(zip(("indices", "values"), v, strict=True)) if isinstance(v, tuple) else v for v in values]
    _refuse_losses(values, arrow.type)
    return pa.array(values, arrow.type)


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
        known = {part.name for part in kind}
        records = [value for value in present if isinstance(value, Mapping)]
        for key in sorted(set(map(str, chain.from_iterable(records))) - known):
            raise SchemaError(f"unknown key {key!r}{did_you_mean(key, known)}")
        for part in kind:
            _refuse_losses([record.get(part.name) for record in records], part.type)
    elif pa.types.is_map(kind):
        pairs = [pair for value in present for pair in (value.items() if isinstance(value, Mapping) else value)]
        _refuse_losses([key for key, _ in pairs], kind.key_type)
        _refuse_losses([value for _, value in pairs], kind.item_type)
    elif pa.types.is_dictionary(kind):
        _refuse_losses(present, kind.value_type)
    elif hasattr(kind, "value_field"):
        if classes & {str, bytes}:
            raise SchemaError("a text is not a list")
        _refuse_losses(chain.from_iterable(present), kind.value_type)
