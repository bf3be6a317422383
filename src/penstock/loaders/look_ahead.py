"""Look-ahead of a plan over stores in buckets: what is fetched before it is needed, and what is evicted last.

The plan knows all steps, so that parts are requested some steps early, as many at a time as a budget of bytes allows,
and a part whose next use is far away makes room for others (Belady's rule). The order is the same for all ranks, and so
is what they evict from the cache of their machine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.memory import format_bytes
from penstock.order.block_shuffle import BlockShuffle
from penstock.order.plan import Plan, Position
from penstock.order.sample_orders import ArithmeticOrder, Order
from penstock.store.gather import TokenTable
from penstock.store.part_rows import PartRows
from penstock.store.row_ranges import RowRanges
from penstock.store.shards import Verify

log = logging.getLogger(__name__)

_MOST_BYTES = 256 << 20
"""Bytes that are requested ahead at most; an eighth of the cache, if that is less: more would push out what a later
window uses again."""
_MOST_BLOCKS = 32
_told: set[tuple[str, ...]] = set()


class LookAhead:
    """Future of the tables of a plan that are in buckets."""

    def __init__(self, tables: Sequence[TokenTable], plan: Plan, verify: Verify) -> None:
        self._tables, self.plan, self._verified = tables, plan, verify != "fast"
        self.position: Position | None = None
        """Position before the steps whose parts are needed next."""
        self.near_steps = 0.0
        """Steps ahead for which parts have been requested."""
        self._rows: list[PartRows] | None = None
        self._process = 0
        shards = {id(store.bucket): store.bucket for table in tables for store in table.stores}
        self._shards = [found for found in shards.values() if found is not None]
        self._bytes = min([_MOST_BYTES, *(found.cache_bytes // 8 for found in self._shards)])
        self._ranges: dict[int, RowRanges | None] = {}

    def row_ranges(self, number: int) -> RowRanges | None:
        """Reader of single rows, for a table whose pieces would be fetched over and over; None for others."""
        if number not in self._ranges:
            self._ranges[number] = RowRanges(self._tables[number]) if self._is_scattered(number) else None
        return self._ranges[number]

    def _is_scattered(self, number: int) -> bool:
        """True if samples are drawn from everywhere, the cache does not hold the data, and no checksums are asked for.

        A piece would then serve a row or two before it is evicted: one is kept with a chance of cache / data.
        """
        table, order = self._tables[number], self.plan.sources[number].order
        return (
            table.in_bucket
            and order.shuffle is True
            and not self._fits
            and not self._verified
            and type(table) is TokenTable
            and RowRanges.fits(table)
        )

    @property
    def _fits(self) -> bool:
        """True if the caches hold the data."""
        limits = {id(shards.cache): shards.cache.limit_bytes for shards in self._shards}
        return sum(shards.manifest.bytes for shards in self._shards) <= sum(limits.values()) * 7 // 8

    def has_room(self, blocks: Sequence[int]) -> bool:
        """True if more may be requested, blocks of steps that need so many bytes each being planned already.

        Parts that are in the cache count too: what is planned has to stay there until it is used.
        """
        return len(blocks) < _MOST_BLOCKS and sum(blocks) < self._bytes

    def begin(self, position: Position) -> None:
        """Go to a position. The caches ask from now on what this plan uses next."""
        self.position = position
        if self._process != os.getpid():
            self._process = os.getpid()
            self._tell()
            for shards in self._shards:
                shards.cache.add_users(self)

    def reach(self, positions: Sequence[Position]) -> None:
        """Note that parts were requested up to a position."""
        if self.position is not None and positions:
            self.near_steps = float(max(positions[-1].step - self.position.step, 1))

    def next_uses(self, names: Sequence[str]) -> npt.NDArray[np.float64]:
        """Steps until each cached part is used; NaN for parts of others."""
        uses = np.full(len(names), np.nan)
        if self.position is None:
            return uses
        if self._rows is None:
            self._rows = [PartRows(table) for table in self._tables]
        sources = self.plan.sources
        for rows, source, cursor, each in zip(self._rows, sources, self.position.cursors, self._samples_a_step()):
            uses[rows.layouts(names)] = 0.0
            found = rows.ranges(names)
            if not len(found.which):
                continue
            epochs = source.order.until_use(found.rows, found.tokens, cursor)
            if source.max_epochs is not None and cursor.epoch + 1 >= source.max_epochs:
                done = cursor.window / max(source.order.windows, 1)
                epochs[epochs + done >= 1.0] = np.inf  # no epoch comes after this one
            steps = epochs * _samples(source.order) / max(each, 1e-9)
            uses[found.which] = np.fmin(uses[found.which], steps)
        return uses

    def forget(self) -> None:
        """Drop what was requested and not used: the loop is over, or goes on elsewhere."""
        for shards in self._shards:
            shards.forget()
        for ranges in self._ranges.values():
            if ranges is not None:
                ranges.forget()

    def __getstate__(self) -> dict[str, object]:
        """State for worker processes, which begin themselves."""
        return self.__dict__ | {"_ranges": {}, "_rows": None, "_process": 0}

    def _samples_a_step(self) -> list[float]:
        """Samples of each source in a step, now."""
        batch, schedule = self.plan.global_batch, self.plan.schedule
        if schedule is None or self.position is None:
            return [float(batch)] * len(self.plan.sources)
        weights = schedule.weights_at(self.position.step)
        total = sum(weights.values())
        return [float(batch * weights[name] / total) for name in self.plan.names]

    def _tell(self) -> None:
        """Say once if the cache does not hold the data, and what helps."""
        nbytes = sum(shards.manifest.bytes for shards in self._shards)
        limit = min(shards.cache.limit_bytes for shards in self._shards)
        names = tuple(shards.home.shown for shards in self._shards)
        if self._fits or names in _told:
            return
        _told.add(names)
        shuffles = [source.order.shuffle for source in self.plan.sources]
        if any(shuffle is True for shuffle in shuffles):
            each = "each row is fetched by itself, without a checksum"
            if not any(self.row_ranges(number) for number in range(len(self._tables))):
                each = "pieces are fetched again and again"
            log.warning(
                "%s: %s do not fit the cache of %s, and shuffle=True draws samples from everywhere, so that %s; "
                "shuffle='blocks' fetches each piece about once an epoch, or raise cache_bytes",
                ", ".join(names),
                format_bytes(nbytes),
                format_bytes(limit),
                each,
            )
        for source, table in zip(self.plan.sources, self._tables):
            shuffle = source.order.shuffle
            window = shuffle.window_share(table.tokens) * nbytes if isinstance(shuffle, BlockShuffle) else 0
            if 2 * window > limit:
                log.warning(
                    "%s: the cache of %s does not hold two windows of %s; pass shuffle=BlockShuffle(window_tokens=...) "
                    "with a smaller window, or raise cache_bytes",
                    source.name,
                    format_bytes(limit),
                    format_bytes(window),
                )


def _samples(order: Order) -> float:
    """Samples of an epoch, roughly."""
    if isinstance(order, ArithmeticOrder):
        return float(order.total)
    return max(1.0, order.table.tokens / order.capacity if order.capacity else order.table.rows)
