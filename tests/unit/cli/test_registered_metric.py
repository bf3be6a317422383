"""The metric of a competition: that of the class which reads it."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from house_prices_data import make_house_prices
from penstock.datasets.base import CompetitionType
from penstock.datasets.house_prices import HousePricesDataset, house_prices_metadata
from penstock.datasets.inference import infer
from penstock.datasets.registry import DatasetRegistry
from penstock.datasets.sample_data import make_titanic
from penstock.datasets.spec_file import read_spec
from penstock.datasets.tabular import TabularDataset

Call = Callable[..., Any]


@pytest.fixture
def houses(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(here / "share"))
    return make_house_prices(here / "hp", rows=60, test_rows=20)


class LoudDataset(TabularDataset):
    metric = "mae"


def test_add_takes_the_metric_of_the_class_it_chooses(houses: Path, penstock: Call) -> None:
    result = penstock("competitions", "add", "hp", "--name", "house-prices")
    assert result.exit_code == 0, result.stderr
    assert ["metric", "rmsle"] in [line.split() for line in result.stdout.splitlines()]
    registry = DatasetRegistry()
    assert registry.get_metadata("house-prices").evaluation_metric == "rmsle"
    assert "evaluation_metric: rmsle  # HousePricesDataset" in (houses / "competition.yaml").read_text()
    dataset = registry.load("house-prices")
    guess = np.full(len(dataset), 180_000.0)
    assert dataset.score(guess) == HousePricesDataset(dataset.spec).score(guess) < 2


def test_add_refuses_another_metric_than_that_of_the_class(houses: Path, penstock: Call) -> None:
    result = penstock("competitions", "add", "hp", "--name", "house-prices", "--metric", "rmse")
    assert result.exit_code == 1
    assert re.search(r"--metric.*HousePricesDataset", result.stderr)
    assert not (houses / "competition.yaml").exists()
    assert penstock("competitions", "add", "hp", "--name", "mine", "--metric", "rmse").exit_code == 0
    assert DatasetRegistry().load("mine").metric == "rmse"
    result = penstock("competitions", "add", "hp", "--name", "house-prices")
    assert result.exit_code == 1
    assert "competition.yaml: evaluation_metric" in result.stderr
    assert DatasetRegistry().list_competitions() == ["mine"]


def test_the_class_wins_over_what_was_registered_and_the_log_says_so(
    houses: Path, tmp_path: Path, penstock: Call, caplog: pytest.LogCaptureFixture
) -> None:
    registry, found = DatasetRegistry(), infer(houses, name="house-prices", metric="rmse")
    with caplog.at_level(logging.WARNING):
        registry.register_competition("house-prices", found.metadata, found.spec)
    assert "rmse" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert registry.load("house-prices").metric == "rmsle"
    assert "rmsle" in caplog.text
    assert registry.search_competitions(metric="rmsle") == ["house-prices"]
    assert registry.search_competitions(metric="rmse") == []
    [listed] = json.loads(penstock("competitions", "list", "--json").stdout)["competitions"]
    assert listed["metric"] == "rmsle"


def test_a_class_that_was_given_or_discovered_states_its_metric_too(houses: Path, here: Path) -> None:
    registry, found = DatasetRegistry(), infer(houses, name="dwellings")
    registry.register_competition("dwellings", found.metadata, found.spec, dataset_class=LoudDataset)
    assert (registry.metric_of("dwellings"), registry.load("dwellings").metric) == ("mae", "mae")
    found = infer(houses, name="cabins")
    registry.register_competition("cabins", found.metadata, found.spec)
    (here / "cabins_dataset.py").write_text(
        "from penstock.datasets import TabularDataset\nclass CabinsDataset(TabularDataset):\n    metric = 'medae'\n"
    )
    assert registry.metric_of("cabins") == "rmse"
    registry.discover(here / "cabins_dataset.py")
    assert registry.metric_of("cabins") == "medae"
    other = DatasetRegistry()  # knows the class by the name of its file, which it runs when it loads
    assert (other.metric_of("cabins"), other.load("cabins").metric) == ("rmse", "medae")


def test_an_alias_of_the_same_metric_is_no_disagreement(houses: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry, spec = DatasetRegistry(), infer(houses, name="house-prices").spec
    said = dataclasses.replace(house_prices_metadata(), evaluation_metric="Root Mean Squared Logarithmic Error")
    with caplog.at_level(logging.WARNING):
        registry.register_competition("house-prices", said, spec)
        registry.load("house-prices")
    assert not caplog.records


def test_a_class_is_not_taken_for_data_that_predicts_something_else(here: Path) -> None:
    registry, spec = DatasetRegistry(here / "registry"), infer(make_titanic(here / "t", rows=60, test_rows=20)).spec
    metadata = infer(here / "t", name="titanic", competition_type="regression", metric="mae").metadata
    spec = dataclasses.replace(spec, competition_name="titanic", competition_type=CompetitionType.REGRESSION)
    registry.register_competition("titanic", metadata, spec)
    assert registry.class_of("titanic").why.startswith("TitanicDataset")
    assert registry.load("titanic").metric == "mae"


def test_the_metric_that_add_writes_is_read_back(houses: Path, penstock: Call) -> None:
    penstock("competitions", "add", "hp", "--name", "house-prices")
    assert read_spec(houses / "competition.yaml")[0].evaluation_metric == "rmsle"
    assert penstock("competitions", "add", "hp", "--name", "house-prices").exit_code == 0
