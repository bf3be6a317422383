"""`streaming=True`: batches from input that is too big, remote or endless to be prepared first.

    reader = StreamReader(Recipe(tokenizer="model/"), "corpus/*.jsonl", form, global_batch=64, length=2048)
    position = reader.start()
    while (step := reader.next(position)) is not None:
        train(step.arrays)
        position = step.position
    reader.to_state(position)

The input is cut into blocks by sizes alone. A fixed number of streams, whatever the number of ranks, share them, dealt
anew in every epoch. Each reads its blocks, shuffles rows in windows, tokenises and packs by itself, as a pure function
of (seed, epoch, stream), and each slot of a global batch is always filled by the same few streams: so a rank reads only
what its slots need, and what it reads depends on nothing but the plan. Every row comes exactly once an epoch.

Shuffling is as good as blocks dealt at random and windows of rows make it; without `shuffle` the streams still take
turns, so rows come in the order of the files only within a stream.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

import orjson
import xxhash

from penstock.arrays.truncation import Policy
from penstock.batching.collate import BatchLayout
from penstock.corpus.recipe import Recipe
from penstock.distributed.ranks import Rank
from penstock.distributed.rendezvous import Rendezvous
from penstock.errors import ConfigError, ResumeError
from penstock.files.listing import PathLike
from penstock.files.states import StateFormat
from penstock.loaders.streamed.batches import collated
from penstock.loaders.streamed.catalog import Catalog, OpenedInput, open_input_rows
from penstock.loaders.streamed.counts import StreamCounts
from penstock.loaders.streamed.cursors import StreamCursor
from penstock.loaders.streamed.epoch_end import Ending
from penstock.loaders.streamed.samples import Shape
from penstock.loaders.streamed.stream import Filled, Stream, StreamLane
from penstock.loaders.streamed.windows import BlockSequence, WindowBuilder, WindowLimits
from penstock.memory import MemoryBudget
from penstock.pipeline.prefetch import Background
from penstock.pipeline.stages import Fitting

__all__ = ["StreamOptions", "StreamPosition", "StreamReader", "StreamStep"]

VERSION = 1
_STATE = StateFormat("streams", "a loader with streaming=True")


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """How a stream is read. Of these, `streams` and the window decide which batches there are."""

    streams: int = 64
    """About how many streams there are; the most ranks that can share the reading."""
    shuffle_window: int = 4096
    """Rows that a stream shuffles, and packs, at a time."""
    window_bytes: int = 2 << 20
    """Bytes of input that make a window full, if the rows are large."""
    on_error: Literal["raise", "skip", "quarantine"] = "raise"
    """A bad row stops the run, is left out and counted, or is also written to the `quarantine` file."""
    quarantine: PathLike | None = None
    steps_per_epoch: int | None = None
    """An epoch ends after so many steps at most. Several ranks without a rendezvous take exactly so many, and fill up
    with blanks."""
    rendezvous: Rendezvous | PathLike | None = None
    """Where ranks agree on the end of an epoch; by default the store of torch.distributed. A path: a directory that all
    of them see, new for each start of the job."""
    timeout_seconds: float = 300.0
    """How long a rank without data waits to hear from the others."""
    threads: int | None = None
    """That make windows ahead of time; by default one for each core, up to 8."""

    def __post_init__(self) -> None:
        WindowLimits(self.shuffle_window, self.window_bytes)
        if self.streams < 1:
            raise ConfigError(f"there must be at least one stream, got {self.streams}")
        if self.on_error not in ("raise", "skip", "quarantine"):
            raise ConfigError(f"on_error must be 'raise', 'skip' or 'quarantine', got {self.on_error!r}")
        if (self.on_error == "quarantine") != (self.quarantine is not None):
            raise ConfigError("on_error='quarantine' and a quarantine file go together; pass both or neither")
        if self.steps_per_epoch is not None and self.steps_per_epoch < 1:
            raise ConfigError(f"steps_per_epoch must be positive, got {self.steps_per_epoch}")


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Between two steps. Cursors of streams that are missing are found by reading the epoch from its beginning."""

    epoch: int = 0
    step: int = 0
    """Steps since the start of the run."""
    epoch_step: int = 0
    """Steps since the start of the epoch."""
    cursors: Mapping[int, StreamCursor] = field(default_factory=dict)


class StreamStep(NamedTuple):
    """One step of this rank: the arrays of a batch, where they came from, and the position behind it."""

    arrays: dict[str, Any]
    metadata: dict[str, Any]
    position: StreamPosition
    tokens: int
    """That are not padding."""


class StreamReader:
    """The batches of one rank, one after the other, from any position on. See the module's text.

    `recipe` says how rows become tokens; it is not needed for a token store. Nothing is read before the first batch
    is asked for. Not for several threads at once.

    A step lacks the samples of streams that have ended, so the last steps of an epoch may be short; a rank without any
    sample delivers a row of padding as long as others have data. With several ranks nobody knows the whole batch, so
    there is no `num_items_in_batch`, and without a fixed length each rank pads to its own longest row.

    metadata: "sources" (files), "source", "row", "offset" and "sample" for each part, "step", "epoch". Rows of text
    and JSON are found by the byte they begin with ("offset", after decompression), those of other formats by "row"; the
    other of the two is -1.
    """

    def __init__(
        self,
        recipe: Recipe | None,
        paths: PathLike | Iterable[PathLike],
        form: BatchLayout,
        *,
        global_batch: int,
        rank: Rank | None = None,
        seed: int = 0,
        shuffle: bool = True,
        packing: str | None = "concat",
        length: int | None = None,
        truncation: Policy = "error",
        max_tokens: int | None = None,
        options: StreamOptions | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        self.recipe, self.form, self.rank = recipe, form, rank or Rank()
        self.paths: list[PathLike] = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        self.global_batch, self.seed, self.shuffle = global_batch, seed, shuffle
        self.shape = Shape(
            packing=packing, length=length, truncation=truncation, max_tokens=max_tokens, multiple=form.multiple
        )
        self.options = options or StreamOptions()
        if global_batch < self.rank.world_size:
            raise ConfigError(f"a global batch of {global_batch} cannot be shared by {self.rank.world_size} ranks")
        if recipe is not None and recipe.dedup:
            raise ConfigError(
                f"dedup={list(recipe.dedup)} needs to see all rows, and a stream is never seen as a whole; prepare the "
                "data first (streaming=False), or deduplicate it with `penstock prepare`"
            )
        if self.rank.world_size > 1:
            self.form = replace(form, fields=form.fields - {"num_items_in_batch"})
        self._budget = budget or MemoryBudget()
        self._pool = Background(self.options.threads)
        self._ending = Ending(
            self.rank, self.options.steps_per_epoch, self.options.rendezvous, self.options.timeout_seconds
        )
        self.tally = StreamCounts(self.options.on_error, self.options.quarantine, self.rank)
        self._live: tuple[int, dict[int, Stream]] | None = None
        self._behind: StreamPosition | None = None
        """Where the streams stand, if that is known without looking at each."""

    # Reading

    def start(self, epoch: int = 0, step: int = 0) -> StreamPosition:
        """The beginning of an epoch."""
        return StreamPosition(epoch, step)

    def next(self, position: StreamPosition) -> StreamStep | None:
        """The step at a position; None at the end of its epoch: `next_epoch` leads to the next one."""
        self._ending.check()
        epoch, step = position.epoch, position.epoch_step
        streams = self._streams_at(position)
        for lane in self.lanes:
            streams[lane.due(step)].begin()
        taken = [sample for lane in self.lanes for sample in self._own(lane, lane.read(step, streams))]
        if not self._ending.more(epoch, step, bool(taken)):
            return None
        cursors = {number: stream.cursor for number, stream in streams.items()}
        self._look_ahead(streams, step + 1)
        arrays, metadata, tokens = collated(taken, self.catalog, self.form, masked=self._prepared.mask is not None)
        metadata |= {"step": position.step, "epoch": epoch}
        self._behind = StreamPosition(epoch, position.step + 1, step + 1, cursors)
        return StreamStep(arrays, metadata, self._behind, tokens)

    def next_epoch(self, position: StreamPosition) -> StreamPosition:
        """Behind the end of an epoch, the beginning of the next."""
        return StreamPosition(position.epoch + 1, position.step)

    def steps_in(self, epoch: int) -> int:
        """Only known if `steps_per_epoch` says so: nobody has counted the tokens of a stream."""
        if self.options.steps_per_epoch is not None:
            return self.options.steps_per_epoch
        raise TypeError(
            "how many batches a stream has is known when it has been read; prepare the data (streaming=False), where "
            "they can be counted, or pass steps_per_epoch"
        )

    def close(self) -> None:
        """Let go of threads, files and memory. Reading goes on from any position."""
        self._drop_streams()
        self._pool.close()
        self.tally.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # State

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that name everything that decides what the batches hold, but the number of ranks."""
        return xxhash.xxh3_64_hexdigest(orjson.dumps(self.describe(), option=orjson.OPT_SORT_KEYS))

    def describe(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "files": xxhash.xxh3_64_hexdigest(orjson.dumps(self.catalog.identity())),
            "rows": self._prepared.described,
            "streams": self.catalog.streams,
            "global_batch": self.global_batch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "shape": self.shape.describe(),
            "window": [self.options.shuffle_window, self.options.window_bytes],
        }

    def to_state(self, position: StreamPosition) -> dict[str, Any]:
        """A position as a small plain dict, with the cursors of this rank's streams: `merge_states` makes one of all.

        The state of a single rank loads too, on any number of ranks; what is missing in it is then read again from the
        beginning of the epoch.
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
        """The position that a state stands for. What does not go together is refused."""
        _STATE.read(state)
        if state.get("global_batch") != self.global_batch:
            raise ResumeError(
                f"the state was saved with a global batch of {state.get('global_batch')}, and it is "
                f"{self.global_batch} now; streams go with the size of the global batch: set batch_size so that "
                "batch_size x ranks is what it was"
            )
        if state.get("plan") != self.fingerprint:
            raise ResumeError(
                f"the state belongs to the plan {state.get('plan')}, and this is {self.fingerprint}: the files, the "
                "recipe, the seed, the packing or the window are not the same; restore them, or start without the state"
            )
        try:
            epoch, step, epoch_step = (int(state[name]) for name in ("epoch", "step", "epoch_step"))
            cursors = {int(number): StreamCursor.from_text(text) for number, text in state["streams"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ResumeError):
                raise
            raise ResumeError(f"the state is damaged: {error!r}; it is a dict that state_dict() made") from error
        if min(epoch, step, epoch_step) < 0 or any(not 0 <= number < self.catalog.streams for number in cursors):
            raise ResumeError("the state is damaged: its numbers do not go with the streams of the plan")
        self._drop_streams()
        self.tally.go_on()
        return StreamPosition(epoch, step, epoch_step, cursors)

    # What is read

    @cached_property
    def catalog(self) -> Catalog:
        return Catalog(self._prepared.source, self.global_batch, self.options.streams)

    @cached_property
    def lanes(self) -> list[StreamLane]:
        """The streams that this rank reads, with the slots they fill."""
        return _lanes(self.catalog.streams, self.global_batch, self._slots)

    @cached_property
    def _slots(self) -> range:
        return self.catalog.sharding.slots_of(self.rank, self.global_batch)

    @cached_property
    def _prepared(self) -> OpenedInput:
        return open_input_rows(self.recipe, self.paths)

    @cached_property
    def _maker(self) -> WindowBuilder:
        ready = self._prepared
        for transform in ready.transforms:
            if isinstance(transform, Fitting):
                transform.fit_budget(self._budget.limit)
        return WindowBuilder(
            self.catalog,
            ready.transforms,
            tokens=ready.tokens,
            mask=ready.mask,
            limits=WindowLimits(self.options.shuffle_window, self.options.window_bytes),
            seed=self.seed,
            shuffle=self.shuffle,
            on_error=self.options.on_error,
        )

    # Inside

    def _streams_at(self, position: StreamPosition) -> dict[int, Stream]:
        """The streams of this rank, where the position says they are."""
        if self._live is None or self._live[0] != position.epoch:
            self._drop_streams()
            self._live = (position.epoch, self._new_streams(position.epoch))
        streams = self._live[1]
        if position is self._behind:
            self._behind = None
            return streams
        for lane in self.lanes:
            if all(number in position.cursors for number in lane.streams):
                for number in lane.streams:
                    streams[number].seek(position.cursors[number])
            elif lane.streams:
                self._replay(lane, streams, position.epoch_step)
        return streams

    def _new_streams(self, epoch: int) -> dict[int, Stream]:
        hands = self.catalog.dealt(self.seed, epoch, shuffle=self.shuffle)
        made: dict[int, Stream] = {}
        for lane in self.lanes:
            told = self.tally.add if lane.slots.start in self._slots else self.tally.ignore
            for number in lane.streams:
                course = BlockSequence(number, epoch, hands[number])
                made[number] = Stream(course, self._maker, self.shape, pool=self._pool, budget=self._budget, told=told)
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

    def _own(self, lane: StreamLane, taken: list[tuple[Filled, int]]) -> list[tuple[Filled, int]]:
        """Of a lane's samples those in this rank's slots."""
        return [sample for slot, sample in zip(lane.slots, taken) if slot in self._slots]

    def _look_ahead(self, streams: dict[int, Stream], step: int) -> None:
        """Have some windows made that will be needed soonest, as far as there is room for them."""
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
            room -= max(streams[number].nbytes, self.options.window_bytes)
            if room < 0:
                return
            streams[number].begin()

    def _drop_streams(self) -> None:
        if self._live is not None:
            for stream in self._live[1].values():
                stream.close()
        self._live = self._behind = None
        self._ending.forget()


def _lanes(streams: int, global_batch: int, slots: range) -> list[StreamLane]:
    """The lanes that touch some slots."""
    if streams >= global_batch:
        each = streams // global_batch
        return [StreamLane(range(slot, slot + 1), range(slot * each, (slot + 1) * each)) for slot in slots]
    each = global_batch // streams
    numbers = range(slots.start // each, (slots.stop - 1) // each + 1)
    return [StreamLane(range(number * each, (number + 1) * each), range(number, number + 1)) for number in numbers]
