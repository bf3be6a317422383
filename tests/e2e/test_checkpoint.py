"""run(checkpoint=dir): kill -9 at any moment, run again, and the output has every row exactly once."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from _scripts import processes
from _scripts.processes import DEADLINE_SECONDS, killed_after_change
from deltalake import DeltaTable
from tests.forked_programs import ForkedProgram

from penstock import ConfigError, Pipeline, PipelineConfig, ResumeError
from penstock.errors import StoppedError
from penstock.sinks import JsonlSink, MemorySink, ParquetSink
from penstock.sources import IteratorSource, JsonlSource
from penstock.transforms import Filter, Map

ROWS = 3000
KILLS = 6
OUTPUTS = ["out.parquet", "out.jsonl", "out.jsonl.gz", "out.csv", "out.arrow", "parts", "live.delta"]


def read_back(path: Path) -> list[int]:
    if path.suffix == ".delta":
        rows = pa.table(DeltaTable(path).to_pyarrow_table())
        assert rows["text"].to_pylist() == [f"ROW {n} " * 5 for n in rows["n"].to_pylist()]
        return sorted(rows["n"].to_pylist())
    if path.is_dir():
        files = sorted(path.glob("part-*"))
        return [n for file in files for n in pq.read_table(file).column("n").to_pylist()]
    if path.suffix == ".parquet":
        return pq.read_table(path).column("n").to_pylist()
    if path.suffix == ".arrow":
        with pa.ipc.open_file(str(path)) as reader:
            return reader.read_all().column("n").to_pylist()
    if path.suffix == ".csv":
        return [int(line.split(",")[0]) for line in path.read_text().splitlines()[1:]]
    data = pa.input_stream(str(path), compression="gzip" if path.suffix == ".gz" else None).read()
    return [json.loads(line)["n"] for line in data.splitlines()]


@pytest.mark.parametrize("name", OUTPUTS)
def test_killed_again_and_again_the_output_has_every_row_once(tmp_path: Path, name: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"n": i, "text": f"row {i} " * 5}) + "\n" for i in range(ROWS)))
    script = Path(processes.__file__).with_name("checkpoint_job.py")
    out, kept = tmp_path / name, tmp_path / "kept"
    said = tmp_path / "said"

    def start() -> ForkedProgram:
        facts = {"source": str(source), "out": str(out), "kept": str(kept)}
        return ForkedProgram(script, json.dumps(facts), said=said)

    rng = random.Random(name)
    kills = 0
    while True:
        process = start()
        # Every attempt but the last is killed at a random moment after it has made some progress of its own.
        if kills < KILLS and killed_after_change(process, kept / "checkpoint.json", rng.random() * 0.15):
            kills += 1
            if name not in ("parts", "live.delta"):
                assert not out.exists(), "a partial file was visible"
            continue
        assert process.wait(DEADLINE_SECONDS) == 0, said.read_text()
        break
    printed = said.read_text()
    expected = [i for i in range(ROWS) if i % 32 != 7 and i % 500 != 499]
    refused = [i for i in range(ROWS) if i % 32 != 7 and i % 500 == 499]
    dropped = sum(i % 32 == 7 for i in range(ROWS))
    assert read_back(out) == expected
    assert kills >= 2, "the job was hardly ever killed: make it slower"
    assert printed.split() == [str(ROWS), str(len(expected)), str(len(refused)), str(dropped)]
    bad = [json.loads(line)["data"]["n"] for line in (kept / "bad.jsonl").read_text().splitlines()]
    assert bad == refused
    leftovers = [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert not [n for n in leftovers if "penstock-parts" in n or ".delta." in n]
    assert start().wait(DEADLINE_SECONDS) == 0
    assert said.read_text() == printed, "a finished checkpoint gives its report again"


def numbers(path: Path, count: int = 1000) -> Path:
    path.write_text("".join(json.dumps({"n": i, "pad": "x" * 200}) + "\n" for i in range(count)))
    return path


def test_a_failure_keeps_the_progress_and_a_mended_run_goes_on(tmp_path: Path) -> None:
    source = numbers(tmp_path / "in.jsonl", 200)
    broken = {"value": True}

    def work(row: dict[str, int]) -> dict[str, int]:
        if row["n"] == 140 and broken["value"]:
            raise ValueError("broken")
        return row

    def make() -> Pipeline:
        config = PipelineConfig(checkpoint_seconds=0, workers=1)
        return Pipeline(JsonlSource(source), [Map(work)], JsonlSink(tmp_path / "out.jsonl"), config, "4 KiB")

    with pytest.raises(Exception, match="broken"):
        make().run(checkpoint=tmp_path / "kept")
    saved = json.loads((tmp_path / "kept" / "checkpoint.json").read_text())
    assert 0 < saved["rows_out"] <= 140
    broken["value"] = False
    report = make().run(checkpoint=tmp_path / "kept")
    assert report.resumed
    assert (report.rows_in, report.rows_out) == (200, 200)
    assert read_back(tmp_path / "out.jsonl") == list(range(200))


def test_stopping_keeps_the_progress(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for file in range(30):
        lines = "".join(json.dumps({"n": number}) + "\n" for number in range(100 * file, 100 * file + 100))
        (tmp_path / "in" / f"{file:02}.jsonl").write_text(lines)
    stopped = threading.Event()

    def held(row: dict[str, int]) -> dict[str, int]:
        if row["n"] >= 2000:
            stopped.wait(60)
        return row

    def make() -> Pipeline:
        config = PipelineConfig(checkpoint_seconds=100)
        return Pipeline(JsonlSource(tmp_path / "in"), [Map(held)], ParquetSink(tmp_path / "o.parquet"), config, "4 KiB")

    pipeline = make().start(checkpoint=tmp_path / "kept")
    while pipeline.snapshot()["rows_out"] < 100:
        time.sleep(0.005)
    pipeline.stop()
    stopped.set()
    with pytest.raises(StoppedError):
        pipeline.wait()
    assert json.loads((tmp_path / "kept" / "checkpoint.json").read_text())["rows_out"] >= 100
    assert make().run(checkpoint=tmp_path / "kept").rows_out == 3000
    assert pq.read_table(tmp_path / "o.parquet").column("n").to_pylist() == list(range(3000))


def test_what_cannot_be_checkpointed_is_refused_with_a_reason(tmp_path: Path) -> None:
    source = JsonlSource(numbers(tmp_path / "in.jsonl"))
    with pytest.raises(ConfigError, match=r"MemorySink\(\)"):
        Pipeline(source, [], MemorySink()).run(checkpoint=tmp_path / "kept")
    bare = type("Bare", (), {"next_batch": lambda self, rows: None})()
    with pytest.raises(ConfigError, match=r"state_dict.*\bBare\b"):
        Pipeline(bare, [], JsonlSink(tmp_path / "o.jsonl")).run(checkpoint=tmp_path / "kept")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        Pipeline(source, [], JsonlSink(tmp_path / "o.jsonl")).run(checkpoint=tmp_path / "file")


def test_a_checkpoint_of_another_pipeline_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    source = numbers(tmp_path / "in.jsonl")
    Pipeline(JsonlSource(source), [], JsonlSink(tmp_path / "o.jsonl")).run(checkpoint=tmp_path / "kept")
    with pytest.raises(ResumeError):
        Pipeline(JsonlSource(source), [Filter("n > 3")], JsonlSink(tmp_path / "o.jsonl")).run(
            checkpoint=tmp_path / "kept"
        )
    (tmp_path / "kept" / "checkpoint.json").write_text('{"half":')
    with pytest.raises(ResumeError):
        Pipeline(JsonlSource(source), [], JsonlSink(tmp_path / "o.jsonl")).run(checkpoint=tmp_path / "kept")


def test_an_iterator_given_as_a_function_can_be_checkpointed(tmp_path: Path) -> None:
    def rows() -> list[dict[str, int]]:
        return [{"n": i} for i in range(100)]

    report = Pipeline(IteratorSource(rows), [], JsonlSink(tmp_path / "o.jsonl")).run(checkpoint=tmp_path / "kept")
    assert report.rows_out == 100
    assert (tmp_path / "o.jsonl").exists()
