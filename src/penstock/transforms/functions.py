"""`Map`, `Filter` and `FlatMap`: a row function, a batch function or an Arrow expression as a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import SchemaError
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
from penstock.transforms.columns import keep_rows
from penstock.transforms.counts import CountingTransform

__all__ = ["Filter", "FlatMap", "Map"]


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
        """Whether it calls a function of somebody else, and is no expression."""
        return self._kind != "expression"

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        kept = keep_rows(batch, self._mask(batch).fill_null(False).to_numpy(zero_copy_only=False))
        self.count({self._reason or repr(self): batch.num_rows - kept.num_rows})
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

    def __init__(
        self, function: Callable[..., Any], *, batch: bool | None = None, schema: pa.Schema | Any | None = None
    ) -> None:
        super().__init__(function, batch, schema)

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._kind == "batch":
            return _joined(self._function(batch), self)
        rows: list[Mapping[str, Any]] = []
        for row in rows_of(values_of(batch)):
            made = self._function(row)
            if isinstance(made, (Mapping, str)) or not isinstance(made, Iterable):
                raise SchemaError(f"{self!r} returned {type(made).__name__} for a row, expected an iterable of dicts")
            rows.extend(made)
        return self._rows.to_batch(rows, batch, {})

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
