"""Features as a model expects them, learned from a stream: scalers of numbers, encoders of categories.

One-hot and ordinal encoding learn the categories; hashing needs no fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.exact_sums import UNIT, exact_sums
from penstock.arrays.hashes import as_seed, hash64
from penstock.arrays.text import flags, is_text, plain
from penstock.errors import ConfigError, DataError, ResumeError, SchemaError
from penstock.pipeline.stages import Source, Transform
from penstock.transforms.columns import as_names, brief, column, one_or_list, position, replace
from penstock.transforms.counts import CountingTransform

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


@dataclass(frozen=True)
class NumberSummary:
    """Count, exact sums and extremes of a stream of numbers; mean and deviation follow from them.

    Sums are integers (`arrays.exact_sums`), so the result is the same bits however the rows are cut and merged.
    """

    count: int = 0
    total: int = 0
    squared: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf

    @classmethod
    def of(cls, values: Floats) -> NumberSummary:
        if not values.size:
            return cls()
        # Zeros of either sign are one value: which of them is the extreme must not depend on their order.
        return cls(values.size, *exact_sums(values), float(values.min()) + 0.0, float(values.max()) + 0.0)

    def merge(self, other: NumberSummary, /) -> NumberSummary:
        return NumberSummary(
            self.count + other.count,
            self.total + other.total,
            self.squared + other.squared,
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
        )

    @cached_property
    def mean(self) -> float:
        """The mean, correctly rounded."""
        return self.total / (self.count << UNIT)

    @cached_property
    def mean_rest(self) -> float:
        """Rest that rounding left out of the mean: with it a large offset costs the scaled values no digits."""
        return float(Fraction(self.total, self.count << UNIT) - Fraction(self.mean))

    @cached_property
    def squares(self) -> float:
        """Sum of squared deviations from the mean, correctly rounded."""
        return (self.squared * self.count - self.total * self.total) / (self.count << 2 * UNIT)

    @property
    def std(self) -> float:
        """The standard deviation of the whole population; exactly 0 if all values are equal."""
        return 0.0 if self.minimum == self.maximum else math.sqrt(self.squares / self.count)

    def to_dict(self) -> dict[str, Any]:
        if not self.count:
            return {"count": 0}  # infinity is not JSON
        figures = {name: getattr(self, name) for name in ("mean", "mean_rest", "squares", "minimum", "maximum")}
        return {"count": self.count, **figures, "sums": [f"{self.total:x}", f"{self.squared:x}"]}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> NumberSummary:
        count = saved["count"]
        if not count:
            return cls()
        figures = {name: float(saved[name]) for name in ("mean", "mean_rest", "squares")}
        if "sums" in saved:
            total, squared = (int(text, 16) for text in saved["sums"])
        else:  # written before sums were kept
            mean = Fraction(figures["mean"]) + Fraction(figures["mean_rest"])
            total = int(count * mean * 2**UNIT)
            squared = int((Fraction(figures["squares"]) + count * mean * mean) * 4**UNIT)
        made = cls(count, total, squared, saved["minimum"], saved["maximum"])
        made.__dict__.update(figures)
        return made


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
        return NumberSummary.from_dict(saved)

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


@dataclass(frozen=True, slots=True)
class Categories:
    """The different values of a column, sorted. Of type null while there are none."""

    values: pa.Array

    @classmethod
    def of(cls, array: pa.Array) -> Categories:
        found = array.unique().drop_null()
        return cls(found.sort() if len(found) else pa.nulls(0))

    def merge(self, other: Categories, /) -> Categories:
        if not len(self.values) or not len(other.values):
            return self if len(self.values) else other
        if self.values.type != other.values.type:
            raise SchemaError(f"categories were {self.values.type} in earlier batches, and are {other.values.type} now")
        return Categories.of(pa.concat_arrays([self.values, other.values]))

    def to_dict(self) -> dict[str, Any]:
        return {"type": str(self.values.type), "values": self.values.to_pylist()}


class CategoryEncoder(Fitted[Categories]):
    """Base of one-hot and ordinal encoding: learning the categories, and finding them."""

    _remedy: ClassVar[str | int]

    @property
    def categories(self) -> dict[str, list[Any]]:
        """The sorted categories of each column."""
        return {name: self.learned(name).values.to_pylist() for name in self.columns}

    def _codes(self, batch: pa.RecordBatch, name: str, *, refuse_unknown: bool) -> pa.Array:
        """The index of each value in the sorted categories; -1 if it is unknown, null if it is null."""
        known = self.learned(name).values
        array = _categorical(column(batch, name), name)
        if array.type != known.type and len(known) and not pa.types.is_null(array.type):
            raise SchemaError(f"column {name!r} is {array.type}, but was fitted as {known.type}")
        codes = pc.index_in(array, value_set=known if len(known) else pa.array([], array.type))
        unknown = flags(pc.and_(array.is_valid(), codes.is_null()))
        if not unknown.any():
            return codes
        if refuse_unknown:
            row = int(unknown.argmax())
            raise DataError(
                f"column {name!r}, row {row} of the batch: {brief(array[row].as_py())} is not among the {len(known)} "
                f"categories of the fit; fit on more data, or pass unknown={self._remedy!r}",
                row=row,
            )
        self.count_kept({f"{name}: unknown category, row kept": int(np.count_nonzero(unknown))})
        return pc.if_else(pa.array(unknown), pa.scalar(-1, codes.type), codes)

    def _summary(self, array: pa.Array, name: str) -> Categories:
        return Categories.of(_categorical(array, name))

    @classmethod
    def _summary_from(cls, saved: Mapping[str, Any]) -> Categories:
        return Categories(pa.array(saved["values"], pa.type_for_alias(saved["type"])))


class OneHotEncoder(CategoryEncoder):
    """Replace a column by one uint8 column per category, named `column=value`, holding 1 where the row has that value.

    The new columns stand where the old one stood, in the order of the sorted categories. Null is null in all of them.
    A value not seen in the fit is an error, or with `unknown="ignore"` 0 in all of them, and counted.
    Categories are text, integers or booleans; more than `max_categories` in the fit are an error.
    """

    _remedy = "ignore"

    def __init__(
        self,
        columns: str | Iterable[str],
        *,
        max_categories: int = 1000,
        unknown: Literal["error", "ignore"] = "error",
    ) -> None:
        super().__init__(columns)
        if max_categories < 1:
            raise ValueError(f"max_categories must be at least 1, got {max_categories}")
        if unknown not in ("error", "ignore"):
            raise ValueError(f"unknown must be 'error' or 'ignore', got {unknown!r}")
        self.max_categories = max_categories
        self.unknown = unknown

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for name in self.columns:
            codes = self._codes(batch, name, refuse_unknown=self.unknown == "error")
            nulls = flags(codes.is_null()) if codes.null_count else None
            numbers = codes.fill_null(-1).to_numpy(zero_copy_only=False)
            new = {}
            for i, value in enumerate(self.learned(name).values.to_pylist()):
                title = f"{name}={value}"
                if title in batch.schema.names:
                    raise SchemaError(f"{self!r} would make a second column called {title!r}; rename the existing one")
                new[title] = pa.array((numbers == i).view(np.uint8), mask=nulls)
            batch = _spread(batch, name, new)
        return batch

    def _check(self, name: str, summary: Categories) -> None:
        if len(summary.values) > self.max_categories:
            raise DataError(
                f"column {name!r} has more than {self.max_categories} categories; "
                f"raise max_categories, or use HashingEncoder"
            )

    def _options(self) -> dict[str, Any]:
        return {"max_categories": self.max_categories, "unknown": self.unknown}

    def __repr__(self) -> str:
        return f"OneHotEncoder({one_or_list(self.columns)}, unknown={self.unknown!r})"


class OrdinalEncoder(CategoryEncoder):
    """Replace values by their place among the sorted categories, 0 for the first, as int64. Null stays null.

    A value not seen in the fit is an error, or becomes `unknown` if that is a (negative) number, and is counted.
    Categories are text, integers or booleans.
    """

    _remedy = -1

    def __init__(self, columns: str | Iterable[str], *, unknown: Literal["error"] | int = "error") -> None:
        super().__init__(columns)
        if unknown != "error" and not (isinstance(unknown, int) and unknown < 0):
            raise ValueError(f"unknown must be 'error' or a negative number, got {unknown!r}")
        self.unknown = unknown

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for name in self.columns:
            codes = self._codes(batch, name, refuse_unknown=self.unknown == "error").cast(pa.int64())
            if self.unknown != "error":
                codes = pc.if_else(pc.less(codes, 0), self.unknown, codes)
            batch = replace(batch, name, codes)
        return batch

    def _options(self) -> dict[str, Any]:
        return {"unknown": self.unknown}

    def __repr__(self) -> str:
        return f"OrdinalEncoder({one_or_list(self.columns)}, unknown={self.unknown!r})"


class HashingEncoder(Transform):
    """Replace values by one of `buckets` numbers, as int64, without a fit. Null stays null.

    The same value has the same number in every process, on every platform, and at every width of its type (int8 5 and
    int64 5, string and large_string), but text "5" and integer 5 differ. Different values may share a number.
    """

    def __init__(self, columns: str | Iterable[str], buckets: int, seed: int = 0) -> None:
        if not 1 <= buckets <= 2**31:
            raise ValueError(f"buckets must be between 1 and 2**31, got {buckets}")
        self.columns = as_names(columns)
        self.buckets = buckets
        self.seed = as_seed(seed)

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for name in self.columns:
            array = column(batch, name)
            # Hashing text takes a call per value, so each is hashed once however often it occurs.
            values = _categorical(array, name).dictionary_encode()
            numbers = hash64(values.dictionary, self.seed) % np.uint64(self.buckets)
            batch = replace(batch, name, pa.array(numbers.astype(np.int64)).take(values.indices))
        return batch

    def __repr__(self) -> str:
        return f"HashingEncoder({one_or_list(self.columns)}, buckets={self.buckets}, seed={self.seed})"


def _categorical(array: pa.Array, name: str) -> pa.Array:
    """A column of categories in one type per kind: large_string, int64 or bool."""
    given = plain(array)
    if is_text(given.type):
        return given.cast(pa.large_string())
    if pa.types.is_integer(given.type) and given.type != pa.uint64():
        return given.cast(pa.int64())
    if pa.types.is_boolean(given.type) or pa.types.is_null(given.type):
        return given
    raise SchemaError(
        f"column {name!r} is {array.type}, expected text, integers up to 64 bits signed, or booleans as categories; "
        f"put Cast({{{name!r}: 'string'}}) before"
    )


def _spread(batch: pa.RecordBatch, name: str, new: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """The batch with several columns in the place of one."""
    at = position(batch, name)
    fields, arrays = list(batch.schema), list(batch.columns)
    fields[at : at + 1] = [pa.field(title, array.type) for title, array in new.items()]
    arrays[at : at + 1] = new.values()
    if not arrays:
        raise SchemaError(f"column {name!r} is the only one, and had no category in the fit; no column would be left")
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields, metadata=batch.schema.metadata))
