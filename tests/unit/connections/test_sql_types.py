"""Types of PostgreSQL, SQLite and DuckDB as Arrow types, and back."""

from __future__ import annotations

import datetime
import json
import secrets
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.servers import PostgresServer

from penstock import Pipeline
from penstock.connections.sql import Database
from penstock.errors import DataError, SchemaError
from penstock.sinks import SqlSink
from penstock.sources import SqlSource

UTC = datetime.UTC
UUID = uuid.UUID("0a27cdf4-c21f-4e4a-bc88-07ebe55478b4")
DAY = datetime.date(2024, 2, 29)
MOMENT = datetime.datetime(2024, 2, 29, 12, 30, 15, 123456)
LONG = Decimal("12345678901234567890123456789012345678901234.5")

# type on the server, a value as SQL, the Arrow type, the value, the type of a table that the sink makes
POSTGRESQL_TYPES: list[tuple[str, str, Any, Any, str]] = [
    ("bool", "true", pa.bool_(), True, "boolean"),
    ("smallint", "-32768", pa.int16(), -32768, "smallint"),
    ("int", "2147483647", pa.int32(), 2147483647, "integer"),
    ("bigint", "-9223372036854775808", pa.int64(), -(1 << 63), "bigint"),
    ("real", "1.5", pa.float32(), 1.5, "real"),
    ("double precision", "'-Infinity'", pa.float64(), float("-inf"), "double precision"),
    ("numeric(10, 2)", "-99999999.99", pa.decimal128(10, 2), Decimal("-99999999.99"), "numeric(10,2)"),
    ("numeric(50, 1)", str(LONG), pa.decimal256(50, 1), LONG, "numeric(50,1)"),
    ("numeric", "1.50", pa.string(), "1.50", "text"),
    ("money", "1234.5", pa.decimal128(20, 2), Decimal("1234.50"), "numeric(20,2)"),
    ("text", "'é''\"\\'", pa.string(), "é'\"\\", "text"),
    ("varchar(5)", "'abc'", pa.string(), "abc", "text"),
    ("char(4)", "'ab'", pa.string(), "ab  ", "text"),
    ("bytea", "'\\x00ff'", pa.binary(), b"\x00\xff", "bytea"),
    ("date", "'2024-02-29'", pa.date32(), DAY, "date"),
    ("time", "'12:30:15.5'", pa.time64("us"), datetime.time(12, 30, 15, 500000), "time without time zone"),
    ("timestamp", f"'{MOMENT}'", pa.timestamp("us"), MOMENT, "timestamp without time zone"),
    (
        "timestamptz",
        f"'{MOMENT}+02'",
        pa.timestamp("us", "UTC"),
        MOMENT.replace(tzinfo=UTC) - datetime.timedelta(hours=2),
        "timestamp with time zone",
    ),
    ("uuid", f"'{UUID}'", pa.uuid(), UUID, "uuid"),
    ("json", "'{\"a\": [1]}'", pa.json_(), '{"a": [1]}', "jsonb"),
    ("jsonb", "'{\"a\": [1]}'", pa.json_(), '{"a": [1]}', "jsonb"),
    ("int[]", "'{1,null,3}'", pa.list_(pa.int32()), [1, None, 3], "integer[]"),
    ("text[]", "'{a,\"b,c\"}'", pa.list_(pa.string()), ["a", "b,c"], "text[]"),
    ("float8[]", "'{}'", pa.list_(pa.float64()), [], "double precision[]"),
    ("numeric[]", "'{1.50,2}'", pa.list_(pa.string()), ["1.50", "2"], "text[]"),
    ("oid", "4000000000", pa.int64(), 4000000000, "bigint"),
    ("oid[]", "'{4000000000}'", pa.list_(pa.int64()), [4000000000], "bigint[]"),
    ("money[]", "'{1.5,-2}'", pa.list_(pa.string()), ["1.50", "-2.00"], "text[]"),
    ("uuid[]", f"'{{{UUID},null}}'", pa.list_(pa.uuid()), [UUID, None], "uuid[]"),
    ("jsonb[]", "array['[1]'::jsonb]", pa.list_(pa.json_()), ["[1]"], "jsonb[]"),
    ("bit(4)", "B'1010'", pa.string(), "1010", "text"),
    ("inet", "'10.0.0.1/8'", pa.string(), "10.0.0.1/8", "text"),
    ("int4range", "'[1,5)'", pa.string(), "[1,5)", "text"),
]


def only_row(source: SqlSource) -> tuple[pa.DataType, list[Any]]:
    batch = source.next_batch(10)
    assert batch is not None
    source.close()
    return batch.schema.field("v").type, batch.column("v").to_pylist()


@pytest.fixture(scope="module")
def typed(postgres: PostgresServer) -> str:
    """A table with a column of every type: the first row has values, the second nulls."""
    name = f"types_{secrets.token_hex(6)}"
    with Database(postgres.url).connect() as connection:
        columns = ", ".join(f"c{at} {kind[0]}" for at, kind in enumerate(POSTGRESQL_TYPES))
        connection.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, {columns})")
        values = ", ".join(kind[1] for kind in POSTGRESQL_TYPES)
        connection.execute(f"INSERT INTO {name} VALUES (1, {values})")
        connection.execute(f"INSERT INTO {name} (id) VALUES (2)")
    return name


def test_each_type_of_postgresql_has_an_arrow_type_and_goes_back(postgres: PostgresServer, typed: str) -> None:
    source = SqlSource(postgres.url, table=typed, key="id")
    batch = source.next_batch(10)
    assert batch is not None
    source.close()
    for at, (name, _, kind, value, _) in enumerate(POSTGRESQL_TYPES):
        assert (name, batch.schema.field(f"c{at}").type) == (name, kind)
        assert (name, batch.column(f"c{at}").to_pylist()) == (name, [value, None])
    sink = SqlSink(postgres.url, f"{typed}_back")
    sink.consume(batch)
    sink.flush()
    again = SqlSource(postgres.url, table=f"{typed}_back", key="id")
    assert again.next_batch(10) == batch
    again.close()
    with Database(postgres.url).connect() as connection:
        made = connection.rows(
            "SELECT format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = to_regclass($1) "
            "AND attnum > 1 ORDER BY attnum",
            [f"{typed}_back"],
        )
    assert [kind for (kind,) in made] == [kind[4] for kind in POSTGRESQL_TYPES]


def test_a_table_of_every_type_takes_its_own_rows_unchanged(postgres: PostgresServer, typed: str) -> None:
    with Database(postgres.url).connect() as connection:
        connection.execute(f"CREATE TABLE {typed}_twin (LIKE {typed})")
        Pipeline(SqlSource(postgres.url, table=typed, key="id"), [], SqlSink(postgres.url, f"{typed}_twin")).run()
        rows = [connection.rows(f"SELECT t::text FROM {name} t ORDER BY id") for name in (typed, f"{typed}_twin")]
    assert rows[1] == rows[0]


def test_rows_are_cast_to_the_types_of_a_table_that_is_there(postgres: PostgresServer, typed: str) -> None:
    texts = [kind for kind in POSTGRESQL_TYPES if kind[0] in ("uuid", "jsonb", "date", "inet", "numeric", "varchar(5)")]
    table = f"{typed}_text"
    with Database(postgres.url).connect() as connection:
        columns = ", ".join(f"c{at} {kind[0]}" for at, kind in enumerate(texts))
        connection.execute(f"CREATE TABLE {table} (extra int DEFAULT 7, {columns}, n smallint)")
    row = {f"c{at}": str(kind[3]) for at, kind in enumerate(texts)} | {"n": 5}
    sink = SqlSink(postgres.url, table)
    sink.consume(pa.RecordBatch.from_pylist([row]))
    sink.flush()
    source = SqlSource(postgres.url, table=table)
    found = source.next_batch(1)
    assert found is not None
    source.close()
    assert found.to_pylist() == [{"extra": 7, **{f"c{at}": kind[3] for at, kind in enumerate(texts)}, "n": 5}]


def test_a_numeric_that_is_no_number_is_named_with_its_row(postgres: PostgresServer) -> None:
    number = "CASE WHEN i = 3 THEN 'NaN' ELSE i::numeric END"
    query = f"SELECT i AS id, ({number})::numeric(10, 2) AS n FROM generate_series(0, 9) i"
    source = SqlSource(postgres.url, query=query, key="id")
    with pytest.raises(DataError, match=r"'n'.*nan.*double precision") as caught:
        source.next_batch(10)
    assert caught.value.row == 3
    # What the message says works.
    cast = SqlSource(postgres.url, query=f"SELECT id, n::float8 AS n FROM ({query}) q", key="id")
    assert cast.next_batch(10) is not None
    for each in (source, cast):
        each.close()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("date", "'infinity'"),
        ("date", "'-infinity'"),
        ("timestamp", "'infinity'"),
        ("timestamp", "'294270-01-01'"),
        ("timestamptz", "'-infinity'"),
        ("timestamp[]", "'{2020-01-01,infinity}'"),
    ],
)
def test_a_time_that_arrow_has_no_value_for_is_named_with_its_row(
    postgres: PostgresServer, kind: str, value: str
) -> None:
    early = "'{4713-01-01 BC}'" if kind.endswith("]") else "'4713-01-01 BC'"
    moment = f"CASE WHEN i = 3 THEN {value} WHEN i = 1 THEN NULL ELSE {early} END"
    query = f"SELECT i AS id, ({moment})::{kind} AS t FROM generate_series(0, 9) i"
    source = SqlSource(postgres.url, query=query, key="id")
    with pytest.raises(DataError, match=r"'t' is 'infinity'.*cast to text") as caught:
        source.next_batch(10)
    assert caught.value.row == 3
    # What the message says works, and the first date of all is no error.
    cast = SqlSource(postgres.url, query=f"SELECT id, t::text AS t FROM ({query}) q", key="id")
    rest = SqlSource(postgres.url, query=f"SELECT * FROM ({query}) q WHERE id <> 3", key="id")
    for each in (cast, rest):
        assert each.next_batch(10) is not None
        each.close()
    source.close()


@pytest.mark.parametrize("product", ["postgresql", "duckdb"])
@pytest.mark.parametrize(
    ("kind", "value"),
    [("time", "24:00:00"), ("timestamp", "infinity"), ("date", "-infinity"), ("timestamptz[]", "{infinity}")],
)
def test_midnight_at_the_end_of_a_day_and_infinite_times_are_refused_by_all(
    product: str, kind: str, value: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = request.getfixturevalue("postgres").url if product == "postgresql" else f"duckdb:///{tmp_path}/a.db"
    if product == "duckdb":
        value = value.replace("{", "[").replace("}", "]")
        Database(url).connect().close()
    rows = "generate_series(0, 9) " + ("i" if product == "postgresql" else "s(i)")
    query = f"SELECT i AS id, CASE WHEN i = 3 THEN CAST('{value}' AS {kind}) END AS t FROM {rows}"
    source = SqlSource(url, query=query, key="id")
    with pytest.raises(DataError, match=r"'t' is .*cast to text") as caught:
        source.next_batch(10)
    source.close()
    assert caught.value.row == 3


@pytest.mark.parametrize("batch_at", [0, 3])
@pytest.mark.parametrize(
    ("kind", "value", "fine"),
    [
        ("STRUCT(x TIMESTAMP)", "{'x': 'infinity'::TIMESTAMP}", "{'x': NULL}"),
        ("MAP(VARCHAR, DATE)", "MAP {'a': '2020-01-01'::DATE, 'b': 'infinity'::DATE}", "MAP {'a': '2020-01-01'::DATE}"),
        ("DATE[][]", "[['2020-01-01'], ['-infinity', NULL]]", "[NULL, [], ['2020-01-01']]"),
        ("DATE[2]", "[NULL, 'infinity'::DATE]", "['2020-01-01', '2020-01-02']"),
        ("STRUCT(a INTEGER, x TIME)", "{'a': 1, 'x': '24:00:00'::TIME}", "{'a': 1, 'x': '23:59:59.999999'::TIME}"),
        ("TIME_NS", "'24:00:00'::TIME_NS", "'23:59:59.999999999'::TIME_NS"),
        (
            "MAP(TIMESTAMP, STRUCT(l TIME[]))",
            "MAP {'2020-01-01': {'l': ['24:00:00']}}",
            "MAP {'2020-01-01': {'l': []}}",
        ),
        ("UNION(n INTEGER, x TIMESTAMPTZ)", "'infinity'::TIMESTAMPTZ", "1"),
    ],
)
def test_times_inside_of_other_values_are_refused_with_their_row(
    kind: str, value: str, fine: str, batch_at: int, tmp_path: Path
) -> None:
    url = f"duckdb:///{tmp_path}/a.db"
    Database(url).connect().close()
    cases = f"CASE WHEN i = 5 THEN ({value})::{kind} WHEN i % 2 = 0 THEN ({fine})::{kind} END"
    query = f"SELECT i AS id, {cases} AS t FROM generate_series(0, 9) s(i)"
    source = SqlSource(url, query=f"SELECT * FROM ({query}) WHERE id >= {batch_at} ORDER BY id", key="id")
    with pytest.raises(DataError, match=r"'t' is .*cast to text") as caught:
        source.next_batch(10)
    source.close()
    assert caught.value.row == 5 - batch_at
    rest = SqlSource(url, query=f"SELECT * FROM ({query}) WHERE id <> 5", key="id")
    batch = rest.next_batch(10)
    rest.close()
    assert batch is not None
    assert batch.num_rows == 9


def test_times_with_a_zone_and_bits_of_duckdb_are_text(tmp_path: Path) -> None:
    url = f"duckdb:///{tmp_path}/a.db"
    Database(url).connect().close()
    query = "SELECT 1 AS id, '12:00:00+02'::timetz AS v, '101'::bit AS b"
    source = SqlSource(url, query=query, key="id")
    batch = source.next_batch(1)
    source.close()
    assert batch is not None
    assert batch.to_pylist() == [{"id": 1, "v": "12:00:00+02", "b": "101"}]


@pytest.fixture(scope="module")
def named(postgres: PostgresServer) -> tuple[str, str]:
    """A schema that is not in the search path, with types of its own, and a URL: a driver looks for types once."""
    schema = f"types_{secrets.token_hex(6)}"
    with Database(postgres.url).connect() as connection:
        connection.execute(f"CREATE SCHEMA {schema}")
        connection.execute(f"CREATE TYPE {schema}.\"Mood\" AS ENUM ('sad', 'ok', 'a b')")
        connection.execute(f'CREATE DOMAIN {schema}."My Int" AS int CHECK (value > 0)')
        connection.execute(f"CREATE TYPE {schema}.facts AS (n numeric, o oid, m money, a int[], t timestamp)")
    return schema, f"{postgres.url}?application_name={schema}"


def test_types_of_users_are_keys_in_their_own_order(named: tuple[str, str]) -> None:
    schema, url = named
    query = f'SELECT m AS k, m::text AS v FROM unnest(enum_range(NULL::{schema}."Mood")) m'
    rows: list[str] = []
    state = None
    for _ in range(3):
        source = SqlSource(url, query=query, key="k")
        if state is not None:
            source.load_state_dict(state)
        batch = source.next_batch(1)
        assert batch is not None
        rows += batch.column("v").to_pylist()
        state = source.state_dict()
        source.close()
    assert rows == ["sad", "ok", "a b"]


def test_arrays_of_types_of_users_are_lists(named: tuple[str, str]) -> None:
    schema, url = named
    query = (
        f"SELECT 1 AS id, CAST('{{sad,null}}' AS {schema}.\"Mood\"[]) AS e, "
        f"CAST('{{1,null}}' AS {schema}.\"My Int\"[]) AS d, CAST('{{}}' AS {schema}.\"Mood\"[]) AS n"
    )
    source = SqlSource(url, query=query, key="id")
    batch = source.next_batch(1)
    source.close()
    assert batch is not None
    assert batch.to_pylist() == [{"id": 1, "e": ["sad", None], "d": [1, None], "n": []}]


def test_a_composite_is_json_with_all_that_is_in_it(named: tuple[str, str]) -> None:
    schema, url = named
    query = (
        "SELECT 1 AS id, v, ARRAY[v, NULL] AS l FROM (SELECT CAST(ROW(1.50, 4000000000, 1.5, '{{1},{2}}', 'infinity') "
        f"AS {schema}.facts) AS v) r"
    )
    source = SqlSource(url, query=query, key="id")
    batch = source.next_batch(1)
    source.close()
    assert batch is not None
    assert [field.type for field in batch.schema] == [pa.int32(), pa.json_(), pa.json_()]
    value = {"n": 1.5, "o": "4000000000", "m": "$1.50", "a": [[1], [2]], "t": "infinity"}
    assert json.loads(batch.column("v")[0].as_py()) == value
    assert json.loads(batch.column("l")[0].as_py()) == [value, None]


@pytest.mark.parametrize("kind", ["int[]", "text[]", "numeric(10, 2)[]", "oid[]", "inet[]"])
def test_arrays_of_several_dimensions_are_refused_and_not_flattened(postgres: PostgresServer, kind: str) -> None:
    one = "10.0.0.1" if kind == "inet[]" else "1"
    array = f"CASE WHEN i = 3 THEN '{{{{{one},{one}}},{{{one},{one}}}}}' ELSE '{{{one}}}' END"
    query = f'SELECT i AS id, ({array})::{kind} AS "a\'b" FROM generate_series(0, 9) i'
    source = SqlSource(postgres.url, query=query, key="id")
    with pytest.raises(DataError, match=r"column .*a'b.* has an array of several dimensions.*to_jsonb"):
        source.next_batch(10)
    source.close()
    cast = SqlSource(postgres.url, query=f'SELECT id, to_jsonb("a\'b") AS a FROM ({query}) q', key="id")
    found = cast.next_batch(10)
    cast.close()
    assert found is not None
    assert found.column("a")[3].as_py().startswith("[[")


def test_a_key_of_oids_is_read_in_their_order(postgres: PostgresServer) -> None:
    query = "SELECT o::oid AS o FROM unnest(ARRAY[4000000000, 5, 3000000000, 4294967295]) o"
    rows: list[int] = []
    state = None
    for _ in range(4):
        source = SqlSource(postgres.url, query=query, key="o")
        if state is not None:
            source.load_state_dict(state)
        batch = source.next_batch(1)
        assert batch is not None
        rows += batch.column("o").to_pylist()
        state = source.state_dict()
        source.close()
    assert rows == [5, 3000000000, 4000000000, 4294967295]


NESTED = [{"id": 1, "s": {"a": 1, "b": [DAY]}, "m": [[1, 2], []]}, {"id": 2, "s": None, "m": None}]


def test_structs_and_lists_of_lists_are_json_in_postgresql(postgres: PostgresServer) -> None:
    table = f"nested_{secrets.token_hex(6)}"
    sink = SqlSink(postgres.url, table)
    sink.consume(pa.RecordBatch.from_pylist(NESTED))
    sink.flush()
    with Database(postgres.url).connect() as connection:
        rows = connection.rows(f"SELECT s->>'a', s->'b'->>0, m->0->>1 FROM {table} ORDER BY id")
    assert rows == [("1", "2024-02-29", "2"), (None, None, None)]


@pytest.mark.parametrize("scheme", ["sqlite", "duckdb"])
def test_embedded_databases_keep_what_they_have_types_for(tmp_path: Path, scheme: str) -> None:
    rows = {
        "i": pa.array([1, None], pa.int64()),
        "u": pa.array([1, None], pa.uint64()),
        "f": pa.array([1.5, None], pa.float32()),
        "t": pa.array(["é", None], pa.large_string()),
        "b": pa.array([b"\0\xff", None], pa.binary()),
        "o": pa.array([True, None]),
        "d": pa.array([DAY, None], pa.date32()),
        "z": pa.array([MOMENT, None], pa.timestamp("us", "UTC")),
        "n": pa.array([Decimal("1.50"), None], pa.decimal128(10, 2)),
        "l": pa.array([[1, 2], None]),
        "j": pa.array(['{"a":1}', None], pa.json_()),
        "e": pa.array(["x", None]).dictionary_encode(),
        "g": pa.array([UUID.bytes, None], pa.uuid()),
    }
    table = pa.table(rows)
    url = f"{scheme}:///{tmp_path}/a.db"
    sink = SqlSink(url, "t")
    sink.consume(table.to_batches()[0])
    sink.flush()
    source = SqlSource(url, table="t")
    batch = source.next_batch(10)
    assert batch is not None
    source.close()
    found = {name: (str(batch.schema.field(name).type), batch.column(name).to_pylist()[0]) for name in rows}
    common = {"i": ("int64", 1), "t": ("string", "é"), "b": ("binary", b"\0\xff"), "e": ("string", "x")}
    lost = {
        **{"u": ("int64", 1), "f": ("double", 1.5), "o": ("int64", 1), "d": ("string", "2024-02-29")},
        **{"z": ("string", MOMENT.isoformat() + "+00:00"), "n": ("string", "1.50"), "l": ("string", "[1,2]")},
        **{"j": ("string", '{"a":1}'), "g": ("string", str(UUID))},
    }
    kept = {
        **{"u": ("decimal128(20, 0)", Decimal(1)), "f": ("float", 1.5), "o": ("bool", True), "d": ("date32[day]", DAY)},
        **{"z": ("timestamp[us, tz=UTC]", MOMENT.replace(tzinfo=UTC)), "n": ("decimal128(10, 2)", Decimal("1.50"))},
        **{"l": ("list<l: int64>", [1, 2]), "j": ("extension<arrow.json>", '{"a":1}')},
        **{"g": ("extension<arrow.uuid>", UUID)},
    }
    assert found == common | (lost if scheme == "sqlite" else kept)
    assert all(value is None for value in batch.slice(1).to_pylist()[0].values())


def test_a_column_that_no_table_holds_is_refused_by_name(tmp_path: Path) -> None:
    sink = SqlSink(f"duckdb:///{tmp_path}/a.db", "t")
    with pytest.raises(SchemaError, match="union"):
        sink.consume(
            pa.RecordBatch.from_pydict(
                {"c": pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])])}
            )
        )


def test_a_column_of_sqlite_that_is_null_for_long_has_the_type_of_its_first_value(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    with Database(url).connect() as connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, declared TEXT, bare)")
        many = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r WHERE i < 3000)"
        connection.execute(f"{many} INSERT INTO t SELECT i, NULL, NULL FROM r")
        connection.execute("INSERT INTO t VALUES (5000, 'late', x'00ff')")
    for options in ({"table": "t"}, {"query": "SELECT id, declared || '' AS declared, bare FROM t"}):
        source = SqlSource(url, key="id", **options)
        assert [field.type for field in source.schema] == [pa.int64(), pa.string(), pa.binary()]
        rows = [row for batch in iter(lambda s=source: s.next_batch(999), None) for row in batch.to_pylist()]
        assert (len(rows), rows[-1]) == (3001, {"id": 5000, "declared": "late", "bare": b"\x00\xff"})


@pytest.mark.parametrize("first", ["'n/a'", "x'6e2f61'"])
def test_fractions_among_text_in_sqlite_keep_their_digits(tmp_path: Path, first: str) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    with Database(url).connect() as connection:
        connection.execute("CREATE TABLE t (id INTEGER, n NUMERIC)")
        connection.execute(f"INSERT INTO t VALUES (9, 0.5), (4, 0.1 + 0.2), (3, {(1 << 53) + 1}), (2, 12345678.91)")
        connection.execute(f"INSERT INTO t VALUES (5, NULL), (1, {first})")
    source = SqlSource(url, table="t", key="id")
    rows = source.next_batch(10)
    source.close()
    assert rows is not None
    texts = [value.decode() if isinstance(value, bytes) else value for value in rows.column("n").to_pylist()]
    assert rows.column("id").to_pylist() == [1, 2, 3, 4, 5, 9]
    assert (texts[:3], texts[4:]) == (["n/a", "12345678.91", "9007199254740993"], [None, "0.5"])
    assert float(texts[3]) == 0.1 + 0.2
