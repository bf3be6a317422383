"""From the rows of a window to samples: cut from one long text, packed, by token budget, or row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.arrays.truncation import Truncation
from penstock.errors import ConfigError
from penstock.loaders.source import Sampling
from penstock.loaders.streamed.rows import TokenRows
from penstock.order.sample_orders import BudgetOrder, ChopOrder, FittedOrder, Order, PackedOrder, RowOrder
from penstock.order.samples import Samples

__all__ = ["Shape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape(Sampling):
    """Rule by which the rows of a window become samples: that of the loader, with its token budget."""

    max_tokens: int | None = None
    """Samples are whole batches of at most so many tokens, padding included."""
    multiple: int = 1

    def __post_init__(self) -> None:
        Sampling.__post_init__(self)
        if self.packing is not None and self.max_tokens is not None:
            raise ConfigError(f"max_tokens={self.max_tokens} is for rows that are not packed; pass packing=None")

    @property
    def carries(self) -> bool:
        """Whether what is left of a window becomes the beginning of the next."""
        return self.packing == "concat"

    def samples(self, rows: TokenRows, key: int, *, shuffle: bool, last: bool) -> Samples:
        """The samples of a window; where they carry over, without what is left, unless it is the last one."""
        if self.carries:
            assert self.length is not None
            count = -(-rows.tokens // self.length) if last else rows.tokens // self.length
            return ChopOrder(rows, self.length, shuffle=False, seed=0).cut(np.arange(count))
        if not rows.rows:
            none = np.zeros(0, np.int64)
            return Samples(np.zeros(1, np.int64), none, none, none)
        order = self._order(rows, key, shuffle)
        return Samples.concat([order.plan_window(0, window) for window in range(order.windows)])

    def describe(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("packing", "length", "truncation", "max_tokens", "multiple")}

    def _order(self, rows: TokenRows, key: int, shuffle: bool) -> Order:
        # The rows are shuffled already; what is left to shuffle is that the longest come first.
        fit = Truncation(self.truncation, self.length)
        if self.packing is not None:
            strategy = self.strategy or "best_fit"
            return PackedOrder(rows, fit, strategy=strategy, shuffle=shuffle, seed=key, window_rows=rows.rows)
        if self.max_tokens is None:
            kind = RowOrder if fit.one_to_one else FittedOrder
            return kind(rows, fit, shuffle=False, seed=key)
        return BudgetOrder(
            rows,
            fit,
            max_tokens=self.max_tokens,
            multiple=self.multiple,
            shuffle=shuffle,
            seed=key,
            window_rows=rows.rows,
        )
