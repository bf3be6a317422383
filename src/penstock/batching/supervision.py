"""Counts of supervised tokens, without building batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import by_owner, offsets_of
from penstock.batching.collate import Tokens
from penstock.order.samples import Samples
from penstock.store.gather import TokenTable

Ints = npt.NDArray[np.int64]
_WORD = 64


def supervised_tokens(samples: Samples, sources: Ints, tables: Sequence[Tokens]) -> int:
    """Number of labels that a batch would have, without building it."""
    total = 0
    for number, which in by_owner(sources, len(tables)):
        table, lengths = tables[number], samples.lengths[which]
        if not table.masked:
            total += int(np.maximum(lengths - 1, 0).sum())
            continue
        at = np.cumsum(lengths) - lengths
        mask = np.zeros(int(lengths.sum()) + 1, np.bool_)
        table.copy_mask(samples.rows[which], samples.starts[which], lengths, mask, at)
        mask[at[lengths > 0]] = False
        total += int(np.count_nonzero(mask))
    return total


class Supervision:
    """Counts of supervised tokens in parts of rows: all but the first without a mask, otherwise by the mask.

    The first token of a part has no label, since nothing predicts it. A mask is read once (about a nanosecond a token)
    and kept as bits with a count for every 64 of them: a quarter of a byte a token.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table

    def count(self, samples: Samples) -> Ints:
        """Supervised tokens of each part."""
        lengths = samples.lengths
        if not self._table.masked:
            return np.maximum(lengths - 1, 0)
        begins = self._bits[2][samples.rows] + samples.starts
        return np.where(lengths > 0, self._supervised_before(begins + lengths) - self._supervised_before(begins + 1), 0)

    def _supervised_before(self, places: Ints) -> Ints:
        """Supervised tokens before each place in the table, all rows end to end."""
        words, before, _ = self._bits
        word, bit = places // _WORD, (places % _WORD).astype(np.uint64)
        below = words[word] & ((np.uint64(1) << bit) - np.uint64(1))
        return before[word] + np.bitwise_count(below)

    @cached_property
    def _bits(self) -> tuple[npt.NDArray[np.uint64], Ints, Ints]:
        """Mask as 64-bit words, the bits set before each word, and the start of each row."""
        table = self._table
        assert table.mask_column is not None
        lengths: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
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
        native = words.astype(np.uint64, copy=False)
        return native, offsets_of(np.bitwise_count(native))[:-1], offsets_of(np.concatenate(lengths))[:-1]
