"""The file a competition expects: what is written, in which order, and what is refused before it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from penstock.datasets import DatasetSpec, TabularDataset, write_submission
from penstock.errors import ConfigError, DataError, SchemaError


def competition(
    folder: Path, target: list[Any], sample: dict[str, Any] | None, kind: str = "binary", **options: Any
) -> TabularDataset:
    """The test split of four rows, the training file of which has this target."""
    rows = {"Id": range(len(target)), "x": 1.5, "y": target}
    pd.DataFrame(rows).to_csv(folder / "train.csv", index=False)
    pd.DataFrame({"Id": [7, 3, 5, 9], "x": 2.5}).to_csv(folder / "test.csv", index=False)
    if sample is not None:
        pd.DataFrame({"Id": [3, 5, 7, 9]} | sample).to_csv(folder / "sample_submission.csv", index=False)
    spec = DatasetSpec("made", folder, kind, target_column="y", id_column="Id", **options)  # type: ignore[arg-type]
    return TabularDataset(spec, "test")


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_class_numbers_are_written_as_classes_in_the_order_of_the_sample(tmp_path: Path) -> None:
    dataset = competition(tmp_path, ["no", "yes"], {"y": "no"})
    path = dataset.submission([1, 0, 0, 1], tmp_path / "out" / "submission.csv")
    assert lines(path) == ["Id,y", "3,no", "5,no", "7,yes", "9,yes"]


@pytest.mark.parametrize(
    "predictions", [np.array([1.0, 0, 0, 1]), mx.array([1, 0, 0, 1]), [[1], [0], [0], [1]], pa.array([1, 0, 0, 1])]
)
def test_predictions_come_from_any_library(tmp_path: Path, predictions: Any) -> None:
    dataset = competition(tmp_path, [0, 1], {"y": 0})
    path = dataset.submission(predictions, tmp_path / "submission.csv")
    assert lines(path) == ["Id,y", "3,0", "5,0", "7,1", "9,1"]


def test_booleans_are_written_as_the_sample_has_them(tmp_path: Path) -> None:
    dataset = competition(tmp_path, [True, False], {"y": False})
    for predictions in ([1, 0, 0, 1], [True, False, False, True]):
        path = dataset.submission(predictions, tmp_path / "submission.csv")
        assert lines(path) == ["Id,y", "3,False", "5,False", "7,True", "9,True"]


def test_probabilities_stay_where_the_metric_or_the_sample_wants_them(tmp_path: Path) -> None:
    dataset = competition(tmp_path, [0, 1], {"y": 0.5})
    given = [0.25, 0.5, 0.75, 1.0]
    expected = ["Id,y", "3,0.5", "5,0.75", "7,0.25", "9,1.0"]
    assert lines(dataset.submission(given, tmp_path / "a.csv")) == expected
    assert lines(dataset.submission(given, tmp_path / "b.csv", metric="auc")) == expected
    both = np.stack([1 - np.array(given), given], axis=1)
    assert lines(dataset.submission(both, tmp_path / "c.csv", metric="log_loss")) == expected


def test_scores_become_labels_only_where_the_metric_says_so(tmp_path: Path) -> None:
    dataset = competition(tmp_path, ["no", "yes"], {"y": "no"})
    given = np.array([[0.1, 0.9], [0.8, 0.2], [0.7, 0.3], [0.4, 0.6]])
    path = tmp_path / "submission.csv"
    with pytest.raises(SchemaError, match="metric="):
        dataset.submission(given, path)
    with pytest.raises(SchemaError, match="metric="):
        dataset.submission(given[:, 1], path)
    assert not path.exists()
    for scores in (given, given[:, 1]):
        dataset.submission(scores, path, metric="accuracy")
        assert lines(path) == ["Id,y", "3,no", "5,no", "7,yes", "9,yes"]


def test_a_column_for_each_class_takes_a_column_of_probabilities(tmp_path: Path) -> None:
    dataset = competition(tmp_path, ["a", "b", "c"], {"a": 0.3, "b": 0.3, "c": 0.4}, "multiclass")
    given = np.array([[0.5, 0.25, 0.25], [0, 1, 0], [0, 0, 1], [1, 0, 0]])
    path = dataset.submission(given, tmp_path / "submission.csv", metric="log_loss")
    assert lines(path) == ["Id,a,b,c", "3,0.0,1.0,0.0", "5,0.0,0.0,1.0", "7,0.5,0.25,0.25", "9,1.0,0.0,0.0"]


@pytest.mark.parametrize(
    ("classes", "start", "order"),
    [
        (("a", "b", "c"), "", ("c", "a", "b")),
        (("a", "b", "c"), "Class_", ("c", "b", "a")),
        ((3, 1, 2), "Class_", (1, 2, 3)),
        (("1", "11", "111"), "1", ("11", "1", "111")),
    ],
)
def test_columns_of_classes_are_put_where_the_sample_has_them(
    tmp_path: Path, classes: tuple[Any, ...], start: str, order: tuple[Any, ...]
) -> None:
    columns = [f"{start}{name}" for name in order]
    dataset = competition(
        tmp_path, list(classes), dict.fromkeys(columns, 0.5), "multiclass", class_names=classes, columns={"y": "text"}
        if isinstance(classes[0], str) else {},
    )  # fmt: skip
    given = np.tile([0.25, 0.5, 0.125], (4, 1))
    path = dataset.submission(given, tmp_path / "submission.csv", metric="log_loss")
    expected = [float(given[0, classes.index(name)]) for name in order]
    assert lines(path)[:2] == [",".join(["Id", *columns]), ",".join(["3", *map(str, expected)])]


def test_columns_of_targets_are_put_where_the_sample_has_them(tmp_path: Path) -> None:
    train = {"Id": [1, 2], "x": 1.5, "l1": [0, 1], "l2": [1, 0]}
    pd.DataFrame(train).to_csv(tmp_path / "train.csv", index=False)
    pd.DataFrame({"Id": [3, 4], "x": 2.5}).to_csv(tmp_path / "test.csv", index=False)
    sample = pa.table({"Id": [3, 4], "l2": [0.5, 0.5], "l1": [0.5, 0.5]})
    spec = DatasetSpec("made", tmp_path, "multilabel", target_column=("l1", "l2"), id_column="Id")  # type: ignore[arg-type]
    dataset = TabularDataset(spec, "test")
    given = np.array([[0.1, 0.9], [0.2, 0.8]])
    assert lines(dataset.submission(given, tmp_path / "s.csv", sample=sample)) == ["Id,l2,l1", "3,0.9,0.1", "4,0.8,0.2"]
    assert lines(dataset.submission(given, tmp_path / "s.csv")) == ["Id,l1,l2", "3,0.1,0.9", "4,0.2,0.8"]
    strange = sample.rename_columns(["Id", "first", "second"])
    with pytest.raises(SchemaError, match=r"'l1'.*'l2'"):
        dataset.submission(given, tmp_path / "s.csv", sample=strange)


def test_rows_with_ids_of_their_own_are_found_by_them(tmp_path: Path) -> None:
    dataset = competition(tmp_path, [0, 1], {"y": 0})
    given = pd.DataFrame({"y": [0, 1, 0, 1], "Id": [3, 7, 5, 9]})
    for predictions in (given, given.to_dict("list"), pa.Table.from_pandas(given, preserve_index=False)):
        assert lines(dataset.submission(predictions, tmp_path / "s.csv"))[1:] == ["3,0", "5,0", "7,1", "9,1"]
    with pytest.raises(DataError, match="'Id'"):
        dataset.submission(given.assign(Id=[3, 3, 5, 9]), tmp_path / "s.csv")
    with pytest.raises(SchemaError, match="'y'"):
        dataset.submission({"Id": [3, 7, 5, 9], "y": [0, 1, 0]}, tmp_path / "s.csv")
    with pytest.raises(SchemaError, match=r"'Id'.*\bint64\b"):
        dataset.submission(given.assign(Id=list("abcd")), tmp_path / "s.csv")


def test_rows_are_found_by_an_index_with_the_name_of_the_ids(tmp_path: Path) -> None:
    dataset = competition(tmp_path, [0, 1], {"y": 0})
    given = pd.DataFrame({"y": [0, 1, 0, 1]}, index=pd.Index([3, 7, 5, 9], name="Id"))
    for predictions in (
        given,
        given["y"],
        {"y": given["y"]},
        given.set_index(pd.Index(range(4), name="n"), append=True),
    ):
        assert lines(dataset.submission(predictions, tmp_path / "s.csv"))[1:] == ["3,0", "5,0", "7,1", "9,1"]
    for predictions in (given.rename_axis("row"), given["y"].rename_axis("row")):
        with pytest.raises(SchemaError, match=r"'row'.*'Id'"):
            dataset.submission(predictions, tmp_path / "s.csv")
    with pytest.raises(DataError, match="'Id'"):
        dataset.submission(given["y"].iloc[:3], tmp_path / "s.csv")
    unnamed = pd.Series([1, 0, 0, 1], index=[9, 9, 9, 9])
    assert lines(dataset.submission(unnamed, tmp_path / "s.csv"))[1:] == ["3,0", "5,0", "7,1", "9,1"]


def test_a_column_is_not_told_by_the_end_of_its_name(tmp_path: Path) -> None:
    dataset = competition(tmp_path, [0.5, 1.5], {"log_y": 0.5}, "regression")
    with pytest.raises(SchemaError, match=r"'log_y'.*'Id'"):
        dataset.submission({"y": [1.0, 2, 3, 4]}, tmp_path / "s.csv")
    with pytest.raises(SchemaError, match=r"'log_a'.*'log_b'"):
        write_submission([1], {"a": [1.0], "b": [2.0]}, tmp_path / "s.csv", target=("log_a", "log_b"))


@pytest.mark.parametrize("flags", [np.array([True, False, False, True]), np.array([True, False, False, True], object)])
def test_booleans_are_numbers_where_scores_are_meant(tmp_path: Path, flags: np.ndarray[Any, Any]) -> None:
    expected = ["3,0", "5,0", "7,1", "9,1"]
    for sample in ({"y": 0.5}, None):
        dataset = competition(tmp_path, [0, 1], sample)
        assert lines(dataset.submission(flags, tmp_path / "s.csv", metric="auc"))[1:] == expected
    several = {"a": flags, "b": ~flags.astype(bool)}
    sample = pa.table({"id": [7, 3, 5, 9], "a": [0.5] * 4, "b": [0.5] * 4})
    for options in ({"sample": sample}, {"metric": "log_loss"}):
        path = write_submission([7, 3, 5, 9], several, tmp_path / "t.csv", target=("a", "b"), **options)
        assert lines(path)[1:3] == ["7,1,0", "3,0,1"]


@pytest.mark.parametrize(
    ("predictions", "metric", "problem"),
    [
        ({"a": [0.5, 0.1], "b": [0.5, 1.5]}, "log_loss", r"'b'.*log_loss"),
        ({"a": [0, 1], "b": [0.2, 1]}, "f1_macro", r"'b'.*f1_macro"),
        ({"a": [0, 1], "b": [0, 2]}, "accuracy", r"'b'.*row 1\b"),
        ({"a": [-0.5, 0.5]}, "brier", r"'a'.*row 0\b"),
        ({"a": [1.0, 2.5]}, "qwk", r"'a'.*row 1\b"),
    ],
)
def test_what_the_metric_would_refuse_is_not_written(
    tmp_path: Path, predictions: dict[str, list[float]], metric: str, problem: str
) -> None:
    with pytest.raises(SchemaError, match=problem):
        write_submission([1, 2], predictions, tmp_path / "s.csv", target=tuple(predictions), metric=metric)
    assert not (tmp_path / "s.csv").exists()


def test_logits_are_no_probabilities_of_two_classes(tmp_path: Path) -> None:
    dataset = competition(tmp_path, ["no", "yes"], None)
    with pytest.raises(SchemaError, match=r"row 0\b.*log_loss"):
        dataset.submission([-3.5, 1, 2, 3], tmp_path / "s.csv", metric="log_loss")


def test_objects_that_are_all_numbers_are_numbers(tmp_path: Path) -> None:
    dataset = competition(tmp_path, [1.5, 2.5], {"y": 0.5}, "regression")
    given = np.array([1, 2.5, 3, 4], object)
    assert lines(dataset.submission(given, tmp_path / "s.csv"))[1:] == ["3,2.5", "5,3.0", "7,1.0", "9,4.0"]


@pytest.mark.parametrize("sample", [{"y": 0}, None])
@pytest.mark.parametrize(
    ("predictions", "problem"),
    [
        (["yes"] * 4, r"'yes'.*row 0\b"),
        ({"y": [7] * 4}, r"row 0\b"),
        ({"foo": [0] * 4}, r"\['foo'\]"),
        ([0, None, 0, 0], r"row 1\b"),
        (np.array([0, pd.NA, 0, 0], object), r"row 1\b"),
        ([1j] * 4, "complex128"),
    ],
)
def test_what_is_of_no_class_is_refused(
    tmp_path: Path, predictions: Any, sample: dict[str, Any] | None, problem: str
) -> None:
    dataset = competition(tmp_path, [0, 1], sample)
    with pytest.raises((DataError, SchemaError), match=problem):
        dataset.submission(predictions, tmp_path / "s.csv")


def test_float32_is_written_in_the_digits_it_has(tmp_path: Path) -> None:
    given = np.array([0.3, 1e20], np.float32)
    assert lines(write_submission([1, 2], given, tmp_path / "s.csv", target="y"))[1:] == ["1,0.3", "2,1e+20"]


def test_numbers_are_written_so_that_they_read_back(tmp_path: Path) -> None:
    dataset = competition(tmp_path, [1.5, 2.5], {"y": 0.5}, "regression")
    given = np.array([0.1, 1 / 3, 2e-9, 3e10])
    path = dataset.submission(given, tmp_path / "submission.csv")
    assert pd.read_csv(path).set_index("Id")["y"].loc[[7, 3, 5, 9]].tolist() == given.tolist()


def test_columns_may_be_given_by_name(tmp_path: Path) -> None:
    dataset = competition(tmp_path, [1.5, 2.5], {"low": 0.5, "high": 1.5}, "regression")
    given = {"high": [1.0, 2.0, 3.0, 4.0], "low": [0.0, 0.5, 0.5, 0.5]}
    for predictions in (given, pd.DataFrame(given)):
        path = dataset.submission(predictions, tmp_path / "submission.csv")
        assert lines(path)[:2] == ["Id,low,high", "3,0.5,2.0"]


def test_without_a_sample_the_rows_are_in_their_own_order(tmp_path: Path) -> None:
    dataset = competition(tmp_path, [0, 1], None)
    assert lines(dataset.submission([1, 0, 0, 1], tmp_path / "s.csv")) == ["Id,y", "7,1", "3,0", "5,0", "9,1"]


def test_ids_and_predictions_alone_make_a_submission(tmp_path: Path) -> None:
    path = write_submission(["a", "b"], [0.5, 1.5], tmp_path / "s.csv", id_column="row", target="price")
    assert lines(path) == ["row,price", "a,0.5", "b,1.5"]
    with pytest.raises(ConfigError, match="target="):
        write_submission(["a"], [1.0], tmp_path / "t.csv")


def test_the_sample_may_have_another_name(tmp_path: Path) -> None:
    dataset = competition(tmp_path, [0, 1], {"y": 0})
    (tmp_path / "sample_submission.csv").rename(tmp_path / "example.csv")
    named = competition(tmp_path, [0, 1], None, files={"sample_submission": "example.csv"})
    expected = ["Id,y", "3,0", "5,0", "7,1", "9,1"]
    assert lines(named.submission([1, 0, 0, 1], tmp_path / "a.csv")) == expected
    assert lines(dataset.submission([1, 0, 0, 1], tmp_path / "b.csv", sample=tmp_path / "example.csv")) == expected


@pytest.mark.parametrize(
    ("predictions", "sample", "problem"),
    [
        ([1, 0, 0], {"y": 0}, "'y'"),
        ([0.5, float("nan"), 0.5, 0.5], {"y": 0.5}, r"'y'.*row 1\b"),
        ([0.5, float("inf"), 0.5, 0.5], {"y": 0.5}, "row 1.*inf"),
        (["a", None, "a", "a"], {"y": "a"}, r"row 1\b"),
        (["a", "b", "a", "b"], {"y": 0}, "'y'"),
        (["a", "b", "a", "b"], {"y": 0.5}, "'y'"),
        ([0, 1, 0, 1], {"y": "a"}, "'y'"),
        ({"z": [0, 1, 0, 1]}, {"y": 0}, r"'y'.*'Id'"),
        (np.zeros((4, 3)), {"a": 0.5, "b": 0.5}, r"'a'.*'b'"),
        (np.zeros((4, 2, 2)), {"y": 0}, r"\b4\b.*\b2\b"),
        (np.array(["2024-01-01", "NaT"] * 2, "M8[D]"), {"y": "a"}, "row 1.*NaT"),
        (np.array([1j] * 4), {"y": 0}, "'y'"),
        (np.array([1, [2], 3, 4], object), {"y": 0}, r"row 1\b"),
        (np.zeros((4, 2)), {"a": 0.5, "b": 0.5}, "'a'"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    tmp_path: Path, predictions: Any, sample: dict[str, Any], problem: str
) -> None:
    dataset = competition(tmp_path, [0.5, 1.5], sample, "regression")
    with pytest.raises((DataError, SchemaError), match=problem):
        dataset.submission(predictions, tmp_path / "submission.csv")
    assert not (tmp_path / "submission.csv").exists()


def test_ids_that_are_not_those_of_the_sample_are_told(tmp_path: Path) -> None:
    sample = pa.table({"Id": [3, 5, 8], "y": [0, 0, 0]})
    dataset = competition(tmp_path, [0, 1], None)
    problem = r"\b3\b.*\b4\b"
    with pytest.raises(DataError, match=problem):
        dataset.submission([1, 0, 0, 1], tmp_path / "s.csv", sample=sample)
    with pytest.raises(DataError, match=r"\b3\b.*\b2\b"):
        write_submission([3, 3], [0, 1], tmp_path / "s.csv", target="y")
    with pytest.raises(DataError, match=r"'Id'.*sample"):
        write_submission([3, 5], [0, 1], tmp_path / "s.csv", sample=pa.table({"Id": [3, 3], "y": [0, 0]}))
    with pytest.raises(DataError, match=r"\b4\b.*\b1\b"):
        dataset.submission([1, 0, 0, 1], tmp_path / "s.csv", sample=pa.table({"Id": [3, 5, 7], "y": [0, 0, 0]}))
    with pytest.raises(SchemaError, match=r"sample.*'Id'"):
        write_submission(["a"], [0], tmp_path / "s.csv", sample=sample)


def test_ids_stand_where_the_sample_has_them(tmp_path: Path) -> None:
    dataset = competition(tmp_path, [0, 1], None)
    sample = pa.table({"y": [0, 0, 0, 0], "Id": [3, 5, 7, 9]})
    path = dataset.submission([1, 0, 0, 1], tmp_path / "s.csv", sample=sample)
    assert lines(path) == ["y,Id", "0,3", "0,5", "1,7", "1,9"]


def test_a_sample_that_is_named_and_not_there_is_looked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = competition(tmp_path, [0, 1], {"y": 0}, files={"sample_submission": "gender_submission.csv"})
    assert lines(dataset.submission([1, 0, 0, 1], tmp_path / "s.csv"))[1:] == ["3,0", "5,0", "7,1", "9,1"]
    assert "'gender_submission.csv'" in caplog.text
    assert "'sample_submission.csv'" in caplog.text
    (tmp_path / "sample_submission.csv").unlink()
    assert lines(dataset.submission([1, 0, 0, 1], tmp_path / "s.csv"))[1:] == ["7,1", "3,0", "5,0", "9,1"]
    assert "gender_submission.csv" in caplog.text


def test_lists_of_classes_are_written_as_the_competition_writes_them(tmp_path: Path) -> None:
    dataset = competition(tmp_path, ["a", "b", "c"], {"y": "a b"}, "multiclass")
    path = dataset.submission(["b a", "a b", "c a", "a c"], tmp_path / "s.csv", metric="map@2")
    assert lines(path)[1:] == ["3,a b", "5,c a", "7,b a", "9,a c"]
    scores = np.array([[0.3, 0.5, 0.1], [0.6, 0.3, 0.1], [0.2, 0.1, 0.7], [0.6, 0.1, 0.3]])
    lists = [["b", "a"], ["a", "b"], ["c", "a"], ["a", "c"]]
    for given in (scores, lists, [[1, 0], [0, 1], [2, 0], [0, 2]], pd.DataFrame(scores, columns=list("abc"))):
        path = dataset.submission(given, tmp_path / "s.csv", metric="map@2")
        assert lines(path)[1:] == ["3,a b", "5,c a", "7,b a", "9,a c"]
    path = dataset.submission([["b", "a"], ["a"], ["c"], ["a", "c"]], tmp_path / "s.csv", metric="map@2")
    assert lines(path)[1:] == ["3,a", "5,c", "7,b a", "9,a c"]
    with pytest.raises(SchemaError, match=r"\bfloat64\b"):
        dataset.submission(np.eye(3)[[0, 1, 2, 0]], tmp_path / "s.csv", metric="map@2")
    with pytest.raises(DataError, match=r"row 1\b"):
        dataset.submission(["b a", None, "c", "a"], tmp_path / "s.csv", metric="map@2")
    for nothing in (None, "abca"):
        with pytest.raises(SchemaError, match="map@2"):
            dataset.submission(nothing, tmp_path / "s.csv", metric="map@2")
    blank = competition(tmp_path, ["a b", "c"], {"y": "a"}, "multiclass")
    with pytest.raises(SchemaError, match="'a b'"):
        blank.submission(scores[:, :2], tmp_path / "s.csv", metric="map@2")


def test_an_earlier_file_stays_until_a_whole_one_replaces_it(tmp_path: Path) -> None:
    dataset = competition(tmp_path, [0, 1], {"y": 0})
    path = tmp_path / "submission.csv"
    dataset.submission([1, 0, 0, 1], path)
    with pytest.raises(SchemaError):
        dataset.submission([1, 0], path)
    assert lines(path)[1:] == ["3,0", "5,0", "7,1", "9,1"]
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []
