"""A set of keys in memory: an open-addressing hash table in one NumPy array.

A key is one or more 64-bit words, the first of them evenly spread and never 0. Its place is given by its *upper* bits,
so the table is sorted but for small displacements, and can be written out in order without a copy of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.transforms._dedup.signatures import frozen, kernels
from penstock.transforms._hashing import Words

__all__ = ["Flags", "KeyTable", "first_places", "sort_keys"]

Flags = np.ndarray[Any, np.dtype[np.bool_]]

_FEWEST_SLOTS = 1 << 10
_CHUNK = 1 << 15
_WORTH_NUMBA = 500_000


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
        if slots > len(self._slots):
            old, self._slots = self._slots, np.zeros((slots, self._width), np.uint64)
            for start in range(0, len(old), _CHUNK):
                part = old[start : start + _CHUNK]
                self._insert(part[part[:, 0] != 0])

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
            self._insert(held[first_places(both)[len(keys) :] >= len(keys)])
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
            part = part[part[:, 0] != 0]
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
        return kernels() if self._width == 1 or self.stored > _WORTH_NUMBA or "numba" in sys.modules else None

    @property
    def _shift(self) -> np.uint64:
        return np.uint64(64 - (len(self._slots).bit_length() - 1))

    def _insert(self, keys: Words) -> None:
        compiled = self._kernels()
        if compiled is not None:
            compiled.insert_all(self._slots, self._shift, frozen(keys))
            return
        at = (keys[:, 0] >> self._shift).astype(np.int64)
        while len(keys):
            free = np.flatnonzero(self._slots[at, 0] == 0)
            places, chosen = np.unique(at[free], return_index=True)
            self._slots[places] = keys[free[chosen]]
            waiting = np.ones(len(keys), np.bool_)
            waiting[free[chosen]] = False
            keys, at = keys[waiting], at[waiting] + 1 & len(self._slots) - 1

    def _add_rows(self, keys: Words, known: Flags | None) -> tuple[Flags, Words]:
        rows, bands = keys.shape[:2]
        flat = keys.reshape(rows * bands, self._width)
        first = first_places(flat)
        seen = self._has(flat)
        if known is not None:
            seen |= known.reshape(-1)
        fresh = flat[~seen & (first == np.arange(len(flat)))]
        self._insert(fresh)
        earlier = first // bands < np.arange(len(flat)) // bands
        return (seen | earlier).reshape(rows, bands).any(axis=1), fresh

    def _has(self, keys: Words) -> Flags:
        found = np.zeros(len(keys), np.bool_)
        asked = np.arange(len(keys))
        at = (keys[:, 0] >> self._shift).astype(np.int64)
        while len(asked):
            there = self._slots[at]
            same = (there == keys[asked]).all(axis=1)
            found[asked[same]] = True
            further = ~same & (there[:, 0] != 0)
            asked, at = asked[further], at[further] + 1 & len(self._slots) - 1
        return found


def sort_keys(keys: Words) -> Words:
    """Sorted by the first word."""
    return keys[np.argsort(keys[:, 0], kind="stable")]


def first_places(keys: Words) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For each key, where the same key stands for the first time."""
    order = np.lexsort(keys.T[::-1])
    new = np.ones(len(keys), np.bool_)
    new[1:] = (keys[order[1:]] != keys[order[:-1]]).any(axis=1)
    first = np.empty(len(keys), np.int64)
    first[order] = order[new][np.cumsum(new) - 1]
    return first


def _sorted(keys: Words) -> Iterator[Words]:
    if len(keys):
        yield sort_keys(keys)


def _filled(slots: int) -> int:
    """How many keys that many slots take: beyond three quarters, looking for a free one takes long."""
    return slots * 3 // 4
