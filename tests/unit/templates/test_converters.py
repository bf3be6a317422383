"""Rows to text: a table at once and row by row, from every kind of frame."""

from __future__ import annotations

import collections
import json
import math
import pickle
import re
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_tables import frame_of, is_missing, naive_text, rows_of, tables

from penstock.errors import ConfigError, DataError, SchemaError
from penstock.templates import (
    BaseTemplate,
    ColumnFormat,
    JinjaTemplate,
    KeyValueTemplate,
    SentenceTemplate,
    TabularTextConverter,
    TextTemplateEngine,
)
from penstock.templates.columns import hiding
from penstock.templates.converters import make_style

STYLES = ["natural", "key_value", "markdown", "json", "list"]


@pytest.fixture
def titanic() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "PassengerId": [1, 2, 3],
            "Survived": [0, 1, 1],
            "Name": ["Braund, Mr. Owen", "Heikkinen, Miss. Laina", 'Cumings, "Mrs." John'],
            "Age": [22.0, np.nan, 0.42],
            "Cabin": [None, None, "C85"],
        }
    )


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40, deadline=None)
@given(columns=tables())
def test_a_row_reads_the_same_alone_and_in_a_table(style: str, columns: dict[str, list[Any]]) -> None:
    converter = TabularTextConverter(style=style)
    frame, rows = frame_of(columns), rows_of(columns)
    texts = converter.convert_batch(frame)
    assert texts == [converter.convert_row(frame.iloc[row]) for row in range(len(frame))]
    assert texts == [converter.convert_row(row) for row in rows]
    assert texts == converter.convert_batch(columns)
    assert texts == converter.convert_batch(rows)
    assert (
        texts
        == converter.convert_table(pa.table({name: pa.array(cells) for name, cells in columns.items()})).to_pylist()
    )


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40, deadline=None)
@given(columns=tables())
def test_polars_and_pandas_frames_read_the_same(style: str, columns: dict[str, list[Any]]) -> None:
    converter = TabularTextConverter(style=style)
    columns = {name.replace("\0", "_"): cells for name, cells in columns.items()}
    polars = pl.DataFrame({name: pl.Series(cells, strict=False) for name, cells in columns.items()})
    assert converter.convert_batch(polars) == converter.convert_batch(frame_of(columns))
    assert [converter.convert_row(row) for row in polars.iter_rows(named=True)] == converter.convert_batch(polars)


@settings(max_examples=50, deadline=None)
@given(columns=tables())
def test_key_value_texts_are_those_of_a_plain_loop(columns: dict[str, list[Any]]) -> None:
    expected = [
        " | ".join(f"{name}: {naive_text(value)}" for name, value in row.items() if not is_missing(value))
        for row in rows_of(columns)
    ]
    assert TabularTextConverter(style="key_value").convert_batch(frame_of(columns)) == expected


@settings(max_examples=50, deadline=None)
@given(columns=tables())
def test_natural_texts_are_those_of_a_plain_loop(columns: dict[str, list[Any]]) -> None:
    expected = [
        " ".join(f"The {name} is {naive_text(value)}." for name, value in row.items() if not is_missing(value))
        for row in rows_of(columns)
    ]
    assert TabularTextConverter().convert_batch(frame_of(columns)) == expected


@settings(max_examples=50, deadline=None)
@given(columns=tables())
def test_json_reads_back_as_the_values(columns: dict[str, list[Any]]) -> None:
    def expected(value: Any) -> Any:
        infinite = isinstance(value, float) and math.isinf(value)
        return naive_text(value) if infinite or isinstance(value, date) else value

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    texts = TabularTextConverter(style="json").convert_batch(frame_of(columns))
    for text, row in zip(texts, rows_of(columns), strict=True):
        found = json.loads(text, parse_constant=refuse)
        assert found == {name: expected(value) for name, value in row.items() if not is_missing(value)}
        assert [type(value) is bool for value in found.values()] == [
            type(value) is bool for value in row.values() if not is_missing(value)
        ]


@settings(max_examples=50, deadline=None)
@given(columns=tables())
def test_markdown_tables_keep_their_cells_apart(columns: dict[str, list[Any]]) -> None:
    def unescaped(cell: str) -> str:
        return re.sub(r"\\([\\|])", r"\1", cell)

    def one_line(text: str) -> str:
        return re.sub(r"\r\n|\r|\n", "<br>", text)

    texts = TabularTextConverter(style="markdown").convert_batch(frame_of(columns))
    for text, row in zip(texts, rows_of(columns), strict=True):
        first, second, *lines = text.split("\n")
        assert (first, second) == ("| Column | Value |", "| --- | --- |")
        cells = [re.fullmatch(r"\| ((?:\\.|[^\\|])*) \| ((?:\\.|[^\\|])*) \|", line, re.DOTALL) for line in lines]
        found = [(unescaped(cell[1]), unescaped(cell[2])) for cell in cells if cell is not None]
        assert found == [
            (one_line(name), one_line(naive_text(value))) for name, value in row.items() if not is_missing(value)
        ]


@settings(max_examples=50, deadline=None)
@given(columns=tables())
def test_a_list_has_one_entry_for_each_value_whatever_lines_it_has(columns: dict[str, list[Any]]) -> None:
    texts = TabularTextConverter(style="list").convert_batch(frame_of(columns))
    for text, row in zip(texts, rows_of(columns), strict=True):
        entries = [entry.replace("\n  ", "\n") for entry in re.split(r"\n(?=- )", text)] if text else []
        assert entries == [f"- {name}: {naive_text(value)}" for name, value in row.items() if not is_missing(value)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1), st.lists(st.floats(width=16), min_size=1))
def test_narrow_floats_are_said_as_they_are_written(singles: list[float], halves: list[float]) -> None:
    converter = TabularTextConverter(style="key_value")
    for dtype, values in ((np.float32, singles), (np.float16, halves)):
        frame = pd.DataFrame({"x": np.array(values, dtype)})
        texts = converter.convert_batch(frame)
        assert texts == [converter.convert_row(frame.iloc[row]) for row in range(len(frame))]
        found = [np.array(text.removeprefix("x: ") or "nan", dtype) for text in texts]
        np.testing.assert_array_equal(np.array(found, dtype), frame["x"].to_numpy())
    assert converter.convert_row({"x": np.float32(0.1)}) == "x: 0.1"


def test_the_columns_of_a_row_that_pandas_made_floats_are_said_as_integers() -> None:
    frame = pd.DataFrame({"count": [3, 10**15], "share": [0.5, 1.0]})
    assert frame.iloc[0].dtype == float
    converter = TabularTextConverter(style="key_value")
    assert converter.convert_row(frame.iloc[0]) == "count: 3 | share: 0.5" == converter.convert_batch(frame)[0]
    assert converter.convert_row(frame.iloc[1]) == "count: 1000000000000000 | share: 1"


def test_files_are_read_by_their_suffix(tmp_path: Path, titanic: pd.DataFrame) -> None:
    converter = TabularTextConverter(style="key_value", target="Survived")
    expected = converter.convert_batch(titanic)
    titanic.to_csv(tmp_path / "a.csv", index=False)
    titanic.to_csv(tmp_path / "a.tsv", index=False, sep="\t")
    titanic.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    pq.write_table(pa.Table.from_pandas(titanic), tmp_path / "a.parquet")
    for name in ("a.csv", "a.tsv", "a.jsonl", "a.parquet"):
        assert converter.convert_batch(tmp_path / name) == expected
        assert converter.convert_batch(str(tmp_path / name)) == expected
    with pytest.raises(FileNotFoundError, match=r"b\.csv"):
        converter.convert_batch(tmp_path / "b.csv")


def test_other_forms_of_tables_and_rows_are_taken(titanic: pd.DataFrame) -> None:
    converter = TabularTextConverter(style="json")
    expected = converter.convert_batch(titanic)
    table = pa.Table.from_pandas(titanic)
    assert converter.convert_batch(table.to_batches()[0]) == expected
    assert converter.convert_batch(table.to_reader()) == expected
    assert converter.convert_batch(row for row in titanic.to_dict("records")) == expected
    assert [converter.convert_row(row) for row in titanic.itertuples(index=False)] == expected
    assert [converter.convert_row(table.slice(row, 1)) for row in range(3)] == expected
    point = collections.namedtuple("point", "x y")
    assert converter.convert_row(point(1, None)) == '{"x": 1}'


def test_the_target_is_never_said_and_need_not_be_there(titanic: pd.DataFrame) -> None:
    converter = TabularTextConverter(target="Survived", exclude=["PassengerId"])
    assert converter.convert_batch(titanic)[0] == "The Name is Braund, Mr. Owen. The Age is 22."
    assert (
        converter.convert_batch(titanic.drop(columns="Survived"))[0] == "The Name is Braund, Mr. Owen. The Age is 22."
    )
    assert converter.convert_row(titanic.iloc[2]) == (
        'The Name is Cumings, "Mrs." John. The Age is 0.42. The Cabin is C85.'
    )
    with pytest.raises(ConfigError, match=r"'sentence'.*target"):
        TabularTextConverter("{Name}: {Survived}", target="Survived")


def test_columns_are_chosen_and_put_in_order(titanic: pd.DataFrame) -> None:
    converter = TabularTextConverter(style="key_value", only=["Age", "Name"])
    assert converter.convert_batch(titanic)[2] == 'Age: 0.42 | Name: Cumings, "Mrs." John'


@pytest.mark.parametrize("option", ["only", "exclude", "columns"])
def test_a_column_that_is_not_there_is_named_with_a_suggestion(titanic: pd.DataFrame, option: str) -> None:
    given: Any = {"Agee": ColumnFormat()} if option == "columns" else ["Agee"]
    converter = TabularTextConverter(**{option: given})
    for convert, data in ((converter.convert_batch, titanic), (converter.convert_row, titanic.iloc[0])):
        with pytest.raises(SchemaError, match=r"'Agee'.*'Age'"):
            convert(data)


def test_options_that_cannot_work_are_refused() -> None:
    template = KeyValueTemplate()
    with pytest.raises(ConfigError, match=r"\bstyle\b.*'key_value'"):
        TabularTextConverter(style="keyvalue")
    with pytest.raises(ConfigError, match="columns="):
        TabularTextConverter(template, columns={})
    with pytest.raises(ConfigError, match="only="):
        TabularTextConverter(template, exclude=["a"])
    with pytest.raises(ConfigError, match=r"only=.*exclude="):
        TabularTextConverter(only=["a"], exclude=["a"])
    with pytest.raises(ConfigError, match=r"'a'.*exclude="):
        TabularTextConverter(exclude=["a", "a"])
    with pytest.raises(ConfigError, match=r"\bmixed\b.*'maybe'"):
        TabularTextConverter(mixed="maybe").convert_batch([])  # type: ignore[arg-type]


@pytest.mark.parametrize("style", STYLES)
def test_an_empty_frame_has_no_texts(style: str) -> None:
    converter = TabularTextConverter(style=style)
    for empty in (pd.DataFrame(), pd.DataFrame({"a": []}), [], {}, {"a": []}, pa.table({}), pl.DataFrame({"a": []})):
        assert converter.convert_batch(empty) == []
        assert len(converter.convert_table(empty)) == 0
    assert TabularTextConverter("{a}").convert_batch([]) == []
    with pytest.raises(SchemaError, match="'a'"):
        TabularTextConverter("{a}").convert_batch(pd.DataFrame({"b": []}))


def test_a_row_without_values_is_still_a_row() -> None:
    assert TabularTextConverter().convert_batch([{"a": None}, {"a": 1}, {"a": float("nan")}]) == ["", "The a is 1.", ""]
    assert TabularTextConverter(style="json").convert_batch([{"a": None}, {"a": 1}]) == ["{}", '{"a": 1}']
    assert TabularTextConverter(style="json", exclude=["a"]).convert_batch([{"a": 1}, {"a": 2}]) == ["{}", "{}"]
    assert TabularTextConverter(style="json").convert_row({}) == "{}"


def test_columns_of_one_name_are_refused() -> None:
    frame = pd.DataFrame([[1, 2, 3]], columns=["a", "b", "a"])
    message = r"'a'.*'b'"
    for data in (frame, pa.Table.from_arrays([pa.array([1])] * 3, names=["a", "b", "a"])):
        with pytest.raises(SchemaError, match=message):
            TabularTextConverter().convert_batch(data)
    with pytest.raises(SchemaError, match=message):
        TabularTextConverter().convert_row(frame.iloc[0])
    with pytest.raises(SchemaError, match="'1'"):
        TabularTextConverter().convert_batch(pd.DataFrame([[1, 2]], columns=[1, "1"]))


def test_what_is_no_table_or_no_row_is_refused(titanic: pd.DataFrame) -> None:
    converter = TabularTextConverter()
    with pytest.raises(SchemaError, match="convert_row"):
        converter.convert_batch(titanic.iloc[0])
    with pytest.raises(SchemaError, match=r"'a'.*convert_row"):
        converter.convert_batch({"a": 1})
    with pytest.raises(SchemaError, match="LazyFrame"):
        converter.convert_batch(pl.LazyFrame({"a": [1]}))
    with pytest.raises(SchemaError, match=r"a\\x00b"):
        converter.convert_batch(pl.DataFrame({"a\0b": [1]}))
    with pytest.raises(SchemaError, match="DataFrame"):
        converter.convert_row(titanic)
    with pytest.raises(SchemaError, match=r"columns.*'b'"):
        converter.convert_batch({"a": [1, 2], "b": [1]})


def test_a_template_or_a_written_sentence_can_be_given(titanic: pd.DataFrame) -> None:
    written = TabularTextConverter("{Name}[ ({Age})]", columns={"Age": ColumnFormat(unit="years")})
    template = SentenceTemplate("t", "{Name}[ ({Age})]", columns={"Age": ColumnFormat(unit="years")})
    expected = ["Braund, Mr. Owen (22 years)", "Heikkinen, Miss. Laina", 'Cumings, "Mrs." John (0.42 years)']
    assert written.convert_batch(titanic) == TabularTextConverter(template).convert_batch(titanic) == expected
    assert repr(TabularTextConverter(template, target="y")) == (
        "TabularTextConverter(SentenceTemplate('t', version='1'), target=['y'])"
    )


def test_large_tables_are_rendered_in_slices_without_a_seam() -> None:
    template = KeyValueTemplate()
    template.slice_rows = 7
    values = [None if n % 5 == 0 else n for n in range(50)]
    table = pa.table({"n": pa.chunked_array([values[:13], values[13:]]), "t": [str(n) for n in range(50)]})
    texts = template.render(table)
    assert texts.num_chunks == 8
    assert texts.to_pylist() == [f"t: {n}" if v is None else f"n: {v} | t: {n}" for n, v in enumerate(values)]
    assert TabularTextConverter(template).convert_table(table).type == pa.string()


def test_texts_past_the_limit_of_one_arrow_array_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.templates.base_template._MAX_BYTES", 200)
    table = pa.table({"x": ["a" * 50] * 9})
    texts = KeyValueTemplate().render(table)
    assert texts.num_chunks > 4
    assert texts.to_pylist() == ["x: " + "a" * 50] * 9
    with pytest.raises(DataError, match=r"\b200\b"):
        KeyValueTemplate().render(pa.table({"x": ["a" * 300]}))


@pytest.mark.parametrize(
    "template", [KeyValueTemplate(), SentenceTemplate("s", "{x}[ {y}]"), JinjaTemplate("j", "{{ x }}")], ids=str
)
def test_templates_travel_between_processes(template: BaseTemplate) -> None:
    row = {"x": 1, "y": None}
    text = template.render_row(row)
    again = pickle.loads(pickle.dumps(template))  # noqa: S301 - our own
    assert again == template
    assert again.fingerprint == template.fingerprint
    assert again.render_row(row) == text


def test_hidden_columns_are_not_said_unless_they_are_asked_for() -> None:
    row, table = {"x": 1, "y": 2}, {"x": [1], "y": [2]}
    every: list[TabularTextConverter | BaseTemplate] = [
        TabularTextConverter(style="key_value"),
        TabularTextConverter(KeyValueTemplate()),
        TabularTextConverter(style="key_value", columns={"y": ColumnFormat(unit="m")}),
        KeyValueTemplate(),
        JinjaTemplate("j", "{% for name in row %}{{ name }}: {{ row[name] }}{% endfor %}"),
    ]
    naming = [KeyValueTemplate(only=["y"]), SentenceTemplate("t", "y: {y}"), JinjaTemplate("j", "y: {{ row.y or y }}")]
    with hiding(["y"]):
        for template in every:
            assert template.convert_row(row) == "x: 1"
            assert template.convert_batch(table) == ["x: 1"]
        assert TextTemplateEngine().convert_data(table, "natural") == ["The x is 1."]
        for template in naming:
            assert template.convert_row(row) == "y: 2"
            assert template.convert_batch(table) == ["y: 2"]
    assert every[0].convert_row(row) == "x: 1 | y: 2"


def test_a_string_that_is_a_style_is_that_style(titanic: pd.DataFrame) -> None:
    for style in STYLES:
        by_name = TabularTextConverter(style, columns={"Age": ColumnFormat(unit="years")}, exclude=["Name"])
        assert by_name.template == make_style(style, columns={"Age": ColumnFormat(unit="years")}, exclude=["Name"])
    assert TabularTextConverter("json", target="Survived").convert_row(titanic.iloc[0]).startswith('{"PassengerId": 1')
    with pytest.raises(ConfigError, match=r"\bstyle\b.*'json'"):
        TabularTextConverter("jsno")
    with pytest.raises(ConfigError, match=r"'\{Age\}'.*\bstyle\b"):
        TabularTextConverter("Guess who survived.")
    with pytest.raises(ConfigError, match=r"'json'.*style='list'"):
        TabularTextConverter("json", style="list")


@pytest.mark.parametrize("target", ["Survivd", "survived", "Survived "])
def test_a_misspelt_target_is_not_put_into_the_text(titanic: pd.DataFrame, target: str) -> None:
    converter = TabularTextConverter(target=target)
    for convert, data in ((converter.convert_batch, titanic), (converter.convert_row, titanic.iloc[0])):
        with pytest.raises(SchemaError, match=rf"target.*'{target}'"):
            convert(data)
    unsaid = TabularTextConverter("{Name}", target=target)
    assert unsaid.convert_batch(titanic) == TabularTextConverter("{Name}").convert_batch(titanic)


def test_columns_that_only_look_a_little_like_the_target_are_said() -> None:
    for target, other in (("SalePrice", "SaleType"), ("sales_29", "sales_28"), ("target", "target_mean"), ("y", "x")):
        assert TabularTextConverter(style="key_value", target=target).convert_row({other: 1}) == f"{other}: 1"
