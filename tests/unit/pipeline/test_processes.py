"""Transforms in spawned processes: any function, any kill, no row lost or repeated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock import ConfigError, MemoryBudget, Pipeline, PipelineConfig
from penstock.errors import StageError
from penstock.pipeline.chain import Chain
from penstock.pipeline.metrics import StageMetrics
from penstock.pipeline.processes import ProcessChain
from penstock.sinks import MemorySink
from penstock.sources import MemorySource
from penstock.transforms import Filter, Map

ROWS = [{"id": i} for i in range(2000)]
TWO = PipelineConfig(workers="process", max_workers=2, batch_rows=100)


def test_lambdas_and_closures_run_in_other_processes_and_keep_order() -> None:
    offset = 1000
    sink = MemorySink()
    report = Pipeline(
        MemorySource(ROWS),
        [Map(lambda row: {"id": row["id"] + offset, "pid": os.getpid()}), Filter(lambda row: row["id"] % 2 == 0)],
        sink,
        TWO,
    ).run()
    rows = sink.rows()
    assert [row["id"] for row in rows] == [i + 1000 for i in range(0, 2000, 2)]
    assert report.dropped == {"Filter(<lambda>)": 1000}
    pids = {row["pid"] for row in rows}
    assert pids - {os.getpid()}, "nothing ran in another process"
    for stage in report.stages[1:3]:
        assert stage["rows_in"] == 2000
        assert stage["busy_seconds"] > 0


def test_a_killed_worker_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def slow(row: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.001)
        pids.write_text(str(os.getpid()))
        return row

    killed: set[int] = set()

    def kill() -> None:
        deadline = time.monotonic() + 20
        while len(killed) < 3 and time.monotonic() < deadline:
            try:
                pid = int(pids.read_text())
            except (FileNotFoundError, ValueError):
                time.sleep(0.005)
                continue
            if pid not in killed and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            time.sleep(0.01)

    sink = MemorySink()
    pipeline = Pipeline(MemorySource(ROWS), [Map(slow)], sink, TWO).start()
    killer = threading.Thread(target=kill)
    killer.start()
    pipeline.wait(timeout_seconds=120)
    pipeline.stop()
    killer.join(30)
    assert len(killed) == 3
    assert [row["id"] for row in sink.rows()] == list(range(2000))


def test_a_batch_that_kills_every_worker_is_an_error_that_says_so() -> None:
    def suicide(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 1500 and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return row

    parent = os.getpid()
    with pytest.raises(StageError, match=r"row 1500\b"):
        Pipeline(MemorySource(ROWS), [Map(suicide)], MemorySink(), TWO).run()


def test_an_exception_in_a_process_names_stage_and_row_and_shows_its_traceback() -> None:
    def refuse(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 1234:
            raise ValueError("not this one")
        return row

    with pytest.raises(StageError, match=r"Map\(refuse\).*row 1234\b") as e:
        Pipeline(MemorySource(ROWS), [Map(refuse)], MemorySink(), TWO).run()
    assert "in refuse" in "".join(e.value.__cause__.__notes__)  # type: ignore[union-attr]


def test_bad_rows_are_isolated_and_counted_across_processes() -> None:
    sink = MemorySink()
    report = Pipeline(
        MemorySource(ROWS),
        [Filter(lambda row: row["id"] % 3 > 0), Map(lambda row: {"x": 1 // (row["id"] % 100), "id": row["id"]})],
        sink,
        PipelineConfig(workers="process", max_workers=2, batch_rows=100, on_error="skip"),
    ).run()
    expected = [i for i in range(2000) if i % 3 and i % 100]
    assert [row["id"] for row in sink.rows()] == expected
    assert report.dropped == {"Filter(<lambda>)": sum(i % 3 == 0 for i in range(2000))}
    assert sum(report.skipped.values()) == sum(bool(i % 3) and i % 100 == 0 for i in range(2000))


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()

    def locked(row: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return row

    with pytest.raises(ConfigError, match=r"Map\(locked\)"):
        ProcessChain(Chain([Map(locked)], [StageMetrics("x", "transform")]))


def test_functions_may_print_without_disturbing_the_pipe() -> None:
    def noisy(row: dict[str, Any]) -> dict[str, Any]:
        print("hello from", row["id"], flush=True)
        return row

    sink = MemorySink()
    Pipeline(MemorySource(ROWS[:400]), [Map(noisy)], sink, TWO).run()
    assert len(sink.rows()) == 400


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from penstock import Pipeline, PipelineConfig\n"
        "from penstock.sources import MemorySource\n"
        "from penstock.transforms import Map\n"
        "def double(row):\n    return {'id': helper(row['id'])}\n"
        "def helper(x):\n    return 2 * x\n"
        "pipeline = Pipeline(MemorySource([{'id': i} for i in range(500)]), [Map(double)],\n"
        "    config=PipelineConfig(workers='process', max_workers=2, batch_rows=50))\n"
        "print(sum(sum(batch.column('id').to_pylist()) for batch in pipeline))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(sum(2 * i for i in range(500)))


def test_the_processes_end_with_the_pipeline() -> None:
    def who(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.append_column("pid", pa.array([os.getpid()] * batch.num_rows))

    budget = MemoryBudget("8 MiB")
    pipeline = Pipeline(MemorySource(ROWS), [who], config=TWO, budget=budget)
    pids = {pid for batch in pipeline for pid in batch.column("pid").to_pylist()} - {os.getpid()}
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert budget.used == 0


def count_starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that are started from now on."""
    started: list[int] = []
    start = ProcessChain._greeted

    def counted(self: ProcessChain) -> Any:
        started.append(1)
        return start(self)

    monkeypatch.setattr(ProcessChain, "_greeted", counted)
    return started


def _unprintable() -> Exception:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    return MuteError()


@pytest.mark.parametrize(
    ("fail", "kind"),
    [
        (lambda: ValueError("bad \udc80 text"), "ValueError"),
        (lambda: SystemExit(3), "SystemExit"),
        (lambda: KeyboardInterrupt(), "KeyboardInterrupt"),
        (lambda: type("Panic", (BaseException,), {})("out of cheese"), "Panic"),
        (_unprintable, "MuteError"),
    ],
)
def test_whatever_a_function_raises_costs_the_row_and_no_process(
    fail: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 777:
            raise fail()
        return row

    started = count_starts(monkeypatch)
    sink = MemorySink()
    config = PipelineConfig(workers="process", max_workers=1, batch_rows=100, on_error="skip")
    report = Pipeline(MemorySource(ROWS), [Map(refuse)], sink, config).run()
    assert [row["id"] for row in sink.rows()] == [i for i in range(2000) if i != 777]
    assert report.skipped == {f"Map(refuse): {kind}": 1}
    assert len(started) == 1, "the process that ran the function was lost"


def test_sys_exit_in_a_process_is_an_error_that_names_the_row() -> None:
    def leave(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 1234:
            sys.exit("enough")
        return row

    with pytest.raises(StageError, match=r"row 1234\b.*enough"):
        Pipeline(MemorySource(ROWS), [Map(leave)], MemorySink(), TWO).run()
