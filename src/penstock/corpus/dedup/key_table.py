"""A set of keys in memory: an open-addressing hash table in one NumPy array.

A key is one or more 64-bit words, the first of them evenly spread and never 0. Its place is given by its *upper* bits,
so the table is sorted but for small displacements, and can be written out in order without a copy of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import numpy as np

from penstock.arrays.hashes import Words
from penstock.corpus.dedup.kernel_calls import Flags, add_keys, move_keys
from penstock.corpus.dedup.minhash import frozen
from penstock.corpus.kernels import PLAIN, kernel
from penstock.files.machine_code import Functions

_FEWEST_SLOTS = 1 << 10
_CHUNK = 1 << 15
_ZERO = np.uint64(0)


class KeyTable:
    """Keys of `width` words. Not for several threads."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._slots: Words = np.zeros((_FEWEST_SLOTS, width), np.uint64)
        self.stored = 0
        self.kernels: Functions | None = None
        """Machine code for one key a row; None: NumPy, with hundreds of short calls for a batch."""

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes

    def most_keys(self, nbytes: int) -> int:
        """Number of keys a table of at most `nbytes` holds; at least that of the smallest table."""
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
        if self.kernels is not None:
            move_keys(self.kernels, old._slots, self._slots)
            return
        for start in range(0, len(old._slots), _CHUNK):
            part = old._slots[start : start + _CHUNK]
            _place(self._slots, self._shift, part.take(np.flatnonzero(part[:, 0]), axis=0))

    def add_rows(self, keys: Words, known: Flags | None) -> tuple[Flags, Words]:
        """Flags of the rows with a key that is `known`, in the table or in an earlier row; and the keys that are new.

        `keys` has a row, a band and a word axis. There must be room for all of them: see `grow_for`.
        """
        if keys.shape[1] == 1:  # exact deduplication, which needs no compiler
            single, known = keys[:, 0], None if known is None else known[:, 0]
            if self.kernels is None:
                duplicate, fresh = self._add_single(single, known)
            else:
                duplicate, fresh = add_keys(self.kernels, self._slots, single, known)
            self.stored += len(fresh)
            return duplicate, fresh
        duplicate = np.zeros(len(keys), np.bool_)
        fresh = np.empty((keys.shape[0] * keys.shape[1], self._width), np.uint64)
        known = np.zeros((0, 0), np.bool_) if known is None else known
        added, _ = _add_rows(self._slots, self._shift, frozen(keys), frozen(known), duplicate, fresh)
        self.stored += added
        return duplicate, fresh[:added]

    def _add_single(self, keys: Words, known: Flags | None) -> tuple[Flags, Words]:
        """`add_rows` for one key a row, with NumPy."""
        duplicate = _repeated(keys)
        if known is not None:
            duplicate |= known
        firsts = np.flatnonzero(~duplicate)
        is_new = _place(self._slots, self._shift, keys.take(firsts, axis=0))
        duplicate[firsts[~is_new]] = True
        return duplicate, keys.take(firsts[is_new], axis=0)

    def remove(self, keys: Words) -> None:
        """Take out keys that are in it."""
        _remove_all(self._slots, self._shift, keys)
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

    @property
    def _shift(self) -> np.uint64:
        return np.uint64(64 - (len(self._slots).bit_length() - 1))


def sort_keys(keys: Words) -> Words:
    """Sorted by the first word."""
    return keys.take(np.argsort(keys[:, 0], kind="stable"), axis=0)


def _repeated(keys: Words) -> Flags:
    """Flags of the keys that are in an earlier row."""
    repeated = np.zeros(len(keys), np.bool_)
    order = np.argsort(keys[:, 0])  # not stable, which is 20 times as fast: most keys have a first word of their own
    first = keys[order, 0]
    same = first[1:] == first[:-1]
    if not same.any():
        return repeated
    shared = np.zeros(len(keys), np.bool_)
    shared[order[1:][same]] = shared[order[:-1][same]] = True
    rows = np.flatnonzero(shared)
    some = keys.take(rows, axis=0)
    order = np.lexsort(some.T[::-1])  # stable: of equal keys, the first row comes first
    ordered = some.take(order, axis=0)
    repeated[rows[order[1:][~_differ(ordered[1:], ordered[:-1])]]] = True
    return repeated


def _differ(left: Words, right: Words) -> Flags:
    """Flags of the rows in which keys differ."""
    differ: Flags = left[:, 0] != right[:, 0]
    for word in range(1, left.shape[1]):
        differ |= left[:, word] != right[:, word]
    return differ


def _sorted(keys: Words) -> Iterator[Words]:
    if len(keys):
        yield sort_keys(keys)


def _filled(slots: int) -> int:
    """Number of keys that this many slots may hold: beyond three quarters, probes become long."""
    return slots * 3 // 4


@kernel(plain=PLAIN // 4, by=2)
def _add_rows(slots: Any, shift: Any, keys: Any, known: Any, duplicate: Any, fresh: Any) -> tuple[int, Any]:
    """Mark rows with a key that is `known`, in the table or in an earlier row; add the new keys, also to `fresh`."""
    mask = len(slots) - 1
    width = slots.shape[1]
    added = 0
    touched = _ZERO
    for row in range(keys.shape[0]):
        before = added
        # Ask for the slots of the next row now: they come from memory all at once, while this row is looked at.
        if row + 1 < keys.shape[0]:
            for band in range(keys.shape[1]):
                touched ^= slots[np.int64(keys[row + 1, band, 0] >> shift), 0]
        seen = False
        for band in range(keys.shape[1]):
            if known.size and known[row, band]:
                seen = True
                continue
            key = keys[row, band]
            at = np.int64(key[0] >> shift)
            while slots[at, 0] != _ZERO and not _equal(slots[at], key):
                at = (at + 1) & mask
            if slots[at, 0] != _ZERO:
                own = False  # a key may be twice in one row
                for i in range(before, added):
                    own = own or _equal(fresh[i], key)
                seen = seen or not own
                continue
            for i in range(width):
                slots[at, i] = fresh[added, i] = key[i]
            added += 1
        duplicate[row] = seen
    return added, touched  # returned, or the compiler would remove the prefetch


def _place(slots: Words, shift: np.uint64, keys: Words) -> Flags:
    """Put different keys into the table; flags of those that were not in it before.

    All keys look at their slot at once. A key whose slot holds another one, or was taken by another one just now, goes
    on to the next slot.
    """
    mask = len(slots) - 1
    is_new = np.zeros(len(keys), np.bool_)
    left = np.arange(len(keys))
    at = (keys[:, 0] >> shift).astype(np.int64)
    while len(left):
        free = slots[at, 0] == 0
        slots[at[free]] = keys[free]  # of several keys for one slot, one stays
        on = _differ(slots.take(at, axis=0), keys)
        is_new[left] = free & ~on
        left, at, keys = left[on], (at[on] + 1) & mask, keys[on]
    return is_new


def _remove_all(slots: Words, shift: np.uint64, keys: Words) -> None:
    """Take keys that are in the table out of it, moving up those that were displaced by them. Rare, so not compiled."""
    mask = len(slots) - 1
    for row in range(len(keys)):
        hole = np.int64(keys[row, 0] >> shift)
        while (slots[hole] != keys[row]).any():
            hole = (hole + 1) & mask
        at = hole
        while True:
            at = (at + 1) & mask
            if slots[at, 0] == _ZERO:
                break
            home = np.int64(slots[at, 0] >> shift)
            if (at - home) & mask >= (at - hole) & mask:
                slots[hole] = slots[at]
                hole = at
        slots[hole] = _ZERO


@kernel()
def _equal(left: Any, right: Any) -> bool:
    for i in range(len(left)):  # noqa: SIM110 - numba compiles no generators
        if left[i] != right[i]:
            return False
    return True
