"""Rows of stores in buckets by their byte ranges, where whole pieces would fetch the data many times over.

An exact shuffle draws rows from everywhere. If the cache does not hold the store, a piece of a megabyte would be
fetched for each row of a few kilobytes; here only the tokens of the row are. A range has no checksum of its own: the
object is pinned by its ETag, and positions follow from the verified index.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import offsets_of
from penstock.memory.views import place_of
from penstock.pipeline.prefetch import FetchPool
from penstock.store.bucket_shards import FETCH_THREADS
from penstock.store.gather import TokenTable

Ints = npt.NDArray[np.int64]
_RANGES_AT_ONCE = 16
"""Ranges of one request to the client, which asks for several at a time."""


class _Batch(NamedTuple):
    """Ranges of one shard that are fetched together, and where their bytes belong."""

    name: str
    shard: int
    ranges: list[tuple[int, int]]
    at: list[int]


class RowTicket(NamedTuple):
    """Tokens of rows that were requested."""

    batches: list[_Batch]
    tokens: int
    places: Ints


class RowRanges:
    """Tokens of any parts of rows of a table, all of whose stores are in buckets."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._pool: FetchPool[list[Any]] = FetchPool(FETCH_THREADS)
        self._values: dict[int, Ints] = {}
        self._before: dict[int, Ints] = {}
        self._count = 0

    @staticmethod
    def fits(table: TokenTable) -> bool:
        """True if the rows of a table can be read so: no mask, and shards whose pieces are known."""
        stores = [store.bucket for store in table.stores]
        return not table.masked and all(shards is not None and shards.has_sums for shards in stores)

    def request(self, rows: Ints, starts: Ints, lengths: Ints) -> RowTicket:
        """Begin to fetch `lengths[j]` tokens of row `rows[j]` from `starts[j]` on, for every part j."""
        width = self._table.dtype.itemsize
        places = offsets_of(lengths)
        batches: list[_Batch] = []
        for number, which, within in self._table.by_shard(rows):
            begins = self._positions(number, within) + starts[which] * width
            ends = begins + lengths[which] * width
            targets = places[:-1][which] * width
            for begin, end, at in _joined(begins, ends, targets):
                if not batches or batches[-1].shard != number or len(batches[-1].ranges) >= _RANGES_AT_ONCE:
                    self._count += 1
                    batches.append(_Batch(f"{self._count}", number, [], []))
                batches[-1].ranges.append((begin, end))
                batches[-1].at.append(at)
        for batch in batches:
            nbytes = sum(end - begin for begin, end in batch.ranges)
            self._pool.request(batch.name, nbytes, partial(self._read, batch))
        return RowTicket(batches, int(places[-1]), places[:-1])

    def take(self, ticket: RowTicket) -> tuple[npt.NDArray[Any], Ints]:
        """The tokens that were requested, and the place of each part in memory, which is valid as long as they are."""
        dtype = self._table.dtype
        tokens = np.empty(max(ticket.tokens, 1), dtype)
        raw = tokens.view(np.uint8)
        for batch in ticket.batches:
            for (begin, end), at, data in zip(
                batch.ranges, batch.at, self._pool.take(batch.name, partial(self._read, batch))
            ):
                raw[at : at + end - begin] = np.frombuffer(data, np.uint8)
        return tokens, ticket.places + place_of(tokens.ctypes.data, dtype.itemsize)

    def forget(self) -> None:
        self._pool.forget()

    def close(self) -> None:
        self._pool.close()

    def _read(self, batch: _Batch) -> list[Any]:
        store, shard = self._table.entries[batch.shard]
        assert store.bucket is not None
        return store.bucket.read_ranges(shard, batch.ranges)

    def _positions(self, number: int, rows: Ints) -> Ints:
        """Position in the object of the first token of rows of a shard."""
        store, shard = self._table.entries[number]
        assert store.bucket is not None
        layout = store.bucket.layout(shard)
        values = self._values.get(number)
        if values is None:
            values = self._values[number] = store.bucket.value_positions(shard, self._table.column)
            self._before[number] = offsets_of(layout.lengths)
        starts, before = np.asarray(layout.starts), self._before[number]
        pieces = np.searchsorted(starts, rows, side="right") - 1
        return np.asarray(values[pieces] + (before[rows] - before[starts[pieces]]) * self._table.dtype.itemsize)


def _joined(begins: Ints, ends: Ints, targets: Ints) -> list[tuple[int, int, int]]:
    """Ranges with those joined that follow each other in the object and in memory; empty ones left out."""
    found: list[tuple[int, int, int]] = []
    for begin, end, at in zip(begins.tolist(), ends.tolist(), targets.tolist()):
        if begin == end:
            continue
        if found and found[-1][1] == begin and found[-1][2] + found[-1][1] - found[-1][0] == at:
            found[-1] = found[-1][0], end, found[-1][2]
        else:
            found.append((begin, end, at))
    return found
