"""House Prices in Ames, Iowa: dataset, spec, metadata and template."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from penstock.datasets.base import ColumnSpec, CompetitionType, DatasetSpec
from penstock.datasets.metadata import CompetitionMetadata
from penstock.datasets.spec import as_path
from penstock.datasets.tabular import TabularDataset
from penstock.templates.base_template import BaseTemplate
from penstock.templates.converters import KeyValueTemplate

_GRADES = {"Ex": "excellent", "Gd": "good", "TA": "typical", "Fa": "fair", "Po": "poor"}
_FINISHES = {
    "GLQ": "good living quarters",
    "ALQ": "average living quarters",
    "BLQ": "below average living quarters",
    "Rec": "average recreation room",
    "LwQ": "low quality",
    "Unf": "unfinished",
}
_BUILDINGS = {
    "1Fam": "single-family house",
    "2fmCon": "two-family conversion",
    "Duplex": "duplex",
    "TwnhsE": "townhouse at the end of a row",
    "Twnhs": "townhouse inside a row",
}

_TEXTS = {
    "MSSubClass": "dwelling code",
    "MSZoning": "zone",
    "Street": "street",
    "Alley": "alley",
    "LotShape": "lot shape",
    "LandContour": "land contour",
    "Utilities": "utilities",
    "LotConfig": "lot position",
    "LandSlope": "slope",
    "Neighborhood": "neighborhood",
    "Condition1": "location",
    "Condition2": "second location",
    "BldgType": "building",
    "HouseStyle": "style",
    "RoofStyle": "roof style",
    "RoofMatl": "roof material",
    "Exterior1st": "exterior",
    "Exterior2nd": "second exterior",
    "MasVnrType": "masonry veneer",
    "Foundation": "foundation",
    "BsmtExposure": "basement exposure",
    "Heating": "heating",
    "CentralAir": "central air",
    "Electrical": "electrical system",
    "Functional": "functionality",
    "GarageType": "garage",
    "GarageFinish": "garage finish",
    "PavedDrive": "paved drive",
    "Fence": "fence",
    "MiscFeature": "other feature",
    "SaleType": "sale type",
    "SaleCondition": "sale condition",
}
_GRADED = {
    "ExterQual": "exterior quality",
    "ExterCond": "exterior condition",
    "BsmtQual": "basement height",
    "BsmtCond": "basement condition",
    "HeatingQC": "heating quality",
    "KitchenQual": "kitchen quality",
    "FireplaceQu": "fireplace quality",
    "GarageQual": "garage quality",
    "GarageCond": "garage condition",
    "PoolQC": "pool quality",
}
_FINISHED = {"BsmtFinType1": "basement finish", "BsmtFinType2": "second basement finish"}
_AREAS = {
    "LotArea": "lot area",
    "MasVnrArea": "masonry veneer area",
    "BsmtFinSF1": "finished basement",
    "BsmtFinSF2": "second finished basement",
    "BsmtUnfSF": "unfinished basement",
    "TotalBsmtSF": "basement area",
    "1stFlrSF": "first floor",
    "2ndFlrSF": "second floor",
    "LowQualFinSF": "low quality finished area",
    "GrLivArea": "living area",
    "GarageArea": "garage area",
    "WoodDeckSF": "wood deck",
    "OpenPorchSF": "open porch",
    "EnclosedPorch": "enclosed porch",
    "3SsnPorch": "three season porch",
    "ScreenPorch": "screen porch",
    "PoolArea": "pool area",
}
_NUMBERS = {
    "OverallQual": "overall quality",
    "OverallCond": "overall condition",
    "YearBuilt": "built in",
    "YearRemodAdd": "remodeled in",
    "BsmtFullBath": "basement full baths",
    "BsmtHalfBath": "basement half baths",
    "FullBath": "full baths",
    "HalfBath": "half baths",
    "BedroomAbvGr": "bedrooms",
    "KitchenAbvGr": "kitchens",
    "TotRmsAbvGrd": "rooms",
    "Fireplaces": "fireplaces",
    "GarageYrBlt": "garage built in",
    "GarageCars": "garage cars",
    "MoSold": "month sold",
    "YrSold": "year sold",
}


class HousePricesDataset(TabularDataset):
    """Houses as keys and values, with the sale price as the label.

    dataset = HousePricesDataset(house_prices_spec("data/house-prices"), split="train", folds=Folds(5))
    """

    competition: ClassVar[str | None] = "house-prices"
    metric = "rmsle"
    spec_from: ClassVar[str] = "house_prices_spec(path), or infer(path).spec"

    def default_template(self) -> BaseTemplate:
        return house_prices_template(self.feature_names)


def house_prices_spec(path: str | Path = "data/house-prices", *, num_samples: int | None = 1460) -> DatasetSpec:
    """Spec of the competition's files; `num_samples=None` for files of another length."""
    return DatasetSpec(
        competition_name="house-prices",
        dataset_path=as_path(path),
        competition_type=CompetitionType.REGRESSION,
        num_samples=num_samples,
        num_features=79,
        target_column="SalePrice",
        id_column="Id",
        columns=_columns(),
    )


def house_prices_metadata() -> CompetitionMetadata:
    """Metadata of the competition, which is scored by the root mean squared error of log prices."""
    return CompetitionMetadata(
        competition_name="house-prices",
        competition_type=CompetitionType.REGRESSION,
        description="Predict what houses in Ames, Iowa, were sold for",
        evaluation_metric="rmsle",
        url="https://www.kaggle.com/competitions/house-prices-advanced-regression-techniques",
        tags=("tabular", "regression"),
    )


def house_prices_template(features: list[str] | None = None) -> KeyValueTemplate:
    """`house_prices_v1`: the features of a house under readable names."""
    columns = _columns()
    chosen = [name for name in columns if name != "SalePrice"] if features is None else features
    said = {name: columns[name].format() for name in chosen if name in columns}
    return KeyValueTemplate("house_prices_v1", columns=said, only=chosen)


def _columns() -> dict[str, ColumnSpec]:
    # Codes are text and not categorical: the real test file has some that its training file lacks.
    columns = {name: ColumnSpec(name=said) for name, said in _TEXTS.items()}
    columns["BldgType"] = ColumnSpec(name="building", categories=_BUILDINGS)
    columns["CentralAir"] = ColumnSpec(name="central air", categories={"Y": "yes", "N": "no"})
    columns |= {name: ColumnSpec(name=said, categories=_GRADES) for name, said in _GRADED.items()}
    columns |= {name: ColumnSpec(name=said, categories=_FINISHES) for name, said in _FINISHED.items()}
    columns |= {name: ColumnSpec(kind="numeric", name=said) for name, said in _NUMBERS.items()}
    columns |= {
        name: ColumnSpec(kind="numeric", name=said, unit="sq ft", thousands=True) for name, said in _AREAS.items()
    }
    columns["LotFrontage"] = ColumnSpec(kind="numeric", name="lot frontage", unit="ft")
    columns["MiscVal"] = ColumnSpec(kind="numeric", name="value of other features", prefix="$", thousands=True)
    columns["SalePrice"] = ColumnSpec(kind="numeric", name="sale price", prefix="$", thousands=True)
    return columns
