"""Made-up competitions: the real files' shape, the same bytes for the same seed, and something to learn."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from house_prices_data import house_prices_table, make_house_prices
from penstock.datasets.sample_data import make_titanic, titanic_table
from penstock.errors import ConfigError

TITANIC = ["PassengerId", "Survived", "Pclass", "Name", "Sex", "Age", "SibSp", "Parch", "Ticket", "Fare"]
TITANIC += ["Cabin", "Embarked"]
FILES = ("train.csv", "test.csv", "sample_submission.csv")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_titanic_has_the_columns_and_counts_of_the_real_files(tmp_path: Path) -> None:
    made = make_titanic(tmp_path / "new" / "titanic")
    train, test, sample = (pd.read_csv(made / name) for name in FILES)
    assert list(train) == TITANIC
    assert list(test) == [name for name in TITANIC if name != "Survived"]
    assert (len(train), len(test)) == (891, 418)
    assert train["PassengerId"].tolist() == list(range(1, 892))
    assert test["PassengerId"].tolist() == list(range(892, 1310))
    assert sample["PassengerId"].equals(test["PassengerId"])
    assert sample["Survived"].equals((test["Sex"] == "female").astype("int64"))


def test_titanic_has_the_holes_and_the_types_of_the_real_files(tmp_path: Path) -> None:
    train = pd.read_csv(make_titanic(tmp_path, rows=4000) / "train.csv")
    missing = train.isna().mean()
    assert missing["Age"] == pytest.approx(0.2, abs=0.04)
    assert missing["Cabin"] == pytest.approx(0.77, abs=0.04)
    assert 0 < missing["Embarked"] < 0.01
    assert not missing.drop(["Age", "Cabin", "Embarked"]).any()
    kinds = {name: str(kind) for name, kind in train.dtypes.items()}
    assert {kinds[name] for name in ("PassengerId", "Survived", "Pclass", "SibSp", "Parch")} == {"int64"}
    assert {kinds[name] for name in ("Age", "Fare")} == {"float64"}
    assert train["Age"].min() < 1
    assert set(train["Embarked"].dropna()) == {"S", "C", "Q"}
    assert train["Name"].str.contains(", ").all()
    assert train["Name"].str.contains('"').any()


def test_titanic_quotes_what_needs_it_and_nothing_else(tmp_path: Path) -> None:
    text = (make_titanic(tmp_path) / "train.csv").read_text(encoding="utf-8")
    line = text.splitlines()[1]
    assert text.startswith(",".join(TITANIC) + "\n")
    assert line.count('"') == 2
    assert "\r" not in text
    assert any('""' in one for one in text.splitlines()), "a nickname in quotation marks"


def test_who_travels_together_shares_ticket_surname_and_fare() -> None:
    table = titanic_table(3000, seed=5).to_pandas()
    parties = table.groupby("Ticket")
    assert parties.size().max() >= 5
    assert (parties["Fare"].nunique() == 1).all()
    assert (parties["Name"].agg(lambda names: names.str.split(",").str[0].nunique()) == 1).all()
    alone = table[parties["Name"].transform("size") == 1]
    assert not alone[["SibSp", "Parch"]].any(axis=None)
    assert (np.diff(table["Ticket"].factorize()[0]) != 0).mean() > 0.95, "families do not stand together in the file"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_survival_can_be_learned_but_not_perfectly(seed: int) -> None:
    table = titanic_table(20_000, seed=seed).to_pandas()
    majority = 1 - table["Survived"].mean()
    cells = table.assign(child=table["Age"].fillna(30) < 14, many=table["SibSp"] + table["Parch"] > 3)
    by_cell = cells.groupby(["Sex", "Pclass", "child", "many"])["Survived"].transform("mean").round()
    assert majority == pytest.approx(0.63, abs=0.02)
    assert 0.78 < (by_cell == table["Survived"]).mean() < 0.86
    women = table[table["Sex"] == "female"].groupby("Pclass")["Survived"].mean()
    assert women[1] > women[2] > women[3] + 0.2


def test_house_prices_has_the_79_features_of_the_real_files(tmp_path: Path) -> None:
    made = make_house_prices(tmp_path)
    train, test = read(made / "train.csv"), read(made / "test.csv")
    assert (len(train), len(test)) == (1460, 1459)
    assert len(train[0]) == 81
    assert list(train[0])[:5] == ["Id", "MSSubClass", "MSZoning", "LotFrontage", "LotArea"]
    assert list(train[0])[-3:] == ["SaleType", "SaleCondition", "SalePrice"]
    assert list(test[0]) == list(train[0])[:-1]
    assert list(read(made / "sample_submission.csv")[0]) == ["Id", "SalePrice"]
    assert len({*train[0], "1stFlrSF", "3SsnPorch", "GarageYrBlt", "PoolQC"}) == 81
    assert not any(value == "" for row in train for value in row.values()), "missing is written NA"


def test_a_house_without_a_garage_a_cellar_or_a_pool_says_na_where_they_are_described(tmp_path: Path) -> None:
    for row in read(make_house_prices(tmp_path) / "train.csv"):
        about = [row[name] == "NA" for name in ("GarageType", "GarageYrBlt", "GarageFinish", "GarageQual")]
        assert len(set(about)) == 1
        assert about[0] == (row["GarageCars"] == "0") == (row["GarageArea"] == "0")
        assert (row["BsmtQual"] == "NA") == (row["TotalBsmtSF"] == "0")
        assert (row["FireplaceQu"] == "NA") == (row["Fireplaces"] == "0")
        assert (row["PoolQC"] == "NA") == (row["PoolArea"] == "0")
        parts = ("BsmtFinSF1", "BsmtFinSF2", "BsmtUnfSF")
        assert sum(int(row[name]) for name in parts) == int(row["TotalBsmtSF"])
        assert int(row["YearBuilt"]) <= int(row["YearRemodAdd"]) <= int(row["YrSold"])


def test_prices_can_be_learned_but_not_perfectly() -> None:
    table = house_prices_table(3000, seed=1).to_pandas()
    features = table[["OverallQual", "GrLivArea", "YearBuilt", "GarageCars", "LotArea", "BsmtFinSF1"]].to_numpy(float)
    given = np.column_stack([features, np.log(features[:, [1, 4]]), np.ones(len(features))])
    price = np.log(table["SalePrice"].to_numpy(float))
    error = price - given @ np.linalg.lstsq(given, price, rcond=None)[0]
    explained = 1 - error.var() / price.var()
    assert 0.6 < explained < 0.93
    assert 140_000 < table["SalePrice"].median() < 200_000
    assert error.std() > 0.11


@pytest.mark.parametrize("make", [make_titanic, make_house_prices])
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(make: object, tmp_path: Path) -> None:
    assert callable(make)
    first, again, other = (make(tmp_path / name, rows=60, test_rows=30, seed=seed) for name, seed in ALIKE)
    for name in FILES[:2]:
        assert (first / name).read_bytes() == (again / name).read_bytes()
        assert (first / name).read_bytes() != (other / name).read_bytes()


ALIKE = [("a", 3), ("b", 3), ("c", 4)]


@pytest.mark.parametrize("make", [make_titanic, make_house_prices])
@pytest.mark.parametrize("rows", [2, 25])
def test_even_a_short_file_has_every_column_and_no_category_of_the_test_file_is_new(
    make: object, rows: int, tmp_path: Path
) -> None:
    assert callable(make)
    made = make(tmp_path, rows=rows, test_rows=200, seed=9)
    train, test = (pd.read_csv(made / name, keep_default_na=False, na_values=["NA", ""]) for name in FILES[:2])
    assert not train.isna().all().any()
    assert not test.isna().all().any()
    assert train[train.columns[1]].nunique() > 0
    for name in test.columns:
        if test[name].dtype == "str" and name not in ("Name", "Ticket", "Cabin"):
            assert set(test[name].dropna()) <= set(train[name].dropna()), name
    if "Survived" in train:
        assert set(train["Survived"]) == {0, 1}


def test_files_that_hold_something_else_are_left_alone(tmp_path: Path) -> None:
    make_titanic(tmp_path, rows=30, test_rows=10)
    make_titanic(tmp_path, rows=30, test_rows=10)  # the same again is no harm
    (tmp_path / "test.csv").write_text("mine\n1\n")
    (tmp_path / "train.csv").unlink()
    with pytest.raises(ConfigError, match=r"test\.csv"):
        make_titanic(tmp_path, rows=30, test_rows=10)
    assert (tmp_path / "test.csv").read_text() == "mine\n1\n"
    assert not (tmp_path / "train.csv").exists(), "none is written if one cannot be"


@pytest.mark.parametrize("make", [titanic_table, house_prices_table])
def test_no_rows_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=r"\brows\b.*\b0\b"):
        make(0)
