"""The contract of sinks, in a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.buckets import download, names_in

from penstock.errors import StageError
from penstock.memory.budget import MemoryBudget
from penstock.pipeline import Pipeline, PipelineConfig
from penstock.sinks import ArrowSink, CsvSink, JsonlSink, ParquetSink
from penstock.sources import open_source
from penstock.testing import FailingTransform, RowsSource, assert_sink_contract

ROWS = [{"n": i, "text": f'row {i}, "quoted"\n', "x": i / 4 + 0.1 if i % 5 else None} for i in range(60)]
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "JSON lines": (JsonlSink, "out.jsonl", {}),
    "JSON lines, zstd": (JsonlSink, "out.jsonl.zst", {}),
    "CSV, gzip": (CsvSink, "out.csv.gz", {}),
    "Parquet": (ParquetSink, "out.parquet", {"row_group_bytes": 500}),
    "Parquet directory": (ParquetSink, "out", {"rows_per_file": 7}),
    "Arrow": (ArrowSink, "out.arrow", {}),
    "JSON lines directory": (JsonlSink, "out/", {"rows_per_file": 11}),
}


class Case:
    """A sink below a URL, and what readers see of it."""

    def __init__(self, url: str, folder: Path, kind: Any, name: str, options: dict[str, Any]) -> None:
        self.url, self._folder, self._kind, self._name, self._options = url, folder, kind, name, options
        self._copies = 0

    def make(self, directory: Path) -> Any:
        return self._kind(f"{self.url}/{directory.parent.name}-{directory.name}/{self._name}", **self._options)

    def see(self, sink: Any) -> list[dict[str, Any]]:
        above = sink.path.parent.url
        visible = [name for name in names_in(above) if not name.startswith(".")]
        if not visible:
            return []
        self._copies += 1
        copy = download(above, self._folder / str(self._copies)) / self._name
        source, rows = open_source(copy), []
        while (batch := source.next_batch(1000)) is not None:
            rows += batch.to_pylist()
        return rows


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest, s3_url: str, tmp_path: Path) -> Case:
    return Case(s3_url, tmp_path, *request.param)


def test_a_sink_in_a_bucket_keeps_its_contract(case: Case) -> None:
    assert_sink_contract(case.make, case.see)


def test_a_run_into_a_bucket_leaves_its_output_and_nothing_else(case: Case, tmp_path: Path) -> None:
    for kept in (None, f"{case.url}/kept", tmp_path / "kept"):
        folder = tmp_path / f"{kept is None}{type(kept).__name__}"
        sink, limit = case.make(folder), MemoryBudget("64 KiB")
        Pipeline(RowsSource(ROWS), [], sink, PipelineConfig(checkpoint_seconds=0), limit).run(kept)
        assert case.see(sink) == ROWS
        assert limit.used == 0
        names = names_in(sink.path.parent.url)
        assert not [name for name in names if name.startswith(".")]
        sink.close()
        if kept is not None:
            (tmp_path / "kept" / "checkpoint.json").unlink(missing_ok=True)


def test_a_failed_run_leaves_nothing_in_the_bucket(case: Case, tmp_path: Path) -> None:
    with pytest.raises(StageError):
        Pipeline(RowsSource(ROWS), [FailingTransform("n", [55])], case.make(tmp_path)).run()
    assert names_in(case.url) == []
