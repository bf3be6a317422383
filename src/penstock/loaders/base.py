"""What every loader is: a plan, the rows it is about, and a position. A batch is a function of the three alone."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from penstock.distributed.sharding import Contiguous, deal
from penstock.errors import ConfigError, PenstockError
from penstock.loaders.batch import TrainingBatch
from penstock.loaders.collation import BatchForm, collate, supervised_tokens, width
from penstock.loaders.options import Options
from penstock.loaders.stocking import Stock
from penstock.order.plan import Plan, Position, Step
from penstock.order.samples import Samples
from penstock.order.schedules import Schedule
from penstock.order.states import from_state, to_state
from penstock.pipeline.ahead import iterate_ahead
from penstock.store.gather import Placed

__all__ = ["DataLoader"]

_SLOW_SECONDS = 0.002
"""Batches that take longer to make than this are made ahead, if nothing else was asked for."""
_AHEAD = 2
_STEPS_AT_ONCE = 32
_LOOK_SECONDS = 1.0
"""How often, at most, it is looked whether the files are still what they were."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What a rank takes of a step, and where its tokens are."""

    step: Step
    samples: Samples
    sources: npt.NDArray[np.int64]
    tables: Sequence[Placed] = ()
    first: int = 0
    """The number of its first part in the tables."""


class DataLoader:
    """Batches for training, in an order that depends on the plan, the seed and the step, and on nothing else.

        with PretrainDataLoader("corpus/", tokenizer, chunk_size=2048, batch_size=8) as loader:
            for batch in loader:              # the rest of this epoch; a second loop is the next one
                loss = model(**batch).loss

    `state_dict()` after a batch stands for everything behind that batch. It is small, the same on every rank, and
    loads on any number of ranks as long as `batch_size` times `world_size` stays the same.

    As a sequence, `loader[i]` is batch i of this epoch, which is how `torch.utils.data.DataLoader` can use it with
    workers: `torch.utils.data.DataLoader(loader, batch_size=None, num_workers=2)`.
    """

    def __init__(
        self,
        stocks: Sequence[Stock],
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
        self._position = self.plan.start()
        self._looked = time.monotonic()
        self._numbers: tuple[Plan, int, Sequence[int]] | None = None
        self._running: list[Generator[Any, None, None]] = []
        self._closed = False

    # What the seed names

    def get_batch(self, batch_size: int | None = None) -> TrainingBatch:
        """The next batch, of `batch_size` samples for each rank. Goes on in the next epoch when one ends."""
        count = None if batch_size is None else _whole(batch_size) * self.rank.world
        self._check_ready()
        for _ in range(2):
            step, behind = self.plan.read(self._position, count)
            if step is not None:
                self._position, _ = self.plan.settle(behind)
                return self._make_one(step)
            if self.plan.ended(behind):
                raise EOFError("there is no batch left: every source was used as often as max_epochs allows")
            self._position = self.plan.next_epoch(behind)
        raise ConfigError(
            f"an epoch has fewer samples than a global batch of {count or self.plan.global_batch}, and drop_last=True "
            "drops what does not fill a batch, so there is none; use a smaller batch, or drop_last=False"
        )

    def get_iterator(self) -> Iterator[TrainingBatch]:
        """The batches of the rest of this epoch."""
        return iter(self)

    def get_num_batches(self) -> int:
        """Batches of this epoch. With packing, the whole epoch is planned for it on lengths, once."""
        return self.plan.delivered_in(self.epoch)

    def reset(self) -> None:
        """Back to the first step of the first epoch."""
        self._stop_running()
        self._position = self.plan.start()

    # Iteration

    def __iter__(self) -> Iterator[TrainingBatch]:
        self._check_ready()
        self._stop_running()
        running = self._iterate()
        self._running.append(running)
        return running

    def __len__(self) -> int:
        return self.get_num_batches()

    def __getitem__(self, number: int) -> TrainingBatch:
        """Batch `number` of this epoch, wherever the loader is."""
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"batch {number} of an epoch of {len(self)}")
        self._check_ready()
        steps = self._steps_of(self.epoch)
        step, _ = self.plan.read(self.plan.seek(steps[number]))
        assert step is not None
        return self._make_one(step)

    def _steps_of(self, epoch: int) -> Sequence[int]:
        """The numbers of the steps of an epoch that are delivered."""
        plan = self.plan
        if self._numbers is None or self._numbers[:2] != (plan, epoch):
            first = sum(plan.steps_in(earlier) for earlier in range(epoch))
            steps: Sequence[int] = range(first, first + plan.steps_in(epoch))
            if plan.delivered_in(epoch) < len(steps):
                steps = [step for step in steps if not plan.skipped(step)]
            self._numbers = plan, epoch, steps
        return self._numbers[2]

    @property
    def epoch(self) -> int:
        """The epoch that the next batch is from."""
        return self._position.epoch

    @property
    def step(self) -> int:
        """The number of the next batch, counted from the beginning of the first epoch."""
        return self._position.step

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; in the middle of that epoch, stay."""
        if _whole(epoch, least=0) != self.epoch:
            self._stop_running()
            self._position = self.plan.seek_epoch(epoch)

    def seek(self, step: int) -> None:
        """Go to the front of a step."""
        self._stop_running()
        self._position = self.plan.seek(step)

    def edit(self, plan: Plan) -> None:
        """Go on by an edited plan, as `loader.edit(loader.plan.skip(340, 360))`; what was delivered cannot change."""
        if plan.fingerprint != self.plan.fingerprint or plan.edits[: self.plan.version] != self.plan.edits:
            raise ConfigError("this plan was not made from the plan of the loader; edit loader.plan")
        for edit in plan.edits[self.plan.version :]:
            if edit.step < self.step:
                raise ConfigError(f"{edit} begins before step {self.step}, which is the next; that has been delivered")
        self._stop_running()
        self.plan = plan

    # State

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: behind the batch that was handed out last. JSON-able, below 4 KiB."""
        return to_state(self.plan, self._position)

    def load_state_dict(self, state: Mapping[str, Any], *, new_batch_size: bool = False) -> None:
        """Go to where another loader of the same plan was. What does not go together is refused, naming both sides."""
        plan, position = from_state(self.plan, state, new_batch_size=new_batch_size)
        self._stop_running()
        self.plan, self._position = plan, position

    # Lifetime

    def close(self) -> None:
        """Stop what is being made ahead, and let go of the files. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._stop_running()
            for table in self._tables:
                table.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes: without what runs."""
        return self.__dict__ | {"_running": []}

    def __repr__(self) -> str:
        names = ", ".join(self.plan.names)
        return f"{type(self).__name__}({names}; {self.batch_size} a batch, {self.rank}, step {self.step})"

    # How batches are made

    def _iterate(self) -> Generator[TrainingBatch, None, None]:
        made = self._make(self._position)
        prefetch = self.options.prefetch
        if prefetch is None:
            made = _ahead_if_slow(made, self.options)
        elif prefetch:
            made = iterate_ahead(made, prefetch, budget=self.options.budget, size=_bytes_of)
        try:
            for batch, behind in made:
                self._position = behind
                yield batch
        finally:
            made.close()

    def _make(self, position: Position) -> Generator[tuple[TrainingBatch, Position], None, None]:
        """The batches of the rest of an epoch, each with the position behind it.

        Steps are read some at a time, first one and then ever more, since looking up where rows lie costs by shard.
        """
        position, over = self.plan.settle(position)
        over, wanted = False, 1
        while not over:
            shares: list[_Share] = []
            ahead: list[Position] = []
            while len(shares) < wanted and not over:
                step, behind = self.plan.read(position)
                if step is None:
                    if position.at_start and not self.plan.ended(position):
                        raise self._nothing()
                    over = True
                    break
                shares.append(self._share(step))
                position, over = self.plan.settle(behind)
                ahead.append(position)
            for share, behind in zip(self._placed(shares), ahead):
                yield self._build(share), behind
            wanted = min(wanted * 2, _STEPS_AT_ONCE)

    def _make_one(self, step: Step) -> TrainingBatch:
        (share,) = self._placed([self._share(step)])
        return self._build(share)

    def _placed(self, shares: list[_Share]) -> Iterator[_Share]:
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
            yield _Share(share.step, share.samples, share.sources, tables, low)
            low = high

    def _build(self, share: _Share) -> TrainingBatch:
        self._look_at_files()
        step, samples = share.step, share.samples
        numbered = Samples(
            samples.offsets,
            np.arange(share.first, share.first + len(samples.rows)),
            np.zeros(len(samples.rows), np.int64),
            samples.lengths,
            samples.single,
        )
        arrays = collate(numbered, share.sources, share.tables, self._form, width(step.samples, self._form))
        if "num_items_in_batch" in arrays and self.rank.world > 1:
            arrays["num_items_in_batch"] = supervised_tokens(step.samples, step.sources, self._tables)
        metadata = {
            "step": step.number,
            "epoch": step.epoch,
            "sources": list(step.names),
            "source": share.sources,
            "row": samples.rows,
            "sample": samples.numbers(),
        }
        options = self.options
        batch = TrainingBatch.from_numpy(arrays, metadata, options.backend, num_tokens=samples.tokens)
        if options.pin_memory:
            batch = batch.pin_memory()
        return batch if options.device is None else batch.to(options.device, non_blocking=options.pin_memory)

    def _share(self, step: Step) -> _Share:
        """What this rank takes of a global batch."""
        samples, rank = step.samples, self.rank
        if rank.world == 1:
            return _Share(step, samples, step.sources)
        if isinstance(self.options.dealt, Contiguous):
            low, high = (len(samples) * place // rank.world for place in (rank.rank, rank.rank + 1))
            first, last = samples.offsets[low], samples.offsets[high]
            return _Share(step, samples.slice(low, high), step.sources[first:last])
        mine = deal(self.options.dealt, samples.sizes(), rank.world)[rank.rank]
        sources = Samples(samples.offsets, step.sources, samples.starts, samples.lengths).take(mine).rows
        return _Share(step, samples.take(mine), sources)

    def _check_ready(self) -> None:
        if self._closed:
            raise ValueError("the loader is closed; make a new one")

    def _look_at_files(self) -> None:
        """Now and then, whether a shard was changed or removed under us: mapped memory would not say so."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            for table in self._tables:
                table.check_unchanged()

    def _stop_running(self) -> None:
        running, self._running = self._running, []
        for generator in running:
            generator.close()

    def _nothing(self) -> PenstockError:
        return ConfigError(
            f"an epoch has fewer samples than a global batch of {self.plan.global_batch}, and drop_last=True drops "
            "what does not fill a batch, so nothing would be delivered; use a smaller batch, or drop_last=False"
        )


def _ahead_if_slow(
    made: Generator[tuple[TrainingBatch, Position], None, None], options: Options
) -> Generator[tuple[TrainingBatch, Position], None, None]:
    """Batch by batch while that is quick; made ahead by a thread once it no longer is, on average."""
    usual = 0.0
    while usual < _SLOW_SECONDS:
        started = time.thread_time()
        item = next(made, None)
        if item is None:
            return
        usual += (time.thread_time() - started - usual) / 8
        yield item
        del item
    yield from iterate_ahead(made, _AHEAD, budget=options.budget, size=_bytes_of)


def _bytes_of(item: tuple[TrainingBatch, Position]) -> int:
    return item[0].nbytes


def _common_form(forms: Sequence[BatchForm]) -> BatchForm:
    """The form of the batches of several sources together."""
    first = forms[0]
    for form in forms[1:]:
        if form != first:
            raise ConfigError(
                f"sources that are mixed share batches, so they need the same form; one has {first}, another {form}"
            )
    return first


def _whole(value: int, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(f"expected a whole number from {least} on, got {value!r}")
    return int(value)
