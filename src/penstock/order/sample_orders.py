"""Orders of samples: the samples of one source, epoch by epoch, in windows that are planned one at a time.

A window is a pure function of (seed, epoch, window number), so resuming anywhere plans a single window again. Where
the number of samples in a window is not arithmetic, windows are counted on lengths alone, as far as it was asked for:
the n-th sample needs the windows before it, and the samples of an epoch need all of its windows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import offsets_of
from penstock.arrays.truncation import Truncation
from penstock.errors import ConfigError, DataError, ResumeError
from penstock.order.block_shuffle import BlockShuffle, Shuffle, first_uses
from penstock.order.packing import count_bins, order_of, pack
from penstock.order.permutation import Permutation, derive_key
from penstock.order.samples import Samples

Ints = npt.NDArray[np.int64]
ROW_WINDOW = 4096
_PACK_WINDOW = 1 << 16
_BUCKET_WINDOW_BATCHES = 64
_CACHED_WINDOWS = 4
_MOST_WINDOWS = 128
"""Orders of a mixture that keep a whole window each; of more, each keeps its next samples."""
_MOST_AHEAD, _LEAST_AHEAD = 1 << 21, 64
"""Samples that the orders of a mixture keep together, and each of them at least."""


class Table(Protocol):
    """Rows of a source, as far as an order needs them: their number and their lengths."""

    @property
    def rows(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    def lengths(self, rows: npt.ArrayLike, /) -> Ints: ...
    def find_tokens(self, positions: npt.ArrayLike, /) -> tuple[Ints, Ints]: ...


class OrderPosition(NamedTuple):
    """Position in an order: the next sample, as epoch, window and index in the window."""

    epoch: int = 0
    window: int = 0
    index: int = 0  # type: ignore[assignment]

    def to_json(self) -> list[int]:
        return list(self)


class _WindowSlice(NamedTuple):
    """Samples of a window from a position on, kept without the others."""

    position: OrderPosition
    samples: Samples
    size: int
    """Samples of the whole window."""

    def read(self, position: OrderPosition, count: int) -> Samples | None:
        """Samples from another position on; None if they are not among these."""
        low = position.index - self.position.index
        high = min(low + count, self.size - self.position.index)
        if position[:2] != self.position[:2] or low < 0 or high > len(self.samples) or high < low:
            return None
        return self.samples.slice(low, high)


class Order(ABC):
    """Samples of one source, epoch by epoch."""

    kind: str
    windows: int
    """Number of windows in an epoch."""
    truncation: Truncation | None = None
    """Policy for rows that are too long; None where rows of any length are cut anyway."""
    capacity: int | None = None
    """Tokens that a sample has room for, where several rows make a sample; None where a row is a sample."""
    even: int | None = None
    """Samples of every window but the last, if arithmetic gives them; None where windows have to be counted."""
    total = 0
    """Samples of every epoch, where windows are even."""
    _ahead = ROW_WINDOW
    """Samples that are looked up at once, or kept of a window, where there are many orders."""
    _windows_kept = _CACHED_WINDOWS

    def __init__(self, table: Table, *, shuffle: Shuffle, seed: int, name: str = "") -> None:
        self.table, self.shuffle, self.seed, self.name = table, shuffle, seed, name
        self._planned: OrderedDict[tuple[int, int], Samples] = OrderedDict()
        self._slice: _WindowSlice | None = None
        self._last_permutation: tuple[tuple[int, int], Permutation] | None = None
        self._ends: dict[int, array[int]] = {}
        """Samples up to the end of each window of an epoch, as far as windows were counted."""

    @abstractmethod
    def plan_window(self, epoch: int, window: int) -> Samples:
        """Samples of a window, planned anew."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Everything that the order depends on except the rows, as plain values."""

    def __repr__(self) -> str:
        options = {"shuffle": self.shuffle, "seed": self.seed, **self.describe()}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in options.items())})"

    def count_window(self, epoch: int, window: int) -> int:
        """Number of samples in a window, without planning them where that is cheaper."""
        return len(self.plan_window(epoch, window))

    def share_memory(self, orders: int) -> None:
        """Keep less, as one of so many orders of a mixture. What is read stays the same."""
        self._ahead = min(ROW_WINDOW, max(_LEAST_AHEAD, _MOST_AHEAD // orders))
        self._windows_kept = 0 if orders > _MOST_WINDOWS else max(1, _CACHED_WINDOWS // orders)

    def window(self, epoch: int, window: int) -> Samples:
        """Samples of a window; the last few windows are cached."""
        key = (epoch, window)
        samples = self._planned.get(key)
        if samples is None:
            samples = self.plan_window(epoch, window)
            if self._windows_kept:
                self._planned[key] = samples
            if len(self._planned) > self._windows_kept:
                self._planned.popitem(last=False)
        return samples

    def read(self, position: OrderPosition, count: int) -> Samples:
        """Up to `count` samples from a position on, all from its window."""
        kept = self._slice
        if kept is not None and (found := kept.read(position, count)) is not None:
            return found
        window = self.window(position.epoch, position.window)
        if position.index > len(window):
            raise ResumeError(
                f"sample {position.index} of window {position.window} of {self.name!r} does not exist; it has "
                f"{len(window)}"
            )
        stop = min(position.index + count, len(window))
        if not self._windows_kept:
            ahead = window.slice(position.index, min(max(stop, position.index + self._ahead), len(window)))
            self._slice = _WindowSlice(position, ahead.copy(), len(window))
        return window.slice(position.index, stop)

    def size_of(self, epoch: int, window: int) -> int:
        """Number of samples in a window."""
        if self.even is not None:
            return min(self.even, self.total - window * self.even)
        kept = self._slice
        if kept is not None and kept.position[:2] == (epoch, window):
            return kept.size
        return len(self.window(epoch, window))

    def count(self, epoch: int) -> int:
        """Number of samples of an epoch."""
        return self.total if self.even is not None else self._samples_before(epoch, self.windows)

    def has(self, epoch: int, samples: int) -> bool:
        """True if an epoch has at least so many samples; counts no more windows than that takes."""
        if self.even is not None:
            return self.total >= samples
        ends = self._ends.setdefault(epoch, array("q"))
        while (ends[-1] if ends else 0) < samples and len(ends) < self.windows:
            self._count_next(epoch, ends)
        return (ends[-1] if ends else 0) >= samples

    def position_of(self, epoch: int, sample: int) -> OrderPosition:
        """Position of the n-th sample of an epoch."""
        if not self.has(epoch, sample + 1):
            return OrderPosition(epoch + 1)
        if self.even is not None:
            return OrderPosition(epoch, *divmod(sample, self.even))
        window = bisect_right(self._ends[epoch], sample)
        return OrderPosition(epoch, window, sample - self._samples_before(epoch, window))

    def number_of(self, position: OrderPosition) -> int:
        """Number of a position's sample within its epoch: the inverse of `position_of`."""
        if self.even is not None:
            return position.window * self.even + position.index
        return self._samples_before(position.epoch, position.window) + position.index

    def _samples_before(self, epoch: int, window: int) -> int:
        """Samples of an epoch before a window."""
        ends = self._ends.setdefault(epoch, array("q"))
        while len(ends) < window:
            self._count_next(epoch, ends)
        return ends[window - 1] if window else 0

    def _count_next(self, epoch: int, ends: array[int]) -> None:
        window = len(ends)
        planned = self._planned.get((epoch, window))
        count = self.count_window(epoch, window) if planned is None else len(planned)
        # Not `append`: another thread may have counted the same window meanwhile.
        ends[window : window + 1] = array("q", [count + (ends[window - 1] if window else 0)])

    def find(self, epoch: int, row: int) -> list[int]:
        """Numbers of the samples of an epoch that a row is part of."""
        found: list[int] = []
        before = 0
        for window in range(self.windows):
            samples = self.plan_window(epoch, window)
            found += (before + np.unique(samples.numbers()[samples.rows == row])).tolist()
            before += len(samples)
        return found

    def until_use(self, rows: Ints, tokens: Ints, position: OrderPosition) -> npt.NDArray[np.float64]:
        """Epochs until each range of rows is used again, roughly: for deciding what to keep, not what to deliver.

        A range is a first row and the row after the last one; `tokens` are the same ranges counted in tokens.
        """
        ranges, here, total = self._numbers_of(rows, tokens, position)
        found = first_uses(self._permutation(total, position.epoch), ranges, here)
        again = first_uses(self._permutation(total, position.epoch + 1), ranges, 0) + total
        used = np.where(np.isfinite(found), found, again) - here
        return np.asarray(np.where(ranges[:, 1] > ranges[:, 0], used, np.inf) / max(total, 1))

    def _numbers_of(self, rows: Ints, tokens: Ints, position: OrderPosition) -> tuple[Ints, int, int]:
        """Ranges of what the order shuffles, the number of those that have been used, and of all."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """State for worker processes, without cached windows, which each worker plans for itself."""
        return self.__dict__ | {"_planned": OrderedDict(), "_ends": {}, "_slice": None}

    def _permutation(self, size: int, epoch: int, *what: int | str) -> Permutation | None:
        if not self.shuffle or not size:
            return None
        last, asked = self._last_permutation, (size, epoch)
        if not what and last is not None and last[0] == asked:
            return last[1]
        key = derive_key(self.seed, self.name, epoch, *what)
        if what:
            return Permutation(size, key)
        if isinstance(self.shuffle, BlockShuffle):
            found: Permutation = self.shuffle.permutation(size, self.table.tokens, key)
        else:
            found = Permutation(size, key)
        self._last_permutation = asked, found
        return found

    def _shuffled(self, size: int, epoch: int, *what: int | str, low: int = 0, high: int | None = None) -> Ints:
        """Entries `low` to `high` of the shuffled numbers below `size`."""
        numbers = np.arange(low, size if high is None else high, dtype=np.int64)
        permutation = self._permutation(size, epoch, *what)
        return numbers if permutation is None else permutation(numbers)

    def _place_of(self, size: int, epoch: int, number: int) -> int:
        """Index of a number among the shuffled numbers below `size`."""
        permutation = self._permutation(size, epoch)
        return number if permutation is None else int(permutation.inverse(number))

    def _truncated(self, rows: Ints) -> Samples:
        """Samples of one part each: rows, or parts of rows that are too long."""
        assert self.truncation is not None
        parts = self.truncation.parts(self.table.lengths(rows), rows)
        return Samples(np.arange(len(parts.rows) + 1, dtype=np.int64), *parts, single=True)


class ArithmeticOrder(Order):
    """Order whose n-th sample is arithmetic, so that windows only serve for counting.

    Samples are looked up in blocks that grow: the first batch does not wait for what the thousandth needs.
    """

    def __init__(self, table: Table, total: int, *, shuffle: Shuffle, seed: int, name: str = "") -> None:
        super().__init__(table, shuffle=shuffle, seed=seed, name=name)
        self.even, self.total = ROW_WINDOW, total
        self.windows = -(-total // ROW_WINDOW)
        self._block: tuple[int, int, Samples] | None = None

    @abstractmethod
    def plan_range(self, epoch: int, low: int, high: int) -> Samples:
        """Samples by their numbers in an epoch."""

    def plan_window(self, epoch: int, window: int) -> Samples:
        low = window * ROW_WINDOW
        return self.plan_range(epoch, low, min(low + ROW_WINDOW, self.total))

    def read(self, position: OrderPosition, count: int) -> Samples:
        low = self.number_of(position)
        high = min(low + count, (position.window + 1) * ROW_WINDOW, self.total)
        size = 0
        if self._block is not None:
            epoch, first, block = self._block
            if epoch == position.epoch and first <= low <= first + len(block):
                if high <= first + len(block):
                    return block.slice(low - first, high - first)
                size = min(max(4 * len(block), _LEAST_AHEAD), self._ahead)
        block = self.plan_range(position.epoch, low, min(max(low + size, high), self.total))
        self._block = position.epoch, low, block
        return block.slice(0, high - low)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_block": None}


class RowWindowOrder(Order):
    """Order whose windows are runs of rows of the shuffled order."""

    truncation: Truncation

    def __init__(
        self,
        table: Table,
        truncation: Truncation,
        *,
        window_rows: int,
        shuffle: Shuffle,
        seed: int,
        name: str = "",
    ) -> None:
        super().__init__(table, shuffle=shuffle, seed=seed, name=name)
        if window_rows < 1:
            raise ConfigError(f"window_rows must be positive, got {window_rows}")
        self.truncation, self.window_rows = truncation, window_rows
        self.windows = -(-table.rows // window_rows)

    def find(self, epoch: int, row: int) -> list[int]:
        window = self._place_of(self.table.rows, epoch, row) // self.window_rows
        samples = self.window(epoch, window)
        inside = np.unique(samples.numbers()[samples.rows == row])
        return [self.number_of(OrderPosition(epoch, window, int(index))) for index in inside]

    def _numbers_of(self, rows: Ints, tokens: Ints, position: OrderPosition) -> tuple[Ints, int, int]:
        return rows, position.window * self.window_rows, self.table.rows

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "window_rows": self.window_rows, **_described(self.truncation)}

    def _window_parts(self, epoch: int, window: int) -> Samples:
        low = window * self.window_rows
        high = min(low + self.window_rows, self.table.rows)
        return self._truncated(self._shuffled(self.table.rows, epoch, low=low, high=high))


class RowOrder(ArithmeticOrder):
    """Every row is a sample."""

    kind = "rows"
    truncation: Truncation

    def __init__(self, table: Table, truncation: Truncation, *, shuffle: Shuffle, seed: int, name: str = "") -> None:
        _check_one_to_one(truncation, "RowOrder")
        super().__init__(table, table.rows, shuffle=shuffle, seed=seed, name=name)
        self.truncation = truncation

    def plan_range(self, epoch: int, low: int, high: int) -> Samples:
        return self._truncated(self._shuffled(self.table.rows, epoch, low=low, high=high))

    def find(self, epoch: int, row: int) -> list[int]:
        return [self._place_of(self.table.rows, epoch, row)]

    def _numbers_of(self, rows: Ints, tokens: Ints, position: OrderPosition) -> tuple[Ints, int, int]:
        return rows, self.number_of(position), self.table.rows

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, **_described(self.truncation)}


class FittedOrder(RowWindowOrder):
    """Every row is one sample, several if it is split, or none if it is dropped."""

    kind = "fitted"

    def __init__(self, table: Table, truncation: Truncation, *, shuffle: Shuffle, seed: int, name: str = "") -> None:
        super().__init__(table, truncation, window_rows=ROW_WINDOW, shuffle=shuffle, seed=seed, name=name)

    def plan_window(self, epoch: int, window: int) -> Samples:
        return self._window_parts(epoch, window)


class ChopOrder(ArithmeticOrder):
    """All rows end to end, cut every `length` tokens. The last sample may be shorter."""

    kind = "concat"

    def __init__(self, table: Table, length: int, *, shuffle: Shuffle, seed: int, name: str = "") -> None:
        if length < 1:
            raise ConfigError(f"the length of a sample must be at least 1 token, got {length}")
        super().__init__(table, -(-table.tokens // length), shuffle=shuffle, seed=seed, name=name)
        self.length = self.capacity = length

    def plan_range(self, epoch: int, low: int, high: int) -> Samples:
        return self.cut(self._shuffled(self.total, epoch, low=low, high=high))

    def cut(self, numbers: Ints) -> Samples:
        """Samples by their numbers in the unshuffled text."""
        begins = numbers * self.length
        sizes = np.minimum(self.length, self.table.tokens - begins)
        first, starts = self.table.find_tokens(begins)
        ends = starts + sizes
        long = np.flatnonzero(ends > self.table.lengths(first))
        if not len(long):
            return Samples(np.arange(len(first) + 1), first, starts, sizes, single=True)
        last = first.copy()
        last[long], ends[long] = self.table.find_tokens(begins[long] + sizes[long] - 1)
        ends[long] += 1
        parts = last - first + 1
        offsets = offsets_of(parts)
        inside = np.arange(offsets[-1]) - np.repeat(offsets[:-1], parts) + np.repeat(first, parts)
        lengths = self.table.lengths(inside)
        part_starts = np.zeros(len(inside), np.int64)
        lengths[offsets[1:] - 1] = ends
        part_starts[offsets[:-1]] = starts
        lengths[offsets[:-1]] -= starts
        samples = Samples(offsets, inside, part_starts, lengths, single=len(inside) == len(numbers))
        return samples.where(lengths > 0) if (lengths == 0).any() else samples

    def find(self, epoch: int, row: int) -> list[int]:
        before = self._tokens_before(row)
        length = int(self.table.lengths(np.array([row]))[0])
        if not length:
            return []
        numbers = np.arange(before // self.length, (before + length - 1) // self.length + 1)
        permutation = self._permutation(self.total, epoch)
        return sorted((numbers if permutation is None else permutation.inverse(numbers)).tolist())

    def _numbers_of(self, rows: Ints, tokens: Ints, position: OrderPosition) -> tuple[Ints, int, int]:
        samples = np.stack([tokens[:, 0] // self.length, -(-tokens[:, 1] // self.length)], axis=1)
        return samples, self.number_of(position), self.total

    def _tokens_before(self, row: int) -> int:
        """Tokens before a row, by bisection: tables find tokens by number, not rows."""
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


class PackedOrder(RowWindowOrder):
    """Whole rows packed into samples of up to `capacity` tokens, within windows of the shuffled order.

    Each epoch packs other rows together. Without shuffling, samples are in the order of their first rows.
    """

    kind = "packed"
    capacity: int

    def __init__(
        self,
        table: Table,
        truncation: Truncation,
        *,
        strategy: str = "best_fit",
        shuffle: Shuffle,
        seed: int,
        name: str = "",
        window_rows: int = _PACK_WINDOW,
        capacity: int | None = None,
    ) -> None:
        super().__init__(table, truncation, window_rows=window_rows, shuffle=shuffle, seed=seed, name=name)
        room = truncation.max_length if capacity is None else capacity
        if room is None:
            raise ConfigError("packing needs a length; pass chunk_size or max_length")
        self.capacity, self.strategy = room, strategy

    def plan_window(self, epoch: int, window: int) -> Samples:
        parts = self._window_parts(epoch, window)
        bins = pack(parts.lengths, self.capacity, self.strategy)
        count = len(bins)
        if self.shuffle or not count:
            order = self._shuffled(count, epoch, "bins", window)
        else:
            order = np.argsort(np.minimum.reduceat(bins.documents, bins.offsets[:-1]), kind="stable")
        return _grouped(parts, bins.documents, bins.offsets, order)

    def count_window(self, epoch: int, window: int) -> int:
        return count_bins(self._window_parts(epoch, window).lengths, self.capacity, self.strategy)

    def describe(self) -> dict[str, Any]:
        return {"strategy": self.strategy, "capacity": self.capacity, **super().describe()}


class BudgetOrder(RowWindowOrder):
    """Rows of similar length together, as many as fit into `max_tokens` once padded to the longest.

    A sample is a whole batch here, and its parts are the rows of that batch.
    """

    kind = "budget"

    def __init__(
        self,
        table: Table,
        truncation: Truncation,
        *,
        max_tokens: int,
        multiple: int = 1,
        shuffle: Shuffle,
        seed: int,
        name: str = "",
        window_rows: int = ROW_WINDOW,
    ) -> None:
        super().__init__(table, truncation, window_rows=window_rows, shuffle=shuffle, seed=seed, name=name)
        self.max_tokens, self.multiple = max_tokens, multiple

    def plan_window(self, epoch: int, window: int) -> Samples:
        parts = self._window_parts(epoch, window)
        documents = np.argsort(-parts.lengths, kind="stable")
        # A batch of nothing but empty rows is padded to one token, and that to the multiple.
        padded = -(-np.maximum(parts.lengths[documents], 1) // self.multiple) * self.multiple
        if len(padded) and padded[0] > self.max_tokens:
            row = int(parts.rows[documents[0]])
            raise DataError(
                f"row {row} has {int(padded[0])} tokens with padding, more than max_tokens={self.max_tokens}; "
                "pass a larger max_tokens, or a max_length with truncation",
                row=row,
            )
        cuts = [0]
        while cuts[-1] < len(padded):
            # The longest row comes first, so it alone decides how many rows fit.
            cuts.append(min(cuts[-1] + self.max_tokens // int(padded[cuts[-1]]), len(padded)))
        order = self._shuffled(len(cuts) - 1, epoch, "batches", window)
        return _grouped(parts, documents, np.array(cuts, np.int64), order)

    def describe(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "multiple": self.multiple, **super().describe()}


class BucketOrder(RowWindowOrder):
    """Every row is a sample, and each run of `size` samples, from a multiple of `size` on, has similar lengths.

    A window is `window_batches` batches of neighbours in the shuffled order. Its rows are sorted by length and cut into
    batches, and the batches are shuffled. Rows that do not fill a batch come last in the epoch, so that a step of a
    multiple of `size` rows never takes half a batch. Within a batch, rows keep the shuffled order: no place in a batch
    has longer rows than another.

    A larger window pads less and mixes rows less.
    """

    kind = "buckets"

    def __init__(
        self,
        table: Table,
        truncation: Truncation,
        *,
        size: int,
        shuffle: Shuffle,
        seed: int,
        name: str = "",
        window_batches: int = _BUCKET_WINDOW_BATCHES,
    ) -> None:
        if size < 1 or window_batches < 1:
            raise ConfigError(f"size and window_batches must be at least 1, got {size} and {window_batches}")
        _check_one_to_one(truncation, "BucketOrder")
        window_rows = size * window_batches
        super().__init__(table, truncation, window_rows=window_rows, shuffle=shuffle, seed=seed, name=name)
        self.size, self.even, self.total = size, window_rows, table.rows

    def plan_window(self, epoch: int, window: int) -> Samples:
        parts = self._window_parts(epoch, window)
        whole = len(parts) // self.size
        by_length = np.argsort(parts.lengths, kind="stable")
        # The rows left over are the last of the shuffled order, so that they are of any length.
        rest = np.arange(whole * self.size, len(parts))
        batches = np.sort(by_length[by_length < whole * self.size].reshape(whole, self.size), axis=1)
        batches = batches[self._shuffled(whole, epoch, "buckets", window)]
        return parts.take(np.concatenate([batches.reshape(-1), rest]))

    def describe(self) -> dict[str, Any]:
        return {"size": self.size, **super().describe()}


def _described(truncation: Truncation) -> dict[str, Any]:
    return {"max_length": truncation.max_length, "truncation": truncation.policy}


def _check_one_to_one(truncation: Truncation, name: str) -> None:
    if not truncation.one_to_one:
        raise ConfigError(f"truncation={truncation.policy!r} does not keep one sample a row, which {name} needs")


def _grouped(parts: Samples, documents: Ints, offsets: Ints, order: Ints) -> Samples:
    """Groups of parts as samples: group g is `documents[offsets[g]:offsets[g + 1]]`, and `order` sorts the groups.

    Within a group, parts keep the order they came in.
    """
    owner = np.empty(len(documents), np.int64)
    owner[documents] = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    inside = order_of(owner)
    groups = Samples(offsets, parts.rows[inside], parts.starts[inside], parts.lengths[inside])
    return groups.take(order)
