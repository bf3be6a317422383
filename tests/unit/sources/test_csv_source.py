from __future__ import annotations

import csv
import datetime as dt
import io
import itertools
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, DataError, SchemaError
from penstock.sources import CsvSource
from penstock.testing import assert_source_contract


def read(source: CsvSource) -> list[dict[str, Any]]:
    rows = []
    try:
        while (batch := source.next_batch(1000)) is not None:
            assert batch.schema.equals(source.schema)
            rows += batch.to_pylist()
    finally:
        source.close()
    return rows


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def types(source: CsvSource) -> dict[str, str]:
    return {field.name: str(field.type) for field in source.schema}


# -- records ---------------------------------------------------------------------------------------------------------

cells = st.text(st.sampled_from('ab,";\n\r\té '), min_size=1, max_size=6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=8),
    crlf=st.booleans(),
    bom=st.booleans(),
    newline_at_end=st.booleans(),
    block=st.sampled_from([1, 20, 1 << 20]),
)
def test_text_written_by_the_csv_module_is_read_back_exactly(
    tmp_path: Path, rows: list[tuple[str, ...]], crlf: bool, bom: bool, newline_at_end: bool, block: int
) -> None:
    out = io.StringIO()
    csv.writer(out, lineterminator="\r\n" if crlf else "\n", quoting=csv.QUOTE_ALL).writerows(
        [("x", "y\nz", "w"), *rows]
    )
    text = out.getvalue() if newline_at_end else out.getvalue().rstrip("\r\n")
    path = write(tmp_path / "a.csv", ("\ufeff" if bom else "") + text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.sources.record_source._SCAN_BYTES", block)
        patch.setattr("penstock.sources.record_source._BATCH_BYTES", block)
        schema = pa.schema([(name, pa.string()) for name in ("x", "y\nz", "w")])
        assert [tuple(row.values()) for row in read(CsvSource(path, schema=schema))] == rows


def test_quotes_inside_a_value_that_is_not_quoted_are_characters(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'size,n\n5" disk,1\n"6"" disk",2\n7" disk,3\n"8\n9",4\n')
    assert read(CsvSource(path)) == [
        {"size": '5" disk', "n": 1},
        {"size": '6" disk', "n": 2},
        {"size": '7" disk', "n": 3},
        {"size": "8\n9", "n": 4},
    ]


def test_a_table_of_passengers_is_what_pandas_reads(tmp_path: Path) -> None:
    """The usual troubles at once: CRLF, quoted commas, doubled quotes, empty cells, numbers with and without holes."""
    lines = ["Id,Survived,Name,Age,Cabin,Fare"]
    for i in range(300):
        age = "" if i % 7 == 0 else f"{20 + i % 50}" if i % 3 else f"{20 + i % 50}.5"
        cabin = "" if i % 4 else f"C{i}"
        lines.append(f'{i},{i % 2},"Family {i}, Mr. ""Jo"" {i}",{age},{cabin},{i * 0.25}')
    path = tmp_path / "passengers.csv"
    path.write_bytes("\r\n".join([*lines, ""]).encode())
    frame = pd.read_csv(path)
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    assert read(CsvSource(path)) == rows
    some = CsvSource(path, columns=["Name", "Age"])
    assert read(some) == [{"Name": row["Name"], "Age": row["Age"]} for row in rows]


def test_a_tab_separated_file_is_read_by_its_suffix_even_beside_a_comma_separated_one(tmp_path: Path) -> None:
    write(tmp_path / "1.csv", 'a,b\n1,"x\ty"\n')
    write(tmp_path / "2.tsv", 'a\tb\n2\tx,"y\n3\t"x\ty"\n')
    assert read(CsvSource(tmp_path)) == [{"a": 1, "b": "x\ty"}, {"a": 2, "b": 'x,"y'}, {"a": 3, "b": "x\ty"}]
    assert read(CsvSource(write(tmp_path / "x.txt", "a;b\n1;2\n"), delimiter=";")) == [{"a": 1, "b": 2}]


def test_files_may_have_their_columns_in_another_order_or_lack_one(tmp_path: Path) -> None:
    write(tmp_path / "1.csv", "a,b\n1,x\n")
    write(tmp_path / "2.csv", "b,a\ny,2\n")
    write(tmp_path / "3.csv", "c,a\n0.5,3\n")
    write(tmp_path / "4.csv", "d,a\n")
    source = CsvSource(tmp_path)
    assert types(source) == {"a": "int64", "b": "string", "c": "double", "d": "null"}
    assert [tuple(row.values()) for row in read(source)] == [
        (1, "x", None, None),
        (2, "y", None, None),
        (3, None, 0.5, None),
    ]
    assert read(CsvSource(tmp_path, columns=["b"])) == [{"b": "x"}, {"b": "y"}, {"b": None}]


def test_a_file_without_a_header_gets_the_names_it_is_given(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "1,x\n2,y\n")
    assert read(CsvSource(path, names=["n", "s"])) == [{"n": 1, "s": "x"}, {"n": 2, "s": "y"}]
    with pytest.raises(ConfigError, match=r"\bnames\b.*'n'"):
        CsvSource(path, names=["n", "n"])


def test_a_header_longer_than_any_buffer_is_read_once_for_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"column_{i}_{'x' * 50}" for i in range(5000)]
    path = write(tmp_path / "a.csv", ",".join(names) + "\n" + ",".join("1" for _ in names) + "\n")
    calls = []
    original = CsvSource._header
    monkeypatch.setattr(CsvSource, "_header", lambda self, *args: calls.append(1) or original(self, *args))
    monkeypatch.setattr("penstock.sources.record_source._BATCH_BYTES", 100)
    assert read(CsvSource(path)) == [dict.fromkeys(names, 1)]
    assert len(calls) == 1


def test_blank_lines_before_the_header_and_between_rows_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "\ufeff\r\n\na,b\r\n1,x\r\n\r\n\n2,y\r\n\n")
    source = CsvSource(path)
    assert read(source) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    block = (source := CsvSource(path)).next_block(1000)
    assert block is not None
    decoded = source.decode(block)
    source.close()
    assert decoded.rows == (0, 3)
    data = path.read_bytes()
    assert [data[source.offset_of(block, row) :][:3] for row in decoded.rows] == [b"1,x", b"2,y"]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"a,b,a\n", "'a'"),
        (b"a,\xff\n", "'utf-8'"),
        (b"a,b\r1,2\r3,4\r", "header"),
    ],
)
def test_a_header_that_cannot_be_read_is_an_error_in_its_place(tmp_path: Path, header: bytes, reason: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(header)
    source = CsvSource(path, allow_empty=True)
    with pytest.raises(DataError, match=r"a\.csv, byte 0: ") as caught:
        source.next_batch(10)
    assert reason in caught.value.reason


# -- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["1", "-2", ""], "int64"),
        (["1", "2.5"], "double"),
        (["1", "x"], "string"),
        (["1", "2.5", "x"], "string"),
        (["true", "False"], "bool"),
        (["1", "true"], "string"),
        (["0", "1"], "int64"),
        (["2020-01-01", ""], "date32[day]"),
        (["2020-01-01", "2020-01-01 10:00:00"], "timestamp[s]"),
        (["2020-01-01", "2020-01-01 10:00:00.5"], "timestamp[ns]"),
        (["2020-01-01 10:00:00", "2020-01-01 10:00:00.5"], "timestamp[ns]"),
        (["2020-01-01T10:00:00Z", "2020-01-01T10:00:00.5Z"], "timestamp[ns, tz=UTC]"),
        (["2020-01-01T10:00:00Z", "2020-01-01"], "string"),
        (["10:00:00", "11:30"], "time32[s]"),
        (["10:00:00", "2020-01-01"], "string"),
        (["2020-01-01", "5"], "string"),
        (["NA", "1"], "int64"),
        (["NA", "x"], "string"),
        (["NA", "null", ""], "null"),
        (["99999999999999999999", "1"], "double"),
    ],
)
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_the_type_of_a_column_comes_from_all_rows_in_any_order_and_any_blocks(
    tmp_path: Path, cells: list[str], kind: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sources.record_source._SCAN_BYTES", block)
    for order in itertools.permutations(cells):
        path = write(tmp_path / "a.csv", "k,v\n" + "".join(f"k,{cell}\n" for cell in order))
        assert types(CsvSource(path)) == {"k": "string", "v": kind}
        assert len(read(CsvSource(path))) == len(cells)


def test_an_empty_cell_is_null_and_na_is_null_except_in_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'n,s,f\n1,NA,NaN\nNA,"",1.5\n,"null",\n"","x",nan\n')
    assert read(CsvSource(path)) == [
        {"n": 1, "s": "NA", "f": None},
        {"n": None, "s": None, "f": 1.5},
        {"n": None, "s": "null", "f": None},
        {"n": None, "s": "x", "f": None},
    ]


def test_a_given_schema_decides_and_must_match_the_header(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "zip,n,day\n007,1,2020-02-03\n")
    schema = pa.schema([("zip", pa.string()), ("n", pa.int8()), ("day", pa.date32())])
    assert read(CsvSource(path, schema=schema)) == [{"zip": "007", "n": 1, "day": dt.date(2020, 2, 3)}]
    assert read(CsvSource(path, schema=schema, columns=["n"])) == [{"n": 1}]
    with pytest.raises(SchemaError, match=r"'zip'.*'day'"):
        read(CsvSource(path, schema=schema.append(pa.field("more", pa.int64()))))
    with pytest.raises(SchemaError, match=r"'day'.*schema"):
        read(CsvSource(path, schema=pa.schema(list(schema)[:2])))
    with pytest.raises(SchemaError, match="'v'"):
        CsvSource(path, schema=pa.schema([("v", pa.list_(pa.int64()))]))


def test_a_file_with_only_a_header_has_columns_and_no_rows(tmp_path: Path) -> None:
    for text in ("a,b", "a,b\n", "a,b\r\n\r\n"):
        source = CsvSource(write(tmp_path / "a.csv", text))
        assert types(source) == {"a": "null", "b": "null"}
        assert read(source) == []


@pytest.mark.parametrize("delimiter", ["", ",,", '"', "\n", "é"])
def test_a_delimiter_is_one_ascii_character(tmp_path: Path, delimiter: str) -> None:
    with pytest.raises(ConfigError, match="delimiter"):
        CsvSource(tmp_path, delimiter=delimiter)


# -- bad records -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "kind", "reason"),
    [
        (b"1,x,y", "wrong number of columns", "Expected 2 columns, got 3: 1,x,y"),
        (b"1", "wrong number of columns", "Expected 2 columns, got 1: 1"),
        (b"   ", "wrong number of columns", "Expected 2 columns, got 1:"),
        (b"1,\xff", "invalid UTF-8", "position 2"),
        (b"x,y", "does not fit the schema", "'n'"),
        (b"1,x\r2,y", "bare carriage return", "lines"),
    ],
)
@pytest.mark.parametrize("before", [b"", b'7,"a\nb"\n', b"\r\n\r\n7,a\r\n"])
@pytest.mark.parametrize("after", [b"", b"\n", b"\n8,b\n"])
def test_a_bad_record_is_named_with_its_exact_place_and_the_others_arrive(
    tmp_path: Path, bad: bytes, kind: str, reason: str, before: bytes, after: bytes
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"n,s\n" + before + bad + after)
    source = CsvSource(path, schema=pa.schema([("n", pa.int64()), ("s", pa.string())]))
    rejected, rows = [], []
    while (block := source.next_block(1 << 20)) is not None:
        decoded = source.decode(block)
        rejected += decoded.rejected
        rows += [row["n"] for row in decoded.batch.to_pylist()]
    source.close()
    assert rows == [7] * before.count(b"7") + [8] * after.count(b"8")
    [row] = rejected
    assert (row.kind, row.data, row.stage) == (kind, bad, "reading CSV")
    assert reason in row.reason
    assert path.read_bytes()[row.offset :].startswith(bad)
    assert row.row == {b"": 0, b'7,"a\nb"\n': 1, b"\r\n\r\n7,a\r\n": 3}[before]


def test_bad_records_do_not_decide_about_types(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"n,s\n1,x\nnot a number,too,many\n2,y\nalso not,\xff\n3,z\n")
    assert types(CsvSource(path)) == {"n": "int64", "s": "string"}


def test_a_quote_that_is_never_closed_is_an_error_behind_the_good_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'n,s\n1,x\n2,"y\n3,z\n')
    source = CsvSource(path)
    assert source.next_batch(10).to_pylist() == [{"n": 1, "s": "x"}]  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"row 1\b.*byte 8\b"):
        source.next_batch(10)


def test_a_csv_source_keeps_the_contract_of_sources(tmp_path: Path) -> None:
    write(tmp_path / "1.csv", "\ufeffa,b\r\n" + "".join(f'{i},"x\r\n{i}"\r\n\r\n' for i in range(15)))
    write(tmp_path / "2.csv", "b,a\n" + "\n".join(f"y,{i}" for i in range(15, 22)))
    rows = [{"a": i, "b": f"x\r\n{i}" if i < 15 else "y"} for i in range(22)]
    assert_source_contract(lambda: CsvSource(tmp_path), rows)


def test_a_header_of_many_columns_takes_no_longer_than_its_length(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(10_000)]
    (tmp_path / "wide.csv").write_text(",".join(names) + "\n" + ",".join(map(str, range(10_000))) + "\n")
    source = CsvSource(tmp_path / "wide.csv")
    assert source.schema.names == names
    batch = source.next_batch(10)
    assert batch is not None
    assert batch.num_columns == 10_000


@pytest.mark.parametrize(
    ("header", "word"), [(",".join(map(str, range(200_000))), "200,000 columns"), ("a,b,a", "twice")]
)
def test_a_header_of_too_many_or_repeated_columns_is_refused(tmp_path: Path, header: str, word: str) -> None:
    (tmp_path / "wide.csv").write_text(f"{header}\n1\n")
    with pytest.raises(DataError, match=word):
        CsvSource(tmp_path / "wide.csv").next_batch(1)
