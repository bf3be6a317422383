"""Steps of one rank, from any position: the streams that it reads, their look-ahead, and the arrays of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from penstock.batching.collate import CompactBatch
from penstock.loaders.streamed.sampled_windows import SampledWindow, WindowMakers
from penstock.loaders.streamed.spec import StreamSpec
from penstock.loaders.streamed.stream import Stream, StreamLane, collate_samples
from penstock.loaders.streamed.windows import StreamCursor, WindowCounts
from penstock.memory import MemoryBudget


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Position between two steps. Streams without a cursor are read again from the beginning of the epoch."""

    epoch: int = 0
    step: int = 0
    """Steps since the start of the run."""
    epoch_step: int = 0
    """Steps since the start of the epoch."""
    cursors: Mapping[int, StreamCursor] = field(default_factory=dict)
    taken: int = 0
    """Slots of each rank that were taken of the step at the cursors, after batches of another size."""

    def next_epoch(self) -> StreamPosition:
        """Beginning of the epoch after the one that ends here."""
        return StreamPosition(self.epoch + 1, self.step)


Sample = tuple[SampledWindow, int]
"""A sample, as a window and an index."""


class TakenStep(NamedTuple):
    """Samples of one step of this rank."""

    samples: list[tuple[int, Sample]]
    """Number of a slot of this rank, and its sample. Slots whose streams have ended have none."""
    following: StreamPosition
    counts: list[WindowCounts]
    """Of the windows that were begun."""


class MadeStep(NamedTuple):
    """One step of this rank."""

    compact: CompactBatch | None
    """None at the end of an epoch of a single rank; several ranks get padding."""
    metadata: dict[str, Any]
    tokens: int
    """Tokens without padding."""
    has_data: bool
    following: StreamPosition
    counts: list[WindowCounts]
    """Of the windows that were begun."""


class StreamSteps(Protocol):
    """Maker of steps, in this process or in others."""

    @property
    def at_hand(self) -> int:
        """Steps with data that were made already."""
        ...

    @property
    def elsewhere(self) -> bool:
        """True if other processes make the steps."""
        ...

    def make(self, position: StreamPosition) -> MadeStep: ...
    def expect(self, position: StreamPosition) -> None:
        """A position that will probably be asked for next."""
        ...

    def forget(self) -> None:
        """Drop what was read ahead."""
        ...

    def close(self) -> None: ...


class StepMaker:
    """Steps made in this process. Not thread-safe."""

    at_hand, elsewhere = 0, False

    def __init__(self, spec: StreamSpec, makers: WindowMakers, budget: MemoryBudget) -> None:
        self.spec, self._makers, self.budget = spec, makers, budget
        self._live: tuple[int, dict[int, Stream]] | None = None
        self._last_position: StreamPosition | None = None
        """Position of the streams as they are, if it is known."""
        self._counts: list[WindowCounts] = []

    def make(self, position: StreamPosition) -> MadeStep:
        """The step at a position."""
        taken, following, counts = self.take(position)
        compact = None
        metadata: dict[str, Any] = {"step": position.step, "epoch": position.epoch}
        tokens = 0
        if taken or self.spec.rank.world_size > 1:
            compact, found, tokens = self.collate([sample for _, sample in taken])
            metadata = found | metadata
        return MadeStep(compact, metadata, tokens, bool(taken), following, counts)

    def take(self, position: StreamPosition) -> TakenStep:
        """Samples of the step at a position, not collated."""
        spec, step = self.spec, position.epoch_step
        streams = self._streams_at(position)
        for lane in spec.lanes:
            if not (stream := streams[lane.due(step)]).left:
                stream.begin()
        taken = [sample for lane in spec.lanes for sample in self._own(lane, lane.read(step, streams))]
        cursors = {number: stream.cursor for number, stream in streams.items()}
        self._look_ahead(streams, step + 1)
        self._last_position = StreamPosition(position.epoch, position.step + 1, step + 1, cursors)
        counts, self._counts = self._counts, []
        return TakenStep(taken, self._last_position, counts)

    def collate(self, taken: Sequence[Sample]) -> tuple[CompactBatch, dict[str, Any], int]:
        """A batch of samples, the origin of each of its parts, and its tokens without padding."""
        spec = self.spec
        made = collate_samples(taken, spec.catalog, spec.form, masked=spec.input.mask is not None)
        for spilled in {window.spilled for window, _ in taken}:
            if spilled is not None:
                spilled.drop_pages()
        return made

    def expect(self, position: StreamPosition) -> None:
        """Nothing: windows are begun when a position is asked for."""

    def forget(self) -> None:
        if self._live is not None:
            for stream in self._live[1].values():
                stream.close()
        self._live = self._last_position = None

    def close(self) -> None:
        self.forget()
        self._makers.close()

    def _streams_at(self, position: StreamPosition) -> dict[int, Stream]:
        """Streams of this rank, at the cursors of a position."""
        if self._live is None or self._live[0] != position.epoch:
            self.forget()
            self._live = (position.epoch, self._new_streams(position.epoch))
        streams = self._live[1]
        if position is self._last_position:
            self._last_position = None
            return streams
        self._last_position = None
        for lane in self.spec.lanes:
            if all(number in position.cursors for number in lane.streams):
                for number in lane.streams:
                    streams[number].seek(position.cursors[number])
            elif lane.streams:
                self._replay(lane, streams, position.epoch_step)
        return streams

    def _new_streams(self, epoch: int) -> dict[int, Stream]:
        sequences = self.spec.sequences(epoch)
        made: dict[int, Stream] = {}
        for lane in self.spec.lanes:
            # A lane that begins in the slots of another rank is counted there.
            count = self._counts_add if lane.slots.start in self.spec.slots else None
            made |= {number: Stream(sequences[number], self._makers, count) for number in lane.streams}
        return made

    def _counts_add(self, counts: WindowCounts) -> None:
        self._counts.append(counts)

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

    def _own(self, lane: StreamLane, taken: list[Sample]) -> list[tuple[int, Sample]]:
        """Samples of a lane that are in the slots of this rank, with the numbers of these slots from its first on."""
        mine = self.spec.slots
        return [(slot - mine.start, sample) for slot, sample in zip(lane.slots, taken) if slot in mine]

    def _look_ahead(self, streams: dict[int, Stream], step: int) -> None:
        """Start to make the windows that are needed soonest, as far as the budget has room."""
        free = 2 * self._makers.count + 2 - sum(stream.waiting for stream in streams.values())
        if free <= 0:
            return
        soonest = []
        for lane in self.spec.lanes:
            turns = len(lane.streams)
            for number in lane.streams:
                stream = streams[number]
                if not stream.waiting and not stream.over:
                    wait = (number - lane.streams.start - step) % turns
                    soonest.append((wait + stream.left * turns // len(lane.slots), number))
        soonest.sort()
        room = self.budget.available
        for _, number in soonest[:free]:
            room -= max(streams[number].nbytes, self.spec.options.window().nbytes)
            if room < 0:
                return
            streams[number].begin()
