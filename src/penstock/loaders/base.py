"""What every loader is: something that makes batches from a position on, and a position."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

import numpy as np

from penstock.batching.batch import TrainingBatch
from penstock.batching.options import Options
from penstock.batching.transfer import DeviceTransfer
from penstock.distributed.ranks import Rank
from penstock.errors import ConfigError
from penstock.loaders.plan_engine import PlanEngine
from penstock.loaders.profile import Profile
from penstock.loaders.sampling import LoaderSource
from penstock.loaders.torch_sampler import BatchKey, EpochIterator, EpochSampler, asked_by_torch, named_batch, refuse
from penstock.order.plan import Plan
from penstock.pipeline.prefetch import ReadAhead

__all__ = ["DataLoader", "Engine"]

_SLOW_SECONDS = 0.002
"""Batches that take longer to make than this are made ahead, if nothing else was asked for."""
_AHEAD = 2
_WATCHED = 256
"""Batches of a loop whose making is timed; if they were quick, the others will be."""
Made = tuple[TrainingBatch, Any]
"""A batch, and the position behind it."""


class Engine(Protocol):
    """What makes the batches: by a plan (`PlanEngine`), or from streams (`Streamed`). Positions are its own values."""

    options: Options
    rank: Rank
    batch_size: int

    @property
    def names(self) -> str: ...
    def start(self) -> Any: ...
    def seek(self, step: int) -> Any: ...
    def seek_epoch(self, epoch: int, position: Any) -> Any: ...
    def one(self, position: Any, batch_size: int | None) -> Made: ...
    def item(self, epoch: int, number: int) -> TrainingBatch: ...
    def position_of(self, epoch: int, number: int) -> Any: ...
    def number_of(self, position: Any) -> int: ...
    def count(self, epoch: int) -> int: ...
    def batches(self, position: Any) -> Generator[Made, None, None]:
        """Closing the generator does not wait for what threads are doing; closing the engine does."""
        ...

    def to_state(self, position: Any) -> dict[str, Any]: ...
    def from_state(self, state: Mapping[str, Any], *, new_batch_size: bool = False) -> Any: ...
    def close(self) -> None: ...


class DataLoader:
    """Batches for training, in an order that depends on the plan, the seed and the step, and on nothing else.

        with PretrainDataLoader("corpus/", tokenizer, chunk_size=2048, batch_size=8) as loader:
            for batch in loader:              # the rest of this epoch; a second loop is the next one
                loss = model(**batch).loss

    `state_dict()` after a batch stands for everything behind that batch. It is small, the same on every rank, and
    loads on any number of ranks as long as `batch_size` times `world_size` stays the same.

    With `device=`, a batch may be used on the stream that is current where it is taken: see `DeviceTransfer`.

    As a sequence, `loader[i]` is batch i of this epoch. Worker processes of torch get batches by name, epoch after
    epoch: `torch.utils.data.DataLoader(loader, batch_size=None, sampler=loader.sampler(), num_workers=2)`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._position = engine, engine.start()
        self._making: _Making | None = None
        self._turn = 0
        """Counts loops, so that one notices that it is no longer its turn."""
        self._moves = 0
        self._loop: EpochIterator | None = None
        """What gave torch's DataLoader the names of batches last, unless the loader was moved since."""
        self._closed = False
        self._edits = 0
        """How often the plan was edited, so that a loop notices."""
        self._profile: Profile | None = None

    # What the seed names

    def get_batch(self, batch_size: int | None = None) -> TrainingBatch:
        """The next batch, of `batch_size` samples for each rank. Goes on in the next epoch when one ends."""
        self._check_ready()
        profile = self._profile
        if profile is not None:
            profile.asked()
        self._leave_loop()
        made, behind = self._engine.one(self._position, None if batch_size is None else _whole(batch_size))
        batch = DeviceTransfer(self.options).move(made)
        self._move(behind)
        if profile is not None:
            profile.given(batch)
        return batch

    def get_iterator(self) -> Iterator[TrainingBatch]:
        """The batches of the rest of this epoch."""
        return iter(self)

    def get_num_batches(self) -> int:
        """Batches of this epoch. With packing, the whole epoch is planned for it on lengths, once."""
        self._check_ready()
        return self._engine.count(self.epoch)

    def reset(self) -> None:
        """Back to the first step of the first epoch."""
        self._move(self._engine.start())

    # Iteration

    def __iter__(self) -> Iterator[TrainingBatch]:
        self._check_ready()
        self._leave_loop()
        self._turn += 1
        self._end_making()
        return self._iterate(self._turn)

    def __len__(self) -> int:
        return self.get_num_batches()

    def __bool__(self) -> bool:
        return True  # and not the length, which a stream does not know

    def __getitem__(self, number: int) -> TrainingBatch:
        """Batch `number` of this epoch, wherever the loader is; or that of a key of `sampler()`."""
        self._check_ready()
        if isinstance(number, BatchKey):
            return DeviceTransfer(self.options).move(named_batch(self, number))
        if asked_by_torch():
            refuse(
                f"asked for item {number!r}, which does not say of which epoch: every epoch would be the first again"
            )
        count = len(self)
        if not -count <= number < count:
            raise IndexError(f"batch {number} of an epoch of {count}")
        return DeviceTransfer(self.options).move(self._engine.item(self.epoch, number % count))

    def __getitems__(self, keys: Any) -> NoReturn:
        """What torch's DataLoader calls to make one batch of several items."""
        refuse("wants to collate batches into larger ones, and they are complete")

    def sampler(self) -> EpochSampler:
        """What torch's DataLoader goes by: each loop over it is an epoch of this loader, the next loop the next one.

        DataLoader(loader, batch_size=None, sampler=loader.sampler(), num_workers=2)
        """
        return EpochSampler(self)

    @property
    def options(self) -> Options:
        return self._engine.options

    @property
    def rank(self) -> Rank:
        return self._engine.rank

    @property
    def batch_size(self) -> int:
        """Samples of a batch of this rank."""
        return self._engine.batch_size

    @property
    def drop_last(self) -> bool:
        return self.options.drop_last

    @property
    def plan(self) -> Plan:
        """The order of everything; see `Plan.step` and `Plan.trace`."""
        return self._indexed().plan

    @property
    def stocks(self) -> tuple[LoaderSource, ...]:
        """The sources."""
        return self._indexed().stocks

    @property
    def epoch(self) -> int:
        """The epoch that the next batch is from."""
        return int(self._position.epoch)

    @property
    def step(self) -> int:
        """The number of the next batch, counted from the beginning of the first epoch."""
        return int(self._position.step)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; in the middle of that epoch, stay."""
        if _whole(epoch, least=0) != self.epoch or self._loop is not None:
            self._move(self._engine.seek_epoch(epoch, self._position))

    def seek(self, step: int) -> None:
        """Go to the front of a step."""
        self._check_ready()
        self._move(self._engine.seek(_whole(step, least=0)))

    def edit(self, plan: Plan) -> None:
        """Go on by an edited plan, as `loader.edit(loader.plan.skip(340, 360))`; what was delivered cannot change.

        A loop that is running goes on by it too.
        """
        self._indexed().edit(plan, self._position)
        self._position = plan.settle(self._position)[0]
        self._edits += 1

    # State

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: behind the batch that was handed out last. JSON-able, below 4 KiB."""
        return self._engine.to_state(self._position if self._loop is None else self._loop.position())

    def load_state_dict(self, state: Mapping[str, Any], *, new_batch_size: bool = False) -> None:
        """Go to where another loader of the same plan was. What does not go together is refused, naming both sides."""
        self._move(self._engine.from_state(state, new_batch_size=new_batch_size))

    # Profiling

    def enable_profiling(self) -> None:
        """Count from here on where the time goes, anew if it was counted already. A loop that is running is included.

        Costs a few microseconds a batch. What is done to make a batch is counted from the next loop on.
        """
        self._profile = Profile()
        self._watch(self._profile)

    def disable_profiling(self) -> None:
        """Count no more; the results so far are gone."""
        self._profile = None
        self._watch(None)

    def get_profiling_results(self) -> dict[str, Any]:
        """What was counted since `enable_profiling`.

        throughput_samples_per_sec, tokens_per_sec, avg_batch_time_ms     of the loop, training included
        batches, samples, tokens, seconds                                 how much it was
        padding_share                                                     of the places in the batches
        stages      shares of the time: `wait` (for batches) and `train` (the body of the loop) are all of it; the
                    others say what was done to make batches, in whatever thread, and may add up to more or less
        advice      one sentence about what would help most
        """
        if self._profile is None:
            raise ConfigError("profiling is not enabled; call enable_profiling() and loop over the loader first")
        return self._profile.results(**self._profile_facts())

    def _watch(self, profile: Profile | None) -> None:
        """For loaders whose engines say what they spend time on."""

    def _profile_facts(self) -> dict[str, Any]:
        """What a loader knows about itself that advice depends on."""
        return {}

    # Lifetime

    def close(self) -> None:
        """Stop what is being made ahead, and let go of the files. A second call does nothing."""
        if not self._closed:
            self._turn += 1
            try:
                self._end_making()
            finally:
                self._closed = True
                self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes: without what runs."""
        return self.__dict__ | {"_making": None, "_profile": None, "_loop": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._engine.names}; {self.batch_size} a batch, {self.rank}, step {self.step})"

    def _iterate(self, turn: int) -> Generator[TrainingBatch, None, None]:
        """The rest of an epoch; begun anew from where the loader is, whenever it is moved or its plan is edited."""
        while True:
            moves, edits = self._moves, self._edits
            profile = self._profile
            if profile is not None:
                profile.asked()
            transfer = DeviceTransfer(self.options)  # here, in the thread that uses the batches
            made = transfer.send_all(self._engine.batches(self._position))
            making = self._making = _Making(made if profile is None else profile.making(made), self.options)
            epoch = self.epoch
            try:
                for batch, behind in making:
                    transfer.receive(batch)
                    self._position, epoch = behind, batch.metadata["epoch"]
                    if self._profile is not None:
                        self._profile.given(batch)
                    yield batch
                    del batch
                    if self._profile is not None:
                        self._profile.asked()
                    if self._turn != turn:
                        raise RuntimeError(
                            "the loader was closed, or another loop over it begun, so this one cannot go on; use a "
                            "loader of its own for each loop"
                        )
                    if (self._moves, self._edits) != (moves, edits):
                        break
                else:
                    return
            finally:
                making.stop()
                if self._profile is not None:
                    self._profile.left()
            if self._moves == moves and self.epoch != epoch:
                return  # an edit left nothing of the epoch

    def _indexed(self) -> PlanEngine:
        if not isinstance(self._engine, PlanEngine):
            raise ConfigError("a stream is read as it comes and has no plan; use streaming=False")
        return self._engine

    def _check_ready(self) -> None:
        if self._closed:
            raise ValueError("the loader is closed; make a new one")

    def _move(self, position: Any) -> None:
        """Go somewhere else; a loop that is running goes on there."""
        self._moves += 1
        self._end_making()
        self._position, self._loop = position, None

    def _leave_loop(self) -> None:
        """Go to where torch's DataLoader is, if that is known, and on from there without it."""
        if self._loop is not None:
            self._position, self._loop = self._loop.position(), None

    def _end_making(self) -> None:
        making, self._making = self._making, None
        if making is not None:
            making.close()


class _Making:
    """Batches as they are made: ahead of time by a thread if that is asked for, or if making them takes long."""

    def __init__(self, made: Generator[Made, None, None], options: Options) -> None:
        self._made, self._options = made, options
        self._ahead: ReadAhead[Made] | None = None
        self._usual = 0.0
        self._watched = _WATCHED if options.prefetch is None else 0
        if options.prefetch:
            self._begin(options.prefetch)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Made:
        if self._ahead is not None:
            return next(self._ahead)
        if not self._watched:
            return next(self._made)
        self._watched -= 1
        started = time.thread_time()
        item = next(self._made)
        # One slow batch, as the first is, is not reason enough for a thread.
        self._usual += (min(time.thread_time() - started, 4 * _SLOW_SECONDS) - self._usual) / 8
        if self._usual > _SLOW_SECONDS:
            self._begin(_AHEAD)
        return item

    def stop(self) -> None:
        """Without waiting for the batch that is being made."""
        if self._ahead is not None:
            self._ahead.stop()
        self._let_go()

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._let_go()

    def _let_go(self) -> None:
        with suppress(ValueError):  # it is running: then whoever runs it ends it
            self._made.close()

    def _begin(self, most: int) -> None:
        self._ahead = ReadAhead(self._made, most, budget=self._options.budget, size=lambda item: item[0].nbytes)


def _whole(value: int, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(f"expected a whole number from {least} on, got {value!r}")
    return int(value)
