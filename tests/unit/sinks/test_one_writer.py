"""Two runs at once into one output, or with one checkpoint: the first goes on, the second is refused by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import Pipeline, PipelineConfig
from penstock.errors import ConfigError, ResumeError
from penstock.sinks import ArrowSink, CsvSink, JsonlSink, ParquetSink, StoreSink, open_sink
from penstock.sources import MemorySource, open_source

ROWS = [{"n": n} for n in range(60)]
OUTPUTS = ["o.parquet", "o.arrow", "o.jsonl", "o.jsonl.zst", "o.csv", "o.tsv.gz"]
DIRECTORIES: list[Any] = [ParquetSink, ArrowSink, JsonlSink, CsvSink]
HOLD = """
import os, sys, threading, time
from penstock import Pipeline, PipelineConfig
from penstock.sinks import open_sink, ParquetSink
from penstock.sources import MemorySource

home = sys.argv[1]
seen = threading.Event()

def identity(row):
    if row["n"] == 59:
        seen.set()
        threading.Event().wait()
    return row

runs = []
for name in sys.argv[2:]:
    sink = open_sink(f"{home}/{name}") if "." in name else ParquetSink(f"{home}/{name}")
    config = PipelineConfig(checkpoint_seconds=0, batch_rows=10, workers=1)
    source = MemorySource([{"n": n} for n in range(60)])
    runs.append(Pipeline(source, [identity], sink, config).start(f"{home}/{name}.cp"))
    seen.wait()
    seen.clear()
    while not os.path.exists(f"{home}/{name}.cp/checkpoint.json"):
        time.sleep(0.01)
print("held", flush=True)
threading.Event().wait()
"""

HOLD_LOCK = """
import sys
from penstock.files.locks import FileLock
FileLock(sys.argv[1]).acquire()
print('held', flush=True)
sys.stdin.read()
"""


def written(path: Path) -> list[int]:
    return [row["n"] for batch in Pipeline(open_source(path)) for row in batch.to_pylist()]


def pipeline(sink: Any, step: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> Pipeline:
    def identity(row: dict[str, Any]) -> dict[str, Any]:
        return step(row)

    return Pipeline(MemorySource(ROWS), [identity], sink, PipelineConfig(checkpoint_seconds=0, workers=1))


class Pause:
    """A transform that stands still before the last row until it is told to go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] == 59:
            self.reached.set()
            assert self.go_on.wait(60)
        return row


@pytest.fixture
def pause() -> Iterator[Pause]:
    made = Pause()
    yield made
    made.go_on.set()


def refused(name: str) -> str:
    return rf"{name}.*\b{os.getpid()}\b"


@pytest.mark.parametrize("name", [*OUTPUTS, *DIRECTORIES])
def test_of_two_checkpointed_runs_into_one_output_the_second_is_refused(
    tmp_path: Path, pause: Pause, name: Any
) -> None:
    def sink() -> Any:
        return open_sink(tmp_path / name) if isinstance(name, str) else name(tmp_path / "o")

    first = pipeline(sink(), pause).start(tmp_path / "cp")
    assert pause.reached.wait(60)
    with pytest.raises(ConfigError, match=refused("/cp")):
        pipeline(sink()).run(tmp_path / "cp")
    with pytest.raises(ConfigError, match=refused("/o")):
        pipeline(sink()).run(tmp_path / "other")
    with pytest.raises(ConfigError, match=refused("/cp")):
        pipeline(JsonlSink(tmp_path / "elsewhere.jsonl")).run(tmp_path / "cp")
    pause.go_on.set()
    assert first.wait(60).rows_out == 60
    out = sink().path
    assert written(out) == list(range(60))
    assert pipeline(sink()).run(tmp_path / "cp").rows_out == 60, "a complete run says its report again"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["cp", "other", out.name])
    assert [path.name for path in (tmp_path / "cp").iterdir()] == ["checkpoint.json"]


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_a_run_in_another_process_is_named_and_once_killed_leaves_nothing_locked(tmp_path: Path) -> None:
    names = ["o.parquet", "o.jsonl", "parts"]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), *names], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n", holder.communicate()[1]
        for name in names:
            for checkpoint in (f"{name}.cp", "other"):
                with pytest.raises(ConfigError, match=str(holder.pid)):
                    pipeline(sink_at(tmp_path / name)).run(tmp_path / checkpoint)
        with pytest.raises(ConfigError, match=rf"\bparts\b.*{holder.pid}"):
            pipeline(sink_at(tmp_path / "parts")).run()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    for name in names:
        assert not (tmp_path / name).exists()
        report = pipeline(sink_at(tmp_path / name)).run(tmp_path / f"{name}.cp")
        assert (report.rows_out, report.resumed) == (60, True)
        assert written(tmp_path / name) == list(range(60))
    assert [path.name for path in tmp_path.iterdir() if path.name[0] == "."] == []


def sink_at(path: Path) -> Any:
    return open_sink(path) if path.suffix else ParquetSink(path)


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_of_two_plain_runs_into_one_directory_the_second_is_refused_and_nothing_hidden_is_published(
    tmp_path: Path, kind: Any
) -> None:
    batch = MemorySource(ROWS).next_batch(60)
    assert batch is not None
    first = kind(tmp_path / "out")
    first.consume(batch)
    with pytest.raises(ConfigError, match=refused("/out")):
        pipeline(kind(tmp_path / "out")).run()
    (tmp_path / ".out.penstock-parts" / f".part-000001{kind.suffix}.99-0123abcd.tmp").write_text("of a run before")
    first.flush()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"part-000000{kind.suffix}"]
    assert written(tmp_path / "out") == list(range(60))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_of_two_plain_runs_into_one_file_the_last_one_wins(tmp_path: Path, pause: Pause) -> None:
    first = pipeline(ParquetSink(tmp_path / "o.parquet"), pause).start()
    assert pause.reached.wait(60)
    pipeline(ParquetSink(tmp_path / "o.parquet"), lambda row: {"n": -row["n"]}).run()
    assert written(tmp_path / "o.parquet") == [-n for n in range(60)]
    pause.go_on.set()
    first.wait(60)
    assert written(tmp_path / "o.parquet") == list(range(60))
    assert [path.name for path in tmp_path.iterdir()] == ["o.parquet"]


def test_a_plain_run_that_fails_leaves_the_parts_of_a_checkpointed_one_alone(tmp_path: Path, pause: Pause) -> None:
    def fail(row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] == 50:
            raise ValueError("no")
        return row

    first = pipeline(JsonlSink(tmp_path / "o.jsonl"), pause).start(tmp_path / "cp")
    assert pause.reached.wait(60)
    with pytest.raises(RuntimeError, match="ValueError"):
        pipeline(JsonlSink(tmp_path / "o.jsonl"), fail).run()
    pause.go_on.set()
    assert first.wait(60).rows_out == 60
    assert written(tmp_path / "o.jsonl") == list(range(60))


@pytest.mark.parametrize("name", ["o.parquet", "o.jsonl", "out"])
def test_a_checkpoint_does_not_go_on_with_the_parts_of_another_run(tmp_path: Path, name: str) -> None:
    """Both wrote one output, one after the other, each with its own checkpoint, and neither came to its end."""
    batches = MemorySource([{"n": n} for n in range(4)]).next_batch(4)
    assert batches is not None
    older, newer = sink_at(tmp_path / name), sink_at(tmp_path / name)
    older.restore({})
    older.consume(batches)
    token = older.checkpoint()
    older.abort()
    newer.restore({})
    newer.consume(batches.slice(2))
    newer.checkpoint()
    newer.abort()
    again = sink_at(tmp_path / name)
    with pytest.raises(ResumeError, match=str(tmp_path)):
        again.restore(token)


def test_a_sink_that_was_replaced_by_a_newer_one_writes_no_more(tmp_path: Path) -> None:
    batch = MemorySource(ROWS).next_batch(60)
    assert batch is not None
    lost, sink = JsonlSink(tmp_path / "o.jsonl"), JsonlSink(tmp_path / "o.jsonl")
    lost.restore({})
    lost.consume(batch)
    sink.restore({})
    for call in (lambda: lost.consume(batch), lost.checkpoint, lost.flush):
        with pytest.raises(ConfigError, match=r"o\.jsonl"):
            call()
    lost.abort()
    sink.consume(batch)
    sink.flush()
    assert written(tmp_path / "o.jsonl") == list(range(60))


def test_a_file_system_without_locks_is_told_of_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(handle: int) -> bool:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("penstock.files.locks._lock", none)
    monkeypatch.setattr("penstock.files.locks._NO_LOCKS", (38,))
    assert pipeline(ParquetSink(tmp_path / "out")).run(tmp_path / "cp").rows_out == 60
    assert written(tmp_path / "out") == list(range(60))
    assert "out: " in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cp", "out"]


def test_of_two_checkpointed_runs_into_one_store_the_second_is_refused(tmp_path: Path, pause: Pause) -> None:
    first = pipeline(StoreSink(tmp_path / "s", tokens=None), pause).start(tmp_path / "cp")
    assert pause.reached.wait(60)
    with pytest.raises(ConfigError, match=str(os.getpid())):
        pipeline(StoreSink(tmp_path / "s", tokens=None)).run(tmp_path / "other")
    pause.go_on.set()
    assert first.wait(60).rows_out == 60
    assert written(tmp_path / "s") == list(range(60))


def test_a_directory_that_is_a_store_in_the_making_is_no_output_for_files(tmp_path: Path) -> None:
    store = StoreSink(tmp_path / "out", tokens=None)
    batch = MemorySource(ROWS).next_batch(60)
    assert batch is not None
    store.consume(batch)
    with pytest.raises(ConfigError, match=refused("/out")):
        pipeline(ParquetSink(tmp_path / "out")).run()
    store.abort()


def test_a_quarantine_file_is_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD_LOCK, str(tmp_path / ".bad.jsonl.penstock-lock")]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    (tmp_path / "bad.jsonl").write_text("theirs\n")

    def fail(row: dict[str, Any]) -> dict[str, Any]:
        raise ValueError(row["n"])

    config = PipelineConfig(on_error="quarantine", quarantine=tmp_path / "bad.jsonl")
    run = Pipeline(MemorySource(ROWS), [fail], JsonlSink(tmp_path / "o.jsonl"), config)
    with pytest.raises(ConfigError, match=rf"quarantine.*{holder.pid}"):
        run.run()
    holder.communicate("")
    assert (tmp_path / "bad.jsonl").read_text() == "theirs\n"
    assert not (tmp_path / "o.jsonl").exists()
    assert run.run().rows_out == 0
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == 60


@pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")
def test_the_next_run_removes_what_a_killed_one_left_without_a_checkpoint(tmp_path: Path) -> None:
    code = (
        "import os, sys, pyarrow as pa; from penstock.sinks import JsonlSink; "
        "JsonlSink(sys.argv[1]).consume(pa.RecordBatch.from_pylist([{'a': 1}])); os.kill(os.getpid(), 9)"
    )
    target = tmp_path / "o.jsonl"
    subprocess.run([sys.executable, "-c", code, str(target)], check=False)
    assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"]
    Pipeline(MemorySource([{"a": 2}]), [], JsonlSink(target)).run()
    assert [path.name for path in tmp_path.iterdir()] == ["o.jsonl"]
