"""How good predictions for the rows of a dataset are, in whatever form they come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from penstock.datasets._labels import Labels
from penstock.datasets._prediction_columns import columns_of, in_order, without_ids
from penstock.datasets.metrics import Metric
from penstock.datasets.predictions import Predictions, PredictionsAre, class_values
from penstock.errors import ConfigError

__all__ = ["score_rows"]


def score_rows(
    labels: Labels,
    data: Any,
    predictions: Any,
    metric: Metric,
    *,
    ids: pa.Array,
    id_column: str | None,
    are: PredictionsAre | None,
) -> float:
    """The score of `predictions` for `data`: classes are compared by their numbers, so that any form will do."""
    columns = columns_of(predictions)
    if columns is not None:
        predictions = _arranged(without_ids(columns, [id_column], ids), labels)
    if labels.classes is not None:
        return _of_classes(labels, data, predictions, metric, are)
    if are is not None:
        raise ConfigError(f"predictions_are={are!r} is for classes, and {labels.spec.competition_type.value} has none")
    return metric(labels.values(data), predictions)


def _arranged(columns: dict[str, Any], labels: Labels) -> Any:
    """Named columns as the array they mean: of the one target, of the classes, or of the targets."""
    targets = labels.spec.targets
    if list(columns) == list(targets[:1]):
        return columns[targets[0]]
    if labels.classes is not None:
        return in_order(columns, labels.classes, f"the target is {targets[0]!r} and its classes")
    return in_order(columns, targets, "the targets")


def _of_classes(labels: Labels, data: Any, predictions: Any, metric: Metric, are: PredictionsAre | None) -> float:
    classes = labels.classes
    assert classes is not None
    truth, numbers = labels.numbers(data), range(len(classes))
    if metric.needs == "rankings":
        return metric(truth, _ranked(predictions, classes, are), classes=numbers)
    given = Predictions.of(predictions, classes, are)
    if metric.needs in ("scores", "probabilities"):
        scores = given.scores(metric.name)
        return metric(truth, scores[:, 1] if metric.of_numbers and scores.ndim == 2 else scores, classes=numbers)
    if metric.of_numbers:
        labels.refuse_no_order(metric.name)
        return metric(class_values(classes)[truth], given.values(metric.name))
    return metric(truth, given.numbers(), classes=numbers)


def _ranked(predictions: Any, classes: tuple[Any, ...], are: PredictionsAre | None) -> Any:
    """Scores as they are; lists of classes, best first, as lists of their numbers."""
    try:
        array = np.asarray(predictions)
    except ValueError:  # lists of different lengths
        array = np.empty(0, object)
    if array.ndim == 2 and array.dtype.kind == "f":
        return array
    if array.ndim == 2:
        return Predictions.of(array.ravel(), classes, are).numbers().reshape(array.shape)
    lists = [list(row) if not isinstance(row, str) else [row] for row in predictions]
    numbers = Predictions.of([label for row in lists for label in row], classes, are).numbers().tolist()
    ends = np.cumsum([len(row) for row in lists]).tolist()
    return [numbers[start:end] for start, end in zip([0, *ends], ends)]
