"""`penstock run --dry-run` finds columns that are not there, and says where it cannot know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from penstock.cli.main import app


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"text": "a b", "n": 1}, {"text": "c", "n": 2}]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("in.csv").write_text("text,n\na b,1\nc,2\n")
    pq.write_table(pa.Table.from_pylist(rows), "in.parquet")
    Path("mine.py").write_text("def renamed(row):\n    return {'words': row['text'].split()[0]}\n")
    return tmp_path


def files() -> list[Path]:
    """Everything but the bytecode of modules that were imported."""
    return sorted(path for path in Path.cwd().iterdir() if path.name != "__pycache__")


def dry(steps: list[Any], *, source: Any = "in.jsonl", code: int = 0, words: tuple[str, ...] = ()) -> str:
    Path("run.yaml").write_text(yaml.safe_dump({"source": source, "transforms": steps, "sink": "out.jsonl"}))
    before = files()
    result = CliRunner().invoke(app, ["run", "run.yaml", "--dry-run", *words])
    assert result.exit_code == code, result.output
    assert files() == before, "nothing is written"
    return " ".join(result.output.split())


BAD: dict[str, Any] = {
    "lower": {"lower": "nosuch"},
    "filter": {"filter": "nosuch >= 3"},
    "map": {"map": {"twice": "nosuch * 2"}},
    "select": {"select": ["text", "nosuch"]},
    "rename": {"rename": {"nosuch": "other"}},
    "fill_nulls": {"fill_nulls": {"values": {"nosuch": 0}}},
    "exact_dedup": {"exact_dedup": "nosuch"},
    "standard_scaler": {"standard_scaler": {"columns": ["nosuch"], "fit": True}},
}


@pytest.mark.parametrize("source", ["in.jsonl", "in.csv", "in.parquet"])
@pytest.mark.parametrize("step", BAD)
def test_a_column_that_is_not_there_is_told_with_its_step(step: str, source: str) -> None:
    told = dry([{"lower": "text"}, BAD[step]], source=source, code=1)
    assert "transforms[1]" in told
    assert "nosuch" in told


def test_every_step_with_such_a_column_is_told_at_once() -> None:
    told = dry([{"filter": "nope >= 3"}, {"lower": "nosuch"}, {"exact_dedup": "gone"}], code=1)
    assert "has 3 problems" in told
    for number, name in enumerate(("nope", "nosuch", "gone")):
        assert f"transforms[{number}]" in told
        assert name in told


def test_columns_of_the_source_are_checked() -> None:
    assert "nosuch" in dry([], source={"path": "in.parquet", "columns": ["nosuch"]}, code=1)


def test_columns_that_steps_make_are_there_for_the_next() -> None:
    told = dry([{"map": {"twice": "n * 2"}}, {"filter": "twice >= 3"}, {"drop": "n"}])
    assert "columns text, twice" in told
    assert "transforms[2]" in dry([{"map": {"twice": "n * 2"}}, {"drop": "n"}, {"filter": "n >= 3"}], code=1)


def test_behind_a_function_and_a_first_pass_the_columns_are_not_known() -> None:
    told = dry([{"lower": "text"}, {"map": "mine:renamed"}, {"lower": "words"}])
    assert "transforms[1]" in told
    assert "calls a function of yours" in told
    told = dry([{"standard_scaler": {"columns": ["n"], "fit": True}}, {"lower": "nosuch"}])
    assert "has to be fitted" in told
    facts = json.loads(dry([{"lower": "text"}], words=("--json",)))
    assert facts["columns"] == ["text", "n"]
    assert facts["columns_unknown_after"] is None


def test_a_step_behind_one_that_became_two_is_fitted() -> None:
    steps: list[Any] = [{"exact_dedup": "text"}, {"standard_scaler": {"columns": ["n"], "fit": True}}]
    assert "StandardScaler" in dry(steps).partition("first pass")[2]
    result = CliRunner().invoke(app, ["run", "run.yaml", "--quiet"])
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["n"] for line in Path("out.jsonl").read_text().splitlines()] == [-1.0, 1.0]


def test_an_engine_is_checked_first_and_plans_without_the_workers_of_this_machine() -> None:
    told = dry([{"lower": "text"}], words=("--engine", "spark"), code=1)
    assert told.startswith("penstock: unknown engine 'spark'")
    told = dry([{"lower": "text"}], source="in.parquet", words=("--engine", "ray"))
    assert " 1 split of about " in told
    assert "workers" not in told
    assert "workers auto" in dry([{"lower": "text"}], words=("--engine", "local"))


def test_problems_of_a_pipeline_at_a_url_name_the_url(penstock: Callable[..., Any]) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    key = "source: [{text: a}]\nsink: out.jsonl\nnonsense: 1\n"
    column = "source: rows.jsonl\ntransforms: [{lower: words}]\nsink: out.jsonl\n"
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    written = {"key": key, "column": column, "syntax": "source: [", "empty": "", "list": "[1]"}
    try:
        for name, text in written.items():
            url = f"memory://pipelines/{name}.yaml"
            memory.pipe(f"/pipelines/{name}.yaml", text.encode())
            for command in (("run", url, "--dry-run"), ("plan", url)):
                result = penstock(*command)
                assert result.exit_code == 1, result.output
                said = result.stderr.replace("\n", "")
                assert url in said, said
                assert said.count(".yaml") == 1, said  # not the path of the local copy
    finally:
        memory.rm("/pipelines", recursive=True)
