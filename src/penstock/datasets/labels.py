"""The target of a table as it is in the file, and as a model learns it."""

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

__all__ = ["Labels", "ranked_texts", "score_rows", "target_values", "training_values"]


_MOST_CLASSES = 100_000


@dataclass(frozen=True)
class Labels:
    """Which columns are the target, and which classes they have."""

    spec: DatasetSpec
    classes: tuple[Any, ...] | None

    @classmethod
    def of(cls, training: Any | None, spec: DatasetSpec) -> Self:
        """With the classes that the spec says, or those of the training file, sorted."""
        return cls.of_values(None if training is None else target_values(training, spec), spec)

    @classmethod
    def of_values(cls, values: pa.Array | None, spec: DatasetSpec) -> Self:
        """The same, of the different values that the target has in the training file."""
        if not spec.competition_type.has_classes or not spec.targets:
            return cls(spec, None)
        if spec.class_names is not None:
            return cls(spec, spec.class_names)
        if values is None:
            return cls(spec, None)  # a missing target is told where rows are checked
        if len(values) > _MOST_CLASSES:
            raise SchemaError(
                f"the target {spec.targets[0]!r} has {len(values)} different values, too many for classes; "
                "is it a regression?"
            )
        found = values.to_pylist()
        if any(value != value for value in found):
            raise DataError(f"the target {spec.targets[0]!r} is NaN in some rows; leave these rows out, or fill them")
        classes = tuple(sorted(found))
        if spec.competition_type is CompetitionType.BINARY_CLASSIFICATION and len(classes) != 2:
            raise SchemaError(
                f"binary_classification needs two values of the target {spec.targets[0]!r}, and the training file has "
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
        """The targets as they are in the file: (rows,), or (rows, targets)."""
        columns = [np.asarray(_target(data, name)) for name in self.spec.targets]
        if self.spec.competition_type.has_many_targets:
            return np.stack(columns, axis=1)
        values = columns[0]
        return values.astype(str) if values.dtype.kind == "O" else values

    def numbers(self, data: Any) -> npt.NDArray[Any]:
        """The targets as class numbers or as numbers."""
        columns = [_target(data, name) for name in self.spec.targets]
        if self.classes is not None:
            return _class_numbers(columns[0], self.classes, self.spec.targets[0])
        numbers = [_floats(column, name) for name, column in zip(self.spec.targets, columns)]
        kind = self.spec.competition_type
        if kind is CompetitionType.MULTILABEL_CLASSIFICATION:
            for name, column in zip(self.spec.targets, numbers):
                wrong = ~np.isin(column, (0, 1))
                if wrong.any():
                    row = int(wrong.argmax())
                    raise DataError(f"the label {name!r} is {column[row]:g} in row {row}; expected 0 or 1", row=row)
        return np.stack(numbers, axis=1) if kind.has_many_targets else numbers[0]

    def class_of(self, predictions: Any) -> ClassNames:
        """The names of classes, of whatever predictions are; plain whole numbers are numbers of classes here."""
        if self.classes is None:
            raise ConfigError(f"{self.spec.competition_type.value} has no classes, or nobody knows them")
        return Predictions.of(predictions, self.classes, "numbers").names()

    def refuse_no_order(self, who: str) -> None:
        """Raise if classes are texts in the order of the alphabet, where their order counts."""
        if self.classes is None or self.spec.class_names is not None or len(self.classes) < 3:
            return
        if isinstance(self.classes[0], str):
            raise ConfigError(
                f"{who} goes by the order of the classes, and that of {list(self.classes)[:10]} is only the alphabet; "
                "give class_names in the spec, from the lowest to the highest"
            )


def target_values(data: Any, spec: DatasetSpec) -> pa.Array | None:
    """The different values of the one target; None where there are no classes, or no such column."""
    if not spec.competition_type.has_classes or not spec.targets or spec.targets[0] not in column_names(data):
        return None
    return _target(data, spec.targets[0]).drop_null().unique()


def training_values(spec: DatasetSpec) -> pa.Array | None:
    """The same of the training file, if there is one."""
    if not spec.competition_type.has_classes or not spec.targets or spec.class_names is not None:
        return None
    target = spec.targets[0]
    options: dict[str, Any] = {"delimiter": spec.delimiter, "encoding": spec.encoding}
    try:
        path = split_file(spec, "train")
    except FileNotFoundError:
        return None
    if target not in read_names(path, **options):
        return None
    kinds = {target: spec.columns[target].kind} if target in spec.columns else {}
    return target_values(read_table(path, columns=[target], kinds=kinds, **options), spec)


def _target(data: Any, name: str) -> pa.Array:
    """The column of a target, of a plain type."""
    column = column_of(data, name)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_decimal(column.type):
        return column.cast(pa.float64())
    return column.cast(pa.string()) if column.type in (pa.string_view(), pa.large_string()) else column


def _class_numbers(column: pa.Array, classes: tuple[Any, ...], name: str) -> npt.NDArray[np.int32]:
    try:
        known = pa.array(list(classes)).cast(column.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, TypeError):
        raise SchemaError(
            f"class_names {list(classes)[:10]} are not values of the target {name!r}, which is {column.type}; give "
            "them as they are in the file"
        ) from None
    found = pc.index_in(column, known)
    if found.null_count:
        row = int(np.asarray(found.is_null()).argmax())
        raise DataError(
            f"the target {name!r} is {column[row].as_py()!r} in row {row}, which is none of the classes "
            f"{list(classes)[:20]}; {found.null_count} rows are so",
            row=row,
        )
    return np.asarray(found).astype(np.int32)


def _floats(column: pa.Array, name: str) -> npt.NDArray[np.float32]:
    try:
        wide = np.asarray(column.cast(pa.float64()))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise SchemaError(
            f"the target {name!r} is {column.type}, and numbers are to be predicted; mend the column, or correct "
            f"competition_type (its values are like {column[0].as_py()!r})"
        ) from None
    with np.errstate(over="ignore"):
        numbers = wide.astype(np.float32)
    bad = ~np.isfinite(numbers)
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"the target {name!r} is {wide[row]:g} in row {row}, which is no number in float32, and {int(bad.sum())} "
            "such rows in all; leave them out, or scale the target (its logarithm, say)",
            row=row,
        )
    return numbers


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
