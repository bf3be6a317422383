"""Labelled examples before each row."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, DataError, SchemaError
from penstock.templates import ColumnFormat, FewShot, KeyValueTemplate, SentenceTemplate, TabularTextConverter, as_table
from penstock.templates.columns import hiding

SAY = SentenceTemplate("t", "value {x}")


def frame(rows: int, first: int = 0) -> pd.DataFrame:
    return pd.DataFrame(
        {"id": range(first, first + rows), "x": range(first, first + rows), "y": [n % 2 for n in range(rows)]}
    )


def drawn(text: str) -> tuple[list[int], int]:
    """The values of the examples, and of the row."""
    *examples, last = [int(n) for n in re.findall(r"value (\d+)", text)]
    return examples, last


def test_examples_come_with_their_labels_and_the_row_waits_for_one() -> None:
    template = FewShot(
        SAY,
        frame(3),
        labels="y",
        count=2,
        instruction="Guess.",
        answer="Odd: ",
        label_format=ColumnFormat(categories={0: "no", 1: "yes"}),
    )
    text = template.render_row({"x": 9})
    assert re.fullmatch(r"Guess\.(\n\nvalue [012]\nOdd: (no|yes)){2}\n\nvalue 9\nOdd:", text)
    for value, label in re.findall(r"value ([012])\nOdd: (\w+)", text):
        assert label == ("yes" if int(value) % 2 else "no")


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 60), st.integers(1, 8), st.integers(0, 2**32))
def test_no_row_is_its_own_example_and_none_comes_twice(rows: int, count: int, seed: int) -> None:
    count = min(count, rows - 1)
    template = FewShot(SAY, frame(rows), labels="y", count=count, seed=seed)
    for n, text in enumerate(template.render(as_table(frame(rows))).to_pylist()):
        examples, row = drawn(text)
        assert row == n
        assert len(set(examples)) == count
        assert row not in examples
        assert set(examples) <= set(range(rows))


@settings(max_examples=30, deadline=None)
@given(st.integers(5, 50), st.integers(1, 4), st.integers(0, 9))
def test_what_is_drawn_does_not_depend_on_where_the_row_is(rows: int, count: int, seed: int) -> None:
    template = FewShot(SAY, frame(30), labels="y", count=count, seed=seed)
    data = frame(rows, first=20)
    texts = template.render(as_table(data)).to_pylist()
    backwards = template.render(as_table(data.iloc[::-1])).to_pylist()
    assert texts == backwards[::-1]
    assert texts == [template.render_row(data.iloc[row]) for row in range(rows)]
    template.slice_rows = 3
    assert template.render(as_table(data)).to_pylist() == texts
    assert TabularTextConverter(template, target="y").convert_batch(data) == texts


def test_copies_of_a_row_are_not_drawn_for_it_either() -> None:
    examples = pd.DataFrame({"x": [1, 1, 1, 2, 3, 4, 5, 6], "y": [0] * 8})
    template = FewShot(SAY, examples, labels="y", count=3)
    for text in template.render(as_table(examples)).to_pylist():
        found, row = drawn(text)
        assert row not in found
    with pytest.raises(DataError, match=r"row 0\b"):
        FewShot(SAY, examples, labels="y", count=6).render(as_table(examples))


def test_an_id_decides_what_is_drawn_and_what_is_left_out() -> None:
    template = FewShot(SAY, frame(40), labels="y", count=3, id_column="id")
    same_id = frame(40)
    same_id["x"] += 100  # other texts under the same ids, as after cleaning
    before = [drawn(text)[0] for text in template.render(as_table(frame(40))).to_pylist()]
    after = [drawn(text)[0] for text in template.render(as_table(same_id)).to_pylist()]
    assert before == after
    assert all(n not in examples for n, examples in enumerate(before))
    with pytest.raises(SchemaError, match="'id'"):
        FewShot(SAY, frame(40), labels="y", count=3, id_column="id").render_row({"x": 1})


def test_every_example_has_its_turn_and_seeds_differ() -> None:
    counts: Counter[int] = Counter()
    rows = as_table(frame(2000, first=100))
    for text in FewShot(SAY, frame(20), labels="y", count=4).render(rows).to_pylist():
        counts.update(drawn(text)[0])
    found = np.array([counts[n] for n in range(20)])
    # 8000 draws over 20 examples: 400 each, with a standard deviation of about 18.
    assert found.sum() == 8000
    assert np.all(np.abs(found - 400) < 110)
    other = FewShot(SAY, frame(20), labels="y", count=4, seed=1).render(rows).to_pylist()
    assert other != FewShot(SAY, frame(20), labels="y", count=4).render(rows).to_pylist()


def test_a_style_leaves_the_label_out_by_itself() -> None:
    template = FewShot(KeyValueTemplate(), frame(5), labels="y", count=1)
    assert "y: " not in template.render_row({"id": 9, "x": 9, "y": 1})
    excluding = FewShot(KeyValueTemplate(exclude=["y"]), frame(5), labels="y", count=1)
    assert excluding.render(as_table(frame(5))).to_pylist() == template.render(as_table(frame(5))).to_pylist()
    assert excluding.render_row(frame(5).iloc[0]) == template.render(as_table(frame(5)))[0].as_py()


def test_a_converter_is_taken_with_its_template_and_its_target() -> None:
    converter = TabularTextConverter(style="key_value", exclude=["id"], target="y")
    template = FewShot(converter, frame(5), labels="y", count=1)
    assert re.fullmatch(r"x: \d\nAnswer: [01]\n\nx: 9\nAnswer:", template.convert_row({"id": 9, "x": 9, "y": 1}))
    assert TabularTextConverter(template).convert_batch(frame(5)) == template.convert_batch(frame(5))
    beside = FewShot(converter, frame(5), labels=[0, 1, 0, 1, 0], count=1)
    assert beside.convert_batch(frame(5)) == template.convert_batch(frame(5))
    assert beside.fingerprint == template.fingerprint
    assert FewShot(converter.template, frame(5), labels=[0, 1, 0, 1, 0], count=1).fingerprint != template.fingerprint
    with hiding(["y"]):
        assert FewShot(converter, frame(5), labels="y", count=1).fingerprint == template.fingerprint
    with pytest.raises(ConfigError, match="TabularTextConverter"):
        FewShot("{x}", frame(5), labels="y")  # type: ignore[arg-type]
    labelled = frame(5).rename(columns={"y": "label"})
    with pytest.raises(SchemaError, match=r"target.*'labl'"):
        FewShot(TabularTextConverter(target="labl"), labelled, labels=[0, 1, 0, 1, 0], count=1)


def test_labels_may_be_given_beside_the_table() -> None:
    by_name = FewShot(SAY, frame(5), labels="y", count=2)
    beside = FewShot(SAY, frame(5)[["x"]], labels=[0, 1, 0, 1, 0], count=2)
    assert beside.render_row({"x": 7}) == by_name.render_row({"x": 7})
    assert beside.fingerprint == by_name.fingerprint
    assert beside.fingerprint != FewShot(SAY, frame(5)[["x"]], labels=[0, 1, 0, 1, 1], count=2).fingerprint
    assert beside.fingerprint != FewShot(SAY, frame(5), labels="y", count=2, seed=1).fingerprint


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"labels": "z"}, SchemaError, r"'z'.*'id'"),
        ({"labels": [1, 2]}, SchemaError, "labels"),
        ({"labels": [1, None, 1, 1, 1]}, DataError, r"(?i)example 1\b"),
        ({"labels": "x"}, ConfigError, r"'t'.*'x'"),
        ({"labels": "y", "count": 0}, ConfigError, r"\bcount\b"),
        ({"labels": "y", "id_column": "key"}, SchemaError, "'key'"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        FewShot(SAY, frame(5), **options)


def test_an_empty_table_has_no_texts() -> None:
    assert (
        FewShot(SAY, frame(5), labels="y", count=2).render(pa.table({"x": pa.array([], pa.int64())})).to_pylist() == []
    )
