"""Metrics of predicted classes and of their probabilities."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.datasets.metrics.arrays import Array, Floats
from penstock.datasets.metrics.values import ranks
from penstock.errors import DataError, SchemaError

__all__ = [
    "accuracy",
    "auc",
    "averaged_f",
    "balanced_accuracy",
    "binary_f",
    "binary_log_loss",
    "brier",
    "cohen_kappa",
    "f_of_rows",
    "hamming",
    "log_loss",
    "mcc",
    "precision",
    "quadratic_kappa",
    "recall",
]

SMALLEST = 1e-15
"""Probabilities are kept this far from 0 and 1, so that one sure mistake costs 34.5 and not everything."""

Flags = npt.NDArray[np.bool_]


def accuracy(truth: Array, predicted: Array) -> float:
    """The share of rows that are right; with several labels in a row, all of them have to be."""
    right = truth == predicted
    return float(np.mean(right if right.ndim == 1 else right.all(axis=1)))


def hamming(truth: Array, predicted: Array) -> float:
    """The share of labels that are wrong."""
    return float(np.mean(truth != predicted))


def balanced_accuracy(truth: Array, predicted: Array) -> float:
    """The recall of each class that occurs, averaged."""
    classes, numbers = np.unique(truth, return_inverse=True)
    right = np.bincount(numbers, weights=truth == predicted, minlength=len(classes))
    return float(np.mean(right / np.bincount(numbers, minlength=len(classes))))


def binary_f(truth: Flags, predicted: Flags, beta: float = 1.0) -> float:
    hit, wrong, missed = (truth & predicted).sum(), (~truth & predicted).sum(), (truth & ~predicted).sum()
    weight = beta * beta
    below = (1 + weight) * hit + weight * missed + wrong
    return float((1 + weight) * hit / below) if below else 0.0


def precision(truth: Flags, predicted: Flags) -> float:
    return float((truth & predicted).sum() / predicted.sum()) if predicted.any() else 0.0


def recall(truth: Flags, predicted: Flags) -> float:
    return float((truth & predicted).sum() / truth.sum()) if truth.any() else 0.0


def averaged_f(truth: Array, predicted: Array, average: str) -> float:
    """F1 over classes, or over the columns of several labels: "macro", "micro" or "weighted" by the true counts."""
    if truth.ndim == 2:
        t, p = truth.astype(np.bool_), predicted.astype(np.bool_)
        hits, true, guessed = (t & p).sum(axis=0), t.sum(axis=0), p.sum(axis=0)
    else:
        classes, numbers = np.unique(np.concatenate([truth, predicted]), return_inverse=True)
        first, second = numbers[: len(truth)], numbers[len(truth) :]
        hits = np.bincount(first[first == second], minlength=len(classes))
        true, guessed = (np.bincount(each, minlength=len(classes)) for each in (first, second))
    if average == "micro":
        below = true.sum() + guessed.sum()
        return float(2 * hits.sum() / below) if below else 0.0
    each = _shares(2.0 * hits, true + guessed)
    if average == "macro":
        return float(each.mean())
    return float((each * true).sum() / true.sum()) if true.sum() else 0.0


def f_of_rows(truth: Array, predicted: Array) -> float:
    """F1 of each row's set of labels, averaged over rows."""
    t, p = truth.astype(np.bool_), predicted.astype(np.bool_)
    return float(_shares(2.0 * (t & p).sum(axis=1), t.sum(axis=1) + p.sum(axis=1)).mean())


def mcc(truth: Array, predicted: Array) -> float:
    """Matthews' correlation, for any number of classes; 0 where either is constant."""
    _, numbers = np.unique(np.concatenate([truth, predicted]), return_inverse=True)
    t, p = numbers[: len(truth)], numbers[len(truth) :]
    count, rows = int(numbers.max()) + 1, float(len(t))
    true, guessed = np.bincount(t, minlength=count).astype(float), np.bincount(p, minlength=count).astype(float)
    covariance = float((t == p).sum()) * rows - true @ guessed
    spread = (rows * rows - guessed @ guessed) * (rows * rows - true @ true)
    return float(covariance / np.sqrt(spread)) if spread > 0 else 0.0


def cohen_kappa(truth: Array, predicted: Array) -> float:
    """Agreement beyond chance; 1 where both are one and the same class throughout."""
    _, numbers = np.unique(np.concatenate([truth, predicted]), return_inverse=True)
    t, p = numbers[: len(truth)], numbers[len(truth) :]
    count = int(numbers.max()) + 1
    chance = float(np.bincount(t, minlength=count) @ np.bincount(p, minlength=count)) / len(t) ** 2
    return float((np.mean(t == p) - chance) / (1 - chance)) if chance < 1 else 1.0


def quadratic_kappa(truth: Floats, predicted: Floats) -> float:
    """Agreement beyond chance, mistakes weighted by the square of their distance; ratings are whole numbers.

    The mean squared difference over that of ratings drawn independently, which needs moments and no table: distances
    are between the ratings themselves, so ratings that nobody gave still lie between those that somebody did.
    """
    for what, values in (("y_true", truth), ("y_pred", predicted)):
        if (values != np.round(values)).any():
            row = int((values != np.round(values)).argmax())
            raise DataError(
                f"qwk: {what} has {values[row]} in row {row}; ratings are whole numbers: round them", row=row
            )
    middle = truth.mean()
    t, p = truth - middle, predicted - middle
    by_chance = np.mean(t * t) + np.mean(p * p) - 2 * t.mean() * p.mean()
    return float(1 - np.mean((t - p) ** 2) / by_chance) if by_chance > 0 else 1.0


def auc(truth: Flags, scores: Floats) -> float:
    """How likely a positive row has the higher score than a negative one; ties count half."""
    positive = int(truth.sum())
    negative = len(truth) - positive
    if not positive or not negative:
        raise DataError("auc: y_true has rows of one class only, and nothing to tell them from")
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
        raise DataError(
            f"log_loss: the probabilities of row {row} sum to {sums[row]:.4f}; those of a row must sum to 1 (softmax)",
            row=row,
        )
    p = np.clip(probabilities, SMALLEST, 1 - SMALLEST)
    p = p / p.sum(axis=1, keepdims=True)
    return float(-np.mean(np.log(p[np.arange(len(p)), numbers])))


def brier(truth: Floats, probabilities: Floats) -> float:
    """The mean squared distance of the probabilities from what happened, summed over classes if there are several."""
    _refuse_no_probability(probabilities)
    distance = (truth - probabilities) ** 2
    return float(np.mean(distance if distance.ndim == 1 else distance.sum(axis=1)))


def _shares(above: Array, below: Array) -> Floats:
    return np.divide(above, below, out=np.zeros(len(above)), where=below > 0)


def _refuse_no_probability(probabilities: Floats) -> None:
    outside = (probabilities < 0) | (probabilities > 1)
    if outside.any():
        row = int(outside.reshape(len(outside), -1).any(axis=1).argmax())
        raise SchemaError(
            f"y_pred has {probabilities[row]!r:.60} in row {row}; probabilities are from 0 to 1 (sigmoid or softmax)"
        )
