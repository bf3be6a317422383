"""Driver of a job: submits tasks, counts crashes, keeps what is done, and puts the results together in order."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from penstock.engines.exchange import write_index
from penstock.engines.executor import Executor, Outcome, Task
from penstock.engines.first_passes import NOTHING_FOUND, FirstPasses
from penstock.engines.identity import JobIdentity
from penstock.engines.job_directory import MARKER_NAME, PLAN_NAME, SPLITS_NAME, JobDirectory
from penstock.engines.parts import schema_of, schema_text
from penstock.engines.plan import JobPlan
from penstock.engines.records import PhaseRecords, add_stages, bottleneck, finished_stages, lost_record, task_name
from penstock.engines.results import SINK_NAME, Results
from penstock.engines.splits import Bundle, bundles_of, count_records, described
from penstock.engines.work import JobWork, moved
from penstock.errors import (
    ChangedFileError,
    ConfigError,
    DataError,
    FailureBudgetError,
    ResumeError,
    SchemaError,
    StageError,
    UnfinishedJobError,
)
from penstock.pipeline.chain import Inferring
from penstock.pipeline.functions import FunctionStage
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.report import Report
from penstock.pipeline.stages import Durable, Remembering, Stateful
from penstock.sinks import StoreSink
from penstock.sinks.file_sink import FileSink
from penstock.sources.record_source import RecordSource
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

    def __post_init__(self) -> None:
        if self.on_crash not in ("raise", "skip", "quarantine"):
            raise ConfigError(f"on_crash must be 'raise', 'skip' or 'quarantine', got {self.on_crash!r}")
        for name in ("split_bytes", "task_budget_bytes", "partitions"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be positive, got {value!r}")


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
        temporary: bool = False,
        fit: Sequence[int] = (),
    ) -> None:
        self._pipeline, self._directory, self._executor = pipeline, directory, executor
        self._options, self._progress, self._share, self._temporary = options, progress, share, temporary
        self._plan = JobPlan.of(pipeline)
        self._passes = FirstPasses(pipeline, self._plan, directory, fit)
        self._identity = JobIdentity(pipeline, self._passes.fits.all())
        self._started = time.monotonic()
        self._crashes: Counter[str] = Counter()
        self._finished = self._tasks = self._bytes_done = 0
        self._mark, self._splits = "", 0
        self._phases: list[PhaseRecords] = []

    # -- plan --------------------------------------------------------------------------------------------------------

    def run(self) -> Report:
        """The whole job, or what is left of it; with a share, that part of the tasks, which ends in an error that says
        what is left to others."""
        if self._share is not None:
            return self._run_share(self._share)
        with self._directory.lock() as lock:
            lock.hold(f"the job in {self._directory.shown}")
            self._directory.check_no_shares()
            try:
                report = self._run_alone()
            except Exception as error:
                # After a crash or an outage the next run resumes. An error of a row would only come again; what other
                # processes have made for `join` stays.
                if self._temporary and _is_final(error) and self._directory.read_json(SPLITS_NAME) is None:
                    self._directory.remove()
                    if isinstance(self._pipeline.sink, FileSink | StoreSink):
                        self._pipeline.sink.discard()
                raise
            if self._temporary:
                self._directory.remove()
            return report

    def _run_share(self, share: tuple[int, int]) -> Report:
        """Run a share under its lock, so that no other process does."""
        with self._directory.share_lock(share) as lock:
            lock.hold(f"split {share[0] + 1}/{share[1]} of the job in {self._directory.shown}")
            try:
                return self._run(self._directory.read_json(PLAN_NAME))
            except Exception as error:
                if self._mark and self._directory.read_json(PLAN_NAME) is None:
                    raise ResumeError(
                        f"the job in {self._directory.shown} was joined or deleted meanwhile, so what this split does "
                        "is of no use any more; if the output is not there, run it again"
                    ) from error
                raise

    def _run_alone(self) -> Report:
        """Run the job under the lock of its directory, so that no other driver does."""
        saved = self._directory.read_json(PLAN_NAME)
        if saved is not None and saved.get("report") is not None:
            self._identity.check_same(saved, self._directory)
            self._identity.check_output(self._directory)
            return Report(**saved["report"])
        sink = self._pipeline.sink
        assert sink is not None
        try:
            return self._run_in_one_place(saved) if self._plan.in_one_place else self._run(saved)
        except BaseException:
            abort = getattr(sink, "abort", None)
            if callable(abort):
                abort()
            raise
        finally:
            for stage in self._pipeline.transforms:
                if isinstance(stage, FunctionStage):
                    stage.fix_output_schema(None)
            self._executor.close()

    def _run_in_one_place(self, saved: dict[str, Any] | None) -> Report:
        """A pipeline whose first step needs order: there is nothing to share out."""
        if saved is not None:
            self._identity.check_same(saved, self._directory)
        self._directory.make()
        if saved is None:
            self._directory.write_json(PLAN_NAME, self._identity.facts() | {"report": None})
        resumable = isinstance(self._pipeline.sink, Durable) and isinstance(self._pipeline.source, Stateful)
        resumable &= all(t.resumable for t in self._pipeline.transforms if isinstance(t, Remembering))
        place = f"{self._directory.place.rstrip('/')}/join"
        fit = [self._pipeline.transforms[position] for position in self._passes.fits.joined]
        report = self._pipeline.run(place if resumable else None, progress=self._progress, fit=fit)
        self._directory.write_json(PLAN_NAME, self._identity.facts() | {"report": report.to_dict()})
        return report

    def _run(self, saved: dict[str, Any] | None) -> Report:
        work = self._work(saved)
        if saved is not None and self._share is None:
            self._tell_resumed(work)
        marker = secrets.token_hex(16)
        self._directory.make()
        if self._share is None:
            self._directory.home.write(MARKER_NAME, marker.encode())
        checks: dict[str, Any] = {"marker": [self._directory.home.place(MARKER_NAME), marker], "files": []}
        if has_files(self._pipeline.source):
            checks["files"] = [list(entry) for entry in input_files(self._pipeline.source)[:1]]
        sink = self._pipeline.sink
        publishing = self._directory.read_json(SINK_NAME) is not None
        if isinstance(sink, StoreSink) and self._plan.shards and self._share is None and not publishing:
            sink.begin()  # refuses a place that it may not use, before anything is done
        self._executor.start(work, checks)
        last = len(self._plan.phases) - 1
        for number in range(last + 1):
            self._passes.run(work, self._phases, lambda tasks: self._run_first(work, tasks), lambda: self._learn(None))
            records = PhaseRecords(len(work.bundles), number)
            self._phases.append(records)
            self._run_tasks(list(self._map_tasks(work, number)), records)
            if number:
                for kind in (f"map-{number - 1}-", f"duplicates-{number - 1}-", f"keys-{number - 1}."):
                    self._directory.delete_parts(kind, but=".bad")
            if number < last:
                starts = records.key_starts
                write_index(self._directory, number, len(work.bundles), work.partitions, starts)
                starts.clear()
                self._run_tasks(list(self._duplicate_tasks(work, number)))
        if self._share is not None:
            raise UnfinishedJobError("all splits are done; `penstock join` puts them together")
        results = Results(
            pipeline=self._pipeline,
            plan=self._plan,
            directory=self._directory,
            work=work,
            phases=self._phases,
            on_crash=self._options.on_crash,
            slots=max(1, self._executor.slots),
            nodes=int(self._executor.snapshot().get("nodes", 1)),
            started=self._started,
            run_tasks=self._run_tasks,
            fit=self._passes.fits.joined,
        )
        report = results.finish()
        self._directory.write_json(PLAN_NAME, self._identity.facts() | {"report": report.to_dict()})
        self._directory.delete_parts()
        return report

    def _work(self, saved: dict[str, Any] | None) -> JobWork:
        """The work of the tasks: as it was planned, or planned now."""
        if saved is not None:
            self._check_plan(saved)
            self._identity.warn_if_unknown(self._directory)
        bundles = bundles_of(self._pipeline.source, self._split_bytes()) if saved is None else []
        self._passes.fit_here()
        source, sink = self._pipeline.source, self._pipeline.sink
        plan = saved if saved is not None else self._planned(bundles)
        if not self._passes.pending:
            self._learn(plan)
            _ = getattr(source, "schema", None)  # known before tasks are sent out
        close = getattr(source, "close", None)
        if callable(close):
            close()
        bundles = [Bundle.of(each) for each in plan["bundles"]]
        work = JobWork(
            self._directory.place,
            source,
            self._plan,
            replace(self._pipeline.config, quarantine=None),
            self._options.task_budget_bytes,
            self._identity.inputs(),
            plan["partitions"],
            sink.encoder() if self._plan.text and isinstance(sink, FileSink) else None,
            bundles,
        )
        self._splits = len(bundles)
        facts = {"bundles": [bundle.to_json() for bundle in bundles], "partitions": work.partitions}
        self._mark = work.mark = self._identity.mark(facts)
        return work

    def _planned(self, bundles: Sequence[Bundle]) -> dict[str, Any]:
        """A new plan, which is in the directory; or that of another share which was faster."""
        if not self._passes.pending:
            self._learn(None)
        plan = self._identity.facts() | {
            "bundles": [bundle.to_json() for bundle in bundles],
            "partitions": self._partitions(bundles),
            "schemas": {
                str(number): schema_text(transform.output_schema)
                for number, transform in enumerate(self._pipeline.transforms)
                if isinstance(transform, Inferring)
            },
            "shares": None if self._share is None else self._share[1],
            "report": None,
        }
        self._directory.make()
        there = self._directory.create_json(PLAN_NAME, plan)
        self._check_plan(there)
        return there

    def _check_plan(self, plan: dict[str, Any]) -> None:
        """Refuse the plan of another job, or of another number of shares."""
        self._identity.check_same(plan, self._directory)
        shares = plan.get("shares")
        if self._share is not None and shares not in (None, self._share[1]):
            mine = f"{self._share[0] + 1}/{self._share[1]}"
            raise ConfigError(
                f"the job in {self._directory.shown} was begun in {shares} splits, and this one is {mine}; run "
                f"1/{shares} to {shares}/{shares}, or delete the directory to begin again"
            )

    def _tell_resumed(self, work: JobWork) -> None:
        phases = len(self._plan.phases)
        tasks = phases * len(work.bundles) + (phases - 1) * work.partitions
        done = sum(name.startswith(("map-", "duplicates-")) for name in self._directory.done())
        where = self._directory.shown
        log.info("resumes the job in %s: %d of %d tasks are done; delete it to start again", where, done, tasks)

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
        first: list[Any] = []
        for phase in self._plan.phases:
            first += [] if phase.drops is None else [phase.drops]
            first += phase.transforms
        first = self._passes.cut(first)
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
        names = [entry[0] for entry in work.inputs]
        for index, bundle in enumerate(work.bundles):
            arguments: dict[str, Any] = {"phase": number, "number": index, "learned": list(self._passes.names)}
            if number:
                arguments["tasks"] = len(work.bundles)
            else:
                arguments["splits"] = bundle.to_json()
            yield Task(task_name(number, index), "map", arguments, described(self._pipeline.source, bundle, names))

    def _duplicate_tasks(self, work: JobWork, number: int) -> Iterator[Task]:
        for partition in range(work.partitions):
            arguments = {"phase": number, "partition": partition}
            name = f"duplicates-{number}-{partition:04d}"
            yield Task(name, "duplicates", arguments, f"partition {partition} of the keys")

    def _run_first(self, work: JobWork, tasks: Sequence[Task]) -> None:
        """Run tasks that everything after them needs: those of another share too, if it has not done them."""
        if self._share is None:
            self._run_tasks(tasks)
            return
        at = len(tasks) * self._share[0] // self._share[1]
        for task in (*tasks[at:], *tasks[:at]):
            record = self._directory.read_json(f"done/{task.name}")
            if record is None or record["plan"] != self._mark:
                work(task)

    def _run_tasks(self, order: Sequence[Task], records: PhaseRecords | None = None) -> list[dict[str, Any]]:
        """Run tasks that are not done yet; what each has noted, unless there are records to take it. Of several that
        fail, the first in order counts."""
        mine = order if self._share is None else order[self._share[0] :: self._share[1]]
        run = TaskRun(order, records)
        done = set()
        for number, record in self._records(order):
            run.take(number, record)
            done.add(order[number].name)
        pending = deque(task for task in mine if task.name not in done)
        self._tasks, self._finished = len(order), len(order) - len(pending)
        running: dict[str, Task] = {}
        while pending or running:
            while pending and len(running) < max(1, self._executor.room):
                task = pending.popleft()
                running[task.name] = task
                self._executor.submit(task)
            for outcome in self._executor.wait(_WAIT_SECONDS):
                if running.pop(outcome.task.name, None) is None:
                    continue
                before = run.first_failure
                self._take(outcome, pending, run)
                if run.first_failure != before:  # those behind it are of no use any more
                    pending = deque(task for task in pending if run.counts(task))
                    for task in [task for task in running.values() if not run.counts(task)]:
                        self._executor.cancel(task)
                        del running[task.name]
            self._show()
        if run.first_failure is not None:
            failed = order[run.first_failure]
            raise self._located(run.failures[run.first_failure], failed)
        if self._share is not None:
            self._check_shares(order, mine, run)
        return run.made

    def _records(self, order: Sequence[Task]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Records of those tasks that are done, with this plan, and whose parts are there in full."""
        parts = self._directory.parts()  # before `done`: parts are deleted once the tasks after them are done
        done = self._directory.done()
        passed = bool(order) and self._is_passed(order[0], done)
        for number, task in enumerate(order):
            if task.name not in done:
                continue
            record = self._directory.record(task.name)
            needed = [(name, size) for name, size in record["parts"].items() if not passed or name.endswith(".bad")]
            lost = [name for name, size in needed if parts.get(name) != size]
            if lost:
                log.warning("%s is run again: %s is damaged or gone", task.described, lost[0])
            elif record["plan"] == self._mark:
                yield number, record

    def _is_passed(self, task: Task, done: set[str]) -> bool:
        """True if all tasks of the phase after it are done, so that its parts may be deleted."""
        following = task.arguments.get("phase", len(self._plan.phases)) + 1
        if following >= len(self._plan.phases):
            return False
        return all(task_name(following, number) in done for number in range(self._splits))

    def _check_shares(self, order: Sequence[Task], mine: Sequence[Task], run: TaskRun) -> None:
        """Take over what others have done meanwhile; refuse to go on if some is left, since the next step needs all."""
        left = len({task.name for task in order} - self._directory.done())
        if not left:
            for number, record in self._records(order):
                run.take(number, record)
            left = len(run.missing)
        if left:
            raise UnfinishedJobError(
                f"its {len(mine):,} of {len(order):,} tasks of this step are done; {left:,} of other splits are not "
                "yet, and when they have ended, `penstock join` does the rest"
            )

    def _take(self, outcome: Outcome, pending: deque[Task], run: TaskRun) -> None:
        task = outcome.task
        number = run.place[task.name]
        if outcome.error is not None:
            run.fail(number, outcome.error)
        elif outcome.crash is not None:
            self._crashes[task.name] += not outcome.node_lost
            if self._crashes[task.name] < _MOST_CRASHES:
                log.warning("%s: %s, on node %s; it is run again", task.described, outcome.crash, outcome.node)
                pending.appendleft(task)
                return
            first = task.kind in ("types", "fit")
            if self._options.on_crash == "raise" or not (first or task.kind == "map") or task.arguments["phase"]:
                reason = (
                    f"{task.described}: {_MOST_CRASHES} workers in a row died with it ({outcome.crash}); give its "
                    "tasks more memory, mend or leave out the rows, or pass on_crash='skip'"
                )
                run.fail(number, StageError(reason, stage=str(self._pipeline)))
                return
            log.error("%s is left out: %d workers died with it (%s)", task.described, _MOST_CRASHES, outcome.crash)
            if first:
                self._directory.finish(task.name, NOTHING_FOUND | {"plan": self._mark, "parts": {}})
                return
            record = self._lost(task, f"{_MOST_CRASHES} workers in a row died with it ({outcome.crash})")
            self._directory.finish(task.name, record | {"plan": self._mark, "parts": {}})
            run.take(number, record)
        else:
            result = outcome.result if outcome.result is not None else self._directory.record(task.name)
            self._finished += 1
            if task.kind == "map":  # first passes read the same bytes
                self._bytes_done += sum(split["nbytes"] for split in task.arguments.get("splits", ()))
            run.take(number, result)

    def _lost(self, task: Task, crash: str) -> dict[str, Any]:
        """Record of a split that is left out; its records are counted, since those after it have numbers."""
        source: Any = self._pipeline.source
        bundle, text = Bundle.of(task.arguments["splits"]), isinstance(source, RecordSource)
        return lost_record(bundle, crash, [count_records(source, split) if text else None for split in bundle.splits])

    def _located(self, error: Exception, task: Task) -> Exception:
        """An error of a row with its number in the file, which the task does not know."""
        if task.kind not in ("map", "fit") or task.arguments["phase"] or not isinstance(error, DataError | StageError):
            return error
        if error.row is None or error.file is None:
            return error
        names = [entry[0] for entry in self._identity.inputs()]
        before = 0
        for number in range(task.arguments["number"]):
            counted = self._counted(task, number)
            if counted is None:  # the work of another process
                return moved(error, None)
            before += sum(records for file, records in counted if records is not None and names[file] == error.file)
        return moved(error, before) if before else error

    def _counted(self, task: Task, number: int) -> Iterable[tuple[int, int | None]] | None:
        """File and number of records of each split of an earlier task of the same step."""
        if task.kind == "map":
            part = self._phases[0].parts[number]
            return None if part is None else zip(part.files, part.records)
        record = self._directory.record(f"{task.name.rpartition('-')[0]}-{number:06d}")
        return zip(record["files"], record["records"])

    def _show(self) -> None:
        if self._progress is not None:
            self._progress(self.snapshot())

    def snapshot(self) -> dict[str, Any]:
        """Figures of the job as a run of a pipeline has them."""
        seconds = time.monotonic() - self._started
        first, last = (self._phases[0], self._phases[-1]) if self._phases else (None, None)
        rows_in = first.sums["rows_in"] if first is not None else 0
        reasons: dict[str, Counter[str]] = {name: Counter() for name in ("dropped", "changed", "bad")}
        for records in self._phases:
            reasons["dropped"].update(records.dropped)
            reasons["changed"].update(records.changed)
            reasons["bad"].update(records.bad_reasons)
        slots, state = max(1, self._executor.slots), self._executor.snapshot()
        stages: dict[tuple[str, str], dict[str, Any]] = {}
        for records in self._phases:
            add_stages(stages, records.stages.values())
        shown = finished_stages(stages.values(), seconds, slots)
        peak = max((records.peak_bytes for records in self._phases), default=0)
        return {
            "seconds": round(seconds, 3),
            "rows_in": rows_in,
            "rows_out": last.sums["rows"] if last is not None else 0,
            "bytes_in": self._bytes_done,
            "rows_done": rows_in,
            "file_bytes_done": self._bytes_done if has_files(self._pipeline.source) else None,
            "dropped": reasons["dropped"].total(),
            "bad_rows": reasons["bad"].total(),
            "reasons": reasons,
            "memory": {"used": peak, "limit": self._options.task_budget_bytes, "peak": peak, "by_owner": {}},
            "workers": slots,
            "stages": shown,
            "bottleneck": bottleneck(shown, self._tasks, int(state.get("nodes", 1))),
            "tasks": self._tasks,
            "tasks_done": self._finished,
            **state,
        }


class TaskRun:
    """Tasks while they run: their places, records and errors."""

    def __init__(self, order: Sequence[Task], records: PhaseRecords | None) -> None:
        self.place = {task.name: number for number, task in enumerate(order)}
        self.made: list[dict[str, Any]] = [] if records is not None else [{}] * len(order)
        self.failures: dict[int, Exception] = {}
        self.first_failure: int | None = None
        self._records = records

    @property
    def missing(self) -> list[int]:
        """Numbers of the tasks without a record."""
        known: Sequence[Any] = self.made if self._records is None else self._records.parts
        return [number for number, record in enumerate(known) if not record]

    def take(self, number: int, record: dict[str, Any]) -> None:
        if self._records is not None:
            self._records.add(number, record)
        else:
            self.made[number] = record

    def fail(self, number: int, error: Exception) -> None:
        self.failures[number] = error
        self.first_failure = min(self.failures)

    def counts(self, task: Task) -> bool:
        """True if no task before it has failed."""
        return self.first_failure is None or self.place[task.name] < self.first_failure


def _is_final(error: Exception) -> bool:
    """True if the input or the pipeline has to change, so that nothing of the job is of use."""
    if isinstance(error, StageError):
        return error.file is not None
    return isinstance(error, DataError | ChangedFileError | SchemaError | FailureBudgetError)


def _schema(text: str) -> pa.Schema:
    found = schema_of(text)
    assert found is not None
    return found


def check_engine(pipeline: Pipeline) -> None:
    """Refuse a pipeline that a job cannot run."""
    if pipeline.sink is None:
        raise ConfigError("this pipeline has no sink, and a job needs one: its rows are on many nodes")
