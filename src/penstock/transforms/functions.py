"""`Map`, `Filter` and `FlatMap`: a row function, a batch function or an Arrow expression as a stage."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.arrays.text import flags
from penstock.errors import ConfigError, SchemaError
from penstock.pipeline.functions import (
    FunctionStage,
    Map,
    function_name,
    kind_of,
    parse_expression,
    project,
    rows_of,
    values_of,
)
from penstock.pipeline.stages import DataProcessor, Transform
from penstock.transforms.columns import keep_rows
from penstock.transforms.counts import CountingTransform

__all__ = ["CustomTransform", "DataProcessor", "Filter", "FlatMap", "Map", "Transform", "transform"]


_ROWS_AT_ONCE = 8192
"""Rows of Python objects at a time: they take many times the memory of Arrow."""


class Filter(CountingTransform):
    """Keep the rows for which a condition holds; the others are counted under the condition's name.

        Filter(lambda row: row["score"] > 0.5)                    # a row: true or false
        Filter(long_enough, batch=True)                           # a RecordBatch: a boolean array
        Filter(pc.field("words") >= 50)                           # an Arrow expression: no Python per row
        Filter("words >= 50 and lang == 'en'")                    # the same, as text

    A null condition does not keep the row.
    """

    def __init__(
        self,
        condition: Callable[..., Any] | pc.Expression | str,
        *,
        batch: bool | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__()
        self._text = condition if isinstance(condition, str) else None
        self._condition = parse_expression(condition) if isinstance(condition, str) else condition
        self._kind = kind_of(self._condition, batch)
        self._reason = reason

    @property
    def calls_function(self) -> bool:
        """True if it calls a user's function, and is no expression."""
        return self._kind != "expression"

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        mask = self._mask(batch)
        keep = flags(
            mask if pa.types.is_boolean(mask.type) else mask.fill_null(False)
        )  # an expression may be of any type
        kept = keep_rows(batch, keep)
        if kept.num_rows < batch.num_rows:
            reason = self._reason or repr(self)
            self.count({reason: batch.num_rows - kept.num_rows})
            self.dropped_examples.add(reason, batch, ~keep)
        return kept

    def _mask(self, batch: pa.RecordBatch) -> pa.Array:
        if self._kind == "expression":
            return project(batch, {"keep": self._condition}).column(0)
        condition = cast(Callable[..., Any], self._condition)
        if self._kind == "row":
            return pa.array([bool(condition(row)) for row in rows_of(values_of(batch))], pa.bool_())
        mask = condition(batch)
        if isinstance(mask, pa.ChunkedArray):
            mask = mask.combine_chunks()
        if not isinstance(mask, pa.Array):
            mask = pa.array(np.asarray(mask))
        if not pa.types.is_boolean(mask.type) or len(mask) != batch.num_rows:
            raise SchemaError(
                f"{self!r} returned {len(mask)} values of {mask.type} for {batch.num_rows} rows, "
                "expected one boolean for each row"
            )
        return mask

    def __repr__(self) -> str:
        return f"Filter({self._text or function_name(self._condition)})"


class FlatMap(FunctionStage):
    """Each row becomes any number of rows, in order.

    FlatMap(lambda row: ({"word": w} for w in row["text"].split()))
    FlatMap(explode, batch=True)                              # a RecordBatch: one or several RecordBatches
    """

    expands = True

    def __init__(
        self, function: Callable[..., Any], *, batch: bool | None = None, schema: pa.Schema | Any | None = None
    ) -> None:
        super().__init__(function, batch, schema)

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._kind == "batch":
            return _joined(self._function(batch), self)
        done: list[pa.RecordBatch] = []
        rows: list[Mapping[str, Any]] = []
        for row in rows_of(values_of(batch)):
            made = self._function(row)
            if isinstance(made, (Mapping, str)) or not isinstance(made, Iterable):
                raise SchemaError(f"{self!r} returned {type(made).__name__} for a row, expected an iterable of dicts")
            for one in made:
                rows.append(one)
                if len(rows) == _ROWS_AT_ONCE:
                    done.append(self._rows.to_batch(rows, batch, {}))
                    rows = []
        if rows or not done:
            done.append(self._rows.to_batch(rows, batch, {}))
        return done[0] if len(done) == 1 else pa.concat_batches(done)

    def __repr__(self) -> str:
        return f"FlatMap({function_name(self._function)})"


def _joined(made: Any, stage: FlatMap) -> pa.RecordBatch:
    if isinstance(made, pa.RecordBatch):
        return made
    if isinstance(made, pa.Table):
        made = made.to_batches()
    batches = list(made)
    if not batches or not all(isinstance(batch, pa.RecordBatch) for batch in batches):
        raise SchemaError(f"{stage!r} must return at least one pyarrow.RecordBatch, got {batches!r:.200}")
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


class CustomTransform(Map):
    """A function as a transform. Called with keywords only it is a copy with those options; called with data it is
    the function itself.

    Options are the keyword-only parameters of the function; the first parameter is the row (a dict) or, by its
    annotation or with `batch=True`, the `pyarrow.RecordBatch`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        batch: bool | None = None,
        schema: pa.Schema | Any | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.function, self.options = function, dict(options or {})
        self._batch, self._schema = batch, schema
        self._check_options()
        bound = functools.partial(function, **self.options) if self.options else function
        super().__init__(bound, batch=batch, schema=schema)
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *data: Any, **options: Any) -> Any:
        if data:
            return self.function(*data, **self.options | options)
        return CustomTransform(
            self.function, batch=self._batch, schema=self._schema, options={**self.options, **options}
        )

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        missing = [name for name, required in self._accepted().items() if required and name not in self.options]
        if missing:
            raise ConfigError(
                f"{self!r} needs {', '.join(missing)}; pass {function_name(self.function)}({missing[0]}=...)"
            )
        return super().transform(batch)

    def __repr__(self) -> str:
        """The function and its options: a checkpoint resumes only under the same name."""
        options = [f"{name}={_shown(self.options[name])}" for name in self._accepted() if name in self.options]
        return f"{function_name(self.function)}({', '.join(options)})"

    def _check_options(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise ConfigError(f"@transform takes a function, got {self.function!r}")
        accepted = self._accepted()
        for name in self.options:
            if name not in accepted:
                raise ConfigError(
                    f"{function_name(self.function)} has no option {name!r}; its keyword-only parameters are "
                    f"{list(accepted) or 'none'}"
                )

    def _accepted(self) -> dict[str, bool]:
        """The options of the function, and whether each must be given."""
        parameters = inspect.signature(self.function).parameters.values()
        return {one.name: one.default is one.empty for one in parameters if one.kind is one.KEYWORD_ONLY}


def _shown(value: Any) -> str:
    """A value as it prints, alike in every process, and short: of a long one the beginning and a hash of it all."""
    if isinstance(value, set | frozenset) and value:
        text = f"{{{', '.join(sorted(map(_shown, value)))}}}"
    else:
        text = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    return text if len(text) <= 80 else f"{text[:60]}... #{xxhash.xxh3_64_hexdigest(text.encode(errors='replace'))}"


@overload
def transform(function: Callable[..., Any], /) -> CustomTransform: ...


@overload
def transform(
    *, batch: bool | None = None, schema: pa.Schema | Any | None = None
) -> Callable[[Callable[..., Any]], CustomTransform]: ...


def transform(
    function: Callable[..., Any] | None = None, /, *, batch: bool | None = None, schema: pa.Schema | Any | None = None
) -> CustomTransform | Callable[[Callable[..., Any]], CustomTransform]:
    """Make a transform of a function, bare (`@transform`) or with arguments (`@transform(batch=True)`).

    A row function takes a dict and returns one; a batch function takes and returns a `pyarrow.RecordBatch`. `schema`
    names the columns a row function returns, where the first rows may mislead. The function must be pure: it is called
    from several threads, and again where it fails.
    """
    if function is not None:
        return CustomTransform(function, batch=batch, schema=schema)
    return functools.partial(CustomTransform, batch=batch, schema=schema)
