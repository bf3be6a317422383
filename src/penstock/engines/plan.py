"""Plan of a job: which steps of a pipeline run on splits, which over partitions of keys, and which in one place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from penstock.memory.budget import format_bytes
from penstock.pipeline.chain import stage_name
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.stages import Finishing, FirstOfKey, FitInParts, Stateful, Transform
from penstock.sinks import StoreSink
from penstock.sinks.file_sink import FileSink
from penstock.sources.record_source import RecordSource


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

    def stages(self) -> list[Transform]:
        """All transforms, in the order of the pipeline."""
        keyed = ([*phase.transforms, *([] if phase.keys is None else [phase.keys])] for phase in self.phases)
        return [*chain.from_iterable(keyed), *self.rest]  # type: ignore[list-item]

    def lines(self, pipeline: Pipeline, splits: int, nbytes: int, fit: Sequence[int] = ()) -> Iterator[str]:
        """The plan in words, a line a phase."""
        fits, stages = Fits.of(self, fit), self.stages()
        size = f" of about {format_bytes(nbytes // max(1, splits))}" if nbytes else ""
        joined = [f"one place    fit of {stage_name(stages[n])}, in a pass over all rows" for n in fits.joined]
        if self.in_one_place:
            yield from joined
            steps = ", ".join(map(stage_name, (pipeline.source, *self.rest, pipeline.sink)))
            yield f"one place    {steps}: the first step needs the rows in order"
            return
        yield f"{splits:,} {'split' if splits == 1 else 'splits'}{size} of {stage_name(pipeline.source)}"
        if isinstance(pipeline.source, RecordSource) and not pipeline.source.has_schema:
            yield "each split   types of the columns, of all rows; schema= saves this pass"
        for position in fits.here:
            yield f"driver       fit of {stage_name(stages[position])}, in a local pass over all rows: {fits.why_here}"
        for phase in self.phases:
            if phase.drops is not None:
                yield f"by key       {stage_name(phase.drops)}: keys are partitioned, the first row of each stays"
            for position in fits.by_tasks:
                if any(stages[position] is each for each in phase.transforms):
                    yield f"each split   fit of {stage_name(stages[position])}: statistics of the splits are merged"
            steps = ", ".join(map(stage_name, phase.transforms)) or "rows as they are"
            yield f"each split   {steps}"
        yield from joined
        if self.rest:
            yield f"one place    {', '.join(map(stage_name, self.rest))}: needs the rows in order"
        where = "each shard  " if self.shards else "each split  " if self.text else "one place   "
        yield f"{where} {stage_name(pipeline.sink)}"


@dataclass(frozen=True, slots=True)
class Fits:
    """Positions of the transforms that are fitted, by where that happens."""

    by_tasks: tuple[int, ...]
    """On every split by itself; what the splits have learned is merged."""
    here: tuple[int, ...]
    """In local passes of the driver, before anything else: one of them cannot be fitted in parts."""
    joined: tuple[int, ...]
    """Among the steps that run in one place, when their rows are there."""
    why_here: str = ""

    def all(self) -> list[int]:
        return [*self.here, *self.by_tasks, *self.joined]

    @classmethod
    def of(cls, plan: JobPlan, fit: Sequence[int]) -> Fits:
        stages, first_joined = plan.stages(), len(plan.stages()) - len(plan.rest)
        shared = [position for position in fit if position < first_joined]
        whole = [position for position in shared if not isinstance(stages[position], FitInParts)]
        last = whole[-1] if whole else -1
        why = "" if not whole else f"{stage_name(stages[last])} has no partial_fit, merge, to_dict and from_dict"
        return cls(
            tuple(position for position in shared if position > last),
            tuple(position for position in shared if position <= last),
            tuple(position for position in fit if position >= first_joined),
            why,
        )
