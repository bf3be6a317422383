"""First passes of a job: column types and fits, which need all rows before the first one leaves, by tasks over splits.

Types of text formats, statistics of transforms that are fitted, and columns of functions. Each is noted in the job's
directory under a name; a task is told the names it needs, and takes each once in a process.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.engines.executor import Task
from penstock.engines.job_directory import JobDirectory
from penstock.engines.parts import schema_of, schema_text
from penstock.engines.plan import Fits, JobPlan
from penstock.engines.records import PhaseRecords, empty_record, task_name
from penstock.engines.rejected_parts import RejectedParts, count_lines
from penstock.engines.row_types import merge_scans, types_missing
from penstock.engines.splits import described
from penstock.errors import StageError
from penstock.pipeline.functions import FunctionStage
from penstock.pipeline.pipeline import Pipeline, fit_config, fit_transforms
from penstock.pipeline.quarantine import BadRows
from penstock.pipeline.stages import Sink, Transform

if TYPE_CHECKING:
    from penstock.engines.work import JobWork

TYPES = "learned-types"
NOTHING_FOUND: dict[str, Any] = {"types": schema_text(pa.schema([])), "records": [], "files": [], "found": False}
"""Record of a task of a first pass that crashes its workers, and is left out: the rows are, later."""


class FirstPasses:
    """First passes of one job, on the driver's side."""

    def __init__(self, pipeline: Pipeline, plan: JobPlan, directory: JobDirectory, fit: Sequence[int]) -> None:
        self._pipeline, self._plan, self._directory = pipeline, plan, directory
        self.fits = Fits.of(plan, fit)
        self._unfitted = {id(pipeline.transforms[position]) for position in self.fits.by_tasks}
        self._types = types_missing(pipeline.source)
        self.names: list[str] = []
        """Names of what is known, in the order in which it became known."""

    @property
    def pending(self) -> bool:
        """True if tasks have to run before columns of functions are learned, and tasks of rows begin."""
        return self._types or bool(self._unfitted)

    def fit_here(self) -> None:
        """Fit in local passes what cannot be fitted in parts, before the work is sent out."""
        if self.fits.here:
            fit_transforms(self._pipeline, self.fits.here)
            self._types = types_missing(self._pipeline.source)

    def cut(self, transforms: list[Any]) -> list[Any]:
        """Transforms before the first that is not fitted yet."""
        return transforms[: next((n for n, each in enumerate(transforms) if id(each) in self._unfitted), None)]

    def run(
        self,
        work: JobWork,
        phases: Sequence[PhaseRecords],
        run_tasks: Callable[[list[Task]], Any],
        learn: Callable[[], None],
    ) -> None:
        """Run the first passes that the tasks of the next phase need."""
        source, phase = self._pipeline.source, len(phases)
        begins = self.pending and not self.names
        if self._types:
            self._types = False
            self._take(TYPES, work, lambda: self._learn_types(work, run_tasks))
        if begins:
            self._learn_columns(work, learn)
        stages = self._plan.stages()
        in_phase = {id(transform) for transform in self._plan.phases[phase].transforms}
        for position in [p for p in self.fits.by_tasks if id(stages[p]) in in_phase]:
            fit = partial(self._fit, work, phases, position, run_tasks)
            self._take(f"learned-fit-{position}", work, fit)
            self._unfitted.discard(id(stages[position]))
            self._learn_columns(work, learn)
        close = getattr(source, "close", None)
        if callable(close):
            close()

    def _take(self, name: str, work: JobWork, find: Callable[[], dict[str, Any]]) -> None:
        """Compute facts, or read those of an earlier run, and give them to the stage."""
        found = self._directory.read_json(f"done/{name}")
        if found is None or found["plan"] != work.mark:
            found = find() | {"plan": work.mark}
            self._directory.finish(name, found)
        take_facts(work, found)
        self.names.append(name)

    def _learn_types(self, work: JobWork, run_tasks: Callable[[list[Task]], Any]) -> dict[str, Any]:
        source: Any = self._pipeline.source
        names = [entry[0] for entry in work.inputs]
        tasks = [
            Task(
                f"types-{number:06d}",
                "types",
                {"phase": 0, "number": number, "splits": bundle.to_json()},
                described(source, bundle, names),
            )
            for number, bundle in enumerate(work.bundles)
        ]
        run_tasks(tasks)
        records = (self._directory.record(task.name) for task in tasks)
        return {"types": schema_text(merge_scans(source, work.bundles, records))}

    def _learn_columns(self, work: JobWork, learn: Callable[[], None]) -> None:
        """Columns of the functions up to the next transform that has to be fitted."""
        stages = [(n, each) for n, each in enumerate(self._plan.stages()) if isinstance(each, FunctionStage)]

        def find() -> dict[str, Any]:
            learn()
            return {"columns": [[n, schema_text(each.output_schema)] for n, each in stages]}

        if any(each.learning for _, each in stages):
            self._take(f"learned-columns-{len(self.names)}", work, find)

    def _fit_tasks(self, work: JobWork, phase: int, position: int) -> Iterator[Task]:
        names = [entry[0] for entry in work.inputs]
        for number, bundle in enumerate(work.bundles):
            arguments: dict[str, Any] = {"phase": phase, "number": number, "position": position}
            arguments |= {"learned": list(self.names), "tasks": len(work.bundles)}
            if not phase:
                arguments["splits"] = bundle.to_json()
            shown = described(self._pipeline.source, bundle, names)
            yield Task(task_name(position, number, "fit"), "fit", arguments, shown)

    def _fit(
        self,
        work: JobWork,
        phases: Sequence[PhaseRecords],
        position: int,
        run_tasks: Callable[[list[Task]], Any],
    ) -> dict[str, Any]:
        tasks = [*self._fit_tasks(work, len(phases), position)]
        run_tasks(tasks)
        learner = unfitted(self._plan.stages()[position])
        rows = PhaseRecords(len(tasks), position, "fit")
        for number, task in enumerate(tasks):
            rows.add(number, empty_record() | self._directory.record(task.name))
        self._check_bad_rows(work, [*phases, rows])
        for task in tasks:
            if self._directory.record(task.name)["found"]:
                with self._directory.opened(f"{task.name}.json") as path:
                    learner.merge(type(learner).from_dict(json.loads(path.read_bytes())))
        return {"position": position, "fitted": learner.to_dict()}

    def _check_bad_rows(self, work: JobWork, phases: Sequence[PhaseRecords]) -> None:
        """Refuse more bad rows than a run allows, as the pass of a local run does: before anything is written."""
        bad = BadRows(fit_config(self._pipeline.config), None)
        RejectedParts(self._pipeline.source, work, phases).give(bad)
        bad.finish(phases[0].sums["rows_in"])


def take_facts(work: JobWork, facts: dict[str, Any]) -> None:
    """Have the source or a transform of the work take what a first pass has found."""
    stages: Sequence[Any] = work.plan.stages()
    if "types" in facts:
        work.source._take_schema(schema_of(facts["types"]))
    for position, text in facts.get("columns", ()):
        if text is not None:
            stages[position].fix_output_schema(schema_of(text))
    if "fitted" in facts:
        stage = stages[facts["position"]]
        stage.fit(()).merge(type(stage).from_dict(facts["fitted"]))


def unfitted(stage: Any) -> Any:
    """A copy of a transform that has learned nothing."""
    return type(stage).from_dict(stage.to_dict()).fit(())


def fit_part(work: JobWork, task: Task, sources: Iterator[tuple[Any, Any]]) -> dict[str, Any]:
    """Fit a transform on the rows of one task, and leave what it has learned as a part."""
    phase = task.arguments["phase"]
    stage = work.plan.stages()[task.arguments["position"]]
    before: list[Transform] = []
    for transform in work.plan.phases[phase].transforms:
        if transform is stage:
            break
        before.append(transform)
    learner, config = unfitted(stage), fit_config(work.config)
    record, bad = empty_record() | {"found": True}, Counter[str]()
    with TemporaryDirectory(prefix="penstock-task-") as folder:
        for file, source in sources:
            lines = Path(folder) / f"bad-{len(record['files'])}"
            limited = work.task_config(config, lines)
            sink = LearnerSink(learner)
            try:
                report = Pipeline(source, before, sink, limited, work.budget_bytes).run()
            except StageError as error:
                raise sink.error or error from None  # that of the transform, as in a local pass
            record["rows_in"] += report.rows_in
            record["files"].append(file)
            record["records"].append(getattr(source, "records", None))
            record["bad_lines"].append(count_lines(lines))
            bad.update(report.quarantined)
            bad.update(report.skipped)
        work.write_bad_lines(task, Path(folder), record["bad_lines"], known=phase == 0)
    with work.directory.created(f"{task.name}.json") as path:
        path.write_text(json.dumps(learner.to_dict()))
    return record | {"bad": dict(bad)}


class LearnerSink(Sink):
    """Sink that fits a transform."""

    def __init__(self, learner: Any) -> None:
        self._learner = learner
        self.error: Exception | None = None
        """What it has raised."""

    def consume(self, batch: pa.RecordBatch) -> None:
        try:
            if batch.num_rows:
                self._learner.partial_fit(batch)
        except Exception as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Nothing: what was learned is written by the task."""
