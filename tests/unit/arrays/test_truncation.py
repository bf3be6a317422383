"""Truncation: parts of rows by policy, and the tokens that are lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.arrays.truncation import TruncatedParts, Truncation
from penstock.errors import ConfigError, DataError


def listed(parts: TruncatedParts) -> list[tuple[int, int, int]]:
    return list(zip(parts.rows.tolist(), parts.starts.tolist(), parts.lengths.tolist()))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=40), st.integers(1, 12))
def test_each_policy_gives_its_parts_and_counts_what_is_lost(lengths: list[int], limit: int) -> None:
    sizes = np.array(lengths, np.int64)
    expected = {
        "drop": [(row, 0, length) for row, length in enumerate(lengths) if length <= limit],
        "right": [(row, 0, min(length, limit)) for row, length in enumerate(lengths)],
        "left": [(row, max(length - limit, 0), min(length, limit)) for row, length in enumerate(lengths)],
        "split": [
            (row, start, min(limit, length - start))
            for row, length in enumerate(lengths)
            for start in (range(0, length, limit) if length else [0])
        ],
    }
    for policy, parts in expected.items():
        cut = Truncation(policy, limit)  # type: ignore[arg-type]
        assert listed(cut.parts(sizes)) == parts
        assert listed(cut.parts(sizes, np.arange(len(sizes)) + 100)) == [(row + 100, *rest) for row, *rest in parts]
        assert cut.lost_tokens(sizes) == sum(lengths) - sum(length for _, _, length in parts)
        assert cut.one_to_one == (policy in ("left", "right"))


def test_a_row_that_is_too_long_is_an_error_with_its_number() -> None:
    with pytest.raises(DataError, match=r"row 7\b.*truncation='right'") as caught:
        Truncation("error", 3).parts(np.array([3, 4]), np.array([5, 7]))
    assert caught.value.row == 7


def test_without_a_limit_every_row_passes() -> None:
    assert listed(Truncation().parts(np.array([3, 0]))) == [(0, 0, 3), (1, 0, 0)]
    assert Truncation("drop").one_to_one
    assert Truncation("drop").lost_tokens(np.array([9])) == 0


def test_policies_and_limits_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'rigth'.*'right'"):
        Truncation("rigth", 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"max_length.*\b0\b"):
        Truncation(max_length=0)
