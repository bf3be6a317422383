"""The blocks about competitions of design document 001 as it prints them, with `data.` read as `penstock.`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import penstock.datasets
from house_prices_data import make_house_prices
from penstock.datasets import CompetitionMetadata, CompetitionType, DatasetRegistry, DatasetSpec, KaggleDataset
from penstock.datasets.sample_data import make_titanic
from penstock.datasets.titanic import titanic_metadata, titanic_spec, titanic_template
from penstock.loaders import MLXDataLoader
from printed_datasets import HOUSE_PRICES, penstock_of

TYPES = """
    class CompetitionType(Enum):
        BINARY_CLASSIFICATION = "binary_classification"
        MULTICLASS_CLASSIFICATION = "multiclass_classification"
        REGRESSION = "regression"
        # ... more types
"""

SPEC = """
    @dataclass
    class DatasetSpec:
        competition_name: str
        dataset_path: Path
        competition_type: CompetitionType
        num_samples: int
        num_features: int
        # ... additional fields
"""

DATASET = """
    class KaggleDataset(ABC):
        def __init__(self, spec: DatasetSpec, split: str = "train"):
            self.spec = spec
            self.split = split

        @abstractmethod
        def __getitem__(self, index: int) -> Dict[str, Any]:
            pass
"""

REGISTRY = """
    registry = DatasetRegistry()

    # Register a new competition
    registry.register_competition(
        competition_name="titanic",
        metadata=metadata,
        spec=spec
    )

    # List available competitions
    competitions = registry.list_competitions()

    # Search competitions
    results = registry.search_competitions(
        competition_type=CompetitionType.BINARY_CLASSIFICATION
    )
"""

TEMPLATES = """
    from data.templates.engine import TextTemplateEngine
    from data.templates.converters import TabularTextConverter

    engine = TextTemplateEngine()

    # Register templates
    engine.register_template(competition_template)

    # Convert data
    texts = engine.convert_data(
        data=df,
        template_name="titanic_v1"
    )
"""

STEP_3 = """
    from data.core.metadata import CompetitionMetadata

    # Create metadata
    metadata = CompetitionMetadata(
        competition_name="house-prices",
        competition_type=CompetitionType.REGRESSION,
        description="Predict house prices",
        evaluation_metric="rmse",
        train_file="train.csv",
        test_file="test.csv"
    )

    # Create spec
    spec = DatasetSpec(
        competition_name="house-prices",
        dataset_path=Path("data/house-prices"),
        competition_type=CompetitionType.REGRESSION,
        num_samples=1460,
        num_features=79,
        target_column="SalePrice"
    )

    # Register
    registry.register_competition("house-prices", metadata, spec)
"""


def run(block: str, **names: Any) -> dict[str, Any]:
    exec(compile(penstock_of(block), "<document 001>", "exec", dont_inherit=True), names)
    return names


def test_the_base_classes_have_what_the_document_shows() -> None:
    names = run(TYPES, Enum=Enum)
    for member in names["CompetitionType"]:
        assert CompetitionType(member.value).name == member.name
    shown = run(SPEC, dataclass=dataclass, Path=Path, CompetitionType=CompetitionType)["DatasetSpec"]
    ours = [field.name for field in fields(DatasetSpec)]
    assert ours[:5] == [field.name for field in fields(shown)]
    shown = run(DATASET, ABC=ABC, abstractmethod=abstractmethod, DatasetSpec=DatasetSpec, Dict=dict, Any=Any)
    assert shown["KaggleDataset"].__abstractmethods__ <= KaggleDataset.__abstractmethods__


def test_the_registry_block_registers_lists_and_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_titanic(tmp_path / "titanic")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    names = run(
        REGISTRY,
        DatasetRegistry=DatasetRegistry,
        CompetitionType=CompetitionType,
        metadata=titanic_metadata(),
        spec=titanic_spec(home),
    )
    assert "titanic" in names["competitions"]
    assert "titanic" in names["results"]
    assert DatasetRegistry().get_spec("titanic") == titanic_spec(home)


def test_the_template_block_converts_a_frame(tmp_path: Path) -> None:
    frame = pd.read_csv(make_titanic(tmp_path) / "train.csv")
    texts = run(TEMPLATES, competition_template=titanic_template(), df=frame)["texts"]
    assert len(texts) == len(frame)
    assert frame["Sex"][0] in texts[0]


def test_the_three_steps_for_house_prices_work_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_house_prices(tmp_path / "data" / "house-prices")
    (tmp_path / "datasets").mkdir()
    file = tmp_path / "datasets" / "house_prices.py"
    file.write_text(penstock_of(HOUSE_PRICES), encoding="utf-8")

    registry = DatasetRegistry(tmp_path / "registry")
    found = registry.discover(tmp_path / "datasets")
    assert not found.errors
    assert found.found["house-prices"].__name__ == "HousePricesDataset"
    run(STEP_3, CompetitionType=CompetitionType, DatasetSpec=DatasetSpec, Path=Path, registry=registry)

    dataset = registry.load("house-prices", split="train")
    assert type(dataset) is found.found["house-prices"]
    frame = pd.read_csv(tmp_path / "data" / "house-prices" / "train.csv")
    batch = next(iter(MLXDataLoader(dataset, batch_size=8, num_workers=4)))
    rows = batch.metadata["row"]
    assert batch["labels"].shape == (8, 1)
    assert np.array(batch["labels"])[:, 0].tolist() == frame["SalePrice"][rows].astype(np.float32).tolist()
    assert [each["id"] for each in batch.metadata["metadata"]] == frame["Id"][rows].tolist()
    tested = registry.load("house-prices", split="test")
    assert len(tested) == 1459
    assert "labels" not in tested[0]


def test_types_are_in_the_package_and_its_modules() -> None:
    assert penstock.datasets.KaggleDataset is KaggleDataset
    assert penstock.datasets.base.DatasetSpec is DatasetSpec
    assert penstock.datasets.metadata.CompetitionMetadata is CompetitionMetadata
    assert penstock.datasets.registry.DatasetRegistry is DatasetRegistry
