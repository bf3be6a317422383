"""Views of Arrow's lists as ragged arrays."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.arrays.ragged import Ragged, owners_of
from penstock.errors import DataError


def test_a_null_inside_a_list_is_refused_with_its_row() -> None:
    lists = pa.array([[1], [], [2, None], [3]], pa.list_(pa.uint16()))
    with pytest.raises(DataError, match=r"row 2 .* null inside") as caught:
        Ragged.of_lists(lists)
    assert caught.value.row == 2
    with pytest.raises(DataError, match="row 0 "):
        Ragged.of_lists(lists[2:])
    with pytest.raises(DataError, match="row 1 "):
        Ragged.of_lists(pa.array([[True], [False, None]]))


def test_nulls_outside_of_a_slice_do_not_matter() -> None:
    lists = pa.array([[None], [4, 5], [6], [None]], pa.list_(pa.uint16()))
    rows = Ragged.of_lists(lists[1:3])
    assert rows.values.dtype == np.uint16
    assert rows.values.tolist() == [4, 5, 6]
    assert rows.offsets.tolist() == [0, 2, 3]


@given(st.lists(st.integers(-40, 40), max_size=24), st.lists(st.integers(-50, 50), max_size=40))
def test_owners_are_those_that_a_search_finds(starts: list[int], places: list[int]) -> None:
    ordered, wanted = np.sort(np.array(starts, np.int64)), np.array(places, np.int64)
    found = owners_of(ordered, wanted)
    assert found.tolist() == [sum(start <= place for start in starts) - 1 for place in places]
