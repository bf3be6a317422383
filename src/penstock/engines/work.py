"""Work of a job: what a task does, on any node. Everything it needs is in this value and in the job's directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.engines.exchange import KeyFile, dropped_rows, find_duplicates
from penstock.engines.executor import Task
from penstock.engines.first_passes import fit_part, take_facts
from penstock.engines.job_directory import JobDirectory
from penstock.engines.parts import EncodedSink, PartSink, part_batches, schema_of, schema_text
from penstock.engines.plan import JobPlan
from penstock.engines.records import add_stages, empty_record, task_name
from penstock.engines.rejected_parts import count_lines, row_unknown
from penstock.engines.row_types import scan_splits
from penstock.engines.shards import write_shard
from penstock.engines.splits import Bundle, split_source
from penstock.errors import ChangedFileError, DataError, StageError
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.report import Report
from penstock.pipeline.stages import Origin, Source


@dataclass
class JobWork:
    """Work of all tasks of a job."""

    place: str
    """Path or URL of the job's directory."""
    source: Any
    plan: JobPlan
    config: PipelineConfig
    budget_bytes: int
    inputs: list[list[Any]]
    """Name, size and time or ETag of each input file, when the job began."""
    partitions: int
    """Number of parts that keys are divided into."""
    encoder: Any = None
    """The sink whose bytes tasks make, if they do."""
    bundles: list[Bundle] = field(default_factory=list)
    mark: str = ""
    """Mark of the plan, by which the records of another job are told apart."""
    _directory: JobDirectory | None = None
    _learned: set[str] = field(default_factory=set)
    """Names of what this process has taken from first passes."""

    @property
    def directory(self) -> JobDirectory:
        if self._directory is None:
            self._directory = JobDirectory(self.place)
        return self._directory

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_directory": None, "bundles": [], "_learned": set()}

    def __call__(self, task: Task) -> dict[str, Any]:
        """Do a task, and note in the directory that it is done; what was noted."""
        for name in task.arguments.get("learned", ()):
            if name not in self._learned:
                take_facts(self, self.directory.record(name))
                self._learned.add(name)
        self.directory.created_bytes.clear()
        made: dict[str, Any] = getattr(self, f"_{task.kind}")(task)
        made |= {"plan": self.mark, "parts": dict(self.directory.created_bytes)}
        self.directory.finish(task.name, made)
        return made

    # -- rows --------------------------------------------------------------------------------------------------------

    def _map(self, task: Task) -> dict[str, Any]:
        """Rows of some splits, or of a part of the phase before, through the steps of a phase."""
        number, phase = task.arguments["phase"], self.plan.phases[task.arguments["phase"]]
        last = number == len(self.plan.phases) - 1
        record = empty_record()
        figures = TaskFigures(number, encodes=last and self.encoder is not None)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="penstock-task-")))
            path = stack.enter_context(self.directory.created(f"{task.name}.rows"))
            sink: PartSink | EncodedSink
            if last and self.encoder is not None:
                sink = EncodedSink(path, self.encoder)
            else:
                sink = PartSink(path, measure=last and self.plan.shards)
            stack.callback(sink.release)
            keys = None
            if phase.keys is not None:
                keys = KeyFile(phase.keys, self.partitions, self.budget_bytes // 4)
            target = sink if keys is None else keys.beside(sink)
            for file, source in self._sources(task, figures.dropped):
                before, lines = sink.rows, folder / f"bad-{len(record['files'])}"
                config = self.task_config(self.config, lines)
                try:
                    report = Pipeline(source, list(phase.transforms), target, config, self.budget_bytes).run()
                except (DataError, StageError) as error:
                    if number:
                        raise moved(error, None) from error  # after stages that drop rows, its number is not known
                    raise
                figures.add(report)
                record["rows_in"] += report.rows_in
                record["files"].append(file)
                record["run_rows"].append(sink.rows - before)
                record["records"].append(getattr(source, "records", None))
                record["bad_lines"].append(count_lines(lines))
            sink.close()
            self.write_bad_lines(task, folder, record["bad_lines"], known=number == 0)
            record |= figures.facts() | {
                "schema": schema_text(sink.schema),
                "rows": sink.rows,
                "bytes": sink.nbytes,
            }
            if keys is not None:
                with self.directory.created(f"{task.name}.keys") as file_path:
                    record["keys"] = keys.write(file_path)
                    file_path.touch()
            if isinstance(sink, PartSink) and sink.sizes:
                with self.directory.created(f"{task.name}.sizes") as file_path:
                    file_path.write_bytes(np.concatenate(sink.sizes).astype("<i8").tobytes())
        return record

    @staticmethod
    def task_config(whole: PipelineConfig, lines: Path) -> PipelineConfig:
        """The number of bad rows is checked over all tasks; to name the one that was too many, it must be known."""
        config = replace(whole, max_failures=None, max_failure_ratio=None)
        limited = whole.max_failures is not None or whole.max_failure_ratio is not None
        if config.on_error == "quarantine" or (config.on_error == "skip" and limited):
            return replace(config, on_error="quarantine", quarantine=lines)
        return config

    def _sources(self, task: Task, dropped: Counter[str]) -> Iterator[tuple[int, Any]]:
        number = task.arguments["phase"]
        if number:
            yield from self._kept(task, dropped)
            return
        for split in Bundle.of(task.arguments["splits"]).splits:
            if hasattr(self.source, "files"):
                self._check_unchanged(split.file)
            yield split.file, split_source(self.source, split)

    def _check_unchanged(self, number: int) -> None:
        name, size, mark = self.inputs[number]
        if [name, size, mark] != input_mark(self.source, number):
            raise ChangedFileError("it has another size or time than when the job began", file=name)

    def _kept(self, task: Task, dropped: Counter[str]) -> Iterator[tuple[int, Any]]:
        """Rows of a part of the phase before, without duplicates; for each input file."""
        number, index = task.arguments["phase"], task.arguments["number"]
        stage = self.plan.phases[number].drops
        assert stage is not None
        name = task_name(number - 1, index)
        before = self.directory.record(name)
        schema = schema_of(before["schema"])
        if schema is None:
            return
        tasks = task.arguments["tasks"]
        gone = dropped_rows(self.directory, number - 1, self.partitions, index, tasks, before["rows"])
        if gone.any():
            dropped[stage.reason] += int(np.count_nonzero(gone))
        with self.directory.opened(f"{name}.rows") as path:
            start = 0
            for file, rows in zip(before["files"], before["run_rows"]):
                shown = self.inputs[file][0] if file < len(self.inputs) else ""
                yield file, KeptRows(path, stage, gone, start, start + rows, shown, schema)
                start += rows

    def write_bad_lines(self, task: Task, folder: Path, counts: list[int], *, known: bool) -> None:
        """Quarantined rows of all splits as one part, if there are any."""
        if not any(counts):
            return
        with self.directory.created(f"{task.name}.bad") as path, open(path, "wb") as target:
            for run, count in enumerate(counts):
                if count:
                    with open(folder / f"bad-{run}", "rb") as lines:
                        target.writelines(lines if known else map(row_unknown, lines))

    # -- first passes ------------------------------------------------------------------------------------------------

    def _types(self, task: Task) -> dict[str, Any]:
        splits = Bundle.of(task.arguments["splits"]).splits
        for number in {split.file for split in splits if split.file < len(self.inputs)}:
            self._check_unchanged(number)
        return scan_splits(self.source, splits)

    def _fit(self, task: Task) -> dict[str, Any]:
        return fit_part(self, task, self._sources(task, Counter()))

    # -- keys and shards ---------------------------------------------------------------------------------------------

    def _duplicates(self, task: Task) -> dict[str, Any]:
        asked = task.arguments
        return find_duplicates(
            self.directory, asked["phase"], asked["partition"], self.partitions, task.name, self.budget_bytes
        )

    def _shard(self, task: Task) -> dict[str, Any]:
        return write_shard(self.directory, task)


class TaskFigures:
    """Sums over the runs of one task."""

    def __init__(self, phase: int, *, encodes: bool) -> None:
        # Parts between the phases are neither the source nor the sink of the job.
        self._kinds = {"transform"} | (set() if phase else {"source", "decode"}) | ({"sink"} if encodes else set())
        self.dropped, self._changed, self._bad = Counter[str](), Counter[str](), Counter[str]()
        self._stages: dict[tuple[str, str], dict[str, Any]] = {}
        self._peak = 0

    def add(self, report: Report) -> None:
        self.dropped.update(report.dropped)
        self._changed.update(report.changed)
        self._bad.update(report.quarantined)
        self._bad.update(report.skipped)
        add_stages(self._stages, (stage for stage in report.stages if stage["kind"] in self._kinds))
        self._peak = max(self._peak, report.peak_bytes)

    def facts(self) -> dict[str, Any]:
        return {
            "dropped": dict(self.dropped),
            "changed": dict(self._changed),
            "bad": dict(self._bad),
            "stages": list(self._stages.values()),
            "peak_bytes": self._peak,
        }


class KeptRows(Source):
    """Rows of a part from row to row, without those of a mask."""

    records = None

    def __init__(self, path: Path, stage: Any, gone: Any, start: int, stop: int, file: str, schema: pa.Schema) -> None:
        self._stage, self._gone, self._start, self._stop, self._file = stage, gone, start, stop, file
        self._batches = part_batches(path)
        self._at = 0
        self._pending: pa.RecordBatch | None = None
        self.schema = stage.without_keys(pa.RecordBatch.from_pylist([], schema=schema)).schema

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        while self._pending is None:
            batch = next(self._batches, None)
            if batch is None or self._at >= self._stop:
                return None
            low, high = max(self._start - self._at, 0), min(self._stop - self._at, batch.num_rows)
            first = self._at + low
            self._at += batch.num_rows
            if high > low:
                kept = self._stage.without_keys(batch.slice(low, high - low))
                mask = self._gone[first : first + high - low]
                if mask.any():
                    if (examples := getattr(self._stage, "dropped_examples", None)) is not None:
                        examples.add(self._stage.reason, kept, mask)
                    kept = kept.filter(pa.array(~mask))
                if kept.num_rows:
                    self._pending = kept
        batch, rest = self._pending.slice(0, max_rows), self._pending.slice(max_rows)
        self._pending = rest if rest.num_rows else None
        return batch

    def origin(self) -> Origin | None:
        return Origin(self._file)

    def __repr__(self) -> str:
        return "the rows of a part"


def input_mark(source: Any, number: int) -> list[Any]:
    """Name, size, and ETag or time of an input file."""
    file = source.files[number]
    stat = file.stat()
    return [str(file), stat.st_size, getattr(file, "etag", None) or stat.st_mtime_ns]


def moved(error: DataError | StageError, by: int | None) -> DataError | StageError:
    """The same error at another row: `by` more, or none."""
    row = None if by is None or error.row is None else error.row + by
    if type(error) is StageError:
        return StageError(error.reason, stage=error.stage, file=error.file, row=row, offset=error.offset)
    if type(error) is DataError:
        return DataError(error.reason, file=error.file, row=row, offset=error.offset, data=error.data)
    return error
