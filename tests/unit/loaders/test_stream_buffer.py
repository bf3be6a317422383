"""`buffer_size` of a `StreamingPipeline` over files and tables."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from penstock.errors import ConfigError
from penstock.loaders.streaming import StreamingPipeline
from penstock.pipeline import Pipeline, PipelineConfig
from penstock.sources import JsonlSource, MemorySource
from penstock.transforms import Filter, FlatMap

ROWS = 20_000
TABLE = pa.table({"n": range(ROWS), "text": [f"some words of row {row}" for row in range(ROWS)]})


def made(folder: Path, kind: str) -> Any:
    if kind == "table":
        return TABLE
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in TABLE.to_pylist()))
    elif kind == "csv":
        pa.csv.write_csv(TABLE, path)
    else:
        pq.write_table(TABLE, path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "table"])
def test_rows_of_files_and_tables_in_flight_are_at_most_the_buffer(tmp_path: Path, kind: str) -> None:
    most, seen = 0, 0
    with StreamingPipeline(made(tmp_path, kind), buffer_size=256, chunk_size=64) as pipeline:
        for number, row in enumerate(pipeline):
            assert row["n"] == number
            seen += 1
            if number % 500 == 0:
                most = max(most, pipeline.stats()["in_flight"])
    assert seen == ROWS
    assert 0 < most <= 256 + 64


def test_a_source_waits_while_enough_rows_are_ahead(tmp_path: Path) -> None:
    config = PipelineConfig(rows_ahead=100, batch_rows=10, workers=2)
    with Pipeline(JsonlSource(made(tmp_path, "jsonl")), config=config) as pipeline:
        loop = iter(pipeline)
        rows = 0
        for _ in range(300):
            rows += next(loop).num_rows
            assert pipeline.snapshot()["rows_in"] - rows <= 100 + 32
    assert rows == 3000


def test_rows_that_a_transform_drops_or_makes_do_not_stop_the_source() -> None:
    config = PipelineConfig(rows_ahead=40, batch_rows=40, workers=2)
    few = Pipeline(MemorySource(TABLE.slice(0, 3000)), [Filter("n >= 2000 and n < 2100")], config=config)
    assert [batch.num_rows for batch in few] == [40, 40, 20]
    many = Pipeline(MemorySource(TABLE.slice(0, 100)), [FlatMap(lambda row: [row] * 50)], config=config)
    assert sum(batch.num_rows for batch in many) == 5000


@pytest.mark.parametrize("taken", [1, 20, 31, 48])
def test_rows_that_a_resumed_run_passes_over_do_not_stop_the_source(tmp_path: Path, taken: int) -> None:
    path = tmp_path / "rows.parquet"
    wide = TABLE.slice(0, 1500).append_column("wide", pa.array([os.urandom(400).hex() for _ in range(1500)]))
    pq.write_table(wide, path, row_group_size=500)

    def make() -> Pipeline:
        config = PipelineConfig(rows_ahead=50, batch_rows=20, workers=2)
        return Pipeline(path, config=config, budget="128 MiB")  # too little to decode ahead

    with make() as first:
        found = [row for _, batch in zip(range(taken), first) for row in batch["n"].to_pylist()]
        state = first.state_dict()
    with make() as second:
        second.load_state_dict(state)
        found += [row for batch in second for row in batch["n"].to_pylist()]
    assert found == list(range(1500))


@pytest.mark.parametrize("given", [{"rows_ahead": 0}, {"rows_ahead": True}, {"rows_ahead": 10, "batch_rows": 20}])
def test_a_number_of_rows_ahead_that_cannot_be_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="rows_ahead"):
        PipelineConfig(**given)


@pytest.mark.parametrize("kind", ["jsonl", "table"])
def test_a_small_buffer_needs_no_other_option(tmp_path: Path, kind: str) -> None:
    with StreamingPipeline(made(tmp_path, kind), buffer_size=64) as pipeline:
        assert [row["n"] for row, _ in zip(pipeline, range(500))] == list(range(500))
        assert pipeline.stats()["in_flight"] <= 64 + 64
