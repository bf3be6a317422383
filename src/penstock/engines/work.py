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
from penstock.engines.parts import PartSink, part_batches, schema_of, schema_text
from penstock.engines.plan import JobPlan
from penstock.engines.row_types import scan_splits
from penstock.engines.shards import write_shard
from penstock.engines.splits import Bundle, split_source
from penstock.errors import ChangedFileError, DataError, StageError
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.report import Report
from penstock.pipeline.stages import Origin, Source
from penstock.sources.splits import has_files, input_files


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
    bundles: list[Bundle] = field(default_factory=list)
    _directory: JobDirectory | None = None
    _learned: set[str] = field(default_factory=set)
    """Names of what this process has taken from first passes."""

    @property
    def directory(self) -> JobDirectory:
        if self._directory is None:
            self._directory = JobDirectory(self.place)
        return self._directory

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_directory", "bundles")} | {
            "bundles": []
        }

    def __call__(self, task: Task) -> dict[str, Any]:
        """Do a task, and note in the directory that it is done; what was noted."""
        for name in task.arguments.get("learned", ()):
            if name not in self._learned:
                take_facts(self, self.directory.record(name))
                self._learned.add(name)
        made: dict[str, Any] = getattr(self, f"_{task.kind}")(task)
        self.directory.finish(task.name, made)
        return made

    # -- rows --------------------------------------------------------------------------------------------------------

    def _map(self, task: Task) -> dict[str, Any]:
        """Rows of some splits, or of a part of the phase before, through the steps of a phase."""
        number, phase = task.arguments["phase"], self.plan.phases[task.arguments["phase"]]
        last = number == len(self.plan.phases) - 1
        record: dict[str, Any] = {"rows_in": 0, "dropped": {}, "changed": {}, "bad": {}, "runs": [], "records": []}
        dropped, changed, bad = Counter[str](), Counter[str](), Counter[str]()
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="penstock-task-")))
            path = stack.enter_context(self.directory.created(f"{task.name}.rows"))
            sink = PartSink(path, measure=last and self.plan.shards)
            keys = KeyFile(phase.keys) if phase.keys is not None else None
            target = sink if keys is None else keys.beside(sink)
            config = replace(self.config, max_failures=None, max_failure_ratio=None)
            for file, source in self._sources(task, dropped):
                before = sink.rows
                if config.on_error == "quarantine":
                    config = replace(config, quarantine=folder / f"bad-{len(record['runs'])}")
                try:
                    report = Pipeline(source, list(phase.transforms), target, config, self.budget_bytes).run()
                except (DataError, StageError) as error:
                    raise _placed(error, known=number == 0) from error
                _count(report, dropped, changed, bad)
                record["rows_in"] += report.rows_in
                record["runs"].append([file, sink.rows - before])
                record["records"].append(getattr(source, "records", None))
            sink.close()
            record["bad_lines"] = self._bad_lines(task, folder, len(record["runs"]), known=number == 0)
            record |= {"rows": sink.rows, "bytes": sink.nbytes, "schema": schema_text(sink.schema)}
            record |= {
                "part": f"{task.name}.rows",
                "dropped": dict(dropped),
                "changed": dict(changed),
                "bad": dict(bad),
            }
            if keys is not None:
                with self.directory.created(f"{task.name}.keys") as file_path:
                    record["keys"] = keys.write(file_path, self.partitions)
            if sink.sizes:
                with self.directory.created(f"{task.name}.sizes") as file_path:
                    file_path.write_bytes(np.concatenate(sink.sizes).astype("<i8").tobytes())
        return record

    def _sources(self, task: Task, dropped: Counter[str]) -> Iterator[tuple[str, Any]]:
        number = task.arguments["phase"]
        if number:
            yield from self._kept(task, dropped)
            return
        for split in Bundle.of(task.arguments["splits"]).splits:
            file = self.inputs[split.file][0] if self.inputs else ""
            if has_files(self.source):
                self._check_unchanged(split.file)
            yield file, split_source(self.source, split)

    def _check_unchanged(self, number: int) -> None:
        name, size, mark = self.inputs[number]
        if [name, size, mark] != input_mark(self.source, number):
            raise ChangedFileError("it has another size or time than when the job began", file=name)

    def _kept(self, task: Task, dropped: Counter[str]) -> Iterator[tuple[str, Any]]:
        """Rows of a part of the phase before, without duplicates; for each input file."""
        number, index = task.arguments["phase"], task.arguments["number"]
        stage = self.plan.phases[number].drops
        assert stage is not None
        before = self.directory.record(f"map-{number - 1}-{index:06d}")
        gone = dropped_rows(self.directory, number - 1, self.partitions, index, before["rows"])
        if gone.any():
            dropped[stage.reason] += int(np.count_nonzero(gone))
        schema = schema_of(before["schema"])
        with self.directory.opened(before["part"]) as path:
            start = 0
            for file, rows in before["runs"]:
                if schema is not None:
                    yield file, KeptRows(path, stage, gone, start, start + rows, file, schema)
                start += rows

    def _bad_lines(self, task: Task, folder: Path, runs: int, *, known: bool) -> list[str | None]:
        """Quarantined rows of each split, as parts; None where there are none."""
        names: list[str | None] = []
        for run in range(runs):
            lines = folder / f"bad-{run}"
            if not _size(lines):
                names.append(None)
                continue
            name = f"{task.name}.bad-{run}"
            with self.directory.created(name) as path:
                data = lines.read_bytes()
                path.write_bytes(data if known else b"".join(map(row_unknown, data.splitlines(keepends=True))))
            names.append(name)
        return names

    # -- first passes ------------------------------------------------------------------------------------------------

    def _types(self, task: Task) -> dict[str, Any]:
        splits = Bundle.of(task.arguments["splits"]).splits
        for number in {split.file for split in splits}:
            self._check_unchanged(number)
        return scan_splits(self.source, splits)

    def _fit(self, task: Task) -> dict[str, Any]:
        return fit_part(self, task, self._sources(task, Counter()))

    # -- keys and shards ---------------------------------------------------------------------------------------------

    def _duplicates(self, task: Task) -> dict[str, Any]:
        return find_duplicates(
            self.directory, task.arguments["phase"], task.arguments["partition"], task.arguments["tasks"], task.name
        )

    def _shard(self, task: Task) -> dict[str, Any]:
        return write_shard(self.directory, task)


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
                kept = batch.slice(low, high - low)
                mask = self._gone[first : first + high - low]
                kept = kept.filter(pa.array(~mask)) if mask.any() else kept
                if kept.num_rows:
                    self._pending = self._stage.without_keys(kept)
        batch, rest = self._pending.slice(0, max_rows), self._pending.slice(max_rows)
        self._pending = rest if rest.num_rows else None
        return batch

    def origin(self) -> Origin | None:
        return Origin(self._file)

    def __repr__(self) -> str:
        return "the rows of a part"


def input_mark(source: Any, number: int) -> list[Any]:
    """Name, size, and ETag or time of an input file."""
    if not hasattr(source, "files"):
        return [*input_files(source)[number], None]
    file = source.files[number]
    stat = file.stat()
    return [str(file), stat.st_size, getattr(file, "etag", None) or stat.st_mtime_ns]


def row_unknown(line: bytes) -> bytes:
    """A quarantined row whose number is not known any more."""
    return shifted(line, None)


def shifted(line: bytes, by: int | None) -> bytes:
    """A quarantined row with another row number: `by` more, or none."""
    start = line.index(b',"row":') + 7
    stop = line.index(b",", start)
    number = line[start:stop]
    if number == b"null" or by == 0:
        return line
    return line[:start] + (b"null" if by is None else b"%d" % (int(number) + by)) + line[stop:]


def _placed(error: DataError | StageError, *, known: bool) -> DataError | StageError:
    """The error of a row; after stages that drop rows, its number is not known."""
    return error if known else moved(error, None)


def moved(error: DataError | StageError, by: int | None) -> DataError | StageError:
    """The same error at another row: `by` more, or none."""
    row = None if by is None or error.row is None else error.row + by
    if isinstance(error, StageError):
        return StageError(error.reason, stage=error.stage, file=error.file, row=row, offset=error.offset)
    return DataError(error.reason, file=error.file, row=row, offset=error.offset, data=error.data)


def _count(report: Report, dropped: Counter[str], changed: Counter[str], bad: Counter[str]) -> None:
    dropped.update(report.dropped)
    changed.update(report.changed)
    bad.update(report.quarantined)
    bad.update(report.skipped)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
