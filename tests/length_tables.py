"""Table of rows that are nothing but their lengths, for plans."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np


@dataclass
class Lengths:
    """Rows of these lengths, each token found by looking through all of them."""

    each: list[int]

    @cached_property
    def flat(self) -> list[tuple[int, int]]:
        """(row, token) of every token."""
        return [(row, token) for row, length in enumerate(self.each) for token in range(length)]

    @property
    def rows(self) -> int:
        return len(self.each)

    @property
    def tokens(self) -> int:
        return sum(self.each)

    def lengths(self, rows: Any) -> Any:
        return np.array(self.each, np.int64)[np.asarray(rows)]

    def find_tokens(self, positions: Any) -> tuple[Any, Any]:
        found = [self.flat[position] for position in np.asarray(positions)]
        return np.array([row for row, _ in found]), np.array([token for _, token in found])
