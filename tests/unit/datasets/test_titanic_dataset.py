"""Titanic and House Prices: the datasets the project brings, on data shaped like the real files."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from house_prices_data import make_house_prices
from penstock.datasets import DatasetSpec, Folds, HousePricesDataset, TitanicDataset, make_titanic
from penstock.datasets.base import CompetitionType
from penstock.datasets.house_prices import house_prices_metadata, house_prices_spec, house_prices_template
from penstock.datasets.tables import read_names
from penstock.datasets.titanic import titanic_metadata, titanic_spec, titanic_template
from penstock.errors import ConfigError, SchemaError


@pytest.fixture(scope="module")
def titanic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_titanic(tmp_path_factory.mktemp("titanic"))


@pytest.fixture(scope="module")
def houses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_house_prices(tmp_path_factory.mktemp("houses"))


def test_a_passenger_is_a_sentence_without_what_is_missing(titanic: Path) -> None:
    dataset = TitanicDataset(titanic_spec(titanic), split="train")
    assert len(dataset) == 891
    row = dataset._data.slice(0, 1).to_pylist()[0]
    assert dataset[0]["text"].startswith(f"{row['Name']} was a {row['Sex']} passenger")
    texts = pa.array(dataset.texts())
    aged = np.asarray(pc.match_substring_regex(texts, "passenger aged [0-9.]+ years in"))
    assert (aged == np.asarray(dataset._data["Age"].is_valid())).all()
    ports = pc.sum(pc.match_substring_regex(texts, "embarked at (Cherbourg|Queenstown|Southampton)")).as_py()
    assert ports == len(dataset) - dataset._data["Embarked"].null_count
    assert not pc.any(pc.match_substring(texts, "unknown")).as_py()


def test_a_sentence_does_without_what_is_left_out(titanic: Path) -> None:
    spec = titanic_spec(titanic)
    full = TitanicDataset(spec).texts()
    ignoring = dataclasses.replace(spec, columns={**spec.columns, "Fare": "ignore"})  # type: ignore[dict-item]
    for dataset in (TitanicDataset(spec, exclude=["Fare"]), TitanicDataset(ignoring)):
        assert dataset.texts() == [re.sub(r", who paid £[0-9.]+", "", text) for text in full]
    with pytest.raises(ConfigError, match=r"'titanic_v1'.*'Name'"):
        TitanicDataset(spec, exclude=["Name"]).texts()
    with pytest.raises(SchemaError, match=r"exclude.*'Fare'"):
        TitanicDataset(spec, exclude=["Fair"])


def test_a_sentence_of_some_columns_uses_their_formats(titanic: Path) -> None:
    dataset = TitanicDataset(titanic_spec(titanic), template="{Name}, {Pclass} class")
    row = dataset._data.slice(0, 1).to_pylist()[0]
    assert dataset[0]["text"] == f"{row['Name']}, {['first', 'second', 'third'][row['Pclass'] - 1]} class"


def test_a_directory_in_the_place_of_a_spec_says_what_to_do(titanic: Path) -> None:
    with pytest.raises(ConfigError, match=r"titanic_spec\(path\).*infer\(path\)"):
        TitanicDataset(str(titanic))  # type: ignore[arg-type]


def test_survival_is_in_the_label_and_nowhere_else(titanic: Path) -> None:
    dataset = TitanicDataset(titanic_spec(titanic))
    labels = dataset.labels()
    assert labels is not None
    assert labels.tolist() == dataset._data["Survived"].to_pylist()
    assert "Survived" not in dataset.template.columns(dataset._data.column_names)


def test_the_usual_spec_of_a_user_is_enough(titanic: Path) -> None:
    spec = DatasetSpec("titanic", titanic, CompetitionType.BINARY_CLASSIFICATION, 891, 10, "Survived", "PassengerId")
    assert TitanicDataset(spec, split="train")[5]["text"] == TitanicDataset(titanic_spec(titanic))[5]["text"]


def test_folds_of_titanic_are_even_and_do_not_share_passengers(titanic: Path) -> None:
    spec = titanic_spec(titanic)
    rates = []
    for fold in range(5):
        train, val = (TitanicDataset(spec, split, folds=Folds(5), fold=fold) for split in ("train", "val"))
        assert not set(train.ids().to_pylist()) & set(val.ids().to_pylist())
        assert len(train) + len(val) == 891
        labels = val.labels()
        assert labels is not None
        rates.append(labels.mean())
    assert np.ptp(rates) < 0.01


def test_families_can_be_kept_on_one_side(titanic: Path) -> None:
    spec = titanic_spec(titanic)
    folds = Folds(4, kind="stratified_grouped", by="Ticket")
    train, val = (TitanicDataset(spec, split, folds=folds) for split in ("train", "val"))
    assert not set(train._data["Ticket"].to_pylist()) & set(val._data["Ticket"].to_pylist())


def test_a_submission_of_titanic_is_what_its_sample_is(titanic: Path, tmp_path: Path) -> None:
    test = TitanicDataset(titanic_spec(titanic), "test")
    path = test.submission(np.zeros(len(test), np.int64), tmp_path / "submission.csv")
    ours, sample = path.read_text().splitlines(), (titanic / "sample_submission.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in ours] == [line.split(",")[0] for line in sample]
    assert ours[0] == sample[0] == "PassengerId,Survived"


def test_titanic_is_scored_by_accuracy(titanic: Path) -> None:
    val = TitanicDataset(titanic_spec(titanic), "val", folds=Folds(5))
    women = np.asarray(pc.equal(val._data["Sex"], "female")).astype(np.int64)
    by_sex = titanic_metadata().score(val.targets(), women)
    assert by_sex == val.score(women, "accuracy")
    assert by_sex > titanic_metadata().score(val.targets(), np.zeros(len(val)))


def test_files_of_another_length_need_a_spec_that_says_so(tmp_path: Path) -> None:
    make_titanic(tmp_path, rows=50, test_rows=20)
    with pytest.raises(SchemaError, match="num_samples=891"):
        TitanicDataset(titanic_spec(tmp_path))
    assert len(TitanicDataset(titanic_spec(tmp_path, num_samples=None))) == 50


def test_the_template_of_titanic_has_a_name_people_can_ask_for() -> None:
    assert titanic_template().name == "titanic_v1"
    assert titanic_template() == titanic_template()


@pytest.mark.parametrize("split", ["train", "test"])
def test_houses_are_keys_and_values_under_readable_names(houses: Path, split: str) -> None:
    dataset = HousePricesDataset(house_prices_spec(houses), split=split)
    text = dataset[0]["text"]
    row = dataset._data.slice(0, 1).to_pylist()[0]
    said = dict(part.split(": ", 1) for part in text.split(" | "))
    assert said["living area"] == f"{row['GrLivArea']:,} sq ft"
    assert said["overall quality"] == str(row["OverallQual"])
    assert said["neighborhood"] == row["Neighborhood"]
    assert len(said) == sum(row[name] is not None for name in dataset.feature_names)
    assert "SalePrice" not in text
    assert "sale price" not in text
    assert ("labels" in dataset[0]) == (split == "train")


def test_every_column_of_house_prices_is_described(houses: Path) -> None:
    names = read_names(houses / "train.csv")
    assert set(house_prices_spec(houses).columns) == set(names) - {"Id"}
    assert set(house_prices_template().columns(())) == set(names) - {"Id", "SalePrice"}
    said = [column.name for column in house_prices_spec(houses).columns.values()]
    assert len(set(said)) == len(said)
    assert all(said)


def test_house_prices_are_float_labels_scored_by_logs(houses: Path) -> None:
    dataset = HousePricesDataset(house_prices_spec(houses), "val", folds=Folds(5))
    labels = dataset.labels()
    assert labels is not None
    assert labels.dtype == np.float32
    assert house_prices_metadata().score(dataset.targets(), labels * 1.1) == pytest.approx(np.log(1.1), rel=1e-3)


def test_a_submission_of_house_prices_is_what_its_sample_is(houses: Path, tmp_path: Path) -> None:
    test = HousePricesDataset(house_prices_spec(houses), "test")
    path = test.submission(np.full(len(test), 150_000.25), tmp_path / "submission.csv")
    assert path.read_text().splitlines()[:2] == ["Id,SalePrice", "1461,150000.25"]
