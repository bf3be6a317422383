"""Jobs whose tasks and drivers die: the same bytes in the end, and done splits are not done again."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.job_runs import Made, differences, files_in, job, run

from penstock import Pipeline, PipelineConfig
from penstock.engines.executor import InProcess, Outcome, Task
from penstock.errors import ConfigError, PenstockError, ResumeError, StageError
from penstock.sinks import JsonlSink, ParquetSink, StoreSink
from penstock.sources import JsonlSource
from penstock.transforms import ExactDedup, Map


class Unreliable(InProcess):
    """Executor that loses tasks before and after their work, runs some twice, and counts those that were done."""

    def __init__(self, seed: int = 0, deadly: str | None = None) -> None:
        super().__init__()
        self._rng, self._deadly = random.Random(seed), deadly
        self.done: Counter[str] = Counter()

    def wait(self, timeout_seconds: float) -> list[Outcome]:
        if not self._waiting:
            return []
        if self._deadly is not None and self._waiting[0].name == self._deadly:
            return [Outcome(self._waiting.popleft(), crash="killed by signal 9", node="here")]
        roll = self._rng.random()
        if roll < 0.2:
            return [Outcome(self._waiting.popleft(), crash="node died", node_lost=True)]
        if roll < 0.4:
            assert self._work is not None
            self._work(self._waiting[0])
        outcomes = super().wait(timeout_seconds)
        self.done.update(outcome.task.name for outcome in outcomes)
        if 0.4 < roll < 0.6:
            return [Outcome(outcomes[0].task, crash="lost on the way", node_lost=True)]
        return outcomes * 2 if roll > 0.9 else outcomes


def upper(row: dict[str, Any]) -> dict[str, Any]:
    return {"text": row["text"].upper(), "n": row["n"]}


def write_input(path: Path, rows: int = 120) -> Path:
    rng = random.Random(7)
    lines = [json.dumps({"text": f"text {rng.randrange(60)} of some words", "n": n}) for n in range(rows)]
    lines[33] = "{bad"
    path.write_text("\n".join(lines))
    return path


SINKS = {
    "jsonl": lambda out: JsonlSink(out / "made.jsonl"),
    "parquet": lambda out: ParquetSink(out / "made", rows_per_file=40),
    "store": lambda out: StoreSink(out / "made", tokens=None, shard_bytes=900),
}


@pytest.mark.parametrize("kind", SINKS)
def test_lost_and_repeated_tasks_change_no_byte(tmp_path: Path, kind: str) -> None:
    source = write_input(tmp_path / "in.jsonl")

    def make(out: Path) -> Made:
        return JsonlSource(source), [Map(upper), ExactDedup("text")], SINKS[kind](out)

    config = {"on_error": "quarantine"}
    local = run(make, tmp_path, config=config)
    for seed in range(3):
        other = run(make, tmp_path, engine=job(700, lambda seed=seed: Unreliable(seed)), config=config)
        assert not differences(local, other)


class Dies(InProcess):
    """Executor whose process is gone after some tasks."""

    def __init__(self, tasks: int) -> None:
        super().__init__()
        self._left = tasks

    def wait(self, timeout_seconds: float) -> list[Outcome]:
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        return super().wait(timeout_seconds)


@pytest.mark.parametrize("kind", SINKS)
def test_done_splits_are_not_done_again_after_the_driver_restarts(tmp_path: Path, kind: str) -> None:
    source = write_input(tmp_path / "in.jsonl")

    def make(out: Path) -> Made:
        return JsonlSource(source), [Map(upper), ExactDedup("text")], SINKS[kind](out)

    config = {"on_error": "skip"}
    local = run(make, tmp_path, config=config)
    place = tmp_path / "job"
    done: Counter[str] = Counter()

    class Counted(Dies):
        def wait(self, timeout_seconds: float) -> list[Outcome]:
            outcomes = super().wait(timeout_seconds)
            done.update(outcome.task.name for outcome in outcomes)
            return outcomes

    other = None
    for _ in range(40):
        try:
            other = run(make, tmp_path, engine=job(700, lambda: Counted(7)), config=config, checkpoint=place)
        except KeyboardInterrupt:
            continue
        break
    assert other is not None
    assert not differences(local, other)
    assert len(done) > 12
    assert set(done.values()) == {1}


_DRIVER = """
import os, signal, sys
from pathlib import Path
from tests.job_runs import job
from tests.unit.engines.test_job_faults import SINKS, upper
from penstock import Pipeline, PipelineConfig
from penstock.sources import JsonlSource
from penstock.transforms import ExactDedup, Map

folder, kind = Path(sys.argv[1]), sys.argv[2]
places = (str(folder / "out"), str(folder / "job"))
left = 0

def count(event, arguments):
    global left
    if event in ("open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir"):
        if str(arguments[0]).startswith(places):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

def run():
    pipeline = Pipeline(
        JsonlSource(folder / "in.jsonl"),
        [Map(upper), ExactDedup("text")],
        SINKS[kind](folder / "out"),
        PipelineConfig(workers=1, on_error="quarantine", quarantine=folder / "out" / "bad.jsonl"),
        "256 MiB",
    )
    pipeline.run(folder / "job", engine=job(1500))

killed = 0
for after in map(int, sys.argv[3:]):
    pid = os.fork()
    if not pid:
        left = after
        sys.addaudithook(count)
        run()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), status
    killed += status != 0
run()
print(killed)
"""


@pytest.mark.parametrize("kind", SINKS)
def test_a_driver_killed_between_file_operations_ends_with_the_same_bytes(tmp_path: Path, kind: str) -> None:
    write_input(tmp_path / "in.jsonl", 60)

    def make(out: Path) -> Made:
        return JsonlSource(tmp_path / "in.jsonl"), [Map(upper), ExactDedup("text")], SINKS[kind](out)

    local = run(make, tmp_path, config={"on_error": "quarantine"})
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").mkdir()
    rng = random.Random()
    moments = [str(rng.randrange(1, 60)) for _ in range(4)]
    command = [sys.executable, "-c", _DRIVER, str(tmp_path), kind, *moments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert not ended.returncode, ended.stderr.decode()
    assert int(ended.stdout) >= 1
    assert files_in(tmp_path / "out") == local.files, moments


def made_in(source: Path) -> Any:
    return lambda out: (JsonlSource(source), [Map(upper)], JsonlSink(out / "made.jsonl"))


def test_a_split_that_crashes_again_and_again_is_named(tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl")
    engine = job(700, lambda: Unreliable(deadly="map-0-000002"))
    ended = run(made_in(source), tmp_path, engine=engine, config={"on_error": "skip"})
    assert ended.error is not None
    assert ended.error[0] == StageError.__name__
    assert f"{source}, from byte 1,276 to 1,914" in ended.error[1]


@pytest.mark.parametrize("word", ["skip", "quarantine"])
def test_a_split_that_crashes_again_and_again_is_left_out_if_asked(tmp_path: Path, word: str) -> None:
    source = write_input(tmp_path / "in.jsonl")
    local = run(made_in(source), tmp_path, config={"on_error": "quarantine"})
    engine = job(700, lambda: Unreliable(deadly="map-0-000000"), on_crash=word)
    ended = run(made_in(source), tmp_path, engine=engine, config={"on_error": "quarantine"})
    made, whole = ended.files["made.jsonl"], local.files["made.jsonl"]
    assert whole.endswith(made)
    assert 0 < len(whole) - len(made) < 900
    reasons = ended.counts["skipped" if word == "skip" else "quarantined"]
    assert reasons["job: workers died with a split"] == 1
    lines = [json.loads(line) for line in ended.files["bad.jsonl"].splitlines()]
    assert lines[-1] == json.loads(local.files["bad.jsonl"])  # its row number counts those that were left out
    assert [line["file"] for line in lines[:-1]] == ([str(source)] if word == "quarantine" else [])
    assert word == "skip" or "from byte 0 to" in lines[0]["reason"]


def test_a_second_driver_is_refused(tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl")
    seen: list[tuple[Any, ...] | None] = []

    class Nested(InProcess):
        def start(self, work: Any, checks: Mapping[str, Any]) -> None:
            super().start(work, checks)
            command = [sys.executable, "-c", _SECOND, str(source), str(tmp_path)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            ended = subprocess.run(command, env=environment, capture_output=True, check=False)
            seen.append((ended.returncode, ended.stderr.decode()))

    run(made_in(source), tmp_path, engine=job(700, Nested), checkpoint=tmp_path / "job", config={"on_error": "skip"})
    assert seen[0] is not None
    assert seen[0][0]
    assert f"the job in {tmp_path / 'job'}" in seen[0][1]


_SECOND = """
import sys
from pathlib import Path
from tests.job_runs import job
from penstock import Pipeline
Pipeline(sys.argv[1], [], f"{sys.argv[2]}/other.jsonl").run(f"{sys.argv[2]}/job", engine=job(700))
"""


@pytest.mark.parametrize("change", ["input", "steps", "sink"])
def test_a_job_that_has_changed_is_refused(tmp_path: Path, change: str) -> None:
    source = write_input(tmp_path / "in.jsonl")
    place, config = tmp_path / "job", {"on_error": "skip"}
    with pytest.raises(KeyboardInterrupt):
        run(made_in(source), tmp_path, engine=job(700, lambda: Dies(3)), checkpoint=place, config=config)
    steps: list[Any] = [Map(upper)]
    name = "made.jsonl"
    if change == "input":
        source.write_text(source.read_text() + "\n")
    elif change == "steps":
        steps.append(ExactDedup("text"))
    else:
        name = "other.jsonl"
    ended = run(
        lambda out: (JsonlSource(source), steps, JsonlSink(out / name)),
        tmp_path,
        engine=job(700),
        checkpoint=place,
        config=config,
    )
    assert ended.error is not None
    assert ended.error[0] == ResumeError.__name__
    assert str(place) in ended.error[1]


def test_an_input_that_changes_during_the_job_is_an_error(tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl")

    class Changes(InProcess):
        def submit(self, task: Task) -> None:
            if task.name == "map-0-000003":
                source.write_text(source.read_text() + "\n")
            super().submit(task)

    ended = run(made_in(source), tmp_path, engine=job(700, Changes), config={"on_error": "skip"})
    assert ended.error is not None
    assert ended.error[0] == "ChangedFileError"


def test_a_job_without_a_checkpoint_leaves_nothing_behind(tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl")
    ended = run(made_in(source), tmp_path, engine=job(700), config={"on_error": "raise"})
    assert ended.error is not None
    assert [path.name for path in (tmp_path / "out").iterdir() if not path.name.endswith("lock")] == []


@pytest.mark.parametrize("kind", ["jsonl", "store"])
def test_a_job_directory_may_be_in_a_bucket(tmp_path: Path, kind: str, s3_url: str) -> None:
    source = write_input(tmp_path / "in.jsonl")

    def make(out: Path) -> Made:
        return JsonlSource(source), [Map(upper), ExactDedup("text")], SINKS[kind](out)

    config = {"on_error": "quarantine"}
    local = run(make, tmp_path, config=config)
    other = run(make, tmp_path, engine=job(1500), config=config, checkpoint=f"{s3_url}/jobs/{kind}")
    assert not differences(local, other)


def test_shares_of_a_job_that_run_at_once_are_joined_to_the_same_bytes(tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl")

    def make(out: Path) -> Made:
        return JsonlSource(source), [Map(upper), ExactDedup("text")], SINKS["store"](out)

    config, place = {"on_error": "skip"}, tmp_path / "job"
    local = run(make, tmp_path, config=config)

    class First(InProcess):
        """In the middle of the first share, the second one does all of its tasks."""

        def submit(self, task: Task) -> None:
            if task.name == "map-0-000002":
                engine = replace(job(700), share=(1, 2))
                assert run(make, tmp_path, engine=engine, config=config, checkpoint=place).error is not None
            super().submit(task)

    engine = replace(job(700, First), share=(0, 2))
    ended = run(make, tmp_path, engine=engine, config=config, checkpoint=place)
    assert ended.error is not None
    assert ended.error[0] == "UnfinishedJobError"
    assert len(list((place / "done").glob("map-0-*"))) == 8
    assert not differences(local, run(make, tmp_path, engine=job(700), config=config, checkpoint=place))


def test_a_function_that_has_changed_is_refused(tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl")
    ends = []
    for function in (lambda row: {"n": row["n"]}, lambda row: {"n": row["n"] + 1}):
        pipeline = Pipeline(source, [Map(function)], tmp_path / "out.jsonl", PipelineConfig(on_error="skip"))
        try:
            pipeline.run(tmp_path / "job", engine=job(700, lambda: Dies(3)))
        except (KeyboardInterrupt, ResumeError) as error:
            ends.append(type(error))
    assert ends == [KeyboardInterrupt, ResumeError]


def test_options_of_a_job_are_checked() -> None:
    for options in ({"on_crash": "ignore"}, {"partitions": 0}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            job(700, **options)
    with pytest.raises(PenstockError, match="split_bytes"):
        job(0)
