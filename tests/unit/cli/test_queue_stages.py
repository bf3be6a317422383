"""`type: queue` in a pipeline file: a queue as source and as sink."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from penstock.fsqueue.queue import Queue

Cli = Callable[..., Any]

INTO = """
source: corpus.jsonl
sink: {type: queue, path: q, batch_rows: 3, batches_per_file: 2, limits: {backlog_files: 9}}
"""
OUT_OF = """
source: {type: queue, path: q, timeout_seconds: 20}
transforms: [{filter: id < 15}]
sink: out.parquet
"""


@pytest.fixture
def queue(corpus: Path, penstock: Cli) -> Path:
    Path("into.yaml").write_text(INTO)
    Path("out.yaml").write_text(OUT_OF)
    result = penstock("run", "into.yaml")
    assert result.exit_code == 0, result.output
    return Path("q")


def test_a_queue_is_filled_by_one_file_and_emptied_by_another(queue: Path, penstock: Cli) -> None:
    assert len(Queue.open(queue).split("train").files()) == 4
    result = penstock("run", "out.yaml")
    assert result.exit_code == 0, result.output
    assert pq.read_table("out.parquet")["id"].to_pylist() == list(range(15))
    assert Queue.open(queue).split("train").files() == []


def test_the_same_run_again_is_told_how_to_go_on(queue: Path, penstock: Cli) -> None:
    result = penstock("run", "into.yaml")
    assert result.exit_code == 1
    assert "penstock queue purge q" in " ".join(result.stderr.split())


def test_the_directory_may_be_called_as_the_argument_is(queue: Path, penstock: Cli) -> None:
    Path("out.yaml").write_text(OUT_OF.replace("path: q", "queue_dir: q"))
    assert penstock("run", "out.yaml").exit_code == 0


def test_both_are_listed(penstock: Cli) -> None:
    listed = json.loads(penstock("plugins", "--json").stdout)
    assert {entry["target"] for entry in listed if entry["name"] == "queue"} == {
        "penstock.fsqueue.source:QueueSource",
        "penstock.fsqueue.sink:QueueSink",
    }


def test_a_first_pass_that_would_empty_the_queue_is_refused_with_the_remedy(queue: Path, penstock: Cli) -> None:
    scaled = OUT_OF.replace("{filter: id < 15}", "{standard_scaler: {columns: [id], fit: true}}")
    Path("out.yaml").write_text(scaled)
    result = penstock("run", "out.yaml")
    assert result.exit_code == 1
    assert "transforms[0]: 'fit: true'" in " ".join(result.stderr.split())
    assert len(Queue.open(queue).split("train").files()) == 4
    Path("out.yaml").write_text(scaled.replace("path: q,", "path: q, acknowledge: committed,"))
    result = penstock("run", "out.yaml")
    assert result.exit_code == 0, result.output
    assert pq.read_table("out.parquet").num_rows == 20
    assert Queue.open(queue).split("train").files() == []
