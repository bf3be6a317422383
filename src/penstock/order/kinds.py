"""The kinds of order: row by row, cut from one long text, packed, or by token budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, DataError
from penstock.order.fitting import Fit
from penstock.order.orders import ROW_WINDOW, ByRow, Plain, Table
from penstock.order.packing import pack
from penstock.order.samples import Samples

__all__ = ["BudgetOrder", "ChopOrder", "FittedOrder", "PackedOrder", "RowOrder"]

Ints = npt.NDArray[np.int64]
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
