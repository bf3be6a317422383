"""Edits as values: what they refuse, how they are written down, and what is read back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, ResumeError
from penstock.order.edits import Ban, Edit, Reweight, Skip, edit_from_json, edits_digest

steps = st.integers(0, 10**12)
edits = st.one_of(
    st.builds(lambda start, length: Skip(start, start + length), steps, st.integers(1, 10**6)),
    st.builds(Ban, steps, st.text(max_size=9), st.lists(st.integers(0, 10**12)).map(tuple)),
    st.builds(
        Reweight,
        steps,
        st.dictionaries(st.text(max_size=9), st.floats(0, 1e9) | st.integers(0, 99) | st.fractions(0, 9), max_size=4),
    ),
)


@given(edits)
def test_an_edit_reads_back_as_it_was_written(edit: Edit) -> None:
    assert edit_from_json(json.loads(json.dumps(edit.to_json()))) == edit


@given(st.lists(edits, max_size=3), st.lists(edits, max_size=3))
def test_the_digest_tells_edits_apart(some: list[Edit], others: list[Edit]) -> None:
    same = [edit.to_json() for edit in some] == [edit.to_json() for edit in others]
    assert (edits_digest(some) == edits_digest(others)) == same


def test_the_digest_does_not_depend_on_the_order_of_the_sources() -> None:
    assert edits_digest([Reweight(1, {"a": 1, "b": 2})]) == edits_digest([Reweight(1, {"b": 2, "a": 1})])
    assert edits_digest([Skip(1, 2), Skip(3, 4)]) != edits_digest([Skip(3, 4), Skip(1, 2)])


def test_numbers_of_numpy_are_written_down_as_numbers() -> None:
    given: list[Edit] = [
        Skip(np.int64(3), np.int32(5)),  # type: ignore[arg-type]
        Ban(np.int64(3), "a", (1,)),  # type: ignore[arg-type]
        Reweight(np.int64(3), {"a": np.float32(0.5), "b": np.int64(2)}),  # type: ignore[arg-type, dict-item]
    ]
    plain = [["skip", 3, 5], ["ban", 3, "a", [1]], ["reweight", 3, {"a": 0.5, "b": 2}]]
    assert json.loads(json.dumps([edit.to_json() for edit in given])) == plain
    assert edits_digest(given) == edits_digest([edit_from_json(facts) for facts in plain])


def test_an_edit_says_what_it_is_and_from_which_step_on() -> None:
    given: list[Edit] = [Skip(340, 360), Ban(7, "web", (1, 2)), Reweight(9, {"web": 1})]
    assert [edit.step for edit in given] == [340, 7, 9]
    assert list(map(str, given)) == ["skip(340, 360)", "ban(2 rows of 'web' from step 7)", "reweight(9, {'web': 1})"]


@pytest.mark.parametrize("make", [lambda: Skip(3, 3), lambda: Skip(-1, 3), lambda: Skip(True, 3), lambda: Skip(0.0, 3)])
def test_steps_to_skip_are_a_range(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"\b340\b.*\b360\b"):
        make()


@pytest.mark.parametrize("step", [-1, 1.0, "1", None, True])
def test_the_step_of_an_edit_is_a_whole_number(step: Any) -> None:
    for make in (lambda: Ban(step, "a", ()), lambda: Reweight(step, {"a": 1})):
        with pytest.raises(ConfigError, match="step="):
            make()


@pytest.mark.parametrize(
    "facts",
    [
        5,
        None,
        "skip",
        [],
        ["skip", 1],
        ["skip", 1, 2, 3],
        ["skip", 5, 3],
        ["skip", "1", "3"],
        ["ban", 1, "a"],
        ["ban", 1, "a", 7],
        ["ban", 1, "a", [1.5]],
        ["ban", -1, "a", [1]],
        ["reweight", 1, [1, 2]],
        ["reweight", "x", {"a": 1}],
        ["reweight", 1, {"a": "much"}],
        ["reweight", 1, {"a": "1/0"}],
    ],
)
def test_what_is_no_edit_is_refused_by_name(facts: Any) -> None:
    with pytest.raises(ResumeError):
        edit_from_json(facts)


def test_an_edit_of_a_newer_release_is_refused_with_a_remedy() -> None:
    with pytest.raises(ResumeError, match="'reorder'"):
        edit_from_json(["reorder", 1])
