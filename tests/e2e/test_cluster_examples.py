"""Trainers on clusters: Ray Train and torchrun on two simulated nodes, resumed on another number of ranks."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lazy_modules import LazyModule
from tests.ray_cluster import RayCluster, why_not
from tests.trainer_runs import EXAMPLES

from penstock import PretrainDataLoader

torch = LazyModule("torch")
CLUSTER = EXAMPLES.parent / "cluster"
SAMPLE = EXAMPLES.parent / "sample"
GLOBAL_BATCH = 12
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
RAY_TRAIN = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",  # of busy machines
}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def network() -> Iterator[RayCluster]:
    """A namespace for programs that listen on all interfaces, without Ray in it."""
    if reason := why_not():
        pytest.skip(reason)
    with RayCluster(nodes=0) as cluster:
        yield cluster


def global_batches(folder: Path, steps: int) -> list[list[list[int]]]:
    """Batches of one process that never stops."""
    with PretrainDataLoader(
        SAMPLE / "documents.jsonl",
        SAMPLE / "tokenizer",
        chunk_size=64,
        batch_size=GLOBAL_BATCH,
        cache_dir=folder,
        backend="numpy",
    ) as loader:
        return [loader.get_batch().input_ids.tolist() for _ in range(steps)]


def seen(folder: Path) -> dict[int, list[list[list[int]]]]:
    """Rows that each rank was given, by step."""
    found: dict[int, list[list[list[int]]]] = {}
    for path in sorted(folder.glob("seen-*.jsonl")):
        for line in path.read_text().splitlines():
            step, _, rows = json.loads(line)
            found.setdefault(step, []).append(rows)
    return found


def assert_trained_on_every_batch_once(folder: Path, steps: int, ranks: list[int]) -> None:
    found = seen(folder)
    assert [len(found[step]) for step in sorted(found)] == ranks
    assert [[row for rows in found[step] for row in rows] for step in range(steps)] == global_batches(folder, steps)


def test_ray_train_resumes_on_another_number_of_workers(ray_cluster: RayCluster, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with ray_cluster.popen(CLUSTER / "ray_train_loop.py", tmp_path, **ENVIRONMENT, **RAY_TRAIN) as driver:
        printed = driver.result()
    assert "'step': 4, 'workers': 2" in printed
    assert "'step': 6, 'workers': 1" in printed
    assert_trained_on_every_batch_once(tmp_path, 6, [2, 2, 2, 2, 1, 1])


def test_torchrun_on_two_nodes_resumes_the_run_of_one_process(
    network: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    script = CLUSTER / "torchrun_loop.py"
    train_here(script, tmp_path, 2, monkeypatch)
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    # Not by c10d: there each launcher asks the other one's store for new nodes, and fails if that one has just ended.
    meet = ["--master-addr=127.0.0.1", "--master-port=29500"]
    nodes = [
        [sys.executable, *launcher, *meet, f"--node-rank={node}", script, tmp_path, "--steps", 4] for node in (0, 1)
    ]
    with network.popen(*nodes[0], **ENVIRONMENT) as one, network.popen(*nodes[1], **ENVIRONMENT) as other:
        printed = one.result() + other.result()
    assert "step 4 on 2 ranks" in printed
    assert_trained_on_every_batch_once(tmp_path, 4, [1, 1, 2, 2])


def train_here(script: Path, folder: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, as the one rank; it has torch already."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    meeting = (folder / "meeting").as_uri()
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        runpy.run_path(str(script))["train"](folder, steps)
    finally:
        torch.distributed.destroy_process_group()
