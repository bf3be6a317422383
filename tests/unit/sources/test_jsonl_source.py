from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, DataError, SchemaError
from penstock.pipeline import Pipeline
from penstock.pipeline.control import AwakeTime
from penstock.sinks import MemorySink
from penstock.sources import JsonlSource, JsonSource
from penstock.testing import assert_source_contract
from penstock.types import Field, Schema

same_directory = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


def read(source: JsonlSource, max_rows: int = 1000) -> list[dict[str, Any]]:
    rows = []
    while (batch := source.next_batch(max_rows)) is not None:
        assert batch.schema.equals(source.schema)
        rows += batch.to_pylist()
    source.close()
    return rows


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def types(schema: pa.Schema) -> dict[str, str]:
    """Columns and their types, without the order of fields, however deep."""
    return {field.name: spelled(field.type) for field in schema}


def spelled(kind: pa.DataType) -> str:
    if pa.types.is_struct(kind):
        return "{" + ", ".join(sorted(f"{field.name}: {spelled(field.type)}" for field in kind)) + "}"
    return f"[{spelled(kind.value_type)}]" if pa.types.is_list(kind) else str(kind)


def filled(value: Any, kind: pa.DataType) -> Any:
    """What a row must look like under a schema: missing fields null, integers among floats floats."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: filled(value.get(field.name), field.type) for field in kind}
    if pa.types.is_list(kind):
        return [filled(item, kind.value_type) for item in value]
    return float(value) if pa.types.is_floating(kind) else value


def expected(rows: list[Any], schema: pa.Schema) -> list[Any]:
    return [filled(row, pa.struct(list(schema))) for row in rows]


# -- the schema comes from all rows ----------------------------------------------------------------------------------

ROWS = [
    {"id": 1, "text": None, "meta": {"a": 1}},
    {"id": 2, "text": "ä\n\u2028", "tags": [], "when": "2024-01-01"},
    {"id": 3.5, "meta": {"b": ["x"], "c": {}}, "tags": [{"k": None}], "empty": {}},
    {
        "id": 4,
        "late": True,
        "tags": [{"k": "v", "w": 1}, None],
        "when": "not a date",
        "nothing": None,
        "lists": [[], [1]],
    },
]
TYPES = {
    "id": "double",
    "text": "string",
    "meta": "{a: int64, b: [string], c: {}}",
    "tags": "[{k: string, w: int64}]",
    "when": "string",
    "empty": "{}",
    "late": "bool",
    "nothing": "null",
    "lists": "[[int64]]",
}


def test_nested_ragged_and_late_fields_get_one_schema(tmp_path: Path) -> None:
    source = JsonlSource(write_lines(tmp_path / "a.jsonl", *ROWS))
    assert types(source.schema) == TYPES
    assert source.schema.names == ["id", "text", "meta", "tags", "when", "empty", "late", "nothing", "lists"]
    assert read(source) == expected(ROWS, source.schema)


@pytest.mark.parametrize("order", list(__import__("itertools").permutations(range(4)))[::3])
def test_the_columns_and_their_types_do_not_depend_on_the_order_of_rows(tmp_path: Path, order: tuple[int, ...]) -> None:
    shuffled = [ROWS[i] for i in order]
    source = JsonlSource(write_lines(tmp_path / "a.jsonl", *shuffled))
    assert types(source.schema) == TYPES
    assert read(source) == expected(shuffled, source.schema)


def test_fields_are_in_the_order_of_their_first_appearance_however_many_cores_parse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JsonlSource, "_kernels", lambda self: None)
    numbers = list(range(400))  # few texts, so that Arrow parses all of it in several chunks
    rows = [{f"a{row // 40}": 1, "o": {f"b{row // 40}": numbers}} for row in range(2000)]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    for _ in range(5):
        schema = JsonlSource(path).schema
        assert schema.names == ["a0", "o", *(f"a{number}" for number in range(1, 50))]
        assert [field.name for field in schema.field("o").type] == [f"b{number}" for number in range(50)]


leaves = {
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False),
    "text": st.text(max_size=6) | st.sampled_from(["2020-01-01", "2020-01-01T00:00:00Z", "12", "null", ""]),
    "bool": st.booleans(),
}


@st.composite
def field_values(draw: st.DrawFn, depth: int = 0) -> st.SearchStrategy[Any]:
    """A strategy for the values of one field: always of types that go together, with nulls and gaps."""
    kind = draw(st.sampled_from([*leaves, "list", "object"] if depth < 2 else [*leaves]))
    if kind == "list":
        return st.none() | st.lists(draw(field_values(depth + 1)), max_size=3)
    if kind == "object":
        fields = {name: draw(field_values(depth + 1)) for name in draw(st.sets(st.sampled_from("abc"), max_size=3))}
        return st.none() | st.fixed_dictionaries({}, optional=fields)
    return st.none() | leaves[kind]


@st.composite
def ragged_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    fields = {name: draw(field_values()) for name in draw(st.sets(st.sampled_from(["p", "q", "r"]), min_size=1))}
    return draw(st.lists(st.fixed_dictionaries({}, optional=fields), min_size=1, max_size=8).filter(any))


@same_directory
@given(
    rows=ragged_rows(),
    seed=st.integers(0, 99),
    chunk=st.sampled_from([1, 40, 1 << 20]),
    block=st.sampled_from([1, 60, 1 << 20]),
)
def test_neither_order_nor_block_boundaries_change_the_schema_or_the_rows(
    tmp_path: Path, rows: list[dict[str, Any]], seed: int, chunk: int, block: int
) -> None:
    shuffled = random.Random(seed).sample(rows, len(rows))
    with pytest.MonkeyPatch.context() as patch:
        plain = JsonlSource(write_lines(tmp_path / "a.jsonl", *rows))
        reference = types(plain.schema)
        assert read(plain) == expected(rows, plain.schema)
        # Small blocks for the scan, small chunks inside Arrow's inference, small blocks for reading.
        patch.setattr("penstock.sources.record_source._SCAN_BYTES", block)
        patch.setattr("penstock.sources.record_source._BATCH_BYTES", block)
        patch.setattr("penstock.sources.jsonl._SCAN_CHUNK_BYTES", max(chunk, 40))
        other = JsonlSource(write_lines(tmp_path / "b.jsonl", *shuffled))
        assert types(other.schema) == reference
        assert read(other) == expected(shuffled, other.schema)
        (tmp_path / "c.json").write_text(json.dumps(shuffled, indent=seed % 3 or None))
        array = JsonSource(tmp_path / "c.json")
        assert types(array.schema) == reference
        assert read(array) == expected(shuffled, array.schema)


def test_several_files_have_one_schema(tmp_path: Path) -> None:
    write_lines(tmp_path / "1.jsonl", {"a": 1}, {"a": 2})
    write_lines(tmp_path / "2.jsonl", {"b": "x"}, {"a": 2.5})
    source = JsonlSource(tmp_path)
    assert types(source.schema) == {"a": "double", "b": "string"}
    assert read(source) == [{"a": 1, "b": None}, {"a": 2, "b": None}, {"a": None, "b": "x"}, {"a": 2.5, "b": None}]


def test_integers_beyond_64_bits_are_floats(tmp_path: Path) -> None:
    source = JsonlSource(write_lines(tmp_path / "a.jsonl", {"a": 1}, {"a": 2**63}, {"a": 2**70}))
    assert types(source.schema) == {"a": "double"}
    assert [row["a"] for row in read(source)] == [1.0, 2.0**63, 2.0**70]


def test_nan_and_infinity_are_numbers_as_python_writes_them(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"a": 1}, {"a": float("nan")}, {"a": float("-inf")})
    values = [row["a"] for row in read(JsonlSource(path))]
    assert values[0] == 1
    assert values[1] != values[1]
    assert values[2] == float("-inf")
    # Also where a row in the same block has to be looked at by itself.
    path.write_text(path.read_text() + "broken\n")
    assert types(JsonlSource(path).schema) == {"a": "double"}


def test_a_long_scan_shows_now_and_then_that_it_goes_on_and_can_be_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sources.record_source._SCAN_BYTES", 50)
    path = write_lines(tmp_path / "a.jsonl", *({"n": i} for i in range(500)))
    source = JsonlSource(path)
    for _ in range(3):
        block = source.next_block(1 << 20)
        assert block is not None
        assert source.decode(block).batch.num_rows == 0
        assert (source.state_dict()["offset"], source.state_dict()["schema"]) == (0, None)
    source.close()  # and no file is left open
    assert read(source) == [{"n": i} for i in range(500)]


def test_a_long_scan_does_not_look_like_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    infer, since = JsonlSource._try_to_infer, AwakeTime.since
    scanned, begins, looked = [], set(), threading.Event()

    def slow(self: JsonlSource, block: Any) -> Any:
        looked.clear()
        assert looked.wait(60)
        scanned.append(block.nbytes)
        return infer(self, block)

    def noted(self: AwakeTime, begin: float) -> float:
        if len(scanned) < 40:
            begins.add(begin)
        looked.set()
        return since(self, begin)

    monkeypatch.setattr(JsonlSource, "_try_to_infer", slow)
    monkeypatch.setattr(AwakeTime, "since", noted)
    path = write_lines(tmp_path / "a.jsonl", *({"n": i, "text": "x" * 980} for i in range(3000)))
    sink = MemorySink()
    # With so small a budget the scan takes 64 KiB at a time.
    Pipeline(JsonlSource(path), [], sink, budget="2 MiB").run()
    assert len(scanned) > 40
    assert len(begins) > 1  # the watch for hangs saw the work of the source begin anew as often
    assert len(sink.rows()) == 3000


# -- the text around the rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1}\n{"a":2}\n',
        '{"a":1}\n{"a":2}',
        '{"a":1}\r\n{"a":2}\r\n',
        '\ufeff{"a":1}\n{"a":2}\n',
        '\n\n{"a":1}\n   \n\t\r\n{"a":2}\n\n',
        '  {"a":1}  \n\t{"a":2}\n   ',
        '\ufeff\r\n{"a":1}\r\n\r\n{"a":2}',
    ],
)
@pytest.mark.parametrize("max_bytes", [1, 9, 1 << 20])
def test_line_ends_blank_lines_and_byte_order_marks_do_not_matter(tmp_path: Path, text: str, max_bytes: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(text.encode())
    source = JsonlSource(path)
    assert source.schema.names == ["a"]
    rows, places = [], []
    while (block := source.next_block(max_bytes)) is not None:
        decoded = source.decode(block)
        assert not decoded.rejected
        rows += decoded.batch.to_pylist()
        numbers = decoded.rows if decoded.rows is not None else range(decoded.batch.num_rows)
        places += [(block.origin.row + number, source.offset_of(block, number)) for number in numbers]
    assert rows == [{"a": 1}, {"a": 2}]
    # The place of each row is its line, and the byte where that line begins.
    lines = text.encode().split(b"\n")
    assert [json.loads(lines[row].removeprefix(b"\xef\xbb\xbf")) for row, _ in places] == rows
    assert [json.loads(text.encode()[offset:].split(b"\n")[0]) for _, offset in places] == rows


def test_a_row_longer_than_a_block_is_read_whole(tmp_path: Path) -> None:
    rows = [{"a": "x" * 10}, {"a": "y" * 3_000_000}, {"a": "z"}]
    source = JsonlSource(write_lines(tmp_path / "a.jsonl", *rows))
    assert read(source) == rows
    source.reset()
    sizes = []
    while (block := source.next_block(100)) is not None:
        sizes.append(source.decode(block).batch.num_rows)
    assert sizes[0] == 1
    assert sum(sizes) == 3


def test_only_the_columns_asked_for_are_read_in_that_order(tmp_path: Path) -> None:
    source = JsonlSource(write_lines(tmp_path / "a.jsonl", *ROWS), columns=["late", "id"])
    assert source.schema.names == ["late", "id"]
    assert read(source) == [{"late": row.get("late"), "id": float(row["id"])} for row in ROWS]
    with pytest.raises(SchemaError, match=r"'lat'.*'id'"):
        JsonlSource(tmp_path / "a.jsonl", columns=["lat"]).schema  # noqa: B018
    for wrong in ([], "id"):
        with pytest.raises(ConfigError, match="columns"):
            JsonlSource(tmp_path / "a.jsonl", columns=wrong)


def test_a_given_schema_saves_the_scan_and_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JsonlSource, "_scan", lambda self, blocks: pytest.fail("scanned"))
    path = write_lines(tmp_path / "a.jsonl", {"a": 1, "t": "2024-01-02"}, {"t": None})
    schema = pa.schema([("t", pa.timestamp("s")), ("a", pa.float32()), ("more", pa.list_(pa.string()))])
    source = JsonlSource(path, schema=schema)
    assert source.schema == schema
    rows = read(source)
    assert [row["a"] for row in rows] == [1.0, None]
    assert str(rows[0]["t"]) == "2024-01-02 00:00:00"
    assert read(JsonlSource(path, schema=schema, columns=["a"])) == [{"a": 1.0}, {"a": None}]


def test_a_field_that_a_given_schema_lacks_is_named_with_its_row(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"a": 1}, {"a": 2, "b": 3})
    source = JsonlSource(path, schema=pa.schema([("a", pa.int64())]))
    assert source.next_batch(10).to_pylist() == [{"a": 1}]  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"'b'.*schema"):
        source.next_batch(10)
    source.close()


def test_types_that_arrow_cannot_parse_from_json_are_read_all_the_same(tmp_path: Path) -> None:
    schema = Schema([Field("vector", "float32", (2,)), Field("kind", "string"), Field("n", "int64")])
    path = write_lines(tmp_path / "a.jsonl", {"vector": [1, 2.5], "kind": "x", "n": 1}, {"vector": None, "n": 2})
    source = JsonlSource(path, schema=schema)
    batch = source.next_batch(10)
    assert batch is not None
    assert batch.schema == schema.to_arrow()
    assert batch["kind"].to_pylist() == ["x", None]
    assert batch["vector"].storage.to_pylist() == [[1.0, 2.5], None]
    source.close()
    write_lines(path, {"vector": [1, 2, 3], "kind": "x", "n": 1})
    source = JsonlSource(path, schema=schema)
    with pytest.raises(DataError, match="'vector'"):
        source.next_batch(10)
    source.close()


# -- values whose types do not go together ---------------------------------------------------------------------------

MIXED = [
    {"a": 1, "b": {"x": "y"}, "c": [1, "two", None]},
    {"a": "one", "b": {"x": [1]}, "c": None},
    {"a": None, "b": None, "c": [{"d": 1}]},
    {"a": {"k": 1}, "b": {"x": None}, "c": []},
]


def test_types_that_do_not_go_together_are_an_error_that_names_the_row(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"a": 1}, {"a": 2}, {"a": "three"}, {"a": 4})
    with pytest.raises(SchemaError, match=r"'a'.*mixed='json'"):
        JsonlSource(path).schema  # noqa: B018
    write_lines(path, {"m": [{"x": 1}]}, {"m": [{"x": [2]}]})
    with pytest.raises(SchemaError, match=r"row 1\b.*'m\[\]\.x'"):
        JsonlSource(path).schema  # noqa: B018
    path.write_text('\n\n{"a":true}\n\n{"a":1}\n')
    with pytest.raises(SchemaError, match=r"row 4\b.*'a'"):
        JsonlSource(path).schema  # noqa: B018


def test_columns_that_are_not_read_may_hold_what_they_like(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"a": 1, "b": 1}, {"a": 2, "b": "x"}, {"a": 3, "b": [{}]})
    assert read(JsonlSource(path, columns=["a"])) == [{"a": 1}, {"a": 2}, {"a": 3}]
    with pytest.raises(SchemaError, match=r"'c'.*'a'"):
        JsonlSource(path, columns=["c"]).schema  # noqa: B018


def test_mixed_values_can_be_kept_as_json_text(tmp_path: Path) -> None:
    source = JsonlSource(write_lines(tmp_path / "a.jsonl", *MIXED), mixed="json")
    assert types(source.schema) == {"a": "string", "b": "{x: string}", "c": "[string]"}
    rows = read(source)
    for row, original in zip(rows, MIXED):
        assert (json.loads(row["a"]) if row["a"] is not None else None) == original["a"]
    assert [row["b"] for row in rows] == [{"x": '"y"'}, {"x": "[1]"}, None, {"x": None}]
    assert rows[0]["c"] == ["1", '"two"', None]
    assert rows[2]["c"] == ['{"d":1}']


def test_mixed_is_free_where_nothing_is_mixed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", *ROWS)
    assert JsonlSource(path, mixed="json").schema == JsonlSource(path).schema
    assert read(JsonlSource(path, mixed="json")) == read(JsonlSource(path))


@pytest.mark.parametrize("columns", [None, ["c"], ["c", "a"]])
def test_mixed_values_resume_exactly_without_another_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: list[str] | None
) -> None:
    path = write_lines(tmp_path / "a.jsonl", *MIXED)
    rows = read(JsonlSource(path, mixed="json", columns=columns))
    assert_source_contract(lambda: JsonlSource(path, mixed="json", columns=columns), rows)
    source = JsonlSource(path, mixed="json", columns=columns)
    source.next_batch(1)
    state = source.state_dict()
    source.close()
    monkeypatch.setattr(JsonlSource, "_scan", lambda self, blocks: pytest.fail("scanned again"))
    fresh = JsonlSource(path, mixed="json", columns=columns)
    fresh.load_state_dict(state)
    assert read(fresh) == rows[1:]


def test_an_unknown_way_to_treat_mixed_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\bmixed\b.*'text'"):
        JsonlSource(tmp_path, mixed="text")  # type: ignore[arg-type]


# -- bad rows --------------------------------------------------------------------------------------------------------

BAD = [
    (b'{"a": 1', "invalid JSON", "JSON"),
    (b"[1, 2]", "not an object", "JSON"),
    (b"null", "not an object", "JSON"),
    (b'"text"', "not an object", "JSON"),
    (b'{"a": "\xff"}', "invalid UTF-8", "position 7"),
    (b'{"a": 1}{"a": 2}', "invalid JSON", "JSON"),
    (b'{"a": 1, "a": 2}', "invalid JSON", "specified twice"),
    (b'{"a": "\\ud800"}', "invalid JSON", "JSON"),
    (b'{"a": 1} null', "invalid JSON", "JSON"),
    (b"}", "invalid JSON", "JSON"),
    (b'{"a": 01}', "invalid JSON", "JSON"),
]


@pytest.mark.parametrize(("bad", "kind", "reason"), BAD)
@pytest.mark.parametrize("before", [b"", b'{"a": 1}\n', b'\n\xc3\xa4\n{"a": 1}\n'.replace(b"\xc3\xa4", b" ")])
@pytest.mark.parametrize("after", [b"", b"\n", b'\n{"a": 7}\n'])
@pytest.mark.parametrize("given", [False, True])
def test_a_bad_row_is_named_with_its_exact_place_and_the_others_arrive(
    tmp_path: Path, bad: bytes, kind: str, reason: str, before: bytes, after: bytes, given: bool
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(before + bad + after)
    source = JsonlSource(path, schema=pa.schema([("a", pa.int64())]) if given else None)
    rejected, rows = [], []
    while (block := source.next_block(1 << 20)) is not None:
        decoded = source.decode(block)
        rejected += decoded.rejected
        rows += decoded.batch.to_pylist()
    source.close()
    assert [row.get("a") for row in rows] == [1] * before.count(b"1") + [7] * after.count(b"7")
    [row] = rejected
    assert (row.kind, row.stage, row.data) == (kind, "reading JSON Lines", bad)
    assert reason in row.reason
    assert row.row == before.count(b"\n")
    assert path.read_bytes()[row.offset :].startswith(bad)


def test_used_directly_the_source_raises_at_the_bad_row_and_then_goes_on_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a":1}\n\nbad\n{"a":2}\n{"a":3}\nworse\n')
    source = JsonlSource(path)
    seen: list[Any] = []
    states = [source.state_dict()]
    while True:
        try:
            batch = source.next_batch(1)
        except DataError as error:
            seen.append((error.row, error.offset))
        else:
            if batch is None:
                break
            seen.append(batch.to_pylist()[0]["a"])
        states.append(source.state_dict())
    source.close()
    assert seen == [1, (2, 9), 2, 3, (5, 29)]
    for position, state in enumerate(states):
        fresh = JsonlSource(path)
        fresh.load_state_dict(state)
        again: list[Any] = []
        while len(again) < len(seen) - position:
            try:
                again += [row["a"] for row in fresh.next_batch(1).to_pylist()]  # type: ignore[union-attr]
            except DataError as error:
                again.append((error.row, error.offset))
        fresh.close()
        assert again == seen[position:]


def test_the_origin_of_a_batch_is_its_first_row_even_behind_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a":1}\n\n\n{"a":2}\n{"a":3}\n')
    source = JsonlSource(path)
    rows = []
    while source.next_batch(1) is not None:
        origin = source.origin()
        assert origin is not None
        rows.append(origin.row)
    assert rows == [0, 3, 4]


@given(
    st.lists(st.sampled_from(['{"a":1}', '{"a":2.5}', "", "bad", "null", '{"a":3}{"a":4}', " "]), max_size=12),
    st.integers(1, 60),
)
@same_directory
def test_whatever_the_lines_and_blocks_good_rows_arrive_and_bad_ones_are_placed(
    tmp_path: Path, lines: list[str], max_bytes: int
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(line + "\n" for line in lines) or "\n")
    source = JsonlSource(path, schema=pa.schema([("a", pa.float64())]))
    good, bad = [], []
    while (block := source.next_block(max_bytes)) is not None:
        decoded = source.decode(block)
        numbers = decoded.rows if decoded.rows is not None else range(decoded.batch.num_rows)
        good += [(block.origin.row + n, row["a"]) for n, row in zip(numbers, decoded.batch.to_pylist(), strict=True)]
        bad += [row.row for row in decoded.rejected]
    source.close()
    assert good == [
        (i, json.loads(line)["a"]) for i, line in enumerate(lines) if line.startswith("{") and "}{" not in line
    ]
    assert bad == [i for i, line in enumerate(lines) if line.strip() and (not line.startswith("{") or "}{" in line)]


def test_a_row_without_any_field_cannot_be_kept_and_says_so(tmp_path: Path) -> None:
    source = JsonlSource(write_lines(tmp_path / "a.jsonl", {}, {}))
    with pytest.raises(DataError, match=r"row 0\b.*byte 0\b"):
        source.next_batch(10)
    source.close()


def test_an_empty_file_is_an_error_unless_allowed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    write_lines(tmp_path / "b.jsonl", {"a": 1})
    source = JsonlSource(tmp_path)
    with pytest.raises(DataError, match=r"row 0\b.*allow_empty=True"):
        source.next_batch(10)
    assert read(JsonlSource(tmp_path, allow_empty=True)) == [{"a": 1}]


# -- JSON files ------------------------------------------------------------------------------------------------------

TRICKY = [
    {"a": '}{][",\\', "b": [{"c": "]"}]},
    {"a": '\\"', "b": []},
    {"a": "\\\\", "b": None},
    {"a": "é\u2028", "b": [{"c": "{"}]},
]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(TRICKY),
        json.dumps(TRICKY, indent=2),
        json.dumps(TRICKY, indent=2).replace("\n", "\r\n"),
        "\ufeff \n" + json.dumps(TRICKY, indent="\t", ensure_ascii=False) + "\n\n",
        json.dumps(TRICKY, separators=(",", ":")),
        "\n".join(json.dumps(row) for row in TRICKY),
        "".join(json.dumps(row, indent=1) for row in TRICKY),
        "\ufeff" + " ".join(json.dumps(row, indent=1) for row in TRICKY),
    ],
)
def test_json_arrays_and_concatenated_objects_are_read_however_they_are_laid_out(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode())
    assert read(JsonSource(path)) == TRICKY
    assert_source_contract(lambda: JsonSource(path), TRICKY)


def test_one_object_is_one_row_and_an_empty_array_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{\n  "a": [1, 2],\n  "b": {"c": null}\n}\n')
    assert read(JsonSource(tmp_path / "a.json")) == [{"a": [1, 2], "b": {"c": None}}]
    (tmp_path / "b.json").write_text(" [ ] \n")
    assert read(JsonSource(tmp_path / "b.json")) == []


@pytest.mark.parametrize(
    ("text", "row", "reason"),
    [
        ('[{"a": 1}, {"a": 2}', 2, "array"),
        ('[{"a": 1}, {"a": 2}, {"a"', 2, '"a"'),
        ('[{"a": 1}, {"a": 2}] {"a": 3}', 2, "array"),
        ('[{"a": 1}, {"a": 2}, 3, 4]', 2, "JSON"),
        ('{"a": 1} {"a": 2} {"a": [3', 2, "object"),
    ],
)
def test_a_json_file_cut_in_the_middle_gives_its_good_rows_and_then_the_error(
    tmp_path: Path, text: str, row: int, reason: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    source = JsonSource(path)
    assert source.next_batch(10).to_pylist() == [{"a": 1}, {"a": 2}]  # type: ignore[union-attr]
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            source.next_batch(10)
        assert (caught.value.row, caught.value.file) == (row, str(path))
        assert reason in caught.value.reason
        assert caught.value.offset is not None
    source.skip_file()
    assert source.next_batch(10) is None


@pytest.mark.parametrize(
    ("text", "good", "bad", "place"),
    [
        ('[null, {"a": 1}, {"a": 2}]', [2], (0, "invalid JSON"), "null"),
        ('[{"a": 1}, null, {"a": 2}, {"a": 3}]', [1, 3], (1, "invalid JSON"), "null"),
        ('[{"a": 1}, [2], {"a": 3}]', [1, 3], (1, "not an object"), "[2]"),
        ('[{"a": 1},\n {"a": nul},\n {"a": 3}]', [1, 3], (1, "invalid JSON"), '{"a": nul}'),
        ('[{"a": 1}, "x", {"a": 3}, {"a": 4}]', [1, 4], (1, "invalid JSON"), '"x"'),
    ],
)
def test_a_bad_item_of_an_array_is_named_with_its_exact_place(
    tmp_path: Path, text: str, good: list[int], bad: tuple[int, str], place: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    source = JsonSource(path)
    block = source.next_block(1 << 20)
    assert block is not None
    decoded = source.decode(block)
    source.close()
    assert [row["a"] for row in decoded.batch.to_pylist()] == good
    [rejected] = decoded.rejected
    assert (rejected.row, rejected.kind) == bad
    assert text[rejected.offset :].startswith(place)


# -- chat data as it comes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.json"])
def test_ragged_chat_data_is_what_the_json_module_reads(tmp_path: Path, name: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "\\"x\\""}'}}
    rows: list[dict[str, Any]] = [
        {"id": 1, "messages": [{"role": "user", "content": "Hi"}]},
        {"id": 2, "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}], "reward": 0},
        {"id": 3, "messages": [], "reward": 0.5, "tools": []},
        {"id": 4, "messages": [{"role": "tool", "content": "[]", "name": "find"}], "meta": {"tags": ["a"], "n": {}}},
        {
            "id": 5,
            "messages": [{"role": "user", "content": "caf\u00e9 \U0001f600\n{"}],
            "meta": None,
            "tools": [{"a": 1}],
        },
    ]
    path = tmp_path / name
    text = json.dumps(rows, indent=1) if name.endswith(".json") else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text)
    source = (JsonSource if name.endswith(".json") else JsonlSource)(path)
    assert read(source) == expected(rows, source.schema)
    assert len(json.dumps(source.state_dict())) < 4096


def test_the_state_stays_small_however_wide_the_rows_are(tmp_path: Path) -> None:
    wide = {f"a rather long column name {i * 7919 % 10007}": i for i in range(600)}
    rows = [wide, wide, {**wide, "more": "x"}]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    source = JsonlSource(path)
    source.next_batch(1)
    state = source.state_dict()
    source.close()
    assert len(json.dumps(state)) < 4096
    fresh = JsonlSource(path)
    fresh.load_state_dict(state)
    assert read(fresh) == expected(rows[1:], fresh.schema)
    write_lines(path, *({**row, "new": 1} for row in rows))
    changed = JsonlSource(path)
    changed.load_state_dict(state)
    with pytest.raises(ValueError, match=r"a\.jsonl"):
        changed.next_batch(1)
