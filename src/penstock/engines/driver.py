"""Driver of a job: submits tasks, counts crashes, keeps what is done, and puts the results together in order."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.engines.executor import Executor, Outcome, Task
from penstock.engines.first_passes import FirstPasses
from penstock.engines.job_directory import MARKER_NAME, PLAN_NAME, JobDirectory
from penstock.engines.parts import PartsSource, schema_of, schema_text
from penstock.engines.plan import JobPlan
from penstock.engines.shards import shard_tasks
from penstock.engines.splits import Bundle, bundles_of, described
from penstock.engines.work import JobWork, input_mark, moved, row_unknown, shifted
from penstock.errors import ConfigError, DataError, ResumeError, StageError, UnfinishedJobError
from penstock.pipeline.chain import Inferring, stage_name
from penstock.pipeline.checkpoint import fingerprint
from penstock.pipeline.functions import FunctionStage
from penstock.pipeline.pipeline import Pipeline, fit_transforms
from penstock.pipeline.quarantine import BadRows
from penstock.pipeline.report import Report
from penstock.pipeline.stages import Durable
from penstock.sinks import StoreSink
from penstock.sources.splits import has_files, input_files

log = logging.getLogger("penstock.engines")

Progress = Callable[[dict[str, Any]], None]
_WAIT_SECONDS = 0.25
_MOST_CRASHES = 3
_KEY_BYTES = 24
"""Bytes of an entry of a key, with some room."""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of a job. None of them changes a byte of its output."""

    split_bytes: int | None = None
    """Size of a split; None: by the size of the input and the number of tasks at once, 4 to 128 MiB."""
    task_budget_bytes: int = 256 << 20
    """Memory budget of one task."""
    on_crash: str = "raise"
    """A split that crashes its worker three times stops the job, or is left out ("skip", "quarantine")."""
    partitions: int | None = None
    """Parts that the keys of a deduplication are divided into; None: so that one fits the budget of a task."""


class Driver:
    """One run of a job."""

    def __init__(
        self,
        pipeline: Pipeline,
        directory: JobDirectory,
        executor: Executor,
        options: JobOptions,
        progress: Progress | None = None,
        share: tuple[int, int] | None = None,
        *,
        fit: Sequence[int] = (),
    ) -> None:
        self._pipeline, self._directory, self._executor = pipeline, directory, executor
        self._options, self._progress, self._share = options, progress, share
        self._plan = JobPlan.of(pipeline)
        self._passes = FirstPasses(pipeline, self._plan, directory, fit)
        self._started = time.monotonic()
        self._crashes: Counter[str] = Counter()
        self._finished = self._tasks = 0
        self._totals = {"rows_in": 0, "rows_out": 0, "bytes": 0, "input": 0}
        self._lost: dict[str, str] = {}

    # -- plan --------------------------------------------------------------------------------------------------------

    def run(self) -> Report:
        """The whole job, or what is left of it; with a share, that part of the tasks, which ends in an error that says
        what is left to others."""
        if self._share is not None:
            return self._run(self._directory.read_json(PLAN_NAME))
        with self._directory.lock() as lock:
            lock.hold(f"the job in {self._directory.shown}")
            saved = self._directory.read_json(PLAN_NAME)
            if saved is not None and saved.get("report") is not None:
                self._check_same(saved)
                return Report(**saved["report"])
            sink = self._pipeline.sink
            assert sink is not None
            if isinstance(sink, StoreSink) and self._plan.shards:
                sink.begin()
            try:
                return self._run(saved)
            except BaseException:
                abort = getattr(sink, "abort", None)
                if callable(abort):
                    abort()
                raise
            finally:
                self._executor.close()

    def _run(self, saved: dict[str, Any] | None) -> Report:
        work = self._work(saved)
        marker = secrets.token_hex(16)
        self._directory.make()
        if self._share is None:
            self._directory.home.write(MARKER_NAME, marker.encode())
        checks: dict[str, Any] = {"marker": [self._directory.home.place(MARKER_NAME), marker], "files": []}
        if has_files(self._pipeline.source):
            checks["files"] = [list(entry) for entry in input_files(self._pipeline.source)[:1]]
        self._executor.start(work, checks)
        last = len(self._plan.phases) - 1
        for number in range(last + 1):
            self._passes.run(work, number, lambda tasks: self._run_first(work, tasks), lambda: self._learn(None))
            self._run_tasks(self._map_tasks(work, number))
            if number < last:
                self._run_tasks(self._duplicate_tasks(work, number))
        records = [self._records(number, len(work.bundles)) for number in range(last + 1)]
        self._check_lost()
        if self._share is not None:
            raise UnfinishedJobError("all splits are done; `penstock join` puts them together")
        report = self._end(work, records)
        self._directory.write_json(PLAN_NAME, self._identity() | {"report": report.to_dict()})
        return report

    def _work(self, saved: dict[str, Any] | None) -> JobWork:
        """The work of the tasks: as it was planned, or planned now."""
        if saved is not None:
            self._check_same(saved)
            bundles = [Bundle.of(each) for each in saved["bundles"]]
        else:
            bundles = bundles_of(self._pipeline.source, self._split_bytes())
        self._passes.fit_here()
        source = self._pipeline.source
        if not self._passes.pending:
            self._learn(saved)
            _ = getattr(source, "schema", None)  # known before tasks are sent out
        close = getattr(source, "close", None)
        if callable(close):
            close()
        partitions = saved["partitions"] if saved is not None else self._partitions(bundles)
        work = JobWork(
            self._directory.place,
            source,
            self._plan,
            replace(self._pipeline.config, quarantine=None),
            self._options.task_budget_bytes,
            self._inputs(),
            partitions,
            bundles,
        )
        if saved is None:
            facts = {"bundles": [bundle.to_json() for bundle in bundles], "partitions": partitions}
            schemas = {
                str(number): schema_text(transform.output_schema)
                for number, transform in enumerate(self._pipeline.transforms)
                if isinstance(transform, Inferring)
            }
            self._directory.make()
            self._directory.write_json(PLAN_NAME, self._identity() | facts | {"schemas": schemas, "report": None})
        return work

    def _split_bytes(self) -> int:
        if self._options.split_bytes is not None:
            return self._options.split_bytes
        total = sum(size for _, size in input_files(self._pipeline.source))
        workers = self._executor.slots if self._share is None else self._share[1]
        return max(4 << 20, min(128 << 20, total // (4 * max(1, workers))))

    def _partitions(self, bundles: Sequence[Bundle]) -> int:
        if self._options.partitions is not None:
            return self._options.partitions
        # About 1 kB of input a row, 14 keys of it, and a share of a quarter of the budget for sorting them.
        keys = sum(bundle.nbytes for bundle in bundles) // 1000 * 14 * _KEY_BYTES
        return max(1, min(4096, max(self._executor.slots, 1 + 4 * keys // self._options.task_budget_bytes)))

    def _identity(self) -> dict[str, Any]:
        pipeline = self._pipeline
        return {
            "pipeline": fingerprint(pipeline.source, pipeline.transforms),
            "stages": str(pipeline),
            "sink": stage_name(pipeline.sink),
            "on_error": pipeline.config.on_error,
            "inputs": self._inputs(),
            "fit": self._passes.fits.all(),
        }

    def _check_same(self, saved: dict[str, Any]) -> None:
        mine = self._identity()
        for name in ("pipeline", "sink", "on_error", "inputs", "fit"):
            if saved.get(name) != mine[name]:
                what = {
                    "inputs": "other input files",
                    "fit": "other transforms to fit",
                    "on_error": "another on_error",
                    "sink": "another sink",
                }
                raise ResumeError(
                    f"the job in {self._directory.shown} has {what.get(name, 'other stages')} ({saved.get('stages')}); "
                    "run it with the same ones, delete the directory, or choose another one"
                )

    def _inputs(self) -> list[list[Any]]:
        source = self._pipeline.source
        if not has_files(source):
            return [[name, size, None] for name, size in input_files(source)]
        return [input_mark(source, number) for number in range(len(input_files(source)))]

    def _learn(self, saved: dict[str, Any] | None) -> None:
        """Have functions learn their columns from the first rows of the input, as they do in a local run."""
        pipeline = self._pipeline
        stages = [t for t in pipeline.transforms if isinstance(t, FunctionStage)]
        if saved is not None:
            for number, text in saved["schemas"].items():
                stage = pipeline.transforms[int(number)]
                if text is not None and isinstance(stage, FunctionStage):
                    stage.fix_output_schema(_schema(text))
            return
        if not any(stage.learning for stage in stages):
            return
        config = replace(
            pipeline.config,
            on_error="raise" if pipeline.config.on_error == "raise" else "skip",
            quarantine=None,
            max_failures=None,
            max_failure_ratio=None,
            batch_rows="auto",
        )
        first = self._passes.cut([t for phase in self._plan.phases for t in phase.transforms])
        probe = Pipeline(pipeline.source, first, None, config, pipeline.budget)
        with closing(iter(probe)) as batches:  # type: ignore[type-var]
            for _ in batches:
                if not any(stage.learning for stage in stages if stage in first):
                    break
        learned = [(stage, stage.output_schema) for stage in stages]
        for each in (pipeline.source, *first):
            reset = getattr(each, "reset", None)
            if callable(reset):
                reset()
        for stage, schema in learned:
            if schema is not None:
                stage.fix_output_schema(schema)

    # -- tasks -------------------------------------------------------------------------------------------------------

    def _map_tasks(self, work: JobWork, number: int) -> Iterator[Task]:
        for index, bundle in enumerate(work.bundles):
            arguments: dict[str, Any] = {"phase": number, "number": index, "learned": list(self._passes.names)}
            if not number:
                arguments["splits"] = bundle.to_json()
            yield Task(f"map-{number}-{index:06d}", "map", arguments, described(self._pipeline.source, bundle))

    def _duplicate_tasks(self, work: JobWork, number: int) -> Iterator[Task]:
        for partition in range(work.partitions):
            arguments = {"phase": number, "partition": partition, "tasks": len(work.bundles)}
            name = f"duplicates-{number}-{partition:04d}"
            yield Task(name, "duplicates", arguments, f"partition {partition} of the keys")

    def _run_first(self, work: JobWork, tasks: Sequence[Task]) -> None:
        """Tasks that everything after them needs; of those of other shares, whoever comes first does them."""
        if self._share is None:
            return self._run_tasks(tasks)
        at = len(tasks) * self._share[0] // self._share[1]
        for task in (*tasks[at:], *tasks[:at]):
            if self._directory.read_json(f"done/{task.name}") is None:
                work(task)
        return None

    def _run_tasks(self, tasks: Iterator[Task] | Sequence[Task]) -> None:
        """Run tasks that are not done yet. Of several that fail, the first in order counts."""
        done = self._directory.done()
        order = list(tasks)
        place = {task.name: number for number, task in enumerate(order)}
        mine = order if self._share is None else order[self._share[0] :: self._share[1]]
        pending = deque(task for task in mine if task.name not in done)
        self._tasks, self._finished = len(order), len(order) - len(pending)
        running: dict[str, Task] = {}
        failures: dict[int, Exception] = {}
        while pending or running:
            while pending and len(running) < max(1, self._executor.slots) and not failures:
                task = pending.popleft()
                running[task.name] = task
                self._executor.submit(task)
            if failures:
                first = min(failures)
                pending = deque(task for task in pending if place[task.name] < first)
                if pending and len(running) < max(1, self._executor.slots):
                    task = pending.popleft()
                    running[task.name] = task
                    self._executor.submit(task)
                for task in [task for task in running.values() if place[task.name] > first]:
                    self._executor.cancel(task)
                    del running[task.name]
            for outcome in self._executor.wait(_WAIT_SECONDS) if running else ():
                if running.pop(outcome.task.name, None) is None:
                    continue
                self._take(outcome, pending, failures, place)
            self._show()
        if failures:
            number = min(failures)
            raise self._located(failures[number], order[number])
        if self._share is not None:
            done = self._directory.done()
            left = sum(task.name not in done for task in order)
            if left:
                raise UnfinishedJobError(
                    f"{len(mine):,} of {len(order):,} tasks of this step are done, and {left:,} are left to other "
                    f"splits; when they have ended, `penstock join` does the rest"
                )

    def _take(
        self, outcome: Outcome, pending: deque[Task], failures: dict[int, Exception], place: dict[str, int]
    ) -> None:
        task = outcome.task
        if outcome.error is not None:
            failures[place[task.name]] = outcome.error
        elif outcome.crash is not None:
            self._crashes[task.name] += not outcome.node_lost
            if self._crashes[task.name] < _MOST_CRASHES:
                log.warning("%s: %s, on node %s; it is run again", task.described, outcome.crash, outcome.node)
                pending.appendleft(task)
                return
            reason = (
                f"{task.described}: {_MOST_CRASHES} workers in a row died with it ({outcome.crash}); give its tasks "
                "more memory, mend or leave out the rows, or pass on_crash='skip'"
            )
            if self._options.on_crash == "raise" or task.kind != "map" or task.arguments["phase"]:
                failures[place[task.name]] = StageError(reason, stage=str(self._pipeline))
            else:
                self._lost[task.name] = outcome.crash
                self._directory.finish(task.name, _nothing(task, outcome.crash))
        else:
            self._finished += 1
            if outcome.result is not None and task.kind == "map":
                self._totals["rows_in"] += outcome.result["rows_in"] if not task.arguments["phase"] else 0
                self._totals["rows_out"] += outcome.result["rows"]
                self._totals["bytes"] += outcome.result["bytes"]

    def _located(self, error: Exception, task: Task) -> Exception:
        """An error of a row with its number in the file, which the task does not know."""
        if task.kind not in ("map", "fit") or task.arguments["phase"] or not isinstance(error, DataError | StageError):
            return error
        if error.row is None or error.file is None:
            return error
        before = 0
        for number in range(task.arguments["number"]):
            record = self._directory.read_json(f"done/{task.name.rpartition('-')[0]}-{number:06d}")
            if record is None:  # the work of another process
                return moved(error, None)
            before += sum(
                records
                for (file, _), records in zip(record["runs"], record["records"])
                if file == error.file and records is not None
            )
        return moved(error, before) if before else error

    def _records(self, phase: int, tasks: int) -> list[dict[str, Any]]:
        return [self._directory.record(f"map-{phase}-{number:06d}") for number in range(tasks)]

    def _check_lost(self) -> None:
        for name, crash in self._lost.items():
            log.error("%s was left out: %s", name, crash)

    # -- end ---------------------------------------------------------------------------------------------------------

    def _end(self, work: JobWork, records: list[list[dict[str, Any]]]) -> Report:
        pipeline, last = self._pipeline, records[-1]
        schema = next((found for record in last if (found := schema_of(record["schema"])) is not None), None)
        joined: Report | None = None
        sink = pipeline.sink
        if self._plan.shards:
            assert isinstance(sink, StoreSink)
            rows_out = sum(record["rows"] for record in last)
            self._write_store(sink, last, schema)
        else:
            joined = self._join(last, schema)
            rows_out = joined.rows_out
        bad = self._bad_rows(records, joined, sum(record["rows_in"] for record in records[0]))
        report = self._report(records, joined, rows_out, bad)
        for task_records in records:
            for record in task_records:
                if record.get("part"):
                    self._directory.delete_part(record["part"])
        return report

    def _write_store(self, sink: StoreSink, records: Sequence[dict[str, Any]], schema: pa.Schema | None) -> None:
        if schema is not None:
            options = sink.shard_options(schema) | {"schema": schema_text(schema)}
            tasks = shard_tasks(self._directory, records, options, sink.piece_bytes, sink.shard_bytes)
            self._run_tasks(tasks)
            parts = Path(self._directory.place) / "parts"
            sink.take_shards(
                (parts / f"{task.name}.data", parts / f"{task.name}.index", self._directory.record(task.name)["entry"])
                for task in tasks
            )
        sink.flush()

    def _join(self, records: Sequence[dict[str, Any]], schema: pa.Schema | None) -> Report:
        pipeline = self._pipeline
        source = PartsSource(self._directory, records, schema if schema is not None else pa.schema([]))
        config = replace(
            pipeline.config,
            max_failures=None,
            max_failure_ratio=None,
            quarantine=self._join_place("bad.jsonl") if pipeline.config.on_error == "quarantine" else None,
        )
        last = Pipeline(source, list(self._plan.rest), pipeline.sink, config, pipeline.budget)
        before = len(pipeline.transforms) - len(self._plan.rest)
        fit_transforms(last, [position - before for position in self._passes.fits.joined])
        checkpoint = self._join_place("join") if isinstance(pipeline.sink, Durable) and self._resumes() else None
        return last.run(checkpoint, progress=self._progress_of_join())

    def _resumes(self) -> bool:
        """A file that is written in one go is made in fewer steps, and the same bytes."""
        return any(getattr(t, "resumable", True) for t in self._plan.rest) and bool(self._plan.rest)

    def _join_place(self, name: str) -> str:
        return f"{self._directory.place.rstrip('/')}/{name}"

    def _progress_of_join(self) -> Progress | None:
        return None

    def _bad_rows(self, records: list[list[dict[str, Any]]], joined: Report | None, rows_in: int) -> Counter[str]:
        """Write the quarantine, and check the number of bad rows; their counts."""
        config = self._pipeline.config
        bad = BadRows(config, self._pipeline._quarantine_path())
        try:
            before: Counter[str] = Counter()
            for number in range(len(records[0])):
                for phase, tasks in enumerate(records):
                    record = tasks[number]
                    bad.take(self._lines(record, before if not phase else None), record["bad"])
            if joined is not None:
                place = Path(self._join_place("bad.jsonl"))
                lines = place.read_bytes().splitlines(keepends=True) if place.exists() else []
                bad.take(map(row_unknown, lines), joined.quarantined or joined.skipped)
            bad.finish(rows_in)
        finally:
            bad.close()
        return bad.counts

    def _lines(self, record: dict[str, Any], before: Counter[str] | None) -> Iterator[bytes]:
        """Quarantined rows of a task with their numbers in the file."""
        for (file, _), records, name in zip(record["runs"], record["records"], record["bad_lines"]):
            if name is not None:
                with self._directory.opened(name) as path:
                    for line in path.read_bytes().splitlines(keepends=True):
                        yield shifted(line, before[file]) if before is not None and records is not None else line
            if before is not None and records is not None:
                before[file] += records

    def _report(
        self, records: list[list[dict[str, Any]]], joined: Report | None, rows_out: int, bad: Counter[str]
    ) -> Report:
        dropped, changed = Counter[str](), Counter[str]()
        for tasks in records:
            for record in tasks:
                dropped.update(record["dropped"])
                changed.update(record["changed"])
        if joined is not None:
            dropped.update(joined.dropped)
            changed.update(joined.changed)
        on_error = self._pipeline.config.on_error
        return Report(
            rows_in=sum(record["rows_in"] for record in records[0]),
            rows_out=rows_out,
            dropped=dict(dropped),
            changed=dict(changed),
            quarantined=dict(bad) if on_error == "quarantine" else {},
            skipped=dict(bad) if on_error == "skip" else {},
            seconds=time.monotonic() - self._started,
            peak_bytes=self._pipeline.budget.peak,
            bottleneck=f"{len(records[0]):,} splits on {self._executor.snapshot().get('nodes', 1)} nodes",
        )

    def _show(self) -> None:
        if self._progress is not None:
            self._progress(self.snapshot())

    def snapshot(self) -> dict[str, Any]:
        """Figures of the job as a run of a pipeline has them."""
        seconds = time.monotonic() - self._started
        return {
            "seconds": round(seconds, 3),
            "rows_in": self._totals["rows_in"],
            "rows_out": self._totals["rows_out"],
            "bytes_in": self._totals["bytes"],
            "rows_done": self._totals["rows_in"],
            "file_bytes_done": None,
            "dropped": 0,
            "bad_rows": 0,
            "stages": [],
            "workers": self._executor.slots,
            "memory": {"used": 0, "limit": self._options.task_budget_bytes, "peak": 0, "by_owner": {}},
            "bottleneck": f"{self._finished:,} of {self._tasks:,} tasks are done",
            "tasks": self._tasks,
            "tasks_done": self._finished,
            **self._executor.snapshot(),
        }


def _nothing(task: Task, crash: str) -> dict[str, Any]:
    """Record of a task whose rows are left out."""
    return {
        **dict.fromkeys(("rows_in", "rows", "bytes"), 0),
        **{"dropped": {}, "changed": {}, "bad": {}, "runs": [], "records": [], "bad_lines": []},
        **{"schema": None, "part": None, "crash": crash, "described": task.described},
    }


def _schema(text: str) -> pa.Schema:
    found = schema_of(text)
    assert found is not None
    return found


def check_engine(pipeline: Pipeline) -> None:
    """Refuse a pipeline that a job cannot run."""
    if pipeline.sink is None:
        raise ConfigError("this pipeline has no sink, and a job needs one: its rows are on many nodes")
