"""Specs and metadata: values that check themselves, and come back from JSON as they were."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.datasets import ColumnSpec, CompetitionMetadata, CompetitionType, DataFiles, DatasetSpec
from penstock.errors import ConfigError


def full_spec() -> DatasetSpec:
    return DatasetSpec(
        competition_name="stars",
        dataset_path=Path("data/stars"),
        competition_type=CompetitionType.ORDINAL_REGRESSION,
        num_samples=10,
        num_features=3,
        target_column="stars",
        id_column="Id",
        columns={
            "size": ColumnSpec(kind="numeric", unit="m", decimals=1, thousands=True, prefix="~"),
            "port": ColumnSpec(
                kind="categorical", name="harbour", categories={1: "first", "S": "south"}, missing="none"
            ),
        },
        group_column="ship",
        time_column="day",
        class_names=(1, 2, 3),
        files=DataFiles({"train": "training.csv"}, delimiter=";", encoding="latin-1"),
    )


@pytest.mark.parametrize(
    ("given", "member"),
    [
        ("regression", CompetitionType.REGRESSION),
        ("Binary", CompetitionType.BINARY_CLASSIFICATION),
        ("MULTICLASS_CLASSIFICATION", CompetitionType.MULTICLASS_CLASSIFICATION),
        ("multi-label", CompetitionType.MULTILABEL_CLASSIFICATION),
        ("time series", CompetitionType.TIME_SERIES),
        (CompetitionType.RANKING, CompetitionType.RANKING),
    ],
)
def test_a_type_is_found_by_what_people_write(given: Any, member: CompetitionType) -> None:
    assert CompetitionType(given) is member


def test_an_unknown_type_is_refused_with_what_was_meant() -> None:
    with pytest.raises(ConfigError, match="'regression'"):
        CompetitionType("regresion")
    with pytest.raises(ConfigError, match="binary_classification"):
        CompetitionType(3)


def test_types_know_whether_they_have_classes() -> None:
    classification = {member for member in CompetitionType if member.is_classification}
    assert {member.name.split("_")[0] for member in classification} == {"BINARY", "MULTICLASS", "MULTILABEL"}
    assert CompetitionType.ORDINAL_REGRESSION.has_classes
    assert not CompetitionType.MULTILABEL_CLASSIFICATION.has_classes
    assert not CompetitionType.REGRESSION.has_classes


def test_the_spec_of_the_guide_can_be_written_as_printed() -> None:
    spec = DatasetSpec(
        competition_name="house-prices",
        dataset_path=Path("data/house-prices"),
        competition_type=CompetitionType.REGRESSION,
        num_samples=1460,
        num_features=79,
        target_column="SalePrice",
    )
    assert spec.dataset_path / "train.csv" == Path("data/house-prices/train.csv")
    assert spec.targets == ("SalePrice",)


def test_texts_are_made_paths_types_and_columns() -> None:
    spec = DatasetSpec("a", "data/a", "binary", columns={"x": "numeric", "y": {"kind": "text", "unit": "m"}})  # type: ignore[arg-type, dict-item]
    assert spec.dataset_path == Path("data/a")
    assert spec.competition_type is CompetitionType.BINARY_CLASSIFICATION
    assert spec.columns == {"x": ColumnSpec(kind="numeric"), "y": ColumnSpec(kind="text", unit="m")}


def test_a_url_stays_a_url_and_can_be_joined() -> None:
    spec = DatasetSpec("a", "s3://bucket/a", "binary")  # type: ignore[arg-type]
    assert str(spec.dataset_path / "train.csv") == "s3://bucket/a/train.csv"
    assert DatasetSpec.from_dict(spec.to_dict()) == spec


def test_a_spec_comes_back_from_json_as_it_was() -> None:
    spec = full_spec()
    again = DatasetSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert list(again.columns["port"].categories) == [1, "S"]
    assert pickle.loads(pickle.dumps(spec)) == spec  # noqa: S301
    assert hash(again) == hash(spec)


def test_metadata_comes_back_from_json_as_it_was() -> None:
    metadata = CompetitionMetadata(
        "stars",
        "ordinal",
        "How many",
        "qwk",
        tags=("a", "b"),
        url="https://example.org",
        deadline="2030-01-01",  # type: ignore[arg-type]
    )
    assert CompetitionMetadata.from_dict(json.loads(json.dumps(metadata.to_dict()))) == metadata
    assert hash(metadata) == hash(CompetitionMetadata.from_dict(metadata.to_dict()))


def test_a_column_is_said_as_its_spec_says() -> None:
    port = full_spec().columns["port"].format()
    assert (port.name, port.missing, port.missing_text, port.unseen) == ("harbour", "say", "none", "keep")
    assert ColumnSpec(decimals=0).format().decimals == 0
    size = full_spec().columns["size"].format()
    assert (size.unit, size.prefix, size.decimals, size.thousands, size.missing) == ("m", "~", 1, True, "omit")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"competition_name": " "}, "competition_name"),
        ({"num_samples": -1}, "num_samples"),
        ({"num_features": 2.5}, "num_features"),
        ({"target_column": ["a", "b"]}, "'a'"),
        ({"competition_type": "multilabel", "target_column": ["a", "a"]}, "'a'"),
        ({"target_column": "a", "id_column": "a"}, "'a'"),
        ({"class_names": ["a", "a"]}, "class_names"),
        ({"competition_type": "binary", "class_names": [1, 2, 3]}, "class_names"),
        ({"columns": {"x": "numerical"}}, "'numeric'"),
        ({"columns": {"x": 3}}, "ColumnSpec"),
        ({"columns": {"x": {"units": "m"}}}, "'unit'"),
        ({"columns": {"x": {"categories": [[1, 2, 3]]}}}, "categories"),
        ({"files": {"trian": "x.csv"}}, "'train'"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(options: dict[str, Any], problem: str) -> None:
    usual: dict[str, Any] = {"competition_name": "a", "dataset_path": "data", "competition_type": "multiclass"}
    with pytest.raises(ConfigError, match=problem):
        DatasetSpec(**usual | options)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"competition_nam": "a"}, "'competition_name'"),
        ({"competition_name": "a", "dataset_path": "x"}, "'competition_type'"),
        ([], "DatasetSpec"),
    ],
)
def test_a_file_that_is_no_spec_is_refused(given: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        DatasetSpec.from_dict(given)


def test_metadata_scores_with_its_metric() -> None:
    metadata = CompetitionMetadata(
        competition_name="house-prices",
        competition_type=CompetitionType.REGRESSION,
        description="Predict house prices",
        evaluation_metric="rmse",
        train_file="train.csv",
        test_file="test.csv",
    )
    assert metadata.metric.name == "rmse"
    assert metadata.score([1.0, 2.0], [1.0, 4.0]) == pytest.approx(2**0.5)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"evaluation_metric": "rmes"}, "'rmse'"),
        ({"evaluation_metric": "auc"}, r"'auc'.*'rmse'"),
        ({"competition_name": ""}, "competition_name"),
        ({"competition_type": "regress"}, "'regression'"),
    ],
)
def test_metadata_that_cannot_be_is_refused(options: dict[str, Any], problem: str) -> None:
    usual: dict[str, Any] = {"competition_name": "a", "competition_type": "regression", "evaluation_metric": "rmse"}
    with pytest.raises(ConfigError, match=problem):
        CompetitionMetadata(**usual | options)
    with pytest.raises(ConfigError, match=r"metadata.*'competition_type'"):
        CompetitionMetadata.from_dict({"competition_name": "a"})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"target_column": 5}, "target_column"),
        ({"target_column": ["a", 5]}, "target_column"),
        ({"id_column": 5}, r"id_column.*'5'"),
        ({"group_column": 4}, "group_column"),
        ({"time_column": ["day"]}, "time_column"),
        ({"delimiter": 5}, "delimiter"),
        ({"delimiter": ";;"}, "delimiter"),
        ({"encoding": 8}, "encoding"),
        ({"columns": [1]}, "columns"),
        ({"columns": {1: "numeric"}}, r"columns.*'1'"),
        ({"files": {"train": 3}}, r"files\['train'\]"),
        ({"class_names": "ab"}, r"class_names.*'ab'"),
        ({"class_names": True}, "class_names"),
        ({"class_names": [[1], [2]]}, "class_names"),
    ],
)
def test_fields_of_another_type_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        DatasetSpec.from_dict({"competition_name": "a", "dataset_path": "b", "competition_type": "binary"} | options)


def test_values_of_numpy_are_made_plain() -> None:
    spec = DatasetSpec(
        "a",
        "b",  # type: ignore[arg-type]
        "multilabel",  # type: ignore[arg-type]
        num_samples=np.int64(3),  # type: ignore[arg-type]
        target_column=np.array(["x", "y"]),  # type: ignore[arg-type]
        class_names=np.array([0, 1]),  # type: ignore[arg-type]
        columns={"z": ColumnSpec(categories=np.array([1, 2]))},  # type: ignore[arg-type]
    )
    assert spec == DatasetSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert (spec.num_samples, spec.targets, spec.class_names) == (3, ("x", "y"), (0, 1))
    assert [type(value) for value in (spec.num_samples, spec.class_names[0])] == [int, int]  # type: ignore[index]
