"""Packing of whole documents into bins of one capacity, by their lengths alone.

Both strategies place the longest documents first: `best_fit` puts each into the fullest bin that has room for it,
`first_fit` into the first opened bin that has. Documents of one length are placed together, so a million documents take
a fraction of a second.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import offsets_of
from penstock.errors import ConfigError

STRATEGIES = ("best_fit", "first_fit")


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """Bins of documents: bin b holds `documents[offsets[b]:offsets[b + 1]]`, longest first.

    Bins are in the order they were opened: the first ones hold the longest documents.
    """

    documents: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[list[int]]:
        """Bin by bin, for tests and people; not for hot paths."""
        for low, high in zip(self.offsets[:-1], self.offsets[1:]):
            yield self.documents[low:high].tolist()

    def sizes(self, lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Tokens in each bin, given the lengths that were packed."""
        return np.diff(offsets_of(np.asarray(lengths)[self.documents])[self.offsets])

    def efficiency(self, lengths: npt.ArrayLike, capacity: int) -> float:
        """Share of the room that is filled; 1.0 without bins."""
        return float(np.asarray(lengths).sum(dtype=np.int64)) / (len(self) * capacity) if len(self) else 1.0


def pack(lengths: npt.ArrayLike, capacity: int, strategy: str = "best_fit") -> Bins:
    """Pack every document whole into one bin, no bin above its capacity. Equal lengths give equal bins.

    Empty documents all go into one bin.

        bins = pack([700, 1200, 300], capacity=1024 * 2)
        bins.documents[bins.offsets[0] : bins.offsets[1]]   # [1, 0]
    """
    sizes, capacity = _checked(lengths, capacity, strategy), operator.index(capacity)
    by_length = order_of(capacity - sizes)
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
    return Bins(by_length[order_of(placed)], offsets_of(np.bincount(placed, minlength=bins)))


def count_bins(lengths: npt.ArrayLike, capacity: int, strategy: str = "best_fit") -> int:
    """Number of bins that `pack` makes; for `best_fit` much faster than packing."""
    sizes, capacity = _checked(lengths, capacity, strategy), operator.index(capacity)
    distinct, counts = _distinct(sizes)
    count = _moves if strategy == "best_fit" else _first_fit
    return max(count(distinct, counts, capacity)[1], int(len(sizes) > 0))


def _checked(lengths: npt.ArrayLike, capacity: int, strategy: str) -> npt.NDArray[np.int64]:
    if strategy not in STRATEGIES:
        raise ConfigError(f"unknown packing strategy {strategy!r}; expected one of {', '.join(STRATEGIES)}")
    if capacity <= 0:
        raise ConfigError(f"capacity must be positive, got {capacity}")
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise ConfigError(f"lengths must be integers in one dimension, got {given.dtype} of shape {given.shape}")
    sizes = given.astype(np.int64, copy=False)
    if not len(sizes) or (sizes.min() >= 0 and sizes.max() <= capacity):
        return sizes
    document = int(np.argmax((sizes < 0) | (sizes > capacity)))
    length = int(given[document])
    if length < 0:
        raise ConfigError(f"document {document} has the negative length {length}")
    raise ConfigError(
        f"document {document} has {length} tokens, more than capacity={capacity}; truncate or split it, or raise the "
        "capacity"
    )


def _distinct(sizes: npt.NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Distinct positive lengths, descending, and the count of each."""
    if len(sizes) and int(sizes.max()) <= 4 * len(sizes):
        times = np.bincount(sizes)
        distinct = np.flatnonzero(times)
        counts = times[distinct]
    else:
        distinct, counts = np.unique(sizes, return_counts=True)
    positive = distinct > 0
    return distinct[positive][::-1].tolist(), counts[positive][::-1].tolist()


def order_of(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Stable argsort of small numbers, 16 bits at a time: NumPy sorts those by radix, ten times as fast."""
    order = np.argsort(numbers.astype(np.uint16), kind="stable")
    bits = int(numbers.max()).bit_length() if len(numbers) else 0
    for shift in range(16, bits, 16):
        digits = (numbers >> shift).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    return order.astype(np.int64, copy=False)


NEW = -1
"""Room of bins that are not open yet."""

Move = tuple[int, int, int, int]
"""(room, bins, each, rest): `bins` bins with this room take `each` documents and then have room `rest`."""


def _moves(lengths: list[int], counts: list[int], capacity: int) -> tuple[list[Move], int]:
    """Moves that place `counts[i]` documents of `lengths[i]` (descending, positive), and the number of bins."""
    smallest = lengths[-1] if lengths else 1
    rooms: list[int] = []  # ascending: rooms that can still take a document
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
    """Put documents of one length into at most `bins` bins of one room, bin by bin; returns the bins used."""
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
    """Bin of every document, longest first. Among bins of equal room, the one opened first is taken."""
    groups: dict[int, list[int]] = {}  # room: numbers of its bins, ascending
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
            there.sort()  # two ascending runs: a merge
    each = np.array([(number, each) for _, number, each, _ in log], np.int64).reshape(-1, 2)
    return np.repeat(np.array(placed, np.int64), np.repeat(each[:, 1], each[:, 0]))


_BLOCK = 256
_FEW = 1 << 14  # so many bins are scanned faster than their blocks are kept up to date

_Numbers = npt.NDArray[np.int64]


def _first_fit(lengths: list[int], counts: list[int], capacity: int) -> tuple[_Numbers, int]:
    """Bin of every document, longest first, and the number of bins; `lengths` are descending and positive."""
    row = _OpenBins(capacity)
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


class _OpenBins:
    """Open bins in order, and the room of each."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bins = 0
        self.rooms = np.zeros(16 * _BLOCK, np.int64)
        self.largest = np.zeros(16, np.int64)
        self.stale = False  # True if `largest` is older than `rooms`

    def with_room(self, length: int, most: int) -> _Numbers:
        """First bins, at most `most`, that have room for a document of this length."""
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
        """Open new bins that hold these numbers of tokens; returns the numbers of the bins."""
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
        # A few blocks are updated at once; after many changes, all blocks are, when they are next needed.
        if self.stale or self.bins <= max(_FEW, len(numbers) * _BLOCK):
            self.stale = True
            return
        blocks = numbers // _BLOCK
        self.largest[blocks] = self.rooms.reshape(-1, _BLOCK)[blocks].max(axis=1)
