"""The skeleton has the types of the whole, and nothing else of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.sources.jsonl as jsonl
from penstock.errors import SchemaError
from penstock.sources import JsonlSource, JsonSource, json_types
from penstock.sources.json_types import skeleton

LONG = "the text of a document, " * 40


def bones(text: str) -> str | None:
    kept = skeleton(np.frombuffer(text.encode(), np.uint8))
    return kept.tobytes().decode() if kept is not None else None


def without_text(value: Any) -> Any:
    """A parsed value with every string in it empty."""
    if isinstance(value, str):
        return ""
    if isinstance(value, list):
        return [without_text(item) for item in value]
    if isinstance(value, dict):
        return {key: without_text(item) for key, item in value.items()}
    return value


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(alphabet='ab"\\{}[]:,\n\té😀'),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='k"\\: é', max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    rows=st.lists(st.dictionaries(st.text(alphabet='k"\\:', max_size=3), values, max_size=4), min_size=1, max_size=5)
)
@settings(max_examples=300, deadline=None)
def test_a_skeleton_is_the_same_json_with_empty_strings(rows: list[dict[str, Any]]) -> None:
    rows = [{"text": LONG, **row} for row in rows] + [{"text": LONG * 20}]
    for separators in ((",", ":"), (" , ", " : ")):
        text = "".join(json.dumps(row, separators=separators) + "\n" for row in rows)
        kept = bones(text)
        with patch.object(json_types, "_TAKEN_BYTES", 0):
            assert bones(text) == kept  # as in a large block
        if kept is not None:
            assert [json.loads(line) for line in kept.splitlines()] == [without_text(row) for row in rows]
        else:
            assert len(json.dumps([without_text(row) for row in rows])) * 4 > len(text) - 1000


def test_a_skeleton_of_mostly_numbers_is_not_worth_making() -> None:
    assert bones('{"a": 1, "b": 2.5}\n' * 100) is None


def test_an_odd_number_of_quotes_has_no_skeleton() -> None:
    assert bones(f'{{"a": "{LONG}"}}\n{{"b": "{LONG}}}\n') is None


def lines(path: Path, rows: list[str]) -> JsonlSource:
    path.write_text("\n".join(rows) + "\n")
    return JsonlSource(path)


@pytest.mark.parametrize("broken", ['{"text": "a, "n": 1}', '{"text": "a", n": 1}', '{"te"xt": "a"}', '{"a": "b'])
def test_a_missing_quote_does_not_change_the_columns_of_other_rows(tmp_path: Path, broken: str) -> None:
    good = [json.dumps({"text": LONG, "n": 1, "late": None})] * 5
    expected = lines(tmp_path / "good.jsonl", good).schema
    assert lines(tmp_path / "a.jsonl", [*good, broken, *good]).schema == expected
    assert lines(tmp_path / "b.jsonl", [*good, broken, *good, broken, *good]).schema == expected


def test_types_are_those_of_a_scan_of_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"text": LONG, "when": "2024-01-01", "n": 1, "messages": [{"role": "user", "content": LONG}]},
        {"text": LONG, "when": "later", "n": 1.5, "messages": [{"role": "tool", "name": "f", "content": None}]},
        {"text": LONG, "when": None, "n": None, "messages": []},
    ]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = tmp_path / "b.json"
    whole.write_text(json.dumps(rows, indent=2))
    by_bones = JsonlSource(source).schema, JsonSource(whole).schema
    monkeypatch.setattr(jsonl, "skeleton", lambda data: None)
    assert by_bones == (JsonlSource(source).schema, JsonSource(whole).schema)
    assert by_bones[0].field("when").type == pa.string()
    assert by_bones[0].field("n").type == pa.float64()


def test_a_conflict_of_types_still_names_its_row(tmp_path: Path) -> None:
    rows = [json.dumps({"text": LONG, "x": 1})] * 3 + [json.dumps({"text": LONG, "x": "one"})]
    with pytest.raises(SchemaError, match=r"row 3\b.*'x'"):
        _ = lines(tmp_path / "a.jsonl", rows).schema
