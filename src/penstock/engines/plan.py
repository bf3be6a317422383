"""Plan of a job: which steps of a pipeline run on splits, which over partitions of keys, and which in one place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.memory.budget import format_bytes
from penstock.pipeline.chain import stage_name
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.stages import Finishing, FirstOfKey, Stateful, Transform
from penstock.sinks import StoreSink
from penstock.sinks.file_sink import FileSink


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps that run on every split by itself, after the duplicates that the phase before found are dropped."""

    transforms: tuple[Transform, ...]
    drops: FirstOfKey | None = None
    """The stage whose duplicates are dropped first; None in the first phase."""
    keys: FirstOfKey | None = None
    """The stage that needs the keys of the rows; None in the last phase."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Phases over splits, and the steps that need all rows in order."""

    phases: tuple[Phase, ...]
    rest: tuple[Transform, ...]
    """Steps that run in one place: the first that needs order and does not say how to partition, and those after it."""
    shards: bool
    """True if tasks write the shards of a store; otherwise all rows go through the sink in one place."""
    text: bool = False
    """True if tasks write the text of a file, which is laid together in one place."""

    @property
    def in_one_place(self) -> bool:
        """True if the first step needs order, so that there is nothing to share out."""
        first = self.phases[0]
        return bool(self.rest) and len(self.phases) == 1 and not first.transforms

    @classmethod
    def of(cls, pipeline: Pipeline) -> JobPlan:
        phases: list[Phase] = []
        here: list[Transform] = []
        before: FirstOfKey | None = None
        rest: Sequence[Transform] = ()
        for number, transform in enumerate(pipeline.transforms):
            if isinstance(transform, FirstOfKey):
                phases.append(Phase(tuple(here), before, transform))
                here, before = [], transform
            elif isinstance(transform, Stateful | Finishing):
                rest = pipeline.transforms[number:]
                break
            else:
                here.append(transform)
        phases.append(Phase(tuple(here), before))
        sink = pipeline.sink
        parallel = not rest and isinstance(sink, StoreSink) and sink.writes_shards
        text = not rest and isinstance(sink, FileSink) and sink.takes_parts
        return cls(tuple(phases), tuple(rest), parallel, text)

    def lines(self, pipeline: Pipeline, splits: int, nbytes: int) -> Iterator[str]:
        """The plan in words, a line a phase."""
        size = f" of about {format_bytes(nbytes // max(1, splits))}" if nbytes else ""
        if self.in_one_place:
            steps = ", ".join(map(stage_name, (pipeline.source, *self.rest, pipeline.sink)))
            yield f"one place    {steps}: the first step needs the rows in order"
            return
        yield f"{splits:,} splits{size} of {stage_name(pipeline.source)}"
        for phase in self.phases:
            if phase.drops is not None:
                yield f"by key       {stage_name(phase.drops)}: keys are partitioned, the first row of each stays"
            steps = ", ".join(map(stage_name, phase.transforms)) or "rows as they are"
            yield f"each split   {steps}"
        if self.rest:
            yield f"one place    {', '.join(map(stage_name, self.rest))}: needs the rows in order"
        where = "each shard  " if self.shards else "each split  " if self.text else "one place   "
        yield f"{where} {stage_name(pipeline.sink)}"
