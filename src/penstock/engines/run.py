"""Engines: where a pipeline runs. `Pipeline(...).run(engine="ray")` and `penstock run --engine ray://host:10001`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.engines.driver import Driver, JobOptions, check_engine
from penstock.engines.executor import Executor, InProcess
from penstock.engines.job_directory import JobDirectory, default_place
from penstock.engines.plan import JobPlan
from penstock.engines.results import SINK_NAME
from penstock.engines.splits import bundles_of
from penstock.errors import ConfigError
from penstock.files.filesystems import output_place
from penstock.files.listing import PathLike
from penstock.memory.budget import parse_bytes
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.report import Report

Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class JobEngine:
    """Engine of jobs: an executor of tasks, made for each run, and the options of a job.

    With a `share`, such as (2, 16), a run does that part of the tasks (counted from 0) and leaves the rest to others.
    """

    executor: Callable[[], Executor] = InProcess
    options: JobOptions = field(default_factory=JobOptions)
    share: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class RayEngine:
    """Ray as the engine of a pipeline.

        Pipeline(...).run(engine=RayEngine(address="ray://head:10001", cpus_per_task=2))

    `address` is that of a running cluster; None takes the one that this process is in (`RAY_ADDRESS`), or starts Ray on
    this machine. `memory` is the budget of one task. A split that crashes its worker three times stops the job, or is
    left out with `on_crash="skip"` or `"quarantine"`.
    """

    address: str | None = None
    cpus_per_task: int = 1
    memory: int | str = "256 MiB"
    split_bytes: int | str | None = None
    on_crash: str = "raise"
    runtime_env: Mapping[str, Any] | None = None

    def job_engine(self) -> JobEngine:
        memory = parse_bytes(self.memory)
        options = JobOptions(
            split_bytes=None if self.split_bytes is None else parse_bytes(self.split_bytes),
            task_budget_bytes=memory,
            on_crash=self.on_crash,
        )
        return JobEngine(executor=lambda: _ray_executor(self, memory), options=options)


def engine_of(engine: Any) -> JobEngine:
    """The engine of a name (`ray`, `ray://host:port`), or as it is."""
    if isinstance(engine, JobEngine):
        return engine
    if isinstance(engine, RayEngine):
        return engine.job_engine()
    if isinstance(engine, str) and (engine == "ray" or engine.startswith("ray://")):
        return RayEngine(address=None if engine == "ray" else engine).job_engine()
    raise ConfigError(
        f"unknown engine {engine!r}; valid: 'local', 'ray', 'ray://HOST:PORT', or a RayEngine with its options"
    )


def _ray_executor(engine: RayEngine, memory: int) -> Executor:
    from importlib import import_module

    executor: Executor = import_module("penstock.engines.ray_executor").RayExecutor(
        engine.address, cpus_per_task=engine.cpus_per_task, memory_bytes=2 * memory, runtime_env=engine.runtime_env
    )
    return executor


def run_pipeline(
    pipeline: Pipeline,
    engine: Any,
    checkpoint: PathLike | None,
    progress: Progress | None,
    fit: Sequence[int] = (),
) -> Report:
    """Run a pipeline as a job, with the output of a local run, byte for byte. `fit` are positions of transforms."""
    check_engine(pipeline)
    chosen = engine_of(engine)
    directory = JobDirectory(job_place(pipeline, checkpoint))
    executor, temporary = chosen.executor(), checkpoint is None
    return Driver(
        pipeline, directory, executor, chosen.options, progress, chosen.share, temporary=temporary, fit=fit
    ).run()


def job_place(pipeline: Pipeline, checkpoint: PathLike | None) -> PathLike:
    """Directory of a job: the checkpoint, or one beside the output."""
    if checkpoint is not None:
        return checkpoint
    target = getattr(pipeline.sink, "path", None)
    if target is None:
        raise ConfigError("a job with this sink needs checkpoint=, a directory that all nodes share, or a URL")
    return default_place(output_place(target, "the output"))


def was_cut_short(target: Path | str, run: str) -> bool:
    """True if the job that published a store was killed before it had cleaned up: its report can still be read."""
    publishing = JobDirectory(default_place(target)).read_json(SINK_NAME)
    return publishing is not None and publishing["token"].get("run") == run


def explain(pipeline: Pipeline, engine: Any, fit: Sequence[int] = ()) -> str:
    """The plan of a job in words: steps that run on splits, over partitions of keys, and in one place."""
    chosen = engine_of(engine)
    bundles = bundles_of(pipeline.source, chosen.options.split_bytes or 128 << 20)
    nbytes = sum(bundle.nbytes for bundle in bundles)
    return "\n".join(JobPlan.of(pipeline).lines(pipeline, len(bundles), nbytes, fit))
