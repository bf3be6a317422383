"""Positions in a plan: sources, steps, and the cursors between samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.order.mixing import Drawn
from penstock.order.sample_orders import Order, OrderPosition
from penstock.order.samples import Samples

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlanSource:
    """Source of a plan: a name, an order of samples, and the identity of its rows."""

    name: str
    order: Order
    identity: str = ""
    """Hash of the content of the rows; other content is another plan."""
    max_epochs: int | None = None
    """Most epochs in which the rows are used; None: no limit."""


class Step:
    """Global batch of a plan. `sources` has the number of the source of each part; rows count within the source.

    `wanted` is the number of samples of a full batch; the last batch of an epoch may have fewer.
    """

    __slots__ = ("epoch", "names", "number", "samples", "sources", "wanted")

    def __init__(
        self, number: int, epoch: int, samples: Samples, sources: Ints, names: tuple[str, ...], wanted: int
    ) -> None:
        self.number, self.epoch, self.samples = number, epoch, samples
        self.sources, self.names, self.wanted = sources, names, wanted

    @property
    def rows(self) -> list[tuple[str, int]]:
        """(source, row) of every part, in order."""
        return [(self.names[source], row) for source, row in zip(self.sources.tolist(), self.samples.rows.tolist())]

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True, slots=True)
class RowUse:
    """Use of a row in a step."""

    step: int
    epoch: int
    """Epoch of the source."""
    sample: int
    """Number of the sample in the global batch."""
    skipped: bool = False
    """True if the step is skipped or the row is banned, so that the row is not delivered."""


class StepRanges(Sequence[int]):
    """Numbers of a range of steps without those of some other ranges; memory and time are by ranges, not by steps."""

    def __init__(self, steps: range, skipped: Sequence[tuple[int, int]]) -> None:
        self._kept: list[range] = []
        here = steps.start
        for start, stop in sorted(skipped):
            if here < min(start, steps.stop):
                self._kept.append(range(here, min(start, steps.stop)))
            here = max(here, stop)
        if here < steps.stop:
            self._kept.append(range(here, steps.stop))
        self._starts = [0, *accumulate(map(len, self._kept))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        place = range(len(self))[number]
        which = bisect_right(self._starts, place) - 1
        return self._kept[which][place - self._starts[which]]


class Position(NamedTuple):
    """Position between two steps of a plan: everything that resuming needs."""

    cursors: tuple[OrderPosition, ...]
    """Next sample of each source."""
    step: int = 0
    epoch: int = 0
    samples: int = 0
    """Samples of this epoch so far."""
    drawn: Drawn | None = None
    epoch_starts: tuple[OrderPosition, ...] = ()
    """Cursor of each source at the beginning of this epoch."""

    @property
    def at_start(self) -> bool:
        """True at the beginning of an epoch."""
        return self.samples == 0


def take(order: Order, cursor: OrderPosition, count: int, *, stay: bool) -> tuple[Samples, OrderPosition]:
    """Next samples of a source, and the cursor after them; with `stay`, the epoch is not left."""
    found: list[Samples] = []
    left, epoch, passes = count, cursor.epoch, 0
    while left:
        if cursor.window >= order.windows:
            cursor = OrderPosition(cursor.epoch + 1)
        if cursor.epoch > epoch and stay:
            break
        block = order.read(cursor, left)
        if len(block):
            found.append(block)
            passes = 0
        left -= len(block)
        cursor = moved(order, cursor, cursor.index + len(block), order.size_of(cursor.epoch, cursor.window))
        if cursor.window == 0 and cursor.index == 0:
            passes += 1
            if passes > 1 and not found:
                raise ConfigError("truncation='drop' drops every row; pass a larger length")
    return (found[0] if len(found) == 1 else Samples.concat(found)), cursor


def advance(order: Order, cursor: OrderPosition, count: int) -> OrderPosition:
    """Cursor after the next samples of a source, as `take` returns it."""
    if order.even is not None:
        total = order.total
        number = order.number_of(cursor) + count
        return order.position_of(cursor.epoch + number // total, number % total)
    return take(order, cursor, count, stay=False)[1]


def moved(order: Order, cursor: OrderPosition, index: int, size: int) -> OrderPosition:
    """Cursor with another index, in the next window or epoch if a window of `size` samples ends there."""
    if index < size:
        return OrderPosition(cursor.epoch, cursor.window, index)
    if cursor.window + 1 < order.windows:
        return OrderPosition(cursor.epoch, cursor.window + 1)
    return OrderPosition(cursor.epoch + 1)


def samples_left(order: Order, cursor: OrderPosition, epochs: int, enough: int) -> int | None:
    """Samples of a source before the end of its last epoch; None if there are more than `enough`."""
    left = 0
    while cursor.epoch < epochs:
        size = order.size_of(cursor.epoch, cursor.window)
        left += size - cursor.index
        if left > enough:
            return None
        cursor = moved(order, cursor, size, size)
    return left


def exhausted(sources: Sequence[PlanSource], position: Position) -> bool:
    """True if every source was used in as many epochs as it may be."""
    return all(
        source.max_epochs is not None and cursor.epoch >= source.max_epochs
        for source, cursor in zip(sources, position.cursors, strict=True)
    )


def nothing_to_deliver(samples: int, size: int) -> ConfigError:
    """Error for an epoch without a single batch."""
    return ConfigError(
        f"an epoch has {samples} samples, fewer than a global batch of {size}, and drop_last=True drops what does not "
        "fill a batch; use a smaller batch_size, or drop_last=False"
    )


def larger_than_epoch(batch_size: int | None, ranks: int, samples: int) -> ConfigError:
    """Error for a batch that was asked for and is larger than an epoch."""
    each = f" x {ranks} ranks" if ranks > 1 else ""
    return ConfigError(
        f"a batch of {batch_size}{each} was asked for, and an epoch has only {samples} samples; ask for at most that "
        "many"
    )
