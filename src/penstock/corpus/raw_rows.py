"""Raw rows of a recipe: the columns that are read, and the transforms that run on them before they become tokens."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from inspect import signature
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa

from penstock import plugins
from penstock._suggest import check_options, did_you_mean
from penstock._syntax import parse
from penstock.chat.formats import is_json_text
from penstock.errors import ConfigError, DataError, ResumeError
from penstock.files.content_hash import UnnamedError, content_hash
from penstock.files.json_values import dumps, loads
from penstock.files.states import StateFormat
from penstock.pipeline import Source, State, Transform
from penstock.pipeline.chain import Chain, StepError, stage_name
from penstock.pipeline.functions import FunctionStage, as_transform
from penstock.pipeline.metrics import StageMetrics
from penstock.pipeline.stages import Finishing, Stateful
from penstock.sources.by_suffix import SourceFiles
from penstock.sources.file_source import FileSource
from penstock.sources.json_types import marked_json
from penstock.sources.memory import IteratorSource
from penstock.sources.plugin_files import PluginFiles
from penstock.sources.record_source import RecordSource
from penstock.sources.saved_dataset import SavedDatasetSource
from penstock.transforms import Filter, FlatMap

_PROBE_ROWS = 256


def open_rows(files: SourceFiles, columns: Sequence[str] | None, *, allow_empty: bool) -> Any:
    """The source of some files; that of a plugin is made for each file, so that it has columns and places."""
    if not issubclass(files.kind, (RecordSource, FileSource)) if isinstance(files.kind, type) else True:
        if files.kind is SavedDatasetSource:
            return files.open()
        return PluginFiles(files.kind, files.files, allow_empty=allow_empty)
    options: dict[str, Any] = {"allow_empty": True} if allow_empty else {}
    if columns is not None and "columns" in signature(files.kind).parameters:
        options["columns"] = columns
    return files.open(**options)


def as_transforms(given: Any) -> tuple[Transform, ...]:
    """The transforms of a recipe: stages, functions of a row, or names with options."""
    if given is None:
        return ()
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence):
        given = [given]
    return tuple(named_transform(each) if isinstance(each, (str, Mapping)) else as_transform(each) for each in given)


def content_name(stage: Any) -> str:
    """Name of a transform by its content: its own `describe`, or a hash.

    Raises `UnnamedError` with the reason if there is none.
    """
    describe = getattr(stage, "describe", None)
    if callable(describe):
        facts = describe()
        return facts if isinstance(facts, str) else orjson.dumps(facts, option=orjson.OPT_SORT_KEYS).decode()
    return f"{stage_name(stage)} #{content_hash(stage)}"


def describe_transforms(transforms: Sequence[Transform]) -> tuple[list[str], str | None]:
    """Descriptions for a key, and the reason why there is no key if one of them has no name by its content."""
    described, unnamed = [], None
    for transform in transforms:
        try:
            described.append(content_name(transform))
        except UnnamedError as error:
            described.append(stage_name(transform))
            unnamed = unnamed or (
                f"{stage_name(transform)} cannot be named by its content: {error}; give it a method describe() that "
                "returns a text which changes when its results do, or make a store with prepare(...) and load that"
            )
    return described, unnamed


def first_rows(source: Any) -> pa.RecordBatch | None:
    """The first good rows of a source that was not read yet, and will be from its beginning; None if there are none."""
    if isinstance(source, PeekedSource):
        return source.first
    if isinstance(source, IteratorSource):
        return source.first_rows()
    if not isinstance(source, (FileSource, RecordSource)):
        return _first_good(source, source.reset)
    beside = copy.copy(source)  # it has the schema, and a place of its own
    return _first_good(beside, beside.close)


def _first_good(source: Any, leave: Callable[[], None]) -> pa.RecordBatch | None:
    before = None
    try:
        while True:
            try:
                return cast("pa.RecordBatch | None", source.next_batch(_PROBE_ROWS))
            except DataError as error:
                if str(error) == before:
                    source.skip_file()
                before = str(error)
    finally:
        leave()


_STATE = StateFormat("rows of a source", "a source without a schema", fields={"row": (int,)})


class PeekedSource(Source):
    """A source that shows its columns in its first rows alone: any object with `next_batch`.

    Resuming passes over the rows before the saved one, so it costs as much as reading them.
    """

    def __init__(self, inner: Any) -> None:
        self._inner, self._row = inner, 0
        self._pending: pa.RecordBatch | None = None

    @cached_property
    def first(self) -> pa.RecordBatch | None:
        """The first rows, which are delivered in their place too."""
        self._pending = self._inner.next_batch(_PROBE_ROWS)
        return self._pending

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([]) if self.first is None else self.first.schema

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        _ = self.first
        batch = self._pending if self._pending is not None else self._inner.next_batch(max_rows)
        if batch is None:
            return None
        rest = batch.slice(max_rows)
        self._pending = rest if rest.num_rows else None
        part = batch.slice(0, max_rows)
        self._row += part.num_rows
        return part

    def size_hint(self) -> int | None:
        hint = getattr(self._inner, "size_hint", None)
        return hint() if callable(hint) else None

    def reset(self) -> None:
        """Back to the first row."""
        if self._row:
            if not callable(reset := getattr(self._inner, "reset", None)):
                raise ConfigError(f"{self!r} has no method reset, so it can be read only once; make it again")
            reset()
            self.__dict__.pop("first", None)
            self._pending, self._row = None, 0

    def close(self) -> None:
        if callable(close := getattr(self._inner, "close", None)):
            close()

    def state_dict(self) -> State:
        return _STATE.write({"row": self._row})

    def load_state_dict(self, state: State) -> None:
        row = _STATE.read(state)["row"]
        self.reset()
        while self._row < row:
            if self.next_batch(row - self._row) is None:
                raise ResumeError(f"the state was saved at row {row}, and {self!r} ended after {self._row} rows")

    def __repr__(self) -> str:
        return stage_name(self._inner)


def schema_after(transforms: Sequence[Transform], batch: pa.RecordBatch) -> pa.Schema:
    """The columns after the transforms, found by running them on some rows; what they learn is forgotten again."""
    chain = Chain(transforms, [StageMetrics(stage_name(each), "transform") for each in transforms])
    try:
        try:
            ran = chain.run(batch, batch.nbytes)
        except StepError as error:
            ran = chain.isolate(batch, first_only=False)
            if ran.batch is None:
                raise error.error from error.error.__cause__
        schema = chain.output_schema or chain.schema_without_rows(batch.schema)
        schema = schema or (ran.batch.schema if ran.batch is not None else None)
    finally:
        for transform in transforms:
            if callable(reset := getattr(transform, "reset", None)):
                reset()
    if schema is None:
        raise ConfigError(
            f"the columns after {', '.join(map(stage_name, transforms))} are unknown: of the first {batch.num_rows} "
            "rows none is left; pass schema= to the transform"
        )
    return schema


def on_json(transforms: Sequence[Transform], schema: pa.Schema) -> list[Transform]:
    """The transforms for rows some of whose columns are JSON text: functions of a row see the values.

    Columns of messages are kept as JSON where one type for all rows would change them.
    """
    names = [field.name for field in schema if is_json_text(field)]
    if not names or not transforms:
        return list(transforms)
    return [*(_with_values(each, names) for each in transforms), _MarkJson(names)]


def _with_values(stage: Transform, names: Sequence[str]) -> Transform:
    attribute = "_condition" if isinstance(stage, Filter) else "_function"
    if not isinstance(stage, (Filter, FunctionStage)) or stage._kind != "row":
        return stage
    made = copy.copy(stage)
    function = getattr(stage, attribute)
    setattr(made, attribute, partial(_call_with_values, function, frozenset(names), isinstance(stage, FlatMap)))
    return made


def _call_with_values(function: Callable[[Any], Any], names: frozenset[str], many: bool, row: dict[str, Any]) -> Any:
    result = function({name: _value(each) if name in names else each for name, each in row.items()})
    if many:
        return [_as_text(each, names) for each in result]
    return _as_text(result, names)


def _value(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return loads(text)
    except ValueError:
        return text


def _as_text(row: Any, names: frozenset[str]) -> Any:
    if not isinstance(row, Mapping):
        return row
    return {name: dumps(each) if name in names and each is not None else each for name, each in row.items()}


class _MarkJson(Transform):
    """Marks columns of text as JSON, which functions of rows do not keep."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        there = [field.name for field in batch.schema if field.name in self._names and field.type == pa.string()]
        return batch.cast(marked_json(batch.schema, there)) if there else batch


class RowNumbers(Transform):
    """A transform in a stream: the rows that it makes keep the number of the row that they were made of.

    Transforms that only drop rows get the column of numbers; others do not see it. If a transform changes the number
    of rows without it, it is called row by row.
    """

    def __init__(self, inner: Transform, column: str) -> None:
        if isinstance(inner, (Stateful, Finishing)):
            raise ConfigError(
                f"{stage_name(inner)} depends on the order of rows, which streams do not keep; leave it out, or "
                "prepare the data first (streaming=False)"
            )
        self.inner, self._column = inner, column
        own = type(inner).__module__.startswith("penstock.")
        self._sees_numbers = own and not isinstance(inner, FunctionStage)
        self._one_each = not isinstance(inner, FlatMap)

    def __getattr__(self, name: str) -> Any:
        # Counts, the budget of caches and what is learned are those of the transform.
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        numbers = batch.column(self._column)
        plain = batch if self._sees_numbers else batch.drop_columns([self._column])
        if self._one_each:
            made = self.inner.transform(plain)
            if not isinstance(made, pa.RecordBatch) or self._column in made.schema.names:
                return made
            if made.num_rows == batch.num_rows:
                return made.append_column(self._column, numbers)
        parts = [self.inner.transform(plain.slice(row, 1)) for row in range(plain.num_rows)]
        owners = np.repeat(np.arange(len(parts)), [part.num_rows for part in parts])
        made = pa.concat_batches([part for part in parts if part.num_rows] or parts[:1])
        return made.append_column(self._column, numbers.take(pa.array(owners)))

    def __repr__(self) -> str:
        return stage_name(self.inner)


def snake_case(name: str) -> str:
    """The name of a class as files have it."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


@cache
def built_in_transforms() -> Mapping[str, Callable[..., Any]]:
    """The transforms of penstock by name."""
    from penstock import transforms

    public = {name: getattr(transforms, name) for name in dir(transforms)}
    return {
        snake_case(name): kind
        for name, kind in public.items()
        if isinstance(kind, type) and hasattr(kind, "transform") and kind.__module__ != "penstock.pipeline.stages"
    }


def _as_option(call: str) -> str | Mapping[str, Any]:
    """`{"cast": {"id": "string"}}` for `Cast({'id': 'string'})`; what is no call of a built-in transform stays."""
    try:
        node = parse(call, mode="eval").body
        if isinstance(node, ast.Name):
            node = ast.Call(node, [], [])
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) <= 1):
            return call
        name = snake_case(node.func.id)
        if name not in built_in_transforms() or (node.args and node.keywords):
            return call
        if node.args:
            return {name: ast.literal_eval(node.args[0])}
        options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        return {name: options} if options else name
    except (SyntaxError, ValueError):
        return call


def named_transform(given: str | Mapping[str, Any]) -> Any:
    """The transform that a name stands for: `drop_nulls`, or `{"lower": "text"}`, or `{"shout": {"column": "text"}}`.

    A mapping of its parameters is passed by name, any other value as the first argument. Errors name transforms as they
    are written in Python, so `DropNulls('text')` is understood too.
    """
    if isinstance(given, str) and given[:1].isupper():
        given = _as_option(given)
    if isinstance(given, Mapping):
        if len(given) != 1:
            raise ConfigError(f"expected one transform with its options, such as {{'lower': 'text'}}, got {given!r}")
        ((name, options),) = given.items()
    else:
        name, options = given, {}
    known = built_in_transforms()
    if name in known:
        maker: Callable[..., Any] = known[name]
    elif name in (installed := [each.name for each in plugins.installed() if each.group == "transforms"]):
        maker = plugins.find("transforms", name)
    else:
        hint = did_you_mean(name, [*known, *installed])
        raise ConfigError(
            f"no transform is called {name!r}{hint}; `penstock plugins` lists them; a transform of yours is passed as "
            "an object"
        )
    parameters = signature(maker).parameters
    by_name = options is None or isinstance(options, Mapping)
    if isinstance(options, Mapping) and not options.keys() <= parameters.keys():
        first = str(next(iter(parameters.values())).annotation) if parameters else ""
        by_name = "Mapping" not in first and "dict" not in first  # `rename: {old: new}` is the first argument
        check_options(options if by_name else (), parameters, "argument", where=f"transform {name!r}")
    try:
        return maker(**(options or {})) if by_name else maker(options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"transform {name!r} with {options!r:.200}: {error}") from None
