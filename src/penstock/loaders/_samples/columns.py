"""Samples as columns: tokens, numbers, and what is kept beside the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.loaders._samples.kinds import IGNORE
from penstock.loaders._samples.ragged import Ragged

__all__ = ["ArrowCells", "Columns", "ListCells", "some_of"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ListCells:
    """A column of anything, as a list."""

    values: list[Any]

    def take(self, rows: Ints) -> list[Any]:
        return [self.values[row] for row in rows.tolist()]


@dataclass(frozen=True, slots=True)
class ArrowCells:
    """A column of anything, as Arrow has it."""

    values: pa.ChunkedArray

    def take(self, rows: Ints) -> list[Any]:
        numbers = pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(np.ascontiguousarray(rows))])
        cells: list[Any] = self.values.take(numbers).to_pylist()
        return cells


@dataclass(frozen=True)
class Columns:
    """Some samples: row i of every column is of sample i."""

    rows: int
    ids: Ragged | None = None
    """None: samples that have no tokens, only numbers of one shape."""
    by_token: Mapping[str, Ragged] = field(default_factory=dict)
    """Of the same lengths as the ids."""
    fixed: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Whole numbers as they were given (bytes and truth values only where batches have them), others as float32."""
    beside: Mapping[str, ListCells | ArrowCells] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        tokens = sum(column.nbytes for column in self.by_token.values())
        numbers = sum(column.nbytes for column in self.fixed.values())
        return tokens + numbers + (0 if self.ids is None else self.ids.nbytes)

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each sample."""
        return np.zeros(self.rows, np.int64) if self.ids is None else self.ids.lengths

    @cached_property
    def ignored(self) -> npt.NDArray[np.bool_] | None:
        """Which samples have a label of their own that is not to be learned; None: none has."""
        labels = self.fixed.get("labels")
        if labels is None or labels.dtype.kind not in "iu":
            return None
        found = (labels == IGNORE).reshape(self.rows, -1).all(axis=1)
        return found if found.any() else None

    def identity(self, digest: Callable[[bytes], object]) -> None:
        """Feed what tells these samples from others: how long they are, the ids of some, their numbers beside."""
        if self.ids is not None:
            digest(np.ascontiguousarray(self.ids.lengths).tobytes())
            for row in some_of(len(self.ids)).tolist():
                digest(np.ascontiguousarray(self.ids.row(row), np.int64).tobytes())
        for name in sorted(self.fixed):
            digest(name.encode())
            digest(np.ascontiguousarray(self.fixed[name]).tobytes())


def some_of(rows: int) -> npt.NDArray[np.int64]:
    """A few rows, spread evenly, that stand for all."""
    return np.unique(np.linspace(0, max(rows - 1, 0), min(rows, 64)).astype(np.int64))
