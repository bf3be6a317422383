"""Titanic: dataset, spec, metadata and template."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from penstock.datasets.base import ColumnSpec, CompetitionType, DatasetSpec
from penstock.datasets.metadata import CompetitionMetadata
from penstock.datasets.spec import as_path
from penstock.datasets.tabular import TabularDataset
from penstock.templates.base_template import BaseTemplate
from penstock.templates.sentences import SentenceTemplate

_COLUMNS = {
    "Survived": ColumnSpec(kind="categorical", name="survived", categories={0: "no", 1: "yes"}),
    "Pclass": ColumnSpec(
        kind="categorical", name="class", description="ticket class", categories={1: "first", 2: "second", 3: "third"}
    ),
    "Name": ColumnSpec(kind="text", name="name"),
    "Sex": ColumnSpec(kind="categorical", name="sex"),
    "Age": ColumnSpec(kind="numeric", name="age", unit="years"),
    "SibSp": ColumnSpec(
        kind="numeric", name="siblings and spouses", description="number of siblings and spouses aboard"
    ),
    "Parch": ColumnSpec(
        kind="numeric", name="parents and children", description="number of parents and children aboard"
    ),
    "Ticket": ColumnSpec(kind="text", name="ticket", description="ticket number"),
    "Fare": ColumnSpec(kind="numeric", name="fare", prefix="£", decimals=2),
    "Cabin": ColumnSpec(kind="text", name="cabin", description="cabin number"),
    "Embarked": ColumnSpec(
        kind="categorical",
        name="port",
        description="port of embarkation",
        categories={"C": "Cherbourg", "Q": "Queenstown", "S": "Southampton"},
    ),
}
_TEXT = (
    "{Name} was a {Sex} passenger[ aged {Age}] in {Pclass} class[, travelling with {SibSp} siblings or spouses and "
    "{Parch} parents or children][, who paid {Fare}][, stayed in cabin {Cabin}][ and embarked at {Embarked}]."
)


class TitanicDataset(TabularDataset):
    """Passengers, each in a sentence, with survival as the label.

    dataset = TitanicDataset(titanic_spec("data/titanic"), split="train", folds=Folds(5))
    """

    competition: ClassVar[str | None] = "titanic"
    metric = "accuracy"
    spec_from: ClassVar[str] = "titanic_spec(path), or infer(path).spec"

    def default_template(self) -> BaseTemplate:
        return titanic_template()


def titanic_spec(path: str | Path = "data/titanic", *, num_samples: int | None = 891) -> DatasetSpec:
    """Spec of the competition's files; `num_samples=None` for files of another length."""
    return DatasetSpec(
        competition_name="titanic",
        dataset_path=as_path(path),
        competition_type=CompetitionType.BINARY_CLASSIFICATION,
        num_samples=num_samples,
        num_features=10,
        target_column="Survived",
        id_column="PassengerId",
        columns=_COLUMNS,
        class_names=(0, 1),
    )


def titanic_metadata() -> CompetitionMetadata:
    """Metadata of the competition, which is scored by accuracy."""
    return CompetitionMetadata(
        competition_name="titanic",
        competition_type=CompetitionType.BINARY_CLASSIFICATION,
        description="Predict which passengers survived the sinking of the Titanic",
        evaluation_metric="accuracy",
        sample_submission_file="gender_submission.csv",
        url="https://www.kaggle.com/competitions/titanic",
        tags=("tabular", "binary classification"),
    )


def titanic_template() -> SentenceTemplate:
    """`titanic_v1`: a sentence about each passenger."""
    formats = {name: column.format() for name, column in _COLUMNS.items() if f"{{{name}}}" in _TEXT}
    return SentenceTemplate("titanic_v1", _TEXT, columns=formats)
