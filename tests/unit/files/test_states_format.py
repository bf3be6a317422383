"""The format that all saved states share: it survives JSON, and refuses whatever was changed."""

from __future__ import annotations

import json
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ResumeError
from penstock.files.states import CHECKSUM, StateFormat, parse_json, to_json, with_checksum

FORMAT = StateFormat("numbers", "a counter", version=2)
STATE = FORMAT.write({"row": 3, "name": "ä\ud800"[:1], "nested": {"list": [1, 2.5, None]}})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        | st.dictionaries(st.integers(0, 300), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(facts=st.dictionaries(st.text(max_size=6).map(lambda name: f"_{name}"), VALUES, max_size=5))
def test_a_state_is_the_same_after_a_way_through_json(facts: dict[str, Any]) -> None:
    state = FORMAT.write(facts)
    FORMAT.read(state)
    FORMAT.read(json.loads(json.dumps(state)))
    FORMAT.read(parse_json(to_json(state, indent=True)))


def test_other_mappings_sequences_and_numpy_numbers_are_plain_values() -> None:
    plain = FORMAT.write({"at": {"a": [1, 2.5]}})
    other = FORMAT.write({"at": MappingProxyType({"a": (np.int64(1), np.float64(2.5))})})
    assert plain[CHECKSUM] == other[CHECKSUM]
    FORMAT.read(OrderedDict(reversed(plain.items())))


def test_numbers_of_any_size_are_kept_exactly() -> None:
    state = FORMAT.write({"generator": {"state": 2**127 + 1, 10: "a", 9: "b"}})
    assert FORMAT.read(parse_json(to_json(state)))["generator"]["state"] == 2**127 + 1


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", object()])
def test_a_state_that_is_not_plain_is_refused_when_it_is_made(value: Any) -> None:
    with pytest.raises(ResumeError):
        FORMAT.write({"value": value})


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (None, "counter"),
        ([1], "counter"),
        ({}, "counter"),
        ({"kind": "numbers", "version": 2, "row": 3}, "counter.*checksum"),
        ({"version": 1, "row": 3}, "checksum"),
        (STATE | {"row": 4}, "checksum"),
        (STATE | {"row": 2**70}, "checksum"),
        (STATE | {"row": {1, 2}}, r"\{1, 2\}"),
        (STATE | {CHECKSUM: None}, "checksum"),
        (STATE | {"version": 3}, r"version 3\b"),
        (with_checksum(STATE | {"version": 1}), r"version 1\b"),
        (with_checksum(STATE | {"version": True}), "version"),
        (with_checksum(STATE | {"kind": "letters"}), r"\bkind\b.*'letters'"),
    ],
)
def test_what_is_not_an_intact_state_of_this_kind_is_refused_with_a_remedy(state: Any, told: str) -> None:
    with pytest.raises(ResumeError, match=told):
        FORMAT.read(state)


def test_json_that_is_nested_without_end_is_not_json() -> None:
    with pytest.raises(ValueError, match="nested"):
        parse_json(b"[" * 100_000)
    assert orjson.loads(to_json({"b": 1, "a": 2})) == {"a": 2, "b": 1}
