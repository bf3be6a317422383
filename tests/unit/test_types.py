import dataclasses
import datetime as dt
import io
import json
import pickle
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from penstock.errors import SchemaError
from penstock.types import (
    Field,
    Schema,
    from_numpy,
    from_rows,
    ragged,
    sparse_from_dense,
    sparse_from_pairs,
    sparse_to_dense,
    to_numpy,
    to_rows,
)
from penstock.types import schema as types
from penstock.types.columns import to_column

quick = settings(max_examples=60, deadline=None)

NUMBERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
ATOMS = [
    *NUMBERS,
    *["bool", "string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null", "uuid", "json"],
    *["date32", "date64", "timestamp[ns]", "timestamp[us, UTC]", "timestamp[s, +05:30]", "time32[ms]", "time64[ns]"],
    *["duration[s]", "bool8", "month_day_nano_interval", "fixed_size_binary[16]", "decimal32<5, 2>", "decimal64<9, 0>"],
    *["decimal128<10, -2>", "decimal256<50, 3>", "dictionary<int32, string>", "dictionary<uint8, int64, ordered>"],
    *["run_end_encoded<int32, string>", "sparse<float32>[10000]", "tensor<uint8>[3, 4]", "tensor<float16>[?, 64]"],
]


def message(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(SchemaError) as caught:
        call(*args, **options)
    return str(caught.value)


def address(array: pa.Array) -> int:
    """Where the values of an array lie: its last buffer, past the rows that a slice skips."""
    if isinstance(array, pa.ExtensionArray):
        return address(array.storage)
    if pa.types.is_fixed_size_list(array.type):
        return address(array.flatten())
    return array.buffers()[-1].address + array.offset * array.type.bit_width // 8


def through_ipc(batch: pa.RecordBatch) -> pa.RecordBatch:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


def wrapped(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    part = st.tuples(children, st.sampled_from(["", " not null"])).map("".join)
    names = st.lists(st.text(min_size=0, max_size=4), max_size=3, unique=True)
    return st.one_of(
        st.tuples(st.sampled_from(["list", "large_list", "list_view", "large_list_view"]), part).map(
            lambda pair: f"{pair[0]}<{pair[1]}>"
        ),
        st.tuples(part, st.integers(0, 9)).map(lambda pair: f"fixed_size_list<{pair[0]}>[{pair[1]}]"),
        st.tuples(st.sampled_from(ATOMS[:12]), part, st.sampled_from(["", ", sorted"])).map(
            lambda three: f"map<{three[0]}, {three[1]}{three[2]}>"
        ),
        names.flatmap(
            lambda names: st.tuples(*[part] * len(names)).map(
                lambda parts: f"struct<{','.join(f'{json.dumps(n)}:{p}' for n, p in zip(names, parts))}>"
            )
        ),
    )


spellings = st.recursive(st.sampled_from(ATOMS), wrapped, max_leaves=6)
column_names = st.text(max_size=8)
tensors = st.builds(
    Field,
    column_names,
    st.sampled_from([*NUMBERS, "bool"]),
    st.lists(st.none() | st.integers(0, 9), min_size=1, max_size=4),
    st.none() | st.text(max_size=5),
    st.booleans(),
)
plain_fields = st.builds(
    lambda name, dtype, role, nullable: Field(name, dtype, None, role, nullable or dtype == "null"),
    *(column_names, spellings, st.none() | st.text(max_size=5), st.booleans()),
)
fields = plain_fields | tensors
schemas = st.lists(fields, max_size=5, unique_by=lambda field: field.name).map(Schema)


# --- how a type is written down ---


@pytest.mark.parametrize(
    "spelling", [*ATOMS, "list<int64>", "map<string, float32>", "struct<a: int64, b: list<string>>"]
)
def test_a_canonical_spelling_is_kept_as_it_is(spelling: str) -> None:
    assert Field("x", spelling).spelling == spelling


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("  list< int64 >", "list<int64>"),
        ("map<string,list<float32 not null>not null,sorted>", "map<string, list<float32 not null> not null, sorted>"),
        ('struct<"a":int8,"b c":int8,"":int8>', 'struct<a: int8, "b c": int8, "": int8>'),
        ("struct<>", "struct<>"),
        ("fixed_size_list<float32>[ 768 ]", "fixed_size_list<float32>[768]"),
        ("timestamp[us,UTC]", "timestamp[us, UTC]"),
        ("list<tensor<int8>[?,3]>", "list<tensor<int8>[?, 3]>"),
        (int, "int64"),
        (float, "float64"),
        (bool, "bool"),
        (str, "string"),
        (bytes, "binary"),
        (np.float16, "float16"),
        (np.dtype("uint8"), "uint8"),
        (np.dtype("U7"), "string"),
        (np.dtype("datetime64[us]"), "timestamp[us]"),
        (pa.list_(pa.int8(), 3), "fixed_size_list<int8>[3]"),
        (pa.list_(pa.field("element", pa.int8(), nullable=False)), "list<int8 not null>"),
    ],
)
def test_what_may_be_given_as_a_dtype_is_kept_as_its_canonical_spelling(given: object, canonical: str) -> None:
    assert Field("x", given).dtype == canonical


def test_a_tensor_spelling_becomes_dtype_and_shape() -> None:
    assert Field("x", "tensor<float32>[?, 64]") == Field("x", "float32", (None, 64))
    assert Field("x", pa.fixed_shape_tensor(pa.int8(), (2, 3))) == Field("x", "int8", [2, np.int64(3)])


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("in64", "unknown type 'in64'; did you mean 'int64'?"),
        ("list<flaot32>", "unknown type 'flaot32' in 'list<flaot32>'; did you mean 'float32'?"),
        ("str", "unknown type 'str'; did you mean 'string'?"),
        ("list[int64]", "cannot read the type 'list[int64]': expected '<', got '[int64]'"),
        ("list<int64", "cannot read the type 'list<int64': expected '>', got the end"),
        ("list<int64>>", "cannot read the type 'list<int64>>': expected the end, got '>'"),
        ("", "cannot read the type '': expected a type, got the end"),
        ("timestamp", "cannot read the type 'timestamp': expected a unit such as [us], got the end"),
        ("timestamp[h]", "cannot read the type 'timestamp[h]': Invalid time unit: 'h'"),
        ("map<string>", "cannot read the type 'map<string>': expected ',', got '>'"),
        (
            "map<string, int8, srted>",
            "cannot read the type 'map<string, int8, srted>': expected 'sorted', got 'srted>'",
        ),
        ("struct<a int8>", "cannot read the type 'struct<a int8>': expected ':', got 'int8>'"),
        ("struct<: int8>", "cannot read the type 'struct<: int8>': expected a field name, got ': int8>'"),
        (
            "struct<a: int8, a: int8>",
            "cannot read the type 'struct<a: int8, a: int8>': a struct has two fields named 'a'",
        ),
        ("decimal128<x, 2>", "cannot read the type 'decimal128<x, 2>': expected a number, got 'x, 2>'"),
        ("decimal128<50, 2>", "cannot read the type 'decimal128<50, 2>': precision should be between 1 and 38"),
        ("tensor<string>[3]", "cannot read the type 'tensor<string>[3]': a tensor holds numbers or bools, got string"),
        ("tensor<int8>[]", "cannot read the type 'tensor<int8>[]': a tensor has at least one dimension"),
        ("tensor<int8>[-1]", "cannot read the type 'tensor<int8>[-1]': expected a size or '?', got '-1]'"),
        (
            "tensor<int8>[65536, 65536]",
            "cannot read the type 'tensor<int8>[65536, 65536]': 4294967296 values are more than a tensor can have",
        ),
        ("sparse<bool>[3]", "cannot read the type 'sparse<bool>[3]': a sparse vector holds numbers, got bool"),
        ("sparse<int8>[?]", "cannot read the type 'sparse<int8>[?]': expected one size, got [?]"),
        (
            "sparse<int8>[2147483648]",
            "cannot read the type 'sparse<int8>[2147483648]': a sparse vector is shorter than 2**31",
        ),
        (
            "fixed_size_list<int8>[4294967296]",
            "cannot read the type 'fixed_size_list<int8>[4294967296]': value too large to convert to int",
        ),
        (np.dtype("complex64"), "Arrow has no type for the NumPy dtype dtype('complex64'): Unsupported numpy type 14"),
        (
            5,
            "not a type: 5; give a spelling such as 'int64' or 'list<string>', a pyarrow.DataType, a NumPy dtype, "
            "or one of bool, int, float, str, bytes",
        ),
    ],
)
def test_a_type_that_cannot_be_read_says_where_and_what_was_expected(dtype: object, expected: str) -> None:
    assert message(Field, "x", dtype) == f"column 'x': {expected}"


def test_a_word_near_no_type_lists_the_types() -> None:
    assert message(Field, "x", "qqq").startswith("column 'x': unknown type 'qqq'; known types: bool, int8, int16, ")


def test_a_spelling_nested_without_end_is_refused() -> None:
    assert "cannot read the type" in message(Field, "x", "list<" * 5000)


def test_a_field_refuses_what_cannot_describe_a_column() -> None:
    assert re.search(r"'x'.*'tensor<string>\[3\]'", message(Field, "x", "string", (3,)))
    assert "'x'" in message(Field, "x", "int8", (3, -1))
    assert message(Field, "x", "int8", (True,)).endswith("got True")
    assert message(Field, "x", "int8", (2.5,)).endswith("got 2.5")
    assert "'x'" in message(Field, "x", "null", nullable=False)
    assert re.search(r"\b3\b", message(Field, 3, "int8"))
    assert "'x'" in message(Field, "x", "int8", role=1)
    assert re.search(r"'x'.*'no'", message(Field, "x", "int8", nullable="no"))


# --- to Arrow and back ---


@quick
@given(fields)
def test_a_field_survives_arrow(field: Field) -> None:
    assert Field.from_arrow(field.to_arrow()) == field


@quick
@given(schemas)
def test_a_schema_survives_arrow_bytes(schema: Schema) -> None:
    assert Schema.from_arrow(pa.ipc.read_schema(schema.to_arrow().serialize())) == schema


@pytest.mark.parametrize(
    "arrow",
    [
        pa.string(),
        pa.decimal128(10, 2),
        pa.dictionary(pa.int8(), pa.large_string(), ordered=True),
        pa.list_(pa.field("item", pa.float32(), nullable=False), 768),
        pa.large_list(pa.map_(pa.string(), pa.field("value", pa.int8(), nullable=False), keys_sorted=True)),
        pa.struct([pa.field("not null", pa.time32("s"), nullable=False), pa.field('"', pa.duration("ns"))]),
        pa.list_view(pa.timestamp("ms", tz="Europe/Berlin")),
        pa.run_end_encoded(pa.int16(), pa.binary(4)),
        pa.fixed_shape_tensor(pa.bool_(), (2, 0)),
        pa.list_(pa.fixed_shape_tensor(pa.float32(), (2, 2))),
        pa.uuid(),
    ],
    ids=str,
)
def test_an_arrow_type_comes_back_as_it_was(arrow: pa.DataType) -> None:
    assert Field.from_arrow(pa.field("x", arrow)).to_arrow().type == arrow


@pytest.mark.parametrize(
    ("arrow", "expected"),
    [
        (
            pa.dense_union([pa.field("a", pa.int8())]),
            "Arrow type dense_union<a: int8=0> is not supported: "
            "cast the column to one of the types penstock can spell",
        ),
        (
            pa.fixed_shape_tensor(pa.int8(), (2, 3), permutation=[1, 0]),
            "Arrow type extension<arrow.fixed_shape_tensor[value_type=int8, shape=[2,3], permutation=[1,0]]> "
            "is not supported: its dimensions are permuted; store it in row-major order",
        ),
        (
            pa.json_(pa.large_string()),
            "Arrow type extension<arrow.json> is not supported: it is stored as large_string, only string is known",
        ),
        (
            pa.opaque(pa.int8(), "point", "somebody"),
            "Arrow type extension<arrow.opaque[storage_type=int8, type_name=point, vendor_name=somebody]> "
            "is not supported: cast the column to one of the types penstock can spell",
        ),
    ],
    ids=["union", "permuted", "json", "opaque"],
)
def test_an_arrow_type_without_a_spelling_is_named(arrow: pa.DataType, expected: str) -> None:
    assert message(Field.from_arrow, pa.field("x", arrow)) == f"column 'x': {expected}"


def test_fixed_shapes_are_the_canonical_extension_type() -> None:
    assert Field("x", "float32", (3, 4)).to_arrow().type == pa.fixed_shape_tensor(pa.float32(), (3, 4))


def test_variable_shapes_have_the_canonical_storage_and_their_shape_in_metadata() -> None:
    arrow = Field("x", "float32", (None, 64), role="frames").to_arrow()
    assert arrow.type == pa.struct([("data", pa.list_(pa.float32())), ("shape", pa.list_(pa.int32(), 2))])
    assert arrow.metadata == {b"penstock.shape": b"[null, 64]", b"penstock.role": b"frames"}


def test_sparse_vectors_keep_their_size_in_metadata() -> None:
    arrow = Field("x", "sparse<float32>[10000]").to_arrow()
    assert arrow.type == pa.struct([("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float32()))])
    assert arrow.metadata == {b"penstock.sparse": b"10000"}


def canonical_tensor(parameters: str) -> pa.Field:
    storage = pa.struct([("data", pa.list_(pa.int8())), ("shape", pa.list_(pa.int32(), 2))])
    metadata = {"ARROW:extension:name": "arrow.variable_shape_tensor", "ARROW:extension:metadata": parameters}
    return pa.field("x", storage, metadata=metadata)


@pytest.mark.parametrize(
    "read", [lambda field: field, lambda field: pa.ipc.read_schema(pa.schema([field]).serialize())[0]]
)
def test_canonical_variable_shapes_of_other_programs_are_understood(read: Callable[[pa.Field], pa.Field]) -> None:
    assert Field.from_arrow(read(canonical_tensor('{"uniform_shape": [null, 3]}'))) == Field("x", "int8", (None, 3))
    assert Field.from_arrow(read(canonical_tensor("{}"))) == Field("x", "int8", (None, None))
    assert Field.from_arrow(read(canonical_tensor('{"permutation": [0, 1]}'))) == Field("x", "int8", (None, None))
    assert "its dimensions are permuted" in message(Field.from_arrow, read(canonical_tensor('{"permutation": [1, 0]}')))


def test_metadata_that_outlived_its_column_is_ignored() -> None:
    for dtype in ("int8", "struct<indices: list<int64>, values: list<int8>>", "struct<indices: int8, values: int8>"):
        stale = Field("x", dtype).to_arrow().with_metadata({"penstock.sparse": "7", "penstock.shape": "[null]"})
        assert Field.from_arrow(stale) == Field("x", dtype)


def test_identity_permutations_and_dimension_names_do_not_make_another_type() -> None:
    named = pa.fixed_shape_tensor(pa.int8(), (2, 3), dim_names=["h", "w"], permutation=[0, 1])
    assert Field.from_arrow(pa.field("x", named)) == Field("x", "int8", (2, 3))


def test_roles_shapes_and_sizes_survive_a_parquet_file() -> None:
    schema = Schema(
        [
            Field("vector", "float32", (2,), role="embedding", nullable=False),
            Field("frames", "float32", (None, 2)),
            Field("terms", "list<sparse<int8>[9]>"),
        ]
    )
    row = {"vector": [1, 2], "frames": [[3, 4]], "terms": [{"indices": [8], "values": [1]}]}
    file = io.BytesIO()
    pq.write_table(pa.Table.from_batches([from_rows([row], schema)]), file)
    assert Schema.from_arrow(pq.read_table(file).schema) == schema


# --- the schema as a collection ---


def test_a_schema_is_an_ordered_collection_of_fields() -> None:
    a, b = Field("a", "int8"), Field("b", "string")
    schema = Schema([a, b])
    assert (len(schema), list(schema), schema.names, schema["b"]) == (2, [a, b], ["a", "b"], b)
    assert "a" in schema
    assert "c" not in schema
    assert schema == Schema({"a": np.int8, "b": str}) != Schema([b, a])
    assert hash(schema) == hash(Schema([a, b]))
    assert schema.select(["b"]) == Schema([b])
    assert schema.select(["b", "a"]).names == ["b", "a"]
    assert schema.with_field(Field("a", "int64")) == Schema([Field("a", "int64"), b])
    assert schema.with_field(Field("c", "int64")).names == ["a", "b", "c"]
    assert str(Schema([a, Field("c", "int8", (2,), nullable=False)])) == "a: int8\nc: tensor<int8>[2] not null"


def test_fields_and_schemas_are_values() -> None:
    schema = Schema([Field("x", "float32", (None, 64), role="frames")])
    assert pickle.loads(pickle.dumps(schema)) == schema  # noqa: S301
    assert dataclasses.replace(schema["x"], name="y") == Field("y", "float32", (None, 64), role="frames")
    with pytest.raises(dataclasses.FrozenInstanceError):
        schema["x"].name = "z"  # type: ignore[misc]


def test_a_schema_refuses_doubles_strangers_and_unknown_names() -> None:
    a = Field("a", "int8")
    assert "'a'" in message(Schema, [a, a])
    assert re.search(r"'a'.*Field\(name, dtype\)", message(Schema, ["a"]))
    assert re.search(r"'txet'.*'text'", message(Schema({"text": str}).select, ["txet"]))


@quick
@given(schemas)
def test_a_schema_survives_json(schema: Schema) -> None:
    again = Schema.from_dict(json.loads(json.dumps(schema.to_dict())))
    assert again == schema
    assert again.fingerprint() == schema.fingerprint()


def test_a_dict_of_another_version_or_shape_is_refused() -> None:
    good = Schema({"x": "int8"}).to_dict()
    assert good == {"version": 1, "fields": [{"name": "x", "dtype": "int8"}]}
    assert re.search(r"version 2\b.*version 1\b", message(Schema.from_dict, {**good, "version": 2}))
    assert "version 1" in message(Schema.from_dict, {})
    assert "fields" in message(Schema.from_dict, {"version": 1})
    assert re.search(
        r"'dytpe'.*'dtype'", message(Schema.from_dict, {"version": 1, "fields": [{"name": "x", "dytpe": "int8"}]})
    )
    assert "'name': 'x'" in message(Schema.from_dict, {"version": 1, "fields": [{"name": "x"}]})


def test_the_fingerprint_is_the_same_on_every_machine() -> None:
    schema = Schema([Field("x", "float32", (None, 64), role="frames"), Field("é", "list<int64>", nullable=False)])
    assert schema.fingerprint() == "a5929d2a11d664d1"


def test_the_fingerprint_sees_every_part_of_a_field_and_their_order() -> None:
    x, y = Field("x", "int8"), Field("y", "int8")
    variants = [
        [x],
        [x, y],
        [y, x],
        [Field("x", "int16")],
        [Field("x", "int8", (1,))],
        [Field("x", "int8", role="label")],
        [Field("x", "int8", nullable=False)],
    ]
    assert len({Schema(variant).fingerprint() for variant in variants}) == len(variants)


# --- validate ---


SCHEMA = Schema(
    [
        Field("id", "int64", nullable=False),
        Field("text", "string"),
        Field("image", "uint8", (2, 3)),
        Field("frames", "float32", (None, 2)),
        Field("terms", "sparse<float32>[5]"),
    ]
)
ROW = {"id": 1, "text": "a", "image": np.zeros((2, 3)), "frames": [[1, 2]], "terms": ([0, 4], [1, 2])}


def test_a_batch_that_fits_passes_in_any_order_of_columns() -> None:
    batch = from_rows([ROW, {"id": 2}], SCHEMA)
    SCHEMA.validate(batch)
    SCHEMA.validate(batch.select(batch.schema.names[::-1]))
    SCHEMA.validate(through_ipc(batch).slice(1))
    SCHEMA.validate(batch.slice(0, 0))


def test_a_batch_that_lost_its_metadata_still_passes() -> None:
    batch = from_rows([ROW], SCHEMA)
    SCHEMA.validate(pa.RecordBatch.from_arrays(batch.columns, batch.schema.names))


def test_all_problems_of_a_batch_are_listed_at_once() -> None:
    batch = pa.record_batch(
        {
            "id": pa.array([1, None, None]),
            "txet": pa.array(["a", "b", "c"]),
            "image": types.from_numpy({"image": np.zeros((3, 3, 2), np.uint8)})["image"],
            "frames": pa.array([1.0, 2.0, 3.0]),
        }
    )
    said = message(SCHEMA.validate, batch)
    for name in ("text", "terms", "txet", "id", "image", "frames"):
        assert f"column '{name}'" in said
    assert re.search(r"'id'.*row 1\b", said)
    assert re.search(r"'image'.*uint8>\[2, 3\].*uint8>\[3, 2\]", said)
    assert re.search(r"'frames'.*float32>\[\?, 2\].*float64", said)


def test_a_column_that_is_there_is_not_suggested_for_another() -> None:
    batch = pa.record_batch({"text": ["a"], "text2": ["b"]})
    assert "'text2'" in message(Schema({"text": str}).validate, batch)


def test_a_column_that_is_there_twice_is_a_problem() -> None:
    twice = pa.RecordBatch.from_arrays([pa.array([1])] * 2, ["x", "x"])
    assert "'x'" in message(Schema({"x": "int64"}).validate, twice)
    assert "'x'" in message(to_rows, twice)


def test_a_column_of_an_unsupported_type_is_a_problem_not_a_crash() -> None:
    union = pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])])
    assert message(Schema({"x": "int64"}).validate, pa.record_batch({"x": union})).startswith(
        "column 'x': Arrow type dense_union<"
    )


def test_a_sparse_vector_of_another_size_is_a_problem() -> None:
    batch = from_rows([{"terms": ([0], [1])}], Schema({"terms": "sparse<float32>[7]"}))
    assert re.search(
        r"'terms'.*sparse<float32>\[5\], got sparse<float32>\[7\]", message(SCHEMA.select(["terms"]).validate, batch)
    )


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (([1, 5], [1, 2]), "column 'terms': row 1: index 5 is outside a vector of size 5"),
        (([-1], [1]), "column 'terms': row 1: index -1 is outside a vector of size 5"),
        (([1, 2, 1], [1, 2, 3]), "column 'terms': row 1: index 1 is there more than once"),
        (([1, 2], [1]), "column 'terms': row 1: 2 indices for 1 values"),
        (
            ([1, None], [1, 2]),
            "column 'terms': inside its values: 1 null, the first at value 1, and NumPy has no null; "
            "fill or drop them first",
        ),
    ],
)
def test_sparse_vectors_that_make_no_sense_are_named_by_row(cell: Any, expected: str) -> None:
    kind = SCHEMA["terms"].to_arrow().type
    array = pa.array([None, dict(zip(("indices", "values"), cell))], kind)
    assert message(SCHEMA.select(["terms"]).validate, pa.record_batch({"terms": array})) == expected
    assert message(from_rows, [{}, {"terms": cell}], SCHEMA.select(["terms"])) == expected


@pytest.mark.parametrize(
    ("shape", "given"), [((None, 2), [1, 3]), ((None, 2), [1, 2]), ((3, None), [2, 2]), ((None, None), [-2, -2])]
)
def test_variable_tensors_whose_values_do_not_fill_their_shape_are_named_by_row(shape: Any, given: list[int]) -> None:
    field = Field("x", "float32", shape)
    array = pa.array([None, {"data": [1.0, 2.0, 3.0, 4.0], "shape": given}], field.to_arrow().type)
    wanted = field.spelling.removeprefix("tensor<float32>")
    expected = f"row 1: expected a tensor of shape {wanted}, got {given} with 4 values"
    assert message(Schema([field]).validate, pa.record_batch({"x": array})) == f"column 'x': {expected}"
    assert message(to_numpy, array, field) == expected


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        ("list<int64 not null>", [1], [1, None]),
        ("struct<a: int64 not null>", {"a": 1}, {"a": None}),
        ("map<string, int64 not null>", [("a", 1)], [("a", None)]),
        ("map<struct<a: int8 not null>, int8>", [({"a": 1}, 1)], [({"a": None}, 1)]),
        ("list<struct<a: fixed_size_list<int8 not null>[1]>>", [{"a": [1]}, None], [{"a": [None]}]),
    ],
)
def test_nulls_inside_values_are_found_where_none_are_allowed(dtype: str, good: Any, bad: Any) -> None:
    schema = Schema({"x": dtype})
    batch = from_rows([{"x": good}, {"x": None}], schema)
    schema.validate(batch)
    expected = f"column 'x': nulls inside values where {dtype} allows none"
    assert message(from_rows, [{"x": good}, {"x": bad}], schema) == expected
    array = pa.array([bad, good], schema["x"].to_arrow().type)
    assert message(schema.validate, pa.record_batch({"x": array})) == expected
    schema.validate(pa.record_batch({"x": array[1:]}))


def test_validate_takes_batches_and_mappings_only() -> None:
    assert "RecordBatch" in message(SCHEMA.validate, [1])


ARRAYS = {
    "id": np.arange(4),
    "text": np.array(["a", None, "c", "d"], object),
    "image": np.zeros((4, 2, 3), np.uint8),
    "frames": np.zeros((4, 9, 2), np.float32),
    "terms": np.array([([0], [1.0]), None, ([], []), ([4], [2.0])], object),
}


def test_arrays_that_fit_pass_whatever_their_variable_dimensions() -> None:
    SCHEMA.validate(ARRAYS)
    SCHEMA.validate(ARRAYS | {"frames": np.zeros((4, 0, 2), np.float32)})
    ragged_frames = np.empty(4, object)
    ragged_frames[:2] = np.zeros((3, 2), np.float32), np.zeros((1, 2), np.float32)
    SCHEMA.validate(ARRAYS | {"frames": ragged_frames, "text": np.array(list("abcd"))})


def test_all_problems_of_a_mapping_of_arrays_are_listed_at_once() -> None:
    arrays = ARRAYS | {
        "id": np.arange(4, dtype=np.float32),
        "txet": ARRAYS["text"],
        "image": np.zeros((5, 3, 3), np.uint8),
        "frames": np.zeros((4, 2, 9), np.float32),
        "terms": np.array([None, ([7], [1.0]), None, None], object),
    }
    del arrays["text"]
    said = message(SCHEMA.validate, arrays)
    for name in ("text", "txet", "id", "image", "frames", "terms"):
        assert f"column '{name}'" in said
    assert re.search(r"'id'.*int64.*float32", said)
    assert re.search(r"'image'.*uint8>\[2, 3\].*uint8>\[3, 3\]", said)
    assert re.search(r"'frames'.*float32>\[\?, 2\].*float32>\[2, 9\]", said)
    assert re.search(r"'terms'.*row 1\b.*\b7\b", said)
    assert re.search(r"'id'.*\b4\b.*'image'.*\b5\b", said)


class OnlyDlpack:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_torch_tensors_and_dlpack_arrays_are_arrays_and_are_not_copied() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6).reshape(2, 3)
    exported = OnlyDlpack(np.arange(2.0))
    batch = from_numpy({"x": tensor, "y": exported}, allow_copy=False)
    assert address(batch["x"]) == tensor.data_ptr()
    assert address(batch["y"]) == exported.array.ctypes.data
    Schema([Field("x", "int64", (3,)), Field("y", "float64")]).validate({"x": tensor, "y": exported})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1, 2], "expected an array, got list; numpy.asarray(...) makes one"),
        (np.array(1), "expected an array whose first dimension is the row, got one without dimensions"),
        (np.ma.array([1]), "NumPy masks are not read; pyarrow.array(...) turns them into nulls"),
        (np.arange(3, dtype=">i4"), "the bytes of >i4 are in the other order; astype makes them native"),
        (
            np.zeros(2, np.complex64),
            "Arrow has no type for the NumPy dtype dtype('complex64'): Unsupported numpy type 14",
        ),
        (np.array([["a"]]), "expected one value per row, got <U1 of shape (1, 1)"),
        (
            np.array([1, "a"], object),
            "row 1: 'a' does not fit the int64 of the rows before; give a schema "
            "(Could not convert 'a' with type str: tried to convert to int64)",
        ),
    ],
)
def test_what_is_no_array_of_rows_is_refused(value: Any, expected: str) -> None:
    assert message(from_numpy, {"x": value}) == f"column 'x': {expected}"


def test_torch_tensors_that_numpy_cannot_read_are_refused() -> None:
    torch = pytest.importorskip("torch")
    assert re.search(r"'x'.*numpy\(\)", message(from_numpy, {"x": torch.zeros(2, requires_grad=True)}))
    assert re.search(r"'x'.*NumPy", message(from_numpy, {"x": torch.zeros(2, dtype=torch.bfloat16)}))


def test_a_float64_array_is_not_taken_for_a_column_of_strings() -> None:
    # numpy.dtype("float64") == None was true for years, since None means float64 to numpy.dtype.
    assert re.search(r"'x'.*\bfloat64\b", message(Schema({"x": str}).validate, {"x": np.zeros(2)}))


# --- NumPy both ways ---


numeric_arrays = st.sampled_from(NUMBERS).flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))
)


@quick
@given(numeric_arrays)
def test_numbers_go_to_arrow_and_back_unchanged_and_uncopied(array: np.ndarray) -> None:
    batch = from_numpy({"x": array}, allow_copy=False)
    batch.validate(full=True)
    again = to_numpy(batch["x"], allow_copy=False)
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert again.tobytes() == array.tobytes()
    assert array.size == 0 or again.ctypes.data == array.ctypes.data
    assert Field.from_arrow(batch.schema.field("x")) == Field("x", array.dtype, array.shape[1:] or None)


@quick
@given(numeric_arrays, st.data())
def test_a_slice_of_a_column_is_a_view_of_the_same_rows(array: np.ndarray, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(array)))
    view = to_numpy(from_numpy({"x": array}).slice(start)["x"], allow_copy=False)
    assert view.tobytes() == array[start:].tobytes()
    assert view.size == 0 or view.ctypes.data == array[start:].ctypes.data


@pytest.mark.parametrize(
    ("field", "array"),
    [
        (Field("x", "timestamp[us, UTC]"), np.array(["2024-02-29T12:00", "1969-12-31"], "M8[us]")),
        (Field("x", "duration[ms]"), np.array([1, -1], "m8[ms]")),
        (Field("x", "float32", (2, 3)), np.arange(12, dtype=np.float32).reshape(2, 2, 3)),
        (Field("x", "fixed_size_list<float32>[3]"), np.arange(6, dtype=np.float32).reshape(2, 3)),
        (Field("x", "fixed_size_list<fixed_size_list<int8>[2]>[3]"), np.arange(12, dtype=np.int8).reshape(2, 3, 2)),
    ],
    ids=lambda value: str(value) if isinstance(value, Field) else "",
)
def test_a_schema_decides_what_an_array_becomes_and_memory_stays_shared(field: Field, array: np.ndarray) -> None:
    batch = from_numpy({"x": array}, Schema([field]), allow_copy=False)
    assert batch.schema == Schema([field]).to_arrow()
    view = to_numpy(batch["x"], field, allow_copy=False)
    assert view.ctypes.data == array.ctypes.data == address(batch["x"])
    assert np.array_equal(view, array)
    assert not view.flags.writeable


def test_a_dense_array_becomes_variable_tensors_without_copying_its_values() -> None:
    array = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    field = Field("x", "float32", (None, 2))
    batch = from_numpy({"x": array}, Schema([field]), allow_copy=False)
    batch.validate(full=True)
    assert batch["x"].field("data").values.buffers()[1].address == array.ctypes.data
    views = to_numpy(batch["x"], field, allow_copy=False)
    assert [view.tolist() for view in views] == array.tolist()
    assert [view.ctypes.data for view in views] == [row.ctypes.data for row in array]


def test_variable_tensors_of_an_ipc_file_are_views_of_the_file() -> None:
    field = Field("x", "int16", (None, None))
    rows = [{"x": [[1, 2, 3]]}, {"x": [[4], [5]]}, {"x": np.zeros((0, 7))}]
    column = through_ipc(from_rows(rows, Schema([field])))["x"]
    values, offsets = ragged(column, allow_copy=False)
    assert (values.tolist(), offsets.tolist()) == ([1, 2, 3, 4, 5], [0, 3, 5, 5])
    assert values.ctypes.data == column.field("data").values.buffers()[1].address
    views = to_numpy(column, field, allow_copy=False)
    assert [view.tolist() for view in views] == [[[1, 2, 3]], [[4], [5]], []]
    assert views[2].shape == (0, 7)
    assert views[1].ctypes.data == values[3:].ctypes.data


def test_canonical_variable_tensors_of_other_programs_become_arrays_and_rows() -> None:
    field = canonical_tensor('{"uniform_shape": [null, 2]}')
    storage = pa.array([{"data": [1, 2, 3, 4], "shape": [2, 2]}, None], field.type)
    batch = through_ipc(pa.record_batch([storage], schema=pa.schema([field])))
    assert isinstance(batch["x"].type, pa.BaseExtensionType)
    Schema([Field("x", "int8", (None, 2))]).validate(batch)
    assert to_numpy(batch["x"])[0].tolist() == [[1, 2], [3, 4]]
    assert ragged(batch["x"][:1])[0].tolist() == [1, 2, 3, 4]
    assert to_rows(batch)[0]["x"].tolist() == [[1, 2], [3, 4]]
    assert to_rows(batch)[1] == {"x": None}


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_ragged_gives_views_of_values_and_offsets(kind: Callable[[pa.DataType], pa.DataType]) -> None:
    column = pa.array([[1, 2], [], [3]], kind(pa.int32()))
    values, offsets = ragged(column, allow_copy=False)
    assert (values.tolist(), offsets.tolist()) == ([1, 2, 3], [0, 2, 2, 3])
    assert values.ctypes.data == column.values.buffers()[1].address
    assert offsets.ctypes.data == column.buffers()[1].address


def test_ragged_offsets_of_a_slice_start_at_zero_and_its_values_are_still_a_view() -> None:
    column = pa.array([[1, None], [2], [3, 4]])
    values, offsets = ragged(column[1:])
    assert (values.tolist(), offsets.tolist()) == ([2, 3, 4], [0, 1, 3])
    assert values.ctypes.data == column.values.buffers()[1].address + 2 * 8


@pytest.mark.parametrize("dtype", ["list<int64 not null>", "large_list<int8 not null>", "map<string, int8 not null>"])
def test_no_rows_at_all_need_no_offsets(dtype: str) -> None:
    schema = Schema({"x": dtype})
    kind = schema["x"].to_arrow().type
    column = pa.Array.from_buffers(kind, 0, [None, None], children=[pa.array([], kind.field(0).type)])
    schema.validate(pa.RecordBatch.from_arrays([column], schema=schema.to_arrow()))
    assert to_numpy(column).shape == (0,)
    if not dtype.startswith("map"):
        values, offsets = ragged(column)
        assert (values.shape, offsets.tolist()) == ((0,), [0])


def test_lists_become_arrays_of_views_with_none_for_null() -> None:
    column = pa.array([[1, 2], None, []])
    rows = to_numpy(column)
    assert rows.dtype == object
    assert rows[0].tolist() == [1, 2]
    assert rows[1] is None
    assert rows[2].tolist() == []
    nested = to_numpy(pa.array([[["a"], ["b", None]], []]))
    assert [inner.tolist() for inner in nested[0]] == [["a"], ["b", None]]


def test_lists_of_tensors_become_arrays_of_tensors() -> None:
    inner = from_numpy({"x": np.arange(8, dtype=np.int8).reshape(2, 2, 2)})["x"]
    column = pa.ListArray.from_arrays(pa.array([0, 0, 2], pa.int32()), inner)
    assert to_numpy(column, allow_copy=False)[1].tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_what_numpy_stores_otherwise_is_copied_and_equal() -> None:
    days = np.array(["2024-02-29", "1969-12-31"], "M8[D]")
    batch = from_numpy({"flag": np.array([True, False]), "day": days, "mask": np.eye(2, dtype=bool)})
    assert to_numpy(batch["flag"]).tolist() == [True, False]
    assert np.array_equal(to_numpy(batch["day"]), days)
    assert to_numpy(batch["mask"]).tolist() == np.eye(2, dtype=bool).tolist()
    assert to_numpy(pa.array(["a", None])).tolist() == ["a", None]
    assert to_numpy(pa.array([{"a": 1}, {"a": 2}])).tolist() == [{"a": 1}, {"a": 2}]
    assert to_numpy(pa.array([["a"], ["b"]], pa.list_(pa.string(), 1))).tolist() == [["a"], ["b"]]
    assert to_numpy(pa.array([[1, 2], [3, 4]], pa.list_view(pa.int8()))).tolist() == [[1, 2], [3, 4]]


def test_chunks_are_joined_and_one_chunk_is_a_view() -> None:
    column = pa.array([1, 2])
    assert to_numpy(pa.chunked_array([column, column])).tolist() == [1, 2, 1, 2]
    assert to_numpy(pa.chunked_array([], pa.int64()), allow_copy=False).tolist() == []
    assert to_numpy(pa.chunked_array([column]), allow_copy=False).ctypes.data == address(column)


TERMS = Field("x", "sparse<float32>[3]")


@pytest.mark.parametrize(
    ("column", "field", "expected"),
    [
        (pa.array([True]), None, "a view of bool is impossible: NumPy stores it in another width than Arrow"),
        (
            pa.array([dt.date(2024, 1, 1)]),
            None,
            "a view of date32 is impossible: NumPy stores it in another width than Arrow",
        ),
        (pa.array(["a"]), None, "a view of string is impossible: it has no NumPy dtype, only objects"),
        (pa.array([["a"]]), None, "a view of string is impossible: it has no NumPy dtype, only objects"),
        (pa.array([[1], None]), None, "1 null, the first in row 1, and NumPy has no null; fill or drop them first"),
        (
            pa.chunked_array([[1], [2]]),
            None,
            "a view is impossible: the column is in 2 chunks; see combine_chunks()",
        ),
        (
            sparse_from_pairs([([0], [1])], TERMS),
            TERMS,
            "a view of sparse<float32>[3] is impossible: the zeros are not stored",
        ),
        (
            from_rows([{"x": None}], Schema([Field("x", "int8", (None,))]))["x"],
            Field("x", "int8", (None,)),
            "1 null, the first in row 0, and NumPy has no null; fill or drop them first",
        ),
    ],
)
def test_a_copy_that_was_not_allowed_is_an_error_that_says_why(column: Any, field: Field | None, expected: str) -> None:
    to_numpy(column.drop_null(), field)
    assert message(to_numpy, column, field, allow_copy=False) == expected


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.arange(6)[::2], "a view is impossible: the array is not in C order"),
        (np.zeros((2, 3)).T, "a view is impossible: the array is not in C order"),
        (np.array([True]), "a view of bool is impossible: NumPy stores it in another width than Arrow"),
        (np.array(["a"]), "a view is impossible: Arrow cannot share values of <U1"),
        (np.array([None]), "a view is impossible: Arrow cannot share values of object"),
    ],
)
def test_an_array_that_cannot_be_shared_is_copied_or_an_error_that_says_why(array: np.ndarray, expected: str) -> None:
    assert to_numpy(from_numpy({"x": array})["x"]).tolist() == array.tolist()
    assert message(from_numpy, {"x": array}, allow_copy=False) == f"column 'x': {expected}"


def test_nulls_have_no_place_in_an_array_of_numbers() -> None:
    assert re.search(r"row 1\b.*NumPy", message(to_numpy, pa.array([1, None, None])))
    assert to_numpy(pa.array([None, 1, 2])[1:], allow_copy=False).tolist() == [1, 2]
    tensors = from_rows([{"x": [1, 2]}, {"x": [3, None]}], Schema([Field("x", "int8", (2,))]))["x"]
    assert "NumPy" in message(to_numpy, tensors)


def test_a_column_that_is_not_what_the_field_says_is_refused() -> None:
    tensors = from_numpy({"x": np.zeros((2, 2, 3), np.int8)})["x"]
    assert "tensor<int8>[3, 2], got tensor<int8>[2, 3]" in message(to_numpy, tensors, Field("x", "int8", (3, 2)))
    assert "int64" in message(to_numpy, pa.array([1]), Field("x", "int8"))
    assert to_numpy(tensors.storage, Field("x", "int8", (3, 2))).shape == (2, 3, 2)
    assert "int64" in message(ragged, pa.array([1]))
    assert re.search(r"row 1\b.*NumPy", message(ragged, pa.array([[1], None])))


def test_arrays_of_different_lengths_make_no_batch() -> None:
    assert re.search(r"'x'.*'y'", message(from_numpy, {"x": np.zeros(2), "y": np.zeros(3)}))


# --- rows ---


cells: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int8": st.integers(-128, 127),
    "uint64": st.integers(0, 2**64 - 1),
    "float64": st.floats(allow_nan=False),
    "string": st.text(max_size=5),
    "large_binary": st.binary(max_size=5),
    "timestamp[us, UTC]": st.datetimes(dt.datetime(1900, 1, 1), timezones=st.just(dt.UTC)),
    "decimal128<10, 2>": st.decimals(-99999, 99999, places=2),
    "list<int64>": st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), max_size=3),
    "fixed_size_list<string>[2]": st.lists(st.text(max_size=2), min_size=2, max_size=2),
    "map<string, list<int8>>": st.lists(
        st.tuples(st.text(max_size=2), st.lists(st.integers(0, 9), max_size=2)), max_size=2
    ),
    "struct<a: int64, b: list<string>>": st.fixed_dictionaries(
        {"a": st.none() | st.integers(0, 9), "b": st.lists(st.text(max_size=2), max_size=2)}
    ),
    "dictionary<int32, string>": st.sampled_from(["x", "y"]),
}


@st.composite
def tables(draw: st.DrawFn) -> tuple[Schema, list[dict[str, Any]]]:
    dtypes = draw(st.lists(st.sampled_from(sorted(cells)), min_size=1, max_size=4))
    columns = {f"c{number}": dtype for number, dtype in enumerate(dtypes)}
    row = st.fixed_dictionaries({name: st.none() | cells[dtype] for name, dtype in columns.items()})
    return Schema(columns), draw(st.lists(row, max_size=6))


@quick
@given(tables())
def test_rows_become_a_batch_and_the_same_rows_again(table: tuple[Schema, list[dict[str, Any]]]) -> None:
    schema, rows = table
    batch = from_rows(rows, schema)
    batch.validate(full=True)
    schema.validate(batch)
    assert batch.schema == schema.to_arrow()
    assert to_rows(batch) == rows
    assert to_rows(through_ipc(batch).slice(1)) == rows[1:]


@quick
@given(st.lists(st.fixed_dictionaries({}, optional={"a": st.integers(0, 9), "b": st.text(max_size=3)}), max_size=6))
def test_without_a_schema_a_missing_key_is_null_and_every_row_stays(rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(key for row in rows for key in row))
    if rows and not names:
        assert str(len(rows)) in message(from_rows, rows)
    else:
        assert to_rows(from_rows(rows)) == [{name: row.get(name) for name in names} for row in rows]


def test_tensors_and_sparse_vectors_come_back_from_rows() -> None:
    batch = from_rows([ROW, {"id": 2}, ROW], SCHEMA)
    first, empty, last = to_rows(through_ipc(batch))
    assert empty == {"id": 2, "text": None, "image": None, "frames": None, "terms": None}
    assert (first["image"].dtype, first["image"].shape) == (np.uint8, (2, 3))
    assert (first["frames"].dtype, first["frames"].tolist()) == (np.float32, [[1, 2]])
    assert first["terms"] == last["terms"] == {"indices": [0, 4], "values": [1.0, 2.0]}
    again = from_rows([first, empty, last], SCHEMA)
    assert again.equals(batch)


@quick
@given(st.data())
def test_tensors_of_any_shape_survive_rows_and_nulls(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from([*NUMBERS, "bool"]))
    sizes = st.tuples(*(st.integers(0, 3) if size is None else st.just(size) for size in shape))
    cell = sizes.flatmap(lambda shape: npst.arrays(dtype, shape))
    rows = data.draw(st.lists(st.none() | cell, max_size=4))
    batch = from_rows([{"x": row} for row in rows], Schema([Field("x", dtype, shape)]))
    batch.validate(full=True)
    for row, again in zip(rows, to_rows(batch), strict=True):
        if row is None:
            assert again["x"] is None
        else:
            assert (again["x"].dtype, again["x"].shape) == (row.dtype, row.shape)
            assert again["x"].tobytes() == row.tobytes()


def test_a_batch_without_columns_keeps_its_rows() -> None:
    assert to_rows(pa.record_batch({"x": [1, 2]}).select([])) == [{}, {}]
    assert from_rows([]).num_columns == 0


def test_a_late_float_makes_the_column_float_and_late_keys_are_kept() -> None:
    batch = from_rows([{"a": 1, "s": {"x": 1}}, {"a": 2.5, "s": {"y": "late"}}])
    assert batch.schema.field("a").type == pa.float64()
    assert to_rows(batch)[1] == {"a": 2.5, "s": {"x": None, "y": "late"}}


def test_a_row_that_is_no_mapping_or_has_an_unknown_key_is_named() -> None:
    assert re.search(r"row 1\b.*'id'", message(from_rows, [{"id": 1}, ["id"]], SCHEMA))
    assert re.search(r"'txt'.*'text'", message(from_rows, [{"id": 1}, {"id": 2, "txt": ""}], SCHEMA))


@pytest.mark.parametrize(
    ("dtype", "good", "bad", "expected"),
    [
        ("int64", 1, "a", "'a'"),
        ("int8", 1, 300, "int8"),
        ("int64", 2.0, 1.5, "int64"),
        ("int64", 2.0, float("nan"), "int64"),
        (
            "int64",
            Decimal(2),
            Decimal("1.5"),
            "Decimal('1.5')",
        ),
        (
            "timestamp[s]",
            2,
            Fraction(3, 2),
            "timestamp[s]",
        ),
        ("list<int64>", [1], [1, 1.5], "list<int64>"),
        (
            "list<int64>",
            np.array([1.0]),
            np.array([1.5]),
            "list<int64>",
        ),
        (
            "map<string, int8>",
            {"a": 1},
            {"a": 0.5},
            "'a'",
        ),
        (
            "map<int8, string>",
            [(1, "")],
            [(0.5, "")],
            "map<int8, string>",
        ),
        ("dictionary<int8, int64>", 1, 1.5, "dictionary<int8, int64>"),
        (
            "struct<a: int8>",
            {"a": 1},
            {"a": 0.5},
            "'a'",
        ),
        ("struct<a: int8>", (1,), (0.5,), "int8"),
        (
            "struct<a: int8>",
            [("a", 1)],
            [("a", 0.5)],
            "'a'",
        ),
        (
            "run_end_encoded<int32, int64>",
            1,
            1.5,
            "run_end_encoded",
        ),
        ("bool8", 1, 0.5, "bool8"),
        (
            "list<struct<name: string>>",
            [{"name": "x"}],
            [{"nmae": "x"}],
            "'nmae'",
        ),
        ("list<string>", ["ab"], "ab", "'ab'"),
        ("string", "a", 1, "'int'"),
        (
            "sparse<int8>[3]",
            ([0], [1]),
            ([0], [0.5]),
            "sparse<int8>[3]",
        ),
        (
            "sparse<int8>[3]",
            ([0], [1]),
            ([0], [1], 3),
            "sparse<int8>[3]",
        ),
        (
            "tensor<int8>[2]",
            [1, 2],
            [1, 2, 3],
            "tensor<int8>[2]",
        ),
        ("tensor<int8>[?]", [1], [[1]], "tensor<int8>[?]"),
        ("tensor<int8>[?]", [1], ["a"], "'a'"),
        (
            "tensor<int8>[?]",
            [1],
            [1.5],
            "tensor<int8>[?]",
        ),
        (
            "tensor<int8>[1]",
            [1],
            [300],
            "tensor<int8>[1]",
        ),
    ],
)
def test_a_value_that_does_not_fit_is_named_by_column_and_row(dtype: str, good: Any, bad: Any, expected: str) -> None:
    schema = Schema({"x": dtype})
    rows = [{"x": good}, {}, {"x": good}, {"x": bad}, {"x": good}, {"x": bad}]
    assert from_rows(rows[:3], schema).num_rows == 3
    assert str(expected) in message(from_rows, rows, schema)


def test_a_value_that_fits_no_column_is_named_without_a_schema_too() -> None:
    assert re.search(r"'x'.*'a'", message(from_rows, [{"x": 1}, {}, {"x": "a"}]))
    assert message(from_rows, [{"x": np.zeros((2, 2))}]).startswith("column 'x': row 0: array([[0., 0... [0., 0.]])")
    assert "does not fit any column; give a schema" in message(from_rows, [{"x": object()}])


def test_problems_in_several_columns_are_listed_at_once() -> None:
    assert re.search(r"(?s)'id'.*row 1\b.*'text'.*'int'", message(from_rows, [{"id": 1}, {"text": 5}], SCHEMA))


def test_tensors_inside_other_types_are_not_built_from_rows() -> None:
    assert re.search(
        r"'x'.*list<tensor<int8>\[2\]>", message(from_rows, [{"x": [[1, 2]]}], Schema({"x": "list<tensor<int8>[2]>"}))
    )


# --- sparse vectors ---


@quick
@given(npst.arrays(np.float32, npst.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=5)))
def test_sparse_vectors_are_dense_again_as_they_were(matrix: np.ndarray) -> None:
    field = Field("x", f"sparse<float32>[{matrix.shape[1]}]")
    column = sparse_from_dense(matrix)
    assert column.type == field.to_arrow().type
    assert sum(len(cell["indices"]) for cell in column.to_pylist()) == np.count_nonzero(matrix)
    for array in (column, pa.chunked_array([column, column[:0]])):
        assert np.array_equal(sparse_to_dense(array, field), matrix, equal_nan=True)
    assert np.array_equal(to_numpy(column[1:], field), matrix[1:], equal_nan=True)


def test_sparse_vectors_are_made_from_pairs() -> None:
    column = sparse_from_pairs([([2, 0], np.array([1.5, 2.5])), ([], []), None], TERMS)
    assert column.null_count == 1
    assert sparse_to_dense(column[:2], TERMS).tolist() == [[2.5, 0, 1.5], [0, 0, 0]]
    assert "row 0" in message(sparse_from_pairs, [([3], [1])], TERMS)


def test_sparse_columns_that_cannot_be_dense_are_refused() -> None:
    assert re.search(r"\bint64\b.*sparse<float32>\[3\]", message(sparse_to_dense, pa.array([1]), TERMS))
    assert re.search(
        r"list<int32>.*list<float64>> for sparse<float32>\[3\]",
        message(sparse_to_dense, sparse_from_dense(np.ones((1, 3))), TERMS),
    )
    assert re.search(r"row 0\b.*NumPy", message(sparse_to_dense, sparse_from_pairs([None], TERMS), TERMS))
    assert "(3,)" in message(sparse_from_dense, np.zeros(3))
    outside = sparse_from_dense(np.ones((1, 4), np.float32))
    assert "row 0" in message(sparse_to_dense, outside, TERMS)


def test_a_column_of_python_values_refuses_what_pyarrow_would_lose_in_silence() -> None:
    whole = pa.field("n", pa.int64())
    assert pa.array([1, 0.5], whole.type).to_pylist() == [1, 0], "pyarrow has learned to refuse: ours may go"
    assert re.search(r"row 2\b.*\bint64\b", message(to_column, [1, None, 0.5], whole))
    assert message(to_column, [[1], [2, 0.5]], pa.field("n", pa.list_(pa.int8()))).startswith(
        "row 1: expected list<int8>"
    )
    assert message(to_column, ["a", 1], None).startswith("row 1: 1 ")
    assert to_column([1, None, 2.0], whole).equals(pa.array([1, None, 2]))
    assert to_column([1, None, 0.5], None).equals(pa.array([1.0, None, 0.5]))
