"""Pipelines on a Ray cluster of three nodes: the bytes of a local run, also when nodes and drivers are killed.

The functions without `test_` are drivers: they run in the namespace of the cluster, as programs of their own.
`test_ray_chaos.py` kills nodes and drivers at random.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ray_cluster import RayCluster

from penstock import Pipeline, PipelineConfig
from penstock.corpus.dedup.stages import ExactDedup, MinHashDedup
from penstock.engines.run import RayEngine
from penstock.errors import StageError
from penstock.sinks import JsonlSink, StoreSink
from penstock.transforms import Filter, Map
from penstock.transforms.tokenization import ByteTokenizer, Tokenize

pytestmark = pytest.mark.timeout(600)  # waiting for the cluster counts

WORDS = ["river", "turbine", "gate", "water", "valve", "flow", "head", "loss", "the", "of", "and", "pipe"]


def make_input(folder: Path, *, rows: int, seed: int = 0, bad: float = 0.01) -> None:
    draw = random.Random(seed)
    for number in range(2):
        with (folder / f"in{number}.jsonl").open("w") as file:
            for row in range(rows):
                text = " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))
                file.write("{not json\n" if draw.random() < bad else json.dumps({"text": text, "n": row}) + "\n")


def described(folder: Path, name: str, kind: str, *, pause: float = 0.0) -> Pipeline:
    """A pipeline of some kind that writes to `name`."""

    def longer(row: dict[str, Any]) -> dict[str, Any]:
        if pause and not row["n"] % 50:
            time.sleep(pause)
            (folder / "calls" / f"{row['n']}-{os.getpid()}-{time.monotonic_ns()}").touch()
        return {**row, "length": len(row["text"])}

    inputs, config = str(folder / "in*.jsonl"), PipelineConfig(on_error="quarantine")
    if kind == "rows":
        return Pipeline(inputs, [longer, Filter("length > 9")], JsonlSink(folder / f"{name}.jsonl"), config)
    steps: list[Any] = [longer, ExactDedup("text"), MinHashDedup("text", ngram=2, bands=4), Tokenize(ByteTokenizer())]
    return Pipeline(inputs, steps, StoreSink(folder / f"{name}.store", shard_bytes=4000), config)


def output(folder: Path, name: str) -> dict[str, bytes]:
    """Bytes of everything that a pipeline made, by name; of manifests, what no clock and no draw decides."""
    found = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if not path.is_file() or not str(inside).startswith(f"{name}."):
            continue
        data = path.read_bytes()
        if path.suffix == ".json" and b'"created"' in data:
            manifest = json.loads(data)
            data = json.dumps({key: manifest[key] for key in manifest if key not in _DRAWN}).encode()
        found[str(inside).replace(name, "")] = data
    return found


_DRAWN = ("created", "run", "checksum")


def run_job(folder: str, name: str, kind: str, split_bytes: int, pause: float = 0.0) -> dict[str, Any]:
    engine = RayEngine(split_bytes=split_bytes, memory="64 MiB", cpus_per_task=2)  # one worker a node
    report = described(Path(folder), name, kind, pause=pause).run(engine=engine)
    return {"in": report.rows_in, "out": report.rows_out, "dropped": report.dropped, "bad": report.quarantined}


def run_local(folder: Path, kind: str) -> dict[str, Any]:
    report = described(folder, f"local-{kind}", kind).run()
    return {"in": report.rows_in, "out": report.rows_out, "dropped": report.dropped, "bad": report.quarantined}


def run_many(folder: str, cases: list[list[Any]]) -> list[dict[str, Any]]:
    """Several jobs in one driver: starting a driver takes seconds."""
    return [run_job(str(Path(folder) / str(number)), "job", *case[2:]) for number, case in enumerate(cases)]


def test_random_jobs_give_the_bytes_of_local_runs(ray_cluster: RayCluster, tmp_path: Path) -> None:
    cases: list[tuple[int, int, str, int]] = []

    @settings(max_examples=3, derandomize=True, deadline=None)
    @given(st.integers(0, 300), st.integers(0, 9), st.sampled_from(["rows", "store"]), st.integers(500, 9000))
    def draw(rows: int, seed: int, kind: str, split_bytes: int) -> None:
        cases.append((rows, seed, kind, split_bytes))

    draw()
    cases.append((250, 1, "store", 2500))
    expected = []
    for number, (rows, seed, kind, _) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        make_input(folder, rows=max(1, rows), seed=seed)
        expected.append(run_local(folder, kind))
    assert ray_cluster.run(run_many, tmp_path, [[*case] for case in cases]) == expected
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        assert output(folder, "job") == output(folder, f"local-{case[2]}")


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    make_input(tmp_path, rows=1000)
    (tmp_path / "calls").mkdir()
    run_local(tmp_path, "store")
    return tmp_path


def done(folder: Path) -> list[str]:
    place = folder / ".job.store.job" / "done"
    return sorted(file.name for file in place.glob("[!.]*")) if place.is_dir() else []  # none that is being written


def wait_for_tasks(folder: Path, driver: Any, number: int) -> None:
    while len(done(folder)) < number:
        assert driver.process.poll() is None, driver.stderr
        time.sleep(0.02)


def test_a_killed_node_changes_nothing(ray_cluster: RayCluster, slow: Path) -> None:
    with ray_cluster.popen(run_job, slow, "job", "store", 3000, 0.1) as driver:
        wait_for_tasks(slow, driver, 4)
        ray_cluster.kill_node(1)
        driver.result()
    assert output(slow, "job") == output(slow, "local-store")


def test_a_killed_driver_goes_on_with_the_tasks_that_are_left(ray_cluster: RayCluster, slow: Path) -> None:
    with ray_cluster.popen(run_job, slow, "job", "store", 3000, 0.1) as driver:
        wait_for_tasks(slow, driver, 5)
        driver.kill()
    before = {name: (slow / ".job.store.job" / "done" / name).stat().st_mtime_ns for name in done(slow)}
    with ray_cluster.popen(run_job, slow, "job", "store", 3000, 0.1) as driver:
        wait_for_tasks(slow, driver, len(before) + 1)
        after = {name: (slow / ".job.store.job" / "done" / name).stat().st_mtime_ns for name in before}
        driver.result()
    assert after == before
    assert output(slow, "job") == output(slow, "local-store")


def run_poisoned(folder: str) -> str:
    """A job with a row that ends the process that works on it."""

    def deadly(row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] == 77:
            os._exit(9)
        return row

    inputs = str(Path(folder) / "in0.jsonl")
    schema = pa.schema([("text", pa.string()), ("n", pa.int64())])
    sink, config = JsonlSink(Path(folder) / "out.jsonl"), PipelineConfig(on_error="skip")
    pipeline = Pipeline(inputs, [Map(deadly, schema=schema)], sink, config)
    try:
        pipeline.run(engine=RayEngine(split_bytes=2000, memory="64 MiB", cpus_per_task=2))
    except StageError as error:
        return str(error)
    return "no error"


def test_a_split_that_kills_its_workers_is_named(ray_cluster: RayCluster, tmp_path: Path) -> None:
    make_input(tmp_path, rows=200)
    message = ray_cluster.run(run_poisoned, tmp_path)
    assert "in0.jsonl, from byte" in message
    assert "3 workers in a row died with it" in message
