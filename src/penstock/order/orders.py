"""What an order is: the samples of one source, epoch by epoch, in windows that are planned one at a time.

An order is cut into windows, each a pure function of (seed, epoch, window): to go on anywhere, one window is planned
again. How many samples a window has is known when it is planned; where that is not plain arithmetic, counting a whole
epoch means planning it on lengths alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.order.fitting import Fit
from penstock.order.permutation import Permutation, derive_key
from penstock.order.samples import Samples

__all__ = ["ROW_WINDOW", "ByRow", "Order", "Place", "Plain", "Table"]

Ints = npt.NDArray[np.int64]
ROW_WINDOW = 4096
_KEPT_WINDOWS = 4


class Table(Protocol):
    """What an order has to know of the rows: how many there are, and how long they are."""

    @property
    def rows(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    def lengths(self, rows: npt.ArrayLike, /) -> Ints: ...
    def find_tokens(self, positions: npt.ArrayLike, /) -> tuple[Ints, Ints]: ...


class Place(NamedTuple):
    """The next sample of a source: which window of which epoch, and which of its samples."""

    epoch: int = 0
    window: int = 0
    index: int = 0  # type: ignore[assignment]

    def to_json(self) -> list[int]:
        return list(self)


class Order(ABC):
    """The samples of one source, epoch by epoch."""

    kind: str
    windows: int
    """In an epoch."""

    def __init__(self, table: Table, *, shuffle: bool, seed: int, name: str = "") -> None:
        self.table, self.shuffle, self.seed, self.name = table, shuffle, seed, name
        self._planned: OrderedDict[tuple[int, int], Samples] = OrderedDict()
        self._counts: dict[int, Ints] = {}
        self._block: tuple[int, int, Samples] | None = None

    @abstractmethod
    def plan_window(self, epoch: int, window: int) -> Samples:
        """The samples of a window, anew."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Everything that the order depends on but the rows, as plain values."""

    def plain_counts(self) -> Ints | None:
        """Samples in each window, if that is plain arithmetic and the same in every epoch."""
        return None

    def window(self, epoch: int, window: int) -> Samples:
        """The samples of a window; those planned last are remembered."""
        key = (epoch, window)
        samples = self._planned.get(key)
        if samples is None:
            samples = self.plan_window(epoch, window)
            self._planned[key] = samples
            if len(self._planned) > _KEPT_WINDOWS:
                self._planned.popitem(last=False)
        return samples

    def some(self, place: Place, count: int) -> Samples:
        """Up to `count` samples from a place on, none of them of another window."""
        window = self.window(place.epoch, place.window)
        return window.slice(place.index, min(place.index + count, len(window)))

    def size_of(self, epoch: int, window: int) -> int:
        """Samples of a window."""
        return len(self.window(epoch, window))

    def counts(self, epoch: int) -> Ints:
        """Samples in each window of an epoch. Plans the whole epoch on lengths, unless it is plain arithmetic."""
        plain = self.plain_counts()
        if plain is not None:
            return plain
        if epoch not in self._counts:
            counts = [len(self.plan_window(epoch, window)) for window in range(self.windows)]
            self._counts[epoch] = np.array(counts, np.int64)
        return self._counts[epoch]

    def count(self, epoch: int) -> int:
        return int(self.counts(epoch).sum())

    def place_of(self, epoch: int, sample: int) -> Place:
        """Where the n-th sample of an epoch is."""
        ends = np.cumsum(self.counts(epoch))
        window = int(np.searchsorted(ends, sample, side="right"))
        if window >= self.windows:
            return Place(epoch + 1)
        return Place(epoch, window, sample - (int(ends[window - 1]) if window else 0))

    def number_of(self, place: Place) -> int:
        """Which sample of its epoch a place is: the inverse of `place_of`."""
        return int(self.counts(place.epoch)[: place.window].sum()) + place.index

    def find(self, epoch: int, row: int) -> list[int]:
        """The samples of an epoch that a row is part of."""
        window = self.window_of(epoch, row)
        if window is None:
            return self._search(epoch, row)
        samples = self.window(epoch, window)
        inside = np.unique(samples.numbers()[samples.rows == row])
        return [self.number_of(Place(epoch, window, int(index))) for index in inside]

    def window_of(self, epoch: int, row: int) -> int | None:
        """The window that holds a row, if it is one; None if every window has to be looked at."""
        return None

    def _search(self, epoch: int, row: int) -> list[int]:
        found: list[int] = []
        before = 0
        for window in range(self.windows):
            samples = self.plan_window(epoch, window)
            found += (before + np.unique(samples.numbers()[samples.rows == row])).tolist()
            before += len(samples)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes: without what was planned, which they plan for themselves."""
        return self.__dict__ | {"_planned": OrderedDict(), "_counts": {}, "_block": None}

    def _permutation(self, size: int, epoch: int, *what: int | str) -> Permutation | None:
        return Permutation(size, derive_key(self.seed, self.name, epoch, *what)) if self.shuffle and size else None

    def _numbers(self, size: int, epoch: int, low: int, high: int) -> Ints:
        """What stands at the places `low` to `high` of the shuffled numbers below `size`."""
        places = np.arange(low, high, dtype=np.int64)
        shuffled = self._permutation(size, epoch)
        return places if shuffled is None else shuffled(places)


class Plain(Order):
    """Orders whose n-th sample is plain arithmetic, so that windows are nothing but a way of counting.

    Samples are looked up in blocks: only as many as are asked for at first, then more at a time, since the first batch
    should not wait for what the thousandth needs.
    """

    @abstractmethod
    def total(self) -> int:
        """Samples of an epoch."""

    @abstractmethod
    def plan_range(self, epoch: int, low: int, high: int) -> Samples:
        """Samples by their numbers in an epoch."""

    def plain_counts(self) -> Ints:
        return _even_counts(self.total(), ROW_WINDOW)

    def plan_window(self, epoch: int, window: int) -> Samples:
        low = window * ROW_WINDOW
        return self.plan_range(epoch, low, min(low + ROW_WINDOW, self.total()))

    def size_of(self, epoch: int, window: int) -> int:
        return min(ROW_WINDOW, self.total() - window * ROW_WINDOW)

    def count(self, epoch: int) -> int:
        return self.total()

    def place_of(self, epoch: int, sample: int) -> Place:
        if sample >= self.total():
            return Place(epoch + 1)
        return Place(epoch, *divmod(sample, ROW_WINDOW))

    def number_of(self, place: Place) -> int:
        return place.window * ROW_WINDOW + place.index

    def some(self, place: Place, count: int) -> Samples:
        low = self.number_of(place)
        high = min(low + count, (place.window + 1) * ROW_WINDOW, self.total())
        size = 0
        if self._block is not None:
            epoch, first, block = self._block
            if epoch == place.epoch and first <= low <= first + len(block):
                if high <= first + len(block):
                    return block.slice(low - first, high - first)
                size = min(4 * len(block), ROW_WINDOW)
        block = self.plan_range(place.epoch, low, min(max(low + size, high), self.total()))
        self._block = place.epoch, low, block
        return block.slice(0, high - low)


class ByRow(Order):
    """Orders whose windows are rows that stand next to each other in the shuffled order."""

    def __init__(self, table: Table, fit: Fit, *, window_rows: int, shuffle: bool, seed: int, name: str = "") -> None:
        super().__init__(table, shuffle=shuffle, seed=seed, name=name)
        if window_rows < 1:
            raise ConfigError(f"window_rows must be positive, got {window_rows}")
        self.fit, self.window_rows = fit, window_rows
        self.windows = -(-table.rows // window_rows)

    def window_of(self, epoch: int, row: int) -> int | None:
        shuffled = self._permutation(self.table.rows, epoch)
        place = row if shuffled is None else int(shuffled.inverse(row))
        return place // self.window_rows

    def _fitted(self, epoch: int, window: int) -> Samples:
        rows = self.table.rows
        low = window * self.window_rows
        numbers = self._numbers(rows, epoch, low, min(low + self.window_rows, rows))
        return self.fit.parts(numbers, self.table.lengths(numbers))


def _even_counts(total: int, size: int) -> Ints:
    counts = np.full(-(-total // size), size, np.int64)
    if total % size:
        counts[-1] = total % size
    return counts
