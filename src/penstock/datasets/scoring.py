"""How good predictions for the rows of a dataset are, in whatever form they come; and lists of classes as texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.datasets.labels import Labels
from penstock.datasets.metrics import Metric
from penstock.datasets.prediction_columns import in_order, in_rows
from penstock.datasets.predictions import Predictions, PredictionsAre, as_array, class_values, is_missing
from penstock.errors import ConfigError, DataError, SchemaError

__all__ = ["ranked_texts", "score_rows"]

Array = npt.NDArray[Any]


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
    predictions = in_rows(predictions, [id_column], ids)
    if isinstance(predictions, dict):
        predictions = _arranged(predictions, labels)
    if labels.classes is not None:
        return _of_classes(labels, data, predictions, metric, are)
    if are is not None:
        raise ConfigError(f"predictions_are={are!r} is for classes, and {labels.spec.competition_type.value} has none")
    if metric.needs != "rankings":
        predictions = as_array(predictions)
        if metric.needs != "labels" or metric.of_numbers:
            _refuse_texts(predictions, metric.name)
    return metric(labels.values(data), predictions)


def _arranged(columns: dict[str, Any], labels: Labels) -> Any:
    """Named columns as the array they mean: of the one target, of the classes, or of the targets."""
    targets = labels.spec.targets
    if list(columns) == list(targets[:1]):
        return columns[targets[0]]
    if labels.classes is not None:
        return in_order(columns, labels.classes, f"the target is {targets[0]!r} and its classes", classes=True)
    return in_order(columns, targets, "the targets")


def _refuse_texts(given: Any, metric: str) -> None:
    """Raise for numbers that are written out, as for any other text."""
    if given.dtype.kind in "US" or (given.dtype.kind == "O" and any(isinstance(one, str) for one in given.ravel())):
        raise SchemaError(f"{metric} needs numbers, got texts: {given.ravel()[:3].tolist()}; make them numbers first")


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
        if metric.needs == "labels" and given.between:
            raise SchemaError(
                f"{metric.name} compares classes, and predictions such as {given.given[:3].tolist()} lie between them; "
                "round them first"
            )
        return metric(class_values(classes)[truth], given.values(metric.name))
    return metric(truth, given.numbers(), classes=numbers)


def ranked_texts(given: Any, classes: tuple[Any, ...], metric: Metric, are: PredictionsAre | None) -> Array:
    """Lists of classes as competitions write them: with blanks between; of scores, the highest that are looked at.

    Texts stay as they are.
    """
    if isinstance(given, str) or not np.iterable(given):
        raise SchemaError(f"{metric.name} scores lists of classes, one for each row, got {given!r:.60}")
    rows = given.to_pylist() if hasattr(given, "to_pylist") else list(given)
    if all(isinstance(row, str) for row in rows):
        return np.array(rows, object)
    names = np.array([str(name) for name in classes], object)
    blank = next((name for name in names if len(name.split()) != 1), None)
    if blank is not None:
        raise SchemaError(
            f"{metric.name} scores lists of classes, and {blank!r} has blanks in its name; pass them as one text for "
            "each row, as the competition writes them"
        )
    lists = _ranked(given, classes, are)
    if isinstance(lists, np.ndarray) and lists.dtype.kind == "f":
        lists = _highest(lists, len(classes), metric)
    return np.array([" ".join(names[row]) for row in lists], object)


def _highest(scores: Array, classes: int, metric: Metric) -> Array:
    if scores.shape[1] != classes:
        raise SchemaError(f"predictions have {scores.shape[1]} columns, and there are {classes} classes")
    bad = ~np.isfinite(scores).all(axis=1)
    if bad.any():
        row = int(bad.argmax())
        raise DataError(f"the scores of row {row} are {scores[row]}; every row needs finite ones", row=row)
    if (scores == np.floor(scores)).all():
        raise SchemaError(
            f"{metric.name} scores lists of classes, best first, and whole numbers as {scores.dtype} may be classes or "
            "scores; give classes as whole numbers (.astype(int)), or as their names"
        )
    _, at, count = metric.name.partition("@")
    return np.argsort(-scores, axis=1, kind="stable")[:, : int(count) if at else classes]


def _ranked(predictions: Any, classes: tuple[Any, ...], are: PredictionsAre | None) -> Any:
    """Scores (rows, classes) as they are; classes, best first, as lists of their numbers.

    These may be lists, texts as competitions write them ("a b"), or one class for each row.
    """
    try:
        array = as_array(predictions)
    except SchemaError:
        if not isinstance(predictions, Sequence) or isinstance(predictions, str):
            raise
        array = np.empty(0, object)  # lists of different lengths
    if array.ndim == 2 and array.shape[1] == 1:
        array = predictions = array[:, 0]
    if array.ndim == 2 and array.dtype.kind == "f":
        return array
    if array.ndim == 2:
        return Predictions.of(array.ravel(), classes, are).numbers().reshape(array.shape)
    if array.dtype.kind == "S":
        array = np.char.decode(array, "utf-8")
    rows = array.tolist() if len(array) else list(predictions)
    nothing = next((row for row, given in enumerate(rows) if not np.iterable(given) and is_missing(given)), None)
    if nothing is not None:
        raise DataError(f"the prediction for row {nothing} is {rows[nothing]!r}, and no list of classes", row=nothing)
    if array.ndim == 1 and array.dtype.kind in "biuf":
        one = Predictions.of(predictions, classes, are)
        if one.fractional:
            raise SchemaError(
                f"predictions such as {rows[:3]} are neither classes nor lists of them; give (rows, {len(classes)}) of "
                "scores, or for each row the classes, best first"
            )
        return one.numbers()[:, None]
    if rows and all(isinstance(row, str) for row in rows):
        return _read(rows, classes)
    lists = [[row] if isinstance(row, str) or not np.iterable(row) else list(row) for row in rows]
    numbers = Predictions.of([label for row in lists for label in row], classes, are).numbers().tolist()
    ends = np.cumsum([len(row) for row in lists]).tolist()
    return [numbers[start:end] for start, end in zip([0, *ends], ends)]


def _read(texts: list[str], classes: tuple[Any, ...]) -> list[list[int]]:
    """The numbers of the classes in each text: the name of one, or several with blanks between them."""
    known = {str(name): number for number, name in enumerate(classes)}
    found = []
    for row, text in enumerate(texts):
        words = [text] if text in known else text.split()
        unknown = [word for word in words if word not in known]
        if unknown:
            raise DataError(f"{unknown[0]!r} in row {row} is none of the classes {list(classes)[:10]}", row=row)
        found.append([known[word] for word in words])
    return found
