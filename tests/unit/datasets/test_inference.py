from __future__ import annotations

import codecs
import csv
import dataclasses
import functools
import gzip
import io
import threading
from collections.abc import Mapping, Sequence
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from house_prices_data import make_house_prices
from penstock.datasets import column_types, inference
from penstock.datasets.base import CompetitionType
from penstock.datasets.inference import infer
from penstock.datasets.sample_data import make_titanic
from penstock.datasets.tabular import TabularDataset
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.remote import path_of

Columns = Mapping[str, Sequence[Any]]


def text(columns: Columns, delimiter: str = ",") -> str:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values()))
    return out.getvalue()


def put(directory: Path, **files: Columns) -> Path:
    directory.mkdir(exist_ok=True)
    for name, columns in files.items():
        (directory / f"{name}.csv").write_text(text(columns))
    return directory


def kinds(directory: Path) -> dict[str, str | None]:
    return {name: column.kind for name, column in infer(directory).spec.columns.items()}


NUMBERS = list(range(100))
FLOATS = [number / 7 for number in NUMBERS]


def test_titanic_is_told(tmp_path: Path) -> None:
    metadata, spec, notes = infer(make_titanic(tmp_path / "titanic", rows=300, test_rows=100))
    assert (metadata.competition_name, metadata.evaluation_metric) == ("titanic", "accuracy")
    assert spec.competition_type is CompetitionType.BINARY_CLASSIFICATION
    assert (spec.target_column, spec.id_column) == ("Survived", "PassengerId")
    assert (spec.num_samples, spec.num_features) == (300, 10)
    told = {name: column.kind for name, column in spec.columns.items()}
    assert told.keys() == {*["Pclass", "Name", "Sex", "Age", "SibSp", "Parch", "Ticket", "Fare", "Cabin", "Embarked"]}
    assert {name: told[name] for name in ("Pclass", "Name", "Sex", "Age", "Ticket", "Fare", "Embarked")} == {
        "Pclass": "numeric",
        "Name": "text",
        "Sex": "categorical",
        "Age": "numeric",
        "Ticket": "text",
        "Fare": "numeric",
        "Embarked": "categorical",
    }
    assert notes["competition_type"].startswith("'Survived' has two values: 0 (")
    assert spec.files.keys() == {"train", "test", "sample_submission"}


def test_house_prices_are_told(tmp_path: Path) -> None:
    metadata, spec, notes = infer(make_house_prices(tmp_path / "house_prices", rows=300, test_rows=300))
    assert (metadata.competition_name, metadata.evaluation_metric) == ("house-prices", "rmse")
    assert spec.competition_type is CompetitionType.REGRESSION
    assert (spec.target_column, spec.id_column, spec.num_features) == ("SalePrice", "Id", 79)
    assert "different numbers from" in notes["competition_type"]


def test_every_guess_has_its_reason(tmp_path: Path) -> None:
    _, spec, notes = infer(make_titanic(tmp_path / "titanic", rows=100, test_rows=50))
    expected = {"competition_name", "competition_type", "evaluation_metric", "target_column", "id_column"}
    expected |= {f"columns.{name}" for name in spec.columns} | {f"files.{split}" for split in spec.files}
    assert expected <= notes.keys()
    assert all(notes.values())


def test_many_classes_are_multiclass_whether_words_or_numbers(tmp_path: Path) -> None:
    words = put(tmp_path / "w", train={"x": FLOATS, "kind": [f"k{n % 4}" for n in NUMBERS]}, test={"x": FLOATS})
    assert infer(words).spec.competition_type is CompetitionType.MULTICLASS_CLASSIFICATION
    digits = put(tmp_path / "d", train={"x": FLOATS, "label": [n % 10 for n in NUMBERS]}, test={"x": FLOATS})
    metadata, spec, notes = infer(digits)
    assert spec.competition_type is CompetitionType.MULTICLASS_CLASSIFICATION
    assert metadata.evaluation_metric == "accuracy"
    assert "ordinal_regression" in notes["competition_type"]


def test_whole_numbers_that_are_no_classes_are_regression(tmp_path: Path) -> None:
    counts = put(tmp_path / "c", train={"x": FLOATS, "count": [n * 3 for n in NUMBERS]}, test={"x": FLOATS})
    assert infer(counts).spec.competition_type is CompetitionType.REGRESSION
    sparse = put(tmp_path / "s", train={"x": FLOATS, "y": [(n % 4) * 1000 for n in NUMBERS]}, test={"x": FLOATS})
    assert infer(sparse).spec.competition_type is CompetitionType.REGRESSION


def test_a_sample_with_a_column_for_each_class_asks_for_probabilities(tmp_path: Path) -> None:
    train = {"id": NUMBERS, "x": FLOATS, "target": [f"Class_{n % 3}" for n in NUMBERS]}
    sample = {"id": [1, 2], "Class_0": [0.3, 0.3], "Class_1": [0.3, 0.3], "Class_2": [0.4, 0.4]}
    found = infer(put(tmp_path / "c", train=train, test={"id": [1, 2], "x": [1, 2]}, sample_submission=sample))
    assert found.spec.target_column == "target"
    assert found.metadata.evaluation_metric == "log_loss"


def test_a_sample_with_fractions_for_two_classes_asks_for_scores(tmp_path: Path) -> None:
    train = {"id": NUMBERS, "x": FLOATS, "y": [n % 2 for n in NUMBERS]}
    test = {"id": [1, 2], "x": [1, 2]}
    half = put(tmp_path / "c", train=train, test=test, sample_submission={"id": [1, 2], "y": [0.5, 0.5]})
    assert infer(half).metadata.evaluation_metric == "auc"
    whole = put(tmp_path / "d", train=train, test=test, sample_submission={"id": [1, 2], "y": [0, 1]})
    assert infer(whole).metadata.evaluation_metric == "accuracy"


def test_several_columns_of_0_and_1_are_labels_and_several_numbers_are_targets(tmp_path: Path) -> None:
    train = {"id": NUMBERS, "text": [f"comment {n}" for n in NUMBERS], "toxic": [n % 2 for n in NUMBERS]}
    train |= {"rude": [n % 3 // 2 for n in NUMBERS]}
    test = {"id": [1], "text": ["a"]}
    sample = {"id": [1], "toxic": [0.5], "rude": [0.5]}
    labels = infer(put(tmp_path / "a", train=train, test=test, sample_submission=sample))
    assert labels.spec.competition_type is CompetitionType.MULTILABEL_CLASSIFICATION
    assert labels.spec.target_column == ("toxic", "rude")
    train |= {"rude": FLOATS}
    many = infer(put(tmp_path / "b", train=train, test=test, sample_submission=sample))
    assert many.spec.competition_type is CompetitionType.MULTI_TARGET_REGRESSION
    assert many.metadata.evaluation_metric == "mcrmse"


def test_labels_in_one_cell_are_noticed(tmp_path: Path) -> None:
    names = np.array(["cat", "dog", "cow", "hen", "pig"])
    rng = np.random.default_rng(0)
    joined = [" ".join(sorted(names[rng.random(5) < 0.5])) or "none" for _ in NUMBERS]
    found = infer(put(tmp_path / "a", train={"x": FLOATS, "labels": joined}, test={"x": FLOATS}))
    assert "labels joined by ' '" in found.notes["competition_type"]


def test_texts_that_are_hardly_ever_the_same_are_no_classes(tmp_path: Path) -> None:
    words = put(tmp_path / "w", train={"x": FLOATS, "y": [f"word {n // 2}" for n in NUMBERS]}, test={"x": FLOATS})
    with pytest.raises(ConfigError, match=r"'y'.*--type"):
        infer(words)
    assert infer(words, competition_type="multiclass").spec.competition_type.has_classes
    comma = put(tmp_path / "c", train={"x": FLOATS, "y": [f"{n},5" for n in NUMBERS]}, test={"x": FLOATS})
    with pytest.raises(ConfigError, match="--type"):
        infer(comma)


def days(first: int, count: int) -> list[str]:
    return [str(np.datetime64("2024-01-01") + np.timedelta64(first + n, "D")) for n in range(count)]


def test_numbers_asked_for_later_days_are_a_time_series(tmp_path: Path) -> None:
    train = {"date": days(0, 100), "store": [n % 3 for n in NUMBERS], "sales": FLOATS}
    later = put(tmp_path / "l", train=train, test={"date": days(100, 9), "store": [1] * 9})
    _, spec, notes = infer(later)
    assert (spec.competition_type, spec.time_column) == (CompetitionType.TIME_SERIES, "date")
    assert notes["time_column"] == "the training file ends at 2024-04-09, and the test file begins at 2024-04-10"
    assert kinds(later)["date"] == "date"
    mixed = put(tmp_path / "m", train=train, test={"date": days(50, 9), "store": [1] * 9})
    assert infer(mixed).spec.competition_type is CompetitionType.REGRESSION
    assert infer(mixed).spec.time_column is None


def test_classes_asked_for_later_days_stay_classes_and_keep_the_time(tmp_path: Path) -> None:
    train = {"date": days(0, 100), "up": [n % 2 for n in NUMBERS]}
    found = infer(put(tmp_path / "l", train=train, test={"date": days(100, 9)}))
    assert found.spec.competition_type is CompetitionType.BINARY_CLASSIFICATION
    assert found.spec.time_column == "date"


def test_rows_of_something_that_the_test_file_has_others_of_are_a_group(tmp_path: Path) -> None:
    train = {"row_id": NUMBERS, "patient_id": [n // 5 for n in NUMBERS], "x": FLOATS, "y": [n % 2 for n in NUMBERS]}
    found = infer(put(tmp_path / "g", train=train, test={"row_id": [100, 101], "patient_id": [50, 51], "x": [1, 2]}))
    assert (found.spec.group_column, found.spec.id_column) == ("patient_id", "row_id")
    shared = infer(put(tmp_path / "h", train=train, test={"row_id": [100, 101], "patient_id": [1, 51], "x": [1, 2]}))
    assert shared.spec.group_column is None


def test_kinds_of_columns_are_told_by_their_values(tmp_path: Path) -> None:
    train: dict[str, Sequence[Any]] = {
        "id": NUMBERS,
        "flag": [n % 2 for n in NUMBERS],
        "truth": ["true", "false"] * 50,
        "word": ["yes", "no"] * 50,
        "few": ["red", "green", "blue", "red"] * 25,
        "one": ["same"] * 100,
        "comment": [f"the comment number {n}" for n in NUMBERS],
        "number": FLOATS,
        "code": [f"{n % 30:03d}" for n in NUMBERS],
        "day": days(0, 100),
        "nothing": [""] * 100,
        "target": FLOATS,
    }
    assert kinds(put(tmp_path / "k", train=train)) == {
        "flag": "boolean",
        "truth": "boolean",
        "word": "boolean",
        "few": "categorical",
        "one": "categorical",
        "comment": "text",
        "number": "numeric",
        "code": "categorical",
        "day": "date",
        "nothing": "ignore",
    }


def test_a_column_whose_test_values_are_new_is_no_category(tmp_path: Path) -> None:
    train = {"colour": ["red", "blue"] * 50, "flag": [0, 1] * 50, "y": FLOATS}
    directory = put(tmp_path / "u", train=train, test={"colour": ["red", "pink"], "flag": [1, 2]})
    assert kinds(directory) == {"colour": "text", "flag": "numeric"}
    assert "'pink'" in infer(directory).notes["columns.colour"]


def test_codes_that_only_the_test_file_has_make_a_column_text(tmp_path: Path) -> None:
    train = {"id": NUMBERS, "zip": [10000 + number for number in NUMBERS], "y": [0, 1] * 50}
    directory = put(tmp_path / "zips", train=train, test={"id": [100, 101], "zip": ["99999", "01234"]})
    _, spec, notes = infer(directory)
    assert spec.columns["zip"].kind == "text"
    assert notes["columns.zip"] == "train.csv has numbers, but test.csv has codes: '01234'"
    assert "01234" in TabularDataset(spec, "test")[1]["text"]


def test_columns_that_only_the_training_file_has_are_ignored_if_the_sample_says_what_is_asked(tmp_path: Path) -> None:
    train = {"id": NUMBERS, "x": FLOATS, "casual": FLOATS, "count": FLOATS}
    directory = put(
        tmp_path / "b", train=train, test={"id": [1], "x": [1]}, sample_submission={"id": [1], "count": [0]}
    )
    assert infer(directory).spec.target_column == "count"
    assert kinds(directory)["casual"] == "ignore"


def test_files_are_found_whatever_their_case_format_and_compression(tmp_path: Path) -> None:
    train, test = {"x": FLOATS, "y": FLOATS}, {"x": FLOATS}
    (tmp_path / "Train.csv.gz").write_bytes(gzip.compress(text(train).encode()))
    pq.write_table(pa.table(test), tmp_path / "TEST.parquet")
    (tmp_path / "my_submission_example.csv").write_text("x,y\n1,2\n")
    found = infer(tmp_path)
    assert dict(found.spec.files) == {
        "train": "Train.csv.gz",
        "test": "TEST.parquet",
        "sample_submission": "my_submission_example.csv",
    }
    assert found.metadata.train_file == "Train.csv.gz"
    assert found.spec.target_column == "y"


def test_types_that_only_parquet_has_are_told_too(tmp_path: Path) -> None:
    columns = {
        "colour": pa.array(["red", "blue"] * 50).dictionary_encode(),
        "list": pa.array([[1, 2]] * 100),
        "bytes": pa.array([b"x"] * 100),
        "visitor_id": pa.array([n // 2 for n in NUMBERS]),
        "y": pa.array(FLOATS),
    }
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    others = {name: values for name, values in columns.items() if name != "y"} | {"visitor_id": ["a"] * 100}
    pq.write_table(pa.table(others), tmp_path / "test.parquet")
    assert kinds(tmp_path) == {"colour": "categorical", "list": "ignore", "bytes": "ignore", "visitor_id": "numeric"}
    assert infer(tmp_path).spec.group_column == "visitor_id"


@pytest.mark.parametrize("delimiter", [";", "\t", "|", ","])
@pytest.mark.parametrize("mark", [codecs.BOM_UTF8, b""])
def test_marks_and_odd_delimiters_do_not_matter(tmp_path: Path, delimiter: str, mark: bytes) -> None:
    (tmp_path / "train.csv").write_bytes(mark + text({"Id": NUMBERS, "x": FLOATS, "y": FLOATS}, delimiter).encode())
    (tmp_path / "test.csv").write_bytes(mark + text({"Id": [1], "x": [1]}, delimiter).encode())
    found = infer(tmp_path).spec
    assert (found.id_column, found.target_column, found.num_features) == ("Id", "y", 1)


def test_what_is_given_is_not_guessed(tmp_path: Path) -> None:
    directory = put(tmp_path / "a", train={"a": NUMBERS, "b": FLOATS, "c": [n % 4 for n in NUMBERS]}, test={"a": [1]})
    metadata, spec, notes = infer(
        directory, name="mine", target="c", id_column="a", competition_type="ordinal", metric="kappa"
    )
    assert metadata.competition_name == spec.competition_name == "mine"
    assert (spec.target_column, spec.id_column, metadata.evaluation_metric) == ("c", "a", "kappa")
    assert spec.competition_type is CompetitionType.ORDINAL_REGRESSION
    assert notes["target_column"] == "given"
    assert infer(directory, target=["b", "c"]).spec.target_column == ("b", "c")


def test_a_directory_that_is_no_dataset_is_told_what_was_looked_for_and_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"x")
    (tmp_path / "test.csv").write_text("a\n1\n")
    with pytest.raises(ConfigError, match=r"train\.csv.*test\.csv"):
        infer(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"train\.csv"):
        infer(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match=r"\bgone\b"):
        infer(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"photo\.jpg"):
        infer(tmp_path / "photo.jpg")


@pytest.mark.parametrize(
    ("train", "test", "error", "message"),
    [
        ("", "a\n1\n", DataError, r"train\.csv"),
        ("a,b\n", "a\n1\n", DataError, r"train\.csv"),
        ("a,b,c\n1,2,3\n", "a\n1\n", ConfigError, r"'b'.*'c'"),
        ("a,b\n1,2\n", "a,b\n1,2\n", ConfigError, r"test\.csv.*'a'"),
        ("a,b\n1,2\n", None, ConfigError, "--target"),
        ("a,y,target\n1,2,3\n", None, ConfigError, r"'y'.*'target'"),
        (
            "a,b,y\n1,2,3\n2,3,4\n3,4,5\n",
            "a,B\n1,2\n",
            SchemaError,
            r"test\.csv.*'B'",
        ),
        ("a,y\n1,5\n2,5\n", "a\n1\n", DataError, "'y'"),
        ("a,y\n1,\n2,\n", "a\n1\n", DataError, "'y'"),
        ("a,y\n1,2,3\n", "a\n1\n", DataError, r"train\.csv"),
        ("a,a\n1,2\n", "a\n1\n", SchemaError, "'a'"),
        ("a,y\n1,\xe9\n", "a\n1\n", DataError, r"train\.csv"),
    ],
)
def test_bad_files_are_a_clear_error(
    tmp_path: Path, train: str, test: str | None, error: type[Exception], message: str
) -> None:
    (tmp_path / "train.csv").write_bytes(train.encode("latin-1"))
    if test is not None:
        (tmp_path / "test.csv").write_text(test)
    with pytest.raises(error, match=message):
        infer(tmp_path)


def test_a_column_that_is_given_and_not_there_is_an_error(tmp_path: Path) -> None:
    directory = put(tmp_path / "a", train={"price": NUMBERS, "b": FLOATS}, test={"b": [1]})
    with pytest.raises(SchemaError, match=r"target.*'price'"):
        infer(directory, target="prize")
    with pytest.raises(SchemaError, match=r"'c'.*'price'"):
        infer(directory, id_column="c")
    with pytest.raises(ConfigError, match="'binry'"):
        infer(directory, competition_type="binry")
    with pytest.raises(ConfigError, match=r"'acuracy'.*metric"):
        infer(directory, metric="acuracy")


def test_a_directory_behind_a_url_is_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec  # type: ignore[import-untyped]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memory = fsspec.filesystem("memory")
    memory.pipe("/inferred/train.csv", text({"x": FLOATS, "y": FLOATS}).encode())
    memory.pipe("/inferred/test.csv", text({"x": FLOATS}).encode())
    try:
        spec = infer("memory://inferred").spec
    finally:
        memory.rm("/inferred", recursive=True)
    assert str(spec.dataset_path) == "memory://inferred"
    assert (spec.competition_name, spec.target_column, spec.num_samples) == ("inferred", "y", 100)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


def test_files_of_a_web_server_are_asked_for_by_their_usual_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    put(tmp_path / "web", train={"x": FLOATS, "y": FLOATS}, test={"x": FLOATS})
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            spec = infer(f"{url}/web").spec
            assert spec.files == {"train": "train.csv", "test": "test.csv"}
            assert len(TabularDataset(dataclasses.replace(spec, files={}), "test")) == 100
            with pytest.raises(ConfigError, match=r"\bweb\b"):
                infer(f"{url}/nowhere")
            with pytest.raises(FileNotFoundError, match=r"files=.*'train'"):
                TabularDataset(dataclasses.replace(spec, dataset_path=path_of(f"{url}/nowhere"), files={}), "train")
        finally:
            server.shutdown()
            thread.join()


def test_columns_of_numbers_are_typed_in_few_attempts_each(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []
    cast = pc.cast
    monkeypatch.setattr(column_types.pc, "cast", lambda *given: (attempts.append(given), cast(*given))[1])
    texts = pa.table({f"c{number}": ["0.5", None, " 1.25"] for number in range(20)})
    typed = column_types.typed_columns(texts, {}, {}, "train.csv", has_codes=False, decimal_commas=False)
    assert set(typed.schema.types) == {pa.float64()}
    assert len(attempts) <= 2 * 20  # each one that fails takes as long as typing the column


def test_the_names_of_many_columns_are_not_listed_for_each_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = 0

    class Counted:
        def __init__(self, table: pa.Table) -> None:
            self._table = table

        def __getattr__(self, name: str) -> Any:
            nonlocal listed
            listed += name == "column_names"
            return getattr(self._table, name)

    def read(*given: Any) -> Any:
        files = real_read(*given)
        return dataclasses.replace(files, train=Counted(files.train), test=Counted(files.test))

    def dates(train: Any, test: Any, names: list[str]) -> Any:
        found = real_dates(train._table, test._table, names)
        return found._replace(train=Counted(found.train), test=Counted(found.test))

    real_read, real_dates = inference._read, inference.dates_of_files
    monkeypatch.setattr(inference, "_read", read)
    monkeypatch.setattr(inference, "dates_of_files", dates)
    features = {f"f{n}": NUMBERS for n in range(40)}
    put(tmp_path, train={**features, "target": NUMBERS}, test=features)
    assert len(infer(tmp_path).spec.columns) == 40
    assert listed <= 4
