"""Metrics of competitions by name: NumPy only; NaN and wrong shapes are refused.

    get_metric("rmse")(y_true, y_pred)
    get_metric("Area Under the ROC Curve").greater_is_better
    get_metric("map@5"), get_metric("fbeta@0.5"), get_metric("pinball@0.9")

`Metric.needs` is the form of predictions that a metric takes:

    labels           a label for each row, of the same type as the true ones
    scores           a number for each row (two classes), or one for each row and class; only their order counts
    probabilities    the same, from 0 to 1, summing to 1 in each row
    values           a number for each row, or one for each row and target
    rankings         a list of labels for each row, best first, or the scores of its items
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from penstock import plugins
from penstock._suggest import did_you_mean
from penstock.datasets import metric_functions as functions
from penstock.datasets.metric_functions import (
    Array,
    Floats,
    as_labels,
    as_numbers,
    binary_truth,
    class_numbers,
    refuse_fractions,
    refuse_no_flags,
    refuse_unknown,
    same_length,
)
from penstock.datasets.predictions import is_missing
from penstock.datasets.spec import CompetitionType
from penstock.errors import ConfigError, DataError, PluginError, SchemaError

Needs = Literal["labels", "scores", "probabilities", "values", "rankings"]
Score = Callable[[Any, Any, Sequence[Any] | None], float]
Shape = Literal["one", "many", "any"]
"""One label for each row, a column of 0 and 1 for each label, or either."""

_BINARY = CompetitionType.BINARY_CLASSIFICATION
_CLASSES = frozenset({_BINARY, CompetitionType.MULTICLASS_CLASSIFICATION})
_ORDERED = _CLASSES | {CompetitionType.ORDINAL_REGRESSION}
_LABELS = _ORDERED | {CompetitionType.MULTILABEL_CLASSIFICATION}
_NUMBERS = frozenset(
    {
        CompetitionType.REGRESSION,
        CompetitionType.MULTI_TARGET_REGRESSION,
        CompetitionType.ORDINAL_REGRESSION,
        CompetitionType.TIME_SERIES,
        CompetitionType.RANKING,
    }
)
_RANKED = frozenset(
    {
        CompetitionType.RANKING,
        CompetitionType.MULTICLASS_CLASSIFICATION,
        CompetitionType.MULTILABEL_CLASSIFICATION,
    }
)


@dataclass(frozen=True, slots=True)
class Metric:
    """Function that scores predictions: `metric(y_true, y_pred)`.

    `classes` are the classes in the order of the columns of `y_pred`, the positive one last if there is one column. By
    default labels are in the order of their values.
    """

    name: str
    function: Score
    greater_is_better: bool
    needs: Needs
    types: frozenset[CompetitionType]
    """Competition types that it fits."""
    aliases: tuple[str, ...] = ()
    of_numbers: bool = False
    """True if distances between values count, so that classes are compared by their values or numbers."""

    def __call__(self, y_true: Any, y_pred: Any, *, classes: Sequence[Any] | None = None) -> float:
        return self.function(y_true, y_pred, classes)

    def suits(self, competition_type: CompetitionType) -> bool:
        """True if it fits competitions of this type."""
        return CompetitionType(competition_type) in self.types

    def is_better(self, score: float, than: float) -> bool:
        """True if one score beats another."""
        return score > than if self.greater_is_better else score < than


def get_metric(name: str | Metric) -> Metric:
    """Metric by its name or an alias; names such as `map@5` include a number."""
    if isinstance(name, Metric):
        return name
    plain, number = _spelled(name)
    found = _BY_ALIAS.get(_compact(plain))
    if found is None and (own := _own(plain)) is not None:
        return own
    if found is None:
        known = [*METRICS, *_REGISTERED, *(f"{one}@..." for one in _FAMILIES)]
        near = did_you_mean(_compact(plain), [_compact(one) for one in (*METRICS, *_FAMILIES)])
        raise ConfigError(
            f"{name!r} is not a known metric; known: {known}{near}; register your own with register_metric(...), or as "
            "an entry point of penstock.metrics"
        )
    if found in _FAMILIES:
        return _FAMILIES[found](number)
    if number is not None:
        raise ConfigError(f"{name!r}: {found} takes no number; {list(_FAMILIES)} do")
    return METRICS[found]


def register_metric(
    name: str,
    function: Callable[[Any, Any], float],
    *,
    greater_is_better: bool,
    needs: Needs = "values",
    types: Iterable[CompetitionType | str] | None = None,
    replace: bool = False,
) -> Metric:
    """Metric `function(y_true, y_pred)` under a name, for `score`, `submission`, specs and the registry.

        register_metric("wmae", lambda truth, predicted: ..., greater_is_better=False)

    `needs` is the form of predictions (see this module), `types` the competition types it fits (default: all). The name
    is known in this process; a package makes it known everywhere with an entry point `name = "package:METRIC"` in the
    group `penstock.metrics`. A name that exists is refused unless `replace` is set.
    """
    if not callable(function):
        raise ConfigError(f"the metric {name!r} must be a function of y_true and y_pred, got {function!r}")
    if needs not in get_args(Needs):
        raise ConfigError(f"needs must be one of {list(get_args(Needs))}, got {needs!r}")
    plain, number = _spelled(name)
    key = _compact(plain)
    if not key or number is not None:
        raise ConfigError(f"the name of a metric must have letters or digits and no @, got {name!r}")
    if key in _BY_ALIAS or (key in _REGISTERED and not replace):
        known = _BY_ALIAS.get(key, name)
        raise ConfigError(f"a metric is called {known!r} already; choose another name than {name!r}")
    suited = frozenset(CompetitionType) if types is None else frozenset(map(CompetitionType, types))

    def score(y_true: Any, y_pred: Any, classes: Sequence[Any] | None) -> float:
        value = function(y_true, y_pred)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise DataError(f"the metric {name!r} returned {value!r:.80}, expected a number") from None

    _REGISTERED[key] = Metric(name, score, greater_is_better, needs, suited, of_numbers=needs == "values")
    return _REGISTERED[key]


def _own(name: str) -> Metric | None:
    """Metric that was registered here or by a plugin."""
    if (found := _REGISTERED.get(_compact(name))) is not None:
        return found
    for plugin in plugins.installed():
        if plugin.group == "metrics" and _compact(plugin.name) == _compact(name):
            metric = plugins.find("metrics", plugin.name)
            if not isinstance(metric, Metric):
                raise PluginError(f"plugin {plugin.name!r} (penstock.metrics) is {metric!r:.80}, expected a Metric")
            return metric
    return None


_REGISTERED: dict[str, Metric] = {}
"""Metrics of the user, by compact name."""


# -- inputs of each kind of metric -----------------------------------------------------------------------------------


def _labels(name: str, score: Callable[[Array, Array], float], *, shape: Shape = "any") -> Score:
    return lambda y_true, y_pred, classes: score(*_two_labels(name, y_true, y_pred, classes, shape))


def _two_labels(
    name: str, y_true: Any, y_pred: Any, classes: Sequence[Any] | None, shape: Shape
) -> tuple[Array, Array]:
    """Comparable labels: of one shape and one type, and no probabilities."""
    truth, predicted = as_labels(y_true, "y_true", name), as_labels(y_pred, "y_pred", name)
    same_length(truth, predicted, name)
    if shape != "any" and truth.ndim != (1 if shape == "one" else 2):
        wanted = "one label for each row" if shape == "one" else "a column of 0 and 1 for each label"
        raise SchemaError(f"{name} needs {wanted}, got y_true of shape {truth.shape}")
    refuse_fractions(truth, predicted, name)
    same_length(truth, predicted, name, same_shape=True)
    for what, labels in (("y_true", truth), ("y_pred", predicted)):
        if labels.ndim == 2:
            refuse_no_flags(labels, what, name)
        elif classes is not None:
            refuse_unknown(labels, what, classes, name)
    if (truth.dtype.kind in "US") != (predicted.dtype.kind in "US"):
        raise SchemaError(
            f"{name}: y_true has {truth.dtype} labels and y_pred {predicted.dtype}; convert class numbers to names, or "
            "names to numbers"
        )
    return truth, predicted


def _two_classes(name: str, score: Callable[[Array, Array], float]) -> Score:
    """Labels of two classes, as flags of the positive one."""

    def function(y_true: Any, y_pred: Any, classes: Sequence[Any] | None) -> float:
        truth, predicted = _two_labels(name, y_true, y_pred, classes, "one")
        if classes is None:
            both = np.unique(np.concatenate([truth, predicted]))
            classes = [0, 1] if both.dtype.kind in "biuf" and set(both.tolist()) <= {0, 1} else both.tolist()
        if len(classes) != 2:
            raise SchemaError(
                f"{name} is for two classes, got labels {list(classes)[:5]}; pass classes=[negative, positive], or use "
                "f1_macro"
            )
        return score(binary_truth(truth, name, classes), np.asarray(predicted == classes[1]))

    return function


def _of_scores(name: str, two: Callable[[Array, Floats], float], many: Callable[[Array, Floats], float]) -> Score:
    """One column is for the positive class; several are for the classes, or for separate labels (averaged)."""

    def function(y_true: Any, y_pred: Any, classes: Sequence[Any] | None) -> float:
        truth, predicted = as_labels(y_true, "y_true", name), as_numbers(y_pred, "y_pred", name)
        same_length(truth, predicted, name)
        if truth.ndim == 2:
            same_length(truth, predicted, name, same_shape=True)
            columns = range(truth.shape[1])
            return float(np.mean([two(binary_truth(truth[:, i], name, (0, 1)), predicted[:, i]) for i in columns]))
        if predicted.ndim == 1:
            return two(binary_truth(truth, name, classes), predicted)
        return many(class_numbers(truth, predicted.shape[1], name, classes), predicted)

    return function


def _values(name: str, score: Callable[[Floats, Floats], float], *, one_column: bool = False) -> Score:
    def function(y_true: Any, y_pred: Any, _: Sequence[Any] | None) -> float:
        truth, predicted = as_numbers(y_true, "y_true", name), as_numbers(y_pred, "y_pred", name)
        same_length(truth, predicted, name, same_shape=True)
        if one_column and truth.ndim == 2:
            return float(np.mean([score(truth[:, i], predicted[:, i]) for i in range(truth.shape[1])]))
        return score(truth, predicted)

    return function


def _one_against_rest(numbers: Array, scores: Floats) -> float:
    return float(np.mean([functions.auc(numbers == k, scores[:, k]) for k in range(scores.shape[1])]))


def _multiclass_brier(numbers: Array, probabilities: Floats) -> float:
    return functions.brier(np.eye(probabilities.shape[1])[numbers], probabilities)


# -- the table -------------------------------------------------------------------------------------------------------


def _table() -> dict[str, Metric]:
    rows: list[Metric] = []

    def add(
        name: str, function: Score, up: bool, needs: Needs, types: frozenset[CompetitionType], *aliases: str,
        of_numbers: bool = False,
    ) -> None:  # fmt: skip
        rows.append(Metric(name, function, up, needs, types, aliases, of_numbers))

    def labels(
        name: str, score: Callable[[Array, Array], float], up: bool, types: frozenset[CompetitionType], *aliases: str,
        shape: Shape = "any",
    ) -> None:  # fmt: skip
        add(name, _labels(name, score, shape=shape), up, "labels", types, *aliases)

    def values(
        name: str, score: Callable[[Floats, Floats], float], up: bool, *aliases: str, alone: bool = False
    ) -> None:
        add(name, _values(name, score, one_column=alone), up, "values", _NUMBERS, *aliases, of_numbers=True)

    two, many = frozenset({_BINARY}), _CLASSES | {CompetitionType.MULTILABEL_CLASSIFICATION}
    c, f_score = functions, functions.averaged_f
    labels("accuracy", c.accuracy, True, _LABELS, "categorization accuracy", "classification accuracy", "acc")
    labels("balanced_accuracy", c.balanced_accuracy, True, _ORDERED, "macro recall", "recall_macro", shape="one")
    for name, score in (("f1", c.binary_f), ("precision", c.precision), ("recall", c.recall)):
        others = ("f1 score", "f score", "f1_binary") if name == "f1" else ()
        add(name, _two_classes(name, score), True, "labels", two, *others)
    labels("f1_macro", partial(f_score, average="macro"), True, _LABELS, "macro f1", "macro f score", "macro f1 score")
    labels("f1_micro", partial(f_score, average="micro"), True, _LABELS, "micro f1", "micro f score", "micro f1 score")
    labels("f1_weighted", partial(f_score, average="weighted"), True, _LABELS, "weighted f1", "weighted f1 score")
    several = frozenset({CompetitionType.MULTILABEL_CLASSIFICATION})
    labels(
        "f1_samples",
        partial(f_score, average="samples"),
        True,
        several,
        "mean f score",
        "mean f1 score",
        "samples f1",
        shape="many",
    )
    labels("hamming", c.hamming, False, _LABELS, "hamming loss")
    labels("mcc", c.mcc, True, _ORDERED, "matthews correlation coefficient", "matthews", "matthews corrcoef",
           shape="one")  # fmt: skip
    labels("kappa", c.cohen_kappa, True, _ORDERED, "cohen kappa", "cohens kappa", shape="one")
    ordered = _ORDERED | {CompetitionType.REGRESSION}
    add("qwk", _values("qwk", c.quadratic_kappa, one_column=True), True, "labels", ordered, "quadratic weighted kappa",
        "weighted kappa", "quadratic kappa", of_numbers=True)  # fmt: skip
    add("auc", _of_scores("auc", c.auc, _one_against_rest), True, "scores", many, "roc auc", "auroc", "roc auc score",
        "area under roc curve", "area under the roc curve", "area under receiver operating characteristic curve",
        "mean columnwise auc", "mean column wise roc auc", "mean columnwise roc auc", "mcauc")  # fmt: skip
    add("log_loss", _of_scores("log_loss", c.binary_log_loss, c.log_loss), False, "probabilities", many, "logloss",
        "multiclass loss", "multi class log loss", "multiclass log loss", "cross entropy", "binary cross entropy",
        "mean columnwise log loss")  # fmt: skip
    add("brier", _of_scores("brier", lambda t, p: c.brier(t.astype(np.float64), p), _multiclass_brier), False,
        "probabilities", many, "brier score", "brier score loss")  # fmt: skip
    values("rmse", c.rmse, False, "root mean squared error", "root mean square error", "rmsd")
    values("mse", c.mse, False, "mean squared error", "mean square error")
    values("rmsle", c.rmsle, False, "root mean squared logarithmic error", "root mean squared log error")
    values("mae", c.mae, False, "mean absolute error")
    values("medae", c.medae, False, "median absolute error")
    values("mape", c.mape, False, "mean absolute percentage error")
    values("smape", c.smape, False, "symmetric mean absolute percentage error")
    values("r2", c.r2, True, "r squared", "r2 score", "coefficient of determination")
    values("mcrmse", c.rmse, False, "mean columnwise root mean squared error", "mean columnwise rmse")
    values("pearson", c.pearson, True, "pearson correlation", "pearson correlation coefficient", alone=True)
    values("spearman", c.spearman, True, "spearmans rho", "spearman correlation", "spearmans rank correlation",
           "mean columnwise spearmans correlation", alone=True)  # fmt: skip
    add("gini", _values("gini", c.gini), True, "scores", _NUMBERS | two, "normalized gini", "normalised gini",
        "gini index", "normalized gini coefficient", of_numbers=True)  # fmt: skip
    return {metric.name: metric for metric in rows}


def _whole(name: str, number: float | None) -> int:
    if number is None or number < 1 or number != int(number):
        raise ConfigError(f"{name} needs a positive count, such as {name}@5, got {number!r}")
    return int(number)


def _map(number: float | None) -> Metric:
    k = _whole("map", number)
    return Metric(f"map@{k}", lambda t, p, c: map_at(t, p, k, c), True, "rankings", _RANKED)


def _ndcg(number: float | None) -> Metric:
    k = None if number is None else _whole("ndcg", number)
    name = "ndcg" if k is None else f"ndcg@{k}"
    return Metric(name, lambda t, p, c: ndcg_at(t, p, k, c), True, "rankings", _RANKED)


def _fbeta(number: float | None) -> Metric:
    if number is None or number <= 0:
        raise ConfigError(f"fbeta needs a beta above 0, such as fbeta@2, got {number!r}")
    name = f"fbeta@{number:g}"
    score = _two_classes(name, lambda t, p: functions.binary_f(t, p, number))
    return Metric(name, score, True, "labels", frozenset({_BINARY}))


def _pinball(number: float | None) -> Metric:
    if number is None or not 0 < number < 1:
        raise ConfigError(f"pinball needs a quantile between 0 and 1, such as pinball@0.9, got {number!r}")
    name = f"pinball@{number:g}"
    score = _values(name, lambda t, p: functions.pinball(t, p, number))
    return Metric(name, score, False, "values", _NUMBERS, of_numbers=True)


_FAMILIES: Mapping[str, Callable[[float | None], Metric]] = {
    "map": _map,
    "ndcg": _ndcg,
    "fbeta": _fbeta,
    "pinball": _pinball,
}
"""Metrics with a number after an @."""

METRICS: Mapping[str, Metric] = _table()
"""Metrics without a number, by name."""


def _compact(name: str) -> str:
    """Name without case, dashes, blanks and apostrophes."""
    return re.sub(r"[^a-z0-9]+", "", name.lower())


def _spelled(name: str) -> tuple[str, float | None]:
    """`MAP@{5}` is map and 5."""
    if not isinstance(name, str):
        raise ConfigError(f"a metric is given by its name, got {name!r}")
    plain, at, number = name.partition("@")
    if not at:
        return plain, None
    try:
        return plain, float(number.strip(" {}"))
    except ValueError:
        raise ConfigError(f"{name!r}: expected a number after the @, got {number!r}") from None


_BY_ALIAS = {
    **{_compact(alias): one.name for one in METRICS.values() for alias in (one.name, *one.aliases)},
    **{name: name for name in _FAMILIES},
    "meanaverageprecision": "map",
    "normalizeddiscountedcumulativegain": "ndcg",
    "pinballloss": "pinball",
    "quantileloss": "pinball",
}


def map_at(truth: Any, predicted: Any, k: int, classes: Sequence[Any] | None = None) -> float:
    """Mean average precision at `k`; `truth` has one label or a list of labels in each row.

    Predictions are a list of labels for each row, best first, or the scores of all classes (floats, a column for each
    in the order of `classes`); ties keep the order of the columns. A label that a list repeats counts once, at its
    first place.
    """
    name = f"map@{k}"
    truth, predicted = (given.to_numpy() if hasattr(given, "to_numpy") else given for given in (truth, predicted))
    if len(truth) != len(predicted):
        raise SchemaError(f"{name}: y_true has {len(truth)} rows and y_pred {len(predicted)}; they must be equal")
    if not len(truth):
        raise SchemaError(f"{name}: y_true is empty")
    first = None if len(truth) and _is_list(truth[0]) else np.asarray(truth)
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
    """Discounted cumulative gain at `k` over the best possible one; the gain of an item is its relevance.

    Both arrays have a row for each list and a column for each item; with one label per row only that class is relevant.
    Tied items share their places. A list without a relevant item counts 0.
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
    """1 in the column of each row's label, or the given 0 and 1."""
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
            f"{name}: y_pred has integers as {given.dtype}, which may be labels or scores; pass labels as integers "
            "(.astype(int)), best first, or order the classes by score"
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
    """Raise if one side has text labels and the other none, or if a label is missing."""
    texts, others = _kinds(truth, "y_true", name), _kinds(predicted, "y_pred", name)
    if texts and others and not texts & others:
        raise SchemaError(
            f"{name}: of y_true and y_pred one has text labels and the other numbers; convert class numbers to names, "
            "or names to numbers"
        )


def _kinds(rows: Any, what: str, name: str) -> set[bool]:
    """{True} if labels are text, {False} if they are not, or both."""
    if isinstance(rows, np.ndarray) and rows.dtype.kind in "biuUS":
        return {rows.dtype.kind in "US"}
    kinds = set()
    for number, row in enumerate(rows):
        for label in row if _is_list(row) else (row,):
            if is_missing(label):
                raise DataError(f"{name}: {what} has NaN or no label in row {number}", row=number)
            kinds.add(isinstance(label, str | bytes))
    return kinds


def _gain(relevance: Floats, scores: Floats, discount: Floats) -> Floats:
    """Discounted gain of each row; tied items get the mean discount of their places."""
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


def _lists(predicted: Any) -> Array | None:
    """Array of lists of equal length; else None."""
    try:
        array = np.asarray(predicted)
    except ValueError:
        return None
    return array if array.ndim == 2 else None
