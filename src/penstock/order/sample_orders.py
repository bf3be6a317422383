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

from penstock.errors import ConfigError, DataError
from penstock.order.overlong import Fit
from penstock.order.packing import pack
from penstock.order.permutation import Permutation, derive_key
from penstock.order.samples import Samples

__all__ = [
    "ROW_WINDOW",
    "BudgetOrder",
    "ByRow",
    "ChopOrder",
    "FittedOrder",
    "Order",
    "OrderPosition",
    "PackedOrder",
    "Plain",
    "RowOrder",
    "Table",
]


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


class OrderPosition(NamedTuple):
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

    def some(self, place: OrderPosition, count: int) -> Samples:
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

    def place_of(self, epoch: int, sample: int) -> OrderPosition:
        """Where the n-th sample of an epoch is."""
        ends = np.cumsum(self.counts(epoch))
        window = int(np.searchsorted(ends, sample, side="right"))
        if window >= self.windows:
            return OrderPosition(epoch + 1)
        return OrderPosition(epoch, window, sample - (int(ends[window - 1]) if window else 0))

    def number_of(self, place: OrderPosition) -> int:
        """Which sample of its epoch a place is: the inverse of `place_of`."""
        return int(self.counts(place.epoch)[: place.window].sum()) + place.index

    def find(self, epoch: int, row: int) -> list[int]:
        """The samples of an epoch that a row is part of."""
        window = self.window_of(epoch, row)
        if window is None:
            return self._search(epoch, row)
        samples = self.window(epoch, window)
        inside = np.unique(samples.numbers()[samples.rows == row])
        return [self.number_of(OrderPosition(epoch, window, int(index))) for index in inside]

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

    def place_of(self, epoch: int, sample: int) -> OrderPosition:
        if sample >= self.total():
            return OrderPosition(epoch + 1)
        return OrderPosition(epoch, *divmod(sample, ROW_WINDOW))

    def number_of(self, place: OrderPosition) -> int:
        return place.window * ROW_WINDOW + place.index

    def some(self, place: OrderPosition, count: int) -> Samples:
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


_PACK_WINDOW = 1 << 16


class RowOrder(Plain):
    """Every row is a sample."""

    kind = "rows"

    def __init__(self, table: Table, fit: Fit, *, shuffle: bool, seed: int, name: str = "") -> None:
        if not fit.keeps_count:
            raise ConfigError(f"truncation={fit.truncation!r} makes other than one sample of a row; see FittedOrder")
        super().__init__(table, shuffle=shuffle, seed=seed, name=name)
        self.fit = fit
        self.windows = -(-table.rows // ROW_WINDOW)

    def total(self) -> int:
        return self.table.rows

    def plan_range(self, epoch: int, low: int, high: int) -> Samples:
        numbers = self._numbers(self.table.rows, epoch, low, high)
        return self.fit.parts(numbers, self.table.lengths(numbers))

    def find(self, epoch: int, row: int) -> list[int]:
        shuffled = self._permutation(self.table.rows, epoch)
        return [row if shuffled is None else int(shuffled.inverse(row))]

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, **self.fit.describe()}


class FittedOrder(ByRow):
    """Every row is a sample, or several, or none, if it is too long for one."""

    kind = "fitted"

    def __init__(self, table: Table, fit: Fit, *, shuffle: bool, seed: int, name: str = "") -> None:
        super().__init__(table, fit, window_rows=ROW_WINDOW, shuffle=shuffle, seed=seed, name=name)

    def plan_window(self, epoch: int, window: int) -> Samples:
        return self._fitted(epoch, window)

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "window_rows": self.window_rows, **self.fit.describe()}


class ChopOrder(Plain):
    """All rows behind one another, cut every `length` tokens. The last sample may be shorter."""

    kind = "concat"

    def __init__(self, table: Table, length: int, *, shuffle: bool, seed: int, name: str = "") -> None:
        super().__init__(table, shuffle=shuffle, seed=seed, name=name)
        if length < 1:
            raise ConfigError(f"a sample holds at least one token, got a length of {length}")
        self.length = length
        self._samples = -(-table.tokens // length)
        self.windows = -(-self._samples // ROW_WINDOW)

    def total(self) -> int:
        return self._samples

    def plan_range(self, epoch: int, low: int, high: int) -> Samples:
        return self.cut(self._numbers(self._samples, epoch, low, high))

    def cut(self, numbers: Ints) -> Samples:
        """Samples by where they stand in the text."""
        begins = numbers * self.length
        ends = np.minimum(begins + self.length, self.table.tokens)
        rows, starts = self.table.find_tokens(np.concatenate([begins, ends - 1]))
        count = len(numbers)
        first, last = rows[:count], rows[count:]
        parts = last - first + 1
        offsets = np.concatenate([[0], np.cumsum(parts)]).astype(np.int64)
        inside = np.arange(offsets[-1]) - np.repeat(offsets[:-1], parts) + np.repeat(first, parts)
        lengths = self.table.lengths(inside)
        part_starts = np.zeros(len(inside), np.int64)
        lengths[offsets[1:] - 1] = starts[count:] + 1
        part_starts[offsets[:-1]] = starts[:count]
        lengths[offsets[:-1]] -= starts[:count]
        samples = Samples(offsets, inside, part_starts, lengths, single=len(inside) == count)
        return samples.where(lengths > 0) if (lengths == 0).any() else samples

    def find(self, epoch: int, row: int) -> list[int]:
        before = self._tokens_before(row)
        length = int(self.table.lengths(np.array([row]))[0])
        if not length:
            return []
        numbers = np.arange(before // self.length, (before + length - 1) // self.length + 1)
        shuffled = self._permutation(self._samples, epoch)
        places = numbers if shuffled is None else np.asarray(shuffled.inverse(numbers))
        return sorted(places.tolist())

    def _tokens_before(self, row: int) -> int:
        """Found by halving, since tokens are found by their number, not rows."""
        low, high = 0, self.table.tokens
        while low < high:
            middle = (low + high) // 2
            if int(self.table.find_tokens(np.array([middle]))[0][0]) < row:
                low = middle + 1
            else:
                high = middle
        return low

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "length": self.length}


class PackedOrder(ByRow):
    """Whole rows packed into samples of up to `capacity` tokens, window by window of the shuffled order.

    What lies together changes from epoch to epoch. Without shuffling, samples are in the order of their first rows.
    """

    kind = "packed"

    def __init__(
        self,
        table: Table,
        fit: Fit,
        *,
        strategy: str = "best_fit",
        shuffle: bool,
        seed: int,
        name: str = "",
        window_rows: int = _PACK_WINDOW,
        capacity: int | None = None,
    ) -> None:
        super().__init__(table, fit, window_rows=window_rows, shuffle=shuffle, seed=seed, name=name)
        wanted = fit.max_length if capacity is None else capacity
        if wanted is None:
            raise ConfigError("packing needs a length: pass chunk_size or max_length")
        self.capacity, self.strategy = wanted, strategy

    def plan_window(self, epoch: int, window: int) -> Samples:
        parts = self._fitted(epoch, window)
        bins = pack(parts.lengths, self.capacity, self.strategy)
        order = self._bin_order(bins.documents, bins.offsets, epoch, window)
        return _grouped(parts, bins.documents, bins.offsets, order)

    def _bin_order(self, documents: Ints, offsets: Ints, epoch: int, window: int) -> Ints:
        count = len(offsets) - 1
        shuffled = self._permutation(count, epoch, "bins", window)
        if shuffled is not None:
            return shuffled(np.arange(count, dtype=np.int64))
        return np.argsort(np.minimum.reduceat(documents, offsets[:-1]), kind="stable") if count else offsets[:-1]

    def describe(self) -> dict[str, Any]:
        facts = {"strategy": self.strategy, "capacity": self.capacity, "window_rows": self.window_rows}
        return {"kind": self.kind, **facts, **self.fit.describe()}


class BudgetOrder(ByRow):
    """Rows of about the same length together, as many as fit into `max_tokens` once they are padded to the longest.

    A sample is a whole batch here, and its parts are the rows of that batch.
    """

    kind = "budget"

    def __init__(
        self,
        table: Table,
        fit: Fit,
        *,
        max_tokens: int,
        multiple: int = 1,
        shuffle: bool,
        seed: int,
        name: str = "",
        window_rows: int = ROW_WINDOW,
    ) -> None:
        super().__init__(table, fit, window_rows=window_rows, shuffle=shuffle, seed=seed, name=name)
        self.max_tokens, self.multiple = max_tokens, multiple

    def plan_window(self, epoch: int, window: int) -> Samples:
        parts = self._fitted(epoch, window)
        documents = np.argsort(-parts.lengths, kind="stable")
        # A batch of empty rows alone is padded to one token, and that to the multiple.
        padded = -(-np.maximum(parts.lengths[documents], 1) // self.multiple) * self.multiple
        if len(padded) and padded[0] > self.max_tokens:
            row = int(parts.rows[documents[0]])
            raise DataError(
                f"row {row} has {int(padded[0])} tokens with padding, and a batch holds max_tokens={self.max_tokens}; "
                "pass a larger max_tokens, or a max_length with truncation",
                row=row,
            )
        cuts = [0]
        while cuts[-1] < len(padded):
            # The longest comes first, so it alone decides how many fit.
            cuts.append(min(cuts[-1] + self.max_tokens // int(padded[cuts[-1]]), len(padded)))
        offsets = np.array(cuts, np.int64)
        count = len(offsets) - 1
        shuffled = self._permutation(count, epoch, "batches", window)
        order = np.arange(count, dtype=np.int64) if shuffled is None else shuffled(np.arange(count))
        return _grouped(parts, documents, offsets, order)

    def describe(self) -> dict[str, Any]:
        facts = {"max_tokens": self.max_tokens, "multiple": self.multiple, "window_rows": self.window_rows}
        return {"kind": self.kind, **facts, **self.fit.describe()}


def _grouped(parts: Samples, documents: Ints, offsets: Ints, order: Ints) -> Samples:
    """Parts put together: group g is `documents[offsets[g]:offsets[g + 1]]`, and groups come in the order given.

    Within a group parts keep the order they came in.
    """
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    inside = documents[np.lexsort((documents, owner))]
    groups = Samples(offsets, parts.rows[inside], parts.starts[inside], parts.lengths[inside])
    return groups.take(order)
