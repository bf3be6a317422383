from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from house_prices_data import make_house_prices
from penstock.datasets.base import ColumnSpec, CompetitionType, DatasetSpec
from penstock.datasets.inference import Inference, infer
from penstock.datasets.metadata import CompetitionMetadata
from penstock.datasets.sample_data import make_titanic
from penstock.datasets.spec_file import SPEC_FILE, check_files, read_spec, write_spec
from penstock.errors import ConfigError, DataError, SchemaError


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
    assert "target_column: " in text
    assert re.search(r"evaluation_metric: .*binary_classification", text)
    assert "'male'" in text
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
    with pytest.raises(ConfigError, match=r"competition\.yaml"):
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
            r"'target_colum'.*'target_column'",
        ),
        ("competition_name: titanic", "", r"competition\.yaml.*'competition_name'"),
        ("binary_classification  #", "binry  #", r"competition\.yaml.*'binry'"),
        ("evaluation_metric: accuracy", "evaluation_metric: rmse", "'rmse'"),
        ("evaluation_metric: accuracy", "evaluation_metric: acc0racy", "'acc0racy'"),
        (
            "Sex: {kind: categorical}",
            "Sex: {kind: categoricl}",
            r"\bkind\b.*'categorical'",
        ),
        ("Sex: {kind: categorical}", "Sex: {knd: text}", r"ColumnSpec.*'knd'"),
        ("Sex: {kind: categorical}", "No: {kind: categorical}", r"competition\.yaml"),
        ("num_samples: 120", "num_samples: many", r"num_samples.*'many'"),
        ("tags: []", "tags: [1]", "'1'"),
        ("tags: []", "url: 7", r"competition\.yaml"),
        ("tags: []", "dataset_path: [a]", r"dataset_path.*'a'"),
        ("id_column: PassengerId", "id_column: 5", "id_column"),
        ("Sex: {kind: categorical}", "Sex: {missing: no}", "Sex.*missing"),
        ("Sex: {kind: categorical}", "Sex: {decimals: two}", "'two'"),
        ("description: ''", "tags: [a]\ndescription: ''", r"competition\.yaml.*'tags'"),
        ("description: ''", "description: 'a", r"competition\.yaml, line \d+"),
        ("train: train.csv", "trian: train.csv", r"'trian'.*'train'"),
    ],
)
def test_a_file_that_makes_no_sense_is_an_error_that_names_it(titanic: Path, old: str, new: str, message: str) -> None:
    correct(titanic, old, new)
    with pytest.raises(ConfigError, match=message):
        read_spec(titanic / SPEC_FILE)


def test_columns_that_are_no_mapping_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / SPEC_FILE
    file.write_text("competition_name: a\ncompetition_type: regression\ncolumns: [a, b]\nevaluation_metric: rmse\n")
    with pytest.raises(ConfigError, match=r"'a'.*'b'"):
        read_spec(file)
    file.write_text("")
    with pytest.raises(ConfigError, match=r"competition\.yaml"):
        read_spec(file)


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        (
            "target_column: Survived",
            "target_column: Survivd",
            SchemaError,
            "'Survivd'",
        ),
        ("target_column: Survived", "target_column: Age", SchemaError, "'Survived'"),
        ("target_column: Survived", "target_column: Sex", SchemaError, "target_column"),
        ("target_column: Survived", "target_column:", ConfigError, r"target_column.*train\.csv"),
        (
            "num_samples: 120",
            "num_samples: 121",
            SchemaError,
            r"num_samples=121.*num_samples",
        ),
        ("num_features: 10", "num_features: 11", SchemaError, "num_features=11"),
        ("id_column: PassengerId", "id_column: Pclass", DataError, "id_column"),
        ("id_column: PassengerId", "id_column: Nobody", SchemaError, "id_column='Nobody'"),
        ("Name: {kind: text}", "Name: {kind: numeric}", DataError, "'Name'"),
        (
            "Fare: {kind: numeric}",
            "Fair: {kind: numeric}",
            SchemaError,
            r"'Fair'.*'Fare'",
        ),
        (
            "train: train.csv",
            "train: learn.csv",
            FileNotFoundError,
            r"'learn\.csv'.*competition\.yaml",
        ),
        ("test: test.csv", "test: exam.csv", FileNotFoundError, r"'exam\.csv'"),
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
        ("binary", "Embarked", None, "'Embarked'"),
        ("regression", "Sex", None, "'Sex'"),
        ("multiclass", "Pclass", (1, 2), r"'Pclass'.*row 2\b"),
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
    with pytest.raises(SchemaError, match="class_names"):
        check_files(*read_spec(file))
    file.write_text(lines + "columns: {b: {kind: categorical, categories: {no: bad, yes: good}}}\n")
    with pytest.raises(DataError, match=r"'b'.*'no'"):
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
    with pytest.raises(ConfigError, match=r"'s3://key:\*\*\*@bucket/a'.*a\.yaml"):
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
