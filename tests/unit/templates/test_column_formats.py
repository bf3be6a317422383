"""How one column is said."""

from __future__ import annotations

import math
import pickle
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_tables import CELLS, frame_of

from penstock.errors import ConfigError, DataError
from penstock.templates import ColumnFormat, JsonTemplate, KeyValueTemplate, NaturalTemplate, TabularTextConverter


def said(values: list[Any], style: str = "key_value", **rules: Any) -> list[str]:
    """The texts of one column, after checking that single rows have the same."""
    converter = TabularTextConverter(style=style, columns={"x": ColumnFormat(**rules)})
    texts = converter.convert_batch({"x": values})
    assert texts == [converter.convert_row({"x": value}) for value in values]
    return [text.removeprefix("x: ").removeprefix('{"x": ').removesuffix("}") for text in texts]


def test_numbers_are_said_in_their_shortest_form() -> None:
    assert said([22.0, 7.25, -0.0, 1e300, 1e-7, math.inf, 123456789012.5]) == [
        "22", "7.25", "-0", "1e+300", "1e-07", "inf", "123456789012.5",
    ]  # fmt: skip
    assert said([0, -7, 2**62]) == ["0", "-7", str(2**62)]
    assert said([2.0**53, 2.0**53 + 2, 1e15]) == ["9007199254740992", "9007199254740994.0", "1000000000000000"]
    assert said([Decimal("1.50"), Decimal("-3"), Decimal("0.001")]) == ["1.5", "-3", "0.001"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(allow_nan=False), min_size=1))
def test_a_float_reads_back_from_its_text(values: list[float]) -> None:
    assert [float(text) for text in said(values)] == values


def test_decimals_and_thousands_are_rules() -> None:
    assert said([1234.567, 2.0, -0.001], decimals=2) == ["1234.57", "2.00", "0.00"]
    assert said([1234567, 12], thousands=True) == ["1,234,567", "12"]
    assert said([1234567.891, 12.0], thousands=True, decimals=1) == ["1,234,567.9", "12.0"]
    assert said([1234567.5, 12.0], thousands=True) == ["1,234,567.5", "12"]
    assert said([22, 23], decimals=1) == ["22.0", "23.0"]
    with pytest.raises(DataError, match=r"decimals.*thousands"):
        TabularTextConverter(columns={"x": ColumnFormat(decimals=1)}).convert_batch({"x": [None, "a"]})


def test_units_and_prefixes_surround_the_value() -> None:
    assert said([22, None, 3], unit="years") == ["22 years", "", "3 years"]
    assert said([7.25], prefix="£", decimals=2) == ["£7.25"]
    assert said(["C85"], prefix="#", unit="deck") == ["#C85 deck"]


def test_booleans_and_dates_have_words_of_their_own() -> None:
    assert said([True, False, None]) == ["yes", "no", ""]
    assert said([True, False], booleans=("aboard", "ashore")) == ["aboard", "ashore"]
    assert said([date(2020, 1, 2)], date_format="%d/%m/%Y") == ["02/01/2020"]
    assert said([datetime(2020, 1, 2, 3, 4), None]) == ["2020-01-02 03:04:00", ""]
    assert said([datetime(2020, 1, 2)]) == ["2020-01-02"]


def test_a_missing_value_goes_by_its_rule() -> None:
    assert said([1, None], missing="omit") == ["1", ""]
    assert said([1.5, math.nan], missing="say") == ["1.5", "unknown"]
    assert said(["a", None], missing="say", missing_text="not known") == ["a", "not known"]
    assert said([1, None], style="json", missing="say") == ["1", "null"]
    assert said([1, None], style="json", missing="say", missing_text="?") == ["1", '"?"']
    converter = TabularTextConverter(columns={"x": ColumnFormat(missing="error")})
    with pytest.raises(DataError, match=r"missing.*missing='error'"):
        converter.convert_batch({"x": [1, None, None]})
    with pytest.raises(DataError, match=r"missing.*missing='error'"):
        converter.convert_row({"x": None})


@pytest.mark.parametrize("empty", [[None, None], [math.nan, math.nan]])
def test_a_column_without_any_value_is_told_of_and_goes_by_its_rule(
    empty: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    table = pa.table({"x": empty, "y": [1, 2]})
    omitting = TabularTextConverter()
    assert omitting.convert_batch(table) == ["The y is 1.", "The y is 2."]
    omitting.convert_batch(table)
    assert [record.getMessage() for record in caplog.records] == [
        "template 'natural': column 'x' is missing in all 2 rows, so every text omits it (missing='omit')"
    ]
    caplog.clear()
    saying = TabularTextConverter(columns={"x": ColumnFormat(missing="say")})
    assert saying.convert_batch(table) == ["The x is unknown. The y is 1.", "The x is unknown. The y is 2."]
    assert "'x'" in caplog.text
    with pytest.raises(DataError, match=r"missing.*missing='error'"):
        TabularTextConverter(columns={"x": ColumnFormat(missing="error")}).convert_batch(table)


def test_categories_are_found_by_what_they_would_be_said_as() -> None:
    classes = {1: "first", 2: "second"}
    for values in ([1, 2, None], [1.0, 2.0, None], ["1", "2", None], pd.Series([1, 2, None], dtype="Int64").tolist()):
        assert said(values, categories=classes) == ["first", "second", ""]
    assert said([True, False], categories={True: "survived", False: "died"}) == ["survived", "died"]
    frame = pd.DataFrame({"x": pd.Categorical(["S", "C"], categories=["S", "C", "never seen"])})
    converter = TabularTextConverter(columns={"x": ColumnFormat(categories={"S": "Southampton", "C": "Cherbourg"})})
    assert converter.convert_batch(frame) == ["The x is Southampton.", "The x is Cherbourg."]


def test_an_unseen_category_stops_or_is_kept_or_has_a_text() -> None:
    ports = {"S": "Southampton", "C": "Cherbourg"}
    message = "'Z'.*'S', 'C'.*unseen='keep'"
    converter = TabularTextConverter(columns={"x": ColumnFormat(categories=ports)})
    with pytest.raises(DataError, match=rf"'x'.*row 2\b.*{message}") as caught:
        converter.convert_batch({"x": ["S", None, "Z", "Z"]})
    assert (caught.value.row, caught.value.data) == (2, "Z")
    with pytest.raises(DataError, match=f"'x'.*{message}"):
        converter.convert_row({"x": "Z"})
    assert said(["S", "Z"], categories=ports, unseen="keep") == ["Southampton", "Z"]
    assert said(["S", "Z"], categories=ports, unseen="another port") == ["Southampton", "another port"]
    with pytest.raises(DataError, match=r"'0'.*'7'"):
        said([100], categories={n: f"no {n}" for n in range(100)})


def test_the_row_of_an_unseen_category_counts_from_the_first_of_the_table() -> None:
    template = KeyValueTemplate(columns={"x": ColumnFormat(categories={"a": "A"})})
    template.slice_rows = 10
    with pytest.raises(DataError, match="column 'x', row 27:"):
        template.render(pa.table({"x": ["a"] * 27 + ["b"] * 5}))


def test_names_and_descriptions_stand_for_the_column() -> None:
    rules = {"SibSp": ColumnFormat(name="relatives", description="number of siblings and spouses aboard")}
    row = {"SibSp": 1, "Sex": "male"}
    assert (
        NaturalTemplate(columns=rules).render_row(row)
        == "The number of siblings and spouses aboard is 1. The Sex is male."
    )
    assert KeyValueTemplate(columns=rules).render_row(row) == "relatives: 1 | Sex: male"
    assert JsonTemplate(columns=rules).render_row(row) == '{"relatives": 1, "Sex": "male"}'


def test_json_has_numbers_where_the_rule_leaves_numbers_and_texts_elsewhere() -> None:
    assert said([1234.5], style="json", decimals=2) == ["1234.50"]
    assert said([1234.5], style="json", thousands=True) == ['"1,234.5"']
    assert said([5], style="json", thousands=True) == ['"5"']
    assert said([5], style="json", unit="m") == ['"5 m"']
    assert said([1], style="json", categories={1: 'the "first"'}) == ['"the \\"first\\""']
    assert said([True], style="json") == ["true"]
    assert said([True], style="json", booleans=("on", "off")) == ['"on"']
    assert said([math.inf, -math.inf, 1.0], style="json") == ['"inf"', '"-inf"', "1"]
    assert said([date(2020, 1, 2)], style="json") == ['"2020-01-02"']


RULES = [
    ColumnFormat(decimals=1, unit="m", missing="say"),
    ColumnFormat(thousands=True, prefix="$"),
    ColumnFormat(missing="say", missing_text="none", booleans=("T", "")),
    ColumnFormat(categories={0: "zero", "a": "A", True: "T"}, unseen="keep"),
    ColumnFormat(categories={0: "zero"}, unseen="other", missing="say"),
    ColumnFormat(date_format="%Y.%m", unit="x"),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("style", ["key_value", "json"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rules_say_a_row_as_they_say_a_table(style: str, rule: ColumnFormat, data: st.DataObject) -> None:
    numbers_only = rule.decimals is not None or rule.thousands
    kinds = ["maybe int", "maybe float", "maybe bool"] if numbers_only else sorted(CELLS)
    values = data.draw(st.lists(CELLS[data.draw(st.sampled_from(kinds))], min_size=1, max_size=6))
    converter = TabularTextConverter(style=style, columns={"x": rule})
    frame = frame_of({"x": values, "y": [1] * len(values)})
    assert converter.convert_batch(frame) == [converter.convert_row(frame.iloc[row]) for row in range(len(values))]
    assert converter.convert_batch(frame) == [converter.convert_row({"x": value, "y": 1}) for value in values]


def test_rules_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"missing.*'skip'"):
        ColumnFormat(missing="skip")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="decimals"):
        ColumnFormat(decimals=-1)
    with pytest.raises(ConfigError, match=r"\bunit\b"):
        ColumnFormat(unit=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"categories.*'1'"):
        ColumnFormat(categories={1: "one", "1": "first"})
    with pytest.raises(ConfigError, match="categories"):
        ColumnFormat(categories={1: 2})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"'units'.*'unit'"):
        TabularTextConverter(columns={"x": {"units": "m"}})
    with pytest.raises(ConfigError, match=r"columns.*ColumnFormat"):
        KeyValueTemplate(columns=["x"])  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules_travel_as_plain_keys_and_between_processes(rule: ColumnFormat) -> None:
    assert ColumnFormat.from_dict(rule.to_dict()) == rule
    assert pickle.loads(pickle.dumps(rule)) == rule  # noqa: S301 - our own
    assert ColumnFormat().to_dict() == {}
