"""Files whose dates are not ISO: one format for train and test, folds in time, and a word about what stays text."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.datasets.base import ColumnSpec, CompetitionType, DatasetSpec
from penstock.datasets.folds import Folds
from penstock.datasets.inference import infer
from penstock.datasets.spec_file import check_files, read_spec, write_spec
from penstock.datasets.submission import write_submission
from penstock.datasets.tables import read_table
from penstock.datasets.tabular import TabularDataset
from penstock.errors import DataError

FIRST = dt.date(2018, 11, 1)
DAYS = [FIRST + dt.timedelta(days=number) for number in range(100)]


def put(directory: Path, train: Sequence[str], test: Sequence[str], name: str = "day", sample: str = "") -> Path:
    directory.mkdir(exist_ok=True)
    rows = [f'{n},"{when}",{(n * 37) % 11 + n / 7:.3f}' for n, when in enumerate(train)]
    (directory / "train.csv").write_text(f"id,{name},sold\n" + "\n".join(rows) + "\n")
    rows = [f'{n + 1000},"{when}"' for n, when in enumerate(test)]
    (directory / "test.csv").write_text(f"id,{name}\n" + "\n".join(rows) + "\n")
    if sample:
        (directory / "sample_submission.csv").write_text(sample)
    return directory


def written(days: Sequence[dt.date], form: str) -> list[str]:
    return [day.strftime(form) for day in days]


@pytest.mark.parametrize("form", ["%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%b %d, %Y", "%d-%b-%Y", "%d.%m.%Y %H:%M"])
def test_folds_are_in_time_whatever_the_form_of_dates(tmp_path: Path, form: str) -> None:
    found = infer(put(tmp_path / "c", written(DAYS[:80], form), written(DAYS[80:], form)))
    assert found.spec.time_column == "day"
    assert found.spec.competition_type is CompetitionType.TIME_SERIES
    assert found.spec.columns["day"] == ColumnSpec(kind="date", date_format=form)
    val = TabularDataset(found.spec, "val", folds=Folds(4), fold=3)
    train = TabularDataset(found.spec, "train", folds=Folds(4), fold=3)
    assert val.rows is not None
    assert train.rows is not None
    assert min(val.rows) > max(train.rows)
    assert "2018-11-01" in train.texts()[0]
    file = write_spec(found, tmp_path / "c" / "competition.yaml")
    assert read_spec(file)[1] == found.spec
    assert check_files(found.metadata, found.spec) == {"train": 80, "test": 20}


def test_the_test_file_follows_the_training_file_and_may_decide_for_it(tmp_path: Path) -> None:
    early = [dt.date(2019, month, day) for month in range(1, 13) for day in range(1, 13)]
    later = [dt.date(2020, 1, day) for day in range(1, 13)]
    train = put(tmp_path / "a", written([*early, dt.date(2019, 12, 31)], "%d/%m/%Y"), written(later, "%d/%m/%Y"))
    spec = DatasetSpec("c", train, CompetitionType.REGRESSION, target_column="sold", id_column="id")
    test = TabularDataset(spec, "test")  # alone, 01/02/2020 could be either
    assert "2020-01-02" in test.texts()[1]
    test_decides = put(tmp_path / "b", written(early, "%d/%m/%Y"), written([*later, dt.date(2020, 1, 31)], "%d/%m/%Y"))
    found = infer(test_decides)
    assert (found.spec.time_column, found.spec.date_formats) == ("day", {"day": "%d/%m/%Y"})
    assert "2019-01-02" in TabularDataset(found.spec).texts()[1]


def test_a_column_that_nothing_decides_is_named_and_stays_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    early = written([dt.date(2019, month, day) for month in range(1, 13) for day in range(1, 13)], "%d/%m/%Y")
    place = put(tmp_path / "c", early, ["01/02/2020"])
    with caplog.at_level(logging.WARNING):
        found = infer(place)
    assert "column 'day'" in caplog.text
    assert "by %d/%m/%Y and" in found.notes["doubts.day"]
    assert "date_format" in found.notes["columns.day"]
    assert (found.spec.columns["day"].kind, found.spec.time_column) == ("text", None)
    caplog.clear()
    spec = DatasetSpec("c", place, CompetitionType.REGRESSION, target_column="sold", id_column="id")
    with caplog.at_level(logging.WARNING):
        assert "02/01/2019" in TabularDataset(spec).texts()[1]
    assert "'day'" in caplog.text
    dated = DatasetSpec(
        "c", place, CompetitionType.REGRESSION, target_column="sold", id_column="id", columns={"day": "date"}
    )
    with pytest.raises(DataError, match=r"'day'.*date_format"):
        TabularDataset(dated)
    said = ColumnSpec(kind="date", date_format="%d/%m/%Y")
    dataset = TabularDataset(
        DatasetSpec(
            "c",
            place,
            CompetitionType.REGRESSION,
            target_column="sold",
            id_column="id",
            columns={"day": said},
            time_column="day",
        )
    )
    assert "2019-01-02" in dataset.texts()[1]


def test_a_word_among_dates_is_a_warning_or_an_error_with_its_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    days = written(DAYS[:80], "%d.%m.%Y")
    days[7] = "unknown"
    place = put(tmp_path / "c", days, written(DAYS[80:], "%d.%m.%Y"))
    with caplog.at_level(logging.WARNING):
        assert infer(place).spec.columns["day"].kind == "text"
    assert "'unknown'" in caplog.text
    with pytest.raises(DataError, match=r"'day'.*'unknown'"):
        read_table(place / "train.csv", kinds={"day": "date"})


def test_numbers_are_dates_only_if_they_are_written_so(tmp_path: Path) -> None:
    place = put(tmp_path / "c", written(DAYS[:80], "%Y%m%d"), written(DAYS[80:], "%Y%m%d"))
    found = infer(place)
    assert (found.spec.time_column, found.spec.date_formats) == ("day", {"day": "%Y%m%d"})
    assert read_table(place / "train.csv", kinds={"day": "date"})["day"][0].as_py() == FIRST
    other = put(tmp_path / "d", ["2017", "2018"] * 40, ["2019"] * 5, name="year")
    assert infer(other).spec.time_column == "year"
    with pytest.raises(DataError, match=r"'year'.*'2017'"):
        read_table(other / "train.csv", kinds={"year": "date"})
    codes = put(tmp_path / "e", written(DAYS[:80], "%Y%m%d"), written(DAYS[80:], "%Y%m%d"), name="code")
    assert infer(codes).spec.columns["code"].kind == "numeric"


def test_dates_beside_timestamps_are_compared(tmp_path: Path) -> None:
    found = infer(put(tmp_path / "c", written(DAYS[:80], "%Y-%m-%d"), written(DAYS[80:], "%Y-%m-%d %H:%M:%S")))
    assert found.spec.time_column == "day"
    mixed = infer(put(tmp_path / "d", written(DAYS[:80], "%Y-%m-%d"), written(DAYS[80:], "%d.%m.%Y")))
    assert mixed.spec.time_column == "day"
    assert len(TabularDataset(mixed.spec, "test")) == 20
    same_day = infer(put(tmp_path / "e", written(DAYS[:80], "%d.%m.%Y"), written(DAYS[79:], "%d.%m.%Y")))
    assert same_day.spec.time_column == "day"


def test_a_time_that_some_rows_lack_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    days = written(DAYS[:80], "%d.%m.%Y")
    days[3] = ""
    with caplog.at_level(logging.WARNING):
        found = infer(put(tmp_path / "c", days, written(DAYS[80:], "%d.%m.%Y")))
    assert found.spec.time_column is None
    assert "1 row" in found.notes["doubts.day"]
    assert "folds" in caplog.text


def test_ids_that_are_dates_stay_as_they_are_written(tmp_path: Path) -> None:
    place, rows = tmp_path, [(n * 37) % 11 + n / 7 for n in range(80)]
    text = "".join(f"{when},{sold}\n" for when, sold in zip(written(DAYS[:80], "%d.%m.%Y"), rows))
    (place / "train.csv").write_text("Date,sold\n" + text)
    asked = written(DAYS[80:], "%d.%m.%Y")
    (place / "test.csv").write_text("Date\n" + "".join(f"{when}\n" for when in asked))
    (place / "sample_submission.csv").write_text("Date,sold\n" + "".join(f"{when},0.0\n" for when in asked))
    found = infer(place)
    assert (found.spec.id_column, found.spec.time_column) == ("Date", "Date")
    val = TabularDataset(found.spec, "val", folds=Folds(3), fold=2)
    assert val.rows is not None
    assert min(val.rows) > 50
    test = TabularDataset(found.spec, "test")
    out = write_submission(test, np.arange(20.0), place / "out.csv")
    assert out.read_text().splitlines()[1] == f"{asked[0]},0.0"


@pytest.mark.parametrize("form", ["%d.%m.%Y", "%b %d, %Y"])
def test_folds_read_times_that_a_dataset_has_as_texts(form: str) -> None:
    spec = DatasetSpec("c", Path("x"), CompetitionType.REGRESSION, target_column="y", time_column="day")
    table: Any = pa.table({"y": np.arange(100.0), "day": written(DAYS, form)})
    fold = Folds(4).split(table, spec, 1)
    assert max(fold.train) < min(fold.val)
    unclear = pa.table({"y": [0.0] * 12, "day": [f"{n:02}/02/2019" for n in range(1, 13)]})
    with pytest.raises(DataError, match="'day'"):
        Folds(2).split(unclear, spec, 0)


def test_targets_are_not_taken_for_dates(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("x,when\n" + "".join(f"{n},{d}.01.2019\n" for n, d in enumerate([30, 31] * 9)))
    spec = DatasetSpec("c", tmp_path, CompetitionType.BINARY_CLASSIFICATION, target_column="when")
    assert TabularDataset(spec).class_names == ("30.01.2019", "31.01.2019")
