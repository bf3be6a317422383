"""Forms of files that competitions have: ids and columns of one file only, zip archives, dates in time."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from penstock import plugins
from penstock.datasets import (
    CompetitionType,
    DatasetSpec,
    Folds,
    KaggleDataset,
    Metric,
    TabularDataset,
    get_metric,
    infer,
    read_table,
    register_metric,
)
from penstock.datasets import metrics as metrics_module
from penstock.errors import ConfigError, DataError, PluginError, SchemaError
from penstock.templates import TabularTextConverter


def write(folder: Path, **files: dict[str, Any]) -> Path:
    for name, columns in files.items():
        pd.DataFrame(columns).to_csv(folder / f"{name}.csv", index=False)
    return folder


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


# -- ids -------------------------------------------------------------------------------------------------------------


def digits(folder: Path, ids: list[Any]) -> TabularDataset:
    train = {"label": [0, 1, 2] * 20, "pixel0": range(60)}
    test, sample = {"pixel0": [4, 5, 6]}, {"ImageId": ids, "Label": 0}
    spec = infer(write(folder, train=train, test=test, sample_submission=sample), target="label").spec
    assert spec.id_column is None
    return TabularDataset(spec, "test")


@pytest.mark.parametrize(
    "predictions",
    [[2, 0, 1], {"Label": [2, 0, 1]}, pd.DataFrame({"ImageId": [3, 1, 2], "Label": [1, 2, 0]})],
    ids=["array", "mapping", "frame"],
)
def test_rows_without_ids_get_those_of_the_sample_in_order(tmp_path: Path, predictions: Any) -> None:
    dataset = digits(tmp_path, [1, 2, 3])
    assert lines(dataset.submission(predictions, tmp_path / "out.csv")) == ["ImageId,Label", "1,2", "2,0", "3,1"]


def test_ids_of_the_sample_that_are_row_numbers_are_taken_as_such(tmp_path: Path) -> None:
    dataset = digits(tmp_path, [2, 0, 1])
    assert lines(dataset.submission([2, 0, 1], tmp_path / "out.csv")) == ["ImageId,Label", "2,1", "0,2", "1,0"]
    dataset = digits(tmp_path, [3, 1, 2])
    assert lines(dataset.submission([2, 0, 1], tmp_path / "out.csv")) == ["ImageId,Label", "3,1", "1,2", "2,0"]


def test_a_sample_of_another_length_gives_no_ids(tmp_path: Path) -> None:
    dataset = digits(tmp_path, [1, 2, 3, 4])
    with pytest.raises(DataError, match=r"3 rows.*4 rows.*'ImageId'.*id_column"):
        dataset.submission([2, 0, 1], tmp_path / "out.csv")


def stores(folder: Path) -> Path:
    days = [f"2015-01-{day:02d}" for day in range(1, 29)]
    train = {"Store": [1, 2] * 14, "Date": days, "Sales": np.arange(28) * 10.5, "Customers": range(28)}
    test = {"Id": [11, 12], "Store": [1, 2], "Date": ["2015-02-01", "2015-02-02"]}
    return write(folder, train=train, test=test, sample_submission={"Id": [12, 11], "Sales": 0.0})


@pytest.mark.parametrize("given", [None, "Id"])
def test_an_id_may_be_in_the_test_file_only(tmp_path: Path, given: str | None) -> None:
    _, spec, notes = infer(stores(tmp_path), id_column=given)
    assert (spec.id_column, spec.target_column, spec.num_features) == ("Id", "Sales", 3)
    assert notes["id_column"]
    train, test = TabularDataset(spec, "train"), TabularDataset(spec, "test")
    assert train.ids().to_pylist() == list(range(28))
    assert test.ids().to_pylist() == [11, 12]
    assert test.feature_names == train.feature_names == ["Store", "Date"]
    assert "11" not in test.texts()[0]
    assert lines(test.submission([1.5, 2.5], tmp_path / "out.csv")) == ["Id,Sales", "12,2.5", "11,1.5"]


def test_an_id_that_no_file_has_is_an_error(tmp_path: Path) -> None:
    spec = DatasetSpec("made", stores(tmp_path), CompetitionType.REGRESSION, target_column="Sales", id_column="ID")
    with pytest.raises(SchemaError, match=r"'Id'"):
        TabularDataset(spec, "train")


def test_a_column_of_the_test_file_only_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = {"id": range(40), "x": range(40), "y": [0, 1] * 20}
    _, spec, notes = infer(write(tmp_path, train=train, test={"id": [50], "x": [1], "season": ["winter"]}))
    assert spec.columns["season"].kind == "ignore"
    assert "train.csv" in notes["columns.season"]
    assert "'season'" in caplog.text
    assert TabularDataset(spec, "test").feature_names == TabularDataset(spec, "train").feature_names == ["x"]


def test_a_column_that_is_only_spelled_otherwise_in_the_test_file_is_an_error(tmp_path: Path) -> None:
    files = {"train": {"id": range(9), "Unit Price": range(9), "y": range(9)}, "test": {"id": [9], "unit_price": [1]}}
    with pytest.raises(SchemaError, match=r"'unit_price'.*'Unit Price'"):
        infer(write(tmp_path, **files), target="y")


class WholeRows(KaggleDataset):
    """Dataset of a user, with a converter that renders all columns."""

    template = TabularTextConverter()

    def _load_data(self) -> None:
        self._data = pd.read_csv(self.spec.dataset_path / f"{self.split}.csv")

    def _validate_data(self) -> None: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": self.template.convert_row(self._data.iloc[index])}


def test_whole_rows_show_neither_the_id_nor_the_target(tmp_path: Path) -> None:
    write(tmp_path, train={"Id": [41, 42], "Area": [7, 8], "Price": [99, 98]})
    spec = DatasetSpec("made", tmp_path, CompetitionType.REGRESSION, target_column="Price", id_column="Id")
    assert WholeRows(spec, "train")[0]["text"] == "The Area is 7."


def test_a_template_that_names_the_id_shows_it(tmp_path: Path) -> None:
    write(tmp_path, train={"Id": [41, 42], "Area": [7, 8], "Price": [99, 98]})
    spec = DatasetSpec("made", tmp_path, CompetitionType.REGRESSION, target_column="Price", id_column="Id")
    texts = TabularDataset(spec, "train", template="House {Id} has {Area}.").texts()
    assert texts == ["House 41 has 7.", "House 42 has 8."]


# -- zip -------------------------------------------------------------------------------------------------------------


def zipped(path: Path, members: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


@pytest.mark.parametrize("name", ["{}.csv.zip", "{}.zip", "{}.CSV.ZIP"])
def test_zipped_files_are_read(tmp_path: Path, name: str) -> None:
    rows = "\n".join(f"{i},{i % 2},{i % 3 % 2}" for i in range(40))
    zipped(tmp_path / name.format("train"), {"train.csv": f"id,x,y\n{rows}\n", "__MACOSX/train.csv": "junk"})
    zipped(tmp_path / name.format("test"), {"test.csv": "id,x\n50,1\n"})
    spec = infer(tmp_path).spec
    assert (len(TabularDataset(spec, "train")), len(TabularDataset(spec, "test"))) == (40, 1)


def test_an_archive_of_several_tables_names_them(tmp_path: Path) -> None:
    path = zipped(tmp_path / "train.csv.zip", {"a.csv": "x\n1\n", "b.csv": "x\n1\n"})
    with pytest.raises(ConfigError, match=r"train\.csv\.zip.*a\.csv.*b\.csv"):
        read_table(path)


def test_a_damaged_archive_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = zipped(tmp_path / "train.csv.zip", {"a.csv": "x\n" + "1\n" * 5000})
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"train\.csv\.zip"):
        read_table(path)


# -- time ------------------------------------------------------------------------------------------------------------


def test_folds_in_time_train_on_most_of_the_past_by_default(tmp_path: Path) -> None:
    spec = infer(stores(tmp_path)).spec
    train, val = (TabularDataset(spec, split, folds=Folds(3)) for split in ("train", "val"))
    assert train.fold == val.fold == 2
    assert (len(train), len(val)) == (21, 7)
    assert len(TabularDataset(spec, "train", folds=Folds(3), fold=0)) == 7
    assert TabularDataset(spec, "train", folds=Folds(3, kind="plain")).fold == 0


def test_the_format_of_dates_is_given_as_the_reason(tmp_path: Path) -> None:
    days = [f"{1 + n % 28:02d}/{1 + n // 28:02d}/2019" for n in range(56)]
    _, spec, notes = infer(write(tmp_path, train={"id": range(56), "day": days, "y": range(56)}), target="y")
    assert spec.columns["day"].date_format == "%d/%m/%Y"
    assert "%d/%m/%Y" in notes["columns.day"]


# -- metrics ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_metrics(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(metrics_module, "_REGISTERED", {})
    return


def wape(truth: Any, predicted: Any) -> float:
    return float(np.abs(truth - predicted).sum() / np.abs(truth).sum())


@pytest.mark.usefixtures("own_metrics")
def test_a_registered_metric_scores_by_its_name(tmp_path: Path) -> None:
    register_metric("WAPE", wape, greater_is_better=False, types=["regression", "time_series"])
    metadata, spec, _ = infer(stores(tmp_path), metric="wape")
    assert metadata.metric.name == "WAPE"
    dataset = TabularDataset(spec, "train")
    assert dataset.score(np.zeros(28), "wape") == 1.0
    assert get_metric("W.A.P.E").is_better(0.1, 0.2)
    assert not get_metric("wape").suits(CompetitionType.BINARY_CLASSIFICATION)


@pytest.mark.usefixtures("own_metrics")
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rmse", {}, "'rmse'"),
        ("Accuracy", {}, "'accuracy'"),
        ("own@5", {}, "own@5"),
        ("own", {"needs": "guesses"}, "guesses"),
        ("own", {"types": ["clustering"]}, "clustering"),
    ],
)
def test_a_metric_that_cannot_be_registered_says_why(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        register_metric(name, wape, greater_is_better=False, **options)


@pytest.mark.usefixtures("own_metrics")
def test_a_metric_is_registered_once_unless_it_is_replaced() -> None:
    register_metric("wape", wape, greater_is_better=False)
    with pytest.raises(ConfigError, match="'wape'"):
        register_metric("wape", wape, greater_is_better=False)
    assert register_metric("wape", wape, greater_is_better=True, replace=True).greater_is_better


@pytest.mark.usefixtures("own_metrics")
def test_a_metric_that_returns_no_number_is_an_error(tmp_path: Path) -> None:
    register_metric("odd", lambda truth, predicted: None, greater_is_better=False)  # type: ignore[arg-type, return-value]
    with pytest.raises(DataError, match=r"'odd'.*None"):
        get_metric("odd")([1.0], [1.0])


PLUGIN = Metric("tail", lambda t, p, c: 7.0, True, "values", frozenset(CompetitionType))
NO_METRIC = len


@pytest.mark.usefixtures("own_metrics")
def test_a_metric_of_a_plugin_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint(name, f"{__name__}:{target}", "penstock.metrics")
        for name, target in (("tail", "PLUGIN"), ("bad", "NO_METRIC"))
    ]
    monkeypatch.setattr(plugins, "_points", lambda group: points if group == "metrics" else ())
    assert get_metric("Tail")([1.0], [2.0]) == 7.0
    with pytest.raises(PluginError, match="'bad'"):
        get_metric("bad")
    with pytest.raises(ConfigError, match="register_metric"):
        get_metric("unknown")


def test_nothing_is_logged_for_files_of_the_usual_form(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = {"id": range(40), "x": range(40), "y": [0, 1] * 20}
    infer(write(tmp_path, train=train, test={"id": [50], "x": [1]}))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
