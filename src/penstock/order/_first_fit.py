"""First-fit decreasing: every document in the first bin, in the order they were opened, that has room for it.

Documents of one length fill the bins from left to right, each as far as it goes, so one look over the bins places all
of them. When there are many bins they lie in blocks with the largest room of each known: a length with fewer documents
than there are blocks looks only into blocks that can take one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["assign"]

_BLOCK = 256
_FEW = 1 << 14  # bins that are looked over faster than their blocks are kept up to date

_Numbers = npt.NDArray[np.int64]


def assign(lengths: list[int], counts: list[int], capacity: int) -> tuple[_Numbers, int]:
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
