"""Guesses from the values of columns: kinds, competition type and metric, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock._amounts import counted
from penstock.datasets.spec import ColumnKind, CompetitionType
from penstock.errors import ConfigError, DataError

_MOST_CATEGORIES = 50
_BOOLEAN_WORDS = [{"yes", "no"}, {"y", "n"}, {"true", "false"}, {"t", "f"}]


@dataclass(frozen=True, slots=True)
class Facts:
    """Values of a column, with counts."""

    values: pa.Array
    """Values that are not missing."""
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
        """True for numbers without a fraction, of any type."""
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
        """Distinct values, sorted, if there are at most `most`."""
        return sorted(pc.unique(self.values).to_pylist()) if self.distinct <= most else []

    def among(self, allowed: set[Any]) -> bool:
        found = self.sorted_values(len(allowed))
        return bool(found) and set(found) <= allowed


def facts_of(column: pa.ChunkedArray) -> Facts:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    values = column.drop_null().combine_chunks()
    if isinstance(values, pa.ChunkedArray):  # without a chunk
        values = pa.array([], column.type)
    if pa.types.is_null(values.type):
        return Facts(pa.array([], pa.null()), len(column), 0)
    if not _is_plain(values.type):
        return Facts(values, len(column), len(values))  # nested values are not compared
    return Facts(values, len(column), pc.count_distinct(values).as_py())


def guess_kind(facts: Facts, test: Facts | None) -> tuple[ColumnKind, str]:
    """Kind of a feature, and the reason. `test` is the same column of the test file."""
    missing = f", {counted(facts.missing, 'missing value')}" if facts.missing else ""
    kind = facts.values.type
    if not len(facts.values):
        return "ignore", f"no value in any of the {facts.rows:,} rows"
    if not _is_plain(kind):
        return "ignore", f"{kind} is not text, number or date"
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


def value_counts(facts: Facts, most: int = 6) -> str:
    """`'S' (644), 'C' (168), 'Q' (77)`: the most frequent values with their counts."""
    counts = sorted(
        ((entry["counts"], entry["values"]) for entry in pc.value_counts(facts.values).to_pylist()),
        key=lambda one: (-one[0], str(one[1])),
    )
    shown = ", ".join(f"{_short(value)} ({count:,})" for count, value in counts[:most])
    return shown + (f" and {len(counts) - most:,} more" if len(counts) > most else "")


def is_called_id(name: str) -> bool:
    """True for names of identifiers: id, PassengerId, row_id, uuid, index."""
    return bool(re.fullmatch(r"(?i)id|uid|uuid|guid|index|key|Unnamed: 0", name)) or bool(
        re.search(r"(?<=[a-z0-9])(Id|ID)$|[ _-](?i:id|uid|uuid|key|no|number)$", name)
    )


def _is_plain(kind: pa.DataType) -> bool:
    return not (pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _guess_number(facts: Facts, test: Facts | None, missing: str) -> tuple[ColumnKind, str]:
    span = pc.min_max(facts.values).as_py()
    if facts.among({0, 1}) and facts.distinct == 2 and not _unseen(facts, test):
        return "boolean", f"only 0 and 1{missing}"
    what = "integers" if facts.is_whole else "numbers"
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
    return "categorical", f"{counted(facts.distinct, 'value')}: {value_counts(facts)}{missing}"


def _unseen(facts: Facts, test: Facts | None) -> list[Any]:
    """Values of the test file that the training file lacks."""
    if test is None or not len(test.values):
        return []
    known = set(pc.unique(facts.values).to_pylist())
    return [value for value in pc.unique(test.values).to_pylist() if value not in known]


def _short(value: Any) -> str:
    return f"{value!r:.40}" if isinstance(value, str) else str(value)


_USUAL = {
    CompetitionType.BINARY_CLASSIFICATION: "accuracy",
    CompetitionType.MULTICLASS_CLASSIFICATION: "accuracy",
    CompetitionType.MULTILABEL_CLASSIFICATION: "f1_micro",
    CompetitionType.ORDINAL_REGRESSION: "qwk",
    CompetitionType.REGRESSION: "rmse",
    CompetitionType.MULTI_TARGET_REGRESSION: "mcrmse",
    CompetitionType.RANKING: "spearman",
    CompetitionType.TIME_SERIES: "rmse",
}


def guess_metric(
    kind: CompetitionType, targets: Mapping[str, Facts], *, sample: pa.Table | None, file: str
) -> tuple[str, str]:
    """Metric, and the reason. `targets` are those of the training file, `file` names the sample submission."""
    found = None
    if sample is not None and sample.num_columns > 1 and kind.is_classification:
        columns = {name: facts_of(sample.column(name)) for name in sample.column_names[1:]}
        if all(facts.is_number for facts in columns.values()):
            many = kind is CompetitionType.MULTILABEL_CLASSIFICATION
            found = _of_labels(columns, targets, file) if many else _of_classes(kind, columns, targets, file)
    return found or (_USUAL[kind], f"the usual one for {kind.value}")


def _of_labels(columns: Mapping[str, Facts], targets: Mapping[str, Facts], file: str) -> tuple[str, str] | None:
    """Metric for several labels of 0 and 1 in each row."""
    if not any(_are_fractions(columns[name], target) for name, target in targets.items() if name in columns):
        return None
    why = f"{file} has fractions, so probabilities are expected"
    constant = [name for name, target in targets.items() if target.distinct < 2]
    if constant:  # AUC needs both classes
        return "log_loss", f"{why}; not auc, since {constant[0]!r} is the same in every row"
    return "auc", f"{why}, the mean over columns; log_loss is the other usual one"


def _of_classes(
    kind: CompetitionType, columns: Mapping[str, Facts], targets: Mapping[str, Facts], file: str
) -> tuple[str, str] | None:
    """Metric for one class in each row."""
    [target] = targets.values()
    two = kind is CompetitionType.BINARY_CLASSIFICATION
    if len(columns) == (2 if two else max(len(columns), 3)):
        return "log_loss", f"{file} has a column of numbers for each class"
    if two and len(columns) == 1 and _are_fractions(next(iter(columns.values())), target):
        return "auc", f"{file} has fractions, so probabilities are expected"
    return None


def _are_fractions(column: Facts, target: Facts) -> bool:
    """True if a column of a sample submission has probabilities: 0.5, or 0.0 where the target has 0."""
    as_floats = pa.types.is_floating(column.values.type) and not target.values.type.equals(column.values.type)
    return as_floats or not column.is_whole


_MOST_CLASSES = 50


def type_of_many(names: list[str], facts: list[Facts]) -> tuple[CompetitionType, str]:
    """Competition type of several targets, and the reason."""
    if all(one.among({0, 1}) or pa.types.is_boolean(one.values.type) for one in facts):
        return CompetitionType.MULTILABEL_CLASSIFICATION, f"{len(names)} targets, each 0 or 1"
    if all(one.is_number for one in facts):
        return CompetitionType.MULTI_TARGET_REGRESSION, f"{len(names)} targets, all of them numbers"
    wrong = next(name for name, one in zip(names, facts) if not one.is_number)
    raise ConfigError(
        f"of the {len(names)} targets {names}, {wrong!r} is not a number; several targets are labels of 0 and 1, or "
        "numbers: name the target with --target"
    )


def type_of_one(name: str, facts: Facts) -> tuple[CompetitionType, str]:
    """Competition type of one target, and the reason."""
    if facts.distinct == 1:
        raise DataError(f"the target {name!r} is {facts.values[0].as_py()!r} in every row")
    if facts.distinct == 2:
        return CompetitionType.BINARY_CLASSIFICATION, f"{name!r} has two values: {value_counts(facts)}"
    if not facts.is_number:
        several = _lists(facts)
        if 3 * facts.distinct > len(facts.values):
            raise ConfigError(_no_type(name, facts, several))
        return (
            CompetitionType.MULTICLASS_CLASSIFICATION,
            f"{name!r} has {facts.distinct:,} classes: {value_counts(facts)}{several}",
        )
    if facts.is_whole and facts.distinct <= _MOST_CLASSES and 10 * facts.distinct <= facts.rows:
        first, last = facts.sorted_values(_MOST_CLASSES)[0], facts.sorted_values(_MOST_CLASSES)[-1]
        if last - first + 1 <= 2 * facts.distinct:
            why = f"{name!r} has {facts.distinct} integer values: {value_counts(facts)}"
            return CompetitionType.MULTICLASS_CLASSIFICATION, f"{why}; ordinal_regression if their order counts"
    span = pc.min_max(facts.values).as_py()
    why = f"{name!r} has {facts.distinct:,} different numbers from {span['min']:,} to {span['max']:,}"
    return CompetitionType.REGRESSION, why


def _no_type(name: str, facts: Facts, several: str) -> str:
    texts = facts.values.cast(pa.string())
    comma = pc.all(pc.match_substring_regex(texts, r"^\s*[-+]?\d[\d.]*(,\d+)?\s*$")).as_py()
    hint = "; they look like numbers with decimal commas: write points" if comma else several
    return (
        f"the type is unknown: the target {name!r} has {facts.distinct:,} texts in {len(facts.values):,} rows "
        f"({value_counts(facts, 3)}), too many for classes{hint}; pass --type (competition_type= in Python), or name "
        "another column with --target"
    )


def _lists(facts: Facts) -> str:
    """Hint if the texts look like several labels in one cell."""
    for mark in (" ", ",", ";", "|"):
        parts = pc.list_flatten(pc.split_pattern(facts.values.cast(pa.string()), mark))
        if len(parts) > 1.2 * len(facts.values) and 2 * pc.count_distinct(parts).as_py() < facts.distinct:
            return f"; they look like lists of labels joined by {mark!r}: for multilabel, make each a column of 0 and 1"
    return ""
