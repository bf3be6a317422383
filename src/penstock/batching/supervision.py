"""How many tokens are learned from in any part of any row, counted without copying a mask again and again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.order.samples import Samples
from penstock.store.gather import TokenTable

__all__ = ["Supervision"]

Ints = npt.NDArray[np.int64]
_WORD = 64


class Supervision:
    """The supervised tokens of parts of rows: all but the first where there is no mask, else as the mask says.

    The first token of a part is never learned, since nothing predicts it. With a mask, the whole of it is read once
    (about a nanosecond a token) and kept as bits with a count for every 64 of them: a quarter of a byte a token.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._words: npt.NDArray[np.uint64] | None = None
        self._before: Ints | None = None
        self._starts: Ints | None = None

    def count(self, samples: Samples) -> Ints:
        """Supervised tokens of each part."""
        lengths = samples.lengths
        if not self._table.masked:
            return np.maximum(lengths - 1, 0)
        if self._starts is None:
            self._read()
        assert self._starts is not None
        begins = self._starts[samples.rows] + samples.starts
        return np.where(lengths > 0, self._rank(begins + lengths) - self._rank(begins + 1), 0)

    def _rank(self, places: Ints) -> Ints:
        """Supervised tokens before each place in the table, all rows end to end."""
        assert self._words is not None
        assert self._before is not None
        word, bit = places // _WORD, (places % _WORD).astype(np.uint64)
        below = self._words[word] & ((np.uint64(1) << bit) - np.uint64(1))
        return self._before[word] + np.bitwise_count(below)

    def _read(self) -> None:
        table = self._table
        assert table.mask_column is not None
        lengths: list[npt.NDArray[np.int64]] = []
        packed: list[npt.NDArray[np.uint8]] = []
        left = np.zeros(0, np.uint8)
        for store in table.stores:
            for batch in store.batches(columns=[table.mask_column]):
                column = batch.column(0)
                lengths.append(column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64))
                values = column.flatten().to_numpy(zero_copy_only=False)
                bits = np.concatenate([left, values != 0])
                whole = len(bits) - len(bits) % 8
                packed.append(np.packbits(bits[:whole], bitorder="little"))
                left = bits[whole:]
        packed.append(np.packbits(left, bitorder="little"))
        flat = np.concatenate(packed)
        words = np.zeros(len(flat) // 8 + 2, "<u8")
        words.view(np.uint8)[: len(flat)] = flat
        self._words = words.astype(np.uint64, copy=False)
        self._before = np.concatenate([[0], np.cumsum(np.bitwise_count(self._words), dtype=np.int64)[:-1]])
        reach = np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]))
        self._starts = reach[:-1]
