"""Types of columns: one `Schema`, the same for files, queues and training batches.

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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, Self

import numpy as np
import pyarrow as pa
import xxhash

from penstock._suggest import check_options, did_you_mean
from penstock.errors import SchemaError
from penstock.types.columns import (
    NumpyArray,
    as_numpy,
    content_problems,
    from_array,
    one_chunk,
    ragged_parts,
    refuse,
    to_array,
    to_cells,
    to_column,
    to_dense,
)
from penstock.types.dtypes import parse, shape_text, sparse_size, spell, spelling_of, tensor_parts

_VERSION = 1
_ROLE_KEY = b"penstock.role"


@dataclass(frozen=True, slots=True, init=False)
class Field:
    """One column: its name, its type, the shape of its tensors if it holds tensors, and what it is for.

    `dtype` may be given as a spelling (`"list<int64>"`, see `penstock.types.dtypes`), a `pyarrow.DataType`, a NumPy
    dtype, or one of `bool`, `int`, `float`, `str`, `bytes`; it is kept as the canonical spelling.
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
            check_options(field, Field.__slots__, "key", where=f"field {field}", error=SchemaError)
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
            refuse(_batch_problems(batch, self), "batch")
        elif isinstance(batch, Mapping):
            refuse(_encode_arrays(batch, self, allow_copy=True)[1], "arrays")
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
    array = one_chunk(column, allow_copy)
    return to_array(array, pa.field("", array.type) if field is None else field.to_arrow(), allow_copy)


def ragged(column: pa.Array | pa.ChunkedArray, *, allow_copy: bool = True) -> tuple[NumpyArray, NumpyArray]:
    """`(values, offsets)` of lists or variable-shape tensors: row i is `values[offsets[i]:offsets[i + 1]]`.

    Both are views when the values are numbers; of a slice only the values, since its offsets are made to start at 0.
    The shapes of tensors are `to_numpy(column.field("shape"))`.
    """
    return ragged_parts(one_chunk(column, allow_copy), allow_copy)


def from_numpy(columns: Mapping[str, Any], schema: Schema | None = None, *, allow_copy: bool = True) -> pa.RecordBatch:
    """A batch of NumPy arrays (or what has `__array__` or `__dlpack__`) whose first dimension is the row.

    Numbers in C order are not copied: the batch shares the arrays' memory, so leave them unchanged while it lives.
    Arrays of more than one dimension become fixed-shape tensors unless the schema says otherwise. Nothing is cast:
    an array whose dtype is not the schema's is an error. With `allow_copy=False` what needs a copy is one too.
    """
    arrays, problems = _encode_arrays(columns, schema, allow_copy)
    refuse(problems, "arrays")
    return _record_batch(arrays, schema)


def to_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The batch as one dict per row; tensors are NumPy arrays, everything else is plain Python."""
    names = batch.schema.names
    if len(set(names)) < len(names):
        raise SchemaError(f"rows cannot hold two columns of the same name; the columns are {names}")
    columns = [to_cells(column, arrow) for column, arrow in zip(batch.columns, batch.schema)]
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
            arrays[name] = to_column([row.get(name) for row in rows], arrow)
        except SchemaError as e:
            problems.append(f"column {name!r}: {e}")
        else:
            problems += [f"column {name!r}: {problem}" for problem in content_problems(arrays[name], arrow)]
    refuse(problems, "rows")
    return _record_batch(arrays, schema)


def sparse_to_dense(column: pa.Array | pa.ChunkedArray, field: Field) -> NumpyArray:
    """Sparse vectors as a (rows, size) array; `field` knows the size."""
    array, arrow = one_chunk(column, allow_copy=True), field.to_arrow()
    if sparse_size(arrow) is None or array.type != arrow.type:
        raise SchemaError(f"expected sparse vectors, got {spelling_of(array.type)} for {field.spelling}")
    return to_dense(array, arrow)


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
    array = to_column(list(pairs), field.to_arrow())
    refuse(content_problems(array, field.to_arrow()), "sparse vectors")
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
            # A computed column has lost its metadata; its type is still the right one.
            right = actual in (spell(arrow), spelling_of(arrow.type))
            found = content_problems(column, arrow) if right else [f"expected {spell(arrow)}, got {actual}"]
        problems += [f"column {given.name!r}: {problem}" for problem in found]
    return problems


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
            array = as_numpy(value)
            rows[name] = len(array)
            arrow = None if schema is None else schema[name].to_arrow()
            arrays[name] = column = from_array(array, arrow, allow_copy)
            problems += [f"column {name!r}: {problem}" for problem in content_problems(column, arrow)]
        except SchemaError as e:
            problems.append(f"column {name!r}: {e}")
    if len(set(rows.values())) > 1:
        problems.append(f"the columns differ in rows: {', '.join(f'{name!r} has {n}' for name, n in rows.items())}")
    return arrays, problems
