"""What kind of competition a target makes, told by its values; each guess with its reason."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from penstock.datasets._guesses import Facts, counted
from penstock.datasets.base import CompetitionType
from penstock.errors import ConfigError, DataError

__all__ = ["type_of_many", "type_of_one"]

_MOST_CLASSES = 50


def type_of_many(names: list[str], facts: list[Facts]) -> tuple[CompetitionType, str]:
    """What is asked of several columns, and why."""
    if all(one.among({0, 1}) or pa.types.is_boolean(one.values.type) for one in facts):
        return CompetitionType.MULTILABEL_CLASSIFICATION, f"{len(names)} targets, each 0 or 1"
    if all(one.is_number for one in facts):
        return CompetitionType.MULTI_TARGET_REGRESSION, f"{len(names)} targets, all of them numbers"
    wrong = next(name for name, one in zip(names, facts) if not one.is_number)
    raise ConfigError(
        f"of the {len(names)} targets {names}, {wrong!r} is no number; several targets are labels of 0 and 1, or "
        "numbers: say which is the target with --target"
    )


def type_of_one(name: str, facts: Facts) -> tuple[CompetitionType, str]:
    """What is asked of one column, and why."""
    if facts.distinct == 1:
        raise DataError(f"the target {name!r} is {facts.values[0].as_py()!r} in every row; there is nothing to predict")
    if facts.distinct == 2:
        return CompetitionType.BINARY_CLASSIFICATION, f"{name!r} has two values: {counted(facts)}"
    if not facts.is_number:
        several = _lists(facts)
        if 3 * facts.distinct > len(facts.values):
            raise ConfigError(_no_type(name, facts, several))
        return (
            CompetitionType.MULTICLASS_CLASSIFICATION,
            f"{name!r} has {facts.distinct:,} classes: {counted(facts)}{several}",
        )
    if facts.is_whole and facts.distinct <= _MOST_CLASSES and 10 * facts.distinct <= facts.rows:
        first, last = facts.sorted_values(_MOST_CLASSES)[0], facts.sorted_values(_MOST_CLASSES)[-1]
        if last - first + 1 <= 2 * facts.distinct:
            why = f"{name!r} has {facts.distinct} whole values: {counted(facts)}"
            return CompetitionType.MULTICLASS_CLASSIFICATION, f"{why}; ordinal_regression if their order counts"
    span = pc.min_max(facts.values).as_py()
    why = f"{name!r} has {facts.distinct:,} different numbers from {span['min']:,} to {span['max']:,}"
    return CompetitionType.REGRESSION, why


def _no_type(name: str, facts: Facts, several: str) -> str:
    texts = facts.values.cast(pa.string())
    comma = pc.all(pc.match_substring_regex(texts, r"^\s*[-+]?\d[\d.]*(,\d+)?\s*$")).as_py()
    hint = "; they look like numbers with a decimal comma: write a point" if comma else several
    return (
        f"no type can be guessed: the target {name!r} has {facts.distinct:,} different texts in "
        f"{len(facts.values):,} rows ({counted(facts, 3)}), too many for classes, and they are no numbers{hint}; say "
        "what it is with --type (competition_type= in Python), or name another column with --target"
    )


def _lists(facts: Facts) -> str:
    """A remark if the texts look like several labels in one cell."""
    for mark in (" ", ",", ";", "|"):
        parts = pc.list_flatten(pc.split_pattern(facts.values.cast(pa.string()), mark))
        if len(parts) > 1.2 * len(facts.values) and 2 * pc.count_distinct(parts).as_py() < facts.distinct:
            return f"; these look like lists of labels joined by {mark!r}: make each a column of 0 and 1 for multilabel"
    return ""
