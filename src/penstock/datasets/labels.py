"""Labels of rows, and the score of predictions for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.datasets.metrics import Metric
from penstock.datasets.predictions import (
    Array,
    ClassNames,
    Predictions,
    PredictionsAre,
    as_array,
    class_values,
    in_order,
    in_rows,
    is_missing,
)
from penstock.datasets.rows import column_names, column_of
from penstock.datasets.spec import CompetitionType, DatasetSpec
from penstock.datasets.tables import read_names, read_table, split_file
from penstock.errors import ConfigError, DataError, SchemaError

_MAX_CLASSES = 100_000


@dataclass(frozen=True)
class Labels:
    """Target columns and their classes."""

    spec: DatasetSpec
    classes: tuple[Any, ...] | None

    @classmethod
    def of(cls, training: Any | None, spec: DatasetSpec) -> Self:
        """Labels with the classes of the spec, or the sorted ones of the training file."""
        return cls.of_values(None if training is None else target_values(training, spec), spec)

    @classmethod
    def of_values(cls, values: pa.Array | None, spec: DatasetSpec) -> Self:
        """The same, from the distinct values of the target in the training file."""
        if not spec.competition_type.has_classes or not spec.targets:
            return cls(spec, None)
        if spec.class_names is not None or values is None:
            return cls(spec, spec.class_names)
        target = spec.targets[0]
        if len(values) > _MAX_CLASSES:
            raise SchemaError(f"the target {target!r} has {len(values)} different values; is it a regression?")
        found = values.to_pylist()
        if any(value != value for value in found):
            raise DataError(f"the target {target!r} is NaN in some rows; remove these rows, or fill them")
        classes = tuple(sorted(found))
        if spec.competition_type is CompetitionType.BINARY_CLASSIFICATION and len(classes) != 2:
            raise SchemaError(
                f"binary_classification needs two values of the target {target!r}, and the training file has "
                f"{len(classes)}: {list(classes[:10])}; correct competition_type, or give class_names"
            )
        labels = cls(spec, classes)
        if spec.competition_type is CompetitionType.ORDINAL_REGRESSION:
            labels.refuse_no_order("ordinal_regression")
        return labels

    @property
    def dtype(self) -> type[np.int32] | type[np.float32]:
        return np.int32 if self.spec.competition_type.has_classes else np.float32

    def values(self, data: Any) -> npt.NDArray[Any]:
        """Targets as they are in the file: (rows,), or (rows, targets)."""
        columns = [np.asarray(_target(data, name)) for name in self.spec.targets]
        if self.spec.competition_type.has_many_targets:
            return np.stack(columns, axis=1)
        return columns[0].astype(str) if columns[0].dtype.kind == "O" else columns[0]

    def numbers(self, data: Any) -> npt.NDArray[Any]:
        """Targets as class numbers or as numbers."""
        columns = [_target(data, name) for name in self.spec.targets]
        if self.classes is not None:
            return _class_numbers(columns[0], self.classes, self.spec.targets[0])
        numbers = [_floats(column, name) for name, column in zip(self.spec.targets, columns)]
        kind = self.spec.competition_type
        if kind is CompetitionType.MULTILABEL_CLASSIFICATION:
            for name, column in zip(self.spec.targets, numbers):
                if (wrong := ~np.isin(column, (0, 1))).any():
                    row = int(wrong.argmax())
                    raise DataError(f"the label {name!r} is {column[row]:g} in row {row}; expected 0 or 1", row=row)
        return np.stack(numbers, axis=1) if kind.has_many_targets else numbers[0]

    def class_of(self, predictions: Any) -> ClassNames:
        """Class names of predictions; plain integers are class numbers here."""
        if self.classes is None:
            raise ConfigError(f"{self.spec.competition_type.value} has no classes, or they are unknown")
        return Predictions.of(predictions, self.classes, "numbers").names()

    def refuse_no_order(self, needed_by: str) -> None:
        """Raise if the order of the classes counts, and is only alphabetical."""
        if self.classes is None or self.spec.class_names is not None or len(self.classes) < 3:
            return
        if isinstance(self.classes[0], str):
            raise ConfigError(
                f"{needed_by} needs the order of the classes, and {list(self.classes)[:10]} are in alphabetical order; "
                "give class_names in the spec, from the lowest to the highest"
            )


def target_values(data: Any, spec: DatasetSpec) -> pa.Array | None:
    """Distinct values of the target; None without classes or without such a column."""
    if not spec.competition_type.has_classes or not spec.targets or spec.targets[0] not in column_names(data):
        return None
    return _target(data, spec.targets[0]).drop_null().unique()


def training_values(spec: DatasetSpec) -> pa.Array | None:
    """The same of the training file, if there is one."""
    if not spec.competition_type.has_classes or not spec.targets or spec.class_names is not None:
        return None
    target = spec.targets[0]
    try:
        path = split_file(spec, "train")
    except FileNotFoundError:
        return None
    if target not in read_names(path, **spec.csv_options):
        return None
    kinds = {target: spec.columns[target].kind} if target in spec.columns else {}
    return target_values(read_table(path, columns=[target], kinds=kinds, **spec.csv_options), spec)


def _target(data: Any, name: str) -> pa.Array:
    """Column of a target, of a plain type."""
    column = column_of(data, name)
    if pa.types.is_decimal(column.type):
        return column.cast(pa.float64())
    return column.cast(pa.string()) if column.type == pa.large_string() else column


def _class_numbers(column: pa.Array, classes: tuple[Any, ...], name: str) -> npt.NDArray[np.int32]:
    try:
        known = pa.array(list(classes)).cast(column.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, TypeError):
        raise SchemaError(
            f"class_names {list(classes)[:10]} are not values of the target {name!r}, which is {column.type}"
        ) from None
    found = pc.index_in(column, known)
    if found.null_count:
        row = int(np.asarray(found.is_null()).argmax())
        raise DataError(
            f"the target {name!r} is {column[row].as_py()!r} in row {row}, which is none of the classes "
            f"{list(classes)[:20]}; {found.null_count} rows have no known class",
            row=row,
        )
    return np.asarray(found).astype(np.int32)


def _floats(column: pa.Array, name: str) -> npt.NDArray[np.float32]:
    try:
        wide = np.asarray(column.cast(pa.float64()))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise SchemaError(
            f"the target {name!r} is {column.type}, expected numbers; correct the column, or competition_type (its "
            f"values are like {column[0].as_py()!r})"
        ) from None
    with np.errstate(over="ignore"):
        numbers = wide.astype(np.float32)
    bad = ~np.isfinite(numbers)
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"the target {name!r} is {wide[row]:g} in row {row}, which float32 cannot hold, and {int(bad.sum())} "
            "such rows in all; remove them, or scale the target (its logarithm, say)",
            row=row,
        )
    return numbers


# -- scores ----------------------------------------------------------------------------------------------------------


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
    """Score of `predictions` for `data`; classes are compared by their numbers, so that any form works."""
    predictions = in_rows(predictions, [id_column], ids)
    targets = labels.spec.targets
    if isinstance(predictions, dict):
        if list(predictions) == list(targets[:1]):
            predictions = predictions[targets[0]]
        elif labels.classes is not None:
            what = f"the target is {targets[0]!r} and its classes"
            predictions = in_order(predictions, labels.classes, what, classes=True)
        else:
            predictions = in_order(predictions, targets, "the targets")
    if labels.classes is not None:
        return _score_classes(labels, labels.classes, data, predictions, metric, are)
    if are is not None:
        raise ConfigError(f"predictions_are={are!r} is for classes, and {labels.spec.competition_type.value} has none")
    if metric.needs != "rankings":
        predictions = as_array(predictions)
        text = predictions.dtype.kind in "US" or any(
            isinstance(value, str) for value in (predictions.ravel() if predictions.dtype.kind == "O" else ())
        )
        if text and (metric.needs != "labels" or metric.of_numbers):
            raise SchemaError(f"{metric.name} needs numbers, got text: {predictions.ravel()[:3].tolist()}")
    return metric(labels.values(data), predictions)


def _score_classes(
    labels: Labels, classes: tuple[Any, ...], data: Any, predictions: Any, metric: Metric, are: PredictionsAre | None
) -> float:
    truth, numbers = labels.numbers(data), range(len(classes))
    if metric.needs == "rankings":
        return metric(truth, _ranked(predictions, classes, are), classes=numbers)
    given = Predictions.of(predictions, classes, are)
    if metric.needs in ("scores", "probabilities"):
        scores = given.scores(metric.name)
        return metric(truth, scores[:, 1] if metric.of_numbers and scores.ndim == 2 else scores, classes=numbers)
    if not metric.of_numbers:
        return metric(truth, given.numbers(), classes=numbers)
    labels.refuse_no_order(metric.name)
    if metric.needs == "labels" and given.between:
        raise SchemaError(
            f"{metric.name} compares classes, and predictions such as {given.given[:3].tolist()} lie between them; "
            "round them first"
        )
    return metric(class_values(classes)[truth], given.values(metric.name))


def ranked_texts(given: Any, classes: tuple[Any, ...], metric: Metric, are: PredictionsAre | None) -> Array:
    """Lists of classes as competitions write them, separated by blanks; of scores, the highest ones.

    Text stays unchanged.
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
            f"{metric.name} scores lists of classes, and the class {blank!r} contains blanks; pass one text for each "
            "row, as the competition writes them"
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
        raise DataError(f"the scores of row {row} are {scores[row]}, expected finite numbers", row=row)
    if (scores == np.floor(scores)).all():
        raise SchemaError(
            f"{metric.name} scores lists of classes, best first, and integers as {scores.dtype} may be classes or "
            "scores; pass classes as integers (.astype(int)), or as names"
        )
    _, at, count = metric.name.partition("@")
    return np.argsort(-scores, axis=1, kind="stable")[:, : int(count) if at else classes]


def _ranked(predictions: Any, classes: tuple[Any, ...], are: PredictionsAre | None) -> Any:
    """Scores (rows, classes) unchanged; classes, best first, as lists of their numbers.

    These may be lists, text as competitions write it ("a b"), or one class for each row.
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
    empty = next((row for row, given in enumerate(rows) if not np.iterable(given) and is_missing(given)), None)
    if empty is not None:
        raise DataError(f"the prediction for row {empty} is {rows[empty]!r}, expected a list of classes", row=empty)
    if array.ndim == 1 and array.dtype.kind in "biuf":
        single = Predictions.of(predictions, classes, are)
        if single.fractional:
            raise SchemaError(
                f"predictions such as {rows[:3]} are neither classes nor lists of them; pass (rows, {len(classes)}) of "
                "scores, or the classes of each row, best first"
            )
        return single.numbers()[:, None]
    if rows and all(isinstance(row, str) for row in rows):
        return _parsed(rows, classes)
    lists = [[row] if isinstance(row, str) or not np.iterable(row) else list(row) for row in rows]
    numbers = Predictions.of([label for row in lists for label in row], classes, are).numbers().tolist()
    ends = np.cumsum([len(row) for row in lists]).tolist()
    return [numbers[start:end] for start, end in zip([0, *ends], ends)]


def _parsed(texts: list[str], classes: tuple[Any, ...]) -> list[list[int]]:
    """Class numbers in each text: the name of a class, or several names separated by blanks."""
    known = {str(name): number for number, name in enumerate(classes)}
    found = []
    for row, text in enumerate(texts):
        words = [text] if text in known else text.split()
        if unknown := [word for word in words if word not in known]:
            raise DataError(f"{unknown[0]!r} in row {row} is none of the classes {list(classes)[:10]}", row=row)
        found.append([known[word] for word in words])
    return found
