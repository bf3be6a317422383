"""A competition's tables as samples: specs, metadata with metrics, folds, the registry, and datasets. Door 001.

    CSV -> pa.Table -> folds (train rows | val rows) -> text by a template -> token ids -> samples, or columns whole

    what the data is      base.py, metadata.py      found out from the files: inference.py
    what there is         registry.py, discovery.py
    rows                  reading.py, folds.py, tabular.py, titanic.py, house_prices.py, generated.py
    what comes of it      metrics.py, submission.py

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from penstock._lazy import lazy

if TYPE_CHECKING:
    from penstock.datasets.base import ColumnSpec, CompetitionType, DatasetSpec, KaggleDataset
    from penstock.datasets.discovery import Discovery
    from penstock.datasets.folds import Fold, Folds
    from penstock.datasets.generated import make_house_prices, make_titanic
    from penstock.datasets.house_prices import HousePricesDataset
    from penstock.datasets.inference import infer
    from penstock.datasets.metadata import CompetitionMetadata
    from penstock.datasets.metrics import METRICS, Metric, get_metric
    from penstock.datasets.reading import read_table
    from penstock.datasets.registry import Competition, DatasetRegistry
    from penstock.datasets.submission import write_submission
    from penstock.datasets.tabular import TabularDataset
    from penstock.datasets.titanic import TitanicDataset

__all__ = [
    "METRICS",
    "ColumnSpec",
    "Competition",
    "CompetitionMetadata",
    "CompetitionType",
    "DatasetRegistry",
    "DatasetSpec",
    "Discovery",
    "Fold",
    "Folds",
    "HousePricesDataset",
    "KaggleDataset",
    "Metric",
    "TabularDataset",
    "TitanicDataset",
    "get_metric",
    "infer",
    "make_house_prices",
    "make_titanic",
    "read_table",
    "write_submission",
]

__getattr__ = lazy(
    __name__,
    {
        "METRICS": "penstock.datasets.metrics",
        "ColumnSpec": "penstock.datasets.base",
        "Competition": "penstock.datasets.registry",
        "CompetitionMetadata": "penstock.datasets.metadata",
        "CompetitionType": "penstock.datasets.base",
        "DatasetRegistry": "penstock.datasets.registry",
        "DatasetSpec": "penstock.datasets.base",
        "Discovery": "penstock.datasets.discovery",
        "Fold": "penstock.datasets.folds",
        "Folds": "penstock.datasets.folds",
        "HousePricesDataset": "penstock.datasets.house_prices",
        "KaggleDataset": "penstock.datasets.base",
        "Metric": "penstock.datasets.metrics",
        "TabularDataset": "penstock.datasets.tabular",
        "TitanicDataset": "penstock.datasets.titanic",
        "get_metric": "penstock.datasets.metrics",
        "infer": "penstock.datasets.inference",
        "make_house_prices": "penstock.datasets.generated",
        "make_titanic": "penstock.datasets.generated",
        "read_table": "penstock.datasets.reading",
        "write_submission": "penstock.datasets.submission",
    },
)
