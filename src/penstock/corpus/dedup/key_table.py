"""A set of keys in memory: an open-addressing hash table in one NumPy array.

A key is one or more 64-bit words, the first of them evenly spread and never 0. Its place is given by its *upper* bits,
so the table is sorted but for small displacements, and can be written out in order without a copy of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any

import numpy as np

from penstock.arrays.hashes import Words
from penstock.corpus.dedup.fingerprints import WORTH_NUMBA
from penstock.corpus.dedup.minhash import frozen, kernels

__all__ = ["Flags", "KeyTable", "first_places", "sort_keys"]

Flags = np.ndarray[Any, np.dtype[np.bool_]]
Places = np.ndarray[Any, np.dtype[np.int64]]

_FEWEST_SLOTS = 1 << 10
_CHUNK = 1 << 15
_NARROW, _WIDE, _FEW = (
    np.arange(4),
    np.arange(24),
    200,
)  # slots looked at together: of few keys more, or steps cost most


class KeyTable:
    """Keys of `width` words. Not for several threads."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._slots: Words = np.zeros((_FEWEST_SLOTS, width), np.uint64)
        self.stored = 0

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes

    def most_keys(self, nbytes: int) -> int:
        """How many keys a table of at most `nbytes` takes; at least as many as the smallest table."""
        slots = max(_FEWEST_SLOTS, nbytes // (8 * self._width))
        return _filled(1 << slots.bit_length() - 1)

    def grow_for(self, keys: int) -> None:
        """Make room for that many keys in all. Old and new table are there at the same time, for a moment."""
        slots = len(self._slots)
        while _filled(slots) < keys:
            slots *= 2
        if slots == len(self._slots):
            return
        old = copy(self)
        self._slots = np.zeros((slots, self._width), np.uint64)
        compiled = self._kernels()
        if compiled is None:
            self._lay_out(old.in_order())
            return
        for start in range(0, len(old._slots), _CHUNK):
            compiled.insert_all(self._slots, self._shift, frozen(old._slots[start : start + _CHUNK]))

    def add_rows(self, keys: Words, known: Flags | None) -> tuple[Flags, Words]:
        """Which rows have a key that is `known`, is in the table, or was in an earlier row; and the keys new to all.

        `keys` has a row, a band and a word axis. There must be room for all of them: see `grow_for`.
        """
        compiled = self._kernels()
        if compiled is None:
            duplicate, fresh = self._add_rows(keys, known)
        else:
            duplicate = np.zeros(len(keys), np.bool_)
            fresh = np.empty((keys.shape[0] * keys.shape[1], self._width), np.uint64)
            known = np.zeros((0, 0), np.bool_) if known is None else known
            added, _ = compiled.add_rows(self._slots, self._shift, frozen(keys), frozen(known), duplicate, fresh)
            fresh = fresh[:added]
        self.stored += len(fresh)
        return duplicate, fresh

    def remove(self, keys: Words) -> None:
        """Take out keys that are in it."""
        compiled = self._kernels()
        if compiled is not None:
            compiled.remove_all(self._slots, self._shift, frozen(keys))
        else:
            held = self._slots[self._slots[:, 0] != 0]
            both = np.concatenate((keys, held))
            self._slots[:] = 0
            left = held[first_places(both)[len(keys) :] >= len(keys)]
            self._put(left, self._find(left, self._home(left))[0])
        self.stored -= len(keys)

    def clear(self) -> None:
        """Forget all keys. The memory stays."""
        self._slots[:] = 0
        self.stored = 0

    def in_order(self) -> Iterator[Words]:
        """All keys, sorted by their first word, in pieces.

        A key stands between its own place and the next empty slot. So what lies between two empty slots is sorted as a
        whole against the rest; only the keys that ran over the end of the table, to its beginning, belong last.
        """
        slots = self._slots
        start = self._next_empty(0)
        head = slots[:start]
        ran_over = head[:, 0] >> self._shift > np.uint64(start)
        yield from _sorted(head[~ran_over])
        while start < len(slots):
            stop = self._next_empty(start + _CHUNK)
            part = slots[start:stop]
            part = part.take(np.flatnonzero(part[:, 0]), axis=0)
            yield from _sorted(part if stop < len(slots) else np.concatenate((part, head[ran_over])))
            start = stop

    def _next_empty(self, start: int) -> int:
        """The first empty slot from here on, or the end."""
        while start < len(self._slots):
            empty = np.flatnonzero(self._slots[start : start + _CHUNK, 0] == 0)
            if len(empty):
                return start + int(empty[0])
            start += _CHUNK
        return len(self._slots)

    def _kernels(self) -> Any:
        """The compiled loops. With one key a row NumPy does at first: loading numba takes as long as many lookups."""
        return kernels() if self._width == 1 or self.stored > WORTH_NUMBA or "numba" in sys.modules else None

    @property
    def _shift(self) -> np.uint64:
        return np.uint64(64 - (len(self._slots).bit_length() - 1))

    def _lay_out(self, pieces: Iterable[Words]) -> None:
        """Put sorted keys into the empty table: each in its own place, or behind the one before it."""
        behind, ran_over = 0, []
        for keys in pieces:
            steps = np.arange(len(keys))
            home = self._home(keys)
            home[0] = max(home[0], behind)
            at = np.maximum.accumulate(home - steps) + steps
            behind = int(at[-1]) + 1
            inside = int(np.searchsorted(at, len(self._slots)))
            self._slots[at[:inside]] = keys[:inside]
            ran_over.append(keys[inside:])
        for keys in ran_over:
            self._put(keys, self._find(keys, self._home(keys))[0])

    def _add_rows(self, keys: Words, known: Flags | None) -> tuple[Flags, Words]:
        rows, bands = keys.shape[:2]
        flat = keys.reshape(rows * bands, self._width)
        first, numbers = first_places(flat), np.arange(len(flat))
        places, seen = self._find(flat, self._home(flat))
        if known is not None:
            seen |= known.reshape(-1)
        new = ~seen & (first == numbers)
        fresh = flat.take(np.flatnonzero(new), axis=0)
        self._put(fresh, places[new])
        seen |= first // bands < numbers // bands  # in an earlier row
        return np.logical_or.reduce(seen.reshape(rows, bands), axis=1), fresh

    def _find(self, keys: Words, places: Places) -> tuple[Places, Flags]:
        """For each key the slot where it stands, or the empty one where it belongs; and whether it stands there.

        Looks from `places` on: where the keys are at home, or as far as is known already.
        """
        there = self._slots.take(places, axis=0)  # several times as fast as an index
        found = _equal(there, keys)
        asked = np.flatnonzero(~found & (there[:, 0] != 0))
        at, mask = places[asked] + 1, len(self._slots) - 1
        while len(asked):
            wanted = keys[asked]
            reach = _WIDE if len(asked) < _FEW else _NARROW
            window = at[:, None] + reach & mask
            words = self._slots[window, 0]
            # The search ends at the key or at an empty slot; a key that is equal in its first word alone is passed by.
            stops = (words == wanted[:, :1]) | (words == 0)
            rows, step = np.arange(len(asked)), stops.argmax(axis=1)
            stopped, here = stops[rows, step], window[rows, step]
            there = self._slots.take(here, axis=0)
            same = _equal(there, wanted)
            places[asked], found[asked] = here, same
            further = ~same & ((there[:, 0] != 0) | ~stopped)
            asked, at = asked[further], np.where(stopped, here + 1, at + len(reach))[further]
        return places, found

    def _put(self, keys: Words, places: Places) -> None:
        """Put keys that are not in the table into the empty slots that were found for them."""
        while len(keys):
            self._slots[places] = keys
            # Of several keys with the same slot one has got it now; the others look on.
            lost = ~_equal(self._slots.take(places, axis=0), keys)
            keys = keys[lost]
            places, _ = self._find(keys, places[lost] + 1 & len(self._slots) - 1)

    def _home(self, keys: Words) -> Places:
        return (keys[:, 0] >> self._shift).astype(np.int64)


def sort_keys(keys: Words) -> Words:
    """Sorted by the first word."""
    return keys.take(np.argsort(keys[:, 0], kind="stable"), axis=0)


def first_places(keys: Words) -> Places:
    """For each key, where the same key stands for the first time."""
    words = np.sort(keys[:, 0])
    if not (words[1:] == words[:-1]).any():
        return np.arange(len(keys))
    order = np.lexsort(keys.T[::-1])
    new = np.ones(len(keys), np.bool_)
    new[1:] = (keys[order[1:]] != keys[order[:-1]]).any(axis=1)
    first = np.empty(len(keys), np.int64)
    first[order] = order[new][np.cumsum(new) - 1]
    return first


def _equal(left: Words, right: Words) -> Flags:
    """Which rows are equal. With two or three words, several times as fast as `(left == right).all(axis=1)`."""
    same: Flags = left[:, 0] == right[:, 0]
    for word in range(1, left.shape[1]):
        same &= left[:, word] == right[:, word]
    return same


def _sorted(keys: Words) -> Iterator[Words]:
    if len(keys):
        yield sort_keys(keys)


def _filled(slots: int) -> int:
    """How many keys that many slots take: beyond three quarters, looking for a free one takes long."""
    return slots * 3 // 4
