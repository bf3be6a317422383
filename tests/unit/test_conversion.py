"""Typed values from files and from text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock._suggest import check_options, unknown_option
from penstock.config.settings import ByteSize, freeze
from penstock.errors import ConfigError, SchemaError
from penstock.types.conversion import Problems, convert, from_text, in_words, kind_of


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (3, int | str, 3),
        ("3", int | str, "3"),
        (3.0, int | float, 3.0),
        (3, float | None, 3.0),
        (None, float | None, None),
        ([1, 2], list[float], (1.0, 2.0)),
        ([1, "a"], tuple[int, str], (1, "a")),
        ([1, 2, 3], tuple[int, ...], (1, 2, 3)),
        (["a"], Sequence[str], ("a",)),
        ({"a": 1}, Mapping[str, float], {"a": 1.0}),
        ("left to its constructor", object, "left to its constructor"),
        (1e3, int, 1000),
        ({"a": [1]}, dict[str, list[int]], {"a": (1,)}),
        ({1: 2}, dict, {1: 2}),
        ({"a"}, set[str], {"a"}),
        ([1, 1], set[int], {1}),
        ([{"until": 10}], list[dict[str, int]], ({"until": 10},)),
        ("b", Literal["a", "b"], "b"),
        (True, bool | str, True),
        ("1.5 KiB", ByteSize, 1536),
        (4096.0, ByteSize, 4096),
        ([None], Any, (None,)),
        ("a", Path | None, Path("a")),
    ],
)
def test_values_that_fit_their_kind(value: Any, kind: Any, expected: Any) -> None:
    fitted = convert(freeze(value), kind)
    assert fitted == expected
    assert type(fitted) is type(freeze(expected))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (True, int),
        (True, float),
        (1, bool),
        (1, str),
        ("a", int | float),
        (10**400, float),
        ([1, "a"], list[int]),
        ([1, 2], tuple[int, int, int]),
        ({"a": "b"}, dict[str, int]),
        ((1, "a"), set[int]),
        ("ab", list[str]),
        ("1", int),
        (2.5, int),
        (1, Callable[[int], int]),
        ("a", pa.Schema),
        ("c", Literal["a", "b"]),
        (1, Literal[True]),
        (None, Path),
        (3, Path),
        ("-3 MiB", ByteSize),
        (True, ByteSize),
    ],
)
def test_values_that_do_not_fit_their_kind(value: Any, kind: Any) -> None:
    with pytest.raises(ConfigError, match="expected "):
        convert(freeze(value), kind)


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, {1}, (1, 2)])
def test_containers_keep_their_type(value: Any) -> None:
    assert type(convert(value, Any)) is type(convert(value, kind_of(value))) is type(value)


@pytest.mark.parametrize(
    ("value", "kind", "remedy"),
    [
        ("64", int, "without quotes"),
        ("1e-3", float, "1.0e-3"),
        ("true", bool, "without quotes"),
        (5, str, "in quotes"),
        ("None", int | None, "null"),
    ],
)
def test_a_refusal_names_the_value_the_kind_and_the_remedy(value: Any, kind: Any, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        convert(value, kind)
    assert all(fact in str(refused.value) for fact in (in_words(kind), repr(value), remedy))


def test_problems_are_raised_at_once_with_their_places() -> None:
    problems = Problems()
    problems.check("a.yaml")
    problems.add("config.workers", "expected a whole number")
    with pytest.raises(ConfigError, match=r"a\.yaml: config\.workers: "):
        problems.check("a.yaml")
    problems.add("", "second")
    with pytest.raises(ConfigError, match="2 problems") as refused:
        problems.check("a.yaml")
    assert str(refused.value).splitlines()[1:] == ["  config.workers: expected a whole number", "  second"]


def test_an_unknown_option_has_a_suggestion_and_the_valid_ones() -> None:
    message = unknown_option("batchsize", ["batch_size", "rank"])
    assert message == "unknown option 'batchsize'; did you mean 'batch_size'? Valid options: batch_size, rank"
    assert unknown_option("xyz", []) == "unknown option 'xyz'. Valid options: none"


def test_the_first_unknown_option_is_refused() -> None:
    check_options({"rank": 1}, ["batch_size", "rank"])
    with pytest.raises(ConfigError, match=r"queue\.yaml: .*'rnak'.*'rank'"):
        check_options(["rnak"], ["batch_size", "rank"], "key", where="queue.yaml")
    with pytest.raises(SchemaError, match="'x'"):
        check_options(["x"], [], error=SchemaError)


finite = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(finite)
def test_the_python_spelling_of_a_value_means_that_value_where_its_kind_is_expected(value: Any) -> None:
    read = convert(freeze(from_text(repr(value), kind_of(value))), kind_of(value))
    assert read == freeze(value)
    assert type(read) is type(freeze(value))
