"""A YAML file that describes a pipeline, and the pipeline it describes.

    source: {type: jsonl, path: corpus/*.jsonl}    # or just: source: corpus/*.jsonl, by the suffix of the files
    transforms:
      - lower: text                                # one argument
      - count_words: {column: text, into: words}   # arguments by name
      - drop_nulls                                 # none
      - filter: words >= 50                        # an Arrow expression as text
      - map: {share: words / chars}                # columns from expressions
      - map: my_module:my_function                 # a function, imported; beside the YAML file is a good place
      - map: {function: my_module:fn, batch: true}
      - standard_scaler: {columns: [age], fit: true}   # learns in a first pass over what comes before it
    sink: {type: parquet, path: out.parquet}       # or just: sink: out.parquet
    config: {workers: 4, on_error: quarantine}     # the fields of PipelineConfig
    budget: 256 MiB
    checkpoint: run1/                              # go on from here after a crash

Paths are relative to the current directory, as for every command; only functions are also looked for beside the file.
That of `type: queue`, which is a source and a sink, is the directory of the queue.
Stages are called by name: `penstock plugins` lists them. Every problem is reported at once, with its place in the file.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock._suggest import did_you_mean
from penstock.cli.stage_arguments import ArgumentProblems, import_function, make
from penstock.cli.stage_catalog import resolve
from penstock.corpus.dedup.stages import Dedup
from penstock.errors import PenstockError, QueueNotFoundError
from penstock.files.filesystems import require_local
from penstock.fsqueue import QueueSource
from penstock.memory.budget import MemoryBudget
from penstock.pipeline import Pipeline, PipelineConfig
from penstock.pipeline.functions import FunctionStage
from penstock.sinks import open_sink
from penstock.sources import open_source

__all__ = ["KEYS", "ColumnCheck", "PipelineFile", "check_columns", "read_plan", "spelled_out"]


KEYS = ("source", "transforms", "sink", "config", "budget", "checkpoint")


@dataclass(frozen=True, slots=True)
class PipelineFile:
    """What a file describes, ready to run."""

    pipeline: Pipeline
    to_fit: tuple[int, ...] = ()
    """Which transforms have to learn from the data first, by their position."""
    checkpoint: Path | None = None
    steps: tuple[Any, ...] = ()
    """The transforms as the file lists them."""


def spelled_out(tree: dict[str, Any]) -> dict[str, Any]:
    """With `source: <path>` as `source: {path: <path>}`, so that `--set source.columns=[text]` has a place to go to."""
    short = {end: {"path": tree[end]} for end in ("source", "sink") if isinstance(tree.get(end), (str, list))}
    return tree | short


def read_plan(tree: Mapping[str, Any], path: Path) -> PipelineFile:
    """Build everything the tree describes; nothing is read or written. `path` is the file it came from."""
    builder = _Builder(path)
    plan = builder.plan(tree)
    builder.problems.check(str(path))
    assert plan is not None
    return plan


class _Builder:
    """Builds stage by stage and goes on after a problem, to find the others too."""

    def __init__(self, path: Path) -> None:
        self._folder = str(path.resolve().parent)
        self.problems = ArgumentProblems()

    def plan(self, tree: Mapping[str, Any]) -> PipelineFile | None:
        for key in tree:
            if key not in KEYS:
                hint = did_you_mean(str(key), KEYS) or f"; the keys are {', '.join(KEYS)}"
                self.problems.add(str(key), f"unknown key{hint}")
        source = self._end("sources", tree.get("source"), open_source)
        steps = self._steps(tree.get("transforms"))
        sink = self._end("sinks", tree.get("sink"), open_sink)
        config = self._config(tree.get("config"))
        budget = self._make(MemoryBudget, tree["budget"], "budget") if tree.get("budget") is not None else None
        checkpoint = tree.get("checkpoint")
        if checkpoint is not None and not isinstance(checkpoint, str):
            self.problems.add("checkpoint", f"expected a directory, got {checkpoint!r}")
        elif checkpoint is not None:
            try:
                require_local(checkpoint, "checkpoint")
            except PenstockError as error:
                self.problems.add("checkpoint", str(error))
        self._check_target(sink)
        self._check_passes(source, [fit for _, fit in steps])
        if self.problems:
            return None
        try:
            pipeline = Pipeline(source, [step for step, _ in steps], sink, config, budget)
        except PenstockError as error:
            self.problems.add("pipeline", str(error))
            return None
        # A step may have become several transforms, so positions in the file are not those in the pipeline.
        positions = {id(stage): position for position, stage in enumerate(pipeline.transforms)}
        to_fit = tuple(positions[id(step)] for step, fit in steps if fit)
        place = None if checkpoint is None else require_local(checkpoint, "checkpoint")
        return PipelineFile(pipeline, to_fit, place, tuple(step for step, _ in steps))

    # -- the two ends ----------------------------------------------------------------------------------------------

    def _end(self, group: str, given: Any, open_by_suffix: Callable[[Any], Any]) -> Any:
        """A source or a sink: by its type, or by the suffix of its path."""
        where = group.removesuffix("s")
        if given is None:
            self.problems.add(where, f"is missing; write '{where}: <path>', or '{where}: {{type: ..., path: ...}}'")
        elif isinstance(given, Mapping) and "type" in given:
            maker = self._resolved(group, given["type"], f"{where}.type")
            if maker is not None:
                return self._make(maker, _without_type(given, maker), where)
        elif isinstance(given, Mapping) and "path" not in given:
            known = ["type", "path"]
            hints = "".join(filter(None, (did_you_mean(str(name), known) for name in given)))
            self.problems.add(where, f"needs a type or a path, has {', '.join(map(str, given)) or 'nothing'}{hints}")
        else:
            return self._opened(where, given, open_by_suffix)
        return None

    def _opened(self, where: str, given: Any, open_by_suffix: Callable[[Any], Any]) -> Any:
        path = given["path"] if isinstance(given, Mapping) else given
        if not isinstance(path, str) and not (isinstance(path, list) and all(isinstance(one, str) for one in path)):
            self.problems.add(where, f"expected a path, got {path!r:.80}")
            return None
        try:
            stage = open_by_suffix(path)
        except (PenstockError, ValueError, TypeError, OSError) as error:
            self.problems.add(where, str(error))
            return None
        if isinstance(given, Mapping) and len(given) > 1:
            return self._make(type(stage), given, where)
        return stage

    def _check_target(self, sink: Any) -> None:
        """Before hours of work, not after: the directory that the output goes to."""
        target = getattr(sink, "path", None)
        if isinstance(target, Path) and not target.parent.is_dir():
            self.problems.add("sink", f"no such directory: {str(target.parent)!r}; make it first")

    def _check_passes(self, source: Any, fits: list[bool]) -> None:
        """A first pass must leave the source something for the run."""
        if any(fits) and isinstance(source, QueueSource) and source.acknowledge == "delivered":
            self.problems.add(
                f"transforms[{fits.index(True)}]",
                "'fit: true' reads the source twice, and reading empties a queue; add 'acknowledge: committed' to the "
                "source, and its files stay until the output is published",
            )

    # -- the transforms --------------------------------------------------------------------------------------------

    def _steps(self, given: Any) -> list[tuple[Any, bool]]:
        if given is None:
            return []
        if not isinstance(given, list):
            self.problems.add("transforms", f"expected a list of steps ('- lower: text'), got {given!r:.80}")
            return []
        return [self._step(step, f"transforms[{number}]") for number, step in enumerate(given)]

    def _step(self, given: Any, where: str) -> tuple[Any, bool]:
        """The transform, and whether it is to be fitted."""
        if isinstance(given, str):
            given = {given: None}
        if not isinstance(given, Mapping) or len(given) != 1:
            got = f"the keys {', '.join(map(str, given))}" if isinstance(given, Mapping) else repr(given)
            self.problems.add(where, f"expected one step such as 'lower: text', got {got}")
            return None, False
        ((name, arguments),) = given.items()
        maker = self._resolved("transforms", name, where)
        if maker is None:
            return None, False
        where = f"{where}.{name}"
        if not callable(getattr(maker, "fit", None)):
            return self._make(maker, arguments, where), False
        fit = None
        if isinstance(arguments, Mapping):
            fit = arguments.get("fit")
            arguments = {name: value for name, value in arguments.items() if name != "fit"}
        if not isinstance(fit, bool):
            self.problems.add(
                where,
                "has to learn from the data: add 'fit: true' for a first pass over the source and the steps before",
            )
        return self._make(maker, arguments, where), fit is True

    # -- what arguments stand for ----------------------------------------------------------------------------------

    def function(self, path: str) -> Any:
        """Imported from wherever Python looks, and then from beside the file."""
        if self._folder not in sys.path:
            # Last, so that a types.py beside the file is not taken for Python's own; and for good, since worker
            # processes look where this one does.
            sys.path.append(self._folder)
        return import_function(path)

    def transform(self, given: Any, where: str) -> Any:
        step, fit = self._step(given, where)
        if fit:
            self.problems.add(where, "a step inside another cannot be fitted; put it into the list by itself")
        return step

    # -- shared ----------------------------------------------------------------------------------------------------

    def _resolved(self, group: str, name: Any, where: str) -> Callable[..., Any] | None:
        try:
            return resolve(group, str(name))
        except PenstockError as error:
            self.problems.add(where, str(error))
            return None

    def _make(self, maker: Callable[..., Any], given: Any, where: str, *, called: str = "argument") -> Any:
        return make(maker, given, where, self.problems, parts=self, called=called)

    def _config(self, given: Any) -> PipelineConfig | None:
        if given is not None and not isinstance(given, Mapping):
            self.problems.add("config", f"expected keys such as 'workers: 4', got {given!r:.80}")
            return None
        made: PipelineConfig | None = self._make(PipelineConfig, given, "config", called="key")
        return made


def _without_type(given: Mapping[str, Any], maker: Callable[..., Any]) -> dict[str, Any]:
    """The arguments; the path of a queue is its directory."""
    known = inspect.signature(maker).parameters
    path = "queue_dir" if "queue_dir" in known and "path" not in known else "path"
    return {path if name == "path" else name: value for name, value in given.items() if name != "type"}


@dataclass(slots=True)
class ColumnCheck:
    """What was found out."""

    checked_steps: int = 0
    """So many steps, from the first on, name columns that are there."""
    unknown: str | None = None
    """Why the columns behind them are not known; None if all steps were checked."""
    columns: list[str] = field(default_factory=list)
    """The columns that come out of the steps that were checked."""


def check_columns(plan: PipelineFile, problems: ArgumentProblems) -> ColumnCheck:
    """Adds to `problems` what names a column that is not there."""
    found = ColumnCheck()
    try:
        schema = getattr(plan.pipeline.source, "schema", None)
    except QueueNotFoundError:
        schema = None
    except (PenstockError, OSError, ValueError) as error:
        problems.add("source", str(error))
        return found
    if not isinstance(schema, pa.Schema) or not len(schema):
        found.unknown = "the source does not say which columns it has before it is read"
        return found
    batch = pa.RecordBatch.from_pylist([], schema=schema)
    to_fit = {id(plan.pipeline.transforms[position]) for position in plan.to_fit}
    for number, step in enumerate(plan.steps):
        where = f"transforms[{number}]"
        if missing := _missing(step, batch.schema):
            problems.add(where, f"column {missing!r} is not there; the columns are {batch.schema.names}")
        reason = _unknown_behind(step, fits=id(step) in to_fit)
        if reason is not None:
            found.unknown = f"{where}: {reason}"
            break
        if missing:
            continue
        if not isinstance(step, Dedup) and not _judges_by_function(step):
            try:
                batch = step.transform(batch)
            except (PenstockError, KeyError, pa.ArrowInvalid, pa.ArrowKeyError, pa.ArrowNotImplementedError) as error:
                problems.add(where, str(error))
                continue
        found.checked_steps += 1
    found.columns = batch.schema.names
    return found


def _missing(step: Any, schema: pa.Schema) -> str | None:
    """A column that a step names and that is not there. Other steps tell it themselves."""
    if not isinstance(step, Dedup) and not callable(getattr(step, "fit", None)):
        return None
    named = getattr(step, "columns", None) or getattr(step, "column", None) or ()
    named = [named] if isinstance(named, str) else named
    return next((name for name in named if isinstance(name, str) and name not in schema.names), None)


def _unknown_behind(step: Any, *, fits: bool) -> str | None:
    """Why the columns behind a step are not known before it runs; None if they are."""
    if fits:
        return f"{step!r} has to learn from the data first"
    if not type(step).__module__.startswith("penstock."):
        return f"{type(step).__name__} is not a step of penstock"
    if isinstance(step, FunctionStage) and step.calls_function:
        return f"{step!r} calls a function of yours"
    if hasattr(step, "state_dict") and not isinstance(step, Dedup):
        return f"{step!r} gathers rows"
    return None


def _judges_by_function(step: Any) -> bool:
    """Whether a filter asks a function of somebody else, which is not made for no rows; it changes no column."""
    return bool(getattr(step, "calls_function", False))
