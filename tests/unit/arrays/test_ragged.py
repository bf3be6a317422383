"""Views of Arrow's lists as ragged arrays."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from penstock.arrays.ragged import Ragged
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
