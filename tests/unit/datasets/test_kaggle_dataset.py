"""The base of datasets: what it checks, what it adds, and that the guide's House Prices runs as it is printed."""

from __future__ import annotations

import dataclasses
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from house_prices_data import make_house_prices
from penstock.datasets import ColumnSpec, DatasetSpec, Folds, KaggleDataset
from penstock.datasets.base import CompetitionType
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.templates import TabularTextConverter
from printed_datasets import HOUSE_PRICES, penstock_of


@pytest.fixture(scope="module")
def printed() -> Any:
    names: dict[str, Any] = {"__name__": "printed"}
    exec(compile(penstock_of(HOUSE_PRICES), "house_prices.py", "exec", dont_inherit=True), names)
    return names["HousePricesDataset"]


@pytest.fixture(scope="module")
def houses(tmp_path_factory: pytest.TempPathFactory) -> DatasetSpec:
    return DatasetSpec(
        competition_name="house-prices",
        dataset_path=make_house_prices(tmp_path_factory.mktemp("houses")),
        competition_type=CompetitionType.REGRESSION,
        num_samples=1460,
        num_features=79,
        target_column="SalePrice",
    )


def test_the_printed_dataset_reads_its_training_file(printed: Any, houses: DatasetSpec) -> None:
    dataset = printed(houses, split="train")
    prices = pd.read_csv(houses.dataset_path / "train.csv")["SalePrice"]
    assert len(dataset) == 1460
    sample = dataset[3]
    assert isinstance(sample["input_ids"], mx.array)
    assert sample["input_ids"].shape == sample["attention_mask"].shape
    assert sample["labels"].item() == prices[3]
    assert bytes(np.array(sample["input_ids"])[1:-1].tolist()).decode() == sample["text"]
    assert dataset[-1]["metadata"]["id"] == 1460
    assert dataset.id_column == "Id"


def test_the_printed_dataset_reads_its_test_file_without_labels(printed: Any, houses: DatasetSpec) -> None:
    dataset = printed(houses, split="test")
    assert len(dataset) == 1459
    assert "labels" not in dataset[0]
    assert dataset[0]["metadata"]["id"] == 1461


def test_the_printed_dataset_validates_on_a_fold_of_its_training_file(printed: Any, houses: DatasetSpec) -> None:
    folds = Folds(5)
    train, val = (printed(houses, split=split, folds=folds, fold=2) for split in ("train", "val"))
    whole = printed(houses)
    assert (train.split, val.split) == ("train", "val")
    assert len(train) + len(val) == 1460
    assert not set(train.rows.tolist()) & set(val.rows.tolist())
    for dataset in (train, val):
        for place in (0, len(dataset) - 1):
            there, here = whole[int(dataset.rows[place])], dataset[place]
            assert here["metadata"]["id"] == there["metadata"]["id"]
            assert here["labels"].item() == there["labels"].item()  # a fold of the training file has labels
            assert here["text"] == there["text"]


def test_the_printed_dataset_takes_a_tokenizer_and_a_length(
    printed: Any, houses: DatasetSpec, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = printed(houses, tokenizer="byte", max_length=32, add_special_tokens=False)
    with caplog.at_level("WARNING", "penstock.datasets.text_encoder"):
        assert dataset[0]["input_ids"].shape == (32,)
        assert dataset[1]["input_ids"].shape == (32,)
    assert dataset.cut_rows == 2
    assert dataset.cut_tokens == sum(len(dataset[row]["text"].encode()) - 32 for row in (0, 1))
    cut = [record for record in caplog.records if "max_length=32" in record.getMessage()]
    assert len(cut) == 1  # announced once, counted always
    with pytest.raises(TypeError, match="'tokeniser'"):
        printed(houses, tokeniser="byte")


def test_a_text_that_says_the_target_is_told_once(
    printed: Any, houses: DatasetSpec, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        dataset = printed(houses)
        assert "SalePrice" not in dataset[-1]["text"]  # as it is printed: styles leave the target out
        assert not caplog.records
        dataset = printed(houses)
        dataset.converter = TabularTextConverter(only=["LotArea", "SalePrice"])
        assert "SalePrice" in dataset[-1]["text"]
        _ = dataset[1]
        [warning] = caplog.records
        assert re.search(r"row -1\b.*SalePrice", warning.getMessage())
        caplog.clear()
        dataset = printed(houses)
        dataset.converter = TabularTextConverter(target="SalePrice")
        assert "SalePrice" not in dataset[0]["text"]
        assert "labels" in dataset[0]
        _ = printed(houses, split="test")[0]
    assert not caplog.records


# -- small datasets in memory -----------------------------------------------------------------------------------------


class Small(KaggleDataset):
    """Rows that somebody has already."""

    rows_of: Callable[[str], Any]

    def _load_data(self) -> None:
        self._data = type(self).rows_of(self.split)

    def _validate_data(self) -> None:
        self.validated = self.split

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": index, "split": self.split}


def small(rows: Any, **spec: Any) -> tuple[type[Small], DatasetSpec]:
    made: Any = type("MadeDataset", (Small,), {"rows_of": staticmethod(lambda split: rows)})
    usual: dict[str, Any] = {"competition_type": "binary", "target_column": "y"}
    return made, DatasetSpec(**{"competition_name": "made", "dataset_path": Path("nowhere")} | usual | spec)


NAN = float("nan")
FRAME = {"Id": [1, 2, 3, 4], "x": [0.5, None, 2.5, 3.5], "y": [0, 1, 0, 1]}
HOLDERS = {
    "arrow": pa.table,
    "pandas": pd.DataFrame,
    "polars": pl.DataFrame,
    "rows": lambda columns: [dict(zip(columns, row)) for row in zip(*columns.values())],
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_rows_may_be_held_by_anything(holder: Any) -> None:
    cls, spec = small(holder(FRAME), id_column="Id", num_samples=4, num_features=1)
    folds = Folds(2)
    parts = [cls(spec, split, folds=folds) for split in ("train", "val")]
    assert sorted(value for part in parts for value in part.ids().to_pylist()) == [1, 2, 3, 4]
    assert [len(part) for part in parts] == [2, 2]
    for part in parts:
        assert part.rows is not None
        assert part.ids().to_pylist() == [int(row) + 1 for row in part.rows]


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize(
    ("columns", "spec", "problem"),
    [
        ({}, {"num_samples": 5}, "num_samples=5"),
        ({}, {"num_features": 7}, r"num_features=7.*'Id'"),
        ({}, {"target_column": "Y"}, "'Y'"),
        ({}, {"target_column": "yy"}, "'y'"),
        ({}, {"id_column": "id"}, "id_column='id'"),
        ({}, {"group_column": "g"}, "group_column='g'"),
        ({}, {"columns": {"xx": "numeric"}}, r"'xx'.*'x'"),
        ({"Id": [1, 2, 1, 2]}, {"id_column": "Id"}, r"'Id'.*row 0\b"),
        ({"Id": [1, None, 3, 4]}, {"id_column": "Id"}, r"'Id'.*row 1\b"),
        ({"y": [0, 1, None, None]}, {}, r"'y'.*row 2\b"),
        ({"x": [None] * 4}, {}, r"'x'.*kind='ignore'"),
        ({"Id": [1.0, NAN, 3.0, 4.0]}, {"id_column": "Id"}, r"'Id'.*row 1\b"),
        ({"y": [0.0, 1.0, NAN, 0.0]}, {}, r"'y'.*row 2\b"),
        ({"x": [NAN] * 4}, {}, "'x'"),
        ({"y": list("abab")}, {"class_names": (False, True)}, "'y'"),
    ],
)
def test_rows_that_are_not_what_the_spec_says_are_refused(
    holder: Any, columns: dict[str, Any], spec: dict[str, Any], problem: str
) -> None:
    cls, about = small(holder(FRAME | columns), **spec)
    with pytest.raises((DataError, SchemaError), match=problem):
        cls(about)


def test_a_column_to_ignore_may_be_empty() -> None:
    cls, spec = small(pa.table(FRAME | {"x": [None] * 4}), columns={"x": ColumnSpec(kind="ignore")})
    assert len(cls(spec)) == 4


def test_a_test_file_needs_no_target_and_its_length_is_its_own() -> None:
    cls, spec = small(pa.table({"Id": [1, 2], "x": [1, 2]}), num_samples=4, num_features=1)
    assert len(cls(spec, "test")) == 2
    assert not cls(spec, "test").has_labels


def test_values_of_different_types_are_refused_by_name() -> None:
    cls, spec = small(pd.DataFrame(FRAME | {"y": pd.Series([0, "a", 1, None], dtype=object)}))
    with pytest.raises(DataError, match="'y'"):
        cls(spec)


def test_ids_are_row_numbers_where_there_are_none() -> None:
    cls, spec = small(pa.table({"x": [5, 6, 7, 8], "y": [0, 1, 0, 1]}))
    assert cls(spec).id_column is None
    assert cls(spec).ids().to_pylist() == [0, 1, 2, 3]
    val = cls(spec, "val", folds=Folds(2), fold=1)
    assert val.rows is not None
    assert val.ids().to_pylist() == val.rows.tolist()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"split": "validation"}, r"\bsplit\b.*'validation'"),
        ({"split": "val"}, r"\bval\b.*folds=Folds\(5\)"),
        ({"split": "val", "folds": Folds(2), "fold": 2}, r"\bfold\b"),
        ({"folds": 5}, r"\bfolds\b.*Folds\(\.\.\.\)"),
        ({"max_length": 0}, "max_length"),
        ({"transform": "upper"}, "transform"),
        ({"max_length": 2}, "max_length"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], problem: str) -> None:
    cls, spec = small(pa.table(FRAME))
    with pytest.raises(ConfigError, match=problem):
        _ = cls(spec, **options).encoder
    with pytest.raises(ConfigError, match="DatasetSpec"):
        cls({"competition_name": "made"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'data/made'.*infer\(path\)"):
        cls("data/made")  # type: ignore[arg-type]
    assert cls(spec, folds=Folds(2), fold=np.int64(1)).fold == 1  # type: ignore[arg-type]


def test_a_directory_that_is_not_there_or_no_dataset_is_told(tmp_path: Path, printed: Any) -> None:
    def open_at(path: Path) -> None:
        printed(DatasetSpec("houses", path, CompetitionType.REGRESSION))

    with pytest.raises(FileNotFoundError, match="'houses'"):
        open_at(tmp_path / "nowhere")
    (tmp_path / "readme.md").write_text("no data")
    with pytest.raises(FileNotFoundError, match=r"readme\.md"):
        open_at(tmp_path)
    with pytest.raises(FileNotFoundError, match="'houses'"):
        open_at(tmp_path / "readme.md")


def test_rows_that_were_never_loaded_are_missed() -> None:
    cls, spec = small(None)
    with pytest.raises(DataError, match=r"self\._data"):
        cls(spec)


@pytest.mark.parametrize(("kind", "number"), [("binary", int), ("regression", float)])
def test_targets_of_a_pandas_row_can_be_made_mlx_arrays(kind: str, number: type) -> None:
    frame = pd.DataFrame(FRAME)
    cls, spec = small(frame, competition_type=kind)
    row = cls(spec)._data.iloc[1]
    assert isinstance(row["y"], number)
    assert mx.array([row["y"]]).tolist() == [1]
    assert frame["y"].dtype == np.int64  # the frame that was given is left alone


def test_a_dataset_is_asked_in_terms_of_the_file_its_rows_are_from() -> None:
    cls, spec = small(pa.table(FRAME))
    val = cls(spec, "val", folds=Folds(2))
    assert val.validated == "train"  # type: ignore[attr-defined]
    assert val[0]["split"] == "train"
    assert val.split == "val"
    assert cls(spec, "test", folds=Folds(2))[0]["split"] == "test"


def test_a_validation_file_is_used_where_there_are_no_folds(tmp_path: Path, printed: Any) -> None:
    for split, rows in (("train", 4), ("val", 2)):
        pd.DataFrame({"Id": range(rows), "a": 1, "SalePrice": 5.0}).to_csv(tmp_path / f"{split}.csv", index=False)
    spec = DatasetSpec("houses", tmp_path, CompetitionType.REGRESSION, 4, target_column="SalePrice")
    assert len(printed(spec, "val")) == 2
    assert len(printed(spec, "val", folds=Folds(4))) == 1


@pytest.mark.parametrize("given", ["Id", None])
def test_a_validation_file_with_rows_of_the_training_file_is_told(
    tmp_path: Path, printed: Any, caplog: pytest.LogCaptureFixture, given: str | None
) -> None:
    for split, ids in (("train", ["01", "02", "3"]), ("val", ["3", "02", "4"])):
        pd.DataFrame({"Id": ids, "a": 1, "SalePrice": 5.0}).to_csv(tmp_path / f"{split}.csv", index=False)
    spec = DatasetSpec("houses", tmp_path, CompetitionType.REGRESSION, target_column="SalePrice", id_column=given)
    if given is not None:
        with pytest.raises(DataError, match=r"\bval\b"):
            printed(spec, "val")
        return
    with caplog.at_level("WARNING"):  # files that number their rows from 0 each have no ids
        printed(spec, "val")
    assert re.search(r"\b1\b.*\b3 ids", caplog.text)


@pytest.mark.parametrize("kept", [True, False])
def test_the_training_file_says_what_the_ids_are(tmp_path: Path, printed: Any, kept: bool) -> None:
    stores = range(6) if kept else [0, 1, 2] * 2
    pd.DataFrame({"store_id": stores, "SalePrice": 5.0}).to_csv(tmp_path / "train.csv", index=False)
    pd.DataFrame({"store_id": [7, 8]}).to_csv(tmp_path / "test.csv", index=False)
    spec = DatasetSpec("shops", tmp_path, CompetitionType.REGRESSION, target_column="SalePrice")
    printed = type("ShopsDataset", (printed,), {"_validate_data": lambda self: None})
    for split in ("train", "val", "test"):
        assert printed(spec, split, folds=Folds(2)).id_column == ("store_id" if kept else None)
    pd.DataFrame({"store_id": [7, 7]}).to_csv(tmp_path / "test.csv", index=False)
    if kept:
        with pytest.raises(DataError, match=r"columns=.*'store_id'"):
            printed(spec, "test")
    said = dataclasses.replace(spec, columns={"store_id": "categorical"})  # type: ignore[arg-type]
    assert printed(said, "test").id_column is None


def test_a_transform_is_applied_exactly_once() -> None:
    class Child(Small):
        rows_of = staticmethod(lambda split: pa.table(FRAME))

        def __getitem__(self, index: int) -> dict[str, Any]:
            return self[index + len(self)] if index < 0 else super().__getitem__(index)

    _, spec = small(None)
    calls: list[int] = []

    def count(sample: dict[str, Any]) -> dict[str, Any]:
        calls.append(sample["row"])
        return sample | {"seen": sample.get("seen", 0) + 1}

    dataset = Child(spec, transform=count)
    assert dataset[-1] == {"row": 3, "split": "train", "seen": 1}
    assert [sample["seen"] for sample in dataset] == [1, 1, 1, 1]
    assert calls == [3, 0, 1, 2, 3]


def test_a_transform_that_returns_nothing_is_refused() -> None:
    cls, spec = small(pa.table(FRAME))
    with pytest.raises(DataError, match=r"transform.*row 1\b"):
        _ = cls(spec, transform=lambda sample: sample.update(x=1))[1]


def test_samples_are_right_from_several_threads() -> None:
    cls, spec = small(pa.table(FRAME))
    val = cls(spec, "val", folds=Folds(2), transform=lambda sample: sample | {"seen": sample.get("seen", 0) + 1})
    found: list[Any] = []

    def read() -> None:
        for _ in range(300):
            found.append((val[0], val.split))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1200
    assert all(sample == {"row": 0, "split": "train", "seen": 1} and split == "val" for sample, split in found)


def test_constructors_keep_options_for_themselves_if_they_name_them() -> None:
    class Named(Small):
        rows_of = staticmethod(lambda split: pa.table(FRAME))

        def __init__(self, spec: DatasetSpec, split: str = "train", *, max_length: int = 7) -> None:
            super().__init__(spec, split, max_length=max_length + 1)

    class Grandchild(Named):
        def __init__(self, spec: DatasetSpec) -> None:
            super().__init__(spec, max_length=3)

    _, spec = small(None)
    assert Named(spec).max_length == 8
    assert Named(spec, folds=Folds(2)).folds == Folds(2)  # type: ignore[call-arg]
    assert Grandchild(spec, fold=1, folds=Folds(2)).fold == 1  # type: ignore[call-arg]
    assert Grandchild(spec).max_length == 4


class Pickled(Small):
    rows_of = staticmethod(lambda split: pa.table(FRAME))


def test_a_dataset_can_be_sent_to_another_process() -> None:
    _, spec = small(None)
    dataset = Pickled(spec, "val", folds=Folds(2), tokenizer="byte")
    assert dataset._tokenize("hi") == {"input_ids": [256, 104, 105, 257], "attention_mask": [1, 1, 1, 1]}
    again = pickle.loads(pickle.dumps(dataset))  # noqa: S301
    assert again[1] == dataset[1]
    assert again._tokenize("hi") == dataset._tokenize("hi")


def test_what_is_abstract_stays_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        KaggleDataset(small(None)[1])  # type: ignore[abstract]
