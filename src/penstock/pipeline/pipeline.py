"""Pipeline: a description (source, transforms, sink, config, budget) that can be run, iterated and resumed."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import weakref
from asyncio import AbstractEventLoop
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, Self, cast

import pyarrow as pa

from penstock._forks import check_process
from penstock.errors import ConfigError, ResumeError
from penstock.files.filesystems import beside, output_place, shown
from penstock.files.listing import PathLike
from penstock.memory.budget import MemoryBudget, format_bytes
from penstock.memory.pressure import LOADED_LEAST_BYTES, give_back_memory, resident_bytes, suggest_limit
from penstock.metrics.readings import Readings
from penstock.metrics.targets import Metrics, MetricsConfig
from penstock.metrics.watch import MetricsWatch, ending
from penstock.pipeline.chain import Inferring, stage_name
from penstock.pipeline.checkpoint import STATE, Checkpoint, check_state, fingerprint, schema_from_text, schema_to_text
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.context import Context
from penstock.pipeline.delivery import DeliveryPosition
from penstock.pipeline.event_loop import AsyncBatches, CallThread, called_on
from penstock.pipeline.functions import as_transform
from penstock.pipeline.metrics import job_readings
from penstock.pipeline.quarantine import BadRows
from penstock.pipeline.report import Report
from penstock.pipeline.runner import Runner, SinkThread
from penstock.pipeline.stages import (
    Awaiting,
    Finishing,
    Fitting,
    Live,
    Sink,
    Source,
    State,
    Stateful,
    Transform,
    TwoPart,
)

log = logging.getLogger("penstock.pipeline")

Progress = Callable[[dict[str, Any]], None]
_PROGRESS_SECONDS = 0.25
_GRACE = 2.0
_SMALL_BUDGET = 256 << 20
"""Budget below which tables that nobody uses any more are freed before others are loaded."""
_loaded: list[weakref.ref[Pipeline]] = []
"""Pipelines whose stages loaded much. One that is over holds it until the garbage collector finds the pipeline."""


class Pipeline:
    """Source -> transforms -> sink under one byte budget.

        report = Pipeline(JsonlSource("in.jsonl"), [Lower("text")], ParquetSink("out.parquet")).run()

    Without a sink it is iterated: `for batch in pipeline`. Nothing starts before `run`, `start` or the first batch.
    Rows come out in the order they went in, with any number of workers; which rows, and their order, depend on
    nothing but the stages.

    `source` may also be anything that `penstock.sources.open_source` takes: paths, a table, a list of dicts, a dataset;
    `sink` the path or URL that `penstock.sinks.open_sink` takes.
    A transform may be a plain function: of a row (dict -> dict), or, if its parameter is annotated as
    `pyarrow.RecordBatch`, of a batch.
    """

    def __init__(
        self,
        source: Source | Any,
        transforms: Sequence[Transform | Callable[..., Any]] | Transform | Callable[..., Any] = (),
        sink: Sink | PathLike | None = None,
        config: PipelineConfig | None = None,
        budget: MemoryBudget | int | str | None = None,
    ) -> None:
        self.source: Source = _checked(_as_source(source), "source", "next_batch")
        steps: Sequence[Any] = transforms if isinstance(transforms, Sequence) else [transforms]
        self.transforms: list[Transform] = _in_parts([as_transform(step) for step in steps])
        _keep_json(self.source, self.transforms)
        self.sink: Sink | None = _checked(_as_sink(sink), "sink", "consume", "flush") if sink is not None else None
        self.config = config if config is not None else PipelineConfig()
        self.budget = MemoryBudget.of(suggest_limit() if budget is None else budget)
        if self.config.on_error != "raise":
            _check_restorable(self.transforms)
        self._runner: Runner | None = None
        self._drain: SinkThread | None = None
        self._finished: Report | None = None
        self._start_from: State | None = None
        self._used = False
        self._watch: MetricsWatch | None = None
        self._calls = CallThread()

    # -- run ---------------------------------------------------------------------------------------------------------

    def run(
        self,
        checkpoint: PathLike | None = None,
        *,
        progress: Progress | None = None,
        engine: Any = None,
        fit: Sequence[Transform] = (),
        metrics: Metrics = None,
    ) -> Report:
        """Run to the end of the input and return the report.

        The transforms in `fit` are fitted first, each in a pass over the source and the transforms before it.

        `engine="ray"` (or `"ray://host:port"`) runs it on a cluster, with the same output, byte for byte; then
        `checkpoint` is a directory that all nodes share, or a URL.

        With `checkpoint`, a directory or a URL of an object store, progress is made durable every
        `config.checkpoint_seconds`: after a crash, even kill -9, calling it again resumes, and the output holds every
        row exactly once. A finished checkpoint returns its report again. `progress` is called a few times a second
        with a snapshot. `metrics` is a target of `penstock.metrics.open_exporter`, or several; they change no row.
        """
        positions = fit_positions(self, fit)
        if engine not in (None, "local"):
            return self._run_job(engine, checkpoint, progress, positions, metrics)
        watched = None if metrics is None else MetricsConfig.of(metrics)  # refuses a bad target before the passes
        fit_transforms(self, positions)
        self.start(checkpoint, metrics=watched)
        try:
            return self.wait(progress=progress)
        finally:
            self.stop()

    def explain(self, engine: Any = "ray", *, fit: Sequence[Transform] = ()) -> str:
        """The plan of an engine in words: steps that run on splits, over partitions of keys, and in one place.

        Without an argument, the plan of Ray, which need not be installed. `fit` are the transforms that `run` will fit.
        """
        return cast(str, _engines().explain(self, engine, fit_positions(self, fit)))

    async def run_async(
        self, checkpoint: PathLike | None = None, *, progress: Progress | None = None, metrics: Metrics = None
    ) -> Report:
        """`run` for an event loop, which stays free: one thread waits for the whole run.

        A cancelled task (`task.cancel()`, `asyncio.timeout`) stops the run first: with a checkpoint, the next one
        resumes. `progress` is called in the thread of the event loop.
        """
        loop = asyncio.get_running_loop()

        def work() -> Report:
            self._await_on(loop)
            try:
                shown = None if progress is None else called_on(loop, progress)
                return self.run(checkpoint, progress=shown, metrics=metrics)
            finally:
                self._await_on(None)

        return await self._calls.call(work, self._halt)

    def start(self, checkpoint: PathLike | None = None, *, metrics: Metrics = None) -> Self:
        """Begin in the background; then `wait` for the report, or `stop`."""
        if self.sink is None:
            raise ConfigError("this pipeline has no sink: iterate it (`for batch in pipeline`), or give it one")
        watched = None if metrics is None else MetricsConfig.of(metrics)
        keeper = None
        if checkpoint is not None:
            keeper = Checkpoint(checkpoint, self.source, self.transforms, self.sink, self.config.checkpoint_seconds)
        try:
            if keeper is not None and keeper.state is not None:
                check_state(keeper.state, self._mark(), str(self))
            if keeper is not None and keeper.report is not None:
                log.info("the run in %s is complete; nothing to do", shown(checkpoint or ""))
                self._finished = keeper.report
                keeper.close()
                return self
            if keeper is not None:
                keeper.catch_up()
            runner = self._begin(keeper.state if keeper is not None else None)
        except BaseException:
            if keeper is not None:
                keeper.close()
            raise
        if keeper is not None:
            try:
                keeper.restore(runner.delivery)
            except BaseException:
                runner.close()
                keeper.give_up()
                raise
        resumed = keeper is not None and keeper.state is not None
        self._drain = SinkThread(
            runner,
            self.sink,
            self.budget,
            keeper,
            state=lambda: self._wrap(runner.delivery.position),
            report=lambda: Report.of(self, runner, resumed=resumed),
        )
        runner.threads.append(self._drain.thread)
        if watched is not None:
            self._watch = self._watch_run(watched, runner.metrics, lambda: runner.context.bottleneck(runner.seconds))
            runner.trace(self._watch.spans)
        runner.start()
        return self

    def wait(self, timeout_seconds: float | None = None, *, progress: Progress | None = None) -> Report:
        """Wait for the end and return the report, or raise what stopped the run."""
        if self._finished is not None:
            return self._finished
        with ending(self._watch) as end:
            return cast(Report, end(self._wait(timeout_seconds, progress)))

    def _wait(self, timeout_seconds: float | None, progress: Progress | None) -> Report:
        drain, runner = self._drain, self._runner
        if drain is None or runner is None:
            raise ConfigError("this pipeline has not been started")
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not drain.done.wait(_PROGRESS_SECONDS):
            check_process(runner.process, "this run of a pipeline")
            if progress is not None:
                progress(runner.snapshot())
            if runner.failure is not None and not drain.done.wait(_GRACE):
                runner.close()
                raise runner.failure  # the sink itself hangs: its thread cannot tell us
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"still running after {timeout_seconds:g} s: {self}")
        if progress is not None:
            progress(runner.snapshot())
        runner.close()
        if drain.error is not None:
            raise drain.error
        assert drain.report is not None
        return drain.report

    def stop(self) -> None:
        """Stop now. Output that was not published is dropped, unless a checkpoint keeps it. Idempotent."""
        if self._runner is not None:
            self._runner.close()
        if self._watch is not None:
            self._watch.end("stopped")

    close = stop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    # -- iterate -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """The batches, in order, read ahead by background threads. Iterating again starts again from the beginning."""
        self._check_no_sink()
        yield from self._batches(self._begin(None))

    def __aiter__(self) -> AsyncBatches[pa.RecordBatch]:
        """The batches for `async for`; the event loop is free while one is awaited.

        Leaving the loop, or cancelling its task, ends the run, with the state after the last batch that was delivered.
        """
        self._check_no_sink()
        begun: list[Runner] = []

        def begin(loop: AbstractEventLoop) -> Iterator[pa.RecordBatch]:
            self._await_on(loop)
            begun.append(self._begin(None))
            return self._batches(begun[0])

        def rewind(position: DeliveryPosition) -> None:
            begun[0].delivery.position = position

        return AsyncBatches(
            self._calls,
            begin,
            stop=self._halt,
            leave=self._halt,
            mark=lambda: begun[0].delivery.position,
            rewind=rewind,
        )

    def _batches(self, runner: Runner) -> Iterator[pa.RecordBatch]:
        delivery = runner.delivery
        try:
            runner.start()
            yield from delivery.batches(self.config.batch_rows, self.config.max_wait_seconds)
            delivery.bad_rows.finish(delivery.rows_read)
            delivery.asked_on(at_the_end=True)
        finally:
            runner.close()
            delivery.bad_rows.close()
            self._await_on(None)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Position of the iteration: small, JSON-able, and exact, with any number of rows read ahead.

        A new, equal pipeline that loads it resumes with the row after the last delivered one.
        """
        if not isinstance(self.source, Stateful):
            raise ResumeError(f"{stage_name(self.source)} has no state_dict, so this pipeline cannot be resumed")
        if self._start_from is not None:
            return self._start_from
        if self._runner is not None:
            self._runner.delivery.bad_rows.sync()
            return self._wrap(self._runner.delivery.position)
        return self._wrap(DeliveryPosition(self.source.state_dict(), self._transform_states()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; the state of another pipeline is refused."""
        check_state(state, self._mark(), str(self))
        if self._runner is not None and not self._runner.stopping:
            raise ResumeError("stop the running pipeline before loading a state into it")
        self._start_from = dict(state)

    def snapshot(self) -> dict[str, Any]:
        """Metrics of the current or last run as a plain dict."""
        return self._runner.snapshot() if self._runner is not None else {}

    def metrics(self) -> dict[str, float]:
        """Metrics of the current or last run under the names that exporters use; see docs/metrics.md."""
        return self._runner.metrics() if self._runner is not None else {}

    def __str__(self) -> str:
        stages = [stage_name(stage) for stage in (self.source, *self.transforms)]
        if self.sink is not None:
            stages.append(stage_name(self.sink))
        return " -> ".join(stages) + f"  [budget {format_bytes(self.budget.capacity)}]"

    def __repr__(self) -> str:
        return f"<Pipeline {self}>"

    # -- inside ------------------------------------------------------------------------------------------------------

    def _run_job(
        self,
        engine: Any,
        checkpoint: PathLike | None,
        progress: Progress | None,
        positions: tuple[int, ...],
        metrics: Metrics,
    ) -> Report:
        """Run on an engine; its metrics are those of the snapshots that it shows."""
        if metrics is None:
            return cast(Report, _engines().run_pipeline(self, engine, checkpoint, progress, positions))
        last: dict[str, Any] = {}

        def show(snapshot: dict[str, Any]) -> None:
            last.update(snapshot)
            if progress is not None:
                progress(snapshot)

        watched = MetricsConfig.of(metrics)
        read = partial(job_readings, last, on_error=self.config.on_error)
        with ending(self._watch_run(watched, read, lambda: last.get("bottleneck"))) as end:
            report = cast(Report, end(_engines().run_pipeline(self, engine, checkpoint, show, positions)))
            last["report"] = report.to_dict()  # with the steps that run in one place, for the last reading
            return report

    def _watch_run(
        self, metrics: MetricsConfig, read: Callable[[], Readings], note: Callable[[], str | None]
    ) -> MetricsWatch:
        return metrics.watch("pipeline", "pipeline", read, note=note, description=str(self))

    def _check_no_sink(self) -> None:
        if self.sink is not None:
            raise ConfigError(f"this pipeline has a sink, {stage_name(self.sink)}: call run(), or build it without one")

    def _halt(self) -> None:
        """Make a run that is waited for end, without waiting."""
        if self._runner is not None and not self._runner.stopping:
            self._runner.halt()
        elif isinstance(self.source, Live):
            self.source.interrupt()  # a run that is not there yet passes over rows to resume

    def _await_on(self, loop: AbstractEventLoop | None) -> None:
        """Have a source that awaits its rows do so on an event loop, or on one of its own."""
        if isinstance(self.source, Awaiting):
            self.source.use_loop(loop)

    def _begin(self, state: State | None) -> Runner:
        if self._runner is not None and not self._runner.stopping:
            raise ConfigError("this pipeline is running already; stop it first")
        position = self._prepare(state if state is not None else self._start_from)
        small = self.budget.capacity < _SMALL_BUDGET and any(isinstance(stage, Fitting) for stage in self.transforms)
        if small:
            if any(_is_over(reference()) for reference in list(_loaded)):
                gc.collect()  # seconds in a process of millions of objects
            give_back_memory()
        before = resident_bytes()
        for stage in (self.source, *self.transforms, self.sink):
            if isinstance(stage, Fitting):
                stage.fit_budget(self.budget.capacity)
        if small:
            give_back_memory()  # what they needed only to load
        loaded = max(0, resident_bytes() - before)
        if loaded >= LOADED_LEAST_BYTES:
            _loaded.append(weakref.ref(self, _loaded.remove))
        if isinstance(self.source, Live) and self.config.max_wait_seconds is not None:
            self.source.max_wait_seconds = self.config.max_wait_seconds
        sink_name = stage_name(self.sink) if self.sink is not None else "the consumer"
        bad_rows = BadRows(self.config, self._quarantine_path())
        if state is None and self._start_from is not None and self._start_from["bad_rows"] is not None:
            bad_rows.restore(self._start_from["bad_rows"])
        context = Context(self.source, self.transforms, self.config, self.budget, sink_name, loaded)
        if context.acknowledged is not None:
            context.acknowledged.hold()
        self._runner = Runner(context, position, bad_rows)
        self._drain = self._finished = self._start_from = None
        self._used = True
        return self._runner

    def _prepare(self, state: Mapping[str, Any] | None) -> DeliveryPosition:
        """Load the state into every stage, or reset it to the beginning."""
        for stage in (self.source, *self.transforms, self.sink if self._used else None):
            reset = getattr(stage, "reset", None)
            if callable(reset):
                reset()
            elif stage is self.source and self._used and state is None:
                raise ConfigError(f"{stage_name(stage)} has no reset(), so this pipeline runs only once")
        if state is None:
            return DeliveryPosition(
                self.source.state_dict() if isinstance(self.source, Stateful) else None, self._transform_states()
            )
        check_state(state, self._mark(), str(self))
        cast(Stateful, self.source).load_state_dict(state["source"])
        for index, saved in state["transforms"].items():
            stateful = self._transform_at(index)
            if not isinstance(stateful, Stateful):
                raise _damaged(f"{index!r} is a transform without a state")
            stateful.load_state_dict(saved)
        for index, text in state["schemas"].items():
            inferring = self._transform_at(index)
            if not isinstance(inferring, Inferring):
                raise _damaged(f"{index!r} is a transform whose columns are known")
            inferring.set_output_schema(schema_from_text(text))
        return DeliveryPosition(state["source"], state["transforms"], state["skip_rows"], state["bad_rows"])

    def _transform_at(self, index: str) -> Transform:
        """The transform that a saved state has something for."""
        found = dict(zip(map(str, range(len(self.transforms))), self.transforms)).get(index)
        if found is None:
            raise _damaged(f"there is no transform {index!r}")
        return found

    def _transform_states(self) -> dict[str, State]:
        return {str(i): t.state_dict() for i, t in enumerate(self.transforms) if isinstance(t, Stateful)}

    def _mark(self) -> str:
        return fingerprint(self.source, self.transforms)

    def _wrap(self, position: DeliveryPosition) -> State:
        schemas = {
            str(i): schema_to_text(t.output_schema)
            for i, t in enumerate(self.transforms)
            if isinstance(t, Inferring) and t.output_schema is not None
        }
        facts = {
            "pipeline": self._mark(),
            "stages": " -> ".join(stage_name(stage) for stage in (self.source, *self.transforms)),
            "source": position.source,
            "transforms": position.transforms,
            "schemas": schemas,
            "skip_rows": position.skip_rows,
            "bad_rows": position.bad_rows,
        }
        return STATE.write(facts)

    def _quarantine_path(self) -> Path | str | None:
        if self.config.on_error != "quarantine":
            return None
        if self.config.quarantine is not None:
            return output_place(self.config.quarantine, "quarantine")
        target = getattr(self.sink, "path", None)
        if target is None:
            raise ConfigError("on_error='quarantine' needs PipelineConfig(quarantine='bad-rows.jsonl') with this sink")
        return beside(output_place(target, "the output"), suffix=".quarantine.jsonl")


def _in_parts(transforms: list[Transform]) -> list[Transform]:
    """The transforms, with the unordered part of each `TwoPart` one before it, unless the list has it already.

    It goes as far to the front as it can without passing anything but other in-order stages: what follows the first
    transform with a state runs in order.
    """
    result: list[Transform] = []
    for transform in transforms:
        if isinstance(transform, TwoPart):
            part = transform.preparation()
            if repr(part) not in map(repr, result):
                at = len(result)
                while at and isinstance(result[at - 1], TwoPart):
                    at -= 1
                result.insert(at, part)
        result.append(transform)
    return result


def _as_source(data: Any) -> Any:
    """Data in another form as a source."""
    if hasattr(data, "next_batch"):
        return data
    from importlib import import_module

    # By name, since sources know the pipeline.
    return import_module("penstock.sources.by_suffix").open_source(data)


def _as_sink(target: Any) -> Any:
    """The path of a file, or the URL of a database or a broker, as a sink."""
    if hasattr(target, "consume") or not isinstance(target, (str, PurePath)):
        return target
    from importlib import import_module

    # By name, since sinks know the pipeline.
    return import_module("penstock.sinks.formats").open_sink(target)


def _engines() -> Any:
    from importlib import import_module

    return import_module("penstock.engines.run")  # by name, since engines know the pipeline


def _checked(stage: Any, role: str, *methods: str) -> Any:
    missing = [name for name in methods if not callable(getattr(stage, name, None))]
    if missing:
        raise ConfigError(f"{stage!r:.100} cannot be a {role}: it has no method {' or '.join(missing)}")
    return stage


def _is_over(pipeline: Pipeline | None) -> bool:
    return pipeline is not None and (pipeline._runner is None or pipeline._runner.stopping)


_PASS_BY = frozenset({"Select", "Drop", "DropNulls", "DropColumns", "Limit"})
"""Transforms of penstock that leave the columns they do not drop as they are."""


def _keep_json(source: Source, transforms: Sequence[Transform]) -> None:
    """Have the source keep as JSON what a transform wants so: in one type for all rows, rows would change each other.

    A stage in between may look at the columns, or call them by other names. So they keep their types there, and a
    source that has given them types already keeps those; what has lost something on the way is then refused by the
    transform.
    """
    for number, transform in enumerate(transforms):
        wanted = getattr(transform, "json_columns", None)
        keep = getattr(source, "keep_json", None)
        if not wanted or keep is None:
            continue
        untouched = all(type(stage).__name__ in _PASS_BY for stage in transforms[:number])
        if not untouched or not keep(wanted):
            cast(Any, transform).refuse_typed_json()
        return


def _check_restorable(transforms: Sequence[Transform]) -> None:
    """Finding bad rows runs a batch again, so what holds rows back must be able to go back."""
    for transform in transforms:
        if isinstance(transform, Finishing) and not isinstance(transform, Stateful):
            raise ConfigError(
                f"{stage_name(transform)} holds rows back (it has finish) but has no state_dict, so it cannot go back "
                "when a row fails: give it one, or use on_error='raise'"
            )


def _damaged(why: str) -> ResumeError:
    return ResumeError(f"the state is damaged: {why}; load another copy of it, or start without it")


Watch = Callable[[Pipeline, Any], Generator[pa.RecordBatch, None, None]]
"""Batches of a pipeline on which a transform is fitted."""


def fit_positions(pipeline: Pipeline, fit: Sequence[Any]) -> tuple[int, ...]:
    """Positions of the transforms to fit, in the order of the pipeline."""
    places = {id(stage): position for position, stage in enumerate(pipeline.transforms)}
    for stage in fit:
        if id(stage) not in places:
            raise ConfigError(f"fit= names {stage_name(stage)}, which is not among the transforms of {pipeline}")
        if not callable(getattr(stage, "fit", None)):
            raise ConfigError(f"fit= names {stage_name(stage)}, which has no method fit; leave it out")
    return tuple(sorted(places[id(stage)] for stage in fit))


def fit_config(config: PipelineConfig) -> PipelineConfig:
    """Options of a pass: bad rows that the run skips or quarantines are skipped, and written by the run alone."""
    on_error = "skip" if config.on_error == "quarantine" else config.on_error
    return replace(config, batch_rows="auto", quarantine=None, on_error=on_error)


def fit_transforms(pipeline: Pipeline, positions: Sequence[int], watch: Watch | None = None) -> None:
    """Fit the transforms at these positions, each in its own pass. Afterwards source and transforms are reset."""
    config = fit_config(pipeline.config)
    for position in positions:
        learner: Any = pipeline.transforms[position]
        before = Pipeline(pipeline.source, pipeline.transforms[:position], None, config, pipeline.budget)
        with closing(iter(before) if watch is None else watch(before, learner)) as batches:  # type: ignore[type-var]
            learner.fit(batches)
        for stage in (pipeline.source, *before.transforms):
            reset = getattr(stage, "reset", None)
            if callable(reset):
                reset()
            elif stage is pipeline.source:
                raise ConfigError(f"{stage!r} can be read only once, so {learner!r} cannot be fitted on it")
