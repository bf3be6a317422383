"""A file that is edited after it was registered is another version of the data."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from penstock.datasets.base import CompetitionType, DatasetSpec, KaggleDataset
from penstock.datasets.folds import Folds
from penstock.datasets.inference import infer
from penstock.datasets.metadata import CompetitionMetadata
from penstock.datasets.registry import DatasetRegistry
from penstock.datasets.sample_data import make_titanic
from penstock.errors import DataError, ResumeError
from penstock.loaders import MLXDataLoader

Call = Callable[..., Any]


@pytest.fixture
def ship(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(here / "share"))
    return make_titanic(here / "ship", rows=60, test_rows=20)


def registered(place: Path) -> DatasetRegistry:
    registry, found = DatasetRegistry(), infer(place, name="ship")
    registry.register_competition("ship", found.metadata, found.spec)
    return registry


def edit(file: Path) -> bytes:
    """One passenger is called something else: size, rows and time of the file are what they were."""
    before, times = file.read_bytes(), file.stat()
    file.write_bytes(before.replace(b"Mr.", b"Sir", 1))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_size == times.st_size
    return before


def test_an_edited_training_file_is_refused_by_name(ship: Path) -> None:
    registry = registered(ship)
    assert registry.load("ship").data_version == 1
    before = edit(ship / "train.csv")
    for split in ("train", "test"):  # types and classes of the test file are those of training
        with pytest.raises(DataError, match=r"'ship'.*version 1\b"):
            registry.load("ship", split)
    (ship / "train.csv").write_bytes(before)
    assert registry.load("ship", folds=Folds(3)).data_version == 1


def test_registering_again_makes_another_version_and_says_so(ship: Path, caplog: pytest.LogCaptureFixture) -> None:
    registered(ship)
    before = edit(ship / "train.csv")
    with caplog.at_level(logging.WARNING):
        registry = registered(ship)
    assert "train.csv" in caplog.text
    assert registry.load("ship").data_version == 2
    assert [version.number for version in registry.get("ship").versions] == [1, 2]
    (ship / "train.csv").write_bytes(before)
    assert registry.load("ship").data_version == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        registered(ship)
    assert not caplog.records


def test_files_are_looked_at_for_the_splits_that_need_them(ship: Path) -> None:
    registry = registered(ship)
    edit(ship / "test.csv")
    assert registry.load("ship").data_version == 1
    with pytest.raises(DataError, match=r"test\.csv is"):
        registry.load("ship", "test")


def test_the_sample_submission_is_part_of_the_version(ship: Path) -> None:
    registry, file = registered(ship), ship / "sample_submission.csv"
    file.write_text(file.read_text().replace(",1\n", ",0\n"))
    with pytest.raises(DataError, match=r"sample_submission\.csv is"):
        registry.load("ship", "test")


def test_files_that_come_later_are_noted_when_they_are_first_read(ship: Path) -> None:
    train, test = (ship / "train.csv").read_bytes(), (ship / "test.csv").read_bytes()
    found = infer(ship, name="ship")
    (ship / "train.csv").unlink()
    (ship / "test.csv").unlink()
    (ship / "sample_submission.csv").unlink()
    registry = DatasetRegistry()
    registry.register_competition("ship", found.metadata, dataclasses.replace(found.spec, files={}))
    assert registry.get("ship").versions == ()
    (ship / "train.csv").write_bytes(train)
    assert registry.load("ship").data_version == 1
    (ship / "test.csv").write_bytes(test)
    assert registry.load("ship", "test").data_version == 1
    [version] = DatasetRegistry().get("ship").versions
    assert sorted(version.files) == ["test", "train"]
    edit(ship / "test.csv")
    with pytest.raises(DataError, match=r"test\.csv is"):
        DatasetRegistry().load("ship", "test")


class HastyDataset(KaggleDataset):
    """Its file is edited by somebody while it reads."""

    def _load_data(self) -> None:
        self._data = pd.read_csv(self.spec.dataset_path / "train.csv")
        (self.spec.dataset_path / "train.csv").write_text("x,y\n9,0\n2,1\n")

    def _validate_data(self) -> None: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": np.array([self._data["x"][index]]), "labels": self._data["y"][index]}


def plain_competition(place: Path) -> tuple[CompetitionMetadata, DatasetSpec]:
    place.mkdir()
    (place / "train.csv").write_text("x,y\n1,0\n2,1\n")
    kind = CompetitionType.BINARY_CLASSIFICATION
    return CompetitionMetadata("c", kind), DatasetSpec("c", place, kind, 2, 1, "y")


def test_a_file_that_changes_while_it_is_read_is_refused(here: Path) -> None:
    registry, said = DatasetRegistry(here / "registry"), plain_competition(here / "c")
    registry.register_competition("c", *said, dataset_class=HastyDataset)
    with pytest.raises(DataError, match=r"train\.csv"):
        registry.load("c")


def test_a_state_is_not_resumed_with_edited_rows(here: Path) -> None:
    class PlainDataset(HastyDataset):
        def _load_data(self) -> None:
            self._data = pd.read_csv(self.spec.dataset_path / "train.csv")

    _, spec = plain_competition(here / "c")
    options: dict[str, Any] = {"batch_size": 1, "backend": "numpy", "num_workers": 0}
    state = MLXDataLoader(PlainDataset(spec), **options).state_dict()
    MLXDataLoader(PlainDataset(spec), **options).load_state_dict(state)
    assert PlainDataset(spec).fingerprint == PlainDataset(spec).fingerprint
    (here / "c" / "train.csv").write_text("x,y\n9,0\n2,1\n")
    with pytest.raises(ResumeError):
        MLXDataLoader(PlainDataset(spec), **options).load_state_dict(state)


def test_the_commands_tell_which_version_there_is(ship: Path, penstock: Call) -> None:
    assert penstock("competitions", "add", "ship").exit_code == 0
    edit(ship / "train.csv")
    result = penstock("competitions", "show", "ship", "--rows", "1")
    assert result.exit_code == 1
    assert "train.csv" in result.stderr
    result = penstock("competitions", "add", "ship")
    assert "version 2" in result.stdout
    assert penstock("competitions", "show", "ship", "--rows", "1").exit_code == 0
    shown = json.loads(penstock("competitions", "show", "ship", "--json").stdout)
    assert [version["number"] for version in shown["versions"]] == [1, 2]
    assert "version" in penstock("competitions", "show", "ship").stdout
