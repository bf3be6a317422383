"""Batches of a plan: the samples of a step are arithmetic, and their tokens are in mapped shards."""

from __future__ import annotations

import copy
import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import by_owner, offsets_of
from penstock.batching.backends import get_backend
from penstock.batching.batch import TrainingBatch
from penstock.batching.collate import BatchLayout, CompactBatch, collate_compact, rounded, width
from penstock.batching.options import Options
from penstock.batching.supervision import supervised_tokens
from penstock.distributed.ranks import Rank
from penstock.distributed.sharding import Contiguous, share_cuts, shares_of
from penstock.errors import ConfigError, PenstockError
from penstock.loaders.look_ahead import LookAhead
from penstock.loaders.source import LoaderSource
from penstock.memory.views import keep_freed
from penstock.order.edits import Edit
from penstock.order.plan import Plan, Position, Step
from penstock.order.positions import larger_than_epoch, nothing_to_deliver
from penstock.order.samples import Samples
from penstock.order.schedules import Schedule
from penstock.order.states import from_state, to_state
from penstock.order.steps import next_epoch
from penstock.store.gather import Placed
from penstock.store.row_ranges import RowRanges, RowTicket

log = logging.getLogger(__name__)

_STEPS_AT_ONCE = 64
_QUICK_STEPS, _QUICK_SAMPLES = 128, 8192
"""The same where nothing has to be fetched, and the most samples of that many steps."""
_BLOCKS_AT_ONCE = 4
"""Blocks of steps that are planned ahead for each one that is delivered."""
_TOKENS_AT_ONCE = 1 << 21
"""Tokens of batches that are collated together for a device; they share one array, which lives as long as any of them.
"""
_BYTES_AT_ONCE = 2 << 20
"""The same in main memory, in bytes of the store."""
_SHARE_AT_ONCE = 8
"""The same as a share of the budget, if there is one: an eighth."""
_FILE_CHECK_SECONDS = 1.0
"""Least time between two checks that all files are unchanged."""
_FRESH_SECONDS = 0.001
"""Time after a check in which more batches of the same block are copied without another: a loop without a trainer would
spend a twentieth of its time on checks. Every block is checked before it is planned."""
_FILE_CHECKS = 16
"""Shards of each source that are looked at before tokens are copied."""
_TABLE_CHECKS = 64
"""Sources whose shards are looked at then."""
_KEPT_BYTES = 24 << 20


class Share:
    """Share of a rank in a step, and the place of its tokens: its part j is part `first + j` of the tables."""

    __slots__ = ("first", "samples", "sources", "step", "tables", "tickets")

    def __init__(self, step: Step, samples: Samples, sources: npt.NDArray[np.int64]) -> None:
        self.step, self.samples, self.sources = step, samples, sources
        self.tables: Sequence[Placed] = ()
        self.first = 0
        self.tickets: Mapping[int, RowTicket] = {}
        """Of the first share of a block: what was requested for the block, by table."""


class _Block(NamedTuple):
    """Steps that are planned together, from a position to the following one; None if the epoch ends with them."""

    position: Position
    following: Position | None
    shares: list[Share]
    positions: list[Position]
    """Position after each step."""
    nbytes: int = 0
    """Bytes of parts that they need and that are not in use already."""


class PlanEngine:
    """Batches of one rank of a plan, from any position on."""

    def __init__(
        self,
        sources: Sequence[LoaderSource],
        options: Options,
        *,
        schedule: Schedule | None = None,
        stopping: str = "first_exhausted",
    ) -> None:
        self.options, self.rank = options, options.find_rank()
        self.sources = tuple(sources)
        self._tables = [source.inputs.table for source in sources]
        self._layout = _common_layout(self.sources)
        self.batch_size = 1 if self._layout.split else options.batch_size
        self.plan = Plan(
            tuple(source.plan_source for source in sources),
            self.batch_size * self.rank.world_size,
            schedule=schedule,
            drop_last=options.drop_last,
            stopping=stopping,
        )
        self._ahead: LookAhead | None = None
        """Of tables in buckets."""
        if any(table.in_bucket for table in self._tables):
            self._ahead = LookAhead(self._tables, self.plan, options.verify)
        self._checked, self._check_seconds = time.monotonic(), 0.0
        self._looked = 0.0
        """Time of the last check, also of a few files."""
        self._next_table = 0
        """Table to begin with when some of many are checked."""
        self.at_hand = 0
        """Batches that were collated together with the last one."""
        keep_freed(_KEPT_BYTES)

    def for_rank(self, rank: Rank, batch_size: int, *, integer: npt.DTypeLike, edits: Sequence[Edit]) -> Self:
        """Engine of another rank over the same rows: NumPy batches whose wide fields are `integer`."""
        other = copy.copy(self)
        other.options = replace(self.options, batch_size=batch_size, backend="numpy", device=None, pin_memory=False)
        other.rank, other.batch_size = rank, 1 if self._layout.split else batch_size
        other._layout = replace(self._layout, integer=integer)
        other.plan = replace(self.plan, global_batch=other.batch_size * rank.world_size, edits=()).edited(*edits)
        if self._ahead is not None:
            other._ahead = LookAhead(other._tables, other.plan, other.options.verify)
        return other

    elsewhere = False

    @property
    def layout(self) -> BatchLayout:
        """Layout of the batches."""
        return self._layout

    @property
    def names(self) -> str:
        return ", ".join(self.plan.names)

    def start(self) -> Position:
        return self.plan.start()

    def seek(self, step: int) -> Position:
        return self.plan.seek(step)

    def seek_epoch(self, epoch: int, position: Position) -> Position:
        return self.plan.seek_epoch(epoch)

    def one(self, position: Position, batch_size: int | None) -> tuple[TrainingBatch, Position]:
        """Batch at a position, or the first of the next epoch; EOFError after the last epoch."""
        if batch_size is not None and batch_size != 1 and self._layout.split:
            raise ConfigError(
                f"batch_size={batch_size} does not work with max_tokens={self.options.max_tokens}, which decides the "
                "number of rows; call get_batch() without a size"
            )
        other = batch_size is not None and batch_size != self.batch_size
        count = None if batch_size is None else batch_size * self.rank.world_size
        if count not in (None, self.plan.global_batch) and self.plan.counts_steps:
            raise ConfigError(
                f"batch_size={batch_size} does not work with edits or a schedule, which count steps of "
                f"{self.plan.global_batch} samples; call get_batch() without a size"
            )
        self._check_files()
        for _ in range(2):
            step, following = self.plan.read(position, count)
            if step is not None:
                if other and position.at_start and len(step.samples) < (count or 0):
                    raise larger_than_epoch(batch_size, self.rank.world_size, len(step.samples))
                return self._make_one(step), self.plan.next_delivered(following, count)
            if self.plan.ended(following):
                raise EOFError("no batch is left: every source was used as often as max_epochs allows")
            position = next_epoch(following)
        raise self._nothing(count)

    def item(self, epoch: int, number: int) -> TrainingBatch:
        """Batch `number` of an epoch."""
        self._check_files()
        step, _ = self.plan.read(self.plan.seek(self.plan.delivered_steps(epoch)[number]))
        assert step is not None
        return self._make_one(step)

    def position_of(self, epoch: int, number: int) -> Position:
        """Position before a batch of an epoch; after the last one, the beginning of the next epoch."""
        steps = self.plan.delivered_steps(epoch)
        if number < len(steps):
            return self.plan.seek(steps[number])
        following = self.plan.seek_epoch(epoch + 1)
        return following if self.plan.ended(following) else self.plan.next_delivered(following)

    def number_of(self, position: Position) -> int:
        """Number of the batches of its epoch before a position."""
        return bisect_left(self.plan.delivered_steps(position.epoch), position.step)

    def count(self, epoch: int) -> int:
        return len(self.plan.delivered_steps(epoch))

    def batches(self, position: Position) -> Generator[tuple[TrainingBatch, Position], None, None]:
        """Batches of the rest of an epoch, each with the next position.

        Steps are read in blocks that grow from one, since finding the places of rows has a cost for each shard.
        """
        following: Position | None = self.plan.next_delivered(position)
        assert following is not None
        epoch, wanted, most = following.epoch, 1, _STEPS_AT_ONCE
        if self._ahead is None:
            most = max(most, min(_QUICK_STEPS, _QUICK_SAMPLES // self.plan.global_batch))
        planned: deque[_Block] = deque()
        while planned or (following is not None and following.epoch == epoch):
            if not planned:
                assert following is not None
                planned.append(self._plan_block(following, wanted))
                following = planned[0].following
            block = planned.popleft()
            if self._ahead is not None:
                self._ahead.begin(block.position)
            shares = list(self._placed(block.shares))
            # Only now: the first batch waits for what it needs, and for nothing else.
            wanted = min(wanted * 2, most)
            if self._ahead is not None:
                following, wanted = self._plan_ahead(planned, following, epoch, wanted)
            yield from zip(self._built(shares), block.positions)

    def _plan_block(self, position: Position, most: int) -> _Block:
        """Up to `most` steps of an epoch from a position on."""
        self._check_files()
        following: Position | None = position
        found: list[tuple[Step, Position]] = []
        while len(found) < most and following is not None and following.epoch == position.epoch:
            more = self.plan.read_block(following, most - len(found))
            if not more and following.at_start and (following.step == 0 or not self.plan.ended(following)):
                raise self._nothing(None)
            found += more
            following = more[-1][1] if more else None
        shares = [self._share(step) for step, _ in found]
        return _Block(position, following, shares, [after for _, after in found])

    def _plan_ahead(
        self, planned: deque[_Block], following: Position | None, epoch: int, wanted: int
    ) -> tuple[Position | None, int]:
        """Plan and request further blocks of the epoch, then the first ones of the next epoch."""
        ahead, beyond, sizes = following, False, [block.nbytes for block in planned]
        for _ in range(_BLOCKS_AT_ONCE):
            if ahead is None or self._ahead is None or not self._ahead.has_room(sizes) or self.plan.ended(ahead):
                break
            try:
                if ahead.epoch > epoch:
                    beyond, wanted = True, 1 if not beyond else wanted
                block = self._plan_block(ahead, wanted)
                sizes.append(self._request(block.shares))
            except Exception as error:  # noqa: BLE001 - it is raised again in its place in the order
                log.debug("planning ahead: %s", error)
                break
            ahead = block.following
            if not beyond:
                planned.append(block._replace(nbytes=sizes[-1]))
                following = ahead
            self._ahead.reach(block.positions)
            wanted = min(wanted * 2, _STEPS_AT_ONCE)
        return following, wanted

    def _request(self, shares: list[Share]) -> int:
        """Begin to fetch what shares need and is not on this machine; the bytes of what they need."""
        nbytes = 0
        if not shares:
            return nbytes
        parts = Samples.concat([share.samples for share in shares])
        sources = np.concatenate([share.sources for share in shares])
        for number, which in by_owner(sources, len(self._tables)):
            table, ranges = self._tables[number], self._row_ranges(number)
            if ranges is not None:
                ticket = ranges.request(parts.rows[which], parts.starts[which], parts.lengths[which])
                shares[0].tickets = {**shares[0].tickets, number: ticket}
                nbytes += ticket.tokens * table.dtype.itemsize
            elif table.in_bucket:
                nbytes += table.request(parts.rows[which])
        return nbytes

    def _row_ranges(self, number: int) -> RowRanges | None:
        """Reader of single rows of a table, where its pieces would be fetched over and over."""
        return None if self._ahead is None else self._ahead.row_ranges(number)

    def _make_one(self, step: Step) -> TrainingBatch:
        (share,) = self._placed([self._share(step)])
        return self._build(share)

    def _placed(self, shares: list[Share]) -> Iterator[Share]:
        """Shares, with the places of their tokens."""
        if not shares:
            return
        rows = np.concatenate([share.samples.rows for share in shares])
        starts = np.concatenate([share.samples.starts for share in shares])
        several = len(self._tables) > 1
        sources = np.concatenate([share.sources for share in shares]) if several else shares[0].sources
        places, mask_places = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        held: list[Any] = [table.held() for table in self._tables]
        for number, which in by_owner(sources, len(self._tables)):
            table = self._tables[number]
            if (ranges := self._row_ranges(number)) is not None:
                if number not in shares[0].tickets:
                    self._request(shares)
                held[number], places[which] = ranges.take(shares[0].tickets[number])
                continue
            places[which] = table.locate(rows[which], starts[which], held[number])
            if table.masked:
                mask_places[which] = table.locate_mask(rows[which], starts[which], held[number])
        tables = [Placed(table, places, mask_places, kept) for table, kept in zip(self._tables, held)]
        low = 0
        for share in shares:
            high = low + len(share.samples.rows)
            share.tables, share.first = tables, low
            yield share
            low = high

    def _built(self, shares: list[Share]) -> Iterator[TrainingBatch]:
        """Batches of shares. Batches of the same shape are collated several at once, which saves time for each."""
        at_once, rows = self._batches_at_once(shares), len(shares[0].samples) if shares else 0
        parts, tokens_in_row = None, 0
        device, backend = self.options.device, get_backend(self.options.backend)
        memory = None if device is None else partial(backend.page_locked, device)
        if at_once > 1:  # the same width for all
            parts = _numbered([share.samples for share in shares], shares[0].first)
            tokens_in_row = width(shares[0].step.samples, self._layout)
        for start in range(0, len(shares), at_once):
            self._check_files(_FRESH_SECONDS)
            group = shares[start : start + at_once]
            self.at_hand = len(group) - 1
            if len(group) == 1 or parts is None:
                yield self._build(group[0])
                continue
            first, several = group[0], len(self._tables) > 1
            sources = np.concatenate([share.sources for share in group]) if several else first.sources
            numbered = parts.slice(start * rows, (start + len(group)) * rows)
            whole = collate_compact(numbered, sources, first.tables, self._layout, tokens_in_row, memory)
            size = whole.ids.size // len(group) if whole.grid.full else None
            for share, part in zip(group, whole.split(len(group))):
                yield self._finish(share, part, share.samples.tokens if size is None else size)
                self.at_hand -= 1

    def _batches_at_once(self, shares: list[Share]) -> int:
        layout, rows = self._layout, len(shares[0].samples) if shares else 0
        if not rows or layout.padding_free or layout.split or len({share.samples.offsets.size for share in shares}) > 1:
            return 1
        tokens = width(shares[0].step.samples, layout)
        if layout.length is None and len(shares) > 1:
            sizes = [share.step.samples.sizes() for share in shares]
            longest = np.maximum.reduceat(np.concatenate(sizes), offsets_of([len(each) for each in sizes])[:-1])
            if any(rounded(int(most), layout) != tokens for most in (longest.min(), longest.max())):
                return 1
        itemsize = max(table.dtype.itemsize for table in self._tables)
        most = _TOKENS_AT_ONCE if self.options.device is not None else _BYTES_AT_ONCE // itemsize
        if (budget := self.options.memory) is not None:
            most = min(most, budget.limit // (_SHARE_AT_ONCE * itemsize))
        return max(most // (rows * tokens), 1)

    def _build(self, share: Share) -> TrainingBatch:
        step, samples = share.step, share.samples
        # A batch by tokens has a width of its own on each rank; others have the width of the global batch.
        tokens_in_row = width(samples if self._layout.split else step.samples, self._layout)
        numbered = _numbered([samples], share.first)
        compact = collate_compact(numbered, share.sources, share.tables, self._layout, tokens_in_row)
        return self._finish(share, compact, samples.tokens)

    def _finish(self, share: Share, compact: CompactBatch, tokens: int) -> TrainingBatch:
        """Batch of a share; its fields are made when they are read."""
        if self.rank.world_size > 1 and "num_items_in_batch" in self._layout.fields:
            compact.items = supervised_tokens(share.step.samples, share.step.sources, self._tables)
        backend = get_backend(self.options.backend)
        return TrainingBatch.of_compact(compact, self._metadata(share), backend, tokens)

    def _metadata(self, share: Share) -> dict[str, Any]:
        """Origin of the rows of a share."""
        step, samples = share.step, share.samples
        return {
            "step": step.number,
            "epoch": step.epoch,
            "sources": step.names,
            "source": share.sources,
            "row": samples.rows,
            "sample": samples.numbers(),
        }

    def _share(self, step: Step) -> Share:
        """Share of this rank in a global batch."""
        samples, rank = step.samples, self.rank
        if rank.world_size == 1:
            return Share(step, samples, step.sources)
        if type(self.options.sharding_strategy) is Contiguous:
            low, high = share_cuts(len(samples), rank.world_size)[rank.rank : rank.rank + 2].tolist()
            first, last = samples.offsets[low], samples.offsets[high]
            return Share(step, samples.slice(low, high), step.sources[first:last])
        documents = None if samples.single else (samples.lengths, samples.offsets)
        mine = shares_of(self.options.sharding_strategy, samples.sizes(), rank.world_size, documents)[rank.rank]
        sources = Samples(samples.offsets, step.sources, samples.starts, samples.lengths).take(mine).rows
        return Share(step, samples.take(mine), sources)

    def to_state(self, position: Position) -> dict[str, Any]:
        return to_state(self.plan, position)

    def from_state(self, state: Mapping[str, Any], *, new_batch_size: bool = False) -> Position:
        """Position of a state; the plan takes over the state's edits."""
        self.plan, position = from_state(self.plan, state, new_batch_size=new_batch_size)
        self._follow(self.plan)
        return position

    def edit(self, plan: Plan, position: Position) -> None:
        """Continue with an edited plan; steps before a position cannot change."""
        check_edited(self.plan, plan, position.step)
        self.plan = plan
        self._follow(plan)

    def _follow(self, plan: Plan) -> None:
        """Look ahead in another plan."""
        if self._ahead is not None:
            self._ahead.plan = plan

    def close(self) -> None:
        for source in self.sources:
            if source.inputs.owned:
                source.inputs.table.close()

    def _check_files(self, fresh_seconds: float = 0.0) -> None:
        """Check that no shard was changed or removed, which mapped memory does not show; not if that was just done.

        Of many shards or tables a few are looked at, and all of them once a second, or as often as that takes no more
        than a fiftieth of the time.
        """
        now = time.monotonic()
        if now - self._looked < fresh_seconds:
            return
        self._looked = now
        if now - self._checked >= max(_FILE_CHECK_SECONDS, 50 * self._check_seconds):
            for table in self._tables:
                table.check_unchanged(None)
            self._checked = time.monotonic()
            self._check_seconds = self._checked - now
            return
        tables = self._tables
        if len(tables) > _TABLE_CHECKS:
            first = self._next_table = (self._next_table + _TABLE_CHECKS) % len(tables)
            tables = (tables[first:] + tables[:first])[:_TABLE_CHECKS]
        for table in tables:
            table.check_unchanged(_FILE_CHECKS)

    def _nothing(self, count: int | None) -> PenstockError:
        samples = sum(source.order.count(0) for source in self.plan.sources)
        if not samples:
            return ConfigError("truncation='drop' drops every row; pass a larger length")
        return nothing_to_deliver(samples, count or self.plan.global_batch)


def check_edited(before: Plan, plan: Plan, step: int) -> None:
    """Refuse a plan that was not made from the one before, or whose further edits change steps before `step`."""
    known = len(before.edits)
    if plan.fingerprint != before.fingerprint or plan.edits[:known] != before.edits:
        raise ConfigError("this plan was not made from the plan of the loader; edit loader.plan")
    for edit in plan.edits[known:]:
        if edit.step < step:
            raise ConfigError(
                f"{edit} begins before the next step, {step}, and delivered steps cannot change; begin at loader.step "
                "or later"
            )


def _numbered(several: Sequence[Samples], first: int) -> Samples:
    """Samples in order, whose parts are numbered as in the tables of the first share."""
    single = all(samples.single for samples in several)
    lengths = several[0].lengths if len(several) == 1 else np.concatenate([samples.lengths for samples in several])
    if single:
        offsets = np.arange(len(lengths) + 1)
    else:
        offsets = offsets_of(np.concatenate([np.diff(samples.offsets) for samples in several]))
    return Samples(offsets, np.arange(first, first + len(lengths)), np.zeros(len(lengths), np.int64), lengths, single)


def _common_layout(sources: Sequence[LoaderSource]) -> BatchLayout:
    """Layout of the batches of several sources together."""
    first = sources[0].layout
    for source in sources[1:]:
        first.check_same(sources[0].plan_source.name, source.layout, source.plan_source.name)
    return first
