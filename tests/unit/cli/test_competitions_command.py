"""`penstock competitions` as a person types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import plugins
from penstock.cli import plugins as catalogue
from penstock.datasets.registry import DatasetRegistry
from penstock.datasets.sample_data import make_titanic

Call = Callable[..., Any]


@pytest.fixture
def titanic(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Generated data in ./titanic, and a registry of one's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(here / "share"))
    return make_titanic(here / "titanic", rows=120, test_rows=40)


def correct(directory: Path, old: str, new: str) -> None:
    file = directory / "competition.yaml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))


def test_add_guesses_writes_the_file_and_registers(titanic: Path, penstock: Call) -> None:
    result = penstock("competitions", "add", "titanic")
    assert result.exit_code == 0, result.stderr
    lines = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    assert ["competition", "titanic"] in lines
    assert ["type", "binary_classification"] in lines
    assert ["target", "Survived"] in lines
    assert ["class", "penstock.datasets.titanic:TitanicDataset (penstock's own, by its name and columns)"] in lines
    assert "competition.yaml" in result.stdout
    assert DatasetRegistry().get_spec("titanic").dataset_path == titanic


def test_add_again_reads_the_corrected_file_and_registers_it(titanic: Path, penstock: Call) -> None:
    penstock("competitions", "add", "titanic", "--name", "ship")
    correct(titanic, "evaluation_metric: accuracy", "evaluation_metric: auc")
    corrected = (titanic / "competition.yaml").read_text()
    result = penstock("competitions", "add", "titanic", "--name", "ship")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"\bship\b.*titanic/competition\.yaml", result.stdout)
    assert DatasetRegistry().get_metadata("ship").evaluation_metric == "auc"
    assert (titanic / "competition.yaml").read_text() == corrected
    assert penstock("competitions", "add", "titanic", "--name", "ship", "--infer").exit_code == 0
    assert DatasetRegistry().get_metadata("ship").evaluation_metric == "accuracy"


def test_a_correction_that_does_not_fit_the_data_is_refused_and_nothing_changes(titanic: Path, penstock: Call) -> None:
    penstock("competitions", "add", "titanic")
    correct(titanic, "target_column: Survived", "target_column: Survivd")
    result = penstock("competitions", "add", "titanic")
    assert result.exit_code == 1
    assert re.search(r"^penstock: .*'Survivd'", result.stderr)
    assert DatasetRegistry().get_spec("titanic").target_column == "Survived"


def test_what_is_given_is_taken(titanic: Path, penstock: Call) -> None:
    arguments = [
        "--name",
        "ships",
        "--target",
        "Fare",
        "--id",
        "PassengerId",
        "--metric",
        "mae",
        "--type",
        "regression",
    ]
    result = penstock("competitions", "add", "titanic", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert (facts["name"], facts["written"], facts["rows"]["train"]) == ("ships", True, 120)
    assert facts["metadata"]["evaluation_metric"] == "mae"
    assert facts["spec"]["target_column"] == "Fare"
    result = penstock("competitions", "add", "titanic", "--type", "regression")
    assert result.exit_code == 1
    assert re.search(r"--type.*--infer", result.stderr)


def test_a_name_of_other_data_is_refused_unless_that_is_said(titanic: Path, here: Path, penstock: Call) -> None:
    penstock("competitions", "add", "titanic")
    make_titanic(here / "other", rows=50, test_rows=20)
    result = penstock("competitions", "add", "other", "--name", "titanic")
    assert result.exit_code == 1
    assert "'titanic'" in result.stderr
    assert "num_samples" in result.stderr
    assert "--replace" in result.stderr
    assert not (here / "other" / "competition.yaml").exists()
    assert penstock("competitions", "add", "other", "--name", "titanic", "--replace").exit_code == 0
    assert DatasetRegistry().get_spec("titanic").num_samples == 50


def test_a_name_on_the_command_line_wins_over_that_in_the_file(titanic: Path, penstock: Call) -> None:
    penstock("competitions", "add", "titanic")
    result = penstock("competitions", "add", "titanic", "--name", "ships")
    assert result.exit_code == 0, result.stderr
    assert "competition.yaml" in result.stdout
    assert DatasetRegistry().list_competitions() == ["ships", "titanic"]
    assert "competition_name: titanic" in (titanic / "competition.yaml").read_text()


@pytest.mark.parametrize("target", ["Sex", "Age"])
def test_what_could_not_be_loaded_is_neither_written_nor_registered(titanic: Path, penstock: Call, target: str) -> None:
    penstock("competitions", "add", "titanic")
    before = (titanic / "competition.yaml").read_text()
    correct(titanic, "target_column: Survived", f"target_column: {target}")
    result = penstock("competitions", "add", "titanic")
    assert result.exit_code == 1
    assert "'Survived'" in result.stderr
    assert DatasetRegistry().get_spec("titanic").target_column == "Survived"
    (titanic / "competition.yaml").write_text(before)
    result = penstock("competitions", "add", "titanic", "--infer", "--target", "Age", "--type", "regression")
    assert result.exit_code == 1
    assert "'Age'" in result.stderr
    assert (titanic / "competition.yaml").read_text() == before


def test_a_class_that_was_registered_from_python_stays(titanic: Path, here: Path, penstock: Call) -> None:
    penstock("competitions", "add", "titanic")
    opened = DatasetRegistry()
    there = opened.get("titanic")
    named = "penstock.datasets.tabular:TabularDataset"
    opened.register_competition("titanic", there.metadata, there.spec, dataset_class=named, replace=True)
    assert penstock("competitions", "add", "titanic").exit_code == 0
    assert opened.get("titanic").dataset_class == named
    shown = json.loads(penstock("competitions", "show", "titanic", "--json").stdout)
    assert (shown["class"], shown["class_reason"]) == (named, "registered with it")


def test_a_discovered_class_reads_the_competition_from_then_on(titanic: Path, here: Path, penstock: Call) -> None:
    penstock("competitions", "add", "titanic")
    (here / "titanic_dataset.py").write_text(
        "from penstock.datasets import TabularDataset\nclass TitanicDataset(TabularDataset):\n"
        "    def default_template(self): return '{Name}!'\n"
    )
    assert penstock("competitions", "discover", "titanic_dataset.py").exit_code == 0
    [listed] = json.loads(penstock("competitions", "list", "--json").stdout)["competitions"]
    assert listed["class"] == f"{here / 'titanic_dataset.py'}:TitanicDataset"
    result = penstock("competitions", "show", "titanic", "--rows", "1", "--trust-code")
    assert result.stdout.splitlines()[-1].endswith("!")
    assert penstock("competitions", "add", "titanic", "--trust-code").exit_code == 0
    (here / "titanic_dataset.py").unlink()
    result = penstock("competitions", "show", "titanic", "--rows", "1", "--trust-code")
    assert result.exit_code == 1
    assert "'titanic'" in result.stderr


@pytest.mark.parametrize("key", ["dataset_class", "discovered_class"])
def test_code_that_an_entry_names_is_not_run_before_it_is_trusted(
    key: str, titanic: Path, here: Path, penstock: Call
) -> None:
    penstock("competitions", "add", "titanic")
    (here / "x.py").write_text(
        "import pathlib\nfrom penstock.datasets import TabularDataset\npathlib.Path('ran').touch()\n"
        "class X(TabularDataset): pass\n"
    )
    [entry] = [file for file in DatasetRegistry().path.rglob("*.json") if "titanic" in file.name]
    entry.write_text(json.dumps(json.loads(entry.read_text()) | {key: f"{here / 'x.py'}:X"}))
    for command in (["show", "titanic", "--rows", "1"], ["add", "titanic"]):
        result = penstock("competitions", *command)
        assert result.exit_code == 1
        assert "x.py:X" in result.stderr
        assert "--trust-code" in result.stderr
    assert penstock("competitions", "show", "titanic").exit_code == 0
    assert not (here / "ran").exists()
    assert penstock("competitions", "show", "titanic", "--rows", "1", "--trust-code").exit_code == 0
    assert (here / "ran").exists()


def test_rows_are_shown_as_texts_with_their_labels(titanic: Path, penstock: Call) -> None:
    penstock("competitions", "add", "titanic")
    result = penstock("competitions", "show", "titanic", "--rows", "2")
    assert result.exit_code == 0, result.stderr
    blocks = result.stdout.split("\n\n")
    assert len(blocks) == 3
    head, text = blocks[1].splitlines()
    assert head == f"train row 0: {DatasetRegistry().load('titanic')[0]['labels']}"
    assert " passenger" in text
    facts = json.loads(penstock("competitions", "show", "titanic", "--rows", "1", "--split", "test", "--json").stdout)
    assert [sorted(row) for row in facts["rows"]] == [["text"]]


def test_labels_are_shown_as_the_names_of_classes(here: Path, penstock: Call) -> None:
    (here / "iris").mkdir()
    rows = "".join(f"{row},{row / 3:.2f},{('setosa', 'virginica', 'other')[row % 3]}\n" for row in range(30))
    (here / "iris" / "train.csv").write_text("id,size,label\n" + rows)
    assert penstock("competitions", "add", "iris").exit_code == 0
    assert 'row 0: "setosa"' in penstock("competitions", "show", "iris", "--rows", "1").stdout
    shown = json.loads(penstock("competitions", "show", "iris", "--rows", "3", "--json").stdout)
    assert [row["label"] for row in shown["rows"]] == ["setosa", "virginica", "other"]


def test_dates_that_cannot_be_told_apart_are_named(here: Path, titanic: Path, penstock: Call) -> None:
    (here / "c").mkdir()
    days = [f"{day:02}/{month:02}/2019" for month in range(1, 13) for day in range(1, 13)]
    (here / "c" / "train.csv").write_text("day,y\n" + "".join(f"{day},{n / 7}\n" for n, day in enumerate(days)))
    result = penstock("competitions", "add", "c")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"'day'.*'02/01/2019'", result.stderr)
    correct(here / "c", "day: {kind: text}", "day: {kind: date}")
    result = penstock("competitions", "add", "c")
    assert result.exit_code == 1
    assert re.search(r"'day'.*date_format", result.stderr)
    correct(here / "c", "{kind: date}", "{kind: date, date_format: '%d/%m/%Y'}")
    assert penstock("competitions", "add", "c").exit_code == 0
    assert "2019-01-02" in DatasetRegistry().load("c").texts()[1]  # type: ignore[attr-defined]


def test_a_type_nobody_knows_is_answered_with_the_short_names(titanic: Path, penstock: Call) -> None:
    for command in (["add", "titanic"], ["search"]):
        result = penstock("competitions", *command, "--type", "binari")
        assert result.exit_code == 1
        assert re.search(r"^penstock: --type 'binari'.*'binary'", result.stderr)
        assert "multiclass, multilabel" in result.stderr
    assert "list[str]" not in penstock("competitions", "add", "--help").stdout


def test_a_password_is_refused_before_anything_is_read(titanic: Path, penstock: Call) -> None:
    result = penstock("competitions", "add", "s3://key:secret@bucket/a", "--spec", "a.yaml")
    assert result.exit_code == 1
    assert "'s3://key:***@bucket/a'" in result.stderr


def test_the_commands_import_nothing_of_datasets_before_they_run() -> None:
    code = "import sys, penstock.cli.competitions; print([m for m in sys.modules if m.startswith('penstock.datasets')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_plugin_that_exits_when_it_is_imported_is_listed_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = plugins.Plugin("sources", "bad", "bad:Bad", "bad-package", "1")
    monkeypatch.setattr(plugins, "find", lambda group, name: sys.exit(3))
    reason = "it calls sys.exit(3) when it is imported; update or uninstall bad-package"
    assert catalogue._entry(plugin).problem == reason


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.txt": "x"}, "train.csv"),
        ({}, "has nothing"),
        ({"train.csv": ""}, "empty"),
        ({"train.csv": "a,b\n"}, "header"),
        ({"train.csv": "a,b,c\n1,2,3\n", "test.csv": "a\n1\n"}, "'b'"),
    ],
)
def test_a_directory_that_cannot_be_added_is_told_why(
    titanic: Path, here: Path, penstock: Call, files: dict[str, str], message: str
) -> None:
    (here / "d").mkdir()
    for name, text in files.items():
        (here / "d" / name).write_text(text)
    result = penstock("competitions", "add", "d")
    assert result.exit_code == 1
    assert result.stderr.startswith("penstock: ")
    assert message in result.stderr
    assert not (here / "d" / "competition.yaml").exists()
    assert DatasetRegistry().list_competitions() == []


def test_a_directory_that_is_not_there_is_told_so(titanic: Path, penstock: Call) -> None:
    result = penstock("competitions", "add", "gone")
    assert result.exit_code == 1
    assert "'gone'" in result.stderr
    result = penstock("competitions", "add", "memory://gone")
    assert result.exit_code == 1
    assert re.search(r"competition\.yaml.*--spec", result.stderr)


def test_data_behind_a_url_is_added_with_a_local_file(
    titanic: Path, here: Path, penstock: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec  # type: ignore[import-untyped]

    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    memory = fsspec.filesystem("memory")
    for file in ("train.csv", "test.csv"):
        memory.pipe(f"/far/{file}", (titanic / file).read_bytes())
    try:
        result = penstock("competitions", "add", "memory://far", "--spec", "far.yaml")
        assert result.exit_code == 0, result.stderr
        assert penstock("competitions", "add", "memory://far", "--spec", "far.yaml").exit_code == 0
    finally:
        memory.rm("/far", recursive=True)
    assert str(DatasetRegistry().get_spec("far").dataset_path) == "memory://far"


def test_list_search_show_and_remove(titanic: Path, here: Path, penstock: Call) -> None:
    assert penstock("competitions", "list").stdout == "none\n"
    penstock("competitions", "add", "titanic")
    penstock("competitions", "add", str(make_titanic(here / "ferry", rows=40, test_rows=10)), "--metric", "auc")
    header, *lines = [line.split() for line in penstock("competitions", "list").stdout.splitlines()]
    assert header == ["competition", "type", "metric", "rows", "features", "target", "data"]
    assert [line[:6] for line in lines] == [
        ["ferry", "binary_classification", "auc", "40", "10", "Survived"],
        ["titanic", "binary_classification", "accuracy", "120", "10", "Survived"],
    ]

    def found(*arguments: str) -> list[str]:
        facts = json.loads(penstock("competitions", "search", *arguments, "--json").stdout)
        return [each["name"] for each in facts["competitions"]]

    assert found() == found("--type", "binary") == ["ferry", "titanic"]
    assert found("--metric", "auc") == found("FERR") == found("--max-samples", "50") == ["ferry"]
    assert found("--min-samples", "50") == ["titanic"]
    assert found("nothing") == []
    result = penstock("competitions", "search", "--type", "binry")
    assert result.exit_code == 1
    assert "--type 'binry'" in result.stderr
    assert "categorical" in penstock("competitions", "show", "titanic").stdout
    assert json.loads(penstock("competitions", "show", "titanic", "--json").stdout)["spec"]["num_samples"] == 120
    assert penstock("competitions", "remove", "ferry").stdout == "removed ferry; its data stays\n"
    assert found() == ["titanic"]
    for verb in ("show", "remove"):
        result = penstock("competitions", verb, "titanik")
        assert result.exit_code == 1
        assert "'titanik'" in result.stderr
        assert "'titanic'" in result.stderr


def test_a_damaged_entry_is_named_and_the_others_are_listed(titanic: Path, here: Path, penstock: Call) -> None:
    penstock("competitions", "add", "titanic")
    bad = here / "share" / "penstock" / "competitions" / "bad-000000000000.json"
    bad.write_text("{")
    result = penstock("competitions", "list")
    assert result.exit_code == 0
    assert "titanic" in result.stdout
    assert str(bad) in result.stderr
    assert "--replace" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_registry_of_ones_own_can_be_named(titanic: Path, here: Path, penstock: Call) -> None:
    assert penstock("competitions", "add", "titanic", "--registry", "mine").exit_code == 0
    assert DatasetRegistry(here / "mine").list_competitions() == ["titanic"]
    assert DatasetRegistry().list_competitions() == []


def test_discover_lists_classes_and_names_what_cannot_be_loaded(titanic: Path, here: Path, penstock: Call) -> None:
    (here / "code").mkdir()
    (here / "code" / "lakes_dataset.py").write_text(
        "from penstock.datasets.base import KaggleDataset\n"
        "class LakesDataset(KaggleDataset):\n"
        "    def _load_data(self): ...\n"
        "    def _validate_data(self): ...\n"
        "    def __getitem__(self, index): ...\n"
    )
    result = penstock("competitions", "discover", "code")
    assert result.exit_code == 0, result.stderr
    assert any(line.split()[0] == "lakes" for line in result.stdout.splitlines())
    (here / "code" / "bad_dataset.py").write_text("import sys; sys.exit(7)")
    result = penstock("competitions", "discover", "code")
    assert result.exit_code == 3
    assert any(line.split()[0] == "lakes" for line in result.stdout.splitlines())
    assert "bad_dataset.py: SystemExit" in result.stderr
    facts = json.loads(penstock("competitions", "discover", "code", "--json").stdout)
    assert facts["errors"] == {"code/bad_dataset.py": "SystemExit: 7"}
    assert facts["found"]["lakes"].endswith("lakes_dataset.py:LakesDataset")
