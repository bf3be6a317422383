"""Metrics of predicted numbers, in one column or several."""

from __future__ import annotations

import numpy as np

from penstock.datasets.metrics.arrays import Array, Floats
from penstock.errors import DataError, SchemaError

__all__ = [
    "gini",
    "mae",
    "mape",
    "medae",
    "mse",
    "pearson",
    "pinball",
    "r2",
    "ranks",
    "rmse",
    "rmsle",
    "smape",
    "spearman",
]


def mse(truth: Floats, predicted: Floats) -> float:
    return float(np.mean((truth - predicted) ** 2))


def rmse(truth: Floats, predicted: Floats) -> float:
    """Of several columns: that of each, averaged."""
    return float(np.mean(np.sqrt(np.mean((truth - predicted) ** 2, axis=0))))


def rmsle(truth: Floats, predicted: Floats) -> float:
    for what, values in (("y_true", truth), ("y_pred", predicted)):
        if (values <= -1).any():
            row = int((values <= -1).reshape(len(values), -1).any(axis=1).argmax())
            raise DataError(
                f"rmsle: {what} has {values[row]} in row {row}, and log(1 + x) needs x > -1; "
                "clip predictions at 0, or use rmse",
                row=row,
            )
    return rmse(np.log1p(truth), np.log1p(predicted))


def mae(truth: Floats, predicted: Floats) -> float:
    return float(np.mean(np.abs(truth - predicted)))


def medae(truth: Floats, predicted: Floats) -> float:
    """The median of the absolute errors, averaged over columns."""
    return float(np.mean(np.median(np.abs(truth - predicted), axis=0)))


def mape(truth: Floats, predicted: Floats) -> float:
    """The mean of the errors as shares of the truth: 0.1 is ten percent."""
    if (truth == 0).any():
        row = int((truth == 0).reshape(len(truth), -1).any(axis=1).argmax())
        raise DataError(f"mape: y_true is 0 in row {row}, and no error is a share of 0; use smape or mae", row=row)
    return float(np.mean(np.abs((truth - predicted) / truth)))


def smape(truth: Floats, predicted: Floats) -> float:
    """The errors in percent of the mean size of truth and prediction, 0 to 200; both 0 is no error."""
    size = np.abs(truth) + np.abs(predicted)
    return float(200 * np.mean(np.divide(np.abs(truth - predicted), size, out=np.zeros(size.shape), where=size > 0)))


def r2(truth: Floats, predicted: Floats) -> float:
    """The share of the spread that is explained, averaged over columns; a constant truth gives 1 if met, else 0."""
    if len(truth) < 2:
        raise DataError("r2: there is one row, and no spread to explain; two are needed")
    left = np.atleast_1d(((truth - predicted) ** 2).sum(axis=0))
    spread = np.atleast_1d(((truth - truth.mean(axis=0)) ** 2).sum(axis=0))
    each = np.where(left == 0, 1.0, 0.0)
    np.subtract(1, np.divide(left, spread, out=np.zeros(len(left)), where=spread > 0), out=each, where=spread > 0)
    return float(each.mean())


def pinball(truth: Floats, predicted: Floats, quantile: float) -> float:
    """The quantile loss: what lies above the prediction costs `quantile` of the distance, what lies below the rest."""
    above = truth - predicted
    return float(np.mean(np.maximum(quantile * above, (quantile - 1) * above)))


def pearson(truth: Floats, predicted: Floats, name: str = "pearson") -> float:
    for which, values in (("y_true", truth), ("y_pred", predicted)):
        if values.max() == values.min():
            raise DataError(f"{name}: {which} is the same in every row, and nothing goes with it")
    t, p = _centred(truth), _centred(predicted)
    return float(np.clip((t @ p) / np.sqrt((t @ t) * (p @ p)), -1, 1))


def _centred(values: Floats) -> Floats:
    """Distances from the mean, the largest of them 1: squares of large or small ones would not be numbers any more."""
    scaled = values / np.abs(values).max()
    distances = scaled - scaled.mean()
    return np.asarray(distances / np.abs(distances).max())


def spearman(truth: Floats, predicted: Floats) -> float:
    """Pearson's correlation of the ranks, ties at the mean of theirs."""
    return pearson(ranks(truth), ranks(predicted), "spearman")


def gini(truth: Floats, predicted: Floats) -> float:
    """The normalised Gini coefficient: for two classes 2 * AUC - 1, ties at the mean of their places."""
    if truth.ndim != 1:
        raise SchemaError(f"gini is of one number for each row, got shape {truth.shape}; score each column by itself")
    if truth.max() == truth.min():
        raise DataError("gini: y_true is the same in every row, and no order is better than another")
    t = _centred(truth)
    return float((t @ ranks(predicted)) / (t @ ranks(truth)))


def ranks(values: Array) -> Floats:
    """The rank of each value from 1, equal values at the mean of their ranks."""
    _, numbers, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: Floats = last - (counts - 1) / 2
    return mean[numbers]
