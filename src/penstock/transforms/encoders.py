"""Codes for categories: a column for each, their place in the sorted list, or a hash.

One-hot and ordinal encoding learn the categories from a stream first; hashing needs no fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.hashes import as_seed, hash64
from penstock.arrays.text import flags, plain
from penstock.errors import DataError, SchemaError
from penstock.pipeline.stages import Transform
from penstock.transforms.columns import as_names, brief, column, one_or_list, position, replace
from penstock.transforms.scalers import Fitted

__all__ = ["HashingEncoder", "OneHotEncoder", "OrdinalEncoder"]


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
    if pa.types.is_string(given.type) or pa.types.is_large_string(given.type):
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
