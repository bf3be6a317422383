from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import ConfigError, SchemaError
from penstock.memory.budget import MemoryBudget
from penstock.pipeline import Durable, Pipeline, PipelineConfig
from penstock.sinks import StoreSink
from penstock.sources import MemorySource
from penstock.store import Lineage, open_store, versions

TABLE = pa.table(
    {
        "input_ids": pa.array([list(range(i % 90)) for i in range(2000)], pa.list_(pa.uint16())),
        "loss_mask": pa.array([[j > 4 for j in range(i % 90)] for i in range(2000)], pa.list_(pa.bool_())),
    }
)


def shards(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (path / "shards").iterdir()}


def test_neither_workers_nor_batches_nor_the_budget_leave_a_trace_in_the_shards(tmp_path: Path) -> None:
    seen = []
    runs: list[tuple[int, Any, str]] = [(1, 17, "64 KiB"), (4, 500, "1 MiB"), (2, "auto", "64 MiB")]
    for number, (workers, rows, budget) in enumerate(runs):
        sink = StoreSink(tmp_path / f"{number}.store", shard_bytes="40 KiB")
        config = PipelineConfig(workers=workers, batch_rows=rows)
        Pipeline(MemorySource(TABLE), [], sink, config, MemoryBudget(budget)).run()
        seen.append(shards(sink.path))
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) > 4


def test_the_manifest_is_there_when_the_run_has_ended(tmp_path: Path) -> None:
    sink = StoreSink(tmp_path / "a.store", lineage=Lineage(tokenizer="t", transforms=("x",)))
    assert isinstance(sink, Durable)
    assert sink.manifest is None
    Pipeline(MemorySource(TABLE), [], sink).run()
    assert sink.manifest is not None
    assert sink.manifest.rows == 2000
    assert sink.manifest.supervised == sum(map(sum, TABLE["loss_mask"].to_pylist()))
    store = open_store(sink.path)
    assert (store.manifest.tokenizer, store.manifest.checksum) == ("t", sink.manifest.checksum)


def test_append_mode_adds_a_version_with_each_run(tmp_path: Path) -> None:
    sink = StoreSink(tmp_path / "a.store", mode="append")
    for _ in range(3):
        Pipeline(MemorySource(TABLE), [], sink).run()
        sink.reset()
    assert [version.rows for version in versions(sink.path)] == [2000, 4000, 6000]


def test_a_pipeline_without_the_column_of_tokens_is_told_which_columns_there_are(tmp_path: Path) -> None:
    pipeline = Pipeline(MemorySource({"ids": [[1]]}), [], StoreSink(tmp_path / "a.store"))
    with pytest.raises(SchemaError, match=r"'input_ids'.*'ids'"):
        pipeline.run()
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_there_is_not_touched(tmp_path: Path) -> None:
    Pipeline(MemorySource(TABLE), [], StoreSink(tmp_path / "a.store")).run()
    before = shards(tmp_path / "a.store")
    with pytest.raises(ConfigError, match="mode='append'"):
        Pipeline(MemorySource(TABLE.slice(5)), [], StoreSink(tmp_path / "a.store")).run()
    assert shards(tmp_path / "a.store") == before


def test_it_prints_as_it_was_made(tmp_path: Path) -> None:
    assert repr(StoreSink("corpus.store")) == "StoreSink('corpus.store')"
    with pytest.raises(ConfigError, match=r"\bmode\b"):
        StoreSink(tmp_path, mode="w")
