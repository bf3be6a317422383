"""Numbers on the scale a model expects, learned from a stream: `StandardScaler` and `MinMaxScaler`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from penstock.arrays.text import flags
from penstock.errors import ConfigError, DataError, ResumeError, SchemaError
from penstock.pipeline.stages import Source
from penstock.transforms.columns import as_names, column, one_or_list, replace
from penstock.transforms.counts import CountingTransform

__all__ = ["Fitted", "MinMaxScaler", "StandardScaler", "Summary"]


VERSION = 1


class Summary(Protocol):
    """Statistics of one column, in a form that merges."""

    def merge(self, other: Self, /) -> Self: ...

    def to_dict(self) -> dict[str, Any]: ...


S = TypeVar("S", bound=Summary)


class Fitted(CountingTransform, Generic[S]):
    """A transform that learns a summary of each of its columns before it can transform.

    Fitting is for one thread; a fitted transform may be used by many.
    """

    def __init__(self, columns: str | Iterable[str]) -> None:
        super().__init__()
        self.columns = as_names(columns)
        self._learned: dict[str, S] = {}

    def fit(self, data: Source | pa.RecordBatch | pa.Table | Iterable[pa.RecordBatch]) -> Self:
        """Forget what was learned, then learn from every batch of a source or an iterable. Returns self."""
        self._learned = {}
        for batch in _batches(data):
            self.partial_fit(batch)
        return self

    def partial_fit(self, batch: pa.RecordBatch) -> Self:
        """Learn from one more batch. Returns self."""
        return self._merge({name: self._summary(column(batch, name), name) for name in self.columns})

    def merge(self, other: Self) -> Self:
        """Learn what another one has learned, from other rows. Returns self."""
        if type(other) is not type(self) or other.columns != self.columns:
            raise ValueError(f"{self!r} can merge only one of its own kind and columns, got {other!r}")
        return self._merge(other._learned)

    def to_dict(self) -> dict[str, Any]:
        """Everything needed to build it again; plain values, fit for JSON."""
        learned = {name: summary.to_dict() for name, summary in self._learned.items()}
        return {
            "kind": type(self).__name__,
            "version": VERSION,
            "columns": list(self.columns),
            "options": self._options(),
            "learned": learned,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """The one that `to_dict` described."""
        if saved.get("kind") != cls.__name__ or saved.get("version") != VERSION:
            raise ResumeError(
                f"expected a {cls.__name__}, version {VERSION}, "
                f"got kind {saved.get('kind')!r}, version {saved.get('version')!r}"
            )
        try:
            made = cls(saved["columns"], **saved["options"])
            return made._merge({name: cls._summary_from(learned) for name, learned in saved["learned"].items()})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ResumeError(f"the saved {cls.__name__} is damaged: {error!r}") from error

    def learned(self, name: str) -> S:
        """Statistics of a column; an error if it was not fitted."""
        if name not in self._learned:
            raise ConfigError(f"{self!r} has not been fitted; call fit(source) first, or load one with from_dict")
        return self._learned[name]

    def _merge(self, more: Mapping[str, S]) -> Self:
        # All or nothing: an error in one column must not leave the others a batch ahead.
        merged = {}
        for name, new in more.items():
            try:
                merged[name] = self._learned[name].merge(new) if name in self._learned else new
            except SchemaError as error:
                raise SchemaError(f"column {name!r}: {error}") from None
            self._check(name, merged[name])
        self._learned |= merged
        return self

    def _summary(self, array: pa.Array, name: str) -> S:
        raise NotImplementedError

    @classmethod
    def _summary_from(cls, saved: Mapping[str, Any]) -> S:
        raise NotImplementedError

    def _check(self, name: str, summary: S) -> None:
        return

    def _options(self) -> dict[str, Any]:
        return {}


def _batches(
    data: Source | pa.RecordBatch | pa.Table | Iterable[pa.RecordBatch], max_rows: int = 65_536
) -> Iterator[pa.RecordBatch]:
    if isinstance(data, pa.RecordBatch):
        yield data
    elif isinstance(data, pa.Table):
        yield from data.to_batches()
    elif hasattr(data, "next_batch"):
        while (batch := data.next_batch(max_rows)) is not None:
            yield batch
    else:
        yield from data


Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

LARGEST = 1e150
"""Beyond this the square of a value overflows."""


@dataclass(frozen=True, slots=True)
class NumberSummary:
    """Count, mean, sum of squared deviations, and extremes of a stream of numbers.

    The mean is kept in two parts: then neither a large offset nor the number of merges costs the variance its digits.
    """

    count: int = 0
    mean: float = 0.0
    mean_rest: float = 0.0
    squares: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf

    @classmethod
    def of(cls, values: Floats) -> NumberSummary:
        if not values.size:
            return cls()
        mean = float(values.mean())
        deviations = values - mean
        rest = float(deviations.mean())  # what rounding left out of the mean
        squares = max(float(np.square(deviations).sum()) - values.size * rest * rest, 0.0)
        return cls(values.size, mean, rest, squares, float(values.min()), float(values.max()))

    def merge(self, other: NumberSummary, /) -> NumberSummary:
        """Chan, Golub and LeVeque's pairwise update."""
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        apart = (other.mean - self.mean) + (other.mean_rest - self.mean_rest)
        mean, rest = _two_sum(self.mean, self.mean_rest + apart * (other.count / count))
        squares = self.squares + other.squares + apart * apart * (self.count * (other.count / count))
        return NumberSummary(
            count, mean, rest, squares, min(self.minimum, other.minimum), max(self.maximum, other.maximum)
        )

    @property
    def std(self) -> float:
        """The standard deviation of the whole population; exactly 0 if all values are equal."""
        return 0.0 if self.minimum == self.maximum else math.sqrt(self.squares / self.count)

    def to_dict(self) -> dict[str, Any]:
        # Infinity is not JSON.
        return asdict(self) if self.count else {"count": 0}


class Scaler(Fitted[NumberSummary]):
    """Base of the two scalers."""

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for name in self.columns:
            learned = self.learned(name)
            if not learned.count:
                raise ConfigError(f"{self!r} saw no value of column {name!r} in the fit; fit it on data that has some")
            array = column(batch, name)
            values, nulls = _numbers(array, name)
            result = pa.array(self._scaled(values, learned), mask=nulls)
            batch = replace(batch, name, result.cast(pa.float32()) if array.type == pa.float32() else result)
        return batch

    def _scaled(self, values: Floats, learned: NumberSummary) -> Floats:
        raise NotImplementedError

    def _summary(self, array: pa.Array, name: str) -> NumberSummary:
        values, nulls = _numbers(array, name)
        missing = np.isnan(values) if nulls is None else np.isnan(values) | nulls
        kept = values[~missing]
        if kept.size and not np.abs(kept).max() <= LARGEST:
            row = int(np.flatnonzero(~missing & ~(np.abs(values) <= LARGEST))[0])
            raise DataError(
                f"column {name!r}, row {row} of the batch: {array[row].as_py()!r} is too large to scale; clip it first",
                row=row,
            )
        return NumberSummary.of(kept)

    @classmethod
    def _summary_from(cls, saved: Mapping[str, Any]) -> NumberSummary:
        return NumberSummary(**saved)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({one_or_list(self.columns)})"


class StandardScaler(Scaler):
    """Shift and scale columns to mean 0 and standard deviation 1 (of the population, as scikit-learn does).

    A column whose values are all equal becomes 0. Nulls and NaN are left out of the fit, and stay what they are; an
    infinite value in the fit is an error. float32 columns stay float32, other numbers become float64.
    """

    @property
    def mean(self) -> dict[str, float]:
        return {name: self.learned(name).mean for name in self.columns}

    @property
    def std(self) -> dict[str, float]:
        return {name: self.learned(name).std for name in self.columns}

    def _scaled(self, values: Floats, learned: NumberSummary) -> Floats:
        return ((values - learned.mean) - learned.mean_rest) / (learned.std or 1.0)


class MinMaxScaler(Scaler):
    """Map columns linearly so that the smallest and largest value of the fit become the ends of `range`.

    A value beyond those of the fit lands outside the range; put `Clip` after it to prevent that. A column whose
    values are all equal becomes the low end. Nulls, NaN, infinity and types as in `StandardScaler`.
    """

    def __init__(self, columns: str | Iterable[str], range: tuple[float, float] = (0, 1)) -> None:
        super().__init__(columns)
        low, high = range
        if not -LARGEST <= low < high <= LARGEST:
            raise ValueError(f"range must be a pair of finite numbers, the lower first, got {range!r}")
        self.range = (low, high)

    @property
    def minimum(self) -> dict[str, float]:
        return {name: self.learned(name).minimum for name in self.columns}

    @property
    def maximum(self) -> dict[str, float]:
        return {name: self.learned(name).maximum for name in self.columns}

    def _scaled(self, values: Floats, learned: NumberSummary) -> Floats:
        low, high = self.range
        share = (values - learned.minimum) / (learned.maximum - learned.minimum or 1.0)
        return low + share * (high - low)

    def _options(self) -> dict[str, Any]:
        return {"range": list(self.range)}

    def __repr__(self) -> str:
        return f"MinMaxScaler({one_or_list(self.columns)}, range={self.range})"


def _numbers(array: pa.Array, name: str) -> tuple[Floats, np.ndarray[Any, np.dtype[np.bool_]] | None]:
    """A numeric column as float64 (NaN where it is null), and where it is null."""
    dtype = array.type
    numeric = pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_decimal(dtype)
    if not numeric and not pa.types.is_null(dtype):
        raise SchemaError(f"column {name!r} is {dtype}, expected numbers; put Cast({{{name!r}: 'float64'}}) before")
    # Not a safe cast: integers beyond 2**53 are rounded, as in any arithmetic with floats.
    values = array.cast(pa.float64(), safe=False)
    nulls = flags(array.is_null()) if array.null_count else None
    return (values.fill_null(math.nan) if nulls is not None else values).to_numpy(zero_copy_only=False), nulls


def _two_sum(a: float, b: float) -> tuple[float, float]:
    """a + b, and what rounding took from it."""
    total = a + b
    b_seen = total - a
    return total, (a - (total - b_seen)) + (b - b_seen)
