"""Pipelines that read a queue and are killed or broken off: no row is lost, and with a state none comes twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.waits import wait_for

from penstock.fsqueue import QueueSink, QueueSource
from penstock.pipeline import Pipeline, PipelineConfig

pytestmark = pytest.mark.timeout(900)

NUMBERS = list(range(200))

READER = """
import sys, time
from pathlib import Path
import pyarrow as pa
from penstock.fsqueue import QueueSource
from penstock.pipeline import Pipeline, PipelineConfig
from penstock.sinks import ParquetSink

here, order, hang_at, every = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])

def pass_on(batch: pa.RecordBatch) -> pa.RecordBatch:
    if batch.column("n")[batch.num_rows - 1].as_py() >= hang_at:
        (here / "hangs").touch()
        time.sleep(3600)
    return batch

source = QueueSource(here / "q", order=order, lease_seconds=0.5, timeout_seconds=300)
config = PipelineConfig(workers=1, batch_rows=5, checkpoint_seconds=every)
print(Pipeline(source, [pass_on], ParquetSink(here / "out.parquet"), config).run(here / "kept").rows_out)
"""
NEVER, ALWAYS = 1000.0, 1e-9


def fill(path: Path) -> None:
    with QueueSink(path, batches_per_file=4) as sink:
        for batch in pa.table({"n": NUMBERS}).to_batches(max_chunksize=6):
            sink.consume(batch)


def run_and_kill(home: Path, order: str, hang_at: int, every: float) -> None:
    """A reader that hangs at a row, killed there."""
    (home / "hangs").unlink(missing_ok=True)
    command = [sys.executable, "-c", READER, str(home), order, str(hang_at), str(every)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: (home / "hangs").exists())
        if every == ALWAYS:
            wait_for(lambda: kept_rows(home) > 0)
    finally:
        process.kill()
        process.wait(30)


def kept_rows(home: Path) -> int:
    path = home / "kept" / "checkpoint.json"
    return int(json.loads(path.read_bytes())["rows_out"]) if path.exists() else 0


def finish(home: Path, order: str) -> list[int]:
    """The rows in the output of a reader that comes to the end."""
    command = [sys.executable, "-c", READER, str(home), order, "1000000", str(NEVER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["200"]
    rows: list[int] = pq.read_table(home / "out.parquet").column("n").to_pylist()
    return rows


def files_left(home: Path) -> list[str]:
    return [path.name for path in (home / "q" / "train").iterdir() if ".arrow" in path.name]


@pytest.mark.parametrize("order", ["any", "strict"])
def test_a_run_that_is_killed_before_its_first_checkpoint_begins_anew_and_has_every_row(
    tmp_path: Path, order: str
) -> None:
    fill(tmp_path / "q")
    run_and_kill(tmp_path, order, 60, NEVER)
    assert kept_rows(tmp_path) == 0
    assert sorted(finish(tmp_path, order)) == NUMBERS
    assert files_left(tmp_path) == []


@pytest.mark.parametrize("order", ["any", "strict"])
def test_a_run_that_is_killed_after_a_checkpoint_goes_on_from_it_and_has_every_row_once(
    tmp_path: Path, order: str
) -> None:
    fill(tmp_path / "q")
    run_and_kill(tmp_path, order, 60, ALWAYS)
    assert 0 < kept_rows(tmp_path) <= 60
    assert sorted(finish(tmp_path, order)) == NUMBERS
    assert files_left(tmp_path) == []


@pytest.mark.parametrize("order", ["any", "strict"])
def test_a_run_that_is_killed_again_before_its_next_checkpoint_has_every_row_once(tmp_path: Path, order: str) -> None:
    fill(tmp_path / "q")
    run_and_kill(tmp_path, order, 60, ALWAYS)
    kept = kept_rows(tmp_path)
    run_and_kill(tmp_path, order, 90, NEVER)
    assert kept_rows(tmp_path) == kept
    assert sorted(finish(tmp_path, order)) == NUMBERS
    assert files_left(tmp_path) == []


@pytest.mark.parametrize("order", ["any", "strict"])
def test_a_complete_run_leaves_nothing_and_says_so_again(tmp_path: Path, order: str) -> None:
    fill(tmp_path / "q")
    assert finish(tmp_path, order) == NUMBERS
    assert files_left(tmp_path) == []
    assert finish(tmp_path, order) == NUMBERS


# -- loops -----------------------------------------------------------------------------------------------------------


def pipeline_of(home: Path, order: Any, **options: Any) -> Pipeline:
    source = QueueSource(home / "q", order=order, timeout_seconds=300, lease_seconds=0.5, **options)
    return Pipeline(source, config=PipelineConfig(batch_rows=5))


def rows_of(pipeline: Pipeline, most: int = 10**6) -> list[int]:
    rows: list[int] = []
    for batch in pipeline:
        rows += batch.column("n").to_pylist()
        if len(rows) >= most:
            break
    return rows


@pytest.mark.parametrize("acknowledge", ["delivered", "committed"])
@pytest.mark.parametrize("order", ["any", "strict"])
def test_a_loop_that_was_broken_off_goes_on_from_its_state_with_exactly_the_rest(
    tmp_path: Path, order: str, acknowledge: str
) -> None:
    fill(tmp_path / "q")
    first = pipeline_of(tmp_path, order, acknowledge=acknowledge)
    begun = rows_of(first, 30)
    assert begun == NUMBERS[:30]
    state = json.loads(json.dumps(first.state_dict()))
    again = pipeline_of(tmp_path, order, acknowledge=acknowledge)
    again.load_state_dict(state)
    assert rows_of(again) == NUMBERS[30:]


@pytest.mark.parametrize("order", ["any", "strict"])
def test_without_a_state_what_was_not_asked_past_comes_again(tmp_path: Path, order: str) -> None:
    fill(tmp_path / "q")
    rows_of(pipeline_of(tmp_path, order), 30)
    rest = rows_of(pipeline_of(tmp_path, order))
    # The sixth batch was not asked past; queues keep whole batches, of six rows here.
    assert rest == NUMBERS[24:]
    assert files_left(tmp_path) == []


@pytest.mark.parametrize("order", ["any", "strict"])
def test_a_loop_over_a_source_that_counts_only_commits_leaves_all_before_the_first(tmp_path: Path, order: str) -> None:
    fill(tmp_path / "q")
    first = pipeline_of(tmp_path, order, acknowledge="committed")
    assert rows_of(first) == NUMBERS
    second = pipeline_of(tmp_path, order, acknowledge="committed")
    assert rows_of(second, 60) == NUMBERS[:60]
    second.source.commit(second.state_dict())  # type: ignore[attr-defined]
    third = pipeline_of(tmp_path, order, acknowledge="committed")
    assert rows_of(third) == NUMBERS[60:]
    third.source.commit(third.state_dict())  # type: ignore[attr-defined]
    assert rows_of(pipeline_of(tmp_path, order)) == []
