"""Clean rows: drop or fill nulls, replace by regular expression, clip to a range."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.text import flags, plain
from penstock.errors import SchemaError
from penstock.pipeline.stages import Transform
from penstock.transforms.columns import as_names, brief, column, keep_rows, like, one_or_list, replace
from penstock.transforms.counts import CountingTransform
from penstock.transforms.text import rewrite

Range = tuple[Any, Any]
"""The lowest and the highest value allowed; None leaves that side open."""


class DropNulls(CountingTransform):
    """Drop rows with a null in any of these columns (all columns, if none are named).

    A row is counted once, as `"<column>: null"`, under its first null column. NaN is a value, not a null.
    """

    def __init__(self, columns: str | Iterable[str] | None = None) -> None:
        super().__init__()
        self.columns = None if columns is None else as_names(columns)

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        names = batch.schema.names if self.columns is None else self.columns
        keep = np.ones(batch.num_rows, np.bool_)
        reasons = {}
        for name in names:
            array = column(batch, name)
            if not array.null_count:
                continue
            null = flags(array.is_null()) & keep
            reasons[f"{name}: null"] = int(np.count_nonzero(null))
            keep &= ~null
        if keep.all():
            return batch
        self.count(reasons)
        return keep_rows(batch, keep)

    def __repr__(self) -> str:
        return "DropNulls()" if self.columns is None else f"DropNulls({one_or_list(self.columns)})"


class FillNulls(Transform):
    """Replace nulls by a value: `FillNulls({"age": 0, "name": ""})`. Column types stay.

    Only a column that has no type yet, because all its values are null, takes the type of the filling.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        if not values:
            raise ValueError("values must name at least one column, got {}")
        for name, value in values.items():
            if value is None:
                raise ValueError(f"nulls in {name!r} cannot be filled with None; pass a value")
        self.values = dict(values)

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for name, value in self.values.items():
            array = column(batch, name)
            if array.null_count:
                batch = replace(batch, name, _filled(array, value, name))
        return batch

    def __repr__(self) -> str:
        return f"FillNulls({self.values})"


class ReplaceRegex(Transform):
    r"""Replace every match of a regular expression: `ReplaceRegex("text", r"(\d+) EUR", r"€\1")`.

    The expressions are RE2's, which take time linear in the text: no lookaround, no backreferences in the pattern.
    """

    def __init__(self, column: str, pattern: str, replacement: str) -> None:
        (self.column,) = as_names([column])
        try:
            pc.replace_substring_regex(pa.array([""]), pattern=pattern, replacement=replacement)
        except pa.ArrowInvalid as error:
            raise ValueError(f"pattern {pattern!r} with replacement {replacement!r} cannot be used: {error}") from None
        self.pattern = pattern
        self.replacement = replacement

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return rewrite(
            batch,
            [self.column],
            lambda text: pc.replace_substring_regex(text, pattern=self.pattern, replacement=self.replacement),
        )

    def __repr__(self) -> str:
        return f"ReplaceRegex({self.column!r}, {self.pattern!r}, {self.replacement!r})"


class Clip(Transform):
    """Move values outside a range to its nearest end: `Clip({"age": (0, 120), "income": (0, None)})`.

    Null stays null, NaN stays NaN, and column types stay: in an integer column (0.5, 3.5) means (1, 3).
    """

    def __init__(self, ranges: Mapping[str, Range]) -> None:
        if not ranges:
            raise ValueError("ranges must name at least one column, got {}")
        self.ranges = {name: as_range(given, name) for name, given in ranges.items()}

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for name, given in self.ranges.items():
            array = column(batch, name)
            values = plain(array)
            low, high = ends(values, given, name)
            # Not min_element_wise: it would take the end of the range over a NaN.
            if low is not None:
                values = pc.if_else(pc.less(values, low), low, values)
            if high is not None:
                values = pc.if_else(pc.greater(values, high), high, values)
            batch = replace(batch, name, like(values, array.type))
        return batch

    def __repr__(self) -> str:
        return f"Clip({self.ranges})"


def as_range(given: Range, name: str) -> Range:
    """A pair (low, high), checked."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ValueError(f"the range of {name!r} must be a pair (low, high), got {given!r}")
    low, high = given
    if low is None and high is None:
        raise ValueError(f"the range of {name!r} needs a lowest or a highest value, got (None, None)")
    if low != low or high != high:
        raise ValueError(f"the range of {name!r} cannot end in NaN, got {given!r}")
    try:
        upside_down = low is not None and high is not None and low > high
    except TypeError:
        raise ValueError(f"the ends of the range of {name!r} cannot be compared, got {given!r}") from None
    if upside_down:
        raise ValueError(f"the range of {name!r} must have low <= high, got {given!r}")
    return low, high


def ends(array: pa.Array, given: Range, name: str) -> tuple[pa.Scalar | None, pa.Scalar | None]:
    """The ends of a range in the type of the column; None where the type itself ends earlier."""
    low, high = given
    if pa.types.is_null(array.type):
        return None, None
    try:
        if pa.types.is_integer(array.type):
            low, high = _integer_ends(low, high, np.iinfo(array.type.to_pandas_dtype()))
        return (
            None if low is None else pa.scalar(low, array.type),
            None if high is None else pa.scalar(high, array.type),
        )
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError, ValueError, OverflowError):
        raise SchemaError(f"column {name!r} is {array.type}, which the range {brief(given)} does not fit") from None


def _integer_ends(low: Any, high: Any, limits: np.iinfo[Any]) -> tuple[int | None, int | None]:
    least = limits.min if low in (None, -math.inf) else max(math.ceil(low), limits.min)
    most = limits.max if high in (None, math.inf) else min(math.floor(high), limits.max)
    if least > most:
        raise ValueError("no integer of this type is in the range")
    return (None if least == limits.min else least), (None if most == limits.max else most)


def _filled(array: pa.Array, value: Any, name: str) -> pa.Array:
    values = plain(array)
    try:
        if pa.types.is_null(values.type):
            return pa.repeat(pa.scalar(value), len(values))
        scalar = pa.scalar(value, values.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        scalar = None
    # pa.scalar(0.5, pa.int64()) is 0.
    if scalar is None or (pa.types.is_integer(values.type) and scalar.as_py() != value):
        raise SchemaError(f"column {name!r} is {array.type}, which the filling {brief(value)} does not fit")
    return like(values.fill_null(scalar), array.type)
