"""Engines: where a pipeline runs. `Pipeline(...).run(engine="ray")` and `penstock run --engine ray://host:10001`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.engines.driver import Driver, JobOptions, check_engine
from penstock.engines.executor import Executor, InProcess
from penstock.engines.job_directory import JobDirectory, default_place
from penstock.engines.plan import JobPlan
from penstock.engines.splits import bundles_of
from penstock.errors import ConfigError
from penstock.files.filesystems import output_place
from penstock.files.listing import PathLike
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.report import Report

Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class JobEngine:
    """Engine of jobs: an executor of tasks, made for each run, and the options of a job."""

    executor: Callable[[], Executor] = InProcess
    options: JobOptions = field(default_factory=JobOptions)


def engine_of(engine: Any) -> JobEngine:
    """The engine of a name (`ray`, `ray://host:port`), or as it is."""
    if isinstance(engine, JobEngine):
        return engine
    if isinstance(engine, str) and (engine == "ray" or engine.startswith("ray://")):
        address = None if engine == "ray" else engine
        return JobEngine(executor=lambda: _ray_executor(address))
    raise ConfigError(f"unknown engine {engine!r}; valid: 'local', 'ray', 'ray://HOST:PORT', or an JobEngine")


def _ray_executor(address: str | None) -> Executor:
    from importlib import import_module

    executor: Executor = import_module("penstock.engines.ray_executor").RayExecutor(address)
    return executor


def run_pipeline(pipeline: Pipeline, engine: Any, checkpoint: PathLike | None, progress: Progress | None) -> Report:
    """Run a pipeline as a job, with the output of a local run, byte for byte."""
    check_engine(pipeline)
    chosen = engine_of(engine)
    directory = JobDirectory(job_place(pipeline, checkpoint))
    report = Driver(pipeline, directory, chosen.executor(), chosen.options, progress).run()
    if checkpoint is None:
        directory.remove()
    return report


def job_place(pipeline: Pipeline, checkpoint: PathLike | None) -> PathLike:
    """Directory of a job: the checkpoint, or one beside the output."""
    if checkpoint is not None:
        return checkpoint
    target = getattr(pipeline.sink, "path", None)
    if target is None:
        raise ConfigError("a job with this sink needs checkpoint=, a directory that all nodes share, or a URL")
    return default_place(output_place(target, "the output"))


def explain(pipeline: Pipeline, engine: Any) -> str:
    """The plan of a job in words: steps that run on splits, over partitions of keys, and in one place."""
    chosen = engine_of(engine)
    bundles = bundles_of(pipeline.source, chosen.options.split_bytes or 128 << 20)
    nbytes = sum(bundle.nbytes for bundle in bundles)
    return "\n".join(JobPlan.of(pipeline).lines(pipeline, len(bundles), nbytes))
