"""Mixtures of streams: samples of several streams in the proportion of their weights."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from penstock._suggest import did_you_mean
from penstock.batching.backends import get_backend
from penstock.batching.batch import TrainingBatch
from penstock.batching.collate import width
from penstock.batching.options import Options
from penstock.distributed.ranks import Rank
from penstock.errors import ConfigError, ResumeError
from penstock.files.states import StateFormat
from penstock.loaders.streamed.engine import StreamEngine
from penstock.loaders.streamed.reader import StreamReader
from penstock.loaders.streamed.steps import Sample, StreamPosition
from penstock.loaders.streamed.stream import CollatedSamples
from penstock.metrics.readings import Readings
from penstock.order.mixing import Drawn, Mixture
from penstock.order.samples import Samples
from penstock.order.schedules import Schedule

_STATE = StateFormat("mixed streams", "a mixture of streams")
_STOPPING = ("first_exhausted", "all_exhausted", "never")


class StreamMixPosition(NamedTuple):
    """Position between two steps of a mixture of streams."""

    drawn: Drawn
    places: tuple[StreamPosition, ...]
    """Position of each stream."""
    step: int = 0
    epoch: int = 0
    used: tuple[int, ...] = ()
    """Samples that were taken of the current epoch of each stream."""
    starts: tuple[tuple[int, int], ...] = ()
    """Epoch of each stream, and samples taken of it, where this epoch of the mixture began."""


class StreamMixEngine:
    """Batches of one rank of a mixture of streams.

    Every rank reads every stream, so all know the whole batch and the end of each stream without talking to each other,
    and a state is the same on every rank. It costs the tokenizing of all batches on each rank.
    """

    workers = "threads (each rank reads all streams of a mixture)"

    def __init__(
        self, engines: Mapping[str, StreamEngine], options: Options, schedule: Schedule, stopping: str
    ) -> None:
        if stopping not in _STOPPING:
            raise ConfigError(
                f"stopping_strategy of streams must be one of {', '.join(_STOPPING)}, got {stopping!r}"
                f"{did_you_mean(stopping, _STOPPING)}; others need the lengths of the sources, which prepared ones have"
            )
        if options.drop_last or options.sharding is not None or options.max_tokens is not None:
            raise ConfigError("drop_last, sharding and max_tokens need prepared data; leave them out, or prepare it")
        self.options, self.rank, self.batch_size = options, options.find_rank(), options.batch_size
        self._names, self._stopping = tuple(engines), stopping
        global_batch = self.batch_size * self.rank.world_size
        self._mixture = Mixture(self._names, schedule, global_batch)
        self._readers = [_whole(engine.reader, global_batch, options) for engine in engines.values()]
        self._form = self._readers[0].form
        for name, reader in zip(self._names, self._readers):
            self._form.check_same(self._names[0], reader.form, name)
        if self.rank.world_size > 1:
            self._form = replace(self._form, fields=self._form.fields - {"num_items_in_batch"})

    @property
    def names(self) -> str:
        return ", ".join(self._names)

    def start(self) -> StreamMixPosition:
        places, none = tuple(reader.start() for reader in self._readers), len(self._readers)
        return StreamMixPosition(self._mixture.start(), places, used=(0,) * none, starts=((0, 0),) * none)

    def seek(self, step: int) -> StreamMixPosition:
        raise ConfigError(f"a mixture of streams cannot seek to step {step}; load a state, or prepare the data")

    def seek_epoch(self, epoch: int, position: StreamMixPosition) -> StreamMixPosition:
        if epoch:
            raise ConfigError(f"a mixture of streams cannot seek to epoch {epoch}; load a state, or prepare the data")
        return self.start()

    def one(self, position: StreamMixPosition, batch_size: int | None) -> tuple[TrainingBatch, StreamMixPosition]:
        count = (self.batch_size if batch_size is None else batch_size) * self.rank.world_size
        ids, drawn = self._mixture.draw(position.drawn, count)
        taken: list[tuple[int, Sample]] = [(-1, None)] * count  # type: ignore[list-item]
        places, used = list(position.places), list(position.used)
        for number, reader in enumerate(self._readers):
            mine = np.flatnonzero(ids == number).tolist()
            samples, places[number], used[number] = self._take(reader, places[number], used[number], len(mine))
            for at, sample in zip(mine, samples):
                taken[at] = (number, sample)
        following = position._replace(drawn=drawn, places=tuple(places), step=position.step + 1, used=tuple(used))
        return self._batch(taken, position), self._settled(following)

    def item(self, epoch: int, number: int) -> TrainingBatch:
        raise TypeError("a mixture of streams has no random access; prepare the data to get batches by number")

    def position_of(self, epoch: int, number: int) -> StreamMixPosition:
        raise TypeError("a mixture of streams cannot be used by worker processes of torch; prepare the data")

    number_of: Any = position_of

    def count(self, epoch: int) -> int:
        raise TypeError("the number of batches of a mixture of streams is unknown before its end; prepare the data")

    def batches(self, position: StreamMixPosition) -> Generator[tuple[TrainingBatch, StreamMixPosition], None, None]:
        epoch = position.epoch
        while position.epoch == epoch:
            batch, position = self.one(position, None)
            yield batch, position

    def to_state(self, position: StreamMixPosition) -> dict[str, Any]:
        streams = [reader.to_state(place) for reader, place in zip(self._readers, position.places)]
        facts = {"names": list(self._names), "step": position.step, "epoch": position.epoch}
        facts |= {"drawn": position.drawn.to_json(), "mixed": streams}
        facts |= {"used": list(position.used), "starts": [list(start) for start in position.starts]}
        return _STATE.write(facts)

    def from_state(self, state: Mapping[str, Any], *, new_batch_size: bool = False) -> StreamMixPosition:
        _STATE.read(state)
        if state.get("names") != list(self._names):
            raise ResumeError(f"the state has the streams {state.get('names')}, and this mixture {list(self._names)}")
        places = [reader.from_state(each) for reader, each in zip(self._readers, state["mixed"])]
        drawn = Drawn.from_json(state["drawn"])
        starts = tuple((int(epoch), int(used)) for epoch, used in state["starts"])
        step, epoch = int(state["step"]), int(state["epoch"])
        return StreamMixPosition(drawn, tuple(places), step, epoch, tuple(state["used"]), starts)

    def readings(self) -> Readings:
        """Metrics of the rows that this rank has read, of all streams."""
        found: Readings = {}
        for reader in self._readers:
            for key, value in reader.counts.readings().items():
                found[key] = found.get(key, 0) + value
        return found

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def _take(
        self, reader: StreamReader, place: StreamPosition, used: int, count: int
    ) -> tuple[list[Sample], StreamPosition, int]:
        """The next samples of a stream, which begins again at its end, and how many were taken of its epoch then."""
        samples: list[Sample] = []
        while len(samples) < count:
            more, place, over = reader.take(place, count - len(samples))
            samples += more
            used += len(more)
            if over:
                if not more and not place.epoch_step:
                    raise ConfigError(f"{reader.names} has no samples, so it cannot be mixed")
                place, used = reader.next_epoch(place), 0
        if count and reader.has_ended(place):
            place, used = reader.next_epoch(place), 0
        return samples, place, used

    def _settled(self, position: StreamMixPosition) -> StreamMixPosition:
        """Position in the next epoch, if this one is over: if streams have come to where they were at its beginning."""
        least = {"first_exhausted": 1, "all_exhausted": len(self._names)}.get(self._stopping)
        reached = [(place.epoch, used) for place, used in zip(position.places, position.used)]
        passed = [(epoch - 1, used) >= start for (epoch, used), start in zip(reached, position.starts)]
        if least is None or sum(passed) < least:
            return position
        return position._replace(epoch=position.epoch + 1, starts=tuple(reached))

    def _batch(self, taken: list[tuple[int, Sample]], position: StreamMixPosition) -> TrainingBatch:
        """Batch of this rank, as wide as that of all ranks."""
        each = len(taken) // self.rank.world_size
        mine = taken[self.rank.rank * each : (self.rank.rank + 1) * each]
        whole = Samples.concat([window.samples.slice(index, index + 1) for _, (window, index) in taken])
        masked = any(reader.spec.input.mask is not None for reader in self._readers)
        columns = width(whole, self._form)
        made = CollatedSamples([sample for _, sample in mine], self._form, masked=masked, columns=columns)
        of_sample = np.array([number for number, _ in mine], np.int64)
        source = np.repeat(of_sample, np.diff(made.numbered.offsets))
        by_bytes = np.array([reader.catalog.by_bytes for reader in self._readers])[source]
        metadata = {
            "step": position.step,
            "epoch": position.epoch,
            "sources": self._names,
            "source": source,
            "row": np.where(by_bytes, -1, made.places),
            "offset": np.where(by_bytes, made.places, -1),
            "sample": made.numbered.numbers(),
        }
        return TrainingBatch.of_compact(made.compact, metadata, get_backend(self.options.backend), made.tokens)


def _whole(reader: StreamReader, global_batch: int, options: Options) -> StreamReader:
    """Reader of all samples of a stream, on every rank, for batches of the mixture."""
    spec = reader.spec
    return StreamReader(
        spec.recipe,
        spec.paths,
        spec.sampling.sampling,
        spec.form,
        global_batch=global_batch,
        rank=Rank(),
        seed=options.seed,
        shuffle=bool(options.shuffle),
        options=replace(spec.options, steps_per_epoch=None, rendezvous=None, workers="auto", worker_type="thread"),
        budget=options.memory,
    )
