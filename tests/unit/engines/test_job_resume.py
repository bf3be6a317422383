"""Jobs that go on in the directory of an earlier run: nothing is taken over that this run would not have made."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.job_runs import Made, differences, job, run

from penstock import Pipeline
from penstock.corpus.prepare import prepare
from penstock.corpus.recipe import Recipe
from penstock.engines import identity
from penstock.engines.executor import InProcess, Outcome
from penstock.engines.node_checks import output_versions
from penstock.engines.results import Results
from penstock.errors import ResumeError
from penstock.pipeline.stages import Transform
from penstock.sinks import CsvSink, JsonlSink, ParquetSink, StoreSink
from penstock.sources import JsonlSource, MemorySource
from penstock.store.manifest import is_store
from penstock.transforms import ByteTokenizer, ExactDedup, Map


class StoppedAfter(InProcess):
    """Stops the driver after some tasks of a kind."""

    def __init__(self, tasks: int, kind: str) -> None:
        super().__init__()
        self._left, self._kind = tasks, kind

    def wait(self, timeout_seconds: float) -> list[Outcome]:
        ended = super().wait(timeout_seconds)
        self._left -= sum(outcome.task.kind == self._kind for outcome in ended)
        if self._left <= 0:
            raise KeyboardInterrupt
        return ended


def stop(pipeline: Pipeline, tasks: int = 3, kind: str = "map") -> None:
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(engine=job(500, lambda: StoppedAfter(tasks, kind)))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {n}", "n": n}) + "\n" for n in range(200)))
    return path


class Added(Transform):
    """Adds a number that its name does not tell."""

    def __init__(self, number: int) -> None:
        self._number = number

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.set_column(1, "n", pc.add(batch["n"], self._number))


def added(number: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda row: {"n": row["n"] + number}


CHANGES: dict[str, Callable[[Path, Path, int], Pipeline]] = {
    "argument": lambda rows, out, n: Pipeline(rows, [Added(n)], JsonlSink(out / "out.jsonl")),
    "closure": lambda rows, out, n: Pipeline(rows, [Map(added(n))], JsonlSink(out / "out.jsonl")),
    "schema": lambda rows, out, n: Pipeline(
        rows, [Map(added(0), schema=pa.schema([("n", [pa.int32(), pa.float64()][n])]))], JsonlSink(out / "out.jsonl")
    ),
    "delimiter": lambda rows, out, n: Pipeline(rows, [], CsvSink(out / "out.csv", delimiter=",;"[n])),
    "shards": lambda rows, out, n: Pipeline(
        rows, [], StoreSink(out / "out.store", tokens=None, shard_bytes=1000 + 2000 * n)
    ),
    "rows in memory": lambda rows, out, n: Pipeline(
        MemorySource(pa.table({"n": pa.array(range(n, n + 200), pa.int64())})), [], JsonlSink(out / "out.jsonl")
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_job_with_other_contents_is_refused(rows: Path, tmp_path: Path, change: str) -> None:
    stop(CHANGES[change](rows, tmp_path, 0), 2, "shard" if change == "shards" else "map")
    with pytest.raises(ResumeError, match=r"the job in .* has (an)?other .*; run it with the same ones"):
        CHANGES[change](rows, tmp_path, 1).run(engine=job(500))
    assert CHANGES[change](rows, tmp_path, 0).run(engine=job(500)).rows_out == 200


@pytest.mark.parametrize("change", ["size", "time", "missing", "new", "order", "stage"])
def test_what_differs_from_the_job_is_named(rows: Path, tmp_path: Path, change: str) -> None:
    other, sink = tmp_path / "other.jsonl", JsonlSink(tmp_path / "out.jsonl")
    other.write_bytes(rows.read_bytes())
    os.utime(other, ns=(1, 1))
    stop(Pipeline(JsonlSource([rows, other]), [Added(0)], sink))
    now = [rows, other]
    if change == "size":
        other.write_bytes(b'{"n": 1}\n')
        said = rf"other.jsonl had {rows.stat().st_size:,} bytes, and has 9 now;"
    elif change == "time":
        os.utime(other, ns=(2, 2))
        said = "other.jsonl has another modification time;"
    elif change == "missing":
        now, said = [rows], "other.jsonl is missing now;"
    elif change == "new":
        (tmp_path / "more.jsonl").write_bytes(rows.read_bytes())
        now, said = [*now, tmp_path / "more.jsonl"], "more.jsonl is new;"
    elif change == "order":
        now, said = now[::-1], "the same files in another order or number;"
    else:
        said = "now Added"
    with pytest.raises(ResumeError, match=said):
        Pipeline(JsonlSource(now), [Added(int(change == "stage"))], sink).run(engine=job(500))


def test_a_job_of_other_versions_is_refused_until_it_is_finished(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pipeline() -> Pipeline:
        return Pipeline(rows, [Added(0)], JsonlSink(tmp_path / "out.jsonl"))

    with monkeypatch.context() as patch:
        patch.setattr(identity, "output_versions", lambda: output_versions() | {"pyarrow": "1.0"})
        stop(pipeline())
        pipeline().run(tmp_path / "job", engine=job(500))
    with pytest.raises(ResumeError, match=rf"other versions of packages.*: pyarrow 1.0 then, {pa.__version__} now;"):
        pipeline().run(engine=job(500))
    assert pipeline().run(tmp_path / "job", engine=job(500)).rows_out == 200


def test_code_that_cannot_be_compared_is_named_where_a_job_goes_on(
    rows: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = memoryview(b"held")  # no text stands for it

    def pipeline() -> Pipeline:
        return Pipeline(rows, [Map(lambda row: {"n": row["n"] + len(held)})], JsonlSink(tmp_path / "out.jsonl"))

    stop(pipeline())
    assert "other code" not in caplog.text
    pipeline().run(engine=job(500))
    assert "goes on, perhaps with other code than before: Map" in caplog.text


@pytest.mark.parametrize("harm", ["gone", "cut short", "empty"])
@pytest.mark.parametrize("sink", [JsonlSink, ParquetSink])
def test_a_part_that_was_lost_is_made_again(rows: Path, tmp_path: Path, sink: Any, harm: str) -> None:
    out, local = tmp_path / f"out{sink.suffix}", tmp_path / f"local{sink.suffix}"
    Pipeline(rows, [], sink(local)).run()
    stop(Pipeline(rows, [], sink(out)))
    part = tmp_path / f".{out.name}.job" / "parts" / "map-0-000001.rows"
    if harm == "gone":
        part.unlink()
    else:
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2 if harm == "cut short" else 0])
    assert Pipeline(rows, [], sink(out)).run(engine=job(500)).rows_out == 200
    assert out.read_bytes() == local.read_bytes()


def test_tasks_of_another_job_do_not_count_as_done(rows: Path, tmp_path: Path) -> None:
    """A process that ends late may leave records in a directory that was cleared."""
    stop(Pipeline(rows, [Map({"n": "n + 1"})], JsonlSink(tmp_path / "out.jsonl")))
    (tmp_path / ".out.jsonl.job" / "job.json").unlink()
    Pipeline(rows, [Map({"n": "n + 5"})], JsonlSink(tmp_path / "out.jsonl")).run(engine=job(500))
    made = [json.loads(line)["n"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert made == list(range(5, 205))


def test_a_finished_job_whose_output_is_gone_is_an_error(rows: Path, tmp_path: Path) -> None:
    pipeline = Pipeline(rows, [], JsonlSink(tmp_path / "out.jsonl"))
    pipeline.run(tmp_path / "job", engine=job(500))
    (tmp_path / "out.jsonl").unlink()
    with pytest.raises(ResumeError, match=r"is complete, but its output .*out\.jsonl is gone; delete the directory"):
        Pipeline(rows, [], JsonlSink(tmp_path / "out.jsonl")).run(tmp_path / "job", engine=job(500))


def test_functions_behind_a_deduplication_see_only_the_rows_that_stay(tmp_path: Path) -> None:
    """Also when their columns are learned, before the tasks begin."""
    copies = [{"text": "same", "n": 1.0}, *[{"text": "same", "n": 1.5}] * 50]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in [*copies, {"text": "other", "n": 2.0}]))

    def whole(row: dict[str, Any]) -> dict[str, Any]:
        if not row["n"].is_integer():
            raise ValueError("a copy")
        return {"whole": int(row["n"])}

    def make(out: Path) -> Made:
        return str(source), [ExactDedup("text"), whole], JsonlSink(out / "made.jsonl")

    local = run(make, tmp_path)
    assert local.counts["rows_out"] == 2
    assert not differences(local, run(make, tmp_path, engine=job(300)))


def test_a_preparation_that_is_killed_after_publishing_tells_what_it_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "same"}\n' * 9)
    recipe = Recipe(tokenizer=ByteTokenizer(), dedup=["exact"])

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Results, "_report", killed)  # made after the store is published
        with pytest.raises(KeyboardInterrupt):
            prepare(str(source), tmp_path / "a.store", recipe, engine=job(30))
    assert is_store(tmp_path / "a.store")
    report = prepare(str(source), tmp_path / "a.store", recipe, engine=job(30)).report
    assert report is not None
    assert report.dropped == {"duplicate": 8}
    assert json.loads((tmp_path / "a.store" / "losses.json").read_text())["rows"] == {"duplicate": 8}
    assert not (tmp_path / ".a.store.job").exists()
    assert prepare(str(source), tmp_path / "a.store", recipe, engine=job(30)).report is None
