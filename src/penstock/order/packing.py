"""Whole documents into bins of one capacity, planned on their lengths alone.

Both strategies take the longest documents first: `best_fit` puts each into the fullest bin that still has room for it,
`first_fit` into the one opened first that has. Lengths are small integers, so documents of one length are placed
together; a million of them take a fraction of a second.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError

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
        log, bins = _moves(distinct, counts, capacity)
        placed = _assign_moves(log, distinct[-1] if distinct else 1)
    else:
        placed, bins = _first_fit(distinct, counts, capacity)
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
    count = _moves if strategy == "best_fit" else _first_fit
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


NEW = -1
"""The room of bins that are not open yet."""

Move = tuple[int, int, int, int]
"""(room, bins, each, rest): so many bins with this room take so many documents each, and have the room `rest` then."""


def _moves(lengths: list[int], counts: list[int], capacity: int) -> tuple[list[Move], int]:
    """How `counts[i]` documents of `lengths[i]` (falling, positive) are placed, in order, and the bins it takes."""
    smallest = lengths[-1] if lengths else 1
    rooms: list[int] = []  # rising: the rooms there are that can still take something
    bins_with: dict[int, int] = {}
    bins = 0
    log: list[Move] = []
    for length, left in zip(lengths, counts):
        first = last = bisect_left(rooms, length)
        before = len(log)
        while left and last < len(rooms):
            room = rooms[last]
            used = _fill(log, room, room, bins_with[room], length, left)
            left -= min(left, used * (room // length))
            bins_with[room] -= used
            if not bins_with[room]:
                del bins_with[room]
                last += 1
        del rooms[first:last]
        if left:
            bins += _fill(log, NEW, capacity, left, length, left)
        for _, number, _, rest in log[before:]:
            if rest in bins_with:
                bins_with[rest] += number
            elif rest >= smallest:
                bins_with[rest] = number
                insort(rooms, rest)
    return log, bins


def _fill(log: list[Move], name: int, room: int, bins: int, length: int, documents: int) -> int:
    """Put documents of one length into at most so many bins of one room, one bin after the other; the bins used."""
    each = room // length
    full, over = divmod(documents, each)
    if full >= bins:
        log.append((name, bins, each, room - each * length))
        return bins
    if full:
        log.append((name, full, each, room - each * length))
    if over:
        log.append((name, 1, over, room - over * length))
        return full + 1
    return full


def _assign_moves(log: list[Move], smallest: int) -> npt.NDArray[np.int64]:
    """The bin of every document, longest first. Among bins with the same room the one opened first is taken."""
    groups: dict[int, list[int]] = {}  # room: the numbers of its bins, rising
    opened = 0
    placed: list[int] = []
    for room, number, _, rest in log:
        if room == NEW:
            taken = list(range(opened, opened + number))
            opened += number
        else:
            group = groups[room]
            if number == len(group):
                taken = groups.pop(room)
            else:
                taken = group[:number]
                del group[:number]
        placed += taken
        if rest < smallest:
            continue
        there = groups.get(rest)
        if there is None:
            groups[rest] = taken
        elif number == 1:
            insort(there, taken[0])
        else:
            there += taken
            there.sort()  # two rising runs: a merge
    each = np.array([(number, each) for _, number, each, _ in log], np.int64).reshape(-1, 2)
    return np.repeat(np.array(placed, np.int64), np.repeat(each[:, 1], each[:, 0]))


_BLOCK = 256
_FEW = 1 << 14  # bins that are looked over faster than their blocks are kept up to date

_Numbers = npt.NDArray[np.int64]


def _first_fit(lengths: list[int], counts: list[int], capacity: int) -> tuple[_Numbers, int]:
    """The bin of every document, longest first, and the bins it takes; `lengths` fall and are positive."""
    row = _Row(capacity)
    numbers, shares = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for length, left in zip(lengths, counts):
        number = row.with_room(length, left)
        if len(number):
            share = row.rooms[number] // length
            reach = np.cumsum(share)
            if reach[-1] > left:
                used = int(reach.searchsorted(left)) + 1
                number, share = number[:used], share[:used]
                share[-1] -= reach[used - 1] - left
                left = 0
            else:
                left -= int(reach[-1])
            row.fill(number, share * length)
            numbers.append(number)
            shares.append(share)
        if left:
            each = capacity // length
            share = np.full(-(-left // each), each)
            share[-1] = left - each * (len(share) - 1)
            numbers.append(row.open(share * length))
            shares.append(share)
    return np.repeat(np.concatenate(numbers), np.concatenate(shares)), row.bins


class _Row:
    """Bins in the order they were opened, and the room of each."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bins = 0
        self.rooms = np.zeros(16 * _BLOCK, np.int64)
        self.largest = np.zeros(16, np.int64)
        self.stale = False  # whether `largest` is older than `rooms`

    def with_room(self, length: int, most: int) -> _Numbers:
        """The first bins that take a document of this length, `most` of them or all there are."""
        if self.bins <= max(_FEW, most * _BLOCK):
            return np.flatnonzero(self.rooms[: self.bins] >= length)[:most]
        if self.stale:
            self.rooms.reshape(-1, _BLOCK).max(axis=1, out=self.largest)
            self.stale = False
        blocks = np.flatnonzero(self.largest >= length)[:most]
        found = np.flatnonzero(self.rooms.reshape(-1, _BLOCK)[blocks] >= length)[:most]
        inside: _Numbers = blocks[found // _BLOCK] * _BLOCK + found % _BLOCK
        return inside

    def fill(self, numbers: _Numbers, tokens: _Numbers) -> None:
        self.rooms[numbers] -= tokens
        self._changed(numbers)

    def open(self, tokens: _Numbers) -> _Numbers:
        """New bins that already hold so many tokens."""
        first = self.bins
        self.bins += len(tokens)
        if (short := self.bins - len(self.rooms)) > 0:
            more = max(len(self.largest), -(-short // _BLOCK))
            self.rooms = np.append(self.rooms, np.zeros(more * _BLOCK, np.int64))
            self.largest = np.append(self.largest, np.zeros(more, np.int64))
        self.rooms[first : self.bins] = self.capacity - tokens
        numbers = np.arange(first, self.bins)
        self._changed(numbers)
        return numbers

    def _changed(self, numbers: _Numbers) -> None:
        # A few bins are brought up to date at once; after many, all are, when somebody asks.
        if self.stale or self.bins <= max(_FEW, len(numbers) * _BLOCK):
            self.stale = True
            return
        blocks = numbers // _BLOCK
        self.largest[blocks] = self.rooms.reshape(-1, _BLOCK)[blocks].max(axis=1)
