"""`penstock prepare --split` and `penstock join`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.job_runs import files_in
from typer.testing import CliRunner

from penstock.cli.main import app

SAMPLE = Path(__file__).parents[3] / "examples" / "sample"
DOCUMENTS, TOKENIZER = str(SAMPLE / "documents.jsonl"), str(SAMPLE / "tokenizer")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def penstock(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def prepare(out: str, *more: str, code: int = 0) -> str:
    return penstock("prepare", DOCUMENTS, "--tokenizer", TOKENIZER, "--out", out, *more, code=code)


def test_joined_splits_are_the_store_of_one_run(tmp_path: Path) -> None:
    prepare("local/a.store", "--dedup", "exact")
    said = [prepare("split/a.store", "--dedup", "exact", "--split", split) for split in ("2/2", "1/2")]
    assert "1 of other splits are not yet" in said[0]
    assert "split 1/2: all splits are done" in said[1]
    penstock("join", "split/a.store")
    assert files_in(tmp_path / "local") == files_in(tmp_path / "split")
    assert not (tmp_path / "split" / ".a.store.job").exists()


def test_a_split_with_other_arguments_is_refused_and_the_others_can_be_joined() -> None:
    prepare("a.store", "--split", "1/2")
    assert Path(".a.store.job/prepare.json").stat().st_mode & 0o077 == 0 or os.name == "nt"  # URLs may hold passwords
    said = prepare("a.store", "--split", "2/2", "--max-length", "9", code=1)
    assert "were begun with --max-length None, and this one has 9" in said
    said = prepare("a.store", "--split", "2/2", "--on-error", "skip", code=1)
    assert "were begun with --on-error raise, and this one has 'skip'" in said
    penstock("join", "a.store")


def test_splits_of_a_store_that_was_made_meanwhile_are_removed(tmp_path: Path) -> None:
    prepare("a.store", "--split", "1/2")
    (tmp_path / ".a.store.job").rename("kept")
    prepare("a.store")
    (tmp_path / "kept").rename(".a.store.job")
    assert "is ready" in penstock("join", "a.store")
    assert not (tmp_path / ".a.store.job").exists()


def test_a_split_goes_to_no_cache() -> None:
    assert "--cache is for a store that one process makes" in prepare("a", "--split", "1/2", "--cache", "c", code=1)


def test_a_join_that_is_started_again_finds_the_store_ready(tmp_path: Path) -> None:
    assert "there are no splits to join" in penstock("join", "a.store", code=1)
    prepare("a.store", "--split", "1/1")
    penstock("join", "a.store")
    assert "a.store is ready: no splits are left to join" in penstock("join", "a.store")
    assert '"made":false' in penstock("join", "a.store", "--json").replace(" ", "")
    assert "is ready" in prepare("a.store", "--split", "1/1")
    assert not (tmp_path / ".a.store.job").exists()


def test_a_plain_preparation_removes_splits_of_the_same_arguments_alone(tmp_path: Path) -> None:
    prepare("a.store", "--split", "1/2")
    prepare("a.store")
    assert not (tmp_path / ".a.store.job").exists()
    prepare("a.store", "--split", "1/2", "--mode", "overwrite", "--dedup", "exact")
    prepare("a.store")
    assert (tmp_path / ".a.store.job").exists()


@pytest.mark.parametrize("split", ["0/4", "5/4", "a/b", "3"])
def test_a_wrong_split_is_wrong_usage(split: str) -> None:
    assert "--split" in prepare("a.store", "--split", split, code=2)
