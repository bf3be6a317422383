"""The metrics that decide competitions, by the names they go by there: NumPy only, NaN and wrong shapes refused.

    get_metric("rmse")(y_true, y_pred)
    get_metric("Area Under the ROC Curve").greater_is_better
    get_metric("map@5"), get_metric("fbeta@0.5"), get_metric("pinball@0.9")

What a metric needs as predictions is in `needs`:

    labels           a label for each row, of the same kind as the true ones
    scores           a number for each row (two classes), or one for each row and class; only their order counts
    probabilities    the same, from 0 to 1, those of a row summing to 1
    values           a number for each row, or one for each row and target
    rankings         for each row a list of labels, best first, or the scores of its items
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock._suggest import did_you_mean
from penstock.datasets.metrics import classes as of_classes
from penstock.datasets.metrics import rankings as of_rankings
from penstock.datasets.metrics import values as of_values
from penstock.datasets.metrics.arrays import (
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
from penstock.datasets.spec import CompetitionType
from penstock.errors import ConfigError, SchemaError

__all__ = ["METRICS", "Metric", "Needs", "get_metric"]

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
    """A way to score predictions: `metric(y_true, y_pred)`.

    `classes` names the classes in the order of the columns of `y_pred`, the positive one last if there is one column;
    without it labels are in the order of their values.
    """

    name: str
    function: Score
    greater_is_better: bool
    needs: Needs
    types: frozenset[CompetitionType]
    """The competitions it goes with."""
    aliases: tuple[str, ...] = ()
    of_numbers: bool = False
    """Whether it goes by how far values lie apart, so that classes count by their values or numbers."""

    def __call__(self, y_true: Any, y_pred: Any, *, classes: Sequence[Any] | None = None) -> float:
        return self.function(y_true, y_pred, classes)

    def suits(self, competition_type: CompetitionType) -> bool:
        """Whether it goes with a competition of this type."""
        return CompetitionType(competition_type) in self.types

    def is_better(self, score: float, than: float) -> bool:
        """Whether one score beats another."""
        return score > than if self.greater_is_better else score < than


def get_metric(name: str | Metric) -> Metric:
    """The metric of that name, or of one of the names it goes by; `map@5` and the like carry their number with them."""
    if isinstance(name, Metric):
        return name
    plain, number = _spelled(name)
    found = _BY_ALIAS.get(_compact(plain))
    if found is None:
        known = [*METRICS, *(f"{one}@..." for one in _FAMILIES)]
        near = did_you_mean(_compact(plain), [_compact(one) for one in (*METRICS, *_FAMILIES)])
        raise ConfigError(f"{name!r} is not a metric that is known here; known are {known}{near}")
    if found in _FAMILIES:
        return _FAMILIES[found](number)
    if number is not None:
        raise ConfigError(f"{name!r}: {found} takes no number; those that do are {list(_FAMILIES)}")
    return METRICS[found]


# -- how each is given its arrays ------------------------------------------------------------------------------------


def _labels(name: str, score: Callable[[Array, Array], float], *, shape: Shape = "any") -> Score:
    def function(y_true: Any, y_pred: Any, classes: Sequence[Any] | None) -> float:
        return score(*_two_labels(name, y_true, y_pred, classes, shape))

    return function


def _two_labels(
    name: str, y_true: Any, y_pred: Any, classes: Sequence[Any] | None, shape: Shape
) -> tuple[Array, Array]:
    """Labels that can be compared: of one shape, of one kind, and no probabilities."""
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
            f"{name}: y_true has {truth.dtype} labels and y_pred {predicted.dtype}, so none could be equal; "
            "turn class numbers into names first, or names into numbers"
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
                f"{name} is for two classes, got the labels {list(classes)[:5]}; pass classes=[negative, positive], or "
                "use f1_macro for more than two"
            )
        return score(binary_truth(truth, name, classes), np.asarray(predicted == classes[1]))

    return function


def _of_scores(name: str, two: Callable[[Array, Floats], float], many: Callable[[Array, Floats], float]) -> Score:
    """One column is of the positive class; more are of the classes, or of labels of their own (averaged)."""

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
    return float(np.mean([of_classes.auc(numbers == k, scores[:, k]) for k in range(scores.shape[1])]))


def _multiclass_brier(numbers: Array, probabilities: Floats) -> float:
    return of_classes.brier(np.eye(probabilities.shape[1])[numbers], probabilities)


def _averaged(average: str) -> Callable[[Array, Array], float]:
    return lambda truth, predicted: of_classes.averaged_f(truth, predicted, average)


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
    c, v = of_classes, of_values
    labels("accuracy", c.accuracy, True, _LABELS, "categorization accuracy", "classification accuracy", "acc")
    labels("balanced_accuracy", c.balanced_accuracy, True, _ORDERED, "macro recall", "recall_macro", shape="one")
    for name, score in (("f1", c.binary_f), ("precision", c.precision), ("recall", c.recall)):
        others = ("f1 score", "f score", "f1_binary") if name == "f1" else ()
        add(name, _two_classes(name, score), True, "labels", two, *others)
    labels("f1_macro", _averaged("macro"), True, _LABELS, "macro f1", "macro f score", "macro f1 score")
    labels("f1_micro", _averaged("micro"), True, _LABELS, "micro f1", "micro f score", "micro f1 score")
    labels("f1_weighted", _averaged("weighted"), True, _LABELS, "weighted f1", "weighted f1 score")
    several = frozenset({CompetitionType.MULTILABEL_CLASSIFICATION})
    labels("f1_samples", c.f_of_rows, True, several, "mean f score", "mean f1 score", "samples f1", shape="many")
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
    values("rmse", v.rmse, False, "root mean squared error", "root mean square error", "rmsd")
    values("mse", v.mse, False, "mean squared error", "mean square error")
    values("rmsle", v.rmsle, False, "root mean squared logarithmic error", "root mean squared log error")
    values("mae", v.mae, False, "mean absolute error")
    values("medae", v.medae, False, "median absolute error")
    values("mape", v.mape, False, "mean absolute percentage error")
    values("smape", v.smape, False, "symmetric mean absolute percentage error")
    values("r2", v.r2, True, "r squared", "r2 score", "coefficient of determination")
    values("mcrmse", v.rmse, False, "mean columnwise root mean squared error", "mean columnwise rmse")
    values("pearson", v.pearson, True, "pearson correlation", "pearson correlation coefficient", alone=True)
    values("spearman", v.spearman, True, "spearmans rho", "spearman correlation", "spearmans rank correlation",
           "mean columnwise spearmans correlation", alone=True)  # fmt: skip
    add("gini", _values("gini", v.gini), True, "scores", _NUMBERS | two, "normalized gini", "normalised gini",
        "gini index", "normalized gini coefficient", of_numbers=True)  # fmt: skip
    return {metric.name: metric for metric in rows}


def _whole(name: str, number: float | None) -> int:
    if number is None or number < 1 or number != int(number):
        raise ConfigError(f"{name} needs how many are looked at, such as {name}@5, got {number!r}")
    return int(number)


def _map(number: float | None) -> Metric:
    k = _whole("map", number)
    return Metric(f"map@{k}", lambda t, p, c: of_rankings.map_at(t, p, k, c), True, "rankings", _RANKED)


def _ndcg(number: float | None) -> Metric:
    k = None if number is None else _whole("ndcg", number)
    name = "ndcg" if k is None else f"ndcg@{k}"
    return Metric(name, lambda t, p, c: of_rankings.ndcg_at(t, p, k, c), True, "rankings", _RANKED)


def _fbeta(number: float | None) -> Metric:
    if number is None or number <= 0:
        raise ConfigError(f"fbeta needs a beta above 0, such as fbeta@2, got {number!r}")
    name = f"fbeta@{number:g}"
    score = _two_classes(name, lambda t, p: of_classes.binary_f(t, p, number))
    return Metric(name, score, True, "labels", frozenset({_BINARY}))


def _pinball(number: float | None) -> Metric:
    if number is None or not 0 < number < 1:
        raise ConfigError(f"pinball needs a quantile between 0 and 1, such as pinball@0.9, got {number!r}")
    name = f"pinball@{number:g}"
    score = _values(name, lambda t, p: of_values.pinball(t, p, number))
    return Metric(name, score, False, "values", _NUMBERS, of_numbers=True)


_FAMILIES: Mapping[str, Callable[[float | None], Metric]] = {
    "map": _map,
    "ndcg": _ndcg,
    "fbeta": _fbeta,
    "pinball": _pinball,
}
"""Metrics that carry a number behind an @."""

METRICS: Mapping[str, Metric] = _table()
"""Those without a number, by name."""


def _compact(name: str) -> str:
    """Without what people write differently: case, dashes, blanks, apostrophes."""
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
        raise ConfigError(f"{name!r}: expected a number behind the @, got {number!r}") from None


_BY_ALIAS = {
    **{_compact(alias): one.name for one in METRICS.values() for alias in (one.name, *one.aliases)},
    **{name: name for name in _FAMILIES},
    "meanaverageprecision": "map",
    "normalizeddiscountedcumulativegain": "ndcg",
    "pinballloss": "pinball",
    "quantileloss": "pinball",
}
