"""`penstock run pipeline.yaml`: build what the file describes, run it, say how it went."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import orjson
import pyarrow as pa
import typer
from rich.console import Console

from penstock.cli.console import clear_exits, log_lines, output, print_table
from penstock.cli.pipeline_file import KEYS, ColumnCheck, PipelineFile, check_columns, read_plan, spelled_out
from penstock.cli.stage_arguments import ArgumentProblems
from penstock.errors import ConfigError
from penstock.files.documents import read_document, set_value
from penstock.files.filesystems import require_local
from penstock.memory.budget import format_bytes
from penstock.observe import Extent, closing_table, progress_on
from penstock.pipeline import Pipeline, Report
from penstock.pipeline.checkpoint import CHECKPOINT_NAME

__all__ = ["fit_transforms", "run"]


_PROGRESS_SECONDS = 0.25


def fit_transforms(pipeline: Pipeline, positions: tuple[int, ...], console: Console | None) -> None:
    """Fit the transforms at these positions, each in a pass of its own over the source and the transforms before it.

    Afterwards source and transforms are at their beginning again. Bad rows that the run leaves out are left out here.
    """
    config = replace(pipeline.config, batch_rows="auto", quarantine=None)
    if config.on_error == "quarantine":
        config = replace(config, on_error="skip")  # the run itself writes them down, once
    for position in positions:
        learner: Any = pipeline.transforms[position]
        before = Pipeline(pipeline.source, pipeline.transforms[:position], None, config, pipeline.budget)
        with contextlib.closing(_watched(before, f"{learner!r} learns from {before}", console)) as batches:
            learner.fit(batches)
        for stage in (pipeline.source, *before.transforms):
            reset = getattr(stage, "reset", None)
            if callable(reset):
                reset()
            elif stage is pipeline.source:
                raise ConfigError(f"{stage!r} can be read only once, so {learner!r} cannot learn from it first")


def _watched(pipeline: Pipeline, title: str, console: Console | None) -> Generator[pa.RecordBatch, None, None]:
    if console is None:
        yield from pipeline
        return
    with progress_on(console, Extent.of(pipeline.source), title) as progress:
        shown_at = time.monotonic()
        for batch in pipeline:
            yield batch
            if time.monotonic() - shown_at >= _PROGRESS_SECONDS:
                shown_at = time.monotonic()
                progress(pipeline.snapshot())


def run(
    pipeline: Annotated[Path, typer.Argument(metavar="PIPELINE.YAML", help="The file that describes the pipeline.")],
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a value of the file, e.g. --set config.workers=2 --set transforms.0.lower=title. "
            "The value is YAML; list items go by number, from 0. May be given several times.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Build and check everything, the columns that steps name too; send no rows, write nothing.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object on stdout.")] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep progress here, and go on from it; in place of the file's checkpoint."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no closing table.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Run the pipeline that a YAML file describes.

    \b
    source: {type: jsonl, path: corpus/*.jsonl}   # or just: source: corpus/*.jsonl
    transforms:
      - lower: text                               # one argument
      - count_words: {column: text, into: words}  # arguments by name
      - filter: words >= 50                       # an Arrow expression
      - map: my_module:my_function                # a function beside the YAML file
      - map: {function: my_module:fn, batch: true}
      - standard_scaler: {columns: [age], fit: true}    # learns in a first pass
    sink: {type: parquet, path: out.parquet}      # or just: sink: out.parquet
    config: {workers: 4, on_error: quarantine}    # the fields of PipelineConfig
    budget: 256 MiB
    checkpoint: run1/                             # optional

    Only source and sink are needed. Paths are relative to the current directory. `penstock plugins` lists the stages.

    Exit codes: 0 all went well; 1 an error, told on stderr; 2 a wrong command line; 130 stopped by Ctrl-C.
    """
    for assignment in assignments or ():
        if not assignment.partition("=")[0].strip() or "=" not in assignment:
            raise typer.BadParameter(f"expected a.b=value, got {assignment!r}", param_hint="--set")
    with clear_exits(debug=debug):
        tree = spelled_out(read_document(pipeline, such_as="source: corpus.jsonl"))
        for assignment in assignments or ():
            set_value(tree, assignment, known=KEYS)
            tree = spelled_out(tree)
        plan = read_plan(tree, pipeline)
        if checkpoint is not None:
            plan = dataclasses.replace(plan, checkpoint=require_local(checkpoint, "checkpoint"))
        extent = Extent.of(plan.pipeline.source)
        if dry_run:
            problems = ArgumentProblems()
            columns = check_columns(plan, problems)
            problems.check(str(pipeline))
            facts = _facts(plan, extent) | {"columns": columns.columns, "columns_unknown_behind": columns.unknown}
            typer.echo(orjson.dumps(facts, str) if as_json else "\n".join(_described(plan, extent, columns)))
            return
    kept = f"the same command goes on from {plan.checkpoint}" if plan.checkpoint else "unfinished output was dropped"
    with clear_exits(debug=debug, stopped=f"stopped; {kept}"):
        report = _run(plan, extent, quiet=quiet)
    if as_json:
        typer.echo(orjson.dumps({"pipeline": str(plan.pipeline), **report.to_dict()}))
    elif not quiet:
        print_table(output(), closing_table(report, budget_bytes=plan.pipeline.budget.capacity))


def _run(plan: PipelineFile, extent: Extent, *, quiet: bool) -> Report:
    pipeline = plan.pipeline
    console = Console(stderr=True)
    with log_lines(console, logging.WARNING if quiet else logging.INFO):
        fit_transforms(pipeline, plan.to_fit, None if quiet else console)
        if quiet:
            return pipeline.run(plan.checkpoint)
        # After a resume the figures of a snapshot begin in the middle: there is no telling how much is left.
        whole = Extent() if _resumes(plan) else extent
        with progress_on(console, whole, str(pipeline)) as progress:
            return pipeline.run(plan.checkpoint, progress=progress)


def _resumes(plan: PipelineFile) -> bool:
    return plan.checkpoint is not None and (plan.checkpoint / CHECKPOINT_NAME).exists()


def _facts(plan: PipelineFile, extent: Extent) -> dict[str, Any]:
    """What a dry run tells a machine."""
    pipeline = plan.pipeline
    return {
        "pipeline": str(pipeline),
        "files": extent.files,
        "file_bytes": extent.file_bytes,
        "rows": extent.rows,
        "output": getattr(pipeline.sink, "path", None),
        "budget_bytes": pipeline.budget.capacity,
        "config": dataclasses.asdict(pipeline.config),
        "fits": [repr(pipeline.transforms[position]) for position in plan.to_fit],
        "checkpoint": plan.checkpoint,
        "resumes": _resumes(plan),
    }


def _described(plan: PipelineFile, extent: Extent, columns: ColumnCheck) -> Iterator[str]:
    """What a dry run tells people."""
    facts, config = _facts(plan, extent), plan.pipeline.config
    yield facts["pipeline"]
    if extent.files is not None:
        yield f"input       {extent.files:,} file{'s' * (extent.files != 1)}, {format_bytes(extent.file_bytes or 0)}"
    if extent.rows is not None:
        yield f"rows        {extent.rows:,}"
    if columns.unknown is None:
        yield f"columns     {', '.join(columns.columns)}"
    else:
        yield f"columns     not checked from here on: {columns.unknown}"
    if (target := facts["output"]) is not None:
        yield f"output      {target}{' (there already: it will be replaced)' if Path(target).exists() else ''}"
    yield f"budget      {format_bytes(facts['budget_bytes'])}"
    yield f"workers     {config.workers}, at most {config.worker_limit}"
    yield f"bad rows    {config.on_error}"
    for learner in facts["fits"]:
        yield f"first pass  {learner} learns from the input"
    if plan.checkpoint is not None:
        yield f"checkpoint  {plan.checkpoint}{' (a run is kept there: it will go on)' if facts['resumes'] else ''}"
