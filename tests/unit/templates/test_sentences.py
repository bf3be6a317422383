"""Written sentences, and Jinja."""

from __future__ import annotations

from datetime import date
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from template_tables import frame_of, is_missing, naive_text, rows_of, tables

from penstock.errors import ConfigError, DataError, SchemaError
from penstock.templates import ColumnFormat, JinjaTemplate, SentenceTemplate, TabularTextConverter, as_table

PORTS = ColumnFormat(categories={"S": "Southampton", "C": "Cherbourg"})
TITANIC = SentenceTemplate(
    "titanic_v1",
    "{Name} was a {Sex} passenger[ aged {Age:.0f} years][, who embarked at {Embarked}].",
    columns={"Embarked": PORTS},
)


def render(template: SentenceTemplate | JinjaTemplate, **columns: list[Any]) -> list[str]:
    """The texts of a table, after checking that its rows have the same."""
    texts = template.render(as_table(columns)).to_pylist()
    assert texts == [template.render_row(row) for row in rows_of(columns)]
    return [str(text) for text in texts]


def test_a_part_in_brackets_is_left_out_where_a_column_in_it_is_missing() -> None:
    assert render(
        TITANIC,
        Name=["Ann", "Bob", "Cy"],
        Sex=["female", "male", "male"],
        Age=[22.4, None, 3],
        Embarked=["S", "C", None],
    ) == [
        "Ann was a female passenger aged 22 years, who embarked at Southampton.",
        "Bob was a male passenger, who embarked at Cherbourg.",
        "Cy was a male passenger aged 3 years.",
    ]


def test_parts_may_be_inside_others() -> None:
    template = SentenceTemplate("t", "{a}[, {b}[ and {c}]]!")
    assert render(template, a=[1, 1, 1, 1], b=[2, 2, None, None], c=[3, None, 3, None]) == [
        "1, 2 and 3!", "1, 2!", "1!", "1!",
    ]  # fmt: skip


def test_outside_of_brackets_a_missing_value_is_said() -> None:
    assert render(SentenceTemplate("t", "{a} is here"), a=[None, "x"]) == ["unknown is here", "x is here"]
    rule = {"a": ColumnFormat(missing_text="somebody")}
    assert render(SentenceTemplate("t", "{a} is here", columns=rule), a=[None]) == ["somebody is here"]
    kept = SentenceTemplate("t", "[{a} is] here", columns={"a": ColumnFormat(missing="say")})
    assert render(kept, a=[None, "x"]) == ["unknown is here", "x is here"]
    with pytest.raises(DataError, match=r"'a'.*missing"):
        SentenceTemplate("t", "[{a}]", columns={"a": ColumnFormat(missing="error")}).render(pa.table({"a": [None, 1]}))


def test_signs_are_written_twice_to_mean_themselves_and_names_can_be_quoted() -> None:
    assert render(SentenceTemplate("t", "{{{a}}} [[x]] ]]"), a=[1]) == ["{1} [x] ]"]
    weird = SentenceTemplate("t", "{\"a:b\":.1f} {'c}'} { d }")
    assert weird.columns() == ("a:b", "c}", "d")
    assert render(weird, **{"a:b": [1.25], "c}": ["x"], "d": [True]}) == ["1.2 x yes"]


@pytest.mark.parametrize("text", ["always the same", "", "{{Age}} [[x]]", "json"])
def test_a_text_without_columns_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="'t'"):
        SentenceTemplate("t", text)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (["Age"], "{N} was[ {P}[ in {Q}]][[ and[ {R}]!]]"),
        (["Q"], "{N} was[ aged {Age:.0f}[, {P}]][ {P}][[ and[ {R}]!]]"),
        (["P"], "{N} was[ aged {Age:.0f}][[ and[ {R}]!]]"),
        (["R", "Age"], "{N} was[ {P}[ in {Q}]][[ and!]]"),
        (["nowhere"], "{N} was[ aged {Age:.0f}[, {P}]][ {P}[ in {Q}]][[ and[ {R}]!]]"),
    ],
)
def test_a_sentence_without_some_columns_reads_as_where_they_are_missing(columns: list[str], text: str) -> None:
    rules = {name: ColumnFormat(unit="x") for name in ("Age", "P", "R")}
    whole = SentenceTemplate(
        "t", "{N} was[ aged {Age:.0f}[, {P}]][ {P}[ in {Q}]][[ and[ {R}]!]]", version="3", columns=rules
    )
    less = whole.without(columns)
    assert (less.name, less.version, less.text) == ("t", "3", text)
    assert less.formats == {name: rule for name, rule in rules.items() if name not in columns}
    row = {"N": "Ann", "Age": 22, "P": "p", "Q": "q", "R": "r"}
    assert less.render_row(row) == whole.render_row(row | dict.fromkeys(columns))


def test_what_stands_outside_of_brackets_cannot_be_left_out() -> None:
    with pytest.raises(ConfigError, match=r"'t'.*'a'"):
        SentenceTemplate("t", "{a}[ {b}]").without({"a"})
    with pytest.raises(ConfigError, match="'t'"):
        SentenceTemplate("t", "x[ {b}]").without("b")


def test_a_sentence_can_be_given_the_formats_of_a_whole_table() -> None:
    formats = {"a": ColumnFormat(unit="m"), "b": ColumnFormat(unit="s")}
    template = SentenceTemplate.of("t", "{a}", version=2, columns=formats)
    assert template == SentenceTemplate("t", "{a}", version="2", columns={"a": formats["a"]})


def test_formats_of_python_and_of_dates_are_understood() -> None:
    assert render(SentenceTemplate("t", "{a:05d}|{a:>6}|{a:,}|{a:.1%}"), a=[22, 22.0][:1]) == [
        "00022|    22|22|2200.0%"
    ]
    assert render(SentenceTemplate("t", "{a:03d}"), a=[7.0, None]) == ["007", "unknown"]
    assert render(SentenceTemplate("t", "{a:<5}|{b:%d %m %Y}"), a=["x"], b=[date(2020, 1, 2)]) == ["x    |02 01 2020"]
    assert render(SentenceTemplate("t", "{a:>4}"), a=[True]) == [" yes"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{a", r"character 0\b.*'\{'"),
        ("x {a [b]", r"character 2\b.*'\{'"),
        ("{a{b}}", r"character 0\b.*'\{'"),
        ("a} b", r"'\}'.*'\}\}'"),
        ("a [ {b}", r"'\['.*'\[\['"),
        ("a {b}] c", r"character 5\b.*'\]'"),
        ("[no column]", r"character 0\b"),
        ("{}", r"character 0\b"),
        ("{:.2f}", r"character 0\b"),
        ('{"a', r"character 0\b"),
        ('{"a" b}', r"character 0\b"),
        ("{a:.0q}", r"'a'.*'\.0q'"),
        ("{a:99999}", r"'a'.*'99999'"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_where_it_is_written(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"'t'.*{reason}"):
        SentenceTemplate("t", text)


def test_a_format_that_does_not_go_with_the_values_is_an_error_with_column_and_row() -> None:
    with pytest.raises(DataError, match=r"'a'.*'male'"):
        SentenceTemplate("t", "{a:.0f}").render(pa.table({"a": [None, "male"]}))
    with pytest.raises(DataError, match=r"'a'.*'d'"):
        SentenceTemplate("t", "{a:d}").render(pa.table({"a": [1.5]}))
    with pytest.raises(DataError, match=r"'a'.*'d'"):
        SentenceTemplate("t", "{a:d}").render_row({"a": 1.5})


def test_a_column_that_is_not_there_is_named_with_a_suggestion() -> None:
    frame = pd.DataFrame({"Name": ["x"], "Sex": ["m"], "age": [3], "Embarked": ["S"]})
    for convert, data in (
        (TITANIC.render, as_table(frame)),
        (TITANIC.render_row, frame.iloc[0]),
        (TITANIC.validate, list(frame)),
    ):
        with pytest.raises(SchemaError, match=r"'Name'.*'age'"):
            convert(data)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"'b'.*'a'"):
        SentenceTemplate("t", "{a}", columns={"b": ColumnFormat()})


@settings(max_examples=60, deadline=None)
@given(columns=tables(), data=st.data())
def test_sentences_are_those_of_a_plain_loop(columns: dict[str, list[Any]], data: st.DataObject) -> None:
    """Words, columns and parts in any order, against the same made value by value."""
    names = [name for name in columns if '"' not in name] or ["x"]
    columns = {name: columns.get(name, [1]) for name in names}
    piece = st.tuples(st.sampled_from(["say", "maybe"]), st.lists(st.sampled_from(names), min_size=1, max_size=2))
    pieces = data.draw(st.lists(piece, min_size=1, max_size=5))
    text = "".join(
        "; " + "".join(f'<{{"{name}"}}>' for name in used) if kind == "say"
        else "[, " + "".join(f'({{"{name}"}})' for name in used) + "]"
        for kind, used in pieces
    )  # fmt: skip

    def naive(row: dict[str, Any]) -> str:
        found = ""
        for kind, used in pieces:
            if kind == "say":
                found += "; " + "".join(
                    f"<{'unknown' if is_missing(row[name]) else naive_text(row[name])}>" for name in used
                )
            elif not any(is_missing(row[name]) for name in used):
                found += ", " + "".join(f"({naive_text(row[name])})" for name in used)
        return found

    frame = frame_of(columns)
    converter = TabularTextConverter(text)
    texts = converter.convert_batch(frame)
    assert texts == [naive(row) for row in rows_of(columns)]
    assert texts == [converter.convert_row(frame.iloc[row]) for row in range(len(frame))]


def test_jinja_sees_values_and_texts() -> None:
    template = JinjaTemplate(
        "j",
        "{{ name }}: {% if age is none %}?{% elif age > 30 %}old{% else %}{{ said.age }}{% endif %} {{ row['a b'] }}",
        columns={"age": ColumnFormat(unit="years")},
    )
    assert render(template, name=["x", "y", "z"], age=[22.0, None, 31], **{"a b": [1, 2, 3]}) == [
        "x: 22 years 1", "y: ? 2", "z: old 3",
    ]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(columns=tables())
def test_jinja_says_a_row_as_it_says_a_table(columns: dict[str, list[Any]]) -> None:
    assume("row" not in columns)  # it would take the place of the variable
    template = JinjaTemplate("j", "{% for name in row %}{{ name }}={{ said[name] }}/{{ row[name] }};{% endfor %}")
    frame = frame_of(columns)
    expected = [template.render_row(frame.iloc[row]) for row in range(len(frame))]
    assert template.render(as_table(frame)).to_pylist() == expected


def test_jinja_is_checked_and_kept_in_its_box() -> None:
    with pytest.raises(ConfigError, match=r"'j'.*line 2\b"):
        JinjaTemplate("j", "\n{% if %}")
    with pytest.raises(SchemaError, match=r"'agee'.*'age'"):
        JinjaTemplate("j", "{{ agee }}").render(pa.table({"age": [1]}))
    with pytest.raises(DataError, match=r"'j'.*row 1\b"):
        JinjaTemplate("j", "{% if a %}{{ a.__class__.__mro__ }}{% endif %}").render(pa.table({"a": [0, 1]}))
    with pytest.raises(DataError, match=r"'j'.*row 0\b"):
        JinjaTemplate("j", "{% for i in range(99999) %}{% for j in range(99) %}{{ a }}{% endfor %}{% endfor %}").render(
            pa.table({"a": [0]})
        )
