"""Results of a job: output, quarantine and report, put together in the order of the splits."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.engines.executor import Task
from penstock.engines.job_directory import JobDirectory
from penstock.engines.parts import PartsSource, schema_of, schema_text
from penstock.engines.plan import JobPlan
from penstock.engines.records import PhaseRecords, add_stages, bottleneck, finished_stages
from penstock.engines.rejected_parts import LOST, RejectedParts, row_unknown
from penstock.engines.shards import shard_tasks
from penstock.engines.work import JobWork, moved
from penstock.errors import DataError, FailureBudgetError, StageError
from penstock.files.filesystems import beside, output_place
from penstock.pipeline.pipeline import Pipeline, fit_config, fit_transforms
from penstock.pipeline.quarantine import BadRows
from penstock.pipeline.report import Report
from penstock.pipeline.stages import Durable, Remembering, Sink
from penstock.sinks import StoreSink
from penstock.sinks.file_sink import FileSink

Progress = Callable[[dict[str, Any]], None]
SINK_NAME, _SPOOL = "sink.json", "bad.jsonl"
_NOT_SORTED = ""
"""Bad rows of the last steps until their reasons are known."""


@dataclass(kw_only=True)
class Results:
    """End of one job."""

    pipeline: Pipeline
    plan: JobPlan
    directory: JobDirectory
    work: JobWork
    phases: list[PhaseRecords]
    on_crash: str
    slots: int
    nodes: int
    started: float
    run_tasks: Callable[[Sequence[Task]], list[dict[str, Any]]]
    progress: Progress | None = None
    fit: Sequence[int] = ()
    """Positions of transforms to fit among the steps that run in one place."""

    def finish(self) -> Report:
        """Publish the output, after the number of bad rows was checked; the report."""
        last = self.phases[-1]
        schema = schema_of(last.schema)
        sink = self.pipeline.sink
        if self.fit:
            self._fit_joined(last, schema)
        bad = BadRows(self.pipeline.config, self._quarantine_path())
        try:
            crashed = self.on_crash == "quarantine"
            RejectedParts(self.pipeline.source, self.work, self.phases, told_crashes=crashed).give(bad)
            joined: Report | None = None
            if self.plan.shards:
                assert isinstance(sink, StoreSink)
                self._write_store(sink, last, schema, lambda: self._check(bad))
            elif self.plan.text:
                assert isinstance(sink, FileSink)
                self._check(bad)
                self._lay_together(sink, last, schema)
            else:
                joined = self._join(last, schema, bad)
        finally:
            bad.close()
        return self._report(joined, last, bad.counts)

    @property
    def _rows_in(self) -> int:
        return int(self.phases[0].sums["rows_in"])

    def _check(self, bad: BadRows) -> None:
        bad.finish(self._rows_in)

    # -- output ------------------------------------------------------------------------------------------------------

    def _write_store(
        self, sink: StoreSink, last: PhaseRecords, schema: pa.Schema | None, check: Callable[[], None]
    ) -> None:
        token = self.directory.read_json(SINK_NAME)
        if token is not None:  # everything but publishing was done before the driver was killed
            check()
            sink.restore(token["token"])
            sink.flush()
            return
        sink.restore({})
        if schema is not None:
            options = sink.shard_options(schema) | {"schema": schema_text(schema)}
            tasks = shard_tasks(self.directory, last, options, sink.piece_bytes, sink.shard_bytes)
            for task, made in zip(tasks, self.run_tasks(tasks)):
                with (
                    self.directory.opened(f"{task.name}.data") as data,
                    self.directory.opened(f"{task.name}.index") as index,
                ):
                    sink.take_shards([(data, index, made["entry"])])
        check()
        self.directory.write_json(SINK_NAME, {"token": sink.checkpoint() | {"finishing": True}})
        sink.flush()

    def _lay_together(self, sink: FileSink, last: PhaseRecords, schema: pa.Schema | None) -> None:
        if schema is not None:
            sink.take_part(None, schema)
            for number, part in enumerate(last.complete):
                if part.rows:
                    with self.directory.opened(f"{last.name(number)}.rows") as path:
                        sink.take_part(path, schema)
        sink.flush()

    def _parts_source(self, last: PhaseRecords, schema: pa.Schema | None) -> PartsSource:
        return PartsSource(self.directory, last, [entry[0] for entry in self.work.inputs], schema)

    def _fit_joined(self, last: PhaseRecords, schema: pa.Schema | None) -> None:
        """Fit transforms among the last steps; too many bad rows end the job before anything is written."""
        pipeline = self.pipeline
        bad = BadRows(fit_config(pipeline.config), None)
        RejectedParts(pipeline.source, self.work, self.phases).give(bad)
        self._check(bad)
        most = pipeline.config.max_failures
        left = None if most is None else most - bad.counts.total()
        config = replace(pipeline.config, max_failures=left, max_failure_ratio=None)
        before = len(pipeline.transforms) - len(self.plan.rest)
        fitted = Pipeline(self._parts_source(last, schema), list(self.plan.rest), None, config, pipeline.budget)
        fit_transforms(fitted, [position - before for position in self.fit])

    def _join(self, last: PhaseRecords, schema: pa.Schema | None, bad: BadRows) -> Report:
        """Rows through the steps that need all of them in order, and through the sink."""
        pipeline, spool = self.pipeline, self._place(_SPOOL)
        source = self._parts_source(last, schema)
        rejects = pipeline.config.on_error != "raise" and bool(self.plan.rest)
        most = pipeline.config.max_failures
        config = replace(
            pipeline.config,
            on_error="quarantine" if rejects else "raise",
            max_failures=None if most is None else max(0, most - bad.counts.total()),
            max_failure_ratio=None,
            quarantine=spool if rejects else None,
            checkpoint_seconds=pipeline.config.checkpoint_seconds if self.plan.rest else math.inf,
        )
        assert pipeline.sink is not None

        def take() -> None:
            if rejects:
                self._take_spooled(bad)
            self._check(bad)

        sink: Any = CheckedSink(pipeline.sink, take)
        run = Pipeline(source, list(self.plan.rest), sink, config, pipeline.budget)
        try:
            report = run.run(self._place("join") if self._resumes() else None, progress=self.progress)
        except FailureBudgetError:
            take()
            raise
        except (DataError, StageError) as error:
            raise moved(error, None) from error
        if not sink.checked:  # it was published before the driver was killed
            take()
        bad.counts.pop(_NOT_SORTED, None)
        bad.counts.update(report.quarantined)
        return report

    def _take_spooled(self, bad: BadRows) -> None:
        """Rows that the last steps have rejected, one at a time: there may be very many."""
        if not self.directory.home.exists(_SPOOL):
            return
        with self.directory.opened(_SPOOL, folder="") as path, open(path, "rb") as lines:
            count = sum(1 for _ in lines)
            lines.seek(0)
            bad.take(map(row_unknown, lines), {_NOT_SORTED: count}, self._rows_in)

    def _resumes(self) -> bool:
        """True if the last steps can be resumed after the death of the driver."""
        whole = all(t.resumable for t in self.plan.rest if isinstance(t, Remembering))
        return isinstance(self.pipeline.sink, Durable) and whole

    def _place(self, name: str) -> str:
        return f"{self.directory.place.rstrip('/')}/{name}"

    # -- bad rows ----------------------------------------------------------------------------------------------------

    def _quarantine_path(self) -> Path | str | None:
        config = self.pipeline.config
        if config.on_error == "quarantine" or self.on_crash != "quarantine":
            return self.pipeline._quarantine_path()
        if config.quarantine is not None:
            return output_place(config.quarantine, "quarantine")
        target = getattr(self.pipeline.sink, "path", None)
        return None if target is None else beside(output_place(target, "the output"), suffix=".quarantine.jsonl")

    # -- report ------------------------------------------------------------------------------------------------------

    def _report(self, joined: Report | None, last: PhaseRecords, bad: Counter[str]) -> Report:
        dropped, changed = Counter[str](), Counter[str]()
        stages: dict[tuple[str, str], dict[str, Any]] = {}
        for records in self.phases:
            dropped.update(records.dropped)
            changed.update(records.changed)
            add_stages(stages, records.stages.values())
        if joined is not None:
            dropped.update(joined.dropped)
            changed.update(joined.changed)
            add_stages(stages, (stage for stage in joined.stages if stage["kind"] in ("transform", "sink")))
        seconds = time.monotonic() - self.started
        shown = finished_stages(stages.values(), seconds, self.slots)
        words = {name: self.on_crash if name == LOST else self.pipeline.config.on_error for name in bad}
        return Report(
            rows_in=self._rows_in,
            rows_out=joined.rows_out if joined is not None else int(last.sums["rows"]),
            dropped=dict(dropped),
            changed=dict(changed),
            quarantined={name: rows for name, rows in bad.items() if rows and words[name] == "quarantine"},
            skipped={name: rows for name, rows in bad.items() if rows and words[name] == "skip"},
            seconds=seconds,
            peak_bytes=max(records.peak_bytes for records in self.phases),
            bottleneck=bottleneck(shown, self.phases[0].tasks, self.nodes),
            stages=shown,
        )


class CheckedSink(Sink):
    """A sink that is published only after a check: the number of bad rows, which is known at the end."""

    def __init__(self, sink: Sink, check: Callable[[], None]) -> None:
        self._sink, self._check = sink, check
        self.checked = False

    def consume(self, batch: pa.RecordBatch) -> None:
        self._sink.consume(batch)

    def flush(self) -> None:
        if not self.checked:
            self._check()
            self.checked = True
        self._sink.flush()

    def memory_usage(self) -> int:
        return self._sink.memory_usage()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def __repr__(self) -> str:
        return repr(self._sink)
