"""Metrics of ordered lists: what was recommended, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.datasets._metrics.arrays import Array, Floats, as_numbers, same_length
from penstock.errors import DataError, SchemaError

__all__ = ["map_at", "ndcg_at"]


def map_at(truth: Any, predicted: Any, k: int) -> float:
    """Mean average precision of the first `k`: `truth` has one label or a list of them in each row.

    One label in each row and predictions of one shape are done at once; lists go row by row. What a list has twice
    counts where it is first.
    """
    name = f"map@{k}"
    truth, predicted = (given.to_numpy() if hasattr(given, "to_numpy") else given for given in (truth, predicted))
    if len(truth) != len(predicted):
        raise SchemaError(f"{name}: {len(truth)} rows of y_true and {len(predicted)} of y_pred; they must be as many")
    if not len(truth):
        raise SchemaError(f"{name}: y_true is empty; there is nothing to score")
    first = _labels(truth)
    lists = _lists(predicted)
    if first is not None and lists is not None:
        hits = lists[:, :k] == first[:, None]
        places = hits.argmax(axis=1) + 1.0
        return float(np.mean(np.where(hits.any(axis=1), 1 / places, 0)))
    return float(np.mean([_average_precision(*row, k, number) for number, row in enumerate(zip(truth, predicted))]))


def ndcg_at(truth: Any, scores: Any, k: int | None) -> float:
    """Discounted gain of the first `k` by score over the best there could be, the gain of an item being its relevance.

    Both have a row for each list and a column for each item. Items of one score share the places that they take. Lists
    without a relevant item count 0.
    """
    name = "ndcg" if k is None else f"ndcg@{k}"
    t, s = as_numbers(truth, "y_true", name), as_numbers(scores, "y_pred", name)
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
