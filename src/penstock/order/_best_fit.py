"""Best-fit decreasing, on counts: how many bins of which room take how many documents of which length.

Documents of one length are placed together. The tightest room that takes one also takes the next, until the bin has
less than a length left, so a whole group of bins with the same room moves at once. Two passes: the first knows only
how many bins have each room (all that counting bins takes), the second follows the bins by their numbers.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

__all__ = ["NEW", "Move", "assign", "moves"]

NEW = -1
"""The room of bins that are not open yet."""

Move = tuple[int, int, int, int]
"""(room, bins, each, rest): so many bins with this room take so many documents each, and have the room `rest` then."""


def moves(lengths: list[int], counts: list[int], capacity: int) -> tuple[list[Move], int]:
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


def assign(log: list[Move], smallest: int) -> npt.NDArray[np.int64]:
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
