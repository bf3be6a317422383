"""Base of the text filters: a column, options that describe the filter, and rows left out by reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pyarrow as pa
import xxhash

from penstock.arrays.text import flags
from penstock.transforms.columns import as_names, brief, column, keep_rows
from penstock.transforms.counts import CountingTransform
from penstock.transforms.text import as_text

Codes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Limits: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


class TextFilter(CountingTransform):
    """Filter of rows by one text column. Rows left out are counted as `"<name>: <reason>"`, null text as `null`."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Raised when a change of the code keeps other rows than before, so that prepared data is made again."""
    reasons: tuple[str, ...]

    def __init__(self, column: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        (self.column,) = as_names([column])
        self.options = dict(options)

    def codes(self, text: pa.Array) -> Codes:
        """For every row 0 to keep it, or the number of the first rule it breaks, counted from 1."""
        raise NotImplementedError

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        text = as_text(column(batch, self.column), self.column)
        return self.leave_out(batch, text, self.codes(text) if len(text) else np.zeros(0, np.uint8))

    def leave_out(self, batch: pa.RecordBatch, text: pa.Array, codes: Codes) -> pa.RecordBatch:
        """Keep the rows with code 0 that have text, and count the others by reason."""
        null = flags(text.is_null())
        keep = (codes == 0) & ~null
        if keep.all():
            return batch
        numbers = np.bincount(codes[~null], minlength=len(self.reasons) + 1).tolist()
        reasons = {f"{self.name}: {reason}": n for reason, n in zip(self.reasons, numbers[1:])}
        self.count(reasons | {f"{self.name}: null": int(np.count_nonzero(null))})
        for number, (reason, rows) in enumerate(reasons.items(), 1):
            if rows:
                self.dropped_examples.add(reason, batch, (codes == number) & ~null, self.column)
        return keep_rows(batch, keep)

    def describe(self) -> str:
        """Name, version and every option: equal strings keep equal rows."""
        options = ", ".join(f"{name}={_stable(value)}" for name, value in sorted(self.options.items()))
        return f"{self.name}/{self.version}(column={self.column!r}{', ' if options else ''}{options})"

    @property
    def fingerprint(self) -> str:
        """A short hash of `describe()`, for content keys."""
        return xxhash.xxh3_128_hexdigest(self.describe().encode())

    def __repr__(self) -> str:
        defaults = type(self).__init__.__kwdefaults__ or {}
        options = [f"{key}={brief(given)}" for key, given in self.options.items() if defaults.get(key) != given]
        named = [f"column={self.column!r}"] if self.column != "text" else []
        return f"{type(self).__name__}({', '.join([*options, *named])})"


def as_limit(value: float | None, name: str) -> float:
    """A threshold for the rules. None becomes NaN, which no comparison exceeds."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"{name} must be 0 or more, or None for no limit, got {value!r}")
    return float(value)


def as_limits(options: Mapping[str, float | None]) -> Limits:
    """Thresholds in the order given, checked."""
    return np.array([as_limit(value, name) for name, value in options.items()], np.float64)


def grams(given: Iterable[Sequence[float]], name: str) -> tuple[tuple[int, float], ...]:
    """Pairs of an n-gram length in words and a limit, checked."""
    pairs = tuple((int(n), as_limit(limit, name)) for n, limit in given)
    for n, _ in pairs:
        if n < 1:
            raise ValueError(f"{name} must be pairs of a length in words and a limit, got {pairs!r}")
    return pairs


def _stable(value: Any) -> str:
    if isinstance(value, set | frozenset):
        return repr(sorted(value))
    return repr(value)
