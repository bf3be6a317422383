"""Plain rows are decoded by kernels exactly as by Arrow's parser, or left to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.files.machine_code import Functions, MachineCode
from penstock.files.records import JsonLines
from penstock.sources import JsonlSource, jsonl
from penstock.sources.plain_json import KERNELS, CountedLines, PlainRows, infer_plain

pytest.importorskip("numba")

SCHEMA = pa.schema({"a": pa.string(), "b": pa.float64(), "c": pa.int64(), "d": pa.bool_(), "e": pa.null()})
PLAIN_SCHEMAS = [
    SCHEMA,
    pa.schema({"a": pa.string()}),
    pa.schema({"b": pa.float32(), "c": pa.int8(), "a": pa.string()}),
    pa.schema({"c": pa.uint16(), "é": pa.string()}),
]
MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
NESTED_SCHEMAS = [
    pa.schema({"m": MESSAGES, "a": pa.string()}),
    pa.schema({"m": pa.list_(pa.list_(pa.int64())), "o": pa.struct({"a": pa.bool_(), "m": MESSAGES})}),
    pa.schema({"o": pa.struct({"o": pa.struct({"a": pa.string(), "b": pa.float64()})}), "m": pa.list_(pa.null())}),
]
OTHER_SCHEMAS = [
    pa.schema({"m": pa.list_(pa.field("item", pa.string(), nullable=False))}),
    pa.schema({"m": pa.large_list(pa.string())}),
    pa.schema({"m": pa.list_(pa.string(), 2)}),
    pa.schema({"m": pa.map_(pa.string(), pa.string())}),
    pa.schema({"o": pa.struct({})}),
    pa.schema({"a": pa.large_string(), "c": pa.int64()}),
    pa.schema([pa.field("a", pa.string(), nullable=False), pa.field("b", pa.float64())]),
    pa.schema({"a": pa.list_(pa.string())}),
    pa.schema({"a": pa.timestamp("s"), "c": pa.int64()}),
    pa.schema({"a": pa.string(), "b": pa.binary()}),
    pa.schema({"a": pa.string(), "c": pa.decimal128(20, 2)}),
]

characters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
floats = st.floats(-1e90, 1e90).filter(lambda value: value == 0 or abs(value) > 1e-90)
plain_texts = st.text(characters, max_size=100).map(json.dumps) | st.text(characters, max_size=100).map(
    lambda text: json.dumps(text, ensure_ascii=False)
)
odd_texts = st.sampled_from(
    [
        *(
            r'"\ud83d\ude00"',
            r'"\ud83d"',
            r'"\ude00"',
            r'"\ud83d\ud83d"',
            r'"\ud83dx"',
            r'"\ud83d\n"',
            r'"\uDBFF\uDFFF"',
        ),
        *(r'"\u0000"', r'"\u00e9"', r'"\u00E9\u20ac"', r'"\u12"', r'"\u12g4"', r'"\x"', r'"\""', r'"\\"', r'"\\\""'),
        *(
            r'"\/\b\f\n\r\t"',
            '"\t"',
            '"\x00"',
            '"\x7f"',
            '"open',
            'open"',
            '"\\',
            '"2020-01-01"',
            '"2020-01-01T00:00:00Z"',
        ),
        *(
            '"' + "x" * n + end
            for n in (61, 62, 63, 64, 65, 127, 128, 200)
            for end in ('"', '\\n"', '\\u00e9"', 'é"', "")
        ),
    ]
)
numbers = (
    st.integers(-(1 << 66), 1 << 66).map(str)
    | st.integers(-9, 9).map(str)
    | st.floats(allow_nan=False, allow_infinity=False).map(repr)
    | st.sampled_from(
        [
            *(
                "-0",
                "-0.0",
                "0",
                "00",
                "01",
                "-01",
                "1e5",
                "1E+5",
                "1e-5",
                "1e400",
                "-1e400",
                "1e-400",
                "1e99",
                "1e100",
            ),
            *(
                "1.",
                ".5",
                "-",
                "+1",
                "1e",
                "1e+",
                "0x10",
                "NaN",
                "-NaN",
                "Infinity",
                "-Infinity",
                "Inf",
                "1_000",
                "1.5.5",
            ),
            *("9223372036854775807", "9223372036854775808", "-9223372036854775808", "999999999999999999", "1" * 40),
            *(
                "0." + "1" * 25,
                "0." + "1" * 26,
                "0.1e-320",
                "123456789012345678.5",
                "0.30000000000000004",
                "1.0",
                "127",
            ),
        ]
    )
)
words = st.sampled_from(
    ["true", "false", "null", "nul", "True", "nulll", "tru", "falsee", "", "[]", "{}", '["x"]', '{"x":1}']
)
values = plain_texts | odd_texts | numbers | words


def nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    comma = st.sampled_from([",", ", ", ",", " ,", ",,", ""])
    items = st.tuples(comma, st.lists(inner, max_size=4)).map(lambda made: f"[{made[0].join(made[1])}]")
    pairs = st.tuples(st.sampled_from(["a", "b", "m", "o", "role", "content"]), inner)
    fields = st.lists(pairs, max_size=4).map(
        lambda made: "{" + ",".join(f'"{key}":{value}' for key, value in made) + "}"
    )
    return items | fields


odd_trees = st.recursive(values, nested, max_leaves=8)
deep = st.integers(1, 30).map(lambda depth: "[" * depth + "1" + "]" * depth)
keys = st.sampled_from(['"a"', '"b"', '"c"', '"d"', '"e"', '"é"', r'"\u0061"', '"f f"', '""', "a", "'a'"])
nested_keys = st.sampled_from(['"m"', '"o"', '"m"', '"o"', '"a"'])
spaces = st.sampled_from(["", "", "", " ", "\t", "  ", "\r", "\f", "\v", "\n", "\u00a0"])


@st.composite
def odd_lines(draw: st.DrawFn) -> str:
    fields = draw(st.lists(st.tuples(keys, values) | st.tuples(nested_keys, odd_trees | deep), max_size=5))
    parts = [f"{draw(spaces)}{key}{draw(spaces)}:{draw(spaces)}{value}{draw(spaces)}" for key, value in fields]
    line = (
        "{"
        + draw(st.sampled_from([",", ",", ",", ",,", " , "])).join(parts)
        + draw(st.sampled_from(["}", "}", "}", "", ",}"]))
    )
    return draw(spaces) + line + draw(spaces) + draw(st.sampled_from(["", "", "", "{}", "x", ",", "\r"]))


@st.composite
def plain_lines(draw: st.DrawFn) -> str:
    """A row of the schema, keys in any order, some of them missing."""
    fields = {
        '"a"': draw(plain_texts | st.just("null")),
        '"b"': draw(floats.map(repr) | st.integers(-99, 99).map(str)),
        '"c"': draw(st.integers(-(10**17), 10**17).map(str) | st.just("null")),
        '"d"': draw(st.sampled_from(["true", "false", "null"])),
        '"e"': "null",
    }
    names = draw(st.lists(st.sampled_from(sorted(fields)), unique=True, min_size=1) | st.just(sorted(fields)))
    comma, colon = draw(st.sampled_from([", ", ",", "\t,  "])), draw(st.sampled_from([": ", ":", "\t:"]))
    return "{" + comma.join(f"{name}{colon}{fields[name]}" for name in names) + "}"


messages = st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": st.sampled_from(["user", "é"]), "content": st.text(characters) | st.none()}
    )
    | st.none(),
    max_size=7,
)
objects = st.fixed_dictionaries({}, optional={"a": st.booleans() | st.none(), "m": messages})
trees = st.fixed_dictionaries(
    {},
    optional={
        "m": st.lists(st.none() | st.lists(st.integers(-99, 99) | st.none(), max_size=3), max_size=9) | st.none(),
        "o": objects | st.none(),
        "a": st.text(characters),
    },
)


@st.composite
def nested_lines(draw: st.DrawFn) -> str:
    """A row of the second nested schema, or of the first."""
    row = draw(trees | st.fixed_dictionaries({"m": messages, "a": st.text(characters)}))
    return json.dumps(
        row, ensure_ascii=draw(st.booleans()), separators=draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    )


@st.composite
def files(draw: st.DrawFn) -> bytes:
    lines_of = [plain_lines(), plain_lines() | odd_lines(), nested_lines(), nested_lines() | odd_lines()]
    line = lines_of[draw(st.integers(0, 3))]
    lines = draw(st.lists(line | st.sampled_from(["", " ", "\r", "\t \r", "\f"]), min_size=1, max_size=12))
    end = draw(st.sampled_from(["\n", "\n", "\r\n"]))
    data = end.join(lines).encode(errors="surrogatepass") + draw(st.sampled_from([b"", b"\n", b"\n\n", b"\r\n", b" "]))
    if draw(st.sampled_from([False, False, False, True])):
        at = draw(st.integers(0, len(data)))
        data = (
            data[:at]
            + draw(st.sampled_from([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b'"', b"\\", b"\0"]))
            + data[at:]
        )
    return draw(st.sampled_from([b"", b"", b"", b"\xef\xbb\xbf"])) + data


@pytest.fixture(scope="session")
def kernels() -> Functions:
    found = KERNELS.wait()
    assert found is not None
    return found


@pytest.fixture
def blocks_of(kernels: Functions, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Everything that a source says about a file, by the kernels or without them."""

    def read(path: Path, *, by_kernels: bool, max_bytes: int = 1 << 20, **options: Any) -> list[Any]:
        monkeypatch.setattr(JsonlSource, "_kernels", lambda self: kernels if by_kernels else None)
        said: list[Any] = []
        try:
            source = JsonlSource(path, **options)
            said.append(source.schema)
            while (block := source.next_block(max_bytes)) is not None:
                decoded = source.decode(block)
                decoded.batch.validate(full=True)
                # The types of numbers: 1 == 1.0 == True.
                said.append((decoded.batch.schema, repr(decoded.batch.to_pylist()), decoded.rows, decoded.rejected))
        except Exception as error:
            said.append((type(error), str(error)))
        return said

    return read


@given(
    data=files(),
    max_bytes=st.sampled_from([1 << 20, 64]),
    options=st.sampled_from(
        [{}, {}, {"columns": ["a", "b"]}, {"mixed": "json"}]
        + [{"schema": schema} for schema in PLAIN_SCHEMAS + NESTED_SCHEMAS + OTHER_SCHEMAS]
        + [{"schema": schema, "columns": schema.names[:1]} for schema in PLAIN_SCHEMAS + NESTED_SCHEMAS]
    ),
)
@example(b'{"a":"x","b":1}\n{"a":"y","b":1.5}\n{"b":null}', 64, {})
@example(b'{"a":"x","a":"y"}\n', 64, {})
@example(b'{"a":"x"} {"a":"y"}\n', 1 << 20, {})
@settings(max_examples=600, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_errors_and_types_are_those_of_the_plain_path(
    blocks_of: Callable[..., list[Any]], tmp_path: Path, data: bytes, max_bytes: int, options: dict[str, Any]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    expected = blocks_of(path, by_kernels=False, max_bytes=max_bytes, **options)
    assert blocks_of(path, by_kernels=True, max_bytes=max_bytes, **options) == expected


@given(lines=st.lists(plain_lines(), min_size=1, max_size=20), ending=st.sampled_from(["", "\n"]))
@settings(max_examples=300)
def test_the_kernels_take_plain_rows_and_agree_with_the_json_of_python(
    kernels: Functions, lines: list[str], ending: str
) -> None:
    rows = [json.loads(line) for line in lines]
    data = pa.py_buffer(("\n".join(lines) + ending).encode())
    found = PlainRows(SCHEMA, others=False).decode(kernels, data, len(lines))
    assert found is not None
    batch, is_ascii = found
    batch.validate(full=True)
    assert is_ascii == data.to_pybytes().isascii()
    expected = [{name: row.get(name) for name in SCHEMA.names} for row in rows]
    assert batch.to_pylist() == [row | {"b": None if row["b"] is None else float(row["b"])} for row in expected]
    inferred = infer_plain(kernels, data)
    assert inferred is not None
    assert [name for name, _ in inferred] == list(dict.fromkeys(name for row in rows for name in row))


@given(rows=st.lists(trees, min_size=1, max_size=20))
@settings(max_examples=300)
def test_the_kernels_take_nested_rows_and_agree_with_the_json_of_python(
    kernels: Functions, rows: list[dict[str, Any]]
) -> None:
    rows = [{"a": "", **row} for row in rows]  # a row without fields is left to Arrow
    schema = pa.schema([*NESTED_SCHEMAS[1], pa.field("a", pa.string())])
    data = pa.py_buffer("\n".join(map(json.dumps, rows)).encode())
    found = PlainRows(schema, others=False).decode(kernels, data, len(rows))
    assert found is not None
    batch, _ = found
    batch.validate(full=True)
    empty: dict[str, Any] = {"m": None, "o": None, "a": None}
    expected = [empty | row for row in rows]
    for row in expected:
        if row["o"] is not None:
            row["o"] = {"a": None, "m": None} | row["o"]
            full = [one if one is None else {"role": None, "content": None} | one for one in row["o"]["m"] or []]
            row["o"]["m"] = None if row["o"]["m"] is None else full
    assert batch.to_pylist() == expected


def test_conversations_are_inferred_and_read_whatever_their_length(kernels: Functions) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{i}-{turn}\n"} for turn in range(i % 200)], "n": i}
        for i in range(400)
    ]
    data = pa.py_buffer("\n".join(map(json.dumps, rows)).encode())
    expected = [("messages", MESSAGES), ("n", pa.int64())]
    assert infer_plain(kernels, data) == expected
    found = PlainRows(pa.schema(expected), others=False).decode(kernels, data, len(rows))
    assert found is not None
    assert found[0].to_pylist() == rows


PLAIN = b'{"a": "x\\n\\u00e9", "b": 1.5, "c": 7, "d": true, "e": null}\n{"c": 8, "a": "y"}\r\n\n{"b": -2e-3}'


@pytest.mark.parametrize(
    ("name", "data", "is_taken"),
    [
        ("plain rows", PLAIN, True),
        ("not ASCII", '{"a": "é"}\n'.encode(), True),
        ("another key", PLAIN + b'\n{"z": 1}', False),
        ("a key twice", PLAIN + b'\n{"a": "x", "a": "y"}', False),
        ("a list", PLAIN + b'\n{"a": ["x"]}', False),
        ("an object in an unknown field", PLAIN + b'\n{"z": {"a": 1}}', False),
        ("an object", PLAIN + b'\n{"a": {}}', False),
        ("half a pair", PLAIN + b'\n{"a": "\\ud83d"}', False),
        ("a control character", PLAIN + b'\n{"a": "\t"}', False),
        ("a long integer", PLAIN + b'\n{"c": 1234567890123456789}', False),
        ("a text for a number", PLAIN + b'\n{"c": "1"}', False),
        ("a number for a text", PLAIN + b'\n{"a": 1}', False),
        ("a large exponent", PLAIN + b'\n{"b": 1e400}', False),
        ("a leading zero", PLAIN + b'\n{"c": 01}', False),
        ("no number", PLAIN + b'\n{"b": NaN}', False),
        ("two in a line", PLAIN + b' {"a": "x"}', False),
        ("no fields", PLAIN + b"\n{}", False),
        ("cut short", PLAIN[:-1], False),
    ],
)
def test_a_block_is_taken_as_a_whole_or_not_at_all(kernels: Functions, name: str, data: bytes, is_taken: bool) -> None:
    found = PlainRows(SCHEMA, others=False).decode(kernels, pa.py_buffer(data), data.count(b"\n") + 1)
    assert (found is not None) == is_taken, name


def test_other_columns_are_passed_over_where_columns_are_chosen(kernels: Functions) -> None:
    data = pa.py_buffer(b'{"x": "\\ud83d\\ude00", "a": "y", "x": 1, "z": [{"a": {}}, [[]], "\\n"]}\n')
    found = PlainRows(pa.schema({"a": pa.string()}), others=True).decode(kernels, data, 1)
    assert found is not None
    assert found[0].to_pylist() == [{"a": "y"}]


def test_texts_with_many_escapes_take_the_memory_that_is_counted(kernels: Functions) -> None:
    rows = [{"a": "\u4e2d\u6587" * 500} for _ in range(200)]
    data = pa.py_buffer("\n".join(map(json.dumps, rows)).encode())
    before = pa.total_allocated_bytes()
    found = PlainRows(pa.schema({"a": pa.string()}), others=False).decode(kernels, data, len(rows))
    assert found is not None
    assert found[0].to_pylist() == rows
    assert pa.total_allocated_bytes() - before < 1.1 * found[0].nbytes


def test_columns_that_few_rows_have_are_left_to_arrow(kernels: Functions) -> None:
    data = pa.py_buffer(b'{"k0": 1}\n' * 20_000)
    schema = pa.schema([(f"k{i}", pa.int64()) for i in range(60)])
    assert PlainRows(schema, others=False).decode(kernels, data, 20_000) is None
    assert PlainRows(pa.schema(list(schema)[:5]), others=False).decode(kernels, data, 20_000) is not None


def test_a_block_with_a_long_list_changes_nothing_for_those_after_it(kernels: Functions) -> None:
    plain = PlainRows(pa.schema({"ids": pa.list_(pa.int64())}), others=False)
    few = [{"ids": [1, 2, 3]}] * 30_000
    for long in (0, 40_000, 0, 600_000, 0):
        rows = [*few[:100], {"ids": [7] * long}] if long else few
        data = pa.py_buffer("\n".join(map(json.dumps, rows)).encode())
        found = plain.decode(kernels, data, len(rows))
        if rows is few:
            assert found is not None
            assert found[0].to_pylist() == rows


def test_a_key_that_is_not_utf8_is_no_type(kernels: Functions) -> None:
    assert infer_plain(kernels, pa.py_buffer(b'{"a\xff": 1}\n')) is None


def test_many_keys_are_left_to_arrow(kernels: Functions) -> None:
    for count, is_taken in ((63, True), (64, False)):
        row = {f"k{i}": i for i in range(count)}
        data = pa.py_buffer(json.dumps(row).encode())
        inferred = infer_plain(kernels, data)
        assert (inferred is not None) == is_taken
        schema = pa.schema([(name, pa.int64()) for name in row])
        plain = PlainRows(schema, others=False)
        assert plain.is_possible == is_taken
        if is_taken:
            found = plain.decode(kernels, data, 1)
            assert found is not None
            assert found[0].to_pylist() == [row]


def test_a_source_reads_and_infers_by_the_kernels(
    kernels: Functions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"id": "{i}", "text": "{"long " * 99}é", "score": {i / 7}}}\n' for i in range(2000)))
    monkeypatch.setattr(JsonlSource, "_kernels", lambda self: kernels)
    for name in ("_parse", "_read_skeleton", "_read_any"):  # the plain path
        monkeypatch.setattr(JsonlSource, name, lambda *_: pytest.fail("the kernels did not take the block"))
    source = JsonlSource(path)
    assert source.schema == pa.schema({"id": pa.string(), "text": pa.string(), "score": pa.float64()})
    rows = []
    while (batch := source.next_batch(500)) is not None:
        rows += batch.to_pylist()
    assert [row["score"] for row in rows] == [i / 7 for i in range(2000)]


@given(st.lists(st.sampled_from([b"", b"x", b"y" * 63, b"z" * 200, b"\r"]), max_size=30).map(b"\n".join))
def test_lines_are_counted_as_without_kernels(kernels: Functions, data: bytes) -> None:
    assert KERNELS.loaded is kernels
    view = np.frombuffer(data, np.uint8)
    assert CountedLines().cut(view) == JsonLines().cut(view)


# -- machine code ------------------------------------------------------------------------------------------------------


def run(code: str, **environment: str) -> str:
    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True, env=env
    ).stdout


def test_small_inputs_load_no_compiler_and_large_ones_do_not_import_numba(kernels: Functions, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "x"}\n' * 1000)
    read = """
        import sys
        from penstock.sources import JsonlSource, plain_json
        {change}
        source = JsonlSource({path!r})
        while source.next_batch(100) is not None: pass
        print("llvmlite" in sys.modules, "numba" in sys.modules, plain_json.KERNELS._functions is not None)
    """
    assert run(read.format(change="", path=str(path))) == "False False False\n"
    loads = "from penstock.sources import jsonl; jsonl.LOAD_BYTES = 1"
    assert run(read.format(change=loads, path=str(path))) == "True False True\n"


@pytest.mark.skipif(sys.platform != "linux", reason="memory is protected as Linux does it")
def test_nothing_is_read_behind_a_block_wherever_it_is_cut(kernels: Functions) -> None:
    out = run("""
        import ctypes, mmap
        import numpy as np
        import pyarrow as pa
        from penstock.sources.plain_json import KERNELS, CountedLines, PlainRows, infer_plain

        rows = b'{"a": "' + b"x" * 70 + b'\\\\n\\\\ud83d\\\\ude00", "b": [-12.5e-3, null], "c": true}\\n'
        rows += b' {"c": false, "b": [], "a": "' + b"y" * 130 + b'"}\\r\\n\\n'
        rows += b'{"a": "' + b"\\\\u00e9" * 30 + b'", "c": null}'
        memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
        page = np.frombuffer(memory, np.uint8)[: mmap.PAGESIZE]
        protect = ctypes.CDLL(None).mprotect
        protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        assert protect(page.ctypes.data + mmap.PAGESIZE, mmap.PAGESIZE, 0) == 0
        kernels = KERNELS.wait()
        schema = pa.schema({"a": pa.string(), "b": pa.list_(pa.float64()), "c": pa.bool_()})
        plain, taken = PlainRows(schema, others=False), 0
        for size in range(1, len(rows) + 1):
            view = page[mmap.PAGESIZE - size :]
            view[:] = np.frombuffer(rows, np.uint8)[:size]
            block = pa.py_buffer(view)
            CountedLines().cut(view)
            taken += (plain.decode(kernels, block, 5) is not None) + (infer_plain(kernels, block) is not None)
        print(taken)
    """)
    assert int(out) == 2 * 8, "both, where whole rows end"


def test_rows_are_read_without_numba(tmp_path: Path) -> None:
    out = run("""
        import sys
        sys.modules["numba"] = sys.modules["llvmlite"] = None
        from penstock.sources.plain_json import KERNELS
        print(KERNELS.wait(), KERNELS.functions(compile_missing=True))
    """)
    assert out == "None None\n"


@pytest.mark.slow
def test_code_is_compiled_once_by_another_process(tmp_path: Path) -> None:
    code = """
        import sys
        from penstock.sources.plain_json import KERNELS
        print(KERNELS.functions(compile_missing=False))
        print(KERNELS.functions(compile_missing=False), KERNELS._compiler)
        print(sorted(KERNELS.wait()), "numba" in sys.modules)
    """
    out = run(code, NUMBA_CACHE_DIR=str(tmp_path))
    assert out == "None\nNone None\n['count_lines', 'find_values', 'take_bits', 'take_lists', 'take_texts'] False\n"
    (made,) = (tmp_path / "penstock").rglob("*.*")
    before = made.stat()
    assert "find_values" in run(code, NUMBA_CACHE_DIR=str(tmp_path))
    assert made.stat() == before


def test_code_that_cannot_be_compiled_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    module = tmp_path / "broken_kernels_of_a_test.py"
    module.write_text("raise ValueError\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert MachineCode(module.stem).wait() is None
    (kept,) = (tmp_path / "cache").rglob("*.code")
    assert kept.read_bytes() == b"failed"
    assert MachineCode(module.stem).wait() is None


def test_a_long_row_is_not_gone_through_for_each_of_its_keys(kernels: Functions) -> None:
    many = {f"k{number}": {f"n{inner}": inner for inner in range(15)} for number in range(60)}
    row = json.dumps({"text": "x" * 200_000} | many).encode() + b"\n"
    assert infer_plain(kernels, pa.py_buffer(row)) is None
    lists = json.dumps(dict.fromkeys(many)) + "\n" + json.dumps({"text": "x" * 200_000} | {key: [] for key in many})
    assert infer_plain(kernels, pa.py_buffer(lists.encode())) is None
    assert infer_plain(kernels, pa.py_buffer(json.dumps(many).encode() + b"\n" + b'{"k0": null}\n' * 80_000))


def test_a_numba_that_cannot_be_imported_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('needs another NumPy')\n")
    code = "from penstock.sources.plain_json import KERNELS; print(KERNELS.wait())"
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path / "cache"), PYTHONPATH=str(tmp_path)) == "None\n"
    assert not [*(tmp_path / "cache").rglob("*.code")]


def test_a_file_that_is_gone_does_not_take_the_rows_before_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"a": 1}\n')
    source = JsonlSource(sorted(tmp_path.glob("*.jsonl")), schema=pa.schema([("a", pa.int64())]))
    assert len(source.files) == 2
    (tmp_path / "b.jsonl").unlink()
    batch = source.next_batch(10)
    assert batch is not None
    assert batch.num_rows == 1
    with pytest.raises((PenstockError, OSError), match=r"b\.jsonl"):
        source.next_batch(10)


@pytest.mark.slow
def test_damaged_code_is_not_run_and_compiled_again(tmp_path: Path) -> None:
    code = "from penstock.sources.plain_json import KERNELS; print(KERNELS.wait() is not None)"
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)) == "True\n"
    (kept,) = (tmp_path / "penstock").rglob("*.*")
    whole = kept.read_bytes()
    for damaged in (whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], whole[:-1], b""):
        kept.write_bytes(damaged)
        assert run(code, NUMBA_CACHE_DIR=str(tmp_path)) == "False\n"
        assert not kept.exists()
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)) == "True\n"


def test_kernels_are_for_large_inputs_and_budgets_with_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(KERNELS, "functions", lambda *, compile_missing: asked.append(compile_missing))
    for number in range(5):
        (tmp_path / f"{number}.jsonl").write_text('{"a": "x"}\n' * 10)
    for load, compiled, budget, expected in [
        (551, 551, 1 << 30, []),
        (550, 551, 1 << 30, [False]),
        (1, 550, 1 << 30, [True]),
        (1, 1, 1 << 28, [False]),  # as much as the process takes that compiles
        (1, 1, 1 << 27, []),
    ]:
        monkeypatch.setattr(jsonl, "LOAD_BYTES", load)
        monkeypatch.setattr(jsonl, "COMPILE_BYTES", compiled)
        source = JsonlSource(tmp_path)
        source.fit_budget(budget)
        assert source._kernels() is None
        assert asked == expected
        asked.clear()
