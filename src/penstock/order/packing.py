"""Whole documents into bins of one capacity, planned on their lengths alone.

Both strategies take the longest documents first: `best_fit` puts each into the fullest bin that still has room for it,
`first_fit` into the one opened first that has. Lengths are small integers, so documents of one length are placed
together; a million of them take a fraction of a second.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.order import _best_fit, _first_fit

__all__ = ["STRATEGIES", "Bins", "count_bins", "pack"]

STRATEGIES = ("best_fit", "first_fit")


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """Which documents lie together: bin b holds `documents[offsets[b]:offsets[b + 1]]`, longest first.

    Bins come in the order they were opened: the first ones hold the longest documents.
    """

    documents: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[list[int]]:
        """Bin by bin: for people and tests, not for hot paths."""
        for low, high in zip(self.offsets[:-1], self.offsets[1:]):
            yield self.documents[low:high].tolist()

    def sizes(self, lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Tokens in each bin, given the lengths that were packed."""
        reach = np.zeros(len(self.documents) + 1, np.int64)
        np.cumsum(np.asarray(lengths)[self.documents], out=reach[1:])
        return np.diff(reach[self.offsets])

    def efficiency(self, lengths: npt.ArrayLike, capacity: int) -> float:
        """The share of all room that is filled, 1.0 when there are no bins."""
        return float(np.asarray(lengths).sum(dtype=np.int64)) / (len(self) * capacity) if len(self) else 1.0


def pack(lengths: npt.ArrayLike, capacity: int, strategy: str = "best_fit") -> Bins:
    """Every document into one bin whole, no bin over its capacity. The same lengths always give the same bins.

    Documents of no length cost nothing and go where the strategy puts them: all into one bin.

        bins = pack([700, 1200, 300], capacity=1024 * 2)
        bins.documents[bins.offsets[0] : bins.offsets[1]]   # [1, 0]
    """
    sizes, capacity = _checked(lengths, capacity, strategy), operator.index(capacity)
    by_length = _order_of(capacity - sizes)
    distinct, counts = _distinct(sizes)
    if strategy == "best_fit":
        log, bins = _best_fit.moves(distinct, counts, capacity)
        placed = _best_fit.assign(log, distinct[-1] if distinct else 1)
    else:
        placed, bins = _first_fit.assign(distinct, counts, capacity)
    if empty := len(sizes) - len(placed):
        bins = max(bins, 1)
        filled = np.bincount(placed, sizes[by_length[: len(placed)]], bins)
        placed = np.append(placed, np.full(empty, np.argmax(filled) if strategy == "best_fit" else 0))
    offsets = np.zeros(bins + 1, np.int64)
    np.cumsum(np.bincount(placed, minlength=bins), out=offsets[1:])
    return Bins(by_length[_order_of(placed)], offsets)


def count_bins(lengths: npt.ArrayLike, capacity: int, strategy: str = "best_fit") -> int:
    """How many bins `pack` would make; for `best_fit` in a small part of its time."""
    sizes, capacity = _checked(lengths, capacity, strategy), operator.index(capacity)
    distinct, counts = _distinct(sizes)
    count = _best_fit.moves if strategy == "best_fit" else _first_fit.assign
    return max(count(distinct, counts, capacity)[1], int(len(sizes) > 0))


def _checked(lengths: npt.ArrayLike, capacity: int, strategy: str) -> npt.NDArray[np.int64]:
    if strategy not in STRATEGIES:
        raise ConfigError(f"unknown packing strategy {strategy!r}; expected one of {', '.join(STRATEGIES)}")
    if capacity <= 0:
        raise ConfigError(f"the capacity of a bin must be positive, got {capacity}")
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise ConfigError(f"lengths must be integers in one dimension, got {given.dtype} of shape {given.shape}")
    sizes = given.astype(np.int64, copy=False)
    if not len(sizes) or (sizes.min() >= 0 and sizes.max() <= capacity):
        return sizes
    document = int(np.argmax((sizes < 0) | (sizes > capacity)))
    length = int(given[document])
    if length < 0:
        raise ConfigError(f"document {document} has the length {length}; lengths cannot be negative")
    raise ConfigError(
        f"document {document} has {length} tokens and a bin holds {capacity}; "
        "truncate or split documents before packing, or pack into larger bins"
    )


def _distinct(sizes: npt.NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """The positive lengths there are, falling, and how often each occurs."""
    if len(sizes) and int(sizes.max()) <= 4 * len(sizes):
        times = np.bincount(sizes)
        distinct = np.flatnonzero(times)
        counts = times[distinct]
    else:
        distinct, counts = np.unique(sizes, return_counts=True)
    positive = distinct > 0
    return distinct[positive][::-1].tolist(), counts[positive][::-1].tolist()


def _order_of(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A stable argsort of small numbers, 16 bits at a time: NumPy sorts those by radix, ten times as fast."""
    order = np.argsort(numbers.astype(np.uint16), kind="stable")
    bits = int(numbers.max()).bit_length() if len(numbers) else 0
    for shift in range(16, bits, 16):
        digits = (numbers >> shift).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    return order.astype(np.int64, copy=False)
