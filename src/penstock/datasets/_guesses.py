"""What a column holds, told by its values: a kind, and the counts that decided."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.datasets._spec import ColumnKind

__all__ = ["Facts", "counted", "facts_of", "guess_kind", "is_called_id", "plural"]

_MOST_CATEGORIES = 50
_BOOLEAN_WORDS = [{"yes", "no"}, {"y", "n"}, {"true", "false"}, {"t", "f"}]


@dataclass(frozen=True, slots=True)
class Facts:
    """A column, counted."""

    values: pa.Array
    """Without the missing ones."""
    rows: int
    distinct: int

    @property
    def missing(self) -> int:
        return self.rows - len(self.values)

    @property
    def is_number(self) -> bool:
        kind = self.values.type
        return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))

    @property
    def is_whole(self) -> bool:
        """Numbers without a fraction, whatever their type."""
        if not self.is_number or pa.types.is_integer(self.values.type):
            return self.is_number
        return bool(pc.all(pc.equal(pc.floor(self.values), self.values)).as_py())

    @property
    def is_date(self) -> bool:
        return bool(pa.types.is_temporal(self.values.type))

    @property
    def is_unique(self) -> bool:
        return not self.missing and self.distinct == self.rows > 0

    def sorted_values(self, most: int) -> list[Any]:
        """All different values in order, if there are so few."""
        return sorted(pc.unique(self.values).to_pylist()) if self.distinct <= most else []

    def among(self, allowed: set[Any]) -> bool:
        found = self.sorted_values(len(allowed))
        return bool(found) and set(found) <= allowed


def facts_of(column: pa.ChunkedArray) -> Facts:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    values = column.drop_null().combine_chunks()
    if isinstance(values, pa.ChunkedArray):  # no chunk at all
        values = pa.array([], column.type)
    if pa.types.is_null(values.type):
        return Facts(pa.array([], pa.null()), len(column), 0)
    if not _is_plain(values.type):
        return Facts(values, len(column), len(values))  # lists and the like are not compared
    return Facts(values, len(column), pc.count_distinct(values).as_py())


def guess_kind(facts: Facts, test: Facts | None) -> tuple[ColumnKind, str]:
    """The kind of a feature, and why. `test` is the same column of the test file."""
    missing = f", {plural(facts.missing, 'missing value')}" if facts.missing else ""
    kind = facts.values.type
    if not len(facts.values):
        return "ignore", f"it has no value in any of the {facts.rows:,} rows"
    if not _is_plain(kind):
        return "ignore", f"{kind} is neither text nor number nor date"
    if pa.types.is_boolean(kind):
        return "boolean", f"true and false{missing}"
    if facts.is_date:
        span = pc.min_max(facts.values).as_py()
        return "date", f"from {span['min']} to {span['max']}{missing}"
    if facts.is_number:
        return _guess_number(facts, test, missing)
    words = [str(value) for value in facts.sorted_values(2)]
    if {word.strip().lower() for word in words} in _BOOLEAN_WORDS and not _unseen(facts, test):
        return "boolean", f"the words {' and '.join(map(repr, words))}{missing}"
    return _guess_text(facts, test, missing)


def counted(facts: Facts, most: int = 6) -> str:
    """`'S' (644), 'C' (168), 'Q' (77)`: the values that occur most, with how often."""
    counts = sorted(
        ((entry["counts"], entry["values"]) for entry in pc.value_counts(facts.values).to_pylist()),
        key=lambda one: (-one[0], str(one[1])),
    )
    shown = ", ".join(f"{_short(value)} ({count:,})" for count, value in counts[:most])
    return shown + (f" and {len(counts) - most:,} more" if len(counts) > most else "")


def is_called_id(name: str) -> bool:
    """Whether a name is that of an identifier: id, PassengerId, row_id, uuid, index."""
    return bool(re.fullmatch(r"(?i)id|uid|uuid|guid|index|key|Unnamed: 0", name)) or bool(
        re.search(r"(?<=[a-z0-9])(Id|ID)$|[ _-](?i:id|uid|uuid|key|no|number)$", name)
    )


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _is_plain(kind: pa.DataType) -> bool:
    return not (pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _guess_number(facts: Facts, test: Facts | None, missing: str) -> tuple[ColumnKind, str]:
    span = pc.min_max(facts.values).as_py()
    if facts.among({0, 1}) and facts.distinct == 2 and not _unseen(facts, test):
        return "boolean", f"only 0 and 1{missing}"
    what = "whole numbers" if facts.is_whole else "numbers"
    few = f", {facts.distinct} different; categorical if they are codes" if facts.distinct <= 20 else ""
    return "numeric", f"{what} from {span['min']:,} to {span['max']:,}{few}{missing}"


def _guess_text(facts: Facts, test: Facts | None, missing: str) -> tuple[ColumnKind, str]:
    few = facts.distinct <= _MOST_CATEGORIES and 2 * facts.distinct <= len(facts.values)
    if not few:
        words = pc.mean(pc.add(pc.count_substring(facts.values.cast(pa.string()), " "), 1)).as_py()
        return "text", f"{facts.distinct:,} different texts of {words:.1f} words on average{missing}"
    unseen = _unseen(facts, test)
    if unseen:
        shown = ", ".join(map(_short, unseen[:3]))
        return "text", f"{facts.distinct:,} different values, but the test file has others: {shown}{missing}"
    return "categorical", f"{plural(facts.distinct, 'value')}: {counted(facts)}{missing}"


def _unseen(facts: Facts, test: Facts | None) -> list[Any]:
    """Values of the test file that the training file has not."""
    if test is None or not len(test.values):
        return []
    known = set(pc.unique(facts.values).to_pylist())
    return [value for value in pc.unique(test.values).to_pylist() if value not in known]


def _short(value: Any) -> str:
    return f"{value!r:.40}" if isinstance(value, str) else str(value)
