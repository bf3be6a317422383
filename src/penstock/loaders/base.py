"""Base of all loaders: four methods to write, or an engine that makes batches from a position on."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self, runtime_checkable

import numpy as np

from penstock._forks import check_process
from penstock.arrays.truncation import Truncation
from penstock.batching.batch import TrainingBatch
from penstock.batching.context import ContextSlice
from penstock.batching.device import DeviceTransfer
from penstock.batching.options import Options, show_options
from penstock.distributed.ranks import Rank
from penstock.errors import ConfigError
from penstock.loaders.adapters import BatchKey, EpochIterator, EpochSampler, batch_of, called_by_torch, refuse
from penstock.loaders.counters import LoaderCounters
from penstock.loaders.plan_engine import PlanEngine
from penstock.loaders.profile import Profile
from penstock.loaders.source import LoaderSource
from penstock.metrics.readings import name_of
from penstock.metrics.targets import MetricsConfig
from penstock.metrics.watch import MetricsWatch
from penstock.order.plan import Plan
from penstock.pipeline.event_loop import AsyncBatches, CallThread
from penstock.pipeline.prefetch import ReadAhead

log = logging.getLogger(__name__)
_SLOW_SECONDS = 0.002
"""Batches that take longer than this are prefetched, unless `prefetch` is set."""
_PREFETCH = 2
_GRACE_SECONDS = 1.0
"""Longest wait of a cancelled task for the batch that is being made."""
_TIMED_BATCHES = 256
"""Batches of a loop whose preparation is timed."""
_AT_HAND, _AT_HAND_BYTES = 8, 4 << 20
"""Batches at hand that are taken at a time, and their bytes."""
_FIXED = frozenset({"options", "rank", "batch_size", "drop_last"})
"""Attributes that the batches of an engine do not follow."""
Made = tuple[TrainingBatch, Any]
"""A batch, and the next position."""


class Engine(Protocol):
    """Maker of batches: from a plan, from streams, from samples or from rollouts. Positions are its own values."""

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
        """Rest of an epoch. Closing the generator does not wait for its threads; closing the engine does."""
        ...

    def to_state(self, position: Any) -> dict[str, Any]: ...
    def from_state(self, state: Mapping[str, Any], *, new_batch_size: bool = False) -> Any: ...
    def close(self) -> None: ...


@runtime_checkable
class _Interruptible(Protocol):
    """An engine that may wait for rows. If `interrupt` returns True it has to be closed, and works again then."""

    def interrupt(self) -> bool: ...


@runtime_checkable
class _Counting(Protocol):
    """An engine that counts the rows it reads."""

    def readings(self) -> dict[str, float]: ...


@runtime_checkable
class _Streaming(Protocol):
    """An engine whose batches name the files that they are of."""

    def many_files(self) -> bool: ...


@runtime_checkable
class _Supplying(Protocol):
    """An engine that may have batches at hand."""

    @property
    def at_hand(self) -> int:
        """Batches after the last one that need neither work nor waiting."""
        ...

    @property
    def elsewhere(self) -> bool:
        """True if other processes make the batches."""
        ...


class DataLoader:
    """Batches for training, in an order that depends on nothing but the plan, the seed and the step.

        with PretrainDataLoader("corpus/", tokenizer, chunk_size=2048, batch_size=8) as loader:
            for batch in loader:              # the rest of this epoch; the next loop is the next epoch
                loss = model(**batch).loss

    `state_dict()` after a batch is the position after that batch. It is small, equal on every rank, and loads on any
    number of ranks as long as `batch_size` times `world_size` stays the same.

    As a sequence, `loader[i]` is batch i of this epoch. Worker processes of torch get batches by key:
    `torch.utils.data.DataLoader(loader, batch_size=None, sampler=loader.sampler(), num_workers=2)`.

    A loader of your own needs four methods: `get_batch`, `get_iterator`, `get_num_batches` and `reset`. It gets loops,
    `len`, `with`, and a place in a `MixedDataLoader`. The other methods need an engine, which penstock's loaders have.
    """

    # Defaults for subclasses that do not call __init__.
    _engine: Engine = None  # type: ignore[assignment]
    _position: Any = None
    _prefetcher: _Prefetcher | None = None
    _closed = False
    _profile: Profile | None = None
    _calls: CallThread | None = None
    _counters: LoaderCounters | None = None
    _metrics_watch: MetricsWatch | None = None
    _context: ContextSlice | None = None
    _metrics_kind = "loader"

    def __init_subclass__(
        cls, options: tuple[type[Any], ...] = (), without: Collection[str] = (), **keywords: Any
    ) -> None:
        """`options` are the dataclasses that `__init__` takes as `**options`: `help` and `signature` show their fields,
        but not those in `without`."""
        super().__init_subclass__(**keywords)
        if options:
            show_options(cls, options, without)

    def __init__(self, engine: Engine) -> None:
        self.options, self.rank = engine.options, engine.rank
        self.batch_size, self.drop_last = engine.batch_size, engine.options.drop_last
        self._context = engine.options.context_slice  # now: a worker process does not know its rank
        self._engine, self._position = engine, engine.start()
        self._loops = 0
        """Number of loops so far: an earlier loop is over when another begins."""
        self._moves = 0
        self._edits = 0
        """Number of edits of the plan so far: a running loop follows them."""
        self._loop: EpochIterator | None = None
        """Loop of torch's DataLoader that got the last keys, unless the loader was moved since."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and self._engine is not None:
            raise AttributeError(f"{name} of a loader cannot be changed; make another loader with {name}={value!r}")
        super().__setattr__(name, value)

    # The four methods of the interface

    def get_batch(self, batch_size: int | None = None) -> TrainingBatch:
        """Next batch, of `batch_size` samples for each rank. Continues with the next epoch when one ends.

        The last batch of an epoch has the samples that are left. A `batch_size` larger than an epoch is an error.
        """
        self._check_ready()
        profile, counters = self._profile, self._watched()
        if profile is not None:
            profile.wait()
        counters.request()
        self._leave_loop()
        made, following = self._engine.one(self._position, None if batch_size is None else _integer(batch_size))
        batch = DeviceTransfer(self.options, self._context).move(made)
        self._move(following)
        counters.deliver(batch)
        if profile is not None:
            profile.deliver(batch)
        return batch

    def get_iterator(self) -> Iterator[TrainingBatch]:
        """Batches of the rest of this epoch."""
        return self._begin_loop()

    def get_num_batches(self) -> int:
        """Number of batches of this epoch. With packing, plans the whole epoch on lengths, once."""
        self._check_ready()
        return self._engine.count(self.epoch)

    def num_batches_of_epoch(self, epoch: int) -> int:
        """Number of batches of any epoch; a subclass that counts its batches itself has as many in every one."""
        if type(self).get_num_batches is not DataLoader.get_num_batches:
            return self.get_num_batches()
        self._check_ready()
        return self._engine.count(_integer(epoch, least=0))

    def reset(self) -> None:
        """Go back to the first step of the first epoch."""
        self._check_ready()
        self._move(self._engine.start())

    # Iteration

    def __iter__(self) -> Iterator[TrainingBatch]:
        return self.get_iterator()

    def __aiter__(self) -> AsyncBatches[TrainingBatch]:
        """Batches of the rest of this epoch for `async for`; the event loop is free while one is awaited.

        Leaving the loop, or cancelling its task, leaves the loader after the last batch that was delivered.
        """
        if self._calls is None:
            self._calls = CallThread()
        own = type(self).get_iterator is not DataLoader.get_iterator
        # Here, in the thread that uses the batches.
        transfer = None if own else DeviceTransfer(self.options, self._context)
        loop = 0
        interrupted = False

        def begin(_: object) -> Iterator[TrainingBatch]:
            nonlocal loop
            if transfer is None:
                return self.get_iterator()
            batches = self._begin_loop(transfer)
            loop = self._loops
            return follow(batches)

        def follow(batches: Generator[TrainingBatch, None, None]) -> Iterator[TrainingBatch]:
            try:
                yield from batches
            finally:
                if interrupted:
                    self._engine.close()

        def stop() -> None:
            nonlocal interrupted
            if loop and loop == self._loops:
                self._loops += 1
                interrupted = isinstance(self._engine, _Interruptible) and self._engine.interrupt()

        def rewind(position: Any) -> None:
            self._position = position

        return AsyncBatches(
            self._calls,
            begin,
            stop=stop,
            mark=lambda: self._position,
            rewind=rewind,
            receive=None if transfer is None else transfer.receive,
            grace_seconds=_GRACE_SECONDS,
        )

    def __len__(self) -> int:
        return self.get_num_batches()

    def __bool__(self) -> bool:
        return True  # not the length, which a stream does not know

    def __getitem__(self, number: int) -> TrainingBatch:
        """Batch `number` of this epoch, at any position of the loader; or the batch of a key of `sampler()`."""
        self._check_ready()
        if isinstance(number, BatchKey):
            # A worker process of torch counts nothing: nobody would ask it.
            counters = self._watched() if self._loop is not None and self._loop.in_process else None
            if counters is not None:
                counters.request()
            batch = DeviceTransfer(self.options, self._context).move(batch_of(self, number))
            if counters is not None:
                counters.deliver(batch)
            return batch
        if called_by_torch():
            refuse(f"requested item {number!r} without an epoch, so that every epoch would repeat the first")
        if not isinstance(number, (int, np.integer)):
            raise TypeError(f"loader[i] takes the number of a batch, got {number!r}; use itertools.islice for several")
        count = len(self)
        if not -count <= number < count:
            raise IndexError(f"batch {number} does not exist; the epoch has {count} batches")
        return DeviceTransfer(self.options, self._context).move(self._engine.item(self.epoch, number % count))

    def __getitems__(self, keys: Any) -> NoReturn:
        """Called by torch's DataLoader to collate several items into one batch."""
        refuse("collates items into batches, and these are batches already")

    def sampler(self) -> EpochSampler:
        """Sampler for torch's DataLoader: each loop over it is the next epoch of this loader.

        DataLoader(loader, batch_size=None, sampler=loader.sampler(), num_workers=2)
        """
        return EpochSampler(self)

    @property
    def plan(self) -> Plan:
        """Plan of all steps; see `Plan.step` and `Plan.trace`."""
        return self._plan_engine().plan

    @property
    def sources(self) -> tuple[LoaderSource, ...]:
        """Sources of the plan, with their rows."""
        return self._plan_engine().sources

    @property
    def epoch(self) -> int:
        """Epoch of the next batch."""
        self._ready()
        return int(self._position.epoch)

    @property
    def step(self) -> int:
        """Number of the next batch, counted from the beginning of the first epoch."""
        self._ready()
        return int(self._position.step)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; within that epoch, stay."""
        if _integer(epoch, least=0) != self.epoch or self._loop is not None:
            self._move(self._engine.seek_epoch(epoch, self._position))

    def seek(self, step: int) -> None:
        """Go to the position before a step."""
        self._check_ready()
        self._move(self._engine.seek(_integer(step, least=0)))

    def edit(self, plan: Plan) -> None:
        """Continue with an edited plan, such as `loader.plan.skip(340, 360)`; delivered steps cannot change.

        A running loop follows it too.
        """
        self._plan_engine().edit(plan, self._position)
        self._position = plan.next_delivered(self._position)
        self._edits += 1

    # State

    def state_dict(self) -> dict[str, Any]:
        """Position after the last delivered batch, as plain values below 4 KiB."""
        self._check_ready(closed_too=True)
        return self._engine.to_state(self._position if self._loop is None else self._loop.position())

    def load_state_dict(self, state: Mapping[str, Any], *, new_batch_size: bool = False) -> None:
        """Go to the position of a state. A state of another plan is refused, with what differs."""
        self._check_ready(closed_too=True)
        self._move(self._engine.from_state(state, new_batch_size=new_batch_size))

    # Profiling

    def enable_profiling(self) -> None:
        """Measure where the time goes from now on, in a running loop too. Costs a few microseconds a batch."""
        self._profile = Profile()
        self._watch(self._profile)

    def disable_profiling(self) -> None:
        """Stop measuring, and forget the results."""
        self._profile = None
        self._watch(None)

    def get_profiling_results(self) -> dict[str, Any]:
        """Measurements since `enable_profiling`.

        throughput_samples_per_sec, tokens_per_sec, avg_batch_time_ms     of the loop, training included
        batches, samples, tokens, seconds                                 totals
        padding_share                                                     of the places in the batches
        stages      shares of the time: `wait` (for batches) and `train` (body of the loop) add up to 1; the others are
                    parts of making batches, in any thread, and may add up to more or less
        advice      one sentence on what would help most
        """
        if self._profile is None:
            raise ConfigError("profiling is not enabled; call enable_profiling() and loop over the loader first")
        return self._profile.results(**self._profile_facts())

    # Metrics

    def metrics(self) -> dict[str, float]:
        """Metrics of this process under the names that exporters use: steps, tokens, waiting, padding, mixture.

        Any thread may ask, at any time; see docs/metrics.md. Without a batch so far, and for a loader of your own, the
        dict is empty. Batches that worker processes of torch make are not counted.
        """
        counters = self._counters
        found = {} if counters is None or self._engine is None else counters.readings()
        return found | self._more_metrics() if found else found

    def _more_metrics(self) -> dict[str, float]:
        """Metrics of the position, the prefetching and the budget."""
        loop, counters = self._loop, self._counters
        last = None if loop is None or loop.over or counters is None else counters.last
        step, epoch = (self.step, self.epoch) if last is None else (last[0] + 1, last[1])
        found: dict[str, float] = {"penstock_loader_step": step, "penstock_loader_epoch": epoch}
        prefetcher, budget = self._prefetcher, self.options.memory
        if isinstance(self._engine, _Counting):
            found |= (rows := self._engine.readings())
            lost = (value for key, value in rows.items() if name_of(key) == "penstock_pipeline_tokens_dropped_total")
            found["penstock_loader_truncated_tokens_total"] = sum(lost)
        if prefetcher is not None:
            found["penstock_loader_prefetched_batches"] = prefetcher.ready
        if budget is not None:
            for name in ("used", "limit", "peak"):
                found[f"penstock_loader_budget_{name}_bytes"] = getattr(budget, name)
        return found

    def _watched(self) -> LoaderCounters:
        """Counters of this process; the first time, exporters begin too."""
        if self._counters is None:
            many_files = self._engine.many_files if isinstance(self._engine, _Streaming) else None
            self._counters = LoaderCounters(_cuts_of(self._engine), many_files)
            config = self.options.metrics
            if isinstance(config, MetricsConfig):
                self._metrics_watch = self._watch_metrics(config)
                self._counters.spans = self._metrics_watch.spans
        return self._counters

    def _watch_metrics(self, config: MetricsConfig) -> MetricsWatch:
        loader = weakref.ref(self)  # a loader that is forgotten must not live as long as its watch

        def read() -> dict[str, float] | None:
            here = loader()
            return None if here is None or here._closed else here.metrics()

        kind = self._metrics_kind
        return config.watch(kind, type(self).__name__, read, description=repr(self), rank=self.rank.rank)

    def _watch(self, profile: Profile | None) -> None:
        """Hook for loaders whose engines measure their own stages."""

    def _profile_facts(self) -> dict[str, Any]:
        """Facts of a loader that the advice depends on."""
        return {}

    # Lifetime

    def close(self) -> None:
        """Stop prefetching and close the files. A second call does nothing."""
        if self._engine is not None and not self._closed:
            self._loops += 1
            if self._counters is not None:
                self._counters.stop()
            if self._metrics_watch is not None:
                self._metrics_watch.end()
            try:
                self._end_prefetch()
            finally:
                self._closed = True
                self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None and self._metrics_watch is not None:
            self._metrics_watch.end(error=error)
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """State for worker processes, without what runs in this one."""
        running = {"_prefetcher": None, "_profile": None, "_loop": None, "_calls": None}
        running |= {"_counters": None, "_metrics_watch": None}
        return self.__dict__ | (running if self._engine is not None else {})

    def __repr__(self) -> str:
        name = type(self).__name__
        if self._engine is None:
            return f"{name}()"
        facts = [f"{self.batch_size} a batch", str(self.rank), f"step {self.step}"]
        facts += [workers] if (workers := getattr(self._engine, "workers", None)) else []  # of a stream
        return f"{name}({self._engine.names}; {', '.join(facts)})"

    def _begin_loop(self, receiver: DeviceTransfer | None = None) -> Generator[TrainingBatch, None, None]:
        self._check_ready()
        self._leave_loop()
        self._loops += 1
        self._end_prefetch()
        return self._iterate(self._loops, receiver)

    def _iterate(self, loop: int, receiver: DeviceTransfer | None) -> Generator[TrainingBatch, None, None]:
        """Rest of an epoch; continues at the new position whenever the loader is moved or its plan is edited.

        With a `receiver` another thread receives the batches.
        """
        process, counters, mine = os.getpid(), self._watched(), vars(self)
        while True:
            moves, edits = self._moves, self._edits
            profile = self._profile
            if profile is not None:
                profile.wait()
            counters.request()
            # Here, in the thread that uses the batches.
            transfer = receiver or DeviceTransfer(self.options, self._context)
            receive = transfer.receive if receiver is None and not transfer.idle else None
            made = _several(self._engine.batches(self._position), self._engine, transfer)
            prefetcher = _Prefetcher(made if profile is None else profile.timed(made), self.options, self._engine)
            self._prefetcher, epoch = prefetcher, self.epoch
            log.debug("%r: epoch %d, a loop begins", self, epoch)
            began, count = time.monotonic(), 0
            try:
                for batch, following in prefetcher:
                    count += 1
                    if receive is not None:
                        receive(batch)
                    elif receiver is not None and self._loops != loop:
                        return  # nobody waits for it: it is the next one again
                    mine["_position"], epoch = following, batch.metadata["epoch"]
                    if self._profile is not None:
                        self._profile.deliver(batch)
                    counters.deliver(batch)
                    yield batch
                    del batch
                    check_process(process, "this loop over a loader")
                    if self._profile is not None:
                        self._profile.wait()
                    counters.request()
                    if self._loops != loop:
                        raise RuntimeError(
                            "this loop is over: the loader was closed, or another loop over it began; use one loader "
                            "for each loop"
                        )
                    if self._moves != moves or self._edits != edits:
                        break
                else:
                    log.debug("%r: epoch %d ends, %d batches in %.3f s", self, epoch, count, time.monotonic() - began)
                    return
            finally:
                prefetcher.stop()
                counters.stop()
                if self._profile is not None:
                    self._profile.stop()
            if self._moves == moves and self.epoch != epoch:
                return  # an edit left nothing of the epoch

    def _plan_engine(self) -> PlanEngine:
        self._check_ready(closed_too=True)
        if not isinstance(self._engine, PlanEngine):
            raise ConfigError(f"{type(self).__name__} has no plan; loaders of prepared data have one (streaming=False)")
        return self._engine

    def _ready(self) -> Engine:
        """The engine; an error if there is none."""
        self._check_ready(closed_too=True)
        return self._engine

    def _check_ready(self, *, closed_too: bool = False) -> None:
        if self._engine is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no engine; a loader of your own defines get_batch, get_iterator, "
                "get_num_batches and reset"
            )
        if self._closed and not closed_too:
            raise ValueError("the loader is closed; make a new one")

    def _move(self, position: Any) -> None:
        """Go to another position; a running loop continues there."""
        self._moves += 1
        self._end_prefetch()
        self._position, self._loop = position, None

    def _leave_loop(self) -> None:
        """Go to the position of torch's DataLoader, if it is known, and continue without it."""
        if self._loop is not None:
            self._position, self._loop = self._loop.position(), None

    def _end_prefetch(self) -> None:
        prefetcher, self._prefetcher = self._prefetcher, None
        if prefetcher is not None:
            prefetcher.close()


class _Prefetcher:
    """Batches of a loop: prefetched by a thread if `prefetch` says so, or if making them turns out to be slow."""

    def __init__(self, made: Generator[Made, None, None], options: Options, engine: Engine) -> None:
        self._made, self._options = made, options
        self._engine = engine if isinstance(engine, _Supplying) else None
        self._ahead: ReadAhead[Made] | None = None
        self._fields = _FieldMaking()
        self._seconds = 0.0
        """Running mean of the time a batch takes."""
        self._timed = _TIMED_BATCHES if options.prefetch is None else 0
        if options.prefetch:
            self._begin(options.prefetch)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Made:
        if self._ahead is not None:
            if (item := self._next_ahead(self._ahead)) is not None:
                return item
            self._end_thread()
        if not self._timed:
            return next(self._made)
        self._timed -= 1
        started = time.thread_time()
        item = next(self._made)
        # One slow batch, such as the first, is no reason for a thread.
        self._seconds += (min(time.thread_time() - started, 4 * _SLOW_SECONDS) - self._seconds) / 8
        if self._seconds > _SLOW_SECONDS:
            self._begin(_PREFETCH)
        return item

    @property
    def ready(self) -> int:
        """Batches that are prepared."""
        return 0 if self._ahead is None else self._ahead.ready

    def stop(self) -> None:
        """End without waiting for the batch in progress."""
        if self._ahead is not None:
            self._ahead.stop()
        self._close_generator()

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._close_generator()

    def _close_generator(self) -> None:
        with suppress(ValueError):  # it is running: its thread closes it
            self._made.close()

    def _begin(self, most: int) -> None:
        if self._options.device is None:
            self._made = _with_fields(self._made, self._fields)
        self._fields.wanted = True
        self._ahead = ReadAhead(self._made, most, budget=self._options.memory, size=lambda item: item[0].nbytes)

    def _next_ahead(self, ahead: ReadAhead[Made]) -> Made | None:
        """The next batch of the thread; None if the thread has ended, and this one goes on."""
        if self._options.prefetch is None and self._engine is not None and self._engine.elsewhere:
            ahead.finish()  # a thread beside the trainer would only take its turns in the interpreter
        try:
            return next(ahead)
        except StopIteration:
            if ahead.handed_back:
                return None
            raise

    def _end_thread(self) -> None:
        assert self._ahead is not None
        self._ahead.close()
        self._ahead, self._fields.wanted, self._timed = None, False, 0


def _several(
    made: Generator[Made, None, None], engine: Engine, transfer: DeviceTransfer
) -> Generator[Made, None, None]:
    """Batches on the device. Those that are at hand are taken and sent several at a time.

    Between two steps of a training nothing of a loader is in the caches of the processor: one batch after the other
    takes a fraction of the time that each takes by itself.
    """
    supplying = engine if isinstance(engine, _Supplying) else None
    waiting: deque[Made] = deque()
    over = False
    try:
        if supplying is None and transfer.idle:
            yield from made
            return
        if supplying is None:
            yield from ((transfer.send(batch), following) for batch, following in made)
            return
        while not over:
            error: Exception | None = None
            if (first := next(made, None)) is None:
                return
            waiting.append(first)
            at_hand = supplying.at_hand
            most = min(at_hand, _AT_HAND, _AT_HAND_BYTES // max(first[0].nbytes, 1)) if at_hand else 0
            del first
            try:
                waiting.extend(islice(made, most))
            except Exception as found:  # noqa: BLE001 - it is raised in its place in the order
                error = found
            over = 0 < most >= len(waiting)
            sent = transfer.send_several([batch for batch, _ in waiting])
            waiting = deque(zip(sent, [position for _, position in waiting]))
            del sent
            while waiting:
                yield waiting.popleft()
            if error is not None:
                raise error
    finally:
        made.close()


class _FieldMaking:
    """Switch: a thread makes the fields of batches ahead of their reader."""

    wanted = False


def _with_fields(made: Generator[Made, None, None], making: _FieldMaking) -> Generator[Made, None, None]:
    """Batches with all their fields, made by the thread that iterates. On a device they are made by their reader."""
    try:
        for batch, following in made:
            yield (batch.make_fields() if making.wanted else batch), following
            del batch
    finally:
        with suppress(ValueError):  # the thread that stops the loop is closing it
            made.close()


def _cuts_of(engine: Engine) -> list[tuple[Truncation, Any] | None]:
    """Truncation and row lengths of each source of a plan; None for those that cut nothing off."""
    if type(engine) is not PlanEngine:  # those of preferences cut each side by itself
        return []
    found: list[tuple[Truncation, Any] | None] = []
    for source in engine.sources:
        order = source.plan_source.order
        cut = getattr(order, "truncation", None)
        if cut is not None and (cut.max_length is None or cut.policy not in ("left", "right")):
            cut = None
        found.append(None if cut is None else (cut, order.table.lengths))
    return found


def _integer(value: int, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(f"expected an integer of at least {least}, got {value!r}")
    return int(value)
