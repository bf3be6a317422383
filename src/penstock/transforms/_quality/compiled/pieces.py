"""Pieces of text that came before."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.transforms._quality.compiled.points import Array, compiled, count_characters, same

__all__ = ["is_new", "repeated_pieces", "table_size"]


@compiled
def hash_bytes(data: Array, start: int, stop: int) -> Any:
    """Eight bytes at a time; the length is part of it."""
    h = np.uint64(stop - start) * np.uint64(0x9E3779B97F4A7C15)
    at = start
    while at < stop:
        word = np.uint64(0)
        for i in range(min(8, stop - at)):
            word |= np.uint64(data[at + i]) << np.uint64(8 * i)
        h = (h ^ word) * np.uint64(0xBF58476D1CE4E5B9)
        h ^= h >> np.uint64(32)
        at += 8
    return h


@compiled
def is_new(data: Array, start: int, stop: int, slots: Array, size: int, spans: Array, n: int) -> bool:
    """Whether this stretch is not among the first `n` spans yet; if so it becomes span `n`."""
    slot = np.int64(hash_bytes(data, start, stop) & np.uint64(size - 1))
    while slots[slot] >= 0:
        first, last = spans[slots[slot], 0], spans[slots[slot], 1]
        if last - first == stop - start and same(data, start, data, first, stop - start):
            return False
        slot = (slot + 1) & (size - 1)
    slots[slot] = n
    spans[n, 0], spans[n, 1] = start, stop
    return True


@compiled
def table_size(n: int) -> int:
    size = 16
    while size < 2 * n + 2:
        size *= 2
    return size


@compiled
def repeated_pieces(
    data: Array, begin: int, stop: int, breaks: int, slots: Array, spans: Array
) -> tuple[int, int, int]:
    """Pieces between runs of at least `breaks` newlines; how many of them came before, and their characters."""
    pieces, unique, repeated, characters = 0, 0, 0, 0
    newlines = 0
    for at in range(begin, stop):
        newlines += data[at] == 10
    size = table_size(newlines + 1)
    slots[:size] = -1
    at = first = begin
    while True:
        last = at
        while at < stop and data[at] == 10:
            at += 1
        if at < stop and at - last < breaks:
            at += 1
            continue
        if at == stop and at - last < breaks:
            last = stop
        pieces += 1
        if is_new(data, first, last, slots, size, spans, unique):
            unique += 1
        else:
            repeated += 1
            characters += count_characters(data, first, last)
        if last == stop:
            return pieces, repeated, characters
        first = at
