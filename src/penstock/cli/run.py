"""`penstock run pipeline.yaml`: build, check and run the pipeline that the file describes."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer
from rich.console import Console

from penstock._amounts import counted
from penstock.cli.console import log_lines, print_json, print_table, report_errors
from penstock.cli.options import (
    DebugOption,
    EngineOption,
    JsonOption,
    MetricsOption,
    QuietOption,
    SetOption,
    check_assignments,
    command,
)
from penstock.cli.pipeline_file import KEYS, PipelineFile, read_pipeline, spelled_out
from penstock.corpus.dedup.stages import Dedup
from penstock.engines.run import engine_of, job_place
from penstock.errors import PenstockError, QueueNotFoundError
from penstock.files.documents import read_document, set_value
from penstock.files.filesystems import output_place, shown, shown_place
from penstock.files.objects import bucket_has
from penstock.files.remote import fetched_path
from penstock.memory.budget import format_bytes
from penstock.memory.pressure import free_large_blocks_at_once
from penstock.metrics.targets import MetricsConfig
from penstock.observe import Extent, closing_table, progress_on
from penstock.pipeline import Pipeline, Report
from penstock.pipeline.checkpoint import load_checkpoint
from penstock.pipeline.functions import FunctionStage
from penstock.pipeline.pipeline import fit_transforms
from penstock.types.conversion import Problems

_PROGRESS_SECONDS = 0.25


def _watched(console: Console, pipeline: Pipeline, learner: Any) -> Generator[pa.RecordBatch, None, None]:
    """Batches on which a transform is fitted, with a display of the progress."""
    title = f"fitting {learner!r} on {pipeline}"
    with progress_on(console, Extent.of(pipeline.source), title) as progress:
        shown_at = time.monotonic()
        for batch in pipeline:
            yield batch
            if time.monotonic() - shown_at >= _PROGRESS_SECONDS:
                shown_at = time.monotonic()
                progress(pipeline.snapshot())


@command()
def run(
    pipeline: Annotated[
        str, typer.Argument(metavar="PIPELINE.YAML", help="The file that describes the pipeline, also a URL.")
    ],
    assignments: SetOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build and check everything, columns too; process no rows.")
    ] = False,
    as_json: JsonOption = False,
    engine: EngineOption = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Save progress here and resume from it, instead of the file's checkpoint."),
    ] = None,
    metrics: MetricsOption = None,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Run the pipeline that a YAML file describes.

    \b
    source: {type: jsonl, path: corpus/*.jsonl}   # or just: source: corpus/*.jsonl
    transforms:
      - lower: text                               # one argument
      - count_words: {column: text, into: words}  # arguments by name
      - filter: words >= 50                       # an Arrow expression
      - map: my_module:my_function                # a function, also from the file's directory
      - map: {function: my_module:fn, batch: true}
      - standard_scaler: {columns: [age], fit: true}    # fitted in a first pass
    sink: {type: parquet, path: out.parquet}      # or just: sink: out.parquet
    config: {workers: 4, on_error: quarantine}    # the fields of PipelineConfig
    budget: 256 MiB
    checkpoint: run1/                             # optional

    Only source and sink are required. Paths are relative to the current directory. `penstock plugins` lists the stages.

    Exit codes: 0 success; 1 an error, printed to stderr; 2 wrong usage; 130 stopped by Ctrl-C.
    """
    free_large_blocks_at_once()
    elsewhere = engine not in (None, "local")
    if elsewhere:
        engine_of(engine)
    file, name = fetched_path(pipeline), shown(pipeline)
    tree = spelled_out(read_document(file, such_as="source: corpus.jsonl", name=name))
    for assignment in check_assignments(assignments):
        set_value(tree, assignment, known=KEYS)
        tree = spelled_out(tree)
    described = read_pipeline(tree, file, name)
    if checkpoint is not None:
        described = replace(described, checkpoint=output_place(checkpoint, "checkpoint"))
    extent = Extent.of(described.pipeline.source)
    if dry_run:
        problems = Problems()
        columns = check_columns(described, problems, scan=not elsewhere)
        problems.check(name)
        facts = _facts(described, extent) | {"columns": columns.columns, "columns_unknown_after": columns.unknown}
        if as_json:
            print_json(facts, indent=False)
        else:
            typer.echo("\n".join(_lines(described, extent, columns, elsewhere=elsewhere)))
            if elsewhere:
                typer.echo(described.pipeline.explain(engine, fit=described.fit))
        return
    kept = described.checkpoint
    if kept is None and elsewhere:
        kept = output_place(job_place(described.pipeline, None), "the directory of the job")
    stopped = f"the same command resumes from {shown_place(kept)}" if kept else "unfinished output was removed"
    with report_errors(debug=debug, stopped=f"stopped; {stopped}"):
        report = _run(described, extent, engine, metrics or None, quiet=quiet)
    if as_json:
        print_json({"pipeline": str(described.pipeline), **report.to_dict()}, indent=False)
    elif not quiet:
        print_table(closing_table(report, budget_bytes=described.pipeline.budget.capacity))


def _run(
    described: PipelineFile, extent: Extent, engine: str | None, metrics: list[str] | None, *, quiet: bool
) -> Report:
    pipeline = described.pipeline
    watched = None if metrics is None else MetricsConfig.of(metrics)  # refuses a bad target before the passes
    console = Console(stderr=True)
    with log_lines(console, logging.WARNING if quiet else logging.INFO):
        fit: Sequence[Any] = described.fit
        if engine in (None, "local"):
            fit = ()
            fit_transforms(pipeline, described.to_fit, None if quiet else partial(_watched, console))
        if quiet:
            return pipeline.run(described.checkpoint, engine=engine, fit=fit, metrics=watched)
        with progress_on(console, extent, str(pipeline)) as progress:
            return pipeline.run(described.checkpoint, progress=progress, engine=engine, fit=fit, metrics=watched)


def _resumes(described: PipelineFile) -> bool:
    return described.checkpoint is not None and load_checkpoint(described.checkpoint) is not None


def _output(described: PipelineFile) -> Path | str | None:
    path = getattr(described.pipeline.sink, "path", None)
    return None if path is None else output_place(path, "the output")


def _facts(described: PipelineFile, extent: Extent) -> dict[str, Any]:
    """Result of a dry run."""
    pipeline = described.pipeline
    quarantine = pipeline.config.quarantine
    return {
        "pipeline": str(pipeline),
        "files": extent.files,
        "file_bytes": extent.file_bytes,
        "rows": extent.rows,
        "output": None if (output := _output(described)) is None else shown_place(output),
        "budget_bytes": pipeline.budget.capacity,
        "config": dataclasses.asdict(pipeline.config) | {"quarantine": quarantine and shown(quarantine)},
        "fits": [repr(pipeline.transforms[position]) for position in described.to_fit],
        "checkpoint": None if described.checkpoint is None else shown_place(described.checkpoint),
        "resumes": _resumes(described),
    }


def _lines(described: PipelineFile, extent: Extent, columns: ColumnCheck, *, elsewhere: bool) -> Iterator[str]:
    facts, config = _facts(described, extent), described.pipeline.config
    yield facts["pipeline"]
    if extent.files is not None:
        yield f"input       {counted(extent.files, 'file')}, {format_bytes(extent.file_bytes or 0)}"
    if extent.rows is not None:
        yield f"rows        {extent.rows:,}"
    if columns.unknown is None:
        yield f"columns     {', '.join(columns.columns)}"
    else:
        yield f"columns     not checked from here on: {columns.unknown}"
    if (target := _output(described)) is not None:
        exists = target.exists() if isinstance(target, Path) else bucket_has(target)
        yield f"output      {facts['output']}{' (exists: it will be replaced)' if exists else ''}"
    yield f"budget      {format_bytes(facts['budget_bytes'])}"
    if not elsewhere:  # else tasks have the cores that the engine gives them
        yield f"workers     {config.workers}, at most {config.worker_limit}"
    yield f"bad rows    {config.on_error}"
    for learner in facts["fits"]:
        yield f"first pass  fits {learner} on the input"
    if described.checkpoint is not None:
        yield f"checkpoint  {facts['checkpoint']}{' (exists: the run will be resumed)' if facts['resumes'] else ''}"


@dataclass(slots=True)
class ColumnCheck:
    """Result of checking the columns that steps name."""

    unknown: str | None = None
    """Reason why the columns after them are unknown; None if all steps were checked."""
    columns: list[str] = field(default_factory=list)
    """Columns after the last checked step."""


def check_columns(described: PipelineFile, problems: Problems, *, scan: bool = True) -> ColumnCheck:
    """Add a problem for every step that names a missing column; the steps run on a batch without rows.

    Without `scan`, nothing is checked if all rows would have to be read for it.
    """
    found = ColumnCheck()
    if not scan and not getattr(described.pipeline.source, "has_schema", True):
        found.unknown = "the columns are found by the job, from all rows; give the source a schema to check them now"
        return found
    try:
        schema = getattr(described.pipeline.source, "schema", None)
    except QueueNotFoundError:
        schema = None
    except (PenstockError, OSError, ValueError) as error:
        problems.add("source", str(error))
        return found
    if not isinstance(schema, pa.Schema) or not len(schema):
        found.unknown = "the source has no schema before it is read"
        return found
    batch = pa.RecordBatch.from_pylist([], schema=schema)
    to_fit = {id(described.pipeline.transforms[position]) for position in described.to_fit}
    for number, step in enumerate(described.steps):
        where = f"transforms[{number}]"
        if missing := _missing(step, batch.schema):
            problems.add(where, f"no column {missing!r}; the columns are {batch.schema.names}")
        reason = _unknown_after(step, fits=id(step) in to_fit)
        if reason is not None:
            found.unknown = f"{where}: {reason}"
            break
        if missing:
            continue
        if not isinstance(step, Dedup) and not getattr(step, "calls_function", False):  # a filter keeps all columns
            try:
                batch = step.transform(batch)
            except (PenstockError, KeyError, pa.ArrowInvalid, pa.ArrowKeyError, pa.ArrowNotImplementedError) as error:
                problems.add(where, str(error))
                continue
    found.columns = batch.schema.names
    return found


def _missing(step: Any, schema: pa.Schema) -> str | None:
    """A missing column that the step names. Other steps report it themselves."""
    if not isinstance(step, Dedup) and not callable(getattr(step, "fit", None)):
        return None
    named = getattr(step, "columns", None) or getattr(step, "column", None) or ()
    named = [named] if isinstance(named, str) else named
    return next((name for name in named if isinstance(name, str) and name not in schema.names), None)


def _unknown_after(step: Any, *, fits: bool) -> str | None:
    """Reason why the columns after a step are unknown before it runs; None if they are known."""
    if fits:
        return f"{step!r} has to be fitted first"
    if not type(step).__module__.startswith("penstock."):
        return f"{type(step).__name__} is not a step of penstock"
    if isinstance(step, FunctionStage) and step.calls_function:
        return f"{step!r} calls a function of yours"
    if hasattr(step, "state_dict") and not isinstance(step, Dedup):
        return f"{step!r} buffers rows"
    return None
