"""Metrics of ordered lists: what was recommended, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.datasets.metrics.arrays import (
    Array,
    Floats,
    as_labels,
    as_numbers,
    class_numbers,
    refuse_no_flags,
    same_length,
)
from penstock.datasets.predictions import is_missing
from penstock.errors import DataError, SchemaError

__all__ = ["map_at", "ndcg_at"]


def map_at(truth: Any, predicted: Any, k: int, classes: Sequence[Any] | None = None) -> float:
    """Mean average precision of the first `k`: `truth` has one label or a list of them in each row.

    Predictions are a list of labels for each row, best first, or the scores of all classes (floats, a column for each
    in the order of `classes`); items of one score go by their columns. One label in each row and predictions of one
    shape are done at once; lists go row by row. What a list has twice counts where it is first.
    """
    name = f"map@{k}"
    truth, predicted = (given.to_numpy() if hasattr(given, "to_numpy") else given for given in (truth, predicted))
    if len(truth) != len(predicted):
        raise SchemaError(f"{name}: {len(truth)} rows of y_true and {len(predicted)} of y_pred; they must be as many")
    if not len(truth):
        raise SchemaError(f"{name}: y_true is empty; there is nothing to score")
    first = _labels(truth)
    lists = _lists(predicted)
    if lists is not None and lists.dtype.kind == "f" and (first is None or first.dtype.kind != "f"):
        return _map_of_scores(truth if first is None else first, lists, k, classes)
    _refuse_mixture(truth if first is None else first, predicted if lists is None else lists, name)
    if first is not None and lists is not None:
        hits = lists[:, :k] == first[:, None]
        places = hits.argmax(axis=1) + 1.0
        return float(np.mean(np.where(hits.any(axis=1), 1 / places, 0)))
    return float(np.mean([_average_precision(*row, k, number) for number, row in enumerate(zip(truth, predicted))]))


def ndcg_at(truth: Any, scores: Any, k: int | None, classes: Sequence[Any] | None = None) -> float:
    """Discounted gain of the first `k` by score over the best there could be, the gain of an item being its relevance.

    Both have a row for each list and a column for each item; of one label in each row only that class is relevant.
    Items of one score share the places that they take. Lists without a relevant item count 0.
    """
    name = "ndcg" if k is None else f"ndcg@{k}"
    s = as_numbers(scores, "y_pred", name)
    if np.ndim(truth) == 1 and s.ndim == 2:
        t = _relevance(as_labels(truth, "y_true", name), s, name, classes)
    else:
        t = as_numbers(truth, "y_true", name)
    same_length(t, s, name, same_shape=True)
    if t.ndim == 1:
        t, s = t[None], s[None]
    if (t < 0).any():
        row = int((t < 0).any(axis=1).argmax())
        raise DataError(f"{name}: y_true has a relevance below 0 in row {row}", row=row)
    discount = 1 / np.log2(np.arange(t.shape[1]) + 2)
    if k is not None:
        discount[k:] = 0
    best = -np.sort(-t, axis=1) @ discount
    gained = _gain(t, s, discount)
    return float(np.mean(np.divide(gained, best, out=np.zeros(len(best)), where=best > 0)))


def _relevance(truth: Array, scores: Floats, name: str, classes: Sequence[Any] | None) -> Floats:
    """1 in the column of each row's label, or the 0 and 1 that are given."""
    same_length(truth, scores, name)
    if truth.ndim == 2:
        same_length(truth, scores, name, same_shape=True)
        refuse_no_flags(truth, "y_true", name)
        return truth.astype(np.float64)
    return np.eye(scores.shape[1])[class_numbers(truth, scores.shape[1], name, classes)]


def _map_of_scores(truth: Any, given: Array, k: int, classes: Sequence[Any] | None) -> float:
    name = f"map@{k}"
    scores = as_numbers(given, "y_pred", name)
    if (scores == np.floor(scores)).all():
        raise SchemaError(
            f"{name}: y_pred has whole numbers as {given.dtype}, which may be labels or scores; give labels as whole "
            "numbers (.astype(int)), best first, or order classes by their scores yourself"
        )
    relevant = _relevance(as_labels(truth, "y_true", name), scores, name, classes)
    counts = relevant.sum(axis=1)
    if not counts.all():
        row = int((counts == 0).argmax())
        raise DataError(f"{name}: row {row} of y_true has no label; leave the row out", row=row)
    hits = np.take_along_axis(relevant, np.argsort(-scores, axis=1, kind="stable")[:, :k], axis=1)
    precisions = np.cumsum(hits, axis=1) / np.arange(1, hits.shape[1] + 1)
    return float(np.mean((precisions * hits).sum(axis=1) / np.minimum(counts, k)))


def _refuse_mixture(truth: Any, predicted: Any, name: str) -> None:
    """Raise if one side has texts and the other none, so that nothing could be found; or if a label is missing."""
    texts, others = _kinds(truth, "y_true", name), _kinds(predicted, "y_pred", name)
    if texts and others and not texts & others:
        raise SchemaError(
            f"{name}: {'y_true' if True in texts else 'y_pred'} has texts as labels and the other numbers, so none "
            "could be equal; turn class numbers into names first, or names into numbers"
        )


def _kinds(rows: Any, what: str, name: str) -> set[bool]:
    """Whether labels are texts: of some of them, of others not, or both."""
    if isinstance(rows, np.ndarray) and rows.dtype.kind in "biuUS":
        return {rows.dtype.kind in "US"}
    kinds = set()
    for number, row in enumerate(rows):
        for label in row if _is_list(row) else (row,):
            if is_missing(label):
                raise DataError(f"{name}: {what} has NaN or nothing as a label in row {number}", row=number)
            kinds.add(isinstance(label, str | bytes))
    return kinds


def _gain(relevance: Floats, scores: Floats, discount: Floats) -> Floats:
    """The discounted gain of each row: items of one score each get the mean of the discounts of their places."""
    order = np.argsort(-scores, axis=1, kind="stable")
    sorted_scores = np.take_along_axis(scores, order, axis=1)
    starts = np.ones(scores.shape, np.bool_)
    starts[:, 1:] = sorted_scores[:, 1:] != sorted_scores[:, :-1]
    group = np.cumsum(starts.ravel()) - 1
    spread = np.bincount(group, weights=np.tile(discount, len(scores))) / np.bincount(group)
    gains = np.take_along_axis(relevance, order, axis=1) * spread[group].reshape(scores.shape)
    total: Floats = gains.sum(axis=1)
    return total


def _average_precision(actual: Any, guessed: Any, k: int, row: int) -> float:
    relevant = set(actual) if _is_list(actual) else {actual}
    if not relevant:
        raise DataError(f"map@{k}: row {row} of y_true has no label; leave the row out", row=row)
    if not _is_list(guessed):
        raise SchemaError(f"map@{k}: row {row} of y_pred is {guessed!r:.60}; expected a list of labels, best first")
    found: set[Any] = set()
    total = 0.0
    for place, label in enumerate(list(guessed)[:k], start=1):
        if label in relevant and label not in found:
            found.add(label)
            total += len(found) / place
    return total / min(len(relevant), k)


def _is_list(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (isinstance(value, Sequence) and not isinstance(value, str | bytes))


def _labels(truth: Any) -> Array | None:
    if len(truth) and _is_list(truth[0]):
        return None
    return np.asarray(truth)


def _lists(predicted: Any) -> Array | None:
    """An array, if all lists are of one length; else None."""
    try:
        array = np.asarray(predicted)
    except ValueError:
        return None
    return array if array.ndim == 2 else None
