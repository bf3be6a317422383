"""Which samples make up step s: the orders of all sources, how they are mixed, and what was changed on the way.

    plan = Plan([Feed("web", order)], global_batch=256)
    plan.step(1000).rows        # what step 1000 is made of
    plan.trace("web", 4711)     # the steps that use row 4711, past and future

A plan is a value. Nothing in it knows about ranks, threads or time. An edit (`skip`, `ban`, `reweight`) makes a new
plan that is the old one up to the step it begins with, and loses and repeats nothing after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from penstock._dtypes import did_you_mean
from penstock.errors import ConfigError
from penstock.order.edits import Ban, Edit, Reweight, Skip
from penstock.order.mixing import Mixture
from penstock.order.orders import Place
from penstock.order.positions import Feed, Position, Step, Use, behind_of, left_of, pass_by, take
from penstock.order.samples import Samples
from penstock.order.schedules import Schedule

__all__ = ["Feed", "Plan", "Position", "Step", "Use"]

Ints = npt.NDArray[np.int64]
_VERSION = 1
STOPPING = ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement", "never")
_REMEMBERED_EVERY = 64


@dataclass(frozen=True)
class Plan:
    """The order of everything, step by step. See the module's text."""

    feeds: tuple[Feed, ...]
    global_batch: int
    schedule: Schedule | None = None
    """Weights of the sources; None for a single source, whose epochs then end batches."""
    drop_last: bool = False
    stopping: str = "first_exhausted"
    edits: tuple[Edit, ...] = ()
    _memo: dict[int, Position] = field(default_factory=dict, compare=False, repr=False)
    _steps: dict[int, int] = field(default_factory=dict, compare=False, repr=False)
    _mixture: list[Mixture] = field(default_factory=list, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.feeds:
            raise ConfigError("a plan needs at least one source")
        if self.global_batch < 1:
            raise ConfigError(f"a batch holds at least one sample, got {self.global_batch}")
        if self.stopping not in STOPPING:
            hint = did_you_mean(self.stopping, STOPPING)
            raise ConfigError(f"stopping_strategy must be one of {', '.join(STOPPING)}, got {self.stopping!r}{hint}")
        if self.schedule is None and len(self.feeds) > 1:
            raise ConfigError(f"{len(self.feeds)} sources need weights")
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f"the names of sources must differ, got {list(self.names)}")
        for feed in self.feeds:
            self._check_not_empty(feed)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(feed.name for feed in self.feeds)

    @cached_property
    def _unlimited(self) -> bool:
        return any(feed.max_epochs is None for feed in self.feeds)

    @property
    def counts_steps(self) -> bool:
        """Whether anything in it is said in steps, which are other steps if batches have another size."""
        changes = self.schedule is not None and any(len(part.points) > 1 for part in self.schedule.parts)
        return bool(self.edits) or changes

    @property
    def version(self) -> int:
        """How many edits were made."""
        return len(self.edits)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that name the plan without its edits."""
        return xxhash.xxh3_64_hexdigest(orjson.dumps(self.describe(), option=orjson.OPT_SORT_KEYS))

    def describe(self) -> dict[str, Any]:
        """Everything that decides what the steps hold, but the edits and the size of a batch."""
        return {
            "version": _VERSION,
            "sources": [
                {
                    "name": feed.name,
                    "rows": feed.identity,
                    "shuffle": feed.order.shuffle,
                    "seed": feed.order.seed,
                    "order": feed.order.describe(),
                    "max_epochs": feed.max_epochs,
                }
                for feed in self.feeds
            ],
            "weights": None if self.schedule is None else self.schedule.to_dict(),
            "stopping": None if self.schedule is None else self.stopping,
            "drop_last": self.drop_last,
        }

    # Reading

    def start(self) -> Position:
        drawn = None if self.schedule is None else self._mix.start()
        first = tuple(Place() for _ in self.feeds)
        return Position(first, drawn=drawn, marks=first)

    def read(self, position: Position, count: int | None = None) -> tuple[Step | None, Position]:
        """The step at a position, and the position behind it. None at the end of an epoch; ask again for the next one.

        `count` is the number of samples, by default a global batch. Steps that are skipped are passed over.
        """
        position = self._past_skipped(position)
        if self.schedule is None:
            return self._read_alone(position, count or self.global_batch)
        return self._read_mixed(position, count or self.global_batch)

    def read_some(self, position: Position, most: int) -> list[tuple[Step, Position]]:
        """Up to `most` steps of one epoch from a settled position on, each with the settled position behind it.

        None at the end of an epoch. The same as `read` and `settle` step by step, for less.
        """
        size = self.global_batch
        if self.schedule is not None or self.edits or not self._unlimited or most < 2:
            return self._read_one(position)
        place, order = position.places[0], self.feeds[0].order
        if place.epoch > position.epoch:
            return self._read_one(position)
        block = order.some(place, most * size)
        count = len(block) // size
        if count < 2:
            return self._read_one(position)
        found: list[tuple[Step, Position]] = []
        sources = np.zeros(len(block.rows), np.int64)
        epoch, names, marks = position.epoch, self.names, position.marks
        for number in range(count):
            samples = block.slice(number * size, (number + 1) * size)
            step = Step(position.step + number, epoch, samples, sources[: len(samples.rows)], names, size)
            done = (number + 1) * size
            behind = Place(epoch, place.window, place.index + done)
            if number == count - 1:
                behind = behind_of(order, place, behind.index, order.size_of(epoch, place.window))
            moved = Position((behind,), step.number + 1, epoch, position.samples + done, None, marks)
            found.append((step, moved))
        step, moved = found[-1]
        found[-1] = step, self.settle(moved)[0]
        return found

    def _read_one(self, position: Position) -> list[tuple[Step, Position]]:
        step, behind = self.read(position)
        return [] if step is None else [(step, self.settle(behind)[0])]

    def settle(self, position: Position, count: int | None = None) -> tuple[Position, bool]:
        """The position in front of the next step that is delivered, and whether that is in another epoch.

        `count` is the number of samples that the next step is asked for, by default a global batch.
        """
        crossed = False
        while True:
            position, over = self._crossed(self._past_skipped(position), count)
            crossed = crossed or over
            if not over or self.ended(position) or not self.skipped(position.step):
                return position, crossed

    def ended(self, position: Position) -> bool:
        """Whether nothing comes any more, in any epoch: every source was used as often as it may be."""
        if self._unlimited:
            return False
        return all(
            feed.max_epochs is not None and place.epoch >= feed.max_epochs
            for feed, place in zip(self.feeds, position.places)
        )

    def step(self, number: int) -> Step:
        """What step `number` is made of, counted from the beginning of the first epoch."""
        position = self.seek(number)
        step, _ = self._read_raw(position)
        if step is None:
            raise IndexError(f"the plan has {position.step} steps, so there is no step {number}")
        return step

    def seek(self, number: int) -> Position:
        """The position in front of a step. Arithmetic for one source, if the number of its samples is; see `counts`."""
        if number < 0:
            raise IndexError(f"steps are counted from 0, got {number}")
        return self._crossed(self._seek_alone(number) if self.schedule is None else self._seek_mixed(number))[0]

    def seek_epoch(self, epoch: int) -> Position:
        """The position in front of an epoch."""
        return self.seek(sum(self.steps_in(earlier) for earlier in range(epoch)))

    def steps_in(self, epoch: int) -> int:
        """Steps of an epoch, skipped ones included."""
        if self.schedule is None:
            samples = self.feeds[0].order.count(epoch)
            return samples // self.global_batch if self.drop_last else -(-samples // self.global_batch)
        if self.stopping == "never":
            raise TypeError(
                "a mixture with stopping_strategy='never' has no end to count to; choose 'first_exhausted' or "
                "'all_exhausted', or count steps yourself"
            )
        if epoch not in self._steps:
            self._walk_epochs(epoch)
        return self._steps[epoch]

    def delivered_in(self, epoch: int) -> int:
        """Steps of an epoch that are delivered."""
        steps = self.steps_in(epoch)
        if not any(isinstance(edit, Skip) for edit in self.edits):
            return steps
        first = sum(self.steps_in(earlier) for earlier in range(epoch))
        return sum(not self.skipped(number) for number in range(first, first + steps))

    def next_epoch(self, position: Position) -> Position:
        """Behind the end of an epoch, the beginning of the next."""
        drawn = position.drawn
        if drawn is not None and drawn.out:
            # Sources that were used up may be used again.
            drawn = replace(drawn, start=drawn.position, base=drawn.counts, owed=(), out=())
        return position._replace(epoch=position.epoch + 1, samples=0, marks=position.places, drawn=drawn)

    def trace(self, source: str | int, row: int | None = None, *, epochs: int = 1) -> list[Use]:
        """Every use of a row in the first `epochs` passes over its source, in order.

        `trace("web", 4711)`, or `trace(4711)` if there is a single source.
        """
        if row is None:
            if len(self.feeds) > 1 or isinstance(source, str):
                raise ConfigError(f"say which row of which source: trace({self.names[0]!r}, 4711)")
            return self.trace(self.names[0], source, epochs=epochs)
        source = str(source)
        which = self._index(source)
        order = self.feeds[which].order
        if not 0 <= row < order.table.rows:
            raise IndexError(f"row {row} of {source!r}, which has {order.table.rows} rows")
        uses: list[Use] = []
        most = self.feeds[which].max_epochs
        for epoch in range(epochs if most is None else min(epochs, most)):
            for sample in order.find(epoch, row):
                use = self._use_alone(epoch, sample) if self.schedule is None else self._use_mixed(which, epoch, sample)
                if use is not None:
                    uses.append(replace(use, skipped=self._is_withheld(use.step, source, row)))
        return uses

    # Edits

    def skip(self, start: int, stop: int) -> Plan:
        """Never deliver the steps `start` to `stop` (not included). The others keep their numbers and their rows."""
        return self.edited(Skip(start, stop))

    def ban(self, rows: Mapping[str, Iterable[int]] | Iterable[int], *, step: int = 0) -> Plan:
        """Leave out some rows from `step` on. All others stay where they are; a sample left empty is a blank."""
        if not isinstance(rows, Mapping):
            if len(self.feeds) > 1:
                raise ConfigError(
                    f"say of which source: ban({{'{self.names[0]}': [...]}}); there are {list(self.names)}"
                )
            rows = {self.names[0]: rows}
        plan = self
        for name, numbers in rows.items():
            size = self.feeds[self._index(name)].order.table.rows
            banned = tuple(sorted(_row_numbers(numbers)))
            if banned and not (banned[0] >= 0 and banned[-1] < size):
                raise ConfigError(f"rows {banned[0]} to {banned[-1]} of {name!r}, which has {size} rows")
            plan = plan.edited(Ban(step, name, banned))
        return plan

    def reweight(self, step: int, weights: Mapping[str, float]) -> Plan:
        """Mix by other weights from `step` on. Every source goes on where it is."""
        if self.schedule is None:
            raise ConfigError("there is nothing to weigh: this plan has a single source without weights")
        return self.edited(Reweight(step, dict(weights)))

    def edited(self, *edits: Edit) -> Plan:
        """The plan with some edits more."""
        schedule = self.schedule
        for edit in edits:
            if isinstance(edit, Reweight) and schedule is not None:
                schedule = schedule.with_change(edit.step, edit.weights)
                Mixture(self.names, schedule, self.global_batch)
            if isinstance(edit, Ban):
                self._index(edit.source)
        return replace(self, edits=(*self.edits, *edits), _memo={}, _steps={}, _mixture=[])

    def skipped(self, number: int) -> bool:
        """Whether a step is not delivered."""
        return any(isinstance(edit, Skip) and edit.start <= number < edit.stop for edit in self.edits)

    # Behind the scenes

    @property
    def _mix(self) -> Mixture:
        if not self._mixture:
            assert self.schedule is not None
            schedule = self.schedule
            for edit in self.edits:
                if isinstance(edit, Reweight):
                    schedule = schedule.with_change(edit.step, edit.weights)
            self._mixture.append(Mixture(self.names, schedule, self.global_batch))
        return self._mixture[0]

    def _read_raw(self, position: Position) -> tuple[Step | None, Position]:
        """As `read`, but of skipped steps too."""
        if self.schedule is None:
            return self._read_alone(position, self.global_batch)
        return self._read_mixed(position, self.global_batch)

    def _read_alone(self, position: Position, count: int) -> tuple[Step | None, Position]:
        feed, place = self.feeds[0], position.places[0]
        if place.epoch > position.epoch or self.ended(position):
            return None, position
        samples, behind = take(feed.order, place, count, stay=True)
        if not len(samples) or (self.drop_last and len(samples) < count):
            # What is left is not enough for a batch; the next epoch begins without it.
            return None, position._replace(places=(Place(place.epoch + 1),))
        moved = Position(
            (behind,), position.step + 1, position.epoch, position.samples + len(samples), None, position.marks
        )
        sources = np.zeros(len(samples.rows), np.int64)
        return self._step(position, samples, sources, count), moved

    def _read_mixed(self, position: Position, count: int) -> tuple[Step | None, Position]:
        if self._epoch_over(position) or self.ended(position):
            return None, position
        ids, moved = self._draw(position, count)
        if not len(ids) or (self.drop_last and len(ids) < count):
            return None, self._leave(position)
        parts: list[Samples] = []
        places: list[Place] = []
        for number, (feed, place) in enumerate(zip(self.feeds, position.places)):
            wanted = int((ids == number).sum())
            samples, behind = take(feed.order, place, wanted, stay=False)
            parts.append(samples)
            places.append(behind)
        together = Samples.concat(parts)
        # The k-th sample drawn from a source is the k-th that was taken of it.
        order = np.empty(len(ids), np.int64)
        order[np.argsort(ids, kind="stable")] = np.arange(len(ids))
        samples = together.take(order)
        sources = np.repeat(ids.astype(np.int64), np.diff(samples.offsets))
        return self._step(position, samples, sources, count), moved._replace(places=tuple(places))

    def _draw(self, position: Position, count: int) -> tuple[Ints, Position]:
        """The sources of the next samples; places are not moved."""
        assert position.drawn is not None
        ids, drawn = self._mix.draw(position.drawn, count, self._limits(position, count))
        return ids, position._replace(drawn=drawn, step=position.step + 1, samples=position.samples + len(ids))

    def _limits(self, position: Position, count: int) -> list[int | None] | None:
        """The most samples of each source in all, as far as they could be reached by the next `count`."""
        assert position.drawn is not None
        limits: list[int | None] = []
        for feed, place, used, mark in zip(
            self.feeds, position.places, position.drawn.counts, position.marks, strict=True
        ):
            last = self._last_epoch(feed, mark)
            left = None if last is None else left_of(feed.order, place, last, count)
            limits.append(None if left is None else used + left)
        return limits if any(limit is not None for limit in limits) else None

    def _epoch_over(self, position: Position) -> bool:
        """Whether the mixture has come to where its epoch ends."""
        if self.stopping == "never" or not position.samples:
            return False
        passed = [
            (place.epoch - 1, place.window, place.index) >= (mark.epoch, mark.window, mark.index)
            for place, mark in zip(position.places, position.marks)
        ]
        if self.stopping != "first_exhausted" and any(passed):
            # Nobody waits for a source that gives nothing any more.
            passed = [done or self._is_out(which, position) for which, done in enumerate(passed)]
        return any(passed) if self.stopping == "first_exhausted" else all(passed)

    def _crossed(self, position: Position, count: int | None = None) -> tuple[Position, bool]:
        """In the next epoch, if there is nothing left of this one; and whether that is so."""
        if not self._is_over(position, count or self.global_batch):
            return position, False
        return self.next_epoch(self._leave(position)), True

    def _is_over(self, position: Position, count: int) -> bool:
        """Whether there is no batch of so many samples left in the epoch of a position."""
        if self.ended(position):
            return True
        if self.schedule is not None:
            return self._epoch_over(position) or self._runs_dry(position, count)
        place = position.places[0]
        if place.epoch > position.epoch:
            return True
        needed = count if self.drop_last else 1  # there may be windows without any
        left = left_of(self.feeds[0].order, place, place.epoch + 1, needed - 1)
        return left is not None

    def _runs_dry(self, position: Position, count: int) -> bool:
        """Whether sources that end for good have no batch left between them."""
        if self._limits(position, count) is None:
            return False
        ids, _ = self._draw(position, count)
        return len(ids) < (count if self.drop_last else 1)

    def _leave(self, position: Position) -> Position:
        """Past what is left of an epoch and fills no batch."""
        if self.schedule is None:
            left = position.places[0].epoch == position.epoch
            return position._replace(places=(Place(position.epoch + 1),)) if left else position
        if self._epoch_over(position):
            return position
        ends = (self._last_epoch(feed, mark) for feed, mark in zip(self.feeds, position.marks))
        places = (place if end is None else Place(end) for place, end in zip(position.places, ends))
        return position._replace(places=tuple(places))

    def _last_epoch(self, feed: Feed, mark: Place) -> int | None:
        """The epoch of a source in which no sample of it may be used any more, as things are; None if there is none."""
        if self.stopping != "all_exhausted_without_replacement":
            return feed.max_epochs
        return mark.epoch + 1 if feed.max_epochs is None else min(mark.epoch + 1, feed.max_epochs)

    def _step(self, position: Position, samples: Samples, sources: Ints, wanted: int) -> Step:
        for edit in self.edits:
            if isinstance(edit, Ban) and edit.step <= position.step:
                which = self._index(edit.source)
                gone = (sources == which) & np.isin(samples.rows, np.asarray(edit.rows, np.int64))
                if gone.any():
                    samples, sources = samples.where(~gone), sources[~gone]
        return Step(position.step, position.epoch, samples, sources, self.names, wanted)

    def _past_skipped(self, position: Position) -> Position:
        while self.skipped(position.step):
            stop = max(
                edit.stop for edit in self.edits if isinstance(edit, Skip) and edit.step <= position.step < edit.stop
            )
            if self.schedule is None and self.feeds[0].order.plain_counts() is not None:
                here = self._seek_alone(position.step)
                if (here.places, here.epoch) == (position.places, position.epoch):
                    position = self._seek_alone(stop)
                    continue
            step, behind = self._read_raw(position)
            if step is None:
                return position
            position = behind
        return position

    def _seek_alone(self, number: int) -> Position:
        order, left, epoch = self.feeds[0].order, number, 0
        plain = order.plain_counts()
        if plain is not None:
            steps = self.steps_in(0)
            epoch, left = divmod(number, steps) if steps else (0, 0)
        else:
            while left >= (steps := self.steps_in(epoch)):
                if not steps:
                    raise self._nothing_to_deliver(order.count(epoch))
                left, epoch = left - steps, epoch + 1
        place = order.place_of(epoch, left * self.global_batch)
        samples = left * self.global_batch
        return Position((place,), step=number, epoch=epoch, samples=samples, marks=(Place(epoch),))

    def _seek_mixed(self, number: int) -> Position:
        known = max((step for step in self._memo if step <= number), default=None)
        position = self.start() if known is None else self._memo[known]
        while position.step < number:
            position = self._walk(position)[1]
        return position

    def _walk(self, position: Position) -> tuple[Position, Position]:
        """In front of and behind the next step, over the ends of epochs, without putting the samples together."""
        position = self._crossed(position)[0]
        if self.ended(position):
            raise IndexError(f"the plan has {position.step} steps and ends there")
        ids, moved = self._draw(position, self.global_batch)
        if len(ids) < (self.global_batch if self.drop_last else 1):
            raise self._nothing_to_deliver(len(ids))
        counts = np.bincount(ids, minlength=len(self.feeds)).tolist()
        places = tuple(pass_by(f.order, p, n) for f, p, n in zip(self.feeds, position.places, counts))
        behind = moved._replace(places=places)
        if behind.step % _REMEMBERED_EVERY == 0:
            self._memo[behind.step] = behind
        return position, behind

    def _walk_epochs(self, epoch: int) -> None:
        """Count the steps of the epochs up to one."""
        position = self.start()
        first = 0
        while True:
            try:
                behind = self._walk(position)[1]
            except IndexError:
                self._steps[position.epoch] = position.step - first
                for later in range(position.epoch + 1, epoch + 1):
                    self._steps[later] = 0
                return
            if behind.epoch > position.epoch:
                self._steps[position.epoch] = position.step - first
                first = position.step
                if position.epoch == epoch:
                    return
            position = behind

    def _use_alone(self, epoch: int, sample: int) -> Use | None:
        """The step of a sample, None if it is in no batch."""
        within, slot = divmod(sample, self.global_batch)
        if within >= self.steps_in(epoch):
            return None
        plain = self.feeds[0].order.plain_counts() is not None
        before = epoch * self.steps_in(0) if plain else sum(map(self.steps_in, range(epoch)))
        return Use(before + within, epoch, slot)

    def _use_mixed(self, which: int, epoch: int, sample: int) -> Use | None:
        """The same for a sample of one of several sources: found by walking, from the nearest step that is known."""
        order = self.feeds[which].order
        target = order.place_of(epoch, sample)
        position = self.start()
        for known in self._memo.values():
            if known.step > position.step and known.places[which] <= target:
                position = known
        try:
            while True:
                begun, behind = self._walk(position)
                if behind.places[which] > target:
                    break
                if self._is_out(which, behind):
                    return None
                position = behind
        except IndexError:
            return None
        if begun.places[which] > target:
            return None  # it was among what did not fill a batch
        place = begun.places[which]
        inside = order.number_of(target) - order.number_of(place)
        inside += sum(order.count(earlier) for earlier in range(place.epoch, epoch))
        ids, _ = self._draw(begun, self.global_batch)
        return Use(begun.step, epoch, int(np.flatnonzero(ids == which)[inside]))

    def _is_out(self, which: int, position: Position) -> bool:
        """Whether a source gives nothing any more: it was used as often as it may be, or is never weighed again."""
        most = self.feeds[which].max_epochs
        silent = self._silent_from[which]
        ended = most is not None and position.places[which].epoch >= most
        return ended or (silent is not None and position.step >= silent)

    @cached_property
    def _silent_from(self) -> list[int | None]:
        """For each source the step from which on its weight is 0, if there is one."""
        schedule = self._mix.schedule
        last = max(step for part in schedule.parts for step, _ in part.points)
        weights = schedule.weights_at(last)
        return [None if weights[name] else last for name in self.names]

    def _is_withheld(self, number: int, source: str, row: int) -> bool:
        banned = (
            isinstance(edit, Ban) and edit.source == source and edit.step <= number and row in edit.rows
            for edit in self.edits
        )
        return self.skipped(number) or any(banned)

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise ConfigError(
                f"no source is called {name!r}{did_you_mean(name, self.names)}; there are {list(self.names)}"
            )
        return self.names.index(name)

    def _check_not_empty(self, feed: Feed) -> None:
        if not feed.order.table.rows:
            raise ConfigError(f"there are no rows in {feed.name!r}, so there is nothing to train on")
        if not feed.order.table.tokens:
            raise ConfigError(f"there are no tokens in the rows of {feed.name!r}, so there is nothing to train on")
        plain = feed.order.plain_counts()
        if plain is None or self.schedule is not None or not self.drop_last:
            return
        if int(plain.sum()) < self.global_batch:
            raise self._nothing_to_deliver(int(plain.sum()))

    def _nothing_to_deliver(self, samples: int) -> ConfigError:
        return ConfigError(
            f"an epoch has {samples} samples, fewer than a global batch of {self.global_batch}, and drop_last=True "
            "drops what does not fill a batch, so nothing would be delivered; use a smaller batch, or drop_last=False"
        )


def _row_numbers(numbers: Iterable[int]) -> set[int]:
    try:
        return {index(number) for number in numbers}
    except TypeError:
        raise ConfigError(f"rows to ban are whole numbers, such as ban([3, 5]), got {numbers!r}") from None
