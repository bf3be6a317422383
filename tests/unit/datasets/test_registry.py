from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.datasets.base import ColumnSpec, CompetitionType, DatasetSpec, KaggleDataset
from penstock.datasets.inference import infer
from penstock.datasets.metadata import CompetitionMetadata
from penstock.datasets.registry import Competition, DatasetRegistry, default_registry_directory
from penstock.datasets.sample_data import make_titanic
from penstock.datasets.titanic import titanic_metadata, titanic_spec
from penstock.errors import ConfigError, DataError, StalledError
from penstock.files.locks import FileLock
from penstock.files.remote import path_of


@pytest.fixture
def registry(tmp_path: Path) -> DatasetRegistry:
    return DatasetRegistry(tmp_path / "registry")


def competition(
    name: str, kind: str = "regression", samples: int | None = 10, metric: str = "rmse", **more: Any
) -> tuple[str, CompetitionMetadata, DatasetSpec]:
    metadata = CompetitionMetadata(name, CompetitionType(kind), evaluation_metric=metric, **more)
    return name, metadata, DatasetSpec(name, Path("/data") / name, CompetitionType(kind), samples, 3, "y")


class MiniDataset(KaggleDataset):
    """Two rows, whatever the spec says."""

    def _load_data(self) -> None:
        self._data = [{"y": 1, "x": "a"}, {"y": 2, "x": "b"}]

    def _validate_data(self) -> None: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self._data[index])


def test_what_is_registered_is_there_for_another_registry(registry: DatasetRegistry) -> None:
    name, metadata, spec = competition("house-prices", tags=("houses",), description="Predict house prices")
    registry.register_competition(competition_name=name, metadata=metadata, spec=spec)
    other = DatasetRegistry(registry.path)
    assert other.list_competitions() == ["house-prices"]
    assert other.get_metadata(name) == metadata
    assert other.get_spec(name) == spec
    assert other.get(name) == Competition(metadata, spec, None)
    assert "house-prices" in other
    assert "titanic" not in other
    assert len(other) == 1


def test_an_empty_registry_makes_no_directory(registry: DatasetRegistry) -> None:
    assert registry.list_competitions() == []
    assert registry.search_competitions() == []
    assert registry.damaged() == {}
    assert not registry.path.exists()


def test_without_a_path_it_is_in_the_users_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert DatasetRegistry().path == tmp_path / "penstock" / "competitions"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert default_registry_directory().is_relative_to(Path.home())


def test_a_relative_path_is_found_from_anywhere(
    registry: DatasetRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, metadata, spec = competition("a")
    registry.register_competition(name, metadata, dataclasses.replace(spec, dataset_path=Path("data/a")))
    assert registry.get_spec(name).dataset_path == tmp_path / "data" / "a"
    name, metadata, spec = competition("b")
    registry.register_competition(name, metadata, dataclasses.replace(spec, dataset_path="s3://bucket/b"))  # type: ignore[arg-type]
    assert str(registry.get_spec(name).dataset_path) == "s3://bucket/b"


@pytest.mark.parametrize("name", ["Titanic: Machine Learning", "a/b", "../x", "CON", "日本", ".hidden", "x" * 300, "A"])
def test_any_name_can_be_registered(registry: DatasetRegistry, name: str) -> None:
    registry.register_competition(*competition("a"))
    registry.register_competition(*competition(name))
    assert registry.list_competitions() == sorted(["a", name])
    assert registry.get_spec(name).competition_name == name
    assert all(file.parent == registry.path for file in registry.path.parent.rglob("*.json"))


def test_registering_twice_through_one_registry_is_an_error(registry: DatasetRegistry) -> None:
    registry.register_competition(*competition("a"))
    with pytest.raises(ConfigError, match=r"'a'.*replace=True"):
        registry.register_competition(*competition("a"))
    registry.register_competition(*competition("a", samples=11), replace=True)
    assert registry.get_spec("a").num_samples == 11


def test_the_same_from_an_earlier_process_is_fine_and_something_else_is_an_error(registry: DatasetRegistry) -> None:
    registry.register_competition(*competition("a"))
    DatasetRegistry(registry.path).register_competition(*competition("a"))
    with pytest.raises(
        ConfigError,
        match=r"description.*replace=True",
    ):
        DatasetRegistry(registry.path).register_competition(*competition("a", samples=11, description="new"))
    assert registry.get_spec("a").num_samples == 10


def test_categories_that_are_numbers_compare_equal_after_a_round_trip(registry: DatasetRegistry) -> None:
    name, metadata, spec = competition("a")
    spec = dataclasses.replace(spec, columns={"c": {"kind": "categorical", "categories": {1: "one", 2: "two"}}})
    registry.register_competition(name, metadata, spec)
    again = DatasetRegistry(registry.path)
    again.register_competition(name, metadata, spec)
    assert again.get_spec(name) == spec


def test_what_does_not_belong_together_is_refused(registry: DatasetRegistry) -> None:
    _, metadata, spec = competition("a")
    with pytest.raises(ConfigError, match=r"'a'.*'b'"):
        registry.register_competition("b", metadata, spec)
    with pytest.raises(ConfigError, match=r"'b'.*'a'"):
        registry.register_competition("a", metadata, competition("b")[2])
    binary = competition("a", "binary", metric="accuracy")[2]
    with pytest.raises(ConfigError, match="binary_classification"):
        registry.register_competition("a", metadata, binary)
    with pytest.raises(ConfigError, match="DatasetSpec"):
        registry.register_competition("a", {}, spec)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="competition_name"):
        registry.register_competition(" ", metadata, spec)
    assert registry.list_competitions() == []


def test_an_unknown_name_is_an_error_that_suggests_one(registry: DatasetRegistry) -> None:
    with pytest.raises(ConfigError, match="'titanic'"):
        registry.get("titanic")
    registry.register_competition(*competition("titanic"))
    for ask in (registry.get, registry.get_spec, registry.get_metadata, registry.remove, registry.load):
        with pytest.raises(ConfigError, match=r"'titanik'.*'titanic'"):
            ask("titanik")


def test_a_removed_competition_can_be_registered_anew(registry: DatasetRegistry) -> None:
    registry.register_competition(*competition("a"))
    registry.remove("a")
    assert registry.list_competitions() == []
    registry.register_competition(*competition("a", samples=99))
    assert registry.get_spec("a").num_samples == 99


def test_search_narrows_by_type_metric_size_and_text(registry: DatasetRegistry) -> None:
    registry.register_competition(*competition("house-prices", samples=1460, description="Sale prices in Ames"))
    registry.register_competition(*competition("bikes", samples=None, metric="rmsle", tags=("city", "Rental")))
    registry.register_competition(*competition("titanic", "binary", 891, "accuracy", tags=("ship",)))
    registry.register_competition(*competition("digits", "multiclass", 60_000, "accuracy"))
    search = registry.search_competitions
    assert search() == ["bikes", "digits", "house-prices", "titanic"]
    assert search(competition_type=CompetitionType.BINARY_CLASSIFICATION) == ["titanic"]
    assert search("regression") == ["bikes", "house-prices"]
    assert search(metric="accuracy") == ["digits", "titanic"]
    assert search(metric="root mean squared error") == ["house-prices"]
    assert search(min_samples=891, max_samples=1460) == ["house-prices", "titanic"]
    assert search(max_samples=891) == ["titanic"]
    assert search(text="AMES sale") == ["house-prices"]
    assert search(text="rental") == ["bikes"]
    assert search(text="itan") == ["titanic"]
    assert search("multiclass", "accuracy", 1000, text="digits") == ["digits"]
    assert search("binary", text="digits") == []


def test_a_search_that_cannot_find_anything_is_an_error(registry: DatasetRegistry) -> None:
    with pytest.raises(ConfigError, match="'binry'"):
        registry.search_competitions("binry")
    with pytest.raises(ConfigError, match=r"'acuracy'.*metric"):
        registry.search_competitions(metric="acuracy")
    with pytest.raises(ConfigError, match=r"min_samples=2.*max_samples=1"):
        registry.search_competitions(min_samples=2, max_samples=1)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'"x"', b'{"format": 1}', b'{"format": "x"}', b'{"format": 1, "metadata": 3, "spec": {}}'],
)
def test_a_damaged_file_is_named_and_the_others_still_work(
    registry: DatasetRegistry, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    registry.register_competition(*competition("good"))
    registry.register_competition(*competition("bad"))
    [file] = registry.path.glob("bad-*.json")
    file.write_bytes(content)
    with pytest.raises(DataError, match=file.name):
        registry.get("bad")
    with caplog.at_level(logging.WARNING, logger="penstock"):
        assert registry.list_competitions() == ["good"]
    assert file.name in caplog.text
    assert registry.search_competitions("regression") == ["good"]
    assert list(registry.damaged()) == [file]
    again = DatasetRegistry(registry.path)
    with pytest.raises(DataError, match=r"bad-.*replace=True"):
        again.register_competition(*competition("bad"))
    again.register_competition(*competition("bad"), replace=True)
    assert again.list_competitions() == ["bad", "good"]
    file.write_bytes(content)
    again.remove("bad")
    assert again.damaged() == {}


def test_an_entry_of_a_later_release_is_said_to_be_one(registry: DatasetRegistry) -> None:
    registry.register_competition(*competition("a"))
    [file] = registry.path.glob("a-*.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 2}))
    with pytest.raises(DataError, match="format"):
        registry.get("a")


def test_a_dataset_is_loaded_by_the_class_that_was_given(registry: DatasetRegistry) -> None:
    name, metadata, spec = competition("a", samples=2)
    spec = dataclasses.replace(spec, num_features=1)
    registry.register_competition(name, metadata, spec, dataset_class=MiniDataset)
    dataset = registry.load("a", "train", transform=lambda sample: sample | {"seen": True})
    assert type(dataset) is MiniDataset
    assert dataset[1] == {"y": 2, "x": "b", "seen": True}
    assert DatasetRegistry(registry.path).get("a").dataset_class == f"{__name__}:MiniDataset"
    assert type(DatasetRegistry(registry.path).load("a")) is MiniDataset


def test_a_class_of_the_script_that_is_run_is_warned_of(
    registry: DatasetRegistry, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.register_competition(*competition("mini"), dataset_class=MiniDataset)
    assert not caplog.records
    monkeypatch.setattr(MiniDataset, "__module__", "__main__")
    monkeypatch.setattr("penstock.datasets.discovery._file_of", lambda dataset: tmp_path / "script.py")
    registry.register_competition(*competition("tiny"), dataset_class=MiniDataset)
    [record] = caplog.records
    assert f"{tmp_path / 'script.py'}:MiniDataset" in record.getMessage()
    assert "module" in record.getMessage()


def test_a_class_in_a_file_is_loaded_by_another_process(registry: DatasetRegistry, tmp_path: Path) -> None:
    file = tmp_path / "mini_dataset.py"
    file.write_text(
        "from penstock.datasets.base import KaggleDataset\n"
        "class MiniDataset(KaggleDataset):\n"
        "    def _load_data(self): self._data = [{'y': 1}, {'y': 2}, {'y': 3}]\n"
        "    def _validate_data(self): ...\n"
        "    def __getitem__(self, index): return self._data[index]\n"
    )
    name, metadata, spec = competition("a", samples=3)
    spec = dataclasses.replace(spec, num_features=0)
    found = registry.discover(file)
    assert found.errors == {} or all("penstock" in place for place in found.errors)
    registry.register_competition(name, metadata, spec, dataset_class=found.found["mini"])
    code = (
        "import sys; from penstock.datasets.registry import DatasetRegistry as R; print(len(R(sys.argv[1]).load('a')))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(registry.path)], capture_output=True, text=True, check=True)
    assert done.stdout == "3\n"
    file.write_text("raise RuntimeError('boom')")
    with pytest.raises(ConfigError, match=r"mini_dataset\.py.*MiniDataset"):
        DatasetRegistry(registry.path).load("a")


def test_a_discovered_class_is_used_for_the_competition_it_is_named_after(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "frozen_lakes_dataset.py").write_text(
        "from penstock.datasets.base import KaggleDataset\n"
        "class FrozenLakesDataset(KaggleDataset):\n"
        "    def _load_data(self): self._data = [{'y': 1}]\n"
        "    def _validate_data(self): ...\n"
        "    def __getitem__(self, index): return self._data[index]\n"
    )
    name, metadata, spec = competition("Frozen_Lakes", samples=1)
    registry.register_competition(name, metadata, dataclasses.replace(spec, num_features=0))
    registry.discover(tmp_path / "code")
    assert type(registry.load(name)).__name__ == "FrozenLakesDataset"


def test_a_competition_without_a_class_is_a_table(registry: DatasetRegistry, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "learn.csv").write_text("id,x,y\n1,a,0.5\n2,b,1.5\n")
    metadata = CompetitionMetadata("some-table", CompetitionType.REGRESSION, "", "rmse", train_file="learn.csv")
    spec = DatasetSpec("some-table", tmp_path / "d", CompetitionType.REGRESSION, 2, 1, "y", "id")
    registry.register_competition("some-table", metadata, spec)
    dataset = registry.load("some-table")
    assert type(dataset).__name__ == "TabularDataset"
    assert len(dataset) == 2


LAKES = """
from penstock.datasets.base import KaggleDataset
class LakesDataset(KaggleDataset):
    def _load_data(self): self._data = [{'y': 1}]
    def _validate_data(self): ...
    def __getitem__(self, index): return self._data[index]
"""


@pytest.mark.parametrize("registered_first", [True, False])
def test_a_discovered_class_is_remembered_and_nothing_else_takes_its_place(
    registry: DatasetRegistry, tmp_path: Path, caplog: pytest.LogCaptureFixture, registered_first: bool
) -> None:
    file = tmp_path / "code" / "lakes_dataset.py"
    file.parent.mkdir()
    file.write_text(LAKES)
    name, metadata, spec = competition("lakes", samples=1)
    spec = dataclasses.replace(spec, num_features=0)
    if not registered_first:
        registry.discover(file.parent)
    registry.register_competition(name, metadata, spec)
    if registered_first:
        registry.discover(file.parent)
    other = DatasetRegistry(registry.path)
    assert other.class_of(name) == (f"{file}:LakesDataset", "discovered for its name")
    with caplog.at_level(logging.INFO, logger="penstock"):
        assert type(other.load(name)).__name__ == "LakesDataset"
    assert str(file) in caplog.text
    other.register_competition(name, metadata, spec)  # a script that runs again
    DatasetRegistry(registry.path).register_competition(name, metadata, spec, replace=True)
    assert other.get(name).discovered_class == f"{file}:LakesDataset"
    file.write_text("raise RuntimeError('boom')")
    with pytest.raises(ConfigError, match=r"'lakes'.*RuntimeError"):
        DatasetRegistry(registry.path).load(name)
    file.unlink()
    with pytest.raises(ConfigError, match=r"lakes_dataset\.py.*LakesDataset"):
        DatasetRegistry(registry.path).load(name)
    other.remove(name)
    other.register_competition(name, metadata, spec)
    assert other.get(name).discovered_class is None


def test_a_class_that_was_given_is_not_displaced_by_one_that_is_discovered(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    (tmp_path / "lakes_dataset.py").write_text(LAKES)
    registry.register_competition(*competition("lakes"), dataset_class=MiniDataset)
    registry.discover(tmp_path / "lakes_dataset.py")
    assert DatasetRegistry(registry.path).class_of("lakes").name == f"{__name__}:MiniDataset"


def own(registry: DatasetRegistry, spec: DatasetSpec) -> tuple[str, str]:
    registry.register_competition("titanic", titanic_metadata(), spec, replace=True)
    assert type(registry.load("titanic")).__name__ == registry.class_of("titanic").name.partition(":")[2]
    return registry.class_of("titanic")


def test_a_class_of_penstock_is_taken_for_the_columns_it_knows(registry: DatasetRegistry, tmp_path: Path) -> None:
    known = titanic_spec(make_titanic(tmp_path / "titanic", rows=60, test_rows=20), num_samples=60)
    assert own(registry, known)[0] == "penstock.datasets.titanic:TitanicDataset"
    assert own(registry, infer(known.dataset_path).spec)[0] == "penstock.datasets.titanic:TitanicDataset"
    table = "penstock.datasets.tabular:TabularDataset"
    words = dataclasses.replace(known, columns={**known.columns, "Sex": ColumnSpec(name="gender")})
    assert own(registry, words) == (table, "TitanicDataset is not for it: the spec has its own format for 'Sex'")
    ignored = dataclasses.replace(known, columns={**known.columns, "Cabin": ColumnSpec(kind="ignore")})
    assert own(registry, ignored) == (table, "TitanicDataset is not for it: 'Cabin' is not a feature in the spec")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.csv").write_text("PassengerId,rooms,Survived\n1,2,0\n2,3,1\n")
    other = DatasetSpec("titanic", tmp_path / "mine", CompetitionType.BINARY_CLASSIFICATION, target_column="Survived")
    assert own(registry, other) == (
        table,
        "TitanicDataset is not for it: the training file has no 'Pclass', 'Name', 'Sex' and 7 more",
    )


def test_what_cannot_be_opened_counts_as_damaged(registry: DatasetRegistry, caplog: pytest.LogCaptureFixture) -> None:
    registry.register_competition(*competition("good"))
    (registry.path / "folder.json").mkdir()
    (registry.path / "loop.json").symlink_to("loop.json")
    with caplog.at_level(logging.WARNING, logger="penstock"):
        assert registry.list_competitions() == ["good"]
    assert "folder.json" in caplog.text
    assert sorted(file.name for file in registry.damaged()) == ["folder.json", "loop.json"]


def test_what_another_process_removed_can_be_registered_again(registry: DatasetRegistry) -> None:
    registry.register_competition(*competition("a"))
    DatasetRegistry(registry.path).remove("a")
    registry.register_competition(*competition("a", samples=11))
    assert registry.get_spec("a").num_samples == 11


@pytest.mark.parametrize(
    "url", ["s3://key:secret@bucket/a", "https://host/a?token=secret", "s3://b/a?secret_key=secret"]
)
def test_a_password_is_not_stored(registry: DatasetRegistry, url: str) -> None:
    name, metadata, spec = competition("a")
    with pytest.raises(ConfigError, match=r"\*\*\*") as error:
        registry.register_competition(name, metadata, dataclasses.replace(spec, dataset_path=path_of(url)))  # type: ignore[arg-type]
    assert "secret'" not in str(error.value)
    assert "a" not in registry


# -- many processes --------------------------------------------------------------------------------------------------

_WORKER = """
import sys
from pathlib import Path
from penstock.datasets.base import DatasetSpec
from penstock.datasets.metadata import CompetitionMetadata
from penstock.datasets.registry import DatasetRegistry
from penstock.errors import ConfigError
path, number, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def one(name, samples):
    metadata = CompetitionMetadata(name, "regression", "words " * 200, "rmse")
    return name, metadata, DatasetSpec(name, Path("/data") / name, "regression", samples)

print("ready", flush=True)
sys.stdin.readline()
won = 0
for i in range(rounds):
    registry = DatasetRegistry(path)
    registry.register_competition(*one(f"own-{number}-{i}", i))          # nobody else's
    registry.register_competition(*one("same", 1))                      # everybody's, the same
    registry.register_competition(*one("changing", number), replace=True)  # everybody's, another each time
    try:
        registry.register_competition(*one(f"contested-{i}", number))   # one can have it
        won += 1
    except ConfigError as error:
        assert "spec.num_samples" in str(error), error
    names = registry.list_competitions()
    assert {f"own-{number}-{k}" for k in range(i + 1)} <= set(names), names
    assert registry.get_spec("changing").num_samples in range(10)
    assert not registry.damaged()
print(won)
"""


def start(script: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(script), *map(str, arguments)]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_processes_that_register_and_read_at_once_lose_nothing(registry: DatasetRegistry, tmp_path: Path) -> None:
    script, rounds = tmp_path / "worker.py", 8
    script.write_text(_WORKER)
    ours = [start(script, registry.path, number, rounds) for number in range(3)]
    for process in ours:
        go(process)
    told = [process.communicate() for process in ours]
    assert [process.returncode for process in ours] == [0, 0, 0], [errors for _, errors in told]
    assert sum(int(won) for won, _ in told) == rounds  # of each contested name exactly one process was the first
    expected = {f"own-{number}-{i}" for number in range(3) for i in range(rounds)}
    expected |= {"same", "changing"} | {f"contested-{i}" for i in range(rounds)}
    assert set(registry.list_competitions()) == expected
    assert not [file for file in registry.path.iterdir() if file.name.startswith(".")]


_ENDLESS = _WORKER[: _WORKER.index("won = 0")] + (
    "number = 0\n"
    "while True:\n"
    "    number += 1\n"
    "    DatasetRegistry(path).register_competition(*one('changing', number), replace=True)\n"
)


def test_kill_9_in_the_middle_leaves_a_readable_registry(registry: DatasetRegistry, tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(_ENDLESS)
    registry.register_competition(*competition("before"))
    for _ in range(3):
        process = start(script, registry.path, 0, 0)
        go(process)
        first = registry.get_spec("changing").num_samples if "changing" in registry else None
        deadline = time.monotonic() + 30
        while "changing" not in registry or registry.get_spec("changing").num_samples == first:
            assert time.monotonic() < deadline
        process.kill()
        process.communicate()
        assert registry.list_competitions() == ["before", "changing"]
        assert registry.damaged() == {}
    registry.register_competition(*competition("changing", samples=7), replace=True)
    assert registry.get_spec("changing").num_samples == 7
    assert not list(registry.path.glob(".*.tmp"))


def test_a_writer_that_holds_on_is_named(registry: DatasetRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.datasets.registry._WAIT_SECONDS", 0.0)
    registry.register_competition(*competition("a"))
    [file] = registry.path.glob("a-*.json")
    with FileLock(file.with_name(f".{file.stem}.lock")) as lock:
        assert lock.acquire()
        with pytest.raises(StalledError, match=rf"'a'.*{os.getpid()}"):
            registry.register_competition(*competition("a"), replace=True)
        assert registry.get_spec("a").num_samples == 10
