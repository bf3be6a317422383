"""Shares of a job by processes that know nothing of each other: one plan, and no join while one of them runs."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.job_runs import Ended, Made, differences, job, run

from penstock.engines import driver
from penstock.engines.executor import InProcess, Task
from penstock.engines.job_directory import PLAN_NAME, JobDirectory
from penstock.sinks import JsonlSink
from penstock.sources import JsonlSource
from penstock.transforms import ExactDedup, Map


def longer(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "length": len(row["text"])}


class Shares:
    """A job in a folder, whole or a share of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.place = folder, folder / "job"
        rows = [{"text": f"row {n % 60}", "n": n} for n in range(100)]
        (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(self, out: Path) -> Made:
        return JsonlSource(self.folder / "in.jsonl"), [Map(longer), ExactDedup("text")], JsonlSink(out / "made.jsonl")

    def local(self) -> Ended:
        return run(self.make, self.folder)

    def share(self, number: int, of: int, size: int = 500, executor: Callable[[], Any] = InProcess) -> tuple[Any, ...]:
        engine = replace(job(size, executor), share=(number, of))
        error = run(self.make, self.folder, engine=engine, checkpoint=self.place).error
        assert error is not None
        return error

    def join(self) -> Ended:
        return run(self.make, self.folder, engine=job(500), checkpoint=self.place)


@pytest.fixture
def shares(tmp_path: Path) -> Shares:
    return Shares(tmp_path)


def meanwhile(do: Callable[[], None]) -> Callable[[], InProcess]:
    """An executor that does something else before its second task."""

    class Executor(InProcess):
        def submit(self, task: Task) -> None:
            if task.name == "map-0-000002":
                do()
            super().submit(task)

    return Executor


def test_shares_that_plan_at_once_have_one_plan(shares: Shares, monkeypatch: pytest.MonkeyPatch) -> None:
    local, plan_splits, plans = shares.local(), driver.bundles_of, []

    def planned(*given: Any) -> Any:
        monkeypatch.setattr(driver, "bundles_of", plan_splits)
        shares.place.mkdir(exist_ok=True)
        assert shares.share(1, 2, size=900)[0] == "UnfinishedJobError"
        plans.append((shares.place / PLAN_NAME).read_bytes())
        return plan_splits(*given)

    monkeypatch.setattr(driver, "bundles_of", planned)
    assert shares.share(0, 2, size=500)[0] == "UnfinishedJobError"
    assert [(shares.place / PLAN_NAME).read_bytes()] == plans
    splits = len(json.loads(plans[0])["bundles"])
    assert len(list((shares.place / "done").glob("map-0-*"))) == splits
    assert not differences(local, shares.join())


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_the_first_plan_stays(tmp_path: Path, kind: str, s3_url: str) -> None:
    directory = JobDirectory(f"{s3_url}/job" if kind == "bucket" else tmp_path / "job")
    directory.make()
    assert [directory.create_json(PLAN_NAME, {"n": n})["n"] for n in (1, 2)] == [1, 1]
    assert list(directory.home.list()) == [PLAN_NAME]


def test_a_share_of_another_number_of_shares_is_refused(shares: Shares) -> None:
    local = shares.local()
    shares.share(0, 4)
    kind, message, *_ = shares.share(1, 2)
    assert kind == "ConfigError"
    assert "was begun in 4 splits, and this one is 2/2; run 1/4 to 4/4" in message
    assert shares.share(1, 4)[0] == "UnfinishedJobError"
    assert not differences(local, shares.join())


def test_a_job_is_not_joined_while_a_share_runs(shares: Shares) -> None:
    local, ends = shares.local(), []
    assert shares.share(0, 2, executor=meanwhile(lambda: ends.append(shares.join().error)))[0] == "UnfinishedJobError"
    assert ends[0][0] == "ConfigError"
    assert f"split 1/2 of the job in {shares.place} is still run by process" in ends[0][1]
    assert not differences(local, shares.join())


def test_a_share_is_not_run_twice_at_once(shares: Shares) -> None:
    ends: list[Any] = []
    shares.share(0, 2, executor=meanwhile(lambda: ends.append(shares.share(0, 2))))
    assert f"split 1/2 of the job in {shares.place} is in use by process" in ends[0][1]


def test_a_share_says_that_its_job_was_joined_or_deleted(shares: Shares) -> None:
    kind, message, *_ = shares.share(0, 2, executor=meanwhile(lambda: shutil.rmtree(shares.place)))
    assert kind == "ResumeError"
    assert "was joined or deleted meanwhile" in message


def test_a_resumed_job_says_what_is_done(shares: Shares, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.engines")
    shares.share(0, 2)
    assert "resumes" not in caplog.text
    splits = len(json.loads((shares.place / PLAN_NAME).read_bytes())["bundles"])
    done = len(list((shares.place / "done").glob("map-0-*")))
    shares.join()
    said = f"resumes the job in {shares.place}: {done} of {2 * splits + 1} tasks are done; delete it to start again"
    assert said in caplog.messages
