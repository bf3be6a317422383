"""Batches by a plan: which samples a step is made of is arithmetic, and their tokens lie in mapped shards."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.batching.backends import get_backend
from penstock.batching.batch import TrainingBatch
from penstock.batching.collate import BatchForm, collate, split_rows, supervised_tokens, width
from penstock.batching.options import Options
from penstock.distributed.sharding import Contiguous, deal, share_cuts
from penstock.errors import ConfigError, PenstockError
from penstock.loaders.sampling import LoaderSource
from penstock.memory.views import keep_freed
from penstock.order.plan import Plan, Position, Step
from penstock.order.samples import Samples
from penstock.order.schedules import Schedule
from penstock.order.states import from_state, to_state
from penstock.store.gather import Placed

__all__ = ["PlanEngine", "Share", "StepNumbers"]


class StepNumbers:
    """The numbers of the delivered steps of an epoch; those that were asked for last are kept."""

    def __init__(self) -> None:
        self._known: tuple[Plan, int, Sequence[int]] | None = None

    def of(self, plan: Plan, epoch: int) -> Sequence[int]:
        if self._known is None or self._known[:2] != (plan, epoch):
            first = sum(plan.steps_in(earlier) for earlier in range(epoch))
            steps: Sequence[int] = range(first, first + plan.steps_in(epoch))
            if plan.delivered_in(epoch) < len(steps):
                steps = [step for step in steps if not plan.skipped(step)]
            self._known = plan, epoch, steps
        return self._known[2]

    def __getstate__(self) -> dict[str, None]:
        """For worker processes: without what is quickly looked up again."""
        return {"_known": None}


_STEPS_AT_ONCE = 64
_BYTES_AT_ONCE = 2 << 20
"""Of ids. Batches made together are parts of one array, which lives as long as any of them."""
_LOOK_SECONDS = 1.0
"""How often, at most, it is looked whether the files are still what they were."""
_KEPT_BYTES = 24 << 20


class Share:
    """What a rank takes of a step, and where its tokens are: part j of it is part `first + j` of the tables."""

    __slots__ = ("first", "samples", "sources", "step", "tables")

    def __init__(self, step: Step, samples: Samples, sources: npt.NDArray[np.int64]) -> None:
        self.step, self.samples, self.sources = step, samples, sources
        self.tables: Sequence[Placed] = ()
        self.first = 0


class PlanEngine:
    """The batches of one rank of a plan, from any position on."""

    batch_class: type[TrainingBatch] = TrainingBatch

    def __init__(
        self,
        stocks: Sequence[LoaderSource],
        options: Options,
        *,
        schedule: Schedule | None = None,
        stopping: str = "first_exhausted",
    ) -> None:
        self.options, self.rank = options, options.find_rank()
        self.stocks = tuple(stocks)
        self._tables = [stock.inputs.table for stock in stocks]
        self._form = _common_form([stock.form for stock in stocks])
        self.batch_size = 1 if self._form.split else options.batch_size
        self.plan = Plan(
            tuple(stock.feed for stock in stocks),
            self.batch_size * self.rank.world,
            schedule=schedule,
            drop_last=options.drop_last,
            stopping=stopping,
        )
        self._looked = time.monotonic()
        self._numbers = StepNumbers()
        keep_freed(_KEPT_BYTES)

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
        """The batch at a position, over the end of an epoch if there is one; EOFError at the end of all of them."""
        if batch_size is not None and batch_size != 1 and self._form.split:
            raise ConfigError(
                f"batches hold as many rows as fit into max_tokens={self.options.max_tokens}, so none of {batch_size} "
                "can be asked for; call get_batch() without a size"
            )
        count = None if batch_size is None else batch_size * self.rank.world
        if count not in (None, self.plan.global_batch) and self.plan.counts_steps:
            raise ConfigError(
                f"the plan has edits or a schedule, which count steps of {self.plan.global_batch} samples, so no batch "
                f"of {batch_size} for each rank can be taken; call get_batch() without a size"
            )
        for _ in range(2):
            step, behind = self.plan.read(position, count)
            if step is not None:
                return self._make_one(step), self.plan.settle(behind, count)[0]
            if self.plan.ended(behind):
                raise EOFError("there is no batch left: every source was used as often as max_epochs allows")
            position = self.plan.next_epoch(behind)
        raise self._nothing(count)

    def item(self, epoch: int, number: int) -> TrainingBatch:
        """Batch `number` of an epoch."""
        step, _ = self.plan.read(self.plan.seek(self._numbers.of(self.plan, epoch)[number]))
        assert step is not None
        return self._make_one(step)

    def position_of(self, epoch: int, number: int) -> Position:
        """In front of a batch of an epoch; behind the last one, the beginning of the next epoch."""
        steps = self._numbers.of(self.plan, epoch)
        if number < len(steps):
            return self.plan.seek(steps[number])
        behind = self.plan.seek_epoch(epoch + 1)
        return behind if self.plan.ended(behind) else self.plan.settle(behind)[0]

    def number_of(self, position: Position) -> int:
        """How many batches of its epoch are in front of a position."""
        return bisect_left(self._numbers.of(self.plan, position.epoch), position.step)

    def count(self, epoch: int) -> int:
        return self.plan.delivered_in(epoch)

    def batches(self, position: Position) -> Generator[tuple[TrainingBatch, Position], None, None]:
        """The batches of the rest of an epoch, each with the position behind it.

        Steps are read some at a time, first one and then ever more, since looking up where rows lie costs by shard.
        """
        position, _ = self.plan.settle(position)
        epoch, wanted = position.epoch, 1
        while position.epoch == epoch:
            found: list[tuple[Step, Position]] = []
            while len(found) < wanted and position.epoch == epoch:
                more = self.plan.read_some(position, wanted - len(found))
                if not more:
                    if position.at_start and (position.step == 0 or not self.plan.ended(position)):
                        raise self._nothing(None)
                    epoch = -1
                    break
                found += more
                position = more[-1][1]
            shares = list(self._placed([self._share(step) for step, _ in found]))
            yield from zip(self._built(shares), [behind for _, behind in found])
            wanted = min(wanted * 2, _STEPS_AT_ONCE)

    def _make_one(self, step: Step) -> TrainingBatch:
        self._look_at_files()
        (share,) = self._placed([self._share(step)])
        return self._build(share)

    def _placed(self, shares: list[Share]) -> Iterator[Share]:
        """Shares with the places of their tokens."""
        if not shares:
            return
        rows = np.concatenate([share.samples.rows for share in shares])
        starts = np.concatenate([share.samples.starts for share in shares])
        sources = np.concatenate([share.sources for share in shares])
        places, mask_places = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        for number, table in enumerate(self._tables):
            which = slice(None) if len(self._tables) == 1 else np.flatnonzero(sources == number)
            places[which] = table.locate(rows[which], starts[which])
            if table.masked:
                mask_places[which] = table.locate_mask(rows[which], starts[which])
        tables = [Placed(table, places, mask_places) for table in self._tables]
        low = 0
        for share in shares:
            high = low + len(share.samples.rows)
            share.tables, share.first = tables, low
            yield share
            low = high

    def _built(self, shares: list[Share]) -> Iterator[TrainingBatch]:
        """Batches; small ones of rows that are all alike some at a time, since those cost by the batch."""
        at_once = self._batches_at_once(shares)
        for start in range(0, len(shares), at_once):
            self._look_at_files()
            group = shares[start : start + at_once]
            if len(group) == 1:
                yield self._build(group[0])
                continue
            first, rows = group[0], sum(len(share.samples) for share in group)
            together = Samples(
                np.arange(rows + 1),
                np.arange(first.first, first.first + rows),
                np.zeros(rows, np.int64),
                np.full(rows, first.samples.lengths[0]),
                single=True,
            )
            arrays = collate(together, first.sources, first.tables, self._form, int(together.lengths[0]))
            ids = arrays["input_ids"]
            tokens = ids.size // len(group)
            for share, part in zip(group, split_rows(arrays, len(group))):
                yield self._finish(share, part, tokens)

    def _batches_at_once(self, shares: list[Share]) -> int:
        form = self._form
        if len(shares) < 2 or len(self._tables) > 1 or form.padding_free or form.split:
            return 1
        if "num_items_in_batch" in form.fields and not form.fields & {"labels", "loss_mask"}:
            return 1  # there would be nothing to count it from
        if not all(share.step.samples.single and len(share.samples) == len(shares[0].samples) for share in shares):
            return 1
        lengths = np.concatenate([share.step.samples.lengths for share in shares])
        length = int(lengths[0]) if len(lengths) and lengths.min() == lengths.max() else 0
        if not length or width(shares[0].step.samples, form) != length:
            return 1
        return max(_BYTES_AT_ONCE // (8 * length * max(len(shares[0].samples), 1)), 1)

    def _build(self, share: Share) -> TrainingBatch:
        step, samples = share.step, share.samples
        numbered = Samples(
            samples.offsets,
            np.arange(share.first, share.first + len(samples.rows)),
            np.zeros(len(samples.rows), np.int64),
            samples.lengths,
            samples.single,
        )
        # A batch by tokens is a matter of its rank alone; others have the width of the global batch.
        tokens_in_row = width(samples if self._form.split else step.samples, self._form)
        arrays = collate(numbered, share.sources, share.tables, self._form, tokens_in_row)
        return self._finish(share, arrays, samples.tokens)

    def _finish(self, share: Share, arrays: dict[str, Any], tokens: int) -> TrainingBatch:
        """A batch of the arrays of a share."""
        step, samples = share.step, share.samples
        if "num_items_in_batch" in arrays and self.rank.world > 1:
            arrays["num_items_in_batch"] = supervised_tokens(step.samples, step.sources, self._tables)
        metadata = {
            "step": step.number,
            "epoch": step.epoch,
            "sources": step.names,
            "source": share.sources,
            "row": samples.rows,
            "sample": samples.numbers(),
        }
        options = self.options
        packed = self._form.packed or self._form.padding_free
        batch = self.batch_class.of_collated(arrays, metadata, get_backend(options.backend), tokens, packed=packed)
        return batch.pin_memory() if options.pin_memory else batch

    def _share(self, step: Step) -> Share:
        """What this rank takes of a global batch."""
        samples, rank = step.samples, self.rank
        if rank.world == 1:
            return Share(step, samples, step.sources)
        if type(self.options.dealt) is Contiguous:
            low, high = share_cuts(len(samples), rank.world)[rank.rank : rank.rank + 2].tolist()
            first, last = samples.offsets[low], samples.offsets[high]
            return Share(step, samples.slice(low, high), step.sources[first:last])
        mine = deal(self.options.dealt, samples.sizes(), rank.world)[rank.rank]
        sources = Samples(samples.offsets, step.sources, samples.starts, samples.lengths).take(mine).rows
        return Share(step, samples.take(mine), sources)

    def to_state(self, position: Position) -> dict[str, Any]:
        return to_state(self.plan, position)

    def from_state(self, state: Mapping[str, Any], *, new_batch_size: bool = False) -> Position:
        """The position that a state stands for; the plan takes on its edits."""
        self.plan, position = from_state(self.plan, state, new_batch_size=new_batch_size)
        return position

    def edit(self, plan: Plan, position: Position) -> None:
        """Go on by an edited plan; what was delivered before a position cannot change."""
        if plan.fingerprint != self.plan.fingerprint or plan.edits[: self.plan.version] != self.plan.edits:
            raise ConfigError("this plan was not made from the plan of the loader; edit loader.plan")
        for edit in plan.edits[self.plan.version :]:
            if edit.step < position.step:
                raise ConfigError(
                    f"{edit} begins before step {position.step}, which is the next; what was delivered cannot change: "
                    "let it begin with loader.step or later"
                )
        self.plan = plan

    def close(self) -> None:
        for stock in self.stocks:
            if stock.inputs.owned:
                stock.inputs.table.close()

    def _look_at_files(self) -> None:
        """Now and then, whether a shard was changed or removed under us: mapped memory would not say so."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            for table in self._tables:
                table.check_unchanged()

    def _nothing(self, count: int | None) -> PenstockError:
        if not any(feed.order.count(0) for feed in self.plan.feeds):
            return ConfigError("no row is left: truncation='drop' drops them all; pass a larger length")
        return ConfigError(
            f"an epoch has fewer samples than a global batch of {count or self.plan.global_batch}, and "
            "drop_last=True drops what does not fill a batch, so nothing would be delivered; use a smaller batch, or "
            "drop_last=False"
        )


def _common_form(forms: Sequence[BatchForm]) -> BatchForm:
    """The form of the batches of several sources together."""
    first = forms[0]
    for form in forms[1:]:
        if form != first:
            raise ConfigError(
                f"sources that are mixed share batches, so they need the same form; one has {first}, another {form}"
            )
    return first
