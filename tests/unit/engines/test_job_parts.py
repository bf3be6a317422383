"""Parts of a job: keys by partition, records in little memory, figures of all tasks in one report."""

from __future__ import annotations

import json
import tracemalloc
from functools import partialmethod
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.job_cases import Tail
from tests.job_runs import Made, differences, job, run

from penstock import Pipeline, PipelineConfig
from penstock.engines.exchange import KeyFile, dropped_rows, find_duplicates, write_index
from penstock.engines.job_directory import JobDirectory
from penstock.engines.records import PhaseRecords, empty_record, task_name
from penstock.errors import FailureBudgetError
from penstock.sinks import ArrowSink, JsonlSink, ParquetSink
from penstock.sources import JsonlSource, MemorySource
from penstock.store.home import BucketHome, LocalHome
from penstock.transforms import ExactDedup, Filter, Map, MinHashDedup


@pytest.mark.parametrize("stage", [ExactDedup("text"), MinHashDedup("text", ngram=1, bands=3, rows=2)])
@pytest.mark.parametrize("budget", [1 << 30, 2000])
def test_duplicates_by_partitions_are_those_of_one_pass(tmp_path: Path, stage: Any, budget: int) -> None:
    rng = np.random.default_rng(3)
    batches = [
        pa.record_batch({"text": [f"a{n} b{m}" for n, m in rng.integers(0, 25, (rows, 2))]}) for rows in (40, 0, 9, 60)
    ]
    directory, partitions = JobDirectory(tmp_path), 3
    directory.make()
    starts = {}
    for number, batch in enumerate(batches):
        keys = KeyFile(stage, partitions, 0)
        keys._most = 400  # so that most of them wait in a file
        for start in range(0, batch.num_rows, 7):
            keys.add(batch.slice(start, 7))
        with directory.created(f"{task_name(0, number)}.keys") as path:
            found = keys.write(path)
            path.touch()
        if found is not None:
            starts[number] = np.array(found)
    write_index(directory, 0, len(batches), partitions, starts)
    for partition in range(partitions):
        find_duplicates(directory, 0, partition, partitions, f"duplicates-0-{partition:04d}", budget)
    stage.reset()
    for number, batch in enumerate(batches):
        gone = dropped_rows(directory, 0, partitions, number, len(batches), batch.num_rows)
        assert batch.filter(pa.array(~gone)) == stage.transform(batch)


def test_the_driver_keeps_little_of_a_split() -> None:
    record = json.dumps(
        empty_record([0]) | {"rows": 123456, "run_rows": [123456], "records": [123460], "schema": "s" * 2000}
    )
    records = PhaseRecords(1000, 0)
    tracemalloc.start()
    try:
        for number in range(1000):
            records.add(number, json.loads(record))
        assert tracemalloc.get_traced_memory()[0] < 1000 * 600
    finally:
        tracemalloc.stop()


def write_rows(path: Path) -> Path:
    path.write_text("\n".join(json.dumps({"text": f"text {n % 40}", "n": n}) for n in range(200)))
    return path


def test_the_report_has_the_figures_of_all_tasks(tmp_path: Path) -> None:
    source = JsonlSource(write_rows(tmp_path / "in.jsonl"))
    snapshots: list[dict[str, Any]] = []
    steps = [Filter("n >= 10"), ExactDedup("text")]
    report = Pipeline(source, steps, JsonlSink(tmp_path / "out.jsonl")).run(engine=job(900), progress=snapshots.append)
    rows = {stage["name"]: (stage["rows_in"], stage["rows_out"]) for stage in report.stages}
    assert rows["Filter(n >= 10)"] == (200, 190)
    assert rows[f"JsonlSink('{tmp_path / 'out.jsonl'}')"] == (40, 40)
    assert sum(stage["kind"] == "source" for stage in report.stages) == 1
    assert report.peak_bytes > 0
    assert "on 1 node" in report.bottleneck
    assert str(report)
    last = snapshots[-1]
    assert last["file_bytes_done"] == (tmp_path / "in.jsonl").stat().st_size
    assert (last["rows_done"], last["tasks_done"]) == (200, last["tasks"])


def test_progress_of_a_job_can_be_shown(tmp_path: Path) -> None:
    from rich.console import Console

    from penstock.observe import Extent, LiveProgress

    source = JsonlSource(write_rows(tmp_path / "in.jsonl"))
    pipeline = Pipeline(source, [Filter("n >= 10")], JsonlSink(tmp_path / "out.jsonl"))
    with (
        open(tmp_path / "shown", "w", encoding="utf-8") as file,
        LiveProgress(Console(file=file, force_terminal=True), Extent.of(source), "a job", first_seconds=0.0) as shown,
    ):
        pipeline.run(engine=job(900), progress=shown)


def test_nothing_is_published_if_too_many_rows_are_bad(tmp_path: Path) -> None:
    def refuse(row: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("no")

    limits: list[tuple[dict[str, Any], str]] = [
        ({"max_failures": 20}, r"21 bad rows.*row 20: ValueError: no"),
        ({"max_failure_ratio": 0.5}, r"200 of 200 rows are bad.*row 199: ValueError: no"),
    ]
    for engine, (limit, said) in product((None, job(900)), limits):
        config = PipelineConfig(on_error="skip", **limit)
        pipeline = Pipeline(write_rows(tmp_path / "in.jsonl"), [Map(refuse)], tmp_path / "out.jsonl", config)
        with pytest.raises(FailureBudgetError, match=said):
            pipeline.run(engine=engine)
        assert not (tmp_path / "out.jsonl").exists()


def test_the_ratio_of_bad_rows_is_that_of_the_rows_read(tmp_path: Path) -> None:
    rows = [json.dumps({"n": n, "odd": n % 2}) for n in range(4000)]
    (tmp_path / "in.jsonl").write_text("\n".join(rows))

    def refuse(row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] % 10 == 0:
            raise ValueError("no")
        return row

    for number, engine in enumerate((None, job(9000))):
        config = PipelineConfig(on_error="skip", max_failure_ratio=0.15)
        steps = [Map(refuse), Filter("odd == 1")]  # half of the rows that are read are left
        report = Pipeline(tmp_path / "in.jsonl", steps, tmp_path / f"out-{number}.jsonl", config).run(engine=engine)
        assert (report.rows_in, sum(report.skipped.values())) == (4000, 400)


@pytest.mark.parametrize("sink", [ArrowSink, ParquetSink])
def test_bytes_of_columnar_files_depend_on_the_rows_alone(tmp_path: Path, sink: Any) -> None:
    table = pa.table(
        {
            "text": ["x" * (n % 7000) for n in range(900)],
            "n": pa.array([None if n % 3 else n for n in range(900)]),
            "kind": pa.array(["abc"[n % 3] for n in range(900)]).dictionary_encode(),
        }
    )
    made = set()
    for rows in (1, 7, 300, 900):
        path = tmp_path / f"{rows}{sink.suffix}"
        options = {"row_group_bytes": 500_000} if sink is ParquetSink else {}
        to = sink(path, **options)
        for batch in table.to_batches(max_chunksize=rows):
            to.consume(batch)
        to.flush()
        made.add(path.read_bytes())
    assert len(made) == 1


def test_a_pipeline_whose_first_step_needs_order_says_that_it_runs_in_one_place(tmp_path: Path) -> None:
    from tests.job_cases import Every

    pipeline = Pipeline(MemorySource([{"n": n} for n in range(9)]), [Every()], tmp_path / "out.jsonl")
    assert pipeline.explain(job(10)).startswith("one place    MemorySource")
    assert pipeline.run(engine=job(10)).rows_out == 5


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_bad_rows_of_the_last_steps_are_not_loaded_at_once(
    tmp_path: Path, kind: str, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": f"{'kappa' if n % 3 else 'alpha'} {n}"} for n in range(60)]

    def make(out: Path) -> Made:
        return MemorySource(rows), [Map({"size": "len(text)"}), Tail()], JsonlSink(out / "made.jsonl")

    local = run(make, tmp_path, config={"on_error": "quarantine"})
    for home in (LocalHome, BucketHome):
        monkeypatch.setattr(home, "read", partialmethod(_read_no_rows, home.read))
    place = f"{s3_url}/job" if kind == "bucket" else tmp_path / "job"
    other = run(make, tmp_path, config={"on_error": "quarantine"}, engine=job(300), checkpoint=place)
    assert len(local.files["bad.jsonl"].splitlines()) == 40
    assert not differences(local, other)


def _read_no_rows(self: Any, read: Any, name: str) -> bytes:
    assert not name.endswith(".jsonl")
    data: bytes = read(self, name)
    return data
