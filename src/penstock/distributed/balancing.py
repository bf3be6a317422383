"""Balancing: samples of different lengths in parts of equal cost, and in micro-batches.

Everything is arithmetic on lengths, so all ranks get the same result without communication.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError

Numbers = npt.NDArray[np.int64]
_SWAPS, _PARTNERS = 8, 8  # most swaps for each part, and number of cheapest parts to swap with

Part = tuple[float, int, list[int]]
"""Cost of some items, one of them (for ties), and all of them."""


def attention_cost(
    lengths: npt.ArrayLike, linear: float = 1.0, quadratic: float = 1 / 24576
) -> npt.NDArray[np.float64]:
    """Cost of a sequence of L tokens: `linear * L + quadratic * L**2`, by default in units of one token.

    Attention costs about L / (6 * hidden size) of the matrices; the default is for a hidden size of 4096, a 7B model.
    For documents packed into one sequence, pass the lengths of the documents and add up.
    """
    tokens = np.asarray(lengths, np.float64)
    return linear * tokens + quadratic * tokens * tokens


def karmarkar_karp(costs: npt.ArrayLike, parts: int, equal_size: bool = False) -> list[Numbers]:
    """Items in `parts` parts of nearly equal cost, by largest differencing.

    The two divisions with the widest gaps between their most and least expensive parts are joined, again and again: the
    most expensive part of one with the cheapest of the other. With `equal_size` the numbers of items differ by at most
    one; since that leaves fewer choices, items are swapped afterwards.

    Parts are in the order of their first items, items in their own order. Parts are empty, at the end, only if there
    are fewer items than parts. 100,000 items take below a second, a global batch a millisecond.
    """
    values = _checked(costs, parts)
    order = np.argsort(-values, kind="stable")
    amounts = values.tolist()
    heap: list[tuple[float, int, list[Part]]] = []
    if equal_size:
        # The blanks that fill the last group cost nothing and are at most one to a part.
        for number, start in enumerate(range(0, len(order), parts)):
            group = order[start : start + parts].tolist()
            division = [(amounts[item], item, [item]) for item in reversed(group)]
            blanks: list[Part] = [(0, -1 - blank, []) for blank in range(parts - len(group))]
            heap.append((_gap(division, parts), number, blanks + division))
    else:
        heap = [(-amounts[item], number, [(amounts[item], item, [item])]) for number, item in enumerate(order.tolist())]
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        first = heapq.heappop(heap)[2]
        joined = _join(first, heap[0][2], parts)
        heapq.heapreplace(heap, (_gap(joined, parts), serial, joined))
        serial += 1
    members = [part[2] for part in heap[0][2]] if heap else []
    return _in_order(_swapped(values, members) if equal_size else members, parts)


def greedy(costs: npt.ArrayLike, parts: int, equal_size: bool = False) -> list[Numbers]:
    """Items in `parts` parts of nearly equal cost: each, the most expensive first, to the cheapest part so far."""
    values = _checked(costs, parts)
    amounts = values.tolist()
    least, larger = divmod(len(amounts), parts)
    members: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0.0, 0, part) for part in range(parts)]
    for item in np.argsort(-values, kind="stable").tolist():
        cost, size, part = heapq.heappop(heap)
        while equal_size and size >= least and not (size == least and larger):
            cost, size, part = heapq.heappop(heap)
        members[part].append(item)
        larger -= equal_size and size == least
        heapq.heappush(heap, (cost + amounts[item], size + 1, part))
    return _in_order(members, parts)


def micro_batches(
    lengths: npt.ArrayLike, max_tokens: int, *, padded: bool = False, at_least: int = 1, multiple_of: int = 1
) -> list[Numbers]:
    """Samples in micro-batches of at most `max_tokens`, the largest first; none is empty, each sample is in one.

    `padded` counts rows times the longest, as in a padded tensor; otherwise the sum, as in a packed one. Their number
    is the smallest that the limit allows (always if padded, almost always if not), at least `at_least`, and a multiple
    of `multiple_of`. For W ranks that need equally many, split the global batch with `multiple_of=W` and give rank r
    `[r::W]`: no communication, and micro-batches that run at the same time are of similar size.
    """
    given = _checked(lengths, at_least, "at_least")
    if given.size and np.asarray(lengths).dtype.kind == "f":
        raise ConfigError(f"lengths must be integers, got {given.dtype}")
    sizes = given.astype(np.int64)
    if multiple_of < 1 or max_tokens < 1:
        raise ConfigError(f"multiple_of and max_tokens must be at least 1, got {multiple_of} and {max_tokens}")
    if not len(sizes):
        return []
    longest = int(np.argmax(sizes))
    if sizes[longest] > max_tokens:
        raise ConfigError(
            f"sample {longest} has {sizes[longest]} tokens, more than max_tokens={max_tokens}; raise max_tokens, or "
            "truncate such samples"
        )
    batches = (
        _padded(sizes, max_tokens, at_least, multiple_of)
        if padded
        else _summed(sizes, max_tokens, at_least, multiple_of)
    )
    weights = [int(sizes[batch].max()) * len(batch) if padded else int(sizes[batch].sum()) for batch in batches]
    order = sorted(range(len(batches)), key=lambda number: (-weights[number], int(batches[number][0])))
    return [batches[number] for number in order]


def _summed(sizes: Numbers, max_tokens: int, at_least: int, multiple_of: int) -> list[Numbers]:
    """Balanced micro-batches, as few as possible; where they exceed the limit, tightly packed ones."""
    lowest = _round_up(max(at_least, -(-int(sizes.sum()) // max_tokens)), multiple_of, len(sizes))
    batches = karmarkar_karp(sizes, lowest)
    if _fits(sizes, batches, max_tokens):
        return batches
    tight = _best_fit(sizes, max_tokens)
    count = _round_up(max(lowest, len(tight)), multiple_of, len(sizes))
    if count > lowest:
        batches = karmarkar_karp(sizes, count)
    return batches if _fits(sizes, batches, max_tokens) else _split(tight, count)


def _padded(sizes: Numbers, max_tokens: int, at_least: int, multiple_of: int) -> list[Numbers]:
    """Neighbours by length: as many rows as fit at the longest remaining length, which is optimal."""
    order, batches, start = np.argsort(-sizes, kind="stable"), [], 0
    while start < len(order):
        rows = max_tokens // max(1, int(sizes[order[start]]))
        batches.append(order[start : start + rows].tolist())
        start += rows
    return _split(batches, _round_up(max(at_least, len(batches)), multiple_of, len(sizes)))


def _best_fit(sizes: Numbers, max_tokens: int) -> list[list[int]]:
    """Longest first, each where the least room remains."""
    batches: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        at = bisect_left(room, (size, -1))
        if at == len(room):
            insort(room, (max_tokens - size, len(batches)))
            batches.append([item])
        else:
            left, batch = room.pop(at)
            insort(room, (left - size, batch))
            batches[batch].append(item)
    return batches


def _split(batches: list[list[int]], count: int) -> list[Numbers]:
    """Halve those with the most rows until there are `count`."""
    heap = [(-len(batch), number, batch) for number, batch in enumerate(batches)]
    heapq.heapify(heap)
    for number in range(len(batches), count):
        batch = heapq.heappop(heap)[2]
        middle = len(batch) // 2
        heapq.heappush(heap, (-middle, number, batch[:middle]))
        heapq.heappush(heap, (middle - len(batch), number + count, batch[middle:]))
    return _in_order([batch for _, _, batch in heap], count)


def _fits(sizes: Numbers, batches: list[Numbers], max_tokens: int) -> bool:
    return all(int(sizes[batch].sum()) <= max_tokens for batch in batches)


def _round_up(count: int, multiple_of: int, items: int) -> int:
    rounded = -(-count // multiple_of) * multiple_of
    if rounded > items:
        raise ConfigError(
            f"{items} samples do not fill {rounded} micro-batches (multiple_of={multiple_of}); use a larger batch or "
            "larger max_tokens"
        )
    return rounded


def _join(first: list[Part], second: list[Part], parts: int) -> list[Part]:
    """Two divisions as one: most expensive with cheapest. A division lists its non-empty parts, cheapest first."""
    if len(first) < len(second):
        first, second = second, first
    if len(second) == 1:  # by far the most frequent case, and cheap
        insort(first, second[0] if len(first) < parts else _together(first.pop(0), second[0]))
        return first
    meeting = max(0, len(first) + len(second) - parts)  # the others find an empty part on the other side
    joined = [_together(one, other) for one, other in zip(first[:meeting], reversed(second[:meeting]))]
    joined += first[meeting:]
    joined += second[meeting:]
    joined.sort()
    return joined


def _swapped(values: npt.NDArray[Any], members: list[list[int]]) -> list[list[int]]:
    """Swap an item of the most expensive part for a cheaper one elsewhere, as long as that narrows their gap."""
    parts = [np.array(sorted(items, key=values.__getitem__), np.int64) for items in members]
    sums = np.array([values[items].sum() for items in parts])
    for _ in range(_SWAPS * len(parts)):
        high = int(sums.argmax())
        for low in np.argsort(sums, kind="stable")[:_PARTNERS].tolist():
            gap = sums[high] - sums[low]
            if gap <= 0 or not len(parts[low]):
                continue
            wanted = values[parts[high]] - gap / 2
            cheap = values[parts[low]]
            nearest = np.searchsorted((cheap[1:] + cheap[:-1]) / 2, wanted)
            give = int(np.abs(wanted - cheap[nearest]).argmin())
            take = int(nearest[give])
            moved = values[parts[high][give]] - cheap[take]
            if 0 < moved < gap:
                break
        else:
            break
        for part, place, item in ((high, give, parts[low][take]), (low, take, parts[high][give])):
            rest = np.delete(parts[part], place)
            parts[part] = np.insert(rest, np.searchsorted(values[rest], values[item]), item)
        sums[high] -= moved
        sums[low] += moved
    return [items.tolist() for items in parts]


def _together(one: Part, other: Part) -> Part:
    small, large = (one[2], other[2]) if len(one[2]) < len(other[2]) else (other[2], one[2])
    large.extend(small)
    return (one[0] + other[0], max(one[1], other[1]), large)


def _gap(division: list[Part], parts: int) -> float:
    """Negative gap between the most expensive and the cheapest part, for a min-heap."""
    return (division[0][0] if len(division) == parts else 0) - division[-1][0]


def _in_order(members: list[list[int]], parts: int) -> list[Numbers]:
    filled = sorted((np.sort(np.array(items, np.int64)) for items in members if items), key=lambda items: int(items[0]))
    return filled + [np.zeros(0, np.int64) for _ in range(parts - len(filled))]


def _checked(costs: npt.ArrayLike, parts: int, name: str = "parts") -> npt.NDArray[Any]:
    values = np.asarray(costs)
    if parts < 1:
        raise ConfigError(f"{name} must be at least 1, got {parts}")
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iuf"):
        raise ConfigError(f"expected one number for each sample, got {values.dtype} of shape {values.shape}")
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0))) if values.size else np.zeros(0, np.int64)
    if wrong.size:
        raise ConfigError(
            f"sample {wrong[0]} has {values[wrong[0]]}; lengths and costs must be finite and not negative"
        )
    return values.astype(np.float64) if values.dtype.kind == "u" or not values.size else values
