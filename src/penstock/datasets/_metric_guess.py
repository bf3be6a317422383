"""The metric of a competition, told by its type and by what its sample submission holds; the guess with its reason."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from penstock.datasets._guesses import Facts, facts_of
from penstock.datasets.base import CompetitionType

__all__ = ["guess_metric"]

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
    """A metric, and why. `targets` are those of the training file, `file` is the name of the sample submission."""
    found = None
    if sample is not None and sample.num_columns > 1 and kind.is_classification:
        asked = {name: facts_of(sample.column(name)) for name in sample.column_names[1:]}
        if all(one.is_number for one in asked.values()):
            many = kind is CompetitionType.MULTILABEL_CLASSIFICATION
            found = _of_labels(asked, targets, file) if many else _of_classes(kind, asked, targets, file)
    return found or (_USUAL[kind], f"what is usual for {kind.value}")


def _of_labels(asked: Mapping[str, Facts], targets: Mapping[str, Facts], file: str) -> tuple[str, str] | None:
    """Of several labels of 0 and 1 in each row."""
    if not any(_are_fractions(asked[name], target) for name, target in targets.items() if name in asked):
        return None
    why = f"{file} has fractions, so it wants probabilities"
    constant = [name for name, target in targets.items() if target.distinct < 2]
    if constant:  # AUC compares the rows of two classes
        return "log_loss", f"{why}; not auc, as {constant[0]!r} is the same in every row"
    return "auc", f"{why}, the mean over columns; log_loss is the other usual one"


def _of_classes(
    kind: CompetitionType, asked: Mapping[str, Facts], targets: Mapping[str, Facts], file: str
) -> tuple[str, str] | None:
    """Of one class in each row."""
    [target] = targets.values()
    two = kind is CompetitionType.BINARY_CLASSIFICATION
    if len(asked) == (2 if two else max(len(asked), 3)):
        return "log_loss", f"{file} has a column of numbers for each class"
    if two and len(asked) == 1 and _are_fractions(next(iter(asked.values())), target):
        return "auc", f"{file} has fractions, so it wants probabilities"
    return None


def _are_fractions(asked: Facts, target: Facts) -> bool:
    """Whether a column of a sample submission is probabilities of what the target has: 0.5, or 0.0 where it has 0."""
    as_floats = pa.types.is_floating(asked.values.type) and not target.values.type.equals(asked.values.type)
    return as_floats or not asked.is_whole
