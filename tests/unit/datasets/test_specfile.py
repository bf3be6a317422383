from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.datasets.base import ColumnSpec, CompetitionType, DatasetSpec
from penstock.datasets.generated import make_house_prices, make_titanic
from penstock.datasets.inference import Inference, infer
from penstock.datasets.metadata import CompetitionMetadata
from penstock.datasets.spec_file import SPEC_FILE, check_files, read_spec, write_spec
from penstock.errors import ConfigError, DataError, SchemaError


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def titanic(tmp_path: Path) -> Path:
    """A directory with generated data and its competition.yaml."""
    directory = make_titanic(tmp_path / "titanic", rows=120, test_rows=40)
    write_spec(infer(directory), directory / SPEC_FILE)
    return directory


def correct(directory: Path, old: str, new: str) -> Path:
    file = directory / SPEC_FILE
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    return file


@pytest.mark.parametrize("make", [make_titanic, make_house_prices])
def test_what_is_written_is_read_back_and_fits_the_files(tmp_path: Path, make: object) -> None:
    directory = make(tmp_path / "data", rows=150, test_rows=60)  # type: ignore[operator]
    found = infer(directory)
    file = write_spec(found, directory / SPEC_FILE)
    metadata, spec = read_spec(file)
    assert metadata == found.metadata
    assert spec == found.spec
    assert check_files(metadata, spec) == {"train": 150, "test": 60, "sample_submission": 60}


def test_reasons_stand_beside_the_guesses(titanic: Path) -> None:
    text = (titanic / SPEC_FILE).read_text()
    assert "target_column: Survived  # " in text
    assert "evaluation_metric: accuracy  # what is usual for binary_classification" in text
    assert "  Sex: {kind: categorical}  # 2 values: 'male' (" in text
    assert "dataset_path" not in text


def test_corrections_are_read(titanic: Path) -> None:
    correct(
        titanic, "Pclass: {kind: numeric}", "Pclass: {kind: categorical, name: class, categories: {1: 1st, 2: 2nd}}"
    )
    correct(titanic, "evaluation_metric: accuracy", "evaluation_metric: auc")
    correct(titanic, "description: ''", "description: Who survived")
    correct(titanic, "tags: []", "tags: [ships, people]")
    metadata, spec = read_spec(titanic / SPEC_FILE)
    assert (metadata.evaluation_metric, metadata.description, metadata.tags) == (
        "auc",
        "Who survived",
        ("ships", "people"),
    )
    assert spec.columns["Pclass"] == ColumnSpec(kind="categorical", name="class", categories={1: "1st", 2: "2nd"})


def test_a_moved_directory_takes_its_file_along(titanic: Path, tmp_path: Path) -> None:
    moved = titanic.rename(tmp_path / "elsewhere")
    metadata, spec = read_spec(moved / SPEC_FILE)
    assert spec.dataset_path == moved
    check_files(metadata, spec)


def test_a_file_elsewhere_says_where_the_data_is(
    titanic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_spec(infer(titanic), tmp_path / "mine.yaml")
    assert read_spec(file)[1].dataset_path == titanic
    file.write_text(file.read_text().replace(f"dataset_path: {titanic}", "dataset_path: titanic"))
    monkeypatch.chdir("/")
    assert read_spec(file)[1].dataset_path == titanic


def test_corrections_are_never_written_over_unless_that_is_said(titanic: Path) -> None:
    file = correct(titanic, "description: ''", "description: mine")
    with pytest.raises(ConfigError, match="is there already and may hold corrections"):
        write_spec(infer(titanic), file)
    assert "description: mine" in file.read_text()
    write_spec(infer(titanic), file, overwrite=True)
    assert "description: ''" in file.read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "target_column:",
            "target_colum:",
            r"competition\.yaml: unknown key 'target_colum'; did you mean 'target_column'",
        ),
        ("competition_name: titanic", "", r"competition\.yaml: 'competition_name' is missing; add a line such as"),
        ("binary_classification  #", "binry  #", r"competition\.yaml: 'binry' is not a competition type"),
        ("evaluation_metric: accuracy", "evaluation_metric: rmse", r"yaml: metric 'rmse' does not go with binary"),
        ("evaluation_metric: accuracy", "evaluation_metric: acc0racy", r"yaml: 'acc0racy' is not a metric"),
        (
            "Sex: {kind: categorical}",
            "Sex: {kind: categoricl}",
            r"yaml: columns: Sex: kind must be one of .*did you mean 'categorical'",
        ),
        ("Sex: {kind: categorical}", "Sex: {knd: text}", r"yaml: columns: Sex: ColumnSpec has no field 'knd'"),
        ("Sex: {kind: categorical}", "No: {kind: categorical}", r"columns has False, which YAML takes for no text"),
        ("num_samples: 120", "num_samples: many", r"yaml: num_samples must be a count, or empty, got 'many'"),
        ("tags: []", "tags: [1]", r"yaml: tags is 1, expected a text; if it is one, write it in quotes: '1'"),
        ("tags: []", "url: 7", r"yaml: url is 7, expected a text"),
        ("tags: []", "dataset_path: [a]", r"yaml: dataset_path is \['a'\], expected a text"),
        ("id_column: PassengerId", "id_column: 5", r"yaml: id_column must be text, got 5"),
        ("Sex: {kind: categorical}", "Sex: {missing: no}", r"yaml: columns: Sex: missing is False, expected a text"),
        ("Sex: {kind: categorical}", "Sex: {decimals: two}", r"yaml: columns: Sex: decimals is 'two', expected"),
        ("description: ''", "tags: [a]\ndescription: ''", r"competition\.yaml, line \d+.*'tags' is there twice"),
        ("description: ''", "description: 'a", r"competition\.yaml, line \d+"),
        ("train: train.csv", "trian: train.csv", r"yaml: files has 'trian'; .*did you mean 'train'"),
    ],
)
def test_a_file_that_makes_no_sense_is_an_error_that_names_it(titanic: Path, old: str, new: str, message: str) -> None:
    correct(titanic, old, new)
    with pytest.raises(ConfigError, match=message):
        read_spec(titanic / SPEC_FILE)


def test_columns_that_are_no_mapping_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / SPEC_FILE
    file.write_text("competition_name: a\ncompetition_type: regression\ncolumns: [a, b]\nevaluation_metric: rmse\n")
    with pytest.raises(ConfigError, match=r"columns is \['a', 'b'\]; expected a line for each"):
        read_spec(file)
    file.write_text("")
    with pytest.raises(ConfigError, match="is empty; it needs at least"):
        read_spec(file)


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        (
            "target_column: Survived",
            "target_column: Survivd",
            SchemaError,
            "target column 'Survivd' is not in the train",
        ),
        ("target_column: Survived", "target_column: Age", SchemaError, r"only the train file has \['Survived'\]"),
        ("target_column: Survived", "target_column: Sex", SchemaError, "or mark columns with kind: ignore"),
        ("target_column: Survived", "target_column:", ConfigError, "target_column is missing; train.csv has"),
        (
            "num_samples: 120",
            "num_samples: 121",
            SchemaError,
            "says num_samples=121, and the training file has 120 rows; .* or leave num_samples empty",
        ),
        ("num_features: 10", "num_features: 11", SchemaError, "says num_features=11, and the training file has 10"),
        ("id_column: PassengerId", "id_column: Pclass", DataError, "ids in all are there again"),
        ("id_column: PassengerId", "id_column: Nobody", SchemaError, "id_column='Nobody' is not in the train file"),
        ("Name: {kind: text}", "Name: {kind: numeric}", DataError, "column 'Name' has .*, which is not a number"),
        (
            "Fare: {kind: numeric}",
            "Fair: {kind: numeric}",
            SchemaError,
            "describes column 'Fair', .*did you mean 'Fare'",
        ),
        (
            "train: train.csv",
            "train: learn.csv",
            FileNotFoundError,
            "'learn.csv' is not in .*; it has competition.yaml",
        ),
        ("test: test.csv", "test: exam.csv", FileNotFoundError, "'exam.csv' is not in"),
    ],
)
def test_a_file_that_disagrees_with_the_data_is_a_clear_error(
    titanic: Path, old: str, new: str, error: type[Exception], message: str
) -> None:
    correct(titanic, old, new)
    with pytest.raises(error, match=message):
        check_files(*read_spec(titanic / SPEC_FILE))


@pytest.mark.parametrize(
    ("kind", "target", "classes", "message"),
    [
        ("binary", "Embarked", None, "needs two values of the target 'Embarked', and the training file has 3"),
        ("regression", "Sex", None, "the target 'Sex' is string, and numbers are to be predicted"),
        ("multiclass", "Pclass", (1, 2), "the target 'Pclass' is 3 in row 2, which is none of the classes"),
    ],
)
def test_a_target_that_cannot_be_what_the_type_says_is_an_error(
    tmp_path: Path, kind: str, target: str, classes: tuple[int, ...] | None, message: str
) -> None:
    rows = [("Sex", "Pclass", "Embarked"), ("m", 1, "S"), ("f", 2, "C"), ("m", 3, "Q")]
    (tmp_path / "train.csv").write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    metric = "rmse" if kind == "regression" else "accuracy"
    metadata = CompetitionMetadata("a", CompetitionType(kind), evaluation_metric=metric)
    spec = DatasetSpec("a", tmp_path, CompetitionType(kind), target_column=target, class_names=classes)
    with pytest.raises((DataError, SchemaError), match=message):
        check_files(metadata, spec)


def test_words_that_yaml_takes_for_booleans_are_pointed_out(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("b,ill\nno,no\nyes,yes\nyes,no\n")
    file = tmp_path / SPEC_FILE
    lines = "competition_name: a\ncompetition_type: binary\ntarget_column: ill\n"
    file.write_text(lines + "class_names: [no, yes]\n")
    with pytest.raises(SchemaError, match="YAML reads no, yes, off and on without quotes as false and true"):
        check_files(*read_spec(file))
    file.write_text(lines + "columns: {b: {kind: categorical, categories: {no: bad, yes: good}}}\n")
    with pytest.raises(DataError, match=r"'b' .* has 'no' in row 0, a category .* YAML reads no and yes as false and"):
        check_files(*read_spec(file))
    file.write_text(lines + "class_names: ['no', 'yes']\n")
    assert check_files(*read_spec(file)) == {"train": 3}


def test_a_deadline_that_yaml_takes_for_a_date_is_a_text(titanic: Path) -> None:
    assert read_spec(correct(titanic, "tags: []", "deadline: 2024-01-31"))[0].deadline == "2024-01-31"


def test_a_file_elsewhere_leads_back_to_a_relative_directory(
    titanic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").mkdir()
    assert read_spec(write_spec(infer("titanic"), "specs/mine.yaml"))[1].dataset_path == titanic


def test_a_password_is_not_written(titanic: Path) -> None:
    found = infer(titanic)
    remote = dataclasses.replace(found.spec, dataset_path="s3://key:secret@bucket/a")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'s3://key:\*\*\*@bucket/a' has a password in it, and a.yaml is plain"):
        write_spec(found._replace(spec=remote), titanic / "a.yaml")
    assert not (titanic / "a.yaml").exists()


NAMES = st.text(min_size=1, max_size=12).filter(lambda name: name.strip() and name == name.strip())


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.lists(NAMES, min_size=3, max_size=6, unique=True),
    note=st.text(max_size=30),
    description=st.text(max_size=30),
    path=st.sampled_from(["here", "s3://bucket/data"]),
)
def test_any_name_and_any_reason_survive(
    tmp_path: Path, names: list[str], note: str, description: str, path: str
) -> None:
    target, id_column, *others = names
    metadata = CompetitionMetadata(
        names[0], CompetitionType.REGRESSION, description, "rmse", train_file=names[1], tags=tuple(others)
    )
    place = tmp_path if path == "here" else path
    spec = DatasetSpec(
        names[0],
        place,  # type: ignore[arg-type]
        CompetitionType.REGRESSION,
        5,
        len(others),
        target,
        id_column,
        columns={name: ColumnSpec(kind="text", categories={1: name}) for name in others},
        files={"train": names[1]},
    )
    notes = dict.fromkeys(["competition_name", "target_column", *(f"columns.{name}" for name in others)], note)
    file = write_spec(Inference(metadata, spec, notes), tmp_path / SPEC_FILE, overwrite=True)
    assert read_spec(file) == (metadata, dataclasses.replace(spec))
