"""What is given as truth and prediction, as arrays that a metric can trust: shapes that match, no NaN, no surprises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.datasets.predictions import is_missing
from penstock.errors import DataError, SchemaError

__all__ = [
    "Array",
    "Floats",
    "as_labels",
    "as_numbers",
    "binary_truth",
    "class_numbers",
    "refuse_fractions",
    "refuse_no_flags",
    "refuse_unknown",
    "same_length",
]

Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float64]


def as_labels(given: Any, what: str, metric: str) -> Array:
    """Labels of any kind, one for each row or one row of them."""
    array = _array(given, what, metric)
    if array.dtype.kind == "S":
        return np.char.decode(array, "utf-8")
    if array.dtype.kind == "f":
        _refuse_nan(array, what, metric)
    if array.dtype.kind == "O":
        missing = np.fromiter((is_missing(value) for value in array.ravel()), np.bool_, array.size)
        if missing.any():
            row = int(missing.reshape(len(array), -1).any(axis=1).argmax())
            raise DataError(f"{metric}: {what} has no label in row {row}; every row needs one", row=row)
        kinds = {isinstance(value, str) for value in array.ravel()}
        if len(kinds) > 1:
            raise DataError(f"{metric}: {what} has texts and other labels in one array; make them one kind")
        return array.astype(str) if kinds == {True} else np.array(array.tolist())
    return array


def as_numbers(given: Any, what: str, metric: str) -> Floats:
    """Finite numbers as float64."""
    array = _array(given, what, metric)
    if array.dtype.kind not in "biuf":
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError):
            raise SchemaError(f"{metric} needs numbers as {what}, got {array.dtype}: {array.ravel()[:3]!r}") from None
    numbers = array.astype(np.float64, copy=False)
    _refuse_nan(numbers, what, metric)
    return numbers


def refuse_fractions(truth: Array, predicted: Array, metric: str) -> None:
    """Raise for probabilities where labels are compared: none would be equal, and a perfect model had 0."""
    if predicted.dtype.kind != "f" or (truth.dtype.kind == "f" and (truth != np.floor(truth)).any()):
        return
    fractional = predicted != np.floor(predicted)
    if fractional.any():
        row = int(fractional.reshape(len(predicted), -1).any(axis=1).argmax())
        raise SchemaError(
            f"{metric} compares labels, and y_pred has {predicted[row].tolist()!r:.60} in row {row}, as probabilities "
            "are; pass labels: probabilities >= 0.5, or for (rows, classes) scores.argmax(axis=1)"
        )


def refuse_no_flags(labels: Array, what: str, metric: str) -> None:
    """Raise unless several labels for each row are 0 and 1, or false and true."""
    wrong = ~np.isin(labels, (0, 1)) if labels.dtype.kind in "biuf" else np.ones(labels.shape, np.bool_)
    if wrong.any():
        row = int(wrong.any(axis=1).argmax())
        raise SchemaError(
            f"{metric}: {what} has {labels[row].tolist()!r:.60} in row {row}; a column for each label has 0 or 1"
        )


def same_length(truth: Array, predicted: Array, metric: str, *, same_shape: bool = False) -> None:
    """Raise unless there is one prediction for each truth; with `same_shape`, also as many columns."""
    if len(truth) != len(predicted):
        raise SchemaError(f"{metric}: {len(truth)} rows of y_true and {len(predicted)} of y_pred; they must be as many")
    if same_shape and truth.shape != predicted.shape:
        raise SchemaError(f"{metric}: y_true has shape {truth.shape} and y_pred {predicted.shape}; they must be equal")


def refuse_unknown(labels: Array, what: str, classes: Sequence[Any], metric: str) -> None:
    """Raise for a label that is none of the classes."""
    known = set(classes)
    for label in np.unique(labels).tolist():
        if label not in known:
            row = int(np.argmax(labels == label))
            raise DataError(f"{metric}: the label {label!r} in row {row} of {what} is none of {list(classes)}", row=row)


def binary_truth(truth: Array, metric: str, classes: Sequence[Any] | None = None) -> npt.NDArray[np.bool_]:
    """Which rows are of the positive class: 1, True, or the later of two labels."""
    if truth.ndim != 1:
        raise SchemaError(f"{metric}: y_true has shape {truth.shape}; expected one label for each row")
    found = np.unique(truth)
    if classes is not None:
        if len(classes) != 2:
            raise SchemaError(f"{metric}: one column of predictions is for two classes, got classes={list(classes)}")
        refuse_unknown(truth, "y_true", classes, metric)
        return np.asarray(truth == classes[1])
    if found.dtype.kind in "biuf" and set(found.tolist()) <= {0, 1}:
        return np.asarray(truth == 1)
    if len(found) != 2:
        raise SchemaError(
            f"{metric}: y_true has the labels {found[:5].tolist()}, and one column of predictions is for two classes; "
            "pass predictions of shape (rows, classes), or classes=[negative, positive]"
        )
    return np.asarray(truth == found[1])


def class_numbers(truth: Array, count: int, metric: str, classes: Sequence[Any] | None = None) -> npt.NDArray[np.int64]:
    """The column of the predictions that each row's label means."""
    if truth.ndim != 1:
        raise SchemaError(f"{metric}: y_true has shape {truth.shape}; expected one label for each row")
    if classes is not None:
        if len(classes) != count:
            raise SchemaError(f"{metric}: y_pred has {count} columns and there are {len(classes)} classes")
        refuse_unknown(truth, "y_true", classes, metric)
        order = np.argsort(np.asarray(classes), kind="stable")
        return order[np.searchsorted(np.asarray(classes)[order], truth)].astype(np.int64)
    if truth.dtype.kind in "iub" and len(truth) and int(truth.min()) >= 0 and int(truth.max()) < count:
        return truth.astype(np.int64)
    found, numbers = np.unique(truth, return_inverse=True)
    if len(found) != count:
        raise SchemaError(
            f"{metric}: y_true has {len(found)} different labels and y_pred {count} columns; pass classes=[...] in the "
            "order of the columns"
        )
    return numbers.astype(np.int64)


def _array(given: Any, what: str, metric: str) -> Array:
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise SchemaError(f"{metric}: {what} cannot be made an array: {error}") from None
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim not in (1, 2):
        raise SchemaError(f"{metric}: {what} has shape {array.shape}; expected (rows,) or (rows, columns)")
    if not array.size:
        raise SchemaError(f"{metric}: {what} is empty; there is nothing to score")
    return array


def _refuse_nan(array: Array, what: str, metric: str) -> None:
    bad = ~np.isfinite(array)
    if bad.any():
        row = int(bad.reshape(len(array), -1).any(axis=1).argmax())
        raise DataError(
            f"{metric}: {what} has {int(bad.sum())} values that are NaN or infinite, first in row {row}; "
            "find out where they come from, no score can be given for them",
            row=row,
        )
