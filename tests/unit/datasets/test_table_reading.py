"""Reading tables as competitions have them: delimiters, encodings, holes, ragged rows, mixed types."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from house_prices_data import make_house_prices
from penstock.datasets import DatasetSpec, make_titanic
from penstock.datasets.column_types import typed_columns
from penstock.datasets.tables import find_file, read_names, read_table, split_file
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.compression import open_output

ROWS = 'id,name,size\n1,"Braund, Mr. Owen",2.5\n2,Ådne,\n'
VALUES = {"id": [1, 2], "name": ["Braund, Mr. Owen", "Ådne"], "size": [2.5, None]}


def written(folder: Path, content: str | bytes, name: str = "train.csv") -> Path:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder / name


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le-bom", "utf-32"])
def test_a_byte_order_mark_tells_the_encoding_and_is_in_no_name(tmp_path: Path, encoding: str) -> None:
    data = ("\ufeff" + ROWS).encode("utf-16-le") if encoding == "utf-16-le-bom" else ROWS.encode(encoding)
    table = read_table(written(tmp_path, data))
    assert table.to_pydict() == VALUES
    assert read_names(tmp_path / "train.csv") == ["id", "name", "size"]


def test_bytes_of_another_encoding_are_refused_until_it_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, ROWS.encode("latin-1"))
    with pytest.raises(DataError, match=r"encoding.*'latin-1'"):
        read_table(path)
    assert read_table(path, encoding="latin-1").to_pydict() == VALUES
    with pytest.raises(DataError, match="encoding"):
        read_table(path, encoding="latin-one")


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_is_found_by_looking(tmp_path: Path, delimiter: str) -> None:
    rows = [["a", "b", "c"], ["1", "x, y; z", "2,5"], ["2", "|p|", "3,5"]]
    text = "\n".join(delimiter.join(f'"{cell}"' if set(cell) & set(",;|\t") else cell for cell in row) for row in rows)
    table = read_table(written(tmp_path, text + "\n"))
    assert table.column_names == ["a", "b", "c"]
    assert table["b"].to_pylist() == ["x, y; z", "|p|"]


def test_commas_in_texts_do_not_hide_a_semicolon(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, "a;b\nx, y;1\nz, w;2\nq, r, s;3\n"))
    assert table.to_pydict() == {"a": ["x, y", "z, w", "q, r, s"], "b": [1, 2, 3]}


def test_of_delimiters_that_fit_equally_well_it_is_the_semicolon(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, "Preis, EUR;Zimmer\n1,5;3\n2,5;4\n"))
    assert table.to_pydict() == {"Preis, EUR": [1.5, 2.5], "Zimmer": [3, 4]}


def test_commas_in_every_row_but_the_header_are_no_delimiter(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, "a;b\n" + "1,5;2,5\n" * 150))
    assert table.column_names == ["a", "b"]
    assert table["a"][0].as_py() == 1.5


def test_a_file_with_one_column_is_a_table(tmp_path: Path) -> None:
    assert read_table(written(tmp_path, "a\n1\n2\n")).to_pydict() == {"a": [1, 2]}


def test_a_delimiter_that_is_given_is_used(tmp_path: Path) -> None:
    assert read_table(written(tmp_path, "a^b\n1^2\n"), delimiter="^").to_pydict() == {"a": [1], "b": [2]}
    with pytest.raises(ConfigError, match="delimiter"):
        read_table(tmp_path / "train.csv", delimiter="::")
    with pytest.raises(ConfigError, match="delimiter"):
        read_table(tmp_path / "train.csv", delimiter=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz"])
def test_compressed_files_are_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"train.csv{suffix}"
    with open(path, "wb") as file:
        out = open_output(file, suffix)
        out.write(ROWS.encode())
        out.close()
    assert read_table(path).to_pydict() == VALUES
    assert read_names(path) == list(VALUES)


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = written(tmp_path, gzip.compress(ROWS.encode())[:-12], "train.csv.gz")
    with pytest.raises(DataError, match=r"train\.csv\.gz"):
        read_table(path)
    with pytest.raises(DataError, match=r"train\.parquet"):
        read_table(written(tmp_path, b"no parquet", "train.parquet"))


def test_parquet_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table(VALUES), tmp_path / "train.parquet")
    assert read_table(tmp_path / "train.parquet").to_pydict() == VALUES
    assert read_table(tmp_path / "train.parquet", columns=["size"]).to_pydict() == {"size": [2.5, None]}
    assert read_names(tmp_path / "train.parquet") == list(VALUES)


def test_dictionaries_and_views_of_parquet_are_read_as_values(tmp_path: Path) -> None:
    texts = pa.array(["x", "y", None, "x"])
    kinds = {"d": texts.dictionary_encode(), "v": texts.cast(pa.string_view()), "n": pa.array([1, 2, 1, 1])}
    pq.write_table(pa.table(kinds | {"n": kinds["n"].dictionary_encode()}), tmp_path / "train.parquet")
    table = read_table(tmp_path / "train.parquet")
    assert table.schema.types == [pa.string(), pa.string(), pa.int64()]
    assert table["d"].to_pylist() == table["v"].to_pylist() == texts.to_pylist()


def test_one_word_among_numbers_makes_a_column_text(tmp_path: Path) -> None:
    rows = [*map(str, range(5000)), "unknown"]
    table = read_table(written(tmp_path, "a,b\n" + "".join(f"{cell},1\n" for cell in rows)))
    assert table["a"].type == pa.string()
    assert table["a"].to_pylist() == rows


def test_a_word_in_a_column_said_to_be_numeric_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, 'age,b\n22,1\n"about 30",2\nyoung,3\n')
    problem = r"'age'.*'about 30'"
    with pytest.raises(DataError, match=problem) as caught:
        read_table(path, kinds={"age": "numeric"})
    assert caught.value.row == 1


@pytest.mark.parametrize(
    ("cells", "kind", "values"),
    [
        (["yes", "No", ""], "boolean", [True, False, None]),
        (["1", "0", "1"], "boolean", [True, False, True]),
        ([" 1.5 ", "x".replace("x", "2"), ""], "numeric", [1.5, 2.0, None]),
        (["1", "2", "3"], "text", ["1", "2", "3"]),
        (["007", "8", "9"], None, ["007", "8", "9"]),
        (["7", "8", ""], "categorical", [7, 8, None]),
        (["true", "False", ""], None, [True, False, None]),
        (["0", "1", "true"], None, ["0", "1", "true"]),
    ],
)
def test_columns_become_what_they_are_said_to_be(
    tmp_path: Path, cells: list[str], kind: Any, values: list[Any]
) -> None:
    path = written(tmp_path, "a,b\n" + "".join(f"{cell},x\n" for cell in cells))
    assert read_table(path, kinds={"a": kind})["a"].to_pylist() == values


LATE = [str(number) for number in range(1000, 2100)]


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        ([*LATE, "0042", "42"], None),
        ([*LATE, "0042"], "categorical"),
        ([*LATE, "0042"], "id"),
        (["12345678901234567890", "7"], None),
        (["12345678901234567890", "12345678901234567891"], "id"),
        (["12345678901234567890", "1.5"], "categorical"),
        (["0x1F", "12"], None),
        (["007.10", "3.5"], None),
        (["00.5", "3"], None),
        (["01e5", "3"], None),
        (["9007199254740993", "1.5"], None),
        (["1e5", "3"], "id"),
        (["1.0", "2.0"], "id"),
        (["2024-01-01 00:00", "2024-01-02 00:00"], "id"),
    ],
)
def test_codes_come_back_as_they_are_written(tmp_path: Path, cells: list[str], kind: Any) -> None:
    path = written(tmp_path, "a,b\n" + "".join(f"{cell},0.5\n" for cell in cells))
    table = read_table(path, kinds={"a": kind})
    assert table["a"].to_pylist() == cells
    assert table["b"].type == pa.float64()
    assert read_table(path, kinds={"a": kind}, columns=["a"])["a"].to_pylist() == cells


@pytest.mark.parametrize(
    ("cells", "kind", "values"),
    [
        (["1", "22"], "id", [1, 22]),
        (["007", "8"], "numeric", [7, 8]),
        (["12345678901234567890", "1"], "numeric", [12345678901234567890.0, 1.0]),
        (["1", "2.0"], "categorical", [1.0, 2.0]),
        (["0.5", "-0"], None, [0.5, 0.0]),
        (["9223372036854775807", "1"], None, [9223372036854775807, 1]),
        (["9007199254740991", "1.5"], None, [9007199254740991.0, 1.5]),
        (["1e-05", "1e17"], None, [1e-05, 1e17]),
        (["12:03", " 007 x"], None, ["12:03", " 007 x"]),
    ],
)
def test_what_numbers_give_back_stays_a_number(tmp_path: Path, cells: list[str], kind: Any, values: list[Any]) -> None:
    path = written(tmp_path, "a,b\n" + "".join(f"{cell},00\n" for cell in cells))
    assert read_table(path, kinds={"a": kind})["a"].to_pylist() == values


@pytest.mark.parametrize("before", ["1,", "1,-", "1, ", '1,"', "1;", "1\t"])
@pytest.mark.parametrize("zero", ["007", "0x1F", "0.7", "0", "70"])
def test_no_code_is_overlooked_wherever_it_stands(tmp_path: Path, before: str, zero: str) -> None:
    delimiter, quote = before[1], before[2:] if before.endswith('"') else ""
    path = written(tmp_path, f"a{delimiter}b\n{before}{zero}{quote}\n2{delimiter}5\n")
    is_code = zero in ("007", "0x1F")
    assert pa.types.is_string(read_table(path).schema.field("b").type) == is_code


NUMBERS = ["1", "-2", "+3", " 4", "5 ", "1.5", "1e5", "inf", "-inf", "1.", ".5", "-0", "1e999", "9" * 20, "1_0", "x"]
TIMES = ["2020-01-02", "2020-01-02 ", "2020-01-02 03:04", "2020-01-02T03:04:05.1", "2020-01-02 03:04:05+02:00", "12:34"]


@pytest.mark.parametrize("first", [*NUMBERS, *TIMES, "12:34:56", "25:61", "true", "False", "yes", " true"])
def test_types_are_those_that_arrow_infers(first: str) -> None:
    for second in [*NUMBERS, *TIMES, "true"]:
        cells = pa.table({"a": [first, second]})
        options = pcsv.ConvertOptions(true_values=["true", "True"], false_values=["false", "False"], null_values=[""])
        data = pa.py_buffer(f'a\n"{first}"\n"{second}"\n'.encode())
        expected = pcsv.read_csv(pa.BufferReader(data), convert_options=options)["a"]
        found = typed_columns(cells, {"a": "numeric"}, {}, "a.csv", has_codes=False, decimal_commas=False)["a"]
        assert (found.type, found.to_pylist()) == (expected.type, expected.to_pylist()), second


@pytest.mark.parametrize("first", ["\n", "\r\n\r\n", "  \n", "sep=;\n", '"sep=;"\r\n\n', "\nSEP=;\n"])
def test_lines_before_the_header_are_no_header(tmp_path: Path, first: str) -> None:
    path = written(tmp_path, first + "a;b\n1;x,y\n2;z\n")
    assert read_table(path).to_pydict() == {"a": [1, 2], "b": ["x,y", "z"]}
    assert read_names(path) == ["a", "b"]
    with pytest.raises(DataError, match=r"line 3\b") as caught:
        read_table(written(tmp_path, '\na;b\n1;"x\n'))
    assert caught.value.row == 0


def test_the_delimiter_that_a_first_line_says_is_used(tmp_path: Path) -> None:
    assert read_table(written(tmp_path, "sep=^\na^b\n1^2\n")).to_pydict() == {"a": [1], "b": [2]}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_two_bytes_for_a_sign_without_a_mark_are_told(tmp_path: Path, encoding: str) -> None:
    path = written(tmp_path, ROWS.encode(encoding))
    with pytest.raises(DataError, match=rf"{encoding}.*encoding='{encoding}'"):
        read_table(path)
    assert read_table(path, encoding=encoding).to_pydict() == VALUES


def test_decimal_commas_are_read_in_files_of_semicolons(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, "a;b;c;d\n1,5;1,000;x,5;0\n;2,500;2,5;-1,25\n")
    with caplog.at_level("INFO", "penstock.datasets.column_types"):
        table = read_table(path)
        assert table.to_pydict() == {"a": [1.5, None], "b": ["1,000", "2,500"], "c": ["x,5", "2,5"], "d": [0.0, -1.25]}
        assert [record.args[1] for record in caplog.records] == ["a", "d"]  # type: ignore[index]
        caplog.clear()
        assert read_table(path, kinds={"b": "numeric", "a": "text"})["b"].to_pylist() == [1.0, 2.5]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    with pytest.raises(DataError, match="'1,5'"):
        read_table(written(tmp_path, 'a,b\n"1,5",2\n'), kinds={"a": "numeric"})


def test_points_beside_decimal_commas_may_be_thousands(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, "price;weight;size\n1.500;2,5;1.5\n900;3,75;1.250\n;;\n")
    with caplog.at_level("WARNING", "penstock.datasets.column_types"):
        table = read_table(path)
    assert table["price"].to_pylist() == ["1.500", "900", None]
    assert (table["weight"].to_pylist(), table["size"].to_pylist()) == ([2.5, 3.75, None], [1.5, 1.25, None])
    [record] = caplog.records
    assert re.search(r"'price'.*'1\.500'", record.getMessage())
    with pytest.raises(DataError, match=r"'price'.*'1\.500'") as caught:
        read_table(path, kinds={"price": "numeric"})
    assert caught.value.row == 0
    told = read_table(path, kinds={"price": "numeric"}, followed={"price": pa.float64()})
    assert told["price"].to_pylist() == [1.5, 900.0, None]
    assert read_table(written(tmp_path, "price;weight\n1.500;2\n"))["price"].to_pylist() == [1.5]


def test_dates_are_read_and_others_named(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, "day,b\n2024-05-17,1\n,2\n"), kinds={"day": "date"})
    assert pa.types.is_temporal(table["day"].type)
    with pytest.raises(DataError, match=r"'day'.*'Friday'"):
        read_table(written(tmp_path, "day,b\nFriday,1\n"), kinds={"day": "date"})
    with pytest.raises(DataError, match=r"'b'.*'maybe'"):
        read_table(written(tmp_path, "a,b\n1,maybe\n"), kinds={"b": "boolean"})


@pytest.mark.parametrize(
    ("text", "row", "found"),
    [
        ("a,b\n1,2\n3\n", 1, "'3'"),
        ("a,b\n\n1,2\n\n3,4\n5,6,7\n", 2, "'5,6,7'"),
        ('a,b\n1,"x\ny"\n3\n', 1, "delimiter="),
        ('a,b\n1,2\n3,"4\n5,6\n', 1, r"line 3\b"),
    ],
)
def test_ragged_rows_are_refused_with_their_number(tmp_path: Path, text: str, row: int, found: str) -> None:
    with pytest.raises(DataError, match=found) as caught:
        read_table(written(tmp_path, text))
    assert caught.value.row == row
    assert caught.value.file == "train.csv"


def test_a_quote_inside_a_cell_is_no_open_quote(tmp_path: Path) -> None:
    assert read_table(written(tmp_path, 'a,b\n5" pipe,2\n6 pipe,3\n'))["a"].to_pylist() == ['5" pipe', "6 pipe"]


def test_headers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="'a'"):
        read_table(written(tmp_path, "a,a\n1,2\n"))
    with pytest.raises(DataError, match=r"train\.csv"):
        read_table(written(tmp_path, "\n"))
    with pytest.raises(DataError, match=r"train\.csv"):
        read_table(written(tmp_path, ""))
    assert read_table(written(tmp_path, ",a\n1,2\n")).column_names == ["Unnamed: 0", "a"]
    assert read_table(written(tmp_path, "a,b\n")).num_rows == 0


def test_columns_are_chosen_by_name(tmp_path: Path) -> None:
    assert read_table(written(tmp_path, ROWS), columns=["size"]).to_pydict() == {"size": [2.5, None]}
    with pytest.raises(SchemaError, match="'size'"):
        read_table(tmp_path / "train.csv", columns=["sise"])


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train\.csv"):
        read_table(tmp_path / "train.csv")
    with pytest.raises(ConfigError, match=r"'\.csv'"):
        read_table(written(tmp_path, "x", "train.png"))


def test_missing_values_are_those_of_pandas_but_none(tmp_path: Path) -> None:
    path = written(tmp_path, "a,b\nNA,1\nx,NaN\nNone,\n")
    assert read_table(path).to_pydict() == {"a": [None, "x", "None"], "b": [1, None, None]}
    assert read_table(path, missing=[""])["a"].to_pylist() == ["NA", "x", "None"]


@pytest.mark.parametrize("make", [make_titanic, make_house_prices])
def test_whole_files_read_as_pandas_reads_them(tmp_path: Path, make: Any) -> None:
    make(tmp_path, rows=200, test_rows=10)
    ours = read_table(tmp_path / "train.csv").to_pandas()
    usual = [word for word in pd._libs.parsers.STR_NA_VALUES if word != "None"]
    theirs = pd.read_csv(tmp_path / "train.csv", keep_default_na=False, na_values=usual)
    pd.testing.assert_frame_equal(ours, theirs, check_dtype=False)


cells = st.text(st.characters(codec="utf-8", exclude_characters="\r\x00", exclude_categories=["Cs"]), max_size=6)


@given(rows=st.lists(st.tuples(cells, cells), min_size=1, max_size=8), delimiter=st.sampled_from([",", ";", "\t", "|"]))
@settings(max_examples=60, deadline=None)
def test_texts_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], delimiter: str
) -> None:
    path = tmp_path_factory.mktemp("csv") / "train.csv"
    pd.DataFrame(rows, columns=["left", "right"]).to_csv(path, sep=delimiter, index=False, quoting=1)
    table = read_table(path, kinds={"left": "text", "right": "text"}, missing=[])
    assert list(zip(table["left"].to_pylist(), table["right"].to_pylist())) == rows


@pytest.mark.parametrize("name", ["train.csv", "Train.CSV", "training.csv.gz", "train.parquet", "TRAIN.tsv"])
def test_the_file_of_a_split_is_found_whatever_its_case_and_format(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    (tmp_path / "train_extra.csv").touch()
    assert find_file(tmp_path, "train") == tmp_path / name
    assert find_file(tmp_path, "test") is None
    assert find_file(tmp_path / "nowhere", "train") is None


def test_a_plain_csv_file_comes_before_others(tmp_path: Path) -> None:
    for name in ("train.parquet", "train.csv.gz", "train.csv"):
        (tmp_path / name).touch()
    assert find_file(tmp_path, "train") == tmp_path / "train.csv"


def test_a_split_whose_file_is_missing_lists_what_is_there(tmp_path: Path) -> None:
    spec = DatasetSpec("a", tmp_path, "binary", files={"test": "t.csv"})  # type: ignore[arg-type]
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileNotFoundError, match=r"notes\.txt"):
        split_file(spec, "train")
    with pytest.raises(FileNotFoundError, match=r"'t\.csv'"):
        split_file(spec, "test")


def test_remote_files_are_read_through_a_local_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = fsspec.filesystem("memory")
    files.pipe("/competition/train.csv", ROWS.encode())
    try:
        spec = DatasetSpec("a", "memory://competition", "binary")  # type: ignore[arg-type]
        assert read_table(split_file(spec, "train")).to_pydict() == VALUES
    finally:
        files.rm("/competition", recursive=True)
