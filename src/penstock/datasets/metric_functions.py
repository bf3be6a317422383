"""Formulas of the metrics, and the checks of their inputs: shapes that match, no NaN, no unknown label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.datasets.predictions import is_missing
from penstock.errors import DataError, SchemaError

Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]

SMALLEST = 1e-15
"""Distance of clipped probabilities from 0 and 1: one certain mistake costs 34.5 and not infinity."""


# -- inputs ----------------------------------------------------------------------------------------------------------


def as_labels(given: Any, what: str, metric: str) -> Array:
    """Labels of any kind, one for each row or one row of them."""
    array = _array(given, what, metric)
    if array.dtype.kind == "S":
        return np.char.decode(array, "utf-8")
    if array.dtype.kind == "f":
        _refuse_nan(array, what, metric)
    if array.dtype.kind != "O":
        return array
    missing = np.fromiter(map(is_missing, array.ravel()), np.bool_, array.size).reshape(array.shape)
    if missing.any():
        row = first_row(missing)
        raise DataError(f"{metric}: {what} has no label in row {row}; every row needs one", row=row)
    kinds = {isinstance(value, str) for value in array.ravel()}
    if len(kinds) > 1:
        raise DataError(f"{metric}: {what} mixes text and other labels in one array; use one type")
    return array.astype(str) if kinds == {True} else np.array(array.tolist())


def as_numbers(given: Any, what: str, metric: str) -> Floats:
    """Finite numbers as float64."""
    array = _array(given, what, metric)
    try:
        numbers = array.astype(np.float64, copy=False)
    except (TypeError, ValueError):
        raise SchemaError(f"{metric} needs numbers as {what}, got {array.dtype}: {array.ravel()[:3]!r}") from None
    _refuse_nan(numbers, what, metric)
    return numbers


def first_row(flags: Flags) -> int:
    """Number of the first row with a flag."""
    return int(flags.reshape(len(flags), -1).any(axis=1).argmax())


def refuse_fractions(truth: Array, predicted: Array, metric: str) -> None:
    """Raise for probabilities where labels are compared: none would be equal, and a perfect model would score 0."""
    if predicted.dtype.kind != "f" or (truth.dtype.kind == "f" and (truth != np.floor(truth)).any()):
        return
    fractional = predicted != np.floor(predicted)
    if fractional.any():
        row = first_row(fractional)
        raise SchemaError(
            f"{metric} compares labels, and y_pred has {predicted[row].tolist()!r:.60} in row {row}, which looks like "
            "a probability; pass labels: probabilities >= 0.5, or scores.argmax(axis=1) for (rows, classes)"
        )


def refuse_no_flags(labels: Array, what: str, metric: str) -> None:
    """Raise unless several labels for each row are 0 and 1, or false and true."""
    wrong = ~np.isin(labels, (0, 1)) if labels.dtype.kind in "biuf" else np.ones(labels.shape, np.bool_)
    if wrong.any():
        row = first_row(wrong)
        raise SchemaError(f"{metric}: {what} has {labels[row].tolist()!r:.60} in row {row}; expected 0 or 1 per label")


def same_length(truth: Array, predicted: Array, metric: str, *, same_shape: bool = False) -> None:
    """Raise unless there is one prediction for each truth; with `same_shape`, also as many columns."""
    if len(truth) != len(predicted):
        raise SchemaError(f"{metric}: y_true has {len(truth)} rows and y_pred {len(predicted)}; they must be equal")
    if same_shape and truth.shape != predicted.shape:
        raise SchemaError(f"{metric}: y_true has shape {truth.shape} and y_pred {predicted.shape}; they must be equal")


def refuse_unknown(labels: Array, what: str, classes: Sequence[Any], metric: str) -> None:
    """Raise for a label that is none of the classes."""
    for label in np.unique(labels).tolist():
        if label not in set(classes):
            row = int(np.argmax(labels == label))
            raise DataError(f"{metric}: label {label!r} in row {row} of {what} is none of {list(classes)}", row=row)


def binary_truth(truth: Array, metric: str, classes: Sequence[Any] | None = None) -> Flags:
    """Flags of the rows of the positive class: 1, True, or the later of two labels."""
    _one_label(truth, metric)
    if classes is not None:
        if len(classes) != 2:
            raise SchemaError(f"{metric}: one column of predictions is for two classes, got classes={list(classes)}")
        refuse_unknown(truth, "y_true", classes, metric)
        return np.asarray(truth == classes[1])
    found = np.unique(truth)
    if found.dtype.kind in "biuf" and set(found.tolist()) <= {0, 1}:
        return np.asarray(truth == 1)
    if len(found) != 2:
        raise SchemaError(
            f"{metric}: y_true has the labels {found[:5].tolist()}, and one column of predictions is for two classes; "
            "pass predictions of shape (rows, classes), or classes=[negative, positive]"
        )
    return np.asarray(truth == found[1])


def class_numbers(truth: Array, count: int, metric: str, classes: Sequence[Any] | None = None) -> npt.NDArray[np.int64]:
    """Column of the predictions for the label of each row."""
    _one_label(truth, metric)
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


def _one_label(truth: Array, metric: str) -> None:
    if truth.ndim != 1:
        raise SchemaError(f"{metric}: y_true has shape {truth.shape}; expected one label for each row")


def _array(given: Any, what: str, metric: str) -> Array:
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise SchemaError(f"{metric}: {what} cannot be converted to an array: {error}") from None
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim not in (1, 2):
        raise SchemaError(f"{metric}: {what} has shape {array.shape}; expected (rows,) or (rows, columns)")
    if not array.size:
        raise SchemaError(f"{metric}: {what} is empty")
    return array


def _refuse_nan(array: Array, what: str, metric: str) -> None:
    bad = ~np.isfinite(array)
    if bad.any():
        row = first_row(bad)
        count = int(bad.sum())
        raise DataError(f"{metric}: {what} has {count} NaN or infinite values, the first in row {row}", row=row)


# -- labels ----------------------------------------------------------------------------------------------------------


def accuracy(truth: Array, predicted: Array) -> float:
    """Share of correct rows; with several labels in a row, all of them have to be correct."""
    right = truth == predicted
    return float(np.mean(right if right.ndim == 1 else right.all(axis=1)))


def hamming(truth: Array, predicted: Array) -> float:
    """Share of wrong labels."""
    return float(np.mean(truth != predicted))


def balanced_accuracy(truth: Array, predicted: Array) -> float:
    """Mean recall over the classes that occur."""
    hits, true, _ = _counts(truth, predicted)
    return float(np.mean((hits / np.maximum(true, 1))[true > 0]))


def binary_f(truth: Flags, predicted: Flags, beta: float = 1.0) -> float:
    hit, wrong, missed = (truth & predicted).sum(), (~truth & predicted).sum(), (truth & ~predicted).sum()
    weight = beta * beta
    below = (1 + weight) * hit + weight * missed + wrong
    return float((1 + weight) * hit / below) if below else 0.0


def precision(truth: Flags, predicted: Flags) -> float:
    return float((truth & predicted).sum() / predicted.sum()) if predicted.any() else 0.0


def recall(truth: Flags, predicted: Flags) -> float:
    return precision(predicted, truth)


def averaged_f(truth: Array, predicted: Array, average: str) -> float:
    """F1 over classes, over the columns of several labels, or over rows.

    `average` is "macro", "micro", "weighted" (by the true counts) or "samples".
    """
    hits, true, guessed = _counts(truth, predicted, axis=1 if average == "samples" else 0)
    if average == "micro":
        hits, true, guessed = (np.atleast_1d(each.sum()) for each in (hits, true, guessed))
    below = true + guessed
    each = np.divide(2.0 * hits, below, out=np.zeros(len(hits)), where=below > 0)
    if average != "weighted":
        return float(each.mean())
    return float((each * true).sum() / true.sum()) if true.sum() else 0.0


def mcc(truth: Array, predicted: Array) -> float:
    """Matthews correlation coefficient for any number of classes; 0 where either side is constant."""
    hits, true, guessed = (each.astype(float) for each in _counts(truth, predicted))
    rows = float(len(truth))
    spread = (rows * rows - guessed @ guessed) * (rows * rows - true @ true)
    return float((hits.sum() * rows - true @ guessed) / np.sqrt(spread)) if spread > 0 else 0.0


def cohen_kappa(truth: Array, predicted: Array) -> float:
    """Agreement beyond chance; 1 where both sides are the same class in every row."""
    hits, true, guessed = _counts(truth, predicted)
    chance = float(true @ guessed) / len(truth) ** 2
    return float((hits.sum() / len(truth) - chance) / (1 - chance)) if chance < 1 else 1.0


def quadratic_kappa(truth: Floats, predicted: Floats) -> float:
    """Agreement beyond chance, with mistakes weighted by the square of their distance; ratings are integers.

    The mean squared difference over that of independently drawn ratings. This needs moments and no table, since
    distances are between the ratings themselves: ratings that never occur still lie between those that do.
    """
    for what, values in (("y_true", truth), ("y_pred", predicted)):
        if (wrong := values != np.round(values)).any():
            row = int(wrong.argmax())
            raise DataError(f"qwk: {what} has {values[row]} in row {row}; ratings are integers, round them", row=row)
    middle = truth.mean()
    t, p = truth - middle, predicted - middle
    by_chance = np.mean(t * t) + np.mean(p * p) - 2 * t.mean() * p.mean()
    return float(1 - np.mean((t - p) ** 2) / by_chance) if by_chance > 0 else 1.0


def _counts(truth: Array, predicted: Array, axis: int = 0) -> tuple[Array, Array, Array]:
    """Hits, true and predicted labels of each class; of flags along an axis, of each column or row."""
    if truth.ndim == 2:
        t, p = truth.astype(np.bool_), predicted.astype(np.bool_)
        return (t & p).sum(axis=axis), t.sum(axis=axis), p.sum(axis=axis)
    classes, numbers = np.unique(np.concatenate([truth, predicted]), return_inverse=True)
    first, second = numbers[: len(truth)], numbers[len(truth) :]
    each = (first[first == second], first, second)
    hits, true, guessed = (np.bincount(found, minlength=len(classes)) for found in each)
    return hits, true, guessed


# -- scores and probabilities ----------------------------------------------------------------------------------------


def auc(truth: Flags, scores: Floats) -> float:
    """Probability that a positive row has a higher score than a negative one; ties count half."""
    positive = int(truth.sum())
    negative = len(truth) - positive
    if not positive or not negative:
        raise DataError("auc: y_true has rows of one class only; it needs both")
    return float((ranks(scores)[truth].sum() - positive * (positive + 1) / 2) / (positive * negative))


def binary_log_loss(truth: Flags, probabilities: Floats) -> float:
    _refuse_no_probability(probabilities)
    p = np.clip(probabilities, SMALLEST, 1 - SMALLEST)
    return float(-np.mean(np.where(truth, np.log(p), np.log1p(-p))))


def log_loss(numbers: npt.NDArray[np.int64], probabilities: Floats) -> float:
    _refuse_no_probability(probabilities)
    sums = probabilities.sum(axis=1)
    off = np.abs(sums - 1) > 1e-3
    if off.any():
        row = int(off.argmax())
        raise DataError(f"log_loss: the probabilities of row {row} sum to {sums[row]:.4f}, expected 1", row=row)
    p = np.clip(probabilities, SMALLEST, 1 - SMALLEST)
    p = p / p.sum(axis=1, keepdims=True)
    return float(-np.mean(np.log(p[np.arange(len(p)), numbers])))


def brier(truth: Floats, probabilities: Floats) -> float:
    """Mean squared distance of the probabilities from the outcome, summed over classes if there are several."""
    _refuse_no_probability(probabilities)
    distance = (truth - probabilities) ** 2
    return float(np.mean(distance if distance.ndim == 1 else distance.sum(axis=1)))


def _refuse_no_probability(probabilities: Floats) -> None:
    outside = (probabilities < 0) | (probabilities > 1)
    if outside.any():
        row = first_row(outside)
        raise SchemaError(
            f"y_pred has {probabilities[row]!r:.60} in row {row}; probabilities are from 0 to 1 (sigmoid or softmax)"
        )


# -- values ----------------------------------------------------------------------------------------------------------


def mse(truth: Floats, predicted: Floats) -> float:
    return float(np.mean((truth - predicted) ** 2))


def rmse(truth: Floats, predicted: Floats) -> float:
    """Root of the mean squared error, averaged over columns."""
    return float(np.mean(np.sqrt(np.mean((truth - predicted) ** 2, axis=0))))


def rmsle(truth: Floats, predicted: Floats) -> float:
    for what, values in (("y_true", truth), ("y_pred", predicted)):
        if (values <= -1).any():
            row = first_row(values <= -1)
            raise DataError(
                f"rmsle: {what} has {values[row]} in row {row}, and log(1 + x) needs x > -1; "
                "clip predictions at 0, or use rmse",
                row=row,
            )
    return rmse(np.log1p(truth), np.log1p(predicted))


def mae(truth: Floats, predicted: Floats) -> float:
    return float(np.mean(np.abs(truth - predicted)))


def medae(truth: Floats, predicted: Floats) -> float:
    """Median of the absolute errors, averaged over columns."""
    return float(np.mean(np.median(np.abs(truth - predicted), axis=0)))


def mape(truth: Floats, predicted: Floats) -> float:
    """Mean of the errors as shares of the truth: 0.1 is ten percent."""
    if (truth == 0).any():
        row = first_row(truth == 0)
        raise DataError(f"mape: y_true is 0 in row {row}, which no error is a share of; use smape or mae", row=row)
    return float(np.mean(np.abs((truth - predicted) / truth)))


def smape(truth: Floats, predicted: Floats) -> float:
    """Errors in percent of the mean size of truth and prediction, 0 to 200; both 0 is no error."""
    size = np.abs(truth) + np.abs(predicted)
    return float(200 * np.mean(np.divide(np.abs(truth - predicted), size, out=np.zeros(size.shape), where=size > 0)))


def r2(truth: Floats, predicted: Floats) -> float:
    """Explained share of the variance, averaged over columns; a constant truth scores 1 if it is met, else 0."""
    if len(truth) < 2:
        raise DataError("r2: there is one row; the variance needs two")
    left = np.atleast_1d(((truth - predicted) ** 2).sum(axis=0))
    spread = np.atleast_1d(((truth - truth.mean(axis=0)) ** 2).sum(axis=0))
    each = np.where(left == 0, 1.0, 0.0)
    np.subtract(1, np.divide(left, spread, out=np.zeros(len(left)), where=spread > 0), out=each, where=spread > 0)
    return float(each.mean())


def pinball(truth: Floats, predicted: Floats, quantile: float) -> float:
    """Quantile loss: a truth above the prediction costs `quantile` of the distance, one below costs the rest."""
    above = truth - predicted
    return float(np.mean(np.maximum(quantile * above, (quantile - 1) * above)))


def pearson(truth: Floats, predicted: Floats, name: str = "pearson") -> float:
    for which, values in (("y_true", truth), ("y_pred", predicted)):
        if values.max() == values.min():
            raise DataError(f"{name}: {which} is the same in every row, so it has no correlation")
    t, p = _centred(truth), _centred(predicted)
    return float(np.clip((t @ p) / np.sqrt((t @ t) * (p @ p)), -1, 1))


def spearman(truth: Floats, predicted: Floats) -> float:
    """Pearson's correlation of the ranks, with ties at the mean of their ranks."""
    return pearson(ranks(truth), ranks(predicted), "spearman")


def gini(truth: Floats, predicted: Floats) -> float:
    """Normalised Gini coefficient: 2 * AUC - 1 for two classes, with ties at the mean of their places."""
    if truth.ndim != 1:
        raise SchemaError(f"gini needs one number for each row, got shape {truth.shape}; score each column by itself")
    if truth.max() == truth.min():
        raise DataError("gini: y_true is the same in every row, so every order is equal")
    t = _centred(truth)
    return float((t @ ranks(predicted)) / (t @ ranks(truth)))


def ranks(values: Array) -> Floats:
    """Rank of each value from 1, equal values at the mean of their ranks."""
    _, numbers, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean: Floats = np.cumsum(counts) - (counts - 1) / 2
    return mean[numbers]


def _centred(values: Floats) -> Floats:
    """Distances from the mean, scaled to at most 1, since squares of very large or small ones overflow."""
    scaled = values / np.abs(values).max()
    distances = scaled - scaled.mean()
    return np.asarray(distances / np.abs(distances).max())
