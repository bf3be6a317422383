"""What predictions mean, decided once: the same to `class_of`, to `score` and to `submission`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lazy_modules import LazyModule

from penstock.datasets import DatasetSpec, Folds, KaggleDataset, TabularDataset
from penstock.datasets.predictions import ClassNames, Predictions
from penstock.errors import ConfigError, DataError, SchemaError

sk = LazyModule("sklearn.metrics")
torch = LazyModule("torch")


def dataset(
    folder: Path, target: list[Any], kind: str = "multiclass", split: str = "train", **options: Any
) -> TabularDataset:
    pd.DataFrame({"id": range(len(target)), "x": 1.5, "y": target}).to_csv(folder / "train.csv", index=False)
    pd.DataFrame({"id": [10, 11, 12], "x": 1.5}).to_csv(folder / "test.csv", index=False)
    more = {name: options.pop(name) for name in ("folds", "fold") if name in options}
    spec = DatasetSpec("made", folder, kind, target_column="y", id_column="id", **options)  # type: ignore[arg-type]
    return TabularDataset(spec, split, **more)


def written(data: TabularDataset, predictions: Any, **options: Any) -> list[str]:
    path = data.submission(predictions, data.spec.dataset_path / "out.csv", **options)
    return [line.split(",")[1] for line in path.read_text().splitlines()[1:]]


CLASSES = [("no", "yes"), (0, 1), (1, 0), (1, 2, 3), (2, 0, 1), ("b", "c", "a"), (True, False), (0.5, 1.5, 2.5)]


@given(classes=st.sampled_from(CLASSES), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_every_form_of_the_same_predictions_is_the_same_or_refused(classes: tuple[Any, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, len(classes), int(rng.integers(1, 6)))
    names = np.array(classes)[numbers]
    forms: list[Any] = [np.eye(len(classes))[numbers], Predictions.of(numbers, classes, "numbers").names()]
    if len(classes) == 2:
        forms.append(np.where(numbers == 1, 0.75, 0.25))
    for form in forms:
        assert Predictions.of(form, classes).numbers().tolist() == numbers.tolist()
    for form, are in ((numbers, "numbers"), (names, "names")):
        assert Predictions.of(form, classes, are).numbers().tolist() == numbers.tolist()  # type: ignore[arg-type]
        try:
            guessed = Predictions.of(form, classes).numbers().tolist()
        except SchemaError:  # may be either
            guessed = numbers.tolist()
        assert guessed == numbers.tolist()


def test_whole_numbers_are_what_they_can_be_and_refused_if_they_can_be_both() -> None:
    assert Predictions.of([0, 2], (1, 2, 3)).meaning == "numbers"
    assert Predictions.of([1, 3], (1, 2, 3)).meaning == "names"
    with pytest.raises(SchemaError, match="predictions_are="):
        Predictions.of([1, 2], (1, 2, 3)).numbers()
    with pytest.raises(SchemaError, match="predictions_are="):
        Predictions.of([True, False], (True, False)).numbers()
    assert Predictions.of([True, False], (1, 0)).names().tolist() == [0, 1]
    with pytest.raises(SchemaError, match=r"classes.*\b3\b"):
        Predictions.of([True, False], (1, 2, 3)).numbers()
    with pytest.raises(DataError, match=r"row 1\b"):
        Predictions.of([1, 5], (1, 2, 3), "names").numbers()
    with pytest.raises(ConfigError, match=r"'numbers'.*'labels'"):
        Predictions.of([1], (1, 2), "labels")  # type: ignore[arg-type]


def test_names_are_known_in_part_and_after_a_pickle_and_nothing_computed_from_them_is() -> None:
    names = Predictions.of([0, 1], (1, 2), "numbers").names()
    assert isinstance(names[:1], ClassNames)
    assert isinstance(pickle.loads(pickle.dumps(names)), ClassNames)  # noqa: S301
    assert type(names == 1) is np.ndarray
    assert type(names + 1) is np.ndarray
    assert type(np.argsort(names)) is type(names.argsort()) is type(np.argpartition(names, 1)) is np.ndarray


def test_what_class_of_gives_is_written_as_it_is(tmp_path: Path) -> None:
    scores = np.array([[0.9, 0.1, 0], [0.1, 0.9, 0], [0.9, 0.1, 0]])
    test = dataset(tmp_path, [1, 2, 3] * 2, split="test")
    assert written(test, test.class_of(scores)) == ["1", "2", "1"]
    assert written(test, test.class_of(test.class_of(scores))) == ["1", "2", "1"]
    assert written(test, scores.argmax(axis=1)) == ["1", "2", "1"]
    with pytest.raises(SchemaError, match="predictions_are="):
        written(test, [1, 2, 1])
    assert written(test, [1, 2, 1], predictions_are="names") == ["1", "2", "1"]
    assert written(test, [1, 2, 1], predictions_are="numbers") == ["2", "3", "2"]
    other = dataset(tmp_path, [0, 1], "binary", "test", class_names=(1, 0))
    assert written(other, other.class_of([0, 1, 1])) == ["1", "0", "0"]


@pytest.mark.parametrize("target", [["a", "b", "c"], [1, 2, 3], [7, 9, 8]])
def test_a_score_takes_classes_in_every_form(tmp_path: Path, target: list[Any]) -> None:
    data = dataset(tmp_path, target * 4)
    labels = data.labels()
    assert labels is not None
    scores = np.eye(3)[labels] * 0.7 + 0.1
    for predictions in (labels, scores, scores.argmax(axis=1), data.class_of(labels), data.targets()):
        assert data.score(predictions, "accuracy") == 1.0
        assert data.score(predictions, "f1_macro") == 1.0
    assert data.score(scores, "auc") == 1.0
    named = pd.DataFrame(scores[:, [2, 0, 1]], columns=[sorted(target)[i] for i in (2, 0, 1)])
    assert data.score(named, "log_loss") == pytest.approx(data.score(scores, "log_loss"))
    assert data.score(scores, "map@2") == data.score(np.argsort(-scores)[:, :2].tolist(), "map@2") == 1.0
    assert data.score(scores, "ndcg") == 1.0


def test_the_positive_class_is_the_second_of_class_names_for_every_metric(tmp_path: Path) -> None:
    target = ["sick" if row % 3 == 0 else "well" for row in range(12)]
    data = dataset(tmp_path, target, "binary", class_names=("well", "sick"))
    everybody = np.array(["sick"] * 12)
    assert data.score(everybody, "f1") == pytest.approx(sk.f1_score(target, everybody, pos_label="sick"))
    sick = (np.array(target) == "sick") * 0.9
    assert data.score(sick, "auc") == data.score(sick, "f1") == data.score(sick, "gini") == 1.0
    assert data.score(np.stack([1 - sick, sick], axis=1), "gini") == 1.0


def test_a_fold_of_one_class_is_scored_with_the_classes_of_the_dataset(tmp_path: Path) -> None:
    target, folds = ["yes"] + ["no"] * 9, Folds(5, kind="plain")
    parts = [dataset(tmp_path, target, "binary", "val", folds=folds, fold=fold) for fold in range(5)]
    fold = next(part for part in parts if set(part.targets().tolist()) == {"no"})  # type: ignore[union-attr]
    assert fold.class_names == ("no", "yes")
    assert fold.score(["no", "no"], "f1") == 0.0
    assert fold.score([0.1, 0.1], "log_loss") == pytest.approx(-np.log(0.9))


def test_a_score_without_a_metric_goes_by_that_of_the_competition(tmp_path: Path) -> None:
    data = dataset(tmp_path, ["no", "yes"] * 3, "binary")
    with pytest.raises(ConfigError, match="'made'"):
        data.score([0.1, 0.9] * 3)
    data.metric = "accuracy"
    assert data.score([0.1, 0.9] * 3) == 1.0
    test = dataset(tmp_path, ["no", "yes"] * 3, "binary", "test")
    test.metric = "accuracy"
    assert written(test, [0.1, 0.9, 0.8]) == ["no", "yes", "yes"]


def test_names_are_no_scores(tmp_path: Path) -> None:
    data = dataset(tmp_path, ["no", "yes"] * 3, "binary")
    with pytest.raises(SchemaError, match=r"\bauc\b"):
        data.score(data.targets(), "auc")
    turned = dataset(tmp_path, [0, 1] * 3, "binary", class_names=(1, 0))
    with pytest.raises(SchemaError, match="predictions_are="):
        turned.score(turned.targets(), "auc")
    with pytest.raises(SchemaError, match=r"\b0\.0\b.*\b1\.0\b"):
        turned.score(turned.targets().astype(float), "auc")  # type: ignore[union-attr]
    assert turned.score(turned.labels(), "auc", predictions_are="numbers") == 1.0
    with pytest.raises(SchemaError, match=r"\bauc\b"):
        dataset(tmp_path, ["a", "b", "c"]).score([0, 1, 2], "auc")


def test_columns_of_targets_and_rows_are_found_by_name_and_id(tmp_path: Path) -> None:
    train = pd.DataFrame({"id": [5, 6, 7, 8], "x": 1.5, "l1": [1.0, 2, 3, 4], "l2": [9.0, 8, 7, 5]})
    train.to_csv(tmp_path / "train.csv", index=False)
    spec = DatasetSpec("made", tmp_path, "multi_target_regression", target_column=("l1", "l2"), id_column="id")  # type: ignore[arg-type]
    data = TabularDataset(spec)
    turned = train[["l2", "l1", "id"]].iloc[::-1]
    for frame in (turned, pl.from_pandas(turned), pa.Table.from_pandas(turned, preserve_index=False)):
        assert data.score(frame, "rmse") == 0.0
    assert data.score(train[["l1", "l2"]].to_numpy(), "rmse") == 0.0
    with pytest.raises(SchemaError, match=r"'l1'.*'foo'"):
        data.score({"l1": [1] * 4, "foo": [2] * 4}, "rmse")
    with pytest.raises(DataError, match=r"\b1\b.*\b8\b"):
        data.score(train.assign(id=[5, 6, 7, 1])[["id", "l1", "l2"]], "rmse")
    with pytest.raises(ConfigError, match="predictions_are='names'"):
        data.score(train[["l1", "l2"]].to_numpy(), "rmse", predictions_are="names")


def test_rows_of_an_index_of_ids_are_found_by_it(tmp_path: Path) -> None:
    data = dataset(tmp_path, [1.5, 2.5, 3.5], "regression")
    given = pd.DataFrame({"y": [3.5, 2.5, 1.5]}, index=pd.Index([2, 1, 0], name="id"))
    assert data.score(given, "rmse") == data.score(given["y"], "rmse") == data.score({"y": given["y"]}, "rmse") == 0.0
    assert data.score(given.reset_index().set_index("y", drop=False), "rmse") == 0.0
    for predictions in (given.rename_axis("row"), given["y"].rename_axis("row")):
        with pytest.raises(SchemaError, match=r"'row'.*reset_index"):
            data.score(predictions, "rmse")


def test_columns_of_classes_may_all_begin_alike_and_targets_may_not(tmp_path: Path) -> None:
    data = dataset(tmp_path, ["lo", "hi", "mid"])
    scores = np.array([[0.1, 0.7, 0.2], [0.8, 0.1, 0.1], [0.2, 0.3, 0.5]])
    named = pd.DataFrame(scores[:, [2, 0, 1]], columns=["Class_mid", "Class_hi", "Class_lo"])
    assert data.score(named, "log_loss") == data.score(scores, "log_loss")
    numbers = dataset(tmp_path, [1.5, 2.5], "regression")
    with pytest.raises(SchemaError, match=r"'log_y'.*'y'"):
        numbers.score({"log_y": [1.5, 2.5]}, "rmse")


@pytest.mark.parametrize("target", [["a", "b", "c"], [1, 2, 3]])
def test_lists_of_classes_are_scored_in_every_form(tmp_path: Path, target: list[Any]) -> None:
    data = dataset(tmp_path, target)
    first, second, third = target
    texts = [f"{first} {second}", f"{third} {second}", f"{third}"]
    for lists in (texts, pa.array(texts), [[first, second], [third, second], [third]], [[0, 1], [2, 1], [2]]):
        assert data.score(lists, "map@2") == pytest.approx((1 + 0.5 + 1) / 3)
    for one in ([0, 2, 2], np.array([[0], [2], [2]]), data.class_of([0, 2, 2])):
        assert data.score(one, "map@2") == pytest.approx(2 / 3)
    with pytest.raises(DataError, match=r"'x'.*row 1\b"):
        data.score([texts[0], f"{first} x", texts[2]], "map@2")
    for metric in ("map@2", "accuracy"):
        for nothing in (None, "abc", np.float64(1)):
            with pytest.raises(SchemaError):
                data.score(nothing, metric)
    with pytest.raises(SchemaError, match=r"\b0\.5\b"):
        data.score([0.5, 0.25, 0.5], "map@2")


@pytest.mark.parametrize("library", [mx, torch])
def test_bfloat16_is_scored_and_written(tmp_path: Path, library: Any) -> None:
    given = (mx.array if library is mx else torch.tensor)([0.25, 0.75, 0.5], dtype=library.bfloat16)
    assert dataset(tmp_path, ["no", "yes", "yes"], "binary").score(given, "auc") == 1.0
    assert dataset(tmp_path, [0.25, 0.75, 0.5], "regression").score(given, "rmse") == 0.0
    test = dataset(tmp_path, [0.25, 0.75, 0.5], "regression", "test")
    assert written(test, given) == ["0.25", "0.75", "0.5"]
    assert dataset(tmp_path, ["no", "yes"], "binary").class_of(given).tolist() == ["no", "yes", "yes"]


def test_texts_are_no_numbers_and_objects_may_be(tmp_path: Path) -> None:
    data = dataset(tmp_path, [1.0, 2.5], "regression")
    for texts in (["1", "2.5"], np.array(["1", "2.5"], object)):
        with pytest.raises(SchemaError, match=r"'1'.*'2\.5'"):
            data.score(texts, "rmse")
    assert data.score(np.array([1, 2.5], object), "rmse") == 0.0


def test_a_number_of_no_class_is_told_with_what_it_is() -> None:
    with pytest.raises(DataError, match=r"row 1\b.*'names'"):
        Predictions.of([1, 5], (1, 2, 5), "numbers").numbers()
    with pytest.raises(DataError, match=r"row 1\b"):
        Predictions.of([1, 7], (1, 2, 5)).numbers()


# -- classes with an order -------------------------------------------------------------------------------------------


def test_classes_with_an_order_need_one_that_is_not_the_alphabet(tmp_path: Path) -> None:
    target = ["low", "mid", "high"] * 2
    with pytest.raises(ConfigError, match="class_names"):
        dataset(tmp_path, target, "ordinal")
    data = dataset(tmp_path, target, "ordinal", class_names=("low", "mid", "high"))
    assert data.score([0, 1, 2, 0, 1, 1], "mae") == pytest.approx(1 / 6)
    assert data.score(["low", "mid", "high", "low", "mid", "low"], "mae") == pytest.approx(2 / 6)
    assert data.score([0.5, 1, 2, 0, 1, 2], "mae") == pytest.approx(0.5 / 6)
    expected = sk.cohen_kappa_score([0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 0], weights="quadratic")
    assert data.score([0, 1, 2, 0, 1, 0], "qwk") == pytest.approx(expected)
    with pytest.raises(ConfigError, match=r"\bqwk\b"):
        dataset(tmp_path, target).score([0, 1, 2, 0, 1, 2], "qwk")


def test_stars_are_compared_by_their_values(tmp_path: Path) -> None:
    data = dataset(tmp_path, [1, 3, 5] * 2, "ordinal")
    assert data.score(data.labels(), "mae") == 0.0
    assert data.score([0, 1, 1, 0, 1, 2], "mae") == pytest.approx(2 / 6)
    assert data.score([1.5, 3, 5, 1, 3, 5], "mae", predictions_are="names") == pytest.approx(0.5 / 6)
    assert data.score([0.5, 1, 2, 0, 1, 2], "mae", predictions_are="numbers") == pytest.approx(1 / 6)
    with pytest.raises(SchemaError, match="predictions_are="):
        data.score([1.5, 3, 5, 1, 3, 5], "mae")
    for are in (None, "numbers", "names"):
        with pytest.raises(SchemaError, match=r"\bqwk\b"):
            data.score([1.5, 3, 5, 1, 3, 5], "qwk", predictions_are=are)
        with pytest.raises((DataError, SchemaError), match=r"\b1\.5\b"):
            data.score([1.5, 3, 5, 1, 3, 5], "accuracy", predictions_are=are)


# -- targets ---------------------------------------------------------------------------------------------------------


class Written(KaggleDataset):
    """As people write them: a pandas frame, and nothing said about targets."""

    def _load_data(self) -> None:
        self._data = pd.read_csv(self.spec.dataset_path / f"{self.split}.csv")

    def _validate_data(self) -> None:
        pass

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": str(self._data["x"].iloc[index])}


@pytest.mark.parametrize(
    ("target", "kind"), [(["no", "yes", "no", "no"], "binary"), ([1.5, 2.5, 3.5, 4.5], "regression")]
)
def test_a_dataset_that_somebody_wrote_has_targets_and_scores(tmp_path: Path, target: list[Any], kind: str) -> None:
    dataset(tmp_path, target, kind)
    spec = DatasetSpec("made", tmp_path, kind, target_column="y", id_column="id")  # type: ignore[arg-type]
    data = Written(spec)
    assert data.targets().tolist() == target  # type: ignore[union-attr]
    assert data.score(data.labels(), "accuracy" if kind == "binary" else "rmse") == float(kind == "binary")
    test = Written(spec, "test")
    assert test.targets() is None
    assert test.class_names == (("no", "yes") if kind == "binary" else None)
    with pytest.raises(ConfigError):
        test.score([0, 1, 1], "accuracy")
    if kind == "binary":
        assert written(test, [0, 1, 1]) == ["no", "yes", "yes"]  # type: ignore[arg-type]
        val = Written(spec, "val", folds=Folds(2, kind="plain"), fold=0)
        assert val.class_names == ("no", "yes")


@pytest.mark.parametrize("value", [float("inf"), 1e300])
def test_a_target_that_is_no_number_in_float32_is_refused(tmp_path: Path, value: float) -> None:
    pq.write_table(pa.table({"id": [1, 2], "x": ["a", "b"], "y": [3.0, value]}), tmp_path / "train.parquet")
    data = TabularDataset(DatasetSpec("made", tmp_path, "regression", target_column="y", id_column="id"))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"'y'.*row 1\b"):
        data.labels()


@pytest.mark.parametrize(
    "target",
    [
        pa.array(list("uvuv")).dictionary_encode(),
        pa.array(list("uvuv"), pa.string_view()),
        pa.array(list("uvuv"), pa.large_string()),
    ],
)
def test_targets_of_any_type_of_text_are_classes(tmp_path: Path, target: pa.Array) -> None:
    pq.write_table(pa.table({"id": [1, 2, 3, 4], "x": list("abab"), "y": target}), tmp_path / "train.parquet")
    data = TabularDataset(DatasetSpec("made", tmp_path, "binary", target_column="y", id_column="id"))  # type: ignore[arg-type]
    assert data.labels().tolist() == [0, 1, 0, 1]  # type: ignore[union-attr]
    assert data.targets().tolist() == list("uvuv")  # type: ignore[union-attr]
    assert data.score([0, 1, 0, 0], "accuracy") == 0.75
