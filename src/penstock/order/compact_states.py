"""Cursors and counts of many sources in little text: what differs from what the plan predicts.

The count of a source is within a sample of its target, so that one bit for each source and the position say all counts.
Where samples are arithmetic, the cursor of a source follows from its count, and so does the cursor at the beginning of
the epoch. A state of 10,000 such sources takes 2 or 3 KiB. Packed samples have to be counted window by window, and a
state has the index of each source in its window instead: 2 to 4 bytes a source.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.order.mixing import Drawn, Mixture
from penstock.order.plan import Plan, mixture_of
from penstock.order.positions import Position
from penstock.order.sample_orders import Order, OrderPosition

Ints = npt.NDArray[np.int64]
_WIDTHS = (8, 16, 32, 64)


def write_compact(plan: Plan, position: Position) -> dict[str, Any] | None:
    """Facts that lead back to a position of a mixture, beside step, epoch and samples; None if they would not."""
    mixture, drawn = mixture_of(plan), position.drawn
    if mixture is None or drawn is None:
        return None
    orders = [source.order for source in plan.sources]
    begin = drawn.position - position.samples
    counts, base = np.array(drawn.counts, np.int64), np.array(drawn.base, np.int64)
    derived = drawn.owed == _debts(mixture, drawn.start, drawn.base)
    facts = {
        "position": drawn.position,
        "start": drawn.start,
        "counts": _write(counts - mixture.expected_whole(drawn.position)),
        "base": _write(base - mixture.expected_whole(drawn.start)),
        "owed": True if derived else [str(debt) for debt in drawn.owed],
        "out": list(drawn.out),
        "places": _write_cursors(orders, position.cursors, counts),
        "marks": _write_cursors(orders, position.epoch_starts, mixture.expected_whole(begin)),
    }
    found = read_compact(plan, facts, position.samples)
    return facts if found == (position.cursors, drawn, position.epoch_starts) else None


def read_compact(
    plan: Plan, facts: Mapping[str, Any], samples: int
) -> tuple[tuple[OrderPosition, ...], Drawn, tuple[OrderPosition, ...]]:
    """Cursors, draws and cursors at the beginning of the epoch, from the result of `write_compact`.

    Raises ValueError, TypeError, KeyError or ArithmeticError if it is damaged.
    """
    mixture = mixture_of(plan)
    if mixture is None:
        raise ValueError("it belongs to a mixture")
    orders = [source.order for source in plan.sources]
    here, start = int(facts["position"]), int(facts["start"])
    if not 0 <= start <= here or not 0 <= samples <= here:
        raise ValueError(f"position {here}, start {start} and {samples} samples contradict each other")
    counts = mixture.expected_whole(here) + _read(facts["counts"], len(orders))
    base = tuple((mixture.expected_whole(start) + _read(facts["base"], len(orders))).tolist())
    owed = _debts(mixture, start, base) if facts["owed"] is True else tuple(map(Fraction, facts["owed"]))
    drawn = Drawn(here, tuple(counts.tolist()), start, base, owed, tuple(facts["out"])).checked()
    places = _read_cursors(orders, facts["places"], counts)
    return places, drawn, _read_cursors(orders, facts["marks"], mixture.expected_whole(here - samples))


def _debts(mixture: Mixture, start: int, base: Sequence[int]) -> tuple[Fraction, ...]:
    """Samples that sources are owed after a change of weights, if nothing but weights decided the counts."""
    if not start:
        return ()
    return mixture.debts([target - count for target, count in zip(mixture.expected(start), base)])


def _write_cursors(orders: Sequence[Order], cursors: Sequence[OrderPosition], counts: Ints) -> list[str]:
    """Cursors of sources, of which so many samples were drawn."""
    numbers, epochs, windows = [], [], []
    for order, cursor, count in zip(orders, cursors, counts.tolist()):
        if order.even is not None:
            numbers.append(cursor.epoch * order.total + order.number_of(cursor) - count)
            continue
        numbers.append(cursor.index - (0 if cursor.epoch or cursor.window else count))
        epochs.append(cursor.epoch)
        windows.append(cursor.window)
    return [_write(np.array(each, np.int64)) for each in (numbers, epochs, windows)]


def _read_cursors(orders: Sequence[Order], facts: Any, counts: Ints) -> tuple[OrderPosition, ...]:
    uneven = sum(order.even is None for order in orders)
    sizes = (len(orders), uneven, uneven)
    numbers, epochs, windows = (iter(_read(text, size).tolist()) for text, size in zip(facts, sizes, strict=True))
    found: list[OrderPosition] = []
    for order, count, number in zip(orders, counts.tolist(), numbers):
        if order.even is not None:
            cursor = order.position_of(*divmod(count + number, order.total))
        else:
            epoch, window = next(epochs), next(windows)
            cursor = OrderPosition(epoch, window, number if epoch or window else number + count)
        if min(cursor) < 0:
            raise ValueError(f"{cursor} is no cursor")
        found.append(cursor)
    return tuple(found)


def _write(values: Ints) -> str:
    """Integers as text: nothing for zeros, a bit for each 0 or 1, else the bytes that the largest needs, compressed."""
    if not values.any():
        return ""
    if values.min() >= 0 and values.max() <= 1:
        width, raw = 1, np.packbits(values.astype(np.uint8)).tobytes()
    else:
        # Small numbers of both signs become small numbers.
        plain = (values << 1) ^ (values >> 63)
        width = next(width for width in _WIDTHS if width == 64 or int(plain.view(np.uint64).max()) < 1 << width)
        raw = plain.view(np.uint64).astype(f"<u{width // 8}").tobytes()
    packed = zlib.compress(raw, 9)
    if len(packed) < len(raw):
        return f"z{width}:{base64.b85encode(packed).decode()}"
    return f"{width}:{base64.b85encode(raw).decode()}"


def _read(text: Any, count: int) -> Ints:
    """Integers from the result of `_write`."""
    if text == "":
        return np.zeros(count, np.int64)
    kind, _, coded = str(text).partition(":")
    width = int(kind.removeprefix("z"))
    raw = base64.b85decode(coded)
    size = -(-count * width // 8)
    if kind.startswith("z"):
        try:
            raw = zlib.decompressobj().decompress(raw, size + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from error
    if width not in (1, *_WIDTHS) or len(raw) != size:
        raise ValueError(f"{len(raw)} bytes are not {count} numbers of {width} bits")
    if width == 1:
        return np.unpackbits(np.frombuffer(raw, np.uint8), count=count).astype(np.int64)
    plain = np.frombuffer(raw, f"<u{width // 8}").astype(np.uint64)
    return ((plain >> np.uint64(1)) ^ (np.uint64(0) - (plain & np.uint64(1)))).view(np.int64)
