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
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import orjson
import xxhash

from penstock.batching.collate import BatchLayout, CompactBatch
from penstock.corpus.recipe import Recipe
from penstock.distributed.ranks import Rank
from penstock.distributed.synchronization import DirectoryRendezvous, EndOfEpoch, Rendezvous, find_rendezvous
from penstock.errors import ConfigError, ResumeError
from penstock.files.listing import PathLike
from penstock.files.states import StateFormat
from penstock.loaders.source import Sampling
from penstock.loaders.streamed.catalog import Catalog
from penstock.loaders.streamed.rows import WindowSampling
from penstock.loaders.streamed.spec import StreamOptions, StreamSpec
from penstock.loaders.streamed.steps import Sample, StepMaker, StreamPosition, StreamSteps, TakenStep
from penstock.loaders.streamed.stream import StreamLane
from penstock.loaders.streamed.windows import StreamCounts, StreamCursor
from penstock.loaders.streamed.workers import choose_workers, open_step_maker, open_steps
from penstock.memory import MemoryBudget
from penstock.order.positions import larger_than_epoch
from penstock.pipeline.stages import Live
from penstock.sources.inputs import Input, as_input, shown_input, why_it_stays

__all__ = ["StreamOptions", "StreamPosition", "StreamReader", "StreamStep"]

VERSION = 1
_STATE = StateFormat(
    "streams",
    "a loader with streaming=True",
    fields={"epoch": (int,), "step": (int,), "epoch_step": (int,), "streams": (dict,)},
)


class StreamStep(NamedTuple):
    """One step of this rank: a batch, its origin, and the next position."""

    compact: CompactBatch
    metadata: dict[str, Any]
    position: StreamPosition
    tokens: int
    """Tokens without padding."""

    @property
    def arrays(self) -> dict[str, Any]:
        """Fields of the batch."""
        return self.compact.arrays()


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
        paths: Input,
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
        self.rank, self.global_batch = rank or Rank(), global_batch
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
            form = replace(form, fields=form.fields - {"num_items_in_batch"})
        self._budget = budget or MemoryBudget()
        self.spec = StreamSpec(
            recipe=recipe,
            paths=as_input(paths),
            sampling=WindowSampling(sampling, max_tokens, form.multiple),
            form=form,
            global_batch=global_batch,
            rank=self.rank,
            seed=seed,
            shuffle=shuffle,
            options=self.options,
            memory=self._budget.limit,
        )
        stays = None if isinstance(self.spec.paths, list) else why_it_stays(self.spec.paths)
        self.workers = choose_workers(self.options, memory=self._budget.limit, stays=stays)
        """Workers that make the batches, and the reason for them."""
        self._made_by: StreamSteps | None = None
        self._samples_by: StepMaker | None = None
        """Maker for batches of other sizes, if processes make the steps."""
        self._kept: tuple[tuple[int, int], Mapping[int, StreamCursor], TakenStep] | None = None
        """Last step that `read` took samples of, by epoch, step and cursors."""
        self._process = os.getpid()
        self._epoch: int | None = None
        self._epoch_end = EpochEnd(
            self.rank, self.options.steps_per_epoch, self.options.rendezvous, self.options.timeout_seconds
        )
        self.counts = StreamCounts(self.options.on_error, self.options.quarantine, self.rank)

    # Reading

    def start(self, epoch: int = 0, step: int = 0) -> StreamPosition:
        """Position at the beginning of an epoch."""
        return StreamPosition(epoch, step)

    def next(self, position: StreamPosition) -> StreamStep | None:
        """The step at a position; None at the end of its epoch (see `next_epoch`)."""
        if position.taken:
            return self.read(position, len(self.spec.slots))
        made_by = self._makers_at(position)
        made = made_by.make(position)
        for counts in made.counts:
            self.counts.add(counts)
        if not self._epoch_end.more(position.epoch, position.epoch_step, made.has_data):
            made_by.expect(self.next_epoch(position))
            return None
        assert made.compact is not None
        return StreamStep(made.compact, made.metadata, made.following, made.tokens)

    @property
    def at_hand(self) -> int:
        """Steps that other processes have made already."""
        return 0 if self._made_by is None else self._made_by.at_hand

    @property
    def elsewhere(self) -> bool:
        """True if other processes make the steps."""
        return self._made_by is not None and self._made_by.elsewhere

    def read(self, position: StreamPosition, count: int) -> StreamStep | None:
        """The next `count` samples of this rank as one batch, also across steps; None at the end of an epoch.

        The position within a step is part of the next position. All ranks have to read as many.
        """
        samples, here, ended = self.take(position, count)
        if here is position:
            return None
        if ended and not position.epoch_step and not position.taken:
            raise larger_than_epoch(count, 1, len(samples))
        compact, metadata, tokens = self._sample_maker(self._makers_at(position)).collate(samples)
        metadata |= {"step": position.step, "epoch": position.epoch}
        return StreamStep(compact, metadata, replace(here, step=position.step + 1), tokens)

    def take(self, position: StreamPosition, count: int) -> tuple[list[Sample], StreamPosition, bool]:
        """The next `count` samples of this rank, the next position, and whether the epoch ended before the last."""
        maker, alone = self._sample_maker(self._makers_at(position)), self.rank.world_size == 1
        samples: list[Sample] = []
        here, left = position, count
        while left:
            step = self._taken_at(maker, here)
            if not self._epoch_end.more(here.epoch, here.epoch_step, bool(step.samples)):
                return samples, here, True
            # Ranks count slots, of which all have as many; a single rank counts samples, and its batches are full.
            share = len(step.samples) if alone else len(self.spec.slots)
            low, high = here.taken, min(share, here.taken + left)
            found = enumerate(sample for _, sample in step.samples) if alone else step.samples
            samples += [sample for slot, sample in found if low <= slot < high]
            left -= high - low
            here = step.following if high == share else replace(here, taken=high)
        return samples, here, False

    def has_ended(self, position: StreamPosition) -> bool:
        """True if nothing of its epoch is left at a position; reads the next samples."""
        maker = self._sample_maker(self._makers_at(position))
        return not position.taken and not self._taken_at(maker, position).samples

    def _taken_at(self, maker: StepMaker, position: StreamPosition) -> TakenStep:
        """Samples of a step. Those of the last one are kept, as the next batch may need the rest of them."""
        kept = self._kept
        if kept is not None and kept[0] == (position.epoch, position.epoch_step) and kept[1] is position.cursors:
            return kept[2]
        step = maker.take(replace(position, taken=0) if position.taken else position)
        for counts in step.counts:
            self.counts.add(counts)
        self._kept = ((position.epoch, position.epoch_step), position.cursors, step)
        return step

    def _makers_at(self, position: StreamPosition) -> StreamSteps:
        """Maker of the steps of an epoch."""
        self._epoch_end.check()
        if self._process != os.getpid():  # a fork has no threads, and must not talk to the processes of its parent
            self._process = os.getpid()
            self._made_by = self._samples_by = self._kept = None
        if position.epoch != self._epoch:
            self._epoch_end.forget()
            self._epoch = position.epoch
        if self._made_by is None:
            self._made_by = open_steps(self.spec, self._budget, self.workers)
        return self._made_by

    def _sample_maker(self, made_by: StreamSteps) -> StepMaker:
        """Maker of single samples; processes make whole steps only."""
        if isinstance(made_by, StepMaker):
            return made_by
        if self._samples_by is None:
            self._samples_by = open_step_maker(self.spec, self._budget)
        return self._samples_by

    def next_epoch(self, position: StreamPosition) -> StreamPosition:
        """Beginning of the epoch after the one that ended at a position."""
        return position.next_epoch()

    def steps_in(self, epoch: int) -> int:
        """`steps_per_epoch`, if it is set; otherwise the number of steps is unknown."""
        if self.options.steps_per_epoch is not None:
            return self.options.steps_per_epoch
        raise TypeError(
            "the number of batches of a stream is unknown before its end; prepare the data (streaming=False), or pass "
            "streaming=StreamOptions(steps_per_epoch=...)"
        )

    def close(self) -> None:
        """Release workers, files and memory. Reading can continue from any position."""
        makers = (self._made_by, self._samples_by) if self._process == os.getpid() else ()
        self._made_by = self._samples_by = self._kept = None
        for maker in makers:
            if maker is not None:
                maker.close()
        self._epoch_end.forget()
        self.counts.close()

    def interrupt(self) -> bool:
        """Make a step that waits for rows of a live source fail, from any thread; False for other sources.

        `close` has to follow.
        """
        if isinstance(self.spec.paths, Live):
            self.spec.paths.interrupt()
            return True
        return False

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
            "rows": self.spec.input.described,
            "streams": self.catalog.streams,
            "global_batch": self.global_batch,
            "seed": self.spec.seed,
            "shuffle": self.spec.shuffle,
            "shape": self.spec.sampling.describe(),
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
        if etags := self._etags:
            facts["etags"] = etags
        if position.taken:
            facts |= {"taken": position.taken, "world_size": self.rank.world_size}
        return _STATE.write(facts)

    @cached_property
    def _etags(self) -> dict[str, str]:
        return self.catalog.etags()

    def _check_etags(self, saved: Any) -> None:
        """Refuse objects that were replaced by others of the same name and size since the state was saved."""
        if not isinstance(saved, Mapping) or not self._etags or saved == self._etags:
            return
        changed = [name for name, etag in self._etags.items() if name in saved and saved[name] != etag]
        what = f"{changed[0]!r} was" if changed and changed[0] else "some of the input files were"
        raise ResumeError(
            f"{what} replaced since the state was saved (the ETag is another); restore the files, or start without "
            "the state"
        )

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
        self._check_etags(state.get("etags"))
        try:
            epoch, step, epoch_step = (int(state[name]) for name in ("epoch", "step", "epoch_step"))
            cursors = {int(number): StreamCursor.from_text(text) for number, text in state["streams"].items()}
            taken = int(state.get("taken", 0))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ResumeError):
                raise
            raise ResumeError(f"the state is damaged: {error!r}; it is a dict that state_dict() made") from error
        if min(epoch, step, epoch_step) < 0 or any(not 0 <= number < self.catalog.streams for number in cursors):
            raise ResumeError("the state is damaged: its epoch, step or streams are out of range")
        if taken and state.get("world_size") != self.rank.world_size:
            raise ResumeError(
                f"the state was saved by {state.get('world_size')} ranks within a step, after get_batch with another "
                f"size than that of the loader, and this run has {self.rank.world_size}; resume with as many ranks, or "
                "from a state between two steps"
            )
        if not 0 <= taken < max(1, len(self.spec.slots)):
            raise ResumeError("the state is damaged: the part of its step is out of range")
        for maker in (self._made_by, self._samples_by):
            if maker is not None:
                maker.forget()
        self._kept = None
        self._epoch_end.forget()
        self.counts.keep_quarantine()
        return StreamPosition(epoch, step, epoch_step, cursors, taken)

    # What is read

    @property
    def names(self) -> str:
        """Names of what is read, for messages."""
        return shown_input(self.spec.paths)

    @property
    def form(self) -> BatchLayout:
        return self.spec.form

    @property
    def catalog(self) -> Catalog:
        return self.spec.catalog

    @property
    def lanes(self) -> list[StreamLane]:
        """Streams that this rank reads, with the slots that they fill."""
        return self.spec.lanes


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
                    f"{self._rank}: ranks have to agree on the end of a stream, and {error}; both are "
                    "options of the stream: streaming=StreamOptions(steps_per_epoch=...) does without"
                ) from None
        return DirectoryRendezvous(self._given) if isinstance(self._given, (str, os.PathLike)) else self._given
