"""The YAML file of `penstock run`, and the pipeline that it describes.

    source: {type: jsonl, path: corpus/*.jsonl}    # or just: source: corpus/*.jsonl, by the suffix of the files
    transforms:
      - lower: text                                # one argument
      - count_words: {column: text, into: words}   # arguments by name
      - drop_nulls                                 # none
      - filter: words >= 50                        # an Arrow expression as text
      - map: {share: words / chars}                # columns from expressions
      - map: my_module:my_function                 # a function, imported; beside the YAML file is a good place
      - map: {function: my_module:fn, batch: true}
      - standard_scaler: {columns: [age], fit: true}   # fitted in a first pass over the data
    sink: {type: parquet, path: out.parquet}       # or just: sink: out.parquet
    config: {workers: 4, on_error: quarantine}     # the fields of PipelineConfig
    budget: 256 MiB
    checkpoint: run1/                              # resume from here after a crash

Paths are relative to the current directory; functions are also imported from the directory of the file. The path of
`type: queue`, which is a source and a sink, is the directory of the queue. `penstock plugins` lists the names of
stages. All problems are reported at once, with their places in the file.
"""

from __future__ import annotations

import collections.abc
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_origin, get_type_hints

import pyarrow as pa
import pyarrow.compute as pc

from penstock._suggest import did_you_mean, nearest, unknown_option
from penstock.cli.plugins import resolve
from penstock.errors import ConfigError, PenstockError
from penstock.files.filesystems import output_place
from penstock.files.listing import is_service
from penstock.fsqueue import QueueSource
from penstock.memory.budget import MemoryBudget
from penstock.pipeline import Pipeline, PipelineConfig
from penstock.pipeline.stages import Transform
from penstock.sinks import open_sink
from penstock.sinks import services as sink_services
from penstock.sources import open_source
from penstock.sources import services as source_services
from penstock.transforms import parse_expression
from penstock.types import Schema
from penstock.types.conversion import Problems, convert, members

KEYS = ("source", "transforms", "sink", "config", "budget", "checkpoint")


_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_MAPPINGS = (dict, collections.abc.Mapping)
_ERRORS = (PenstockError, ValueError, TypeError, LookupError, OSError)
"""Errors of a constructor that mean bad arguments."""


@dataclass(frozen=True, slots=True)
class PipelineFile:
    """Content of a file, ready to run."""

    pipeline: Pipeline
    to_fit: tuple[int, ...] = ()
    """Positions of the transforms that have to be fitted first."""
    checkpoint: Path | str | None = None
    steps: tuple[Any, ...] = ()
    """The transforms as the file lists them."""

    @property
    def fit(self) -> list[Transform]:
        """The transforms that have to be fitted first."""
        return [self.pipeline.transforms[position] for position in self.to_fit]


def spelled_out(tree: dict[str, Any]) -> dict[str, Any]:
    """`source: <path>` as `source: {path: <path>}`, so that `--set source.columns=[text]` works."""
    short = {end: {"path": tree[end]} for end in ("source", "sink") if isinstance(tree.get(end), (str, list))}
    return tree | short


def read_pipeline(tree: Mapping[str, Any], path: Path, name: str | None = None) -> PipelineFile:
    """Build the described pipeline without reading or writing data. `path` is the file of the tree.

    Errors call it `name`: that of a URL, if `path` is its local copy.
    """
    builder = _Builder(path)
    described = builder.build(tree)
    builder.problems.check(name or str(path))
    assert described is not None
    return described


class _Builder:
    """Builds stage by stage, and continues after a problem to find the others."""

    def __init__(self, path: Path) -> None:
        self._folder = str(path.resolve().parent)
        self.problems = Problems()

    def build(self, tree: Mapping[str, Any]) -> PipelineFile | None:
        for key in tree:
            if key not in KEYS:
                self.problems.add(str(key), unknown_option(key, KEYS, "key"))
        source = self._end("sources", tree.get("source"), open_source)
        steps = self._steps(tree.get("transforms"))
        sink = self._end("sinks", tree.get("sink"), open_sink)
        config = self._config(tree.get("config"))
        budget = self._make(MemoryBudget, tree["budget"], "budget") if tree.get("budget") is not None else None
        checkpoint = self.problems.attempt("checkpoint", _checkpoint, tree.get("checkpoint"))
        self._check_target(sink)
        self._check_passes(source, [fit for _, fit in steps])
        if self.problems:
            return None
        transforms = [step for step, _ in steps]
        pipeline = self.problems.attempt("pipeline", Pipeline, source, transforms, sink, config, budget)
        if pipeline is None:
            return None
        # A step may have become several transforms, so positions in the file are not those in the pipeline.
        positions = {id(stage): position for position, stage in enumerate(pipeline.transforms)}
        to_fit = tuple(positions[id(step)] for step, fit in steps if fit)
        return PipelineFile(pipeline, to_fit, checkpoint, tuple(transforms))

    # -- the two ends ----------------------------------------------------------------------------------------------

    def _end(self, group: str, given: Any, open_by_suffix: Callable[[Any], Any]) -> Any:
        """A source or a sink: by its type, or by the suffix of its path."""
        where = group.removesuffix("s")
        if isinstance(given, Mapping) and "type" not in given and is_service(given.get("path", given.get("url"))):
            rest = {name: value for name, value in given.items() if name not in ("path", "url")}
            url = given.get("path", given.get("url"))
            services = source_services if group == "sources" else sink_services
            return self._make(services.service_class(url), {"url": url, **rest}, where)
        if given is None:
            self.problems.add(where, f"missing; write '{where}: <path>', or '{where}: {{type: ..., path: ...}}'")
        elif isinstance(given, Mapping) and "type" in given:
            maker = self.problems.attempt(f"{where}.type", resolve, group, str(given["type"]))
            if maker is not None:
                return self._make(maker, _without_type(given, maker), where)
        elif isinstance(given, Mapping) and "path" not in given:
            hints = "".join(did_you_mean(str(name), ["type", "path"]) for name in given)
            self.problems.add(where, f"expected a type or a path, got {', '.join(map(str, given)) or 'nothing'}{hints}")
        else:
            return self._opened(where, given, open_by_suffix)
        return None

    def _opened(self, where: str, given: Any, open_by_suffix: Callable[[Any], Any]) -> Any:
        path = given["path"] if isinstance(given, Mapping) else given
        stage = self.problems.attempt(where, lambda: open_by_suffix(convert(path, str | list[str])), errors=_ERRORS)
        if stage is not None and isinstance(given, Mapping) and len(given) > 1:
            return self._make(type(stage), _without_type(given, type(stage)), where)
        return stage

    def _check_target(self, sink: Any) -> None:
        """The directory of the output must exist before hours of work, not after."""
        target = getattr(sink, "path", None)
        if isinstance(target, Path) and not target.parent.is_dir():
            self.problems.add("sink", f"no such directory: {str(target.parent)!r}; create it first")

    def _check_passes(self, source: Any, fits: list[bool]) -> None:
        """A first pass must not empty the source."""
        if any(fits) and isinstance(source, QueueSource) and source.acknowledge == "delivered":
            self.problems.add(
                f"transforms[{fits.index(True)}]",
                "'fit: true' reads the source twice, and reading empties a queue; add 'acknowledge: committed' to the "
                "source, which keeps its files until the output is published",
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
        """The transform, and True if it has to be fitted."""
        if isinstance(given, str):
            given = {given: None}
        if not isinstance(given, Mapping) or len(given) != 1:
            got = f"the keys {', '.join(map(str, given))}" if isinstance(given, Mapping) else repr(given)
            self.problems.add(where, f"expected one step such as 'lower: text', got {got}")
            return None, False
        ((name, arguments),) = given.items()
        maker = self.problems.attempt(where, resolve, "transforms", str(name))
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
                "has to be fitted: add 'fit: true' for a first pass over the source and the steps before",
            )
        return self._make(maker, arguments, where), fit is True

    # -- arguments ------------------------------------------------------------------------------------------------

    def _convert(self, value: Any, hint: Any, where: str) -> Any:
        """The value as an annotated parameter takes it: functions imported, stages and schemas made."""
        choices = members(hint)
        if value is None and types.NoneType in choices:
            return None
        if pa.Schema in choices:
            return Schema(value).to_arrow() if isinstance(value, Mapping) else convert(value, pa.Schema)
        if Transform in choices:
            step, fit = self._step(value, where)
            if fit:
                self.problems.add(where, "a step inside another cannot be fitted; put it into the list by itself")
            return step
        if any(map(_is_function, choices)):
            if isinstance(value, str) and _FUNCTION.fullmatch(value):
                return self._function(value)
            if isinstance(value, Mapping) and _takes_mapping(hint):
                return {
                    name: parse_expression(text) if isinstance(text, str) else pc.scalar(text)
                    for name, text in value.items()
                }
        return convert(value, hint)

    def _function(self, path: str) -> Any:
        """The function `module:name`; the directory of the file comes last on the path."""
        if self._folder not in sys.path:
            # Last, so that a types.py there does not hide Python's own; for good, since worker processes import too.
            sys.path.append(self._folder)
        return _import_function(path)

    def _make(self, maker: Callable[..., Any], given: Any, where: str, *, what: str = "argument") -> Any:
        """Call `maker` with its value in the file; None if there are problems.

        A mapping holds keyword arguments; anything else is the first argument, and null no argument. If the first
        parameter takes a mapping (`rename: {old: new}`), a mapping that names no parameter is that argument.
        """
        signature = _Signature.of(maker)
        arguments = signature.named(given)
        if arguments is None:
            self.problems.add(where, f"takes no arguments, got {given!r:.80}")
            return None
        before = len(self.problems)
        for problem in signature.name_problems(arguments, what):
            self.problems.add(where, problem)
        for name, value in arguments.items():
            place = f"{where}.{_shown(name)}" if value is not given else where
            arguments[name] = self.problems.attempt(place, self._convert, value, signature.hints.get(name, Any), place)
        if len(self.problems) > before:
            return None
        return self.problems.attempt(where, lambda: maker(**arguments), errors=_ERRORS)

    def _config(self, given: Any) -> PipelineConfig | None:
        if given is not None and not isinstance(given, Mapping):
            self.problems.add("config", f"expected keys such as 'workers: 4', got {given!r:.80}")
            return None
        return self._make(PipelineConfig, given, "config", what="key")  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Signature:
    """Parameters of a stage."""

    parameters: dict[str, inspect.Parameter]
    hints: dict[str, Any]
    takes_any: bool
    """True if it has `**options`, and so no unknown names."""

    @classmethod
    def of(cls, maker: Callable[..., Any]) -> Self:
        parameters = inspect.signature(maker).parameters.values()
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        try:
            hints = get_type_hints(maker.__init__ if isinstance(maker, type) else maker)  # type: ignore[misc]
        except (NameError, TypeError, AttributeError):
            hints = {}  # annotations of a plugin that only a type checker can read: its constructor checks
        return cls(
            {parameter.name: parameter for parameter in parameters if parameter.kind not in variadic},
            hints,
            any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters),
        )

    def named(self, given: Any) -> dict[str, Any] | None:
        """The arguments by name; None if there is one and no parameter takes it."""
        first = next(iter(self.parameters), None)
        if given is None:
            return {}
        if isinstance(given, Mapping):
            arguments = {self._spelled(name): value for name, value in given.items()}
            by_name = any(name in self.parameters and self._fits(name, arguments[name]) for name in arguments)
            if by_name or first is None or not _takes_mapping(self.hints.get(first, Any)):
                return arguments
        return {first: given} if first is not None else None

    def name_problems(self, arguments: Mapping[str, Any], what: str) -> Iterator[str]:
        """Unknown names, and missing names that were not just misspelled."""
        known = [_shown(name) for name in self.parameters]
        unknown = [name for name in arguments if name not in self.parameters and not self.takes_any]
        yield from (unknown_option(name, known, what) for name in unknown)
        given = {*map(_shown, arguments), *(nearest(name, known) for name in unknown)}
        for name, parameter in self.parameters.items():
            if parameter.default is inspect.Parameter.empty and _shown(name) not in given:
                yield f"missing {what} {_shown(name)!r}"

    def _fits(self, name: str, value: Any) -> bool:
        """True if the value has the form of the parameter's, without importing or making anything."""
        choices = members(self.hints.get(name, Any))
        if isinstance(value, str) and any(map(_is_function, choices)):
            return True
        if isinstance(value, Mapping) and pa.Schema in choices:
            return True
        try:
            convert(value, self.hints.get(name, Any))
        except ConfigError:
            return False
        return True

    def _spelled(self, name: Any) -> Any:
        """`path`, `paths` and `url` mean the same."""
        names = ("path", "paths", "url")
        if name not in names or name in self.parameters:
            return name
        return next((other for other in names if other in self.parameters), name)


def _shown(name: Any) -> str:
    return "path" if name == "paths" else str(name)


def _takes_mapping(hint: Any) -> bool:
    """True if a mapping in the file can be this one argument (`rename: {old: new}`)."""
    return any((get_origin(choice) or choice) in _MAPPINGS for choice in members(hint))


def _is_function(hint: Any) -> bool:
    return (get_origin(hint) or hint) is collections.abc.Callable


def _import_function(path: str) -> Any:
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"no module {error.name!r} for {path!r}; put it into the directory of the YAML file, or install it"
            ) from error
        raise ConfigError(f"importing {module_name!r} failed: {error}") from error
    except Exception as error:
        raise ConfigError(f"importing {module_name!r} failed: {type(error).__name__}: {error}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, [known for known in vars(found) if not known.startswith("_")])
            raise ConfigError(f"no {name!r} in {getattr(module, '__file__', None) or module_name}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{path!r}: expected a function, got {found!r:.80}")
    return found


def _checkpoint(given: Any) -> Path | str | None:
    return None if given is None else output_place(convert(given, str), "checkpoint")


def _without_type(given: Mapping[str, Any], maker: Callable[..., Any]) -> dict[str, Any]:
    """The arguments; the path of a queue is its directory, that of a database its URL."""
    known = inspect.signature(maker).parameters
    path = next((name for name in ("path", "queue_dir", "url") if name in known), "path")
    return {path if name == "path" else name: value for name, value in given.items() if name != "type"}
