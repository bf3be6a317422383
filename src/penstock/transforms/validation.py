"""Check every row against declared rules: raise, skip the row, or null the value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.text import flags, plain
from penstock.errors import DataError, SchemaError
from penstock.transforms.cleanup import Range, as_range, ends
from penstock.transforms.columns import as_names, brief, column, keep_rows, like, replace
from penstock.transforms.counts import CountingTransform
from penstock.transforms.text import as_text

Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
OnInvalid: TypeAlias = Literal["raise", "skip", "null"]


class ArrowSchema(Protocol):
    """Something that knows its Arrow schema, such as `penstock.types.Schema`."""

    def to_arrow(self) -> pa.Schema: ...


class Validate(CountingTransform):
    """Check rows against a schema and rules per column, and raise, skip the row, or null the value.

        Validate(not_null=["id"], ranges={"age": (0, 120)}, regex={"email": r".+@.+"}, on_invalid="skip")

    - `schema`: its columns must be there with its types; others may be too. A batch that differs is always an error:
      no row of it is better than another. Fields that are not nullable count as `not_null`.
    - `ranges`: both ends belong to the range; None leaves a side open. NaN is in no range.
    - `regex`: the whole value must match (RE2).
    - `allowed`: the value must be one of these.

    Null breaks `not_null` only. Rules apply in the order schema, not_null, ranges, regex, allowed, and within each as
    written; a row is counted once, under the first it breaks, e.g. `"age: out of range"`. With `"null"` every value
    that breaks a rule becomes null, and its row is counted once, as `"age: out of range, set to null"`; a null that is
    not allowed cannot be replaced like this.
    """

    def __init__(
        self,
        schema: pa.Schema | ArrowSchema | None = None,
        *,
        not_null: str | Iterable[str] = (),
        ranges: Mapping[str, Range] | None = None,
        regex: Mapping[str, str] | None = None,
        allowed: Mapping[str, Iterable[Any]] | None = None,
        on_invalid: OnInvalid = "raise",
    ) -> None:
        super().__init__()
        if on_invalid not in ("raise", "skip", "null"):
            raise ValueError(f"on_invalid must be 'raise', 'skip' or 'null', got {on_invalid!r}")
        self.schema = schema if schema is None or isinstance(schema, pa.Schema) else schema.to_arrow()
        required = [field.name for field in self.schema or () if not field.nullable]
        required += [name for name in (as_names(not_null) if not_null else ()) if name not in required]
        if required and on_invalid == "null":
            raise ValueError(f"on_invalid='null' cannot replace a null in {required}; use 'skip' or 'raise'")
        self.rules: tuple[Rule, ...] = (
            *(NotNull(name) for name in required),
            *(InRange(name, *as_range(given, name)) for name, given in (ranges or {}).items()),
            *(Matches(name, pattern) for name, pattern in (regex or {}).items()),
            *(OneOf(name, tuple(values)) for name, values in (allowed or {}).items()),
        )
        if not self.rules and self.schema is None:
            raise ValueError("nothing to validate; pass a schema, not_null, ranges, regex or allowed")
        self.on_invalid = on_invalid

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self.schema is not None:
            _check_schema(batch, self.schema)
        broken = [(rule, rule.broken(column(batch, rule.column))) for rule in self.rules]
        broken = [(rule, rows) for rule, rows in broken if rows.any()]
        if not broken:
            return batch
        if self.on_invalid == "raise":
            _raise_first(batch, broken)
        valid = np.ones(batch.num_rows, np.bool_)
        done = ", set to null" if self.on_invalid == "null" else ""
        reasons = {}
        for rule, rows in broken:
            reasons[f"{rule.column}: {rule.problem}{done}"] = int(np.count_nonzero(rows & valid))
            valid &= ~rows
        if self.on_invalid == "skip":
            self.count(reasons)
            return keep_rows(batch, valid)
        self.count_kept(reasons)
        for rule, rows in broken:
            batch = _nulled(batch, rule.column, rows)
        return batch

    def __repr__(self) -> str:
        rules = ["schema"] if self.schema is not None else []
        rules += [f"{rule.column}: {rule.expected}" for rule in self.rules]
        policy = "drop" if self.on_invalid == "skip" else self.on_invalid  # its name in checkpoints
        return f"Validate({', '.join(rules)}, on_invalid={policy!r})"


class Rule(Protocol):
    """Rule for one column."""

    problem: ClassVar[str]

    @property
    def column(self) -> str: ...

    @property
    def expected(self) -> str:
        """Text of the rule, to follow the word "expected"."""
        ...

    def broken(self, array: pa.Array) -> Flags:
        """The rows that break the rule."""
        ...


@dataclass(frozen=True, slots=True)
class NotNull:
    problem: ClassVar[str] = "null"
    column: str

    @property
    def expected(self) -> str:
        return "a value"

    def broken(self, array: pa.Array) -> Flags:
        return flags(array.is_null())


@dataclass(frozen=True, slots=True)
class InRange:
    problem: ClassVar[str] = "out of range"
    column: str
    low: Any
    high: Any

    @property
    def expected(self) -> str:
        if self.high is None:
            return f"at least {self.low!r}"
        if self.low is None:
            return f"at most {self.high!r}"
        return f"{self.low!r} to {self.high!r}"

    def broken(self, array: pa.Array) -> Flags:
        values = plain(array)
        low, high = ends(values, (self.low, self.high), self.column)
        inside = flags(values.is_valid())
        # Asking what is inside, not what is outside, keeps NaN out: it compares false with everything.
        if low is not None:
            inside &= flags(pc.greater_equal(values, low))
        if high is not None:
            inside &= flags(pc.less_equal(values, high))
        return flags(values.is_valid()) & ~inside


@dataclass(frozen=True, slots=True)
class Matches:
    problem: ClassVar[str] = "does not match"
    column: str
    pattern: str

    def __post_init__(self) -> None:
        try:
            pc.match_substring_regex(pa.array([""]), pattern=self.pattern)
        except pa.ArrowInvalid as error:
            raise ValueError(f"the pattern {self.pattern!r} of {self.column!r} cannot be used: {error}") from None

    @property
    def expected(self) -> str:
        return f"a match of {self.pattern!r}"

    def broken(self, array: pa.Array) -> Flags:
        text = as_text(array, self.column)
        return flags(pc.invert(pc.match_substring_regex(text, pattern=rf"\A(?:{self.pattern})\z")))


@dataclass(frozen=True, slots=True)
class OneOf:
    problem: ClassVar[str] = "not allowed"
    column: str
    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.values or None in self.values:
            raise ValueError(f"the allowed values of {self.column!r} must be one or more, and not None: {self.values}")

    @property
    def expected(self) -> str:
        return f"one of {brief(list(self.values))}"

    def broken(self, array: pa.Array) -> Flags:
        values = plain(array)
        if pa.types.is_null(values.type):
            return np.zeros(len(values), np.bool_)
        try:
            allowed = pa.array(self.values, values.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            allowed = None
        # pa.array([0.5], pa.int64()) is [0].
        if allowed is None or (pa.types.is_integer(values.type) and allowed.to_pylist() != list(self.values)):
            raise SchemaError(
                f"column {self.column!r} is {array.type}, which allowed={brief(list(self.values))} does not fit"
            )
        return flags(values.is_valid()) & ~flags(pc.is_in(values, value_set=allowed))


def _check_schema(batch: pa.RecordBatch, schema: pa.Schema) -> None:
    for field in schema:
        given = column(batch, field.name).type
        if given != field.type:
            raise SchemaError(
                f"column {field.name!r} is {given}, expected {field.type}; "
                f"put Cast({{{field.name!r}: '{field.type}'}}) before"
            )


def _raise_first(batch: pa.RecordBatch, broken: list[tuple[Rule, Flags]]) -> None:
    row = min(int(rows.argmax()) for _, rows in broken)
    rule = next(rule for rule, rows in broken if rows[row])
    value = brief(column(batch, rule.column)[row].as_py())
    raise DataError(
        f"column {rule.column!r}, row {row} of the batch: {rule.problem}: {value}, expected {rule.expected}", row=row
    )


def _nulled(batch: pa.RecordBatch, name: str, rows: Flags) -> pa.RecordBatch:
    array = column(batch, name)
    values = plain(array)
    nulled = pc.if_else(pa.array(rows), pa.scalar(None, values.type), values)
    return replace(batch, name, like(nulled, array.type))
