"""Keys that no longer fit into memory: sorted runs on disk, with a filter in memory that says which are surely not.

The files have no names where the system allows it: they vanish with the process, however it ends.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from penstock.arrays.hashes import Words
from penstock.corpus.dedup.key_table import Flags, sort_keys

__all__ = ["KeyRuns"]

_BLOCK = 256  # keys between two entries of a run's index; a probe reads this many
_READ = 256  # blocks that are read before the keys are looked for in them
_ASK = 1 << 14  # keys that are looked for at a time
_FAN = 4  # as many runs of about one size become a single one
_PART = 1 << 16  # keys in memory while runs are merged


class KeyRuns:
    """A set that takes many keys at a time, none of which it has already.

    Memory: the filter, which never grows, and 8 bytes for every 256 keys. At 10 bits of the filter for each key some 3
    in 100 questions about an unknown key go to disk; with fewer bits, more do.
    """

    def __init__(self, width: int, filter_bytes: int, directory: Path | None) -> None:
        self._width, self._directory = width, directory
        self._filter = _Filter(filter_bytes)
        self._levels: list[list[_Run]] = []

    @property
    def nbytes(self) -> int:
        return self._filter.nbytes + sum(run.index.nbytes for run in self._runs())

    def fit(self, filter_bytes: int) -> None:
        """From now on have a filter of that size, which is made by reading all keys once."""
        if (fitting := _Filter(filter_bytes)).nbytes != self._filter.nbytes:
            self._filter = fitting
            for run in self._runs():
                for start in range(0, run.keys, _PART):
                    self._filter.add(run.read(start, _PART)[:, 0])

    def add(self, pieces: Iterable[Words]) -> None:
        """Keep keys that come in order of their first word."""
        self._put(0, _Run(self._width, self._noted(pieces), self._directory))

    def has(self, keys: Words) -> Flags:
        """Which of the keys (a row of words each) are here."""
        found = np.zeros(len(keys), np.bool_)
        for start in range(0, len(keys), _ASK):
            part = keys[start : start + _ASK]
            asked = np.flatnonzero(self._filter.may_have(part[:, 0]))
            asked = asked[np.argsort(part[asked, 0])]
            for run in self._runs():
                if not len(asked):
                    break
                here = run.has(part[asked])
                found[start + asked[here]] = True
                asked = asked[~here]
        return found

    def _runs(self) -> Iterator[_Run]:
        for level in reversed(self._levels):
            yield from level

    def _noted(self, pieces: Iterable[Words]) -> Iterator[Words]:
        for piece in pieces:
            self._filter.add(piece[:, 0])
            yield piece

    def _put(self, number: int, run: _Run) -> None:
        if number == len(self._levels):
            self._levels.append([])
        level = self._levels[number]
        level.append(run)
        if len(level) == _FAN:
            merged = _Run(self._width, _merged(level), self._directory)
            level.clear()
            self._put(number + 1, merged)


class _Run:
    """A file of keys, sorted by their first word."""

    def __init__(self, width: int, pieces: Iterable[Words], directory: Path | None) -> None:
        self._width, self.keys = width, 0
        with tempfile.TemporaryFile(dir=directory, prefix="penstock-dedup-") as file:
            self._file = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._file)
            index = []
            for piece in pieces:
                index.append(piece[-self.keys % _BLOCK :: _BLOCK, 0].copy())  # a view would keep the piece
                self.keys += len(piece)
                file.write(np.ascontiguousarray(piece).data)
        self.index: Words = np.concatenate(index) if index else np.zeros(0, np.uint64)
        """The first word of every 256th key."""

    def has(self, keys: Words) -> Flags:
        """Which of the keys are here; they must be sorted by their first word."""
        found = np.zeros(len(keys), np.bool_)
        # Usually one block: the last that begins before the key. Two, if a block begins with the very first word of it.
        lasts = np.searchsorted(self.index, keys[:, 0], side="right") - 1
        firsts = np.maximum(np.searchsorted(self.index, keys[:, 0], side="left") - 1, 0)
        many = lasts - firsts + 1  # 0 for a key before the first block
        blocks = np.unique(np.arange(many.sum()) - np.repeat(np.cumsum(many) - many - firsts, many))
        for start in range(0, len(blocks), _READ):
            some = blocks[start : start + _READ].tolist()
            asked = slice(np.searchsorted(lasts, some[0]), np.searchsorted(firsts, some[-1], side="right"))
            # Whole blocks in their order are one sorted array.
            found[asked] |= _within(self._blocks(some), keys[asked])
        return found

    def read(self, start: int, count: int) -> Words:
        """Keys from a place on, as many as there are."""
        size = 8 * self._width
        return self._as_keys(_read(self._file, max(0, min(count, self.keys - start)) * size, start * size))

    def _blocks(self, numbers: list[int]) -> Words:
        size = 8 * self._width * _BLOCK
        end = self.keys * 8 * self._width
        parts = [_read(self._file, min(size, end - number * size), number * size) for number in numbers]
        return self._as_keys(b"".join(parts))

    def _as_keys(self, data: bytes) -> Words:
        return np.frombuffer(data, np.uint64).reshape(-1, self._width)

    def between(self, low: int, high: int) -> Words:
        """The keys whose first word is from `low` to `high`, both included."""
        first = max(0, int(np.searchsorted(self.index, np.uint64(low), side="left")) - 1) * _BLOCK
        last = int(np.searchsorted(self.index, np.uint64(high), side="right")) * _BLOCK
        keys = self.read(first, last - first)
        return keys[(keys[:, 0] >= np.uint64(low)) & (keys[:, 0] <= np.uint64(high))]


class _Filter:
    """A Bloom filter whose bits for one key lie in one word: a question costs one access to memory."""

    def __init__(self, nbytes: int) -> None:
        self._words: Words = np.zeros(max(64, nbytes // 8), np.uint64)

    @property
    def nbytes(self) -> int:
        return self._words.nbytes

    def add(self, keys: Words) -> None:
        """Note keys, which must be sorted: then those of one word are neighbours."""
        at = self._places(keys)
        starts = np.flatnonzero(np.diff(at, prepend=-1))
        if len(starts):
            self._words[at[starts]] |= np.bitwise_or.reduceat(_bits(keys), starts)

    def may_have(self, keys: Words) -> Flags:
        bits = _bits(keys)
        present: Flags = self._words[self._places(keys)] & bits == bits
        return present

    def _places(self, keys: Words) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Rising with the keys, and spread as evenly as they are."""
        return ((keys >> np.uint64(32)) * np.uint64(len(self._words)) >> np.uint64(32)).astype(np.int64)


def _read(file: int, size: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        data = os.pread(file, size, offset)
    else:  # Windows
        os.lseek(file, offset, os.SEEK_SET)
        data = os.read(file, size)
    if len(data) != size:
        raise OSError(f"a temporary file gave {len(data)} bytes from byte {offset} on, expected {size}")
    return data


def _bits(keys: Words) -> Words:
    bits = np.zeros(len(keys), np.uint64)
    for place in (0, 6, 12, 18):
        bits |= np.uint64(1) << (keys >> np.uint64(place) & np.uint64(63))
    return bits


def _merged(runs: list[_Run]) -> Iterator[Words]:
    """All keys of some runs in order. Keys are spread evenly, so equal stretches of numbers hold about as many."""
    parts = max(1, sum(run.keys for run in runs) // _PART)
    cuts = [part * (1 << 64) // parts for part in range(parts + 1)]
    for low, high in pairwise(cuts):
        yield sort_keys(np.concatenate([run.between(low, high - 1) for run in runs]))


def _within(block: Words, keys: Words) -> Flags:
    """Which keys are in a sorted block."""
    at = np.searchsorted(block[:, 0], keys[:, 0], side="left")
    stop = np.searchsorted(block[:, 0], keys[:, 0], side="right")
    found = np.zeros(len(keys), np.bool_)
    while (left := np.flatnonzero(~found & (at < stop))).size:
        found[left] = (block[at[left]] == keys[left]).all(axis=1)
        at[left] += 1
    return found
