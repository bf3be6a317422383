"""Rows of about the same length together, batch by batch, so that little is padded."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.order.overlong import Fit
from penstock.order.sample_orders import ByRow, OrderPosition, Table
from penstock.order.samples import Samples

__all__ = ["BucketOrder"]

Ints = npt.NDArray[np.int64]
_WINDOW_BATCHES = 64


class BucketOrder(ByRow):
    """Every row is a sample, and `size` neighbours, from a multiple of `size` on, are of about the same length.

    A window is `window_batches` batches of rows that stand next to each other in the shuffled order. Its rows are
    sorted by length and cut into batches, and the batches shuffled. What does not fill a batch, at the end of an
    epoch, comes last, so that steps of `size` rows, or of a multiple of that, never take from two batches by halves.
    Within a batch rows keep the shuffled order: no place in a batch has longer rows than another.

    The larger a window, the less is padded, and the less random is which rows meet.
    """

    kind = "buckets"

    def __init__(
        self,
        table: Table,
        fit: Fit,
        *,
        size: int,
        shuffle: bool,
        seed: int,
        name: str = "",
        window_batches: int = _WINDOW_BATCHES,
    ) -> None:
        if size < 1 or window_batches < 1:
            raise ConfigError(f"batches hold at least one row and windows one batch, got {size} and {window_batches}")
        if not fit.keeps_count:
            raise ConfigError(
                f"truncation={fit.truncation!r} makes other than one sample of a row, and buckets need one"
            )
        super().__init__(table, fit, window_rows=size * window_batches, shuffle=shuffle, seed=seed, name=name)
        self.size = size

    def plain_counts(self) -> Ints:
        counts = np.full(self.windows, self.window_rows, np.int64)
        if self.table.rows % self.window_rows:
            counts[-1] = self.table.rows % self.window_rows
        return counts

    def count(self, epoch: int) -> int:
        return self.table.rows

    def size_of(self, epoch: int, window: int) -> int:
        return min(self.window_rows, self.table.rows - window * self.window_rows)

    def place_of(self, epoch: int, sample: int) -> OrderPosition:
        if sample >= self.table.rows:
            return OrderPosition(epoch + 1)
        return OrderPosition(epoch, *divmod(sample, self.window_rows))

    def number_of(self, place: OrderPosition) -> int:
        return place.window * self.window_rows + place.index

    def plan_window(self, epoch: int, window: int) -> Samples:
        parts = self._fitted(epoch, window)
        whole = len(parts) // self.size
        by_length = np.argsort(parts.lengths, kind="stable")
        # What is left over is of any length if the rows that are left over are any: the last of the shuffled order.
        left = np.arange(whole * self.size, len(parts))
        batches = np.sort(by_length[by_length < whole * self.size].reshape(whole, self.size), axis=1)
        shuffled = self._permutation(whole, epoch, "buckets", window)
        if shuffled is not None:
            batches = batches[shuffled(np.arange(whole, dtype=np.int64))]
        return parts.take(np.concatenate([batches.reshape(-1), left]))

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "size": self.size, "window_rows": self.window_rows, **self.fit.describe()}
