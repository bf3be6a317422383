"""Metrics: against scikit-learn on drawn data where it has them, against numbers worked out by hand elsewhere."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lazy_modules import LazyModule

from penstock.datasets.base import CompetitionType
from penstock.datasets.metrics import METRICS, get_metric
from penstock.errors import ConfigError, DataError, SchemaError

sk = LazyModule("sklearn.metrics")
stats = LazyModule("scipy.stats")

quickly = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def drawn(seed: int, classes: int = 3, most: int = 40) -> tuple[np.random.Generator, int, np.ndarray[Any, Any]]:
    """A generator, a number of rows, and labels of which every class is there."""
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(classes, most))
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, rows - classes)])
    rng.shuffle(labels)
    return rng, rows, labels


def quietly(function: Any, *args: Any, **options: Any) -> float:
    """scikit-learn warns of what it then defines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(function(*args, **options))


@pytest.mark.parametrize(
    ("name", "reference", "options"),
    [
        ("accuracy", sk.function("accuracy_score"), {}),
        ("balanced_accuracy", sk.function("balanced_accuracy_score"), {}),
        ("f1_macro", sk.function("f1_score"), {"average": "macro"}),
        ("f1_micro", sk.function("f1_score"), {"average": "micro"}),
        ("f1_weighted", sk.function("f1_score"), {"average": "weighted"}),
        ("hamming", sk.function("hamming_loss"), {}),
        ("mcc", sk.function("matthews_corrcoef"), {}),
    ],
)
@given(seed=seeds, as_text=st.booleans())
@quickly
def test_metrics_of_labels_are_those_of_scikit_learn(
    name: str, reference: Any, options: dict[str, Any], seed: int, as_text: bool
) -> None:
    rng, rows, truth = drawn(seed)
    predicted = np.where(rng.random(rows) < 0.5, truth, rng.integers(0, 4, rows))  # a class nobody has, too
    if as_text:
        truth, predicted = (np.array(["cat", "dog", "eel", "fox"])[labels] for labels in (truth, predicted))
    assert get_metric(name)(truth, predicted) == pytest.approx(quietly(reference, truth, predicted, **options))


@pytest.mark.parametrize(
    ("name", "reference", "options"),
    [
        ("f1", sk.function("f1_score"), {}),
        ("precision", sk.function("precision_score"), {}),
        ("recall", sk.function("recall_score"), {}),
        ("fbeta@2", sk.function("fbeta_score"), {"beta": 2}),
        ("fbeta@0.5", sk.function("fbeta_score"), {"beta": 0.5}),
        ("kappa", sk.function("cohen_kappa_score"), {}),
    ],
)
@given(seed=seeds)
@quickly
def test_metrics_of_two_classes_are_those_of_scikit_learn(
    name: str, reference: Any, options: dict[str, Any], seed: int
) -> None:
    rng, rows, truth = drawn(seed, classes=2)
    predicted = rng.integers(0, 2, rows) if seed % 5 else np.zeros(rows, np.int64)  # also never the positive one
    assert get_metric(name)(truth, predicted) == pytest.approx(quietly(reference, truth, predicted, **options))


@given(seed=seeds, columns=st.sampled_from(["macro", "micro", "weighted", "samples"]))
@quickly
def test_f1_of_several_labels_is_that_of_scikit_learn(seed: int, columns: str) -> None:
    rng = np.random.default_rng(seed)
    truth, predicted = rng.integers(0, 2, (2, int(rng.integers(1, 20)), 4))
    expected = quietly(sk.f1_score, truth, predicted, average=columns, zero_division=0)
    assert get_metric(f"f1_{columns}")(truth, predicted) == pytest.approx(expected)
    assert get_metric("accuracy")(truth, predicted) == pytest.approx(sk.accuracy_score(truth, predicted))
    assert get_metric("hamming")(truth, predicted) == pytest.approx(sk.hamming_loss(truth, predicted))


@given(seed=seeds, levels=st.integers(1, 8))
@quickly
def test_auc_counts_ties_as_scikit_learn_does(seed: int, levels: int) -> None:
    rng, rows, truth = drawn(seed, classes=2)
    scores = rng.integers(0, levels, rows) / levels
    assert get_metric("auc")(truth, scores) == pytest.approx(sk.roc_auc_score(truth, scores))
    named = np.array(["no", "yes"])[truth]
    assert get_metric("auc")(named, scores) == pytest.approx(sk.roc_auc_score(truth, scores))


@given(seed=seeds)
@quickly
def test_auc_and_log_loss_of_several_classes_are_those_of_scikit_learn(seed: int) -> None:
    rng, rows, truth = drawn(seed, classes=4)
    probabilities = rng.dirichlet([0.8] * 4, rows).clip(1e-9)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    expected = sk.roc_auc_score(truth, probabilities, multi_class="ovr", average="macro", labels=range(4))
    assert get_metric("auc")(truth, probabilities) == pytest.approx(expected)
    expected = sk.log_loss(truth, probabilities, labels=range(4))
    assert get_metric("log_loss")(truth, probabilities) == pytest.approx(expected)
    named = np.array(["d", "c", "b", "a"])
    reordered = get_metric("log_loss")(named[truth], probabilities, classes=named.tolist())
    assert reordered == pytest.approx(expected)


@given(seed=seeds)
@quickly
def test_log_loss_and_brier_of_two_classes_are_those_of_scikit_learn(seed: int) -> None:
    rng, rows, truth = drawn(seed, classes=2)
    probabilities = rng.uniform(1e-6, 1 - 1e-6, rows)
    assert get_metric("log_loss")(truth, probabilities) == pytest.approx(sk.log_loss(truth, probabilities))
    assert get_metric("brier")(truth, probabilities) == pytest.approx(sk.brier_score_loss(truth, probabilities))


@given(seed=seeds)
@quickly
def test_columnwise_auc_is_the_mean_of_the_columns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = np.concatenate([np.zeros((1, 3)), np.ones((1, 3)), rng.integers(0, 2, (20, 3))]).astype(np.int64)
    scores = rng.random(truth.shape)
    each = [sk.roc_auc_score(truth[:, i], scores[:, i]) for i in range(3)]
    assert get_metric("mean column-wise ROC AUC")(truth, scores) == pytest.approx(np.mean(each))


@given(seed=seeds, low=st.integers(-2, 3))
@quickly
def test_quadratic_kappa_measures_distance_between_ratings_themselves(seed: int, low: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(2, 40))
    truth, predicted = low + rng.integers(0, 5, (2, rows))
    predicted[0] = truth[0] + 1 if truth[0] < low + 4 else truth[0] - 1
    span = range(low, low + 5)  # all ratings there may be: without them scikit-learn goes by rank
    expected = sk.cohen_kappa_score(truth, predicted, labels=span, weights="quadratic")
    assert get_metric("Quadratic Weighted Kappa")(truth, predicted) == pytest.approx(expected)


def test_kappa_of_one_and_the_same_rating_is_one() -> None:
    assert get_metric("qwk")([3, 3, 3], [3, 3, 3]) == 1.0
    assert get_metric("kappa")([3, 3, 3], [3, 3, 3]) == 1.0


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("rmse", sk.function("root_mean_squared_error")),
        ("mse", sk.function("mean_squared_error")),
        ("mae", sk.function("mean_absolute_error")),
        ("medae", sk.function("median_absolute_error")),
        ("mape", sk.function("mean_absolute_percentage_error")),
        ("r2", sk.function("r2_score")),
        ("rmsle", sk.function("root_mean_squared_log_error")),
        ("pinball@0.9", lambda t, p: sk.mean_pinball_loss(t, p, alpha=0.9)),
        ("pinball@0.1", lambda t, p: sk.mean_pinball_loss(t, p, alpha=0.1)),
        ("spearman", lambda t, p: stats.spearmanr(t, p).statistic),
        ("pearson", lambda t, p: stats.pearsonr(t, p).statistic),
    ],
)
@given(seed=seeds)
@quickly
def test_metrics_of_numbers_are_those_of_scikit_learn_and_scipy(name: str, reference: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth, predicted = rng.integers(1, 9, (2, int(rng.integers(3, 40)))).astype(float)
    truth[:2], predicted[:2] = (1, 2), (2, 7)
    assert get_metric(name)(truth, predicted) == pytest.approx(float(reference(truth, predicted)))


@given(seed=seeds)
@quickly
def test_metrics_of_several_targets_average_over_columns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth, predicted = rng.normal(size=(2, 20, 3))
    columns = [np.sqrt(np.mean((truth[:, i] - predicted[:, i]) ** 2)) for i in range(3)]
    assert get_metric("MCRMSE")(truth, predicted) == pytest.approx(np.mean(columns))
    assert get_metric("rmse")(truth, predicted) == pytest.approx(sk.root_mean_squared_error(truth, predicted))
    assert get_metric("r2")(truth, predicted) == pytest.approx(sk.r2_score(truth, predicted))
    assert get_metric("mae")(truth, predicted) == pytest.approx(sk.mean_absolute_error(truth, predicted))
    assert get_metric("medae")(truth, predicted) == pytest.approx(sk.median_absolute_error(truth, predicted))


def test_r2_of_a_constant_truth_is_one_if_met_and_else_zero() -> None:
    assert get_metric("r2")([5, 5], [5, 5]) == 1.0
    assert get_metric("r2")([5, 5], [5, 6]) == 0.0


@given(seed=seeds, levels=st.integers(2, 9))
@quickly
def test_gini_of_two_classes_is_twice_the_auc_less_one(seed: int, levels: int) -> None:
    rng, rows, truth = drawn(seed, classes=2)
    scores = rng.integers(0, levels, rows)
    assert get_metric("normalized gini")(truth, scores) == pytest.approx(2 * sk.roc_auc_score(truth, scores) - 1)


def test_gini_of_numbers_is_one_for_the_right_order_and_minus_one_for_the_reverse() -> None:
    claims = [0.0, 10.0, 3.0, 250.0]
    assert get_metric("gini")(claims, [1, 3, 2, 4]) == pytest.approx(1)
    assert get_metric("gini")(claims, [4, 2, 3, 1]) == pytest.approx(-1)


def test_smape_is_in_percent_of_the_mean_size() -> None:
    # |100 - 110| / 105 and |50 - 25| / 37.5, and 0 for 0: the mean of 9.5238 %, 66.6667 % and 0 %.
    assert get_metric("smape")([100, 50, 0], [110, 25, 0]) == pytest.approx((100 / 10.5 + 200 / 3 + 0) / 3)


@given(seed=seeds, k=st.integers(1, 6), levels=st.integers(1, 5))
@quickly
def test_ndcg_is_that_of_scikit_learn_ties_included(seed: int, k: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 4, (4, 5)).astype(float)
    scores = rng.integers(0, levels, (4, 5)).astype(float)
    assert get_metric(f"NDCG@{k}")(truth, scores) == pytest.approx(sk.ndcg_score(truth, scores, k=k))
    assert get_metric("ndcg")(truth, scores) == pytest.approx(sk.ndcg_score(truth, scores))


def test_map_counts_where_the_right_label_stands() -> None:
    truth = np.array([1, 2, 3])
    guesses = np.array([[1, 9, 8], [9, 2, 8], [9, 8, 7]])
    assert get_metric("MAP@3")(truth, guesses) == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert get_metric("map@{1}")(truth, guesses) == pytest.approx(1 / 3)
    assert get_metric("map@3")(truth.tolist(), [[1], [9, 2], []]) == pytest.approx((1 + 1 / 2 + 0) / 3)


@given(seed=seeds, k=st.integers(1, 5))
@quickly
def test_map_is_the_same_row_by_row_and_at_once(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    truth, guesses = rng.integers(0, 5, 12), rng.integers(0, 5, (12, 4))
    at_once = get_metric(f"map@{k}")(truth, guesses)
    assert at_once == pytest.approx(get_metric(f"map@{k}")([[label] for label in truth.tolist()], guesses.tolist()))
    assert at_once == pytest.approx(get_metric(f"map@{k}")(pd.Series(truth, index=range(5, 17)), guesses))


def test_map_of_several_right_labels_counts_each_once() -> None:
    # Hits in places 1 and 3: (1/1 + 2/3) / min(2 labels, 3).
    assert get_metric("map@3")([["a", "b"]], [["a", "x", "b"]]) == pytest.approx((1 + 2 / 3) / 2)
    assert get_metric("map@3")([["a", "b"]], [["a", "a", "b"]]) == pytest.approx((1 + 2 / 3) / 2)
    assert get_metric("map@1")([["a", "b"]], [["a"]]) == pytest.approx(1)


def test_map_of_scores_is_that_of_the_classes_in_their_order() -> None:
    rng = np.random.default_rng(0)
    scores, truth = rng.random((20, 4)), rng.integers(0, 4, 20)
    order = np.argsort(-scores, axis=1)
    assert get_metric("map@3")(truth, scores) == pytest.approx(get_metric("map@3")(truth, order))
    names = np.array(["d", "b", "c", "a"])
    named = get_metric("map@3")(names[truth], scores, classes=names.tolist())
    assert named == pytest.approx(get_metric("map@3")(truth, order))
    several = rng.integers(0, 2, (20, 4)) | np.eye(4, dtype=int)[truth]
    lists = [np.flatnonzero(row).tolist() for row in several]
    assert get_metric("map@3")(several, scores) == pytest.approx(get_metric("map@3")(lists, order.tolist()))
    one_hot = sk.ndcg_score(np.eye(4)[truth], scores, k=2)
    assert get_metric("ndcg@2")(truth, scores) == pytest.approx(one_hot)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Root Mean Squared Error", "rmse"),
        ("RMSLE", "rmsle"),
        ("Area Under Receiver Operating Characteristic Curve", "auc"),
        ("ROC-AUC", "auc"),
        ("LogLoss", "log_loss"),
        ("Multiclass Loss", "log_loss"),
        ("Categorization Accuracy", "accuracy"),
        ("Macro F-Score", "f1_macro"),
        ("Matthews Correlation Coefficient", "mcc"),
        ("QuadraticWeightedKappa", "qwk"),
        ("Spearman's Rho", "spearman"),
        ("MAP@{12}", "map@12"),
    ],
)
def test_metrics_go_by_the_names_competitions_use(written: str, name: str) -> None:
    assert get_metric(written).name == name


def test_an_unknown_metric_is_refused_with_what_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"'acuracy'.*'accuracy'"):
        get_metric("acuracy")
    with pytest.raises(ConfigError, match="'rmse@5'"):
        get_metric("rmse@5")
    with pytest.raises(ConfigError, match=r"\bmap\b"):
        get_metric("map")
    with pytest.raises(ConfigError, match="'map@k'"):
        get_metric("map@k")


def test_every_alias_is_of_one_metric() -> None:
    names = [alias for metric in METRICS.values() for alias in (metric.name, *metric.aliases)]
    assert len(names) == len(set(names))
    assert all(get_metric(alias).name == metric.name for metric in METRICS.values() for alias in metric.aliases)


@pytest.mark.parametrize("name", sorted(METRICS))
def test_no_metric_takes_nan_or_rows_that_do_not_match(name: str) -> None:
    truth, other = np.array([0, 1, 1, 0]), np.array([1.0, 0.0, 1.0])
    many = METRICS[name].types == frozenset({CompetitionType.MULTILABEL_CLASSIFICATION})
    if many:
        truth, other = np.stack([truth, truth], 1), np.stack([other, other], 1)
    with pytest.raises(SchemaError, match="y_true"):
        METRICS[name](truth, other)
    bad = np.where(np.arange(truth.size).reshape(truth.shape) == 2, np.nan, 0.5)
    with pytest.raises(DataError, match="NaN"):
        METRICS[name](truth, bad)
    with pytest.raises(SchemaError, match="empty"):
        METRICS[name]([], [])


@pytest.mark.parametrize(
    ("name", "truth", "predicted", "problem"),
    [
        ("auc", [1, 1], [0.1, 0.2], "y_true"),
        ("auc", ["a", "b", "c"], [0.1, 0.2, 0.3], "classes="),
        ("log_loss", [0, 1], [0.5, 1.5], "y_pred"),
        ("log_loss", [0, 1], [[0.5, 0.9], [0.5, 0.5]], "log_loss"),
        ("log_loss", ["a", "b"], [[0.2, 0.3, 0.5]] * 2, "classes="),
        ("rmsle", [1, 2], [1, -3], "y_pred"),
        ("mape", [0, 1], [1, 1], "y_true"),
        ("qwk", [1, 2], [1, 1.5], "y_pred"),
        ("f1", [0, 1, 2], [0, 1, 2], "f1_macro"),
        ("accuracy", ["a", "b"], [0, 1], "y_true"),
        ("accuracy", [0, None], [0, 1], r"row 1\b"),
        ("rmse", ["x", "y"], [1, 2], "y_true"),
        ("rmse", [[1, 2]], [[1, 2, 3]], "y_true"),
        ("pearson", [1, 1], [1, 2], "y_true"),
        ("gini", [1, 1], [1, 2], "y_true"),
        ("gini", [[1, 2], [2, 1]], [[1, 2], [2, 1]], r"\bgini\b"),
        ("accuracy", [0, 1], [0.2, 0.9], "y_pred"),
        ("accuracy", ["a", "b"], [0.2, 0.9], "y_pred"),
        ("accuracy", [0, 1], [[0.2, 0.8], [0.6, 0.4]], "argmax"),
        ("precision", [0, 1], [0.2, 0.9], "y_pred"),
        ("kappa", [0, 1], [0.2, 0.9], "y_pred"),
        ("hamming", [[0, 1]], [[0.2, 0.9]], "y_pred"),
        ("f1_micro", [[0, 1]], [[0.2, 0.9]], "y_pred"),
        ("f1_micro", [[0, 2]], [[0, 1]], "f1_micro"),
        ("f1_micro", [["0", "1"]], [["1", "0"]], "f1_micro"),
        ("mcc", [[0, 1]], [[0, 1]], r"\bmcc\b"),
        ("kappa", [[0, 1]], [[0, 1]], r"\bkappa\b"),
        ("balanced_accuracy", [[0, 1]], [[0, 1]], "balanced_accuracy"),
        ("f1_samples", [0, 1], [0, 1], "f1_samples"),
        ("r2", [1], [2], r"\br2\b"),
        ("map@2", [1, 2], [["1", "x"], ["2", "y"]], "y_pred"),
        ("map@2", ["a", "b"], [[0, 1], [1, 0]], "y_true"),
        ("map@2", [0, 1], np.eye(2), "y_pred"),
        ("map@2", [float("nan"), 1], [[1, 2], [1, 2]], r"NaN.*row 0\b"),
    ],
)
def test_what_cannot_be_scored_says_why(name: str, truth: Any, predicted: Any, problem: str) -> None:
    with pytest.raises((DataError, SchemaError), match=problem):
        get_metric(name)(truth, predicted)


def test_classes_say_which_are_there_and_which_is_positive() -> None:
    assert get_metric("f1")(["no", "no"], ["no", "no"], classes=["no", "yes"]) == 0.0
    assert get_metric("f1")([1, 2], [1, 1], classes=[2, 1]) == pytest.approx(2 / 3)
    with pytest.raises(DataError, match=r"'zzz'.*y_pred"):
        get_metric("f1")(["a", "b"], ["a", "zzz"], classes=["a", "b"])
    with pytest.raises(SchemaError, match="classes"):
        get_metric("f1")([0, 1], [0, 1], classes=[0, 1, 2])


def test_bytes_are_texts() -> None:
    assert get_metric("accuracy")(np.array(["a", "bb"]), np.array([b"a", b"bb"])) == 1.0


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_correlations_do_not_depend_on_the_size_of_numbers(size: float) -> None:
    truth, predicted = np.array([1.0, 2, 3, 5]), np.array([1.0, 3, 2, 4])
    for name in ("pearson", "gini"):
        assert get_metric(name)(truth * size, predicted * size) == pytest.approx(get_metric(name)(truth, predicted))


def test_metrics_know_which_way_is_up_and_what_they_need() -> None:
    assert get_metric("auc").greater_is_better
    assert get_metric("auc").needs == "scores"
    assert get_metric("rmse").is_better(1.0, 2.0)
    assert get_metric("accuracy").is_better(0.9, 0.8)
    assert get_metric("log_loss").needs == "probabilities"
    assert get_metric("rmse").suits(CompetitionType.REGRESSION)
    assert not get_metric("rmse").suits(CompetitionType.BINARY_CLASSIFICATION)
