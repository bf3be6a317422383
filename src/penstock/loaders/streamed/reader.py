"""Batches of tokens from files that are read, tokenised and packed on the way: `streaming=True`.

    reader = StreamReader(Recipe(tokenizer="model/"), "corpus/*.jsonl", Sampling(...), form, global_batch=64)
    position = reader.start()
    while (step := reader.next(position)) is not None:
        train(step.arrays)
        position = step.position
    reader.to_state(position)

The input is cut into blocks by file sizes alone. A fixed number of streams, on any number of ranks, share the
blocks, which are assigned anew in every epoch. Each stream reads its blocks, shuffles rows in windows, tokenises and
packs by itself, as a pure function of (seed, epoch, stream). Each slot of a global batch is always filled by the same
streams, so a rank reads only what its slots need. Every row comes exactly once an epoch.

Without `shuffle` the streams still take turns, so rows come in the order of the files only within a stream.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

import orjson
import xxhash

from penstock.batching.collate import BatchLayout
from penstock.corpus.recipe import Recipe
from penstock.distributed.ranks import Rank
from penstock.distributed.synchronization import DirectoryRendezvous, EndOfEpoch, Rendezvous, find_rendezvous
from penstock.errors import ConfigError, ResumeError
from penstock.files.listing import PathLike
from penstock.files.states import StateFormat
from penstock.loaders.source import Sampling
from penstock.loaders.streamed.catalog import Catalog, OpenedInput, open_input_rows
from penstock.loaders.streamed.rows import WindowSampling
from penstock.loaders.streamed.stream import SampledWindow, Stream, StreamLane, collate_samples
from penstock.loaders.streamed.windows import BlockSequence, StreamCounts, StreamCursor, WindowBuilder, WindowLimits
from penstock.memory import MemoryBudget
from penstock.memory.budget import parse_bytes
from penstock.pipeline.prefetch import Background
from penstock.pipeline.stages import Fitting

__all__ = ["StreamOptions", "StreamPosition", "StreamReader", "StreamStep"]

VERSION = 1
_STATE = StateFormat("streams", "a loader with streaming=True")


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Options of `streaming=True`. Only `streams` and the window sizes change the batches."""

    streams: int = 64
    """Number of streams, approximately; at most this many ranks can share the reading."""
    shuffle_window: int = 4096
    """Rows that a stream shuffles and packs at a time."""
    window_bytes: int | str = "2 MiB"
    """Most bytes of input in a window, if rows are large."""
    on_error: Literal["raise", "skip", "quarantine"] = "raise"
    """A bad row stops the run, is skipped and counted, or is skipped and written to the `quarantine` file."""
    quarantine: PathLike | None = None
    steps_per_epoch: int | None = None
    """Most steps of an epoch. Several ranks without a rendezvous take exactly this many, and fill up with padding."""
    rendezvous: Rendezvous | PathLike | None = None
    """Place where ranks agree on the end of an epoch; by default the store of torch.distributed. A path is a directory
    that all ranks see, new for each start of the job."""
    timeout_seconds: float = 300.0
    """Longest wait of a rank without data for the others."""
    threads: int | None = None
    """Threads that make windows ahead; by default one for each core, up to 8."""

    def __post_init__(self) -> None:
        self.window()
        if self.streams < 1:
            raise ConfigError(f"streams must be positive, got {self.streams}")
        if self.on_error not in ("raise", "skip", "quarantine"):
            raise ConfigError(f"on_error must be 'raise', 'skip' or 'quarantine', got {self.on_error!r}")
        if (self.on_error == "quarantine") != (self.quarantine is not None):
            raise ConfigError("on_error='quarantine' and a quarantine file go together; pass both or neither")
        if self.steps_per_epoch is not None and self.steps_per_epoch < 1:
            raise ConfigError(f"steps_per_epoch must be positive, got {self.steps_per_epoch}")

    def window(self) -> WindowLimits:
        """Size of a window."""
        return WindowLimits(self.shuffle_window, parse_bytes(self.window_bytes))


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Position between two steps. Streams without a cursor are read again from the beginning of the epoch."""

    epoch: int = 0
    step: int = 0
    """Steps since the start of the run."""
    epoch_step: int = 0
    """Steps since the start of the epoch."""
    cursors: Mapping[int, StreamCursor] = field(default_factory=dict)


class StreamStep(NamedTuple):
    """One step of this rank: the arrays of a batch, their origin, and the next position."""

    arrays: dict[str, Any]
    metadata: dict[str, Any]
    position: StreamPosition
    tokens: int
    """Tokens without padding."""


class StreamReader:
    """Batches of one rank, one after the other, from any position. Not thread-safe.

    `recipe` describes how rows become tokens; a token store needs none. Nothing is read before the first batch.

    The last steps of an epoch may be short, because some streams end before others. A rank without samples delivers a
    row of padding as long as others have data. No rank of several knows the whole batch: there is no
    `num_items_in_batch`, and without a fixed length each rank pads to its own longest row.

    Metadata: "sources" (files), "source", "row", "offset" and "sample" for each part, "step", "epoch". Rows of text and
    JSON have the byte at which they begin ("offset", after decompression) and -1 as "row"; rows of other formats have
    "row" and -1 as "offset".
    """

    def __init__(
        self,
        recipe: Recipe | None,
        paths: PathLike | Iterable[PathLike],
        sampling: Sampling,
        form: BatchLayout,
        *,
        global_batch: int,
        rank: Rank | None = None,
        seed: int = 0,
        shuffle: bool = True,
        max_tokens: int | None = None,
        options: StreamOptions | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        self.recipe, self.form, self.rank = recipe, form, rank or Rank()
        self.paths: list[PathLike] = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        self.global_batch, self.seed, self.shuffle = global_batch, seed, shuffle
        self._sampling = WindowSampling(sampling, max_tokens, form.multiple)
        if sampling.strategy is not None and max_tokens is not None:
            raise ConfigError(f"max_tokens={max_tokens} is for rows that are not packed; pass packing=None")
        self.options = options or StreamOptions()
        if global_batch < self.rank.world_size:
            raise ConfigError(f"a global batch of {global_batch} cannot be shared by {self.rank.world_size} ranks")
        if recipe is not None and recipe.dedup:
            raise ConfigError(
                f"dedup={list(recipe.dedup)} needs all rows, which a stream does not have; prepare the data first "
                "(streaming=False), or deduplicate it with `penstock prepare`"
            )
        if self.rank.world_size > 1:
            self.form = replace(form, fields=form.fields - {"num_items_in_batch"})
        self._budget = budget or MemoryBudget()
        self._pool = Background(self.options.threads)
        self._epoch_end = EpochEnd(
            self.rank, self.options.steps_per_epoch, self.options.rendezvous, self.options.timeout_seconds
        )
        self.counts = StreamCounts(self.options.on_error, self.options.quarantine, self.rank)
        self._live: tuple[int, dict[int, Stream]] | None = None
        self._last_position: StreamPosition | None = None
        """Position of the streams as they are, if it is known."""

    # Reading

    def start(self, epoch: int = 0, step: int = 0) -> StreamPosition:
        """Position at the beginning of an epoch."""
        return StreamPosition(epoch, step)

    def next(self, position: StreamPosition) -> StreamStep | None:
        """The step at a position; None at the end of its epoch (see `next_epoch`)."""
        self._epoch_end.check()
        epoch, step = position.epoch, position.epoch_step
        streams = self._streams_at(position)
        for lane in self.lanes:
            streams[lane.due(step)].begin()
        taken = [sample for lane in self.lanes for sample in self._own(lane, lane.read(step, streams))]
        if not self._epoch_end.more(epoch, step, bool(taken)):
            return None
        cursors = {number: stream.cursor for number, stream in streams.items()}
        self._look_ahead(streams, step + 1)
        arrays, metadata, tokens = collate_samples(taken, self.catalog, self.form, masked=self._input.mask is not None)
        metadata |= {"step": position.step, "epoch": epoch}
        self._last_position = StreamPosition(epoch, position.step + 1, step + 1, cursors)
        return StreamStep(arrays, metadata, self._last_position, tokens)

    def next_epoch(self, position: StreamPosition) -> StreamPosition:
        """Beginning of the epoch after the one that ended at a position."""
        return StreamPosition(position.epoch + 1, position.step)

    def steps_in(self, epoch: int) -> int:
        """`steps_per_epoch`, if it is set; otherwise the number of steps is unknown."""
        if self.options.steps_per_epoch is not None:
            return self.options.steps_per_epoch
        raise TypeError(
            "the number of batches of a stream is unknown before its end; prepare the data (streaming=False), or pass "
            "steps_per_epoch"
        )

    def close(self) -> None:
        """Release threads, files and memory. Reading can continue from any position."""
        self._drop_streams()
        self._pool.close()
        self.counts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # State

    @cached_property
    def fingerprint(self) -> str:
        """Hash, in 16 hex digits, of everything that the batches depend on except the number of ranks."""
        return xxhash.xxh3_64_hexdigest(orjson.dumps(self.describe(), option=orjson.OPT_SORT_KEYS))

    def describe(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "files": xxhash.xxh3_64_hexdigest(orjson.dumps(self.catalog.identity())),
            "rows": self._input.described,
            "streams": self.catalog.streams,
            "global_batch": self.global_batch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "shape": self._sampling.describe(),
            "window": [self.options.shuffle_window, self.options.window().nbytes],
        }

    def to_state(self, position: StreamPosition) -> dict[str, Any]:
        """A position as a small plain dict, with the cursors of this rank's streams; `merge_states` joins all ranks.

        The state of a single rank loads on any number of ranks, too: streams without a cursor are then read again from
        the beginning of the epoch.
        """
        facts = {
            "plan": self.fingerprint,
            "global_batch": self.global_batch,
            "epoch": position.epoch,
            "step": position.step,
            "epoch_step": position.epoch_step,
            "streams": {str(number): cursor.to_text() for number, cursor in sorted(position.cursors.items())},
        }
        return _STATE.write(facts)

    def from_state(self, state: Mapping[str, Any]) -> StreamPosition:
        """Position of a state; refuses states of other streams."""
        _STATE.read(state)
        if state.get("global_batch") != self.global_batch:
            raise ResumeError(
                f"the state is of a global batch of {state.get('global_batch')}, it is {self.global_batch} now: "
                "streams depend on it: set batch_size so that batch_size x ranks is the same"
            )
        if state.get("plan") != self.fingerprint:
            raise ResumeError(
                f"the state belongs to the plan {state.get('plan')}, this is {self.fingerprint}: files, recipe, "
                "seed, packing or window differ; restore them, or start without the state"
            )
        try:
            epoch, step, epoch_step = (int(state[name]) for name in ("epoch", "step", "epoch_step"))
            cursors = {int(number): StreamCursor.from_text(text) for number, text in state["streams"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ResumeError):
                raise
            raise ResumeError(f"the state is damaged: {error!r}; it is a dict that state_dict() made") from error
        if min(epoch, step, epoch_step) < 0 or any(not 0 <= number < self.catalog.streams for number in cursors):
            raise ResumeError("the state is damaged: its epoch, step or streams are out of range")
        self._drop_streams()
        self.counts.keep_quarantine()
        return StreamPosition(epoch, step, epoch_step, cursors)

    # What is read

    @cached_property
    def catalog(self) -> Catalog:
        return Catalog(self._input.source, self.global_batch, self.options.streams)

    @cached_property
    def lanes(self) -> list[StreamLane]:
        """Streams that this rank reads, with the slots that they fill."""
        return _lanes(self.catalog.streams, self.global_batch, self._slots)

    @cached_property
    def _slots(self) -> range:
        return self.catalog.sharding.slots_of(self.rank, self.global_batch)

    @cached_property
    def _input(self) -> OpenedInput:
        return open_input_rows(self.recipe, self.paths)

    @cached_property
    def _builder(self) -> WindowBuilder:
        ready = self._input
        for transform in ready.transforms:
            if isinstance(transform, Fitting):
                transform.fit_budget(self._budget.limit)
        return WindowBuilder(
            self.catalog,
            ready.transforms,
            tokens=ready.tokens,
            mask=ready.mask,
            limits=self.options.window(),
            seed=self.seed,
            shuffle=self.shuffle,
            on_error=self.options.on_error,
        )

    # Inside

    def _streams_at(self, position: StreamPosition) -> dict[int, Stream]:
        """Streams of this rank, at the cursors of a position."""
        if self._live is None or self._live[0] != position.epoch:
            self._drop_streams()
            self._live = (position.epoch, self._new_streams(position.epoch))
        streams = self._live[1]
        if position is self._last_position:
            self._last_position = None
            return streams
        for lane in self.lanes:
            if all(number in position.cursors for number in lane.streams):
                for number in lane.streams:
                    streams[number].seek(position.cursors[number])
            elif lane.streams:
                self._replay(lane, streams, position.epoch_step)
        return streams

    def _new_streams(self, epoch: int) -> dict[int, Stream]:
        assigned = self.catalog.assign(self.seed, epoch, shuffle=self.shuffle)
        made: dict[int, Stream] = {}
        for lane in self.lanes:
            count = self.counts.add if lane.slots.start in self._slots else self.counts.ignore
            for number in lane.streams:
                made[number] = Stream(
                    BlockSequence(number, epoch, assigned[number]),
                    self._builder,
                    self._sampling,
                    pool=self._pool,
                    budget=self._budget,
                    on_window=count,
                )
        return made

    def _replay(self, lane: StreamLane, streams: dict[int, Stream], steps: int) -> None:
        """Read a lane from the beginning of the epoch up to a step."""
        mine = [streams[number] for number in lane.streams]
        for stream in mine:
            stream.rewind()
            stream.counting = not steps
        for step in range(steps):
            lane.read(step, streams)
        for stream in mine:
            stream.counting = True

    def _own(self, lane: StreamLane, taken: list[tuple[SampledWindow, int]]) -> list[tuple[SampledWindow, int]]:
        """Samples of a lane that are in the slots of this rank."""
        return [sample for slot, sample in zip(lane.slots, taken) if slot in self._slots]

    def _look_ahead(self, streams: dict[int, Stream], step: int) -> None:
        """Start to make the windows that are needed soonest, as far as the budget has room."""
        free = 2 * self._pool.threads + 2 - sum(stream.waiting for stream in streams.values())
        if free <= 0:
            return
        soonest = []
        for lane in self.lanes:
            turns = len(lane.streams)
            for number in lane.streams:
                stream = streams[number]
                if not stream.waiting and not stream.over:
                    wait = (number - lane.streams.start - step) % turns
                    soonest.append((wait + stream.left * turns // len(lane.slots), number))
        soonest.sort()
        room = self._budget.available
        for _, number in soonest[:free]:
            room -= max(streams[number].nbytes, self.options.window().nbytes)
            if room < 0:
                return
            streams[number].begin()

    def _drop_streams(self) -> None:
        if self._live is not None:
            for stream in self._live[1].values():
                stream.close()
        self._live = self._last_position = None
        self._epoch_end.forget()


def _lanes(streams: int, global_batch: int, slots: range) -> list[StreamLane]:
    """Lanes that overlap some slots."""
    if streams >= global_batch:
        each = streams // global_batch
        return [StreamLane(range(slot, slot + 1), range(slot * each, (slot + 1) * each)) for slot in slots]
    each = global_batch // streams
    numbers = range(slots.start // each, (slots.stop - 1) // each + 1)
    return [StreamLane(range(number * each, (number + 1) * each), range(number, number + 1)) for number in numbers]


class EpochEnd:
    """End of an epoch, at the same step on all ranks: after `steps`, or when no rank has data left."""

    def __init__(
        self, rank: Rank, steps: int | None, rendezvous: Rendezvous | PathLike | None, timeout_seconds: float
    ) -> None:
        self._rank, self._steps, self._timeout_seconds = rank, steps, timeout_seconds
        self._given = rendezvous
        self._pass: EndOfEpoch | None = None
        self._end: int | None = None
        self._following: tuple[int, int] | None = None
        """Next (epoch, step) of the current pass."""

    def check(self) -> None:
        """Raise if ranks have to agree and cannot."""
        if self._agreed:
            self._place()

    @property
    def _agreed(self) -> bool:
        """True if ranks have to communicate; with a number of steps they need not."""
        return self._rank.world_size > 1 and (self._steps is None or self._given is not None)

    def more(self, epoch: int, step: int, has_data: bool) -> bool:
        """True if the step takes place on all ranks; a rank without data waits for the others."""
        if self._steps is not None and step >= self._steps:
            return False
        if not self._agreed:
            return has_data or self._rank.world_size > 1
        if self._pass is None or self._following not in ((epoch, step), (epoch, step + 1)):
            self._end = None
            self._pass = EndOfEpoch(self._place(), self._rank, epoch, self._timeout_seconds, name="stream")
        self._following = (epoch, step + 1)
        if has_data:
            self._pass.passed(step)
            return True
        self._end = step if self._end is None else self._end
        self._pass.ended(self._end)
        return self._pass.more(step)

    def forget(self) -> None:
        """Start another pass."""
        self._pass = None

    def _place(self) -> Rendezvous:
        if self._given is None:
            try:
                return find_rendezvous()
            except ConfigError as error:
                raise ConfigError(
                    f"{self._rank}: ranks have to agree on the end of a stream, and {error}; or pass steps_per_epoch"
                ) from None
        return DirectoryRendezvous(self._given) if isinstance(self._given, (str, os.PathLike)) else self._given
