"""Tokenised rows of a window in memory, and the samples made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arrays.ragged import Ragged
from penstock.arrays.truncation import Truncation
from penstock.loaders.source import Sampling
from penstock.order.sample_orders import BudgetOrder, ChopOrder, FittedOrder, Order, PackedOrder, RowOrder
from penstock.order.samples import Samples

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Rows of tokens with their supervision and origin; the table that a sample order reads."""

    ids: Ragged
    mask: npt.NDArray[np.bool_] | None
    """Supervised tokens; None: all of them."""
    blocks: Ints
    """Block that each row was read from."""
    places: Ints
    """Byte or row of the file at which each row begins."""

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        return int(self.ids.offsets[-1])

    @property
    def nbytes(self) -> int:
        arrays = (self.ids.values, self.ids.offsets, self.blocks, self.places, self.mask)
        return sum(int(array.nbytes) for array in arrays if array is not None)

    def lengths(self, rows: npt.ArrayLike) -> Ints:
        wanted, offsets = np.asarray(rows, np.int64), self.ids.offsets
        return offsets[wanted + 1] - offsets[wanted]

    def find_tokens(self, positions: npt.ArrayLike) -> tuple[Ints, Ints]:
        """Row of the n-th token, and its number in that row."""
        wanted = np.asarray(positions, np.int64)
        rows = np.searchsorted(self.ids.offsets, wanted, side="right") - 1
        return rows, wanted - self.ids.offsets[rows]

    def take(self, rows: Ints) -> TokenRows:
        """Some rows, in the order given."""
        mask = None if self.mask is None else Ragged(self.mask, self.ids.offsets).take(rows).values
        return TokenRows(self.ids.take(rows), mask, self.blocks[rows], self.places[rows])

    def tail(self, tokens: int) -> TokenRows:
        """The last tokens, as a copy; its first row may be the end of a row."""
        offsets, begin = self.ids.offsets, self.tokens - tokens
        first = int(np.searchsorted(offsets, begin, side="right")) - 1 if tokens else self.rows
        ids = Ragged(self.ids.values[begin:].copy(), np.maximum(offsets[first:] - begin, 0))
        mask = None if self.mask is None else self.mask[begin:].copy()
        return TokenRows(ids, mask, self.blocks[first:], self.places[first:])

    @classmethod
    def of(cls, tokens: pa.ListArray, mask: pa.ListArray | None, blocks: Ints, places: Ints) -> TokenRows:
        """Rows of Arrow columns of lists."""
        supervised = None if mask is None else Ragged.of_lists(mask).values.astype(np.bool_, copy=False)
        return cls(Ragged.of_lists(tokens), supervised, blocks, places)

    @classmethod
    def concat(cls, parts: Sequence[TokenRows]) -> TokenRows:
        if len(parts) == 1:
            return parts[0]
        if not parts:
            none = np.zeros(0, np.int64)
            return cls(Ragged(np.zeros(0, np.uint16), np.zeros(1, np.int64)), None, none, none)
        mask = None
        if any(part.mask is not None for part in parts):
            flags = (part.mask if part.mask is not None else np.ones(part.tokens, np.bool_) for part in parts)
            mask = np.concatenate(list(flags))
        return cls(
            Ragged.joined([part.ids for part in parts]),
            mask,
            np.concatenate([part.blocks for part in parts]),
            np.concatenate([part.places for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class WindowSampling:
    """Samples of the rows of a window: chopped, packed, by token budget, or row by row."""

    sampling: Sampling
    max_tokens: int | None = None
    """Samples are whole batches of at most this many tokens, padding included."""
    multiple: int = 1

    @property
    def carries(self) -> bool:
        """True if the tokens left over in a window begin the first sample of the next."""
        return self.sampling.strategy == "concat"

    @property
    def in_order(self) -> bool:
        """True if samples follow the rows, so that unshuffled ones do not depend on the windows."""
        return self.carries or (self.sampling.strategy is None and self.max_tokens is None)

    def samples(self, rows: TokenRows, key: int, *, shuffle: bool, last: bool) -> Samples:
        """Samples of a window. Where tokens carry over, those left over are sampled in the last window only."""
        length = self.sampling.length
        if self.carries:
            assert length is not None
            count = -(-rows.tokens // length) if last else rows.tokens // length
            return ChopOrder(rows, length, shuffle=False, seed=0).cut(np.arange(count))
        if not rows.rows:
            none = np.zeros(0, np.int64)
            return Samples(np.zeros(1, np.int64), none, none, none)
        order = self._order(rows, key, shuffle)
        return Samples.concat([order.plan_window(0, window) for window in range(order.windows)])

    def describe(self) -> dict[str, Any]:
        sampling = self.sampling
        return {
            "packing": sampling.strategy,
            "length": sampling.length,
            "truncation": sampling.truncation,
            "max_tokens": self.max_tokens,
            "multiple": self.multiple,
        }

    def _order(self, rows: TokenRows, key: int, shuffle: bool) -> Order:
        # The rows are shuffled already. Orders that put the longest rows first shuffle their samples.
        fit, kind = Truncation(self.sampling.truncation, self.sampling.length), self.sampling.strategy
        if kind is not None:
            return PackedOrder(rows, fit, strategy=kind, shuffle=shuffle, seed=key, window_rows=rows.rows)
        if self.max_tokens is None:
            return (RowOrder if fit.one_to_one else FittedOrder)(rows, fit, shuffle=False, seed=key)
        return BudgetOrder(
            rows,
            fit,
            max_tokens=self.max_tokens,
            multiple=self.multiple,
            shuffle=shuffle,
            seed=key,
            window_rows=rows.rows,
        )
